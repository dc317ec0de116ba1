"""Sets of time, held against sets of whole numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.observe.traces.events import Spans, intersect, length_ns, merge, subtract, union, window

PAIRS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8)


def spans_of(pairs: list[tuple[int, int]]) -> Spans:
    starts = np.array([start for start, _ in pairs], np.int64)
    return union(starts, starts + np.array([length for _, length in pairs], np.int64))


def points(spans: Spans) -> set[int]:
    return {point for start, end in spans.tolist() for point in range(start, end)}


@given(PAIRS, PAIRS)
def test_spans_are_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    a, b = spans_of(one), spans_of(other)
    assert points(a) == {point for start, length in one for point in range(start, start + length)}
    assert points(intersect(a, b)) == points(a) & points(b)
    assert points(subtract(a, b)) == points(a) - points(b)
    assert points(merge(a, b)) == points(a) | points(b)


@given(PAIRS)
def test_spans_are_sorted_and_apart_so_that_lengths_count_once(pairs: list[tuple[int, int]]) -> None:
    spans = spans_of(pairs)
    assert length_ns(spans) == len(points(spans))
    assert (spans[1:, 0] > spans[:-1, 1]).all()


def test_a_window_without_length_is_empty() -> None:
    assert length_ns(window(5, 5)) == 0
    assert window(2, 5).tolist() == [[2, 5]]
