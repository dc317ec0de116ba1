"""Seconds of calls on one device, and the tensors that they work on."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from planner.probe.run import Device
from planner.specs.units import MICRO

WARM_UP, FEWEST, MOST = 2, 3, 30
"""Number of calls before a timing, and the smallest and largest number of calls of a timing."""


class Stopwatch:
    """Measures seconds of calls on one device."""

    def __init__(self, device: Device, budget_s: float) -> None:
        self.device, self.budget_s = device, budget_s

    def microseconds(self, call: Callable[[], object]) -> float:
        """Median of a few calls, each timed by itself; on a GPU between two events on its stream."""
        for _ in range(WARM_UP):
            call()
        first_s = self._times(call, 1)[0]
        repeats = max(FEWEST, min(MOST, int(self.budget_s / max(first_s, 1e-9))))
        return median(self._times(call, repeats)) / MICRO

    def _times(self, call: Callable[[], object], repeats: int) -> list[float]:
        if self.device == "cpu":
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            return times
        event = cast(Any, torch.cuda.Event)
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(repeats)]
        for start, end in pairs:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def backward_us(self, output: Tensor, inputs: tuple[Tensor, ...]) -> float:
        """Microseconds of computing all gradients of `inputs`."""
        seed = torch.ones_like(output)
        return self.microseconds(lambda: torch.autograd.grad(output, inputs, seed, retain_graph=True))

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
        made = torch.randn(*shape, device=self.device, dtype=dtype)
        return made.requires_grad_() if grad else made
