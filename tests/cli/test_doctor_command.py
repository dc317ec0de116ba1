"""`plan doctor`: drivers' tools, libraries and solvers that are there, missing or broken, and nothing private."""

import builtins
import json
import os
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tables import beside

from planner.cli import main
from planner.distribution import DISTRIBUTION
from planner.profile import doctor as examine
from planner.profile.doctor import Gpu
from planner.profile.doctor import _trouble as trouble_of
from planner.search.ilp import solver as self_test

TABLES = beside(__file__)

NVIDIA = 'echo "NVIDIA H100 80GB HBM3, 81559, 550.54.15"; echo "NVIDIA H100 80GB HBM3, 81559, 550.54.15"'
AMD = json.dumps(
    {
        "card0": {"VRAM Total Memory (B)": "206141652992", "Card series": "AMD Instinct MI300X OAM"},
        "system": {"Driver version": "6.12.12"},
    }
)


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH whose first folder is empty and which has no driver's tools, and a home."""
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLANNER_HISTORY", str(tmp_path / "history"))
    return tools


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def doctor(capsys: pytest.CaptureFixture[str], *options: str, code: int = 0) -> Any:
    assert main(["doctor", "--json", *options]) == code
    return json.loads(capsys.readouterr().out)


def lost(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make distributions look as if they were not installed."""
    real = metadata.version

    def version(name: str) -> str:
        if name in names:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)


def test_it_is_one_screen_of_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40
    assert lines[0].startswith("trainplan ")
    assert lines[-1] == "The core works."


def test_nvidia_smi_names_gpus_and_their_profile(bare_machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool(bare_machine, "nvidia-smi", NVIDIA)
    found = doctor(capsys)
    assert [gpu["name"] for gpu in found["gpus"]] == ["NVIDIA H100 80GB HBM3"] * 2
    assert found["gpus"][0]["memory_gib"] == pytest.approx(79.6, abs=0.1)
    assert found["profile"].startswith("h100-sxm-80gb, of this GPU")


def test_rocm_smi_names_those_of_amd(bare_machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool(bare_machine, "rocm-smi", f"echo '{AMD}'")
    found = doctor(capsys)
    assert [gpu["name"] for gpu in found["gpus"]] == ["AMD Instinct MI300X OAM"]
    assert found["profile"].startswith("mi300x,")


@pytest.mark.parametrize(("name", "memory_gib", "profile"), TABLES["the_profile_is_the_one_named_after_the_gpu"])
def test_the_profile_is_the_one_named_after_the_gpu(name: str, memory_gib: float | None, profile: str | None) -> None:
    found = examine.profile_of(Gpu(name=name, memory_gib=memory_gib))
    assert (found and found.name) == profile


@pytest.mark.parametrize(("script", "says"), TABLES["a_tool_that_fails_is_told_and_nothing_breaks"])
def test_a_tool_that_fails_is_told_and_nothing_breaks(script: str, says: str, bare_machine: Path, capsys: Any) -> None:
    tool(bare_machine, "nvidia-smi", script)
    found = doctor(capsys)
    assert (found["gpus"], found["gpu_trouble"]) == ([], says)
    assert "the default: no GPU is found" in found["profile"]


def test_a_missing_extra_is_named_with_the_line_that_installs_it(monkeypatch: Any, capsys: Any) -> None:
    lost(monkeypatch, "torch", "uvicorn")
    found = doctor(capsys)
    extras = {extra["name"]: extra for extra in found["extras"]}
    assert extras["probe"]["install"].endswith("pip install 'trainplan[probe]'")
    assert extras["serve"]["install"].endswith("pip install 'trainplan[serve]'")
    assert found["torch"] == ""


def test_a_wheel_is_held_against_its_own_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requires = TABLES["a_wheel_is_held_against_its_own_metadata_2"]
    wheel = SimpleNamespace(requires=requires, read_text=lambda name: None)
    real = metadata.distribution
    monkeypatch.setattr(metadata, "distribution", lambda name: wheel if name == DISTRIBUTION else real(name))
    monkeypatch.setattr(examine, "PACKAGE", tmp_path / "site-packages" / "planner")
    kind, packages = examine.installed()
    assert kind == "wheel"
    troubles = {extra: [[one.name, one.trouble] for one in has] for extra, has in packages.items()}
    assert troubles == TABLES["a_wheel_is_held_against_its_own_metadata"]


def test_a_missing_library_of_the_core_ends_with_1(monkeypatch: Any, capsys: Any) -> None:
    lost(monkeypatch, "jinja2")
    assert main(["doctor"]) == 1
    said = capsys.readouterr()
    assert "It does not all work: jinja2 is missing" in " ".join(said.out.split())
    assert said.err.startswith("error: jinja2 is missing\nhint: ")
    assert said.err.endswith("pip install trainplan brings what is missing\n")


@pytest.mark.parametrize(("version", "needs", "trouble"), TABLES["versions_are_held_against_what_is_needed"])
def test_versions_are_held_against_what_is_needed(version: str, needs: str, trouble: str) -> None:
    assert trouble_of(version, needs) == trouble


def test_a_solver_that_does_not_work_ends_with_4(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(self_test, "_objective", lambda name: 10.0 if name == "HiGHS" else 11.0)
    assert main(["doctor", "-q"]) == 4
    hint = capsys.readouterr().err.splitlines()[1]
    assert hint.startswith("hint: pip install --force-reinstall --no-deps 'highspy")
    found = doctor(capsys, code=4)
    assert found["troubles"] == ["HiGHS: finds 10.0 where the optimum is 11"]
    assert list(map(bool, found["solvers"].values())) == [True, False]


def test_cbc_is_not_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = self_test._solver

    def solver(pulp: Any, name: Any) -> Any:
        if name == "CBC":
            raise AttributeError("module 'pulp' has no attribute 'PULP_CBC_CMD'")
        return real(pulp, name)

    monkeypatch.setattr(self_test, "_solver", solver)
    found = doctor(capsys)
    assert list(map(bool, found["solvers"].values())) == [False, True]


def test_a_folder_for_temporary_files_that_cannot_be_written_ends_with_1(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(examine.tempfile, "gettempdir", lambda: "/proc/none")
    found = doctor(capsys, code=1)
    assert found["troubles"][-1].startswith("/proc/none: cannot be written")


def test_no_user_and_no_machine_is_named(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node17.secret.example")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv("PLANNER_HISTORY", str(tmp_path / "kept"))
    monkeypatch.setattr(examine, "_temp", lambda: ("/scratch/ada/tmp on node17", ""))
    found = doctor(capsys)
    assert found["history"] == "~/kept"
    assert found["temp"] == "/scratch/USER/tmp on HOST"
    assert not [secret for secret in ("node17", "/ada", str(tmp_path)) if secret in json.dumps(found)]


def test_kept_runs_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "history").mkdir()
    for name in ("run-1.json", "run-2.json", "prices.json"):
        (tmp_path / "history" / name).write_text("{}")
    assert doctor(capsys)["num_runs"] == 2


def test_torch_is_not_imported() -> None:
    code = "import sys; from planner.cli import main; main(['doctor', '-q']); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL).returncode == 0


def test_a_library_that_is_missing_at_the_start_is_named(monkeypatch: Any, capsys: Any) -> None:
    real = builtins.__import__

    def missing(name: str, *more: Any) -> Any:
        if name == "planner.cli.app":
            raise ModuleNotFoundError("No module named 'yaml'", name="yaml.nodes")
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert main(["models"]) == 1
    assert capsys.readouterr().err.endswith("pip install trainplan brings it\n")
