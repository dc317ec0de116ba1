"""Collectives on AMD GPUs against published tables of rccl-tests, Primus' benchmark and MORI's dispatch kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from planner.physics.communication import Kind, collective_s, collective_tiers_s, dispatch_tiers_s
from planner.specs.cluster import ClusterSpec, parse_tiers
from planner.specs.registry import load_hardware

TABLES = yaml.safe_load((Path(__file__).parent / "rccl.yaml").read_text())

MIB, GIB = 2**20, 2**30


def cluster_of(hardware: str, num_gpus: int) -> ClusterSpec:
    return ClusterSpec(hardware=load_hardware(hardware), num_gpus=num_gpus)


@pytest.mark.parametrize(("hardware", "kind", "num_gpus", "num_bytes", "microseconds", "tolerance"), TABLES["measured"])
def test_a_collective_takes_what_rccl_tests_measured(
    hardware: str, kind: Kind, num_gpus: int, num_bytes: int, microseconds: float, tolerance: float
) -> None:
    predicted_us = 1e6 * float(collective_s(kind, num_bytes, num_gpus, 1, cluster_of(hardware, num_gpus)))
    assert predicted_us == pytest.approx(microseconds, rel=tolerance)


@pytest.mark.parametrize(("kind", "bus_gb_per_s"), [("all_gather", 350), ("reduce_scatter", 360)])
def test_two_nodes_reach_what_cvs_expects(kind: Kind, bus_gb_per_s: float) -> None:
    """ROCm's cluster validation suite asks two nodes of eight ports for these rates (rccl_config.json)."""
    taken_s = float(collective_s(kind, 16 * GIB, 16, 1, cluster_of("mi300x", 16)))
    assert 16 * GIB * 15 / 16 / taken_s == pytest.approx(bus_gb_per_s * 1e9, rel=0.06)


@pytest.mark.parametrize(
    ("ep", "bytes_per_value", "microseconds"), [(8, 1, 502), (16, 1, 977), (16, 2, 2318), (32, 1, 1854), (32, 2, 4227)]
)
def test_tokens_reach_their_experts_as_with_mori(ep: int, bytes_per_value: int, microseconds: float) -> None:
    """4,096 tokens of 7,168 values to 8 experts each, on MI300X with ConnectX-7 (ROCm/mori's README); no fit saw it."""
    num_bytes = 4096 * 7168 * bytes_per_value * 8
    predicted_us = 1e6 * float(sum(dispatch_tiers_s(num_bytes, 8, ep, 1, cluster_of("mi300x", ep))))
    assert predicted_us == pytest.approx(microseconds, rel=0.3)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
def test_the_slowest_tier_decides_where_rings_pass_all_of_them(kind: Kind) -> None:
    """The network is slower than a node's links and hides them; alone, those would take as long as in one node."""
    inner_s, network_s = (float(s) for s in collective_tiers_s(kind, 16 * GIB, 64, 1, cluster_of("mi355x", 64)))
    port = load_hardware("mi355x").tiers[1].bytes_per_s
    outside = {"all_reduce": 2 * 63 / 64 / 8, "all_gather": 63 / 64 / 8, "all_to_all": 56 / 64}[kind]
    assert inner_s + network_s == pytest.approx(16 * GIB * outside / port, rel=0.02)


def test_a_shared_spine_slows_amd_gpus_too() -> None:
    hardware = load_hardware("mi300x")
    plain, shared = (
        ClusterSpec(
            hardware=hardware, num_gpus=256, network_tiers=parse_tiers(f"pod:64:50,spine:*:50{times}", hardware)
        )
        for times in ("", ":4x")
    )
    inside, across = 16 * GIB * 63 / 64 / 8, 16 * GIB * 255 / 256 / 64
    rate = hardware.tiers[1].bytes_per_s
    # a pod's 64 ports share what leaves it, so that four times fewer uplinks are still faster than its own ring
    assert float(collective_s("all_gather", 16 * GIB, 256, 1, shared)) == pytest.approx(inside / rate, rel=0.02)
    assert float(collective_s("all_gather", 16 * GIB, 4, 64, shared)) == pytest.approx(
        4 * float(collective_s("all_gather", 16 * GIB, 4, 64, plain)), rel=0.02
    )
    assert 4 * across < inside
