"""Layouts under changed assumptions: each step is what pricing the layout with the change by hand gives."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from planner.answer import AS_PLANNED, Plan, RobustStep
from planner.cli.inputs import read_described, read_job
from planner.cli.options import JobOptions, LayoutOptions
from planner.layout import variation as robust
from planner.layout.evaluate import evaluate
from planner.layout.price import reprice
from planner.layout.variation import NUM_LAYOUTS, assumed_steps, other_assumptions, robust_steps
from planner.report.rows import robust_of
from planner.search.search import plan
from planner.specs.training import Parallelism, SearchLimits

JOB = LayoutOptions(model="qwen3-30b", gpus=32, hardware="h100", seq_length=4096, global_batch_size=512)
TUNED, PLAIN = "ep_overlap=true,dispatcher=deepep", "ep_overlap=false,dispatcher=deepep"
GRIDS = (
    Parallelism(pp=2, dp=16, ep=8, vpp=4, micro_batch_size=1, schedule="interleaved-1f1b"),
    Parallelism(tp=2, pp=1, dp=16, ep=16, micro_batch_size=1),
)


def evaluated(grid: Parallelism, **changed: Any) -> Plan:
    asked = replace(JOB, **changed)
    job = read_described(asked, read_job(asked))
    return evaluate(job.model, job.cluster, job.training, grid, runtime=job.runtime_spec)


def steps_of(plans: list[Plan]) -> tuple[RobustStep, ...]:
    trainer = evaluated(GRIDS[0], switch=PLAIN).runtime_spec
    candidates = [reprice(one, one.best) for one in plans][:NUM_LAYOUTS]
    return robust_steps([one.best for one in plans][:NUM_LAYOUTS], assumed_steps(candidates, trainer))


@cache
def compared(switch: str = TUNED) -> tuple[dict[str, float], ...]:
    """The steps of both layouts, by the short name of the assumption, however little it matters."""
    plans = [evaluated(grid, switch=switch) for grid in GRIDS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(robust, "TOLD_FRACTION", -1.0)
        steps = steps_of(plans)
    return tuple(
        {step.assumption.partition(":")[0]: step.step_s for step in steps if step.layout == str(one.parallelism)}
        for one in plans
    )


@pytest.mark.thorough(3)
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("slow rank", {"straggler_fraction": 0.1}),
        ("uneven experts", {"moe_imbalance": 1.5}),
        ("half the network", {"assume": "network_gb_per_s=25"}),
    ],
)
def test_each_step_is_that_of_the_layout_priced_with_the_change(name: str, option: dict[str, Any]) -> None:
    switch = {"switch": TUNED}
    for grid, steps in zip(GRIDS, compared(), strict=True):
        assert steps[AS_PLANNED] == evaluated(grid, **switch).step.step_s
        assert steps[name] == pytest.approx(evaluated(grid, **switch, **option).step.step_s, rel=1e-3)


def test_default_switches_are_those_of_the_trainer() -> None:
    for grid, steps in zip(GRIDS, compared(), strict=True):
        by_hand = evaluated(grid, switch=PLAIN).step.step_s
        assert steps["default switches"] == pytest.approx(by_hand, rel=1e-3)
        assert steps["default switches"] != pytest.approx(steps[AS_PLANNED], rel=0.02)


def test_without_overlap_every_collective_is_waited_for() -> None:
    fields = ("gradient", "parameter", "tp", "ep", "cp", "fsdp")
    none = ",".join(f"{field}_overlap_fraction=0" for field in fields) + ",ep_overlap_network_fraction=0"
    for grid, steps in zip(GRIDS, compared(), strict=True):
        by_hand = evaluated(grid, switch="dispatcher=deepep", assume=none).step.step_s
        assert steps["no overlap"] == pytest.approx(by_hand, rel=0.02), "but for what overlapping costs the host"


def test_layouts_keep_their_order_and_each_starts_as_planned() -> None:
    plans = [evaluated(grid) for grid in GRIDS]
    steps = steps_of(plans)
    names = list(dict.fromkeys(step.assumption for step in steps))
    assert names[0] == AS_PLANNED
    assert all(": " in name for name in names[1:]), "each is explained"
    assert [step.assumption for step in steps] == names * 2
    assert [step.layout for step in steps] == [str(one.parallelism) for one in plans for _ in names]


def test_an_assumption_is_told_if_it_moves_a_step_or_changes_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [evaluated(grid) for grid in GRIDS]
    monkeypatch.setattr(robust, "TOLD_FRACTION", 1e9)
    assert steps_of(plans[:1]) == ()
    slower, faster = sorted(plans, key=lambda one: -one.step.step_s)
    others = {step.assumption for step in steps_of([slower, faster])}
    assert len(others) > 1, "the second layout is faster, whatever moves"
    first = {step.assumption for step in steps_of([faster, slower])}
    assert len(first) < len(others)


def test_a_recipe_that_is_the_trainers_own_stays_as_planned() -> None:
    for steps in compared(PLAIN):
        assert steps["default switches"] == pytest.approx(steps[AS_PLANNED], rel=1e-3)
    plans = [evaluated(grid, switch=PLAIN) for grid in GRIDS]
    assert not any("switches" in step.assumption for step in steps_of(plans))


def search(**options: Any) -> Plan:
    job = read_job(JobOptions(**options))
    return plan(job.model, job.cluster, job.training, limits=SearchLimits(), runtime=job.runtime_spec)


@pytest.fixture(scope="module")
def slow() -> Plan:
    """A job on a slow network, the fastest layout of which hides more exchanges than its neighbour has."""
    return search(
        model="8b", gpus=16, hardware="h100", seq_length=8192, global_batch_size=16, assume="network_gb_per_s=8"
    )


@pytest.mark.thorough(0)
def test_the_layout_that_loses_least_need_not_be_the_fastest(slow: Plan) -> None:
    table = robust_of(slow.best)
    assert table is not None
    assert table.least > 0
    assert table.losses[table.least] < 0.5 * table.losses[0]
    assert f"alternative {table.least} loses at most" in table.remarks[0]


def test_the_answer_compares_the_best_with_its_alternatives(slow: Plan) -> None:
    shown = [slow.best, *slow.alternatives][: robust.NUM_LAYOUTS]
    assert list(dict.fromkeys(step.layout for step in slow.best.robust)) == [str(one.parallelism) for one in shown]
    planned = [step.step_s for step in slow.best.robust if step.assumption == AS_PLANNED]
    assert planned == [one.step.step_s for one in shown]
    assert not any(other.robust for other in slow.alternatives)
    assert Plan.model_validate_json(slow.model_dump_json()) == slow


def test_an_answer_of_one_layout_compares_nothing() -> None:
    job = read_job(JobOptions(model="8b", gpus=8, hardware="h100", global_batch_size=64))
    one = plan(job.model, job.cluster, job.training, limits=SearchLimits(top=1, tp=(8,)), runtime=job.runtime_spec)
    assert one.best.robust == ()
    assert evaluated(GRIDS[0]).best.robust == ()


def test_the_same_change_is_priced_once() -> None:
    candidate = reprice(one := evaluated(GRIDS[0]), one.best)
    for other in other_assumptions(candidate.pricing):
        changed = other.of(candidate.pricing)
        assert candidate.priced_as(replace(changed)) is candidate.priced_as(changed)
