"""Seconds of each chunk while no message between stages is under way.

A receive or a send of NCCL is a kernel. From when it is posted until its peer has come it spins on some of the GPU's
multiprocessors, which whatever computes meanwhile has to do without (NVIDIA/nccl issues 689 and 1025). Posting receives
late would not help: the sender would spin instead. Therefore all ranks run their chunks once more after the steps,
with tensors of their own in place of messages. Those seconds are the chunks' own; the steps' are shown beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, sqrt
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist

from planner.probe.rank.training import Trainer
from planner.probe.result import ChunkSeconds

ROUND_S = 1.0
"""Seconds in which a chunk's passes of one round are done, if they take as long as they did in the steps."""
FEWEST, MOST = 5, 200
"""Smallest and largest number of passes of a round."""
MOST_ROUNDS = 3
SPREAD_WANTED = 0.01
"""Another round follows until the standard error of the median is below this share of it."""


class Pass(NamedTuple):
    """Seconds of one micro-batch on a chunk, forward and backward."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


def with_quiet_seconds(
    trainer: Trainer, chunks: Sequence[ChunkSeconds], on_action: Callable[[str], None]
) -> tuple[ChunkSeconds, ...]:
    """The chunks with their quiet seconds. All ranks call this together, because ranks of one stage exchange tensors
    within it; so all of them must know how often each chunk runs."""
    passes: dict[int, list[Pass]] = {chunk.stage: [] for chunk in chunks}
    seconds = _largest(trainer, {chunk.stage: chunk.forward_s + chunk.backward_s for chunk in chunks})
    spreads = [1.0] * len(seconds)
    for _ in range(MOST_ROUNDS):
        for stage in passes:
            if spreads[stage] > SPREAD_WANTED:
                count = max(FEWEST, min(MOST, ceil(ROUND_S / max(seconds[stage], ROUND_S / MOST))))
                passes[stage] += _passes(trainer, stage, count, on_action)
        on_action("spreads (waiting)")
        spreads = _largest(trainer, {stage: spread_of([p.total_s for p in done]) for stage, done in passes.items()})
    trainer.forget()
    return tuple(
        chunk.model_copy(
            update={
                "quiet_forward_s": median(p.forward_s for p in passes[chunk.stage]),
                "quiet_backward_s": median(p.backward_s for p in passes[chunk.stage]),
                "spread_fraction": spread_of([p.total_s for p in passes[chunk.stage]]),
            }
        )
        for chunk in chunks
    )


def _passes(trainer: Trainer, stage: int, count: int, on_action: Callable[[str], None]) -> list[Pass]:
    """Seconds of `count` micro-batches, one after the other, behind one that is not counted. The GPU is waited for when
    all of them are under way."""
    batch, clock = trainer.own_batch(), trainer.clock
    messages = {"F": trainer.empty().normal_(), "B": torch.ones_like(trainer.empty())}
    clock.start()
    marks = []
    for number in range(count + 1):
        on_action(f"micro-batch {number} of chunk {stage} (computing)")
        marks.append(trainer.micro_batch(stage, batch, lambda kind: messages[kind].detach()))
    passes = []
    for number, marks_of_kind in enumerate(marks):
        on_action(f"micro-batch {number} of chunk {stage} (waiting)")
        taken = {kind: clock.seconds(end) - clock.seconds(start) for kind, (start, end) in marks_of_kind.items()}
        passes.append(Pass(taken.pop("F"), sum(taken.values())))
    return passes[1:]


def _largest(trainer: Trainer, values: Mapping[int, float]) -> list[float]:
    """For each virtual stage, the largest value that any rank has."""
    largest = torch.zeros(len(trainer.run.stage_to_rank), dtype=torch.float64)
    for stage, value in values.items():
        largest[stage] = value
    largest = largest.to(trainer.device)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [float(value) for value in largest]


def spread_of(values: Sequence[float]) -> float:
    """Standard error of the median as a share of it: 1.2533 · σ / √n, with 1.4826 times the median deviation for σ, in
    which single interruptions do not count."""
    middle = median(values)
    deviation = 1.4826 * median(abs(value - middle) for value in values)
    return 1.2533 * deviation / sqrt(len(values)) / middle if middle else 0.0
