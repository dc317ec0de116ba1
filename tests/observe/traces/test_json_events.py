"""The scanner reads what the standard library reads, in pieces of any size, and says where a file is broken."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from made_traces import training_trace
from tables import beside

from planner.errors import SpecError
from planner.observe.traces import source
from planner.observe.traces.source import EventScanner, read_kineto, trace_file

TABLES = beside(__file__)


def scanned(path: Path) -> tuple[list[dict[str, object]], dict[str, object]]:
    with trace_file(path) as source:
        scanner = EventScanner(source)
        return list(scanner.events()), scanner.header


def written(folder: Path, text: str | bytes, name: str = "t.json") -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("chunk", [1, 7, 4096])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_events_and_header_are_those_of_json(tmp_path: Path, monkeypatch: Any, chunk: int, name: str) -> None:
    monkeypatch.setattr(source, "CHUNK_BYTES", chunk)
    trace = training_trace(0)
    trace.header["numbers"] = [1, 2.5e3, -0.5, "ü — \\u00e9"]
    events, header = scanned(trace.write(tmp_path / name))
    whole = json.loads(trace.text())
    assert events == whole.pop("traceEvents")
    assert header == whole


def test_a_bare_list_of_events_is_a_trace(tmp_path: Path) -> None:
    events, header = scanned(written(tmp_path, ' [ {"ph": "X"} , {"ph": "M"}]\n'))
    assert (events, header) == ([{"ph": "X"}, {"ph": "M"}], {})


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "CHUNK_BYTES", 64)
    trace = training_trace(0)
    trace.events = trace.events[:2]
    text = trace.text()
    for end in range(0, len(text) - 1, 7):
        with pytest.raises(SpecError):
            scanned(written(tmp_path, text[:end]))


@pytest.mark.parametrize(
    ("text", "said"),
    [*TABLES["what_is_broken_is_told_with_its_place"],
        ('{"traceEvents": [{"ts": ' + "9" * 5000 + "}]}", "thousands of digits"),
        ('{"traceEvents": [{"a": ' + "[" * 100_000 + "]" * 100_000 + "}]}", "nested too deeply"),
        ("[" * 200_000, "nested too deeply"),
        (b"\xff\xfe\x00", "holds no `traceEvents`")],
)  # fmt: skip
def test_what_is_broken_is_told_with_its_place(tmp_path: Path, text: str | bytes, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(SpecError, match=said) as refused:
        read_kineto(path)
    assert str(path) in refused.value.message
    assert len(refused.value.lines().splitlines()) == 2


def test_a_value_without_end_is_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_VALUE_CHARS", 10_000)
    monkeypatch.setattr(source, "CHUNK_BYTES", 1000)
    with pytest.raises(SpecError, match="a value of more than 10,000 characters"):
        scanned(written(tmp_path, '{"traceEvents": [{"name": "' + "x" * 100_000 + '"}]}'))


@pytest.mark.parametrize("inside", [b" " * 10**7, b'{"traceEvents": [' + b"{}," * 400_000])
def test_a_bomb_is_refused_before_it_is_inflated(tmp_path: Path, monkeypatch: Any, inside: bytes) -> None:
    monkeypatch.setattr(source, "INFLATION_SLACK_BYTES", 2**20)
    with pytest.raises(SpecError, match="inflate to more than"):
        scanned(written(tmp_path, gzip.compress(inside), "t.json.gz"))


@pytest.mark.parametrize("damage", [lambda d: d[:-20], lambda d: d[:200] + bytes(20) + d[220:], lambda d: d[:5]])
def test_broken_gzip_is_one_error(tmp_path: Path, damage: object) -> None:
    data = training_trace(0).write(tmp_path / "whole.json.gz").read_bytes()
    with pytest.raises(SpecError, match=r"gzip|the file ends|not JSON|stands where|inflated"):
        scanned(written(tmp_path, damage(data), "t.json.gz"))  # type: ignore[operator]


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Python frames are most of a file and leave nothing; a kept event leaves its numbers."""
    frame = {
        "ph": "X", "cat": "python_function", "name": "x" * 200, "pid": 1, "tid": 1, "ts": 1.5, "dur": 1, "args": {},
    }  # fmt: skip
    kernel = {
        "ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 1.5, "dur": 1.25,
        "args": {"stream": 7},
    }  # fmt: skip
    path = tmp_path / "big.json"
    with path.open("w") as file:
        file.write('{"traceEvents": [\n')
        one = ",\n".join(json.dumps(event) for event in [*[frame] * 90, *[kernel] * 10])
        for _ in range(250):
            file.write(one + ",\n")
        file.write(json.dumps(kernel) + "]}")
    assert path.stat().st_size > 6 * 2**20
    tracemalloc.start()
    try:
        (trace,) = read_kineto(path)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(trace.gpu) == 2501
    assert peak_bytes < 6 * 2**20


def test_progress_counts_mebibytes(tmp_path: Path) -> None:
    told: list[int] = []
    blanks = b" " * (3 * 2**20)
    read_kineto(written(tmp_path, blanks + training_trace(0).text().encode()), lambda: told.append(1))
    assert len(told) == 3
