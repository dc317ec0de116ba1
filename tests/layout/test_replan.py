"""A saved plan is priced again to the same seconds, and an order made to measure survives the file."""

from __future__ import annotations

import json
from typing import Any

import pytest
from toys import MOE, Problem, toy_cluster, toy_model, toy_problem, toy_training

from planner.answer import Plan, PricedLayout
from planner.errors import SpecError
from planner.layout.evaluate import evaluate
from planner.layout.price import order_of, reprice, with_microbatches
from planner.plan_file import with_alternative
from planner.schedule.replay import makespan_s
from planner.search.search import plan
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import SearchLimits, TrainingSpec


def _plan(model: str, gpus: int, runtime: str = "megatron", **limits: object) -> Plan:
    cluster = ClusterSpec(hardware=load_hardware("h200"), num_gpus=gpus)
    training = TrainingSpec(seq_length=4096, global_batch_size=64)
    found = plan(
        load_model(model), cluster, training, limits=SearchLimits.model_validate({"top": 2, **limits}), runtime=runtime
    )
    return Plan.from_json(json.loads(json.dumps(found.to_json())))


def _pipeline_s(layout: PricedLayout, tail_s: float) -> float:
    parts = layout.step.breakdown
    return layout.step.step_s - parts.exposed_dp_s - parts.optimizer_s - tail_s


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("model", "limits"),
    [
        ("8b", {"pp": (4,)}),
        ("8b", {"pp": (2,), "recompute": ("full",)}),
        ("deepseek-v2-lite", {"pp": (2,), "vpp": (1,), "tp": (1,), "switches": "default"}),
        ("gpt-oss-20b", {"pp": (4,), "tp": (1,), "recompute": ("selective",), "switches": "default"}),
    ],
)
def test_a_saved_plan_is_priced_again_to_the_same_seconds(model: str, limits: dict[str, object]) -> None:
    saved = _plan(model, 16, **limits)
    again = reprice(saved, saved.best)
    expected = _pipeline_s(saved.best, float(again.table.tail_s))
    assert makespan_s(again.order, again.durations) == pytest.approx(expected, rel=1e-9)
    assert [round(float(rank.parameters)) for rank in again.rank_costs] == [
        stage.num_parameters for stage in saved.stages
    ]


def _searched(problem: Problem) -> Plan:
    found = plan(problem.model, problem.cluster, problem.training, limits=problem.limits, runtime=problem.runtime)
    return Plan.from_json(json.loads(json.dumps(found.to_json())))


@pytest.mark.parametrize(
    ("model", "limits"),
    [
        (toy_model(12), {"schedule": ("interleaved-1f1b",), "vpp": (3,)}),
        (toy_model(12, moe=MOE), {"schedule": ("1f1b",)}),
    ],
    ids=["chunks", "kinds"],
)
def test_layers_are_recomputed_where_they_were_saved_to_be(model: ModelSpec, limits: dict[str, Any]) -> None:
    """Chunks of a stage recompute unequal numbers of layers, or the later kind alone."""
    saved = _searched(
        toy_problem(
            model, toy_cluster(4, memory_gib=5.0), toy_training(32), "torch-eager", pp=(2,), tp=(2,), cp=(1,),
            micro_batch_size=(4,), zero_stage=(1,), top=1, memory_headroom_gib=0.0, **limits,
        )
    )  # fmt: skip
    again = reprice(saved, saved.best)
    expected = _pipeline_s(saved.best, float(again.table.tail_s))
    assert makespan_s(again.order, again.durations) == pytest.approx(expected, rel=1e-9)
    unsaid = [stage.model_copy(update={"num_recomputed": ()}) for stage in saved.stages]
    older = reprice(saved, saved.best.model_copy(update={"stages": tuple(unsaid)}))
    assert makespan_s(older.order, older.durations) != pytest.approx(expected, rel=1e-4), "stages only count them"
    assert sum(map(sum, older.split.recomputed)) >= sum(stage.recompute["full"] for stage in saved.stages)


def test_alternatives_keep_what_priced_them() -> None:
    """torchtitan compiles no layer whose backward is split, so that one plan may be priced for two runtimes."""
    saved = _searched(
        toy_problem(
            toy_model(8), training=toy_training(8, seq_length=4096), runtime="torchtitan", pp=(2, 4), cp=(1,),
            micro_batch_size=(1,), schedule=("1f1b", "zb-v"),
        )
    )  # fmt: skip
    layouts = (saved.best, *saved.alternatives)
    assert {layout.parallelism.schedule for layout in layouts} == {"1f1b", "zb-v"}
    for number, layout in enumerate(layouts):
        again = reprice(chosen := with_alternative(saved, number or None), chosen.best)
        assert again.pricing.runtime.compiled == chosen.runtime_spec.compiled == (not again.order.splits_backward)
        expected = _pipeline_s(layout, float(again.table.tail_s))
        assert makespan_s(again.order, again.durations) == pytest.approx(expected, rel=2e-3)


def test_an_order_made_to_measure_survives_the_file_and_is_no_slower() -> None:
    named = _plan("8b", 16, "torch-eager", pp=(4,), schedule=("1f1b", "interleaved-1f1b", "zb-h1", "zb-v"))
    measured = _plan("8b", 16, "torch-eager", pp=(4,), schedule=("auto",))
    assert measured.step.step_s <= named.step.step_s * (1 + 1e-9)
    again = reprice(measured, measured.best)
    expected = _pipeline_s(measured.best, float(again.table.tail_s))
    assert makespan_s(again.order, again.durations) == pytest.approx(expected, rel=1e-9)
    if measured.best.actions:
        assert measured.parallelism.schedule == "auto"
        assert [" ".join(map(str, actions)) for actions in order_of(measured.best).ranks] == list(measured.best.actions)


def test_a_shorter_step_has_the_micro_batches_asked_for() -> None:
    saved = _plan("8b", 16, pp=(4,))
    assert order_of(with_microbatches(saved.best, 8)).num_microbatches == 8
    with pytest.raises(SpecError, match="made to measure"):
        with_microbatches(saved.best.model_copy(update={"actions": ("0F0",)}), 4)
    with pytest.raises(SpecError, match="0 is below 1"):
        with_microbatches(saved.best, 0)


def test_what_a_plan_chose_is_evaluated_to_its_step() -> None:
    """With its recipe, and with the one layer of 32 that is recomputed whole."""
    model, cluster = load_model("8b"), ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    training = TrainingSpec(seq_length=8192, global_batch_size=512)
    found = plan(model, cluster, training)
    layout = found.best.parallelism
    assert layout.recompute_num_layers == found.best.stages[0].recompute["full"] < 32
    assert evaluate(model, cluster, training, found.best).step.step_s == pytest.approx(found.step.step_s, rel=1e-9)
    again = evaluate(model, cluster, training, layout.replace(), runtime=found.runtime_spec)
    assert again.step.step_s == pytest.approx(found.step.step_s, rel=1e-9)
    assert layout.replace(recompute="none").recompute_num_layers is None
