"""The recipe of a run beside the best: every switch by brute force, and terms that add up to the whole difference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from remedy_jobs import JOBS, case_of, plan_of_job, typed
from written import LLAMA_8B, arguments, iterations, read

from planner.answer import Plan
from planner.layout.evaluate import evaluate
from planner.layout.recipe import setting_of, under
from planner.observe.case import Case
from planner.observe.judge import judged, judged_beside, of_run, predicted
from planner.observe.observation import Observation, Observed
from planner.observe.remedy.estimate import LEAST_GAIN, expected_step_s
from planner.observe.remedy.recipe_gap import recipe_gap, recipe_terms
from planner.observe.remedy.running import differences, restored, running
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware
from planner.specs.training import Parallelism, TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import broken_recipe_rules, has_effect
from planner.trainers.stated import switched
from planner.trainers.switches import SWITCHES


def best_alone(case: Case, name: str) -> float:
    """Seconds of the step at the best value of one switch alone, by trying them all."""
    now = running(case)
    assert now is not None
    has = SWITCHES[name].value_of(now.pricing.runtime)
    steps = [now.step_s]
    for value in switches_of(now.pricing.runtime)[name]:
        if value in SWITCHES[name].consent and value != has:
            continue
        runtime = switched(now.pricing.runtime, {name: value})
        other = under(now, runtime)
        if not any(broken_recipe_rules(replace(setting_of(now), runtime=runtime))) and other.fits:
            steps.append(other.step_s)
    return min(steps)


@pytest.mark.parametrize("job", JOBS)
def test_each_switch_is_at_the_best_of_its_values(job: str) -> None:
    case = case_of(job)
    now, rows = running(case), {row.switch: row for row in recipe_gap(case)}
    assert now is not None
    for name in switches_of(now.pricing.runtime):
        if not has_effect(name, setting_of(now)):
            assert name not in rows
            continue
        alone_s = best_alone(case, name)
        if name in rows and "," not in rows[name].options[1]:
            assert rows[name].gain_s == pytest.approx(now.step_s - alone_s)
        elif name in rows:
            assert rows[name].gain_s > now.step_s - alone_s
        else:
            assert alone_s >= now.step_s * (1 - LEAST_GAIN)
    gains = [row.gain_s for row in recipe_gap(case)]
    assert gains == sorted(gains, reverse=True)


DUMP = LLAMA_8B | {"hidden_dropout": 0.0, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}


def observed(folder: Path, **changes: Any) -> Observation:
    return read(folder, "\n".join([arguments(**{**DUMP, **changes}), *iterations([9.0] * 30)]))


def planned_as(**layout: Any) -> Plan:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=16)
    training = TrainingSpec(seq_length=8192, global_batch_size=128)
    return evaluate("8b", cluster, training, Parallelism(tp=2, pp=2, **layout))


@pytest.fixture(scope="module")
def planned() -> Plan:
    return planned_as()


def beside(planned: Plan, observation: Observation) -> Case:
    return Case(observation, None, predicted(planned, "plan.json"), planned)


def test_a_log_of_the_plan_has_no_terms(planned: Plan, tmp_path: Path) -> None:
    case = beside(planned, observed(tmp_path, tp_comm_overlap=True))
    assert recipe_terms(case) == ()
    assert differences(case) == ()


def test_terms_add_up_to_the_price_of_the_logs_recipe(
    planned: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {
        "overlap_grad_reduce": False, "overlap_param_gather": False, "recompute_granularity": "full",
        "tp_comm_overlap": False, "recompute_method": "uniform", "recompute_num_layers": 1, "bias_swiglu_fusion": False,
    }  # fmt: skip
    case = beside(planned, observed(tmp_path, **changes))
    terms = recipe_terms(case)
    assert [term.term for term in terms] == [
        "recipe: tp_comm_overlap", "recipe: overlap_grad_reduce", "recipe: overlap_param_gather",
        "recipe: activation_fusion", "recipe: recompute",
    ]  # fmt: skip
    assert "the log shows overlap_grad_reduce false, the plan has true" in [term.evidence for term in terms]
    words = ["--model", "8b", "--gpus", "16", "--hardware", "h100", "--tp", "2", "--pp", "2", "-s", "8192", "-b", "128"]
    recipe = "tp_comm_overlap=false,overlap_grad_reduce=false,overlap_param_gather=false,activation_fusion=false"
    same = ["--recompute", "full", "--switch", f"{recipe},cross_entropy_fusion=native"]
    priced = typed(capsys, ["evaluate", *words, *same])
    whole_s = priced.step.step_s - planned.step.step_s
    assert sum(term.seconds for term in terms) == pytest.approx(whole_s, abs=1e-9)
    now = running(case)
    assert now is not None
    assert now.step_s == pytest.approx(priced.step.step_s)


def test_what_the_log_shows_off_is_said_with_its_flag(planned: Plan, tmp_path: Path) -> None:
    case = beside(
        planned, observed(tmp_path, tp_comm_overlap=True, overlap_grad_reduce=False, overlap_param_gather=False)
    )
    rows = {row.switch: row for row in recipe_gap(case)}
    row = rows["overlap_grad_reduce"]
    assert (row.has, row.better, row.planned, row.cause, row.is_stated) == ("false", "true", "true", "exposed_dp", True)
    assert "--overlap-grad-reduce" in row.settings
    assert row.evidence == "the log shows overlap_grad_reduce false, and true is faster"
    now = running(case)
    assert now is not None
    measured_s = case.observation.step_s
    assert measured_s == 9.0
    assert expected_step_s(case, now, now) == pytest.approx(measured_s)


def test_what_a_part_of_a_dump_does_not_name_is_not_said(planned: Plan, tmp_path: Path) -> None:
    seen = observed(tmp_path, overlap_grad_reduce=False)
    assert {"overlap_grad_reduce", "cross_entropy_fusion", "recompute"} <= set(seen.facts.stated_switches)
    assert "tp_comm_overlap" not in seen.facts.stated_switches
    assert seen.facts.run["features"]["tp_comm_overlap"] is False
    assert [row.name for row in differences(beside(planned, seen))] == ["overlap_grad_reduce"]


def test_recomputing_that_the_log_has_off_is_a_term(tmp_path: Path) -> None:
    case = beside(planned_as(recompute="full"), observed(tmp_path))
    (term,) = [term for term in recipe_terms(case) if "recompute" in term.term]
    assert term.evidence == "the log shows recompute none, the plan has full"
    assert term.seconds < 0


def test_a_switch_at_another_value_than_planned_goes_back(planned: Plan, tmp_path: Path) -> None:
    case = beside(planned, observed(tmp_path, overlap_grad_reduce=False))
    now = running(case)
    assert now is not None
    (back,) = restored(case, ("overlap_grad_reduce", "compile"), now)
    assert back.step_s == pytest.approx(planned.step.step_s)
    assert not list(restored(case, ("compile",), now))


def test_without_a_plan_there_is_no_gap(tmp_path: Path) -> None:
    alone = Case(observed(tmp_path))
    assert recipe_gap(alone) == ()
    assert recipe_terms(alone) == ()
    assert running(alone) is None


def test_sharding_that_the_log_lacks_is_a_term(planned: Plan, tmp_path: Path) -> None:
    case = beside(planned, observed(tmp_path, tp_comm_overlap=True, use_distributed_optimizer=False))
    (term, *others) = [term for term in recipe_terms(case) if "zero_stage" in term.term]
    assert others == []
    assert term.evidence == "the log shows zero_stage 0, the plan has 1"
    assert term.seconds > 0


def test_memory_above_the_plan_is_no_room() -> None:
    plan = plan_of_job("megatron")
    peak = plan.best.worst_stage.memory.peak_allocated_bytes
    above = case_of("megatron", peak_memory_bytes=peak + 10 * GIB, peak_memory_kind="allocated")
    plain, less = running(case_of("megatron")), running(above)
    assert plain is not None
    assert less is not None
    assert max(less.excess_bytes) - max(plain.excess_bytes) == pytest.approx(10 * GIB)


def test_beside_an_earlier_run_the_recipes_of_both_logs_are_held_together(planned: Plan, tmp_path: Path) -> None:
    off = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    earlier = Observed(observation=observed(tmp_path, **off), plan=planned)
    later = observed(tmp_path, **off, cross_entropy_loss_fusion=False)
    answer = judged_beside(later, earlier, "observed.json")
    names = [term.term for term in answer.waterfall]
    assert [name for name in names if name.startswith("recipe")] == ["recipe: cross_entropy_fusion"]
    assert "the earlier run has native" in answer.waterfall[0].evidence
    bare = Observed(observation=Observation(sources=(), step_s=9.0), plan=planned)
    assert recipe_terms(Case(later, None, of_run(bare, "observed.json"), planned, bare)) == ()


def test_the_waterfall_has_the_recipes_terms_and_adds_up(planned: Plan, tmp_path: Path) -> None:
    answer = judged(observed(tmp_path, overlap_grad_reduce=False, overlap_param_gather=False), planned, "plan.json")
    found = {term.term: term for term in answer.waterfall}
    assert found["recipe: overlap_grad_reduce"].seconds > 0
    assert sum(term.seconds for term in answer.waterfall) == pytest.approx(9.0 - planned.step.step_s, abs=1e-9)
