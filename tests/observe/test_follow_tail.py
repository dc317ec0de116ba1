"""The end of a file that grows: lines in parts, rotation, truncation, files that come late, and what is no text."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from planner.errors import SpecError
from planner.observe.lines import MAX_LINE_BYTES, FileEnd, NewLines, StdinEnd, source_of


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_bytes(b"one\ntwo\nthr")
    return path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_half_a_line_waits_for_its_end(log: Path) -> None:
    end = FileEnd(str(log))
    assert end.read() == [b"one", b"two"]
    assert end.read() == []
    append(log, b"ee\r\nfour")
    assert end.read() == [b"three"]
    append(log, b"\n")
    assert end.read() == [b"four"]


def test_a_file_that_was_renamed_is_read_to_its_end_and_the_new_one_from_its_begin(log: Path) -> None:
    end = FileEnd(str(log))
    end.read()
    log.rename(log.with_suffix(".1"))
    append(log.with_suffix(".1"), b"ee\nhal")
    log.write_bytes(b"new\n")
    assert [end.read() for _ in range(3)] == [[b"three"], [b"new"], []]


def test_a_file_that_was_cut_is_read_again_without_its_half_line(log: Path) -> None:
    said: list[str] = []
    end = FileEnd(str(log), said.append)
    end.read()
    log.write_bytes(b"new\n")
    assert end.read() == [b"new"]
    assert len(said) == 1
    assert "was cut off" in said[0]


def test_a_file_that_vanishes_is_waited_for_and_said_once(log: Path) -> None:
    said: list[str] = []
    end = FileEnd(str(log), said.append)
    end.read()
    log.unlink()
    assert [end.read() for _ in range(4)] == [[]] * 4
    assert said == [f"{log}: is not there: waiting for it"]
    log.write_bytes(b"back\n")
    assert end.read() == [b"back"]


def test_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    said: list[str] = []
    end = FileEnd(str(tmp_path / "later" / "train.log"), said.append)
    assert [end.read(), end.read(), len(said)] == [[], [], 1]
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "train.log").write_bytes(b"now\n")
    assert end.read() == [b"now"]


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("train.log.gz", b"", "is packed"), ("train.log", b"\x1f\x8b\x08\0", "is packed"),
        ("train.log", bytes(1000), "is a binary file"), ("folder", None, "is no regular file"),
    ],
)  # fmt: skip
def test_what_does_not_grow_by_lines_is_refused(tmp_path: Path, name: str, data: bytes | None, says: str) -> None:
    path = tmp_path / name
    path.mkdir() if data is None else path.write_bytes(data)
    with pytest.raises(SpecError, match=says) as caught:
        source_of(str(path)).read()
    assert caught.value.hint


def test_a_line_without_an_end_takes_no_memory() -> None:
    lines = NewLines()
    for _ in range(40):
        assert lines.of(b"x" * MAX_LINE_BYTES) == []
    assert lines.of(b"\nnext\n") == [b"x" * MAX_LINE_BYTES, b"next"]


def test_standard_input_ends_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as stdin, os.fdopen(writer, "wb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stdin", stdin)
        end = StdinEnd()
        assert end.read() == []
        pipe.write(b"one\ntw")
        assert end.read() == [b"one"]
        pipe.write(b"o")
        pipe.close()
        assert [end.read(), end.read(), end.read()] == [[], [b"two"], None]
