"""Only `planner/specs/reading` parses what users' files hold; whoever else calls a parser says why."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tables import beside

TABLES = beside(__file__)

ROOT = Path(__file__).parents[2]
HOME = "planner/specs/reading.py"

PARSERS = {
    "json": {"load", "loads", "JSONDecoder"},
    "yaml": {"load", "load_all", "safe_load", "safe_load_all", "full_load", "unsafe_load", "parse", "scan", "compose"},
    "tomllib": {"load", "loads"}, "csv": {"reader", "DictReader"}, "ast": {"parse", "literal_eval"},
    "pickle": {"load", "loads", "Unpickler"}, "gzip": {"open", "GzipFile", "decompress"},
    "zlib": {"decompress", "decompressobj"}, "sqlite3": {"connect"}, "shlex": {"split"},
    "configparser": {"ConfigParser"}, "marshal": {"load", "loads"},
    "builtins": {"eval", "exec", "compile", "__import__"},
}  # fmt: skip
SUSPECT = re.compile(
    rf"^\s*(import|from) ({'|'.join(PARSERS)})\b|(?<![.\w])({'|'.join(PARSERS['builtins'])})\(", re.MULTILINE
)
"""A line that a module needs which calls a parser."""
OWN = "a text that the planner wrote, or that ships with it"
WIRE = "wire between the planner's own processes"
LARGE = "files of gigabytes in pieces, with limits of its own on bytes, inflation and values"

EXCEPTIONS = {
    "planner/profile/doctor.py": "the tables that nvidia-smi and rocm-smi print, and our own package's metadata",
    "planner/layout/runs.py": OWN, "planner/cli/options.py": OWN, "planner/serve/controls.py": OWN,
    "planner/profile/measure.py": WIRE, "planner/report/small.py": OWN,
    "planner/serve/mcp_server.py": "requests of a client, a line each, with a limit", "planner/report/view.py": OWN,
    "planner/specs/base.py": "our own sources, for the docstrings below fields", "planner/trace/trace.py": WIRE,
    "planner/validate/rows.py": OWN,
    "planner/specs/expressions.py": "expressions in our own tables, in which nothing stands that a user gives",
    "planner/probe/torch_build.py": "the table that nvidia-smi prints", "planner/probe/rank/groups.py": WIRE,
    "planner/observe/lines.py": "logs, inflated a MiB at a time, up to a limit; no line is longer than 64 KiB",
    "planner/observe/traces/source.py": f"an unpickler that knows no class, in bounded memory; {LARGE}",
}  # fmt: skip
"""Modules that call a parser themselves, and why they may."""


def parsers_in(source: str) -> set[str]:
    """Every parser that a module calls or imports by name, as `json.loads`."""
    tree, modules, found = ast.parse(source), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: alias.name for alias in node.names if alias.name in PARSERS}
        elif isinstance(node, ast.ImportFrom) and node.module in PARSERS:
            names = {alias.name for alias in node.names} & PARSERS[node.module]
            found |= {f"{node.module}.{name}" for name in names}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in modules:
                found |= {f"{modules[name]}.{attribute}"} if attribute in PARSERS[modules[name]] else set()
            case ast.Call(func=ast.Name(id=name)) if name in PARSERS["builtins"]:
                found.add(name)
    return found


def test_only_the_home_of_reading_calls_a_parser() -> None:
    paths = sorted(path for path in (ROOT / "planner").rglob("*.py") if HOME not in path.as_posix())
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    suspects = {path: source for path, source in sources.items() if SUSPECT.search(source)}
    callers = {path: parsers for path, source in suspects.items() if (parsers := parsers_in(source))}
    strangers = {path: parsers for path, parsers in callers.items() if path not in EXCEPTIONS}
    assert not strangers, f"read with {HOME}, or say in EXCEPTIONS why not: {strangers}"
    assert not EXCEPTIONS.keys() - callers.keys(), "these call no parser any more"


@pytest.mark.parametrize("source", TABLES["the_walk_sees_every_way_to_call_a_parser"])
def test_the_walk_sees_every_way_to_call_a_parser(source: str) -> None:
    assert parsers_in(source)
