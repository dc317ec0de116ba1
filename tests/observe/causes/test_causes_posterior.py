"""Laws of the probabilities of causes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.observe.causes.hypotheses import HYPOTHESES
from planner.observe.causes.kinds import KINDS
from planner.observe.causes.posterior import ALL, Posterior, form_of, leaves, possible_forms
from planner.observe.causes.rank import speaking
from planner.observe.causes.signs.sign import LEAST, MOST, Sign, large, sure

STRENGTHS = st.dictionaries(st.sampled_from(sorted(KINDS)), st.floats(LEAST, MOST), max_size=12)


def signs(**strengths: float) -> dict[str, Sign]:
    return {name: Sign(strength, name) for name, strength in strengths.items()}


@settings(max_examples=15, deadline=None)
@given(strengths=STRENGTHS)
def test_the_weights_of_all_sets_add_up_to_one(strengths: dict[str, float]) -> None:
    found = Posterior.of(signs(**strengths))
    assert found.weights.sum() == pytest.approx(1.0)
    assert found.weights[0] >= 0
    assert all(0 <= found.likelihood(name) <= 1 for name in HYPOTHESES)


def test_without_signs_a_cause_is_as_likely_as_before() -> None:
    found = Posterior.of({})
    for name, row in HYPOTHESES.items():
        assert found.likelihood(name) == pytest.approx(row.prior, rel=0.1)


@pytest.mark.parametrize("sign", [sign for sign, kind in KINDS.items() if kind.is_own])
def test_a_sign_never_lowers_the_cause_that_leaves_it_most(sign: str) -> None:
    likely = max(ALL, key=lambda key: leaves(form_of(key), sign))
    without, absent, seen = (Posterior.of(found) for found in ({}, signs(**{sign: LEAST}), signs(**{sign: MOST})))
    assert absent.likelihood(likely[0]) <= without.likelihood(likely[0]) <= seen.likelihood(likely[0])
    tells = leaves(form_of(likely), sign) >= 3 * KINDS[sign].without
    assert speaking(form_of(likely), signs(**{sign: MOST})) == [sign] * tells


def test_a_larger_sign_is_surer() -> None:
    small, big = (large(times * 0.05, 0.05, 0.001, "late", 1.0, "rank 1") for times in (1.2, 6.0))
    assert small.strength == pytest.approx(big.strength)
    first, second = (Posterior.of({"comes_late": sign}).likelihood("straggler_rank") for sign in (small, big))
    assert first < second
    assert second > 0.75


def test_two_causes_may_both_be_sure() -> None:
    found = Posterior.of({"grows": large(9, 1, 0.1, ""), "comes_late": large(9, 1, 0.1, "")})
    assert min(found.likelihood("leak"), found.likelihood("straggler_rank")) > 0.75


def test_a_cause_that_explains_all_leaves_less_to_the_others() -> None:
    exposed = signs(exposed_dp=MOST, unhidden_dp=MOST)
    overlap, link = (Posterior.of(exposed | more) for more in (signs(slow_dp=LEAST), signs(slow_dp=MOST)))
    assert overlap.likelihood("exposed_dp") > overlap.likelihood("slow_link")
    assert link.likelihood("slow_link") > link.likelihood("exposed_dp")


def test_forms_of_an_axis_that_the_job_lacks_are_left_out() -> None:
    left = possible_forms({"ep": False, "pp": True})
    assert "expert_imbalance" not in {name for name, _ in left}
    assert "bubble" in {name for name, _ in left}
    assert ("straggler_rank", 0) in left


def test_strength_is_the_normal_distribution_s() -> None:
    assert sure(1.0, 1.0, 0.1) == pytest.approx(0.5)
    assert sure(1.1, 1.0, 0.1) == pytest.approx(0.841, abs=0.001)
    assert (sure(9, 1, 0.1), sure(-9, 1, 0.1)) == pytest.approx((MOST, LEAST))
    assert (sure(2, 1, 0), sure(0, 1, 0)) == pytest.approx((MOST, LEAST))
