"""`plan check`: exit codes of a reviewed launch file, what changed, and the forms that a pull request shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from planner.cli import main
from planner.decide import check as checking
from planner.decide.check import Check, check
from planner.export.import_run import read
from planner.report.decisions import markdown, sarif

ROOT = Path(__file__).parents[2]
SCRIPT = """#!/bin/bash
torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 --swiglu --bf16 \\
  --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 256 --tensor-model-parallel-size 2 \\
  --pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --normalization RMSNorm \\
  --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256
"""
FULL = "--use-distributed-optimizer --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EDITS = {
    "nothing": ("--swiglu", "--swiglu", 0),
    "recomputes": ("--use-distributed-optimizer", FULL, 9),
    "too large": ("--micro-batch-size 1", "--micro-batch-size 16", 3),
    "refused": ("--ffn-hidden-size 14336", "--ffn-hidden-size 14337", 8),
    "unknown": ("--swiglu", "--swiglu --attention-of-tomorrow 3", 10),
}
"""What a pull request changes in the script, and the exit code of its check."""


def checked(tmp_path: Path, old: str, new: str) -> Check:
    (tmp_path / "old").mkdir()
    before, after = tmp_path / "old" / "run.sh", tmp_path / "run.sh"
    before.write_text(SCRIPT)
    after.write_text(SCRIPT.replace(old, new))
    return check(after, against=before, searches=False)


@pytest.mark.parametrize("name", EDITS)
def test_the_exit_code_says_what_is_wrong(name: str, tmp_path: Path) -> None:
    old, new, code = EDITS[name]
    assert checked(tmp_path, old, new).exit_code == code


def test_a_change_is_told_by_its_settings_and_by_terms_that_add_up(tmp_path: Path) -> None:
    answer = checked(tmp_path, *EDITS["recomputes"][:2])
    assert answer.comparison.differences["recompute"] == ("none", "full")
    seconds = sum(row.seconds for row in answer.comparison.waterfalls[0])
    assert seconds == pytest.approx(answer.new.step_s - answer.old.step_s)
    assert answer.slower_fraction == pytest.approx(answer.new.step_s / answer.old.step_s - 1)
    text = markdown([answer])
    assert "recompute none → full" in text
    assert "| fits | yes" in text


def test_findings_are_results_of_sarif(tmp_path: Path) -> None:
    log = sarif([checked(tmp_path, *EDITS["unknown"][:2])], "1.0")
    assert [result["ruleId"] for result in log["runs"][0]["results"]] == ["unknown"]
    assert log["runs"][0]["results"][0]["message"]["text"].startswith("--attention-of-tomorrow 3")


def test_the_worst_of_several_files_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name in ("nothing", "unknown", "too large"):
        old, new, _ = EDITS[name]
        paths.append(tmp_path / f"{name.replace(' ', '_')}.sh")
        paths[-1].write_text(SCRIPT.replace(old, new))
    assert main(["check", *map(str, paths), "--no-search", "--json"]) == 3
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [one["exit_code"] for one in checks] == [0, 10, 3]


def test_the_planners_own_choice_is_named_where_it_is_faster(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace(*EDITS["recomputes"][:2]))
    new = check(path).new
    assert new.better_step_s is not None
    assert new.better_step_s < new.step_s
    assert "TP" in new.better


def test_a_grid_that_does_not_divide_is_refused_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT.replace("--global-batch-size 256", "--global-batch-size 250"))
    assert main(["check", str(path), "--no-search"]) == 8
    assert "global_batch_size: 250" in capsys.readouterr().err
    assert main(["check", str(path), "--no-search", "--json"]) == 8
    assert json.loads(capsys.readouterr().out)["checks"][0]["exit_code"] == 8
    (tmp_path / "notes.sh").write_text("echo nothing")
    assert main(["check", str(path), str(tmp_path / "notes.sh"), "--no-search", "--format", "sarif"]) == 2
    results = json.loads(capsys.readouterr().out)["runs"][0]["results"]
    assert [result["ruleId"] for result in results] == ["refused", "unreadable"]


def test_a_variable_is_given_and_an_old_file_is_read_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []
    monkeypatch.setattr(checking, "read", lambda name, *rest: reads.append(str(name)) or read(name, *rest))
    files = [str(tmp_path / name) for name in ("old.sh", "new.sh", "newer.sh")]
    for file in files:
        Path(file).write_text(SCRIPT.replace("--micro-batch-size 1", "--micro-batch-size ${MBS}"))
    command = ["check", *files[1:], "--against", files[0], "--no-search", "--json"]
    assert main(command) == 2
    assert "--set MBS=" in capsys.readouterr().err
    reads.clear()
    assert main([*command, "--set", "MBS=2"]) == 0
    assert reads == files


@pytest.mark.parametrize("name", ["action.yml", ".pre-commit-hooks.yaml"])
def test_the_action_and_the_hook_run_plan_check(name: str) -> None:
    data = yaml.safe_load((ROOT / name).read_text())
    runs = [data[0]["entry"]] if isinstance(data, list) else [step.get("run", "") for step in data["runs"]["steps"]]
    assert any("plan check" in text for text in runs)
