"""The events of a Chrome trace, one at a time: a file of gigabytes is never in memory as a whole.

A window of text moves over the file; the standard library's decoder reads one JSON value at its front.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from planner.errors import SpecError
from planner.observe.traces.events import Call, EventColumns, Events, Names, RankTrace, rank_in_name
from planner.observe.traces.kernels_and_groups import ProcessGroup, ranks_by_stride, ranks_of
from planner.observe.traces.results import HOST
from planner.observe.traces.source import CHUNK_BYTES, Progress, TraceFile
from planner.specs.reading import printable

EVENTS_KEY = "traceEvents"
MAX_VALUE_CHARS = 2**25
"""The longest value beside or inside `traceEvents`; the longest seen in real traces is a call stack of 100 kB."""

_SPACE = re.compile(r"[ \t\n\r]*")
_LIST = re.compile(rf'"{EVENTS_KEY}"\s*:\s*\[')


class EventScanner:
    """Iterate over `events()`; then `header` holds what stands beside them."""

    def __init__(self, source: TraceFile) -> None:
        self.header: dict[str, Any] = {}
        self.num_events = 0
        self._source = source
        self._text, self._at = "", 0
        self._bytes = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._decode = json.JSONDecoder().raw_decode

    def events(self) -> Iterator[dict[str, Any]]:
        """Every event, a mapping; SpecError names the place of anything that is none."""
        head = ""
        if self._peek() != "[":  # else the format's bare list
            while (match := _LIST.search(self._text)) is None:
                if not self._more(MAX_VALUE_CHARS):
                    raise self._source.broken(f"holds no `{EVENTS_KEY}`", "name a trace that torch.profiler exported")
            head, self._at = self._text[: match.end()], match.end() - 1
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
        self._text, self._at = self._text[self._at :], 0
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
            self._text, self._at = "", 0
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
                self._text, self._at = self._text[self._at :], 0
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


_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCH = {"cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "xpu_runtime"}
_OLD_NAMES = {"memcpy": "gpu_memcpy", "memset": "gpu_memset", "operator": "cpu_op"}
"""Categories before torch 1.12, in lower case."""

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
    with TraceFile(path, progress) as source:
        scanner = EventScanner(source)
        reader = _Reader(scanner)
        for event in scanner.events():
            if event.get("ph") == "X":
                reader.add(event)
    if not reader.num_kept:
        raise source.broken("holds no event that torch.profiler records", "name a trace that it exported")
    return reader.traces(source.where)


class _Reader:
    """Sorts events into columns."""

    def __init__(self, scanner: EventScanner) -> None:
        self.scanner = scanner
        self.num_kept = 0
        self.names, self.lanes = Names(), {}  # type: tuple[Names, dict[tuple[int | str, int | str], int]]
        self.calls: dict[Call, int] = {}
        self.groups: dict[str, ProcessGroup] = {}
        self.gpu, self.launches, self.operators, self.marks = (
            EventColumns(),
            EventColumns(),
            EventColumns(),
            EventColumns(),
        )
        self.comms = EventColumns()
        self.copies: list[bool] = []
        self.origin_us: float | None = None
        self.num_negative = 0

    def add(self, event: dict[str, Any]) -> None:
        """Keep one event if it is of use."""
        kind = str(event.get("cat")).lower()
        kind = _OLD_NAMES.get(kind, kind)
        if kind in _GPU:
            columns = self.gpu
        elif kind in _LAUNCH:
            columns = self.launches
        elif kind == "user_annotation" or str(event.get("name")).startswith("ProfilerStep#"):
            columns = self.marks  # before torch 1.12 a step was an operator
        elif kind == "cpu_op":
            columns = self.operators
        else:
            return
        start_ns, end_ns = self._times(event)
        if end_ns < start_ns:
            self.num_negative += 1
            return
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        name = event.get("name")
        index = self.names(name if isinstance(name, str) else str(name)[:100])
        lane, link, call = self._lane(event), self._link(arguments), -1
        if "Collective name" in arguments:
            call = self._call(arguments)
            if kind == "cpu_op":
                self.comms.add(start_ns, end_ns, lane, index, link, call)
        columns.add(start_ns, end_ns, lane, index, link, call)
        if columns is self.gpu:
            self.copies.append(kind != "kernel")
        self.num_kept += 1

    def _times(self, event: dict[str, Any]) -> tuple[int, int]:
        start_us, length_us = self._number(event, "ts"), self._number(event, "dur")
        if self.origin_us is None:
            self.origin_us = float(int(start_us))
        start_ns = round((start_us - self.origin_us) * 1e3)
        return start_ns, start_ns + round(length_us * 1e3)

    def _number(self, event: dict[str, Any], key: str) -> float:
        value = event.get(key, 0)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _LATEST_US:
            return value
        raise self.scanner.broken(f"{key}: {printable(repr(value), 40)} is no number of microseconds")

    def _lane(self, event: dict[str, Any]) -> int:
        place = (_key(event.get("pid")), _key(event.get("tid")))
        return self.lanes.setdefault(place, len(self.lanes))

    def _link(self, arguments: dict[str, Any]) -> int:
        link = arguments.get("correlation")
        return link if isinstance(link, int) and 0 <= link < 2**62 else -1

    def _call(self, arguments: dict[str, Any]) -> int:
        group, size = _text(arguments.get("Process Group Name", "")), arguments.get("Group size")
        if group not in self.groups and len(self.groups) < _MAX_CALLS:
            ranks = ranks_of(arguments.get("Process Group Ranks")) or ranks_by_stride(
                arguments.get("Global rank start"), arguments.get("Global rank stride"), size
            )
            description = _text(arguments.get("Process Group Description", ""))
            self.groups[group] = ProcessGroup(group, description, ranks, size if isinstance(size, int) else None)
        source, destination = (arguments.get(f"{end} Rank") for end in ("Src", "Dst"))
        call = Call(
            _text(arguments["Collective name"]).lower(),
            group,
            max(_count(arguments.get("In msg nelems")), _count(arguments.get("Out msg nelems"))),
            _text(arguments.get("dtype", "")),
            (source, destination) if isinstance(source, int) and isinstance(destination, int) else None,
        )
        return self.calls.setdefault(call, len(self.calls)) if len(self.calls) < _MAX_CALLS else -1

    def traces(self, where: str) -> tuple[RankTrace, ...]:
        """The columns that were read, one trace a GPU."""
        header = self.scanner.header
        groups = {**self.groups, **_configured(header)}
        (gpu, order), (launches, _), (operators, _), (marks, _), (comms, _) = (
            columns.events() for columns in (self.gpu, self.launches, self.operators, self.marks, self.comms)
        )
        copies, on_host = np.array(self.copies, bool)[order], not len(gpu)
        if on_host:
            gpu = self._of_host(operators, marks)
            copies = np.zeros(len(gpu), bool)
        else:
            gpu = _with_calls(gpu, launches, comms)
        lanes = tuple(self.lanes)
        devices = [0] if on_host else sorted({lanes[lane][0] for lane in np.unique(gpu.lane)}, key=str)
        of_lane = np.array([0 if on_host else devices.index(d) if d in devices else -1 for d, _ in lanes] or [0])
        rank, world_size = _rank(header, where)
        return tuple(
            RankTrace(
                where=where, rank=rank if len(devices) == 1 else None, world_size=world_size,
                device=HOST if on_host else _device_name(header, device),
                origin_ns=_whole(header.get("baseTimeNanoseconds")) + round((self.origin_us or 0.0) * 1e3),
                names=tuple(self.names.texts), groups=groups, calls=tuple(self.calls),
                gpu=gpu.where(mine := of_lane[gpu.lane] == number), copies=copies[mine], launches=launches,
                operators=operators, marks=marks, on_host=on_host, lanes=lanes, warnings=self._warnings(on_host),
            )
            for number, device in enumerate(devices)
        )  # fmt: skip

    def _of_host(self, operators: Events, marks: Events) -> Events:
        """Innermost operators, and the annotations that gloo leaves of its collectives."""
        communicates = np.array([bool(_COMMUNICATION_ANNOTATION.match(name)) for name in self.names.texts], bool)
        both = EventColumns()
        calls = np.array([name.startswith("c10d::") for name in self.names.texts], bool)
        works = ~np.array([bool(_BOOKKEEPING.match(name)) for name in self.names.texts], bool)
        if communicates.any():  # the operator that calls an exchange returns before it has run
            works &= ~calls
        operators = operators.where(works[operators.name])
        for events, kept in ((operators, _innermost(operators)), (marks, communicates[marks.name])):
            chosen = events.where(kept)
            for mine, theirs in (
                (both.start_ns, chosen.start_ns), (both.end_ns, chosen.end_ns), (both.lane, chosen.lane),
                (both.name, chosen.name), (both.link, chosen.link), (both.call, chosen.call),
            ):  # fmt: skip
                mine.extend(theirs.tolist())
        return both.events()[0]

    def _warnings(self, on_host: bool) -> tuple[str, ...]:
        told = []
        if on_host:
            told.append("no GPU's events: the times are of operators on the host (profile with ProfilerActivity.CUDA)")
        if self.num_negative:
            told.append(f"{self.num_negative:,} events end before they start and are left out")
        return tuple(told)


def _with_calls(gpu: Events, launches: Events, comms: Events) -> Events:
    """Kernels with the collective inside whose `record_param_comms` they were launched, where they do not say it."""
    if not len(comms) or not len(launches) or (gpu.call >= 0).all():
        return gpu
    call = gpu.call.copy()
    launch = launch_of(gpu, launches)
    for lane in np.unique(comms.lane):
        mine = comms.where(comms.lane == lane)
        todo = np.flatnonzero((call < 0) & (launch >= 0) & (launches.lane[launch] == lane))
        at = launches.start_ns[launch[todo]]
        inside = np.searchsorted(mine.start_ns, at, side="right") - 1
        good = (inside >= 0) & (at < mine.end_ns[inside])
        call[todo[good]] = mine.call[inside[good]]
    return Events(gpu.start_ns, gpu.end_ns, gpu.lane, gpu.name, gpu.link, call)


def launch_of(gpu: Events, launches: Events) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The index in `launches` of the call that launched each of `gpu`, or −1."""
    if not len(launches):
        return np.full(len(gpu), -1, np.int64)
    order = np.argsort(launches.link, kind="stable")
    links = launches.link[order]
    at = np.minimum(np.searchsorted(links, gpu.link), len(links) - 1)
    return np.where((gpu.link >= 0) & (links[at] == gpu.link), order[at], -1)


def _innermost(events: Events) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """True for events without another one inside on the same thread."""
    innermost = np.ones(len(events), bool)
    for lane in np.unique(events.lane):
        mine = np.flatnonzero(events.lane == lane)
        innermost[mine[:-1]] = events.start_ns[mine[1:]] >= events.end_ns[mine[:-1]]
    return innermost


def _configured(header: Mapping[str, Any]) -> dict[str, ProcessGroup]:
    """The groups of `distributedInfo.pg_config`, which lists every rank."""
    info = header.get("distributedInfo")
    entries = info.get("pg_config") if isinstance(info, dict) else None
    groups = {}
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            name, ranks, size = _text(entry.get("pg_name", "")), ranks_of(entry.get("ranks")), entry.get("pg_size")
            whole = ranks if len(ranks) == size else ()
            groups[name] = ProcessGroup(
                name, _text(entry.get("pg_desc", "")), whole, size if isinstance(size, int) else None
            )
    return {name: group for name, group in groups.items() if group.ranks}


def _rank(header: Mapping[str, Any], where: str) -> tuple[int | None, int | None]:
    info = header.get("distributedInfo")
    said = info if isinstance(info, dict) else {}
    rank, world_size = said.get("rank"), said.get("world_size")
    if not isinstance(rank, int) or not 0 <= rank < 10**7:
        rank = rank_in_name(where)
    return rank, world_size if isinstance(world_size, int) and world_size > 0 else None


def _device_name(header: Mapping[str, Any], device: int | str) -> str:
    properties = header.get("deviceProperties")
    for entry in properties if isinstance(properties, list) else ():
        if isinstance(entry, dict) and entry.get("id") == device:
            return printable(str(entry.get("name") or "GPU"), 80)
    return "GPU"


def _text(value: object) -> str:
    return printable(str(value)[:200])


def _key(place: object) -> int | str:
    return place if isinstance(place, int) else str(place)[:100]


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**62 else 0


def _whole(value: object) -> int:
    return value if isinstance(value, int) and abs(value) < 2**62 else 0
