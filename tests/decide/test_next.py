"""The next trial is the one that saves most of the run, the favourite first, and none where none pays."""

from __future__ import annotations

import math
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.answer import Plan
from planner.decide.next import (
    REPEAT_SIGMA,
    Belief,
    MeasuredChoice,
    NextRun,
    TrialChoice,
    choices_of,
    covariance,
    next_answer,
    trial_plan,
)

MakePlan = Callable[..., Plan]
TOOL = Path(__file__).parents[2] / "tools" / "replay_next"


@pytest.fixture
def choice(make_plan: MakePlan) -> Callable[..., TrialChoice]:
    """A layout with a step, an interval and sizes."""

    def made(name: str, step_s: float, width: float, oom: float = 0.0, **sizes: Any) -> TrialChoice:
        plan = make_plan(step_s=step_s, **sizes)
        ends = (step_s * math.exp(-width), step_s * math.exp(width))
        step = plan.step.model_copy(update={"step_s_interval": ends})
        layout = plan.best.model_copy(update={"step": step, "oom_probability": oom})
        return TrialChoice(name, layout.model_copy(update={"recipe": {"nan_checks": name}}), plan.runtime_spec)

    return made


def measured(choice: TrialChoice, step_s: float) -> MeasuredChoice:
    return MeasuredChoice(choice, step_s, 0.0, "log")


def proposed(run: NextRun) -> str | None:
    place = run.proposed()
    return None if place is None else run.choices[place].name


def test_the_favourite_is_measured_first_and_then_the_informative_one(choice: Callable[..., TrialChoice]) -> None:
    best, sure, unsure = choice("best", 10.0, 0.1), choice("sure", 10.3, 0.01), choice("unsure", 10.3, 0.3, tp=1)
    choices = [best, sure, unsure]
    assert proposed(NextRun(2048, choices, days=30)) == "best"
    run = NextRun(2048, choices, [measured(best, 10.0)], days=30)
    assert proposed(run) == "unsure"
    assert run.saved(2) > 10 * run.saved(1)
    # what was measured is told apart from what is expected, and a short step decides for the layout that has it
    answer = next_answer(run, "405b")
    assert [one.measured_s for one in answer.layouts if one.name == "best"] == [10.0]
    assert [outcome.layout for outcome in answer.outcomes] == ["unsure", "best"]
    assert sum(outcome.probability_fraction for outcome in answer.outcomes) == pytest.approx(1)
    assert 9.5 < (answer.outcomes[0].to_s or 0) < 10.3
    assert proposed(NextRun(2048, choices, [measured(best, 10.0), measured(unsure, 9.0)], days=30)) is None


@pytest.mark.parametrize(
    ("why", "widths", "changed"),
    [
        ("what is known is narrow", (0.001, 0.001), {}),
        ("the run is short", (0.1, 0.1), {"days": 0.01}),
        ("the trial is long", (0.1, 0.1), {"trial_steps": 10**6}),
        ("neither can be run", (0.1, 0.1), {"skipped": frozenset({0, 1})}),
        ("the other is far behind", (0.02, 0.02), {"others_s": 15.0}),
    ],
)
def test_it_stops_where_no_trial_pays(
    why: str, widths: tuple[float, float], changed: dict[str, Any], choice: Callable[..., TrialChoice]
) -> None:
    changed = {"days": 30, **changed}
    other = choice("other", changed.pop("others_s", 10.05), widths[1], tp=1)
    run = NextRun(2048, [choice("best", 10.0, widths[0]), other], **changed)
    answer = next_answer(run, "405b")
    assert (answer.proposed, answer.outcomes, answer.favourite) == (None, (), "best"), why
    assert answer.says.startswith("no trial pays")


def test_of_two_that_save_as_much_the_cheap_one_is_run(
    choice: Callable[..., TrialChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    best, *others = (choice(name, 10.0, 0.1, tp=tp) for name, tp in (("best", 8), ("dear", 2), ("cheap", 2)))
    run = NextRun(2048, [best, *others], [measured(best, 10.0)], days=30)
    assert run.saved(1) == pytest.approx(run.saved(2), rel=0.1)  # of two as fast the first is kept
    monkeypatch.setattr(NextRun, "trial_minutes", lambda self, place: {1: 2e4, 2: 1e4}.get(place, 1e4))
    assert proposed(run) == "cheap"
    assert run.trial_minutes(2) < run.trial_minutes(1)


def test_what_may_run_out_of_memory_is_worth_less(choice: Callable[..., TrialChoice]) -> None:
    run = NextRun(2048, [choice("best", 10.0, 0.1), choice("fits", 10.1, 0.1), choice("full", 10.1, 0.1, oom=0.5)])
    assert run.saved(2) == pytest.approx(run.saved(1) / 2)


def test_layouts_that_resemble_each_other_err_together(choice: Callable[..., TrialChoice]) -> None:
    near, same, far = (
        choice("", 10.0, 0.1, tp=tp, micro_batch_size=size).layout for tp, size in ((8, 1), (8, 1), (1, 8))
    )
    cov = covariance([near, same, far])
    spread = np.sqrt(np.diag(cov))
    corr = cov / np.outer(spread, spread)
    assert np.linalg.eigvalsh(cov).min() > 0
    assert 0.85 < corr[0, 1] < 0.99
    assert corr[0, 2] < 0.5 * corr[0, 1]
    # a measured step moves what resembles it by most of its error, and the other by less
    belief = Belief(np.zeros(3), cov).given(0, 0.1, REPEAT_SIGMA)
    assert belief.mean[0] == pytest.approx(0.1, abs=0.01)
    assert belief.mean[1] > 0.08 > belief.mean[2] > 0.01
    # the same by the formula for all at once
    both = Belief(np.zeros(3), cov).given(0, 0.1, 0.01).given(2, -0.1, 0.02)
    some = cov[:, [0, 2]] @ np.linalg.inv(cov[np.ix_([0, 2], [0, 2])] + np.diag([1e-4, 4e-4])) @ [0.1, -0.1]
    assert both.mean == pytest.approx(some)


def test_expected_regret_is_what_draws_lose(choice: Callable[..., TrialChoice]) -> None:
    run = NextRun(2048, [choice("best", 10.0, 0.1), choice("other", 10.0, 0.1, tp=1)])
    chances, regret = run.belief.fastest(0)
    deviation = math.sqrt(sum(np.diag(run.belief.covariance)) - 2 * run.belief.covariance[0, 1])
    assert chances == pytest.approx([0.5, 0.5], abs=0.03)
    assert regret == pytest.approx(deviation / math.sqrt(2 * math.pi), rel=0.05)


def test_a_trial_is_a_plan_that_export_takes(searched: Plan) -> None:
    choices = choices_of(searched)
    assert [choice.layout for choice in choices[: 1 + len(searched.alternatives)]] == [
        searched.best,
        *searched.alternatives,
    ]
    switched = choices[1 + len(searched.alternatives) :]
    assert {"overlap_param_gather"} <= {choice.name.split()[-1].partition("=")[0] for choice in switched}
    run = NextRun(8, choices)
    trial = trial_plan(searched, run, len(choices) - 1)
    assert trial.best.recipe == choices[-1].layout.recipe
    assert len(trial.alternatives) == len(choices) - 1
    runtimes = {other.runtime_spec or trial.runtime_spec for other in trial.alternatives}
    assert searched.runtime_spec in runtimes


@pytest.fixture(scope="module")
def searched() -> Plan:
    from planner import plan
    from planner.specs.cluster import ClusterSpec
    from planner.specs.registry import load_hardware, load_model
    from planner.specs.training import TrainingSpec

    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    return plan(load_model("llama-3.2-1b"), cluster, TrainingSpec(seq_length=4096, global_batch_size=64))


def test_a_few_published_jobs_are_replayed() -> None:
    tool = runpy.run_path(str(TOOL))
    jobs = tool["jobs"]("nemo-2022", "mcore-tests")
    tool["next_run"].__globals__["RUNTIME"] = None
    until = [tool["until"](job, tool["ours_tries"](job)[0]) for job in jobs]
    in_order = [1 + int(job.good.argmax()) for job in jobs]
    assert (until, in_order) == ([1, 1, 1, 1, 1, 2], [1, 1, 1, 1, 1, 2])
    tried, favourite = tool["ours_tries"](jobs[0], 30)
    assert len(tried) < len(jobs[0].layouts)
    assert jobs[0].regret(favourite) < 0.01
