"""Candidate shapes: which axes are tried, how many ranks they use, and the numbered reason of every shape refused.

The order of the ranks: chosen by price, under tiers that tell the orders apart, and the default where none does.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tables import beside
from toys import MOE, Problem, case_of, solved, toy_cluster, toy_model, toy_problem, toy_training

from planner.errors import Infeasible, SpecError
from planner.layout.evaluate import evaluate
from planner.search.case import Case
from planner.search.enumerate import (
    MAX_MICRO_BATCH_TOKENS,
    Rejections,
    check_expressible,
    cuts_evenly,
    enumerate_shapes,
    schedule_options,
)
from planner.search.search import plan
from planner.shape import RANK_ORDERS, Shape, divisors
from planner.specs.cluster import ClusterSpec, parse_tiers
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.trainers.load import RUNTIMES, load_runtime
from planner.trainers.rules.recipe import rules_for

TABLES = beside(__file__)


def enumerated(problem: Problem) -> tuple[Shape, Rejections]:
    return enumerate_shapes(case_of(problem))


def axis(shapes: Shape, name: str) -> set[int]:
    return set(np.asarray(getattr(shapes, name)).tolist())


@pytest.mark.parametrize("number", [1, 2, 12, 36, 97, 2040, 16380, 2**13])
@pytest.mark.parametrize("most", [1, 7, 100, 10**6])
def test_divisors(number: int, most: int) -> None:
    assert divisors(number, most) == [d for d in range(1, number + 1) if number % d == 0 and d <= most]


@pytest.mark.thorough(3)
@pytest.mark.parametrize("num_gpus", [1, 6, 8, 11])
@pytest.mark.parametrize("model", [toy_model(5), toy_model(6, moe=MOE)], ids=["dense", "experts"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_every_shape_is_a_legal_one(num_gpus: int, model: Any, runtime: str) -> None:
    problem = toy_problem(model, toy_cluster(num_gpus), toy_training(24), runtime)
    for shape in problem.shapes():
        assert shape.tp * shape.cp * shape.pp * shape.dp <= num_gpus
        assert shape.dp * shape.micro_batch_size * shape.num_microbatches == 24
        assert model.num_attention_heads % shape.tp == 0
        assert shape.pp <= model.num_hidden_layers
        assert shape.zero_stage in problem.runtime.zero_stages
        assert shape.tp * shape.cp * shape.dp % (shape.ep * shape.etp) == 0
        assert shape.dp * shape.cp % shape.shard_size == 0
        assert shape.shard_size == shape.dp * shape.cp or shape.zero_stage in problem.runtime.grouped_zero_stages
        assert shape.sequence_parallel == (shape.tp > 1 and problem.runtime.has_sequence_parallel)
        for rule in rules_for(problem.runtime):
            assert rule.holds(model, problem.training, shape), rule.reason


@pytest.mark.parametrize(("num_gpus", "batch"), [(8, 24), (11, 24), (16, 30), (12, 7)])
def test_data_parallelism_takes_as_many_ranks_as_the_batch_lets_it(num_gpus: int, batch: int) -> None:
    problem = toy_problem(cluster=toy_cluster(num_gpus), training=toy_training(batch))
    for shape in problem.shapes():
        room = num_gpus // (shape.tp * shape.cp * shape.pp)
        legal = [d for d in range(1, room + 1) if batch % (d * shape.micro_batch_size) == 0]
        steps = {d: batch // (d * shape.micro_batch_size) for d in legal}
        enough = [d for d in legal if steps[d] >= shape.pp]
        even = [d for d in enough if steps[d] % shape.pp == 0]
        assert shape.dp in {max(sizes) for sizes in (legal, enough, even) if sizes}


@pytest.mark.parametrize(
    ("schedule", "sizes"), [(None, {4, 3}), (("dualpipe-v",), {4, 3, 1})], ids=["any", "twice as many micro-batches"]
)
def test_fewer_ranks_are_tried_where_more_leave_no_multiple_of_the_stages(
    schedule: tuple[str, ...] | None, sizes: set[int]
) -> None:
    """24 sequences on 8 stages: 4 ranks would have 6 of them each, 3 have 8, and 1 has the 16 or more of DualPipeV."""
    pins = {"tp": (1,), "cp": (1,), "pp": (8,), "micro_batch_size": (1,), "schedule": schedule}
    problem = toy_problem(toy_model(16), toy_cluster(32), toy_training(24), "torch-eager", **pins)
    assert axis(enumerated(problem)[0], "dp") == sizes


@pytest.mark.parametrize(
    ("tp", "cp", "expected"), [(1, 1, {8, 16, 32}), (4, 1, {2, 4, 8}), (1, 4, {8, 16, 32}), (2, 8, {8, 16})]
)
def test_weights_may_be_sharded_over_part_of_the_ranks(tp: int, cp: int, expected: set[int]) -> None:
    """Over those of a node of 8, doublings of it, or all; no group holds part of a sequence's ranks."""
    limits = SearchLimits(tp=(tp,), cp=(cp,), pp=(1,), micro_batch_size=(1,))
    arguments = (load_model("llama-3.2-1b"), ClusterSpec(hardware=load_hardware("h100"), num_gpus=32))
    training = TrainingSpec(seq_length=4096, global_batch_size=32)
    shapes, _ = enumerate_shapes(Case(*arguments, training, load_runtime("torchtitan"), limits))
    assert axis(shapes, "shard_size") == expected
    shapes, _ = enumerate_shapes(Case(*arguments, training, load_runtime("megatron"), limits))
    # the distributed optimizer shards over all ranks, Megatron-FSDP also over those of a node
    assert axis(shapes, "shard_size") == {32 // tp, *({8 // tp} if 8 // tp >= cp else ())}
    pinned = limits.model_copy(update={"shard_size": (8, 12)})
    shapes, rejections = enumerate_shapes(Case(*arguments, training, load_runtime("torchtitan"), pinned))
    assert axis(shapes, "shard_size") <= {8, 32 // tp}, "replicas alone (ZeRO-0) have no groups"
    assert rejections.counts["shard_size_not_dividing_dp_cp"] == 2


@pytest.mark.parametrize(("trainer", "expected"), [("internevo", {8, 64}), ("megatron", {64}), ("nanotron", {64})])
def test_a_sharded_optimizer_is_grouped_where_that_pays(trainer: str, expected: set[int]) -> None:
    """InternEvo waits for gathered weights; Megatron hides them, and its groups reduce more bytes between nodes."""
    limits = SearchLimits(tp=(1,), cp=(1,), pp=(1,), micro_batch_size=(4,), zero_stage=(1,))
    arguments = load_model("llama-3.2-1b"), ClusterSpec(hardware=load_hardware("h100"), num_gpus=64)
    training, runtime = TrainingSpec(seq_length=4096, global_batch_size=256), load_runtime(trainer)
    shapes, _ = enumerate_shapes(Case(*arguments, training, runtime, limits))
    assert axis(shapes, "shard_size") == expected
    # pinned, they are tried, or refused with a reason
    pinned = limits.model_copy(update={"shard_size": (8,)})
    shapes, rejections = enumerate_shapes(Case(*arguments, training, runtime, pinned))
    refused = {"shard_size_not_expressible": 1} if trainer == "nanotron" else {}
    assert (len(shapes.tp), rejections.counts) == (1 - len(refused), refused)


def test_stages_are_any_number_and_no_shape_comes_twice() -> None:
    problem = toy_problem(toy_model(7), toy_cluster(16), toy_training(16))
    shapes, _ = enumerated(problem)
    assert axis(shapes, "pp") == set(range(1, 8))
    axes = ("tp", "cp", "ep", "etp", "pp", "dp", "micro_batch_size", "zero_stage", "shard_size", "dp_outermost")
    keys = [tuple(getattr(s, a) for a in axes) for s in problem.shapes()]
    assert len(set(keys)) == len(keys)


def test_experts_that_are_not_there_are_split_as_the_rest_or_not_at_all() -> None:
    problem = toy_problem(toy_model(4), toy_cluster(8), toy_training(16))
    free, whole = (
        enumerated(problem)[0],
        enumerated(toy_problem(toy_model(4), toy_cluster(8), toy_training(16), etp=(1,)))[0],
    )
    assert np.array_equal(free.etp, free.tp)
    assert np.array_equal(whole.tp, free.tp)
    assert axis(whole, "etp") == {1}


def test_axes_of_a_large_cluster() -> None:
    model, training = load_model("deepseek-v3"), TrainingSpec(seq_length=4096, global_batch_size=2040)
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=2040)
    shapes, _ = enumerate_shapes(Case(model, cluster, training, load_runtime("megatron"), SearchLimits()))
    assert axis(shapes, "tp") == {1, 2, 4, 8}
    assert axis(shapes, "ep") <= set(divisors(256, 2040))
    assert axis(shapes, "etp") <= {1, 2, 4, 8}
    assert {3, 5, 15, 17} <= axis(shapes, "pp")
    assert max(axis(shapes, "micro_batch_size")) * 4096 <= MAX_MICRO_BATCH_TOKENS
    ranks = np.asarray(shapes.num_ranks)
    assert ranks.max() == 2040
    assert (ranks <= 2040).all()


REASONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "heads_not_divisible_by_tp": ({"tp": (3,)}, ["16", "tp 3"]),
    "kv_heads_not_divisible_by_tp": (
        {"model": toy_model(6, num_attention_heads=24, num_key_value_heads=8, head_dim=64), "tp": (3,)}, ["8", "tp 3"],
    ),
    "intermediate_size_not_divisible_by_tp": ({"model": toy_model(6, intermediate_size=5633), "tp": (2,)}, ["5633"]),
    "shared_expert_not_divisible_by_tp": (
        {"model": toy_model(6, moe=MOE | {"shared_expert_intermediate_size": 1001}), "tp": (2,)}, ["1001", "tp 2"],
    ),
    "moe_intermediate_size_not_divisible_by_etp": (
        {"model": toy_model(6, moe=MOE | {"moe_intermediate_size": 1023}), "tp": (2,), "etp": (2,)}, ["1023", "etp 2"],
    ),
    "experts_not_divisible_by_ep": (
        {"model": toy_model(6, moe=MOE), "ep": (3,), "training": toy_training(24)}, ["4", "ep 3"],
    ),
    "etp_without_experts": ({"tp": (4,), "etp": (2,)}, ["etp 2"]),
    "more_ranks_than_gpus": ({"pp": (4,), "tp": (4,)}, ["tp 4", "pp 4", "8 GPUs"]),
    "global_batch_not_divisible": ({"micro_batch_size": (5,)}, ["32", "5"]),
    "no_data_parallel_size": ({"dp": (3,)}, ["8 GPUs", "32"]),
    "more_stages_than_layers": ({"pp": (8,)}, ["pp 8", "6 layers"]),
    "too_many_actions": (
        {"model": toy_model(3000), "cluster": toy_cluster(3000), "pp": (3000,), "training": toy_training(3000)},
        ["pp 3000", "2,048 stages"],
    ),
    "tp_across_domains": ({"tp": (8,)}, ["tp 8", "4 GPUs", "--tp-across-nodes"]),
    "model_parallel_not_expressible": ({"tp": (2,), "runtime": "torch-fsdp"}, ["tp 2", "torch-fsdp"]),
    "cp_not_expressible": ({"cp": (2,), "runtime": "megatron-2022"}, ["cp 2", "megatron-2022"]),
    "zero_stage_not_expressible": ({"zero_stage": (3,), "runtime": "nanotron"}, ["zero_stage 3", "nanotron", "0, 1"]),
    "zero_stage_with_pp": ({"zero_stage": (3,), "pp": (2,)}, ["zero_stage 3 at pp 2", "megatron"]),
    "seq_length_not_divisible_by_2cp": ({"cp": (2,), "training": toy_training(32, 2050)}, ["2050", "4"]),
    "seq_length_not_divisible_by_tp_cp": ({"tp": (4,), "training": toy_training(32, 2050)}, ["2050", "4"]),
    "seq_length_beyond_positions": (
        {"model": toy_model(6, gated_mlp=False, max_position_embeddings=1024)}, ["2048", "1024"],
    ),
    "expert_bias_with_etp": ({"model": toy_model(6, moe=MOE, bias=True), "tp": (2,), "etp": (2,)}, ["etp 1", "2"]),
    "sliding_window_with_ring_cp": ({"model": toy_model(6, sliding_window=512), "cp": (2,)}, ["cp 2", "512"]),
    "attention_sinks_with_cp": ({"model": toy_model(6, attention_sinks=True), "cp": (2,)}, ["cp 2", "a2a"]),
    "mtp_hidden_size_not_divisible_by_tp": (
        {
            "model": toy_model(
                6, hidden_size=2047, num_attention_heads=16, head_dim=64, intermediate_size=4096,
                num_nextn_predict_layers=1,
            ),
            "tp": (2,),
        },
        ["2047", "tp 2"],
    ),
    "tied_embeddings_with_pp": (
        {"model": toy_model(6, tie_word_embeddings=True), "runtime": "torchtitan", "pp": (2,)}, ["2 stages"],
    ),
    "mtp_with_pp_or_cp": (
        {"model": toy_model(6, num_nextn_predict_layers=1), "runtime": "torchtitan", "pp": (2,)}, ["pp", "2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", REASONS)
def test_every_reason_is_reached_and_has_its_numbers(reason: str) -> None:
    changes, numbers = REASONS[reason]
    shapes, rejections = enumerated(toy_problem(**({"training": toy_training(32)} | changes)))
    assert not len(np.atleast_1d(shapes.tp))
    assert rejections.counts[reason] > 0
    for number in numbers:
        assert number in rejections.examples[reason]


def test_shapes_and_rejections_add_up_to_the_grid() -> None:
    """Each shape of the grid is either legal or counted once."""
    pins: dict[str, Any] = {
        "tp": (1, 2, 3, 4), "cp": (1, 2), "pp": (1, 2, 7), "micro_batch_size": (1, 3), "zero_stage": (0,),
    }  # fmt: skip
    pins |= {"rank_order": RANK_ORDERS[:1]}
    # 3 x 2 x 7 x ... exceeds 8 GPUs now and then: those are no shapes of this cluster, and not counted
    cluster = toy_cluster(64)
    shapes, rejections = enumerated(toy_problem(cluster=cluster, training=toy_training(512), **pins))
    assert len(shapes.tp) + sum(rejections.counts.values()) == 4 * 2 * 3 * 2


def options(shape: Shape, problem: Problem) -> set[tuple[str, int]]:
    return {
        (schedule, int(one.vpp))
        for one, schedule in schedule_options(shape, problem.model, problem.limits, problem.runtime)
    }


def test_schedules_of_a_shape() -> None:
    problem = toy_problem(toy_model(8))
    assert options(Shape(pp=1, num_microbatches=4), problem) == {("none", 1)}
    # Megatron interleaves whole groups of pp micro-batches
    assert options(Shape(pp=4, num_microbatches=6), problem) == {("1f1b", 1)}
    assert options(Shape(pp=4, num_microbatches=2), problem) == {("1f1b", 1)}
    # and may leave the ends of the pipeline without a layer: 8 layers fill 10 stages
    found = options(Shape(pp=2, num_microbatches=8), problem)
    assert found == {("1f1b", 1), *(("interleaved-1f1b", vpp) for vpp in (2, 3, 4, 5))}
    assert options(Shape(pp=2, num_microbatches=8), toy_problem(toy_model(8), vpp=(2,))) == {("interleaved-1f1b", 2)}
    # over two ranks only where sends and receives overlap compute
    waiting = problem.runtime.model_copy(update={"interleaved_p2p_overlap": False})
    assert options(Shape(pp=2, num_microbatches=8), replace(problem, runtime=waiting)) == {("1f1b", 1)}
    assert ("interleaved-1f1b", 2) in options(Shape(pp=4, num_microbatches=8), replace(problem, runtime=waiting))
    only = toy_problem(toy_model(8), schedule=("1f1b",))
    assert options(Shape(pp=2, num_microbatches=8), only) == {("1f1b", 1)}


@pytest.mark.parametrize("num_layers", range(1, 20))
@pytest.mark.parametrize("num_stages", [2, 4, 6])
@pytest.mark.parametrize("empty_ends", [False, True])
def test_equal_stages_but_for_the_ends(num_layers: int, num_stages: int, empty_ends: bool) -> None:
    least = 0 if empty_ends else 1
    exists = any(
        least <= num_layers - first - chunk * (num_stages - 2) <= chunk
        for chunk in range(1, num_layers + 1)
        for first in range(least, chunk + 1)
    )
    assert cuts_evenly(num_layers, num_stages, empty_ends) == exists


@pytest.mark.parametrize(("runtime", "schedule", "says"), TABLES["schedules_that_a_trainer_cannot_run"])
def test_schedules_that_a_trainer_cannot_run(runtime: str, schedule: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_expressible(SearchLimits(schedule=(schedule,)), load_runtime(runtime))
    assert says in caught.value.message
    assert "1f1b" in (caught.value.hint or "")


def test_a_trainer_without_selective_recompute_is_not_asked_for_it() -> None:
    """It would be priced all the same, and beat what the search may choose from."""
    limits, deepspeed = SearchLimits(recompute=("none", "selective")), load_runtime("megatron-deepspeed")
    with pytest.raises(SpecError, match="recompute: megatron-deepspeed has no selective recompute"):
        check_expressible(limits, deepspeed)
    check_expressible(limits, load_runtime("megatron"))


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
        "cluster": cluster, "training": toy_training(rng.choice([16, 32])), "tp": (rng.choice([1, 2, 4]),),
    }  # fmt: skip
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
        shapes, _ = enumerate_shapes(case_of(problem))
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
