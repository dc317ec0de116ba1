"""Fused attention kernels: efficiency by keys, head dimensions and tails."""

from __future__ import annotations

from dataclasses import replace

from planner.physics.kernels.streams import launch_s
from planner.physics.operators import Operator
from planner.shape import Number, ceil, minimum, where
from planner.specs.efficiency import AttentionEfficiency
from planner.specs.hardware import HardwareSpec
from planner.trainers.torch_attention import torch_choice

ATTENTION_BACKWARD_KERNELS = 3
"""Number of kernels in the backward of attention: row sums of gradient · output, the gradients, and the cast of dq."""
QUERY_ROWS = 128
"""Number of queries in one attention tile."""


def attention_s(op: Operator, hardware: HardwareSpec, kernel: str = "fastest") -> tuple[Number, Number]:
    """Forward and backward seconds of fused attention kernels, timed alone.

    FLOPs · (1 + ramp_keys / width) / rate + tail · (one tile row's FLOPs) / (rate / num_sms) + launches, where rate =
    fraction · peak · d / (d + half_head_dim), normalised to d = 128, and width is the most keys that a query meets.
    Where ranks share a sequence, the ramp and the tile row are those of the block on the diagonal: the other blocks are
    rectangles, in which all tile rows take the same time (for a kernel that takes them all, see `_ramped_keys`). The
    backward computes QKᵀ again: it takes 2·(3·d_qk + 2·d_v) FLOPs a score, not 2·(d_qk + d_v). Tail and launches are
    those of each of `count` kernels.
    """
    if kernel.startswith("sdpa"):
        return _torch_attention_s(op, hardware, kernel.partition("-")[2])
    efficiency = hardware.efficiency
    attention = efficiency.kernel(kernel)
    slow = attention.seconds_factor * (efficiency.flash1_factor if kernel == "flash1" else 1.0)
    peak = hardware.peak_flops("bf16")
    assert peak is not None, "HardwareSpec has bf16 or fp16"
    multiple = attention.head_dim_multiple
    qk_dim: Number = ceil(op.qk_dim / multiple) * multiple
    v_dim: Number = ceil(op.v_dim / multiple) * multiple
    rate = peak * _head_dim_factor(attention, qk_dim, v_dim) * (attention.sink_factor if op.has_sinks else 1.0)
    diagonal = minimum(op.width, op.q_len)
    ramped = _ramped_keys(op, diagonal)
    scores = op.count * op.batch * op.heads * op.q_len * op.kv_len * op.attended_fraction * op.imbalance
    seconds: list[Number] = []
    for fraction, ramp, dims, kernels in (
        (attention.forward_fraction, attention.forward_ramp_keys / ramped[0], qk_dim + v_dim, 1),
        (
            attention.backward_fraction,
            attention.backward_ramp_keys / ramped[1],
            3 * qk_dim + 2 * v_dim,
            ATTENTION_BACKWARD_KERNELS,
        ),
    ):
        tail = op.count * attention.tail_fraction * QUERY_ROWS * diagonal * hardware.num_sms
        rows = scores * (1 + ramp) + tail
        seconds.append(slow * 2 * dims * rows / (fraction * rate) + op.count * kernels * launch_s(hardware))
    return seconds[0], seconds[1]


def _ramped_keys(op: Operator, diagonal: Number) -> tuple[Number, Number]:
    """The keys over which the ramp of the forward, and of the backward, is spread: those of the block on the diagonal.

    A kernel that takes a part of the queries with all keys before them pays the ramp once for each row of queries in
    the forward, and for each row of keys in the backward, which FlashAttention-2 runs over keys (arXiv:2307.08691
    §3.2). A square has as many of either, and half of its scores: there these are its side.
    """
    is_part = (op.count > 1) & (op.window == 0)
    seen = op.kv_len * op.attended_fraction
    seeing = op.count * op.q_len * seen / (op.kv_len + op.q_len)
    return where(is_part, 2 * seen, diagonal), where(is_part, 2 * seeing, diagonal)


def _torch_attention_s(op: Operator, hardware: HardwareSpec, taken: str) -> tuple[Number, Number]:
    """`attention_s` in eager torch, where torch took a kernel, or is expected to take one if `taken` is empty.

    FlashAttention-2 wants values as wide as keys; they are padded.
    """
    flash = attention_s(replace(op, v_dim=op.qk_dim), hardware, "flash")
    taken = taken or torch_choice(hardware, int(op.qk_dim), int(op.v_dim))
    if taken == "flash" or hardware.efficiency.cudnn is None:
        return flash
    forward, backward = zip(flash, attention_s(op, hardware, "cudnn"), strict=True)
    return where(op.calls_flash, *forward), where(op.calls_flash, *backward)


def _head_dim_factor(attention: AttentionEfficiency, qk_dim: Number, v_dim: Number) -> Number:
    """Rate at these head dimensions over the rate at 128: wider heads amortise the softmax, until tiles must shrink."""
    dim, half = (qk_dim + v_dim) / 2, attention.half_head_dim
    return dim / (dim + half) * (1 + half / 128) * where(qk_dim > 128, attention.wide_factor, 1.0)
