"""Charts of a plan hold its numbers: bars to one scale beside the capacity, the curve's peak, the Pareto front."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.answer import Plan
from planner.report.pictures import ACTION_COLOURS, MEMORY_COLOURS, envelope, front, stacks, stage_seconds
from planner.report.rows import Entry, entry_of
from planner.specs.units import GIB

MakePlan = Callable[..., Plan]


def heights(svg: str) -> dict[str, list[float]]:
    """Units that each bar is high, by its colour."""
    found: dict[str, list[float]] = {}
    for path, colour in re.findall(r'<path d="([^"]*)" fill="([^"n][^"]*)"', svg):
        found[colour] = [abs(float(b) - float(a)) for a, b in re.findall(r"M\S+ (\S+?)H\S+V(\S+?)H", path)]
    return found


@pytest.mark.parametrize("total_gib", [60.0, 95.0])
def test_memory_is_drawn_to_one_scale_beside_the_capacity(make_plan: MakePlan, total_gib: float) -> None:
    plan = make_plan(pp=4, total_gib=total_gib, fits=total_gib < 79)
    capacity_bytes = plan.cluster.hardware.memory_bytes
    svg = stacks(plan, capacity_bytes)
    assert f"GPU {capacity_bytes / GIB:.1f}" in svg
    found = heights(svg)
    assert all(len(sizes) == 4 for sizes in found.values())
    highs = np.sum(list(found.values()), axis=0)
    totals = np.array([stage.memory.total_bytes for stage in plan.stages], dtype=float)
    assert highs / totals == pytest.approx([highs[0] / totals[0]] * 4, rel=5e-3)
    weights = found[MEMORY_COLOURS["weights"]][0] / plan.stages[0].memory.weights_bytes
    assert weights == pytest.approx(highs[0] / totals[0], rel=2e-2)


def test_the_seconds_of_a_stage_and_the_rest_are_the_step(make_plan: MakePlan) -> None:
    plan = make_plan(pp=4)
    drawn = heights(stage_seconds(plan.best))
    assert len(drawn) == 4
    sums = np.sum(list(drawn.values()), axis=0)
    assert sums == pytest.approx([sums[0]] * 4, rel=5e-3)
    stage, count = plan.stages[1], plan.parallelism.num_microbatches
    share = count * stage.forward_s / plan.step.step_s
    assert drawn[ACTION_COLOURS["F"]][1] / sums[1] == pytest.approx(share, rel=5e-3)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_envelope_holds_the_least_and_the_most_of_each_column(data: st.DataObject) -> None:
    """By brute force: the values in force in a column are those that begin in it, and the one in force before."""
    steps = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=30).filter(any))
    times_s = np.cumsum(steps).astype(float)
    values = np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(steps), max_size=len(steps))), dtype=float)
    if times_s[0] == times_s[-1]:
        return
    found = envelope(times_s, values, columns=data.draw(st.integers(1, 12)))
    last = len(found.low) - 1
    for column, (left, right) in enumerate(zip(found.edges_s, found.edges_s[1:], strict=False)):
        first = max(index for index, time_s in enumerate(times_s) if time_s <= left)
        own = [
            v
            for i, (t, v) in enumerate(zip(times_s, values, strict=True))
            if i >= first and (t < right or column == last)
        ]
        assert (found.low[column], found.high[column]) == (min(own), max(own))


def test_the_front_is_what_no_other_beats(make_plan: MakePlan) -> None:
    rng, entry = np.random.default_rng(3), entry_of("one", make_plan().best)
    points = [(float(step), int(peak)) for step, peak in rng.integers(1, 9, (40, 2))]
    entries = [_with(entry, step_s, peak) for step_s, peak in points]
    expected = {
        point
        for point in points
        if not any(other != point and other[0] <= point[0] and other[1] <= point[1] for other in points)
    }
    assert [(one.step_s, one.peak_bytes) for one in front(entries)] == sorted(expected)


def _with(entry: Entry, step_s: float, peak_bytes: int) -> Entry:
    fields = {name: getattr(entry, name) for name in Entry.__slots__}
    return Entry(**{**fields, "step_s": step_s, "peak_bytes": peak_bytes})
