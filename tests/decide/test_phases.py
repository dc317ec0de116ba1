"""A run of phases: the course is the best of all courses, one phase is what `plan` answers, growing batches add up."""

import itertools
import math
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.answer import Plan
from planner.decide.course import Course, answer_of, course_of, held, shortest
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
from planner.decide.phases import Batch, Phase, PhasesAnswer
from planner.errors import Infeasible, SpecError
from planner.layout.evaluate import evaluate
from planner.report.runs import says_run
from planner.search.case import Case
from planner.search.search import plan
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware
from planner.specs.training import DocumentLength, Parallelism, SearchLimits, TrainingSpec
from planner.trainers.load import load_runtime
from tests.toys import toy_model

LIMITS = SearchLimits(micro_batch_size=(1, 2), vpp=(1, 2), switches="default", recompute=("none", "full"))
DAY = 86_400


def phase(name: str, batch: int, seq_length: int = 4096, tokens: float = 1e11, gpus: int = 16, *ramp: Batch) -> Phase:
    training = TrainingSpec(seq_length=seq_length, global_batch_size=batch, tokens=tokens)
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=gpus)
    case = Case(toy_model(16, hidden_size=4096), cluster, training, load_runtime("megatron"), LIMITS)
    return Phase(name, case, (*ramp, Batch(batch, tokens - sum(grown.tokens for grown in ramp))))


PHASES = (
    phase("first", 64, tokens=1e9), phase("second", 128), phase("third", 256), phase("long", 16, 65536, tokens=1e10),
)  # fmt: skip


@pytest.fixture(scope="module")
def course() -> Course:
    return course_of(PHASES, reshard_hours=0.5)


@pytest.fixture(scope="module")
def answer(course: Course) -> PhasesAnswer:
    return answer_of(course)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_shortest_is_the_best_of_all_sequences(data: st.DataObject) -> None:
    keys = [("a",), ("b",), ("c",)]
    number = data.draw(st.integers(1, 4))
    seconds = st.integers(0, 9).map(float)
    costs = [data.draw(st.dictionaries(st.sampled_from(keys), seconds, min_size=1)) for _ in range(number)]
    change = data.draw(st.fixed_dictionaries({(n, a, b): seconds for n in range(4) for a in keys for b in keys}))

    def total(path: tuple[Any, ...]) -> float:
        stops = sum(change[n, a, b] for n, (a, b) in enumerate(itertools.pairwise(path), start=1))
        return stops + sum(cost[key] for cost, key in zip(costs, path, strict=True))

    found_path = shortest(costs, lambda n, a, b: change[n, a, b])
    assert total(tuple(found_path)) == min(total(path) for path in itertools.product(*costs))


def test_the_course_is_the_best_of_all_sequences_of_layouts(course: Course) -> None:
    tables = [course.runs_of(number) for number in range(len(PHASES))]
    own = [len(plan.layouts) for plan in course.found]
    assert any(len(table) > number for table, number in zip(tables, own, strict=True))  # of other phases too

    def total(path: tuple[Any, ...]) -> float:
        stops = sum(course.change_s(n, a, b) for n, (a, b) in enumerate(itertools.pairwise(path), start=1))
        return stops + sum(table[key].wall_s for table, key in zip(tables, path, strict=True))

    best = min(map(total, itertools.product(*tables)))
    assert total(tuple(course.chosen())) == pytest.approx(best, rel=1e-12)


def test_dear_resharding_keeps_one_layout_as_long_as_it_can(course: Course) -> None:
    dear = replace(course, reshard_s=1e12)
    assert len({key[0] for key in dear.chosen()[:3]}) == 1
    assert len(set(dear.chosen()[:3])) == 1  # nothing but the batch changes: the job goes on


def test_one_phase_is_what_plan_answers() -> None:
    alone = PHASES[1]
    case = alone.case
    own = plan(case.model, case.cluster, case.training, limits=case.limits, runtime=case.runtime)
    (told,) = answer_of(course_of([alone])).phases
    assert told.plan.best == own.best
    assert told.plan.run_cost == own.run_cost
    assert (told.days, told.usd, told.days_interval) == (
        own.run_cost.days, own.run_cost.usd, own.run_cost.days_interval,
    )  # fmt: skip
    assert (told.step_s, told.tokens_per_s, told.mfu) == (own.step.step_s, own.step.tokens_per_s, own.step.mfu)
    assert (told.layout, told.stop_s, told.kept_days) == ("first", 0.0, None)


def test_sums_are_those_of_phases_and_stops(answer: PhasesAnswer) -> None:
    total, phases = answer.total, answer.phases
    assert total.tokens == sum(one.case.training.tokens or 0 for one in PHASES)
    assert total.days == pytest.approx(sum(one.days + one.stop_s / DAY for one in phases))
    assert total.stops_s == sum(one.stop_s for one in phases) > 0
    assert total.gpu_hours == pytest.approx(24 * 16 * total.days)
    assert total.usd == pytest.approx(sum((one.usd or 0) * (1 + one.stop_s / DAY / one.days) for one in phases))
    lows = sum((one.days_interval or (0, 0))[0] for one in phases)
    assert lows < total.days_interval[0] < total.days < total.days_interval[1]
    assert says_run(answer).startswith("211B tokens in 4 phases")


def test_stops_are_where_a_running_job_cannot_change(answer: PhasesAnswer) -> None:
    stops = {change.after: change for change in answer.changes}
    assert "long" in stops
    assert stops["long"].why == "sequence"
    for before, after in itertools.pairwise(answer.phases):
        alike = held(before.plan.best) == held(after.plan.best)
        assert after.layout == ("kept" if alike else "resharded")
        assert (after.name in stops) == (after.stop_s > 0)
    assert PHASES[3].changes_from(PHASES[2]) == ["sequence"]
    assert PHASES[2].changes_from(PHASES[1]) == []
    assert phase("more", 128, gpus=32).changes_from(PHASES[1]) == ["GPUs"]


def test_what_keeping_costs_is_what_evaluate_says(answer: PhasesAnswer) -> None:
    before, after = answer.phases[1:3]
    chosen, case = before.plan.parallelism, PHASES[2].case
    sizes = {name: getattr(chosen, name) for name in ("tp", "cp", "pp", "vpp", "dp", "micro_batch_size", "zero_stage")}
    stated = Parallelism(
        **sizes, schedule=chosen.schedule, layers_per_stage=_counts(before), recompute=chosen.recompute
    )
    priced = evaluate(case.model, case.cluster, case.training, stated, runtime=before.plan.runtime_spec)
    assert after.kept_days == pytest.approx(priced.run_cost.days, rel=1e-3)


def _counts(told: Any) -> tuple[int, ...]:
    chunks = [chunk for stage in told.plan.stages for chunk in stage.chunks]
    return tuple(last - first for first, last in sorted(chunks))


def test_a_batch_that_grows_takes_the_steps_of_each_size() -> None:
    ramp = (Batch(32, 1e10), Batch(64, 1e10), Batch(96, 1e10))
    grown = phase("grown", 128, 4096, 1e11, 16, *ramp)
    (told,) = answer_of(course_of([grown])).phases
    assert [batch.global_batch_size for batch in told.batches] == [32, 64, 96, 128]
    assert told.steps == pytest.approx(sum(batch.tokens / batch.global_batch_size / 4096 for batch in grown.batches))
    training_s = sum(batch.steps * batch.step_s for batch in told.batches)
    assert told.tokens_per_s == pytest.approx(1e11 / training_s)
    plain = told.plan.best.sustained
    factor = plain.step_s / told.step_s
    assert told.days == pytest.approx(factor * training_s / told.effective_fraction / DAY)
    per_microbatch = told.plan.parallelism.dp * told.plan.parallelism.micro_batch_size
    assert all(batch.global_batch_size % per_microbatch == 0 for batch in told.batches)


def test_a_batch_that_no_layout_runs_is_an_error_with_one_that_runs() -> None:
    grown = phase("grown", 128, 4096, 1e11, 16, Batch(1, 1e9))
    odd = replace(grown, case=grown.case.limited(dp=(8,)), batches=(Batch(3, 1e9), *grown.batches[1:]))
    with pytest.raises(SpecError, match="phase grown: rampup: no layout found runs every batch"):
        answer_of(course_of([odd]))


def test_a_phase_without_a_plan_is_named() -> None:
    tight = replace(PHASES[0], name="tight", case=PHASES[0].case.limited(dp=(5,), time_limit_s=0.1))
    with pytest.raises(Infeasible, match="phase tight: "):
        course_of([PHASES[0], tight])


def test_documents_alone_change_without_a_stop() -> None:
    masked = PHASES[1].case.runtime.model_copy(update={"masks_documents": True})
    lengths = (DocumentLength(length=500, share=1.0),)
    cases = [replace(PHASES[1].case, runtime=masked)] * 2
    training = cases[1].training.model_copy(update={"document_lengths": lengths})
    whole, packed = (
        replace(PHASES[1], case=cases[0]),
        replace(PHASES[1], name="packed", case=replace(cases[1], training=training)),
    )
    told = answer_of(course_of([whole, packed]))
    assert told.phases[1].document_fraction == pytest.approx(500 / 4096 * (1 - 500 / 4096 / 3))
    assert told.phases[1].step_s < told.phases[0].step_s
    assert told.phases[1].stop_s == 0.0


def test_a_layout_follows_the_checkpoint_that_it_can_load() -> None:
    # Megatron-LM's checkpoints of ZeRO-1 and of ZeRO-3 cannot be loaded as each other
    pinned = [replace(PHASES[n], case=PHASES[n].case.limited(zero_stage=(1, 3), pp=(1,))) for n in (1, 3)]
    one = replace(pinned[0], case=pinned[0].case.limited(zero_stage=(1,)))
    three = replace(pinned[1], case=pinned[1].case.limited(zero_stage=(3,)))
    assert {stage.plan.parallelism.zero_stage for stage in answer_of(course_of([one, pinned[1]])).phases} == {1}
    assert {stage.plan.parallelism.zero_stage for stage in answer_of(course_of([pinned[0], three])).phases} == {3}
    with pytest.raises(SpecError, match="phase long: no layout found for it can load the checkpoint of phase second"):
        answer_of(course_of([one, three]))


def test_what_is_saved_for_another_layout_is_said() -> None:
    narrow = replace(PHASES[1], case=PHASES[1].case.limited(tp=(2,), zero_stage=(1,), pp=(1,)))
    wide = replace(PHASES[3], case=PHASES[3].case.limited(tp=(4,), zero_stage=(1,), pp=(1,)))
    (change,) = answer_of(course_of([narrow, wide])).changes
    assert (change.resharded, change.gains_days, change.costs_days) == (True, None, 0.0)
    assert change.saved_as == "--dist-ckpt-optim-fully-reshardable"


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
    return MeasuredChoice(choice, step_s, 0.0)


def proposed(run: NextRun) -> str | None:
    place = run.proposed()
    return None if place is None else run.choices[place].name


def test_the_favourite_is_measured_first_and_then_the_informative_one(choice: Callable[..., TrialChoice]) -> None:
    best, sure, unsure = choice("best", 10.0, 0.1), choice("sure", 10.3, 0.01), choice("unsure", 10.3, 0.3, tp=1)
    choices = [best, sure, unsure]
    run = NextRun(2048, choices, days=30)
    assert proposed(run) == "best"
    for one in next_answer(run, "405b").layouts:  # nothing measured narrows an interval yet
        assert one.expected_s_interval == pytest.approx(choices[one.number].layout.step.step_s_interval)
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


def test_of_two_that_save_as_much_the_cheap_one_is_run(choice: Callable[..., TrialChoice], monkeypatch: Any) -> None:
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
    assert (until, in_order) == ([1, 1, 1, 1, 1, 2, 1], [1, 1, 1, 1, 1, 2, 1])
    tried, favourite = tool["ours_tries"](jobs[0], 30)
    assert len(tried) < len(jobs[0].layouts)
    assert jobs[0].regret(favourite) < 0.01
