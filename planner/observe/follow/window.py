"""The last rows of a record: how one that grows for months stays small, and what the last steps alone show."""

from __future__ import annotations

import copy
import math
from array import array
from dataclasses import replace

from planner.observe.record import Back, Record
from planner.observe.thinned import Thinned

KEPT_ROWS = 8_192
"""Rows that a record keeps at least; twice as many are kept at most: 1 MB, and 64 kB for every timer."""


def last_rows(record: Record, rows: int) -> Record:
    """A copy of a record with its last rows alone."""
    window = copy.deepcopy(record)
    keep_last(window, rows)
    first = window.numbers[0] if window.numbers else 0
    later = {key: _since(series, first) for key, series in window.memory_series.items()}
    window.memory_series = {key: series for key, series in later.items() if series.steps}
    return window


def keep_last(record: Record, rows: int) -> int:
    """Forget all but the last rows of steps, and of timers and others as many values; the number of rows forgotten.

    Highest memory, facts, counts and notes stay those of the whole run.
    """
    cut = len(record.numbers) - rows
    if cut <= 0:
        return 0
    for values in (record.numbers, record.seconds, record.covers, record.ends):
        del values[:cut]
    record.backs = [_moved(back, cut) for back in record.backs if back.row > cut]
    record.marks = {row - cut: kinds for row, kinds in record.marks.items() if row >= cut}
    record.mark_s = {
        kind: {row - cut: seconds for row, seconds in of_kind.items() if row >= cut}
        for kind, of_kind in record.mark_s.items()
    }
    begin_s = record.ends[0] - record.seconds[0] * record.covers[0]
    if math.isfinite(begin_s):
        record.first_s = begin_s
        record.activities = [activity for activity in record.activities if activity[2] > begin_s]
    else:
        del record.activities[:-rows]
    for lows, highs in record.timers.values():
        _shorten(rows, lows, highs)
    for values in record.printed.values():
        _shorten(rows, values)
    for links in record.links.values():
        del links[:-rows]
    for spread in record.spreads.values():
        _shorten(rows, spread.lows, spread.highs, spread.low_ranks, spread.high_ranks)
    return cut


def _moved(back: Back, cut: int) -> Back:
    first, end = back.lost_rows
    return replace(back, row=back.row - cut, lost_rows=(max(0, first - cut), max(0, end - cut)))


def _shorten(rows: int, *columns: array[float] | array[int]) -> None:
    for values in columns:
        if len(values) > rows:
            del values[:-rows]


def _since(series: Thinned, first: int) -> Thinned:
    later = Thinned(stride=series.stride)
    for step, value in zip(series.steps, series.values, strict=True):
        if step >= first:
            later.steps.append(step)
            later.values.append(value)
    return later
