"""Prices: arrays cost what their elements do, recomputing trades memory for time, slow hosts and ranks cost waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from toys import exchange_s

from planner.export.import_run import read_configuration
from planner.physics.compute import issue_seconds, operator_seconds, summed, with_host
from planner.physics.cost import CostTable, PartCost
from planner.physics.kernels import attention_s
from planner.physics.layers import decoder_layer
from planner.physics.memory import GRAPH_POOL
from planner.physics.operators import Operator, collectives_of, operators_of, up_to_last_saved
from planner.physics.passes import LATE_NODE_FRACTION, late_nodes_fraction
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import DocumentLength, Dtype, TrainingSpec
from planner.trainers.groups import CHUNK_PARAMETERS
from planner.trainers.load import RUNTIMES, load_runtime

MODELS = ["llama-3.1-70b", "gpt3-175b", "deepseek-v3", "gpt-oss-120b", "gemma-3-27b", "llama-3.2-1b"]
QUANTITIES = [field.name for field in fields(PartCost)]
TOTALS = ["forward_total_s", "input_grad_total_s", "backward_total_s", "total_s", "static_bytes"]
GPUS = ClusterSpec(hardware=load_hardware("h100"), num_gpus=1024)
BYTES = ["weights_bytes", "gradients_bytes", "optimizer_bytes"]


def pricing_of(name: str, runtime: str = "megatron", dtype: Dtype = "bf16", **changes: Any) -> Pricing:
    return Pricing(
        model=load_model(name), training=TrainingSpec(seq_length=4096, global_batch_size=512, dtype=dtype),
        cluster=GPUS, runtime=load_runtime(runtime), **changes,
    )  # fmt: skip


def grid(model: ModelSpec) -> list[Shape]:
    """Shapes that differ in every axis."""
    experts = [(1, None)] if model.moe is None else [(1, None), (4, 1), (8, 2)]
    shapes = []
    for tp, cp, (ep, etp), (pp, zero), batch in product((1, 2, 8), (1, 4), experts, ((1, 3), (4, 1), (8, 0)), (1, 2)):
        etp = tp if etp is None else min(etp, tp)
        shapes.append(
            Shape(
                tp=tp, cp=cp, ep=ep, etp=etp, pp=pp, dp=32, micro_batch_size=batch, num_microbatches=16,
                seq_length=4096, sequence_parallel=int(tp > 1), zero_stage=zero, shard_size=32 * cp if zero < 3 else 8,
            )
        )  # fmt: skip
    return shapes


def named_parts(table: CostTable) -> Iterator[tuple[str, PartCost]]:
    for (kind, mode), part in table.layers.items():
        yield f"{kind} {mode}", part
    yield "embedding", table.embedding
    yield "head", table.head
    yield "head beside embedding", table.head_beside_embedding
    if table.mtp is not None:
        yield "mtp", table.mtp


def quantities(table: CostTable) -> dict[str, Any]:
    """Every number of a table by name."""
    numbers = {f"{name}: {q}": getattr(part, q) for name, part in named_parts(table) for q in QUANTITIES + TOTALS}
    return numbers | {name: getattr(table, name) for name in ("p2p_s", "usable_bytes", "tail_s")}


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("runtime", ["megatron", "torchtitan", "torch-eager"])
def test_an_array_of_shapes_costs_what_its_elements_cost(name: str, runtime: str) -> None:
    pricing = pricing_of(name, runtime, "fp8" if runtime == "megatron" else "bf16")
    shapes = grid(pricing.model)
    many = {
        key: np.broadcast_to(value, len(shapes))
        for key, value in quantities(pricing.table(Shape.stacked(shapes))).items()
    }
    for index in range(0, len(shapes), 1 if len(shapes) < 40 else 5):
        for key, value in quantities(pricing.table(shapes[index])).items():
            assert many[key][index] == pytest.approx(float(value), rel=1e-12, abs=1e-30), (key, shapes[index])


@pytest.mark.parametrize("name", ["llama-3.2-1b", "deepseek-v3"])
@pytest.mark.parametrize("index", [3, np.array([5, 0])])
def test_take_gives_the_tables_of_some_shapes(name: str, index: Any) -> None:
    pricing = pricing_of(name)
    shape = Shape.stacked(grid(pricing.model))
    taken, priced = quantities(pricing.table(shape).take(index)), quantities(pricing.table(shape.take(index)))
    for key, value in priced.items():
        np.testing.assert_allclose(taken[key], value, rtol=1e-12, err_msg=key)
    np.testing.assert_array_equal(pricing.table(shape).take(index).shape.tp, shape.tp[index])


@pytest.mark.thorough(4)
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("name", MODELS)
def test_recomputing_more_keeps_less_and_costs_more(name: str, runtime: str) -> None:
    pricing = pricing_of(name, runtime)
    table = pricing.table(Shape.stacked(grid(pricing.model)))
    for kind in pricing.model.kinds:
        none, selective, full = (table.layers[kind, mode] for mode in ("none", "selective", "full"))
        assert np.all(full.live_bytes < selective.live_bytes)
        assert np.all(selective.live_bytes <= none.live_bytes)
        assert np.all(full.input_grad_total_s > selective.input_grad_total_s)
        assert np.all(selective.input_grad_total_s >= none.input_grad_total_s)
        for part in (selective, full):
            # recomputing happens in the backward alone and leaves weights as they are
            assert np.all(part.forward_total_s == none.forward_total_s)
            assert np.all(part.weight_grad_s == none.weight_grad_s)
            assert np.all(part.static_bytes == none.static_bytes)
            # what is kept, and what comes back while the layer's backward runs, is no less than without
            assert np.all(part.live_bytes + part.transient_bytes >= none.live_bytes + none.transient_bytes - 1)


@pytest.mark.parametrize("way", ["texts", "packs"])
def test_texts_over_as_few_ranks_as_hold_them_take_their_mean(way: str) -> None:
    """Texts as long as a sequence take a static step and what ranks wait; short ones exchange no keys; bytes stay."""
    shape = Shape.of(cp=4, dp=8, seq_length=32768)
    tables = {}
    for length in (32768, 8192, 2048):
        lengths = (DocumentLength(length=length, share=1.0),)
        training = TrainingSpec(seq_length=32768, global_batch_size=64, document_lengths=lengths)
        pricing = replace(pricing_of("llama-3.1-8b"), training=training)
        runtime = pricing.runtime.model_copy(update={"dynamic_cp": way})
        dynamic = replace(pricing, runtime=runtime)
        tables[length] = dynamic.table(shape).layers[dynamic.model.kinds[0], "full"]
        whole = sum(
            part.total_s * (32 if "none" in name else 1)
            for name, part in named_parts(dynamic.table(shape, ("none",)))
            if name != "head beside embedding"
        )
        assert float(dynamic.least_work_s(shape)) == pytest.approx(float(whole), rel=1e-9)
    static = pricing.table(shape).layers[pricing.model.kinds[0], "full"]
    assert tables[32768].total_s == pytest.approx(1.05 * static.total_s, rel=1e-9)
    assert tables[32768].cp_backward_s > tables[8192].cp_backward_s == 0
    assert tables[2048].total_s < tables[8192].total_s if way == "packs" else tables[2048].total_s > 0
    assert {part.live_bytes for part in tables.values()} == {static.live_bytes}


@pytest.mark.parametrize(
    ("policy", "products", "layers_left"), [("eager", 3, 32), ("default", 0, 32), ("sac_and_offload", 0, 1)]
)
def test_a_policy_by_operators_saves_recomputes_or_offloads(policy: str, products: int, layers_left: int) -> None:
    """Of an eager layer of Llama, whose seven products are apart, `op` repeats k, the output's and up.

    On the host waits what all layers but the last keep, and its pages are moved once each way.
    """
    command = "torchrun -m torchtitan.train --module graph_trainer.llama3 --training.seq_len 8192 --model.name llama3 "
    run = read_configuration(command + f"--model.flavor 8B --compile.memory_policy {policy}", "torchtitan").run
    assert (run["parallelism"]["recompute"], run["features"]["cuda_graph"]) == ("selective", "full_iteration")
    runtime = load_runtime("torchtitan").with_features(run["features"])[0]
    pricing = replace(pricing_of("llama-3.1-8b", "torchtitan"), runtime=runtime, selective_modules=("op",))
    shape, kind = Shape.of(dp=8, zero_stage=3, seq_length=8192), pricing.model.kinds[0]
    replayed = operators_of(pricing.replayed_items(pricing.layer(kind, shape), "selective"))
    assert sum(one.kind == "gemm" for one in replayed) == products
    table = pricing.table(shape)
    saved = 8192 * 2 * (1024 + 4096 + 14336)
    graphs = {"cuda_graphs": True, "checks_nan": False}
    plain = replace(pricing, runtime=load_runtime("torchtitan").model_copy(update=graphs))
    eager = plain.table(shape).layers[kind, "selective"].live_bytes / GRAPH_POOL
    kept = (eager + saved * (products == 0)) * layers_left / 32
    assert table.layers[kind, "selective"].live_bytes / GRAPH_POOL == pytest.approx(kept)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_states_alone_are_sharded_over_groups_too(model: str) -> None:
    plain = pricing_of(model)
    outer = replace(plain, runtime=plain.runtime.with_features({"outer_dp_sharding": True})[0])
    kind = plain.model.kinds[0]
    for zero_stage, share, gradients in ((3, 1 / 4, 0.75), (1, 1, 1)):
        shape = Shape.of(dp=32, zero_stage=zero_stage, shard_size=8, seq_length=4096)
        before, after = (pricing.table(shape).layers[kind, "none"] for pricing in (plain, outer))
        assert after.optimizer_bytes == pytest.approx(before.optimizer_bytes * share)
        assert (after.weights_bytes, after.gradients_bytes) == (before.weights_bytes, before.gradients_bytes)
        # gradients of four bytes are scattered, weights of two gathered, where gradients were all-reduced
        scatter_s = plain.exchanges.part_s(before, replace(shape, dp=8))[0]
        among_s = plain.exchanges.part_s(before, shape)[0] - scatter_s
        assert outer.exchanges.part_s(before, shape)[0] == pytest.approx(scatter_s + gradients * among_s)


@pytest.mark.parametrize(("shards", "tp"), [(4, 1), (8, 2)])
def test_ranks_that_share_weights_gather_them_for_every_pass(shards: int, tp: int) -> None:
    plain = pricing_of("llama-3.1-8b")
    shared = replace(plain, runtime=plain.runtime.with_features({"gtp": shards})[0])
    shape = Shape.of(tp=tp, dp=16, seq_length=4096, sequence_parallel=int(tp > 1))
    (kind,) = plain.model.kinds
    before, after = (pricing.table(shape).layers[kind, "none"] for pricing in (plain, shared))
    assert after.weights_bytes == pytest.approx(before.weights_bytes / shards)
    assert after.gradients_bytes == pytest.approx(before.gradients_bytes / shards)
    assert after.optimizer_bytes == before.optimizer_bytes, "sharded over all replicas in any case"
    # the fused gate and up, and the next weight, are whole
    assert after.transient_bytes - before.transient_bytes == 2 * 2 * 2 * 14336 * 4096 / tp
    exchanges = [one for one in collectives_of(shared.layer(kind, shape)) if one.shards > 1]
    weights = 4096 * (4096 * 2 + 1024 * 2 + 14336 * 3) / tp
    assert [(one.kind, one.num_bytes) for one in exchanges] == [
        ("all_gather", 2 * weights), ("all_gather", 2 * weights), ("reduce_scatter", 2 * weights)
    ]  # fmt: skip
    hidden = shared.runtime.fsdp_overlap_fraction
    each_s = exchange_s(exchanges[0], shape, GPUS) + 1e-6 * plain.runtime.collective_sync_us * np.log2(shards)
    assert after.tp_forward_s - before.tp_forward_s == pytest.approx((1 - hidden) * each_s)
    assert after.reduce_s < before.reduce_s


def test_full_recomputation_keeps_the_layer_input_and_repeats_its_forward() -> None:
    pricing = pricing_of("llama-3.1-70b")
    shape = Shape(tp=8, pp=4, dp=4, seq_length=4096, micro_batch_size=2, sequence_parallel=1)
    table = pricing.table(shape)
    (kind,) = pricing.model.kinds
    none, full = table.layers[kind, "none"], table.layers[kind, "full"]
    assert full.live_bytes == 2 * 4096 * 2 * 8192 / 8
    assert full.input_grad_s - none.input_grad_s == pytest.approx(none.forward_s)
    assert full.tp_backward_s - none.tp_backward_s == pytest.approx(none.tp_forward_s)


def test_torch_repeats_a_layer_up_to_the_last_tensor_its_backward_needs() -> None:
    """No down projection and no exchange behind it, where the trainer leaves recomputing to torch."""
    shape = Shape(tp=8, pp=4, dp=4, seq_length=4096, micro_batch_size=2, sequence_parallel=1, zero_stage=3)
    early = pricing_of("llama-3.1-70b", "torchtitan")
    never = replace(early, runtime=early.runtime.model_copy(update={"stops_recompute_early": False}))
    (kind,) = early.model.kinds
    stopped, whole = (pricing.table(shape).layers[kind, "full"] for pricing in (early, never))
    items = decoder_layer(early.model, kind, shape, early.runtime)
    behind = items[len(up_to_last_saved(items)) :]
    assert [op.name for op in operators_of(behind)] == ["mlp down", "mlp residual"]
    gpu_s = [operator_seconds(op, early.cluster.hardware, "bf16", early.runtime)[0] for op in operators_of(behind)]
    late = 1 + late_nodes_fraction(GPUS)
    assert whole.input_grad_s - stopped.input_grad_s == pytest.approx(late * sum(gpu_s))
    (scatter,) = (c for c in collectives_of(behind) if c.name == "mlp down scatter")
    wait_s = early.runtime.collective_sync_us * 1e-6 * 3
    scattered_s = float(exchange_s(scatter, shape, early.cluster)) + wait_s
    assert whole.tp_backward_s - stopped.tp_backward_s == pytest.approx(scattered_s)


def test_a_mixture_that_keeps_what_experts_give_is_repeated_as_far() -> None:
    model, runtime = load_model("deepseek-v3"), load_runtime("torchtitan")
    items = decoder_layer(model, model.layers[-1], Shape(ep=8, dp=8, seq_length=4096), runtime)
    again = {item.name for item in up_to_last_saved(items)}
    assert {item.name for item in items if "combine" in item.name and not getattr(item, "backward", False)} <= again


def freed_by(name: str, shape: Shape, *modules: str) -> list[float]:
    """Bytes that a layer of each kind keeps less where these modules are recomputed."""
    pricing = pricing_of(name, selective_modules=modules)
    table = pricing.table(shape)
    live = {(kind, mode): part.live_bytes for (kind, mode), part in table.layers.items()}
    return [float(live[kind, "none"] - live[kind, "selective"]) for kind in pricing.model.kinds]


def test_modules_recomputed_selectively_are_those_asked_for() -> None:
    shape = Shape(tp=8, pp=4, dp=4, seq_length=4096, sequence_parallel=1)
    assert freed_by("llama-3.1-70b", shape, "core_attn")[0] > 0
    # up, gate and their product, 2·m·f/t bytes each, and the norm that is part of the product: 2·m·h/t
    assert freed_by("llama-3.1-70b", shape, "mlp") == [3 * 2 * 4096 * 28672 / 8 + 2 * 4096 * 8192 / 8]


def test_blocks_of_several_tokens_are_recomputed_as_layers_are() -> None:
    shape = Shape(tp=1, pp=4, dp=4, ep=4, seq_length=4096)
    pricing = pricing_of("deepseek-v3", selective_modules=("moe_act", "mla_up_proj"))
    table, kind = pricing.table(shape), pricing.model.layers[-1]
    assert table.mtp is not None
    for mode in ("selective", "full"):
        block, layer, plain = table.mtp_recomputed[mode], table.layers[kind, mode], table.layers[kind, "none"]
        for name in ("live_bytes", "transient_bytes", "backward_total_s"):
            more = getattr(block, name) - getattr(table.mtp, name)
            assert more == pytest.approx(getattr(layer, name) - getattr(plain, name)), (mode, name)
        assert block.parameters == table.mtp.parameters
        assert block.forward_total_s == pytest.approx(table.mtp.forward_total_s)
    assert not pricing_of("deepseek-v3", "torch-eager").table(shape).mtp_recomputed


def test_norms_that_are_part_of_a_product_go_with_it() -> None:
    """Megatron-LM's `layernorm` acts on norms that stand alone: before latent attention, and before experts."""
    shape = Shape(tp=1, pp=4, dp=4, ep=4, seq_length=4096)
    assert freed_by("llama-3.1-70b", shape, "layernorm") == [0.0]
    # keys and values come from the same norm's output as the queries
    assert freed_by("mixtral-8x7b", shape, "layernorm") == [2 * 4096 * 4096]
    dense, experts = freed_by("deepseek-v3", shape, "layernorm")
    assert dense == 2 * 4096 * 7168
    assert experts == 2 * dense


def test_zero_stages_shard_more_and_more() -> None:
    pricing = pricing_of("llama-3.1-8b", "megatron")
    shapes = [Shape(tp=1, dp=64, seq_length=4096, zero_stage=stage, shard_size=64) for stage in range(4)]
    layers = [pricing.table(shape).layers[pricing.model.kinds[0], "none"] for shape in shapes]
    for stage, layer in enumerate(layers):
        for name, since, whole in zip(BYTES, (3, 2, 1), (2, 4, 12), strict=True):
            ranks = 64 if stage >= since else 1
            assert getattr(layer, name) == pytest.approx(whole * layer.parameters / ranks), (stage, name)
    assert layers[0].gather_s == 0
    assert layers[1].gather_s > 0
    # an all-reduce moves what a reduce-scatter and an all-gather do; its trees pass fewer ranks than their rings
    assert 1.8 * layers[1].reduce_s < layers[0].reduce_s < 2 * layers[1].reduce_s


def test_data_parallel_exchanges_wait_for_each_rank_of_their_ring_a_bucket_at_a_time() -> None:
    """Hops times latency for each bucket beside the bytes; a rank's part of a bucket is a chunk of NCCL's at least."""
    pricing = pricing_of("llama-3.1-8b", "megatron")
    exchanges = pricing.exchanges
    nvlink, network = pricing.cluster.tiers
    parameters, bucket = 2.0**33, 2.0**27
    assert pricing.runtime.bucket_parameters == bucket

    def gather_s(dp: int, num_parameters: float = parameters, zero_stage: int = 1) -> float:
        shape = Shape(tp=1, dp=dp, seq_length=4096, shard_size=dp, zero_stage=zero_stage)
        return float(exchanges.gather_s(num_parameters, 0.0, shape))

    for dp, size in ((64, bucket), (512, bucket), (4096, 4096 * CHUNK_PARAMETERS)):
        ring_s = (dp - dp / 8) * nvlink.latency_s + (dp / 8 - 1) * network.latency_s
        bytes_s = 2 * parameters * (7 / 8 / nvlink.bytes_per_s + (1 - 8 / dp) / 8 / network.bytes_per_s)
        assert gather_s(dp) == pytest.approx(bytes_s + parameters / size * ring_s)
        # ZeRO-3 gathers a layer at once, however large
        assert gather_s(dp, zero_stage=3) == pytest.approx(bytes_s + ring_s)
    # in proportion, so that a stage's exchange is the sum of its layers'
    assert gather_s(512, parameters / 4) == pytest.approx(gather_s(512) / 4)


def test_groups_gather_inside_and_reduce_across() -> None:
    """ZeRO-1 in nodes of 8: weights stay inside, a shard of the gradients is all-reduced between the nodes."""
    pricing = pricing_of("llama-3.1-8b", "megatron")
    exchanges = pricing.exchanges
    all_ranks, nodes = (Shape(tp=1, dp=1024, seq_length=4096, shard_size=size) for size in (1024, 8))
    nvlink, network = pricing.cluster.tiers
    parameters = 2.0**33
    inside_s = parameters * 7 / 8 / nvlink.bytes_per_s + 64 * 7 * nvlink.latency_s / 2
    assert float(exchanges.gather_s(parameters, 0.0, nodes)) == pytest.approx(2 * inside_s)
    across_s = 2 * 4 * parameters / 8 * 127 / 128 / network.bytes_per_s + 64 * 2 * 7 * network.latency_s
    reduced_s = float(exchanges.reduce_s(parameters, 0.0, nodes))
    assert reduced_s == pytest.approx(
        4 * parameters * 7 / 8 / nvlink.bytes_per_s + 64 * 7 * nvlink.latency_s + across_s
    )
    # what a slower network adds is as much for gathers that stay in a node, and more for all others
    slow = replace(pricing, cluster=GPUS.changed(network_gb_per_s=5.0)).exchanges
    assert slow.gather_s(parameters, 0.0, nodes) == exchanges.gather_s(parameters, 0.0, nodes)
    assert slow.gather_s(parameters, 0.0, all_ranks) > 3 * exchanges.gather_s(parameters, 0.0, all_ranks)
    # inside one node there is one group, and nothing to save
    alone = replace(pricing, cluster=GPUS.changed(num_gpus=8)).exchanges
    halves, whole = (Shape(tp=1, dp=8, seq_length=4096, shard_size=size) for size in (4, 8))
    exchanged_s = [float(alone.gather_s(1e9, 0.0, s) + alone.reduce_s(1e9, 0.0, s)) for s in (halves, whole)]
    assert exchanged_s[0] > exchanged_s[1]


def test_tensors_that_are_gathered_one_by_one_go_around_the_ring_once_each() -> None:
    """As InternEvo's broadcasts, which 1,024 ranks take 1.5 s longer for than 512 do."""
    pricing = pricing_of("llama-2-7b", "internevo")
    at_once = replace(pricing, runtime=pricing.runtime.model_copy(update={"gathers_tensors": False})).exchanges
    exchanges = pricing.exchanges
    parameters, hidden = 6.7e9, 4096

    def more_s(dp: int) -> float:
        shape = Shape(tp=1, dp=dp, seq_length=2048, shard_size=dp)
        return float(exchanges.gather_s(parameters, 0.0, shape) - at_once.gather_s(parameters, 0.0, shape))

    nvlink, network = pricing.cluster.tiers
    ring_s = 512 * 7 / 8 * nvlink.latency_s + 63 * network.latency_s
    assert more_s(512) == pytest.approx((parameters / hidden**2 - 1) * ring_s)
    assert more_s(8) < more_s(64) < more_s(512) < more_s(1024) == pytest.approx(2 * more_s(512), rel=0.01)
    assert exchanges.reduce_s(parameters, 0.0, Shape(tp=1, dp=64, seq_length=2048, shard_size=8)) == at_once.reduce_s(
        parameters, 0.0, Shape(tp=1, dp=64, seq_length=2048, shard_size=64)
    )


def test_fp8_is_faster_and_keeps_less() -> None:
    shape = Shape(tp=8, pp=4, dp=4, seq_length=8192, micro_batch_size=2, sequence_parallel=1)
    tables = {dtype: pricing_of("405b", dtype=dtype).table(shape) for dtype in ("bf16", "fp8")}
    kind = load_model("405b").kinds[0]
    bf16, fp8 = (tables[dtype].layers[kind, "none"] for dtype in ("bf16", "fp8"))
    assert fp8.total_s < bf16.total_s
    assert fp8.live_bytes < bf16.live_bytes
    # as it is and transposed, in the stead of 16 bits
    assert fp8.weights_bytes == bf16.weights_bytes
    assert fp8.gradients_bytes == bf16.gradients_bytes / 2
    # gathers carry 8 bits, reduce-scatters 16
    assert 0.5 * bf16.tp_forward_s < fp8.tp_forward_s < 0.9 * bf16.tp_forward_s


def test_nodes_wait_for_the_latest_of_them() -> None:
    """Nothing on one node, more on more of them, and bounded: 3% where a thousand nodes compute, of no exchange."""
    clusters = [GPUS.changed(num_gpus=num_gpus) for num_gpus in (1, 8, 9, 16, 256, 8192, 65536)]
    late = [late_nodes_fraction(cluster) for cluster in clusters]
    assert late[:2] == [0.0, 0.0]
    assert late[2] == late[3] == pytest.approx(LATE_NODE_FRACTION * np.log(2))
    assert late[3:] == sorted(late[3:])
    assert late[-1] < 0.07
    # a node of a GB200 rack has four GPUs
    rack = ClusterSpec(hardware=load_hardware("gb200"), num_gpus=72)
    assert late_nodes_fraction(rack) == pytest.approx(LATE_NODE_FRACTION * np.log(18))
    shape = Shape(tp=8, seq_length=4096, sequence_parallel=1)
    pricing = pricing_of("llama-3.1-70b")
    one, many = (
        next(iter(replace(pricing, cluster=cluster).table(shape).layers.values())) for cluster in (clusters[1], GPUS)
    )
    assert many.forward_s == pytest.approx((1 + late_nodes_fraction(GPUS)) * one.forward_s)
    assert many.tp_forward_s == one.tp_forward_s


def test_a_straggler_slows_compute_and_no_exchange() -> None:
    shape = Shape(tp=8, pp=4, dp=4, seq_length=4096, sequence_parallel=1)
    pricing = pricing_of("llama-3.1-70b")
    slow = Pricing(
        model=pricing.model, training=pricing.training.model_copy(update={"straggler_fraction": 0.25}),
        cluster=pricing.cluster, runtime=pricing.runtime,
    )  # fmt: skip
    usual, slower = (p.table(shape).layers[pricing.model.kinds[0], "none"] for p in (pricing, slow))
    assert slower.forward_s == pytest.approx(1.25 * usual.forward_s)
    assert slower.weight_grad_s == pytest.approx(1.25 * usual.weight_grad_s)
    assert slower.tp_forward_s == usual.tp_forward_s


def test_headroom_is_taken_from_what_tensors_may_use() -> None:
    shape = Shape(tp=8, pp=4, dp=4, seq_length=4096)
    free, tight = (
        pricing_of("llama-3.1-8b", headroom_bytes=headroom).table(shape).usable_bytes for headroom in (0.0, 2.0**30)
    )
    fragmentation = load_hardware("h100").reserved.fragmentation_fraction
    assert free - tight == pytest.approx(2.0**30 / (1 + fragmentation))


def test_stages_hand_on_activations_only_where_there_are_several() -> None:
    pricing = pricing_of("llama-3.1-8b")
    alone, near, far = (
        pricing.table(Shape(tp=tp, pp=pp, dp=dp, seq_length=4096)).p2p_s
        for tp, pp, dp in ((1, 1, 8), (1, 8, 1), (1, 8, 8))
    )
    assert alone == 0
    # next to each other the stages share a node; behind eight data-parallel ranks they do not
    assert 0 < near < far


def test_late_ranks_cost_in_proportion_to_compute_and_doublings() -> None:
    def layer(tp: int, jitter: float) -> PartCost:
        pricing = pricing_of("llama-3.1-70b")
        runtime = pricing.runtime.model_copy(update={"tp_jitter_fraction": jitter})
        shape = Shape(tp=tp, dp=2, seq_length=4096, sequence_parallel=1)
        return replace(pricing, runtime=runtime).table(shape).layers[pricing.model.kinds[0], "full"]

    assert layer(1, 0.1).total_s == layer(1, 0.0).total_s
    for tp, doublings in ((2, 1), (8, 3)):
        still, late = layer(tp, 0.0), layer(tp, 0.1)
        assert late.forward_s == still.forward_s
        assert late.tp_forward_s - still.tp_forward_s == pytest.approx(0.1 * doublings * still.forward_s)
        # recomputing the forward is in the backward's compute, and waits again
        computed_s = still.input_grad_s + still.weight_grad_s
        assert late.tp_backward_s - still.tp_backward_s == pytest.approx(0.1 * doublings * computed_s)


@pytest.mark.parametrize(("seq_length", "hides"), [(2**13, False), (2**20, True)])
def test_a_ring_hides_no_longer_than_the_attention_to_its_other_blocks(seq_length: int, hides: bool) -> None:
    """16 ranks, each on a node of its own: keys of 512 tokens take longer than their scores, those of 65,536 do not."""
    pricing = pricing_of("llama-2-7b")
    # a host that is never late: while the GPU waits for one, exchanges go on
    pricing = replace(pricing, runtime=pricing.runtime.model_copy(update={"host_factor": 0.0}))
    shape = Shape(tp=8, cp=16, dp=2, seq_length=seq_length, sequence_parallel=1)
    (kind,) = pricing.model.kinds
    layer = pricing.table(shape).layers[kind, "none"]
    items = decoder_layer(pricing.model, kind, shape, pricing.runtime)
    attention = [op for op in operators_of(items) if op.kind == "attention"]
    hardware, runtime = pricing.cluster.hardware, pricing.runtime
    issued = issue_seconds(attention, hardware, runtime)
    passes = with_host(summed(operator_seconds(op, hardware, "bf16", runtime) for op in attention), issued, runtime)
    for backward, shown, others in (
        (False, layer.cp_forward_s, passes[0]),
        (True, layer.cp_backward_s, sum(passes[1:])),
    ):
        (ring,) = (c for c in collectives_of(items) if c.group == "cp" and c.backward == backward)
        wait_s = pricing.runtime.collective_sync_us * 1e-6 * 4
        exchanged_s = float(exchange_s(ring, shape, pricing.cluster)) + wait_s
        hidden_s = exchanged_s - float(shown)
        assert (hidden_s == pytest.approx(0.95 * exchanged_s)) == hides
        assert hidden_s <= float(others) * 15 / 16 * (1 + 1e-9)


def test_the_last_rank_of_a_sequence_dealt_in_order_attends_to_nearly_all_of_it() -> None:
    """Its share over the mean is 2 - 1 / cp; layers with a window are even however they are dealt."""
    hardware = load_hardware("h100")
    for cp in (1, 2, 8):
        attention = Operator(
            name="", kind="attention", batch=1, heads=32, q_len=2**17, kv_len=2**17 * cp, qk_dim=128, v_dim=128
        )
        last = replace(attention, imbalance=2 - 1 / cp)
        seconds = [attention_s(op, hardware)[0] for op in (attention, last)]
        assert seconds[1] / seconds[0] == pytest.approx(2 - 1 / cp, rel=0.01)
    model, shape = load_model("gemma-3-27b"), Shape(cp=8, seq_length=131072)
    for runtime, full in (("torchtitan-2025", 1.875), ("torchtitan", 1.0), ("megatron", 1.0)):
        found = {
            kind.attention: float(op.imbalance)
            for kind in model.kinds
            for op in operators_of(decoder_layer(model, kind, shape, load_runtime(runtime)))
            if op.kind == "attention"
        }
        assert found == {"sliding": 1.0, "full": full}


def mixture(
    name: str = "qwen3-30b-a3b",
    seq_length: int = 4096,
    ranks: int = 8,
    network_gb_per_s: float | None = None,
    hardware: str = "h100",
    dtype: Dtype = "bf16",
    **changes: Any,
) -> PartCost:
    """A mixture-of-experts layer on one of a few GPUs that share its experts."""
    pricing = pricing_of(name, dtype=dtype)
    cluster = ClusterSpec(hardware=load_hardware(hardware), num_gpus=1024, network_gb_per_s=network_gb_per_s)
    pricing = replace(pricing, runtime=pricing.runtime.model_copy(update=changes), cluster=cluster)
    shape = Shape(dp=ranks, ep=ranks, etp=1, shard_size=ranks, seq_length=seq_length)
    table = pricing.table(shape, ("none",))
    return next(part for (kind, _), part in table.layers.items() if kind.mlp == "moe")


KERNEL_S = load_hardware("h100").efficiency.host_us * load_runtime("megatron").host_factor * 1e-6
"""What an H100's host needs to issue a kernel."""
NO_HOST: dict[str, Any] = {"moe_kernels": 0.0, "expert_kernels": 0.0}


def test_a_mixture_takes_as_long_as_the_host_or_as_the_gpu() -> None:
    local_experts = 128 / 8
    free = mixture(**NO_HOST)
    slow = mixture(moe_kernels=400.0, expert_kernels=20.0, moe_host_factor=0.5)
    host_s = (400 * 0.5 + 20 * local_experts) * KERNEL_S
    assert slow.forward_total_s == pytest.approx(host_s)
    assert slow.backward_total_s == pytest.approx(host_s)
    assert slow.weight_grad_s == free.weight_grad_s
    # a host that is done before the GPU costs nothing, and neither does one whose work a graph replays
    quick = float(free.forward_total_s) / KERNEL_S
    assert mixture(moe_kernels=0.5 * quick, expert_kernels=0.0) == free
    # one that is done in all, but waits for token counts behind attention and routing, cannot make up for these
    waits = mixture(moe_kernels=0.95 * quick, expert_kernels=0.0)
    assert free.forward_total_s < waits.forward_total_s < 1.4 * free.forward_total_s
    assert waits.backward_total_s == free.backward_total_s
    whole = {"graphed_attention_fraction": 0.0, "graphed_routing_fraction": 0.0}
    assert mixture(moe_kernels=0.95 * quick, expert_kernels=0.0, **whole) == free
    replayed = mixture(moe_kernels=400.0, cuda_graphs=True)
    assert replayed == mixture(**NO_HOST, cuda_graphs=True)


def test_an_optimizer_step_takes_the_host_a_while_for_each_tensor() -> None:
    free, counted = (mixture(tensor_kernels=kernels) for kernels in (0.0, 2.0))
    # of 16 experts two products each, and of the rest two norms, those of queries and keys, router, qkv, output
    tensors = 2 * 128 / 8 + 6
    assert counted.optimizer_s - free.optimizer_s == pytest.approx(2 * tensors * KERNEL_S)
    assert mixture(tensor_kernels=2.0, cuda_graphs=True) == mixture(tensor_kernels=0.0, cuda_graphs=True)


def test_the_host_starts_exchanges_too() -> None:
    def layer(tp: int, kernels: float, name: str = "exchange_kernels", zero_stage: int = 1) -> PartCost:
        pricing = pricing_of("llama-3.1-8b")
        pricing = replace(pricing, runtime=pricing.runtime.model_copy(update={name: kernels}))
        table = pricing.table(Shape(tp=tp, sequence_parallel=1, seq_length=128, zero_stage=zero_stage), ("none",))
        return next(iter(table.layers.values()))

    # at so few tokens the host decides: gathers before two products, scatters after two
    late = 1 + late_nodes_fraction(GPUS)
    assert layer(8, 10.0).forward_s - layer(8, 0.0).forward_s == pytest.approx(late * 40 * KERNEL_S)
    # one rank alone exchanges nothing
    assert layer(1, 10.0) == layer(1, 0.0)
    # ZeRO-3's hooks fetch the weights of two norms and four products each
    fetched, none = (layer(1, kernels, "fetch_kernels", zero_stage=3) for kernels in (10.0, 0.0))
    assert fetched.forward_s - none.forward_s == pytest.approx(late * 60 * KERNEL_S)
    assert layer(1, 10.0, "fetch_kernels") == layer(1, 0.0)


def test_a_host_that_awaits_no_counts_is_late_by_what_both_passes_need() -> None:
    free = mixture(**NO_HOST)
    forward_s, backward_s = float(free.forward_total_s), float(free.backward_total_s)
    between = (forward_s + backward_s) / 2  # longer than the forward, shorter than the backward
    host = {"moe_kernels": between / KERNEL_S, "expert_kernels": 0.0}
    assert mixture(**host).forward_total_s == pytest.approx(between)
    ahead = mixture(**host, awaits_token_counts=False)
    # what the host is late in the forward, the GPU makes up for in the backward
    assert (ahead.forward_total_s, ahead.backward_total_s) == pytest.approx((between, between))
    late = mixture(moe_kernels=2 * between / KERNEL_S, expert_kernels=0.0, awaits_token_counts=False)
    assert late.forward_total_s + late.backward_total_s == pytest.approx(4 * between)


def test_overlapped_exchanges_and_casts_take_the_host_longer() -> None:
    host = {"moe_kernels": 400.0, "expert_kernels": 2.0, "ep_overlap_host_factor": 1.5, "narrow_host_factor": 1.2}
    alone_s = (400 + 2 * 128 / 8) * KERNEL_S
    assert mixture(**host).forward_total_s == pytest.approx(alone_s)
    overlapped = mixture(**host, ep_overlap_fraction=0.8)
    assert (overlapped.forward_total_s, overlapped.backward_total_s) == pytest.approx((1.5 * alone_s, 1.5 * alone_s))
    assert mixture(**host, dtype="fp8").forward_total_s == pytest.approx(1.2 * alone_s)


def test_a_slower_host_issues_mixtures_more_slowly() -> None:
    """Grace takes a fifth longer than the x86 hosts of its day."""
    grace, x86 = (mixture(hardware=name, moe_kernels=400.0, expert_kernels=0.0) for name in ("gb200", "b200"))
    ratio = load_hardware("gb200").efficiency.host_us / load_hardware("b200").efficiency.host_us
    assert ratio > 1.1
    assert grace.forward_total_s == pytest.approx(ratio * x86.forward_total_s)


@pytest.mark.parametrize(("network_gb_per_s", "hides"), [(400, True), (2, False)])
def test_exchanges_hide_no_longer_than_the_passes_beside_them(network_gb_per_s: float, hides: bool) -> None:
    never = {**NO_HOST, "ep_row_bytes": 0.0}
    alone, beside = (
        mixture(
            **never,
            ranks=64,
            network_gb_per_s=network_gb_per_s,
            ep_overlap_fraction=fraction,
            ep_overlap_network_fraction=fraction,
            deepep_sms=0,
        )
        for fraction in (0.0, 1.0)
    )
    exchanged_s, shown_s = (float(part.ep_forward_s + part.ep_backward_s) for part in (alone, beside))
    # a late node hides no more than others
    passes_s = float(alone.forward_s + alone.input_grad_s + alone.weight_grad_s) / (1 + late_nodes_fraction(GPUS))
    assert (exchanged_s < passes_s) == hides
    assert shown_s == pytest.approx(max(exchanged_s - passes_s, 0.0), abs=1e-12)


def test_dense_layers_wait_for_no_expert() -> None:
    pricing = pricing_of("deepseek-v3")
    pricing = replace(pricing, runtime=pricing.runtime.model_copy(update={"moe_kernels": 1e5}))
    shape = Shape(dp=8, ep=8, etp=1, shard_size=8, seq_length=4096)
    for (kind, _), part in pricing.table(shape, ("none",)).layers.items():
        assert (part.forward_total_s > 1) == (kind.mlp == "moe")


def test_tokens_shorter_than_a_row_take_as_long_as_one() -> None:
    """Of 2·2048 bytes: `ep_row_bytes` over them, but never less than their own time."""
    plain, short, long = (mixture(ep_row_bytes=value, **NO_HOST) for value in (0, 4095, 6144))
    assert short.ep_forward_s == plain.ep_forward_s
    latency_s = 2 * load_hardware("h100").tiers[0].latency_s
    assert long.ep_forward_s - latency_s == pytest.approx(1.5 * (plain.ep_forward_s - latency_s))


def test_only_an_all_to_all_waits_for_its_slowest_rank() -> None:
    """Kernels that send each token once wait for each rank by itself: no `collective_sync_us` per doubling."""
    never = {**NO_HOST, "ep_row_bytes": 0.0}
    for once, waited_s in ((False, 2 * 100e-6 * 3), (True, 0.0)):
        free, late = (mixture(**never, sends_tokens_once=once, collective_sync_us=us) for us in (0.0, 100.0))
        assert late.ep_forward_s == pytest.approx(free.ep_forward_s + waited_s)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_a_product_in_pieces_hides_the_exchange_of_all_but_the_first(tp: int) -> None:
    # products that take longer than what they hide
    pricing = pricing_of("llama-3.1-405b")
    shape = Shape(tp=tp, dp=32, seq_length=32_768, sequence_parallel=1)
    tables = []
    for fraction in (0.0, 1.0):
        hides = {"tp_overlap_fraction": fraction, "tp_async_overlap_fraction": 1.0, "collective_sync_us": 0.0}
        runtime = pricing.runtime.model_copy(update=hides)
        tables.append(replace(pricing, runtime=runtime).table(shape))
    (kind,) = pricing.model.kinds
    alone, hidden = (float(table.layers[kind, "none"].tp_forward_s) for table in tables)
    assert hidden == pytest.approx(alone / tp)


def test_products_hide_exchanges_for_as_long_as_they_take() -> None:
    """Over PCIe a layer's exchanges take longer than its products: what is over shows, exchange by exchange."""
    pricing, shape = pricing_of("llama-3.1-70b"), Shape(tp=8, seq_length=4096, sequence_parallel=1)
    changes = {"tp_overlap_fraction": 0.0, "tp_async_overlap_fraction": 1.0, "collective_sync_us": 0.0}
    runtime = pricing.runtime.model_copy(update=changes)
    (kind,) = pricing.model.kinds
    shown_s = {}
    for name in ("a100-pcie-only-80gb", "a100-sxm-80gb"):
        cluster = ClusterSpec(hardware=load_hardware(name), num_gpus=8)
        expected_s, behind_s = 0.0, 0.0
        for exchange in collectives_of(decoder_layer(pricing.model, kind, shape, runtime)):
            if not exchange.backward:
                continue
            exchanged_s = float(exchange_s(exchange, shape, cluster))
            products = [operator_seconds(op, cluster.hardware, "bf16", runtime) for op in exchange.beside]
            products_s = sum(float(getattr(each, exchange.beside_pass)) for each in products)
            is_async = exchange.overlap == "tp_async"
            expected_s += max(exchanged_s - products_s, 0.0) if is_async else exchanged_s
            behind_s += exchanged_s if is_async else 0.0
        part = replace(pricing, runtime=runtime, cluster=cluster).table(shape).layers[kind, "none"]
        assert float(part.tp_backward_s) == pytest.approx(expected_s)
        shown_s[name] = float(part.tp_backward_s) / behind_s
    assert shown_s["a100-pcie-only-80gb"] > 1 > shown_s["a100-sxm-80gb"]


def test_a_graph_halves_the_wait_for_the_last_rank() -> None:
    pricing, shape = pricing_of("llama-3.1-70b"), Shape(tp=4, dp=32, seq_length=4096, sequence_parallel=1)
    (kind,) = pricing.model.kinds

    def exchanged_s(sync_us: float, cuda_graphs: bool) -> float:
        changes = {"collective_sync_us": sync_us, "cuda_graphs": cuda_graphs, "tp_overlap_fraction": 0.0}
        table = replace(pricing, runtime=pricing.runtime.model_copy(update=changes)).table(shape)
        return float(table.layers[kind, "none"].tp_forward_s)

    # four exchanges of a layer's forward among four ranks: two doublings
    assert exchanged_s(100.0, False) - exchanged_s(0.0, False) == pytest.approx(4 * 2 * 100e-6)
    assert exchanged_s(100.0, True) - exchanged_s(0.0, True) == pytest.approx(4 * 100e-6)


@pytest.mark.parametrize("name", ["deepseek-v3", "llama-3.2-1b"])
def test_a_pricing_of_bytes_alone_has_the_same_bytes_and_no_seconds(name: str) -> None:
    pricing = pricing_of(name)
    for shape in grid(pricing.model)[::7]:
        light, full = replace(pricing, counts_seconds=False).table(shape), pricing.table(shape)
        assert float(light.usable_bytes) == float(full.usable_bytes)
        for (part, own), (_, other) in zip(named_parts(light), named_parts(full), strict=True):
            for quantity in QUANTITIES:
                expected = 0.0 if quantity.endswith("_s") else getattr(other, quantity)
                assert getattr(own, quantity) == expected, (part, quantity)
