"""Small changes of a small package: drawn alike every time, met by the tests of their lines, counted once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "tools"
TESTED = """\
def larger(a: int, b: int) -> bool:
    \"\"\"Whether 1 + 1.\"\"\"
    return a > b
"""
UNTESTED = """\
STEP = 3


def area(width: float, height: float) -> float:
    if width < 0:
        raise ValueError(f"{width + 1}")
    return width * height
"""
TESTS = """\
import pytest
from package.tested import larger
from package.untested import area

@pytest.mark.parametrize("b", [1, 2])
def test_larger(b):
    assert larger(b + 1, b)
    assert not larger(b, b)
    assert not larger(0, b)

def test_area():
    area(1.0, 2.0)

def test_that_fails():
    assert area(1.0, 2.0) == 3.0
"""


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The changes of a source text, as (operator, the line after)."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import mutations

    def of(source: str) -> set[tuple[str, str]]:
        return {(found.operator, found.shown(source)[1]) for found in mutations.mutations(source)}

    return of


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", {("compare", "x = (a <= b)"), ("compare", "x = (a >= b)")}),
        ("x = a - b", {("compute", "x = (a + b)"), ("drop", "x = (a)")}),
        ("x = max(é, b)", {("call", "x = (min(é, b))")}),
        ("x = not a or b", {
            ("and or", "x = (not a and b)"), ("drop", "x = (b)"), ("drop", "x = (not a)"), ("unary", "x = (a) or b"),
        }),
        ("x = 0", {("constant", "x = 1")}),
        ("x += b", {("compute", "x -= b")}),
        ("x = a if b else c", {("negate", "x = a if (not b) else c")}),
        ("x = 'a' + b", set()),
        ("x: tuple[int, 3] = f'{a + b}'", set()),
        ("raise ValueError(a + b)", set()),
        ("log.info(a + b)", set()),
    ],
)  # fmt: skip
def test_what_is_changed_and_what_is_text(line: str, expected: set[tuple[str, str]], changes: Any) -> None:
    assert changes(line) == expected


def test_what_a_function_returns_is_changed_as_its_type_says(changes: Any) -> None:
    assert ("return", "def f() -> bool: return (not x)") in changes("def f() -> bool: return x")
    assert ("return", "def f() -> int: return (x + 1)") in changes("def f() -> int: return x")


def test_a_run_counts_what_tests_notice_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    pytest.importorskip("coverage", reason="needs the test extra (coverage)")
    files = {
        "package/__init__.py": "", "package/tested.py": TESTED, "package/untested.py": UNTESTED,
        "tests/test_it.py": TESTS, "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-q'\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def run(*options: str) -> str:
        command = [sys.executable, str(SCRIPTS / "mutate"), "--root", str(tmp_path), "--rooms", "package"]
        done = subprocess.run([*command, "--tests", "tests", "--jobs", "2", *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("--number", "2")
    printed = run()
    (results,) = tmp_path.glob(".mutate/*/seed0.jsonl")
    found = [json.loads(line) for line in results.read_text().splitlines()]
    lines = {(one["file"], one["line"]): one for one in found if one["operator"] != "control"}
    assert len(found) == len(lines) + 1, "each line once, and one control"
    assert {place: one["outcome"] for place, one in lines.items()} == {
        ("package/tested.py", 3): "killed",
        ("package/untested.py", 1): "survived",
        ("package/untested.py", 5): lines["package/untested.py", 5]["outcome"],
        ("package/untested.py", 7): "survived",
    }
    assert lines["package/tested.py", 3]["killer"].startswith("tests/test_it.py::test_larger")
    assert "left out, as they do not pass: ['tests/test_it.py::test_that_fails']" in printed
    assert "1 of 1 controls passed" in printed
    assert "0 more change nothing" in printed
    assert {name: (tmp_path / name).read_text() for name in files} == files
    listed = {name: lines["package/untested.py", 7][name] for name in ("file", "before", "after")}
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "mutate.yaml").write_text(json.dumps([listed | {"reason": "nobody looks"}]))
    told = run("--report")
    assert "1 more change nothing" in told
    assert "package/untested.py:1" in told
    assert "package/untested.py:7" not in told
