"""Families of kernels, rates of links and the host's gaps, as traces of a slower cluster would show them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from measured_runs import observed, priced, slower
from toys import toy_cluster

from planner.answer import Plan
from planner.layout.replan import reprice
from planner.observe.calibration_by_run import from_run, link_shares
from planner.observe.observation import Link, Observed, StepSeries
from planner.observe.observed_run import PricedRun
from planner.observe.traces.collectives import bus_factor
from planner.observe.traces.recorded import ObservedFiles, Recorded
from planner.observe.traces.results import CollectiveTime, FamilyTime, RankReport, TraceReport, TraceStep
from planner.physics.communication import collective_s
from planner.physics.passes import lateness
from planner.specs.cluster import ClusterSpec
from planner.specs.units import MIB


@pytest.fixture(scope="module")
def plan() -> Plan:
    return priced()


def computed_s(plan: Plan, cluster: ClusterSpec, rank: int) -> float:
    """Seconds that a rank computes in a step on a cluster whose host is never late."""
    own = cluster.hardware
    quick = own.model_copy(update={"efficiency": own.efficiency.model_copy(update={"host_us": 0.0})})
    candidate = reprice(plan.model_copy(update={"cluster": cluster.changed(hardware=quick)}), plan.best)
    cost = candidate.rank_costs[rank]
    passes_s = float(cost.forward_s + cost.input_grad_s + cost.weight_grad_s)
    return candidate.num_microbatches * passes_s + float(cost.optimizer_s)


def families(plan: Plan, cluster: ClusterSpec, rank: int) -> dict[str, float]:
    """The kernels of a step: what is gone where a kind of kernel takes next to nothing, and the rest."""
    total_s, late = computed_s(plan, cluster, rank), lateness(plan.training, plan.cluster)
    nothing = 1e-9
    gemm = total_s - computed_s(plan, slower(cluster, gemm_factor=nothing), rank)
    own = cluster.hardware.efficiency
    flash = own.flash.model_copy(update={"seconds_factor": nothing})
    without = cluster.hardware.model_copy(update={"efficiency": own.model_copy(update={"flash": flash})})
    attention = total_s - computed_s(plan, cluster.changed(hardware=without), rank)
    seconds = {"gemm": gemm, "attention": attention, "norm": total_s - gemm - attention}
    return {name: value / late for name, value in seconds.items()}


def traced(
    plan: Plan, step_s: float, ranks: tuple[RankReport, ...], has_log: bool = True, **changes: Any
) -> ObservedFiles:
    """A run of the plan with a log and traces."""
    log: Observed = observed(plan, step_s, **changes)
    observation = log.observation if has_log else log.observation.model_copy(update={"series": StepSeries()})
    recorded = Recorded(traces=TraceReport(ranks=ranks))
    return ObservedFiles(**{**dict(log), "observation": observation, "recorded": recorded})


def rank_of(
    seconds: dict[str, float], step_s: float, stage: int | None, host_gaps_s: float = 0.0, rank: int = 0, **changes: Any
) -> RankReport:
    total_s = sum(seconds.values())
    rows = tuple(
        FamilyTime(family=name, seconds=value, share_fraction=value / total_s, num_kernels=1)
        for name, value in seconds.items()
    )
    step = TraceStep(
        number=1, start_s=0.0, wall_s=step_s, warm_up=False, compute_s=total_s, exposed_communication_s=0.0,
        copies_s=0.0, host_gaps_s=host_gaps_s, dependencies_s=0.0, idle_s=0.0, families=rows, groups=(),
    )  # fmt: skip
    return RankReport(file="r.json", rank=rank, stage=stage, device="NVIDIA H100", steps=(step,), **changes)


def test_each_family_gives_its_own_factor(plan: Plan) -> None:
    truth = slower(plan.cluster, gemm_factor=1.25, stream_factor=1.1)
    own = truth.hardware.efficiency
    flash = own.flash.model_copy(update={"seconds_factor": 1.5})
    truth = truth.changed(
        hardware=truth.hardware.model_copy(update={"efficiency": own.model_copy(update={"flash": flash})})
    )
    step_s = priced(truth).step.step_s
    ranks = tuple(rank_of(families(plan, truth, stage), step_s, stage, rank=stage) for stage in (0, 1))
    calibration = from_run(traced(plan, step_s, ranks), plan.cluster)
    assert calibration.gemm_factor is not None
    assert calibration.stream_factor is not None
    assert calibration.gemm_factor.value == pytest.approx(1.25, rel=0.005)
    assert calibration.attention_factor["flash"].value == pytest.approx(1.5, rel=0.005)
    assert calibration.stream_factor.value == pytest.approx(1.1, rel=0.03), "launches are in it, which no factor moves"
    assert calibration.kernels_factor is None
    again = priced(calibration.of_cluster(plan.cluster)).step.step_s
    assert again == pytest.approx(step_s, rel=0.01)
    assert calibration.step_width == pytest.approx(math.hypot(0.07, 0.01, math.log(step_s / again)), rel=0.01)


def test_a_step_that_kernels_do_not_explain_is_a_poor_fit_and_widens(plan: Plan) -> None:
    ranks = (rank_of(families(plan, plan.cluster, 0), plan.step.step_s, 0),)
    calibration = from_run(traced(plan, 1.4 * plan.step.step_s, ranks), plan.cluster)
    assert calibration.gemm_factor is not None
    assert calibration.gemm_factor.verdict == "confirmed"
    assert calibration.step_width is not None
    assert calibration.step_width > math.log(1.4) - 0.01
    assert calibration.warnings[0].startswith("a poor fit: the run's step of ")


def test_kernels_that_nobody_knows_give_no_factor_by_family(plan: Plan) -> None:
    seconds = families(plan, plan.cluster, 0)
    ranks = (rank_of(seconds | {"other": 0.3 * sum(seconds.values())}, plan.step.step_s, 0),)
    calibration = from_run(traced(plan, 1.1 * plan.step.step_s, ranks), plan.cluster)
    assert calibration.gemm_factor is not None
    assert calibration.gemm_factor.verdict == "refused"
    assert "23% of the computing" in calibration.gemm_factor.reason
    assert calibration.kernels_factor is not None
    assert calibration.kernels_factor.is_applied, "the log's step stays"


def test_ranks_whose_stage_nobody_knows_are_left_out(plan: Plan) -> None:
    ranks = (rank_of(families(plan, plan.cluster, 0), plan.step.step_s, None),)
    assert from_run(traced(plan, plan.step.step_s, ranks), plan.cluster).gemm_factor is None


def test_steps_under_a_profiler_alone_teach_no_speed(plan: Plan) -> None:
    run = traced(plan, 1.2 * plan.step.step_s, (), has_log=False)
    factor = from_run(run, plan.cluster).kernels_factor
    assert factor is not None
    assert factor.verdict == "refused"
    assert "a profiler makes steps longer" in factor.reason


@pytest.mark.parametrize(
    ("gap_s", "log", "longer", "verdict"),
    [(0.004, True, 1.0, "corrected"), (0.004, True, 1.2, "refused"), (0.004, False, 1.0, "refused"),
     (0.4, True, 1.0, "refused")],
)  # fmt: skip
def test_the_hosts_gaps_are_its_own_where_the_profiler_takes_none(
    plan: Plan, gap_s: float, log: bool, longer: float, verdict: str
) -> None:
    count = plan.parallelism.num_microbatches
    priced_s = reprice(plan, plan.best).outside.tail_s
    rank = rank_of(families(plan, plan.cluster, 0), longer * plan.step.step_s, 0, count * gap_s + priced_s)
    overhead = from_run(traced(plan, plan.step.step_s, (rank,), log), plan.cluster).microbatch_overhead_s
    assert overhead is not None
    assert overhead.verdict == verdict
    assert overhead.value == pytest.approx(gap_s, rel=0.05)


def collective(group: str, size: int, kind: str, num_mib: float, seconds: float, waits: bool = False) -> CollectiveTime:
    return CollectiveTime(
        group=group, collective=kind, num_bytes=round(num_mib * MIB), group_size=size, count=9, median_s=2 * seconds,
        transfer_s=None if waits else seconds, at_least=waits,
    )  # fmt: skip


@pytest.fixture(scope="module")
def wide() -> PricedRun:
    """Sixteen GPUs in nodes of four: TP 4 in a node, DP 4 over the network."""
    plan = priced(toy_cluster(16), tp=4, dp=4)
    return PricedRun.of(plan, plan.cluster)


def with_shares(cluster: ClusterSpec, **shares: float) -> ClusterSpec:
    tiers = tuple(
        tier.model_copy(update={"efficiency_fraction": shares.get(tier.name, tier.efficiency_fraction)})
        for tier in cluster.hardware.tiers
    )
    return cluster.changed(hardware=cluster.hardware.model_copy(update={"tiers": tiers}))


def reports(*collectives: CollectiveTime) -> tuple[RankReport, ...]:
    return (RankReport(file="r.json", rank=0, stage=0, device="NVIDIA H100", steps=(), collectives=collectives),)


def test_a_group_tells_the_tier_that_its_placement_crosses(wide: PricedRun) -> None:
    truth = with_shares(wide.cluster, nvlink=0.55, network=0.35)
    inside = float(collective_s("all_gather", 512 * MIB, 4, 1, truth))
    outside = float(collective_s("reduce_scatter", 256 * MIB, 4, 4, truth))
    small = collective("dp", 4, "all_gather", 0.01, 1.0)
    found = link_shares(
        wide,
        reports(
            collective("tp", 4, "all_gather", 512, inside), collective("dp", 4, "reduce_scatter", 256, outside), small
        ),
        (),
    )
    assert found["nvlink"].value == pytest.approx(0.55, rel=1e-3)
    assert found["network"].value == pytest.approx(0.35, rel=1e-3)
    assert {share.verdict for share in found.values()} == {"corrected"}
    assert found["network"].source == "reduce-scatter of 256.0 MiB over 4 ranks"


def test_a_rank_that_shares_nodes_tells_the_network_with_the_links_inside_as_measured() -> None:
    plan = priced(toy_cluster(16), tp=2, dp=8)
    run = PricedRun.of(plan, plan.cluster)
    truth = with_shares(run.cluster, nvlink=0.5, network=0.6)
    inside = float(collective_s("all_gather", 512 * MIB, 2, 1, truth))
    both = float(collective_s("all_gather", 512 * MIB, 8, 2, truth))
    found = link_shares(
        run, reports(collective("tp", 2, "all_gather", 512, inside), collective("dp", 8, "all_gather", 512, both)), ()
    )
    assert found["network"].value == pytest.approx(0.6, rel=1e-2)


def test_waits_and_latency_say_nothing_of_a_rate(wide: PricedRun) -> None:
    slow = float(collective_s("all_gather", 512 * MIB, 4, 1, with_shares(wide.cluster, nvlink=0.3)))
    waiting = link_shares(wide, reports(collective("tp", 4, "all_gather", 512, slow, waits=True)), ())
    assert waiting["nvlink"].verdict == "refused"
    assert "waits for other ranks" in waiting["nvlink"].reason
    tiny = float(collective_s("all_gather", 1024.0, 4, 1, wide.cluster))
    assert link_shares(wide, reports(collective("tp", 4, "all_gather", 1 / 1024, tiny)), ()) == {}
    assert link_shares(wide, reports(collective("pp", 4, "send_recv", 512, 1.0)), ()) == {}
    assert link_shares(wide, reports(collective("tp", 8, "all_gather", 512, 1.0)), ()) == {}, "another group's size"


@pytest.mark.parametrize("op", ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"])
def test_rates_that_a_log_prints_are_of_the_one_group_that_there_is(op: str) -> None:
    plan = priced(toy_cluster(8), dp=8)
    run = PricedRun.of(plan, plan.cluster)
    kind = op.removesuffix("_tensor").removesuffix("_into")
    truth = with_shares(run.cluster, network=0.95)
    seconds = float(collective_s(kind, 512 * MIB, 8, 1, truth))  # type: ignore[arg-type]
    rate = 512 * MIB * bus_factor(kind, 8) / seconds
    link = Link(op=op, message_bytes=512 * MIB / 8, seconds=seconds, bus_bytes_per_s=rate, num_values=3)
    assert link_shares(run, (), (link,))["network"].value == pytest.approx(0.95, rel=1e-2)
    several = priced(toy_cluster(16), tp=4, dp=4)
    assert link_shares(PricedRun.of(several, several.cluster), (), (link,)) == {}
