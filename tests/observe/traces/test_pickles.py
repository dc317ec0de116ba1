"""A pickle is plain data or an error: nothing runs, nothing is imported, and five bytes do not take gigabytes."""

from __future__ import annotations

import os
import pickle
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from planner.errors import SpecError
from planner.observe.traces import source
from planner.observe.traces.source import load_plain


class Runs:
    """Asks to run a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def loaded(folder: Path, data: bytes) -> Any:
    path = folder / "data.pickle"
    path.write_bytes(data)
    return load_plain(path)[0]


PLAIN = {"a": [1, -2.5, None, True, ("x", b"y")], "deep": [[[[]]]], "große": 2**80, "set": {"ä"}}


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_of_every_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    data = {key: value for key, value in PLAIN.items() if key != "set" or protocol >= 4}
    if protocol < 3:  # bytes are a call of a function there
        data["a"] = [1]
    assert loaded(tmp_path, pickle.dumps(data, protocol)) == data


@pytest.mark.parametrize("protocol", range(6))
def test_code_is_refused_and_does_not_run(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(SpecError, match=r"names (posix|nt)\.system, which would run code"):
        loaded(tmp_path, pickle.dumps({"segments": [Runs(marker)]}, protocol))
    assert not marker.exists()


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(OrderedDict(a=1)),
        b"\x80\x02cbuiltins\neval\n(X\x03\x00\x00\x001+1tR.",
        b"(S'ls'\nios\nsystem\n.",
        b"(cos\nsystem\nS'ls'\no.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02X\x03\x00\x00\x00pid\x51.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x04}\x8c\x01a\x8c\x01bs}b.",
    ],
    ids=["class", "GLOBAL REDUCE", "INST", "OBJ", "EXT1", "BINPERSID", "STACK_GLOBAL", "BUILD"],
)
def test_every_way_to_name_code_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(SpecError):
        loaded(tmp_path, data)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80", b"\x80\x04.", b"\x80\x04]", b"\x80\x04a.", b"\x80\x04h\x05.", b"\x80\x04]]}(a.", b"\x80\x04N}Nes.",
     pickle.dumps(PLAIN)[:-9], b"\x80\x09N.", b"I" + b"9" * 10_000 + b"\n.", b"no pickle at all"],
)  # fmt: skip
def test_a_broken_pickle_is_one_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(SpecError, match=r"data\.pickle"):
        loaded(tmp_path, data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02N" + b"r" + struct.pack("<I", 2**31) + b".",  # an index of the memo
        b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.",  # a text of a terabyte
        b"\x80\x04\x8e" + struct.pack("<Q", 2**63 - 1) + b"x.",
        b"\x80\x05\x96" + struct.pack("<Q", 2**38) + b"x.",
    ],
    ids=["memo", "text", "bytes", "bytearray"],
)
def test_few_bytes_do_not_take_gigabytes(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(SpecError, match=r"more memory|no pickle|in the middle"):
        loaded(tmp_path, data)


def test_nesting_has_an_end(tmp_path: Path) -> None:
    data = loaded(tmp_path, b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".")
    while data:  # taken apart from outside, or freeing it would be as deep
        (data,) = data


def test_a_large_pickle_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_PICKLE_BYTES", 1000)
    with pytest.raises(SpecError, match="is larger than"):
        loaded(tmp_path, pickle.dumps("x" * 2000))


def test_the_limit_on_memory_is_lifted_again(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    loaded(tmp_path, pickle.dumps(PLAIN))
    assert resource.getrlimit(resource.RLIMIT_AS) == before
