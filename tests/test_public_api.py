"""What `from planner import …` offers, and that the function `plan` and the module `planner.plan` live side by side."""

from __future__ import annotations

import subprocess
import sys

import pytest

import planner

EXPORTED = {
    "ClusterSpec", "ModelSpec", "Parallelism", "Plan", "RuntimeSpec", "SearchLimits", "TrainingSpec", "evaluate",
    "load_hardware", "load_model", "plan",
}  # fmt: skip


def test_the_exported_surface_is_exactly_this() -> None:
    assert set(planner.__all__) == EXPORTED
    assert all(getattr(planner, name).__name__ == name for name in EXPORTED)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'plane'"):
        planner.plane  # noqa: B018


@pytest.mark.parametrize(
    "statements",
    [
        "from planner import plan; from planner.answer import Plan",
        "from planner.answer import Plan; from planner import plan",
        "import planner.answer; from planner.answer import Plan; from planner import plan",
        "from planner.layout.evaluate import evaluate; from planner.answer import Plan; from planner import plan",
        "import planner; planner.evaluate; from planner.answer import Plan; plan = planner.plan",
    ],
)
def test_plan_is_the_function_in_every_order(statements: str) -> None:
    code = f"{statements}; assert callable(plan) and plan.__name__ == 'plan', plan; assert Plan.__name__ == 'Plan'"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_loads_nothing() -> None:
    code = "import planner, sys; sys.exit(any(m in sys.modules for m in ('numpy', 'pulp', 'pydantic', 'planner.plan')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
