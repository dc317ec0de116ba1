"""The recipe of a run beside the best: every switch by brute force, and terms that add up to the whole difference."""

import json
from pathlib import Path
from typing import Any

import pytest
from priced_plans import priced_plan
from written import LLAMA_8B, TABLES, arguments, iterations, read

from planner.answer import Plan
from planner.cli import main
from planner.observe.case import ObservedCase, recipe_terms, remedy_of_change, running, stated_otherwise
from planner.observe.judge import judged, of_run, predicted
from planner.observe.observation import Observation, Observed
from planner.plan_file import plan_of
from planner.specs.units import GIB
from planner.trainers.load import load_runtime

DUMP = LLAMA_8B | {"hidden_dropout": 0.0, "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}


def observed(folder: Path, **changes: Any) -> Observation:
    return read(folder, "\n".join([arguments(**{**DUMP, **changes}), *iterations([9.0] * 30)]))


def planned_as(**layout: Any) -> Plan:
    fused, _ = load_runtime("megatron").with_features({"cross_entropy_fusion": True})  # as `written` says
    return priced_plan("8b", 16, 8192, 128, runtime=fused, tp=2, pp=2, **layout)


@pytest.fixture(scope="module")
def planned() -> Plan:
    return planned_as()


def typed(capsys: pytest.CaptureFixture[str], words: list[str]) -> Plan:
    """The plan that a command prints."""
    capsys.readouterr()
    assert main([*words, "--json", "-q"]) == 0, words
    return plan_of(json.loads(capsys.readouterr().out), "stdout")


def beside(planned: Plan, observation: Observation) -> ObservedCase:
    return ObservedCase(observation, None, predicted(planned, "plan.json"), planned)


def test_a_log_of_the_plan_has_no_terms(planned: Plan, tmp_path: Path) -> None:
    case = beside(planned, observed(tmp_path, tp_comm_overlap=True))
    assert recipe_terms(case) == ()
    assert stated_otherwise(case) == ()


def test_terms_add_up_to_the_price_of_the_logs_recipe(planned: Plan, tmp_path: Path, capsys: Any) -> None:
    changes = TABLES["terms_add_up_to_the_price_of_the_logs_recipe_2"]
    case = beside(planned, observed(tmp_path, **changes))
    terms = recipe_terms(case)
    assert [term.term for term in terms] == TABLES["terms_add_up_to_the_price_of_the_logs_recipe"]
    assert any("overlap_grad_reduce false" in term.evidence for term in terms)
    words = ["--model", "8b", "--gpus", "16", "--hardware", "h100", "--tp", "2", "--pp", "2", "-s", "8192", "-b", "128"]
    recipe = "tp_comm_overlap=false,overlap_grad_reduce=false,overlap_param_gather=false,activation_fusion=false"
    same = ["--recompute", "full", "--switch", f"{recipe},cross_entropy_fusion=true"]
    priced = typed(capsys, ["evaluate", *words, *same])
    whole_s = priced.step.step_s - planned.step.step_s
    assert sum(term.seconds for term in terms) == pytest.approx(whole_s, abs=1e-9)
    now = running(case)
    assert now.step_s == pytest.approx(priced.step.step_s)


@pytest.mark.parametrize(("changes", "switches", "layouts", "options"), TABLES["a_remedy_wins"])
def test_a_remedy_wins(planned: Plan, tmp_path: Path, changes: Any, switches: Any, layouts: Any, options: Any) -> None:
    remedy = remedy_of_change(beside(planned, observed(tmp_path, **changes)), switches, layouts)
    assert (None if remedy is None else list(remedy.options)) == options
    assert remedy is None or 0 < (remedy.step_s or 0.0) < 9.0


def test_what_the_log_shows_off_is_a_row_with_a_priced_remedy(planned: Plan, tmp_path: Path) -> None:
    off = {"overlap_grad_reduce": False, "overlap_param_gather": False, "recompute_granularity": "full"}
    off |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    answer = judged(observed(tmp_path, tp_comm_overlap=False, **off), planned, "plan.json")
    names = {cause.name: cause for cause in answer.causes}
    assert "recipe" in names
    assert names["recipe"].where == "tp_comm_overlap"
    remedy = names["recipe"].remedy
    assert remedy.is_priced
    assert remedy.options == ("--switch", "tp_comm_overlap=true")
    assert remedy.step_s is not None
    assert 0.9 * 9.0 < remedy.step_s < 9.0


def test_what_a_part_of_a_dump_does_not_name_is_not_said(planned: Plan, tmp_path: Path) -> None:
    seen = observed(tmp_path, overlap_grad_reduce=False)
    assert {"overlap_grad_reduce", "cross_entropy_fusion", "recompute"} <= set(seen.facts.stated_switches)
    assert "tp_comm_overlap" not in seen.facts.stated_switches
    assert seen.facts.run["features"]["tp_comm_overlap"] is False
    assert [row.name for row in stated_otherwise(beside(planned, seen))] == ["overlap_grad_reduce"]


def test_recomputing_that_the_log_has_off_is_a_term(tmp_path: Path) -> None:
    case = beside(planned_as(recompute="full"), observed(tmp_path))
    (term,) = [term for term in recipe_terms(case) if "recompute" in term.term]
    assert ("recompute none" in term.evidence, "has full" in term.evidence) == (True, True)
    assert term.seconds < 0


def test_without_a_plan_there_is_no_gap(tmp_path: Path) -> None:
    alone = ObservedCase(observed(tmp_path))
    assert recipe_terms(alone) == ()
    assert running(alone) is None


def test_sharding_that_the_log_lacks_is_a_term(planned: Plan, tmp_path: Path) -> None:
    case = beside(planned, observed(tmp_path, tp_comm_overlap=True, use_distributed_optimizer=False))
    (term, *others) = [term for term in recipe_terms(case) if "zero_stage" in term.term]
    assert others == []
    assert "zero_stage 0" in term.evidence
    assert term.seconds > 0


def test_memory_above_the_plan_is_no_room(planned: Plan, tmp_path: Path) -> None:
    peak = planned.best.worst_stage.memory.peak_allocated_bytes
    plain, seen = beside(planned, observed(tmp_path)), observed(tmp_path)
    above = seen.model_copy(update={"peak_memory_bytes": peak + 10 * GIB, "peak_memory_kind": "allocated"})
    now, less = running(plain), running(beside(planned, above))
    assert max(less.excess_bytes) - max(now.excess_bytes) == pytest.approx(10 * GIB)


def test_beside_an_earlier_run_the_recipes_of_both_logs_are_held_together(planned: Plan, tmp_path: Path) -> None:
    off = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    earlier = Observed(observation=observed(tmp_path, **off), plan=planned)
    later = observed(tmp_path, **off, cross_entropy_loss_fusion=False)
    answer = judged(later, earlier, "observed.json")
    names = [term.term for term in answer.waterfall]
    assert [name for name in names if name.startswith("recipe")] == ["recipe: cross_entropy_fusion"]
    assert "the earlier run has true" in answer.waterfall[0].evidence
    bare = Observed(observation=Observation(sources=(), step_s=9.0), plan=planned)
    assert recipe_terms(ObservedCase(later, None, of_run(bare, "observed.json"), planned, bare)) == ()


def test_the_waterfall_has_the_recipes_terms_and_adds_up(planned: Plan, tmp_path: Path) -> None:
    answer = judged(observed(tmp_path, overlap_grad_reduce=False, overlap_param_gather=False), planned, "plan.json")
    found = {term.term: term for term in answer.waterfall}
    assert found["recipe: overlap_grad_reduce"].seconds > 0
    assert sum(term.seconds for term in answer.waterfall) == pytest.approx(9.0 - planned.step.step_s, abs=1e-9)
