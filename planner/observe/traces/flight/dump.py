"""One rank's dump of the flight recorder as typed entries; pickles that run code are refused."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import SpecError
from planner.observe.traces.groups import ranks_of
from planner.observe.traces.pickles import load_plain
from planner.observe.traces.source import Source
from planner.specs.reading import label, parse_json, printable
from planner.specs.reading.limits import DUMP

_LEAST_ENTRY_BYTES = 40
"""An entry's numbers and times alone take more: a file with more entries repeats one."""
_RANK = re.compile(r"(\d{1,7})(?:\.\w+)?$")
_HINT = "name dumps that torch's flight recorder wrote, one a rank"


@dataclass(frozen=True, slots=True)
class Entry:
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
class Dump:
    """Entries that one rank recorded, by (name, description) of the group."""

    rank: int
    entries: dict[tuple[str, str], list[Entry]]
    members: dict[str, tuple[int, ...]]
    status: dict[str, dict[str, int]]
    names: dict[str, tuple[str, str]]
    newest_ns: int


def read_dump(path: str | Path, number: int, num_files: int) -> Dump:
    """The dump of one rank, which the dump or the file's name says."""
    where = label(path)
    data, size_bytes = _load(path, where)
    if not isinstance(data, dict) or not isinstance(data.get("entries"), list):
        raise SpecError(f"{where}: holds no `entries`: it is no flight-recorder dump", _HINT)
    if len(data["entries"]) * _LEAST_ENTRY_BYTES > size_bytes:
        raise SpecError(f"{where}: its {size_bytes:,} bytes repeat few entries very often", _HINT)
    rank = _rank(data, where, number, num_files)
    entries: dict[tuple[str, str], list[Entry]] = defaultdict(list)
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
    return Dump(rank, dict(entries), _members(data.get("pg_config")), _status(data.get("pg_status")), names, newest)


def _load(path: str | Path, where: str) -> tuple[Any, int]:
    with Source(path) as source:
        if source.read(1) == b"\x80":
            return load_plain(path)
    with Source(path) as source:
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


def _entry(raw: dict[str, Any], rank: int) -> Entry:
    point_to_point = raw.get("is_p2p") is True
    started, completed = (_whole(raw.get(f"time_discovered_{name}_ns")) for name in ("started", "completed"))
    duration = raw.get("duration_ms")
    measured = duration / 1e3 if isinstance(duration, (int, float)) and 0 <= duration < 1e12 else None
    if measured is None and 0 < started < completed:
        measured = (completed - started) * 1e-9
    frames = raw.get("frames")
    frame = frames[0] if isinstance(frames, list) and frames and isinstance(frames[0], dict) else {}
    file = str(frame.get("filename", "")).rpartition("/")[2]
    return Entry(
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
