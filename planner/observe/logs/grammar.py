"""A grammar: a table of the lines that a trainer prints, each row with the words that every such line holds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from planner.observe.observation import FailedAllocation, HungCollective
from planner.observe.record import RunRecord

Take = Callable[[RunRecord, re.Match[str]], None]
_ISO = re.compile(r"(\d{4})-?(\d\d)-?(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
_AMERICAN = re.compile(r"(\d\d)/(\d\d)/(\d{4}) (\d\d):(\d\d):(\d\d)")
_FLOAT = re.compile(r"[-+]?(?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:[eE][-+]?\d{1,3})?")
MOST = 2**53
"""More of anything is no count: the first whole number that a float cannot tell from the next."""
_SIZES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True)
class LineRow:
    """One kind of line."""

    says: str
    """The line's content in a word or two."""
    needle: str
    """Text that every such line holds, for a search that is cheap."""
    pattern: re.Pattern[str]
    """Searched for in the line, after colours and the launcher's words were taken off."""
    take: Take


@dataclass(frozen=True, slots=True)
class Grammar:
    """The lines of one trainer."""

    name: str
    trainer: str
    rows: tuple[LineRow, ...]
    rank: int = 0
    """The grammar with the lowest counts if several read equally many steps of a file."""
    finish: Callable[[RunRecord], None] = field(default=lambda record: None)
    """Works out what only the whole file says."""


def line_row(says: str, needle: str, pattern: str, take: Take) -> LineRow:
    """A row with its pattern compiled."""
    return LineRow(says, needle, re.compile(pattern), take)


def number(text: str | None) -> float:
    """The number at the begin of a text, commas of thousands left out; not a number where there is none."""
    match = _FLOAT.match(text.strip().replace(",", "")) if text else None
    return float(match[0]) if match else math.nan


def suffixed(text: str) -> tuple[float, float]:
    """`1.2K` as 1200, and half a unit of its last digit: 50."""
    match = _FLOAT.match(text.strip())
    if match is None:
        return math.nan, math.nan
    size = _SIZES.get(text.strip()[match.end() : match.end() + 1].upper(), 1.0)
    digits = len(match[0].partition(".")[2])
    return float(match[0]) * size, 0.5 * 10.0**-digits * size


def whole(text: str | None) -> int | None:
    """The whole number in a text; None where there is none, or one that no file of a trainer has."""
    value = number(text)
    return int(value) if math.isfinite(value) and value == int(value) and 0 <= value < MOST else None


def moment(text: str) -> float:
    """The first date and time in a text as seconds since 1970, taken as UTC; not a number where there is none."""
    match = _ISO.search(text)
    try:
        if match is not None:
            *parts, fraction = match.groups()
            year, month, day, hour, minute, second = map(int, parts)
            at_s = datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
            return at_s + (int(fraction) / 10 ** len(fraction) if fraction else 0.0)
        match = _AMERICAN.search(text)
        if match is not None:
            month, day, year, hour, minute, second = map(int, match.groups())
            return datetime(year, month, day, hour, minute, second, tzinfo=UTC).timestamp()
    except (ValueError, OverflowError):
        pass
    return math.nan


def fields(text: str, separator: str = "|") -> dict[str, str]:
    """`a: 1 | b: 2` as a mapping; of equal names the first counts."""
    found: dict[str, str] = {}
    for part in text.split(separator):
        name, colon, value = part.rpartition(": ") if ": " in part else part.rpartition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def mark(kind: str) -> Take:
    """A row that only says that something happened between steps."""
    return lambda record, match: record.mark(kind)


def fact(name: str, convert: Callable[[str], str | int | None] = whole) -> Take:
    """A row whose first group is a fact of the job."""

    def take(record: RunRecord, match: re.Match[str]) -> None:
        value = convert(match[1])
        if value:
            record.facts[name] = value

    return take


def text_of(value: str) -> str:
    """A name from a log: printable, and not long."""
    return "".join(letter for letter in value.strip() if letter.isprintable())[:120]


def _retried(record: RunRecord, match: re.Match[str]) -> None:
    """torchtitan's `9 CUDA memory allocation retries.`, counted from the begin by each rank."""
    _at_least(record, "num_alloc_retries", match[1])


def _out_of_memory(record: RunRecord, match: re.Match[str]) -> None:
    """torchtitan's `2 CUDA OOM errors thrown.`, counted from the begin by each rank."""
    _at_least(record, "num_ooms", match[1])


def _at_least(record: RunRecord, name: str, text: str) -> None:
    record.counts[name] = max(record.counts[name], int(number(text)))


def _failed(record: RunRecord, match: re.Match[str]) -> None:
    """PyTorch 2.13's warning of one attempt that the allocator may repeat."""
    record.counts["num_alloc_retries"] += 1


_NOT_FREE = re.compile(
    r"([\d.]{1,12}) ([KMG]iB) is allocated by PyTorch, and ([\d.]{1,12}) ([KMG]iB) is reserved by PyTorch but"
)
_OLD_FREE = re.compile(r"([\d.]{1,12}) ([KMG]iB) already allocated;.{0,60}?([\d.]{1,12}) ([KMG]iB) reserved in total")
_CAPACITY = re.compile(r"total capacity of ([\d.]{1,12}) ([KMG]iB)|([\d.]{1,12}) ([KMG]iB) total capacity")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_MOST_ERRORS = 1000


def _bytes(amount: str, unit: str) -> int:
    return round(number(amount) * _UNITS[unit])


def _oom(record: RunRecord, match: re.Match[str]) -> None:
    """`CUDA out of memory. Tried to allocate 2.00 GiB. … 70.1 GiB is allocated by PyTorch, and 5.3 GiB …`"""
    record.counts["num_ooms"] += 1
    allocated = unused = None
    if (now := _NOT_FREE.search(match.string)) is not None:
        allocated, unused = _bytes(now[1], now[2]), _bytes(now[3], now[4])
    elif (old := _OLD_FREE.search(match.string)) is not None:
        allocated = _bytes(old[1], old[2])
        unused = max(0, _bytes(old[3], old[4]) - allocated)
    whole = _CAPACITY.search(match.string)
    rank = record.state.get("rank")
    if len(record.failed_allocations) < _MOST_ERRORS:
        record.failed_allocations.append(
            FailedAllocation(
                rank=None if rank is None else int(rank), requested_bytes=_bytes(match[1], match[2]),
                allocated_bytes=allocated, unused_bytes=unused,
                total_bytes=None if whole is None else _bytes(whole[1] or whole[3], whole[2] or whole[4]),
            )
        )  # fmt: skip


def _hung(record: RunRecord, match: re.Match[str]) -> None:
    """`[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=…`"""
    ran = re.search(r"ran for (\d{1,12}) milliseconds", match.string)
    if len(record.hung_collectives) < _MOST_ERRORS:
        record.hung_collectives.append(
            HungCollective(
                rank=int(match[1]), sequence=int(match[2]), collective=match[3].lower(),
                num_elements=whole(match[4]), seconds=None if ran is None else int(ran[1]) / 1e3,
            )
        )  # fmt: skip


COMMON_ROWS = (
    line_row("retries", "memory allocation retries", r"\b(\d{1,12}) [A-Z]+ memory allocation retries", _retried),
    line_row("out of memory", "OOM errors thrown", r"\b(\d{1,12}) [A-Z]+ OOM errors thrown", _out_of_memory),
    line_row("retry", "allocation failed with OOM", r"memory allocation failed with OOM on device", _failed),
    line_row(
        "out of memory", "out of memory. Tried",
        r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate ([\d.]{1,12}) ([KMG]iB)", _oom,
    ),
    line_row(
        "hung collective", "Watchdog caught collective",
        r"\[Rank (\d{1,7})\] Watchdog caught collective.{0,60}?SeqNum=(\d{1,15}), OpType=(\w{1,40}), "
        r"NumelIn=(\d{1,18})", _hung,
    ),
)  # fmt: skip
"""As of torchtitan 2026 (torchtitan/components/metrics.py) and PyTorch 2.13 (c10/cuda/CUDACachingAllocator.cpp)."""
