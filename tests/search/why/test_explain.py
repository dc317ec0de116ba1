"""Answers that are no plan say what stands in the way, how much is missing, and a change that lifts it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from toys import MOE, Problem, toy_cluster, toy_model, toy_problem, toy_training

from planner.answer import Plan
from planner.errors import Infeasible
from planner.layout.assemble import trade
from planner.search.search import plan
from planner.search.why import explain
from planner.specs.units import GIB


def solved(problem: Problem) -> Plan:
    return plan(problem.model, problem.cluster, problem.training, limits=problem.limits, runtime=problem.runtime)


def refusal(**changes: Any) -> Infeasible:
    with pytest.raises(Infeasible) as caught:
        solved(toy_problem(**changes))
    return caught.value


def missing_gib(error: Infeasible) -> float:
    found = re.search(r"lacks ([\d.,]+) GiB", error.message)
    assert found is not None
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize("memory_gib", [0.25, 0.5, 0.9])
def test_the_nearest_miss_is_named_in_gib(memory_gib: float) -> None:
    error = refusal(model=toy_model(12), cluster=toy_cluster(4, memory_gib=memory_gib))
    assert f"nothing fits in {memory_gib:g} GiB of 4 × toy-gpu" in error.message
    assert "does_not_fit" in error.message
    assert error.rejections["does_not_fit"] > 0
    # with so much more, it does
    enough = memory_gib + 1.25 * missing_gib(error) + 0.1
    assert solved(toy_problem(toy_model(12), toy_cluster(4, memory_gib=enough), top=1)).fits


def test_less_memory_misses_by_more() -> None:
    misses = [missing_gib(refusal(model=toy_model(12), cluster=toy_cluster(4, memory_gib=m))) for m in (0.9, 0.5, 0.25)]
    assert misses == sorted(misses)


@pytest.mark.parametrize("model", [toy_model(12), toy_model(12, moe=MOE)], ids=["dense", "experts"])
def test_the_number_of_gpus_that_would_do_is_the_least_to_a_node(model: Any) -> None:
    error = refusal(model=model, cluster=toy_cluster(4, memory_gib=0.9))
    found = re.search(r"it fits on (\d+) GPUs", error.hint or "")
    assert found is not None
    num_gpus = int(found[1])
    assert solved(toy_problem(model, toy_cluster(num_gpus, memory_gib=0.9), top=1)).fits
    assert num_gpus - 4 < 4 or refusal(model=model, cluster=toy_cluster(num_gpus - 4, memory_gib=0.9))


def test_looking_for_a_remedy_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = {"model": toy_model(12), "cluster": toy_cluster(5, memory_gib=0.9)}
    least = re.search(r"it fits on (\d+) GPUs", refusal(**problem).hint)
    assert refusal(**problem, time_limit_s=1e-9).hint == "add GPUs, or free a pinned axis"
    monkeypatch.setattr(explain, "NARROWING_S", 0.0)
    doubled = re.search(r"it fits on (\d+) GPUs", refusal(**problem).hint)
    assert least is not None
    assert doubled is not None
    assert int(least[1]) < int(doubled[1]) < 2 * int(least[1])
    assert solved(toy_problem(toy_model(12), toy_cluster(int(doubled[1]), memory_gib=0.9), top=1)).fits


@pytest.mark.parametrize(
    ("pin", "freed", "memory_gib"),
    [
        ({"recompute": ("none",)}, "recompute", 0.97),
        ({"micro_batch_size": (8,)}, "micro_batch_size", 1.3),
        ({"pp": (1,)}, "pp", 1.0),
        ({"tp": (1,)}, "tp", 1.0),
        ({"zero_stage": (0,), "dp": (4,)}, "dp", 1.2),
    ],
    ids=str,
)
def test_a_pin_in_the_way_is_named_and_freeing_it_helps(pin: dict[str, Any], freed: str, memory_gib: float) -> None:
    problem = {"model": toy_model(6), "cluster": toy_cluster(8, memory_gib=memory_gib), "training": toy_training(32)}
    error = refusal(**problem, **pin)
    assert f"do not pin {freed.replace('_', '-')}" in (error.hint or "")
    assert solved(toy_problem(**problem, **(pin | {freed: None}), top=1)).fits


def test_a_headroom_in_the_way_is_named_and_giving_it_up_helps() -> None:
    problem = {"model": toy_model(6), "cluster": toy_cluster(8, memory_gib=2.0)}
    error = refusal(**problem, memory_headroom_gib=1.8)
    assert "lower --memory-headroom from 1.8 GiB to 0" in (error.hint or "")
    assert solved(toy_problem(**problem, top=1)).fits


def test_nothing_legal_names_the_rule_that_left_nothing_over() -> None:
    error = refusal(model=toy_model(6), pp=(8,), tp=(1,))
    assert "no legal layout: pp 8" in error.message
    assert "6 layers" in error.message
    assert error.rejections == {"more_stages_than_layers": sum(error.rejections.values())}
    assert "free a pinned axis" in (error.hint or "")


_LEARNED = toy_model(6, gated_mlp=False, max_position_embeddings=1024)
_SINKS = toy_model(6, attention_sinks=True, sliding_window=512)
_FEW = {"runtime": "torchtitan", "pp": (4,), "training": toy_training(4), "micro_batch_size": (1,)}


@pytest.mark.parametrize(
    ("changes", "hint", "then"),
    [
        ({"model": _LEARNED}, "shorten the sequence", {"training": toy_training(8, 1024)}),
        ({"model": _SINKS, "cp": (2,)}, "cp 1, or another --runtime (torchtitan", {"runtime": "torchtitan"}),
        ({"model": _SINKS, "cp": (2,)}, "cp 1, or another --runtime (torchtitan", {"cp": (1,)}),
        ({"cp": (2,), "runtime": "megatron-2022"}, "use cp 1", {"cp": (1,)}),
        ({**_FEW, "dp": (2,)}, "pin a smaller pp, dp", {"dp": (1,)}),
        ({"tp": (8,)}, "add --tp-across-nodes", {"tp_across_nodes": True}),
        ({"tp": (8,), "cp": (2,)}, "more GPUs", {"cluster": toy_cluster(16), "tp_across_nodes": True}),
        ({"zero_stage": (3,)}, "free zero-stage", {"zero_stage": None}),
    ],
)
def test_the_hint_is_of_the_rule_and_following_it_helps(changes: Any, hint: str, then: dict[str, Any]) -> None:
    assert hint in (refusal(**changes).hint or "")
    assert solved(toy_problem(**changes | then, top=1)).fits


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": (3,)}, "heads_not_divisible_by_tp"),
        ({"tp": (8,)}, "tp_across_nvlink_domains"),
        ({"pp": (8,), "tp": (1,)}, "more_stages_than_layers"),
        ({"micro_batch_size": (3,)}, "global_batch_not_divisible"),
        ({"pp": (2,), "vpp": (9,), "schedule": ("interleaved-1f1b",)}, "no_schedule"),
        ({"cluster": toy_cluster(4, memory_gib=0.2), "tp": (1,), "pp": (1,)}, "does_not_fit"),
    ],
)
def test_one_reason_alone_is_the_only_one_counted(changes: dict[str, Any], reason: str) -> None:
    error = refusal(**({"cp": (1,)} | changes))
    # sizes that no head count has are left out of the grid whatever else is asked
    assert set(error.rejections) | {"heads_not_divisible_by_tp"} == {reason, "heads_not_divisible_by_tp"}
    assert f"× {reason}" in error.message


def test_counts_are_listed_largest_first() -> None:
    error = refusal(model=toy_model(12), cluster=toy_cluster(4, memory_gib=0.3))
    listed = [int(n.replace(",", "")) for n in re.findall(r"([\d,]+) × [a-z]+_", error.message)]
    assert listed == sorted(listed, reverse=True)
    assert sorted(listed) == sorted(error.rejections.values())


def test_what_an_alternative_trades() -> None:
    answer = solved(toy_problem(cluster=toy_cluster(8, memory_gib=3.0), training=toy_training(32)))
    assert answer.alternatives
    for other in answer.alternatives:
        slower = other.step.step_s / answer.step.step_s - 1
        more = (other.worst_stage.memory.total_bytes - answer.best.worst_stage.memory.total_bytes) / GIB
        assert other.trade.startswith(f"{slower:+.1%} time, {more:+.1f} GiB")
    same = trade(answer.best, answer.best)
    assert same == "+0.0% time, +0.0 GiB"
    assert answer.best.trade == ""
