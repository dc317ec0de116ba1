"""The waterfall adds up to the difference of the steps, and names the thing that was changed.

Wall time per step less the steady step, in terms that add up to it.
Runs of a small GPT with something wrong on purpose (`tools/record_faults`): the cause is named first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from priced_plans import priced_plan
from tables import beside

from planner.answer import Plan
from planner.layout.candidate import Candidate
from planner.layout.price import reprice
from planner.observe.accounts import STEP_TERMS, Account, GroupExchanges, beside_steps, planned, waterfall
from planner.observe.case import ObservedCase, recipe_terms, stated_otherwise
from planner.observe.judge import judged, observed_of, of_run, predicted, read_observed
from planner.observe.log_reader import observe
from planner.observe.observation import JobFacts, Observation, Observed, SourceFile, Term
from planner.observe.traces.recorded import ObservedFiles, Recorded, kinds_of, observation_of, read_recorded
from tests.made_steps import trace_of
from tests.observe.written import BEGIN_S, iterations, read

TABLES = beside(__file__)

JOBS: dict[str, dict[str, Any]] = TABLES["jobs"]
NUM_GPUS = 16


@cache
def plan_of(job: str) -> Plan:
    return priced_plan(num_gpus=NUM_GPUS, **JOBS[job])


@cache
def candidate_of(job: str) -> Candidate:
    plan = plan_of(job)
    return reprice(plan, plan.best)


def accounts(candidate: Candidate) -> list[Account]:
    """The account of each stage."""
    run = candidate.run()
    return [planned(candidate, run, stage, "") for stage in range(int(candidate.shape.pp))]


def recorded(
    folder: Path, job: str, traced: dict[int, Account], late: dict[int, dict[str, float]] | None = None
) -> Recorded:
    """Traces of some ranks, each of which runs an account of its stage."""
    shape, paths = candidate_of(job).shape, []
    tp, width = int(shape.tp), int(shape.stage_stride)
    for rank, account in traced.items():
        first, stage_first = rank // tp * tp, rank // width * width
        groups = {
            "tp": list(range(first, first + tp)),
            "dp": list(range(rank % tp + stage_first, stage_first + width, tp)),
            "ep": list(range(stage_first, stage_first + width)),
            "pp": [rank % width + width * stage for stage in range(int(shape.pp))],
            "world": list(range(NUM_GPUS)),
        }
        trace = trace_of(account, rank, NUM_GPUS, groups, (late or {}).get(rank))
        paths.append(str(trace.write(folder / f"rank{rank}.json")))
    return read_recorded(kinds_of(paths))


def held(job: str, files: Recorded, step_s: float | None = None) -> Observed:
    """The answer for traces, with a log whose step is given, or without one."""
    observation = observation_of(files)
    if step_s is not None:
        sources = (*observation.sources, SourceFile(path="a.log", format="megatron"))
        observation = observation.model_copy(update={"sources": sources, "step_s": step_s})
    return ObservedFiles(**dict(told(observation, plan_of(job), files)), recorded=files)


def told(
    observation: Observation, plan: Plan, files: Recorded | None = None, earlier: Observed | None = None
) -> Observed:
    """The gap alone, to the plan or to an earlier run."""
    prediction = predicted(plan, "plan.json") if earlier is None else of_run(earlier, "observed.json")
    case = ObservedCase(observation, files, prediction, plan, earlier)
    return Observed(observation=observation, prediction=prediction, waterfall=waterfall(case), plan=plan)


def adds_up(answer: Observed) -> None:
    assert answer.observation.step_s is not None
    gap_s = answer.observation.step_s - answer.prediction.step_s
    assert sum(term.seconds for term in answer.waterfall) == pytest.approx(gap_s, abs=1e-8 * answer.observation.step_s)
    for term in answer.waterfall:
        assert term.evidence
        assert term.term in STEP_TERMS
        assert term.recoverable_s is None or 0 <= term.recoverable_s <= max(0.0, term.seconds)


def largest(answer: Observed) -> Term:
    return max(answer.waterfall, key=lambda term: abs(term.seconds))


@pytest.mark.parametrize("job", JOBS)
def test_an_account_adds_up_to_the_step_of_every_stage(job: str) -> None:
    for account in accounts(candidate_of(job)):
        assert account.total_s == pytest.approx(plan_of(job).step.step_s, rel=1e-9)
        assert min(account.parts.values()) > -1e-9
        assert all(0 <= one.hidden_s <= one.busy_s * (1 + 1e-9) for one in account.exchanges.values())


@pytest.mark.parametrize("job", JOBS)
def test_a_run_that_is_as_planned_has_no_gap(job: str, tmp_path: Path) -> None:
    width = int(candidate_of(job).shape.stage_stride)
    for stage, account in enumerate(accounts(candidate_of(job))):
        answer = held(job, recorded(tmp_path, job, {stage * width: account}))
        assert sum(abs(term.seconds) for term in answer.waterfall) < 1e-5 * plan_of(job).step.step_s


SCALES = st.floats(0.3, 3.0)


@given(
    job=st.sampled_from(("pipeline", "one stage", "mixture")), factors=st.lists(SCALES, min_size=12, max_size=12),
    hiding=st.lists(st.floats(0, 1), min_size=4, max_size=4), log=st.none() | SCALES,
)  # fmt: skip
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_terms_add_up_for_any_trace(
    job: str, factors: list[float], hiding: list[float], log: float | None, tmp_path: Path
) -> None:
    """Every part and every exchange of another length, more or less of it hidden, with a log or without one."""
    account = accounts(candidate_of(job))[-1]
    parts = {name: seconds * factor for (name, seconds), factor in zip(account.parts.items(), factors, strict=False)}
    exchanges, room_s = {}, parts["compute_products"]
    for (group, one), factor, share in zip(account.exchanges.items(), factors, hiding, strict=False):
        busy_s = one.busy_s * factor
        hidden_s = share * min(busy_s, 0.4 * room_s)
        exchanges[group] = GroupExchanges(busy_s, hidden_s, None)
    rank = int(candidate_of(job).shape.stage_stride) * (int(candidate_of(job).shape.pp) - 1)
    files = recorded(tmp_path, job, {rank: replace(account, parts=parts, exchanges=exchanges)})
    step_s = None if log is None else log * plan_of(job).step.step_s
    adds_up(held(job, files, step_s))


TIMERS = ("forward_backward_s", "forward_s", "backward_s", "gradients_s", "parameters_s", "optimizer_s")


@given(seconds=st.dictionaries(st.sampled_from(TIMERS), st.floats(0, 5)), rest=st.floats(0, 2))
@settings(max_examples=20, deadline=None)
def test_terms_add_up_for_any_timers(seconds: dict[str, float], rest: float) -> None:
    step_s = sum(seconds.values()) + rest + 0.1
    breakdown = {**seconds, "unattributed_s": rest + 0.1}
    observation = Observation(sources=(SourceFile(path="a", format="b"),), step_s=step_s, breakdown=breakdown)
    adds_up(told(observation, plan_of("pipeline")))
    earlier = told(observation, plan_of("pipeline"))
    slower = observation.model_copy(update={"step_s": step_s + 1, "breakdown": breakdown | {"optimizer_s": 1.0}})
    adds_up(told(slower, plan_of("pipeline"), earlier=earlier))


def test_timers_that_are_as_planned_have_no_gap() -> None:
    plan = plan_of("pipeline")
    step, tail_s = plan.step.breakdown, candidate_of("pipeline").outside.tail_s
    breakdown = {"gradients_s": step.exposed_dp_s, "optimizer_s": step.optimizer_s, "unattributed_s": tail_s}
    breakdown["forward_backward_s"] = plan.step.step_s - sum(breakdown.values())
    observation = Observation(sources=(SourceFile(path="a", format="b"),), step_s=plan.step.step_s, breakdown=breakdown)
    assert told(observation, plan).waterfall == ()
    slow = observation.model_copy(
        update={"step_s": plan.step.step_s + 1, "breakdown": breakdown | {"optimizer_s": step.optimizer_s + 1}}
    )
    (term,) = told(slow, plan).waterfall
    assert (term.term, term.seconds, term.recoverable_s) == ("optimizer", pytest.approx(1), pytest.approx(1))


def test_a_step_alone_is_not_attributed() -> None:
    plan = plan_of("pipeline")
    observation = Observation(sources=(SourceFile(path="a", format="b"),), step_s=plan.step.step_s + 1)
    (term,) = told(observation, plan).waterfall
    assert (term.term, term.seconds, term.recoverable_s) == ("unattributed", pytest.approx(1), None)
    known = Term(term="recipe: ep_overlap", seconds=0.25, evidence="the log says so")
    cut = waterfall(ObservedCase(observation, None, predicted(plan, "plan.json"), plan), (known,))
    assert [(one.term, one.seconds) for one in cut] == [
        ("recipe: ep_overlap", 0.25), ("unattributed", pytest.approx(0.75)),
    ]  # fmt: skip


def with_tiers(candidate: Candidate, change: Callable[[int], float]) -> Candidate:
    """The layout on links of other rates: `change` has the factor of each tier."""
    hardware = candidate.pricing.cluster.hardware
    tiers = tuple(
        tier.model_copy(update={"gb_per_s": tier.gb_per_s * change(number)})
        for number, tier in enumerate(hardware.tiers)
    )
    cluster = candidate.pricing.cluster.changed(hardware=hardware.model_copy(update={"tiers": tiers}))
    return candidate.priced_as(replace(candidate.pricing, cluster=cluster))


@pytest.mark.parametrize(("job", "tier", "group"), [("one stage", 0, "tp"), ("sharded", 1, "dp"), ("experts", 1, "ep")])
def test_a_link_of_half_its_rate_is_the_term_of_its_group(job: str, tier: int, group: str, tmp_path: Path) -> None:
    slow = with_tiers(candidate_of(job), lambda number: 0.5 if number == tier else 1.0)
    account = accounts(slow)[0]
    peers = {0: account, 1: account} if group != "dp" else {0: account, 8: account}
    answer = held(job, recorded(tmp_path, job, peers))
    adds_up(answer)
    term = largest(answer)
    was, became = accounts(candidate_of(job))[0].exchanges[group], account.exchanges[group]
    shown_s = (became.busy_s - became.hidden_s) - (was.busy_s - was.hidden_s)
    assert term.term == f"{group}_link_rate"
    assert shown_s > 0.01 * plan_of(job).step.step_s
    terms = {one.term: one.seconds for one in answer.waterfall}
    assert term.seconds + terms.get(f"{group}_overlap", 0.0) == pytest.approx(shown_s, rel=0.01)
    alone = held(job, recorded(tmp_path, job, {0: account}))  # which does not tell transfers from waits
    assert largest(alone).term == f"{group}_exchanges"


def test_a_rank_that_comes_late_is_skew_of_the_others(tmp_path: Path) -> None:
    account = accounts(candidate_of("one stage"))[0]
    wait_s = 0.2
    one = account.exchanges["tp"]
    waiting = replace(
        account, exchanges={**account.exchanges, "tp": GroupExchanges(one.busy_s + wait_s, one.hidden_s, wait_s)}
    )
    parts = {**account.parts, "compute_products": account.parts["compute_products"] + wait_s}
    late = replace(account, parts=parts)
    # the late rank computes longer, before its exchange
    traced = recorded(
        tmp_path, "one stage", {0: waiting, 1: replace(waiting, parts=dict(waiting.parts))}, {1: {"tp": wait_s}}
    )
    answer = held("one stage", traced)
    adds_up(answer)
    assert late.total_s == pytest.approx(waiting.total_s)
    term = largest(answer)
    assert (term.term, term.seconds) == ("tp_skew", pytest.approx(wait_s, rel=0.01))


def test_an_overlap_that_is_gone_is_its_own_term(tmp_path: Path) -> None:
    account = accounts(candidate_of("sharded"))[0]
    one = account.exchanges["dp"]
    shown = replace(account, exchanges={"dp": GroupExchanges(one.busy_s, 0.0, 0.0)})
    term = largest(held("sharded", recorded(tmp_path, "sharded", {0: shown})))
    assert (term.term, term.seconds) == ("dp_overlap", pytest.approx(one.hidden_s, rel=1e-3))


@pytest.mark.parametrize(("part", "factor", "more_s"), TABLES["a_longer_part_is_its_own_term"])
def test_a_longer_part_is_its_own_term(part: str, factor: float, more_s: float, tmp_path: Path) -> None:
    account = accounts(candidate_of("one stage"))[0]
    was_s = account.parts.get(part, 0.0)
    slow = replace(account, parts={**account.parts, part: factor * was_s + more_s})
    answer = held("one stage", recorded(tmp_path, "one stage", {0: slow}))
    adds_up(answer)
    longer_s = (factor - 1) * was_s + more_s
    assert (largest(answer).term, largest(answer).seconds) == (part, pytest.approx(longer_s, rel=1e-3))
    assert sum(abs(term.seconds) for term in answer.waterfall) == pytest.approx(longer_s, rel=0.01)


@pytest.mark.parametrize("traced", [True, False])
def test_a_switch_that_the_log_shows_off_is_a_term_and_no_other(traced: bool, tmp_path: Path) -> None:
    plan = plan_of("pipeline")
    features = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    facts = JobFacts(run={"features": features}, stated_switches=tuple(features))
    stated = stated_otherwise(
        ObservedCase(Observation(sources=(), facts=facts), None, predicted(plan, "plan.json"), plan)
    )
    run = stated[-1].candidate
    files, rest_s = recorded(tmp_path, "pipeline", {0: accounts(run)[0]}), run.outside.tail_s
    observation = observation_of(files).model_copy(update={"facts": facts})
    if not traced:
        breakdown = {"optimizer_s": run.outside.optimizer_s, "gradients_s": run.outside.exposed_dp_s}
        breakdown |= {"unattributed_s": rest_s, "forward_backward_s": run.step_s - sum(breakdown.values()) - rest_s}
        observation = Observation(
            sources=(SourceFile(path="a", format="b"),), facts=facts, step_s=run.step_s, breakdown=breakdown
        )
    case = ObservedCase(observation, files if traced else None, predicted(plan, "plan.json"), plan)
    terms = waterfall(case, recipe_terms(case))
    assert [term.term for term in terms if abs(term.seconds) > 1e-5 * run.step_s] == [
        f"recipe: {one.name}" for one in stated
    ]
    assert sum(term.seconds for term in terms) == pytest.approx(run.step_s - plan.step.step_s, rel=1e-5)


def test_a_slow_stage_is_what_it_computes_and_the_bubble_of_others(tmp_path: Path) -> None:
    candidate = candidate_of("pipeline")
    slow = replace(candidate, rank_factors=(1.0, 1.2))
    every = accounts(slow)
    both = recorded(tmp_path, "pipeline", {0: every[0], 8: every[1]})
    assert largest(held("pipeline", both)).term == "compute_products"
    first = held("pipeline", recorded(tmp_path, "pipeline", {0: every[0]}))
    assert largest(first).term == "pipeline_waits"
    adds_up(first)


def test_the_seconds_of_a_profiler_are_a_term(tmp_path: Path) -> None:
    account = accounts(candidate_of("one stage"))[0]
    slowed = replace(account, parts={**account.parts, "host_gaps": account.parts["host_gaps"] + 0.5})
    answer = held("one stage", recorded(tmp_path, "one stage", {0: slowed}), plan_of("one stage").step.step_s)
    adds_up(answer)
    terms = {term.term: term.seconds for term in answer.waterfall}
    assert terms["profiler"] == pytest.approx(-terms["host_gaps"], rel=1e-3)


def test_groups_that_a_trace_does_not_name_are_one_term(tmp_path: Path) -> None:
    account = accounts(candidate_of("one stage"))[0]
    files = recorded(tmp_path, "one stage", {0: account})
    rank = files.traces.ranks[0]
    steps = tuple(
        step.model_copy(update={"groups": tuple(one.model_copy(update={"group": "unknown"}) for one in step.groups)})
        for step in rank.steps
    )
    traces = files.traces.model_copy(update={"ranks": (rank.model_copy(update={"steps": steps}),)})
    answer = held("one stage", files.model_copy(update={"traces": traces}))
    adds_up(answer)
    assert not any(term.term.startswith(("tp_", "dp_")) for term in answer.waterfall)


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


DATA = Path(__file__).parents[1] / "data" / "faults"


@cache
def answer(name: str, beside: str = "") -> ObservedFiles:
    """What `plan observe FILES [--plan observed.json]` answers, the earlier run through its file."""
    paths = [str(path) for path in sorted((DATA / name).iterdir())]
    kinds = kinds_of(paths)
    recorded = read_recorded(kinds)
    observation = observe([path for path in paths if path not in kinds])
    if not beside:
        return ObservedFiles(**dict(judged(observation, recorded=recorded)), recorded=recorded)
    earlier = observed_of(json.loads(answer(beside).model_dump_json()), "observed.json")
    return ObservedFiles(**dict(judged(observation, earlier, "observed.json", recorded)), recorded=recorded)


@pytest.mark.parametrize(("name", "beside", "cause", "where"), TABLES["what_was_made_wrong_is_named_first"])
def test_what_was_made_wrong_is_named_first(name: str, beside: str, cause: str, where: str) -> None:
    first = answer(name, beside).causes[0]
    assert (first.name, first.where) == (cause, where)


@pytest.mark.parametrize("name", ["healthy_dp", "healthy_pp"])
def test_a_healthy_run_has_no_cause(name: str) -> None:
    assert answer(name).causes == ()
    assert answer(name, name).causes == ()


def test_an_observation_that_0_2_saved_is_read() -> None:
    old = read_observed(str(DATA.parent / "observed_by_0_2.json"))
    assert isinstance(old, ObservedFiles)
    assert [cause.name for cause in old.causes] == ["straggler_rank"]
    own = answer("healthy_dp")
    assert judged(own.observation, old, "old.json", own.recorded).verdict == "fast"


def test_an_earlier_run_may_be_longer_in_its_log_than_in_its_traces() -> None:
    said = answer("healthy_dp").model_dump(mode="json")
    observed = said["observation"]
    observed["step_s"] *= 1.1
    observed["breakdown"] = {term: 1.1 * seconds for term, seconds in observed["breakdown"].items()}
    own = answer("sleeps_dp")
    told = judged(own.observation, observed_of(said, "observed.json"), "observed.json", own.recorded)
    assert sum(term.seconds for term in told.waterfall) == pytest.approx(
        told.observation.step_s - said["observation"]["step_s"]
    )
