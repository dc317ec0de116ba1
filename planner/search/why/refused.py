"""The rule that leaves no shape over: its name, its numbers, and a hint that lifts it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from planner.errors import Infeasible
from planner.schedule.orders import SCHEDULES, violation
from planner.search.case import Case
from planner.search.enumerate import Rejections, enumerate_shapes, scalar
from planner.search.schedules import check_expressible, schedule_options, schedules_tried
from planner.shape import Shape

_MORE_MICROBATCHES = "pin a smaller pp, dp or micro-batch-size, or raise the global batch size"
_LESS_OFFLOADED = (
    "offload less, or say how much the hosts have: plan hardware NAME > box.yaml, change its host's memory_gib, and "
    "add --hardware box.yaml"
)
_NO_CP = "use cp 1, or another --runtime (torchtitan takes any attention)"
_HINTS = {
    "attention_sinks_with_cp": _NO_CP,
    "cp_not_expressible": _NO_CP,
    "host_memory": _LESS_OFFLOADED,
    "interleaving_too_few_microbatches": _MORE_MICROBATCHES,
    "model_parallel_not_expressible": "leave tp, cp, pp and ep out, or add --runtime megatron",
    "more_ranks_than_gpus": "lower what is pinned, or give more GPUs",
    "seq_length_beyond_positions": "shorten the sequence to the positions that the model has",
    "sliding_window_with_ring_cp": _NO_CP,
    "too_few_microbatches": _MORE_MICROBATCHES,
    "tp_across_domains": "add --tp-across-nodes, or lower tp",
    "zero_stage_not_expressible": "free zero-stage, or use another --runtime",
}


class NothingLegal(Infeasible):
    """No shape obeys the arithmetic of model and batch and the rules of the trainer."""

    def __init__(self, rejections: Rejections, case: Case) -> None:
        self.reason = last_reason(rejections)
        example = _too_many_ranks(case) or rejections.examples.get(self.reason, "no shape exists")
        super().__init__(f"no legal layout: {example}", hint_for(self.reason, case), rejections.counts)


def last_reason(rejections: Rejections) -> str:
    """The rule that left no shape over; empty if no rule refused any.

    Rules are applied one after the other, so it is the last rule that refused a shape.
    """
    return next(reversed(rejections.counts), "")


def hint_for(reason: str, case: Case) -> str:
    """A change of the job that lifts the rule which left no shape over."""
    change = "change the number of GPUs or the global batch size"
    return _HINTS.get(reason, f"free a pinned axis, or {change}" if case.pins else change)


def _too_many_ranks(case: Case) -> str:
    """A sentence on pinned sizes that together are more ranks than there are GPUs; empty where they are not."""
    sizes = {axis: min(case.pins[axis]) for axis in ("tp", "cp", "pp", "dp") if axis in case.pins}
    ranks, gpus = prod(sizes.values()), case.cluster.num_gpus
    if ranks <= gpus:
        return ""
    return (
        f"{' · '.join(f'{axis} {size}' for axis, size in sizes.items())} are {ranks:,} ranks, more than {gpus:,} GPUs"
    )


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rule that leaves no shape over."""

    reason: str
    says: str
    rejections: Rejections


def refusal(case: Case) -> Refusal | None:
    """The rule that leaves no shape over, or None if some shape obeys all rules.

    Raises SpecError for an unknown schedule.
    """
    known = [name for name in case.limits.schedule or () if name in SCHEDULES and name not in case.runtime.schedules]
    if known:
        says = f"{case.runtime.name} cannot run the schedule {known[0]}, only {', '.join(case.runtime.schedules)}"
        return Refusal("schedule_not_in_trainer", says, Rejections())
    check_expressible(case.limits, case.runtime)
    shapes, rejections = shapes_of(case)
    if not np.size(shapes.tp):
        reason = last_reason(rejections)
        says = _too_many_ranks(case) or (_no_data_parallel(case) if reason == "no_data_parallel_size" else "")
        return Refusal(reason, says or rejections.examples[reason], rejections)
    if any(schedule_options(shape, case.model, case.limits, case.runtime) for shape in _scalars(shapes)):
        return None
    says = _no_schedule(case, next(_scalars(shapes)))
    rejections.add("no_schedule", np.size(shapes.tp), says)
    return Refusal("no_schedule", says, rejections)


def shapes_of(case: Case) -> tuple[Shape, Rejections]:
    """The legal shapes of a case as arrays, and the reasons why other shapes are not legal."""
    return enumerate_shapes(case.model, case.cluster, case.training, case.limits, case.runtime)


def _scalars(shapes: Shape) -> Iterator[Shape]:
    return (scalar(shapes, index) for index in range(np.size(shapes.tp)))


def _no_data_parallel(case: Case) -> str:
    """A sentence on a pinned dp that contradicts the batch or the cluster; empty if none does."""
    batch, sizes = case.training.global_batch_size, case.limits.dp or ()
    if sizes and all(batch % size for size in sizes):
        return f"global_batch_size {batch} is no multiple of dp {' or '.join(map(str, sizes))}"
    if sizes and min(sizes) > case.cluster.num_gpus:
        return f"dp {min(sizes)} needs more than {case.cluster.num_gpus} GPUs"
    return ""


def _no_schedule(case: Case, shape: Shape) -> str:
    """A sentence on why no schedule that may be used runs this shape."""
    pp, steps = int(shape.pp), int(shape.num_microbatches)
    for vpp in case.limits.vpp or (1,):
        for name in reversed(schedules_tried(case.limits, case.runtime)):
            error = violation(name, pp, vpp, steps)
            if error is not None and name != "none":
                return error.message
            if error is None and vpp > 1:
                layers = case.model.num_hidden_layers
                return f"{layers} layers cannot be cut into pp {pp} · vpp {vpp} = {pp * vpp} chunks of like size"
    return f"no schedule runs pp {pp} with {steps} micro-batches"
