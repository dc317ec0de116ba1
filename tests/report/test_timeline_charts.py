"""Timelines drawn as pictures show each action where and for how long it ran, and say which part of a step they are."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch

from planner.layout.evaluate import evaluate
from planner.report.charts import ACTION_COLOURS, SOFT
from planner.report.timeline import MOST, WHOLE, DrawnStep, draw_timeline, shown_step
from planner.schedule.compare import RankSeconds
from planner.schedule.orders import build_schedule
from planner.schedule.replay import replay
from planner.schedule.timeline import Timeline
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware
from planner.specs.training import Parallelism, TrainingSpec

FOUR = (1.0,) * 4


def replayed(name: str, vpp: int, num_microbatches: int, ranks: tuple[float, ...] = FOUR) -> Timeline:
    return RankSeconds(ranks, ranks, ranks, p2p_s=0.1).replayed(build_schedule(name, len(ranks), vpp, num_microbatches))


def boxes(axes: Axes, colour: str | None = None) -> list[tuple[float, float, int]]:
    """Left and right ends and rows of the bars, of one colour or of all but the transfers."""
    found = []
    for patch in axes.patches:
        assert isinstance(patch, PathPatch)
        face = "#{:02x}{:02x}{:02x}".format(*(round(255 * part) for part in patch.get_facecolor()[:3]))
        if face == colour if colour else face != SOFT:
            corners = np.asarray(patch.get_path().vertices).reshape(-1, 5, 2)
            found += [(float(box[0, 0]), float(box[1, 0]), round(float(box[0, 1]) + 0.41)) for box in corners]
    return found


def test_every_action_of_a_short_step_is_a_bar_at_its_place() -> None:
    timeline = RankSeconds(FOUR, FOUR, FOUR).replayed(build_schedule("1f1b", 4, 1, 8))
    picture = draw_timeline(timeline)
    (axes,) = picture.figure.axes
    assert len(boxes(axes)) == 4 * 8 * 2
    backwards = boxes(axes, ACTION_COLOURS["B"].lower())
    assert (4.0, 6.0, 3) in backwards  # the last rank's first backward
    assert sorted(box for box in backwards if box[2] == 0)[-1] == (31.0, 33.0, 0)
    assert [text.get_text() for text in axes.texts].count("7") == 8
    assert picture.caption.startswith("1f1b, 8 micro-batches on 4 ranks: 33.00 s, of which ranks idle 27.3%.")
    assert "fills for 10.00 s" in picture.caption
    assert "Drawn" not in picture.caption


def test_transfers_are_drawn_below_the_bars_that_wait_for_them() -> None:
    (axes,) = draw_timeline(replayed("1f1b", 1, 4)).figure.axes
    transfers = boxes(axes, SOFT)
    assert len(transfers) == 2 * 3 * 4  # three boundaries, there and back
    assert all(right - left == pytest.approx(0.1) for left, right, _ in transfers)


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
    picture = draw_timeline(timeline, bubble_fraction=0.123)
    assert "the pipeline bubble is 12.3% of the step" in picture.caption
    _, *panels = picture.figure.axes
    for window, axes in zip((middle, begin, end), panels, strict=True):
        assert axes.get_xlim() == pytest.approx((window.from_s, window.to_s))
        inside = (step.start_s < window.to_s) & (step.end_s > window.from_s)
        assert len(boxes(axes)) == np.count_nonzero(inside) <= MOST
        assert all(np.bincount(step.rank[inside]) <= WHOLE)
    assert len(panels[0].texts) > 0.9 * len(boxes(panels[0]))  # all but those cut by the window bear their number


def test_the_caption_adds_up_to_the_step() -> None:
    timeline = replayed("interleaved-1f1b", 2, 32)
    fill_s, drain_s = DrawnStep(timeline).steady_s
    caption = draw_timeline(timeline).caption
    for part_s in (fill_s, drain_s - fill_s, timeline.makespan_s - drain_s):
        assert f"{part_s:,.2f} s" in caption
    shorter = draw_timeline(timeline, None, 4096).caption
    assert "The plan's step has 4096 micro-batches" in shorter


def test_the_shades_of_chunks_differ_and_the_numbers_on_them_are_seen() -> None:
    (axes,) = draw_timeline(replayed("interleaved-1f1b", 8, 4)).figure.axes
    forwards = {patch.get_facecolor() for patch in axes.patches}
    assert len(forwards) == 2 * 8 + 1  # two kinds, and the transfers
    assert {text.get_color() for text in axes.texts} == {"#ffffff", "#000000"}


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("ranks", "vpp", "num_microbatches"), [(16, 8, 256), (64, 4, 256), (1, 1, 300)])
def test_a_drawing_of_any_step_is_small_and_well_formed(ranks: int, vpp: int, num_microbatches: int) -> None:
    name = "interleaved-1f1b" if vpp > 1 else "1f1b"
    page = draw_timeline(replayed(name, vpp, num_microbatches, (1.0,) * ranks)).svg("the schedule")
    assert len(page) < 400_000
    assert ElementTree.fromstring(page).get("aria-label") == "the schedule"


def test_a_file_stands_by_itself() -> None:
    text = draw_timeline(replayed("1f1b", 1, 4)).file()
    root = ElementTree.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "DejaVu Sans" in root.attrib["font-family"]
    assert "var(--" not in text  # no page around it has colours for it


@pytest.mark.parametrize(("pass_s", "unit"), [(1.0, "s"), (1e-3, "ms"), (1e-5, "µs"), (0.0, "µs")])
def test_the_axis_has_the_unit_that_suits_the_step(pass_s: float, unit: str) -> None:
    ranks = (pass_s,) * 4
    (axes,) = draw_timeline(RankSeconds(ranks, ranks, ranks).replayed(build_schedule("1f1b", 4, 1, 8))).figure.axes
    assert axes.get_title("left") == f"whole step, {unit}"
    ticks = [float(tick) for tick in axes.get_xticks()]
    assert len(ticks) > 2
    assert np.allclose(ticks, np.round(ticks, 2))


def test_of_a_step_of_too_many_actions_a_shorter_one_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=16)
    plan = evaluate("8b", cluster, TrainingSpec(seq_length=2048, global_batch_size=256), Parallelism(pp=4))
    assert shown_step(plan).num_microbatches == plan.parallelism.num_microbatches == 64
    monkeypatch.setattr("planner.report.timeline.LONG", 500)
    short = shown_step(plan)
    assert short.num_microbatches == 40
    caption = draw_timeline(replay(short.order, short.durations), 0.01, 64).caption
    assert "bubble is 1.0% of the step" in caption
    assert "The plan's step has 64 micro-batches" in caption
