"""The whole step is replayed with the seconds of stages that ran alone, however many micro-batches it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the probe extra (torch)")

from small_plans import SMALL, plan_of

from planner.probe.eager import in_eager_torch, repriced
from planner.probe.result import ChunkSeconds
from planner.probe.verdict.compare import replayed_step_s
from planner.specs.model import ModelSpec

MODEL = ModelSpec.model_validate(SMALL)


@pytest.mark.parametrize("batch", [8, 10**7])
def test_stages_as_fast_as_planned_make_the_planned_step(batch: int) -> None:
    eager = in_eager_torch(plan_of(MODEL, 2, 32, batch, tp=1, cp=1, pp=2, dp=1), alone=True)

    def stages(factor: float) -> list[Any]:
        return [
            SimpleNamespace(chunks=[
                ChunkSeconds(
                    stage=stage,
                    forward_s=factor * float(cost.forward_s),
                    backward_s=factor * float(cost.input_grad_s + cost.weight_grad_s),
                    weight_grad_s=factor * float(cost.weight_grad_s),
                )
            ])
            for stage, cost in enumerate(repriced(eager).costs)
        ]  # fmt: skip

    planned_s = eager.step.step_s
    assert replayed_step_s(eager, stages(1.0)) == pytest.approx(planned_s)
    assert planned_s * 1.01 < replayed_step_s(eager, stages(2.0)) < planned_s * 2
