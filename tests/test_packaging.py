"""The wheel holds everything that a plan needs, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import planner
from planner.trainers.load import RUNTIMES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_every_module_model_and_profile_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "planner").rglob("*.py")}
    for folder in ("model_specs", "hardware_profiles"):
        expected |= {f"planner/_data/{folder}/{path.name}" for path in (ROOT / folder).glob("*.yaml")}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert expected <= packed
    assert {name.split("/")[0] for name in packed} == {"planner"}
    assert not [name for name in packed if name.endswith((".pyc", ".part"))]


def test_data_files_of_the_package_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    trainers = {f"planner/trainers/data/{name}.yaml" for name in (*RUNTIMES, "shared/nccl")}
    assert {"planner/py.typed", *trainers} <= set(wheel.namelist())
    data = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "planner").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert data <= set(wheel.namelist())


def test_the_wheel_plans_from_another_folder(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    code = "import planner, sys; from planner.cli import main; print(planner.__file__); sys.exit(main(['models']))"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert "405.9B" in done.stdout


def test_versions_agree_and_torch_is_not_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == planner.__version__
    assert project["scripts"] == {"plan": "planner.cli:main"}
    assert not [need for need in project["dependencies"] if re.match(r"torch\b", need)]
    assert [need for need in project["optional-dependencies"]["probe"] if re.match(r"torch\b", need)]


def test_the_licence_is_apache_2() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert (ROOT / "LICENSE").read_text().count("\n") > 190
