"""From a plan to a run: the ranks that fit, the chunks they hold, a small model of the same structure."""

from __future__ import annotations

import pytest

from planner.errors import ProbeError
from planner.schedule.orders import build_schedule
from planner.specs.registry import load_model

pytest.importorskip("torch", reason="needs the probe extra (torch)")

from small_plans import plan_of, small_plan

from planner.probe.plan_runs import ranks_run, scaled_model, stand_in_stages
from planner.probe.plan_slice import RankGrid, fit_gpus, fit_processes, real_chunks, scaled_chunks
from planner.probe.probe import ProbeOptions
from planner.probe.run import ChunkSpec


@pytest.mark.parametrize("name", ["405b", "deepseek-v3", "gpt3-175b", "gpt-oss-20b", "gemma-3-27b", "bloom-176b"])
def test_a_model_in_small_keeps_its_structure(name: str) -> None:
    model, grid = load_model(name), RankGrid(pp=2, dp=2, cp=1, tp=2, ep=4)
    small = scaled_model(model, 64, 8, 16, grid)
    assert set(small.kinds) == set(model.kinds)
    assert small.num_attention_heads % grid.tp == small.num_key_value_heads % grid.tp == 0
    kept = ("gated_mlp", "activation", "norm", "qk_norm", "post_norms", "attention_sinks", "tie_word_embeddings")
    assert [getattr(small, field) for field in kept] == [getattr(model, field) for field in kept]
    assert small.moe is None or small.moe.num_experts % grid.ep == 0


def test_layers_shrink_in_proportion() -> None:
    chunks = [ChunkSpec(first_layer=a, last_layer=b) for a, b in ((0, 7), (7, 15), (15, 15), (15, 16))]
    assert [chunk.num_layers for chunk in scaled_chunks(chunks, 2)] == [2, 2, 0, 1]


def test_one_instance_of_a_sharded_optimizer_is_run() -> None:
    """The runner shards over all its replicas: as many as share one in the plan."""
    plan = plan_of(load_model("8b"), 64, 8192, 64, tp=4, dp=16, fsdp=4, zero_stage=1)
    assert fit_gpus(plan.best, 64).dp == 4
    assert ranks_run(plan, ProbeOptions(device="cuda"), num_gpus=64).run.dp_stands_for == 1
    assert fit_gpus(plan.best, 8).dp == 2
    assert ranks_run(plan, ProbeOptions(device="cuda"), num_gpus=8).run.dp_stands_for == 2


def test_gpus_take_whole_tensor_parallel_groups() -> None:
    plan = plan_of(load_model("8b"), 64, 8192, 64, tp=4, pp=4, dp=4)
    assert fit_gpus(plan.best, 32) == RankGrid(pp=4, dp=2, cp=1, tp=4, ep=1)
    assert fit_gpus(plan.best, 8) == RankGrid(pp=2, dp=1, cp=1, tp=4, ep=1)
    with pytest.raises(ProbeError, match="2 GPUs are less than one group of tp 4 × cp 1"):
        fit_gpus(plan.best, 2)
    with pytest.raises(ProbeError, match="4 GPUs are less than two of 4 stages of tp 4 × cp 1"):
        fit_gpus(plan.best, 4)
    with pytest.raises(ProbeError, match="--order has 4 ranks, the slice of the plan that fits here 2 stages"):
        ranks_run(plan, ProbeOptions(device="cuda", order=build_schedule("1f1b", 4, 1, 8)), num_gpus=8)


def test_an_order_with_more_chunks_splits_the_stages_layers_among_them() -> None:
    layout = plan_of(load_model("8b"), 4, 8192, 64, pp=4).best
    chunks = real_chunks(layout, build_schedule("zb-v", 4, 2, 8), range(4))
    assert sum(chunk.num_layers for chunk in chunks) == 32
    interleaved = small_plan(pp=2, vpp=3, schedule="interleaved-1f1b").best
    (whole,) = real_chunks(interleaved, build_schedule("none", 1, 1, 2), [0])
    assert whole.num_layers == interleaved.stages[0].num_layers


def test_sequences_are_split_over_as_many_ranks_as_planned_or_in_small_over_two() -> None:
    plan = plan_of(load_model("8b"), 64, 8192, 64, tp=2, cp=4, pp=4, dp=2)
    assert fit_gpus(plan.best, 32) == RankGrid(pp=4, dp=1, cp=4, tp=2, ep=1)
    assert fit_gpus(plan.best, 16) == RankGrid(pp=2, dp=1, cp=4, tp=2, ep=1)
    with pytest.raises(ProbeError, match="4 GPUs are less than one group of tp 2 × cp 4"):
        fit_gpus(plan.best, 4)
    assert fit_processes(plan.best, 16) == RankGrid(pp=4, dp=1, cp=2, tp=2, ep=1)
    assert fit_processes(plan.best, 8) == RankGrid(pp=4, dp=1, cp=2, tp=1, ep=1)
    assert fit_processes(plan.best, 4) == RankGrid(pp=4, dp=1, cp=1, tp=1, ep=1)
    _, run, grid, *_ = ranks_run(plan, ProbeOptions(), num_gpus=16)
    assert (run.world_size, run.seq_length, run.whole_seq_length) == (grid.num_ranks, 2048, 8192)
    assert [run.rank(run.place(rank)) for rank in range(16)] == list(range(16))
    assert run.place(8).pp == 1


def test_ranks_are_numbered_as_planned() -> None:
    plan = plan_of(load_model("8b"), 8, 8192, 64, tp=2, pp=2, dp=2, rank_order="tp-cp-ep-pp-dp")
    run = ranks_run(plan, ProbeOptions(), num_gpus=8).run
    assert [run.rank(run.place(rank)) for rank in range(8)] == list(range(8))
    assert [(run.place(rank).pp, run.place(rank).dp) for rank in range(0, 8, 2)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_stages_that_differ_only_in_place_are_run_once() -> None:
    plan = plan_of(load_model("8b"), 64, 8192, 64, tp=1, pp=4, vpp=2, dp=16, schedule="interleaved-1f1b")
    first = stand_in_stages(plan.best)
    assert first[0] == 0
    assert first[-1] == 3
    assert all(plan.stages[a].num_layers == plan.stages[b].num_layers for a, b in enumerate(first))
