"""Seconds of a step: those of its pipeline, from the replay of a split in its schedule's order, and those beside it.

Beside the pipeline are exchanges between data-parallel ranks as far as they show, the optimizer, and the work that
every rank does at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.physics.cost import CostTable, PartCost
from planner.physics.memory import sent_bytes
from planner.physics.pricing import Pricing
from planner.record import record
from planner.schedule.actions import Schedule
from planner.schedule.orders import (
    SCHEDULES,
    build_schedule,
    in_flight_microbatches,
    lead_passes,
    passes_behind,
    placement,
)
from planner.schedule.replay import Durations, Timeline, makespan_s, one_f_one_b_waves, replay
from planner.shape import FloatArray, Number, Shape, maximum
from planner.trainers.spec import RuntimeSpec

STEADY_ROUNDS = (3, 4)
"""Two numbers of rounds of pp micro-batches after which a pipeline repeats itself. The search replays these and
extrapolates; the step that is reported is replayed in full."""
SETTLED = 1e-3
"""Largest fraction by which a pipeline that repeats itself may be slower than its busiest rank."""
SETTLED_EARLY = 1e-9
"""The same a round before STEADY_ROUNDS, where most pipelines repeat themselves already: nothing but rounding."""
LONG_ACTIONS = 1 << 20
"""Number of actions beyond which no step is replayed in full: a million actions take seconds and a gigabyte."""
LONG_ROUNDS = 256
"""The most rounds of such a long step that are replayed."""
MOST_ACTIONS = 3 << 19
"""The most actions that are replayed at once, in a few hundred megabytes: pipelines that need more are not priced."""
WIDE = 16
"""Least ranks of plain 1F1B whose passes are timed in waves of all ranks, instead of one by one."""
MOST_STAGES = 2048
"""The most virtual stages of a pipeline that is priced: the seconds that it takes grow with their square."""


def durations_of(pricing: Pricing, table: CostTable, costs: Sequence[PartCost], placement: Sequence[int]) -> Durations:
    """Seconds of every virtual stage as the replay takes them, the trainer's host time per micro-batch included.

    `placement` has the rank of each virtual stage.
    """
    runtime = pricing.runtime
    host_s = runtime.microbatch_overhead_s / 2
    overlaps = runtime.interleaved_p2p_overlap if int(table.shape.vpp) > 1 else runtime.p2p_overlap
    return Durations(
        forward_s=[float(cost.forward_total_s) + host_s for cost in costs],
        input_grad_s=[float(cost.input_grad_total_s) + host_s for cost in costs],
        weight_grad_s=[float(cost.weight_grad_s) for cost in costs],
        p2p_s=_hops_s(pricing, table, placement),
        blocking_p2p=not overlaps,
        activation_bytes=_held_bytes(pricing, table, costs),
    )


def _held_bytes(pricing: Pricing, table: CostTable, costs: Sequence[PartCost]) -> list[float]:
    """Bytes of a micro-batch that each virtual stage holds until its backward, with the hidden states that it sent."""
    sent = float(sent_bytes(pricing.model, table.shape, pricing.runtime))
    held = [float(cost.live_bytes) + sent for cost in costs]
    return [*held[:-1], held[-1] - sent]


def _hops_s(pricing: Pricing, table: CostTable, placement: Sequence[int]) -> float | list[float]:
    """Seconds of a transfer between virtual stages; one number where all boundaries take as long."""
    least_s = float(table.p2p_s)
    if len(placement) == 1:
        return least_s
    hops_s = pricing.exchanges.hops_s(table.shape, placement)
    return least_s if np.all(hops_s == least_s) else [float(hop_s) for hop_s in hops_s]


@record
class Pipeline:
    """Results of the replay of one step; arrays are per rank."""

    num_microbatches: int
    makespan_s: float
    busy_s: FloatArray
    transfer_s: FloatArray
    """Seconds that a rank waits for transfers under way."""
    in_flight_microbatches: FloatArray
    slant_s: float = 0.0
    """Seconds by which the makespan is longer than the most that any rank needs from its first action to its last."""

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the step, over all ranks."""
        return 1 - float(self.busy_s.mean()) / self.makespan_s if self.makespan_s else 0.0

    @property
    def busiest(self) -> int:
        """The rank that decides how long the step is."""
        return int(np.argmax(self.busy_s))


def is_long(shape: Shape) -> bool:
    """True where a step of `shape` has more actions than are replayed in full."""
    return 2 * int(shape.pp) * int(shape.vpp) * int(shape.num_microbatches) > LONG_ACTIONS


def replayed_actions(shape: Shape) -> Number:
    """The number of actions whose replay gives the step of a shape: all, or those of a few rounds."""
    rounds = STEADY_ROUNDS[1] * shape.pp + shape.num_microbatches % shape.pp
    return 2 * shape.pp * shape.vpp * np.minimum(shape.num_microbatches, rounds)


def pipeline_s(shape: Shape, durations: Durations, schedule: str) -> float:
    """Seconds of one step's pipeline: from two short replays where it repeats itself, else from a full one."""
    settled_s = _extrapolated_s(shape, durations, schedule)
    if settled_s is not None:
        return settled_s
    return _makespan_s(shape, schedule, int(shape.num_microbatches), durations)


def _in_waves(shape: Shape, schedule: str, durations: Durations) -> bool:
    """True for plain 1F1B of so many ranks that its replay by waves is the quicker one."""
    is_wide = int(shape.pp) >= WIDE and durations.microbatch_sizes is None
    return is_wide and SCHEDULES[schedule].bound == "one_f_one_b"


def _makespan_s(shape: Shape, schedule: str, num_microbatches: int, durations: Durations) -> float:
    if _in_waves(shape, schedule, durations):
        return float(one_f_one_b_waves(durations, num_microbatches, waits=False).end_s.max())
    return makespan_s(build_schedule(schedule, int(shape.pp), int(shape.vpp), num_microbatches), durations)


def _replayed(shape: Shape, schedule: str, num_microbatches: int, durations: Durations) -> Pipeline:
    pp, vpp = int(shape.pp), int(shape.vpp)
    if not _in_waves(shape, schedule, durations):
        return _pipeline(replay(build_schedule(schedule, pp, vpp, num_microbatches), durations))
    waves = one_f_one_b_waves(durations, num_microbatches)
    makespan_s = float(waves.end_s.max())
    return Pipeline(
        num_microbatches=num_microbatches,
        makespan_s=makespan_s,
        busy_s=waves.busy_s,
        transfer_s=waves.transfer_s,
        in_flight_microbatches=np.array(in_flight_microbatches(schedule, pp, vpp, num_microbatches)),
        slant_s=makespan_s - float((waves.end_s - waves.start_s).max()),
    )


def run_pipeline(
    shape: Shape,
    durations: Durations,
    schedule: str,
    exact: bool = True,
    order: Schedule | None = None,
    known_s: float | None = None,
) -> Pipeline:
    """The replay of one step; unless `exact`, only a few rounds are replayed, and all others take as long.

    Steps of more than `LONG_ACTIONS` actions are never replayed in full. `known_s` is the result of `pipeline_s`, for
    those who know it already.
    """
    if order is not None:
        return _pipeline(replay(order, durations))
    wanted = int(shape.num_microbatches)
    repeats = not _is_replayed_whole(shape) and (is_long(shape) or not exact)
    makespan = None
    if repeats:
        makespan = _extrapolated_s(shape, durations, schedule) if known_s is None else known_s
    if makespan is None:
        return _replayed(shape, schedule, wanted, durations)
    rounds = _replayed(shape, schedule, _short_of(shape, STEADY_ROUNDS[1]), durations)
    times = wanted / rounds.num_microbatches
    busy = rounds.busy_s * times
    # the fill's transfers are no more for a longer step: the time that a rank does not compute is the most it can wait
    transfer = np.minimum(rounds.transfer_s * times, np.maximum(makespan - busy, 0.0))
    return replace(rounds, num_microbatches=wanted, makespan_s=makespan, busy_s=busy, transfer_s=transfer)


def _short_of(shape: Shape, rounds: int) -> int:
    """Number of micro-batches in a step of `rounds` rounds, and an incomplete round at the end if the step has one."""
    pp = int(shape.pp)
    return rounds * pp + int(shape.num_microbatches) % pp


def _is_replayed_whole(shape: Shape) -> bool:
    """True for a short step, for one without a pipeline, and for one with an incomplete round."""
    pp, wanted = int(shape.pp), int(shape.num_microbatches)
    return wanted <= STEADY_ROUNDS[1] * pp or (not is_long(shape) and (pp == 1 or wanted % pp > 0))


def _extrapolated_s(shape: Shape, durations: Durations, schedule: str) -> float | None:
    """Makespan in seconds from short replays, if every further micro-batch adds the same time; else None.

    For a long step, more and more rounds are replayed until this holds, or until `LONG_ROUNDS` are replayed.
    """
    pp, vpp, wanted = int(shape.pp), int(shape.vpp), int(shape.num_microbatches)
    if _is_replayed_whole(shape):
        return None
    ranks, steady, slack = placement(schedule, pp, vpp), STEADY_ROUNDS[1], SETTLED_EARLY
    rounds = STEADY_ROUNDS[0] - 1
    few = _short_of(shape, rounds)
    few_s = _makespan_s(shape, schedule, few, durations)
    while True:
        rounds = rounds + 1 if rounds < steady else 2 * rounds
        more = _short_of(shape, rounds)
        more_s = _makespan_s(shape, schedule, more, durations)
        slope_s = (more_s - few_s) / (more - few)
        settled_s = more_s + slope_s * (wanted - more)
        if _is_settled(slope_s, durations, ranks, slack):
            return settled_s
        if rounds >= steady and not is_long(shape):
            return None
        if rounds >= steady and (rounds >= LONG_ROUNDS or 2 * pp * vpp * _short_of(shape, 2 * rounds) > MOST_ACTIONS):
            return settled_s
        few, few_s, slack = more, more_s, SETTLED


def _is_settled(slope_s: float, durations: Durations, placement: Sequence[int], slack: float) -> bool:
    """True where a further micro-batch adds as much time as the busiest rank needs for it.

    As long as this does not hold, the pace may change. Where ranks wait for transfers, these count as busy time too. A
    rank turns twice per micro-batch, from forward to backward and back. The first and the last rank exchange something
    at one of these turns, the others at both.
    """
    busy = [0.0] * (max(placement) + 1)
    parts = zip(placement, durations.forward_s, durations.input_grad_s, durations.weight_grad_s, strict=True)
    for rank, *seconds in parts:
        busy[rank] += sum(seconds)
    if durations.blocking_p2p and len(placement) == len(busy):
        hops_s = durations.p2p_s
        between = [float(hops_s)] * (len(busy) - 1) if isinstance(hops_s, (int, float)) else list(hops_s)
        busy = [
            seconds + before + after for seconds, before, after in zip(busy, [0, *between], [*between, 0], strict=True)
        ]
    return max(busy) * (1 - 1e-9) <= slope_s <= max(busy) * (1 + slack)


def _pipeline(timeline: Timeline) -> Pipeline:
    return Pipeline(
        num_microbatches=timeline.schedule.num_microbatches,
        makespan_s=timeline.makespan_s,
        busy_s=timeline.busy_s,
        transfer_s=timeline.transfer_s,
        in_flight_microbatches=timeline.peak_in_flight_microbatches,
        slant_s=timeline.makespan_s - float(timeline.span_s.max()),
    )


class OutsidePipeline(NamedTuple):
    """Seconds of a step outside the pipeline."""

    exposed_dp_s: float
    optimizer_s: float
    tail_s: float


OUTSIDE = {
    "forward_s": "forward_total_s", "input_grad_s": "backward_total_s",
    "reduce_s": "reduce_s", "gather_s": "gather_s", "optimizer_s": "optimizer_s",
}  # fmt: skip
"""Seconds of a rank that decide what it takes outside the pipeline, by the field that holds them."""


def outside_pipeline(pricing: Pricing, table: CostTable, ranks: Sequence[PartCost], schedule: str) -> OutsidePipeline:
    """`outside_seconds` of one split."""
    columns = {name: np.array([getattr(rank, held) for rank in ranks]) for name, held in OUTSIDE.items()}
    return OutsidePipeline(*map(float, outside_seconds(pricing, table, PartCost(**columns), schedule)))


def outside_seconds(
    pricing: Pricing, table: CostTable, ranks: PartCost, schedule: str
) -> tuple[Number, Number, Number]:
    """Seconds of the exposed data-parallel exchange, of the optimizer, and of the tail on every rank.

    Gradients are reduced behind the last micro-batch's backward, parameters gathered behind the first one's forward.
    The costs are arrays, whose first axis is of ranks; of a pass only its seconds count (`OUTSIDE`).

    A rank has as much time for this as a micro-batch takes through a chunk of each rank before it, there or back
    (`lead_passes`). Each of its chunks exchanges an equal part. The part of the last chunk can hide behind this chunk's
    own pass, and all parts together behind the passes that follow the first chunk's (`passes_behind`). Without a
    pipeline, ZeRO-2 reduces gradients in every micro-batch, and ZeRO-3 also gathers the weights twice. A hidden
    exchange slows down the passes that hide it: a share of every exchange is exposed (`contention_fraction`).
    """
    runtime, shape = pricing.runtime, table.shape
    sharded = sharded_each_time(int(shape.zero_stage), int(shape.pp))
    exposed: Number = 0.0
    if sharded:
        exchanged = _each_time_s(ranks, sharded)
        hidden = each_time_overlap_fraction(runtime, shape) * (
            ranks.total_s if sharded == 3 else ranks.backward_total_s
        )
        (shown_s,) = np.maximum(runtime.contention_fraction * exchanged, exchanged - hidden)
        exposed = float(shape.num_microbatches) * shown_s
    vpp = int(shape.vpp)
    passes, led = passes_behind(schedule, int(shape.pp), vpp), lead_passes(schedule, vpp)

    def shown(exchanged: Number, passing_s: Number, fraction: float, lead: float) -> Number:
        """Seconds of one exchange that show on the rank where most do."""
        hidden = fraction * passing_s
        before_s = np.cumsum(lead * passing_s, axis=0) - lead * passing_s
        own = np.maximum((exchanged - hidden) / vpp, exchanged - passes * hidden)
        own = np.maximum(own, runtime.contention_fraction * exchanged) - before_s
        return np.asarray(np.maximum(own.max(axis=0), 0.0))

    if sharded < 2:
        fraction = float(reduce_overlap_fraction(runtime, shape))
        exposed = exposed + shown(ranks.reduce_s, ranks.backward_total_s, fraction, led)
    if sharded < 3:
        exposed = exposed + shown(ranks.gather_s, ranks.forward_total_s, runtime.parameter_overlap_fraction, 1 / vpp)
    return exposed, np.max(ranks.optimizer_s, axis=0), table.tail_s


def _each_time_s(rank: PartCost, sharded: int) -> Number:
    """Seconds of a rank's exchanges in every micro-batch, hidden or not."""
    return rank.reduce_s + (2 * rank.gather_s if sharded == 3 else 0.0)


def exchanged_dp_s(shape: Shape, rank: PartCost) -> float:
    """Seconds of all data-parallel exchanges of a rank in a step, hidden or not."""
    sharded = sharded_each_time(int(shape.zero_stage), int(shape.pp))
    once_s = (sharded < 2) * float(rank.reduce_s) + (sharded < 3) * float(rank.gather_s)
    return once_s + (float(shape.num_microbatches) * float(_each_time_s(rank, sharded)) if sharded else 0.0)


def reduce_overlap_fraction(runtime: RuntimeSpec, shape: Shape) -> Number:
    """Share of the window behind the last backward that hides the reduction; torch's stages wait for that of FSDP."""
    waits = runtime.has_torch_stages & (shape.zero_stage >= 2) & (shape.pp > 1)
    return runtime.gradient_overlap_fraction * (1.0 - waits)


def each_time_overlap_fraction(runtime: RuntimeSpec, shape: Shape) -> float:
    """Share of a micro-batch's compute that hides its exchanges: ZeRO-2 reduces gradients as ZeRO-1 does."""
    return runtime.fsdp_overlap_fraction if int(shape.zero_stage) == 3 else runtime.gradient_overlap_fraction


def sharded_each_time(zero_stage: int, pp: int) -> int:
    """ZeRO stage, 2 or 3, whose exchanges run in every micro-batch; 0 where they run once, in the last micro-batch."""
    return zero_stage if pp == 1 and zero_stage >= 2 else 0


PACE = 0.5
"""Share of the GPU's peak at which a stage's mean micro-batch is taken to run, where its layers are not priced yet."""


def groups_pay(pricing: Pricing, of_all: Shape, grouped: Shape) -> npt.NDArray[np.bool_]:
    """True where less of a sharded optimizer's exchanges shows in groups of ranks than among all of them.

    Weights and FLOPs are those of a mean stage, which computes at `PACE`.
    """
    model, training, runtime = pricing.model, pricing.training, pricing.runtime
    totals, expert = pricing.totals, 0.0
    if model.moe is not None:
        idle_fraction = 1 - model.moe.num_experts_per_tok / (model.moe.num_experts + model.moe.num_zero_experts)
        expert = (totals.num_parameters - totals.num_active_parameters) / max(idle_fraction, 1e-9)
    hardware = pricing.cluster.hardware
    peak = hardware.peak_flops(training.dtype) or hardware.peak_flops("bf16")
    assert peak is not None
    forward_s = totals.model_flops_per_token / 3 * of_all.tokens / (of_all.tp * of_all.pp) / (PACE * peak)
    windows = reduce_overlap_fraction(runtime, of_all) * 2 * forward_s, runtime.parameter_overlap_fraction * forward_s

    def shown_s(shape: Shape) -> Number:
        experts = expert / (shape.ep * shape.etp * shape.pp)
        held = (totals.num_parameters - expert) / (shape.tp * shape.pp) + experts
        stage = PartCost(parameters=held, expert_parameters=experts)
        if training.adapters is not None:
            adapters = totals.num_trained_parameters / (shape.tp * shape.pp)
            frozen = {"frozen_parameters": held, "frozen_expert_parameters": experts}
            stage = replace(stage, parameters=held + adapters, **frozen)
        exchanges_s = pricing.exchanges.part_s(stage, shape)
        return sum(
            maximum(runtime.contention_fraction * exchange_s, exchange_s - hidden_s)
            for exchange_s, hidden_s in zip(exchanges_s, windows, strict=True)
        )

    return np.asarray(shown_s(grouped) < shown_s(of_all))
