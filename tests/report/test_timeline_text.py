"""Timelines drawn as text show each action where and for how long it ran."""

from __future__ import annotations

import pytest
from pages import printed

from planner.report.schedules import drawing, render_comparison, render_straggler, render_synthesis, render_timeline
from planner.schedule.compare import RankSeconds, compare, find_order, straggler_cost
from planner.schedule.orders import build_schedule

FOUR = (1.0,) * 4


def test_a_drawing_is_to_scale() -> None:
    """33 columns for 33 seconds: each forward one column, each backward two."""
    timeline = RankSeconds(FOUR, FOUR, FOUR).replayed(build_schedule("1f1b", 4, 1, 8))
    rows = [row.plain for row in drawing(timeline, 2 + 33)]
    assert rows == [
        "0 FFFF······B0FB1FB2FB3FB4·B5·B6·B7",
        "1 ·FFF····B0FB1FB2FB3FB4FB5·B6·B7··",
        "2 ··FF··B0FB1FB2FB3FB4FB5FB6·B7····",
        "3 ···FB0FB1FB2FB3FB4FB5FB6FB7······",
    ]


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
