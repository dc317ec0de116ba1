"""Tokens handed to experts: how often each crosses which links."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.physics.communication import Kind, collective_s, dispatch_tiers_s, exchange_s, joined_fraction, p2p_s
from planner.physics.layers import decoder_layer
from planner.physics.operators import Collective, collectives_of
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
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
