"""Timelines drawn as pictures show each action where and for how long it ran, and say which part of a step they are.

Timelines drawn as text show each action where and for how long it ran.
Traces hold every action, wait and transfer, in microseconds, and their slices nest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from pages import printed
from priced_plans import priced_plan
from trace_judge import judge, named

from planner.report.pictures import ACTION_COLOURS, pipeline, timeline_file
from planner.report.schedules import (
    MOST,
    WHOLE,
    DrawnStep,
    caption,
    drawing,
    render_comparison,
    render_straggler,
    render_synthesis,
    render_timeline,
    shown_step,
)
from planner.report.trace import COMPUTE, TraceSlice, trace_events
from planner.schedule.compare import RankSeconds, compare, find_order, straggler_cost
from planner.schedule.orders import build_schedule
from planner.schedule.replay import Durations, Timeline, replay

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
    monkeypatch.setattr("planner.report.schedules.LONG", 500)
    short = shown_step(plan)
    assert short.num_microbatches == 40
    drawing = pipeline(replay(short.order, short.durations), 0.01, 64)
    assert "bubble is 1.0% of the step" in drawing
    assert "step has 64 micro-batches" in drawing


def test_a_drawing_is_to_scale() -> None:
    """33 columns for 33 seconds: each forward one column, each backward two."""
    timeline = RankSeconds(FOUR, FOUR, FOUR).replayed(build_schedule("1f1b", 4, 1, 8))
    rows = [row.plain for row in drawing(timeline, 2 + 33)]
    assert rows == [
        "0 FFFF······B0FB1FB2FB3FB4·B5·B6·B7", "1 ·FFF····B0FB1FB2FB3FB4FB5·B6·B7··",
        "2 ··FF··B0FB1FB2FB3FB4FB5FB6·B7····", "3 ···FB0FB1FB2FB3FB4FB5FB6FB7······",
    ]  # fmt: skip


def test_every_second_chunk_is_small_and_long_actions_are_filled() -> None:
    timeline = RankSeconds((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)).replayed(build_schedule("zb-v", 2, 2, 1))
    rows = [row.plain for row in drawing(timeline, 2 + 40)]
    assert rows == ["0 F0──········f0──i0──w0──········I0──W0──", "1 ····F0──f0──········i0──w0──I0──W0──····"]


@pytest.mark.parametrize(("name", "num_microbatches"), [("1f1b", 8), ("1f1b", 300), ("dualpipe", 8)])
def test_a_report_fits_eighty_columns_without_colour(name: str, num_microbatches: int) -> None:
    timeline = RankSeconds(FOUR, FOUR, FOUR, p2p_s=0.1).replayed(build_schedule(name, 4, 1, num_microbatches))
    text = printed(render_timeline(timeline))
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_comparison_lists_every_schedule_or_why_not() -> None:
    eight = (1.0,) * 8
    rows = compare(RankSeconds(eight, eight, eight), 64, vpp=4)
    lines = {line.split()[0]: line for line in printed(render_comparison(rows)).splitlines()}
    assert "2.7%" in lines["interleaved-1f1b"]  # of useful time, at vpp 4
    assert "2 copies" in lines["dualpipe"]
    assert " 0.0% " in lines["pipedream-2bw"]  # steps follow each other without a flush
    refused = compare(RankSeconds(FOUR, FOUR, FOUR), 6)
    assert "needs a multiple of 4 micro-batches" in printed(render_comparison(refused), 200)


def test_a_straggler_and_what_rebalancing_gives_back() -> None:
    ranks = RankSeconds(FOUR, FOUR, FOUR, slow_ranks={3: 1.2})
    cost = straggler_cost(build_schedule("1f1b", 4, 1, 8), ranks)
    assert (cost.even_s, cost.slow_s) == pytest.approx((33, 37.8))
    even_s = 12 / (3 + 1 / 1.2)  # all ranks equally long, at the same work in all
    assert cost.rebalanced_s == pytest.approx(11 * even_s)
    assert "4.800 s (14.5% more than 33.00 s)" in printed(render_straggler(cost))


def test_an_order_found_is_set_beside_named_one_and_bound() -> None:
    found = find_order(RankSeconds((1.0, 1.2, 1.0, 1.3), (1.0,) * 4, (0.9,) * 4), 12, 1, 5.0)
    text = printed(render_synthesis(found))
    assert "best named schedule that fits" in text
    assert "above the best possible" in " ".join(text.split())


def events_of(name: str, pp: int, vpp: int, num_microbatches: int, **more: Any) -> list[dict[str, Any]]:
    ones = [1.0] * pp * vpp
    durations = Durations(ones, ones, ones, activation_bytes=[10.0] * pp * vpp, **more)
    trace = trace_events(replay(build_schedule(name, pp, vpp, num_microbatches), durations))
    judge(trace)
    return trace["traceEvents"]


def test_actions_are_named_slices_of_their_rank() -> None:
    events = events_of("1f1b", 4, 1, 8)
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 3 and event["tid"] == 0]
    assert len(slices) == 16
    assert slices[1] == {
        "ph": "X", "pid": 3, "tid": 0, "name": "backward 0", "cat": "backward", "cname": "thread_state_runnable",
        "ts": 4e6, "dur": 2e6, "args": {"action": "3B0", "micro-batch": 0, "stage": 3, "chunk": 0},
    }  # fmt: skip
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2", "rank 3"}


def test_chunks_and_kinds_are_told_apart() -> None:
    names = {event["name"] for event in events_of("zb-v", 2, 2, 4) if event["ph"] == "X"}
    assert {"forward 0, chunk 0", "input gradient 0, chunk 1", "weight gradient 3, chunk 0", "fill", "drain"} <= names


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("p2p_s", [0.0, 0.25, 5.0])
def test_computation_and_waits_cover_the_step_and_no_thread_overlaps_itself(name: str, p2p_s: float) -> None:
    events = events_of(name, 4, 1, 8, p2p_s=p2p_s, blocking_p2p=p2p_s == 0.25)
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    end = max(end for spans in threads.values() for _, end in spans)
    for spans in threads.values():
        spans.sort()
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(spans))
    for rank in range(4):
        covered = sum(stop - start for thread in (0, 1) for start, stop in threads[rank, thread])
        assert covered == pytest.approx(end)


def test_transfers_are_drawn_on_the_receiver() -> None:
    events = events_of("1f1b", 2, 1, 2, p2p_s=0.25)
    arriving = [event for event in events if event["ph"] == "X" and event["pid"] == 1 and event["tid"] == 2]
    assert [(event["name"], event["ts"], event["dur"]) for event in arriving] == [
        ("activation 0", 1e6, 0.25e6),
        ("activation 1", 2e6, 0.25e6),
    ]
    assert not [event for event in events_of("1f1b", 2, 1, 2) if event["ph"] == "X" and event["tid"] in (2, 3)]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_arrows_lead_from_each_result_to_what_consumes_it(name: str) -> None:
    vpp = 2 if name == "zb-v" else 1
    events = events_of(name, 4, vpp, 8, p2p_s=0.25)
    slices = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    starts, ends = ({event["id"]: event for event in events if event["ph"] == phase} for phase in "sf")
    assert len(starts) == 2 * 3 * vpp * 8  # three boundaries that cross ranks, there and back, for each round
    for flow, start in starts.items():
        sent, received = (
            next(one for one in slices if one["pid"] == end["pid"] and one["ts"] <= end["ts"] < one["ts"] + one["dur"])
            for end in (start, ends[flow])
        )
        assert sent["args"]["micro-batch"] == received["args"]["micro-batch"]
        step = 1 if start["name"] == "activation" else -1
        assert received["args"]["stage"] == sent["args"]["stage"] + step
        assert sent["ts"] + sent["dur"] + 0.25e6 <= received["ts"]


def test_what_is_inside_a_pass_lies_in_every_such_pass_and_arrows_keep_clear_of_it() -> None:
    ones = [1.0, 1.0]
    timeline = replay(build_schedule("1f1b", 2, 1, 2), Durations(ones, ones, ones))
    inner = {
        (0, "F"): [
            TraceSlice(COMPUTE, "tp: gather", 0.0, 0.25),
            TraceSlice("tensor-parallel", "gather", 0.0, 0.5, {"hidden_s": 0.25}),
            TraceSlice(COMPUTE, "tp: scatter", 0.75, 1.0),
        ]
    }
    trace = trace_events(timeline, inner=inner)
    slices = named(trace, judge(trace))
    assert [(one.start_ns, one.depth) for one in slices[0, "compute"] if one.event["name"] == "tp: gather"] == [
        (0, 1),
        (1_000_000_000, 1),
    ]
    assert [one.seconds for one in slices[0, "tensor-parallel"]] == [0.5, 0.5]
    starts = [event["ts"] for event in trace["traceEvents"] if event["ph"] == "s" and event["pid"] == 0]
    assert starts == [0.5e6, 1.5e6]
