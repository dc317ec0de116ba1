"""More spare nodes never train less, the cheapest number is that of a scan, and kinds of failures add up."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.months.losses import Losses, failure_kinds, losses_of
from planner.months.whole_run import ALIKE, cheapest_spares, spares
from planner.specs.cluster import ClusterSpec, parse_tiers
from planner.specs.hardware import LinkTier
from planner.specs.registry import load_hardware
from planner.specs.training import OperationsSpec


def losses(num_gpus: int, rate_fraction: float = 0.0, rate: float | None = None) -> Losses:
    cluster = ClusterSpec(hardware="h100", num_gpus=num_gpus)
    found = losses_of(cluster, OperationsSpec(failures_per_1000_gpu_days=rate), num_gpus, 5.7e12, True)
    return replace(found, rate_without_node_fraction=rate_fraction)


nodes = st.integers(2, 2048)
rates = st.floats(0.05, 5.0)


@settings(max_examples=40, deadline=None)
@given(num_nodes=nodes, rate=rates, fraction=st.floats(0.0, 1.0), idle=st.integers(0, 6))
def test_more_spare_nodes_never_train_less(num_nodes: int, rate: float, fraction: float, idle: int) -> None:
    job = losses(8 * num_nodes, fraction, rate)
    rows = [spares(job, number, 8, idle) for number in range(10)]
    for fewer, more in pairwise(rows):
        assert more.lost_gpu_hours <= fewer.lost_gpu_hours + 1e-9 * num_nodes
        assert more.none_free_fraction <= fewer.none_free_fraction
        assert more.idle_gpu_hours >= fewer.idle_gpu_hours


@settings(max_examples=40, deadline=None)
@given(num_nodes=nodes, rate=rates, fraction=st.floats(0.0, 1.0), idle=st.integers(0, 6))
def test_the_cheapest_number_is_that_of_a_scan(num_nodes: int, rate: float, fraction: float, idle: int) -> None:
    job = losses(8 * num_nodes, fraction, rate)
    costs = [spares(job, number, 8, idle).gpu_hours for number in range(80)]
    scanned = next(number for number, cost in enumerate(costs) if cost <= (1 + ALIKE) * min(costs))
    assert cheapest_spares(job, 8, idle).num_nodes == scanned


def test_a_job_that_can_go_on_needs_fewer_spare_nodes() -> None:
    waits, goes_on = losses(2048), losses(2048, 0.85)
    assert spares(goes_on, 0, 8).lost_gpu_hours < spares(waits, 0, 8).lost_gpu_hours
    assert cheapest_spares(goes_on, 8).num_nodes < cheapest_spares(waits, 8).num_nodes
    assert cheapest_spares(waits, 8).num_nodes == 2


def test_idle_nodes_cost_nothing_to_keep() -> None:
    row = spares(losses(2048), 3, 8, num_idle_nodes=2)
    assert row.idle_gpu_hours == 24 * 8
    assert spares(losses(2048), 2, 8, num_idle_nodes=2).idle_gpu_hours == 0


@pytest.mark.parametrize(("hardware", "num_gpus"), [("h100", 2048), ("h100", 16), ("gb200", 2016), ("mi300x", 512)])
def test_kinds_of_failures_add_up_to_all(hardware: str, num_gpus: int) -> None:
    cluster = ClusterSpec(hardware=hardware, num_gpus=num_gpus)
    job = losses_of(cluster, OperationsSpec(), num_gpus, 1e12, True)
    kinds = failure_kinds(job, cluster)
    assert sum(kind.per_day.value for kind in kinds) == pytest.approx(job.failures_per_day.value)
    assert [kind.num_nodes for kind in kinds][:3] == [0, 1, 1]


def test_a_switch_takes_a_rack_a_leafs_nodes_or_those_of_a_narrow_tier() -> None:
    def taken(cluster: ClusterSpec) -> int:
        job = losses_of(cluster, OperationsSpec(), cluster.num_gpus, 1e12, True)
        return failure_kinds(job, cluster)[-1].num_nodes

    assert taken(ClusterSpec(hardware="h100", num_gpus=2048)) == 32
    assert taken(ClusterSpec(hardware="h100", num_gpus=64)) == 8
    assert taken(ClusterSpec(hardware="gb200", num_gpus=720)) == 18
    tiers: tuple[LinkTier, ...] = parse_tiers("leaf:128:50,spine:*:50", load_hardware("h100"))
    assert taken(ClusterSpec(hardware="h100", num_gpus=2048, network_tiers=tiers)) == 16


def test_switches_of_a_large_job_fail_every_few_weeks() -> None:
    cluster = ClusterSpec(hardware="h100", num_gpus=16_384)
    switch = failure_kinds(losses(16_384), cluster)[-1]
    # Llama 3 lost 35 of 419 to switches and cables in 54 days
    assert 54 * switch.per_day.value < 35
    assert 1 / switch.per_day.value == pytest.approx(12, rel=0.1)
