"""The search answers with the fastest layout whose risk is accepted, else with the safest, and says what more buys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import Problem, case_of, solved, toy_cluster, toy_model, toy_problem, toy_training

from planner.answer import Plan
from planner.errors import Infeasible
from planner.layout.candidate import Candidate
from planner.layout.confidence import memory_width, oom_probability
from planner.layout.evaluate import price_given, priced_as_given
from planner.layout.variation import setting_of
from planner.search.case import Case
from planner.search.safest import standing
from planner.search.search import plan, search
from planner.search.why.explain import program_text
from planner.search.why.misses import candidates_of, shapes_of
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.trainers.load import load_runtime
from planner.trainers.rules.recipe import broken_recipe_rules


def tight(memory_gib: float, **limits: object) -> Problem:
    """A problem of a few hundred layouts, most of which do not fit."""
    cluster, training = toy_cluster(4, memory_gib=memory_gib), toy_training(16)
    sizes = {"tp": (1, 2), "cp": (1,), "zero_stage": (1,), "schedule": ("1f1b",), "micro_batch_size": (1, 2)}
    return toy_problem(toy_model(4), cluster, training, **({"top": 1, "gap_fraction": 0.0} | sizes | limits))


def candidates(problem: Problem) -> Iterator[Candidate]:
    """All layouts with their default splits."""
    case = case_of(problem)
    for _, candidate in candidates_of(case, shapes_of(case)[0]):
        yield candidate.priced_as(replace(candidate.pricing, counts_seconds=True))


def risk_of(candidate: Candidate) -> float:
    total_bytes = max(stage.total_bytes for stage in candidate.memory)
    pricing = candidate.pricing
    return oom_probability(total_bytes, pricing.cluster.hardware.memory_bytes, memory_width(pricing))


@given(st.sampled_from([1.8, 2.2, 2.6]), st.sampled_from([0.001, 0.02, 0.1, 0.3, 0.5, 0.9]))
@settings(max_examples=4, deadline=None)
def test_the_answer_is_the_fastest_of_all_whose_risk_is_accepted(memory_gib: float, risk: float) -> None:
    """Its bound holds for them, too: the program sees the capacity that the risk leaves."""
    problem = tight(memory_gib, oom_risk=risk, recompute=("none",))
    answer, best_s = search(case_of(problem)), problem.best_step_s()
    assert answer.fits
    assert answer.best.oom_probability is not None
    if math.isfinite(best_s):
        assert answer.best.oom_probability <= risk * (1 + 1e-9)
        assert not answer.warnings
        assert answer.step.step_s <= best_s * 1.005
        assert answer.search.lower_bound_s <= best_s * (1 + 1e-6)
    accepted = [c.step_s for c in candidates(problem) if risk_of(c) <= risk and c.fits]
    assert answer.warnings or min(accepted, default=math.inf) >= answer.step.step_s * (1 - 1e-9)


def test_less_risk_is_never_faster() -> None:
    answers = [search(case_of(tight(1.8, oom_risk=risk))) for risk in (0.3, 0.1, 1e-4)]
    steps = [answer.step.step_s for answer in answers]
    assert steps == sorted(steps)
    assert len(set(steps)) > 1


def test_where_nothing_is_safe_enough_the_safest_is_chosen_with_a_warning() -> None:
    need_gib = min(max(stage.total_bytes for stage in c.memory) for c in candidates(tight(2.0))) / 2**30
    problem = tight(need_gib * 1.01)
    answer = solved(problem)
    risk = answer.best.oom_probability
    assert answer.fits
    assert risk is not None
    assert 0.1 < risk < 0.5
    assert (
        f"no layout fits with a probability of 90%: this one, the safest found, fits with {1 - risk:.0%}"
        in (answer.warnings[0])
    )
    assert risk <= min(map(risk_of, candidates(problem))) * (1 + 1e-6)
    assert answer.risk_offer is None
    with pytest.raises(Infeasible, match="nothing fits in"):
        search(case_of(tight(need_gib * 0.97)))


def test_a_headroom_that_is_asked_for_is_all_that_is_asked_for() -> None:
    filling, ruled = tight(1.8, memory_headroom_gib=0.0), tight(1.8)
    assert search(case_of(filling)).step.step_s < search(case_of(ruled)).step.step_s
    none_left = tight(1.8, memory_headroom_gib=1.5)
    with pytest.raises(Infeasible):
        search(case_of(none_left))


def real(model: str, num_gpus: int, **limits: Any) -> Plan:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=8192, global_batch_size=2048 if num_gpus > 1000 else 512)
    asked = SearchLimits(**({"top": 1, "time_limit_s": 600.0} | limits))
    return plan(load_model(model), cluster, training, limits=asked)


@pytest.mark.parametrize(("model", "num_gpus"), [("8b", 8), ("70b", 256), ("405b", 2048)])
def test_the_default_answer_fits_with_nine_in_ten(model: str, num_gpus: int) -> None:
    answer = real(model, num_gpus)
    for layout in (answer.best, *answer.alternatives):
        assert layout.oom_probability is not None
        assert layout.oom_probability <= 0.1
        assert answer.to_json()["best"]["oom_probability"] == answer.best.oom_probability


def test_the_gpu_may_be_filled_as_before() -> None:
    """Without headroom the fastest layout is the one of old, which runs out of memory about every other time."""
    filled, safe = real("8b", 8, memory_headroom_gib=0.0), real("8b", 8)
    assert filled.step.step_s == pytest.approx(48.75, rel=0.01)
    assert filled.step.step_s < safe.step.step_s
    assert filled.best.oom_probability is not None
    assert filled.best.oom_probability > 0.3
    assert filled.risk_offer is None


def test_what_more_risk_buys_is_bought_by_it() -> None:
    offered = real("8b", 8, top=2)
    offer = offered.risk_offer
    assert 0.1 < offer.oom_probability <= offer.oom_risk == 0.3
    assert offer.step_s < 0.995 * offered.step.step_s
    bought = real("8b", 8, oom_risk=offer.oom_risk)
    assert bought.step.step_s <= offer.step_s * 1.005
    assert bought.risk_offer is None or bought.risk_offer.oom_risk == 0.5


def test_the_program_that_is_shown_leaves_the_headroom_free() -> None:
    answer = real("8b", 8, pp=(2,))
    shown = [
        next(line for line in program_text(answer, limits=limits).splitlines() if "a rank can use" in line)
        for limits in (SearchLimits(), SearchLimits(memory_headroom_gib=0.0))
    ]
    ruled, filling = (float(line.split()[4]) for line in shown)
    assert ruled < filling - 2.5


def test_what_is_found_is_priced_again_as_it_was() -> None:
    """`plan evaluate` of the chosen layout says the same risk."""
    problem = tight(1.8)
    candidate = next(candidates(problem))
    case = case_of(problem)
    layout = next(layout for layout, _ in candidates_of(case, shapes_of(case)[0]))
    priced = price_given(case.model, case.cluster, case.training, layout, case.runtime)
    assert priced.oom_probability == pytest.approx(risk_of(candidate))


def test_a_simpler_layout_keeps_to_the_rules_of_its_recipe() -> None:
    """Experts overlap in one chunk a rank in no pipeline, so that several chunks stay several."""
    runtime, _ = load_runtime("megatron").with_features({"ep_overlap": True, "dispatcher": "hybridep"})
    model, training = load_model("glm-4.5-air"), TrainingSpec(seq_length=4096, global_batch_size=16384)
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=128)
    layout = Parallelism(tp=2, pp=2, dp=32, ep=16, etp=1, vpp=4, micro_batch_size=1, recompute="selective")
    candidate, _ = priced_as_given(model, cluster, training, layout, runtime)
    case = Case(model, cluster, training, runtime, SearchLimits())
    found = standing(candidate, [], case, runtime).candidates[0]
    assert int(found.shape.vpp) > 1
    assert not any(broken_recipe_rules(setting_of(found)))
