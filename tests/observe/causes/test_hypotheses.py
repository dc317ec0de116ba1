"""The rows of causes and signs: every name of the contract, and nothing that hangs in the air."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from planner.observe.causes.hypotheses import HYPOTHESES
from planner.observe.causes.kinds import KINDS
from planner.observe.remedy.recipe_gap import CAUSE_OF

CONTRACT = (
    "no_ep_overlap", "host_bound", "straggler_rank", "slow_link", "unfused_kernels", "attention_kernel", "exposed_dp",
    "expert_imbalance", "data_stall", "clocks", "fragmentation", "recompute_unneeded", "bubble", "leak",
)  # fmt: skip
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", CONTRACT)
def test_every_name_of_the_contract_is_a_hypothesis(name: str) -> None:
    assert HYPOTHESES[name].name == name
    assert HYPOTHESES[name].source


@pytest.mark.parametrize("name", HYPOTHESES)
def test_a_cause_leaves_signs_that_exist_and_one_of_its_own_in_each_form(name: str) -> None:
    for form in HYPOTHESES[name].forms:
        assert form.leaves.keys() <= KINDS.keys()
        assert all(KINDS[sign].without < chance < 1 for sign, chance in form.leaves.items() if chance >= 0.5)
        assert any(KINDS[sign].is_own and chance >= 3 * KINDS[sign].without for sign, chance in form.leaves.items())


def test_most_jobs_have_nothing() -> None:
    assert sum(row.prior for row in HYPOTHESES.values()) < 1
    assert all(0 < row.prior <= 0.1 for row in HYPOTHESES.values())


def test_every_sign_of_its_own_speaks_of_a_cause_and_says_what_shows_it() -> None:
    left = {sign for row in HYPOTHESES.values() for form in row.forms for sign in form.leaves}
    assert left == KINDS.keys()
    assert all(kind.needs.says and kind.says for kind in KINDS.values())
    assert all(0 < kind.without <= 0.3 for kind in KINDS.values())


def test_every_switch_with_a_cause_of_its_own_is_a_sign_of_it() -> None:
    for cause in set(CAUSE_OF.values()):
        assert f"off_{cause}" in KINDS
        assert any(f"off_{cause}" in form.leaves for form in HYPOTHESES[cause].forms)


@pytest.mark.parametrize(
    ("name", "where", "says"),
    [
        ("straggler_rank", "rank 3", "rank 3 is slower than the others"),
        ("straggler_rank", "", "one rank is slower than the others"),
        ("data_stall", "rank 1", "rank 1: training waits for data"),
        ("slow_link", "tp", "a link is slower than it should be (tp)"),
    ],
)
def test_a_place_that_is_known_is_part_of_the_words(name: str, where: str, says: str) -> None:
    assert HYPOTHESES[name].at(where) == says


def test_the_page_has_the_tables_of_today() -> None:
    page = (ROOT / "docs" / "OBSERVE_CAUSES.md").read_text()
    assert runpy.run_path(str(ROOT / "scripts" / "causes"))["rewritten"](page) == page
