"""Why nothing fits: the rule that leaves no shape over, or the layout that lacks least memory, and what lifts it.

Thousands of shapes are sorted by a cheap estimate. For the most promising ones the exact memory of their layouts is
worked out, as `plan evaluate` prints it, so that the message and `plan evaluate` name the same number. All of it is
arithmetic of bytes: no seconds are priced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf, prod
from operator import attrgetter
from typing import Any

import numpy as np

from planner.errors import Infeasible, SpecError
from planner.layout.candidate import Candidate
from planner.layout.evaluate import pricing_of, selective_modules
from planner.layout.given import given_layout
from planner.physics.cost import CostTable
from planner.physics.layers import model_totals
from planner.physics.pricing import Pricing
from planner.record import record
from planner.schedule.orders import SCHEDULES
from planner.search.bounds import exceeds_all_ranks, layer_bytes
from planner.search.case import Case
from planner.search.chain import best_split
from planner.search.enumerate import (
    Rejections,
    check_expressible,
    enumerate_shapes,
    no_schedule,
    scalar,
    schedule_options,
)
from planner.search.frontier import blocks_of, nodes_of
from planner.search.ilp.node import RecomputeChoice, splits_tried
from planner.search.priced_shapes import PricedShapes, fits, priced_shapes
from planner.shape import FloatArray, IntArray, Shape
from planner.specs.training import Parallelism, Recompute
from planner.specs.units import gib
from planner.trainers.spec import RuntimeSpec

_MORE_MICROBATCHES = "pin a smaller pp, dp or micro-batch-size, or raise the global batch size"
_LESS_OFFLOADED = (
    "offload less, or say how much the hosts have: add --assume host_memory_gib=512, where that is a GPU's share of it"
)
_NO_CP = "use cp 1, or --runtime torchtitan, which takes any attention"
_HINTS = {
    "attention_sinks_with_cp": _NO_CP,
    "cp_not_expressible": _NO_CP,
    "host_memory": _LESS_OFFLOADED,
    "interleaving_too_few_microbatches": _MORE_MICROBATCHES,
    "model_parallel_not_expressible": "leave tp, cp, pp and ep out, or add --runtime megatron",
    "more_ranks_than_gpus": "lower what is pinned, or give more GPUs",
    "recipe": "leave out what --switch pins, or change the number of GPUs",
    "seq_length_beyond_positions": "--seq-length {positions}, the positions that the model has",
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
    hint = _HINTS.get(reason, f"free a pinned axis, or {change}" if case.pins else change)
    return hint.format(positions=case.model.max_position_embeddings)


def _too_many_ranks(case: Case) -> str:
    """A sentence on pinned sizes that together are more ranks than there are GPUs; empty where they are not."""
    sizes = {axis: min(case.pins[axis]) for axis in ("tp", "cp", "pp", "dp") if axis in case.pins}
    ranks, gpus = prod(sizes.values()), case.cluster.num_gpus
    if ranks <= gpus:
        return ""
    return (
        f"{' · '.join(f'{axis} {size}' for axis, size in sizes.items())} are {ranks:,} ranks, more than {gpus:,} GPUs"
    )


@record
class BrokenRule:
    """A rule that leaves no shape over."""

    reason: str
    says: str
    rejections: Rejections


def refusal(case: Case) -> BrokenRule | None:
    """The rule that leaves no shape over, or None if some shape obeys all rules.

    Raises SpecError for an unknown schedule.
    """
    known = [name for name in case.limits.schedule or () if name in SCHEDULES and name not in case.runtime.schedules]
    if known:
        says = f"{case.runtime.name} cannot run the schedule {known[0]}, only {', '.join(case.runtime.schedules)}"
        return BrokenRule("schedule_not_in_trainer", says, Rejections())
    check_expressible(case.limits, case.runtime)
    shapes, rejections = enumerate_shapes(case)
    if not np.size(shapes.tp):
        reason = last_reason(rejections)
        says = _too_many_ranks(case) or (_no_data_parallel(case) if reason == "no_data_parallel_size" else "")
        return BrokenRule(reason, says or rejections.examples[reason], rejections)
    every = (scalar(shapes, index) for index in range(np.size(shapes.tp)))
    if any(schedule_options(shape, case.model, case.limits, case.runtime) for shape in every):
        return None
    says = no_schedule(scalar(shapes, 0), case.model, case.limits, case.runtime)
    rejections.add("no_schedule", np.size(shapes.tp), says)
    return BrokenRule("no_schedule", says, rejections)


def _no_data_parallel(case: Case) -> str:
    """A sentence on a pinned dp that contradicts the batch or the cluster; empty if none does."""
    batch, sizes = case.training.global_batch_size, case.limits.dp or ()
    if sizes and all(batch % size for size in sizes):
        return f"global_batch_size {batch} is no multiple of dp {' or '.join(map(str, sizes))}"
    if sizes and min(sizes) > case.cluster.num_gpus:
        return f"dp {min(sizes)} needs more than {case.cluster.num_gpus} GPUs"
    return ""


MOST_STATE_BYTES = 24
"""More bytes than the weight, the gradient and the state of one parameter take in any recipe."""
DOES_NOT_FIT = "does_not_fit"
PROMISING, SPLIT = 12, 16
"""Shapes whose exact memory is worked out, and those whose layers are split by it where none of the former fits."""
MODES: tuple[Recompute, ...] = ("full", "selective", "none")
"""Ways to recompute; mostly the first needs the least memory."""


class NothingFits(Infeasible):
    """Some shapes are legal, and no layout of them fits."""

    def __init__(self, case: Case, rejections: dict[str, int]) -> None:
        hardware, headroom_gib = case.cluster.hardware, case.limits.memory_headroom_gib
        room = f"{hardware.memory_gib:g} GiB{f' less {headroom_gib:g} of headroom' if headroom_gib else ''}"
        self.where = f"nothing fits in {room} of {case.cluster.num_gpus} × {hardware.name}"
        super().__init__(self.where, rejections=rejections)


@record
class Miss:
    """A layout that does not fit, and how much it lacks."""

    layout: Parallelism
    """The layout as `plan evaluate` is told it; only the fields that have to be said are set."""
    candidate: Candidate
    """The same layout with its prices."""

    @property
    def shortfall_bytes(self) -> float:
        """Bytes that the fullest stage needs beyond the GPU's memory, headroom kept free."""
        return max(self.candidate.excess_bytes)

    @property
    def stage(self) -> int:
        """The fullest stage."""
        return self.candidate.excess_bytes.index(self.shortfall_bytes)

    @property
    def as_data(self) -> dict[str, Any]:
        """The layout field by field, its words on the command line, the fullest stage, and the GiB that it lacks."""
        return {
            **_fields(self.layout),
            "options": options_of(self.layout),
            "stage": self.stage,
            "shortfall_gib": gib(self.shortfall_bytes),
        }

    def __str__(self) -> str:
        free_bytes = self.candidate.pricing.headroom_bytes
        free = f" with {gib(free_bytes):,.1f} left free" if free_bytes else ""
        lacks = f"lacks {gib(self.shortfall_bytes):,.1f} GiB on stage {self.stage}{free}"
        return f"{' '.join(options_of(self.layout))}, {lacks}"


def options_of(layout: Parallelism) -> list[str]:
    """A layout as words of the command line."""
    words = []
    for field, value in _fields(layout).items():
        option = field.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", ",".join(value) if isinstance(value, list) else str(value)]
    return words


def _fields(layout: Parallelism) -> dict[str, Any]:
    return layout.model_dump(mode="json", include=layout.model_fields_set)


def nearest_miss(case: Case) -> Miss | None:
    """The layout that lacks least memory among those of the most promising shapes; None if none lacks any.

    Layers are split as trainers split them by default, since such a layout can be written in one command line.
    """
    return _nearest(pair for pair in _candidates(case, _smallest(case)) if not pair[1].fits)


def _nearest(layouts: Iterable[tuple[Parallelism, Candidate]]) -> Miss | None:
    return min((Miss(*layout) for layout in layouts), key=attrgetter("shortfall_bytes"), default=None)


def fitting_candidate(case: Case) -> Candidate | None:
    """Some layout of the most promising shapes that fits, by the exact memory.

    First layers are split evenly, then as the memory of each rank asks for.
    """
    shapes = _smallest(case)
    shapes = None if shapes is None else _with_room(case, shapes)
    if shapes is None or not len(shapes.kernel):
        return None
    even = (candidate for _, candidate in _candidates(case, shapes, lightest_alone=True))
    piped = np.flatnonzero(np.asarray(shapes.shape.pp) > 1)[:SPLIT]
    return next(filter(attrgetter("fits"), even), None) or next(_split_by_room(case, shapes.take(piped)), None)


def least_lack_bytes(case: Case) -> float:
    """The fewest bytes that a layout of the most promising shapes lacks, split evenly; none, or fewer, if it fits."""
    least = inf
    for _, candidate in _candidates(case, _smallest(case), lightest_alone=True):
        least = min(least, max(candidate.excess_bytes))
        if least <= 0:
            break
    return least


def _with_room(case: Case, shapes: PricedShapes) -> PricedShapes:
    """The first shapes, as many as are split, whose ranks have room for the layers together under some schedule.

    It has no chunks if that is open.
    """
    limits = case.limits.model_copy(update={"vpp": case.limits.vpp or (1,)})
    modes, pps, rows = modes_allowed(case), np.asarray(shapes.shape.pp), list[int]()
    for block in blocks_of(np.flatnonzero(fits(shapes)), pps):
        roomy = np.zeros(len(block), dtype=bool)
        for index, nodes in nodes_of(replace(shapes.take(block), limits=limits)):
            roomy[index[~exceeds_all_ranks(nodes.shapes, modes, nodes.orders)]] = True
        rows += block[roomy].tolist()
        if np.count_nonzero(pps[rows] > 1) >= SPLIT:
            break
    return shapes.take(np.array(rows, dtype=np.int64))


def _split_by_room(case: Case, shapes: PricedShapes) -> Iterator[Candidate]:
    """Layouts of plain 1F1B that fit, with layers split so."""
    for _, candidate in _candidates(case, shapes, SPLIT, lightest_alone=True):
        mode = candidate.split.recompute
        choice = RecomputeChoice("none", "all") if mode == "full" else RecomputeChoice(mode, "none")
        yield from (
            found for _, found in splits_tried(candidate, choice, best_split) if found is not None and found.fits
        )


def least_state_bytes(case: Case) -> float:
    """Bytes of weights, gradients and optimizer on the mean rank of the shape that spreads them most; 0 for none."""
    shapes = _smallest(case)
    if shapes is None:
        return 0.0
    table = shapes.table
    ends = [shapes.static_bytes("embedding", table.embedding), shapes.static_bytes("head", table.head)]
    layers = [
        number * shapes.static_bytes(kind, table.layers[kind, "none"])
        for kind, number in shapes.pricing.kind_counts.items()
    ]
    return float((sum([*ends, *layers]) / np.asarray(shapes.shape.pp)).min())


def refused_by_states(case: Case) -> NothingFits | None:
    """The refusal of a case whose weights, gradients and optimizer alone take more than a GPU has, however spread.

    None where they may fit, or where no shape is legal.
    """
    together_bytes = case.cluster.hardware.memory_bytes * case.cluster.num_gpus
    if model_totals(case.model, case.runtime, 1).num_parameters * MOST_STATE_BYTES <= together_bytes:
        return None
    if least_state_bytes(case) <= case.cluster.hardware.memory_bytes:
        return None
    legal_shapes, rejections = enumerate_shapes(_of_least_batch(case))
    return NothingFits(case, rejections.counts | {DOES_NOT_FIT: np.size(legal_shapes.tp)})


def _of_least_batch(case: Case) -> Case:
    """The case with the smallest micro-batch that may be: both answers of a pair where the objective has them."""
    least = case.limits.micro_batch_size or (case.training.objective.row.num_sequences,)
    return case.limited(micro_batch_size=(min(least),))


def _smallest(case: Case) -> PricedShapes | None:
    """The legal shapes with the smallest micro-batch that may be, priced; None if there is none.

    First come those that probably need least memory.
    """
    if not case.runtime.has_model_parallel:
        case = case.limited(**{axis: getattr(case.limits, axis) or (1,) for axis in ("tp", "cp", "pp", "ep")})
    legal_shapes, _ = enumerate_shapes(_of_least_batch(case))
    if not np.size(legal_shapes.tp) and len(case.limits.micro_batch_size or ()) > 1:
        legal_shapes, _ = enumerate_shapes(case)
    if not np.size(legal_shapes.tp) or not modes_allowed(case):
        return None
    shapes = priced_shapes(_of_bytes(case, case.runtime), legal_shapes, case.limits)
    return shapes.take(np.argsort(_estimate_bytes(shapes, modes_allowed(case)), kind="stable"))


def _of_bytes(case: Case, runtime: RuntimeSpec) -> Pricing:
    """The pricing of a case that counts bytes alone."""
    modules = selective_modules(case.model, case.runtime)
    pricing = pricing_of(case.model, case.cluster, case.training, runtime, case.limits, modules)
    return replace(pricing, counts_seconds=False)


def count_misfits(case: Case, shapes: PricedShapes, may_fit: Sequence[int] | IntArray, rejections: Rejections) -> None:
    """Count the shapes whose ranks together lack memory for the layers; the example is the shape that lacks most."""
    misfits = np.delete(np.arange(len(shapes.kernel)), may_fit)
    if not len(misfits):
        return
    worst = misfits[[np.argmax(_estimate_bytes(shapes.take(misfits), modes_allowed(case)))]]
    least = _nearest(candidates_of(case, shapes.shape.take(worst)))
    rejections.add(DOES_NOT_FIT, len(misfits), "the ranks have no room for the layers" if least is None else str(least))


def modes_allowed(case: Case) -> tuple[Recompute, ...]:
    """Ways to recompute that the user allows and the trainer knows."""
    allowed = case.limits.recompute or MODES
    return tuple(m for m in MODES if m in allowed and (m != "selective" or case.runtime.has_sequence_parallel))


def _estimate_bytes(shapes: PricedShapes, modes: Sequence[Recompute]) -> FloatArray:
    """A rough estimate of the bytes that the first rank of each shape lacks for its share of the layers.

    It only sorts the shapes; no user sees this number.
    """
    pp = shapes.shape.pp
    in_flight = np.minimum(shapes.shape.num_microbatches, pp)[:, None].astype(float)
    layers_bytes = np.min([layer_bytes(shapes, mode, in_flight) for mode in modes], axis=0)[:, :, 0]
    counts = shapes.counts
    # the fullest rank has a whole number of layers
    share = np.ceil(counts.sum() / pp) / counts.sum()
    return np.asarray(counts @ layers_bytes * share - shapes.pricing.usable_bytes(shapes.shape))


def candidates_of(case: Case, shapes: Shape) -> Iterator[tuple[Parallelism, Candidate]]:
    """The layouts of some shapes: each schedule with its fewest chunks, and each way to recompute."""
    return _candidates(case, priced_shapes(_of_bytes(case, case.runtime), shapes, case.limits), np.size(shapes.tp))


def _candidates(
    case: Case, priced: PricedShapes | None, most: int = PROMISING, lightest_alone: bool = False
) -> Iterator[tuple[Parallelism, Candidate]]:
    """`candidates_of` the first shapes of those whose bytes are known.

    The lightest legal way to recompute comes first; with `lightest_alone` it is the only one of each.
    """
    if priced is None:
        return
    every = np.arange(min(len(priced.kernel), most))
    tables: dict[RuntimeSpec, tuple[Pricing, CostTable]] = {case.runtime: (priced.pricing, priced.cost_table(every))}
    for row in every.tolist():
        for shape, schedule in _fewest_chunks(case, scalar(priced.shape, row)):
            runtime = case.runtime.for_schedules(SCHEDULES[schedule].splits_backward)
            if runtime not in tables:
                pricing = _of_bytes(case, runtime)
                tables[runtime] = pricing, pricing.table(priced.shape.take(every))
            pricing, table = tables[runtime]
            for mode in modes_allowed(case):
                layout = layout_of(case, shape, schedule, mode)
                try:
                    given = given_layout(pricing, layout)
                except SpecError:
                    continue
                if not given.warnings:
                    yield layout, Candidate(pricing, replace(table.take(row), shape=shape), given.split, schedule)
                    if lightest_alone:
                        break


def _fewest_chunks(case: Case, shape: Shape) -> Iterator[tuple[Shape, str]]:
    """The schedules that a shape may run, each with the fewest chunks, since those need least memory."""
    seen = set()
    for option, schedule in schedule_options(shape, case.model, case.limits, case.runtime):
        if schedule not in seen:
            seen.add(schedule)
            yield option, schedule


def layout_of(case: Case, shape: Shape, schedule: str, recompute: Recompute) -> Parallelism:
    """One scalar shape as `plan evaluate` is told it; a field with its default value is left unset."""
    runtime, vpp, shard_size = case.runtime, int(shape.vpp), int(shape.shard_size)
    fields: dict[str, Any] = {axis: int(getattr(shape, axis)) for axis in ("tp", "pp", "dp")}
    fields |= {axis: size for axis in ("cp", "ep", "vpp") if (size := int(getattr(shape, axis))) > 1}
    if int(shape.etp) != (1 if case.model.moe is not None else int(shape.tp)):
        fields["etp"] = int(shape.etp)
    fields["micro_batch_size"] = int(shape.micro_batch_size)
    if schedule not in ("none", "interleaved-1f1b" if vpp > 1 else "1f1b"):
        fields["schedule"] = schedule
    if bool(shape.sequence_parallel) != (runtime.sequence_parallel and int(shape.tp) > 1):
        fields["sequence_parallel"] = bool(shape.sequence_parallel)
    zero_stage, own = int(shape.zero_stage), 1 if 1 in runtime.zero_stages else runtime.zero_stages[0]
    if shard_size != int(shape.dp) * int(shape.cp):
        fields |= {"zero_stage": zero_stage, "fsdp": shard_size}
    elif zero_stage != own:
        fields["zero_stage"] = zero_stage
    if recompute != "none":
        fields["recompute"] = recompute
    if recompute == "selective":
        fields["recompute_modules"] = selective_modules(case.model, runtime)
    return Parallelism(**fields)
