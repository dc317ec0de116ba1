"""Clocks of several ranks: how far one is ahead of another, and by how much that may be wrong."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch", reason="needs the probe extra (torch)")

from planner.probe.rank.pipeline import offset_of


def sums(seed: int, ahead_s: float, slowest_s: float) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Times at which two ranks enter and leave ten sums, each by its own clock; neither leaves before both are in."""
    draw, now_s, own, first = random.Random(seed), 0.0, list[tuple[float, float]](), list[tuple[float, float]]()
    for _ in range(10):
        entered = [now_s + draw.expovariate(1 / slowest_s) for _ in range(2)]
        left = [max(entered) + 1e-6 + draw.expovariate(1 / slowest_s) for _ in range(2)]
        own.append((entered[0] + ahead_s, left[0] + ahead_s))
        first.append((entered[1], left[1]))
        now_s = max(left)
    return own, first


@pytest.mark.parametrize("ahead_s", [0.0, 3e-4, -7200.0])
@pytest.mark.parametrize("slowest_s", [1e-5, 1e-3])
def test_the_offset_is_never_wrong_by_more_than_is_said(ahead_s: float, slowest_s: float) -> None:
    errors = []
    for seed in range(100):
        own, first = sums(seed, ahead_s, slowest_s)
        offset_s, error_s = offset_of(own, first)
        assert abs(offset_s - ahead_s) <= error_s + 1e-9
        errors.append(error_s)
    assert sum(errors) / len(errors) < slowest_s, "ten sums say more than a usual one"


def test_one_quick_sum_is_enough() -> None:
    """The others are late on either side, as where a host is interrupted."""
    own = [(100.0, 109.0), (110.0, 110.001), (111.0, 125.0)]
    first = [(8.0, 9.0), (10.0, 10.001), (20.0, 25.0)]
    offset_s, error_s = offset_of(own, first)
    assert offset_s == pytest.approx(100.0)
    assert error_s == pytest.approx(0.001)
