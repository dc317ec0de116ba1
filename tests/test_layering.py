"""Who may import whom; only the integer program imports the solver, only what runs on GPUs imports torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "planner"
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

ALLOWED = {
    "errors": set(),
    "files": {"errors"},
    "shape": {"errors"},
    "specs": {"errors"},
    "trainers": {"errors", "shape", "specs"},
    "schedule": {"errors", "shape"},
    "physics": {"errors", "shape", "specs", "trainers"},
    # a plan loads itself, and shows its report in a notebook
    "answer": {"errors", "files", "shape", "specs", "trainers", "plan_file", "report.page"},
    "plan_file": {"errors", "specs", "answer"},
    "layout": {"errors", "shape", "specs", "trainers", "schedule", "physics", "answer"},
    "search": {"errors", "shape", "specs", "trainers", "schedule", "physics", "answer", "layout"},
    # a target's constraints are written once, and the search holds candidates against them too
    "export": {"errors", "files", "shape", "specs", "trainers", "schedule", "answer"},
    "report": {"errors", "files", "specs", "trainers", "schedule", "answer", "layout.replan"},
    "validate": {"errors", "files", "shape", "specs", "trainers", "answer", "layout", "search"},
    # exchanges that ran by themselves stand beside the seconds that the plan has links take for their bytes, and what
    # ranks ran beside what the plan's layout costs in the program that they are
    "probe": {"errors", "files", "specs", "trainers", "schedule", "answer", "physics.communication", "layout.candidate",
        "layout.replan",
    },
    # a fit evaluates what it fits, on the runs that validate ships and on stages that a probe ran
    "profile": {
        "errors", "files", "shape", "specs", "trainers", "schedule", "physics", "answer", "layout", "validate", "probe",
    },
}  # fmt: skip
"""Rooms that each room may import, beside itself; `cli` may import all of them and is imported by none."""

EXTERNAL = {
    "pulp": {"search/ilp"},
    "torch": {"probe", "profile"},
}
"""Libraries that only these files or folders may import."""


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever it stands."""
    names = set()
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", [p for p in FILES if room(p) not in ("cli", "__init__")], ids=str)
def test_imports_only_what_its_room_may(path: Path) -> None:
    ours = {name.removeprefix("planner.") for name in imports(path) if name.startswith("planner.")}
    allowed = {room(path), *ALLOWED[room(path)], "__version__"}
    strangers = {name for name in ours if not any(fnmatch(name, p) for a in allowed for p in (a, f"{a}.*"))}
    assert not strangers, f"{path} imports {sorted(strangers)}; {room(path)} may import {sorted(allowed)}"


@pytest.mark.parametrize("library", EXTERNAL)
def test_only_its_files_import(library: str) -> None:
    users = {path for path in FILES if any(name.split(".")[0] == library for name in imports(path))}
    assert not {str(p) for p in users if not {str(p), *map(str, p.parents)} & EXTERNAL[library]}


@pytest.mark.parametrize(
    "statement",
    [
        "import planner",
        "from planner import plan",
        "from planner.cli import main; main(['--model', '8b', '--gpus', '8', '--json'])",
        "from planner.cli import main; main(['-h'])",
    ],
)
def test_torch_is_not_imported(statement: str) -> None:
    code = f"{statement}; import sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
