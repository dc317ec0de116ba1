"""plan, observe, calibrate, plan: the measured step comes back, and a run that teaches nothing is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from measured_runs import observed, priced, slower
from toys import toy_cluster

from planner.answer import Plan
from planner.errors import SpecError
from planner.layout.confidence import hardware_width
from planner.observe.calibration_by_run import ONE_RUN_WIDTH, from_run
from planner.observe.observation import GapCause, JobFacts, ObservedMemory
from planner.specs.units import GIB


@pytest.fixture(scope="module")
def plan() -> Plan:
    return priced()


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.floats(0.85, 1.7))
def test_the_same_layout_takes_the_measured_step_again(plan: Plan, factor: float) -> None:
    step_s = factor * plan.step.step_s
    calibration = from_run(observed(plan, step_s), plan.cluster)
    again = priced(calibration.of_cluster(plan.cluster))
    assert calibration.kernels_factor is not None
    if calibration.kernels_factor.verdict == "corrected":
        assert again.step.step_s == pytest.approx(step_s, rel=1e-6)
        assert again.evidence == "probed"
    else:
        assert again.step.step_s == plan.step.step_s
        assert step_s == pytest.approx(plan.step.step_s, rel=0.0101)


def test_another_layout_moves_as_far_as_its_kernels_do(plan: Plan) -> None:
    """A cluster whose kernels take 1.3 times as long, and whose links do not, is what one run makes of it."""
    truth = slower(plan.cluster, kernels_factor=1.3)
    calibration = from_run(observed(plan, priced(truth).step.step_s), plan.cluster)
    assert calibration.kernels_factor.value == pytest.approx(1.3, rel=1e-6)
    for sizes in ({"tp": 4, "dp": 2}, {"dp": 8}, {"pp": 4, "dp": 2}):
        expected = priced(truth, **sizes).step.step_s
        told = priced(calibration.of_cluster(plan.cluster), **sizes).step.step_s
        assert told == pytest.approx(expected, rel=1e-6)
        assert told < 1.3 * priced(**sizes).step.step_s


def test_it_is_the_profiles_own_numbers_that_are_corrected_not_those_of_the_plan(plan: Plan) -> None:
    """A plan that was calibrated already does not count twice."""
    truth = slower(plan.cluster, kernels_factor=1.2)
    step_s = priced(truth).step.step_s
    first = from_run(observed(plan, step_s), plan.cluster)
    again = from_run(observed(priced(first.of_cluster(plan.cluster)), step_s), plan.cluster)
    assert again.kernels_factor.value == pytest.approx(first.kernels_factor.value, rel=1e-6)


def test_one_run_leaves_the_width_of_another_layout_and_more_where_it_is_noisy(plan: Plan) -> None:
    step_s = 1.2 * plan.step.step_s
    quiet = from_run(observed(plan, step_s), plan.cluster).step_width
    noisy = from_run(observed(plan, step_s, step_s_spread=(0.92 * step_s, 1.08 * step_s)), plan.cluster).step_width
    coarse = from_run(observed(plan, step_s, step_s_precision_fraction=0.05), plan.cluster).step_width
    assert quiet == pytest.approx(math.hypot(ONE_RUN_WIDTH, 0.01), rel=1e-3)
    assert noisy == pytest.approx(math.hypot(ONE_RUN_WIDTH, math.log(1.08 / 0.92) / 2), rel=1e-3)
    assert coarse is not None
    assert quiet is not None
    assert coarse > math.hypot(quiet, 0.049)
    assert quiet < hardware_width(plan.cluster.hardware), "the toy is known by its data sheet alone"


def test_seconds_say_nothing_of_memory_whose_width_stays(plan: Plan) -> None:
    again = priced(from_run(observed(plan, 1.2 * plan.step.step_s), plan.cluster).of_cluster(plan.cluster))
    before, after = (one.best.worst_stage.memory.total_bytes_interval for one in (plan, again))
    assert after == pytest.approx(before)


def test_memory_beside_tensors_is_measured(plan: Plan) -> None:
    memory = ObservedMemory(
        rank=0, max_allocated_bytes=50 * GIB, max_reserved_bytes=53 * GIB, device_bytes=int(54.5 * GIB)
    )
    calibration = from_run(observed(plan, plan.step.step_s, memory=(memory,)), plan.cluster)
    assert calibration.fragmentation_fraction.value == pytest.approx(0.06)
    assert calibration.context_gib.value == pytest.approx(1.5)
    assert calibration.context_gib.verdict == "corrected"
    full = memory.model_copy(update={"device_bytes": 79 * GIB})
    other = from_run(observed(plan, plan.step.step_s, memory=(full,)), plan.cluster).context_gib
    assert other.verdict == "refused"
    assert "other processes are on the GPUs" in other.reason


def test_a_peak_that_was_predicted_poorly_widens_memory(plan: Plan) -> None:
    peak = round(1.3 * plan.best.worst_stage.memory.peak_allocated_bytes)
    run = observed(plan, plan.step.step_s, peak_memory_bytes=peak, peak_memory_kind="allocated")
    again = priced(from_run(run, plan.cluster).of_cluster(plan.cluster))
    low, high = again.best.worst_stage.memory.total_bytes_interval or (1.0, 1.0)
    assert math.log(high / low) / 2 >= math.log(1.3) - 1e-6


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step_s": None}, "has no steps"),
        ({"num_steps": 8}, "has 5 steps behind the warm-up, of which 10 are the fewest"),
        ({"drift_fraction": 0.2}, "is not steady: its steps grow by 20%"),
        ({"drift_fraction": -0.2}, "is not steady: its steps shrink by 20%"),
        ({"step_s_spread": (0.5, 1.5)}, "is not steady: four in five of its steps differ by 55%"),
        ({"facts": JobFacts(num_gpus=64)}, "the log is of another job than plan.json: GPUs 64, not 8"),
    ],
)
def test_a_run_that_tells_no_speed_is_refused(plan: Plan, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says) as refused:
        from_run(observed(plan, **{"step_s": plan.step.step_s, **changes}), plan.cluster, "observed.json")
    assert refused.value.message.startswith("observed.json: ")
    assert refused.value.hint


@pytest.mark.parametrize("factor", [0.3, 2.6])
def test_a_step_that_no_such_gpu_takes_is_refused(plan: Plan, factor: float) -> None:
    with pytest.raises(SpecError, match="which no factor on the kernels of toy-gpu explains"):
        from_run(observed(plan, factor * plan.step.step_s), plan.cluster)


def test_a_step_that_links_decide_says_nothing_of_kernels() -> None:
    plan = priced(toy_cluster(8, network_gb_per_s=0.3), tp=1, dp=8)
    calibration = from_run(observed(plan, 1.3 * plan.step.step_s), plan.cluster)
    assert calibration.kernels_factor.verdict == "refused"
    assert "host and links hold it up" in calibration.kernels_factor.reason
    again = priced(calibration.of_cluster(plan.cluster), tp=1, dp=8)
    assert again.step.step_s == plan.step.step_s
    assert again.evidence == plan.evidence
    low_s, high_s = again.step.step_s_interval or (1.0, 1.0)
    assert low_s < 1.3 * plan.step.step_s < high_s, "what was measured is inside"
    assert any(warning.startswith("a poor fit") for warning in calibration.warnings)


def cause(name: str, seconds: float | None) -> GapCause:
    return GapCause(name=name, evidence="seen", seconds=seconds)


def test_what_a_data_stall_takes_is_not_learned(plan: Plan) -> None:
    step_s = plan.step.step_s
    stalled = observed(plan, 1.3 * step_s, (cause("data_stall", 0.1 * step_s),))
    calibration = from_run(stalled, plan.cluster)
    assert calibration.kernels_factor is not None
    assert priced(calibration.of_cluster(plan.cluster)).step.step_s == pytest.approx(1.2 * step_s, rel=1e-6)
    assert "data stall" in calibration.warnings[0]


@pytest.mark.parametrize(
    ("seconds", "says"), [(None, "slowed the run by an unknown time"), (0.5, "went to straggler rank")]
)
def test_a_straggler_that_cannot_be_taken_out_is_no_teacher(plan: Plan, seconds: float | None, says: str) -> None:
    took = None if seconds is None else seconds * plan.step.step_s
    with pytest.raises(SpecError, match=says) as refused:
        from_run(observed(plan, 1.3 * plan.step.step_s, (cause("straggler_rank", took),)), plan.cluster)
    assert "observe it again" in refused.value.hint


def test_slow_clocks_are_left_in(plan: Plan) -> None:
    step_s = 1.2 * plan.step.step_s
    guesses = (cause("clocks", 0.1),)
    calibration = from_run(observed(plan, step_s, guesses), plan.cluster)
    assert priced(calibration.of_cluster(plan.cluster)).step.step_s == pytest.approx(step_s, rel=1e-6)
    assert calibration.warnings == ()


def test_memory_that_leaked_is_left_out(plan: Plan) -> None:
    memory = ObservedMemory(rank=0, max_allocated_bytes=50 * GIB, max_reserved_bytes=53 * GIB)
    leak = observed(plan, 1.2 * plan.step.step_s, (cause("leak", None),), memory=(memory,))
    calibration = from_run(leak, plan.cluster)
    assert calibration.fragmentation_fraction is None
    assert calibration.kernels_factor.is_applied
    assert calibration.warnings == ("its memory is left out: it leaked",)
