"""Which tests run which lines: recorded once with coverage, then asked which tests a changed line is to meet."""

from __future__ import annotations

import gzip
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

import pytest
from mutations import Mutation

MOST_TESTS, MOST_TESTS_S = 40, 15.0
"""Tests that meet one change, and their seconds together when nothing is changed."""
QUIETLY = ("-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Options of pytest that leave no files, start no processes, and let it be given modules that are imported already."""


class Recorder:
    """A pytest plugin: which test runs which lines, how long it takes, whether it passes.

    Lines that a fixture of a module or a session runs count for every test that uses it. What the code under test has
    cached is forgotten before each test, so that lines behind a cache count for all who need them.
    """

    def __init__(self, coverage: Any, root: Path, part: int, parts: int) -> None:
        self.coverage, self.root, self.context, self.part = coverage, str(root), "", slice(part, None, parts)
        self.seconds: dict[str, float] = {}
        self.fixture_s: dict[str, float] = {}
        self.shared_s = 0.0
        self.not_passed: set[str] = set()
        self.fixtures: dict[str, list[str]] = {}

    @contextmanager
    def _as(self, context: str) -> Iterator[None]:
        before, self.context = self.context, context
        self.coverage.switch_context(context)
        try:
            yield
        finally:
            self.context = before
            self.coverage.switch_context(before)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = items[self.part]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        used = item._fixtureinfo.name2fixturedefs.values()
        self.fixtures[item.nodeid] = [_name(defs[-1]) for defs in used if defs[-1].scope != "function"]
        self._forget_caches()
        start_s, self.shared_s = time.process_time(), 0.0
        with self._as(item.nodeid):
            result = yield
        own_s = time.process_time() - start_s - self.shared_s
        # alone, a test makes all of its fixtures itself
        self.seconds[item.nodeid] = own_s + sum(self.fixture_s.get(name, 0.0) for name in self.fixtures[item.nodeid])
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        if fixturedef.scope == "function":
            return (yield)
        start_s = time.process_time()
        with self._as(_name(fixturedef)):
            result = yield
        self.fixture_s[_name(fixturedef)] = time.process_time() - start_s
        self.shared_s += self.fixture_s[_name(fixturedef)]
        return result

    def pytest_runtest_logreport(self, report: Any) -> None:
        if not report.passed:
            self.not_passed.add(report.nodeid)

    def _forget_caches(self) -> None:
        for module in list(sys.modules.values()):
            if (getattr(module, "__file__", None) or "").startswith(self.root):
                for value in list(vars(module).values()):
                    for cached in (value, *(vars(value).values() if isinstance(value, type) else ())):
                        if callable(forget := getattr(cached, "cache_clear", None)):
                            forget()


def _name(fixture: Any) -> str:
    return f"fixture {fixture.baseid}::{fixture.argname}"


def record(root: Path, rooms: Sequence[str], tests: Sequence[str], paths: Sequence[Path]) -> None:
    """Run all tests once, some for each of `paths`, and write there: tests, their seconds, the tests of each line."""
    pids = []
    for part, path in enumerate(paths):
        if not (pid := os.fork()):
            _record(root, rooms, tests, path, part, len(paths))
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def _record(root: Path, rooms: Sequence[str], tests: Sequence[str], path: Path, part: int, parts: int) -> NoReturn:
    from coverage import Coverage

    enter(root)
    coverage = Coverage(data_file=None, config_file=False, source=[str(root / room) for room in rooms])
    recorder = Recorder(coverage, root, part, parts)
    coverage.start()
    pytest.main([*tests, *QUIETLY], plugins=[recorder])
    coverage.stop()
    names = [name for name in recorder.seconds if name not in recorder.not_passed]
    users: dict[str, set[int]] = defaultdict(set)
    for number, name in enumerate(names):
        for context in (name, *recorder.fixtures[name]):
            users[context].add(number)
    data, lines = coverage.get_data(), {}
    for file in data.measured_files():
        contexts = data.contexts_by_lineno(file).items()
        lines[str(Path(file).relative_to(root))] = {
            line: sorted(set().union(*(users[context] for context in of_line))) for line, of_line in contexts
        }
    libraries = [name for name, module in list(sys.modules.items()) if "site-packages" in str(module)]
    found = {"tests": names, "seconds": [recorder.seconds[name] for name in names], "lines": lines}
    with gzip.open(path.with_suffix(".part"), "wt") as out:
        json.dump(found | {"libraries": libraries, "not_passed": sorted(recorder.not_passed)}, out)
    path.with_suffix(".part").rename(path)
    leave(0)


def enter(root: Path) -> None:
    """Have this process import the code under test from `root`."""
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)
    sys.argv = ["pytest"]


def leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Map:
    """What was recorded, asked for the tests that a change is to meet."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.tests: list[str] = []
        self.seconds: list[float] = []
        self.libraries: list[str] = []
        self.not_passed: list[str] = []
        self.lines: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for path in paths:
            with gzip.open(path, "rt") as file:
                part = json.load(file)
            for name, lines in part["lines"].items():
                for line, tests in lines.items():
                    self.lines[name][int(line)] |= {len(self.tests) + test for test in tests}
            for kind in ("tests", "seconds", "libraries", "not_passed"):
                getattr(self, kind).extend(part[kind])
        self.breadth = Counter(test for lines in self.lines.values() for tests in lines.values() for test in tests)

    def tests_for(self, file: str, mutation: Mutation) -> list[int]:
        """The tests that a change is to meet, in the order in which they run.

        Of all that run one of its lines those that run the fewest other lines, of each test function in turn. A line
        that runs on import is every test's that runs anything of its file; thrice as many may be needed there.
        """
        lines = self.lines[file]
        changed = set().union(*(lines[n] for n in range(mutation.line, mutation.end_line + 1) if n in lines))
        chosen = self._most_specific(changed or set().union(*lines.values()), 1 if changed else 3)
        fastest: dict[str, float] = {}
        for test in chosen:
            fastest[self._file(test)] = min(fastest.get(self._file(test), self.seconds[test]), self.seconds[test])
        return sorted(chosen, key=lambda test: (fastest[self._file(test)], self._file(test), self.seconds[test]))

    def _most_specific(self, tests: Iterable[int], times: int) -> list[int]:
        functions: dict[str, list[int]] = defaultdict(list)
        for test in sorted(tests, key=lambda test: (self.breadth[test], self.seconds[test])):
            functions[self.tests[test].split("[")[0]].append(test)
        chosen: list[int] = []
        seconds = 0.0
        for test in (test for turn in zip_longest(*functions.values()) for test in turn if test is not None):
            if not chosen or seconds + self.seconds[test] <= times * MOST_TESTS_S:
                chosen.append(test)
                seconds += self.seconds[test]
            if len(chosen) == times * MOST_TESTS:
                break
        return chosen

    def _file(self, test: int) -> str:
        return self.tests[test].split("::")[0]
