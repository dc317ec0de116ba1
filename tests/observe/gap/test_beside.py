"""Wall time per step less the steady step, in terms that add up to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from planner.observe.accounts import beside_steps
from planner.observe.observation import Observation, Term
from tests.observe.written import BEGIN_S, iterations, read


def adding_up(observation: Observation) -> tuple[Term, ...]:
    """The terms, which add up."""
    wall, terms = observation.wall, beside_steps(observation)
    assert observation.step_s is not None
    made = observation.num_steps - sum(restart.lost_steps for restart in observation.restarts)
    more_s = sum(term.seconds for term in terms)
    assert more_s == pytest.approx(wall.wall_s / made - observation.step_s, abs=1e-6 * observation.step_s)
    return terms


@given(
    seconds=st.lists(st.floats(0.5, 9.0), min_size=3, max_size=40), again=st.integers(0, 10), wait=st.floats(0, 500)
)  # fmt: skip
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_terms_add_up_for_any_log(seconds: list[float], again: int, wait: float, tmp_path: Path) -> None:
    lines = [*iterations(seconds)]
    if again:
        first = max(1, len(seconds) - again)
        lines += iterations(seconds[first - 1 :], first=first, begin_s=BEGIN_S + sum(seconds) + wait)
    seen = read(tmp_path, "\n".join(lines))
    assume(seen.step_s is not None)  # steps of two kinds have no median
    adding_up(seen)


def test_terms_are_what_happened(tmp_path: Path) -> None:
    seconds = [30.0] + [2.0] * 99
    seconds[50] = 12.0
    lines = [*iterations(seconds), *iterations([2.0] * 40, first=91, begin_s=BEGIN_S + sum(seconds) + 600)]
    terms = {term.term: term for term in adding_up(read(tmp_path, "\n".join(lines)))}
    made = 130
    assert terms["warm_up"].seconds == pytest.approx(28 / made)
    assert terms["slow_unexplained"].seconds == pytest.approx(10 / made)
    assert terms["interruptions"].seconds == pytest.approx(600 / made, rel=0.01)
    assert terms["steps_made_again"].seconds == pytest.approx(20 / made)
    assert "10 steps were made twice" in terms["steps_made_again"].evidence


def test_lines_without_times_have_none(tmp_path: Path) -> None:
    assert beside_steps(read(tmp_path, "2.0\n2.1\n2.0\n")) == ()
