"""Seconds of each chunk while no message between stages is under way.

A receive or a send of NCCL is a kernel. From when it is posted until its peer has come it spins on some of the GPU's
multiprocessors, which whatever computes meanwhile has to do without (NVIDIA/nccl issues 689 and 1025). Posting receives
late would not help: the sender would spin instead. Therefore all ranks run their chunks once more after the steps,
with tensors of their own in place of messages. Those seconds are the chunks' own; the steps' are shown beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from statistics import median

import torch
import torch.distributed as dist

from planner.probe.rank.training import Trainer
from planner.probe.repeats import is_sure, spread_fraction
from planner.probe.result import ChunkSeconds

FEWEST, MOST = 5, 200
"""Smallest and largest number of micro-batches of a round, which else takes `run.steady_s`."""
MOST_ROUNDS = 3
"""Rounds follow each other until the medians are sure, if the run's steps are repeated for that at all."""

Passes = list[tuple[float, float]]
"""Seconds of each micro-batch's forward and backward."""


def with_quiet_seconds(
    trainer: Trainer, chunks: Sequence[ChunkSeconds], on_action: Callable[[str], None]
) -> tuple[ChunkSeconds, ...]:
    """The chunks with their quiet seconds. All ranks call this together, because ranks of one stage exchange tensors
    within it; so all of them must know how often each chunk runs."""
    run, passes = trainer.run, dict[int, Passes]((chunk.stage, []) for chunk in chunks)
    seconds = _largest(trainer, {chunk.stage: chunk.forward_s + chunk.backward_s for chunk in chunks})
    unsure = set(passes)
    for _ in range(MOST_ROUNDS if run.most_s else 1):
        for stage in sorted(unsure):
            count = max(FEWEST, min(MOST, ceil(run.steady_s / max(seconds[stage], 1e-9))))
            passes[stage] += _passes(trainer, stage, count, on_action)
        on_action("spreads (waiting)")
        spreads = _largest(trainer, {stage: _spread(done) for stage, done in passes.items()})
        unsure = {stage for stage in passes if not is_sure(spreads[stage])}
    trainer.forget()
    return tuple(
        chunk.model_copy(
            update={
                "quiet_forward_s": median(forward_s for forward_s, _ in passes[chunk.stage]),
                "quiet_backward_s": median(backward_s for _, backward_s in passes[chunk.stage]),
                "spread_fraction": _spread(passes[chunk.stage]),
            }
        )
        for chunk in chunks
    )


def _spread(passes: Passes) -> float:
    """The larger standard error of the medians of forward and backward, as a share of them; 1 where it is unknown."""
    spreads = [spread_fraction(seconds) for seconds in zip(*passes, strict=True)]
    return max((1.0 if spread is None else spread for spread in spreads), default=1.0)


def _passes(trainer: Trainer, stage: int, count: int, on_action: Callable[[str], None]) -> Passes:
    """Seconds of `count` micro-batches, one after the other, behind one that is not counted. The GPU is waited for when
    all of them are under way."""
    batch, clock = trainer.own_batch(), trainer.clock
    messages = {"F": trainer.empty().normal_(), "B": torch.ones_like(trainer.empty())}
    clock.start()
    marks = [
        trainer.micro_batch(stage, batch, lambda kind: messages[kind].detach(), on_action) for _ in range(count + 1)
    ]
    passes = []
    for number, marks_of_kind in enumerate(marks):
        on_action(f"micro-batch {number} of chunk {stage} (waiting)")
        taken = {kind: clock.seconds(end) - clock.seconds(start) for kind, (start, end) in marks_of_kind.items()}
        passes.append((taken.pop("F"), sum(taken.values())))
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
