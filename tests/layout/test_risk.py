"""The risk of running out of memory: a normal tail of the logarithm, which falls with memory and rises with need."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import toy_problem

from planner.answer import SIGMAS_TO_END, Plan
from planner.layout.confidence import headroom_bytes, memory_width, oom_probability
from planner.layout.evaluate import evaluate, pricing_of
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import load_runtime

WIDTHS = st.floats(0.02, 0.5)
GIBS = st.floats(1.0, 300.0)


def evaluated(memory_gib: float = 80.0, tp: int = 8, runtime: str = "megatron", model: str = "8b") -> Plan:
    hardware = load_hardware("h100").model_copy(update={"memory_gib": memory_gib})
    training = TrainingSpec(seq_length=4096, global_batch_size=32)
    return evaluate(
        load_model(model), ClusterSpec(hardware=hardware, num_gpus=8), training, Parallelism(tp=tp), runtime=runtime
    )


@given(GIBS, GIBS, GIBS, WIDTHS)
def test_more_memory_and_less_need_are_safer(total: float, capacity: float, more: float, width: float) -> None:
    risk = oom_probability(total, capacity, width)
    assert 0 <= oom_probability(total, capacity + more, width) <= risk <= oom_probability(total + more, capacity, width)
    assert risk <= 1


@given(GIBS, WIDTHS)
def test_the_ends_of_the_interval_have_a_tenth_on_either_side(total: float, width: float) -> None:
    assert oom_probability(total, total * math.exp(width), width) == pytest.approx(0.1)
    assert oom_probability(total, total, width) == pytest.approx(0.5)
    assert oom_probability(total, total * math.exp(-width), width) == pytest.approx(0.9)
    assert pytest.approx(NormalDist().inv_cdf(0.9)) == SIGMAS_TO_END


@given(st.floats(0.001, 0.999), st.floats(0.5, 1.5))
def test_a_rank_fits_beside_the_headroom_exactly_if_its_risk_is_accepted(risk: float, filled: float) -> None:
    pricing = toy_problem().pricing
    capacity = pricing.cluster.hardware.memory_bytes
    total = filled * (capacity - headroom_bytes(pricing, SearchLimits(oom_risk=risk)))
    accepted = oom_probability(total, capacity, memory_width(pricing)) <= risk
    # above one half the rule leaves nothing free, and layouts must fit all the same
    assert accepted == (filled <= 1) or (risk > 0.5 and accepted) or filled == pytest.approx(1)


@given(st.floats(1e-300, 0.998), st.floats(0.001, 0.5))
def test_more_risk_leaves_less_free(risk: float, more: float) -> None:
    pricing = toy_problem().pricing
    free = [headroom_bytes(pricing, SearchLimits(oom_risk=r)) for r in (risk, min(0.999, risk + more))]
    assert free[0] >= free[1] >= 0
    assert free[0] < pricing.cluster.hardware.memory_bytes


@pytest.mark.parametrize("gib", [0.0, 3.5])
def test_a_headroom_that_is_asked_for_replaces_the_rule(gib: float) -> None:
    problem = toy_problem(oom_risk=0.001, memory_headroom_gib=gib)
    assert problem.pricing.headroom_bytes == gib * GIB
    assert pricing_of(problem.model, problem.cluster, problem.training, problem.runtime).headroom_bytes == 0


def test_a_given_layout_fits_by_its_bytes_and_says_its_risk() -> None:
    total_gib = evaluated().best.worst_stage.memory.total_bytes / GIB
    risks = []
    for filled, fits in ((1.01, False), (0.999, True), (0.95, True), (0.8, True)):
        best = evaluated(total_gib / filled).best
        assert best.fits is fits
        assert best.oom_probability is not None
        risks.append(best.oom_probability)
    assert risks == sorted(risks, reverse=True)
    assert risks[0] > 0.5 > risks[1] > 0.1
    assert risks[-1] < 0.01


def test_the_worst_stage_decides() -> None:
    plan = evaluated(25.0, tp=4)
    width = memory_width(toy_problem(load_model("8b")).pricing)
    totals = [stage.memory.total_bytes for stage in plan.stages]
    at_width = [oom_probability(total, plan.cluster.hardware.memory_bytes, width) for total in totals]
    low, high = plan.best.worst_stage.memory.total_bytes_interval or (0.0, 0.0)
    own = oom_probability(max(totals), plan.cluster.hardware.memory_bytes, math.log(high / low) / 2)
    assert plan.best.oom_probability == pytest.approx(own)
    assert max(at_width) == at_width[totals.index(max(totals))]


@pytest.mark.parametrize(("surer", "runtime"), [("megatron", "torchtitan"), ("megatron", "nanotron")])
def test_a_trainer_whose_allocator_is_known_less_well_leaves_more_free(surer: str, runtime: str) -> None:
    pricing = toy_problem().pricing
    known, other = (replace(pricing, runtime=load_runtime(name)) for name in (surer, runtime))
    assert memory_width(other) > memory_width(known)
    assert headroom_bytes(other, SearchLimits()) > headroom_bytes(known, SearchLimits())


def test_gpus_that_idle_bring_utilisation_down() -> None:
    """Half the GPUs at the same step, but for a node more to be late, do half the model FLOPs a GPU."""
    model, hardware = load_model("8b"), load_hardware("h100")
    training = TrainingSpec(seq_length=4096, global_batch_size=32)
    steps = [
        evaluate(model, ClusterSpec(hardware=hardware, num_gpus=n), training, Parallelism(tp=8, dp=1)).step
        for n in (8, 16)
    ]
    assert steps[1].step_s == pytest.approx(steps[0].step_s, rel=0.005)
    assert steps[1].mfu == pytest.approx(steps[0].mfu / 2, rel=0.005)
    assert steps[1].model_tflops_per_gpu == pytest.approx(steps[0].model_tflops_per_gpu / 2, rel=0.005)


def test_what_rocm_holds_is_known_less_well() -> None:
    """A GPU whose libraries are known less well leaves more free; the two widths are independent."""
    hardware = load_hardware("mi355x")
    known = hardware.model_copy(update={"reserved": hardware.reserved.model_copy(update={"width": 0.0})})
    widths = []
    for gpu in (hardware, known):
        cluster = ClusterSpec(hardware=gpu, num_gpus=8)
        training = TrainingSpec(seq_length=4096, global_batch_size=64)
        widths.append(memory_width(pricing_of(load_model("8b"), cluster, training, load_runtime("primus-megatron"))))
    assert widths[0] == pytest.approx(math.hypot(widths[1], hardware.reserved.width))
    assert widths[0] > widths[1]
