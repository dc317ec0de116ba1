"""Waiting and going on lose as much at the break-even, and each less on its own side of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.months.losses import Fact, stated
from planner.months.whole_run import Standstill, break_even_s, going_on_s, return_pays_s, waiting_s

seconds = st.floats(1.0, 1e5)
fractions = st.floats(0.01, 0.99)


@given(back_s=seconds, detection_s=st.floats(0.0, 1.0), save_s=seconds, again_s=seconds, fraction=fractions)
def test_both_lose_as_much_there(
    back_s: float, detection_s: float, save_s: float, again_s: float, fraction: float
) -> None:
    wait_s = break_even_s(back_s, fraction, save_s)

    def loses(repair_s: float) -> tuple[float, float]:
        waits = waiting_s(repair_s, detection_s, again_s)
        return float(waits), float(going_on_s(repair_s, back_s, fraction, save_s + again_s))

    waits, goes_on = loses(wait_s)
    assert waits == pytest.approx(goes_on)
    waits, goes_on = loses(1.5 * wait_s)
    assert goes_on < waits
    waits, goes_on = loses(0.7 * wait_s)
    assert waits < goes_on


@given(return_s=seconds, fraction=fractions)
def test_a_return_pays_once_it_has_won_back_its_stop(return_s: float, fraction: float) -> None:
    runs_s = return_pays_s(return_s, fraction)
    assert runs_s is not None
    assert runs_s - return_s == pytest.approx(fraction * runs_s)
    assert return_pays_s(return_s, 1.0) is None


def test_parts_add_up_and_err_independently() -> None:
    parts = {"start": Fact(value=300, low=100, high=900, source="s"), "read": stated(20.0)}
    still = Standstill(parts)
    assert still.value_s == 320
    assert still.interval_s == (120, 920)
    both = Standstill({**parts, "again": parts["start"]})
    assert both.value_s - both.interval_s[0] == pytest.approx(200 * 2**0.5)
