"""`plan next` proposes a run, `plan export --trials` writes it, and `plan observe` brings it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.cli import main
from planner.plan_file import read_plan

JOB = ["--model", "8b", "--gpus", "16", "-s", "8192", "-b", "128", "--no-history", "-q"]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("next") / "plan.json"
    assert main([*JOB, "-o", str(path)]) == 0
    return path


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main(["next", *words, "--json", "-q"]) == 0
    return json.loads(capsys.readouterr().out)


def run_of(trial: Path, longer: float) -> Path:
    """The observation of a run of a trial, whose steps take `longer` times what was predicted."""
    step_s, log, path = longer * read_plan(str(trial)).step.step_s, trial.with_suffix(".csv"), trial.with_suffix(".run")
    log.write_text("step,step_time_s\n" + "".join(f"{n},{step_s * (1 + 0.002 * (n % 3)):.6f}\n" for n in range(1, 31)))
    assert main(["observe", str(log), "--plan", str(trial), "-q", "--force", "-o", str(path)]) == 0
    return path


def test_the_loop_closes(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANNER_HISTORY", str(tmp_path / "history"))
    plan, first, second = str(plan_file), tmp_path / "first.json", tmp_path / "second.json"
    before = answer(capsys, plan, "--days", "30", "-o", str(first))
    assert before["proposed"] == before["favourite"] == str(read_plan(plan).parallelism)
    assert main(["export", str(first), "--to", "megatron", "--trials", "0", "-o", str(tmp_path / "trial"), "-q"]) == 0
    row = json.loads((tmp_path / "trial" / "trials.json").read_text())["trials"][0]
    assert row["layout"] == before["proposed"]
    run = run_of(first, 1.2)
    # a run that takes longer than the others are expected to makes another layout the favourite
    after = answer(capsys, plan, "--days", "30", "--measured", str(run), "-o", str(second))
    assert after["num_measured"] == 1
    assert after["proposed"] != before["proposed"]
    told = {one["number"]: one for one in after["layouts"]}
    assert told[0]["measured_s"] == pytest.approx(1.2 * told[0]["predicted_s"], rel=0.01)
    assert told[1]["expected_s"] > 1.05 * told[1]["predicted_s"]
    # kept, it counts by itself, and once where it is given too
    assert main(["validate", "--add", str(run), "-q"]) == 0
    assert answer(capsys, plan, "--days", "30") == after
    assert answer(capsys, plan, "--days", "30", "--measured", str(run)) == after
    assert answer(capsys, plan, "--days", "30", "--no-history") == before
    # one that did not run is not proposed again
    number = next(one["number"] for one in after["layouts"] if one["name"] == after["proposed"])
    assert answer(capsys, plan, "--days", "30", "--skip", str(number))["proposed"] != after["proposed"]


def test_it_stops_with_exit_code_0_and_writes_nothing(
    plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.json"
    assert main(["next", str(plan_file), "--days", "0.01", "-o", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("stop  train with TP")
    assert "none.json is not written" in err
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["--measured", "{plan}"], "is no observation", 2),
        (["--measured", "{other}"], "is a run of another job: the batch: 64 × 8192", 2),
        (["--skip", "99"], "--skip: 99 is no layout of this plan", 2),
        (["--days", "0"], "--days: 0 is no time", 2),
        (["{full}"], "its layout does not fit", 3),
        (["--history", "nowhere"], "--history: nowhere: is no folder", 2),
    ],
)
def test_what_is_wrong_is_named(
    words: list[str], said: str, code: int, plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ""
    if "{other}" in words:
        smaller = tmp_path / "other.json"
        assert main([*JOB, "-b", "64", "-o", str(smaller)]) == 0
        other = str(run_of(smaller, 1.0))
    if "{full}" in words:
        full = tmp_path / "full.json"
        assert (
            main(["evaluate", "--model", "70b", "--gpus", "8", "--tp", "8", "--no-history", "-q", "-o", str(full)]) == 0
        )
        plan_file, words = full, []
    words = [word.format(plan=plan_file, other=other) for word in words]
    assert main(["next", str(plan_file), *words]) == code
    err = capsys.readouterr().err
    assert said in err
    assert "\nhint: " in err
