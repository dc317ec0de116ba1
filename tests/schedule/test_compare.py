"""The same ranks under every schedule."""

from __future__ import annotations

import pytest

from planner.schedule.compare import RankSeconds, compare, find_order
from planner.schedule.orders import SCHEDULES, build_schedule


def test_chunks_share_their_ranks_seconds() -> None:
    ranks = RankSeconds((1.0, 2.0), (2.0, 4.0), (0.5, 1.0))
    looped = ranks.durations((0, 1, 0, 1))
    assert looped.forward_s == [0.5, 1.0, 0.5, 1.0]
    assert ranks.durations((0, 1, 1, 0)).input_grad_s == [1.0, 2.0, 2.0, 1.0]
    assert ranks.durations((0, 1, 1, 0), num_directions=2).weight_grad_s == [0.5, 1.0]


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"none", "forward-only"}))
def test_every_schedule_does_the_same_work(name: str) -> None:
    ones = (1.0,) * 4
    row = next(row for row in compare(RankSeconds(ones, ones, ones), 8) if row.name == name)
    assert row.timeline.busy_s.tolist() == pytest.approx([8 * 3] * 4)
    assert 0 <= row.bubble_fraction < 0.4


def test_chunks_are_as_many_as_asked_where_the_schedule_can() -> None:
    ones = (1.0,) * 4
    chunks = {row.name: row.vpp for row in compare(RankSeconds(ones, ones, ones), 8, vpp=3)}
    assert (chunks["1f1b"], chunks["interleaved-1f1b"], chunks["zb-v"], chunks["zb-h1"]) == (1, 3, 2, 3)


def test_one_rank_needs_no_pipeline() -> None:
    rows = {row.name: row for row in compare(RankSeconds((1.0,), (1.0,), (1.0,)), 8)}
    assert rows["none"].step_s == 24
    assert "interleaved-1f1b" not in rows


def test_an_order_may_use_either_placement() -> None:
    uneven = RankSeconds((1.0, 1.2, 0.9, 1.1), (1.0, 1.2, 0.9, 1.1), (0.9, 1.0, 0.8, 1.0))
    found = find_order(uneven, 8, vpp=2, in_flight_microbatches=4.0)
    for name in ("interleaved-1f1b", "zb-v", "zb-h1"):
        timeline = uneven.replayed(build_schedule(name, 4, 2, 8))
        if timeline.peak_in_flight_microbatches.max() <= 4:
            assert found.makespan_s <= timeline.makespan_s
