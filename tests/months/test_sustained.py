"""The sustained step: longer than a benchmark's, as production runs are, and no surer than the GPU is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from planner.answer import Plan, PricedLayout
from planner.layout.evaluate import evaluate
from planner.months.sustained import sustained
from planner.specs.cluster import ClusterSpec
from planner.specs.training import Parallelism, TrainingSpec


@pytest.fixture(name="layout")
def _layout(make_plan: Callable[..., Plan]) -> PricedLayout:
    return make_plan().best


def half_width(interval: tuple[float, float]) -> float:
    return math.log(interval[1] / interval[0]) / 2


def test_it_is_longer_by_the_published_factor_and_names_its_source(layout: PricedLayout) -> None:
    found = sustained(layout, known=True)
    assert found.step_s == pytest.approx(1.12 * layout.step.step_s)
    assert "production runs" in found.source
    low_s, high_s = found.step_s_interval
    assert low_s < found.step_s < high_s
    assert (high_s - low_s) / 2 <= 0.12 * found.step_s


def test_it_is_less_sure_where_no_production_run_was_published(layout: PricedLayout) -> None:
    assert layout.step.step_s_interval is not None
    plain, unsure = sustained(layout, known=True), sustained(layout, known=False)
    own = half_width(layout.step.step_s_interval)
    assert half_width(unsure.step_s_interval) == pytest.approx(math.hypot(half_width(plain.step_s_interval), own))


def test_a_straggler_that_was_stated_is_not_counted_twice(layout: PricedLayout) -> None:
    assert sustained(layout, known=True, straggler_fraction=0.05).step_s == pytest.approx(
        1.12 / 1.05 * layout.step.step_s
    )
    # never below the jitter of clean runs
    assert sustained(layout, known=True, straggler_fraction=0.5).step_s == pytest.approx(1.004 * layout.step.step_s)


def test_every_layout_has_one() -> None:
    training = TrainingSpec(seq_length=8192, global_batch_size=64)
    for hardware, known in (("h100", True), ("gh200", False)):
        best = evaluate("8b", ClusterSpec(hardware=hardware, num_gpus=8), training, Parallelism(tp=8)).best
        assert best.sustained is not None
        assert best.sustained.step_s > best.step.step_s
        assert (half_width(best.sustained.step_s_interval) < 0.12) == known
