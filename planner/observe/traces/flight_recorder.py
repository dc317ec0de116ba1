"""Dumps of torch's flight recorder, one a rank, held beside each other; pickles that run code are refused."""

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
from planner.specs.reading import label, parse_json, printable
from planner.specs.reading.limits import DUMP

_LEAST_ENTRY_BYTES = 40
"""An entry's numbers and times alone take more: a file with more entries repeats one."""
_RANK = re.compile(r"(\d{1,7})(?:\.\w+)?$")
_HINT = "name dumps that torch's flight recorder wrote, one a rank"
_OWN_SIZES = re.compile(r"_?(broadcast|scatter|gather|reduce)|_?all_?to_?all.*")
"""Collectives whose ranks may give sizes of their own."""


@dataclass(frozen=True, slots=True)
class RecordedCollective:
    """One collective on one rank."""

    rank: int
    sequence: int
    collective: str
    dtype: str
    sizes: str
    done: bool
    created_ns: int
    where: str


@dataclass(frozen=True, slots=True)
class FlightDump:
    """Entries that one rank recorded, by (name, description) of the group; and the ranks of groups by name."""

    rank: int
    entries: dict[tuple[str, str], list[RecordedCollective]]
    members: dict[str, tuple[int, ...]]


class Outstanding(Spec):
    """A collective that at least one rank began and has not ended."""

    sequence: int
    collective: str
    waiting: tuple[int, ...]
    """Ranks that called it."""
    missing: tuple[int, ...]
    """Ranks of the group, with a dump, that did not: the likely culprits."""
    where: str
    """File, line and function of the first waiting rank's call."""


class Mismatch(Spec):
    """One collective that ranks called in different ways."""

    sequence: int
    field: str
    """`collective`, `dtype` or `sizes`."""
    values: dict[int, str]
    """The value of each rank."""


class FlightGroup(Spec):
    """One process group in all dumps."""

    name: str
    description: str
    ranks: tuple[int, ...]
    """Its members as its dumps say them, else the ranks whose dumps have entries of it."""
    last_enqueued: dict[int, int]
    last_completed: dict[int, int]
    outstanding: tuple[Outstanding, ...]
    mismatches: tuple[Mismatch, ...]


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
    dumps = [_dump(path, number, len(paths)) for number, path in enumerate(paths)]
    ranks = tuple(sorted(dump.rank for dump in dumps))
    twice = next((a for a, b in pairwise(ranks) if a == b), None)
    if twice is not None:
        raise SpecError(f"flight recorder: two dumps are of rank {twice}", "keep one of them")
    groups = tuple(_group(key, dumps) for key in sorted({key for dump in dumps for key in dump.entries}))
    missing = {rank for group in groups for rank in group.ranks} - set(ranks)
    return FlightReport(ranks=ranks, missing_ranks=tuple(sorted(missing)), groups=groups, verdict=_verdict(groups))


def _dump(path: str | Path, number: int, num_files: int) -> FlightDump:
    """The dump of one rank, which the dump or the file's name says."""
    where = label(path)
    with TraceFile(path) as source:
        is_pickle = source.read(1) == b"\x80"
    if is_pickle:
        data, size_bytes = load_plain(path)
    else:
        with TraceFile(path) as source:
            text = source.read_all(DUMP.num_bytes)
        data, size_bytes = parse_json(text, where, _HINT, DUMP, keeps_last=True), len(text)
    if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
        raise SpecError(f"{where}: holds no `entries`: it is no flight-recorder dump", _HINT)
    if len(data["entries"]) * _LEAST_ENTRY_BYTES > size_bytes:
        raise SpecError(f"{where}: its {size_bytes:,} bytes repeat few entries very often", _HINT)
    rank, entries = _rank(data, where, number, num_files), defaultdict(list)
    for index, raw in enumerate(data["entries"]):
        if not isinstance(raw, dict):
            raise SpecError(f"{where}: entries[{index}]: is no mapping", _HINT)
        group = raw.get("process_group")
        pair = (_text(group[0]), _text(group[1])) if isinstance(group, (list, tuple)) and len(group) == 2 else ("?", "")
        if raw.get("is_p2p") is not True:
            entries[pair].append(_entry(raw, rank))
    config = data.get("pg_config")
    configured = config.values() if isinstance(config, dict) else ()
    members = {_text(one.get("name")): ranks_of(one.get("ranks")) for one in configured if isinstance(one, dict)}
    return FlightDump(rank, dict(entries), members)


def _rank(data: dict[str, Any], where: str, number: int, num_files: int) -> int:
    said = data.get("rank")
    if isinstance(said, int) and not isinstance(said, bool) and 0 <= said < 10**7:
        return said
    if match := _RANK.search(Path(where).name):
        return int(match[1])
    if num_files == 1:
        return number
    raise SpecError(f"{where}: neither the dump nor its name says its rank", "name it with the rank at the end: nccl_3")


def _entry(raw: dict[str, Any], rank: int) -> RecordedCollective:
    frames = raw.get("frames")
    frame = frames[0] if isinstance(frames, list) and frames and isinstance(frames[0], dict) else {}
    file = str(frame.get("filename", "")).rpartition("/")[2]
    name = _text(raw.get("profiling_name"))
    return RecordedCollective(
        rank, _whole(raw.get("collective_seq_id")), name.partition(":")[2] or name, _text(raw.get("input_dtypes")),
        _text(raw.get("input_sizes")), raw.get("state") == "completed" or raw.get("retired") is True,
        _whole(raw.get("time_created_ns")), _text(f"{file}:{frame.get('line')}:{frame.get('name')}") if file else "",
    )  # fmt: skip


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else 0


def _text(value: object) -> str:
    return printable(str(value)[:120], 120)


def _group(key: tuple[str, str], dumps: Sequence[FlightDump]) -> FlightGroup:
    entries = [entry for dump in dumps for entry in dump.entries.get(key, ())]
    present = sorted({entry.rank for entry in entries})
    said = next((dump.members[key[0]] for dump in dumps if dump.members.get(key[0])), ())
    by_sequence: dict[int, list[RecordedCollective]] = defaultdict(list)
    for entry in sorted(entries, key=lambda entry: entry.sequence):
        by_sequence[entry.sequence].append(entry)
    of_rank = {rank: [entry for entry in entries if entry.rank == rank] for rank in present}
    completed = {rank: max((e.sequence for e in own if e.done), default=0) for rank, own in of_rank.items()}
    # a rank whose ring begins later has called a collective and forgotten it
    first_kept = {dump.rank: 0 for dump in dumps if dump.rank in (said or present)}
    first_kept |= {rank: min(e.sequence for e in own) for rank, own in of_rank.items() if rank in first_kept}
    outstanding = []
    for number, called in by_sequence.items():
        waiting = [e for e in called if not e.done and completed[e.rank] < number]
        absent = sorted({rank for rank, first in first_kept.items() if first <= number} - {e.rank for e in called})
        if waiting:
            first = min(waiting, key=lambda e: e.created_ns)
            outstanding.append(
                Outstanding(
                    sequence=number, collective=first.collective, waiting=tuple(sorted(e.rank for e in waiting)),
                    missing=tuple(absent), where=first.where,
                )
            )  # fmt: skip
    return FlightGroup(
        name=key[0], description=key[1], ranks=tuple(sorted(said or present)),
        last_enqueued={rank: max(e.sequence for e in own) for rank, own in of_rank.items()}, last_completed=completed,
        outstanding=tuple(outstanding),
        mismatches=tuple(m for number, called in by_sequence.items() for m in _mismatches(number, called)),
    )  # fmt: skip


def _mismatches(number: int, called: list[RecordedCollective]) -> Iterator[Mismatch]:
    """The first field in which ranks differ; sizes may differ where a root gives or takes them."""
    values = {"collective": {e.rank: e.collective for e in called}, "dtype": {e.rank: e.dtype for e in called}}
    if not any(_OWN_SIZES.fullmatch(e.collective) for e in called):
        values["sizes"] = {e.rank: e.sizes for e in called}
    field = next((field for field, of_rank in values.items() if len(set(of_rank.values())) > 1), None)
    if field is not None:
        yield Mismatch(sequence=number, field=field, values=values[field])


def _verdict(groups: Sequence[FlightGroup]) -> str:
    """One sentence: a mismatch explains a hang, then a rank that never came, then what merely waits."""
    for group in groups:
        for mismatch in group.mismatches:
            told = "; ".join(f"rank {rank}: {value}" for rank, value in list(mismatch.values.items())[:4])
            return f"{_name(group)}: ranks differ in the {mismatch.field} of collective {mismatch.sequence}: {told}"
    waiting = [(group, waits) for group in groups for waits in group.outstanding]
    for group, waits in sorted(waiting, key=lambda pair: not pair[1].missing):
        what, missing = f"{waits.collective} number {waits.sequence}", ", ".join(map(str, waits.missing[:8]))
        if not missing:
            return f"{_name(group)}: all ranks given called {what}; it has not ended"
        called = ", ".join(map(str, waits.waiting[:8]))
        return f"{_name(group)}: rank {missing} never called {what}, in which rank {called} waits"
    return "no collective is outstanding, and all ranks called the same ones"


def _name(group: FlightGroup) -> str:
    return f"group {group.name}" + (f" ({group.description})" if group.description else "")
