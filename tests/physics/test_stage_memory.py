"""What a rank holds at its worst, read off a few rounds of a schedule, is what it holds over the whole step.

What waits in host memory: which tensors, how long the link takes, and what it leaves on the GPU.
States and updates of optimizers: against counts by hand, laws over rows, and what a search may choose.
What waits on the host: its bytes, layouts that it has no memory for, and GPUs that have no memory but the host's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from toys import toy_cluster, toy_model, toy_problem, toy_training

from planner.answer import Plan
from planner.errors import Infeasible, SpecError
from planner.layout.candidate import Candidate, Split, activation_peaks_bytes, even_counts, peaks_of_schedule
from planner.layout.evaluate import evaluate, price_given
from planner.physics.kernels import product_s, stream_s
from planner.physics.layers import decoder_layer, embedding, padded_vocab
from planner.physics.memory import OFFLOADED, is_decoder_layer, offloaded_bytes, shown_s
from planner.physics.operators import Operator
from planner.physics.optimizers import state_bytes, state_update_s, states_of, tensors_of, update_bytes
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import (
    HOST_STATE_BYTES,
    fits_host,
    fixed_bytes,
    fixed_workspace_bytes,
    host_bytes,
    relaxed_peak_bytes,
    stage_memory,
    static_bytes,
)
from planner.schedule.orders import SCHEDULES, build_schedule, chunks_in_flight, violation
from planner.search.case import Case
from planner.search.recipes import pinned
from planner.search.search import search
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import ObjectiveSpec, Parallelism, Recompute, SearchLimits, TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import RUNTIMES, has_dtype, load_runtime, switches_of
from planner.trainers.optimizers import BLOCK, OPTIMIZERS
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import switched

PP, NUM_MICROBATCHES = 4, 48


TRAINING = [name for name, kind in SCHEDULES.items() if kind.trains_one_copy]

IN_DTYPES = [(dtype, name) for dtype in ("bf16", "fp8") for name in RUNTIMES if has_dtype(load_runtime(name), dtype)]
"""Every trainer in every dtype that it has."""


@pytest.mark.parametrize(
    ("schedule", "vpp"),
    [(name, vpp) for name in TRAINING for vpp in (1, 2) if not violation(name, PP, vpp, NUM_MICROBATCHES)],
)
def test_a_few_rounds_hold_what_the_whole_step_holds(schedule: str, vpp: int) -> None:
    problem = toy_problem(toy_model(8), runtime="torch-eager", pp=(PP,))
    table, *_ = (table for table, *_ in problem.nodes())
    table = replace(table, shape=replace(table.shape, vpp=vpp, num_microbatches=NUM_MICROBATCHES))
    live_bytes = [float(stage + 1) for stage in range(PP * vpp)]
    whole = build_schedule(schedule, PP, vpp, NUM_MICROBATCHES)
    assert peaks_of_schedule(table.shape, schedule, live_bytes) == activation_peaks_bytes(whole, live_bytes)


PRODUCTS_BYTES = 64 << 20
"""The workspace of products on an H100."""


@pytest.mark.parametrize(("pp", "vpp", "buffers"), [(1, 1, 0), (2, 1, 12), (4, 1, 24), (4, 2, 48)])
def test_torch_s_stages_have_buffers_for_every_micro_batch(pp: int, vpp: int, buffers: int) -> None:
    """Of 12: inputs and gradients of outputs, 2 B · 64 tokens · hidden size each; others reuse one."""
    problem = toy_problem(toy_model(8), runtime="torchtitan", pp=(1,))
    shape = Shape(pp=pp, vpp=vpp, dp=1, num_microbatches=12, seq_length=64, zero_stage=1)
    table, sent = problem.pricing.table(shape), 2 * 64 * problem.model.hidden_size
    assert fixed_workspace_bytes(problem.pricing, table) == PRODUCTS_BYTES + buffers * sent
    runtime = problem.pricing.runtime.model_copy(update={"has_torch_stages": False})
    plain = replace(problem.pricing, runtime=runtime)
    assert fixed_workspace_bytes(plain, table) == PRODUCTS_BYTES + (sent if pp > 1 else 0)


def test_unpipelined_fsdp_holds_two_layers_and_gradients_to_be_scattered() -> None:
    problem = toy_problem(toy_model(8), runtime="torchtitan", pp=(1,))
    table = problem.pricing.table(Shape(dp=4, num_microbatches=12, seq_length=64, zero_stage=3, shard_size=4))
    layer = max(part.parameters for part in table.layers.values())
    gathered_bytes = 2 * 2 * layer + 4 * max(layer, table.head.parameters)
    assert fixed_workspace_bytes(problem.pricing, table) == PRODUCTS_BYTES + gathered_bytes


def test_narrow_gradients_are_copied_for_the_optimizer() -> None:
    """Megatron-LM's takes fp32 ones: of two ranks' shards, once nothing else is held."""
    problem = toy_problem(toy_model(8), pp=(1,))
    table = problem.pricing.table(Shape(dp=2, num_microbatches=4, seq_length=16, zero_stage=1, shard_size=2))
    layer = table.layers[problem.model.kinds[0], "none"].times(8)
    narrow = problem.pricing.runtime.model_copy(update={"gradient_bytes": 2})
    held = {
        runtime.gradient_bytes: stage_memory(replace(problem.pricing, runtime=runtime), table, layer, 1000.0)
        for runtime in (problem.pricing.runtime, narrow)
    }
    copied = 4 * float(layer.parameters) / 2 + PRODUCTS_BYTES
    beside = held[2].activations_bytes + held[2].logits_bytes + held[2].workspace_bytes
    assert beside == pytest.approx(copied)
    assert held[4].activations_bytes + held[4].logits_bytes + held[4].workspace_bytes < copied


@pytest.mark.parametrize("alone", [False, True])
def test_log_probabilities_need_their_logits_when_nothing_else_is_held(alone: bool) -> None:
    """10 bytes of each, on the rank with the head, less what is on the host meanwhile."""
    problem = toy_problem(toy_model(8), pp=(1,))
    table = problem.pricing.table(Shape(dp=2, num_microbatches=4, seq_length=16, zero_stage=1, shard_size=2))
    objective = ObjectiveSpec(scored_tokens=10**6, scored_alone=alone)
    training = problem.pricing.training.model_copy(update={"objective": objective})
    pricing = replace(problem.pricing, training=training)
    layer = table.layers[problem.model.kinds[0], "none"]
    whole, beside = layer + table.head, []
    for part in (layer, whole):
        held = stage_memory(pricing, table, part, 1000.0)
        beside.append(held.activations_bytes + held.logits_bytes + held.workspace_bytes)
    freed = alone * float(whole.optimizer_bytes)  # Megatron's gradients stay
    scored = 10 * 10**6 * float(padded_vocab(problem.model, table.shape, pricing.runtime))
    assert beside[1] == pytest.approx(scored + PRODUCTS_BYTES - freed)
    assert beside[0] < beside[1]


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("dtype", "trainer"), IN_DTYPES)
def test_the_relaxation_is_never_above_the_exact_peak(trainer: str, dtype: str) -> None:
    """With the micro-batches that an order certainly holds, and any transient that the rank certainly needs."""
    problem = toy_problem(
        toy_model(8), toy_cluster(8), toy_training(16, dtype=dtype), trainer, cp=(1,), tp=(1, 2), micro_batch_size=(1,)
    )
    compared = 0
    for table, schedule, choice in list(problem.nodes())[::7]:
        shape, base = table.shape, choice.mode
        pp, vpp, microbatches = int(shape.pp), int(shape.vpp), int(shape.num_microbatches)
        candidate = Candidate(problem.pricing, table, Split(even_counts(8, pp * vpp), base), schedule)
        if base == "full":
            continue
        for rank, (cost, stage) in enumerate(zip(candidate.rank_costs, candidate.memory, strict=True)):
            chunks = [part for part, at in zip(candidate.costs, candidate.placement, strict=True) if at == rank]
            held = chunks_in_flight(schedule, pp, vpp, microbatches)[rank]
            live = sum(count * float(part.live_bytes) for count, part in zip(held, chunks, strict=True))
            relaxed = relaxed_peak_bytes(float(cost.static_bytes), live, float(cost.transient_bytes))
            assert relaxed + fixed_bytes(problem.pricing, table) <= stage.peak_allocated_bytes + 8
            compared += 1
    assert compared


@pytest.mark.thorough(3)
@pytest.mark.parametrize(("dtype", "trainer"), IN_DTYPES)
def test_static_bytes_of_a_part_are_those_it_is_priced_with(trainer: str, dtype: str) -> None:
    """Weights that stay in 16 bits under 8-bit recipes too: the head, the embedding."""
    problem = toy_problem(toy_model(4, vocab_size=64_000), toy_cluster(8), toy_training(16, dtype=dtype), trainer)
    pricing = problem.pricing
    for shape in problem.shapes()[::17]:
        table = pricing.table(shape)
        for part in (table.embedding, table.head, *table.layers.values()):
            assert float(static_bytes(part, shape, pricing.runtime, dtype)) == pytest.approx(float(part.static_bytes))


MODEL, MEGATRON = load_model("qwen3-30b-a3b"), load_runtime("megatron")
SHAPE = Shape(dp=8, ep=8, shard_size=8, seq_length=4096)
(KIND,) = MODEL.kinds
ITEMS = decoder_layer(MODEL, KIND, SHAPE, MEGATRON)


def pricing(hardware: str = "gb200", **fields: object) -> Pricing:
    return Pricing(
        model=MODEL,
        training=TrainingSpec(seq_length=4096, global_batch_size=64),
        cluster=ClusterSpec(hardware=load_hardware(hardware), num_gpus=8),
        runtime=MEGATRON.model_copy(update=fields),
    )


def test_inputs_of_modules_by_hand() -> None:
    rows = 4096 * 8
    assert offloaded_bytes(ITEMS, ["moe_act"]) == 2 * rows * 2 * 768
    assert offloaded_bytes(ITEMS, ["expert_fc1"]) == 2 * rows * 2048
    assert offloaded_bytes(ITEMS, ["attn_proj"]) == 2 * 4096 * 32 * 128
    assert offloaded_bytes(ITEMS, ["core_attn"]) == 2 * 4096 * (32 + 2 * 4) * 128
    assert offloaded_bytes(ITEMS, ["moe_act", "attn_proj"]) == 2 * rows * 2 * 768 + 2 * 4096 * 32 * 128


def test_what_is_recomputed_does_not_travel() -> None:
    assert offloaded_bytes(ITEMS, ["expert_fc1"], recomputed=frozenset({"moe"})) == 0.0
    assert offloaded_bytes(ITEMS, []) == 0.0


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
def test_every_module_has_an_input_in_some_layer(name: str) -> None:
    model = load_model(name)
    layers = [decoder_layer(model, kind, SHAPE, MEGATRON) for kind in model.kinds]
    for module in OFFLOADED:
        assert any(offloaded_bytes(items, [module]) > 0 for items in layers), module


def test_a_pass_hides_the_copy_as_long_as_it_takes_itself() -> None:
    h100 = load_hardware("h100")
    second = h100.host.bytes_per_s
    assert shown_s(second, h100, 2.0) == 0.0
    assert shown_s(second, h100, 0.25) == pytest.approx(0.75)


def test_the_host_memory_limits_a_link_that_is_faster() -> None:
    gb200 = load_hardware("gb200").host
    assert gb200.bytes_per_s == gb200.memory_bytes_per_s < gb200.link_gb_per_s * 1e9


def test_bytes_leave_the_gpu_and_come_back_for_the_backward() -> None:
    moved = offloaded_bytes(ITEMS, ["moe_act"])
    plain, away = (
        pricing(**fields).table(SHAPE).layers[KIND, "none"] for fields in ({}, {"offload_modules": ("moe_act",)})
    )
    assert plain.live_bytes - away.live_bytes == pytest.approx(moved)
    assert away.transient_bytes - plain.transient_bytes == pytest.approx(moved)
    assert away.total_s == plain.total_s  # NVLink-C2C


def test_pcie_shows_what_a_layer_does_not_hide() -> None:
    every = {"offload_modules": ("moe_act", "expert_fc1", "core_attn", "attn_proj"), "host_factor": 0.0}
    plain, away = (
        pricing("h100", **fields).table(SHAPE).layers[KIND, "none"] for fields in ({"host_factor": 0.0}, every)
    )
    moved_s = offloaded_bytes(ITEMS, every["offload_modules"]) / load_hardware("h100").host.bytes_per_s  # type: ignore[arg-type]
    assert away.forward_total_s == pytest.approx(max(moved_s, float(plain.forward_total_s)))
    assert moved_s > plain.forward_total_s


@pytest.mark.parametrize("mode", ["none", "full"])
def test_layers_kept_on_the_host_take_their_share_of_all_layers_along(mode: Recompute) -> None:
    plain, half, whole = (
        pricing(offloaded_layers=count).table(SHAPE).layers[KIND, mode].live_bytes for count in (0, 24, 48)
    )
    assert half == pytest.approx(plain / 2)
    assert whole == pytest.approx(0.0)
    assert is_decoder_layer(ITEMS)
    assert not is_decoder_layer(embedding(MODEL, SHAPE, MEGATRON))


def test_recomputed_layers_keep_their_input_wherever_others_are() -> None:
    tables = [pricing(offload_modules=modules).table(SHAPE) for modules in ((), ("moe_act",))]
    full = [table.layers[KIND, "full"].live_bytes for table in tables]
    assert full[0] == full[1] == 2 * 4096 * 2048


def test_moments_leave_the_gpu_and_the_host_updates_them_more_slowly() -> None:
    plain, half, whole = (
        pricing("h100", optimizer_offload_fraction=share).table(SHAPE).layers[KIND, "none"] for share in (0.0, 0.5, 1.0)
    )
    assert half.optimizer_bytes == pytest.approx(plain.optimizer_bytes / 2)
    assert whole.optimizer_bytes == 0, "masters leave with the moments"
    assert whole.optimizer_s - half.optimizer_s == pytest.approx(half.optimizer_s - plain.optimizer_s)
    assert whole.optimizer_s > 20 * plain.optimizer_s


def test_a_graph_of_the_whole_step_has_a_pool_of_its_own() -> None:
    eager, replayed = (pricing(cuda_graphs=on).table(SHAPE).layers[KIND, "none"].live_bytes for on in (False, True))
    assert 1.1 < replayed / eager < 1.5


H100 = load_hardware("h100")
SHAPE_OF_OPTIMIZERS = Shape.of(tp=1, seq_length=2048)


def _runtime(name: str, optimizer: str) -> RuntimeSpec:
    return switched(load_runtime(name), {"optimizer": optimizer})


def _pricing(optimizer: str, runtime: str = "hf", model: str = "8b") -> Pricing:
    training = TrainingSpec(seq_length=2048, global_batch_size=8)
    cluster = ClusterSpec(hardware=H100, num_gpus=8)
    return Pricing(model=load_model(model), training=training, cluster=cluster, runtime=_runtime(runtime, optimizer))


def _product(rows: int, columns: int, **more: object) -> Operator:
    sizes = {"name": "up", "m": 1, "n": rows, "k": columns, "parameters": rows * columns}
    return Operator(kind="gemm", **{**sizes, **more})  # type: ignore[arg-type]


def _bytes(op: Operator, optimizer: str, runtime: str = "hf") -> float:
    return float(state_bytes(list(tensors_of(op, 4096)), _runtime(runtime, optimizer)))


@pytest.mark.parametrize(
    ("optimizer", "resident"),
    [
        ("adamw-8bit", 2 * 4096 * 1024 * (1 + 4 / 256)),
        ("paged-adamw-8bit", 2 * 4096 * 1024 * 4 / 256),
        ("paged-adamw", 0),
        ("adafactor", 4 * (4096 + 1024)),
        ("sgd", 0),
        ("sgd-momentum", 2 * 4096 * 1024),
        ("adamw", 4 * 4096 * 1024),
    ],
)
def test_states_of_a_matrix_in_16_bits(optimizer: str, resident: float) -> None:
    runtime = load_runtime("hf").model_copy(update={"optimizer": optimizer})
    (matrix, bias) = tensors_of(_product(4096, 1024), 4096)
    assert float(states_of(matrix, runtime).resident_bytes) == pytest.approx(resident)
    assert float(states_of(bias, runtime).resident_bytes) == 0


def test_small_tensors_and_embeddings_keep_their_states_in_32_bits() -> None:
    norm = Operator(name="norm", kind="elementwise", family="norm", parameters=4095)
    table = Operator(name="embedding", kind="elementwise", family="embedding", parameters=4096 * 50)
    assert _bytes(norm, "adamw-8bit") == 8 * 4095
    assert _bytes(table, "adamw-8bit") == 8 * 4096 * 50


def test_a_small_tensor_does_not_leave_the_gpu() -> None:
    assert _bytes(_product(99, 1000), "paged-adamw") == 8 * 99_000
    assert _bytes(_product(100, 1000), "paged-adamw") == 0


def test_muon_keeps_one_moment_of_matrices_and_two_of_the_rest() -> None:
    head = _product(1000, 4096, name="head")
    bias = _product(64, 32, parameters=64 * 32 + 64)
    assert _bytes(_product(64, 32), "muon", "megatron") == 4 * 64 * 32
    assert _bytes(bias, "muon", "megatron") == 4 * 64 * 32 + 8 * 64
    assert _bytes(head, "muon", "megatron") == 8 * 4096 * 1000


def test_an_iteration_of_newton_and_schulz_has_the_flops_of_its_three_products() -> None:
    runtime, (long, short) = _runtime("megatron", "muon"), (14336, 4096)
    plain = runtime.model_copy(update={"optimizer": "sgd-momentum"})

    def seconds(which: RuntimeSpec, tp: int = 1) -> float:
        return float(state_update_s(list(tensors_of(_product(long // tp, short), 4096)), 4096, tp, H100, which))

    fraction = H100.efficiency.gemm.forward_fraction
    products = [(short, short, long), (short, short, short), (short, long, short)]
    each = sum(float(product_s(H100, "bf16", fraction, 1, *dims)) for dims in products)
    more_moved = update_bytes(OPTIMIZERS["muon"], runtime) - update_bytes(OPTIMIZERS["sgd-momentum"], plain)
    moved_s = float(stream_s(H100, more_moved * long * short, 0, "optimizer"))
    assert seconds(runtime) - seconds(plain) == pytest.approx(5 * each + moved_s)
    # tensor-parallel ranks repeat the products on the whole matrix, and update their share of it
    assert seconds(runtime, tp=2) > 5 * each > 0.9 * seconds(runtime, tp=2)
    # or each take their slice alone
    alone = runtime.model_copy(update={"optimizer": "muon-blockwise"})
    assert seconds(alone) == seconds(runtime) > 2 * seconds(alone, tp=4) > 0
    # or share two of them, and sum a square of the hidden state's width
    shared = runtime.model_copy(update={"optimizer": "muon-distributed"})
    assert seconds(shared) == seconds(runtime)
    square = float(product_s(H100, "bf16", fraction, 1, short, short, short))
    summed = 2 * 7 / 8 * 4 * short**2 / H100.tiers[0].bytes_per_s
    assert seconds(runtime, tp=8) - seconds(shared, tp=8) == pytest.approx(
        5 * ((each - square) * 7 / 8 - summed), rel=0.1
    )


@pytest.mark.parametrize("runtime", ["hf", "megatron"])
def test_no_optimizer_keeps_more_than_adamw_and_all_rows_are_priced(runtime: str) -> None:
    tables = {
        name: _pricing(str(name), runtime).table(SHAPE_OF_OPTIMIZERS)
        for name in switches_of(load_runtime(runtime))["optimizer"]
    }
    kept = {name: float(next(iter(table.layers.values())).optimizer_bytes) for name, table in tables.items()}
    assert all(kept[name] < kept["adamw"] for name in kept if name not in ("adamw", "paged-adamw"))
    assert all(float(table.embedding.optimizer_s) > 0 for table in tables.values())


def test_states_are_sharded_as_adamws_are() -> None:
    pricing = _pricing("adamw-8bit")
    whole, eighth = (
        next(iter(pricing.table(Shape.of(tp=1, dp=dp, seq_length=2048, zero_stage=2)).layers.values())) for dp in (1, 8)
    )
    assert float(whole.optimizer_bytes) == pytest.approx(8 * float(eighth.optimizer_bytes))
    assert float(whole.state_bytes) == float(eighth.state_bytes)


def test_arrays_of_shapes_are_priced_as_each_shape_by_itself() -> None:
    pricing = _pricing("muon", "megatron")
    several = pricing.table(Shape.of(tp=np.array([1, 2]), dp=np.array([8, 4]), seq_length=2048, zero_stage=1))
    for place, (tp, dp) in enumerate(((1, 8), (2, 4))):
        one = pricing.table(Shape.of(tp=tp, dp=dp, seq_length=2048, zero_stage=1))
        for key, part in several.layers.items():
            assert float(part.take(place, {}).optimizer_bytes) == pytest.approx(float(one.layers[key].optimizer_bytes))
            assert float(part.take(place, {}).optimizer_s) == pytest.approx(float(one.layers[key].optimizer_s))


def _evaluated(optimizer: str) -> Plan:
    return evaluate(
        load_model("8b"), ClusterSpec(hardware=load_hardware("h200"), num_gpus=1),
        TrainingSpec(seq_length=1024, global_batch_size=1), Parallelism(recompute="full"),
        runtime=_runtime("hf", optimizer),
    )  # fmt: skip


def test_adafactor_makes_copies_of_the_largest_weight() -> None:
    plan = _evaluated("adafactor")
    memory = plan.best.stages[0].memory
    sizes = memory.activations_bytes + memory.logits_bytes + memory.workspace_bytes
    # 16 bytes for each element of the embedding table, of which activations are gone
    assert sizes == pytest.approx(16 * 128_256 * 4096, rel=0.01)


@pytest.mark.parametrize(
    ("stage", "micro_batches", "unfused", "bytes_of_a_weight"),
    [
        (2, 1, False, 2 + 18 / 8),
        (2, 1, True, 2 + 22 / 8),
        (3, 1, False, 20 / 8),
        (3, 1, True, 24 / 8),
        (3, 2, True, 24 / 8),
    ],
)
def test_the_peak_of_an_update_under_zero(
    stage: int, micro_batches: int, unfused: bool, bytes_of_a_weight: float
) -> None:
    """Of short sequences: weights, gradients, their fp32 copies, masters and moments, and a copy of one of these."""
    model = load_model("llama-3.1-8b")
    training = TrainingSpec(global_batch_size=8 * micro_batches, seq_length=128)
    layout = Parallelism(dp=8, zero_stage=stage, recompute="full")  # type: ignore[arg-type]
    runtime = switched(load_runtime("hf"), {"sharding": "deepspeed", "unfused_adamw": unfused})
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    memory = evaluate(model, cluster, training, layout, runtime=runtime).best.worst_stage.memory
    assert memory.peak_allocated_bytes == pytest.approx(bytes_of_a_weight * 8.03e9, rel=0.06)


def test_a_checkpoint_holds_the_states_that_there_are() -> None:
    held = {name: _runtime("hf", name).checkpoint_bytes_per_parameter for name in ("adamw", "adamw-8bit", "sgd")}
    assert held == {"adamw": 6, "adamw-8bit": 2 + 2 * (1 + 4 / BLOCK), "sgd": 2}


def test_every_optimizer_says_where_its_numbers_come_from() -> None:
    assert all(row.source and row.says for row in OPTIMIZERS.values())


def test_offloaded_states_of_hf_leave_the_gpu_whole() -> None:
    pricing, hf = _pricing("adamw"), load_runtime("hf")
    each = (replace(pricing, runtime=switched(hf, {"optimizer_offload": share})) for share in (0.0, 1.0))
    on, off = (next(iter(one.table(SHAPE_OF_OPTIMIZERS).layers.values())) for one in each)
    assert float(on.optimizer_bytes) > 0
    assert float(off.optimizer_bytes) == 0
    assert float(off.optimizer_s) > float(on.optimizer_s)


def test_other_optimizers_do_not_go_to_the_host() -> None:
    limits = SearchLimits(switches={"optimizer": "adafactor", "optimizer_offload": 1.0})
    cluster = ClusterSpec(hardware=H100, num_gpus=8)
    training = TrainingSpec(seq_length=1024, global_batch_size=8)
    with pytest.raises(SpecError, match="must be adamw beside optimizer_offload"):
        pinned(Case(load_model("8b"), cluster, training, load_runtime("hf"), limits))


PARAMETERS = 8_030_261_248
TRAINING_OF_HOST_MEMORY = TrainingSpec(seq_length=4096, global_batch_size=32)


def cluster(host_gib: float, num_gpus: int = 8) -> ClusterSpec:
    hardware = load_hardware("rtx-pro-6000")
    host = hardware.host.model_copy(update={"memory_gib": host_gib})
    return ClusterSpec(hardware=hardware.model_copy(update={"host": host}), num_gpus=num_gpus)


def pricing_of_host_memory(host_gib: float, **runtime: Any) -> Pricing:
    return Pricing(
        model=load_model("8b"), training=TRAINING_OF_HOST_MEMORY, cluster=cluster(host_gib),
        runtime=load_runtime("megatron").model_copy(update=runtime),
    )  # fmt: skip


def shape(**sizes: int) -> Shape:
    return Shape.of(**({"seq_length": 4096, "num_microbatches": 4, "shard_size": sizes.get("dp", 1)} | sizes))


def test_nothing_waits_on_the_host_unless_it_is_asked_for() -> None:
    assert host_bytes(pricing_of_host_memory(1), shape(dp=8, zero_stage=1)) == 0
    assert fits_host(pricing_of_host_memory(0.001), shape(dp=8, zero_stage=1))


@pytest.mark.parametrize("sizes", [{"dp": 8}, {"tp": 2, "dp": 4}, {"pp": 2, "dp": 4}])
def test_the_states_of_all_parameters_are_spread_over_the_ranks(sizes: dict[str, int]) -> None:
    for fraction in (0.5, 1.0):
        told = pricing_of_host_memory(64, optimizer_offload_fraction=fraction)
        expected = fraction * HOST_STATE_BYTES * PARAMETERS / 8
        assert host_bytes(told, shape(**sizes, zero_stage=1)) == pytest.approx(expected, rel=1e-3)


def test_activations_that_wait_grow_with_the_tokens_and_shrink_with_tensor_parallelism() -> None:
    told = pricing_of_host_memory(64, offload_modules=("core_attn", "attn_proj"))
    one = host_bytes(told, shape(dp=8))
    # inputs of attention and of its projection: q, k and v, and the output, in 32 layers
    assert one == 32 * 4096 * 2 * (4096 + 2 * 1024 + 4096)
    assert host_bytes(told, shape(dp=8, micro_batch_size=2)) == 2 * one
    assert host_bytes(told, shape(dp=4, tp=2)) == one / 2


@pytest.mark.parametrize(
    ("stage", "share", "weights", "gradients"), [(3, 1, 0, 0), (3, 0, 0, 6), (2, 1, 16, 0), (1, 1, 16, 6)]
)
def test_weights_and_gradients_that_wait(stage: int, share: float, weights: float, gradients: float) -> None:
    """Bytes of a parameter's shard on each of eight ranks, times eight; what is not sharded stays."""
    runtime = switched(load_runtime("deepspeed"), {"parameter_offload": True, "optimizer_offload": share})
    told = replace(pricing_of_host_memory(64), runtime=runtime)
    sizes = shape(dp=8, zero_stage=stage)
    part = told.table(sizes).layers[told.model.layers[0], "none"]
    found = [each / part.parameters for each in (part.weights_bytes, part.gradients_bytes, part.optimizer_bytes)]
    assert found == pytest.approx([weights / 8, gradients * (1 if stage == 1 else 1 / 8), (1 - share) * 12 / 8])
    assert (host_bytes(told, sizes) > HOST_STATE_BYTES * share * PARAMETERS / 8) == (stage == 3 or share == 1)
    # a shard of 16 bits comes over PCIe before it is gathered
    plain = replace(told, runtime=load_runtime("deepspeed")).table(sizes).layers[told.model.layers[0], "none"]
    copied_s = 2 * part.parameters / 8 / told.cluster.hardware.host.bytes_per_s
    assert part.gather_s - plain.gather_s == pytest.approx(copied_s * (stage == 3))


def test_a_layout_whose_host_has_too_few_bytes_says_so() -> None:
    runtime = load_runtime("megatron").model_copy(update={"optimizer_offload_fraction": 1.0})
    layout = Parallelism(dp=8, zero_stage=1)
    need_gib = HOST_STATE_BYTES * PARAMETERS / 8 / GIB
    for host_gib in (0.9 * need_gib, 1.3 * need_gib):
        priced = price_given(load_model("8b"), cluster(host_gib), TRAINING_OF_HOST_MEMORY, layout, runtime)
        assert priced.parallelism.host_bytes == pytest.approx(need_gib * GIB, rel=1e-6)
        told = [warning for warning in priced.warnings if "host memory" in warning]
        assert bool(told) == (host_gib < need_gib)
        assert all(f"{need_gib:,.0f} GiB a GPU" in warning for warning in told)


def test_a_search_takes_no_layout_whose_host_has_too_few_bytes() -> None:
    runtime = load_runtime("deepspeed").model_copy(update={"optimizer_offload_fraction": 1.0})
    limits = SearchLimits(time_limit_s=60, tp=(1,), pp=(1,), micro_batch_size=(1,), zero_stage=(1, 2))

    def found(host_gib: float) -> Any:
        return search(Case(load_model("8b"), cluster(host_gib), TRAINING_OF_HOST_MEMORY, runtime, limits))

    with pytest.raises(Infeasible, match="host memory") as refused:
        found(10)
    assert "--assume host_memory_gib=" in (refused.value.hint or "")
    assert found(64).best.fits
