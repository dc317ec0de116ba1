"""A plan that is saved, a plan that is evaluated anew and a plan that was exported and imported say the same."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.counting import law
from laws.jobs import Job, jobs
from planner.answer import Plan
from planner.layout.evaluate import evaluate
from planner.plan_file import read_plan

sys.path.append(str(Path(__file__).parents[1] / "export"))

from round_trips import RUNTIME_OF, round_trips


def saved_and_read(plan: Plan) -> Plan:
    """The plan that a file holds in which `plan` was saved."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        plan.save(path)
        again = read_plan(str(path))
        assert again.saved_text() == path.read_text()
    return again


def evaluated_again(plan: Plan) -> Plan:
    """The layout of a plan, as `evaluate` takes it, priced anew."""
    runtime = plan.best.runtime_spec or plan.runtime_spec
    return evaluate(plan.model.spec, plan.cluster, plan.training, plan.best, runtime=runtime)


def same_price(plan: Plan, again: Plan) -> None:
    assert again.step.step_s == pytest.approx(plan.step.step_s, rel=1e-12)
    assert [stage.memory for stage in again.stages] == [stage.memory for stage in plan.stages]
    assert [stage.chunks for stage in again.stages] == [stage.chunks for stage in plan.stages]
    assert again.parallelism == plan.parallelism
    assert again.fits == plan.fits


@law(8)
@given(jobs())
def test_a_saved_plan_is_the_plan_and_its_layout_is_priced_the_same(job: Job) -> None:
    plan = job.plan()
    saved = saved_and_read(plan)
    assert saved == plan
    assert saved.inputs_sha256 == plan.inputs_sha256
    same_price(saved, evaluated_again(saved))


@law(4)
@given(st.sampled_from(sorted(RUNTIME_OF)), st.integers(1, 10**9))
def test_an_exported_plan_comes_back_as_the_saved_one(target: str, seed: int) -> None:
    """The export of the plan that was read is imported with the price of the plan that was written."""
    for trip in round_trips(target, 1, seed):
        saved = saved_and_read(trip.plan)
        assert trip.is_same, str(trip)
        assert saved.step == trip.plan.step
        same_price(saved, evaluated_again(saved))
