"""The compute of a step is cut into terms that add up to it, and that move with what they are named after."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.answer import Plan
from planner.layout.evaluate import evaluate
from planner.layout.price import reprice
from planner.layout.step import compute_terms
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec


def plan_of(model: str, seq_length: int = 4096, dtype: Any = "bf16", **layout: Any) -> Plan:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=32)
    training = TrainingSpec(seq_length=seq_length, global_batch_size=64, dtype=dtype)
    return evaluate(load_model(model), cluster, training, Parallelism(**layout))


def terms_of(plan: Plan) -> dict[str, float]:
    candidate = reprice(plan, plan.best)
    return compute_terms(candidate, int(np.argmax(candidate.run().busy_s)))


DENSE = {"tp": 4, "pp": 4, "dp": 2}
PLANS: dict[str, dict[str, Any]] = {
    "dense": {"model": "8b", **DENSE},
    "recomputed": {"model": "8b", **DENSE, "recompute": "full"},
    "narrow": {"model": "8b", **DENSE, "dtype": "fp8"},
    "interleaved": {"model": "8b", **DENSE, "vpp": 2, "schedule": "interleaved-1f1b"},
    "mixture": {"model": "qwen3-30b", "tp": 1, "pp": 2, "dp": 16, "ep": 8},
    "multi-token prediction": {"model": "glm-4.5-air", "tp": 1, "pp": 2, "dp": 16, "ep": 16},
}


@pytest.mark.parametrize("job", PLANS.values(), ids=list(PLANS))
def test_the_terms_add_up_to_the_compute_of_the_step(job: dict[str, Any]) -> None:
    plan = plan_of(**job)
    terms = terms_of(plan)
    compute_s = plan.step.breakdown.compute_s
    assert sum(terms.values()) == pytest.approx(compute_s, rel=1e-9)
    assert min(terms.values()) > -1e-9 * compute_s
    assert terms["products_s"] > 0.3 * compute_s


def test_each_term_is_of_what_it_names() -> None:
    plain = terms_of(plan_of("8b", **DENSE))
    longer = terms_of(plan_of("8b", seq_length=16384, **DENSE))
    recomputed = terms_of(plan_of("8b", recompute="full", **DENSE))
    narrow = terms_of(plan_of("8b", dtype="fp8", **DENSE))
    assert longer["attention_s"] / plain["attention_s"] > 8  # four times the tokens, each over four times the keys
    assert longer["products_s"] / plain["products_s"] == pytest.approx(4, rel=0.1)
    assert (plain["recompute_s"], recomputed["products_s"]) == (0.0, plain["products_s"])
    # a forward is a third of a layer's products, and repeated
    assert 0.2 < recomputed["recompute_s"] / (plain["products_s"] + plain["attention_s"]) < 0.5
    assert narrow["products_s"] < 0.75 * plain["products_s"]
    assert narrow["attention_s"] == pytest.approx(plain["attention_s"])
