"""From a plan to a result: the slice that runs, what it proves, and what it measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tables import beside

from planner.errors import ProbeError, SpecError
from planner.schedule.orders import build_schedule
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model

pytest.importorskip("torch", reason="needs the probe extra (torch)")

import torch.distributed.fsdp
from small_plans import SMALL, TRACED, plan_of, run, small_plan
from torch.utils.flop_counter import FlopCounterMode

from planner.physics.layers import decoder_layer
from planner.physics.operators import operators_of
from planner.probe.model.chunk import Chunk, initialise
from planner.probe.model.peers import Surroundings
from planner.probe.plan_runs import ranks_run, require_split
from planner.probe.probe import ProbeOptions, probe, trace_events
from planner.probe.rank.gradients import FlatParameters, Sharding
from planner.probe.result import MeasuredRun
from planner.probe.run import ChunkSpec
from planner.probe.run_price import EAGER
from planner.shape import Shape

TABLES = beside(__file__)

ROOT = Path(__file__).parent.parent.parent


def test_a_slice_of_a_large_plan_runs_and_agrees() -> None:
    plan = plan_of(load_model("deepseek-v2-lite"), 64, 4096, 64, tp=2, pp=3, dp=8, cp=1, ep=16, etp=1)
    result = run(plan, num_processes=6)
    assert result.agrees
    assert {check.name for check in result.checks} == {
        "order", "exchanges", "in flight", "loss", "gradients", "gradient norm",
    }  # fmt: skip
    assert "DP 8 → 1" in result.slice.reduced
    assert result.run.model.moe is not None
    assert result.run.model.mla is not None
    assert {kind.mlp for kind in result.run.model.layers} == {"dense", "moe"}


def test_a_traced_model_runs_by_its_operators() -> None:
    model = ModelSpec(**SMALL | TRACED)
    result = run(plan_of(model, 4, 32, 8, tp=1, pp=2, dp=2, cp=1))
    assert result.agrees
    assert {"loss", "gradients", "gradient norm"} <= {check.name for check in result.checks}
    assert any("module's own code" in what for what in result.slice.extrapolated)


def test_a_traced_layer_takes_the_flops_of_its_operators() -> None:
    model = ModelSpec(**SMALL | TRACED)
    chunk = Chunk(model, ChunkSpec(first_layer=0, last_layer=2), Surroundings())
    initialise(chunk, 0)
    shape, x = Shape(micro_batch_size=2, seq_length=32), torch.randn(32, 2, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        chunk(x, x, x, None).square().sum().backward()
    operators = [op for kind in model.layers[:2] for op in operators_of(decoder_layer(model, kind, shape, EAGER))]
    products = sum(op.forward_flops for op in operators if op.kind == "gemm")
    assert counted.get_total_flops() == 3 * products, "torch counts no attention of a CPU"
    assert len(list(chunk.parameters())) == 6, "two norms and scales: the second layer shares the first one's matrices"
    grads = [weight.grad for weight in chunk.parameters() if weight.grad is not None]
    assert len(grads) == 6
    assert all(grad.abs().max() > 0 for grad in grads)
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 6, "none adds to another's"


def test_what_a_small_slice_does_not_exchange_is_named() -> None:
    plan = plan_of(load_model("deepseek-v2-lite"), 64, 4096, 64, tp=2, pp=3, dp=8, cp=1, ep=16, etp=1)
    result = run(plan, num_processes=3)
    unshared = {f"{axis}-parallel exchanges" for axis in ("tensor", "data", "expert")}
    assert {what for what in result.slice.extrapolated if what.endswith("-parallel exchanges")} == unshared
    assert "exchanges" in result.slice.verified
    alone = run(plan, num_processes=1)
    assert "pipeline-parallel exchanges" in alone.slice.extrapolated
    assert "exchanges" not in {*alone.slice.verified, *(check.name for check in alone.checks)}


def test_zero_3_is_run_where_no_backward_is_split() -> None:
    plan = small_plan(pp=1, dp=2, zero_stage=3)
    result = run(plan)
    assert result.run.fully_sharded
    assert result.agrees
    assert not any("ZeRO" in what for what in result.slice.extrapolated)
    split = small_plan(pp=2, dp=2, zero_stage=3, schedule="zb-h1")
    with pytest.raises(ProbeError, match="no ZeRO-3 under zb-h1"):
        ranks_run(split, ProbeOptions(), num_gpus=4)
    assert ranks_run(plan, ProbeOptions(), num_gpus=2).run.fully_sharded
    assert any("ZeRO-3" in what for what in run(split).slice.extrapolated)


def test_a_torch_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0+cu128")
    with pytest.raises(ProbeError, match=r"torch 2\.8\.0\S* is too old"):
        run(small_plan(pp=2))


def test_a_stage_alone_under_zero_3_holds_its_shard() -> None:
    result = run(small_plan(pp=2, dp=4, zero_stage=3), stages=1)
    assert not any("ZeRO" in what for what in result.slice.extrapolated)
    (rank,) = result.ranks
    assert rank.num_parameters == small_plan(pp=2, dp=4, zero_stage=3).stages[1].num_parameters
    assert all(chunk.backward_s > 0 and chunk.weight_grad_s is None for chunk in rank.chunks)


def test_another_order_than_the_plans() -> None:
    result = run(small_plan(), order=build_schedule("zb-v", 2, 2, 4))
    assert result.agrees
    assert "zb-v" in result.slice.run


def test_stages_alone() -> None:
    plan = small_plan(tp=2, pp=3, dp=2)
    result = run(plan, stages="all")
    assert result.mode == "stages"
    assert [rank.stage for rank in result.ranks] == [0, 1, 2]
    names = {comparison.name for comparison in result.comparisons}
    assert names == {"forward", "backward", "optimizer", "step"}
    # seconds of a CPU are not held against a GPU's
    assert all(comparison.agrees is None for comparison in result.comparisons)
    assert result.step_s is not None
    assert result.slice.verified == ("compute seconds of each stage that ran",)
    assert "memory" in result.slice.extrapolated
    spans = [event for event in trace_events(plan, result)["traceEvents"] if event["ph"] == "X"]
    actions = [action for rank in result.run.ranks for action in rank]
    assert sorted(event["name"] for event in spans if event["pid"] == 0) == sorted(actions)
    took = {event["name"]: event["dur"] for event in spans if event["pid"] == 0}
    stage = plan.best.stages[1]
    assert took["1F0"] == pytest.approx(1e6 * (result.ranks[1].chunks[0].forward_s + stage.forward_comm_s))
    # of one stage there is no pipeline to draw
    first_stage = result.model_copy(update={"ranks": result.ranks[:1]})
    assert trace_events(plan, first_stage)["traceEvents"] == []


def test_a_stage_alone_repeats_its_step_and_has_finite_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(small_plan(), stages=1, num_steps=3)
    (rank,) = result.ranks
    took_s = [step.step_s for step in rank.steps]
    assert len(took_s) == 3
    assert result.step_spread_s == max(took_s) - min(took_s) > 0
    assert [(check.name, check.passed) for check in result.checks] == [("finite", True)]
    lost = rank.steps[0].model_copy(update={"gradient_norm": None})
    measured = MeasuredRun(run=result.run, ranks=(rank.model_copy(update={"steps": (lost, *rank.steps[1:])}),))
    monkeypatch.setattr("planner.probe.probe.launch", lambda *_, **__: measured)
    assert [check.passed for check in run(small_plan(), stages=1, num_steps=3).checks] == [False]


@pytest.mark.parametrize("stages", [0, "all"])
def test_a_stage_larger_than_the_machine_is_not_begun(stages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan(pp=2)
    largest = max(stage.memory.peak_allocated_bytes for stage in plan.stages)
    assert plan.stages[0].memory.peak_allocated_bytes == largest
    monkeypatch.setattr("os.sysconf", lambda name: {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": largest - 1}[name])
    with pytest.raises(ProbeError, match=r"--stage 0: its tensors are .* GiB, this machine has") as caught:
        run(plan, stages=stages)
    assert "leave out --stage" in caught.value.hint
    assert run(plan).agrees


def test_stages_alone_of_split_sequences() -> None:
    result = run(small_plan(tp=2, cp=2, pp=2), stages=1)
    assert (result.run.seq_length, result.run.world_size) == (16, 8)
    assert result.ranks[0].num_parameters == small_plan(tp=2, cp=2, pp=2).stages[1].num_parameters


def test_one_stage_alone_among_experts() -> None:
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    plan = plan_of(ModelSpec(**{**SMALL, "moe": moe}), 8, 32, 16, tp=2, pp=2, dp=2, ep=4, etp=1)
    result = run(plan, stages=1)
    planned = plan.stages[1].num_parameters
    assert [(rank.stage, rank.num_parameters) for rank in result.ranks] == [(1, planned)]
    with pytest.raises(SpecError, match="--stage 2: the plan has stages 0 to 1"):
        run(plan, stages=2)


def test_a_rank_that_stands_for_several_sums_for_all_and_steps_as_one() -> None:
    """Of 10 values in 4 shards of 3: the norm is that of all, the state and the new weights the first shard's."""
    parameter = torch.nn.Parameter(torch.ones(10))
    flat = FlatParameters([parameter], [], Sharding(stands_for=4), torch.float32, learning_rate=0.1)
    (parameter * torch.arange(1.0, 11.0)).sum().backward()  # type: ignore[no-untyped-call]
    flat.reduce()
    assert float(flat.squared_norm()) == pytest.approx(sum(i * i for i in range(1, 11)))
    assert flat.master.shape == (3,)
    flat.step(torch.tensor(1.0))
    assert (flat.weights[:3] < 1).all()
    assert torch.equal(flat.weights[3:10], torch.ones(7)), "nobody has their state"
    assert not flat.grads.any()


@pytest.mark.parametrize(("device", "changes", "seq_length", "message"), TABLES["what_cannot_be_split"])
def test_what_cannot_be_split(device: Any, changes: dict[str, Any], seq_length: int, message: str) -> None:
    plan = small_plan(cp=2)
    model = plan.model.model_copy(update={"spec": ModelSpec(**SMALL | changes)})
    training = plan.training.model_copy(update={"seq_length": seq_length})
    with pytest.raises(ProbeError, match=message):
        probe(plan.model_copy(update={"model": model, "training": training}), ProbeOptions(device=device))


def test_chunks_as_long_as_the_sequence_are_no_reason_not_to_split_it() -> None:
    plan = small_plan(cp=2)
    model = plan.model.model_copy(update={"spec": ModelSpec(**SMALL, attention_chunk_size=32)})
    require_split(plan.model_copy(update={"model": model}), ProbeOptions(device="cuda"))
