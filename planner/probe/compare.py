"""Predicted beside measured: seconds and bytes of stages, exchanges and the pipeline; and checks of a finished run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Literal

from planner.answer import Plan, StagePlan
from planner.layout.candidate import Candidate
from planner.physics import compute, kernels
from planner.physics.communication import Kind, collective_s, p2p_s
from planner.physics.operators import BF16
from planner.probe.plan_slice import chunk_numbers, planned_seconds, replay_durations
from planner.probe.result import (
    ComparedQuantity,
    ProbeCheck,
    ProbedExchange,
    ProbedMemory,
    RankResult,
    shown,
    slowest_exchanges,
    stride_of,
)
from planner.probe.run import Place, ProbeRun, message_of
from planner.probe.run_price import knows_peak, repriced, static_bytes, without_exchanges
from planner.schedule.replay import Durations, makespan_s, replay
from planner.specs.cluster import ClusterSpec


def by_stage(run: ProbeRun, ranks: Sequence[RankResult]) -> list[RankResult]:
    """One rank of each pipeline stage."""
    return [next(r for r in ranks if r.stage == stage) for stage in range(run.pp)]


def span_s(ranks: Sequence[RankResult]) -> float:
    """Seconds from the start of the step to the end of the last action of any rank."""
    return max(rank.actions[-1].end_s for rank in ranks)


def waited_s(rank: RankResult) -> float:
    """Seconds in which the rank was free and its next action had not received what it works on."""
    return sum(timed.start_s - timed.ready_s for timed in rank.actions)


def bubble_fraction(ranks: Sequence[RankResult]) -> float:
    """1 − mean busy seconds / span, as `Timeline.bubble_fraction`."""
    return 1 - sum(rank.busy_s for rank in ranks) / len(ranks) / span_s(ranks)


def in_flight(run: ProbeRun) -> list[int]:
    """The largest number of activations that each pipeline rank holds at once, according to its order."""
    equal_s = [1.0] * len(run.chunks)
    return [int(count) for count in replay(run.order, Durations(equal_s, equal_s, equal_s)).peak_in_flight_chunks]


def run_checks(run: ProbeRun, ranks: Sequence[RankResult]) -> list[ProbeCheck]:
    """Checks of what a finished run proves. A message of the wrong shape or a deadlock would have ended the run."""
    as_listed = [tuple(timed.action for timed in rank.actions) == run.ranks[rank.stage] for rank in ranks]
    num_messages = sum(message_of(run.order, action) is not None for actions in run.order.ranks for action in actions)
    planned = in_flight(run)
    measured = [max(rank.peak_in_flight_chunks for rank in ranks if rank.stage == stage) for stage in range(run.pp)]
    rows = (
        ("order", all(as_listed), f"{sum(map(len, run.ranks))} actions without a deadlock"),
        ("exchanges", True, f"{num_messages} messages, each of the planned shape"),
        ("in flight", measured == planned, f"{measured} chunks at most, planned {planned}"),
    )
    checks = [
        ProbeCheck(name=name, passed=passed, detail=detail)
        for name, passed, detail in rows
        if num_messages or name != "exchanges"
    ]
    if not run.check:
        checks.append(check_finite(ranks))
    for name in dict.fromkeys(check.name for rank in ranks for check in rank.checks):
        same = [check for rank in ranks for check in rank.checks if check.name == name]
        worst = next((check for check in same if not check.passed), same[0])
        checks.append(worst)
    return checks


def check_finite(ranks: Sequence[RankResult]) -> ProbeCheck:
    """A check that losses and gradient norms are numbers, for runs whose losses are compared with nothing."""
    passed = all(None not in (step.loss, step.gradient_norm) for rank in ranks for step in rank.steps)
    last = ranks[-1].steps[-1]
    detail = f"loss {shown(last.loss, 4)}, gradient norm {shown(last.gradient_norm, 4)}"
    return ProbeCheck(name="finite", passed=passed, detail=detail)


def replayed_step_s(eager: Plan, stages: Sequence[RankResult]) -> float:
    """Seconds of the plan's whole step, changed by the difference that measured compute makes to its pipeline."""
    priced = repriced(eager)
    measured_s = priced.run(durations=durations_alone(priced, stages)).makespan_s
    return eager.step.step_s + measured_s - priced.run().makespan_s


def durations_alone(priced: Candidate, stages: Sequence[RankResult]) -> Durations:
    """Durations of every virtual stage: compute as measured for stages alone, exchanges and host time as planned."""
    planned = priced.durations
    seconds = []
    for stage, ((rank, index), cost) in enumerate(zip(chunk_numbers(priced.placement), priced.costs, strict=True)):
        chunk = stages[rank].chunks[index]
        weight_grad_s = min(chunk.weight_grad_s or 0.0, chunk.backward_s)
        forward_s = chunk.forward_s + planned.forward_s[stage] - float(cost.forward_s)
        beside_s = planned.input_grad_s[stage] - float(cost.input_grad_s)
        seconds.append((forward_s, chunk.backward_s - weight_grad_s + beside_s, weight_grad_s))
    return replace(replay_durations(seconds), p2p_s=planned.p2p_s, blocking_p2p=planned.blocking_p2p)


KINDS: dict[str, Kind] = {"all-gather": "all_gather", "all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter"}
OPTIMIZER_KERNELS = 9
"""Kernels of an optimizer step on parameters of one kind: norm, scale, update, cast, zeros, and four of one number."""
Unit = Literal["s", "bytes", "fraction", "count"]


def compared(
    name: str,
    unit: Unit,
    predicted: float,
    measured: float,
    tolerance_fraction: float | None,
    stage: int | None = None,
    least: float | None = None,
) -> ComparedQuantity:
    """Judge a quantity, or only show it if there is no tolerance. All agrees from `least`, without waits, to twice the
    waits that are part of `predicted`."""
    lower = predicted if least is None else min(least, predicted)
    agrees = None
    if tolerance_fraction is not None:
        agrees = (1 - tolerance_fraction) * lower <= measured <= (1 + tolerance_fraction) * (2 * predicted - lower)
    return ComparedQuantity(
        name=name, stage=stage, unit=unit, predicted=predicted, measured=measured, agrees=agrees,
        least=lower if lower < predicted else None,
    )  # fmt: skip


def compare_exchanges(cluster: ClusterSpec, run: ProbeRun, ranks: Sequence[RankResult]) -> list[ComparedQuantity]:
    """Each kind of exchange on its slowest rank, beside the seconds that the cluster's links need for its bytes. It is
    shown and not judged.

    Experts' gradients are left out, because their ranks are not evenly spaced.
    """
    pairs = [(exchange, planned_s(cluster, run, exchange)) for exchange in slowest_exchanges(ranks)]
    return [
        compared(exchange.name, "s", planned, exchange.seconds, None)
        for exchange, planned in pairs
        if planned is not None
    ]


def planned_s(cluster: ClusterSpec, run: ProbeRun, exchange: ProbedExchange) -> float | None:
    """Seconds that the cluster's links need for an exchange; None for experts' gradients, whose ranks are not evenly
    spaced."""
    stride = stride_of(exchange, run)
    if stride is None:
        return None
    return float(collective_s(KINDS[exchange.name.split()[-1]], exchange.num_bytes, exchange.size, stride, cluster))


def compare_pipeline(
    plan: Plan,
    least: Plan,
    run: ProbeRun,
    ranks: Sequence[RankResult],
    plan_stages: Sequence[int],
    tolerance_fraction: float | None,
) -> list[ComparedQuantity]:
    """The pipeline as a whole, beside the replay of its planned seconds; `least` is the plan without waits. Waits and
    the bubble are shown and not judged."""
    planned, quick = (
        replace(planned_seconds(each.best, run.order, plan_stages), p2p_s=hops_s(plan.cluster, run))
        for each in (plan, least)
    )
    timeline = replay(run.order, planned)
    waits = []
    for number, stage in enumerate(plan_stages):
        starts_s = timeline.start_s[number].tolist()
        ends_s = timeline.end_s[number].tolist()
        planned_s = sum(starts_s) - sum(ends_s[:-1])
        measured_s = median(waited_s(rank) for rank in ranks if rank.stage == number)
        waits.append(compared("wait for messages", "s", planned_s, measured_s, None, stage))
    return [
        *waits,
        compared("bubble", "fraction", timeline.bubble_fraction, bubble_fraction(ranks), None),
        compared(
            "pipeline", "s", timeline.makespan_s, span_s(ranks), tolerance_fraction,
            least=makespan_s(run.order, quick),
        ),
    ]  # fmt: skip


def hops_s(cluster: ClusterSpec, run: ProbeRun) -> list[float]:
    """Seconds of a message over each boundary of virtual stages: messages run beside compute, and delay who waits."""
    shards = run.tp if run.sequence_parallel else 1
    num_bytes = BF16 * run.seq_length * run.micro_batch_size * run.model.hidden_size / shards
    places = run.order.stage_to_rank[: run.order.num_model_stages]
    ranks = [run.rank(Place(pp, 0, 0, 0)) for pp in places]
    return [float(p2p_s(num_bytes, abs(a - b), cluster, min(a, b))) if a != b else 0.0 for a, b in pairwise(ranks)]


def compare_stage(
    plan: Plan,
    least: Plan,
    plan_stage: int,
    ranks: Sequence[RankResult],
    tolerance_fraction: float | None,
    alone: bool,
    *,
    passes: bool = True,
    optimizer: bool = True,
    peak: bool = True,
) -> list[ComparedQuantity]:
    """Seconds and bytes of one stage's ranks, of which passes, the optimizer's step and the peak may be shown alone.

    `least` is the plan without waits. `alone` means that peers were emulated, so that its seconds include no exchange.
    """
    stage, quick = plan.best.stages[plan_stage], least.best.stages[plan_stage]
    chunks = [chunk for rank in ranks for chunk in rank.chunks]
    comparisons = list[ComparedQuantity]()
    for way, name in enumerate(("forward", "backward")):
        planned_s, least_s = (
            (each.forward_s, each.backward_s)[way] + (each.forward_comm_s, each.backward_comm_s)[way] * (not alone)
            for each in (stage, quick)
        )
        took_s = median(sum(chunk.passes_s[way] for chunk in rank.chunks) for rank in ranks)
        comparisons.append(
            compared(name, "s", planned_s, took_s, tolerance_fraction if passes else None, plan_stage, least_s)
        )
    weight_grads = [chunk.weight_grad_s for chunk in chunks if chunk.weight_grad_s is not None]
    if weight_grads:
        seconds = sum(weight_grads) / len(ranks)
        comparisons.append(compared("weight gradient", "s", stage.weight_grad_s, seconds, None, plan_stage))
    optimizer_s = median(step.optimizer_s for rank in ranks for step in rank.steps)
    # an embedding table takes longer to update than it is priced at: physics/kernels.py, TABLE_BYTES
    judged = tolerance_fraction if optimizer and "embedding" not in stage.holds else None
    least_s, planned_s = _optimizer_s(plan, stage)
    comparisons.append(compared("optimizer", "s", planned_s, optimizer_s, judged, plan_stage, least=least_s))
    memories = [rank.memory for rank in ranks if rank.memory is not None]
    if memories:
        comparisons += _compare_memory(plan, plan_stage, memories, tolerance_fraction, peak)
    return comparisons


def host_keeps_up(eager: Plan, least: Plan, tolerance_fraction: float) -> list[bool]:
    """For each stage, if its host is done before its GPU where the stage runs alone, without exchanges beside which a
    host catches up; else the seconds of its passes are those of the host."""
    return [
        all(
            issued_s <= (1 + tolerance_fraction / 2) * computed_s
            for issued_s, computed_s in ((stage.forward_s, quick.forward_s), (stage.backward_s, quick.backward_s))
        )
        for stage, quick in zip(without_exchanges(eager).stages, least.stages, strict=True)
    ]


def _optimizer_s(plan: Plan, stage: StagePlan) -> tuple[float, float]:
    """The price of an optimizer step, and this with the launches that it leaves out, or the host's time for them."""
    hardware = plan.cluster.hardware
    kinds = 1 if plan.model.spec.moe is None else 2
    num_kernels = OPTIMIZER_KERNELS * kinds
    launched_s = stage.optimizer_s + num_kernels * kernels.launch_s(hardware)
    return stage.optimizer_s, max(launched_s, num_kernels * compute.issue_s(hardware, plan.runtime_spec))


def _compare_memory(
    plan: Plan,
    plan_stage: int,
    memories: Sequence[ProbedMemory],
    tolerance_fraction: float | None,
    holds_as_planned: bool,
) -> list[ComparedQuantity]:
    """Bytes of the fullest rank of a stage. They are judged up to ZeRO-1. Beyond it, gathered weights and gradients
    come and go, and under ZeRO-2 the run keeps all gradients."""
    planned = plan.stages[plan_stage].memory
    static = static_bytes(plan, plan_stage)
    peak = planned.peak_allocated_bytes
    reserved_factor = 1 + plan.cluster.hardware.reserved.fragmentation_fraction
    tolerance = tolerance_fraction if plan.parallelism.zero_stage <= 1 else None
    peak_tolerance = tolerance if holds_as_planned and knows_peak(plan) else None
    rows = (
        ("static memory", static, max(memory.static_bytes for memory in memories), tolerance),
        ("peak allocated", peak, max(memory.peak_allocated_bytes for memory in memories), peak_tolerance),
        ("peak reserved", reserved_factor * peak, max(memory.peak_reserved_bytes for memory in memories), None),
        ("device memory", planned.total_bytes, max(memory.device_used_bytes for memory in memories), None),
    )
    return [compared(name, "bytes", a, b, judged, plan_stage) for name, a, b, judged in rows]
