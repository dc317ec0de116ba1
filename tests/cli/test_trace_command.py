"""`plan trace` writes events that a trace viewer accepts, for every stage of the plan."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from priced_plans import priced_plan
from trace_judge import judge, named

from planner.cli import main
from planner.report import trace as trace_module
from planner.trainers.load import load_runtime
from planner.trainers.switches import SWITCHES


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "plan.json"
    assert main(["--model", "8b", "--gpus", "16", "--pp", "4", "-s", "4096", "-b", "64", "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def mixture_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with all kinds of exchanges, some of them beside other micro-batches."""
    path = tmp_path_factory.mktemp("trace") / "plan.json"
    overlapping = load_runtime("megatron").model_copy(update=SWITCHES["ep_overlap"].values[True])
    sizes = {"tp": 2, "cp": 2, "pp": 2, "ep": 4, "vpp": 2}
    priced_plan("deepseek-v2-lite", 16, runtime=overlapping, **sizes).save(path)
    return path


def _traced(*arguments: str, tmp_path: Path) -> dict[str, Any]:
    target = tmp_path / "trace.json"
    assert main(["trace", *arguments, "-o", str(target)]) == 0
    return json.loads(target.read_text())


def _run(*arguments: str) -> int:
    return main(["trace", *arguments])


def test_every_stage_computes_waits_and_exchanges_gradients(plan_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "trace.json"
    assert _run(str(plan_file), "-o", str(target)) == 0
    events = json.loads(target.read_text())["traceEvents"]
    layout = json.loads(plan_file.read_text())["best"]["parallelism"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == set(range(layout["pp"]))
    computed = [event for event in slices if event["name"].startswith(("forward", "backward"))]
    assert len(computed) == 2 * layout["pp"] * layout["vpp"] * layout["num_microbatches"]
    reductions = [event for event in slices if event["name"] == "reduce gradients"]
    assert len(reductions) == (layout["pp"] * layout["vpp"] if layout["dp"] > 1 else 0)
    for rank in range(layout["pp"]) if reductions else ():
        ours = sorted((event["ts"], event["dur"]) for event in reductions if event["pid"] == rank)
        assert all(end >= (begin + length) * (1 - 1e-9) for (begin, length), (end, _) in pairwise(ours))
        last = max(event["ts"] for event in computed if event["pid"] == rank)
        assert ours[0][0] < last or layout["vpp"] == 1, "the first chunk to end does not wait for the others"
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)


@pytest.mark.parametrize(
    ("job", "runtime", "sizes"),
    [
        # an all-reduce among many ranks that two passes cannot hide
        ((512, 2048, 512), "megatron", {"pp": 2, "vpp": 2}),
        # torch's stages wait for the reduction
        ((128, 4096, 64), "torchtitan", {"pp": 2}),
        # ZeRO-3 without a pipeline gathers and reduces in every micro-batch
        ((16, 4096, 64), "torchtitan", {}),
        ((4, 4096, 32), "megatron", {"pp": 4}),
    ],
    ids=["many ranks", "torchtitan", "every micro-batch", "one replica"],
)
def test_ends_with_the_step(job: tuple[int, int, int], runtime: str, sizes: dict[str, int], tmp_path: Path) -> None:
    saved, target = tmp_path / "plan.json", tmp_path / "trace.json"
    priced_plan("8b", *job, runtime=runtime, **sizes).save(saved)
    assert _run(str(saved), "-o", str(target)) == 0
    slices = [event for event in json.loads(target.read_text())["traceEvents"] if event["ph"] == "X"]
    end_s = max(event["ts"] + event["dur"] for event in slices) / 1e6
    assert end_s == pytest.approx(json.loads(saved.read_text())["best"]["step"]["step_s"], rel=1e-9, abs=1e-7)
    assert min(event["ts"] for event in slices) >= 0
    judge(json.loads(target.read_text()))


def test_what_shows_of_the_exchanges_is_what_the_plan_says(mixture_file: Path, tmp_path: Path) -> None:
    best = json.loads(mixture_file.read_text())["best"]
    trace = _traced(str(mixture_file), tmp_path=tmp_path)
    slices = named(trace, judge(trace))
    groups = {"tensor-parallel": "tp", "context-parallel": "cp", "expert-parallel": "ep"}
    assert groups.keys() <= {thread for _, thread in slices}
    times = best["parallelism"]["num_microbatches"]
    of_stages_s = []
    for stage in best["stages"]:
        priced_s = times * (stage["forward_comm_s"] + stage["backward_comm_s"])
        inside = [one for one in slices[stage["stage"], "compute"] if one.depth]
        assert sum(one.seconds for one in inside) == pytest.approx(priced_s, rel=2e-3)  # eighths of a microsecond
        of_groups_s = {
            group: sum(one.event["args"]["exposed_s"] for one in slices[stage["stage"], thread])
            for thread, group in groups.items()
        }
        assert sum(of_groups_s.values()) == pytest.approx(priced_s, rel=1e-5)
        of_stages_s.append(of_groups_s)
    breakdown = best["step"]["breakdown"]
    said_s = {group: breakdown[f"{group}_comm_s"] for group in groups.values()}
    assert any(of_groups_s == pytest.approx(said_s, rel=1e-5, abs=1e-6) for of_groups_s in of_stages_s)


def test_of_many_exchanges_those_of_a_layer_or_a_pass_are_one(
    mixture_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, last = json.loads(mixture_file.read_text())["best"]["stages"][1]["chunks"][0]
    layers = {f"layer {layer}" for layer in range(first, last)}
    shown_s, counts = [], []
    for most, says in (
        (300_000, "each by itself"),
        (5_000, "those of a layer together"),
        (10, "those of a pass together"),
    ):
        monkeypatch.setattr(trace_module, "MAX_SLICES", most)
        trace = _traced(str(mixture_file), "--force", tmp_path=tmp_path)
        slices = named(trace, judge(trace))
        assert trace["otherData"]["exchanges"].startswith(says)
        parts = {one.event["args"]["part"] for one in slices[1, "expert-parallel"]}
        assert ({""} if most == 10 else layers) <= parts
        shown_s.append(sum(one.seconds for one in slices[1, "compute"] if one.depth))
        counts.append(len(trace["traceEvents"]))
    assert counts == sorted(counts, reverse=True)
    assert shown_s == pytest.approx([shown_s[0]] * 3, rel=1e-3)


def test_memory_has_its_peak_reserve_and_capacity(mixture_file: Path, tmp_path: Path) -> None:
    plan = json.loads(mixture_file.read_text())
    trace = _traced(str(mixture_file), tmp_path=tmp_path)
    for stage in plan["best"]["stages"]:
        counted = [event for event in trace["traceEvents"] if event["ph"] == "C" and event["pid"] == stage["stage"]]
        memory = [event["args"] for event in counted if event["name"] == "memory"]
        assert max(args["allocated bytes"] for args in memory) == stage["memory"]["peak_allocated_bytes"]
        assert {args["reserved bytes"] for args in memory} == {stage["memory"]["reserved_bytes"]}
        (capacity,) = {event["args"]["bytes"] for event in counted if event["name"] == "memory capacity"}
        assert capacity == pytest.approx(plan["cluster"]["hardware"]["memory_gib"] * 2**30, abs=1)


def test_every_result_that_travels_has_an_arrow_and_the_file_says_what_it_is(plan_file: Path, tmp_path: Path) -> None:
    best = json.loads(plan_file.read_text())["best"]
    layout = best["parallelism"]
    trace = _traced(str(plan_file), tmp_path=tmp_path)
    stages = layout["pp"] * layout["vpp"]
    arrows = [event for event in trace["traceEvents"] if event["ph"] == "s"]
    assert len(arrows) == 2 * (stages - 1) * layout["num_microbatches"]
    about = trace["otherData"]
    assert about["command"].startswith("plan --model 8b --gpus 16")
    assert about["model"] == "llama-3.1-8b"
    assert about["step_s"] == pytest.approx(best["step"]["step_s"])


def test_an_alternative_is_traced_as_it_runs(plan_file: Path, tmp_path: Path) -> None:
    other = json.loads(plan_file.read_text())["alternatives"][0]
    trace = _traced(str(plan_file), "--alternative", "1", tmp_path=tmp_path)
    judge(trace)
    assert trace["otherData"]["step_s"] == pytest.approx(other["step"]["step_s"])
    shorter = _traced(str(plan_file), "-m", str(other["parallelism"]["pp"]), "--force", tmp_path=tmp_path)
    judge(shorter)
    assert shorter["otherData"]["layout"].endswith(f"× {other['parallelism']['pp']}")


def test_a_step_of_too_many_actions_is_refused_with_a_length_that_works(
    plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trace_module, "MAX_ACTIONS", 300)
    target = tmp_path / "trace.json"
    assert _run(str(plan_file), "-o", str(target)) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert "too many for a trace" in error
    assert not target.exists()
    assert _run(str(plan_file), "-o", str(target), *hint.split("with ")[1].split()) == 0
