"""Timelines drawn as pictures show each action where and for how long it ran, and say which part of a step they are."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from priced_plans import priced_plan

from planner.report.pictures import ACTION_COLOURS, pipeline, timeline_file
from planner.report.timeline import MOST, WHOLE, DrawnStep, caption, shown_step
from planner.schedule.compare import RankSeconds
from planner.schedule.orders import build_schedule
from planner.schedule.replay import Timeline, replay

FOUR = (1.0,) * 4


def replayed(name: str, vpp: int, num_microbatches: int, ranks: tuple[float, ...] = FOUR) -> Timeline:
    return RankSeconds(ranks, ranks, ranks, p2p_s=0.1).replayed(build_schedule(name, len(ranks), vpp, num_microbatches))


def boxes(drawing: str, style: str = 'class="action"') -> list[tuple[float, float, float]]:
    """Left and right ends and heights of the bars whose path has a style."""
    paths = re.findall(r"<path ([^>]*)>", drawing)
    ends = [re.findall(r"M(\S+) (\S+?)H(\S+?)V", path) for path in paths if style in path]
    return [(float(left), float(right), float(y)) for path in ends for left, y, right in path]


def test_every_action_of_a_short_step_is_a_bar_as_long_as_it_takes() -> None:
    timeline = RankSeconds(FOUR, FOUR, FOUR).replayed(build_schedule("1f1b", 4, 1, 8))
    drawing = timeline_file(timeline)
    bars = boxes(drawing)
    assert len(bars) == 4 * 8 * 2
    backwards = boxes(drawing, f'fill="{ACTION_COLOURS["B"].lower()}"')
    lengths = {round(right - left) for left, right, _ in backwards}
    assert len(backwards) == 32
    assert lengths == {round(2 * (right - left)) for left, right, _ in bars if round(right - left) not in lengths}
    assert re.findall(r">(\d+)</text>", drawing).count("7") >= 8
    assert "33.00 s" in caption(DrawnStep(timeline), DrawnStep(timeline).windows(), None, 0)


def test_transfers_are_drawn_below_the_bars_that_wait_for_them() -> None:
    transfers = boxes(timeline_file(replayed("1f1b", 1, 4)), 'class="hop"')
    assert len(transfers) == 2 * 3 * 4  # three boundaries, there and back
    assert len({round(right - left, 1) for left, right, _ in transfers}) <= 3, "to a tenth of a unit"


@pytest.mark.parametrize(("name", "vpp"), [("interleaved-1f1b", 4), ("zb-v", 2), ("dualpipe", 1), ("gpipe", 1)])
def test_a_long_step_is_drawn_in_windows_that_can_be_read(name: str, vpp: int) -> None:
    timeline = replayed(name, vpp, 64)
    step = DrawnStep(timeline)
    middle, begin, end = step.windows()
    assert begin.from_s == 0
    assert end.to_s == timeline.makespan_s
    assert 0 <= middle.from_s < middle.to_s <= timeline.makespan_s
    fill_s, drain_s = step.steady_s
    assert (middle.title == "steady state") == (fill_s < drain_s)
    if fill_s < drain_s:
        assert fill_s <= middle.from_s < middle.to_s <= drain_s
    drawing = pipeline(timeline, 0.123)
    assert "the pipeline bubble is 12.3% of the step" in drawing
    seen = [(step.start_s < window.to_s) & (step.end_s > window.from_s) for window in (middle, begin, end)]
    assert len(boxes(drawing)) == sum(map(np.count_nonzero, seen)) <= 3 * MOST
    assert all(np.bincount(step.rank[inside]).max() <= WHOLE for inside in seen)


def test_the_caption_adds_up_to_the_step() -> None:
    timeline = replayed("interleaved-1f1b", 2, 32)
    fill_s, drain_s = DrawnStep(timeline).steady_s
    drawing = pipeline(timeline)
    for part_s in (fill_s, drain_s - fill_s, timeline.makespan_s - drain_s):
        assert f"{part_s:,.2f} s" in drawing
    assert "step has 4096 micro-batches" in pipeline(timeline, None, 4096)


def test_the_shades_of_chunks_differ_and_the_numbers_on_them_are_seen() -> None:
    drawing = timeline_file(replayed("interleaved-1f1b", 8, 4))
    assert len({*re.findall(r'fill="(#\w+)" class="action"', drawing)}) == 2 * 8
    assert {*re.findall(r'<text [^>]*class="(\w+)"', drawing)} >= {"on", "dark"}


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("ranks", "vpp", "num_microbatches"), [(16, 8, 256), (64, 4, 256), (1, 1, 300)])
def test_a_file_of_any_step_is_small_and_stands_by_itself(ranks: int, vpp: int, num_microbatches: int) -> None:
    name = "interleaved-1f1b" if vpp > 1 else "1f1b"
    text = timeline_file(replayed(name, vpp, num_microbatches, (1.0,) * ranks))
    assert len(text) < 400_000
    assert ElementTree.fromstring(text.encode()).tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(--" not in text  # no page around it has colours for it


@pytest.mark.parametrize(("pass_s", "unit"), [(1.0, "s"), (1e-3, "ms"), (1e-5, "µs"), (0.0, "µs")])
def test_the_axis_has_the_unit_that_suits_the_step(pass_s: float, unit: str) -> None:
    ranks = (pass_s,) * 4
    drawing = timeline_file(RankSeconds(ranks, ranks, ranks).replayed(build_schedule("1f1b", 4, 1, 8)))
    assert f">whole step, {unit}<" in drawing


def test_of_a_step_of_too_many_actions_a_shorter_one_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = priced_plan("8b", 16, 2048, 256, pp=4)
    assert shown_step(plan).num_microbatches == plan.parallelism.num_microbatches == 64
    monkeypatch.setattr("planner.report.timeline.LONG", 500)
    short = shown_step(plan)
    assert short.num_microbatches == 40
    drawing = pipeline(replay(short.order, short.durations), 0.01, 64)
    assert "bubble is 1.0% of the step" in drawing
    assert "step has 64 micro-batches" in drawing
