"""A followed log in trouble: no line is counted twice, changed or lost without a word, and memory stays as it is."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest
from tailed import failing, told

from planner.errors import SpecError
from planner.observe.lines import BLOCK_BYTES, MAX_LINE_BYTES
from planner.observe.log_tail import FileEnd

FIRST = b"".join(b"iteration %d | a line that is long enough to be known again\n" % step for step in range(20))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_bytes(FIRST)
    return path


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def end(log: Path, said: list[str]) -> FileEnd:
    """The end of the log, whose first lines were read."""
    end = FileEnd(str(log), said.append)
    assert end.read() == FIRST.splitlines()
    return end


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


@pytest.mark.parametrize("seed", range(40))
def test_no_line_is_counted_twice_changed_or_lost_without_a_word(seed: int, tmp_path: Path) -> None:
    story = told(seed, tmp_path)
    assert story.faults() == [], story.said
    assert story.seen, "something was read"


def test_a_log_that_was_cut_and_outgrew_its_old_size_is_read_from_its_begin(
    end: FileEnd, log: Path, said: list[str]
) -> None:
    with log.open("r+b") as file:  # copytruncate, and the next steps before it is asked again
        file.truncate(0)
    append(log, FIRST.replace(b"iteration", b"step") * 3)
    assert end.read() == FIRST.replace(b"iteration", b"step").splitlines() * 3
    assert ["was cut off" in text for text in said] == [True]


def test_a_writer_that_goes_on_behind_a_hole_is_read_behind_it(end: FileEnd, log: Path, said: list[str]) -> None:
    with log.open("r+b") as file:  # a shell's > does not append
        file.truncate(0)
        assert end.read() == []
        file.seek(2**40)
        file.write(b"behind a terabyte\n")
        file.flush()
        assert end.read() == [b"behind a terabyte"]
        file.truncate(0)
        file.seek(2**30)
        file.write(b"again\nhal")
    assert [end.read(), len(said)] == [[b"again"], 2]
    # a follower that comes later finds the same
    assert FileEnd(str(log)).read() == [b"again"]


def test_a_log_that_goes_away_and_comes_back_is_read_on(end: FileEnd, log: Path, said: list[str]) -> None:
    log.rename(log.with_suffix(".away"))
    append(log.with_suffix(".away"), b"written while it was aw")
    assert [end.read(), end.read()] == [[], []]
    append(log.with_suffix(".away"), b"ay\n")
    assert end.read() == [b"written while it was away"]
    log.with_suffix(".away").rename(log)
    append(log, b"back\n")
    assert end.read() == [b"back"]
    assert said == [f"{log}: is not there: waiting for it"]


def test_a_copy_that_takes_its_place_is_read_on(end: FileEnd, log: Path, said: list[str]) -> None:
    for step in range(3):  # rsync writes beside, and renames
        beside = log.with_suffix(f".{step}")
        beside.write_bytes(log.read_bytes() + b"step %d\n" % step)
        beside.rename(log)
        assert end.read() == [b"step %d" % step]
    assert said == []
    beside.write_bytes(FIRST[:-1] + b"!\n" + b"step 9\n")
    beside.rename(log)
    assert len(end.read()) == 21, "another log of nearly the same lines is another log"
    assert ["is another file now" in text for text in said] == [True]


def test_lines_written_while_a_log_is_rotated_are_read_in_order(end: FileEnd, log: Path) -> None:
    old = log.with_suffix(".1")
    log.rename(old)
    append(old, b"the writer has not opened the new one\n")
    log.touch()
    assert end.read() == [b"the writer has not opened the new one"]
    append(old, b"nor now\n")
    assert end.read() == [b"nor now"]
    append(old, b"the last of the old\n")
    append(log, b"the first of the new\n")
    assert [end.read(), end.read()] == [[b"the last of the old"], [b"the first of the new"]]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
@pytest.mark.parametrize("call", ["pread", "stat", "fstat", "open"])
def test_a_file_system_that_fails_for_a_while_costs_no_line(
    call: str, number: int, end: FileEnd, log: Path, said: list[str]
) -> None:
    append(log, b"half a li")
    end.read()
    with failing("pread", errno.ESTALE), failing(call, number):
        assert [end.read() for _ in range(4)] == [[]] * 4
    append(log, b"ne\nnext\n")
    assert end.read() == [b"half a line", b"next"]
    assert 1 <= len(said) <= 2, "said, and not said at every look"
    assert all("waiting for it" in text for text in said)


@pytest.mark.parametrize("kind", ["folder", "fifo", "loop", "packed", "binary", "locked"])
def test_what_takes_the_place_of_a_followed_log_is_waited_out(
    kind: str, end: FileEnd, log: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    away = log.with_suffix(".away")
    log.rename(away)
    make = {
        "folder": log.mkdir, "fifo": lambda: os.mkfifo(log), "loop": lambda: log.symlink_to(log.name),
        "packed": lambda: log.write_bytes(b"\x1f\x8b\x08\0 packed"), "binary": lambda: log.write_bytes(b"\1\2\3" * 99),
        "locked": lambda: log.write_bytes(b"secret\n"),
    }[kind]  # fmt: skip
    make()
    append(away, b"the writer goes on\n")
    with monkeypatch.context() as patch:
        if kind == "locked":
            patch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "locked")))
        assert [end.read() for _ in range(3)] == [[b"the writer goes on"], [], []]
    assert len(said) == 1
    assert "cannot be read now (" in said[0]
    log.rmdir() if kind == "folder" else log.unlink()
    away.rename(log)
    append(log, b"back\n")
    assert end.read() == [b"back"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.ELOOP, errno.EIO])
def test_what_cannot_be_read_from_the_begin_is_refused(number: int, log: Path) -> None:
    with failing("open", number), pytest.raises(SpecError, match=f"cannot be read: {os.strerror(number)}"):
        FileEnd(str(log)).read()


def test_letters_and_lines_that_come_in_parts_are_whole(end: FileEnd, log: Path) -> None:
    text = "étape 7 — 损失 2.0 💾\r\n".encode()
    read = []
    for byte in text * 2:
        append(log, bytes([byte]))
        read += end.read()
    assert [line for line in read if line] == [text.rstrip()] * 2


def test_a_longer_line_than_is_read_is_said_once(end: FileEnd, log: Path, said: list[str]) -> None:
    for _ in range(3):
        append(log, b"x" * (MAX_LINE_BYTES + 5) + b"\n")
        assert end.read() == [b"x" * MAX_LINE_BYTES]
    assert [f"{MAX_LINE_BYTES:,} bytes" in text for text in said] == [True]


def test_many_lines_at_once_are_read_block_by_block(tmp_path: Path) -> None:
    path, lines = tmp_path / "train.log", [b"iteration %d" % step for step in range(150_000)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    end = FileEnd(str(path))
    blocks = list(itertools.takewhile(bool, iter(end.read, None)))
    assert [line for block in blocks for line in block] == lines
    assert sum(map(len, blocks[0])) < BLOCK_BYTES
    assert len(blocks) > 2
