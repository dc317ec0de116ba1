"""Ranks are held against the price of eager torch, which they run, whatever trainer and dtype the plan is for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from priced_plans import priced_plan
from tables import beside

from planner.answer import Plan
from planner.errors import ProbeError, SpecError
from planner.specs.cluster import ClusterSpec

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")


from planner.cli import main  # noqa: E402
from planner.cli.measurements import read_probe  # noqa: E402
from planner.probe.evidence import slowness  # noqa: E402
from planner.probe.plan_runs import ranks_run  # noqa: E402
from planner.probe.plan_slice import ProbeOptions, planned_seconds  # noqa: E402
from planner.probe.probe import judge_ranks  # noqa: E402
from planner.probe.result import (  # noqa: E402
    ChunkSeconds,
    MeasuredRun,
    ProbedMemory,
    ProbeResult,
    RankOutOfMemory,
    RankResult,
    StepSeconds,
    TimedAction,
)
from planner.probe.run import ProbeRun  # noqa: E402
from planner.probe.run_price import EAGER, in_eager_torch  # noqa: E402
from planner.profile.probe_calibration import from_probe  # noqa: E402
from planner.schedule.replay import replay  # noqa: E402

TABLES = beside(__file__)

PLANS: dict[str, dict[str, Any]] = TABLES["plans"]


def make_plan(model: str = "8b", dtype: str = "bf16", moe_imbalance: float = 1.0, **more: Any) -> Plan:
    training = {"dtype": dtype, "moe_imbalance": moe_imbalance}
    return priced_plan(model, training=training, **{"hardware": "h200", "tp": 2, "pp": 4, "dp": 1} | more)


def rank_as_priced(
    plan: Plan, run: ProbeRun, rank: int, factor: float, alone: bool, kernels: tuple[str, ...] = ()
) -> RankResult:
    """A rank as slow as `factor` times the price of eager torch with `kernels` of attention, which needs its bytes."""
    eager, place = in_eager_torch(plan, kernels, alone), run.place(rank)
    stage, took = eager.stages[place.pp], planned_seconds(eager.best, run.order, range(run.pp))
    timeline = replay(run.order, took)
    spans = zip(run.ranks[place.pp], timeline.start_s[place.pp], timeline.end_s[place.pp], strict=True)
    beside = (stage.forward_comm_s, stage.backward_comm_s) if alone else (0.0, 0.0)
    memory = stage.memory
    step = StepSeconds(
        pipeline_s=1.0, reduce_s=0.0, optimizer_s=factor * stage.optimizer_s, step_s=1.0, loss=1.0, gradient_norm=1.0
    )
    actions = tuple(
        TimedAction(action=action, ready_s=factor * start, start_s=factor * start, end_s=factor * end)
        for action, start, end in spans
    )
    chunks = tuple(
        ChunkSeconds(
            stage=virtual, forward_s=factor * (took.forward_s[virtual] - beside[0]),
            backward_s=factor * (took.input_grad_s[virtual] + took.weight_grad_s[virtual] - beside[1]),
        )
        for virtual in run.stages_of(place.pp)
    )  # fmt: skip
    held = ProbedMemory(
        static_bytes=memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes,
        peak_allocated_bytes=memory.peak_allocated_bytes, peak_reserved_bytes=memory.peak_allocated_bytes,
        device_used_bytes=memory.total_bytes,
    )  # fmt: skip
    return RankResult(
        rank=rank, attention_kernels=kernels, stage=place.pp, dp=place.dp, tp=place.tp, torch_version="2.13",
        device_name="NVIDIA H200", num_parameters=1, steps=(step,) * run.num_steps, actions=actions, chunks=chunks,
        peak_in_flight_chunks=int(timeline.peak_in_flight_chunks[place.pp]), memory=held,
    )  # fmt: skip


@pytest.fixture
def probe_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`plan probe` on eight GPUs that take `factor` times as long as eager torch is priced: exit code and result."""

    def probe(
        plan: Plan, factor: float, *options: str, kernels: tuple[str, ...] = (), one_by_one: bool = False
    ) -> tuple[int, ProbeResult]:
        def launch(run: ProbeRun, child: Any = None, ranks: Any = ()) -> MeasuredRun:
            update = {"experts_one_by_one": one_by_one}
            ranks_as_priced = (
                rank_as_priced(plan, run, rank, factor, bool(ranks), kernels).model_copy(update=update)
                for rank in ranks or range(run.world_size)
            )
            return MeasuredRun(run=run, ranks=tuple(ranks_as_priced))

        monkeypatch.setattr("planner.probe.probe.launch", launch)
        monkeypatch.setattr("planner.probe.probe.capacity_bytes", lambda plan: math.inf)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
        saved = tmp_path / "probe.json"
        code = main(["probe", str(tmp_path / "plan.json"), "--device", "cuda", "--force", "-o", str(saved), *options])
        return code, read_probe(str(saved))

    return probe


@pytest.mark.thorough(2)
@pytest.mark.parametrize("options", [(), ("--stage", "all")], ids=["ranks", "stages"])
@pytest.mark.parametrize("name", PLANS)
def test_gpus_as_fast_as_eager_torch_is_priced_agree_and_slower_ones_do_not(
    name: str, options: tuple[str, ...], probe_it: Any
) -> None:
    plan = make_plan(**PLANS[name])
    code, result = probe_it(plan, 1.0, *options)
    assert [
        (comparison.name, comparison.stage) for comparison in result.comparisons if comparison.agrees is False
    ] == []
    assert code == 0
    judged = {comparison.name for comparison in result.comparisons if comparison.agrees}
    assert judged >= {"forward", "backward", "optimizer", "static memory", "step" if options else "pipeline"}
    assert (result.plan_runtime, result.plan_step_s) == (plan.runtime, plan.step.step_s)
    assert any(f"{plan.runtime}'s own kernels" in what for what in result.slice.extrapolated)
    assert result.uses_tolerance
    code, result = probe_it(plan, 1.2, *options)
    assert code == 6
    assert {comparison.name for comparison in result.comparisons if comparison.agrees is False} >= {
        "forward",
        "backward",
        "optimizer",
    }


@pytest.mark.parametrize("options", [(), ("--stage", "all")], ids=["ranks", "stages"])
def test_seconds_with_gathered_weights_in_them_are_shown(options: tuple[str, ...], probe_it: Any) -> None:
    plan = make_plan(runtime="torchtitan", tp=1, pp=2, dp=4, zero_stage=3)
    code, result = probe_it(plan, 1.2, *options)
    assert result.run.fully_sharded
    assert code == 0
    assert {comparison.agrees for comparison in result.comparisons} == {None}
    assert any("passes that gather weights" in what for what in result.slice.extrapolated)
    if not options:
        with pytest.raises(SpecError, match="its passes waited for gathered weights"):
            slowness(plan, result)


def test_a_tables_update_and_that_for_several_ranks_are_shown(probe_it: Any) -> None:
    def judged(plan: Plan) -> list[bool]:
        _, result = probe_it(plan, 1.0)
        return [comparison.agrees is not None for comparison in result.comparisons if comparison.name == "optimizer"]

    assert judged(make_plan()) == [False, True, True, True]
    assert judged(make_plan(num_gpus=16, dp=2)) == [False] * 4


@pytest.mark.parametrize(("tp", "dearer"), [(1, 0.0), (8, 0.03)])
def test_only_a_stage_alone_copies_what_ranks_exchange(tp: int, dearer: float) -> None:
    plan = make_plan(tp=tp, pp=1, dp=8 // tp)
    ranks, alone = (in_eager_torch(plan, alone=is_alone).stages[0] for is_alone in (False, True))
    assert (alone.forward_s == ranks.forward_s) == (dearer == 0.0)
    assert alone.forward_s >= (1 + dearer) * ranks.forward_s
    assert alone.memory == ranks.memory


def test_no_stage_is_slow_that_takes_what_eager_torch_takes(probe_it: Any, tmp_path: Path, capsys: Any) -> None:
    plan = make_plan()
    for factor in (1.0, 1.2):
        probe_it(plan, factor)
        capsys.readouterr()
        assert main(["rebalance", str(tmp_path / "plan.json"), str(tmp_path / "probe.json"), "--json"]) == 0
        stages = json.loads(capsys.readouterr().out)["stages"]
        assert [stage["rank_factor"] for stage in stages] == pytest.approx([factor] * 4)


def test_memory_that_eager_torch_was_to_lack_contradicts_no_plan() -> None:
    plan, out_of_memory = make_plan(), RankOutOfMemory(rank=0, stage=0, phase="warm-up", message="")
    options = ProbeOptions(device="cuda")
    ran = ranks_run(plan, options, num_gpus=8)
    measured = MeasuredRun(run=ran.run, ranks=(), out_of_memory=out_of_memory)
    result = judge_ranks(plan, options, ran, measured)
    needed_bytes = in_eager_torch(plan).stages[0].memory.total_bytes
    assert result.predicted_bytes == needed_bytes > plan.stages[0].memory.total_bytes
    assert not result.agrees
    small = plan.cluster.hardware.model_copy(update={"memory_gib": needed_bytes / 2**30 - 0.1})
    tight = plan.model_copy(update={"cluster": ClusterSpec(hardware=small, num_gpus=8)})
    with pytest.raises(ProbeError, match="stage 0 ran out of memory as predicted: eager torch"):
        judge_ranks(tight, options, ran._replace(plan=tight), measured)


@pytest.mark.parametrize(("hardware", "is_doubted"), [("h200", False), ("h100", True)])
def test_another_gpu_than_the_plans_is_doubted(hardware: str, is_doubted: bool, probe_it: Any, capsys: Any) -> None:
    plan = make_plan(hardware=hardware)
    probe_it(plan, 1.0)
    doubt = f"the probe: ran on NVIDIA H200; is that {plan.cluster.hardware.name}?"
    assert (doubt in capsys.readouterr().err) == is_doubted


def test_the_layout_stays_and_its_price_again_is_the_same() -> None:
    plan = make_plan(dtype="fp8", recompute="full", recompute_num_layers=2)
    once = in_eager_torch(plan)
    assert once.parallelism == plan.parallelism
    assert [stage.recompute for stage in once.stages] == [stage.recompute for stage in plan.stages]
    assert in_eager_torch(once) == once
    assert once.runtime_spec == EAGER
    host = plan.runtime_spec.model_copy(update={"microbatch_overhead_s": 1e-3})
    probed = in_eager_torch(plan.model_copy(update={"runtime_spec": host}))
    assert probed.step.step_s > once.step.step_s, "what an earlier probe measured of the host stays"


LONG: dict[str, Any] = {"tp": 1, "pp": 2, "dp": 1, "num_gpus": 2, "seq_length": 32768}


@pytest.mark.parametrize("options", [(), ("--stage", "all")], ids=["ranks", "stages"])
def test_ranks_are_judged_against_the_kernel_of_attention_that_ran(
    options: tuple[str, ...], probe_it: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(**LONG)
    as_flash, as_cudnn = (in_eager_torch(plan, (kernel,)).stages[0].forward_s for kernel in ("flash", "cudnn"))
    assert as_flash > 1.2 * as_cudnn == 1.2 * in_eager_torch(plan).stages[0].forward_s
    code, result = probe_it(plan, 1.0, *options, kernels=("flash",))
    assert code == 0
    assert [round(c.predicted, 9) for c in result.comparisons if c.name == "forward" and c.stage == 0] == [
        round(as_flash, 9)
    ]
    assert "attention ran in FlashAttention-2 where the plan expected cuDNN's kernel" in _words(capsys)
    assert slowness(plan, result)[0].factor == pytest.approx(1.0)
    assert set(from_probe(result, plan.cluster).attention_factor) == {"flash"}
    code, result = probe_it(plan, 1.0, *options, kernels=("cudnn",))
    assert (code, result.notes) == (0, ())


def test_a_kernel_that_did_not_run_is_missed(probe_it: Any) -> None:
    """Layers with windows ran in FlashAttention-2 as expected, and those without did so too."""
    plan = make_plan("gemma-3-27b", tp=4, pp=2, num_gpus=8)
    assert probe_it(plan, 1.0, kernels=("cudnn", "flash"))[1].notes == ()
    (note,) = probe_it(plan, 1.0, kernels=("flash",))[1].notes
    assert note.startswith("attention ran in FlashAttention-2 where the plan expected cuDNN's kernel and FlashAtt")


@pytest.mark.parametrize(
    ("job", "ran", "says"),
    TABLES["a_kernel_that_no_profile_has_is_shown_and_corrects_nothing"],
    ids=["attention", "experts"],
)
def test_a_kernel_that_no_profile_has_is_shown_and_corrects_nothing(
    job: dict[str, Any], ran: dict[str, Any], says: str, probe_it: Any
) -> None:
    plan = make_plan(**job)
    _, result = probe_it(plan, 1.5, **ran)
    agreed = {(c.name, c.agrees) for c in result.comparisons if c.name in ("forward", "backward", "pipeline")}
    assert agreed == {("forward", None), ("backward", None), ("pipeline", None)}
    assert {c.agrees for c in result.comparisons if c.name == "static memory"} == {True}
    assert says in " ".join(result.notes)
    with pytest.raises(SpecError, match=says):
        from_probe(result, plan.cluster)


def _words(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())
