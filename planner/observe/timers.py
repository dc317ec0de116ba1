"""The timers of a record: those of a step, and the terms that a step is made of by them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from planner.observe.measured import Timer
from planner.observe.record import Record

TERMS = (
    (("forward-backward", "forward_backward"), "forward_backward_s"),
    (
        ("all-grads-sync", "grads-all-reduce", "backward-params-all-reduce", "backward-reduce-model-grads"),
        "gradients_s",
    ),
    (("params-all-gather",), "parameters_s"),
    (("forward-compute", "forward", "fwd"), "forward_s"),
    (("backward-compute", "backward", "bwd"), "backward_s"),
    (("optimizer", "step"), "optimizer_s"),
)
"""Timers that follow each other in a step, and the term that each is; of several names the first found counts."""
_INSIDE = {
    "all-grads-sync": ("gradients_s", "forward_backward_s"),
    "params-all-gather": ("parameters_s", "optimizer_s"),
}
"""Timers that Megatron core runs inside of another: its schedules finalise the gradients before `forward-backward` ends
(schedules.py, since core 0.7), and the distributed optimizer gathers parameters in its step (distrib_optimizer.py)."""
_BESIDE = {"grads-all-reduce", "grads-reduce-scatter", "backward-params-all-reduce"}
"""Timers of older versions, which ran all of these one after the other."""
DATA_TIMERS = ("batch-generator", "batch_input", "data_loading", "straggler-get-batch")
"""Timers of waiting for a batch: Megatron-LM's, DeepSpeed's pipeline engine's, a column of torchtitan's metrics, and
that of `--log-straggler`; the first found counts."""
_SET_UP = (
    "model-and-optimizer-setup", "train/valid/test-data-iterators-setup", "load-checkpoint", "model and optimizer",
    "train/valid/test data iterators",
)  # fmt: skip
"""Timers of what happens once, before the first step."""
_MOST_OVER_FRACTION = 0.03
"""Terms may add up to this much more than a step, and are then scaled: the most of each is of another rank."""
_PARTS_OF_FORWARD_BACKWARD = ("forward_s", "backward_s")


def breakdown_of(record: Record, step_s: float) -> dict[str, float]:
    """The seconds of a step by its timers, and what they leave."""
    found: dict[str, float] = {}
    for names, term in TERMS:
        seconds = next((most for name in names if (most := _most_s(record, name)) is not None), None)
        if seconds is not None:
            found[term] = seconds
    if "forward_backward_s" in found:
        for part in _PARTS_OF_FORWARD_BACKWARD:
            found.pop(part, None)
    for inner, (term, outer) in _INSIDE.items():
        if (
            inner in record.timers
            and not _BESIDE & record.timers.keys()
            and found.get(outer, 0.0) > found.get(term, 0.0)
        ):
            found[outer] -= found.get(term, 0.0)
    total = sum(found.values())
    if step_s < total <= step_s * (1 + _MOST_OVER_FRACTION):
        found, total = {term: seconds * step_s / total for term, seconds in found.items()}, step_s
    # timers inside each other, or of micro-batches, are no parts of a step
    return {**found, "unattributed_s": step_s - total} if total <= step_s else {"unattributed_s": step_s}


def _most_s(record: Record, name: str) -> float | None:
    """The most that a timer shows over the ranks, in seconds: the median over what was printed."""
    highs = record.timers.get(name, ((), ()))[1]
    if highs:
        return float(np.median(np.frombuffer(highs, dtype=float)))
    return max(record.of_ranks(name).values(), default=None)


def timers_of(record: Record) -> Iterator[Timer]:
    for name, (lows, highs) in record.timers.items():
        if len(lows) and name not in _SET_UP:
            low, high = (float(np.median(np.frombuffer(values, dtype=float))) for values in (lows, highs))
            ranks, mean_s = record.of_ranks(name), math.fsum(highs) / len(highs)
            yield Timer(name=name, min_s=low, max_s=high, num_values=len(lows), per_rank_s=ranks, mean_s=mean_s)
    for name in record.rank_timers:
        if name not in record.timers:
            ranks = record.of_ranks(name)
            values = list(ranks.values())
            yield Timer(name=name, min_s=min(values), max_s=max(values), num_values=len(values), per_rank_s=ranks)


def data_s(record: Record) -> float | None:
    """Mean seconds in a step of waiting for a batch, on the rank that waits longest."""
    values = next((record.timers[name][1] for name in DATA_TIMERS if record.timers.get(name, ((), ()))[1]), None)
    if values:
        return math.fsum(values) / len(values)
    return next((most for name in DATA_TIMERS if (most := _most_s(record, name)) is not None), None)
