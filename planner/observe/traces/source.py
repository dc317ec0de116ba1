"""Files of any size, read in pieces, plain or gzipped: the events of Chrome traces, one at a time, and pickles of plain
data; whatever is wrong is a SpecError that names the file.

A trace of gigabytes is never in memory as a whole: a window of text moves over the file, and the standard library's
decoder reads one JSON value at its front.

Memory snapshots and flight-recorder dumps are pickles of mappings, lists, text and numbers. Whatever names a class or a
function is refused before it is looked up. The memory that a load may take is bounded by the file's size, because an
index of the pickle's memo can ask for gigabytes in five bytes.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import pickle
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from planner.errors import SpecError
from planner.observe.lines import opened
from planner.observe.traces.events import (
    EVENT,
    HOST,
    TABLES,
    Call,
    Events,
    ProcessGroup,
    RankTrace,
    is_whole,
    launch_of,
    mappings,
    rank_in_name,
    ranks_by_stride,
    ranks_of,
)
from planner.specs.base import Fields, Said, mapping
from planner.specs.reading import label, printable

Progress = Callable[[], None]
"""Called once for each MiB that has been read and inflated."""

CHUNK_BYTES = 2**20
MAX_INFLATION = 200
"""The most bytes that a byte of gzip may become: traces reach 30, and a bomb 1,000."""
INFLATION_SLACK_BYTES = 2**24
"""Small files may inflate by more, to this size."""


@dataclass(slots=True)
class TraceFile:
    """The bytes of one file, inflated where they are gzipped."""

    where: str
    stream: IO[bytes] | gzip.GzipFile
    size_bytes: int
    progress: Progress | None = None
    num_inflated: int = 0

    def read(self, num_bytes: int = CHUNK_BYTES) -> bytes:
        """At most `num_bytes` more bytes; none at the end. SpecError where they cannot be inflated."""
        try:
            data = self.stream.read(num_bytes)
        except (OSError, EOFError, zlib.error) as error:
            reason = "ends in the middle" if isinstance(error, EOFError) else f"cannot be inflated: {error}"
            raise self.broken(f"gzip {reason}", "copy the file again") from None
        before = self.num_inflated // 2**20
        self.num_inflated += len(data)
        most = max(MAX_INFLATION * self.size_bytes, INFLATION_SLACK_BYTES)
        if isinstance(self.stream, gzip.GzipFile) and self.num_inflated > most:
            raise self.broken(f"its {self.size_bytes:,} bytes inflate to more than {most:,}, as no trace does")
        for _ in range(self.num_inflated // 2**20 - before if self.progress else 0):
            self.progress()  # type: ignore[misc]
        return data

    def read_all(self, max_bytes: int) -> bytes:
        """The whole file; SpecError above `max_bytes`."""
        parts = []
        size = 0
        while data := self.read():
            size += len(data)
            if size > max_bytes:
                raise self.broken(f"is larger than {max_bytes / 1e6:,.0f} MB, the most that is read of such a file")
            parts.append(data)
        return b"".join(parts)

    def broken(self, problem: str, hint: str = "name another file, or write this one again") -> SpecError:
        """The error that this file causes."""
        return SpecError(f"{self.where}: {printable(problem)}", hint)


@contextmanager
def trace_file(path: str | Path, progress: Progress | None = None) -> Iterator[TraceFile]:
    """A file to read. Raises SpecError where it cannot be opened."""
    with opened(str(path)) as stream:
        yield TraceFile(label(path), stream, os.path.getsize(path), progress)


MAX_PICKLE_BYTES = 300 * 10**6
"""The largest pickle that is read; `record_memory_history(max_entries=100_000)` leaves 50 to 250 MB."""
BYTES_PER_BYTE = 16
"""Memory for each byte of a file: a snapshot's events take 12."""
SLACK_BYTES = 2**28


class _Forbidden(Exception):
    """Raised for a global that a pickle names."""


class _PlainUnpickler(pickle.Unpickler):
    """Knows no class and no function, so that REDUCE, BUILD, INST and OBJ have nothing to work on."""

    def find_class(self, module: str, name: str) -> Any:
        raise _Forbidden(f"names {module}.{name}, which would run code")

    def persistent_load(self, pid: Any) -> Any:
        raise _Forbidden("refers to objects outside it")


def load_plain(path: str | Path, progress: Progress | None = None) -> tuple[Any, int]:
    """The data of a pickle and the file's bytes; SpecError for anything that is more than plain data."""
    with trace_file(path, progress) as source:
        data = source.read_all(MAX_PICKLE_BYTES)
    hint = "name a file that torch wrote; pickles that run code are not read"
    try:
        with _bounded(BYTES_PER_BYTE * len(data) + SLACK_BYTES):
            return _PlainUnpickler(io.BytesIO(data)).load(), len(data)
    except _Forbidden as error:
        raise source.broken(f"this pickle {error}", hint) from None
    except MemoryError:
        raise source.broken(f"its {len(data):,} bytes ask for more memory than such a file can need", hint) from None
    except RecursionError:
        raise source.broken("nested too deeply", hint) from None
    except EOFError:
        raise source.broken("the pickle ends in the middle", "copy the file again") from None
    # whatever a broken stream makes the machine do: pop from nothing, index what is no list, hash what has no hash …
    except (
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        IndexError,
        OverflowError,
    ) as error:
        reason = str(error).partition("\n")[0][:100]
        end = "truncated" in reason or "ran out" in reason
        problem = "the pickle ends in the middle" if end else f"no pickle: {reason}"
        raise source.broken(problem, "copy the file again" if end else hint) from None


@contextmanager
def _bounded(extra_bytes: int) -> Iterator[None]:
    """Let the process take at most `extra_bytes` more address space, where the system can bound it (Linux)."""
    try:
        import resource

        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [in_use + extra_bytes, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


EVENTS_KEY = "traceEvents"
MAX_VALUE_CHARS = 2**25
"""The longest value beside or inside `traceEvents`; the longest seen in real traces is a call stack of 100 kB."""

_SPACE = re.compile(r"[ \t\n\r]*")
_LIST = re.compile(rf'"{EVENTS_KEY}"\s*:\s*\[')


class EventScanner:
    """Iterate over `events()`; then `header` holds what stands beside them."""

    def __init__(self, source: TraceFile) -> None:
        self.header: Fields = {}
        self.num_events = 0
        self._source = source
        self._text = ""
        self._at = 0
        self._bytes = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._decode = json.JSONDecoder().raw_decode

    def events(self) -> Iterator[Fields]:
        """Every event, a mapping; SpecError names the place of anything that is none."""
        head = ""
        if self._peek() != "[":  # else the format's bare list
            while (match := _LIST.search(self._text)) is None:
                if not self._more(MAX_VALUE_CHARS):
                    raise self._source.broken(f"holds no `{EVENTS_KEY}`", "name a trace that torch.profiler exported")
            head = self._text[: match.end()]
            self._at = match.end() - 1
        self._at += 1
        while (mark := self._peek()) != "]":
            if self.num_events:
                if mark != ",":
                    raise self.broken(
                        f"{mark!r} stands where a comma should" if mark else "the file ends in the middle"
                    )
                self._at += 1
            event = self._value()
            if not isinstance(event, dict):
                raise self.broken("is not an event, which is a mapping")
            yield event
            self.num_events += 1
        self._text = self._text[self._at :]
        self._at = 0
        while self._more(MAX_VALUE_CHARS):
            pass
        if head:
            self._take_header(head + self._text)
        elif self._text[1:].strip():
            raise self._source.broken("something follows the end of the trace")

    def _take_header(self, text: str) -> None:
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._source.broken(f"beside {EVENTS_KEY}: not JSON, or cut off: {error}") from None
        self.header = {key: value for key, value in header.items() if key != EVENTS_KEY}

    def broken(self, problem: str) -> SpecError:
        """The error that the event caused which was read last."""
        return self._source.broken(f"{EVENTS_KEY}[{self.num_events}]: {problem}")

    def _peek(self) -> str:
        """The next character that is no blank, or nothing at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            assert match  # an empty one at least
            self._at = match.end()
            if self._at < len(self._text):
                return self._text[self._at]
            self._text = ""
            self._at = 0
            if not self._more():
                return ""

    def _value(self) -> Any:
        """The value at the front; text is added until it is whole."""
        self._peek()
        while True:
            try:
                value, self._at = self._decode(self._text, self._at)
                return value
            except json.JSONDecodeError as error:
                self._text = self._text[self._at :]
                self._at = 0
                if not self._more(MAX_VALUE_CHARS):
                    raise self.broken(f"not JSON, or the file ends in the middle: {error.msg}") from None
            except (RecursionError, ValueError):  # an integer of thousands of digits
                raise self.broken("nested too deeply, or a number of thousands of digits") from None

    def _more(self, most: int = 2**62) -> bool:
        """Read at least as much again as is left, so that a long value is not decoded often; false at the end."""
        if len(self._text) > most:
            raise self.broken(f"a value of more than {most:,} characters")
        data = self._source.read(max(CHUNK_BYTES, len(self._text)))
        self._text += self._bytes.decode(data, final=not data)
        return bool(data)


MAX_NAME_CHARS = 2000
MAX_NAMES_CHARS = 2**26
"""Names longer than this in total are counted under one: real traces have some thousand kernels."""
_COMMUNICATION_ANNOTATION = re.compile(r"^(gloo|mpi|ucc):")
_BOOKKEEPING = re.compile(
    r"^(aten::(resolve_(conj|neg)|empty\w*|as_strided\w*|view\w*|_?reshape\w*|t|transpose|permute|expand\w*|detach|select"
    r"|slice|alias|narrow|split|(un)?squeeze|unbind|result_type|_local_scalar_dense|item|is_nonzero)|detach|record_param.*)$"
)
"""Operators that move no data; the work that they are inside of is one operator."""
_LATEST_US = 2.2e15
"""The year 2039 in microseconds: times beyond it are of no clock, and differences below it fit into 63 bits."""
_MAX_CALLS = 10**6


def read_kineto(path: str | Path, progress: Progress | None = None) -> tuple[RankTrace, ...]:
    """The trace of each GPU in one file, mostly one. SpecError for whatever is none."""
    with trace_file(path, progress) as source:
        scanner = EventScanner(source)
        reader = _Reader(scanner)
        for event in scanner.events():
            if event.get("ph") == "X":
                reader.add(event)
    if not any(map(len, reader.tables.values())):
        raise source.broken("holds no event that torch.profiler records", "name a trace that it exported")
    return tuple(reader.traces(source.where))


class _Reader:
    """Sorts events into tables of whole numbers, 56 bytes each, whatever the file says of them."""

    def __init__(self, scanner: EventScanner) -> None:
        self.scanner = scanner
        self.tables = {name: array("q") for name in ("gpu", "launches", "operators", "marks", "comms")}
        self.names: dict[str, int] = {}
        self.lanes: dict[tuple[int | str, int | str], int] = {}
        """(device or process, stream or thread)."""
        self.calls: dict[Call, int] = {}
        self.groups: dict[str, ProcessGroup] = {}
        self.origin_us: float | None = None
        self.num_chars = self.num_negative = 0

    def add(self, event: Fields) -> None:
        """Keep one event if it is of use."""
        category = str(event.get("cat")).lower()
        text = str(event.get("name"))[:MAX_NAME_CHARS]
        kind = TABLES["tables"].get(category)
        if kind == "operators" and text.startswith("ProfilerStep#"):
            kind = "marks"  # before torch 1.12 a step was an operator
        if kind is None:
            return
        start_us = self._number(event, "ts")
        length_us = self._number(event, "dur")
        self.origin_us = float(int(start_us)) if self.origin_us is None else self.origin_us
        start_ns = round((start_us - self.origin_us) * 1e3)
        if length_us < 0:
            self.num_negative += 1
            return
        arguments = mapping(event.get("args"))
        call = self._call(arguments) if "Collective name" in arguments else -1
        link = arguments.get("correlation")
        lane = self.lanes.setdefault((_key(event.get("pid")), _key(event.get("tid"))), len(self.lanes))
        row = (
            start_ns, start_ns + round(length_us * 1e3), lane, self._name(text),
            link if is_whole(link) else -1, call, kind == "gpu" and category != "kernel",
        )  # fmt: skip
        self.tables[kind].extend(row)
        if call >= 0 and kind == "operators":
            self.tables["comms"].extend(row)

    def _name(self, text: str) -> int:
        if text not in self.names:
            text = text if self.num_chars < MAX_NAMES_CHARS else "(further names)"
            self.num_chars += len(text) + 100
        return self.names.setdefault(text, len(self.names))

    def _number(self, event: Fields, key: str) -> float:
        value = event.get(key, 0)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LATEST_US:
            return value
        raise self.scanner.broken(f"{key}: {printable(repr(value), 40)} is no number of microseconds")

    def _call(self, arguments: Fields) -> int:
        group = _text(arguments.get("Process Group Name", ""))
        size = arguments.get("Group size")
        if group not in self.groups and len(self.groups) < _MAX_CALLS:
            start = arguments.get("Global rank start")
            stride = arguments.get("Global rank stride")
            ranks = ranks_of(arguments.get("Process Group Ranks")) or ranks_by_stride(start, stride, size)
            description = _text(arguments.get("Process Group Description", ""))
            self.groups[group] = ProcessGroup(group, description, ranks, size if isinstance(size, int) else None)
        source, destination = (arguments.get(f"{end} Rank") for end in ("Src", "Dst"))
        sizes = (arguments.get(f"{side} msg nelems") for side in ("In", "Out"))
        call = Call(
            _text(arguments["Collective name"]).lower(), group,
            max(size if is_whole(size) else 0 for size in sizes),
            _text(arguments.get("dtype", "")),
            (source, destination) if isinstance(source, int) and isinstance(destination, int) else None,
        )  # fmt: skip
        return self.calls.setdefault(call, len(self.calls)) if len(self.calls) < _MAX_CALLS else -1

    def _events(self, name: str) -> Events:
        """The events of a table by start, those that hold others first."""
        return _by_start(np.frombuffer(self.tables[name], EVENT))

    def traces(self, where: str) -> Iterator[RankTrace]:
        """The tables that were read, one trace a GPU."""
        header = self.scanner.header
        lanes = list(self.lanes)
        gpu, launches, operators, marks, comms = map(self._events, self.tables)
        warnings = []
        on_host = not len(gpu)
        if on_host:
            gpu = self._of_host(operators, marks)
            warnings.append("no GPU's events: times are of operators on the host (profile with ProfilerActivity.CUDA)")
        elif len(comms) and len(launches):
            gpu = _with_calls(gpu, launches, comms)
        if self.num_negative:
            warnings.append(f"{self.num_negative:,} events end before they start and are left out")
        device_of = [0 if on_host else device for device, _ in lanes]
        devices = sorted({device_of[lane] for lane in np.unique(gpu["lane"])}, key=str)
        rank, world_size = _rank(header, where)
        origin_ns = header.get("baseTimeNanoseconds")
        for device in devices:
            mine = np.array([own == device for own in device_of], bool)[gpu["lane"]]
            yield RankTrace(
                where=where, rank=rank if len(devices) == 1 else None, world_size=world_size,
                device=HOST if on_host else _device_name(header, device),
                origin_ns=(origin_ns if is_whole(origin_ns) else 0) + round((self.origin_us or 0.0) * 1e3),
                names=tuple(printable(name, MAX_NAME_CHARS) for name in self.names),
                groups={**self.groups, **_configured(header)}, calls=tuple(self.calls), gpu=gpu[mine],
                launches=launches, operators=operators, marks=marks, on_host=on_host, warnings=tuple(warnings),
            )  # fmt: skip

    def _of_host(self, operators: Events, marks: Events) -> Events:
        """Innermost operators, and the annotations that gloo leaves of its collectives."""

        def named(matches: Callable[[str], object]) -> np.ndarray[Any, np.dtype[np.bool_]]:
            return np.array([bool(matches(name)) for name in self.names], bool)

        communicates = named(_COMMUNICATION_ANNOTATION.match)
        works = ~named(_BOOKKEEPING.match)
        if communicates.any():  # the operator that calls an exchange returns before it has run
            works &= ~named(lambda name: name.startswith("c10d::"))
        operators = operators[works[operators["name"]]]
        innermost = np.ones(len(operators), bool)  # without another one inside on the same thread
        for lane in np.unique(operators["lane"]):
            mine = np.flatnonzero(operators["lane"] == lane)
            innermost[mine[:-1]] = operators["start"][mine[1:]] >= operators["end"][mine[:-1]]
        return _by_start(np.concatenate([operators[innermost], marks[communicates[marks["name"]]]]))


def _by_start(events: Events) -> Events:
    """Events by start, those that hold others first."""
    return events[np.lexsort((-events["end"], events["start"]))]


def _with_calls(gpu: Events, launches: Events, comms: Events) -> Events:
    """Kernels with the collective inside whose `record_param_comms` they were launched, where they do not say it."""
    gpu, launch = gpu.copy(), launch_of(gpu, launches)
    for lane in np.unique(comms["lane"]):
        mine = comms[comms["lane"] == lane]
        todo = np.flatnonzero((gpu["call"] < 0) & (launch >= 0) & (launches["lane"][launch] == lane))
        at = launches["start"][launch[todo]]
        inside = np.searchsorted(mine["start"], at, side="right") - 1
        good = (inside >= 0) & (at < mine["end"][inside])
        gpu["call"][todo[good]] = mine["call"][inside[good]]
    return gpu


def _configured(header: Said) -> dict[str, ProcessGroup]:
    """The groups of `distributedInfo.pg_config`, which lists every rank."""
    groups = {}
    for entry in mappings(mapping(header.get("distributedInfo")).get("pg_config")):
        name = _text(entry.get("pg_name", ""))
        ranks = ranks_of(entry.get("ranks"))
        size = entry.get("pg_size")
        if ranks and len(ranks) == size:
            groups[name] = ProcessGroup(name, _text(entry.get("pg_desc", "")), ranks, size)
    return groups


def _rank(header: Said, where: str) -> tuple[int | None, int | None]:
    said = mapping(header.get("distributedInfo"))
    rank, size = said.get("rank"), said.get("world_size")
    world_size = size if isinstance(size, int) and size > 0 else None
    return rank if is_whole(rank, 10**7) else rank_in_name(where), world_size


def _device_name(header: Said, device: int | str) -> str:
    for entry in mappings(header.get("deviceProperties")):
        if entry.get("id") == device:
            return printable(str(entry.get("name") or "GPU"), 80)
    return "GPU"


def _text(value: object) -> str:
    return printable(str(value)[:200])


def _key(place: object) -> int | str:
    return place if isinstance(place, int) else str(place)[:100]
