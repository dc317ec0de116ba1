"""The order of the ranks goes into the files of trainers that have it, and comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from planner.answer import Plan
from planner.export.export import bundle_of
from planner.export.import_run import read_configuration
from planner.layout.evaluate import evaluate
from planner.layout.runs import parse_run
from planner.shape import RANK_ORDERS

Planned = Callable[..., Plan]
OWN, DP_OUTERMOST = RANK_ORDERS
OPTION = "--use-tp-pp-dp-mapping"


@pytest.mark.thorough(3)
@pytest.mark.parametrize("order", RANK_ORDERS)
@pytest.mark.parametrize("target", ["megatron", "bridge"])
@pytest.mark.parametrize(
    "job",
    [
        {"model": "llama-3.1-8b", "gpus": 16, "pp": 2, "tp": 2},
        {"model": "llama-3.1-8b", "gpus": 16, "pp": 2, "cp": 2},
        {"model": "mixtral-8x7b", "gpus": 64, "pp": 4, "tp": 4, "ep": 4},
    ],
    ids=["dense", "context", "mixture"],
)
def test_an_order_comes_back_at_its_price(planned: Planned, job: dict[str, Any], target: str, order: str) -> None:
    plan = planned(**job, rank_order=order)
    text = bundle_of(plan, target, force=True).files[0].text
    assert (OPTION in text or "dist.use_tp_pp_dp_mapping=true" in text) is (order == DP_OUTERMOST)
    imported = read_configuration(text)
    assert imported.unknown == {}
    run = parse_run({"run": imported.complete(num_gpus=job["gpus"], model=job["model"], hardware="h100")})
    again = evaluate(run.model, run.cluster, run.training, run.parallelism, runtime=run.runtime)
    assert again.best.rank_order == order
    assert again.step.step_s == pytest.approx(plan.step.step_s, rel=1e-6)


def test_dense_models_are_given_as_many_replicas_of_experts(planned: Planned) -> None:
    """Megatron core asks for it where there are none, too (parallel_state.py; its own tests …_dp_last say etp 4)."""
    text = bundle_of(planned("llama-3.1-8b", 16, pp=2, cp=2, tp=2, rank_order=DP_OUTERMOST), "megatron").files[0].text
    assert "--expert-tensor-parallel-size: 4" in text
    alone = bundle_of(planned("llama-3.1-8b", 16, pp=2, tp=2, rank_order=DP_OUTERMOST), "megatron").files[0].text
    assert "--expert-tensor-parallel-size" not in alone


def test_another_trainer_is_priced_in_its_own_order(planned: Planned) -> None:
    plan = planned("llama-2-7b", 16, pp=2, rank_order=DP_OUTERMOST)
    own = planned("llama-2-7b", 16, pp=2, runtime="torch-eager")
    (note,) = (note for note in bundle_of(plan, "torch", force=True).notes if "priced for" in note)
    assert f"priced for torch-eager: {own.step.step_s:.4g} s" in note
