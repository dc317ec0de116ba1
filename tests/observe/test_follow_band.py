"""When a run has left its band: how soon, and how seldom without a reason."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest

from planner.observe.follower import Band, BandWatch

BAND = Band(9.0, 10.0, "plan.json")


def watched(seconds: Iterable[float], covers: int = 1, **changes: object) -> tuple[BandWatch, int | None]:
    """The watch after the first step of the alarm, and the number of that step."""
    watch = BandWatch(**{"band": BAND, "allowed_steps": 20, **changes})  # type: ignore[arg-type]
    for number, value in enumerate(seconds, start=1):
        watch.take(value, covers, False)
        if watch.rings:
            return watch, number * covers
    return watch, None


def noisy(level_s: float, count: int, rng: random.Random) -> Iterator[float]:
    """Steps as MLPerf's 42 logs of 405B have them: noise of 0.4% whose neighbours are alike, and 3% that take longer,
    by 10% in the mean (in those logs CV 3.4%, slowest ÷ median 1.43)."""
    deviation = 0.0
    for _ in range(count):
        deviation = 0.5 * deviation + rng.gauss(0, 0.004 * 0.75**0.5)
        slow = 1 + rng.expovariate(10) if rng.random() < 0.03 else 1.0
        yield level_s * (1 + deviation) * slow


@pytest.mark.parametrize("level", [0.905, 0.95, 0.98, 0.995])
def test_no_alarm_inside_of_the_band(level: float) -> None:
    # 10 runs of 2,000 steps each, up to half a percent from the band's end
    rung = [watched(noisy(10 * level, 2_000, random.Random(seed)))[1] for seed in range(10)]
    assert rung == [None] * 10


def test_a_run_that_becomes_slow_rings_after_so_many_steps() -> None:
    rng = random.Random(1)
    steps = [*noisy(9.5, 300, rng), *noisy(10.4, 100, rng)]
    watch, at = watched(steps)
    assert (watch.side, watch.place) == (1, "above")
    assert at is not None
    assert 320 <= at <= 325


def test_a_run_that_is_slow_from_its_begin_has_a_warm_up() -> None:
    assert watched([10.5] * 100)[1] == 44
    assert watched([30.0, 20.0, *[9.5] * 50, *[10.5] * 22])[1] == 74


def test_one_in_ten_slow_steps_is_no_alarm() -> None:
    assert watched(([9.5] * 9 + [19.0]) * 40)[1] is None
    assert watched(([9.5] * 5 + [12.0] * 15) * 20)[1] is None


def test_short_steps_have_to_be_out_for_two_minutes_unless_far() -> None:
    band = Band(0.45, 0.5, "plan.json")
    assert watched([0.47] * 30 + [0.53] * 100, band=band)[1] is None
    assert watched([0.47] * 30 + [0.53] * 300, band=band)[1] == 30 + 2 + 227
    assert watched([0.47] * 30 + [0.7] * 100, band=band)[1] == 52


def test_below_the_band_rings_unless_only_slow_ones_do() -> None:
    watch, at = watched([9.5] * 10 + [8.5] * 30)
    assert (watch.place, at) == ("below", 32)
    assert watched([9.5] * 10 + [8.5] * 30, only_slow=True)[1] is None


def test_steps_that_the_log_explains_are_not_counted() -> None:
    watch = BandWatch(5, BAND)
    for number in range(200):
        watch.take(9.5 if number % 2 else 15.0, 1, number % 2 == 0)
    assert (watch.place, watch.out_steps) == ("in band", 0)


def test_lines_that_are_means_need_three() -> None:
    assert watched([9.5] * 10 + [12.0] * 10, covers=10)[1] == 150
    assert watched([9.5] * 10 + [12.0] * 2 + [9.5] * 10, covers=10)[1] is None


def test_digits_that_are_not_printed_are_no_alarm() -> None:
    assert watched([10.04] * 100, precision_fraction=0.005)[1] is None
    assert watched([10.2] * 100, precision_fraction=0.005)[1] is not None


def test_a_start_begins_anew() -> None:
    watch, _ = watched([9.5] * 10 + [12.0] * 10)
    assert watch.out_steps > 0
    watch.start()
    assert (watch.out_steps, watch.place) == (0, "warm-up")
    for _ in range(20):
        watch.take(12.0, 1, False)
    assert watch.out_steps == 0
