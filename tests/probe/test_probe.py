"""From a plan to a result: the slice that runs, what it proves, what it measures, and the command around it."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from probes import probe_result, probe_run

from planner.answer import Plan
from planner.errors import ProbeError, SpecError
from planner.export.torch.schedule_csv import to_torch_csv
from planner.layout.evaluate import evaluate
from planner.schedule.orders import build_schedule
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec

pytest.importorskip("torch", reason="needs the probe extra (torch)")

import torch

from planner.cli import main
from planner.probe import slices
from planner.probe.compare import compare_data_parallel, compare_exchanges
from planner.probe.gpus import distinct_stages, ranks_result, ranks_run
from planner.probe.gradients import FlatParameters, Sharding
from planner.probe.probe import Options, probe, require_split
from planner.probe.result import Exchange, Measured, OutOfMemory, ProbeResult, RankMemory, StepSeconds
from planner.probe.trace import trace_events

ROOT = Path(__file__).parent.parent.parent
SMALL = {
    "name": "small",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def plan_of(
    model: ModelSpec, num_gpus: int, seq_length: int, batch: int, runtime: str = "torch-eager", **layout: Any
) -> Plan:
    return evaluate(
        model,
        ClusterSpec(hardware=load_hardware("h100"), num_gpus=num_gpus),
        TrainingSpec(seq_length=seq_length, global_batch_size=batch),
        Parallelism(**layout),
        runtime=runtime,
    )


def small_plan(**layout: Any) -> Plan:
    sizes = {"tp": 1, "cp": 1, "pp": 2, "dp": 1, **layout}
    num_gpus = prod(sizes[name] for name in ("tp", "cp", "pp", "dp"))
    return plan_of(ModelSpec(**SMALL), num_gpus, 32, 8, **sizes)


def run(plan: Plan, **options: Any) -> ProbeResult:
    result = probe(plan, Options(**{"num_steps": 1, "timeout_s": 60.0, **options}))
    assert result is not None
    return result


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
    assert [stage.stage for stage in result.activity] == [0, 1, 2]


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
        ranks_run(split, Options(), num_gpus=4)
    assert ranks_run(plan, Options(), num_gpus=2)[0].fully_sharded
    assert any("ZeRO-3" in what for what in run(split).slice.extrapolated)


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


@pytest.mark.parametrize(("schedule", "layout"), [("1f1b", {"pp": 4}), ("interleaved-1f1b", {"pp": 2, "vpp": 3})])
def test_the_bubble_of_sleeping_ranks(schedule: str, layout: dict[str, int]) -> None:
    plan = small_plan(schedule=schedule, **layout)
    for _ in range(8):  # a busy machine may wake one rank late
        result = run(plan, sleep=True)
        bubble = next(found for found in result.comparisons if found.name == "bubble")
        if bubble.agrees:
            break
    assert result.agrees
    assert abs(bubble.measured - bubble.predicted) <= 0.03


def test_stages_alone() -> None:
    plan = small_plan(tp=2, pp=3, dp=2)
    result = run(plan, stages="all")
    assert result.mode == "stages"
    assert [rank.stage for rank in result.ranks] == [0, 1, 2]
    names = {found.name for found in result.comparisons}
    assert names == {"forward", "backward", "weight gradient", "optimizer", "step"}
    # seconds of a CPU are not held against a GPU's
    assert all(found.agrees is None for found in result.comparisons)
    assert all(chunk.input_grad_s and chunk.weight_grad_s for rank in result.ranks for chunk in rank.chunks)
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
    one = result.model_copy(update={"ranks": result.ranks[:1]})
    assert trace_events(plan, one)["traceEvents"] == []


def test_a_stage_alone_repeats_its_step_and_has_finite_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(small_plan(), stages=1, num_steps=3)
    (rank,) = result.ranks
    took_s = [step.step_s for step in rank.steps]
    assert len(took_s) == 3
    assert result.step_spread_s == max(took_s) - min(took_s) > 0
    assert [(check.name, check.passed) for check in result.checks] == [("finite", True)]
    lost = rank.steps[0].model_copy(update={"gradient_norm": None})
    measured = Measured(run=result.run, ranks=(rank.model_copy(update={"steps": (lost, *rank.steps[1:])}),))
    monkeypatch.setattr("planner.probe.gpus.launch", lambda *_, **__: measured)
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


@pytest.mark.parametrize("name", ["405b", "deepseek-v3", "gpt3-175b", "gpt-oss-20b", "gemma-3-27b", "bloom-176b"])
def test_a_model_in_small_keeps_its_structure(name: str) -> None:
    model, grid = load_model(name), slices.Grid(pp=2, dp=2, cp=1, tp=2, ep=4)
    small = slices.scaled_model(model, 64, 8, 16, grid)
    assert set(small.kinds) == set(model.kinds)
    assert small.num_attention_heads % grid.tp == small.num_key_value_heads % grid.tp == 0
    kept = ("gated_mlp", "activation", "norm", "qk_norm", "post_norms", "attention_sinks", "tie_word_embeddings")
    assert [getattr(small, field) for field in kept] == [getattr(model, field) for field in kept]
    assert small.moe is None or small.moe.num_experts % grid.ep == 0


def test_layers_shrink_in_proportion() -> None:
    chunks = [slices.ChunkSpec(first_layer=a, last_layer=b) for a, b in ((0, 7), (7, 15), (15, 15), (15, 16))]
    assert [chunk.num_layers for chunk in slices.scaled_chunks(chunks, 2)] == [2, 2, 0, 1]


def test_one_instance_of_a_sharded_optimizer_is_run() -> None:
    """The runner shards over all its replicas: as many as share one in the plan."""
    plan = plan_of(load_model("8b"), 64, 8192, 64, tp=4, dp=16, fsdp=4, zero_stage=1)
    assert slices.fit_gpus(plan.best, 64).dp == 4
    assert ranks_run(plan, Options(device="cuda"), num_gpus=64)[0].dp_stands_for == 1
    assert slices.fit_gpus(plan.best, 8).dp == 2
    assert ranks_run(plan, Options(device="cuda"), num_gpus=8)[0].dp_stands_for == 2


def test_gpus_take_whole_tensor_parallel_groups() -> None:
    plan = plan_of(load_model("8b"), 64, 8192, 64, tp=4, pp=4, dp=4)
    assert slices.fit_gpus(plan.best, 32) == slices.Grid(pp=4, dp=2, cp=1, tp=4, ep=1)
    assert slices.fit_gpus(plan.best, 8) == slices.Grid(pp=2, dp=1, cp=1, tp=4, ep=1)
    with pytest.raises(ProbeError, match="2 GPUs are less than one group of tp 4 × cp 1"):
        slices.fit_gpus(plan.best, 2)
    with pytest.raises(ProbeError, match="4 GPUs are less than two of 4 stages of tp 4 × cp 1"):
        slices.fit_gpus(plan.best, 4)
    with pytest.raises(ProbeError, match="--order has 4 ranks, the slice of the plan that fits here 2 stages"):
        ranks_run(plan, Options(device="cuda", order=build_schedule("1f1b", 4, 1, 8)), num_gpus=8)


def test_an_order_with_more_chunks_splits_the_stages_layers_among_them() -> None:
    layout = plan_of(load_model("8b"), 4, 8192, 64, pp=4).best
    chunks = slices.real_chunks(layout, build_schedule("zb-v", 4, 2, 8), range(4))
    assert sum(chunk.num_layers for chunk in chunks) == 32
    interleaved = small_plan(pp=2, vpp=3, schedule="interleaved-1f1b").best
    (whole,) = slices.real_chunks(interleaved, build_schedule("none", 1, 1, 2), [0])
    assert whole.num_layers == interleaved.stages[0].num_layers


def test_what_ran_out_of_memory_is_held_against_the_stage_it_stands_for() -> None:
    plan, grid = plan_of(load_model("8b"), 4, 8192, 64, pp=4), slices.Grid(2, 1, 1, 1, 1)
    run, _, stages = ranks_run(plan, Options(device="cuda"), 2)
    memory = OutOfMemory(rank=1, stage=1, phase="warm-up", message="")
    measured = Measured(run=run, ranks=(), out_of_memory=memory)
    result = ranks_result(plan, Options(device="cuda"), measured, grid, stages)
    assert result.predicted_bytes == plan.stages[3].memory.total_bytes != plan.stages[1].memory.total_bytes


def compared_memory(plan: Plan, grid: slices.Grid, stages: list[int]) -> tuple[ProbeResult, dict[Any, Any]]:
    """What ranks that hold just what the plan says of them are said to hold."""
    run, _, _ = ranks_run(plan, Options(device="cuda"), grid.num_ranks)
    memory = RankMemory(static_bytes=1, peak_allocated_bytes=1, peak_reserved_bytes=1, device_used_bytes=1)
    ran = probe_result(plan, lambda j: (1e-3, 2e-3), stages=range(grid.pp), mode="ranks", run=run, memory=memory)
    ranks = tuple(rank.model_copy(update={"steps": rank.steps * run.num_steps}) for rank in ran.ranks)
    result = ranks_result(plan, Options(device="cuda"), Measured(run=run, ranks=ranks), grid, stages)
    return result, {(row.name, row.stage): row for row in result.comparisons}


def test_a_slice_with_less_dp_holds_what_the_plan_says() -> None:
    plan = plan_of(load_model("8b"), 16, 8192, 64, pp=4, dp=4)
    run, grid, stages = ranks_run(plan, Options(device="cuda"), 15)
    assert (grid, run.dp_stands_for) == (slices.Grid(pp=4, dp=2, cp=1, tp=1, ep=1), 2)
    _, found = compared_memory(plan, grid, stages)
    planned = plan.stages[1].memory
    static, peak = found["static memory", 1], found["peak allocated", 1]
    assert static.predicted == planned.weights_bytes + planned.gradients_bytes + planned.optimizer_bytes
    assert peak.predicted == planned.peak_allocated_bytes
    assert (static.agrees, peak.agrees) == (False, False)


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


def test_before_a_step_under_zero_3_there_are_neither_gathered_weights_nor_gradients() -> None:
    plan = plan_of(load_model("8b"), 16, 8192, 64, runtime="torchtitan", pp=2, dp=8, zero_stage=3)
    _, found = compared_memory(plan, slices.Grid(2, 8, 1, 1, 1), [0, 1])
    fp32_weights_and_moments = 3 * 4
    static = found["static memory", 0]
    assert static.predicted == pytest.approx(plan.stages[0].num_parameters / 8 * fp32_weights_and_moments)
    assert static.agrees is None


def test_a_slice_with_fewer_stages_holds_fewer_micro_batches_and_no_peak_is_judged() -> None:
    plan = plan_of(load_model("8b"), 16, 8192, 64, pp=4, dp=4)
    result, found = compared_memory(plan, slices.Grid(2, 1, 1, 1, 1), [0, 3])
    assert (found["static memory", 0].agrees, found["peak allocated", 0].agrees) == (False, None)
    assert any("in flight as planned" in what for what in result.slice.extrapolated)


def test_sequences_are_split_over_as_many_ranks_as_planned_or_in_small_over_two() -> None:
    plan = plan_of(load_model("8b"), 64, 8192, 64, tp=2, cp=4, pp=4, dp=2)
    assert slices.fit_gpus(plan.best, 32) == slices.Grid(pp=4, dp=1, cp=4, tp=2, ep=1)
    assert slices.fit_gpus(plan.best, 16) == slices.Grid(pp=2, dp=1, cp=4, tp=2, ep=1)
    with pytest.raises(ProbeError, match="4 GPUs are less than one group of tp 2 × cp 4"):
        slices.fit_gpus(plan.best, 4)
    assert slices.fit_grid(plan.best, 16, most_dp=2) == slices.Grid(pp=4, dp=1, cp=2, tp=2, ep=1)
    assert slices.fit_grid(plan.best, 8, most_dp=2) == slices.Grid(pp=4, dp=1, cp=2, tp=1, ep=1)
    assert slices.fit_grid(plan.best, 4, most_dp=2) == slices.Grid(pp=4, dp=1, cp=1, tp=1, ep=1)
    run, grid, _ = ranks_run(plan, Options(), num_gpus=16)
    assert (run.world_size, run.seq_length, run.whole_seq_length) == (grid.num_ranks, 2048, 8192)
    assert [run.rank(run.place(rank)) for rank in range(16)] == list(range(16))


@pytest.mark.parametrize("exchange", ["p2p", "all_gather"])
def test_a_plans_ring_is_named_among_what_was_not_measured(exchange: str) -> None:
    plan = small_plan(cp=2)
    assert plan.runtime_spec.cp_comm_type == "all_gather", "as the probe's ranks do"
    runtime = plan.runtime_spec.model_copy(update={"cp_comm_type": exchange})
    plan = plan.model_copy(update={"runtime_spec": runtime})
    ran = probe_result(plan, lambda stage: (1e-3, 2e-3), mode="ranks", run=probe_run(plan, num_steps=1))
    grid, measured = slices.Grid(pp=2, dp=1, cp=2, tp=1, ep=1), Measured(run=ran.run, ranks=ran.ranks)
    result = ranks_result(plan, Options(device="cuda"), measured, grid, [0, 1])
    assert any("by p2p" in what for what in result.slice.extrapolated) == (exchange == "p2p")


@pytest.mark.parametrize(
    ("device", "changes", "seq_length", "message"),
    [
        ("cpu", {}, 30, "sequences of 30 tokens do not split into two equal chunks for each of cp 2 ranks"),
        ("cuda", {"position_embedding": "alibi"}, 32, r"split sequences \(cp 2\) takes no ALiBi"),
        ("cuda", {"attention_chunk_size": 8}, 32, r"split sequences \(cp 2\) takes no chunks of 8 tokens"),
    ],
)
def test_what_cannot_be_split(device: Any, changes: dict[str, Any], seq_length: int, message: str) -> None:
    plan = small_plan(cp=2)
    model = plan.model.model_copy(update={"spec": ModelSpec(**SMALL | changes)})
    training = plan.training.model_copy(update={"seq_length": seq_length})
    with pytest.raises(ProbeError, match=message):
        probe(plan.model_copy(update={"model": model, "training": training}), Options(device=device))


def test_chunks_as_long_as_the_sequence_are_no_reason_not_to_split_it() -> None:
    plan = small_plan(cp=2)
    model = plan.model.model_copy(update={"spec": ModelSpec(**SMALL, attention_chunk_size=32)})
    require_split(plan.model_copy(update={"model": model}), Options(device="cuda"))


@pytest.mark.parametrize("loss", [2.5, float("nan")])
def test_ranks_on_gpus_are_compared_in_time_memory_and_loss(loss: float, capsys: pytest.CaptureFixture[str]) -> None:
    from planner.cli.output import show
    from planner.cli.probe_report import render

    plan = small_plan()
    memory = RankMemory(static_bytes=1, peak_allocated_bytes=2, peak_reserved_bytes=3, device_used_bytes=4)
    ran = probe_result(plan, lambda stage: (1e-3, 2e-3), mode="ranks", run=probe_run(plan, num_steps=1), memory=memory)
    step = StepSeconds(**{**ran.ranks[0].steps[0].model_dump(), "loss": loss})
    ranks = [rank.model_copy(update={"steps": (step,)}) for rank in ran.ranks]
    measured = Measured(run=ran.run, ranks=tuple(ranks))
    result = ranks_result(plan, Options(device="cuda"), measured, slices.Grid(pp=2, dp=1, cp=1, tp=1, ep=1), [0, 1])
    found = {(row.name, row.stage): row for row in result.comparisons}
    for name in ("forward", "backward", "optimizer", "wait for messages", "static memory", "peak allocated"):
        assert {(name, 0), (name, 1)} <= found.keys()
    assert found["peak reserved", 0].measured == 3
    # the first stage waits in the middle and at the end of 1f1b, the last one for its first micro-batch
    assert found["wait for messages", 0].predicted > found["wait for messages", 1].predicted > 0
    assert found["bubble", None].predicted == pytest.approx(1 / 3, abs=0.2)
    (finite,) = [check for check in result.checks if check.name == "finite"]
    assert finite.passed == (loss == 2.5)
    show(render(result))
    printed = " ".join(capsys.readouterr().out.split())
    assert ("(median of 1); loss 2.5000" if loss == 2.5 else "FAILED finite loss not finite") in printed


def test_stages_that_differ_only_in_place_are_run_once() -> None:
    plan = plan_of(load_model("8b"), 64, 8192, 64, tp=1, pp=4, vpp=2, dp=16, schedule="interleaved-1f1b")
    first = distinct_stages(plan.best)
    assert first[0] == 0
    assert first[-1] == 3
    assert all(plan.stages[a].num_layers == plan.stages[b].num_layers for a, b in enumerate(first))


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(small_plan().to_json()))
    return str(path)


def test_command_prints_json_and_traces(plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert main(["probe", plan_file, "--device", "cpu", "--steps", "1", "--json", "--trace", str(trace)]) == 0
    result = ProbeResult.model_validate_json(capsys.readouterr().out)
    assert result.agrees
    events = json.loads(trace.read_text())["traceEvents"]
    spans = {(event["pid"], event["name"]) for event in events if event["ph"] == "X"}
    assert {(0, "0F0"), (1, "0F0"), (0, "1B3"), (1, "1B3")} <= spans
    ends = [
        max(event["ts"] + event["dur"] for event in events if event.get("pid") == pid and "dur" in event)
        for pid in (0, 1)
    ]
    assert ends[0] == pytest.approx(ends[1]), "of the model in small as long as of the plan"
    assert any("to be as long as measured" in event["args"]["name"] for event in events if event["ph"] == "M")


@pytest.mark.parametrize("options", [[], ["--stage", "1"], ["--sleep"]])
def test_a_tolerance_that_judges_nothing_is_told(
    options: list[str], plan_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["probe", plan_file, "--device", "cpu", "--steps", "1", "--tolerance", "1e-9", *options])
    assert code == 0 or options == ["--sleep"]
    assert "--tolerance 1e-09: nothing that this run measured is judged by it" in capsys.readouterr().err


def test_command_splits_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(small_plan(tp=2, cp=2, pp=2).to_json()))
    assert main(["probe", str(path), "--device", "cpu", "--steps", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "run TP 2 × CP 2 × PP 2 × DP 1" in printed
    assert "ok loss" in printed
    assert "cp all-gather of " in printed
    assert " KiB over 2 ranks" in printed
    assert "0.00 MiB" not in printed
    assert "not measured: GPU seconds" in printed


def test_a_mismatch_is_exit_code_6(
    plan_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import faulty

    monkeypatch.setattr("planner.probe.gpus.stage_child", faulty.stage_out_of_memory)
    assert main(["probe", plan_file, "--device", "cpu", "--stage", "1"]) == 6
    captured = capsys.readouterr()
    assert "stage 1 (rank 1) asked for 2.5 GiB more in warm-up, at 1F0" in " ".join(captured.out.split())
    assert "error: the run contradicts the plan" in captured.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "--device: 'tpu' is unknown"),
        (["--stage", "x"], "--stage: 'x' is no stage"),
        (["--steps", "0"], "--steps: 0 is too small"),
        (["--timeout", "-1"], "must be positive"),
        (["--order", "ORDER", "--stage", "all"], "--order: a stage alone follows the plan's own schedule"),
        (["--sleep", "--stage", "all"], "--sleep: ranks sleep on the CPU only"),
        (["--stage", "0", "--trace", "t.json"], "--trace: of stage 0 alone there is no pipeline to draw"),
        (["-o", "same.json", "--trace", "./same.json"], "-o, --trace: both name same.json"),
    ],
)
def test_wrong_options(
    options: list[str], message: str, plan_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = tmp_path / "order.csv"
    order.write_text(to_torch_csv(build_schedule("1f1b", 2, 1, 2)))
    options = [str(order) if option == "ORDER" else option for option in options]
    assert main(["probe", plan_file, *options]) == 2
    assert message in capsys.readouterr().err


def test_a_report_is_printed_before_a_file_that_cannot_be_written(
    plan_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probed = run(small_plan(), stages="all")
    monkeypatch.setattr("planner.probe.probe.probe", lambda plan, options: probed)
    folder = tmp_path / "gone"
    folder.mkdir()

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("planner.files._replace", full)
    assert main(["probe", plan_file, "--stage", "all", "-o", str(folder / "probe.json")]) == 1
    captured = capsys.readouterr()
    assert "the run agrees with the plan" in captured.out
    assert "each stage: median of 1" in captured.out
    assert "probe.json: cannot be written: No space left on device" in captured.err


def test_a_trace_without_a_step_is_not_written(
    plan_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probed = run(small_plan(), stages=0)
    monkeypatch.setattr("planner.probe.probe.probe", lambda plan, options: probed)
    trace = tmp_path / "trace.json"
    assert main(["probe", plan_file, "--stage", "all", "--trace", str(trace)]) == 0
    assert "trace.json is not written: no step ran to its end" in capsys.readouterr().err
    assert not trace.exists()


def test_help_says_what_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--help"]) == 0
    assert "Save what was measured" in capsys.readouterr().out


def test_a_file_that_is_no_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.json"
    path.write_text('{"hidden_size": 1}')
    assert main(["probe", str(path)]) == 2
    assert "is not a plan" in capsys.readouterr().err


def test_no_gpu(plan_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["probe", plan_file, "--device", "cuda"]) == 5
    assert "torch sees no GPU" in capsys.readouterr().err


def test_exchanges_are_shown_beside_what_the_links_say() -> None:
    plan = small_plan(tp=2, pp=2, dp=2)
    ran = probe_result(plan, lambda stage: (1e-3, 2e-3), mode="ranks", run=probe_run(plan, num_steps=1))
    size = 2**30
    timed = [
        Exchange(name=name, size=2, num_bytes=size, seconds=seconds, bus_gb_per_s=1.0)
        for name, seconds in (("tp all-reduce", 1e-3), ("gradient reduce-scatter", 2e-3))
    ]
    slow = timed[0].model_copy(update={"seconds": 5e-3})
    ranks = [
        rank.model_copy(update={"exchanges": (slow if number else timed[0], timed[1])})
        for number, rank in enumerate(ran.ranks)
    ]
    found = {one.name: one for one in compare_exchanges(plan.cluster, ran.run, ranks)}
    inner = plan.cluster.tiers[0]
    assert found["tp all-reduce"].measured == 5e-3
    # half of the bytes twice, or once, and a latency for each pass
    assert found["tp all-reduce"].predicted == pytest.approx(size / inner.bytes_per_s + 2 * inner.latency_s)
    scatter_s = size / 2 / inner.bytes_per_s + inner.latency_s
    assert found["gradient reduce-scatter"].predicted == pytest.approx(scatter_s)
    assert all(one.agrees is None for one in found.values())


def test_a_steps_sums_and_gathers_are_shown_beside_what_the_links_say() -> None:
    plan = small_plan(tp=2, pp=2, dp=2)
    ran = probe_result(plan, lambda stage: (1e-3, 2e-3), mode="ranks", run=probe_run(plan, num_steps=1))
    timed = tuple(
        Exchange(name=name, size=2, num_bytes=2**30, seconds=1e-3, bus_gb_per_s=1.0)
        for name in ("tp all-reduce", "gradient reduce-scatter", "weight all-gather")
    )
    step = ran.ranks[0].steps[0].model_copy(update={"reduce_s": 3e-3, "gather_s": 4e-3})
    rank = ran.ranks[0].model_copy(update={"exchanges": timed, "steps": (step,)})
    found = compare_data_parallel(plan.cluster, ran.run, [rank], 0)
    assert [(one.name, one.measured, one.agrees) for one in found] == [
        ("gradients summed", 3e-3, None),
        ("weights gathered", 4e-3, None),
    ]
    alone = compare_exchanges(plan.cluster, ran.run, [rank])
    assert [one.predicted for one in found] == [one.predicted for one in alone[1:]]
    of_experts = rank.model_copy(update={"exchanges": (timed[1].model_copy(update={"size": 4}),)})
    assert compare_data_parallel(plan.cluster, ran.run, [of_experts], 0) == []
