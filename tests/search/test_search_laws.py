"""Laws of the search over random jobs: more of a resource finds no slower plan, proven is what it says."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from laws.counting import law
from toys import MOE, solved, toy_cluster, toy_model, toy_problem, toy_training

from planner.answer import Plan
from planner.errors import Infeasible
from planner.trainers.load import RUNTIMES

WORSE = {"memory_gib": 4.0, "nvlink_gb_per_s": 100.0, "network_gb_per_s": 2.0, "hbm_gb_per_s": 1500.0, "tflops": 400.0}
"""A poor GPU: each of these is doubled, or more, by itself."""
HIDDEN_LESS = 5e-4
"""A rank that is not the busiest computes faster on a faster GPU, and hides less of its exchange of gradients."""
MODELS: list[dict[str, Any]] = [{}, {"moe": MOE}, {"tie_word_embeddings": True, "vocab_size": 96_000}]


def best(resources: dict[str, float], layers: int, design: dict[str, Any], batch: int, trainer: str) -> Plan | None:
    problem = toy_problem(
        toy_model(layers, **design), toy_cluster(8, **resources), toy_training(batch), trainer, top=1, cp=(1,)
    )
    try:
        return solved(problem)
    except Infeasible:
        return None


@law(5)
@given(
    resource=st.sampled_from(sorted(WORSE)),
    times=st.sampled_from([2.0, 5.0]),
    layers=st.integers(4, 7),
    design=st.sampled_from(MODELS),
    batch=st.sampled_from([8, 24]),
    trainer=st.sampled_from(sorted(RUNTIMES)),
)
def test_more_of_a_resource_finds_no_slower_plan(
    resource: str, times: float, layers: int, design: dict[str, Any], batch: int, trainer: str
) -> None:
    before = best(WORSE, layers, design, batch, trainer)
    after = best(WORSE | {resource: times * WORSE[resource]}, layers, design, batch, trainer)
    if before is None:
        return
    for answer in (before, after):
        assert answer.search.outcome != "feasible"
        assert (answer.search.outcome == "proven") == (answer.search.gap <= 0.005 * (1 + 1e-9))
    assert after.step.step_s <= before.step.step_s * (1 + after.search.gap + HIDDEN_LESS)
