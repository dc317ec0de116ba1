"""A rank's memory over the step: its maximum is the plan's peak, and it is made of what the replay says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pinned_numbers import LAYOUTS
from toys import MOE, toy_cluster, toy_model, toy_problem, toy_training

from planner.layout.candidate import Candidate, Split
from planner.layout.evaluate import evaluate
from planner.layout.memory_curve import MemoryCurve, memory_curves
from planner.layout.price import reprice
from planner.schedule.orders import SCHEDULES
from planner.schedule.replay import replay
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.load import load_runtime


def curves_of(candidate: Candidate) -> tuple[MemoryCurve, ...]:
    return memory_curves(candidate, replay(candidate.order, candidate.durations))


def hold(candidate: Candidate) -> None:
    """Every curve's maximum is its rank's peak, it begins and ends with what outlives the step, and time goes on."""
    for curve, memory in zip(curves_of(candidate), candidate.memory, strict=True):
        assert curve.peak_bytes == memory.peak_allocated_bytes
        assert curve.activations_bytes.max() == memory.activations_bytes
        assert curve.times_s[0] == 0
        assert (np.diff(curve.times_s) >= 0).all()
        assert curve.times_s[-1] == pytest.approx(candidate.step_s, rel=3e-3)
        parts = (memory.weights_bytes, memory.gradients_bytes, memory.optimizer_bytes)
        assert sum(parts) <= curve.allocated_bytes.min() == curve.allocated_bytes[-1]
        assert curve.activations_bytes[-1] == curve.moment_bytes[-1] == 0
        assert min(curve.activations_bytes.min(), curve.moment_bytes.min()) >= 0


@pytest.mark.parametrize(
    "schedule", [name for name, kind in SCHEDULES.items() if kind.trains_one_copy and kind.max_pp > 1]
)
@pytest.mark.parametrize("moe", [None, MOE])
def test_the_maximum_is_the_peak_in_every_schedule(schedule: str, moe: dict[str, Any] | None) -> None:
    kind, pp = SCHEDULES[schedule], 4
    vpp = max(kind.min_vpp, min(kind.max_vpp, 2))
    problem = toy_problem(toy_model(11, moe=moe))
    uneven = Split((2, *[1] * (pp * vpp - 2), 11 - pp * vpp)) if vpp == 2 else Split((2, 4, 3, 2))
    table = problem.pricing.table(Shape.of(pp=pp, vpp=vpp, dp=2, num_microbatches=16, seq_length=2048))
    hold(Candidate(problem.pricing, table, uneven, schedule))


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("model", "num_gpus", "trainer", "dtype", "sizes"), LAYOUTS)
def test_the_maximum_is_the_peak_under_every_trainer(
    model: str, num_gpus: int, trainer: str, dtype: str, sizes: dict[str, Any]
) -> None:
    cluster = ClusterSpec(
        hardware=load_hardware("mi355x" if trainer.startswith("primus") else "h100"), num_gpus=num_gpus
    )
    training = TrainingSpec(seq_length=4096, global_batch_size=64, dtype=dtype)  # type: ignore[arg-type]
    plan = evaluate(model, cluster, training, Parallelism(**sizes), runtime=trainer)
    candidate = reprice(plan, plan.best)
    hold(candidate)
    peaks = [stage.memory.peak_allocated_bytes for stage in plan.stages]
    assert [curve.peak_bytes for curve in curves_of(candidate)] == peaks


def test_copies_of_gradients_are_there_while_the_optimizer_runs() -> None:
    """Few activations and 16-bit gradients: the copies are the peak, behind the last backward."""
    runtime = load_runtime("megatron").model_copy(update={"widens_gradients": True, "gradient_bytes": 2})
    problem = toy_problem(toy_model(8, vocab_size=2048), toy_cluster(1), toy_training(2, seq_length=64), runtime)
    candidate = Candidate(problem.pricing, problem.pricing.table(Shape.of(seq_length=64)), Split((8,)), "1f1b")
    hold(candidate)
    (curve,) = curves_of(candidate)
    assert curve.peak_s >= candidate.run().makespan_s
    assert curve.moment_bytes.max() == pytest.approx(4 * candidate.rank_costs[0].parameters, rel=1e-6)
