"""The tensors alive at a peak add up to it, item by item, and are those that the layer's operators keep."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from planner.answer import Plan
from planner.answer.memory import MemoryOfStage, MemoryTensor
from planner.layout.alive import MAX_ACTIONS, explore, shown, step_of
from planner.layout.candidate import Candidate
from planner.layout.evaluate import evaluate
from planner.layout.memory_curve import memory_curves
from planner.layout.price import reprice
from planner.physics.operators import DTYPE_BYTES
from planner.schedule.replay import replay
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware
from planner.specs.training import AdapterSpec, Parallelism, TrainingSpec

COPIES = "fp32 copies of gradients, beyond what is free"
ITEMS = ("weights", "gradients", "optimizer", "activations", "logits", "workspace")
LAYOUTS: tuple[tuple[str, int, str, str, dict[str, Any]], ...] = (
    ("llama-3.1-8b", 16, "megatron", "bf16", {"tp": 2, "pp": 4, "vpp": 2, "micro_batch_size": 1}),
    ("llama-3.1-8b", 16, "megatron", "fp8", {"tp": 2, "cp": 4, "pp": 2, "recompute": "selective"}),
    ("llama-3.1-8b", 16, "torchtitan", "bf16", {"pp": 4, "vpp": 2, "schedule": "zb-v"}),
    ("llama-3.1-8b", 8, "torch-fsdp", "bf16", {"fsdp": "full_shard"}),
    ("llama-3.1-8b", 8, "torch-eager", "bf16", {"tp": 2, "pp": 2, "recompute": "full", "recompute_num_layers": 3}),
    ("deepseek-v3", 64, "megatron", "fp8", {"tp": 2, "pp": 16, "vpp": 2, "ep": 4, "recompute": "selective"}),
    ("deepseek-v2-lite", 16, "megatron", "bf16", {"pp": 2, "ep": 8, "recompute": "full"}),
    ("gpt3-175b", 64, "megatron-2021", "bf16", {"tp": 8, "pp": 4, "vpp": 2}),
)


def plan_of(model: str, num_gpus: int, trainer: str, dtype: str, sizes: dict[str, Any]) -> Plan:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=4096, global_batch_size=32, dtype=dtype)  # type: ignore[arg-type]
    return evaluate(model, cluster, training, Parallelism(**sizes), runtime=trainer)


def explored(plan: Plan, *stages: int) -> tuple[Candidate, list[MemoryOfStage]]:
    candidate = reprice(plan, plan.best)
    return candidate, [*explore(plan, plan.best, candidate, stages).stages]


@pytest.mark.thorough(3)
@pytest.mark.parametrize("job", LAYOUTS, ids=lambda job: f"{job[0]} {job[2]} {job[3]}")
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
        step = step_of(candidate, timeline, curve)
        assert step.peak()[0] == curve.peak_bytes
        assert min(tensor.bytes for tensor in step.tensors) >= 0
        freed = {event.tensor for event in step.events if not event.is_made}
        kept = [tensor for number, tensor in enumerate(step.tensors) if number not in freed]
        assert sum(tensor.bytes for tensor in kept) == curve.allocated_bytes[-1]


@pytest.mark.parametrize("bits", [4, 16])
def test_frozen_weights_have_rows_and_neither_gradients_nor_states(bits: int) -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=2)
    adapters = AdapterSpec.model_validate({"base_bits": bits})
    training = TrainingSpec(seq_length=2048, global_batch_size=4, adapters=adapters)
    plan = evaluate("llama-3.2-1b", cluster, training, Parallelism(), runtime="hf")
    _, (stage,) = explored(plan, 0)
    planned = plan.best.stages[0].memory
    assert sum(tensor.bytes for tensor in stage.tensors) == stage.peak_bytes == planned.peak_allocated_bytes
    for item in ITEMS:
        listed = sum(tensor.bytes for tensor in stage.tensors if tensor.item == item)
        assert listed == getattr(planned, f"{item}_bytes"), item
    frozen = [tensor for tensor in stage.tensors if tensor.name.endswith(" frozen")]
    assert sum(tensor.bytes for tensor in frozen) == pytest.approx(planned.frozen_weights_bytes, rel=1e-6)
    others = [tensor.name for tensor in stage.tensors if tensor.item in ("gradients", "optimizer")]
    assert others
    assert all("lora_" in name for name in others)


@pytest.fixture(scope="module")
def piped() -> MemoryOfStage:
    """Stage 0 of Llama 3.1 8B on four stages of two chunks with tp 2, at a sequence of 4,096."""
    return explored(plan_of(*LAYOUTS[0]), 0)[1][0]


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
    _, (stage,) = explored(plan_of(*LAYOUTS[4]), 1)
    recomputed = {tensor.layer for tensor in named(stage, "layer input")}
    assert recomputed == {16, 17, 18}
    kept = {tensor.name for tensor in stage.tensors if tensor.layer in recomputed and tensor.item == "activations"}
    assert kept == {"layer input"}
    assert all("full" not in tensor.remade_by for tensor in named(stage, "attention norm: input"))


def test_narrow_products_keep_their_inputs_cast() -> None:
    _, (stage,) = explored(plan_of(*LAYOUTS[1]), 0)
    assert {tensor.dtype for tensor in named(stage, "attention norm: output")} == {"fp8"}
    assert {tensor.dtype for tensor in named(stage, "attention norm: input")} == {"bf16"}
    # with a sharded optimizer the masters are cast straight to fp8, as they are and transposed
    casts = named(stage, "qkv weight cast")
    assert {(tensor.shape, tensor.dtype, tensor.bytes) for tensor in casts} == {
        ((2, 3072, 4096), "fp8", 2 * 3072 * 4096)
    }
    assert not named(stage, "qkv weight")


def test_changes_are_priced_and_free_memory(piped: MemoryOfStage) -> None:
    plan = plan_of(*LAYOUTS[0])
    answer = explore(plan, plan.best, reprice(plan, plan.best), (0,))
    assert {"recompute all layers", "recompute mlp"} <= {change.change for change in answer.changes}
    steps_s = [change.step_s for change in answer.changes]
    assert steps_s == sorted(steps_s)
    assert all(change.peak_bytes[0] < piped.peak_bytes for change in answer.changes)
    full = next(change for change in answer.changes if change.change == "recompute all layers")
    sizes = Parallelism(**LAYOUTS[0][4], recompute="full")
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
