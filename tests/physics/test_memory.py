"""What a backward needs for a moment.

Bytes of stages and of whole runs against what allocators showed.
What 8- and 4-bit recipes keep and compute: which tensors are cast, and what stays in 16 bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tables import beside
from toys import exchange_s

from planner.layout.evaluate import evaluate
from planner.layout.runs import parse_run
from planner.physics import compute, kernels, memory
from planner.physics.communication import collective_s
from planner.physics.layers import decoder_layer, head
from planner.physics.memory import (
    gradients_bytes,
    optimizer_bytes,
    sharded,
    transient_bytes,
    weights_bytes,
    whole_gradients_bytes,
    working_set,
)
from planner.physics.operators import (
    NARROW_BYTES,
    Operator,
    Saved,
    collectives_of,
    operators_of,
    saved_bytes,
    wide_parameters,
)
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.load import load_runtime
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import Value
from planner.validate.rows import PublishedRun, load_rows
from planner.validate.score import evaluate_rows
from tools.calibrate.kernels import measured_model
from tools.calibrate.tables import read_table

TABLES = beside(__file__)


@pytest.mark.parametrize(
    ("cp", "kind", "expected"),
    [
        # keys and values of 8 heads and their gradients, all of them gathered; queries of 32 heads, output, gradients
        (8, "all_gather", 2 * 2 * 256 * (131072 * 8 + 131072 // 8 * 32)),
        # eight blocks of keys and values, and an output for each
        (8, "p2p", 2 * 131072 * (8 * 256 + 32 * 128)),
        (8, "a2a", 2 * 2 * 256 * (131072 // 8) * (8 + 32)),
        (1, "p2p", 2 * 2 * 256 * 131072 * (8 + 32)),
    ],
)
def test_what_split_attention_holds_for_a_moment(cp: int, kind: str, expected: int) -> None:
    model, shape = load_model("llama-3.1-8b"), Shape(cp=cp, dp=1, seq_length=131072, shard_size=8)
    runtime = load_runtime("megatron").model_copy(update={"cp_comm_type": kind})
    layer = decoder_layer(model, model.layers[0], shape, runtime)
    attention = [next(op for op in operators_of(layer) if op.kind == "attention")]
    assert transient_bytes(attention, runtime) == expected


@pytest.mark.parametrize(("cp", "sent"), [(4, 2 * (2 * 2048 + 3 * 6144 + 2 * 48)), (1, 0)])
def test_scans_exchange_tokens_for_heads(cp: int, sent: int) -> None:
    """Queries, keys, values, gates, decays and steps one way, values back; each is copied into its order."""
    model, shape = load_model("qwen3.5-27b"), Shape(cp=cp, dp=1, seq_length=131072, shard_size=cp)
    layer = decoder_layer(model, model.layers[0], shape, load_runtime("megatron"))
    exchanges = [c.num_bytes for c in collectives_of(layer) if c.group == "cp"]
    (order,) = (op for op in operators_of(layer) if op.name == "cp order")
    assert order.forward_bytes == 4 * sent * 131072 / cp
    assert exchanges == [2 * (2 * 2048 + 3 * 6144 + 2 * 48) * 131072 / cp] * 2


def test_a_loss_in_chunks_has_its_gradients_in_chunks() -> None:
    """Each chunk has as many logits as a hidden state has elements: 2 GiB for one million tokens, not 37."""
    model, shape = load_model("qwen3-8b"), Shape(cp=8, dp=1, seq_length=2**20, shard_size=8, zero_stage=3)
    chunked = load_runtime("torchtitan").with_features({"liger": "loss"})[0]
    held = transient_bytes([op for op in operators_of(head(model, shape, chunked)) if op.name == "head"], chunked)
    hidden_bytes = 2 * 2**17 * 4096
    of_liger = chunked.with_features({"chunked_loss": "liger"})[0]
    passes = [
        op.backward_factor for each in (chunked, of_liger) for op in operators_of(head(model, shape, each)) if op.n
    ]
    assert passes[0] == 1.5 * passes[1], "TRL computes logits again, Liger's gradients leave the forward"
    assert held == pytest.approx(2 * hidden_bytes + 2 * 4096 * 151936)


def test_keys_that_were_gathered_may_be_kept() -> None:
    """torchtitan keeps those of the whole sequence, and recomputing operations gathers them again."""
    model, shape = load_model("llama-3.1-8b"), Shape(cp=8, dp=8, seq_length=131072, shard_size=64, zero_stage=3)
    titan = load_runtime("torchtitan")
    kept, again = (
        decoder_layer(model, model.layers[0], shape, titan.model_copy(update={"keeps_gathered_keys": keeps}))
        for keeps in (True, False)
    )
    assert saved_bytes(kept) - saved_bytes(again) == 7 * 2 * 131072 // 8 * 8 * 256
    assert saved_bytes(kept, frozenset({"op"})) == saved_bytes(again, frozenset({"op"}))
    sent = [sum(c.num_bytes for c in collectives_of(items) if c.group == "cp") for items in (kept, again)]
    assert sent[1] == 1.5 * sent[0], "K and V once more in backward, beside their gradients"


@pytest.mark.parametrize(("ep", "kept_rows"), [(8, 1), (1, 0)])
def test_of_experts_op_keeps_the_rows_that_an_exchange_brought(ep: int, kept_rows: int) -> None:
    """No grouped product is saved: a run of 16B on eight H100 held 73 GiB, where 95 were counted (torchtitan 1789)."""
    model, shape = load_model("deepseek-v2-lite"), Shape(ep=ep, dp=8, seq_length=4096, shard_size=8, zero_stage=3)
    layer = decoder_layer(model, model.layers[-1], shape, load_runtime("torchtitan-2025"))
    experts = [op for op in operators_of(layer) if op.expert or op.name in ("moe_act", "row weights")]
    rows_bytes = 2 * 4096 * 6 * 2048
    assert saved_bytes(experts, frozenset({"op"})) == pytest.approx(kept_rows * rows_bytes, rel=0.02)
    assert saved_bytes(experts) > 3 * rows_bytes


def test_gathered_inputs_may_be_kept() -> None:
    """torchtitan keeps what tensor-parallel ranks gather, and gathers nothing again; `op` drops it and repeats that."""
    model = load_model("llama-3.1-8b")
    shape = Shape(tp=8, dp=8, seq_length=8192, shard_size=8, zero_stage=3, sequence_parallel=1)
    titan = load_runtime("torchtitan")
    kept, again = (
        decoder_layer(model, model.layers[0], shape, titan.model_copy(update={"keeps_gathered_inputs": keeps}))
        for keeps in (True, False)
    )
    hidden_bytes = 2 * 8192 * 4096
    # the seven shards of others, before attention and before the MLP
    assert saved_bytes(kept) - saved_bytes(again) == 2 * hidden_bytes * 7 / 8
    assert saved_bytes(kept, frozenset({"op"})) == saved_bytes(again, frozenset({"op"}))
    gathers = [[c for c in collectives_of(items) if c.kind == "all_gather" and c.num_bytes] for items in (kept, again)]
    assert len(gathers[1]) - len(gathers[0]) == 2
    assert [gather.backward for gather in gathers[1] if "again" in gather.name] == [True, True]


def test_keys_repeated_for_every_head_are_sent_for_every_head() -> None:
    """torchtitan until 2026: Llama's 8 heads of keys travel as 32, and are written before attention."""
    model, shape = load_model("llama-3.1-8b"), Shape(cp=4, dp=2, seq_length=131072, shard_size=8, zero_stage=3)
    plain = load_runtime("torchtitan-2025").model_copy(update={"repeats_keys": False})
    layers = [
        decoder_layer(model, model.layers[0], shape, plain.model_copy(update={"repeats_keys": repeats}))
        for repeats in (False, True)
    ]
    sent = [sum(c.num_bytes for c in collectives_of(items) if c.group == "cp") for items in layers]
    assert sent[1] == 4 * sent[0]
    copied = next(op for op in operators_of(layers[1]) if op.name == "repeat k, v")
    assert copied.forward_bytes == 2 * 2 * 32768 * 128 * (8 + 32)
    assert "repeat k, v" not in {op.name for op in operators_of(layers[0])}


def test_weights_behind_the_experts_keep_their_outputs() -> None:
    model, shape = load_model("qwen3-30b-a3b"), Shape(dp=8, ep=8, seq_length=4096, shard_size=8, zero_stage=3)
    titan = load_runtime("torchtitan")
    behind, within = (
        saved_bytes(
            decoder_layer(model, model.layers[0], shape, titan.model_copy(update={"weights_expert_outputs": w}))
        )
        for w in (True, False)
    )
    assert behind - within == 2 * 4096 * 8 * 2048


def test_a_pipeline_sums_gradients_whole_until_its_last_micro_batch() -> None:
    """torch's stages let FSDP reduce gradients once a step: only then are they sharded (4 B each, of 1e9 over 8)."""
    titan = load_runtime("torchtitan")
    for zero_stage in (2, 3):
        alone = Shape(dp=8, zero_stage=zero_stage, shard_size=8)
        assert gradients_bytes(1e9, 0.0, alone, titan) == 4e9 / 8
        assert gradients_bytes(1e9, 0.0, replace(alone, pp=2), titan) == 4e9


_SUMS = "hf sharding fsdp 2|hf sharding deepspeed 0|automodel gradient_sync last 4|automodel gradient_sync each 0"


@pytest.mark.parametrize("said", _SUMS.split("|"))
def test_fsdp_sums_whole_gradients_until_its_last_micro_batch(said: str) -> None:
    trainer, switch, value, whole = said.split()
    runtime, alone = load_runtime(trainer).with_features({switch: value})[0], Shape(dp=8, zero_stage=3, shard_size=8)
    assert (shards := whole_gradients_bytes(1e9, 0.0, alone, runtime)) == runtime.gradient_bytes * 1e9 / 8
    several = replace(alone, num_microbatches=2)
    assert whole_gradients_bytes(1e9, 0.0, several, runtime) == max(shards, int(whole) * 1e9)


def test_fp32_shards_with_weights_gathered_for_good() -> None:
    """FSDP2 keeps the fp32 masters sharded; ZeRO-2 there means 16-bit copies of all weights beside them."""
    titan, megatron = load_runtime("torchtitan"), load_runtime("megatron")
    for runtime, pp, zero_stage, expected in (
        (titan, 1, 3, 4e9 / 8),
        (titan, 2, 3, 4e9 / 8 + 2e9),
        (titan, 1, 2, 4e9 / 8 + 2e9),
        (titan, 1, 0, 4e9),
        (megatron, 1, 2, 2e9),
        (megatron, 1, 3, 2e9 / 8),
    ):
        shape = Shape(pp=pp, dp=8, zero_stage=zero_stage, shard_size=8)
        assert weights_bytes(1e9, 0.0, shape, runtime, "bf16") == expected


@pytest.mark.parametrize(
    ("tp", "ep", "shard_size", "ranks"), TABLES["experts_are_sharded_over_their_replicas_in_a_shard_group"]
)
def test_experts_are_sharded_over_their_replicas_in_a_shard_group(
    tp: int, ep: int, shard_size: int, ranks: int
) -> None:
    """Megatron-LM's expert_data_parallel_size over its instances; tensor-parallel ranks hold different experts."""
    shape = Shape.of(tp=tp, etp=1, dp=64, ep=ep, shard_size=shard_size)
    megatron = load_runtime("megatron")
    assert optimizer_bytes(0.0, 1e9, shape, megatron) == pytest.approx(12e9 / ranks)
    assert sharded(1e9, 1e9, shape, megatron) == pytest.approx(1e9 / shard_size + 1e9 / ranks)


@pytest.mark.parametrize(("switches", "dtype", "each"), TABLES["masters_are_remainders_beside_16_bit_weights"])
def test_masters_are_remainders_beside_16_bit_weights(switches: dict[str, Value], dtype: str, each: int) -> None:
    runtime, _ = load_runtime("megatron").with_features(switches)
    runtime = runtime.in_dtype(dtype, "hopper")
    assert optimizer_bytes(1e9, 0.0, Shape(), runtime) == each * 1e9


@pytest.mark.parametrize(("tp", "copies"), [(1, 2), (8, 3.5)])
def test_torch_s_loss_split_over_ranks_keeps_exponentials_too(tp: int, copies: float) -> None:
    """Gradients of softmax and logits in fp32, 8 bytes a token for labels; exponentials, and the logits in 16 bits."""
    runtime, _ = load_runtime("torchtitan").with_features({"compile": False})
    layer = head(load_model("llama-3.1-8b"), Shape(tp=tp, seq_length=1024), runtime)
    loss = next(op for op in operators_of(layer) if op.family == "loss")
    logits = 1024 * 128256 / tp * 4
    assert sum(held.num_bytes for held in working_set(loss, runtime)) == pytest.approx(copies * logits, rel=1e-3)


B200 = [row for row in load_rows() if row.family == "simumax-b200"]


@pytest.mark.parametrize("row", B200[::3], ids=lambda row: row.id)
def test_allocated_memory_of_megatron_on_b200(row: PublishedRun) -> None:
    """SimuMax's published runs, release v1.2: max_memory_allocated of the worst rank."""
    (scored,) = evaluate_rows([row])
    assert scored.memory_error == pytest.approx(0.0, abs=0.02)


def test_allocated_memory_is_right_on_average() -> None:
    errors = [abs(one.memory_error) for one in evaluate_rows(B200) if one.memory_error is not None]
    assert sum(errors) / len(errors) < 0.01


@pytest.mark.parametrize(("layout", "gib"), TABLES["allocated_memory_of_megatron_on_h100"])
def test_allocated_memory_of_megatron_on_h100(layout: dict[str, Any], gib: float) -> None:
    """Its own tests gpt3_7b_tp1_pp4_memory_speed and gpt3_7b_tp4_pp1_memory_speed: mem-max-allocated-bytes of the last
    rank on DGX H100 (golden_values_dev_dgx_h100.json). Unfused loss, dropout, no sequence parallelism."""
    model = {
        "name": "gpt3-7b", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 16384,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 131_073, "gated_mlp": False,
        "norm": "layernorm", "bias": True, "position_embedding": "learned", "max_position_embeddings": 8192,
    }  # fmt: skip
    features = {
        "overlap_grad_reduce": True, "overlap_param_gather": True, "cross_entropy_fusion": False, "dropout": True,
        "flash_attention": True,
    }  # fmt: skip
    run = {"model": model, "hardware": "h100", "num_gpus": 8, "runtime": "megatron", "seq_length": 8192}
    run |= {"global_batch_size": 8, "dtype": "bf16", "features": features}
    run["parallelism"] = {"zero_stage": 1, "sequence_parallel": False, **layout}
    last = parse_run({"run": run}).evaluate().stages[-1]
    assert last.memory.peak_allocated_bytes / 2**30 == pytest.approx(gib, rel=0.015)


def test_a_loss_that_megatron_fuses_natively_copies_its_softmax() -> None:
    """Its tests gpt3_mcore_te_tp2_pp2_{cross_entropy_loss_fusion, resume_torch_dist} on H100: 1,751 and 1,366 MiB."""
    model = {
        "name": "gpt3-345m", "num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 2048,
        "num_attention_heads": 8, "vocab_size": 50_257, "gated_mlp": False, "bias": True, "tie_word_embeddings": True,
        "position_embedding": "learned", "max_position_embeddings": 1024, "norm": "layernorm",
    }  # fmt: skip
    run = {"model": model, "hardware": "h100", "num_gpus": 8, "runtime": "megatron", "seq_length": 1024}
    run |= {"global_batch_size": 32, "parallelism": {"tp": 2, "pp": 2, "micro_batch_size": 4, "zero_stage": 0}}
    native, plain = (
        parse_run({"run": run | {"features": {"cross_entropy_fusion": how}}}).evaluate().stages[-1].memory
        for how in ("native", False)
    )
    assert (native.peak_allocated_bytes - plain.peak_allocated_bytes) / 2**20 == pytest.approx(385, rel=0.1)


BLOOM = [row for row in load_rows() if row.family == "bloom-prequel" and row.measured.peak_memory_gib]
"""nvidia-smi of one node after one iteration, to the GB."""


@pytest.mark.parametrize("recipe", ["fp16", None])
def test_memory_of_megatron_deepspeed(recipe: str | None) -> None:
    """fp16 gradients are summed in fp16; bf16 ones in fp32 and kept beside (4 more bytes a parameter)."""
    rows = [row for row in BLOOM if row.run.get("precision_recipe") == recipe]
    errors = sorted(abs(one.memory_error or 0.0) for one in evaluate_rows(rows))
    assert len(errors) >= 10
    assert sum(errors) / len(errors) < 0.06
    assert errors[int(0.9 * len(errors))] < 0.12


def test_the_loss_of_torchtitan_was_not_compiled_in_2024() -> None:
    """Llama 3 8B on H100, compiled: reserved memory within 3%, most of it logits in fp32."""
    rows = [row for row in load_rows() if row.id.startswith("torchtitan-8b-h100") and "compile" in row.id]
    assert len(rows) == 4
    for one in evaluate_rows(rows):
        assert one.memory_error == pytest.approx(0.0, abs=0.03), one.row.id


def h200_stages() -> list[dict[str, str]]:
    table = read_table("h200", "stages")
    names = ("model", "tp", "pp", "dp", "stage", "layers", "batch", "seq", "recompute", "microbatches")
    columns = {name: table.text(name) for name in (*names, "static_bytes", "peak_allocated_bytes")}
    return [{name: str(column[row]) for name, column in columns.items()} for row in range(table.num_rows)]


@pytest.mark.parametrize("row", h200_stages(), ids=lambda row: "-".join(row.values()))
def test_allocated_memory_of_a_stage_on_h200(row: dict[str, str]) -> None:
    """Eager torch: before the first forward to a ten-thousandth, at the step's worst moment within 0.2%, but for the
    workspace of products, which an H100 with the same torch had and these rows have not."""
    tp, pp, dp, batch = (int(row[name]) for name in ("tp", "pp", "dp", "batch"))
    model = measured_model(row["model"])
    model = model.model_copy(update={"num_hidden_layers": int(row["layers"]) * pp})
    recompute: Any = row["recompute"]
    plan = evaluate(
        model,
        ClusterSpec(hardware=load_hardware("h200"), num_gpus=tp * pp * dp),
        TrainingSpec(seq_length=int(row["seq"]), global_batch_size=batch * dp * int(row["microbatches"])),
        Parallelism(tp=tp, pp=pp, dp=dp, micro_batch_size=batch, recompute=recompute, sequence_parallel=tp > 1),
        runtime="torch-eager",
    )
    memory = plan.stages[int(row["stage"])].memory
    static = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes
    assert static == pytest.approx(int(row["static_bytes"]), rel=1e-4)
    assert memory.peak_allocated_bytes - (64 << 20) == pytest.approx(int(row["peak_allocated_bytes"]), rel=0.002)


MEGATRON = load_runtime("megatron")
SHAPE = Shape(dp=8, shard_size=8, seq_length=4096)


def priced(dtype: str, hardware: str, runtime: str = "megatron", **changes: object) -> Pricing:
    return Pricing(
        model=load_model("llama-3.1-8b"),
        training=TrainingSpec.model_validate({"seq_length": 4096, "global_batch_size": 64, "dtype": dtype}),
        cluster=ClusterSpec(hardware=load_hardware(hardware), num_gpus=8),
        runtime=load_runtime(runtime).model_copy(update=changes),
    )


@pytest.mark.parametrize(
    ("dtype", "hardware", "runtime", "zero_stage", "bytes_per_weight"),
    [
        ("bf16", "b200", "megatron", 1, 2),
        ("fp8", "h100", "megatron", 1, 2),  # as it is and transposed
        ("fp8", "b200", "megatron", 1, 1),  # products of either orientation
        ("mxfp8", "b200", "megatron", 1, 2 * 33 / 32),  # scales run along rows
        ("nvfp4", "b200", "megatron", 1, 2 * 9 / 16),
        ("mxfp8", "b200", "megatron", 0, 2 + 2 * 33 / 32),  # no sharded optimizer to cast for
        ("fp8", "h100", "torch-eager", 1, 2 + 2),
        ("fp8", "h100", "torchtitan", 3, 4 / 8),  # fp32 shards, cast in every pass
    ],
)
def test_bytes_of_weights(dtype: str, hardware: str, runtime: str, zero_stage: int, bytes_per_weight: float) -> None:
    pricing = priced(dtype, hardware, runtime)
    shape = Shape(dp=8, shard_size=8, seq_length=4096, zero_stage=zero_stage)
    (kind,) = pricing.model.kinds
    part = pricing.table(shape).layers[kind, "none"]
    norms = 2 * 4096
    wide_bytes = pricing.runtime.weight_bytes / (8 if zero_stage == 3 else 1)
    assert part.wide_parameters == norms
    assert part.weights_bytes == pytest.approx((part.parameters - norms) * bytes_per_weight + norms * wide_bytes)


def test_embedding_and_head_stay_in_16_bits() -> None:
    table = priced("mxfp8", "b200").table(SHAPE)
    for part in (table.embedding, table.head):
        assert part.wide_parameters == part.parameters
        assert part.weights_bytes == 2 * part.parameters


def test_the_head_is_computed_in_16_bits() -> None:
    pricing = priced("fp8", "h100")
    (product,) = (op for op in operators_of(head(pricing.model, SHAPE, MEGATRON)) if op.kind == "gemm")
    hardware = pricing.cluster.hardware
    narrow, wide = (compute.operator_seconds(product, hardware, dtype, MEGATRON) for dtype in ("fp8", "bf16"))
    assert narrow == wide


def test_routers_stay_in_16_bits() -> None:
    model = load_model("qwen3-30b-a3b")
    layer = operators_of(decoder_layer(model, model.layers[0], SHAPE, MEGATRON))
    assert [op.name for op in layer if op.kind == "gemm" and not op.is_cast] == ["router"]
    assert wide_parameters(layer) == 128 * 2048 + 2 * 2048 + 2 * 128


@pytest.mark.parametrize("dtype", ["fp8", "mxfp8", "nvfp4"])
def test_saved_bytes_of_a_dense_layer(dtype: str) -> None:
    """Inputs of norms, qkv, the core's output with its cast copy, gate and up; cast inputs of the four kernels."""
    model = load_model("llama-3.1-8b")
    hidden, kv, intermediate, heads = 4096, 1024, 14336, 32
    kept = 2 * (2 * hidden + (hidden + 2 * kv) + hidden + 2 * intermediate) + 4 * (heads + 2)
    cast = NARROW_BYTES[dtype] * (3 * hidden + intermediate)
    layer = decoder_layer(model, model.layers[0], SHAPE, MEGATRON)
    assert saved_bytes(layer, dtype=dtype) == pytest.approx(4096 * (kept + cast))
    assert saved_bytes(layer) == 4096 * (kept + 2 * (2 * hidden + intermediate))


def test_autocast_keeps_rows_in_fp32_and_a_copy_of_each_input() -> None:
    """66 bytes a token and feature, and weights in 16 bits, as transformers 5 saves of a layer on this CPU."""
    model = load_model("smollm2-1.7b")
    layer = decoder_layer(
        model, model.layers[0], SHAPE, load_runtime("torch-fsdp").with_features({"autocast": True})[0]
    )
    weights = 4 * 2048**2 + 3 * 2048 * 8192
    assert saved_bytes(layer) == pytest.approx(66 * 4096 * 2048 + 2 * weights, rel=1e-3)


def test_a_recomputed_module_keeps_no_cast_copy_either() -> None:
    op = Operator(name="x", kind="gemm", saved=(Saved("input", (32,), ("mlp",), cast_copy=True),))
    assert op.saved_bytes(dtype="fp8") == 32
    assert op.saved_bytes(frozenset({"mlp"}), "fp8") == 0
    assert op.saved_bytes() == 0


@pytest.mark.parametrize(("runtime", "dtype", "expected"), [
    (MEGATRON, "bf16", 4), (MEGATRON, "mxfp8", 2), (MEGATRON.with_features({"fp32_grad_accum": True})[0], "mxfp8", 4),
    (MEGATRON.with_features({"fp32_grad_accum": False})[0], "bf16", 2), (load_runtime("torch-eager"), "fp8", 4),
])  # fmt: skip
def test_bytes_of_main_gradients(runtime: RuntimeSpec, dtype: str, expected: int) -> None:
    resolved = runtime.in_dtype(dtype, "blackwell")
    assert memory.gradients_bytes(10, 0, SHAPE, resolved) == 10 * expected


def test_what_products_take_in_is_sent_as_they_take_it() -> None:
    """All-gathers before products carry the cast values; reduce-scatters, and what the head takes, 16 bits."""
    model, shape = load_model("llama-3.1-8b"), Shape(tp=4, sequence_parallel=1, seq_length=4096)
    cluster = ClusterSpec(hardware=load_hardware("b200"), num_gpus=8)
    latency_s = 3 * cluster.tiers[0].latency_s
    kinds = set()
    for items, cast in (
        (decoder_layer(model, model.layers[0], shape, MEGATRON), True),
        (head(model, shape, MEGATRON), False),
    ):
        for exchange in collectives_of(items):
            wide, narrow = (float(exchange_s(exchange, shape, cluster, dtype)) for dtype in ("bf16", "mxfp8"))
            if exchange.kind == "all_gather" and cast:
                assert (narrow - latency_s) * (wide > 0) == pytest.approx((wide - latency_s) * (wide > 0) * 33 / 64)
                kinds.add(exchange.name.split()[-1])
            elif exchange.kind != "all_gather" or exchange.name != "head grad gather":
                assert narrow == wide, exchange.name
    assert kinds == {"gather", "again"}


def test_scales_of_rows_are_sent_with_16_bits_and_cast_by_every_rank() -> None:
    shape = Shape(tp=8, sequence_parallel=1, seq_length=8192)
    sooner, later = (
        priced("fp8", "h100", narrow_exchanges=narrow, tp_overlap_fraction=0.0, host_factor=0.0).table(shape, ("none",))
        for narrow in (True, False)
    )
    (kind,) = sooner.layers
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    wide_s, narrow_s = (float(collective_s("all_gather", size * 8192 * 4096, 8, 1, cluster)) for size in (2, 1))
    more_s = later.layers[kind].tp_forward_s - sooner.layers[kind].tp_forward_s
    assert float(more_s) == pytest.approx(2 * (wide_s - narrow_s))
    assert later.layers[kind].forward_s > sooner.layers[kind].forward_s


def test_a_head_in_eight_bits_is_faster_where_products_are_narrow() -> None:
    wide, narrow = (priced("mxfp8", "gb200", narrow_head=on).table(SHAPE, ("none",)).head for on in (False, True))
    assert narrow.forward_s < 0.75 * wide.forward_s
    in_bf16 = (priced("bf16", "gb200", narrow_head=on).table(SHAPE, ("none",)).head for on in (False, True))
    assert len({part.forward_s for part in in_bf16}) == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_trainers_own_narrow_kernels_slow_narrow_products_alone(dtype: str) -> None:
    product = Operator(name="x", kind="gemm", m=8192, n=4096, k=4096, parameters=4096 * 4096, modules=())
    hardware, times = load_hardware("h100"), []
    for factor in (1.0, 1.5):
        runtime = MEGATRON.model_copy(update={"narrow_factor": factor, "casts_weights": False})
        seconds = compute.operator_seconds(product, hardware, dtype, runtime)
        cast = kernels.cast_s(product, hardware, dtype, runtime)
        times.append(seconds.forward_s - cast.forward_s)
    assert times[1] == pytest.approx(times[0] * (1.5 if dtype == "fp8" else 1.0))
