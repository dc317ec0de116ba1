"""Bytes of a stage: what stays, what lives between forward and backward, and what one operator needs for a moment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.physics.operators import BF16, FP32, INT64, NARROW_BYTES, Item, Operator, operators_of
from planner.shape import Number, Shape
from planner.specs.hardware import HardwareSpec
from planner.specs.model import ModelSpec
from planner.trainers.spec import RuntimeSpec

ALIGNMENT = 512
"""The least that torch's allocator gives a tensor, such as the loss."""


def weights_bytes(
    dense: Number, expert: Number, shape: Shape, runtime: RuntimeSpec, dtype: str, wide: Number = 0.0
) -> Number:
    """Weights a rank keeps; `wide` of the dense ones stay in 16 bits under any recipe.

    Under ZeRO-3 they are sharded, and a pipeline stage keeps bf16 copies gathered from first micro-batch to last. So
    does every rank under ZeRO-2 where the weights are the fp32 masters (FSDP2 without resharding).
    """
    cast: Number = runtime.weight_bytes if dtype not in NARROW_BYTES else _cast_weight_bytes(shape, runtime, dtype)
    are_masters = runtime.weight_bytes > BF16
    from_stage = 2 if are_masters else 3
    kept = cast * _sharded(dense - wide, expert, shape, from_stage)
    kept = kept + runtime.weight_bytes * _sharded(wide, 0.0, shape, from_stage)
    zero = shape.zero_stage
    gathered = ((zero == 3) & (shape.pp > 1)) | ((zero == 2) & are_masters)
    return kept + np.where(gathered, BF16 * (dense + expert), 0.0)


def _cast_weight_bytes(shape: Shape, runtime: RuntimeSpec, dtype: str) -> Number:
    """Of one weight that products meet in 8 or 4 bits.

    Cast in every pass, no copy stays. Else it is cast once a step, and also transposed where scales run along rows (or
    the GPU multiplies only by rows): beside the 16-bit weight, or in its stead where a sharded optimizer casts its
    masters straight to the narrow weights.
    """
    if runtime.casts_weights:
        return runtime.weight_bytes
    copies = runtime.fp8_copies if dtype == "fp8" else 2
    beside = np.where(runtime.narrow_parameters & (shape.zero_stage >= 1), 0, runtime.weight_bytes)
    return beside + copies * NARROW_BYTES[dtype]


def gradients_bytes(dense: Number, expert: Number, shape: Shape, runtime: RuntimeSpec) -> Number:
    """Main gradients and 16-bit ones beside them that are never freed; sharded from ZeRO-2 on.

    A pipeline stage sums them whole until its last micro-batch, and shards them then (torch 2.13,
    distributed/pipelining/stage.py: set_requires_gradient_sync(False)).
    """
    each, pipelined = runtime.gradient_bytes + runtime.kept_gradient_bytes, shape.pp > 1
    return each * np.where(pipelined, dense + expert, _sharded(dense, expert, shape, 2))


def optimizer_bytes(dense: Number, expert: Number, shape: Shape, runtime: RuntimeSpec) -> Number:
    """fp32 masters and Adam moments; sharded from ZeRO-1 on."""
    return runtime.optimizer_bytes * _sharded(dense, expert, shape, 1)


def sharded_parameters(dense: Number, expert: Number, shape: Shape) -> Number:
    """Parameters whose optimizer step this rank computes."""
    return _sharded(dense, expert, shape, 1)


def _sharded(dense: Number, expert: Number, shape: Shape, from_stage: int) -> Number:
    """Parameters over shard_size ranks (experts: over expert_dp of them) where zero_stage ≥ from_stage, else whole."""
    on = shape.zero_stage >= from_stage
    # HSDP shards experts over no more ranks than it shards the rest
    expert_ranks = np.minimum(np.maximum(shape.expert_dp, 1), shape.shard_size)
    return dense / np.where(on, shape.shard_size, 1) + expert / np.where(on, expert_ranks, 1)


def communicators(shape: Shape) -> Number:
    """Communicators a rank opens: one for each of tp, cp, pp, dp·cp, ep and expert-dp that spans more than one rank."""
    sizes = (
        shape.tp,
        shape.cp,
        shape.pp,
        shape.dp * shape.cp,
        shape.ep,
        np.where(shape.ep > 1, shape.expert_dp, 1),
    )
    return sum(1.0 * (size > 1) for size in sizes)


def reserved_bytes(allocated_bytes: Number, shape: Shape, hardware: HardwareSpec) -> Number:
    """Context, communicator buffers, and the allocator's loss in proportion to what is allocated."""
    return fixed_reserved_bytes(shape, hardware) + hardware.reserved.fragmentation_fraction * allocated_bytes


def fixed_reserved_bytes(shape: Shape, hardware: HardwareSpec) -> Number:
    """The part of the reserve that does not grow with what is allocated."""
    reserved = hardware.reserved
    return reserved.context_bytes + reserved.communicator_bytes * communicators(shape)


def usable_bytes(shape: Shape, hardware: HardwareSpec, headroom_bytes: float = 0.0) -> Number:
    """The most that tensors may take: memory less the fixed reserve and headroom, less the allocator's share."""
    free = hardware.memory_bytes - fixed_reserved_bytes(shape, hardware) - headroom_bytes
    return free / (1 + hardware.reserved.fragmentation_fraction)


def transient_bytes(items: Sequence[Item], runtime: RuntimeSpec) -> Number:
    """The most that a part's backward needs above what it saved.

    Walks the operators backwards: an operator needs its output's and its input's gradient (and a bf16 weight gradient,
    unless the GEMM adds into the main gradient) while the tensors saved by later operators are already free.
    """
    worst: Number = 0.0
    freed: Number = 0.0
    for op in reversed(operators_of(items)):
        worst = np.maximum(worst, working_set_bytes(op, runtime) - freed)
        freed = freed + op.saved_bytes()
    return worst


def unused_gradient_bytes(items: Sequence[Item], runtime: RuntimeSpec) -> Number:
    """bf16 gradients that are handed to autograd and never filled: the weight's own product adds into the main one.

    Transformer Engine keeps one for each shape of weight, for good.
    """
    if not runtime.hands_unused_gradients:
        return 0.0
    return sum(BF16 * op.n * op.k for op in operators_of(items) if op.kind == "gemm" and op.weight)


def working_set_bytes(op: Operator, runtime: RuntimeSpec) -> Number:
    """What the backward of one operator needs beside what is saved: gradients, copies, what it writes."""
    if op.kind == "gemm":
        gradients = BF16 * op.count * op.m * (op.n + op.k)
        weight = 0 if runtime.fused_grad_accumulation or not op.weight else BF16 * op.parameters
        return gradients + weight
    if op.kind == "attention":
        # where keys and values are gathered, those of the whole sequence and their gradients
        keys = op.kv_len if runtime.cp_comm_type == "all_gather" else op.q_len
        backward = BF16 * 2 * op.batch * (op.qk_dim + op.v_dim) * (op.q_len * op.heads + keys * op.kv_heads)
        if runtime.cp_comm_type != "p2p":
            return backward
        # a ring holds all blocks of keys and values, and an output for each, until the last (Transformer Engine)
        blocks = BF16 * op.batch * op.kv_len * (op.kv_heads * (op.qk_dim + op.v_dim) + op.heads * op.v_dim)
        return np.maximum(backward, blocks * (op.kv_len > op.q_len))
    if op.family == "loss":
        # beside the softmax, as large: its gradient, and that of the logits; in place, a bf16 copy alone
        return op.saved_bytes() * (BF16 / FP32 if runtime.loss_in_place else 2)
    return op.backward_bytes * 2 / 3 if op.working_bytes is None else op.working_bytes


def constant_bytes(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> Number:
    """What a stage holds beside its parameters: cosines and sines [seq, head_dim / 2] and the step's token ids."""
    if not runtime.keeps_tables:
        return 0.0
    return 2 * BF16 * shape.seq_length * model.head_dim / 2 + INT64 * shape.tokens + ALIGNMENT
