"""Tokens handed to experts: how often each crosses which links.

Collectives on AMD GPUs against published tables of rccl-tests, Primus' benchmark and MORI's dispatch kernels.
Where the ranks of a group lie, held against the numbers of the ranks themselves, under both orders.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from toys import exchange_s

from planner.layout.evaluate import pricing_of
from planner.layout.price import placements
from planner.physics.communication import (
    Blocks,
    Kind,
    collective_s,
    collective_tiers_s,
    data_parallel_places,
    dispatch_tiers_s,
    joined_fraction,
    members_by_tier,
    p2p_s,
)
from planner.physics.layers import decoder_layer
from planner.physics.operators import Collective, collectives_of
from planner.shape import RANK_ORDERS, Shape
from planner.specs.cluster import ClusterSpec, parse_tiers
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import TrainingSpec
from planner.trainers.load import load_runtime

H100 = ClusterSpec(hardware=load_hardware("h100"), num_gpus=64)
NVL72 = ClusterSpec(hardware=load_hardware("gb200"), num_gpus=64)
MI300X = ClusterSpec(hardware=load_hardware("mi300x"), num_gpus=16)
NUM_BYTES = 8.0 * 2**30


def dispatch_s(*arguments: Any, **options: Any) -> Any:
    return sum(dispatch_tiers_s(*arguments, **options))


def latencies_s(cluster: ClusterSpec, num_tiers: int) -> float:
    return sum(tier.latency_s for tier in cluster.tiers[:num_tiers])


def test_in_one_domain_a_rank_gets_a_token_once() -> None:
    """Of 8 visits to 16 ranks, 16·(1 − (15/16)⁸) ranks are distinct, and one rank in 16 is the token's own."""
    distinct = 16 * (1 - (15 / 16) ** 8)
    expected = NUM_BYTES / 8 * distinct * 15 / 16 / NVL72.tiers[0].bytes_per_s
    assert float(dispatch_s(NUM_BYTES, 8, 16, 1, NVL72)) == pytest.approx(expected + latencies_s(NVL72, 1))


def test_between_nodes_a_node_gets_a_token_once() -> None:
    """Two nodes of 8: the other one is visited by all but 1 token in 256, whose copies are handed on inside."""
    nvlink, network = H100.tiers[0].bytes_per_s, H100.tiers[1].bytes_per_s
    inside = 16 * (1 - (15 / 16) ** 8) * 7 / 8 / nvlink
    between = (1 - 1 / 256) / network
    expected = NUM_BYTES / 8 * (inside + between) + latencies_s(H100, 2)
    assert float(dispatch_s(NUM_BYTES, 8, 16, 1, H100)) == pytest.approx(expected)


def test_one_choice_crosses_the_network_as_often_as_any_exchange() -> None:
    network = H100.tiers[1].bytes_per_s
    once, each = (float(f) for f in (dispatch_s(1e12, 1, 64, 1, H100), collective_s("all_to_all", 1e12, 64, 1, H100)))
    outer = 1e12 * 56 / 64 / network
    assert once > outer
    assert each > outer
    # what differs is what came over the network and is handed on inside
    assert once - each == pytest.approx(1e12 * (7 / 8 - 7 / 64) / H100.tiers[0].bytes_per_s, rel=1e-3)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_ring_passes_every_rank_and_a_tree_does_not(kind: Kind) -> None:
    """64 ranks in 8 nodes: 56 hops within nodes and 7 between them; an all-reduce climbs and descends log₂ 8."""
    nvlink, network = H100.tiers
    one_byte = float(collective_s(kind, 1e-9, 64, 1, H100))
    assert one_byte == pytest.approx(56 * nvlink.latency_s + 7 * network.latency_s)
    assert float(collective_s("all_reduce", 1e-9, 64, 1, H100)) == pytest.approx(
        2 * (7 * nvlink.latency_s + 3 * network.latency_s)
    )
    # ranks a node apart meet on the network alone
    assert float(collective_s(kind, 1e-9, 8, 8, H100)) == pytest.approx(7 * network.latency_s)


def test_exchanges_one_after_another_wait_as_often_and_move_as_much() -> None:
    once, thrice = (float(collective_s("all_gather", 1e9, 64, 1, H100, exchanges=n)) for n in (1, 3))
    wait_s = float(collective_s("all_gather", 1e-9, 64, 1, H100))
    assert thrice - once == pytest.approx(2 * wait_s)


def test_nothing_to_send_takes_no_time() -> None:
    assert float(dispatch_s(0.0, 8, 16, 1, H100)) == 0.0
    assert float(dispatch_s(NUM_BYTES, 8, 1, 1, H100)) == 0.0


def test_experts_in_a_row_lie_on_two_ranks() -> None:
    # 9 experts of 256 apart by 8: a token visits 1 rank of 4 experts and crosses 8/4 borders to the next
    in_row, anywhere = (float(dispatch_s(NUM_BYTES, 9, 64, 1, H100, row_fraction=f)) for f in (8 / 256, 0.0))
    assert in_row < anywhere / 2
    # a row as long as all experts visits every rank
    everywhere = float(dispatch_s(NUM_BYTES, 1, 64, 1, H100, row_fraction=1.0))
    assert everywhere > float(dispatch_s(NUM_BYTES, 1, 64, 1, H100))


def test_arrays_cost_what_their_elements_cost() -> None:
    sizes = np.array([1, 4, 8, 16, 64])
    together = dispatch_s(NUM_BYTES, 4, sizes, 1, H100)
    assert list(together) == [float(dispatch_s(NUM_BYTES, 4, int(size), 1, H100)) for size in sizes]


@pytest.mark.parametrize(("runtime", "choices"), [("megatron", 8), ("torchtitan", 0)])
def test_who_sends_tokens_once(runtime: str, choices: int) -> None:
    model, shape = load_model("qwen3-30b-a3b"), Shape(ep=16, dp=16, seq_length=4096)
    items = decoder_layer(model, model.layers[0], shape, load_runtime(runtime))
    exchanges = [item for item in collectives_of(items) if item.kind == "all_to_all"]
    assert len(exchanges) == 4
    for exchange in exchanges:
        assert exchange.choices == choices
        assert exchange.num_bytes == 2 * 4096 * 8 * 2048
    plain = Collective(name="plain", kind="all_to_all", group="ep", num_bytes=exchanges[0].num_bytes)
    assert (float(exchange_s(exchanges[0], shape, H100)) < float(exchange_s(plain, shape, H100))) == (choices > 0)


@pytest.mark.parametrize("choices", [0, 8])
def test_scattered_rows_slow_the_innermost_links_alone(choices: int) -> None:
    plain = Collective(name="dispatch", kind="all_to_all", group="ep", num_bytes=NUM_BYTES, choices=choices)
    slow = replace(plain, inner_factor=3.0)
    inside = Shape(dp=8, ep=8)
    one, three = (float(exchange_s(exchange, inside, H100)) for exchange in (plain, slow))
    assert three - latencies_s(H100, 1) == pytest.approx(3 * (one - latencies_s(H100, 1)))
    across = Shape(dp=64, ep=64)
    extra = float(exchange_s(slow, across, H100)) - float(exchange_s(plain, across, H100))
    copies = 64 * (1 - (63 / 64) ** 8) * 7 / 8 / 8 if choices else 7 / 64
    assert extra == pytest.approx(2 * copies * NUM_BYTES / H100.tiers[0].bytes_per_s)


@pytest.mark.parametrize(("members", "links"), [(2, 1), (4, 3), (8, 7)])
def test_without_a_switch_ranks_have_the_links_among_themselves(members: int, links: int) -> None:
    """Each of n ranks sends 1/n of the tensor to each of n − 1 peers, over a link of its own each."""
    fabric = MI300X.tiers[0]
    link_bytes_per_s = 64e9 * fabric.efficiency_fraction
    waited_s = (members - 1) * fabric.latency_s + fabric.start_s
    moved_s = float(collective_s("all_gather", NUM_BYTES, members, 1, MI300X)) - waited_s
    assert moved_s == pytest.approx(NUM_BYTES / members / link_bytes_per_s)
    assert float(joined_fraction(fabric, members)) == pytest.approx(links / 7)
    assert joined_fraction(H100.tiers[0], members) == 1.0, "a switch gives any two ranks all of it"


def test_without_a_switch_two_ranks_share_one_link() -> None:
    fabric = MI300X.tiers[0]
    inside = NUM_BYTES / (64e9 * fabric.efficiency_fraction) + fabric.latency_s
    assert float(p2p_s(NUM_BYTES, 1, MI300X)) == pytest.approx(inside)
    assert float(p2p_s(NUM_BYTES, 8, MI300X)) == pytest.approx(NUM_BYTES / MI300X.tiers[1].bytes_per_s, rel=1e-3)


def test_rows_wait_for_the_host_on_a_network_that_it_drives() -> None:
    """UCCL over EFA: 2,048 rows of 4 KiB to the other of two nodes take their messages, not their bytes."""
    shape = Shape.of(ep=16, dp=2, seq_length=2048)
    sent = Collective(
        name="dispatch", kind="all_to_all", group="ep", num_bytes=8 * 2048 * 4096.0, choices=8, row_bytes=4096
    )
    seconds = {}
    for hardware in ("p5", "h100"):
        for transport in ("uccl", "nvshmem", "ibgda"):
            exchange = replace(sent, transport=transport)
            seconds[hardware, transport] = exchange_s(exchange, shape, ClusterSpec(hardware=hardware, num_gpus=32))
    assert seconds["p5", "uccl"] == pytest.approx(2048 * 2.1e-6 + 1.25e-3, rel=0.05)
    assert seconds["p5", "uccl"] > seconds["p5", "nvshmem"] > 3 * seconds["p5", "ibgda"]
    assert seconds["h100", "uccl"] == seconds["h100", "ibgda"]


@pytest.mark.parametrize(("ep", "gb_per_s"), [(16, 37.5), (32, 33), (64, 26.4), (128, 26.4)])
def test_an_all_to_all_over_efa_slows_down_among_more_nodes(ep: int, gb_per_s: float) -> None:
    """29 GB/s a GPU among four p5 (Qwen3-30B on Megatron-Bridge), of a line of 50."""
    seconds = collective_s("all_to_all", 1e9, ep, 1, ClusterSpec(hardware="p5", num_gpus=ep))
    assert seconds == pytest.approx(1e9 * (1 - 8 / ep) / (gb_per_s * 1e9), rel=0.25)


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


H100_OF_PLACES = load_hardware("h100")
PODS = ClusterSpec(
    hardware=H100_OF_PLACES, num_gpus=4096, network_tiers=parse_tiers("pod:256:50,spine:*:50:7x", H100_OF_PLACES)
)
GRIDS = [(8, 1, 4, 16), (4, 2, 8, 8), (2, 4, 4, 16), (1, 1, 16, 32), (8, 2, 16, 8), (2, 1, 2, 64)]
"""tp, cp, pp, dp: powers of two, so that no group is cut at a border of nodes or pods."""


def numbered(shape: Shape) -> dict[tuple[int, int, int, int], int]:
    """The rank of each (tp, cp, dp, pp), by Megatron's definition: the axes of an order are strides in a row."""
    axes = {"tp": int(shape.tp), "cp": int(shape.cp), "dp": int(shape.dp), "pp": int(shape.pp)}
    order = [axis for axis in shape.rank_order.split("-") if axis != "ep"]
    strides, stride = {}, 1
    for axis in order:
        strides[axis], stride = stride, stride * axes[axis]
    places = product(*(range(axes[axis]) for axis in ("tp", "cp", "dp", "pp")))
    return {p: sum(i * strides[axis] for i, axis in zip(p, ("tp", "cp", "dp", "pp"), strict=True)) for p in places}


def counted(ranks: list[int], num_gpus: int) -> int:
    """Ranks of a group in the unit of the tier that holds its first."""
    return sum(rank // num_gpus == ranks[0] // num_gpus for rank in ranks)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("order", RANK_ORDERS)
def test_replicas_share_as_many_units_as_their_numbers_say(order: str, grid: tuple[int, int, int, int]) -> None:
    tp, cp, pp, dp = grid
    shape = Shape.of(tp=tp, cp=cp, pp=pp, dp=dp, dp_outermost=RANK_ORDERS.index(order))  # type: ignore[arg-type]
    rank = numbered(shape)
    group = sorted(rank[0, c, d, 0] for c in range(cp) for d in range(dp))
    dense, _ = data_parallel_places(shape)
    expected = [counted(group, size) for size in (8, 256)]
    assert [int(n) for n in members_by_tier(cp * dp, dense, PODS.tiers)] == [*expected, cp * dp]
    for shard in (cp, cp * dp // 2, cp * dp):
        each = dense.every(shard) if isinstance(dense, Blocks) else dense * shard
        replicas = [counted(group[::shard], size) for size in (8, 256)]
        assert [int(n) for n in members_by_tier(cp * dp // shard, each, PODS.tiers)] == [*replicas, cp * dp // shard]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("order", RANK_ORDERS)
def test_stages_are_as_far_apart_as_their_numbers_say(order: str, grid: tuple[int, int, int, int]) -> None:
    tp, cp, pp, dp = grid
    shape = Shape.of(tp=tp, cp=cp, pp=pp, dp=dp, dp_outermost=RANK_ORDERS.index(order), seq_length=8192)  # type: ignore[arg-type]
    rank = numbered(shape)
    training = TrainingSpec(seq_length=8192, global_batch_size=2048)
    exchanges = pricing_of(load_model("405b"), PODS, training, load_runtime("megatron")).exchanges
    num_bytes = 2 * float(shape.shard_tokens) * 16384
    stages = [rank[0, 0, 0, q] for q in range(pp)]
    hops = []
    for a, b in pairwise(stages):
        tier = next(t for t in PODS.tiers if t.num_gpus is None or a // t.num_gpus == b // t.num_gpus)
        hops.append(num_bytes / tier.bytes_per_s + tier.latency_s)
    assert exchanges.hops_s(shape, range(pp)) == pytest.approx(hops)
    assert float(exchanges.p2p_s(shape)) == pytest.approx(min(hops))


def test_arrays_of_both_orders_are_priced_as_shapes_alone() -> None:
    tp, cp, pp, dp, outermost = (
        np.array(column) for column in zip(*[(*g, o) for g in GRIDS for o in (0, 1)], strict=True)
    )
    together = Shape.of(tp=tp, cp=cp, pp=pp, dp=dp, dp_outermost=outermost, seq_length=8192)
    training = TrainingSpec(seq_length=8192, global_batch_size=2048)
    exchanges = pricing_of(load_model("405b"), PODS, training, load_runtime("megatron")).exchanges
    prices = [np.broadcast_to(f, tp.shape) for f in (exchanges.p2p_s(together), exchanges.reduce_s(1e9, 0.0, together))]
    for row in range(len(tp)):
        alone = together.take(np.array(row))
        assert [float(p[row]) for p in prices] == pytest.approx(
            [float(exchanges.p2p_s(alone)), float(exchanges.reduce_s(1e9, 0.0, alone))]
        )


def test_llama_3_s_pods() -> None:
    """Pods of 3,072 GPUs with a seventh of the bandwidth between them (arXiv:2407.21783, section 3.3.1)."""
    cluster = ClusterSpec(
        hardware=H100_OF_PLACES, num_gpus=16384, network_tiers=parse_tiers("pod:3072:50,spine:*:50:7x", H100_OF_PLACES)
    )
    assert [tier.name for tier in cluster.tiers] == ["nvlink", "pod", "spine"]
    assert cluster.tiers[2].bytes_per_s == pytest.approx(cluster.tiers[1].bytes_per_s / 7)
    inside, across = (float(p2p_s(1e9, 1024, cluster, start)) for start in (0, 2048))
    assert across == pytest.approx(7 * inside, rel=1e-3)
    sizes = {"tp": 8, "pp": 16, "dp": 128}
    own, moved = (
        {p.group: str(p) for p in placements(Shape.of(**sizes, dp_outermost=order), cluster)} for order in (0, 1)
    )
    assert own == {"tp": "tp 8 in nvlink", "dp": "dp 128 over pod", "pp": "pp 16 over spine 7x"}
    assert moved == {"tp": "tp 8 in nvlink", "dp": "dp 128 over spine 7x", "pp": "pp 16 over pod"}


@pytest.mark.parametrize(("ep", "words"), TABLES["experts_inside_and_across_a_rack"])
def test_experts_inside_and_across_a_rack(ep: int, words: str) -> None:
    cluster = ClusterSpec(hardware=load_hardware("gb200"), num_gpus=576)
    (experts,) = (p for p in placements(Shape.of(ep=ep, dp=576), cluster) if p.group == "ep")
    assert str(experts) == words
