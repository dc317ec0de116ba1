"""The names of `from planner import …`: loaded when they are asked for, with types that a user's checker sees."""

import doctest
import json
import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from priced_plans import priced_plan

import planner

TABLES = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())

ROOT = Path(__file__).parents[1]
CONTRACT = {
    "ClusterSpec", "ModelSpec", "Parallelism", "Plan", "RuntimeSpec", "SearchLimits", "TrainingSpec", "evaluate",
    "load_hardware", "load_model", "plan",
}  # fmt: skip
ERRORS = {
    "Infeasible", "PlannerError", "ProbeError", "ProbeMismatch", "SolverError", "SpecError", "Unsupported",
}  # fmt: skip
TWINS = {
    "HardwareSpec", "check", "explain", "export_plan", "load_runtime", "read_configuration", "replan",
    "validate_runs", "write_report",
}  # fmt: skip
"""Library functions of commands, and what they take and give."""
NAMED_AT_HOME = {"export_plan": "export", "read_configuration": "read"}
"""Names that differ in their module, whose folder already says what they are about."""

REVEALED = ["planner.answer.Plan", "float", "planner.answer.Plan", "float", "str"]


@pytest.fixture(scope="module")
def plan() -> planner.Plan:
    return priced_plan(batch=16, tp=2, pp=2, dp=2)


def test_the_exported_surface_is_exactly_this() -> None:
    assert set(planner.__all__) == CONTRACT | ERRORS | TWINS
    assert all(getattr(planner, name).__name__ == NAMED_AT_HOME.get(name, name) for name in planner.__all__)
    assert set(dir(planner)) == {*planner.__all__, "__version__"}


def test_no_room_hides_an_exported_name() -> None:
    """Importing a room sets it as an attribute of the package."""
    assert not set(planner.__all__) & {module.name for module in pkgutil.iter_modules(planner.__path__)}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plane'"):
        planner.plane  # noqa: B018


def test_importing_the_package_loads_nothing() -> None:
    code = "import planner, sys; dir(planner); sys.exit(any(m in sys.modules for m in ('numpy', 'pulp', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_script_of_the_user_type_checks(tmp_path: Path) -> None:
    """As mypy sees an installed package: without its configuration, by its py.typed."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    script = tmp_path / "script.py"
    script.write_text(TABLES["script"])
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={os.devnull}", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    revealed = [
        line.split('"')[1].removeprefix("builtins.") for line in done.stdout.splitlines() if "Revealed type" in line
    ]
    assert revealed == REVEALED


def test_a_field_that_no_version_had_is_named(plan: planner.Plan, tmp_path: Path) -> None:
    data = plan.to_json()
    data["runtime_spec"]["host_factr"] = 1.0
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(planner.SpecError, match=r"plan.json: runtime_spec.host_factr: unknown key") as error:
        planner.Plan.load(tmp_path / "plan.json")
    assert "did you mean host_factor" in error.value.hint


def test_a_notebook_shows_the_report(plan: planner.Plan, tmp_path: Path) -> None:
    planner.write_report(plan, tmp_path / "report.html")
    assert "llama-3.1-8b" in (tmp_path / "report.html").read_text()
    html = plan._repr_html_()
    assert html.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert html.count('"') == 4, "the page is escaped"


def test_predictions_are_scored_on_one_source() -> None:
    family, everything = planner.validate_runs("bloom")
    assert (family.name, everything.name, family.num_rows) == ("bloom", "all", 1)
    with pytest.raises(planner.SpecError, match="family: 'blom' is unknown"):
        planner.validate_runs("blom")


def modules() -> list[str]:
    rooms = [import_module(f"planner.{name}") for name in ("physics", "schedule")]
    found = [module.name for room in rooms for module in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")]
    return ["planner.shape", *found]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings_are_right(name: str) -> None:
    """Physics and schedules are usable by themselves, as these show."""
    assert doctest.testmod(import_module(name)).failed == 0
