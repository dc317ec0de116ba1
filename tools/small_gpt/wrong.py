"""What goes wrong: sleeps, work, sockets, garbage. It acts on the program, never on a file that the program writes."""

from __future__ import annotations

import gc
import os
import socket
import time
from typing import Any

import torch
from small_gpt.job import Run
from small_gpt.model import HIDDEN
from torch import nn

SO_MAX_PACING_RATE = 47
"""Linux' option of a socket: the most bytes per second that it sends; Python has no name for it."""


class Wrong:
    """The fault of one rank of a run; nothing where it has none."""

    def __init__(self, run: Run, rank: int) -> None:
        self.fault, self.layout = run.fault, run.layout
        self.is_mine = rank in run.fault.ranks
        self.kept: list[Any] = []
        self.extra = torch.randn(HIDDEN, HIDDEN)
        self.num_extra, self.loop_s = 0, 0.0

    def prepare(self, part: nn.Module, sockets: dict[str, set[int]]) -> None:
        """Make the fault ready, once the model and its groups are there."""
        if not self.is_mine:
            return
        if self.fault.kind == "slow_link":
            self._slow_down(part, sockets.get(self.fault.axis, set()))
        if self.fault.kind == "computes":
            begin = time.process_time()
            for _ in range(200):
                self.extra @ self.extra
            each_s = (time.process_time() - begin) / 200
            self.num_extra = round(self.fault.seconds / self.layout.num_microbatches / each_s)
        if self.fault.kind == "host_bound":
            leaves = [module for module in part.modules() if not list(module.children())]
            self.loop_s = self.fault.seconds / self.layout.num_microbatches / len(leaves)
            for module in leaves:
                module.register_forward_pre_hook(self._loop)
        if self.fault.kind == "collects":
            gc.disable()
            gc.collect()
            begin = time.process_time()
            gc.collect()
            each_s = (time.process_time() - begin) / len(gc.get_objects())
            self.kept = [[None] for _ in range(round(self.fault.seconds / each_s))]

    def _slow_down(self, part: nn.Module, sockets: set[int]) -> None:
        """Let the group's sockets send so slowly that the bytes of a step take the fault's seconds."""
        layout = self.layout
        activations = 4 * HIDDEN * layout.micro_batch_size * layout.seq_length * layout.num_microbatches
        num_bytes = {
            "dp": sum(p.numel() for p in part.parameters()) * 4 * 2 * (layout.dp - 1) / layout.dp,
            "tp": 4 * layout.layers_per_stage * activations / 2,
            "pp": activations,
        }
        for descriptor in sockets:
            copy = socket.socket(fileno=os.dup(descriptor))
            copy.setsockopt(
                socket.SOL_SOCKET, SO_MAX_PACING_RATE, round(num_bytes[self.fault.axis] / self.fault.seconds)
            )
            copy.close()

    def _loop(self, *_: object) -> None:
        """Busy Python, as of trainers that decide in Python what to launch."""
        end_s = time.perf_counter() + self.loop_s
        while time.perf_counter() < end_s:
            pass

    def before_forward(self) -> None:
        """Run in each forward pass."""
        if self.is_mine and self.fault.kind == "sleeps":
            time.sleep(self.fault.seconds / self.layout.num_microbatches)
        for _ in range(self.num_extra):
            self.extra @ self.extra

    def before_data(self, index: int) -> None:
        """Run before a batch is given."""
        fault = self.fault
        if fault.kind == "data_stall" and self.is_mine and index % fault.every == fault.every - 1:
            time.sleep(fault.seconds * fault.every)

    def after_step(self, number: int) -> None:
        """Run behind each step."""
        fault = self.fault
        if fault.kind == "leaks" and self.is_mine:
            self.kept.append(torch.randn(fault.leaked_bytes // 4))
            if fault.seconds:  # statistics over everything that was ever seen: each step does more
                for values in self.kept:
                    values.mean()
        if fault.kind == "collects" and number % fault.every == 0:
            gc.collect()
