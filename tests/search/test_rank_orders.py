"""The order of the ranks: chosen by price, under tiers that tell the orders apart, and the default where none does."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from toys import MOE, solved, toy_cluster, toy_model, toy_problem, toy_training

from planner.errors import Infeasible
from planner.layout.evaluate import evaluate
from planner.search.enumerate import enumerate_shapes
from planner.search.search import plan
from planner.shape import RANK_ORDERS
from planner.specs.cluster import ClusterSpec, parse_tiers
from planner.specs.registry import load_hardware
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.trainers.load import load_runtime

OWN, DP_OUTERMOST = RANK_ORDERS
H100 = load_hardware("h100")


def three_tiers(num_gpus: int, pod: int, pod_gb_per_s: float, spine_gb_per_s: float) -> ClusterSpec:
    """Nodes of four, pods, and a spine."""
    cluster = toy_cluster(num_gpus)
    text = f"pod:{pod}:{pod_gb_per_s:g},spine:*:{spine_gb_per_s:g}"
    return cluster.changed(network_tiers=parse_tiers(text, cluster.hardware))


SMALL: dict[str, Any] = {
    "model": toy_model(4), "cp": (1,), "zero_stage": (1,), "micro_batch_size": (1,), "recompute": ("none",), "top": 1,
    "gap_fraction": 0.0,
}  # fmt: skip


@pytest.mark.thorough(2)
@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_as_fast_as_all_layouts_under_both_orders(seed: int) -> None:
    rng = random.Random(f"orders {seed}")
    cluster = three_tiers(16, 8, rng.choice([5.0, 50.0]), rng.choice([0.05, 0.5, 5.0]))
    options = SMALL | {
        "cluster": cluster,
        "training": toy_training(rng.choice([16, 32])),
        "tp": (rng.choice([1, 2, 4]),),
    }
    best_s = {order: toy_problem(**options, rank_order=(order,)).best_step_s() for order in RANK_ORDERS}
    answer = solved(toy_problem(**options))
    assert answer.search.lower_bound_s <= min(best_s.values()) * (1 + 1e-6)
    assert answer.step.step_s <= min(best_s.values()) * 1.005
    for order in RANK_ORDERS:
        if answer.parallelism.rank_order == order:
            assert best_s[order] <= min(best_s.values()) * 1.005


@pytest.mark.parametrize(
    ("spine_gb_per_s", "training", "order"),
    [(5.0, toy_training(256, 8192), DP_OUTERMOST), (0.5, toy_training(64), OWN)],
    ids=["activations weigh more", "weights weigh more"],
)
def test_each_order_has_its_place(spine_gb_per_s: float, training: TrainingSpec, order: str) -> None:
    """Behind a slow spine it is best to keep inside a pod what moves more bytes: what stages send, or gradients."""
    cluster = three_tiers(16, 8, 50.0, spine_gb_per_s)
    answer = solved(
        toy_problem(**SMALL | {"model": toy_model(8)}, cluster=cluster, training=training, tp=(1,), pp=(2,))
    )
    assert answer.parallelism.rank_order == order


def test_no_second_order_where_no_tier_tells_them_apart() -> None:
    training, runtime = TrainingSpec(seq_length=8192, global_batch_size=512), load_runtime("megatron")
    for cluster, limits, differs in (
        (ClusterSpec(hardware=H100, num_gpus=64), {"tp": (8,)}, False),
        (ClusterSpec(hardware=H100, num_gpus=8), {}, False),
        (ClusterSpec(hardware=H100, num_gpus=64), {"tp": (2,)}, True),
        (three_tiers(64, 32, 50.0, 10.0), {"tp": (4,)}, True),
    ):
        problem = toy_problem(toy_model(8), cluster, training, runtime, **limits)
        shapes, _ = enumerate_shapes(problem.model, cluster, training, problem.limits, runtime)
        assert bool(np.any(shapes.dp_outermost)) is differs
        moved = shapes.take(np.flatnonzero(np.broadcast_to(shapes.dp_outermost, np.shape(shapes.tp))))
        assert np.all((np.asarray(moved.pp) > 1) & (np.asarray(moved.dp) > 1))


def test_equal_links_keep_the_default() -> None:
    cluster = toy_cluster(16, nvlink_gb_per_s=50.0, network_gb_per_s=50.0)
    answer = solved(toy_problem(**SMALL, cluster=cluster, training=toy_training(32), pp=(2, 4)))
    assert answer.parallelism.rank_order == OWN


def test_experts_must_have_as_many_replicas_as_the_rest() -> None:
    cluster = three_tiers(32, 16, 50.0, 0.05)
    problem = toy_problem(
        toy_model(8, moe=MOE), cluster, toy_training(64), tp=(1,), cp=(1, 2, 4), pp=(2,), ep=(1, 2, 4), etp=(1,),
        rank_order=(DP_OUTERMOST,),
    )  # fmt: skip
    shapes = problem.shapes()
    assert shapes
    assert all(shape.ep * shape.etp == shape.tp * shape.cp for shape in shapes)


def test_a_trainer_without_the_order_refuses_it_by_name() -> None:
    with pytest.raises(Infeasible, match="rank_order tp-cp-ep-pp-dp: torchtitan has tp-cp-ep-dp-pp"):
        solved(toy_problem(**SMALL | {"zero_stage": (3,)}, runtime="torchtitan", rank_order=(DP_OUTERMOST,)))
    layout = Parallelism(pp=2, dp=4, rank_order=DP_OUTERMOST)
    answer = evaluate(toy_model(8), toy_cluster(8), toy_training(32), layout, runtime="torchtitan")
    assert any("torchtitan refuses this layout: rank_order" in warning for warning in answer.warnings)


def test_llama_3_405b_is_mapped_as_it_was() -> None:
    """TP, CP, PP, DP on 16,384 H100, in pods of 3,072 behind a spine of a seventh of the rate (arXiv:2407.21783)."""
    network = parse_tiers("pod:3072:50,spine:*:50:7x", H100)
    cluster = ClusterSpec(hardware=H100, num_gpus=16384, network_tiers=network)
    limits = SearchLimits(top=1, tp=(8,), pp=(8, 16))
    answer = plan("405b", cluster, TrainingSpec(seq_length=8192, global_batch_size=2048), limits=limits)
    assert answer.parallelism.rank_order == DP_OUTERMOST
    spanned = {p.group: p.tier for p in answer.best.placement}
    assert (spanned["pp"], spanned["dp"]) == ("pod", "spine")
