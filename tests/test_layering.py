"""Who may import whom, without cycles; only the integer program imports the solver, only what runs on GPUs torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import yaml

TABLES = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())

PACKAGE = Path(__file__).parents[1] / "planner"
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))

ALLOWED = {
    "errors": set(),
    "record": set(),
    "rank_orders": set(),
    "distribution": set(),
    "files": {"errors"},
    "saved": {"errors"},
    "shape": {"errors", "rank_orders"},
    "specs": {"errors"},
    "trainers": {"errors", "shape", "specs"},
    # a schedule is read from CSV
    "schedule": {"errors", "shape", "specs.reading"},
    "physics": {"errors", "shape", "specs", "trainers"},
    "answer": {"errors", "files", "shape", "saved", "specs", "trainers"},
    "plan_file": {"errors", "saved", "specs", "schedule", "answer", "layout"},
    # a run of months knows a layout's seconds, and nothing of how they came about
    "months": {"errors", "shape", "specs", "answer"},
    "layout": {"errors", "shape", "specs", "trainers", "schedule", "physics", "answer", "months"},
    # what `explain` answers is sentences, with the numbers written as the reports write them
    "search": {"errors", "shape", "specs", "trainers", "schedule", "physics", "answer", "layout", "report.causes"},
    # a target's constraints are written once, and the search holds candidates against them too
    # and prices a plan under the trainer that it is written for; what a manifest says is a run
    "export": {
        "distribution", "errors", "files", "shape", "specs", "trainers", "schedule", "answer", "months",
        "layout.price", "layout.runs",
    },
    # a saved plan is priced again to cut its seconds further; a probe's file is read without torch; a sweep searches; a
    # job that resumes is split, searched again and held against months of failures, as the phases of a run are
    "decide": {
        "errors", "shape", "specs", "trainers", "answer", "schedule.orders", "months", "layout",
        "probe.result", "observe.observation", "search.case", "search.layouts", "search.recipes",
        "search.safest", "search.search", "search.why.recipe", "search.why.remedy",
        # a launch file that is checked is read as the importer reads it, and broken rules are those of its trainer
        "export.import_run", "export.spelling",
    },
    # the answer of `explain` is a type of its own, and rendered as the plan is; a recipe's variables are the export's;
    # a saved plan is replayed to draw its pipeline and its memory over time; what probes, machines and published runs
    # measured is shown as plans are
    "report": {
        "errors", "files", "specs", "trainers", "schedule", "answer", "search.why.explanation", "search.why.recipe",
        "search.rebalance", "layout.price", "export.launchers", "decide", "observe", "probe", "profile", "validate",
        # a trace draws what runs inside and beside a candidate's passes, and its memory
        "layout.alive", "layout.candidate", "layout.memory_curve", "layout.step",
    },
    # a module is traced in a process of its own into a model file
    "trace": {"errors", "specs"},
    "validate": {"errors", "files", "shape", "specs", "trainers", "answer", "layout", "search", "months"},
    # exchanges that ran by themselves stand beside the seconds that the plan has links take for their bytes, and what
    # ranks ran beside what the plan's layout costs in the program that they are
    "probe": {
        "errors", "files", "specs", "trainers", "schedule", "answer", "physics.communication", "physics.compute",
        "physics.kernels", "physics.operators", "layout.candidate", "layout.price",
        # a run is priced before it starts
        "shape", "physics.cost", "physics.memory", "physics.pricing", "physics.stage_memory", "layout.seconds",
        # ranks run the operators of a traced layer
        "physics.layers",
    },
    # a fit evaluates what it fits, on stages that a probe ran; what a machine lacks is looked for everywhere, and the
    # solver tests itself
    "profile": {
        "distribution", "errors", "files", "saved", "shape", "specs", "trainers", "schedule", "physics", "answer",
        "layout", "probe", "search.ilp.solver", "observe.history", "observe.default_folder",
    },
    # the page asks as the command line does, which gives it the reader of options: nothing imports `cli`. It prices the
    # layout on the screen again, searches, and shows and exports what is found
    "serve": {
        "errors", "shape", "specs", "trainers", "schedule", "answer", "plan_file", "layout", "search",
        "report", "export", "decide.check", "decide.next",
    },
    # a log's argument dump is a configuration that the importer reads; a run that was read is priced, and changed by
    # what would help; a run that calibrates is believed as a probe is, and one that is kept holds its plan
    "observe": {
        "errors", "files", "shape", "specs", "answer", "trainers", "export", "schedule", "physics", "layout",
        "plan_file", "saved", "profile.probed",
    },
}  # fmt: skip
"""Rooms that each room may import, beside itself; `cli` may import all of them and is imported by none."""

EXTERNAL = {
    "jinja2": {"export/trainer_files.py", "report/html.py"}, "pulp": {"search/ilp"},
    "torch": {"probe", "profile", "trace/run.py"}, "mcp": {"serve/mcp_server.py"},
    "mcp_types": {"serve/mcp_server.py"}, "starlette": {"serve"}, "uvicorn": {"serve"},
}  # fmt: skip
"""Libraries that only these files or folders may import."""

RIDDLES = ("Of ", "What ", "Where ", "Whether ")
"""Beginnings of a docstring that is no sentence and names no quantity."""
ROOMS_WITH_RIDDLES: set[str] = set()
"""Rooms not rewritten yet."""


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax tree."""
    return tuple(ast.walk(ast.parse((PACKAGE / path).read_text())))


@cache
def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever it stands."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(path: Path) -> str:
    return path.parts[0].removesuffix(".py")


@pytest.mark.parametrize("name", sorted({room(path) for path in FILES} - {"cli", "__init__"}))
def test_a_room_imports_only_what_it_may(name: str) -> None:
    allowed = {name, *ALLOWED[name], "distribution.__version__", "record.record"}
    for path in (path for path in FILES if room(path) == name):
        ours = {imported.removeprefix("planner.") for imported in imports(path) if imported.startswith("planner.")}
        strangers = {each for each in ours if not any(fnmatch(each, p) for a in allowed for p in (a, f"{a}.*"))}
        assert not strangers, f"{path} imports {sorted(strangers)}; {name} may import {sorted(allowed)}"


@pytest.mark.parametrize("library", EXTERNAL)
def test_only_its_files_import(library: str) -> None:
    users = {path for path in FILES if any(name.split(".")[0] == library for name in imports(path))}
    assert not {str(p) for p in users if not {str(p), *map(str, p.parents)} & EXTERNAL[library]}


def module(path: Path) -> str:
    """A file's name below the package as an import spells it; a folder's own for its `__init__.py`."""
    return ".".join(path.with_suffix("").parts).removesuffix("__init__").removesuffix(".")


def modules_of(path: Path, known: set[str]) -> set[str]:
    """The package's own modules that a file imports, also inside functions."""
    names = {name.removeprefix("planner.") for name in imports(path) if name.startswith("planner.")}
    return {name if name in known else name.rpartition(".")[0] for name in names} & known - {module(path)}


def test_no_module_imports_itself_by_way_of_others() -> None:
    # the package's own file loads what it names when that is asked for
    known = {module(path) for path in FILES} - {""}
    graph = {module(path): modules_of(path, known) for path in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a cycle, each imported by the next: {error.args[1]}")


def docstrings(path: Path) -> Iterator[str]:
    """Every string that stands alone: docstrings of modules, classes and functions, and those below an assignment."""
    for node in nodes(path):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


@pytest.mark.parametrize("name", sorted({room(path) for path in FILES} - ROOMS_WITH_RIDDLES))
def test_docstrings_begin_with_a_sentence_or_a_quantity(name: str) -> None:
    paths = [path for path in FILES if room(path) == name]
    assert [f"{path}: {text}" for path in paths for text in docstrings(path) if text.startswith(RIDDLES)] == []


@pytest.mark.parametrize("statement", TABLES["torch_is_not_imported"])
def test_torch_is_not_imported(statement: str) -> None:
    code = f"{statement}; import sys; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
