"""`plan observe`: the answer in words and as JSON, the job from a plan, from the log or from options, and errors."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from written import BEGIN_S, LLAMA_8B, TABLES, arguments, iteration, iterations, mlperf, torchtitan

from planner.answer import Plan
from planner.cli import main
from planner.observe.judge import judged, predicted
from planner.observe.observation import JobFacts, Observation, Observed, SourceFile
from planner.specs.units import GIB

JOB = ["--model", "8b", "--hardware", "h100", "--tp", "2", "--pp", "2", "-q"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("observe")
    steps = [12.0, *[9.0] * 30]
    (folder / "dump.log").write_text("\n".join([arguments(**LLAMA_8B), *iterations(steps)]))
    (folder / "bare.log").write_text("\n".join(iterations(steps)))
    (folder / "titan.log").write_text(torchtitan([9.0, *[1.4] * 8]))
    (folder / "mlperf.log").write_text(mlperf([55.0] * 4))
    plan = ["evaluate", *JOB, "--gpus", "16", "-b", "128", "-s", "8192", "-o", str(folder / "plan.json")]
    assert main(plan) == 0
    return folder


def answer_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["observe", *words, "--json", "-q"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_json_of_the_contract(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = answer_of(capsys, str(folder / "dump.log"), "--hardware", "h100")
    seen = answer["observation"]
    assert seen["step_s"] == 9.0
    assert seen["tokens_per_s"] == pytest.approx(128 * 8192 / 9)
    terms = answer["waterfall"]
    assert sum(term["seconds"] for term in terms) == pytest.approx(9.0 - answer["prediction"]["step_s"], abs=1e-9)
    assert answer["verdict"] in ("expected", "slow", "fast", "memory")
    assert answer["prediction"]["source"] == "the log's arguments"


def test_log_plan_and_options_say_the_same_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump, bare, plan = (str(folder / name) for name in ("dump.log", "bare.log", "plan.json"))
    by_log = answer_of(capsys, dump, "--hardware", "h100")["prediction"]
    by_plan = answer_of(capsys, bare, "--plan", plan)["prediction"]
    by_options = answer_of(capsys, bare, *JOB, "--gpus", "16", "-s", "8192")["prediction"]
    assert (by_plan["source"], by_options["source"]) == (plan, "the options")
    assert by_plan["step_s"] == pytest.approx(by_options["step_s"])
    assert by_log["layout"] == by_plan["layout"] == by_options["layout"]
    assert by_log["peak_memory_bytes"] == pytest.approx(by_plan["peak_memory_bytes"], rel=0.1)


def test_what_the_log_says_fills_the_options(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = answer_of(capsys, str(folder / "titan.log"), *JOB, "--gpus", "8", "--runtime", "torchtitan")
    assert answer["prediction"]["num_gpus"] == 8
    assert answer["observation"]["tokens_per_s"] == pytest.approx(8 * 8192 / 1.4, rel=0.01)
    assert answer["observation"]["mfu"] is not None
    (folder / "alone.log").write_text("completed step: 7, seconds: 2.0, Tokens/s/device: 1000.0, loss: 1\n")
    assert answer_of(capsys, str(folder / "alone.log"), "--gpus", "8")["observation"]["tokens_per_s"] == 8000


@pytest.mark.parametrize(("device", "hardware"), TABLES["the_gpu_is_the_one_that_the_log_names"])
def test_the_gpu_is_the_one_that_the_log_names(device: str, hardware: str) -> None:
    from planner.cli.observe_command import _hardware

    assert _hardware(device) == hardware


def test_nothing_said_about_the_job_asks_by_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["observe", str(folder / "bare.log")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "tokens per second: add --seq-length N" in text
    assert "add --plan plan.json" in text
    answer = answer_of(capsys, str(folder / "bare.log"))
    assert (answer["prediction"], answer["verdict"]) == (None, None)


def test_saved_and_from_standard_input(folder: Path, capsys: Any, monkeypatch: Any) -> None:
    saved = folder / "observed.json"
    monkeypatch.setattr(
        sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO((folder / "bare.log").read_bytes())))
    )
    assert main(["observe", "-", "-o", str(saved), "-q"]) == 0
    assert json.loads(saved.read_text())["observation"]["num_steps"] == 31
    capsys.readouterr()
    assert main(["observe", str(folder / "bare.log"), "-o", str(saved), "-q"]) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "says"), TABLES["errors_are_a_line_and_a_hint"])
def test_errors_are_a_line_and_a_hint(folder: Path, capsys: Any, monkeypatch: Any, words: list[str], says: str) -> None:
    monkeypatch.chdir(folder)
    capsys.readouterr()
    assert main(["observe", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert [line.split(":")[0] for line in err.splitlines()] == ["error", "hint"]


def test_a_dump_that_lacks_something_leaves_the_observation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "partial.log"
    changed = {name: value for name, value in LLAMA_8B.items() if name not in ("world_size", "global_batch_size")}
    lines = [iteration(step, 2.0, BEGIN_S + 2 * step) for step in range(1, 9)]
    path.write_text("\n".join([arguments(**changed), *lines]))
    capsys.readouterr()
    assert main(["observe", str(path), "--hardware", "h100"]) == 0
    out, err = capsys.readouterr()
    assert "no prediction" in err
    assert "--gpus" in err
    assert "median step" in out


def test_an_observation_without_tokens_compares_with_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = folder / "bare.json"
    assert main(["observe", str(folder / "bare.log"), "-o", str(saved), "-q"]) == 0
    capsys.readouterr()
    assert main(["compare", str(folder / "plan.json"), str(saved)]) == 2
    assert "has not tokens per second" in capsys.readouterr().err


def test_a_guessed_gpu_gives_no_verdict(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = answer_of(capsys, str(folder / "dump.log"))
    assert (answer["verdict"], answer["waterfall"]) == (None, [])
    assert answer["says"].startswith("no verdict: the log names no GPU")
    assert answer["prediction"]["hardware"] == "h100-sxm-80gb"


def test_a_dump_without_a_batch_has_no_guessed_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    dump = arguments(**{name: value for name, value in LLAMA_8B.items() if name != "global_batch_size"})
    lines = [line.replace("global batch size:   128 |", "") for line in iterations([9.0] * 9)]
    log.write_text("\n".join([dump, *lines]))
    assert answer_of(capsys, str(log), "--hardware", "h100")["prediction"] is None
    said = answer_of(capsys, str(log), "--hardware", "h100", "--global-batch-size", "128")
    assert said["verdict"] is not None


@pytest.fixture
def priced(make_plan: Callable[..., Plan]) -> Plan:
    """The plan of conftest with an interval: 10% to either side."""
    plan = make_plan()
    step = plan.best.step.model_copy(
        update={"step_s_interval": (0.9 * plan.best.step.step_s, 1.1 * plan.best.step.step_s)}
    )
    return plan.model_copy(update={"best": plan.best.model_copy(update={"step": step})})


def observed(plan: Plan, factor: float, **more: object) -> Observation:
    sources = (SourceFile(path="a.log", format="megatron"),)
    return Observation(**{"sources": sources, "step_s": factor * plan.step.step_s, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(("factor", "precision", "verdict"), TABLES["the_interval_decides"])
def test_the_interval_decides(priced: Plan, factor: float, precision: float, verdict: str) -> None:
    answer = judged(observed(priced, factor, step_s_precision_fraction=precision), priced, "plan.json")
    assert answer.verdict == verdict
    assert answer.says.startswith(("as expected" if verdict == "expected" else verdict) + ":")
    assert answer.causes == ()


def test_without_an_interval_the_prediction_itself_decides(priced: Plan) -> None:
    step = priced.step.model_copy(update={"step_s_interval": None})
    bare = priced.model_copy(update={"best": priced.best.model_copy(update={"step": step})})
    assert judged(observed(bare, 1.01), bare, "plan.json").verdict == "slow"


def test_memory_beyond_the_interval_is_said_where_the_step_is_right(priced: Plan) -> None:
    peak = priced.best.worst_stage.memory.peak_allocated_bytes
    more = {"peak_memory_bytes": peak + 6 * GIB, "peak_memory_kind": "allocated"}
    answer = judged(observed(priced, 1.0, **more), priced, "plan.json")
    assert (answer.verdict, "6.0 GiB" in answer.says) == ("memory", True)
    slow = judged(observed(priced, 1.2, **more), priced, "plan.json")
    assert (slow.verdict, "6.0 GiB more allocated" in slow.says) == ("slow", True)
    less = {"peak_memory_bytes": peak - 6 * GIB, "peak_memory_kind": "allocated"}
    assert judged(observed(priced, 1.0, **less), priced, "plan.json").verdict == "expected"


@pytest.mark.parametrize(("facts", "says"), TABLES["a_log_of_another_job_gets_no_verdict"])
def test_a_log_of_another_job_gets_no_verdict(priced: Plan, facts: dict[str, Any], says: str) -> None:
    answer = judged(observed(priced, 1.0, facts=JobFacts(**facts)), priced, "plan.json")
    assert answer.verdict is None
    assert answer.says.startswith("no verdict: the log is of another job")
    assert says in answer.says


def test_a_step_of_a_third_of_the_tokens_is_another_job(priced: Plan) -> None:
    rate = priced.step.tokens_per_s
    tokens = [judged(observed(priced, 1.0, tokens_per_s=rate * share), priced, "plan.json") for share in (1 / 3, 0.6)]
    assert [("tokens of a step" in one.says, one.verdict) for one in tokens] == [(True, None), (False, "expected")]


def test_a_log_of_the_same_job_gets_one(priced: Plan) -> None:
    layout = priced.parallelism
    facts = JobFacts(
        num_gpus=priced.cluster.num_gpus,
        seq_length=priced.training.seq_length,
        run={"parallelism": {"tp": layout.tp, "pp": layout.pp}},
    )
    assert judged(observed(priced, 1.0, facts=facts), priced, "plan.json").verdict == "expected"


def test_mfu_goes_with_tokens_per_second(priced: Plan) -> None:
    answer = judged(observed(priced, 2.0, asks=("--seq-length N",)), priced, "plan.json").observation
    assert answer.mfu == pytest.approx(priced.step.mfu / 2)
    assert answer.tokens_per_s == pytest.approx(priced.step.tokens_per_s / 2)
    assert answer.asks == ()
    half = observed(priced, 1.0, tokens_per_s=priced.step.tokens_per_s / 4)
    assert judged(half, priced, "plan.json").observation.mfu == pytest.approx(priced.step.mfu / 4)


def test_an_earlier_run_without_memory_predicts_none(priced: Plan) -> None:
    earlier = Observed(observation=observed(priced, 1.0))
    later = observed(priced, 1.0, peak_memory_bytes=90 * GIB, peak_memory_kind="allocated")
    assert judged(later, earlier, "observed.json").verdict == "expected"


def test_no_step_has_no_verdict(priced: Plan) -> None:
    answer = judged(observed(priced, 1.0).model_copy(update={"step_s": None}), priced, "plan.json")
    assert answer.verdict is None


def test_the_prediction_is_the_plan(priced: Plan) -> None:
    prediction = predicted(priced, "plan.json")
    assert sum(prediction.breakdown.values()) == pytest.approx(sum(priced.step.breakdown.model_dump().values()))
    assert prediction.peak_memory_bytes == priced.best.worst_stage.memory.peak_allocated_bytes
