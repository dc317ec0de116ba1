"""One rank's dump of the flight recorder as typed entries; pickles that run code are refused."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner.errors import SpecError
from planner.observe.traces.kernels_and_groups import ranks_of
from planner.observe.traces.source import TraceFile, load_plain
from planner.specs.base import Spec
from planner.specs.reading import DUMP, label, parse_json, printable

_LEAST_ENTRY_BYTES = 40
"""An entry's numbers and times alone take more: a file with more entries repeats one."""
_RANK = re.compile(r"(\d{1,7})(?:\.\w+)?$")
_HINT = "name dumps that torch's flight recorder wrote, one a rank"


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """One collective or transfer on one rank."""

    rank: int
    sequence: int
    collective: str
    dtype: str
    sizes: str
    done: bool
    created_ns: int
    duration_s: float | None
    where: str
    point_to_point: bool


@dataclass(frozen=True, slots=True)
class FlightDump:
    """Entries that one rank recorded, by (name, description) of the group."""

    rank: int
    entries: dict[tuple[str, str], list[RecordedCollective]]
    members: dict[str, tuple[int, ...]]
    status: dict[str, dict[str, int]]
    names: dict[str, tuple[str, str]]
    newest_ns: int


def read_dump(path: str | Path, number: int, num_files: int) -> FlightDump:
    """The dump of one rank, which the dump or the file's name says."""
    where = label(path)
    data, size_bytes = _load(path, where)
    if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
        raise SpecError(f"{where}: holds no `entries`: it is no flight-recorder dump", _HINT)
    if len(data["entries"]) * _LEAST_ENTRY_BYTES > size_bytes:
        raise SpecError(f"{where}: its {size_bytes:,} bytes repeat few entries very often", _HINT)
    rank = _rank(data, where, number, num_files)
    entries: dict[tuple[str, str], list[RecordedCollective]] = defaultdict(list)
    names: dict[str, tuple[str, str]] = {}
    newest = 0
    for index, raw in enumerate(data["entries"]):
        if not isinstance(raw, dict):
            raise SpecError(f"{where}: entries[{index}]: is no mapping", _HINT)
        group = raw.get("process_group")
        pair = (_text(group[0]), _text(group[1])) if isinstance(group, (list, tuple)) and len(group) == 2 else ("?", "")
        names[str(raw.get("pg_id"))[:40]] = pair
        entry = _entry(raw, rank)
        entries[pair].append(entry)
        times = (raw.get(f"time_{name}_ns") for name in ("created", "discovered_started", "discovered_completed"))
        newest = max(newest, *(_whole(time) for time in times))
    return FlightDump(
        rank, dict(entries), _members(data.get("pg_config")), _status(data.get("pg_status")), names, newest
    )


def _load(path: str | Path, where: str) -> tuple[Any, int]:
    with TraceFile(path) as source:
        if source.read(1) == b"\x80":
            return load_plain(path)
    with TraceFile(path) as source:
        data = source.read_all(DUMP.num_bytes)
    return parse_json(data, where, _HINT, DUMP, keeps_last=True), len(data)


def _rank(data: dict[str, Any], where: str, number: int, num_files: int) -> int:
    said = data.get("rank")
    if isinstance(said, int) and not isinstance(said, bool) and 0 <= said < 10**7:
        return said
    match = _RANK.search(Path(where).name)
    if match:
        return int(match[1])
    if num_files == 1:
        return number
    raise SpecError(f"{where}: neither the dump nor its name says its rank", "name it with the rank at the end: nccl_3")


def _entry(raw: dict[str, Any], rank: int) -> RecordedCollective:
    point_to_point = raw.get("is_p2p") is True
    started, completed = (_whole(raw.get(f"time_discovered_{name}_ns")) for name in ("started", "completed"))
    duration = raw.get("duration_ms")
    measured = duration / 1e3 if isinstance(duration, (int, float)) and 0 <= duration < 1e12 else None
    if measured is None and 0 < started < completed:
        measured = (completed - started) * 1e-9
    frames = raw.get("frames")
    frame = frames[0] if isinstance(frames, list) and frames and isinstance(frames[0], dict) else {}
    file = str(frame.get("filename", "")).rpartition("/")[2]
    return RecordedCollective(
        rank, _whole(raw.get("p2p_seq_id" if point_to_point else "collective_seq_id")),
        _text(raw.get("profiling_name")).partition(":")[2] or _text(raw.get("profiling_name")),
        _text(raw.get("input_dtypes")), _text(raw.get("input_sizes")),
        raw.get("state") == "completed" or raw.get("retired") is True, _whole(raw.get("time_created_ns")), measured,
        _text(f"{file}:{frame.get('line')}:{frame.get('name')}") if file else "", point_to_point,
    )  # fmt: skip


def _members(config: Any) -> dict[str, tuple[int, ...]]:
    groups = config.values() if isinstance(config, dict) else ()
    return {_text(g.get("name")): ranks_of(g.get("ranks")) for g in groups if isinstance(g, dict)}


def _status(status: Any) -> dict[str, dict[str, int]]:
    if not isinstance(status, dict):
        return {}
    return {
        str(group)[:40]: {str(k): v for k, v in numbers.items() if isinstance(v, int)}
        for group, numbers in status.items()
        if isinstance(numbers, dict)
    }


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else 0


def _text(value: object) -> str:
    return printable(str(value)[:120], 120)


NUM_SLOWEST = 5
_OWN_SIZES = re.compile(r"_?(broadcast|scatter|gather|reduce)|_?all_?to_?all.*")
"""Collectives whose ranks may give sizes of their own."""


class Outstanding(Spec):
    """A collective that at least one rank began and has not ended."""

    sequence: int
    collective: str
    waiting: tuple[int, ...]
    """Ranks that called it."""
    missing: tuple[int, ...]
    """Ranks of the group, with a dump, that did not: the likely culprits."""
    age_s: float | None
    """From the first rank's call to the newest time in any dump."""
    where: str
    """File, line and function of the first waiting rank's call."""


class Mismatch(Spec):
    """One collective that ranks called in different ways."""

    sequence: int
    field: str
    """`collective`, `dtype` or `sizes`."""
    values: dict[int, str]
    """The value of each rank."""


class SlowCollective(Spec):
    """A collective that took long."""

    rank: int
    sequence: int
    collective: str
    seconds: float


class FlightGroup(Spec):
    """One process group in all dumps."""

    name: str
    description: str
    ranks: tuple[int, ...]
    """Its members as its dumps say them, else the ranks whose dumps have entries of it."""
    num_collectives: int
    last_enqueued: dict[int, int]
    last_completed: dict[int, int]
    outstanding: tuple[Outstanding, ...]
    mismatches: tuple[Mismatch, ...]
    slowest: tuple[SlowCollective, ...]
    """By durations that the dumps measure; empty without them."""


class FlightReport(Spec):
    """Groups in the dumps of some ranks, and the likely cause of a hang."""

    ranks: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    """Members of groups without a dump: they may have died, or were not given."""
    groups: tuple[FlightGroup, ...]
    verdict: str
    warnings: tuple[str, ...] = ()


def read_flight_recorder(paths: Sequence[str | Path]) -> FlightReport:
    """Hold the dumps of a job's ranks beside each other. Raises SpecError for other files, and for two of one rank."""
    dumps = [read_dump(path, number, len(paths)) for number, path in enumerate(paths)]
    ranks = tuple(sorted(dump.rank for dump in dumps))
    twice = next((a for a, b in pairwise(ranks) if a == b), None)
    if twice is not None:
        raise SpecError(f"flight recorder: two dumps are of rank {twice}", "keep one of them")
    keys = sorted({key for dump in dumps for key in dump.entries})
    newest = max((dump.newest_ns for dump in dumps), default=0)
    groups = tuple(_group(key, dumps, newest) for key in keys)
    members = {rank for group in groups for rank in group.ranks}
    return FlightReport(
        ranks=ranks, missing_ranks=tuple(sorted(members - set(ranks))), groups=groups, verdict=_verdict(groups),
        warnings=() if any(g.slowest for g in groups) else ("no durations: set TORCH_NCCL_ENABLE_TIMING=1",),
    )  # fmt: skip


def _group(key: tuple[str, str], dumps: Sequence[FlightDump], newest_ns: int) -> FlightGroup:
    entries = [entry for dump in dumps for entry in dump.entries.get(key, ())]
    present = tuple(sorted({entry.rank for entry in entries}))
    said = next((dump.members[key[0]] for dump in dumps if dump.members.get(key[0])), ())
    by_sequence: dict[int, list[RecordedCollective]] = defaultdict(list)
    for entry in entries:
        if not entry.point_to_point:
            by_sequence[entry.sequence].append(entry)
    given = {dump.rank for dump in dumps}
    expected = set(said or present) & given
    first_kept = {rank: min(e.sequence for e in entries if e.rank == rank) for rank in present}
    enqueued = {rank: max((e.sequence for e in entries if e.rank == rank), default=0) for rank in present}
    completed = {rank: max((e.sequence for e in entries if e.rank == rank and e.done), default=0) for rank in present}
    for dump in dumps:
        status = next((s for pg, s in dump.status.items() if dump.names.get(pg) == key), {})
        if "last_enqueued_collective" in status:
            enqueued[dump.rank] = max(status["last_enqueued_collective"], enqueued.get(dump.rank, 0))
        if "last_completed_collective" in status:
            completed[dump.rank] = max(status["last_completed_collective"], completed.get(dump.rank, 0))
    timed = sorted((e for e in entries if e.duration_s is not None), key=lambda e: -(e.duration_s or 0.0))
    return FlightGroup(
        name=key[0], description=key[1], ranks=tuple(sorted(said or present)), num_collectives=len(by_sequence),
        last_enqueued=enqueued, last_completed=completed,
        outstanding=tuple(_outstanding(by_sequence, expected, first_kept, completed, newest_ns)),
        mismatches=tuple(m for number in sorted(by_sequence) for m in _mismatches(number, by_sequence[number])),
        slowest=tuple(
            SlowCollective(rank=e.rank, sequence=e.sequence, collective=e.collective, seconds=e.duration_s or 0.0)
            for e in timed[:NUM_SLOWEST]
        ),
    )  # fmt: skip


def _outstanding(
    by_sequence: dict[int, list[RecordedCollective]], expected: set[int], first_kept: dict[int, int],
    completed: dict[int, int], newest_ns: int,
) -> Iterator[Outstanding]:  # fmt: skip
    """Collectives that a rank waits in: called, neither completed nor retired there."""
    for number in sorted(by_sequence):
        called = by_sequence[number]
        waiting = [e for e in called if not e.done and completed.get(e.rank, 0) < number]
        # a rank whose ring begins later has called it and forgotten it
        absent = {r for r in expected - {e.rank for e in called} if first_kept.get(r, 0) <= number}
        if waiting:
            first = min(waiting, key=lambda e: e.created_ns)
            age = (newest_ns - first.created_ns) * 1e-9 if first.created_ns else None
            yield Outstanding(
                sequence=number, collective=first.collective, waiting=tuple(sorted(e.rank for e in waiting)),
                missing=tuple(sorted(absent)), age_s=age, where=first.where,
            )  # fmt: skip


def _mismatches(number: int, called: list[RecordedCollective]) -> Iterator[Mismatch]:
    """The field in which ranks differ; sizes may differ where a root gives or takes them."""
    values = {"collective": {e.rank: e.collective for e in called}, "dtype": {e.rank: e.dtype for e in called}}
    if not any(_OWN_SIZES.fullmatch(e.collective) for e in called):
        values["sizes"] = {e.rank: e.sizes for e in called}
    for field, of_rank in values.items():
        if len(set(of_rank.values())) > 1:
            yield Mismatch(sequence=number, field=field, values=of_rank)
            return  # other fields differ for that reason


def _verdict(groups: Sequence[FlightGroup]) -> str:
    """One sentence: a mismatch explains a hang, then a rank that never came, then what merely waits."""
    for group in groups:
        for mismatch in group.mismatches:
            told = "; ".join(f"rank {rank}: {value}" for rank, value in list(mismatch.values.items())[:4])
            return f"{_name(group)}: ranks differ in the {mismatch.field} of collective {mismatch.sequence}: {told}"
    for group in groups:
        for waits in group.outstanding:
            if waits.missing:
                missing = ", ".join(map(str, waits.missing[:8]))
                what = f"{waits.collective} number {waits.sequence}"
                called = ", ".join(map(str, waits.waiting[:8]))
                return f"{_name(group)}: rank {missing} never called {what}, in which rank {called} waits"
    waiting = [group for group in groups if group.outstanding]
    if waiting:
        waits = waiting[0].outstanding[0]
        return (
            f"{_name(waiting[0])}: all ranks given called {waits.collective} number {waits.sequence}; it has not ended"
        )
    return "no collective is outstanding, and all ranks called the same ones"


def _name(group: FlightGroup) -> str:
    return f"group {group.name}" + (f" ({group.description})" if group.description else "")
