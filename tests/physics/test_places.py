"""Where the ranks of a group lie, held against the numbers of the ranks themselves, under both orders."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from planner.layout.evaluate import pricing_of
from planner.layout.price import placements
from planner.physics.communication import Blocks, data_parallel_places, members_by_tier, p2p_s
from planner.shape import RANK_ORDERS, Shape
from planner.specs.cluster import ClusterSpec, parse_tiers
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import TrainingSpec
from planner.trainers.load import load_runtime

H100 = load_hardware("h100")
PODS = ClusterSpec(hardware=H100, num_gpus=4096, network_tiers=parse_tiers("pod:256:50,spine:*:50:7x", H100))
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
    cluster = ClusterSpec(hardware=H100, num_gpus=16384, network_tiers=parse_tiers("pod:3072:50,spine:*:50:7x", H100))
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


@pytest.mark.parametrize(
    ("ep", "words"),
    [
        (8, "ep 8 in nvlink (NVL72)"),
        (72, "ep 72 in nvlink (NVL72)"),
        (64, "ep 64 in nvlink (NVL72), if jobs fill 64 of its GPUs"),
        (144, "ep 144 crosses NVLink, over infiniband"),
    ],
)
def test_experts_inside_and_across_a_rack(ep: int, words: str) -> None:
    cluster = ClusterSpec(hardware=load_hardware("gb200"), num_gpus=576)
    (experts,) = (p for p in placements(Shape.of(ep=ep, dp=576), cluster) if p.group == "ep")
    assert str(experts) == words
