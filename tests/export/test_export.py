"""`export` and `plan export` write for the targets of the table, alone and together."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from samples import example_of

from planner.answer import Plan
from planner.cli import main
from planner.errors import SpecError
from planner.export.export import MANIFEST, bundle_of, export
from planner.export.refusal import Inexpressible
from planner.export.targets import LAUNCHERS, READERS, SOURCES, TARGETS, TRAINERS, LauncherTarget, TrainerTarget

Planned = Callable[..., Plan]


WRITTEN = ("megatron.yaml", "launch.sh", "launch.sbatch", "preflight.py")


def test_the_example_of_the_docstring(planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"plan": planned("llama-3.1-8b", 16, tp=2, pp=2)}
    exec(example_of(export), names)
    assert names["files"] == [Path("run", name) for name in WRITTEN]
    assert names["manifest"] == Path("run", MANIFEST)
    assert 'image: "registry/image:1"' in Path("pods", "kubernetes.yaml").read_text()


def test_function_and_command_write_the_same(planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("llama-3.1-8b", 16, tp=2, pp=2)
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(json.dumps(plan.to_json()))
    assert main(["export", "plan.json", "--to", "megatron, kubernetes", "-o", "by-command", "-q"]) == 0
    paths = export(plan, to=("megatron", "kubernetes"), out=tmp_path / "by-function")
    assert {path.name for path in Path("by-command").iterdir()} == {path.name for path in paths}
    assert all(path.read_bytes() == Path("by-command", path.name).read_bytes() for path in paths)


def test_the_function_refuses_as_the_command_does(planned: Planned, tmp_path: Path) -> None:
    plan = planned("llama-3.1-8b", 16, tp=2, pp=2)
    with pytest.raises(Inexpressible, match="zero_stage"):
        export(plan, to="torchtitan", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    export(plan, to="megatron", out=tmp_path / "run")
    with pytest.raises(SpecError, match=r"already holds megatron\.yaml"):
        export(plan, to="megatron", out=tmp_path / "run")
    export(plan, to="megatron", out=tmp_path / "run", force=True)


@pytest.mark.parametrize(
    ("runtime", "trainer"), [("megatron", "megatron"), ("torchtitan", "torchtitan"), ("torch-eager", "torch")]
)
def test_a_launcher_alone_starts_the_plan_s_trainer(planned: Planned, runtime: str, trainer: str) -> None:
    bundle = bundle_of(planned("llama-3.1-8b", 16, runtime=runtime, pp=2), ["slurm"])
    assert bundle.targets == (trainer, "slurm")
    assert "launch.sbatch" in {file.name for file in bundle.files}
    assert "launch.sh" not in {file.name for file in bundle.files}


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["megatronn"], "unknown target 'megatronn'"),
        ([], "unknown target"),
        (["megatron", "torchtitan"], "two trainers"),
        (["deepspeed", "slurm"], "nothing to start"),
    ],
)
def test_targets_that_make_no_sense(planned: Planned, targets: list[str], message: str) -> None:
    plan = planned("llama-3.1-8b", 16, pp=2, runtime="megatron", sequence_parallel=False)
    with pytest.raises(SpecError, match=message):
        bundle_of(plan, targets)


def test_a_plan_that_does_not_fit_says_so(planned: Planned) -> None:
    assert "does not fit" in bundle_of(planned("llama-3.1-405b", 8), ["megatron"]).notes[-1]
    assert "does not fit" not in " ".join(bundle_of(planned("llama-3.1-8b", 64), ["megatron"]).notes)


def test_a_runtime_without_a_target_is_named(planned: Planned) -> None:
    with pytest.raises(SpecError, match="runtime 'nanotron' is no target"):
        bundle_of(planned("llama-3.1-8b", 16, pp=2, runtime="nanotron"), ["slurm"])


def test_targets_are_listed_once() -> None:
    assert len(set(TARGETS)) == len(TARGETS)
    assert {"megatron", "bridge", "torchtitan", "torch", "deepspeed", "primus", "hf"} == set(TRAINERS)
    assert {"torchrun", "slurm", "kubernetes", "kubernetes-jobset"} == set(LAUNCHERS)
    read = {"nemo", "nemo-rl", "automodel", "accelerate", "huggingface", "openrlhf", "torchtune"}
    assert {*TRAINERS, *read, "verl", "slime", "neox", "ms-swift"} == set(SOURCES)


@pytest.mark.parametrize(
    "target", [*TRAINERS.values(), *READERS.values(), *LAUNCHERS.values()], ids=lambda target: target.name
)
def test_every_row_names_functions_that_exist(target: TrainerTarget | LauncherTarget) -> None:
    """The table's text is all that connects a target with its package: mypy does not see it."""
    named = [target.writer, target.reader if isinstance(target, TrainerTarget) else None]
    functions = [name for name in named if name is not None]
    for module, _, name in (function.partition(":") for function in functions):
        function = getattr(import_module(f"planner.export.{module}"), name)
        parameters = inspect.signature(function).parameters
        assert list(parameters) in (["plan"], ["config"], ["plan", "command"])


def test_help_and_completion_list_the_targets_without_loading_them() -> None:
    code = "import planner.export.targets, sys; sys.exit(any(m in sys.modules for m in ('numpy', 'yaml', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


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
