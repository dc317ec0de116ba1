"""`plan export` from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.answer import Plan
from planner.cli import main

Planned = Callable[..., Plan]

WRITTEN = ("megatron.yaml", "launch.sh", "launch.sbatch", "preflight.py")


@pytest.fixture
def saved(planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A plan's file, in a folder of its own that is the current one."""
    plan = planned("llama-3.1-8b", 16, tp=2, pp=2)
    other = planned("llama-3.1-8b", 16, tp=4, pp=2)
    plan = plan.model_copy(update={"alternatives": (other.best,)})
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    monkeypatch.chdir(tmp_path)
    return "plan.json"


def test_files_and_their_names(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", saved, "--to", "megatron", "-o", "run"]) == 0
    written = capsys.readouterr().out.split()
    assert written == [f"run/{name}" for name in (*WRITTEN, "manifest.json")]
    assert all(Path(name).is_file() for name in written)
    assert main(["export", saved, "--to", "megatron", "-o", "run"]) == 2
    assert "already holds megatron.yaml" in capsys.readouterr().err
    assert main(["export", saved, "--to", "megatron", "-o", "run", "--force"]) == 0


def test_a_folder_is_named_after_model_and_trainer(saved: str) -> None:
    assert main(["export", saved, "--to", "slurm", "-q"]) == 0
    assert sorted(path.name for path in Path("llama-3-1-8b-megatron").iterdir()) == [
        "launch.sbatch",
        "manifest.json",
        "megatron.yaml",
        "preflight.py",
    ]


def test_a_dry_run_writes_nothing(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(Path().iterdir())
    assert main(["export", saved, "--to", "megatron,kubernetes", "--dry-run", "-q"]) == 0
    out = capsys.readouterr().out
    assert "==> megatron.yaml <==" in out
    assert "kind: TrainJob" in out
    assert set(Path().iterdir()) == before
    assert main(["export", saved, "--to", "megatron", "--dry-run", "--json", "-q"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert set(answer["texts"]) == set(answer["files"]) == set(WRITTEN)


def test_an_alternative(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", saved, "--to", "megatron", "--dry-run", "--alternative", "1", "-q"]) == 0
    assert "--tensor-model-parallel-size: 4" in capsys.readouterr().out
    assert main(["export", saved, "--to", "megatron", "--alternative", "2"]) == 2
    assert "the plan has 1" in capsys.readouterr().err


def test_refusals_are_one_error_with_every_reason(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", saved, "--to", "torchtitan"]) == 2
    err = capsys.readouterr().err
    assert "error: torchtitan cannot express this plan: zero_stage:" in err
    assert "hint: plan again with --runtime torchtitan" in err
    assert main(["export", saved, "--to", "pytorch"]) == 2
    assert "unknown target 'pytorch'" in capsys.readouterr().err


def test_notes_go_to_stderr(saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", saved, "--to", "megatron", "-o", "run", "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert answer["world_size"] == 16
    required = {place["name"] for place in answer["placeholders"] if not (place["default"] or place["is_optional"])}
    assert required == {"DATA_PATH", "TOKENIZER", "CHECKPOINTS"}
    assert all(f"note: fill in {name}: " in captured.err for name in required)
    assert f"note: first run, to hold against the plan: {answer['first_run']}\n" in captured.err
    assert answer["first_run"] == "MOCK=1 bash launch.sh"
