"""The parts of a step: operators and collectives inside its passes and beside them.

The operator list says the order of the exchanges inside a stage's passes, the computing between them, and the seconds
of each, from which follows how much of each shows. Whatever hides more or less of all of them at once (a host that is
late, another micro-batch, late ranks) is shared out, so that what shows adds up to the prices of each part of the
stage. Beside and behind the passes every rank reduces gradients and runs the optimizer. The compute seconds are cut
into products, attention, memory-bound kernels, recomputing and the rest.

Examples in padded batches come last: the mean of their steps, and what packing the same examples would take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from typing import Literal, NamedTuple

import numpy as np

from planner.answer import Plan
from planner.layout.candidate import Candidate
from planner.layout.price import reprice
from planner.layout.seconds import reduce_overlap_fraction, sharded_each_time
from planner.physics.compute import operator_seconds
from planner.physics.cost import PartCost
from planner.physics.operators import Collective, Item, Operator, operators_of
from planner.physics.passes import COMM_GROUPS, lateness
from planner.physics.pricing import Pricing
from planner.record import record
from planner.schedule.replay import Timeline
from planner.specs.model import LayerKind
from planner.specs.training import Recompute
from planner.trainers.documents import example_lengths, largest_normal, longest_of, mean_length, padding_fraction

LATE = {
    "tp": "wait for the latest rank",
    "cp": "wait for the latest rank",
    "ep": "slower beside another micro-batch",
}
"""Reasons why a group's collectives take longer than their own seconds."""
KINDS = ("F", "B", "I")
"""The kinds of actions that exchange something; weight gradients do not."""

Together = Literal["", "part", "pass"]


@record
class PassExchange:
    """A collective of a pass, or all collectives of a group in a part of it."""

    group: str
    """One of COMM_GROUPS."""
    name: str
    part: str
    """`layer 17`, `embedding`, `mtp` or `head`; empty for a whole pass."""
    exposed_s: float
    """Seconds for which the rank does nothing else, as the plan's breakdown counts them."""
    hidden_s: float
    """Seconds that it runs beside computing."""
    leads: bool = False
    """True where it hides behind what follows it, else behind what precedes it."""
    start_s: float = 0.0
    """Seconds from the start of the pass to the time from which it shows."""


Passes = Mapping[tuple[int, str], tuple[PassExchange, ...]]
"""Collectives of one micro-batch, by virtual stage and kind of action, in their order."""


@record
class _Beat:
    """Seconds of computing, and the collective behind them."""

    compute_s: float
    exchange: PassExchange | None = None


def exchanges_of_passes(candidate: Candidate, together: Together = "") -> Passes:
    """The exchanges of each virtual stage's passes; `together` makes one of all those of a group in a part or pass."""
    beats_of, passes = Beats(candidate), {}
    for stage, rank in enumerate(candidate.placement):
        parts = list(beats_of.parts(stage))
        for kind in KINDS:
            beats = [beats_of.of(part, kind) for part in (parts if kind == "F" else parts[::-1])]
            if together == "part":
                beats = [_merged(part) for part in beats]
            flat = [beat for part in beats for beat in part]
            flat = _merged(flat, "") if together == "pass" else flat
            passes[stage, kind] = tuple(_timed(flat, candidate.slowness(rank)))
    return passes


def _merged(beats: Sequence[_Beat], part: str | None = None) -> list[_Beat]:
    """All computing, and behind it one exchange for each group."""
    exchanges = [beat.exchange for beat in beats if beat.exchange is not None]
    merged = [_Beat(sum(beat.compute_s for beat in beats))]
    for group in COMM_GROUPS:
        own = [exchange for exchange in exchanges if exchange.group == group]
        if own:
            exposed_s, hidden_s = sum(one.exposed_s for one in own), sum(one.hidden_s for one in own)
            name = f"{len(own)} exchanges" if len(own) > 1 else own[0].name
            where = own[0].part if part is None else part
            merged.append(_Beat(0.0, PassExchange(group, name, where, exposed_s, hidden_s)))
    return merged


def _timed(beats: Iterable[_Beat], factor: float) -> Iterator[PassExchange]:
    """The exchanges one after the other, on a rank that takes `factor` times as long as the prices say."""
    time_s = 0.0
    for beat in beats:
        time_s += factor * beat.compute_s
        if beat.exchange is not None:
            exposed_s, hidden_s = factor * beat.exchange.exposed_s, factor * beat.exchange.hidden_s
            yield replace(beat.exchange, start_s=time_s, exposed_s=exposed_s, hidden_s=hidden_s)
            time_s += exposed_s


class PassPart(NamedTuple):
    """A part of a virtual stage: a layer, or what comes before or after all layers."""

    name: str
    layer: LayerKind | None
    mode: Recompute
    cost: PartCost


class Beats:
    """Computing, and the collective behind it, of all parts of a candidate's stages; like layers share them."""

    def __init__(self, candidate: Candidate) -> None:
        self._candidate, self._pricing, self._shape = candidate, candidate.pricing, candidate.shape
        self._known: dict[tuple[object, ...], list[_Beat]] = {}

    def parts(self, stage: int) -> Iterator[PassPart]:
        """The parts of a virtual stage, front to back."""
        candidate, model = self._candidate, self._pricing.model
        table, split = candidate.table, candidate.split
        held = dict(candidate.parts_beside_layers(stage))
        if "embedding" in held:
            yield PassPart("embedding", None, "none", held["embedding"])
        for number, layer, mode in split.layer_modes(model, stage):
            yield PassPart(f"layer {number}", layer, mode, table.layers[layer, mode])
        for name in ("mtp", "head"):
            if name in held:
                mode = split.mtp_mode if name == "mtp" and self._pricing.runtime.recomputes_mtp else "none"
                yield PassPart(name, None, mode, held[name])

    def of(self, part: PassPart, kind: str) -> list[_Beat]:
        """The beats of a part in one kind of action."""
        key = (part.layer or part.name, part.mode, kind)
        if key not in self._known:
            self._known[key] = _priced(part.cost, kind, list(self._raw(part, kind)))
        return [
            beat if beat.exchange is None else replace(beat, exchange=replace(beat.exchange, part=part.name))
            for beat in self._known[key]
        ]

    def _raw(self, part: PassPart, kind: str) -> Iterator[_Beat]:
        """Each operator and exchange of a part in an action, as long as if it were alone."""
        items, replayed = self.items(part)
        if kind == "F":
            yield from self._pass(items, items, "forward", ("forward_s",))
            return
        yield from self._pass(replayed, replayed, "forward", ("forward_s",), replayed=True)
        runs = [list(run) for _, run in groupby(items, lambda item: isinstance(item, Collective))]
        # an exchange behind products in the forward is before them in the backward; neighbours keep their order
        backward = [item for run in runs[::-1] for item in (run if isinstance(run[0], Collective) else run[::-1])]
        gradients = ("dgrad_s",) if kind == "I" else ("dgrad_s", "wgrad_s")
        yield from self._pass(items, backward, "backward", gradients)

    def items(self, part: PassPart) -> tuple[Sequence[Item], Sequence[Item]]:
        """The operators and exchanges of a part, and those whose forward runs again in the backward."""
        pricing, shape = self._pricing, self._shape
        model = pricing.model
        if part.name == "embedding":
            return pricing.embedding_items(shape), ()
        if part.name == "head":
            return pricing.head_items(shape, model.tie_word_embeddings), ()
        kinds = model.predicting_layers if part.layer is None else (part.layer,)
        layer = tuple(chain.from_iterable(pricing.layer(kind, shape) for kind in kinds))
        replayed = pricing.replayed_items(layer, part.mode)
        if part.layer is not None:
            return layer, replayed
        blocks = model.num_nextn_predict_layers
        own = pricing.lookup_items(shape) if int(shape.pp) > 1 else ()
        return (*own, *pricing.mtp_block(shape) * blocks), [*replayed] * blocks

    def _pass(
        self, items: Sequence[Item], ordered: Sequence[Item], way: str, gradients: Sequence[str], replayed: bool = False
    ) -> Iterator[_Beat]:
        """One way through `items`, which run in the order of `ordered`."""
        pricing, compute_s = self._pricing, 0.0
        hardware, dtype = pricing.cluster.hardware, pricing.training.dtype
        priced = {id(one.exchange): one for one in pricing.passes.each_exchange(items, self._shape, replayed)}
        for index, item in enumerate(ordered):
            if isinstance(item, Operator):
                passes = operator_seconds(item, hardware, dtype, pricing.runtime)
                compute_s += float(sum(getattr(passes, name) for name in gradients))
            elif (one := priced[id(item)]).way == way and float(one.exchanged_s) > 0:
                hidden_s = float(one.hidden_s)
                leads = any(beside in ordered[index:] for beside in item.beside)
                exposed_s = float(one.exchanged_s) - hidden_s
                yield _Beat(compute_s, PassExchange(one.group, item.name, "", exposed_s, hidden_s, leads))
                compute_s = 0.0
        yield _Beat(compute_s)


def _priced(cost: PartCost, kind: str, beats: Sequence[_Beat]) -> list[_Beat]:
    """The beats, as long together as the part's price says for their computing and for each group's exchanges."""
    computing = {"F": ("forward_s",), "I": ("input_grad_s",), "B": ("input_grad_s", "weight_grad_s")}[kind]
    compute_s, alone_s = sum(float(getattr(cost, name)) for name in computing), sum(beat.compute_s for beat in beats)
    late, shares = [], {}
    for group in COMM_GROUPS:
        priced_s = float(cost.exchanges_s[group][kind != "F"])
        shown_s = sum(beat.exchange.exposed_s for beat in beats if beat.exchange and beat.exchange.group == group)
        shares[group] = min(1.0, priced_s / shown_s) if shown_s else 1.0
        if priced_s > shown_s * (1 + 1e-12):
            late.append(_Beat(0.0, PassExchange(group, LATE[group], "", priced_s - shown_s, 0.0)))
    pace = compute_s / alone_s if alone_s else 1.0
    return [*(_paced(beat, pace, shares) for beat in beats), *late]


def _paced(beat: _Beat, pace: float, shares: Mapping[str, float]) -> _Beat:
    exchange = beat.exchange
    if exchange is not None:
        exposed_s = shares[exchange.group] * exchange.exposed_s
        hidden_s = exchange.hidden_s + exchange.exposed_s - exposed_s
        exchange = replace(exchange, exposed_s=exposed_s, hidden_s=hidden_s)
    return _Beat(pace * beat.compute_s, exchange)


class Span(NamedTuple):
    """An activity of a rank with its begin and end."""

    name: str
    start_s: float
    end_s: float


def beside_pipeline(priced: Candidate, timeline: Timeline, rank: int) -> Iterator[Span]:
    """The spans of a rank, to the end of the plan's step.

    "exposed exchanges" is as long as the plan says; gathers behind the next step's forward are not drawn otherwise.
    """
    cost, outside = priced.rank_costs[rank], priced.outside
    exchanged_s = timeline.makespan_s + outside.exposed_dp_s
    updated_s = exchanged_s + outside.optimizer_s
    reductions = _reductions(priced, timeline, rank, float(cost.reduce_s), exchanged_s)
    spans = [
        *reductions,
        Span("exposed exchanges", max([timeline.makespan_s, *(one.end_s for one in reductions)]), exchanged_s),
        Span("optimizer", exchanged_s, exchanged_s + float(cost.optimizer_s)),
        Span("gradient norm and host", updated_s, updated_s + outside.tail_s),
    ]
    yield from (span for span in spans if span.start_s < span.end_s)


def _reductions(priced: Candidate, timeline: Timeline, rank: int, reduce_s: float, exchanged_s: float) -> list[Span]:
    """Gradients of each chunk reduced behind its last backward, or behind all of them where ZeRO has them so.

    One after the other, as soon as they may be, and early enough for all to be done by `exchanged_s`.
    """
    shape = priced.table.shape
    each_time = sharded_each_time(int(shape.zero_stage), int(shape.pp))
    fraction = float(reduce_overlap_fraction(priced.pricing.runtime, shape))
    passes = zip(priced.order.ranks[rank], timeline.start_s[rank], timeline.end_s[rank], strict=True)
    last = {
        (action.stage, action.microbatch if each_time else 0): (float(end), float(start))
        for action, start, end in passes
        if action.kind != "F"
    }
    ready = [end - fraction * (end - start) for end, start in sorted(last.values())]
    length_s = reduce_s / len({stage for stage, _ in last})
    starts, free_s = [], 0.0
    for index, at_s in enumerate(ready):
        latest_s = exchanged_s - (len(ready) - index) * length_s
        starts.append(min(max(free_s, at_s), latest_s))
        free_s = starts[-1] + length_s
    return [Span("reduce gradients", start, start + length_s) for start in starts]


_NUM_KNOTS = 7
"""Lengths at which a layout is priced; steps are straight between them."""


class Examples(NamedTuple):
    """A run of examples, each seen once an epoch."""

    num_steps: float
    padding_fraction: float
    """Share of the computed tokens that is padding."""
    longer_factor: float
    """Seconds of all steps over those of as many full sequences as the examples fill without padding."""


def run_of_examples(plan: Plan) -> Examples | None:
    """The steps of a run whose training states its examples or pads them; None for any other."""
    training, layout = plan.training, plan.best.parallelism
    if training.tokens is None or (training.examples is None and training.batching == "packed"):
        return None
    lengths = example_lengths(training)
    if training.batching == "packed":
        return Examples(training.tokens / training.tokens_per_step, 0.0, 1.0)
    mean = mean_length(lengths)
    num_steps = training.tokens / mean / training.global_batch_size
    full_steps = training.tokens / training.tokens_per_step
    longer = num_steps * mean_step_s(plan) / (full_steps * plan.best.step.step_s)
    return Examples(num_steps, padding_fraction(lengths, layout.micro_batch_size), longer)


def mean_step_s(plan: Plan) -> float:
    """The expected seconds of a step whose micro-batches are as long as the longest of the examples drawn for them.

    Ranks that shard weights without a pipeline wait for each other in every micro-batch, so that the longest example of
    all ranks' decides. Others wait at the step's end, for the rank whose lengths add up to most: the mean, and the
    expected largest of as many normal sums.
    """
    training, layout = plan.training, plan.best.parallelism
    lengths = example_lengths(training)
    knots = np.unique(np.geomspace(lengths[0][0], lengths[-1][0], _NUM_KNOTS).round().astype(int))
    priced_s = [_step_s(plan, int(length)) for length in knots]
    waits_in_each = layout.zero_stage == 3 and layout.pp == 1
    count = layout.micro_batch_size * (layout.dp if waits_in_each else 1)
    drawn = longest_of(lengths, count)
    steps_s = np.interp([length for length, _ in drawn], knots, priced_s)
    chances = np.array([chance for _, chance in drawn])
    mean_s = float(steps_s @ chances)
    if waits_in_each or layout.dp == 1:
        return mean_s
    deviation_s = float(np.sqrt(np.maximum((steps_s - mean_s) ** 2 @ chances, 0.0) / layout.num_microbatches))
    late_s = deviation_s * float(largest_normal(float(layout.dp)))
    return min(mean_s + late_s, float(steps_s.max()))


def _step_s(plan: Plan, seq_length: int) -> float:
    """Seconds of a step of the plan's layout whose sequences are all so long."""
    if seq_length == plan.training.seq_length:
        return plan.best.step.step_s
    training = plan.training.model_copy(update={"seq_length": seq_length})
    return reprice(plan.model_copy(update={"training": training}), plan.best).step_s


TERMS = {"gemm": "products_s", "attention": "attention_s", "elementwise": "memory_bound_s", "scan": "memory_bound_s"}
"""The term that each kind of operator counts to."""


def compute_terms(candidate: Candidate, rank: int) -> dict[str, float]:
    """Seconds of a step that a rank computes, by term; they add up to its compute.

    Layers count as the GPU takes them if it never waits for the host. `other_compute_s` has the rest: what the GPU
    waits for its host, casts, accumulation.
    """
    pricing, table, split = candidate.pricing, candidate.table, candidate.split
    factor = candidate.num_microbatches * candidate.slowness(rank)
    terms = dict.fromkeys((*TERMS.values(), "recompute_s", "ends_s"), 0.0)
    for stage, modes in enumerate(split.modes(pricing.model)):
        if candidate.placement[stage] != rank:
            continue
        for _, part in candidate.parts_beside_layers(stage):
            terms["ends_s"] += factor * _computed_s(part)
        for (kind, mode), count in modes.items():
            repeated_s = float(table.layers[kind, mode].input_grad_s - table.layers[kind, "none"].input_grad_s)
            terms["recompute_s"] += factor * count * repeated_s
            for term, seconds in _by_term(pricing, pricing.layer(kind, candidate.shape)).items():
                terms[term] += factor * count * seconds
    compute_s = candidate.num_microbatches * _computed_s(candidate.rank_costs[rank])
    return terms | {"other_compute_s": compute_s - sum(terms.values())}


def compute_by_kernels(candidate: Candidate, rank: int) -> dict[str, float]:
    """Seconds of a step that a rank computes, by the kernels that run; they add up to its compute.

    Unlike `compute_terms`, products that are recomputed, or of the ends of the model, count as products. Copies, casts
    and accumulation are `memory_bound_s`; `host_s` is what the GPU waits for its host.
    """
    beats, known = Beats(candidate), dict[object, dict[str, float]]()
    factor = candidate.num_microbatches * candidate.slowness(rank)
    terms = dict.fromkeys((*TERMS.values(), "host_s"), 0.0)
    for stage, holder in enumerate(candidate.placement):
        for part in beats.parts(stage) if holder == rank else ():
            key = (part.layer or part.name, part.mode)
            if key not in known:
                known[key] = _by_kernels(candidate, part, *beats.items(part))
            for term, seconds in known[key].items():
                terms[term] += factor * seconds
    return terms


def _by_kernels(
    candidate: Candidate, part: PassPart, items: Sequence[Item], replayed: Sequence[Item]
) -> dict[str, float]:
    """Seconds of one micro-batch through a part, forward and backward, by kernels."""
    pricing, shape = candidate.pricing, candidate.shape
    terms = _by_term(pricing, items)
    for term, seconds in _by_term(pricing, replayed, backward=False).items():
        terms[term] += seconds
    priced, again = pricing.passes.seconds(items, shape), pricing.passes.seconds(replayed, shape, replayed=True)
    priced_s = sum(float(priced[name]) for name in _COMPUTES) + (float(again["forward_s"]) if replayed else 0.0)
    late_s = max(0.0, min(priced_s, _computed_s(part.cost)) - sum(terms.values()))
    terms["memory_bound_s"] += _computed_s(part.cost) - late_s - sum(terms.values())
    return terms | {"host_s": late_s}


_COMPUTES = ("forward_s", "input_grad_s", "weight_grad_s")


def _computed_s(cost: PartCost) -> float:
    return float(cost.forward_s + cost.input_grad_s + cost.weight_grad_s)


def _by_term(pricing: Pricing, items: Sequence[Item], backward: bool = True) -> dict[str, float]:
    """Seconds of one micro-batch through some operators, by their kind."""
    hardware, training, terms = pricing.cluster.hardware, pricing.training, dict.fromkeys(TERMS.values(), 0.0)
    slow = lateness(training, pricing.cluster)
    for op in operators_of(items):
        passes = operator_seconds(op, hardware, training.dtype, pricing.runtime)
        terms[TERMS[op.kind]] += slow * float(sum(passes) if backward else passes.forward_s)
    return terms
