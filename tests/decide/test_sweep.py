"""A sweep plans what `plan` plans, and its answers and its front are those that trying all pairs finds."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from planner.decide.sweep import (
    Goal,
    PlannedNodes,
    Point,
    Sweep,
    Trial,
    of_points,
    planned,
    planners,
    sweep,
    with_deadline,
)
from planner.layout.evaluate import runtime_of
from planner.report.decisions import as_csv, says_sweep
from planner.search.case import Case
from planner.search.search import plan
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import SearchLimits, TrainingSpec


def trial(num_gpus: int, model: str = "8b", hardware: str = "h100", tokens: float | None = 1e12, **pins: Any) -> Trial:
    case = Case(
        load_model(model),
        ClusterSpec(hardware=load_hardware(hardware), num_gpus=num_gpus),
        TrainingSpec(seq_length=4096, global_batch_size=128, tokens=tokens),
        runtime_of("megatron"),
        SearchLimits(**pins),
    )
    return Trial({"gpus": num_gpus, "hardware": hardware}, case)


def here(trials: Any) -> list[Point]:
    return [planned(one) for one in trials]


PINS: dict[str, Any] = {"tp": (1, 2), "pp": (1, 2), "micro_batch_size": (1,), "vpp": (1,)}


def test_a_point_has_the_figures_of_the_plan_with_its_options() -> None:
    one = trial(16, **PINS)
    answer = plan(one.case.model, one.case.cluster, one.case.training, limits=one.case.limits)
    point = planned(one)
    assert (point.fits, point.layout, point.step_s) == (True, str(answer.parallelism), answer.step.step_s)
    assert (point.days, point.usd, point.usd_interval) == (
        answer.run_cost.days, answer.run_cost.usd, answer.run_cost.usd_interval,
    )  # fmt: skip
    low, high = point.tokens_per_s_interval or (0, 0)
    assert low < answer.step.tokens_per_s < high
    assert high == pytest.approx(answer.training.tokens_per_step / answer.step.step_s_interval[0])


def test_what_cannot_be_planned_is_a_point_with_its_reason() -> None:
    point = planned(trial(8, "405b"))
    assert not point.fits
    assert point.step_s is None
    assert "nothing fits" in point.reason


def test_scaling_is_held_against_the_fewest_gpus_of_the_same_kind() -> None:
    answer = sweep([trial(n, hardware=kind, **PINS) for n in (16, 8) for kind in ("h100", "h200")], Goal(), here)
    efficiency = {(point.num_gpus, point.options["hardware"]): point.scaling_efficiency for point in answer.points}
    assert efficiency[8, "h100"] == efficiency[8, "h200"] == 1.0
    assert 0.9 < (efficiency[16, "h100"] or 0) <= 1.02
    assert answer.points[0].num_gpus == 16, "points keep their order"


def test_processes_give_the_same_points_in_the_same_order() -> None:
    trials = [trial(n, **PINS) for n in (8, 32, 16, 24, 40, 48, 56, 64)]
    with planners(len(trials)) as plan_all:
        assert plan_all(trials) == here(trials)


POINTS = st.builds(
    lambda gpus, fits, days, usd: Point(
        options={"gpus": gpus}, num_gpus=gpus, fits=fits, step_s=1.0, tokens_per_s=1.0, days=days, usd=usd,
        days_interval=(days * 0.9, days * 1.1),
    ),
    st.integers(1, 50), st.booleans(), st.integers(1, 20).map(float), st.integers(1, 20).map(float),
)  # fmt: skip


@given(st.lists(POINTS, max_size=12), st.none() | st.integers(1, 20), st.none() | st.integers(1, 20))
def test_the_front_and_the_answers_are_those_of_all_pairs(
    points: list[Point], deadline: int | None, budget: int | None
) -> None:
    answer = Sweep(points=tuple(points), goal=Goal(deadline_days=deadline, budget_usd=budget))
    for number, point in enumerate(points):
        beaten = [
            other for other in points
            if other.fits and other.days <= point.days and other.usd <= point.usd
            and (other.days, other.usd) != (point.days, point.usd)
        ]  # fmt: skip
        assert (number in answer.pareto) == (point.fits and not beaten)
    met = [p for p in points if p.fits and p.days <= (deadline or 99) and p.usd <= (budget or 99)]
    found = {name: None if index is None else points[index] for name, index in answer.answers.items()}
    for name, field in (("fewest_gpus", "num_gpus"), ("cheapest", "usd"), ("fastest", "days")):
        best = found[name]
        assert (best is None) == (not met)
        assert best is None or getattr(best, field) == min(getattr(point, field) for point in met)


def test_the_probability_of_a_deadline_follows_the_interval() -> None:
    point = Point(options={}, num_gpus=8, fits=True, days=10.0, days_interval=(8.0, 12.5))
    assert with_deadline(point, 10.0).deadline_probability == pytest.approx(0.5)
    assert with_deadline(point, 12.5).deadline_probability == pytest.approx(0.9)
    assert with_deadline(point, 8.0).deadline_probability == pytest.approx(0.1)
    assert with_deadline(point, None).deadline_probability is None


@given(
    rates=st.lists(st.floats(0.01, 1.0), min_size=24, max_size=24),
    late=st.floats(0, 0.01),
    deadline=st.floats(0.5, 80.0),
    fits_from=st.integers(1, 20),
)
def test_the_fewest_are_those_of_a_linear_scan(
    rates: list[float], late: float, deadline: float, fits_from: int
) -> None:
    """Layouts use some of the nodes; more nodes open more layouts, and idle ones cost a little."""

    def point(num_nodes: int) -> Point:
        used = max(range(1, num_nodes + 1), key=lambda n: (sum(rates[:n]) * (n % 3 != 1), n))
        days = 100 / sum(rates[:used]) / (used % 3 != 1 or 0.5) * (1 + late * num_nodes) / 10
        return Point(
            options={}, num_gpus=8 * num_nodes, num_gpus_used=8 * used, fits=num_nodes >= fits_from, step_s=days,
            days=days, usd=days,
        )  # fmt: skip

    nodes = PlannedNodes(trial(8), lambda trials: [point(one.num_gpus // 8) for one in trials], 24)
    goal = Goal(deadline_days=deadline)
    assert nodes.first_that(lambda p: p.fits) == fits_from
    scan = next((n for n in range(1, 25) if goal.is_met(point(n))), None)
    # halving needs that all the nodes meet what fewer do: nodes that bring less than their waits cost may not
    assume(scan is None or goal.is_met(point(24)))
    assert nodes.first_that(goal.is_met, fits_from) == scan


def test_tables_and_csv_have_every_point_and_say_the_answers() -> None:
    answer = of_points(
        [*here([trial(8, **PINS), trial(16, **PINS)]), planned(trial(8, "405b"))], Goal(deadline_days=1e4)
    )
    rows = list(csv.DictReader(io.StringIO(as_csv(answer))))
    assert [row["fits"] for row in rows] == ["True", "True", "False"]
    assert float(rows[1]["usd_interval_low"]) < float(rows[1]["usd"]) < float(rows[1]["usd_interval_high"])
    assert "fewest GPUs: 8 GPUs" in says_sweep(answer)
    assert says_sweep(of_points([planned(trial(8, "405b"))], Goal())) == "None of 1 points fits."
