"""What a step takes beside its pipeline: exposed data-parallel exchange, the optimizer, the tail on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from planner.physics.cost import CostTable, PartCost
from planner.physics.pricing import Pricing
from planner.physics.shape import FloatArray, Number, Shape
from planner.schedule.orders import lead_passes, passes_behind
from planner.search.screen import Screen, least_sum
from planner.specs.runtime import RuntimeSpec
from planner.specs.training import Recompute


class Ends(NamedTuple):
    """Seconds of a step outside the pipeline."""

    exposed_dp_s: float
    optimizer_s: float
    tail_s: float


def ends_of(pricing: Pricing, table: CostTable, ranks: Sequence[PartCost], schedule: str) -> Ends:
    """Gradients are reduced behind the last micro-batch's backward, parameters gathered behind the first one's forward.

    A rank has as long for its own as a micro-batch takes through a chunk of each rank before it, there or back
    (`lead_passes`). Of what its chunks exchange, each an equal part, the last one's hides behind its own pass, and all
    of it behind those that follow the first one's (`passes_behind`). Without a pipeline ZeRO-2 reduces gradients in
    every micro-batch, ZeRO-3 gathers the weights twice as well. What is hidden slows down what hides it: a share of
    every exchange shows (`contention_fraction`).
    """
    runtime, shape = pricing.runtime, table.shape
    sharded = sharded_each_time(int(shape.zero_stage), int(shape.pp))
    exposed = 0.0
    if sharded:
        (first,) = ranks
        exchanged = float(first.reduce_s) + (2 * float(first.gather_s) if sharded == 3 else 0.0)
        behind_s = first.total_s if sharded == 3 else first.backward_total_s
        hidden = runtime.fsdp_overlap_fraction * float(behind_s)
        exposed = float(shape.num_microbatches) * max(runtime.contention_fraction * exchanged, exchanged - hidden)
    vpp, passes = int(shape.vpp), passes_behind(schedule, int(shape.pp), int(shape.vpp))
    reduced, led = reduce_overlap_fraction(runtime, shape), lead_passes(schedule, vpp)
    for once, exchange, fraction, way, lead in (
        (sharded < 2, "reduce_s", reduced, "backward_total_s", led),
        (sharded < 3, "gather_s", runtime.parameter_overlap_fraction, "forward_total_s", 1 / vpp),
    ):
        shown = before_s = 0.0
        for rank in ranks if once else ():
            exchanged, passing_s = float(getattr(rank, exchange)), float(getattr(rank, way))
            hidden = float(fraction) * passing_s
            showing = runtime.contention_fraction * exchanged
            shown = max(shown, max(showing, (exchanged - hidden) / vpp, exchanged - passes * hidden) - before_s)
            before_s += lead * passing_s
        exposed += shown
    return Ends(exposed, max(float(rank.optimizer_s) for rank in ranks), float(table.tail_s))


def reduce_overlap_fraction(runtime: RuntimeSpec, shape: Shape) -> Number:
    """Of the window behind the last backward, what hides the reduction; torch's stages wait for that of FSDP."""
    waits = runtime.has_torch_stages & (np.asarray(shape.zero_stage) >= 2) & (np.asarray(shape.pp) > 1)
    return runtime.gradient_overlap_fraction * (1.0 - waits)


def sharded_each_time(zero_stage: int, pp: int) -> int:
    """The ZeRO stage, 2 or 3, whose exchanges every micro-batch makes; 0 where all wait for the last one's."""
    return zero_stage if pp == 1 and zero_stage >= 2 else 0


def with_ends_s(screen: Screen, pipeline_s: FloatArray, base: Recompute, exchanging: Recompute) -> FloatArray:
    """A lower bound of the step from one of the pipeline; layers in mode `exchanging` hide the exchange.

    Of the first rank's exchange shows what nothing hides, and at least a share of all of it: the greater of a bound by
    the one and a bound by the other. The optimizer takes the mean over ranks at least; the tail is the same on all.
    """
    pps = np.asarray(screen.shape.pp, dtype=float)
    bounds = [_with_exchange_s(screen, pipeline_s, base, exchanging, of_part) for of_part in (beyond_s, showing_s)]
    return np.asarray(np.maximum(*bounds) + all_optimizers_s(screen) / pps + screen.pricing.tail_s(screen.shape))


def _with_exchange_s(
    screen: Screen,
    pipeline_s: FloatArray,
    base: Recompute,
    exchanging: Recompute,
    of_part: Callable[[Screen, PartCost], FloatArray],
) -> FloatArray:
    """A lower bound of pipeline and exchange, of which each part on the first rank adds `of_part`.

    With n layers on the first rank the step takes max(pipeline, M·(work − n·t)/(pp − 1)) + x(n) at least, since the
    other ranks hold what the first does not: t is the slowest kind of layer, x(n) the exchange of the n layers that
    have the least of it. Both terms are convex and piecewise linear, so the least is where a piece ends: where the
    maximum's terms meet, where the next kind begins or x becomes positive, or at the fewest layers that the first rank
    may hold: its full chunks where stages interleave, none elsewhere. Unpipelined, n = L.
    """
    pricing, shape, table = screen.pricing, screen.shape, screen.table
    layers, counts = pricing.model.num_hidden_layers, np.array(list(pricing.kind_counts.values()))
    pps, vpps, steps = np.asarray(shape.pp, dtype=float), np.asarray(shape.vpp), np.asarray(shape.num_microbatches)
    each = np.array([of_part(screen, table.layers[kind, exchanging]) for kind in pricing.kind_counts])
    embedding = of_part(screen, table.embedding)
    mtp = () if table.mtp is None else (table.mtp_recomputed.get(exchanging, table.mtp),)
    last = np.sum([of_part(screen, part) for part in (table.head, *mtp)], axis=0)
    alone = counts @ each + embedding + last
    ends_s = embedding + np.where(screen.folded, np.minimum(last, 0.0), 0.0)
    work, slowest = screen.work_s(base) - screen.ends_s, screen.layer_s(base).max(axis=0)
    others = np.maximum(pps - 1, 1)

    def step_s(num_layers: FloatArray) -> FloatArray:
        held_by_others_s = steps * (work - num_layers * slowest) / others
        exposed_s = ends_s + least_sum(each, counts, num_layers)
        return np.asarray(np.maximum(pipeline_s, held_by_others_s) + np.maximum(exposed_s, 0.0))

    fewest = np.maximum(vpps - 1 - screen.folded, 0) * np.ceil(layers / (pps * vpps))
    breaks = [(work - pipeline_s * others / steps) / slowest]
    before, exposed_s = np.zeros_like(work), ends_s
    order = np.argsort(each, axis=0)
    for more_s, count in zip(np.take_along_axis(each, order, axis=0), counts[order], strict=True):
        until_positive = np.where(more_s > 0, -exposed_s / np.where(more_s > 0, more_s, 1.0), count)
        breaks.append(before + np.clip(until_positive, 0, count))
        before, exposed_s = before + count, exposed_s + count * more_s
    piped = np.min([step_s(np.clip(held, fewest, layers)) for held in (fewest, *breaks)], axis=0)
    return np.asarray(np.where(pps == 1, pipeline_s + np.maximum(alone, 0.0), piped))


def beyond_s(screen: Screen, part: PartCost) -> FloatArray:
    """Seconds of data-parallel exchange of one part less what hides it; of all micro-batches where each makes some.

    Where stages interleave, of the chunk that exchanges last, which is no more than is exposed.
    """
    runtime, shape = screen.pricing.runtime, screen.shape
    reduce_s, gather_s = _exchanges_s(screen, part)
    forward, backward = screen.part(part, "forward_total_s"), screen.part(part, "backward_total_s")
    gathered = gather_s - runtime.parameter_overlap_fraction * forward
    once = reduce_s - reduce_overlap_fraction(runtime, shape) * backward + gathered
    gradients = reduce_s - runtime.fsdp_overlap_fraction * backward
    weights = 2 * gather_s + reduce_s - runtime.fsdp_overlap_fraction * (forward + backward)
    return _each_time(shape, once / np.asarray(shape.vpp), gradients, gathered, weights)


def showing_s(screen: Screen, part: PartCost) -> FloatArray:
    """What shows of the data-parallel exchange of one part however much is hidden; of all micro-batches likewise."""
    fraction = screen.pricing.runtime.contention_fraction
    reduce_s, gather_s = (fraction * seconds for seconds in _exchanges_s(screen, part))
    return _each_time(screen.shape, reduce_s + gather_s, reduce_s, gather_s, reduce_s + 2 * gather_s)


def _exchanges_s(screen: Screen, part: PartCost) -> tuple[Number, Number]:
    """Seconds to reduce the gradients of one part, and to gather its weights."""
    expert = screen.part(part, "expert_parameters")
    dense = screen.part(part, "parameters") - expert
    return screen.pricing.reduce_s(dense, expert, screen.shape), screen.pricing.gather_s(dense, expert, screen.shape)


def _each_time(shape: Shape, once: Number, gradients: Number, gathered: Number, weights: Number) -> FloatArray:
    """`once`; without a pipeline M · gradients + gathered under ZeRO-2, M · weights under ZeRO-3."""
    steps, zero, alone = np.asarray(shape.num_microbatches), np.asarray(shape.zero_stage), np.asarray(shape.pp) == 1
    return np.asarray(
        np.select([alone & (zero == 2), alone & (zero == 3)], [steps * gradients + gathered, steps * weights], once)
    )


def all_optimizers_s(screen: Screen) -> FloatArray:
    """Seconds of the optimizer's work on the whole model's shards, one after the other."""
    pricing, table = screen.pricing, screen.table
    counted = [(table.layers[kind, "none"], count) for kind, count in pricing.kind_counts.items()] + [(table.head, 1)]
    total = np.zeros(len(screen.kernel))
    for part, count in counted:
        expert = screen.part(part, "expert_parameters")
        total = total + count * pricing.update_s(screen.part(part, "parameters") - expert, expert, screen.shape)
    return np.asarray(total)
