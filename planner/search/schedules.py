"""The schedules that a shape may run, and the number of chunks per rank with each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.errors import SpecError
from planner.schedule.orders import SCHEDULES, violation
from planner.search.splits.equal_chunks import chunk_lengths
from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.specs.problems import closest, nearest
from planner.specs.training import SearchLimits
from planner.trainers.load import RUNTIMES, load_runtime
from planner.trainers.spec import RuntimeSpec

DEFAULT_SCHEDULES = tuple(kind.name for kind in SCHEDULES.values() if kind.is_tried_by_default)
"""Schedules that are tried if the user names none."""


def schedule_options(
    shape: Shape, model: ModelSpec, limits: SearchLimits, runtime: RuntimeSpec
) -> list[tuple[Shape, str]]:
    """One scalar shape with every schedule and vpp it may run, plain 1F1B first."""
    options = schedules_of(int(shape.pp), int(shape.num_microbatches), model, limits, runtime)
    return [(replace(shape, vpp=vpp), name) for name, vpp in options]


def schedules_of(
    pp: int, num_microbatches: int, model: ModelSpec, limits: SearchLimits, runtime: RuntimeSpec
) -> list[tuple[str, int]]:
    """Every schedule and vpp that pp ranks may run with so many micro-batches.

    A single rank runs the schedule `none`. It is tried if the user names no schedule, or one that needs no pipeline.
    """
    alone = ("none",) if limits.schedule is None or any(map(_runs_without_pipeline, limits.schedule)) else ()
    return [
        (name, vpp)
        for name in (schedules_tried(limits, runtime) if pp > 1 else alone)
        for vpp in chunks_tried(name, pp, model, limits, runtime)
        # where torch runs groups of other sizes than pp, those are not tried
        if not violation(name, pp, vpp, num_microbatches)
    ]


def _runs_without_pipeline(name: str) -> bool:
    """True for a name with which the user is also content with a layout of one stage."""
    return name == "auto" or (name in SCHEDULES and SCHEDULES[name].runs_without_pipeline)


def chunks_tried(schedule: str, pp: int, model: ModelSpec, limits: SearchLimits, runtime: RuntimeSpec) -> Iterator[int]:
    """Numbers of chunks per rank that the schedule allows and the model's layers fill."""
    kind, layers = SCHEDULES[schedule], model.num_hidden_layers
    # Megatron-LM interleaves over two ranks only where sends and receives overlap compute (arguments.py)
    interleaves = pp > 2 or runtime.interleaved_p2p_overlap
    for vpp in limits.vpp or range(kind.min_vpp, min(kind.max_vpp, (layers + 2) // pp) + 1):
        if vpp == 1 or (interleaves and cuts_evenly(layers, pp * vpp, runtime.head_only_stage)):
            yield int(vpp)


def schedules_tried(limits: SearchLimits, runtime: RuntimeSpec) -> tuple[str, ...]:
    """Schedules that the search may use; the first is always `none`, for shapes without a pipeline."""
    wanted = limits.schedule or DEFAULT_SCHEDULES
    if "auto" in wanted:
        # a compiled layer's backward does not come apart (RuntimeSpec.for_schedules)
        measured_against = (kind for kind in SCHEDULES.values() if kind.is_measured_against)
        wanted = (*wanted, *(k.name for k in measured_against if not (runtime.compiled and k.splits_backward)))
    return ("none", *(n for n in dict.fromkeys(wanted) if n in runtime.schedules and n in SCHEDULES and n != "none"))


def by_runtime(limits: SearchLimits, runtime: RuntimeSpec) -> list[tuple[RuntimeSpec, SearchLimits]]:
    """The runtimes that price the schedules to be tried, each with limits that name its schedules.

    A compiled layer cannot split its backward, so schedules that split it may have an uncompiled runtime of their own.
    """
    named, uncompiled = limits.schedule or (), runtime.for_schedules(split_backward=True)
    split = tuple(name for name in named if name in SCHEDULES and SCHEDULES[name].splits_backward)
    if uncompiled is runtime or not split:
        return [(runtime, limits)]
    unsplit = tuple(name for name in named if name not in split)
    parts = (
        (priced_as, limits.model_copy(update={"schedule": names}))
        for priced_as, names in ((runtime, unsplit), (uncompiled, split))
    )
    return [(priced_as, part) for priced_as, part in parts if part.schedule]


def check_expressible(limits: SearchLimits, runtime: RuntimeSpec) -> None:
    """Raise SpecError for an unknown schedule, and for a schedule or recompute mode that the trainer does not have."""
    if "selective" in (limits.recompute or ()) and not runtime.has_sequence_parallel:
        raise SpecError(f"recompute: {runtime.name} has no selective recompute", "one of none, full")
    for name in limits.schedule or ():
        if name in runtime.schedules:
            continue
        known = name in SCHEDULES or name == "auto"
        raise SpecError(
            f"schedule: {runtime.name} cannot run {name!r}" if known else f"schedule: unknown {name!r}",
            f"one of {', '.join(runtime.schedules)}{'' if known else _nearest(name, runtime)}",
        )


def _nearest(name: str, runtime: RuntimeSpec) -> str:
    """The trainer's schedules that are spelt most like it, else a trainer that has one that is."""
    others = ((other, kind) for other in map(load_runtime, RUNTIMES) for kind in closest(name, other.schedules))
    trainer, kind = next(others, (None, ""))
    elsewhere = "" if trainer is None else f"; --runtime {trainer.name} has {kind}"
    return nearest(name, runtime.schedules) or elsewhere


def cuts_evenly(num_layers: int, num_stages: int, empty_ends: bool) -> bool:
    """True if equal stages hold the layers; the first and the last may hold fewer (none, with `empty_ends`)."""
    return next(chunk_lengths(num_layers, num_stages, empty_ends), None) is not None
