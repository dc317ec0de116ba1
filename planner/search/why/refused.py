"""Why the layouts that someone asks for are not: the rule they break or the memory they lack, what would lift it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np

from planner.answer import PricedLayout
from planner.errors import Infeasible, SolverError, SpecError
from planner.layout.evaluate import price_given, pricing_of, selective_modules
from planner.schedule.orders import SCHEDULES, violation
from planner.search.enumerate import Rejections, enumerate_shapes, scalar
from planner.search.priced_shapes import screen_of
from planner.search.schedules import check_expressible, schedule_options, schedules_tried
from planner.search.why.explain import shortfall_bytes
from planner.search.why.what_if import Case
from planner.shape import Shape
from planner.specs.training import Parallelism
from planner.specs.units import GIB
from planner.trainers.load import RUNTIMES, load_runtime

NEAREST = 6
"""Shapes priced in search of the one that lacks least; values tried in place of a pinned one."""
QUICK_S = 3.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """A rule that leaves no shape over."""

    reason: str
    says: str
    rejections: Rejections


@dataclass(frozen=True, slots=True)
class Lift:
    """A change that makes the question answerable, and the best layout then."""

    change: str
    found: PricedLayout


def refusal(case: Case) -> Refusal | None:
    """The rule that leaves no shape over, or None where some shape obeys them all.

    Raises SpecError for a schedule that nobody knows.
    """
    known = [name for name in case.limits.schedule or () if name in SCHEDULES and name not in case.runtime.schedules]
    if known:
        says = f"{case.runtime.name} cannot run the schedule {known[0]}, only {', '.join(case.runtime.schedules)}"
        return Refusal("schedule_not_in_trainer", says, Rejections())
    check_expressible(case.limits, case.runtime)
    shapes, rejections = _shapes(case)
    if not np.size(shapes.tp):
        # rules are applied one after the other: the last that refused any left nothing over
        reason = next(reversed(rejections.counts))
        says = _no_data_parallel(case) if reason == "no_data_parallel_size" else ""
        return Refusal(reason, says or rejections.examples[reason], rejections)
    if any(schedule_options(shape, case.model, case.limits, case.runtime) for shape in _each(shapes)):
        return None
    says = _no_schedule(case, next(_each(shapes)))
    rejections.add("no_schedule", np.size(shapes.tp), says)
    return Refusal("no_schedule", says, rejections)


def _shapes(case: Case) -> tuple[Shape, Rejections]:
    return enumerate_shapes(case.model, case.cluster, case.training, case.limits, case.runtime)


def _each(shapes: Shape) -> Iterator[Shape]:
    return (scalar(shapes, index) for index in range(np.size(shapes.tp)))


def _no_data_parallel(case: Case) -> str:
    """What a pinned dp contradicts by itself, or nothing."""
    batch, sizes = case.training.global_batch_size, case.limits.dp or ()
    if sizes and all(batch % size for size in sizes):
        return f"global_batch_size {batch} is no multiple of dp {' or '.join(map(str, sizes))}"
    if sizes and min(sizes) > case.cluster.num_gpus:
        return f"dp {min(sizes)} needs more than {case.cluster.num_gpus} GPUs"
    return ""


def _no_schedule(case: Case, shape: Shape) -> str:
    """What the schedules that may be used have against one shape."""
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


def nearest_miss(case: Case) -> PricedLayout | None:
    """Of the layouts that the pins allow, one that lacks least memory, cut evenly and recomputing all it may."""
    pricing = pricing_of(case.model, case.cluster, case.training, case.runtime, case.limits)
    screen = screen_of(pricing, _shapes(case)[0])
    allowed = case.limits.recompute or ("full", "selective", "none")
    recompute = next(mode for mode in ("full", "selective", "none") if mode in allowed)
    modules = selective_modules(case.model, case.runtime) if recompute == "selective" else ()
    missed = []
    for index in np.argsort(shortfall_bytes(screen), kind="stable")[:NEAREST]:
        shape = scalar(screen.shape, int(index))
        for cut, schedule in schedule_options(shape, case.model, case.limits, case.runtime)[:NEAREST]:
            sizes: dict[str, Any] = {axis: int(getattr(cut, axis)) for axis in _SIZES}
            wanted = Parallelism(
                **sizes,
                fsdp=int(cut.shard_size),
                schedule=schedule,
                recompute=recompute,
                recompute_modules=modules,
            )
            try:
                missed.append(price_given(case.model, case.cluster, case.training, wanted, case.runtime))
            except SpecError:
                continue
    capacity = case.cluster.hardware.memory_bytes - case.limits.memory_headroom_gib * GIB
    needs = [layout.worst_stage.memory.total_bytes for layout in missed]
    least = min((need for need in needs if need > capacity), default=None)
    return None if least is None else missed[needs.index(least)]


_SIZES = ("tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch_size", "zero_stage")


def lifts(case: Case, reason: str) -> Iterator[Lift]:
    """Smallest changes, one per pin: the nearest value with which something fits, and permissions that would do."""
    if reason == "schedule_not_in_trainer":
        yield from _other_trainers(case)
    if reason == "tp_across_nvlink_domains":
        yield from _lift("--tp-across-nodes", case.limited(tp_across_nodes=True))
    if case.limits.memory_headroom_gib:
        yield from _lift("--memory-headroom 0", case.limited(memory_headroom_gib=0.0))
    for axis, pinned in case.pins.items():
        option = f"--{axis.replace('_', '-')}"
        for value in _values(case, axis)[:NEAREST]:
            spelled = f"{option} {value} instead of {','.join(map(str, pinned))}"
            if found := list(_lift(spelled, case.limited(**{axis: (value,)}))):
                yield from found
                break


def _other_trainers(case: Case) -> Iterator[Lift]:
    for runtime in map(load_runtime, RUNTIMES):
        if set(case.limits.schedule or ()) <= set(runtime.schedules):
            changed = Case(case.model, case.cluster, case.training, runtime, case.limits)
            yield from _lift(f"--runtime {runtime.name}", changed)


def _lift(change: str, case: Case) -> Iterator[Lift]:
    """The change and its best layout where there is any."""
    try:
        case.limited(top=1, time_limit_s=QUICK_S, gap_fraction=1.0).plan()
        yield Lift(change, case.aside().plan().best)
    except (Infeasible, SolverError, SpecError):
        return


def _values(case: Case, axis: str) -> list[Any]:
    """Other values of a pinned axis, those near to the pinned ones first: sizes that legal shapes have, other modes."""
    pinned = case.pins[axis]
    others: set[int]
    match axis:
        case "recompute":
            return [mode for mode in ("selective", "full", "none") if mode not in pinned]
        case "schedule":
            return [name for name in case.runtime.schedules if name not in pinned and name in SCHEDULES]
        case "vpp":
            others = set(range(1, case.model.num_hidden_layers + 1))
        case _:
            shapes, _ = _shapes(case.limited(**{axis: None}))
            others = set(getattr(shapes, axis).tolist())
    return sorted(others - set(pinned), key=lambda v: (min(abs(log((v + 1) / (pin + 1))) for pin in pinned), v))
