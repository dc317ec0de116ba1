"""The wall time of a run, divided: start-up, steps, evaluation, checkpoints, interruptions, idle.

Every row of steps ends at its line's time and began as many seconds earlier as it covers. What lies between two rows is
what the log says happened there, and idle where it says nothing; what two records both claim is counted as overlap.
"""

from __future__ import annotations

import math

import numpy as np

from planner.observe.measured import Wall
from planner.observe.record import Record

_KINDS = ("evaluation", "checkpoint")
_COARSE_S, _FINE_S = 1.0, 0.002
"""Times of whole seconds are cut, not rounded, so that two of them are off by up to one."""


def wall_of(record: Record) -> Wall | None:
    """The wall time, divided; None where the lines have no times."""
    ends = np.frombuffer(record.ends, dtype=float)
    if not len(ends) or not np.isfinite(ends).all():
        return None
    lengths = np.frombuffer(record.seconds, dtype=float) * np.asarray(record.covers, dtype=float)
    slack_s = _COARSE_S if np.all(ends == np.floor(ends)) else _FINE_S
    first_s = min(record.first_s, float((ends - lengths)[0]))
    items = dict.fromkeys(("steps", "down", "idle", "overlap", *_KINDS), 0.0)
    restarts = {back.row for back in record.backs}
    timed = [(begin, end - begin, -1, kind) for kind, begin, end in record.activities if kind in _KINDS]
    rows = [(end - length, length, row, "steps") for row, (end, length) in enumerate(zip(ends, lengths, strict=True))]
    has_times = {kind for _, _, _, kind in timed}
    cursor = rows[0][0]
    startup_s = cursor - first_s
    for begin, length, row, kind in sorted([*rows, *timed]):
        if row == 0:
            cursor = begin
        items[kind] += length
        gap = begin - cursor
        if abs(gap) <= slack_s:
            cursor += length
            continue
        if gap > 0:
            _share(items, gap, record, row, row in restarts, has_times)
        else:
            items["overlap"] += cursor + length - max(cursor, begin + length)
        cursor = max(cursor, begin + length)
    last_s = max(record.last_s, cursor)
    items["idle"] += last_s - cursor
    return Wall(
        wall_s=last_s - first_s,
        startup_s=startup_s,
        **{f"{name}_s": value for name, value in items.items()},
    )


def _share(items: dict[str, float], gap: float, record: Record, row: int, restarts: bool, timed: set[str]) -> None:
    """Give a gap to what happened in it: as much as each is said to have taken, all of it to one that says nothing."""
    if restarts:
        items["down"] += gap
        return
    marks = [kind for kind in _KINDS if kind in record.marks.get(row, ()) and kind not in timed]
    for kind in marks:
        said_s = record.mark_s.get(kind, {}).get(row)
        taken = min(gap, said_s if said_s is not None else gap)
        items[kind] += taken
        gap -= taken
    items["idle"] += gap


def restart_gap_s(record: Record, row: int) -> float | None:
    """Seconds from the last row before an interruption to the begin of the first after it; None without times."""
    if row == 0 or row >= len(record.ends):
        return None
    down = record.ends[row] - record.seconds[row] * record.covers[row] - record.ends[row - 1]
    return max(0.0, down) if math.isfinite(down) else None
