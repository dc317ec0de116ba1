"""The modules of the probe import each other in one direction only, imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PARTS = ("model", "rank", "launch", "verdict")
"""The folders of the probe. A module imports only from its own folder and from those before it."""
FIRST = ("run", "result", "repeats", "device_state", "torch_build", "eager", "plan_slice", "plan_runs")
"""Modules of the probe's own folder that the folders import; the others (rehearse, probe, worker) import these."""
MOST_MODULES = 20
"""A folder with more modules than this hides the one that a reader looks for."""


def modules_under(package: Path) -> dict[str, Path]:
    """The file of each module under a package's folder, by dotted name."""
    return {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }


def imported_by(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere in it; `from a import b` may name the module `a` or `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def import_graph(package: Path) -> dict[str, set[str]]:
    """The modules of the same package that each module of it imports."""
    modules = modules_under(package)
    return {name: (imported_by(path) & modules.keys()) - {name} for name, path in modules.items()}


def cycle_in(graph: Mapping[str, set[str]]) -> list[str]:
    """Names along one cycle of a graph, the first one again at the end; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


@pytest.mark.parametrize("package", ["probe", "profile"])
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    graph = import_graph(REPOSITORY / "planner" / package)
    assert graph, "no modules were found"
    assert cycle_in(graph) == []


def test_each_part_of_the_probe_imports_only_parts_before_it() -> None:
    def part(name: str) -> int:
        folder = name.split(".")[2]
        return PARTS.index(folder) if folder in PARTS else -1 if folder in FIRST else len(PARTS)

    graph = import_graph(REPOSITORY / "planner" / "probe")
    upward = {
        f"{name} imports {imported}"
        for name, imports in graph.items()
        for imported in imports - {"planner.probe"}
        if name != "planner.probe" and part(imported) > part(name)
    }
    assert upward == set()


@pytest.mark.parametrize("package", ["probe", "profile"])
def test_no_folder_holds_more_modules_than_a_reader_can_scan(package: str) -> None:
    folders = [path.parent for path in modules_under(REPOSITORY / "planner" / package).values()]
    crowded = {folder.name: folders.count(folder) for folder in set(folders) if folders.count(folder) > MOST_MODULES}
    assert crowded == {}


def test_a_cycle_is_found_through_an_import_inside_a_function(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("import second\n")
    (tmp_path / "second.py").write_text("def late():\n    from first import name\n    return name\n")
    graph = {path.stem: imported_by(path) & {"first", "second"} for path in tmp_path.glob("*.py")}
    assert sorted(set(cycle_in(graph))) == ["first", "second"]
    graph["second"] = set()
    assert cycle_in(graph) == []
