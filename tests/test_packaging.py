"""The wheel holds everything that a plan needs, and nothing else."""

import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import planner
from planner.distribution import DISTRIBUTION, install_line
from planner.trainers.load import RUNTIMES

TABLES = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())

ROOT = Path(__file__).parents[1]


PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STEM = f"{re.sub(r'[-_.]+', '_', PROJECT['name'])}-{PROJECT['version']}"
"""The begin of the names of what is built."""


def built(source: Path, folder: Path, *targets: str) -> Path:
    """A folder with what hatchling builds of a source tree."""
    command = [sys.executable, "-m", "hatchling", "build", *(f"-t{target}" for target in targets), "-d", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this tree's wheel and sdist."""
    return built(ROOT, tmp_path_factory.mktemp("dist"), "sdist", "wheel")


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(dist / f"{STEM}-py3-none-any.whl")


def test_the_wheel_holds_the_package_its_data_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    package = [path for path in (ROOT / "planner").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    own = {str(path.relative_to(ROOT)) for path in package}
    for folder in ("model_specs", "hardware_profiles"):
        own |= {f"planner/_data/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.yaml")}
    trainers = {f"planner/trainers/data/{name}.yaml" for name in (*RUNTIMES, "shared/nccl")}
    assert {"planner/py.typed", *trainers} <= own <= set(wheel.namelist())
    info = {
        f"{STEM}.dist-info/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }
    assert set(wheel.namelist()) - own == info
    assert {Path(name).suffix for name in wheel.namelist()} <= {
        "", ".py", ".typed", ".yaml", ".json", ".jsonl", ".csv", ".gz", ".j2", ".js", ".css", ".svg", ".txt",
    }  # fmt: skip


def test_the_wheel_says_its_licence_its_python_and_what_it_needs(wheel: zipfile.ZipFile) -> None:
    info = f"{STEM}.dist-info"
    said = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert (said["Name"], said["Version"]) == (PROJECT["name"], PROJECT["version"])
    assert (said["License-Expression"], said["License-File"]) == ("Apache-2.0", "LICENSE")
    assert said["Requires-Python"] == PROJECT["requires-python"]
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    needs = [need for need in said.get_all("Requires-Dist") or [] if "extra ==" not in need]
    assert len(needs) == len(PROJECT["dependencies"])
    assert set(said.get_all("Provides-Extra") or []) == set(PROJECT["optional-dependencies"])
    assert "Root-Is-Purelib: true" in wheel.read(f"{info}/WHEEL").decode()


def test_the_sdist_holds_what_is_kept_in_git_and_builds_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    with tarfile.open(dist / f"{STEM}.tar.gz") as archive:
        names = {name.removeprefix(f"{STEM}/") for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    kept = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if kept.returncode == 0:
        there = {name for name in kept.stdout.splitlines() if (ROOT / name).exists()}
        assert names == there | {"PKG-INFO"}
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".part"))]
    again = built(tmp_path / STEM, tmp_path / "again", "wheel")
    ours, theirs = (next(folder.glob("*.whl")).read_bytes() for folder in (dist, again))
    assert ours == theirs


def test_the_wheel_plans_from_another_folder(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    code = "import planner, sys; from planner.cli import main; print(planner.__file__); sys.exit(main(['models']))"
    environment = {"PYTHONPATH": str(tmp_path / "site"), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert "405.9B" in done.stdout


def test_versions_agree_and_torch_is_not_a_dependency() -> None:
    assert PROJECT["version"] == planner.__version__
    assert PROJECT["scripts"] == {"plan": "planner.cli:main"}
    assert not [need for need in PROJECT["dependencies"] if re.match(r"torch\b", need)]
    assert [need for need in PROJECT["optional-dependencies"]["probe"] if re.match(r"torch\b", need)]


def test_the_name_on_the_index_is_said_in_one_place() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert install_line("probe", "serve", here=False) == f"pip install '{DISTRIBUTION}[probe,serve]'"
    spelled = re.compile(r"""install_line\("(\w+)"\)|pip install '?planner\b""")
    files = [path for folder in ("planner", "docs", "scripts", "tools") for path in (ROOT / folder).rglob("*")]
    texts = [path.read_text() for path in files if path.is_file() and path.suffix in ("", ".py", ".md")]
    found = [match for text in texts for match in spelled.finditer(text)]
    assert {match[1] for match in found} <= PROJECT["optional-dependencies"].keys(), "extras, by our own name"


def test_the_citation_and_the_changelog_have_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys(), "the keys that its schema requires"
    assert (citation["title"], citation["version"]) == (DISTRIBUTION, planner.__version__)
    assert f"## [{planner.__version__}] - {citation['date-released']}\n" in (ROOT / "CHANGELOG.md").read_text()


@pytest.fixture(scope="module")
def licences() -> ModuleType:
    """tools/licences as a module."""
    loader = importlib.machinery.SourceFileLoader("licences", str(ROOT / "tools" / "licences"))
    spec = importlib.util.spec_from_loader("licences", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_table_is_what_the_installed_packages_say(licences: ModuleType) -> None:
    written = {row.name: row.licence for row in licences.written_rows(licences.TABLE.read_text())}
    installed = {row.name: row.licence for row in licences.installed_rows()}
    differing = {
        name: (licence, written.get(name)) for name, licence in installed.items() if written.get(name) != licence
    }
    assert differing == {}, "tools/licences writes the table anew; read what changed"
    assert all(licences.is_permitted(licence) for licence in written.values()), written


def test_every_package_that_is_asked_for_has_a_row(licences: ModuleType) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = [*project["dependencies"], *extras["serve"], *extras["probe"]]
    names = {canonicalize_name(Requirement(need).name) for need in needs}
    assert names <= {row.name for row in licences.written_rows(licences.TABLE.read_text())}


@pytest.mark.parametrize(("licence", "is_permitted"), TABLES["what_does_not_go_with_apache_2_is_refused"])
def test_what_does_not_go_with_apache_2_is_refused(licences: ModuleType, licence: str, is_permitted: bool) -> None:
    assert licences.is_permitted(licence) is is_permitted


def run(code: str, folder: Path) -> tuple[str, str]:
    """What a process without a network prints, and where it and those that it started reached to."""
    site, reached = folder / "site", folder / "reached"
    site.mkdir()
    reached.touch()
    (site / "sitecustomize.py").write_text(TABLES["guard"])
    paths = os.pathsep.join(map(str, (site, ROOT, ROOT / "scripts")))
    environment = {**os.environ, "PYTHONPATH": paths, "REACHED": str(reached)}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, reached.read_text()


def test_the_guard_refuses_what_leaves_the_machine(tmp_path: Path) -> None:
    out, reached = run(TABLES["ask"], tmp_path)
    assert out.count("no network: ") == 4
    assert len(reached.splitlines()) == 4


def test_no_command_reaches_for_the_network(tmp_path: Path) -> None:
    out, reached = run(TABLES["run"], tmp_path)
    assert out.endswith(" lines\n")
    assert reached == ""


def test_the_page_listens_on_this_machine_alone_and_reaches_nowhere(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="needs the serve extra")
    out, reached = run(TABLES["serve"], tmp_path)
    assert (out, reached) == ("127.0.0.1 True 130\n", "")
