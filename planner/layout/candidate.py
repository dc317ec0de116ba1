"""A candidate is one layout with its prices; all layouts are judged as candidates.

The search makes candidates and keeps the fastest; a given layout and a saved plan become candidates too. Seconds and
memory of a layout, and the answer whether it fits, are properties of its candidate, each computed once.

A candidate has a split, which says which layers every virtual stage holds and how many of them it recomputes. Bytes
that micro-batches in flight hold on each rank are counted along the order of its actions; times do not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from planner.errors import SpecError
from planner.layout.seconds import (
    STEADY_ROUNDS,
    OutsidePipeline,
    Pipeline,
    durations_of,
    exchanged_dp_s,
    is_long,
    outside_pipeline,
    pipeline_s,
    run_pipeline,
)
from planner.physics.cost import CostTable, PartCost, sum_parts
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import StageBytes, fixed_bytes, stage_memory
from planner.record import record
from planner.schedule.actions import HELD_BY_PLACE, ActionList, Schedule
from planner.schedule.orders import SCHEDULES, build_schedule, in_flight_chunks, placement
from planner.schedule.replay import Durations
from planner.shape import FloatArray, Shape
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.reading import printable
from planner.specs.training import Recompute
from planner.trainers.layout_string import expanded

Modes = dict[tuple[LayerKind, Recompute], int]
"""Number of layers of each kind and recompute mode."""

FULL: Recompute = "full"

_OWN_SECONDS = tuple(
    f.name for f in fields(PartCost) if f.name.endswith("_s") and f.name not in ("reduce_s", "gather_s")
)


@record
class Split:
    """Layers of each virtual stage; virtual stage j runs on rank j mod pp.

    The embedding is on the first virtual stage, the head on the last, multi-token-prediction blocks on `mtp_stage`.
    """

    counts: tuple[int, ...]
    """Number of decoder layers of each virtual stage, in model order."""
    base: Recompute = "none"
    """Recompute mode of the layers that are not recomputed in full."""
    recomputed: tuple[tuple[int, ...], ...] = ()
    """Number of layers recomputed in full, per virtual stage and layer kind (in model order); they are the first layers
    of their kind. Empty where there are none."""
    mtp_stage: int | None = None
    """Virtual stage of the multi-token-prediction blocks; None for the last."""

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """First layer of each virtual stage, and the layer behind its last."""
        bounds = [0]
        for count in self.counts:
            bounds.append(bounds[-1] + count)
        return tuple(pairwise(bounds))

    @property
    def priced_modes(self) -> tuple[Recompute, ...]:
        """The recompute modes whose prices it needs."""
        modes: tuple[Recompute, ...] = ("none", *({self.base} - {"none"}))
        return (*modes, FULL) if self.recomputed else modes

    @property
    def recompute(self) -> Recompute:
        """Full if any layer is recomputed whole, else the mode of the others."""
        return FULL if any(map(any, self.recomputed)) else self.base

    @property
    def recompute_num_layers(self) -> int | None:
        """The most layers of a chunk that full recompute covers; None where it covers all layers, or none."""
        whole = tuple(map(sum, self.recomputed))
        return None if whole == self.counts else max(whole, default=0) or None

    @property
    def mtp_mode(self) -> Recompute:
        """Recompute mode of the multi-token-prediction layers: full only if all decoder layers are."""
        return FULL if self.recompute == FULL and self.recompute_num_layers is None else self.base

    def recomputing(self, model: ModelSpec, first: int | None = None) -> Split:
        """The split with the first layers of each stage recomputed whole; with all of them where no number is given."""
        most = model.num_hidden_layers if first is None else first
        return self.recomputing_layers(model, [model.layers[a : min(a + most, b)] for a, b in self.chunks])

    def recomputing_layers(self, model: ModelSpec, layers: Iterable[Sequence[LayerKind]]) -> Split:
        """The split with so many layers of each stage recomputed whole as there are of each kind in `layers`."""
        return replace(self, recomputed=tuple(tuple(each.count(kind) for kind in model.kinds) for each in layers))

    def layer_modes(self, model: ModelSpec, stage: int) -> Iterator[tuple[int, LayerKind, Recompute]]:
        """Each layer of a virtual stage, its kind and its mode: the first of a kind are recomputed in full."""
        full = list(self.recomputed[stage]) if self.recomputed else [0] * len(model.kinds)
        for layer in range(*self.chunks[stage]):
            place = model.kinds.index(model.layers[layer])
            yield layer, model.layers[layer], FULL if full[place] else self.base
            full[place] -= full[place] > 0

    def modes(self, model: ModelSpec) -> list[Modes]:
        """Number of layers of each kind and recompute mode on every virtual stage."""
        stages = []
        for stage, (first, last) in enumerate(self.chunks):
            modes: Modes = {}
            for kind, count in Counter(model.layers[first:last]).items():
                full = self.recomputed[stage][model.kinds.index(kind)] if self.recomputed else 0
                modes.update({key: n for key, n in (((kind, FULL), full), ((kind, self.base), count - full)) if n})
            stages.append(modes)
        return stages


def even_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each stage, as equal as possible; longer stages are in the middle, away from embedding and head."""
    least, more = divmod(num_layers, num_stages)
    start = (num_stages - more) // 2
    return tuple(least + (1 if start <= stage < start + more else 0) for stage in range(num_stages))


def slowed(cost: PartCost, factor: float) -> PartCost:
    """Cost of the same work on a rank that takes `factor` times as long.

    Exchanges over data-parallel ranks take as long as before.
    """
    return replace(cost, **{name: factor * getattr(cost, name) for name in _OWN_SECONDS})


def held_parts(table: CostTable, split: Split, stage: int, folded: bool) -> list[tuple[str, PartCost]]:
    """Names and costs of the parts of a virtual stage beside its decoder layers.

    Where `folded`, one rank has both the first stage and the last.
    """
    last = len(split.counts) - 1
    parts = []
    if stage == 0:
        parts.append(("embedding", table.embedding))
    if table.mtp is not None and stage == (last if split.mtp_stage is None else split.mtp_stage):
        parts.append(("mtp", table.mtp_recomputed.get(split.mtp_mode, table.mtp)))
    if stage == last:
        parts.append(("head", table.head_beside_embedding if folded else table.head))
    return parts


def parse_layout(layout: str, model: ModelSpec, num_stages: int) -> Split:
    """Read the value of Megatron's --pipeline-model-parallel-layout.

    E is the embedding, t a decoder layer, m an MTP block, L the loss, | stands between virtual stages, and (…)*n and
    x*n repeat.
    Raises SpecError when it does not parse, or does not hold every layer once, E first and L last.
    """
    stages = expanded(layout).split("|")
    text = f"layout {printable(layout)!r}"
    bad = set("".join(stages)) - set("EtmL")
    if bad:
        raise SpecError(f"{text}: unknown symbol {sorted(bad)[0]!r}", "use E, t, m, L, | and (…)*n")
    if len(stages) != num_stages:
        raise SpecError(f"{text}: {len(stages)} stages, expected pp·vpp = {num_stages}", "separate virtual stages by |")
    flat = "".join(stages)
    expected = "E" + "t" * model.num_hidden_layers + "m" * model.num_nextn_predict_layers + "L"
    if flat != expected:
        raise SpecError(
            f"{text}: holds {flat.count('E')} E, {flat.count('t')} t, {flat.count('m')} m and {flat.count('L')} L",
            f"the model is E, {model.num_hidden_layers} t, {model.num_nextn_predict_layers} m and L, in this order",
        )
    mtp = [stage for stage, symbols in enumerate(stages) if "m" in symbols]
    if len(mtp) > 1:
        raise SpecError(f"{text}: m on stages {mtp}", "put all m on one virtual stage")
    return Split(tuple(symbols.count("t") for symbols in stages), mtp_stage=mtp[0] if mtp else None)


def splits_from_counts(counts: Sequence[int], model: ModelSpec, placement: Sequence[int]) -> tuple[int, ...]:
    """Layers of each virtual stage from `layers_per_stage`; `placement` has the rank of each virtual stage.

    One entry per virtual stage is taken as given. With one entry per rank, each entry is cut evenly over the rank's
    chunks.
    Raises SpecError when the layers do not add up to the model's.
    """
    if sum(counts) != model.num_hidden_layers:
        raise SpecError(
            f"layers_per_stage: {'+'.join(map(str, counts))} = {sum(counts)} layers, "
            f"{model.name} has {model.num_hidden_layers}",
            "every layer belongs to exactly one stage",
        )
    if len(counts) == len(placement):
        return tuple(counts)
    chunks = [iter(even_counts(count, len(placement) // len(counts))) for count in counts]
    return tuple(next(chunks[rank]) for rank in placement)


def activation_peaks_bytes(order: Schedule, live_bytes: Sequence[float]) -> list[float]:
    """The most bytes that each rank holds in `order`; `live_bytes` has a micro-batch's bytes on each virtual stage."""
    live = np.asarray(live_bytes)
    return [float(np.cumsum(sign * live[stage]).max()) for stage, sign in _held_changes(order)]


@lru_cache(maxsize=8)
def _held_changes(order: Schedule) -> tuple[tuple[npt.NDArray[np.int32], FloatArray], ...]:
    """Virtual stage of each action, per rank, and +1 where an activation is kept or −1 where it is freed."""
    return tuple((actions.stage, HELD_BY_PLACE[actions.kind]) for actions in map(ActionList.of, order.ranks))


def peaks_of_schedule(shape: Shape, schedule: str, live_bytes: Sequence[float]) -> list[float]:
    """The most bytes that each rank holds in a named schedule.

    They are counted over so many micro-batches that the ranks hold all that they ever hold.
    """
    pp, vpp, wanted = int(shape.pp), int(shape.vpp), int(shape.num_microbatches)
    if SCHEDULES[schedule].bound == "one_f_one_b":
        return [held * live for held, live in zip(in_flight_chunks(schedule, pp, 1, wanted), live_bytes, strict=True)]
    few, holds_all = STEADY_ROUNDS[0] * pp, SCHEDULES[schedule].holds_all
    if holds_all and is_long(shape):
        ranks = placement(schedule, pp, vpp)
        return [
            wanted * sum(live for live, at in zip(live_bytes, ranks, strict=True) if at == rank) for rank in range(pp)
        ]
    if is_long(shape):
        few += wanted % pp
    elif wanted % pp or holds_all:
        few = wanted
    return activation_peaks_bytes(build_schedule(schedule, pp, vpp, min(few, wanted)), live_bytes)


OUTSIDE_FIELDS = ("gradient_overlap_fraction", "parameter_overlap_fraction")
"""Fields of a runtime that no price of a stage depends on, only the seconds outside the pipeline."""


@record(slots=False)
class Candidate:
    """One layout: a shape with its prices, a split of the layers, and a schedule."""

    pricing: Pricing
    table: CostTable
    """Prices of the shape."""
    split: Split
    schedule: str
    made_order: Schedule | None = None
    """Action lists that replace those of the named schedule, where an order was made to measure."""
    rank_factors: tuple[float, ...] = ()
    """Factor on the seconds of each rank; empty where all ranks take as long as the table says."""

    @property
    def shape(self) -> Shape:
        """The parallel shape, whose sizes are numbers and not arrays."""
        return self.table.shape

    @property
    def is_folded(self) -> bool:
        """True where one rank has both the first stage and the last."""
        return self.placement[0] == self.placement[-1]

    def parts_beside_layers(self, stage: int) -> list[tuple[str, PartCost]]:
        """`held_parts` of a virtual stage."""
        return held_parts(self.table, self.split, stage, self.is_folded)

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches in a step."""
        return int(self.shape.num_microbatches)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Rank of each virtual stage."""
        if self.made_order is not None:
            return tuple(self.made_order.stage_to_rank)
        return placement(self.schedule, int(self.shape.pp), int(self.shape.vpp))

    @property
    def order_name(self) -> str:
        """Name of the schedule that runs: that of the made order where there is one."""
        return self.made_order.name if self.made_order is not None else self.schedule

    @property
    def named(self) -> Candidate:
        """The candidate in the order of its named schedule, where another one was made to measure."""
        return self if self.made_order is None else replace(self, made_order=None)

    @cached_property
    def order(self) -> Schedule:
        """Action lists of the whole step."""
        if self.made_order is not None:
            return self.made_order
        return build_schedule(self.schedule, int(self.shape.pp), int(self.shape.vpp), self.num_microbatches)

    @cached_property
    def costs(self) -> tuple[PartCost, ...]:
        """Cost of each virtual stage: its layers, and the embedding, head and MTP blocks that it holds."""
        known: dict[tuple[tuple[tuple[LayerKind, Recompute], int], ...], PartCost] = {}
        costs = []
        for stage, modes in enumerate(self.split.modes(self.pricing.model)):
            key = tuple(modes.items())
            if key not in known:
                known[key] = sum_parts(self.table.layers[mode].times(count) for mode, count in key)
            cost = sum((part for _, part in self.parts_beside_layers(stage)), known[key])
            costs.append(slowed(cost, self.slowness(self.placement[stage])) if self.rank_factors else cost)
        return tuple(costs)

    def slowness(self, rank: int) -> float:
        """The factor on a rank's seconds."""
        return self.rank_factors[rank] if self.rank_factors else 1.0

    @cached_property
    def rank_costs(self) -> tuple[PartCost, ...]:
        """Cost of each rank: all of its chunks together."""
        return tuple(by_rank(self.costs, self.placement))

    @cached_property
    def durations(self) -> Durations:
        """Seconds of each virtual stage as the replay takes them."""
        return durations_of(self.pricing, self.table, self.costs, self.placement)

    @cached_property
    def outside(self) -> OutsidePipeline:
        """Seconds of a step outside the pipeline."""
        return outside_pipeline(self.pricing, self.table, self.rank_costs, self.order_name)

    @property
    def hidden_s(self) -> float:
        """Seconds of data-parallel exchanges that nothing shows of, on the rank that exchanges longest."""
        return max(exchanged_dp_s(self.shape, cost) for cost in self.rank_costs) - self.outside.exposed_dp_s

    @cached_property
    def step_s(self) -> float:
        """Seconds of one step: the pipeline's replay and what comes outside it."""
        if self.made_order is not None:
            return self.run().makespan_s + sum(self.outside)
        return self.pipeline_s + sum(self.outside)

    @cached_property
    def pipeline_s(self) -> float:
        """Seconds of the named schedule's pipeline."""
        if self._steps_overlap:
            return self.run().makespan_s
        return pipeline_s(self.shape, self.durations, self.schedule)

    def run(self, exact: bool = True, durations: Durations | None = None) -> Pipeline:
        """The replay of one step, with stages as long as planned or as `durations` says.

        Unless `exact`, only a few rounds are replayed, and all others take as long.
        """
        overlaps = self._steps_overlap
        is_new = exact or overlaps or self.made_order is not None or durations is not None
        known_s = None if is_new else self.pipeline_s
        durations = self.durations if durations is None else durations
        pipeline = run_pipeline(self.shape, durations, self.schedule, exact, self.made_order, known_s)
        return replace(pipeline, makespan_s=pipeline.makespan_s - pipeline.slant_s) if overlaps else pipeline

    @property
    def _steps_overlap(self) -> bool:
        """True where a step begins on the first rank while the last one ends the step before."""
        return self.pricing.runtime.validates_later and SCHEDULES[self.schedule].splits_backward

    def priced_as(self, pricing: Pricing) -> Candidate:
        """The same layout under another pricing, worked out once.

        Where no stage takes another time, its pipeline is not replayed.
        """
        for known in (self, *self._priced_as):
            if known.pricing == pricing:
                return known
        own, other = self.pricing.runtime, pricing.runtime
        kept = own.model_copy(update={name: getattr(other, name) for name in OUTSIDE_FIELDS})
        is_outside = other == kept and pricing == replace(self.pricing, runtime=other)
        if is_outside:
            return self._known_as(pricing, self.table)
        if pricing == self.pricing.recomputing(pricing.selective_modules):
            return self._known_as(pricing, pricing.selective_table(self.table))
        return self._known_as(pricing, pricing.table(self.shape, self.split.priced_modes))

    def _known_as(self, pricing: Pricing, table: CostTable) -> Candidate:
        """The same layout under another pricing whose table is known, which is remembered."""
        again = replace(self, pricing=pricing, table=table)
        if self.made_order is None and again.durations == self.durations:
            vars(again)["pipeline_s"] = self.pipeline_s
        self._priced_as.append(again)
        return again

    @cached_property
    def _priced_as(self) -> list[Candidate]:
        """The results of `priced_as` so far."""
        return []

    @cached_property
    def activation_peaks_bytes(self) -> tuple[float, ...]:
        """The most bytes that micro-batches in flight hold on each rank, in the order of its actions."""
        held = self.durations.activation_bytes
        assert held is not None
        if self.made_order is not None:
            return tuple(activation_peaks_bytes(self.made_order, held))
        return tuple(peaks_of_schedule(self.shape, self.schedule, held))

    @cached_property
    def memory(self) -> tuple[StageBytes, ...]:
        """Peak memory of each rank, in bytes by item."""
        return tuple(
            stage_memory(self.pricing, self.table, cost, peak)
            for cost, peak in zip(self.rank_costs, self.activation_peaks_bytes, strict=True)
        )

    @cached_property
    def excess_bytes(self) -> tuple[float, ...]:
        """Bytes that each rank needs beyond its GPU's memory less headroom; negative where memory is left."""
        capacity = self.pricing.cluster.hardware.memory_bytes - self.pricing.headroom_bytes
        return tuple(stage.total_bytes - capacity for stage in self.memory)

    @property
    def fits(self) -> bool:
        """True where every rank's memory is enough."""
        return max(self.excess_bytes) <= 0

    @property
    def activation_room_bytes(self) -> list[float]:
        """Bytes that each rank has for activations beside all else at its peak."""
        fixed = float(self.table.usable_bytes - fixed_bytes(self.pricing, self.table))
        return [
            fixed - float(cost.static_bytes) - max(float(cost.transient_bytes), float(cost.logits_bytes))
            for cost in self.rank_costs
        ]

    def with_split(self, split: Split) -> Candidate:
        """A candidate of the same shape and schedule with another split."""
        return replace(self, split=split)


def price_together(candidates: Sequence[Candidate], pricings: Sequence[Pricing]) -> None:
    """Work out what `priced_as` will say of each candidate: those of one pricing share a table, which saves most."""
    alike: list[tuple[Pricing, list[Candidate]]] = []
    for candidate, pricing in zip(candidates, pricings, strict=True):
        if pricing == candidate.pricing:
            continue
        group = next((others for known, others in alike if known == pricing), None)
        if group is None:
            alike.append((pricing, group := []))
        group.append(candidate)
    for pricing, group in alike:
        if len(group) > 1:
            modes = dict.fromkeys(mode for one in group for mode in one.split.priced_modes)
            table = pricing.table(Shape.stacked([one.shape for one in group]), tuple(modes))
            for row, one in enumerate(group):
                one._known_as(pricing, replace(table.take(row), shape=one.shape))


def by_rank(costs: Sequence[PartCost], placement: Sequence[int]) -> list[PartCost]:
    """Costs of all chunks of each rank together; `placement` has the rank of each virtual stage."""
    totals: dict[int, PartCost] = {}
    for cost, rank in zip(costs, placement, strict=True):
        totals[rank] = totals[rank] + cost if rank in totals else cost
    return [totals[rank] for rank in range(len(totals))]
