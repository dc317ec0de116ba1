"""The tensors alive at a peak add up to it, item by item, and are those that the layer's operators keep."""

import json
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pinned_numbers import LAYOUTS, layouts
from refusals import refused
from tables import beside
from toys import MOE, Problem, toy_cluster, toy_model, toy_problem, toy_training

from planner.answer import Plan, PricedLayout
from planner.errors import SpecError
from planner.layout.alive import MAX_ACTIONS, MemoryOfStage, MemoryTensor, explore, shown, step_of
from planner.layout.candidate import Candidate, Split
from planner.layout.evaluate import evaluate
from planner.layout.memory_curve import MemoryCurve, memory_curves
from planner.layout.price import order_of, reprice, with_microbatches
from planner.layout.variation import settled
from planner.physics.operators import DTYPE_BYTES
from planner.plan_file import with_alternative
from planner.schedule.orders import SCHEDULES
from planner.schedule.replay import makespan_s, replay
from planner.search.search import plan
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import AdapterSpec, Dtype, Parallelism, SearchLimits, TrainingSpec
from planner.trainers.load import load_runtime
from planner.trainers.spec import RuntimeSpec

TABLES = beside(__file__)

COPIES = "fp32 copies of gradients, beyond what is free"
ITEMS = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
LAYOUTS_ON_CURVES: tuple[tuple[str, int, str, str, dict[str, Any]], ...] = TABLES["layouts_on_curves"]


def plan_of(model: str, num_gpus: int, trainer: str | RuntimeSpec, dtype: str, sizes: dict[str, Any]) -> Plan:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=4096, global_batch_size=32, dtype=dtype)  # type: ignore[arg-type]
    return evaluate(model, cluster, training, Parallelism(**sizes), runtime=trainer)


def explored(plan: Plan, *stages: int) -> tuple[Candidate, list[MemoryOfStage]]:
    candidate = reprice(plan, plan.best)
    return candidate, [*explore(plan, plan.best, candidate, stages).stages]


@pytest.mark.thorough(3)
@pytest.mark.parametrize("job", LAYOUTS_ON_CURVES, ids=lambda job: f"{job[0]} {job[2]} {job[3]}")
def test_they_add_up_to_the_peak_and_to_the_plans_items(job: Any) -> None:
    plan = plan_of(*job)
    ends = sorted({0, len(plan.best.stages) - 1})
    candidate, stages = explored(plan, *ends)
    for stage, planned in zip(stages, (plan.best.stages[end].memory for end in ends), strict=True):
        assert sum(tensor.bytes for tensor in stage.tensors) == stage.peak_bytes == planned.peak_allocated_bytes
        for item in ITEMS:
            listed = sum(tensor.bytes for tensor in stage.tensors if tensor.item == item)
            assert listed == getattr(planned, f"{item}_bytes"), item
        assert max(most for _, most in stage.curve) == stage.peak_bytes
        for tensor in stage.tensors:
            assert tensor.name != "others", "a formula counts what no list of tensors names"
            assert (tensor.shape is None) == (tensor.dtype is None)
            assert tensor.shape is not None or tensor.note
            assert tensor.from_s <= tensor.to_s <= stage.curve[-1][0]
        gone = {one.item for one in stage.tensors if not one.from_s <= stage.peak_s <= one.to_s}
        assert gone <= ({"activations", "logits", "workspace"} if named(stage, COPIES) else set())
    timeline = replay(candidate.order, candidate.durations)
    for curve in (memory_curves(candidate, timeline)[end] for end in ends):
        tensors, events = step_of(candidate, timeline, curve)
        assert (
            max(accumulate(tensors[one.tensor].bytes * (1 if one.is_made else -1) for one in events))
            == curve.peak_bytes
        )
        assert min(tensor.bytes for tensor in tensors) >= 0
        freed = {event.tensor for event in events if not event.is_made}
        kept = [tensor for number, tensor in enumerate(tensors) if number not in freed]
        assert sum(tensor.bytes for tensor in kept) == curve.allocated_bytes[-1]


OLMOE_EXPERTS = 16 * 64 * 3 * 2048 * 1024
FROZEN = [
    ("llama-3.2-1b", 4, "none"),
    ("llama-3.2-1b", 16, "none"),
    ("llama-3.2-1b", 16, "full"),
    ("olmoe-1b-7b", 4, "none"),
]


@pytest.mark.parametrize(("name", "bits", "recompute"), FROZEN)
def test_frozen_weights_have_rows_and_neither_gradients_nor_states(name: str, bits: int, recompute: Any) -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=2)
    adapters = AdapterSpec.model_validate({"base_bits": bits})
    training = TrainingSpec(seq_length=2048, global_batch_size=4, adapters=adapters)
    # a recomputed layer's backward finds what the head kept gone
    runtime = load_runtime("hf").with_features({"liger": recompute == "full"})[0]
    plan = evaluate(name, cluster, training, Parallelism(recompute=recompute), runtime=runtime)
    _, (stage,) = explored(plan, 0)
    planned = plan.best.stages[0].memory
    assert sum(tensor.bytes for tensor in stage.tensors) == stage.peak_bytes == planned.peak_allocated_bytes
    for item in ITEMS:
        listed = sum(tensor.bytes for tensor in stage.tensors if tensor.item == item)
        assert listed == getattr(planned, f"{item}_bytes"), item
    frozen = [tensor for tensor in stage.tensors if tensor.name.endswith(" frozen")]
    assert sum(tensor.bytes for tensor in frozen) == pytest.approx(planned.frozen_weights_bytes, rel=1e-6)
    # bitsandbytes packs no experts that transformers stacks
    experts = sum(tensor.bytes for tensor in frozen if tensor.name.startswith("experts"))
    assert experts == (2 * OLMOE_EXPERTS if name.startswith("olmoe") else 0)
    others = [tensor.name for tensor in stage.tensors if tensor.item in ("gradients", "optimizer")]
    assert others
    assert all("lora_" in name for name in others)


@pytest.fixture(scope="module")
def piped() -> MemoryOfStage:
    """Stage 0 of Llama 3.1 8B on four stages of two chunks with tp 2, at a sequence of 4,096."""
    return explored(plan_of(*LAYOUTS_ON_CURVES[0]), 0)[1][0]


def named(stage: MemoryOfStage, name: str) -> list[MemoryTensor]:
    return [tensor for tensor in stage.tensors if tensor.name == name]


def test_whole_tensors_have_the_bytes_of_their_shapes(piped: MemoryOfStage) -> None:
    whole = [tensor for tensor in piped.tensors if tensor.shape is not None and not tensor.note]
    assert len(whole) > 0.9 * len(piped.tensors)
    for tensor in whole:
        assert tensor.shape is not None
        assert tensor.dtype is not None
        assert tensor.bytes == prod(tensor.shape) * DTYPE_BYTES[tensor.dtype], tensor


def test_shapes_are_those_of_the_rank(piped: MemoryOfStage) -> None:
    """hidden_size 4096, 32 heads and 8 of keys of 128, intermediate_size 14336, two ranks of tensor parallelism."""
    assert {tensor.shape for tensor in named(piped, "qkv")} == {(4096, 3072)}
    assert {tensor.shape for tensor in named(piped, "attention norm: input")} == {(2048, 4096)}
    assert {tensor.shape for tensor in named(piped, "mlp up weight")} == {(14336, 4096)}
    assert {tensor.shape for tensor in named(piped, "embedding weight")} == {(64128, 4096)}
    assert {tensor.dtype for tensor in named(piped, "qkv weight gradient")} == {"fp32"}


def test_micro_batches_in_flight_are_those_that_the_schedule_holds(piped: MemoryOfStage) -> None:
    """Interleaved 1F1B holds (v − 1)·p + 2·(p − 1) + 1 forwards on the first of p = 4 ranks with v = 2 chunks."""
    inputs = named(piped, "attention norm: input")
    flying = {(tensor.layer, tensor.microbatch) for tensor in inputs}
    assert len(flying) == len(inputs) == 11 * 4
    for tensor in inputs:
        assert tensor.made_by == f"forward of micro-batch {tensor.microbatch}"
        assert tensor.freed_by == f"backward of micro-batch {tensor.microbatch}"
    assert {tensor.freed_by for tensor in named(piped, "qkv weight")} == {""}


def test_recomputed_layers_keep_their_input_alone() -> None:
    _, (stage,) = explored(plan_of(*LAYOUTS_ON_CURVES[4]), 1)
    recomputed = {tensor.layer for tensor in named(stage, "layer input")}
    assert recomputed == {16, 17, 18}
    kept = {tensor.name for tensor in stage.tensors if tensor.layer in recomputed and tensor.item == "activations"}
    assert kept == {"layer input"}
    assert all("full" not in tensor.remade_by for tensor in named(stage, "attention norm: input"))


def test_ranks_that_share_a_weight_hold_a_part_each() -> None:
    plan = plan_of("llama-3.1-8b", 8, load_runtime("megatron").with_features({"gtp": 2})[0], "bf16", {"tp": 2, "dp": 4})
    _, (stage,) = explored(plan, 0)
    static = [tensor for tensor in stage.tensors if tensor.item in ("weights", "gradients")]
    assert "others" not in {tensor.name for tensor in static}
    memory = plan.best.stages[0].memory
    assert sum(tensor.bytes for tensor in static) == memory.weights_bytes + memory.gradients_bytes


def test_narrow_products_keep_their_inputs_cast() -> None:
    _, (stage,) = explored(plan_of(*LAYOUTS_ON_CURVES[1]), 0)
    assert {tensor.dtype for tensor in named(stage, "attention norm: output")} == {"fp8"}
    assert {tensor.dtype for tensor in named(stage, "attention norm: input")} == {"bf16"}
    # with a sharded optimizer the masters are cast straight to fp8, as they are and transposed
    casts = named(stage, "qkv weight cast")
    assert {(tensor.shape, tensor.dtype, tensor.bytes) for tensor in casts} == {
        ((2, 3072, 4096), "fp8", 2 * 3072 * 4096)
    }
    assert not named(stage, "qkv weight")


def test_changes_are_priced_and_free_memory(piped: MemoryOfStage) -> None:
    plan = plan_of(*LAYOUTS_ON_CURVES[0])
    answer = explore(plan, plan.best, reprice(plan, plan.best), (0,))
    assert {"recompute all layers", "recompute mlp"} <= {change.change for change in answer.changes}
    steps_s = [change.step_s for change in answer.changes]
    assert steps_s == sorted(steps_s)
    assert all(change.peak_bytes[0] < piped.peak_bytes for change in answer.changes)
    full = next(change for change in answer.changes if change.change == "recompute all layers")
    sizes = Parallelism(**LAYOUTS_ON_CURVES[0][4], recompute="full")
    again = evaluate(plan.model.spec, plan.cluster, plan.training, sizes, runtime="megatron").best
    assert full.step_s == pytest.approx(again.step.step_s, rel=1e-3)
    assert full.peak_bytes == tuple(stage.memory.peak_allocated_bytes for stage in again.stages)


def test_of_a_step_too_long_to_show_a_shorter_one_has_the_same_peaks() -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=4)
    training = TrainingSpec(seq_length=512, global_batch_size=MAX_ACTIONS)
    plan = evaluate("llama-3.1-8b", cluster, training, Parallelism(pp=4), runtime="megatron")
    candidate = shown(reprice(plan, plan.best))
    assert candidate.num_microbatches < 100
    stages = explore(plan, plan.best, candidate, range(4)).stages
    assert [stage.peak_bytes for stage in stages] == [one.memory.peak_allocated_bytes for one in plan.best.stages]


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
        assert curve.activations_bytes[-1] == 0
        assert curve.activations_bytes.min() >= 0


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
def test_the_peak_under_every_trainer(
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
    assert curve.peak_bytes - curve.allocated_bytes[-1] == pytest.approx(
        4 * candidate.rank_costs[0].parameters, rel=1e-6
    )


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
@pytest.mark.parametrize(("model", "limits"), TABLES["a_saved_plan_is_priced_again_to_the_same_seconds"])
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
            micro_batch_size=(1,), schedule=("1f1b", "zb-v"), zero_stage=(3,),
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


def cluster(hardware: str, num_gpus: int = 64) -> ClusterSpec:
    return ClusterSpec(hardware=load_hardware(hardware), num_gpus=num_gpus)


@pytest.mark.parametrize(("runtime", "hardware", "dispatcher", "once"), TABLES["a_dispatcher_that_the_version_has"])
def test_a_dispatcher_that_the_version_has(runtime: str, hardware: str, dispatcher: str, once: bool) -> None:
    found = settled(load_runtime(runtime), cluster(hardware), load_model("deepseek-v3"))
    assert (found.dispatcher, found.sends_tokens_once) == (dispatcher, once)


def test_a_given_layout_is_priced_with_it() -> None:
    def priced_with(runtime: str) -> tuple[object, bool]:
        training = TrainingSpec(seq_length=4096, global_batch_size=256)
        plan = evaluate("qwen3-30b", cluster("gb200"), training, Parallelism(ep=16, dp=64), runtime=runtime)
        return plan.best.recipe["dispatcher"], plan.runtime_spec.sends_tokens_once

    assert priced_with("megatron@0.15") == ("alltoall", False)
    assert priced_with("megatron@0.16") == priced_with("megatron") == ("hybridep", True)


def priced(dtype: Dtype, runtime: str) -> str:
    training = TrainingSpec(seq_length=4096, global_batch_size=256, dtype=dtype)
    return evaluate("llama-3.1-8b", cluster("b200"), training, Parallelism(dp=64), runtime=runtime).training.dtype


def test_four_bits_came_with_a_version() -> None:
    assert (priced("nvfp4", "megatron@0.15"), priced("mxfp8", "megatron@0.14")) == ("nvfp4", "mxfp8")
    with refused("megatron 0.14 has no such recipe, which came with 0.15", "--runtime megatron@0.15 has it"):
        priced("nvfp4", "megatron@0.14")


PINNED = json.loads((Path(__file__).parents[1] / "pinned" / "layouts.json").read_text())


def test_layouts_are_priced_as_before() -> None:
    now = layouts()
    assert now.keys() == PINNED.keys()
    changed = [name for name, values in now.items() if values != pytest.approx(PINNED[name], rel=1e-9)]
    assert not changed, f"{len(changed)} layouts changed, such as {changed[0]}"
