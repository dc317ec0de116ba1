"""Sets of time: sorted spans [start, end) in whole nanoseconds that do not overlap. Lengths of unions, never sums."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
Spans = NDArray[np.int64]
"""An array of shape (number of spans, 2)."""

NONE: Spans = np.zeros((0, 2), np.int64)


def union(starts: Times, ends: Times) -> Spans:
    """The time that any of the given spans covers; those without length are left out."""
    keep = ends > starts
    if not keep.any():
        return NONE
    starts, ends = starts[keep], ends[keep]
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([starts[first], reach[last]], axis=1)


def length_ns(spans: Spans) -> int:
    """Nanoseconds of a set."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def intersect(a: Spans, b: Spans) -> Spans:
    """The time that is in both sets."""
    if not len(a) or not len(b):
        return NONE
    first = np.searchsorted(b[:, 1], a[:, 0], side="right")
    last = np.searchsorted(b[:, 0], a[:, 1], side="left")
    counts = np.maximum(last - first, 0)
    of_a = np.repeat(np.arange(len(a)), counts)
    of_b = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    return np.stack([np.maximum(a[of_a, 0], b[of_b, 0]), np.minimum(a[of_a, 1], b[of_b, 1])], axis=1)


def subtract(a: Spans, b: Spans) -> Spans:
    """The time that is in `a` and not in `b`."""
    if not len(a) or not len(b):
        return a
    edges = np.concatenate([[min(a[0, 0], b[0, 0]) - 1], b.ravel(), [max(a[-1, 1], b[-1, 1]) + 1]])
    return intersect(a, edges.reshape(-1, 2))


def merge(a: Spans, b: Spans) -> Spans:
    """The time that is in either set."""
    both = np.concatenate([a, b])
    return union(both[:, 0], both[:, 1])


def window(start_ns: int, end_ns: int) -> Spans:
    """The set of one span."""
    return np.array([[start_ns, end_ns]], np.int64) if end_ns > start_ns else NONE
