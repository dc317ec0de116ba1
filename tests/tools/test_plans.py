"""The planner's choices beside published layouts: never slower, or it says why."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from planner.answer import Plan
from planner.errors import SpecError
from planner.search.search import plan
from planner.specs.training import SearchLimits
from planner.validate.rows import load_rows
from planner.validate.score import Scored, evaluate_rows
from tools.accuracy import plans
from tools.accuracy.__main__ import main
from tools.accuracy.plans import Beside, counted, gains, plans_beside


@pytest.fixture(scope="module")
def bloom() -> list[Scored]:
    return evaluate_rows([row for row in load_rows() if row.family == "bloom"])


@pytest.fixture(scope="module")
def beside(bloom: list[Scored]) -> Beside:
    (only,) = plans_beside(bloom, time_limit_s=600)  # no clock decides a test
    return only


def varied(one: Scored, **layout: object) -> Scored:
    """The same job in another layout."""
    run = one.row.run
    parallelism = {**run["parallelism"], **layout}
    (changed,) = evaluate_rows([one.row.model_copy(update={"run": {**run, "parallelism": parallelism}})])
    return changed


def test_the_choice_is_no_slower_than_what_was_run(beside: Beside) -> None:
    assert beside.chosen is not None
    assert beside.speedup is not None
    assert beside.speedup >= 1 / (1 + plans.GAP)
    assert beside.note == ""
    assert beside.chosen.cluster.num_gpus == beside.row.run["num_gpus"]


def test_a_job_is_searched_once_however_often_it_was_published(
    bloom: list[Scored], beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches, calls = [], []

    def counting(*args: object, **kwargs: object) -> object:
        searches.append(args)
        return beside.chosen

    monkeypatch.setattr(plans, "plan", counting)
    layouts = plans_beside([bloom[0], varied(bloom[0], tp=8, etp=8, pp=12, dp=4)], lambda: calls.append(1))
    assert (len(layouts), len(searches), len(calls)) == (2, 1, 2)


def test_rows_that_are_not_scored_are_not_compared() -> None:
    rows = [row for row in load_rows() if row.family == "megatron-sc21"]
    assert len(counted(evaluate_rows(rows))) == sum(row.counts for row in rows) < len(rows)


def slower(beside: Beside, factor: float, outcome: str = "proven") -> object:
    """The plan as if its step took `factor` times the published one's."""
    plan = beside.chosen
    assert plan is not None
    assert plan.search is not None
    step = plan.step.model_copy(update={"step_s": factor * beside.published.step.step_s})
    return plan.model_copy(
        update={
            "best": plan.best.model_copy(update={"step": step}),
            "search": plan.search.model_copy(update={"outcome": outcome}),
        }
    )


@pytest.mark.parametrize(
    ("factor", "outcome", "layout", "note"),
    [
        (1.005, "proven", {}, ""),
        (1.02, "proven", {}, "slower"),
        (1.02, "feasible", {}, "out of time"),
        (1.02, "proven", {"dp": 4}, "not searched"),
        (1.02, "proven", {"pp": 1, "dp": 64}, "does not fit"),
    ],
)
def test_a_slower_choice_is_explained_or_a_finding(
    bloom: list[Scored],
    beside: Beside,
    monkeypatch: pytest.MonkeyPatch,
    factor: float,
    outcome: str,
    layout: dict[str, object],
    note: str,
) -> None:
    changed = varied(bloom[0], **{"tp": 2, "etp": 2, "pp": 24, "dp": 8, **layout})
    assert changed.layout is not None
    against = replace(beside, published=changed.layout)
    monkeypatch.setattr(plans, "plan", lambda *args, **kwargs: slower(against, factor, outcome))
    (one,) = plans_beside([changed])
    assert one.note == note


def test_a_layout_that_the_trainer_refuses_is_no_finding(
    bloom: list[Scored], beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stated,) = bloom
    assert stated.layout is not None
    warnings = ("megatron refuses this layout: of its many reasons, one",)
    refused = replace(stated, layout=stated.layout.model_copy(update={"warnings": warnings}))
    monkeypatch.setattr(plans, "plan", lambda *args, **kwargs: slower(beside, 2.0))
    (one,) = plans_beside([refused])
    assert one.note == "refused"


def test_gains_leave_out_what_cannot_be_run(beside: Beside) -> None:
    misfit = replace(beside, note="does not fit", published=beside.published.model_copy(update={"fits": False}))
    family, everything = gains([beside, misfit, replace(beside, note="no plan", chosen=None)])
    assert family.name == "bloom"
    assert everything.name == "all"
    assert everything.num_rows == 3
    assert (everything.num_misfits, everything.num_unfinished, everything.num_slower) == (1, 1, 0)
    assert everything.median == everything.least == beside.speedup


def test_a_family_without_anything_comparable_has_no_median(beside: Beside) -> None:
    (family, _) = gains([replace(beside, note="refused")])
    assert (family.median, family.least, family.least_id, family.num_refused) == (None, None, None, 1)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches for plans beside runs end by themselves: a busy machine chooses the same in more time."""

    def chosen(*job: Any, limits: SearchLimits, **more: Any) -> Plan:
        return plan(*job, limits=limits.model_copy(update={"time_limit_s": 3600.0}), **more)

    monkeypatch.setattr(plans, "plan", chosen)


@pytest.mark.usefixtures("unhurried")
def test_plans_stand_beside_what_was_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(plans, "_note", lambda *args: "slower")
    main(["plans", "--family", "bloom"])
    out = capsys.readouterr().out
    assert "bloom-176b-384gpu" in out
    assert "slower" in out
    main(["plans", "--family", "bloom", "--json"])
    answer = json.loads(capsys.readouterr().out)
    (one,) = answer["plans"]
    assert one["speedup"] == pytest.approx(one["published_step_s"] / one["chosen_step_s"])
    assert one["published"]["dp"] * one["published"]["tp"] * one["published"]["pp"] == 384
    assert [gain["name"] for gain in answer["plan_families"]] == ["bloom", "all"]


def test_a_source_that_is_not_there_is_named() -> None:
    with pytest.raises(SpecError, match="blom"):
        main(["plans", "--family", "blom"])
