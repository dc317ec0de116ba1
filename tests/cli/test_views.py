"""`plan trace` writes events that a trace viewer accepts, for every stage of the plan."""

import io
import json
import pickle
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from priced_plans import priced_plan
from tables import beside
from trace_judge import judge, named

from planner.cli import main
from planner.report import trace as trace_module
from planner.specs.units import GIB
from planner.trainers.load import load_runtime
from planner.trainers.switches import SWITCHES

TABLES = beside(__file__)


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
    TABLES["ends_with_the_step"],
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


def test_of_many_exchanges_those_of_a_layer_are_one(mixture_file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    first, last = json.loads(mixture_file.read_text())["best"]["stages"][1]["chunks"][0]
    layers = {f"layer {layer}" for layer in range(first, last)}
    shown_s, counts = [], []
    for most, says in TABLES["of_many_exchanges_those_of_a_layer_are_one"]:
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


def test_a_step_of_too_many_actions_is_refused(plan_file: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(trace_module, "MAX_ACTIONS", 300)
    target = tmp_path / "trace.json"
    assert _run(str(plan_file), "-o", str(target)) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert "too many for a trace" in error
    assert not target.exists()
    assert _run(str(plan_file), "-o", str(target), *hint.split("with ")[1].split()) == 0


JOB = ["--model", "1b", "--gpus", "8", "--no-history", "--top", "1"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    assert main([*JOB, "-o", str(folder / "plan.json")]) == 0
    return folder


def test_a_plan_is_shown_as_it_was_answered(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved / "plan.json"
    capsys.readouterr()
    assert main(["show", str(path), "--show", "rejected,proof"]) == 0
    shown = capsys.readouterr().out
    assert "llama-3.2-1b on 8" in shown
    assert "legal shapes" in shown
    assert "Where the" not in shown
    assert main(["show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("words", "noun"),
    [
        *TABLES["other_answers_are_shown_as_they_were_answered"],
        (["sweep", *JOB[:2], "--gpus", "8,16", "--no-history", "--json"], "16 GPUs"),
        (["evaluate", *JOB[:5], "--tp", "2", "--json"], "TP 2"),
    ],
)
def test_other_answers_are_shown_as_they_were_answered(words: list[str], noun: str, saved: Path, capsys: Any) -> None:
    assert main([word.replace("PLAN", str(saved / "plan.json")) for word in words]) == 0
    path = saved / f"{words[0].strip('-')}.json"
    path.write_text(capsys.readouterr().out)
    assert main(["show", str(path)]) == 0
    assert noun in capsys.readouterr().out


def test_pictures_of_a_plan_on_stdin_are_written_alone(saved: Path, capsys: Any, monkeypatch: Any) -> None:
    page, trace = saved / "page.html", saved / "trace.json"
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((saved / "plan.json").read_bytes())))
    assert main(["show", "-", "--page", str(page), "--trace", str(trace)]) == 0
    assert capsys.readouterr().out == ""
    assert "<svg" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


JOB_OF_REPORT = ["--model", "8b", "--gpus", "16", "-s", "4096", "--time-limit", "3600", "-q"]


@pytest.fixture(scope="module")
def report_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "plan.json"
    assert main([*JOB_OF_REPORT, "-b", "256", "--pp", "4", "--vpp", "1", "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def target(report_file: Path) -> Path:
    """Its report."""
    path = report_file.with_name("report.html")
    assert main(["report", str(report_file), "-q", "-o", str(path)]) == 0
    return path


def schedule(page: str) -> ElementTree.Element:
    """The drawing of the schedule."""
    found = re.search(r'<div class="scroll"[^>]*>(<svg.*?</svg>)', page, re.DOTALL)
    return ElementTree.fromstring(found[1])


def drawn_bars(page: str) -> int:
    """Actions that the schedule's drawing shows."""
    paths = [element for element in schedule(page).iter() if element.tag.endswith("path")]
    return sum(path.get("d", "").count("H") // 2 for path in paths if path.get("class") == "action")


def test_it_writes_a_page_of_every_stage(report_file: Path, target: Path, tmp_path: Path, capsys: Any) -> None:
    again = tmp_path / "report.html"
    assert main(["report", str(report_file), "-o", str(again)]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"note: wrote {again}\n")
    assert list(tmp_path.iterdir()) == [again]
    page = again.read_text()
    assert page.startswith("<!doctype html>")
    assert all(f">stage {stage}: " in page for stage in range(4))
    assert page == target.read_text(), "the same plan makes the same bytes"
    fullest_bytes = max(
        stage["memory"]["total_bytes"] for stage in json.loads(report_file.read_text())["best"]["stages"]
    )
    assert f"has the highest peak, {fullest_bytes / GIB:.1f} GiB" in page, "the curve is as high as the highest bar"


def test_of_long_steps_windows_are_drawn(report_file: Path, target: Path) -> None:
    best = json.loads(report_file.read_text())["best"]
    assert best["parallelism"]["num_microbatches"] > 32
    page = target.read_text()
    assert 4 * 40 <= drawn_bars(page) <= 4 * 100
    bubble = f"{best['step']['breakdown']['bubble_s'] / best['step']['step_s']:.1%}"
    assert f"the pipeline bubble is {bubble} of the step" in page
    assert f'<td class="num">{bubble}</td>' in page, "the same number as in the table"
    assert "Drawn: steady state" in page


@pytest.fixture(scope="module")
def plan_file_of_memory(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("memory") / "plan.json"
    options = ["--gpus", "4", "--pp", "2", "--tp", "2", "-s", "1024", "-b", "16", "-o", str(path)]
    assert main(["evaluate", "--model", "8b", *options]) == 0
    return str(path)


def test_the_table_fits_a_terminal(plan_file_of_memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", plan_file_of_memory, "--stage", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "Memory at the peak of each stage" in text
    assert "mlp up [1024, 14336] bf16" in text
    assert "recompute all layers" in text


def test_pictures_and_a_snapshot(plan_file_of_memory: str, tmp_path: Path) -> None:
    picture, saved, pickled = (tmp_path / name for name in ("m.svg", "m.json", "m.pickle"))
    options = ["--snapshot", str(pickled), "-o", str(saved), "--plot", str(picture)]
    assert main(["memory", plan_file_of_memory, "--stage", "0", *options]) == 0
    assert "activations" in picture.read_text()
    assert pickle.loads(pickled.read_bytes())["device_traces"][0]
    assert [stage["stage"] for stage in json.loads(saved.read_text())["stages"]] == [0]


JOB_OF_COMPARE = ["--model", "8b", "--gpus", "16", "--hardware", "h200", "--tp", "2", "--pp", "4", "--dp", "2", "-q"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    for name, more in (("a", []), ("b", ["--recompute", "full"])):
        assert main(["evaluate", *JOB_OF_COMPARE, *more, "-o", str(folder / f"{name}.json")]) == 0
    return folder


def test_a_plan_beside_an_imported_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, saved = folder / "pretrain.sh", folder / "mine.json"
    script.write_text(TABLES["a_plan_beside_an_imported_run"])
    arguments = ["import", str(script), "--hardware", "h200", "--no-search", "-q"]
    assert main([*arguments, "-o", str(saved)]) == 0
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    (folder / "answer.json").write_text(capsys.readouterr().out)
    answers = []
    for name in ("mine.json", "answer.json"):
        assert main(["compare", str(folder / "a.json"), str(folder / name), "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
        assert answers[-1]["differences"]["tp"] == [2, 4]
        assert answers[-1]["sides"][1]["kind"] == "run"
    assert answers[0]["waterfall"] == answers[1]["waterfall"]
