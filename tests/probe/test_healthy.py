"""No healthy GPU disagrees with a plan, and one that is slow where it matters does.

The ranks' own code runs on fake GPUs. Each kernel and exchange takes what our formulas say, one by one
(`healthy_kernels.py`), while the verdict comes from the operator lists. `scripts/healthy` does so for many more plans.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from healthy_gpus import Health, probed  # noqa: E402
from healthy_plans import described, random_plan  # noqa: E402
from small_plans import plan_of  # noqa: E402

from planner.answer import Plan  # noqa: E402
from planner.probe.result import ProbeResult  # noqa: E402
from planner.specs.registry import load_model  # noqa: E402

# torch 2.13 has new names for exchanges
pytestmark = pytest.mark.filterwarnings("ignore:.torch.distributed.*is deprecated:FutureWarning")


def off(result: ProbeResult) -> set[str]:
    return {comparison.name for comparison in result.comparisons if comparison.agrees is False}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("seed", [2, 4, 5, 6, 7])  # the quickest
def test_no_healthy_gpu_disagrees(seed: int) -> None:
    random = Random(seed)
    plan = random_plan(random, layers_per_chunk=1, most_stages=2)
    health = Health(host=random.choice((0.3, 1.0)), waits=random.choice((0, 1)), prefers=random.choice(KERNELS))
    result = probed(plan, plan.cluster.num_gpus if seed % 2 else None, health)
    assert (off(result), result.agrees) == (set(), True), described(plan)


KERNELS = ("cudnn", "flash")


def small(model: str, num_layers: int, num_gpus: int, seq_length: int = 4096, **layout: Any) -> Plan:
    spec = load_model(model)
    spec = type(spec)(**{**spec.model_dump(exclude_unset=True), "num_hidden_layers": num_layers})
    sizes = {"tp": 1, "pp": 1, "dp": 1, **layout}
    return plan_of(spec, num_gpus, seq_length, 4 * sizes["dp"], **sizes)


SLOW: dict[str, tuple[Plan, set[str]]] = {
    "product": (small("70b", 2, 2, tp=2), {"forward", "backward"}),
    "attention": (small("8b", 4, 1, seq_length=131072), {"forward", "backward"}),
    "stream": (small("8b", 2, 2, pp=2), {"optimizer"}),
    "exchange": (small("70b", 2, 8, tp=8), {"forward", "pipeline"}),
}
"""For each kind of kernels, a plan where it matters, and what is off if it is slow."""


@pytest.mark.thorough(2)
@pytest.mark.parametrize("kind", SLOW)
def test_a_gpu_that_is_slow_in_one_kind_of_kernels_is_noticed(kind: str) -> None:
    plan, names = SLOW[kind]
    factor = 2.5 if kind == "exchange" else 1.25
    assert off(probed(plan, plan.cluster.num_gpus, Health(slow={kind: factor}))) >= names
