"""What a step takes beside its pipeline, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
from toys import toy_cluster, toy_model, toy_problem, toy_training

from planner.layout.seconds import outside_pipeline
from planner.shape import Shape

FIRST = {"reduce_s": 5.0, "gather_s": 3.0, "forward_s": 1.0, "input_grad_s": 2.0, "weight_grad_s": 0.0}
"""Seconds of a rank, one micro-batch: exchanges, and nothing else than compute that hides them."""


def exposed(
    pp: int, vpp: int, zero_stage: int, schedule: str, ranks: Sequence[dict[str, float]] = (), **switches: float
) -> float:
    """Seconds of exchange that nothing hides, where all that passes could."""
    problem = toy_problem(toy_model(8), toy_cluster(8), toy_training(8))
    hides = dict.fromkeys(("gradient_overlap_fraction", "parameter_overlap_fraction", "fsdp_overlap_fraction"), 1.0)
    pricing = replace(problem.pricing, runtime=problem.pricing.runtime.model_copy(update=hides | switches))
    shape = Shape(pp=pp, vpp=vpp, dp=2, num_microbatches=4, seq_length=2048, zero_stage=zero_stage, shard_size=2)
    table = pricing.table(shape)
    nothing = dict.fromkeys((f.name for f in fields(table.head) if f.name.endswith("_s")), 0.0)
    costs = [replace(table.head, **{**nothing, **seconds}) for seconds in ranks or [FIRST] * pp]
    return outside_pipeline(pricing, table, costs, schedule).exposed_dp_s


@pytest.mark.parametrize(
    ("schedule", "pp", "vpp", "zero_stage", "exposed_s"),
    [
        ("none", 1, 1, 1, (5 - 2) + (3 - 1)),
        ("1f1b", 2, 1, 1, (5 - 2) + (3 - 1)),
        ("none", 1, 1, 2, 4 * (5 - 2) + (3 - 1)),  # gradients of each of four micro-batches
        ("none", 1, 1, 3, 4 * (5 + 2 * 3 - 3)),  # and weights twice
        ("1f1b", 2, 1, 3, (5 - 2) + (3 - 1)),  # gathered from the first micro-batch to the last
        ("interleaved-1f1b", 2, 2, 1, max((5 - 2) / 2, 5 - 1.5 * 2) + max((3 - 1) / 2, 3 - 1.5 * 1)),
        ("interleaved-1f1b", 4, 2, 1, (5 - 2) / 2 + (3 - 1) / 2),  # the last chunk's alone
        ("zb-v", 4, 2, 1, (5 - 2) + (3 - 1)),
    ],
)
def test_exposed_exchange(schedule: str, pp: int, vpp: int, zero_stage: int, exposed_s: float) -> None:
    assert exposed(pp, vpp, zero_stage, schedule) == pytest.approx(exposed_s)


@pytest.mark.parametrize(
    ("pp", "zero_stage", "exposed_s"), [(1, 1, 0.8 * (5 + 3)), (1, 2, 0.8 * (4 * 5 + 3)), (1, 3, 0.8 * 4 * (5 + 2 * 3))]
)
def test_what_is_hidden_slows_down_what_hides_it(pp: int, zero_stage: int, exposed_s: float) -> None:
    """More than the (5 - 2) + (3 - 1) that nothing hides."""
    assert exposed(pp, 1, zero_stage, "none", contention_fraction=0.8) == pytest.approx(exposed_s)


@pytest.mark.parametrize(("pp", "zero_stage", "exposed_s"), [(2, 3, 5 + (3 - 1)), (2, 1, (5 - 2) + (3 - 1))])
def test_torch_s_stages_wait_for_sharded_reductions(pp: int, zero_stage: int, exposed_s: float) -> None:
    assert exposed(pp, 1, zero_stage, "1f1b", has_torch_stages=True) == pytest.approx(exposed_s)


@pytest.mark.parametrize(
    ("schedule", "vpp", "exposed_s"),
    [
        ("1f1b", 1, (9 - 2 - 2) + (7 - 1 - 1)),  # what the second rank lacks, less a pass of the first
        ("interleaved-1f1b", 2, (9 - 1.5 * 2 - 2 / 2) + (7 - 1.5 * 1 - 1 / 2)),  # less a chunk's pass
        ("zb-h1", 1, (9 - 2) + (7 - 1 - 1)),  # whose weight gradients may come last on any rank
    ],
)
def test_the_rank_that_keeps_the_step_waiting_is_not_always_the_first(
    schedule: str, vpp: int, exposed_s: float
) -> None:
    ranks = [FIRST, FIRST | {"reduce_s": 9.0, "gather_s": 7.0}]
    assert exposed(2, vpp, 1, schedule, ranks) == pytest.approx(exposed_s)
