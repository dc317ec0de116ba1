"""Files with a few bytes changed are read, or end in one error; never in anything else."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from made_traces import event, frames, made_snapshot, segment, training_trace, write_pickle

from planner.errors import SpecError
from planner.observe.traces.dumps import read_flight_recorder, read_snapshot
from planner.observe.traces.recorded import FileKind, file_kind_of, read_traces

DATA = Path(__file__).parents[1] / "data"
NUM_MUTANTS = 150


def trace(folder: Path) -> bytes:
    return training_trace(0).write(folder / "t.json").read_bytes()


def zipped(folder: Path) -> bytes:
    return gzip.compress(trace(folder), mtime=0)


def snapshot(folder: Path) -> bytes:
    stack = frames("model/attention.py:forward")
    events = [
        event("segment_alloc", 4096, 8192, 1),
        event("alloc", 4096, 500, 2, stack),
        event("free_requested", 4096, 500, 3),
    ]
    return write_pickle(folder / "s", made_snapshot(events, [segment(4096, [(8192, "inactive", [])])])).read_bytes()


def dump(folder: Path) -> bytes:
    return (DATA / "hang_0").read_bytes()


def json_dump(folder: Path) -> bytes:
    return (DATA / "flight_0.json").read_bytes()


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, cut out, doubled or moved, or the end cut off."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 3, 10])):
        at = chance.randrange(len(changed) or 1)
        match chance.randrange(5):
            case 0:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del changed[at : at + chance.randrange(1, 20)]
            case 2:
                changed[at:at] = changed[at : at + chance.randrange(1, 40)]
            case 3:
                changed[at : at + 1] = chance.choice([b"-", b"1e999", b"null", b"{", b"]", b"\xff", b"\x00", b'"'])
            case 4 if chance.random() < 0.3:
                del changed[at:]
    return bytes(changed)


def read(path: Path) -> None:
    match file_kind_of(path):
        case FileKind.SNAPSHOT:
            [report.model_dump_json() for report in read_snapshot(path)]
        case FileKind.FLIGHT_RECORDER:
            read_flight_recorder([path]).model_dump_json()
        case FileKind.KINETO:
            read_traces([path]).model_dump_json()


@pytest.mark.parametrize("make", [trace, zipped, snapshot, dump, json_dump])
def test_a_mutant_is_read_or_is_one_error(tmp_path: Path, make: Callable[[Path], bytes]) -> None:
    chance, whole = random.Random(27), make(tmp_path)
    path, refused = tmp_path / "mutant_0", []
    for _ in range(NUM_MUTANTS):
        path.write_bytes(mutated(whole, chance))
        try:
            read(path)
        except SpecError as error:
            refused.append(error)
    assert len(refused) > NUM_MUTANTS // 10
    assert [error.message for error in refused if str(path) not in error.message] == []
    assert {len(error.lines().splitlines()) for error in refused} == {2}
    assert all(error.lines().replace("\n", "").isprintable() for error in refused)
