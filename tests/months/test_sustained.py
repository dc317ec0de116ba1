"""The sustained step: longer than a benchmark's, as production runs are, and no surer than the GPU is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from planner.answer import Plan, PricedLayout, Sustained, half_width
from planner.layout.evaluate import evaluate
from planner.months.losses import WIDEST_OF_RUNS, with_sustained
from planner.specs.cluster import ClusterSpec
from planner.specs.training import Parallelism, TrainingSpec


@pytest.fixture(name="layout")
def _layout(make_plan: Callable[..., Plan]) -> PricedLayout:
    return make_plan().best


def sustained(layout: PricedLayout, straggler_fraction: float = 0.0) -> Sustained:
    found = with_sustained(layout, straggler_fraction).sustained
    assert found is not None
    return found


def test_it_is_longer_by_the_published_factor_and_names_its_source(layout: PricedLayout) -> None:
    found = sustained(layout)
    assert found.step_s == pytest.approx(1.12 * layout.step.step_s)
    assert "production runs" in found.source
    # one line of a report
    assert len(found.source) <= 62
    low_s, high_s = found.step_s_interval
    assert low_s < found.step_s < high_s
    assert (high_s - low_s) / 2 <= 0.12 * found.step_s


def test_it_is_less_sure_where_the_benchmark_is_less_sure_than_those_of_the_runs(layout: PricedLayout) -> None:
    def with_width(width: float) -> float:
        step_s = layout.step.step_s
        step = layout.step.model_copy(update={"step_s_interval": (step_s * math.exp(-width), step_s * math.exp(width))})
        return half_width(sustained(layout.model_copy(update={"step": step})).step_s_interval)

    known = with_width(WIDEST_OF_RUNS)
    assert with_width(0.05) == with_width(0.1) == known
    assert with_width(0.3) == pytest.approx(math.sqrt(known**2 + 0.3**2 - WIDEST_OF_RUNS**2))


def test_a_straggler_that_was_stated_is_not_counted_twice(layout: PricedLayout) -> None:
    assert sustained(layout, 0.05).step_s == pytest.approx(1.12 / 1.05 * layout.step.step_s)
    # never below the jitter of clean runs
    assert sustained(layout, 0.5).step_s == pytest.approx(1.004 * layout.step.step_s)


def test_every_layout_has_one() -> None:
    training = TrainingSpec(seq_length=8192, global_batch_size=64)
    for hardware, known in (("h100", True), ("gh200", False)):
        best = evaluate("8b", ClusterSpec(hardware=hardware, num_gpus=8), training, Parallelism(tp=8)).best
        assert best.sustained is not None
        assert best.sustained.step_s > best.step.step_s
        assert (half_width(best.sustained.step_s_interval) < 0.17) == known


def test_each_end_widens_by_itself(layout: PricedLayout) -> None:
    step_s, known = layout.step.step_s, half_width(sustained(layout).step_s_interval)
    step = layout.step.model_copy(update={"step_s_interval": (0.95 * step_s, 1.5 * step_s)})
    found = sustained(layout.model_copy(update={"step": step}))
    low_s, high_s = found.step_s_interval
    assert math.log(found.step_s / low_s) == pytest.approx(known)
    assert math.log(high_s / found.step_s) > 0.35


def test_switches_that_a_run_does_not_say_widen_it_too() -> None:
    training = TrainingSpec(seq_length=4096, global_batch_size=512)
    cluster, layout = ClusterSpec(hardware="h100", num_gpus=128), Parallelism(tp=1, pp=4, ep=8)
    unsaid, said = (
        evaluate("qwen3-30b-a3b", cluster, training, layout, says_switches=says).best for says in (False, True)
    )
    assert unsaid.sustained is not None
    assert said.sustained is not None
    assert unsaid.unsaid
    assert half_width(unsaid.sustained.step_s_interval) > half_width(said.sustained.step_s_interval)
