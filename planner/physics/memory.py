"""Bytes of a stage: weights, gradients and optimizer state, an operator's moment in the backward, and the reserve."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np

from planner.physics.cost import PartCost
from planner.physics.operators import BF16, FP32, NARROW_BYTES, Item, Operator, Saved, operators_of
from planner.shape import Number, Shape, any_of, maximum, minimum, where
from planner.specs.hardware import HardwareSpec
from planner.specs.model import ModelSpec
from planner.trainers.spec import RuntimeSpec

GRAPH_POOL = 1.25
"""Activations of a step that a CUDA graph replays whole, over those of an eager step: the graph's pool is its own.

Megatron-Bridge's notes say 1.5 to 2 for the peak. Its own recipes of Qwen3-30B with eight sequences a micro-batch fit
B300 and GB300 with at most 1.25."""
ALIGNMENT = 512
"""Bytes that torch's allocator gives the smallest tensor, such as the loss."""


def weights_bytes(
    dense: Number, expert: Number, shape: Shape, runtime: RuntimeSpec, dtype: str, wide: Number = 0.0
) -> Number:
    """Bytes of the weights that a rank keeps; `wide` of the dense parameters stay in 16 bits under any recipe.

    Under ZeRO-3 the weights are sharded, and a pipeline stage keeps gathered bf16 copies from its first micro-batch to
    its last. Under ZeRO-2 every rank does so where the weights are the fp32 masters (FSDP2 without resharding).
    """
    cast: Number = runtime.weight_bytes if dtype not in NARROW_BYTES else _cast_weight_bytes(shape, runtime, dtype)
    from_stage = 2 if runtime.weight_bytes > BF16 else 3
    kept = cast * sharded(dense - wide, expert, shape, runtime, from_stage)
    kept = kept + runtime.weight_bytes * sharded(wide, 0.0, shape, runtime, from_stage)
    return kept * _stay(shape, runtime) + gathered_weights_bytes(dense + expert, shape, runtime)


def _stay(shape: Shape, runtime: RuntimeSpec) -> Number:
    """1 where the shards of weights are on the GPU, 0 where they wait on the host."""
    return 1 - runtime.parameter_offload * (shape.zero_stage == 3)


def frozen_bytes(dense: Number, expert: Number, wide: Number, shape: Shape, runtime: RuntimeSpec, dtype: str) -> Number:
    """Bytes of frozen weights: `wide` of the dense ones take 16 bits or more, all others as few as they are kept in.

    ZeRO-3 shards them as others; there are no masters of them. Weights that products read in 8 or 4 bits are cast once,
    and replace the others where the trainer has such parameters.
    """
    packed = frozen_weight_bytes(runtime, dtype) * sharded(dense - wide, expert, shape, runtime, 3)
    return (packed + runtime.frozen_wide_bytes * sharded(wide, 0.0, shape, runtime, 3)) * _stay(shape, runtime)


def frozen_weight_bytes(runtime: RuntimeSpec, dtype: str) -> float:
    """Bytes of one frozen weight of a linear layer, its narrow copies included."""
    each = runtime.frozen_weight_bytes
    copies = 0 if runtime.unpacks_frozen else cast_copies(runtime, dtype)
    if not copies:
        return each
    kept = 1 if runtime.transposes_frozen else copies
    return kept * NARROW_BYTES[dtype] + (0.0 if runtime.narrow_parameters else each)


def frozen_weights_bytes(part: PartCost, shape: Shape, runtime: RuntimeSpec, dtype: str) -> Number:
    """Bytes of a part's frozen weights."""
    expert = part.frozen_expert_parameters
    return frozen_bytes(part.frozen_parameters - expert, expert, part.frozen_wide_parameters, shape, runtime, dtype)


def gathered_frozen_bytes(part: PartCost, runtime: RuntimeSpec) -> Number:
    """Bytes of a frozen weight of a part, in the mean, as ZeRO-3 gathers it: as it is kept, in 16 bits at most."""
    packed = min(runtime.frozen_weight_bytes, BF16)
    return packed + (BF16 - packed) * part.frozen_wide_parameters / maximum(part.frozen_parameters, 1)


def static_bytes(part: PartCost, shape: Shape, runtime: RuntimeSpec, dtype: str) -> tuple[Number, Number, Number]:
    """Bytes of weights, gradients and optimizer of a part whose parameters are counted."""
    dense, expert = part.trained_dense_parameters, part.trained_expert_parameters
    frozen = frozen_weights_bytes(part, shape, runtime, dtype)
    held = dense / runtime.weight_shards
    weights = weights_bytes(held, expert, shape, runtime, dtype, part.wide_parameters / runtime.weight_shards)
    states = optimizer_bytes(dense, expert, shape, runtime, (part.state_bytes, part.expert_state_bytes))
    trained, copies = 1 + runtime.critics, BF16 * runtime.frozen_copies * sharded(dense, expert, shape, runtime, 3)
    return (
        weights * trained + frozen + copies + reference_bytes(part, shape, runtime, dtype),
        gradients_bytes(held, expert, shape, runtime),
        states * trained,
    )


def reference_bytes(part: PartCost, shape: Shape, runtime: RuntimeSpec, dtype: str) -> Number:
    """Bytes of a reference model's copy of a part's weights: frozen, in as many bits as frozen ones."""
    if not runtime.copies_weights:
        return 0.0
    dense = part.reference_parameters - part.reference_expert_parameters
    return frozen_bytes(dense, part.reference_expert_parameters, part.reference_wide_parameters, shape, runtime, dtype)


def gathered_weights_bytes(parameters: Number, shape: Shape, runtime: RuntimeSpec) -> Number:
    """Bytes of the bf16 copies that stay gathered from a step's first micro-batch to its last."""
    zero = shape.zero_stage
    gathered = ((zero == 3) & (shape.pp > 1)) | ((zero == 2) & (runtime.weight_bytes > BF16))
    return BF16 * parameters * gathered


def _cast_weight_bytes(shape: Shape, runtime: RuntimeSpec, dtype: str) -> Number:
    """Bytes of one weight that products read in 8 or 4 bits.

    A weight that is cast in every pass leaves no copy. Any other is cast once a step, and also transposed where scales
    run along rows (or the GPU multiplies only by rows). These copies stand beside the 16-bit weight; where a sharded
    optimizer casts its masters straight to the narrow weights, they replace it.
    """
    if runtime.casts_weights:
        return runtime.weight_bytes
    beside = where(runtime.narrow_parameters & (shape.zero_stage >= 1), 0, runtime.weight_bytes)
    return beside + cast_copies(runtime, dtype) * NARROW_BYTES[dtype]


def cast_copies(runtime: RuntimeSpec, dtype: str) -> int:
    """Copies of a weight in the recipe's 8 or 4 bits that are kept from pass to pass."""
    if dtype not in NARROW_BYTES or runtime.casts_weights:
        return 0
    return runtime.fp8_copies if dtype == "fp8" else 2


def gradients_bytes(dense: Number, expert: Number, shape: Shape, runtime: RuntimeSpec) -> Number:
    """Bytes of the main gradients, and of 16-bit gradients beside them that are never freed; sharded from ZeRO-2 on.

    A pipeline stage sums unsharded gradients until its last micro-batch, and shards them then (torch 2.13,
    distributed/pipelining/stage.py: set_requires_gradient_sync(False)). Those of a step's only micro-batch that are
    made while activations go are counted at the peak (`stage_memory`).
    """
    is_late = runtime.counts_moments * (shape.num_microbatches == 1) * (1 - keeps_gradients(shape, runtime))
    # of plain replicas, buckets beside the gradients
    is_copied = runtime.copies_to_buckets * (shape.zero_stage == 0) * (shape.dp * shape.cp > 1)
    buckets = runtime.gradient_bytes * is_copied * (dense + expert)
    return where(is_late, 0.0, whole_gradients_bytes(dense, expert, shape, runtime)) + buckets


def keeps_gradients(shape: Shape, runtime: RuntimeSpec) -> Number:
    """1 where shards of gradients have a buffer that stays from step to step (DeepSpeed, runtime/zero/stage3.py:
    grad_partitions_flat_buffer)."""
    return (runtime.sharding == "deepspeed") * (shape.zero_stage == 3)


def whole_gradients_bytes(dense: Number, expert: Number, shape: Shape, runtime: RuntimeSpec) -> Number:
    """`gradients_bytes` when the backward is done; or, where that is more, when the last one begins."""
    on_gpu = 1 - offloaded_gradients(runtime) * (shape.zero_stage >= 2)
    # beside sums in 16 bits there are no others
    kept_bytes = runtime.kept_gradient_bytes * (runtime.gradient_bytes > BF16)
    bytes_per_parameter = on_gpu * (runtime.gradient_bytes + kept_bytes)
    unsynced = runtime.unsynced_gradient_bytes * (shape.num_microbatches > 1)
    kept = bytes_per_parameter * where(shape.pp > 1, dense + expert, sharded(dense, expert, shape, runtime, 2))
    return maximum(kept, unsynced * (dense + expert))


def offloaded_gradients(runtime: RuntimeSpec) -> float:
    """Share of the sharded gradients that is on the host."""
    return runtime.optimizer_offload_fraction * runtime.offloads_gradients


def embedding_moment_bytes(part: PartCost, shape: Shape, model: ModelSpec, runtime: RuntimeSpec) -> Number:
    """Bytes that the backward of a trained embedding takes beside gradients that are kept.

    These are the gradient of its output; sums of up to ten rows of one token in fp32, where there are more than 3,072
    tokens (torch 2.13, aten/src/ATen/native/cuda/Embedding.cu); and another gradient of the table, where there is one
    to add it to: of an earlier micro-batch, or of the head that it is tied to, whose gradient waits for it.
    """
    trained = part.parameters - part.frozen_parameters
    tokens, hidden = shape.tokens, model.hidden_size
    sums = FP32 * hidden * (tokens / 10 + minimum(tokens, model.vocab_size)) * (tokens > 3072)
    tables = 1.0 * (shape.num_microbatches > 1) + model.tie_word_embeddings
    return (trained > 0) * (BF16 * tokens * hidden + sums + tables * runtime.gradient_bytes * trained)


def optimizer_bytes(
    dense: Number, expert: Number, shape: Shape, runtime: RuntimeSpec, states: tuple[Number, Number] = (0.0, 0.0)
) -> Number:
    """Bytes of the fp32 masters and the Adam moments on the GPU; sharded from ZeRO-1 on.

    An optimizer other than AdamW has masters where AdamW has them, and `states` for the dense and the expert ones.
    Beside weights of 16 bits the masters may be their other 16.

    Of parameters that the host updates, the moments leave the GPU and the masters stay: Qwen3-30B loses 8 bytes for
    each (Megatron-Bridge's notes on offloading). ZeRO-Offload's masters leave too.
    """
    shards = sharded(dense, expert, shape, runtime)
    if runtime.optimizer != "adamw":
        return runtime.master_bytes * shards + sharded(*states, shape, runtime)
    kept = 0 if runtime.offloads_masters else FP32
    all_bytes = runtime.optimizer_bytes - (FP32 - BF16) * runtime.master_remainders
    left = runtime.optimizer_offload_fraction * max(runtime.optimizer_bytes - kept, 0)
    return max(all_bytes - left, 0) * shards


def sharded(dense: Number, expert: Number, shape: Shape, runtime: RuntimeSpec, from_stage: int = 1) -> Number:
    """Parameters per rank, sharded over shard_size ranks (experts: over others) where zero_stage ≥ from_stage."""
    is_sharded, ranks, expert_ranks = shape.zero_stage >= from_stage, shape.shard_size, expert_shards(shape)
    if runtime.shards_states_over_groups and from_stage == 1:
        ranks = where(shape.zero_stage == 3, shape.dp * shape.cp, ranks)
        expert_ranks = where(shape.zero_stage == 3, maximum(shape.expert_dp, 1), expert_ranks)
    return dense / where(is_sharded, ranks, 1) + expert / where(is_sharded, expert_ranks, 1)


def expert_shards(shape: Shape) -> Number:
    """Ranks over which ZeRO shards what belongs to experts: those of a shard group that hold the same ones.

    Megatron-LM divides the replicas of an expert by the optimizer's instances (core/parallel_state.py:
    intra_partial_expert_data_parallel_size), torchtitan cuts `efsdp` out of a replica (distributed/parallel_dims.py).
    """
    return maximum(shape.tp * shape.shard_size / (shape.ep * shape.etp), 1)


def communicators(shape: Shape) -> Number:
    """Number of communicators of a rank: one for each of tp, cp, pp, dp·cp, ep and expert-dp of more than one rank."""
    sizes = (
        shape.tp,
        shape.cp,
        shape.pp,
        shape.dp * shape.cp,
        shape.ep,
        where(shape.ep > 1, shape.expert_dp, 1),
    )
    return sum(1.0 * (size > 1) for size in sizes)


def reserved_bytes(allocated_bytes: Number, shape: Shape, hardware: HardwareSpec, lost_fraction: float) -> Number:
    """Bytes of the context and the communicators' buffers, and the allocator's loss, a share of `allocated_bytes`."""
    return fixed_reserved_bytes(shape, hardware) + lost_fraction * allocated_bytes


def fixed_reserved_bytes(shape: Shape, hardware: HardwareSpec) -> Number:
    """Bytes of the reserve that do not grow with the allocated bytes."""
    reserved = hardware.reserved
    peers = minimum(shape.ep * shape.etp, hardware.gpus_per_node) - 1.0
    experts = reserved.expert_peer_bytes * peers * (shape.ep > 1)
    return reserved.context_bytes + reserved.communicator_bytes * communicators(shape) + experts


def usable_bytes(shape: Shape, hardware: HardwareSpec, headroom_bytes: float, lost_fraction: float) -> Number:
    """The most bytes that tensors may take: memory less the fixed reserve and headroom, less the allocator's share."""
    free = hardware.memory_bytes - fixed_reserved_bytes(shape, hardware) - headroom_bytes
    return free / (1 + lost_fraction)


def bytes_of(tensors: Iterable[Saved]) -> Number:
    """Bytes of tensors together."""
    return sum((tensor.num_bytes for tensor in tensors), start=0.0)


class Moment(NamedTuple):
    """The backward of one operator of a part: what it needs, and what it finds free."""

    operator: Operator
    working: tuple[Saved, ...]
    freed_bytes: Number
    """Bytes of the tensors that later operators saved."""

    @property
    def num_bytes(self) -> Number:
        """Bytes above those that the part saved."""
        return bytes_of(self.working) - self.freed_bytes


def moments(items: Sequence[Item], runtime: RuntimeSpec) -> Iterator[Moment]:
    """The backward of each operator of a part, the last one first.

    An operator needs the gradients of its output and its input (and a bf16 weight gradient, unless the GEMM adds to the
    main gradient), when the tensors that later operators saved are free.
    """
    freed: Number = 0.0
    for op in reversed(operators_of(items)):
        yield Moment(op, working_set(op, runtime), freed)
        freed = freed + op.saved_bytes()


def transient_bytes(items: Sequence[Item], runtime: RuntimeSpec) -> Number:
    """The most bytes that a part's backward needs above the bytes that the part saved."""
    least: Number = 0.0
    return reduce(maximum, (moment.num_bytes for moment in moments(items, runtime)), least)


def unused_gradients(items: Sequence[Item], runtime: RuntimeSpec) -> tuple[Saved, ...]:
    """The bf16 gradients that autograd is given and that stay empty: the product adds to the main gradient.

    Transformer Engine keeps one such gradient for each shape of weight, until training ends.
    """
    if not runtime.hands_unused_gradients:
        return ()
    products = (op for op in operators_of(items) if op.has_weight_gradient)
    return tuple(Saved(f"unused gradient: {op.name}", (op.n, op.k)) for op in products)


def gathered_bytes(items: Sequence[Item], runtime: RuntimeSpec) -> Number:
    """Bytes of the weights that are whole at a time where ranks share them: one that is read, and the next."""
    if runtime.weight_shards == 1:
        return 0.0
    least: Number = 0.0
    return 2 * BF16 * reduce(maximum, (op.parameters for op in operators_of(items) if not op.expert), least)


def working_set(op: Operator, runtime: RuntimeSpec) -> tuple[Saved, ...]:
    """Tensors that the backward of one operator needs beside its saved ones: gradients, copies, and its results."""
    if not op.has_backward:
        return ()
    if op.kind == "gemm":
        rows = op.count * op.m
        output = Saved("gradient of the output", (rows, op.n))
        if op.working_bytes is not None:  # of a loss in chunks, that of one chunk
            output = Saved("gradient of a chunk of the output", (op.working_bytes,), dtype="bytes")
        gradients = (output, Saved("gradient of the input", (rows, op.k)))
        if op.weight and not op.trained:
            unpacked = Saved("weight in 16 bits", (op.n, op.k))
            return (*gradients, unpacked) if op.is_cast and runtime.unpacks_frozen else gradients
        if runtime.fused_grad_accumulation or not op.weight:
            return gradients
        return (*gradients, Saved("gradient of the weight", (op.parameters,)))
    if op.kind == "attention":
        return _attention_working_set(op, runtime)
    if op.family == "loss":
        softmax, labels = op.saved
        if runtime.loss_in_place:
            narrow = labels._replace(name="labels", dtype="int32")
            if not runtime.keeps_softmax:
                return (narrow,)
            # of the fp32 softmax a bf16 copy, and one in fp32 where torch compiles what also sums or scatters, not in
            # place (Megatron-LM's test gpt3_mcore_te_tp2_pp2_cross_entropy_loss_fusion takes 380 MiB more than without,
            # its softmax 393; core/fusions/fused_cross_entropy.py says so too, and its main branch no longer does it)
            compiled = (softmax._replace(name="copy of the softmax"),) * runtime.fused_cross_entropy
            return (Saved("logits in 16 bits", softmax.dims), *compiled, narrow)
        # beside the softmax, as large: its gradient, and that of the logits
        beside = (
            softmax._replace(name="gradient of the softmax"),
            softmax._replace(name="gradient of the logits"),
            labels._replace(name="indices of the loss"),
            labels._replace(name="its mask"),
        )
        if op.working_bytes is None:
            return beside
        return (*beside, Saved("exponentials, and logits in 16 bits", (op.working_bytes,), dtype="bytes"))
    needed = op.backward_bytes * 2 / 3 if op.working_bytes is None else op.working_bytes
    return (Saved("gradients", (needed,), dtype="bytes"),)


def overwritten_logits(head: Sequence[Item], runtime: RuntimeSpec) -> tuple[Saved, ...]:
    """The logits among the tensors that a head keeps, where their gradient overwrites them."""
    if runtime.keeps_softmax:
        return ()
    return next(op for op in operators_of(head) if op.family == "loss").saved[:1]


def loss_tensors(head: Sequence[Item], layer: Sequence[Item], runtime: RuntimeSpec) -> tuple[Saved, ...]:
    """Tensors that the loss of a head, behind the last `layer`, needs beside what is held."""
    loss = next(op for op in operators_of(head) if op.family == "loss")
    if not runtime.fused_cross_entropy:
        return working_set(loss, runtime)
    logits = next(op for op in operators_of(head) if op.name == "head")
    # beside the logits' gradient, the gathered input and its gradient, and gradients that are never filled
    beside = (
        Saved("gathered input of the head, and its gradient", (2, logits.m, logits.k)),
        *unused_gradients((*head, *layer), runtime),
    )
    overwritten = tuple(tensor._replace(name="logits") for tensor in overwritten_logits(head, runtime))
    return (*(overwritten or working_set(loss, runtime)), *beside)


def _attention_working_set(op: Operator, runtime: RuntimeSpec) -> tuple[Saved, ...]:
    # where keys and values are gathered, those of the whole sequence and their gradients
    keys = op.kv_len if runtime.cp_comm_type == "all_gather" else op.q_len
    both, dims = 2 * op.batch, op.qk_dim + op.v_dim
    backward = (
        Saved("queries, output and their gradients", (both * op.count * op.q_len, op.heads, dims)),
        Saved("keys, values and their gradients", (both * keys, op.kv_heads, dims)),
    )
    if runtime.cp_comm_type != "p2p":
        return backward
    # a ring holds all blocks of keys and values, and an output for each, until the last (Transformer Engine)
    blocks = BF16 * op.batch * op.kv_len * (op.kv_heads * dims + op.heads * op.v_dim)
    needed = maximum(bytes_of(backward), blocks * (op.kv_len > op.q_len))
    return (Saved("queries, keys, values, outputs and gradients", (needed,), dtype="bytes"),)


def sent_bytes(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> Number:
    """Bytes of the hidden states that a chunk has sent on and keeps until its backward; trainers free them."""
    return BF16 * shape.shard_tokens * model.residual_size * runtime.is_runner


def constants(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> tuple[Saved, ...]:
    """Tensors that a stage holds beside parameters: tables of positions, a mask, the step's token ids, the loss."""
    if not runtime.keeps_tables:
        return ()
    seq, rotated = shape.seq_length, model.head_dim if model.mla is None else model.mla.qk_rope_head_dim
    chunk = model.attention_chunk_size or np.inf
    tables = {
        "cosines and sines": (seq / shape.cp * (model.position_embedding == "rope"), rotated),
        "ALiBi scores": (model.num_attention_heads / shape.tp * (model.position_embedding == "alibi"), seq, seq),
        "mask of chunked attention": (seq * (chunk < seq), seq),
    }
    kept = [Saved(name, dims) for name, dims in tables.items() if any_of(dims[0])]
    return (*kept, Saved("token ids", (shape.tokens,), dtype="int64"), Saved("loss", (ALIGNMENT,), dtype="uint8"))


def constant_bytes(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> Number:
    """Bytes of `constants`."""
    return bytes_of(constants(model, shape, runtime))


OFFLOADED: dict[str, frozenset[tuple[str, str]]] = {
    "attn_norm": frozenset({("attention norm", "input")}),
    "qkv_linear": frozenset({("attention norm", "output")}),
    "core_attn": frozenset(
        {
            ("qkv", "qkv"),
            ("q", "q"),
            ("k", "k"),
            ("v", "v"),
            ("assemble q, k", "q"),
            ("assemble q, k", "k"),
            ("assemble q, k", "v"),
        }
    ),
    "attn_proj": frozenset({("attention", "output"), ("values", "output")}),
    "mlp_norm": frozenset({("mlp norm", "input")}),
    "expert_fc1": frozenset({("experts up", "rows"), ("experts up", "received rows")}),
    "moe_act": frozenset({("experts up", "up")}),
}
"""The inputs of each module, as Megatron-LM names modules (--offload-modules): operator, and tensor that it keeps."""


def offloaded(modules: Iterable[str]) -> frozenset[tuple[str, str]]:
    """Operators and their tensors that are inputs of some modules."""
    return frozenset[tuple[str, str]]().union(*(OFFLOADED.get(module, frozenset()) for module in modules))


def offloaded_bytes(
    items: Iterable[Item], modules: Iterable[str], recomputed: frozenset[str] = frozenset(), dtype: str = "bf16"
) -> Number:
    """Bytes of a part that leave the GPU between its forward and its backward; what is recomputed is not kept."""
    leaving = offloaded(modules)
    if not leaving:
        return 0.0
    return sum(
        tensor.bytes_in(dtype)
        for op in operators_of(items)
        for tensor in op.kept(recomputed)
        if (op.name, tensor.name) in leaving
    )


def is_decoder_layer(items: Iterable[Item]) -> bool:
    """True for a layer, which the embedding and the head are not."""
    return any(op.name == "attention norm" for op in operators_of(items))


def shown_s(num_bytes: Number, hardware: HardwareSpec, beside_s: Number) -> Number:
    """Seconds by which a pass of `beside_s` gets longer where `num_bytes` go over the host's link meanwhile."""
    late_s = num_bytes / hardware.host.bytes_per_s - beside_s
    return late_s * (late_s > 0)
