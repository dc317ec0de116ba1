"""The largest cause is the item that loses most, in words that hold for these two layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from planner.answer import Plan, PricedLayout
from planner.report.causes import largest_cause, memory_differences, says_misfit, says_slower, step_differences
from planner.report.format import MEMORY

MakePlan = Callable[..., Plan]


def _slower(plan: Plan, item: str, by_s: float, **layout: Any) -> Plan:
    """The plan with one item of its step longer."""
    step = plan.step
    breakdown = step.breakdown.model_copy(update={item: getattr(step.breakdown, item) + by_s})
    best = plan.best.model_copy(
        update={
            "step": step.model_copy(update={"step_s": step.step_s + by_s, "breakdown": breakdown}),
            "parallelism": plan.parallelism.model_copy(update=layout),
        }
    )
    return plan.model_copy(update={"best": best})


@pytest.mark.parametrize(
    ("item", "layout", "words"),
    [
        ("compute_s", {"recompute": "selective", "recompute_modules": ("core_attn",)}, "every layer (core_attn)"),
        ("compute_s", {"num_gpus_used": 1024}, "uses 1,024 GPUs of 2,048"),
        ("compute_s", {"tp": 16}, "smaller and reach less of the peak: tp 16 with 1 sequence"),
        ("compute_s", {"cp": 2, "micro_batch_size": 2}, "shorter blocks over 2 ranks than over 1"),
        ("tp_comm_s", {"tp": 16}, "tp 16 leaves the NVLink domain of 8"),
        ("tp_comm_s", {"tp": 4}, "between 4 GPUs, in the best between 8"),
        ("cp_comm_s", {"cp": 4}, "go round 4 ranks, across nodes; in the best they stay"),
        ("ep_comm_s", {"ep": 64}, "experts on 512 ranks, more than the 8 of an NVLink domain; in the best on 8"),
        ("pp_comm_s", {"schedule": "zb-h1"}, "zb-h1 waits"),
        ("exposed_dp_s", {"dp": 64, "shard_size": 64}, "3.2B parameters a rank are exchanged over 64 ranks and"),
        ("exposed_dp_s", {"dp": 64, "shard_size": 8}, "over 64 ranks (8 a shard group) and"),
        ("bubble_s", {"pp": 32}, "32 stages for 128 micro-batches; in the best 16 stages"),
        ("optimizer_s", {"zero_stage": 0}, "sharded over none, the best's over 16 ranks"),
        ("overhead_s", {"num_microbatches": 512}, "starts 512 micro-batches a step, in the best 128"),
    ],
)
def test_the_item_that_loses_most_is_the_cause(
    make_plan: MakePlan, item: str, layout: dict[str, Any], words: str
) -> None:
    best = make_plan()
    other = _slower(best, item, 2.0, **layout)
    cause = largest_cause(best.best, other.best, best.cluster)
    assert (cause.item, cause.difference_s) == (item, pytest.approx(2.0))
    assert words in cause.because
    assert f"mostly by {cause.label} (+2.00 s)" in says_slower(best, other, cause, 0.005)


def test_a_smaller_node_has_a_smaller_domain(make_plan: MakePlan) -> None:
    """Nodes of 4 H100, as the user says: their links join 4, whatever the profile's join."""
    best = make_plan()
    cluster = best.cluster.model_copy(update={"gpus_per_node": 4})
    cause = largest_cause(best.best, _slower(best, "tp_comm_s", 2.0).best, cluster)
    assert "tp 8 leaves the NVLink domain of 4 GPUs" in cause.because


def test_a_difference_below_what_searches_are_exact_to_is_no_difference(make_plan: MakePlan) -> None:
    best = make_plan()
    other = _slower(best, "bubble_s", 0.05)
    says = says_slower(best, other, largest_cause(best.best, other.best, best.cluster), 0.005)
    assert says.startswith("It is as fast: 0.23% slower")


def test_a_pin_can_be_faster_than_what_is_tried_without_it(make_plan: MakePlan) -> None:
    best = make_plan()
    other = _slower(best, "bubble_s", -1.0)
    says = says_slower(best, other, largest_cause(best.best, other.best, best.cluster), 0.005)
    assert says.startswith("It is 4.5% faster, mostly by pipeline bubble, 1.00 s less")


def test_differences_hold_every_item_and_add_up(make_plan: MakePlan) -> None:
    best, other = make_plan(), make_plan(total_gib=64.0, step_s=25.0)
    steps = step_differences(best.best, other.best)
    assert {one.item for one in steps} == set(type(best.step.breakdown).model_fields)
    assert sum(one.change for one in steps) == pytest.approx(25.0 - 22.08)
    memories = memory_differences(best.best, other.best)
    assert [one.item for one in memories] == list(MEMORY)
    assert memories[-1].change == sum(one.change for one in memories[:-1])


def test_a_misfit_names_the_stage_and_what_it_lacks(make_plan: MakePlan) -> None:
    layout: PricedLayout = make_plan(total_gib=90.0, fits=False).best
    says = says_misfit(layout, make_plan().cluster, 0.0)
    assert "needs 90.0 GiB on stage 0, 10.9 GiB more than the GPU's 79.1" in says
    assert "activations, 52.0 GiB" in says
    assert "12.9 GiB more than the GPU's 79.1 less 2 of headroom" in says_misfit(layout, make_plan().cluster, 2.0)
