"""Candidate shapes: which axes are tried, how many ranks they use, and the numbered reason of every shape refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toys import MOE, Problem, toy_cluster, toy_model, toy_problem, toy_training

from planner.errors import SpecError
from planner.search.enumerate import (
    MAX_MICRO_BATCH_TOKENS,
    Rejections,
    check_expressible,
    cuts_evenly,
    enumerate_shapes,
    schedule_options,
)
from planner.shape import RANK_ORDERS, Shape, divisors
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import SearchLimits, TrainingSpec
from planner.trainers.load import RUNTIMES, load_runtime
from planner.trainers.rules.recipe import rules_for


def enumerated(problem: Problem) -> tuple[Shape, Rejections]:
    return enumerate_shapes(problem.model, problem.cluster, problem.training, problem.limits, problem.runtime)


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
    shapes, _ = enumerate_shapes(*arguments, training, limits, load_runtime("torchtitan"))
    assert axis(shapes, "shard_size") == expected
    shapes, _ = enumerate_shapes(*arguments, training, limits, load_runtime("megatron"))
    # the distributed optimizer shards over all ranks, Megatron-FSDP also over those of a node
    assert axis(shapes, "shard_size") == {32 // tp, *({8 // tp} if 8 // tp >= cp else ())}
    pinned = limits.model_copy(update={"shard_size": (8, 12)})
    shapes, rejections = enumerate_shapes(*arguments, training, pinned, load_runtime("torchtitan"))
    assert axis(shapes, "shard_size") <= {8}
    assert rejections.counts["shard_size_not_dividing_dp_cp"] == 1


@pytest.mark.parametrize(("trainer", "expected"), [("internevo", {8, 64}), ("megatron", {64}), ("nanotron", {64})])
def test_a_sharded_optimizer_is_grouped_where_that_pays(trainer: str, expected: set[int]) -> None:
    """InternEvo waits for gathered weights; Megatron hides them, and its groups reduce more bytes between nodes."""
    limits = SearchLimits(tp=(1,), cp=(1,), pp=(1,), micro_batch_size=(4,), zero_stage=(1,))
    arguments = load_model("llama-3.2-1b"), ClusterSpec(hardware=load_hardware("h100"), num_gpus=64)
    training, runtime = TrainingSpec(seq_length=4096, global_batch_size=256), load_runtime(trainer)
    shapes, _ = enumerate_shapes(*arguments, training, limits, runtime)
    assert axis(shapes, "shard_size") == expected
    # pinned, they are tried, or refused with a reason
    pinned = limits.model_copy(update={"shard_size": (8,)})
    shapes, rejections = enumerate_shapes(*arguments, training, pinned, runtime)
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
    shapes, _ = enumerate_shapes(model, cluster, training, SearchLimits(), load_runtime("megatron"))
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
        "tp": (1, 2, 3, 4),
        "cp": (1, 2),
        "pp": (1, 2, 7),
        "micro_batch_size": (1, 3),
        "zero_stage": (0,),
    }
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


@pytest.mark.parametrize(
    ("runtime", "schedule", "says"),
    [
        ("megatron", "zb-v", "megatron cannot run 'zb-v'"),
        ("megatron", "1f2b", "unknown '1f2b'"),
        ("torchtitan", "dualpipe", "torchtitan cannot run 'dualpipe'"),
    ],
)
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
