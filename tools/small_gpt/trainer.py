"""A rank of the small GPT: gloo, 1F1B of torch.distributed.pipelining, data and tensor parallel ranks.

What a run leaves behind is what trainers leave: a log, and a trace of torch.profiler for each rank.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from small_gpt.groups import Groups
from small_gpt.job import Run
from small_gpt.log import TIMERS, Log
from small_gpt.model import Block, Part, Tokens, loss_of
from small_gpt.wrong import Wrong
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import ProfilerActivity, profile, record_function, schedule


@dataclass(slots=True)
class Timers:
    """Seconds of the current step by name."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMERS, 0.0))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin


class Stage(PipelineStage):
    """A stage that annotates and times its passes as Megatron-LM does; waits for its neighbours are outside of them."""

    timers: Timers

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.timers("forward-compute"), record_function("forward_step"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.timers("backward-compute"), record_function("backward_step"):
            return super().backward_one_chunk(*args, **kwargs)


class Trainer:
    """One rank of a run."""

    def __init__(self, run: Run, rank: int) -> None:
        layout = run.layout
        self.run, self.layout, self.timers, self.wrong = run, layout, Timers(), Wrong(run, rank)
        self.groups = Groups.make(layout, rank)
        self.stage_index, self.step_number = rank // (layout.tp * layout.dp), 0
        torch.manual_seed(run.seed + self.stage_index)
        blocks: list[nn.Module] = [Block(layout.tp, self.groups.of["tp"]) for _ in range(layout.layers_per_stage)]
        is_last = self.stage_index == layout.pp - 1
        self.part = Part(blocks, self.stage_index == 0, is_last, self.wrong.before_forward)
        self.optimizer = torch.optim.AdamW(self.part.parameters(), lr=1e-4, fused=True)
        tokens = Tokens(layout, run.seed * 1000 + rank // layout.tp % layout.dp << 20, self.wrong.before_data)
        self.batches = iter(torch.utils.data.DataLoader(tokens, batch_size=None))
        self.schedule = None
        if layout.pp > 1:
            stage = Stage(self.part, self.stage_index, layout.pp, torch.device("cpu"), group=self.groups.of["pp"])
            stage.timers = self.timers
            self.schedule = Schedule1F1B(stage, layout.num_microbatches, loss_fn=loss_of)
        self.wrong.prepare(self.part, self.groups.sockets)

    def step(self) -> float:
        """One optimizer step; its loss, 0 where this rank has none."""
        self.step_number += 1
        self.timers.seconds.update(dict.fromkeys(TIMERS, 0.0))
        edge = self.stage_index in (0, self.layout.pp - 1)
        with self.timers("batch-generator"):
            batch = next(self.batches) if edge else torch.empty(0)
        with self.timers("forward-backward"):
            losses = self._pipelined(batch) if self.schedule is not None else self._accumulated(batch)
        if self.layout.dp > 1:
            with self.timers("all-grads-sync"), record_function("all-grads-sync"):
                self._sync_gradients()
        with self.timers("optimizer"):
            self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.wrong.after_step(self.step_number)
        return sum(float(loss.detach()) for loss in losses) / len(losses) if losses else 0.0

    def _pipelined(self, batch: torch.Tensor) -> list[torch.Tensor]:
        assert self.schedule is not None
        losses: list[torch.Tensor] = []
        inputs = (batch[:, :-1],) if self.stage_index == 0 else ()
        if self.stage_index == self.layout.pp - 1:
            self.schedule.step(*inputs, target=batch[:, 1:], losses=losses, return_outputs=False)
        else:
            self.schedule.step(*inputs, return_outputs=False)
        return losses

    def _accumulated(self, batch: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for part in batch.chunk(self.layout.num_microbatches):
            with self.timers("forward-compute"), record_function("forward_step"):
                loss = loss_of(self.part(part[:, :-1]), part[:, 1:]) / self.layout.num_microbatches
            with self.timers("backward-compute"), record_function("backward_step"):
                loss.backward()
            losses.append(loss * self.layout.num_microbatches)
        return losses

    def _sync_gradients(self) -> None:
        """All-reduce in buckets of one layer's size, all of them under way at once."""
        gradients = [p.grad for p in self.part.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / self.layout.dp
        works = [
            dist.all_reduce(bucket, group=self.groups.of["dp"], async_op=True)
            for bucket in flat.chunk(self.layout.layers_per_stage)
        ]
        for work in works:
            assert work is not None
            work.wait()
        for gradient, values in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))

    def _clip(self) -> None:
        """Scale gradients by their norm over all ranks, as every trainer does: each step ends on all ranks at once."""
        gradients = [p.grad for p in self.part.parameters() if p.grad is not None]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        dist.all_reduce(norm)
        scale = float((1.0 / (norm.sqrt() + 1e-6)).clamp(max=1.0))
        for gradient in gradients:
            gradient.mul_(scale)


class _Heap(ctypes.Structure):
    """The C library's account of its heap, `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def allocated_bytes() -> int:
    """Bytes that this process has allocated and not freed, as torch's `memory_allocated` counts them on a GPU."""
    account = ctypes.CDLL(None).mallinfo2
    account.restype = _Heap
    heap = account()
    return int(heap.uordblks + heap.hblkhd)


def rank_main(rank: int, run: Run) -> None:
    """Train as one rank of a run, and leave its trace; the last rank writes the log."""
    torch.set_num_threads(1)
    layout = run.layout
    dist.init_process_group(
        "gloo", init_method=f"file://{run.folder}/store", rank=rank, world_size=layout.num_ranks,
    )  # fmt: skip
    trainer = Trainer(run, rank)
    log = Log(run) if rank == layout.num_ranks - 1 else None
    plan = schedule(wait=run.num_steps - run.num_profiled - 1, warmup=1, active=run.num_profiled)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], schedule=plan) as profiler:
        last_s = time.perf_counter()
        for number in range(1, run.num_steps + 1):
            loss = trainer.step()
            now_s = time.perf_counter()
            told = torch.tensor([allocated_bytes(), *(trainer.timers.seconds[name] for name in TIMERS)]).double()
            gathered = [torch.empty_like(told) for _ in range(layout.num_ranks)]
            dist.all_gather(gathered, told)
            if log is not None:
                memory = [int(values[0]) for values in gathered]
                log.add(number, now_s - last_s, loss, memory, [values[1:].tolist() for values in gathered])
            last_s = now_s
            profiler.step()
    profiler.export_chrome_trace(str(run.folder / f"rank{rank}.json.gz"))
    dist.barrier()
    dist.destroy_process_group()
