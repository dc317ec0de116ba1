"""`export` and `plan export` write for the targets of the table, alone and together.

An export reaches the disk whole, is listed with its hashes, names its plan, and replaces nothing unasked.
A plan is priced under the trainer that it is exported to, and refused where it no longer fits there.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tables import beside

from planner.answer import Plan
from planner.cli import main
from planner.errors import Infeasible, SpecError
from planner.export.export import MANIFEST, bundle_of, export, write_bundle
from planner.export.refusal import priced_for
from planner.export.targets import LAUNCHERS, READERS, TRAINERS, LauncherTarget, TrainerTarget
from planner.export.trainer_files import plan_sha256, slug
from planner.layout.evaluate import evaluate
from planner.search.search import plan
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import load_runtime

TABLES = beside(__file__)

Planned = Callable[..., Plan]


WRITTEN = ("megatron.yaml", "launch.sh", "launch.sbatch", "preflight.py")


def test_function_and_command_write_the_same(planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned("llama-3.1-8b", 16, tp=2, pp=2)
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(json.dumps(plan.to_json()))
    assert main(["export", "plan.json", "--to", "megatron, kubernetes", "-o", "by-command", "-q"]) == 0
    paths = export(plan, to=("megatron", "kubernetes"), out=tmp_path / "by-function")
    assert {path.name for path in Path("by-command").iterdir()} == {path.name for path in paths}
    assert all(path.read_bytes() == Path("by-command", path.name).read_bytes() for path in paths)


@pytest.mark.parametrize(("runtime", "trainer"), TABLES["a_launcher_alone_starts_the_plan_s_trainer"])
def test_a_launcher_alone_starts_the_plan_s_trainer(planned: Planned, runtime: str, trainer: str) -> None:
    bundle = bundle_of(planned("llama-3.1-8b", 16, runtime=runtime, pp=2), ["slurm"])
    assert bundle.targets == (trainer, "slurm")
    assert "launch.sbatch" in {file.name for file in bundle.files}
    assert "launch.sh" not in {file.name for file in bundle.files}


@pytest.mark.parametrize(("targets", "message"), TABLES["targets_that_make_no_sense"])
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
    assert main(["export", saved, "--to", "trl"]) == 2
    assert "error: hf cannot express this plan" in capsys.readouterr().err
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


def test_manifest_lists_what_is_there(planned: Planned, tmp_path: Path) -> None:
    plan = planned("llama-3.1-8b", 16, tp=2, pp=2)
    paths = write_bundle(bundle_of(plan, ["megatron"]), tmp_path / "new" / "folder")
    manifest = json.loads(paths[-1].read_text())
    assert paths[-1].name == MANIFEST
    assert manifest["plan_sha256"] == plan_sha256(plan)
    assert manifest["inputs_sha256"] == plan.inputs_sha256
    assert manifest["world_size"] == 16
    assert manifest["written_for"] == ["Megatron-LM core 0.20.0"]
    assert set(manifest["files"]) == {path.name for path in paths[:-1]}
    for path in paths[:-1]:
        assert manifest["files"][path.name] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert path.stat().st_mode & 0o100 == (0o100 if path.name.startswith("launch") else 0)


def test_the_same_plan_gives_the_same_bytes(planned: Planned) -> None:
    first, second = (planned("llama-3.1-8b", 16, tp=2, pp=2) for _ in range(2))
    assert bundle_of(first, ["megatron"]) == bundle_of(second, ["megatron"])
    assert plan_sha256(first) != plan_sha256(planned("llama-3.1-8b", 16, tp=2, pp=4))


def test_existing_files_stay(planned: Planned, tmp_path: Path) -> None:
    bundle = bundle_of(planned("llama-3.1-8b", 16, tp=2), ["megatron"])
    (tmp_path / "launch.sbatch").write_text("mine")
    with pytest.raises(SpecError, match=r"already holds launch\.sbatch"):
        write_bundle(bundle, tmp_path)
    assert os.listdir(tmp_path) == ["launch.sbatch"]
    write_bundle(bundle, tmp_path, force=True)
    assert "mine" not in (tmp_path / "launch.sbatch").read_text()


@pytest.mark.parametrize(("name", "expected"), TABLES["slug"])
def test_slug(name: str, expected: str) -> None:
    assert slug(name) == expected


OWN = [("megatron", "megatron"), ("bridge", "bridge"), ("torchtitan", "torchtitan"), ("torch", "torch-eager"),
       ("deepspeed", "deepspeed")]  # fmt: skip


def note_of(made: Plan, target: str) -> list[str]:
    return [note for note in bundle_of(made, target, force=True).notes if "priced for" in note]


@pytest.mark.parametrize(("target", "runtime"), OWN)
def test_a_plan_for_the_target_is_written_as_it_was_priced(planned: Planned, target: str, runtime: str) -> None:
    own = planned("llama-3.1-8b", 16, pp=1, runtime=runtime)
    assert priced_for(own, runtime) is own
    assert note_of(own, target) == []


@pytest.mark.parametrize(
    ("target", "runtime", "layout", "lost"), TABLES["the_note_has_step_and_memory_under_the_target"]
)
def test_the_note_has_step_and_memory_under_the_target(
    planned: Planned, target: str, runtime: str, layout: dict[str, Any], lost: str
) -> None:
    """The same numbers as the layout has when it is evaluated for that trainer in the first place."""
    there, here = (planned("llama-3.1-8b", 16, runtime=name, **layout) for name in (runtime, "megatron"))
    if runtime == "torchtitan":
        assert there.parallelism.zero_stage == 3
    (note,) = note_of(here, target)
    used_gib = there.best.worst_stage.memory.total_bytes / GIB
    assert f"priced for {runtime}: {there.step.step_s:.4g} s a step, {used_gib:.1f} of" in note
    assert f"planned for megatron: {here.step.step_s:.4g} s" in note
    assert lost in note


def test_switches_that_the_target_has_stay(planned: Planned) -> None:
    made = planned("llama-3.1-8b", 16, features={"bf16_gradients": True, "optimizer_offload": 1.0})
    there = priced_for(made, "deepspeed").runtime_spec
    assert (there.gradient_bytes, there.optimizer_offload_fraction) == (2, 1.0)


def test_a_layout_that_no_longer_fits_is_refused_without_force(planned: Planned, tmp_path: Path) -> None:
    made = planned("llama-3.1-8b", 16, features={"optimizer_offload": 0.0})
    assert made.fits
    with pytest.raises(
        Infeasible, match=r"--to deepspeed: stage 0 .* 8\d\.\d of 79\.1 GiB, planned for megatron"
    ) as caught:
        export(made, "deepspeed", tmp_path / "run")
    assert caught.value.exit_code == 3
    assert caught.value.hint == "plan again with --runtime deepspeed, or add --force to write it anyway"
    assert not (tmp_path / "run").exists()
    *files, _ = export(made, "deepspeed", tmp_path / "run", force=True)
    assert files


def test_a_loss_that_the_command_line_refuses_is_priced_as_its_own(planned: Planned) -> None:
    """8,192 tokens of 128,256 logits: their softmax is 3.9 GiB in fp32, twice in Megatron's, never in TE's."""
    made = planned("llama-3.1-8b", 16, seq_length=8192, features={"cross_entropy_fusion": True})
    (note,) = note_of(made, "megatron")
    assert "cross_entropy_fusion=true" in note
    there = priced_for(made, "megatron")
    more_gib = (there.best.worst_stage.memory.total_bytes - made.best.worst_stage.memory.total_bytes) / GIB
    assert 5.0 < more_gib < 8.2
    text = bundle_of(made, "megatron").files[0].text
    assert "--cross-entropy-fusion-impl: native" in text
    assert 'cross_entropy_fusion_impl=\\"te' in bundle_of(made, "bridge").files[0].text


@pytest.mark.parametrize(("model", "gpus", "seq"), [("llama-3.1-8b", 8, 8192), ("gpt-oss-20b", 16, 4096)])
def test_no_plan_for_megatron_outgrows_its_own_export(model: str, gpus: int, seq: int) -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=gpus)
    training = TrainingSpec(seq_length=seq, global_batch_size=512)
    found = plan(load_model(model), cluster, training, limits=SearchLimits(top=1, time_limit_s=60))
    assert found.best.recipe["cross_entropy_fusion"] == "native"
    assert not any("not fit" in note or "priced for" in note for note in bundle_of(found, "megatron").notes)


def test_the_runner_keeps_what_it_cannot_recompute(planned: Planned) -> None:
    made = planned("llama-3.1-8b", 16, pp=2, recompute="selective", recompute_modules=("layernorm", "mlp"))
    again = priced_for(made, "torch-eager", ("core_attn", "mlp"))
    assert again.parallelism.recompute_modules == ("mlp",)
    assert any("does not recompute layernorm" in note for note in bundle_of(made, "torch", force=True).notes)


def test_bridge_runs_what_megatron_s_command_line_refuses() -> None:
    model, cluster = load_model("llama-3.1-8b"), ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    training, layout = TrainingSpec(seq_length=8192, global_batch_size=64), Parallelism(pp=1, dp=8)
    bridge, megatron = (
        evaluate(model, cluster, training, layout, runtime=load_runtime(name)) for name in ("bridge", "megatron")
    )
    assert bridge.step.step_s < megatron.step.step_s
    assert bridge.best.worst_stage.memory.total_bytes < megatron.best.worst_stage.memory.total_bytes


def test_a_note_says_where_the_risk_grows_beyond_a_tenth(planned: Planned) -> None:
    """Eager torch keeps more than Megatron: on a GPU that holds it just so, the target runs out every third time."""
    made = planned("llama-3.1-8b", 16, pp=2)
    need_gib = priced_for(made, "torch-eager").best.worst_stage.memory.total_bytes / GIB
    risks = {}
    for spare in (1.02, 1.5):
        hardware = made.cluster.hardware.model_copy(update={"memory_gib": spare * need_gib})
        tighter = made.model_copy(update={"cluster": made.cluster.changed(hardware=hardware)})
        notes = [note for note in bundle_of(tighter, "torch").notes if "runs out of memory there" in note]
        risks[spare] = priced_for(tighter, "torch-eager").best.oom_probability or 0.0
        assert bool(notes) == (risks[spare] > 0.1)
        assert all(f"with a probability of {risks[spare]:.0%}, planned with" in note for note in notes)
    assert risks[1.02] > 0.1 > risks[1.5]
