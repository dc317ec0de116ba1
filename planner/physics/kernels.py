"""Memory-bound kernels: bytes over bandwidth, and launches."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

from planner.physics.operators import BF16, FP32, Operator
from planner.shape import Number, ceil, maximum, minimum, where
from planner.specs.hardware import AttentionEfficiency, GemmEfficiency, HardwareSpec
from planner.specs.units import MICRO
from planner.trainers.documents import torch_choice
from planner.trainers.optimizers import OPTIMIZERS
from planner.trainers.spec import RuntimeSpec


class PassSeconds(NamedTuple):
    """Seconds of the forward, of the input gradient and of the weight gradient; numbers or arrays."""

    forward_s: Number
    dgrad_s: Number
    wgrad_s: Number


def launch_s(hardware: HardwareSpec) -> float:
    """Seconds that the start and the drain of one kernel take."""
    return hardware.efficiency.launch_us * hardware.efficiency.launch_factor * MICRO


def stream_s(hardware: HardwareSpec, num_bytes: Number, num_kernels: Number, family: str = "copy") -> Number:
    """Seconds of `num_kernels` memory-bound kernels that move `num_bytes` together: bytes / bandwidth + launches."""
    efficiency = hardware.efficiency
    bytes_per_s = efficiency.of_family(family) * hardware.hbm_bytes_per_s / efficiency.stream_factor
    return num_bytes / bytes_per_s + num_kernels * launch_s(hardware) * (num_bytes > 0)


TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64))
"""Output tiles of one SM that the libraries choose from."""


CDNA_TILES = ((256, 256), (256, 192), (192, 256), *TILES)
"""Tiles of one compute unit: its 512 registers of 64 lanes on each of four units hold 256 x 256 sums of 32 bits. They
are what hipBLASLt and AITER name in most of their kernels for large products on gfx950."""


ALIGNED = 8
"""Number of 16-bit elements in the 16 bytes that tensor-core kernels load at once."""


EXPERT_STREAMS = 4
"""Streams that Transformer Engine spreads the products of experts over."""


FROZEN_CAST_BYTES = {"fp8": 5, "mxfp8": 3, "nvfp4": 4.5}
"""`CAST_BYTES` beside a frozen weight, which has no gradient that reads a transposed copy."""


FP8 = 1


CAST_BYTES = {"fp8": 5, "mxfp8": 4, "nvfp4": 7}
"""Bytes moved per element that is cast: 16 bits are read, and the narrow copy is written. The 16 bits are read once
more where one scale holds for a whole tensor or a Hadamard transform comes first. Formats with a scale for each block
write a transposed copy as well, whose blocks run down the columns."""


def gemm_s(
    op: Operator, hardware: HardwareSpec, dtype: str, grouped: bool = True, gradient_bytes: int = BF16
) -> PassSeconds:
    """Seconds of y = x·wᵀ, dx = dy·w and dw = dyᵀ·x, each timed alone.

    Without a weight both gradients are input gradients; a frozen weight has none. Where `grouped`, one kernel computes
    the products of all experts; else a few are computed at a time, on streams beside each other. `gradient_bytes` are
    moved per weight for dw: it is written, and where it is added to a main gradient, that gradient is read as well.
    """
    gemm = hardware.efficiency.gemm
    count: Number = op.count if grouped or not op.weight else minimum(op.count, EXPERT_STREAMS)
    times = op.count / count
    forward_s = times * product_s(hardware, dtype, gemm.forward_fraction, count, op.m, op.n, op.k)
    dgrad_s = times * product_s(hardware, dtype, gemm.dgrad_fraction, count, op.m, op.k, op.n)
    wgrad_s = times * product_s(hardware, dtype, gemm.wgrad_fraction, count, op.n, op.k, op.m, gradient_bytes)
    if not op.weight:
        # heads lie in memory one after the other: rows of 16 bytes, or a fallback without tensor cores
        slow = where((op.n % ALIGNED) + (op.k % ALIGNED) == 0, 1.0, 1 / gemm.unaligned_factor)
        return PassSeconds(slow * forward_s, slow * (dgrad_s + wgrad_s), 0.0)
    return PassSeconds(forward_s, dgrad_s, wgrad_s if op.trained else 0.0)


def cast_s(op: Operator, hardware: HardwareSpec, dtype: str, runtime: RuntimeSpec) -> PassSeconds:
    """Seconds to cast operands of a narrow product: the input before the forward, the gradient before the backward.

    Weights are cast once a step, unless ZeRO-3 gathers them anew for every pass. Frozen ones may be transposed anew for
    each input gradient.
    """
    if not (op.is_cast and is_narrow(hardware, dtype)):
        return PassSeconds(0.0, 0.0, 0.0)
    weight = op.n * op.k if runtime.casts_weights else 0
    weight_bytes = weight * _cast_bytes(dtype, 1, runtime)
    cast_bytes = partial(_cast_bytes if op.trained else _frozen_cast_bytes, dtype, runtime=runtime)
    input_bytes = 0 if op.takes_cast_input else op.m * op.k * cast_bytes(op.input_shards)
    gradient_bytes = 0 if op.takes_cast_gradient else op.m * op.n * cast_bytes(op.gradient_shards)
    turned = not op.trained and runtime.transposes_frozen and dtype == "fp8" and runtime.fp8_copies > 1
    turned_bytes = 2 * FP8 * op.n * op.k * turned
    return PassSeconds(
        stream_s(hardware, op.count * (input_bytes + weight_bytes), 1, "cast"),
        stream_s(hardware, op.count * (gradient_bytes + weight_bytes + turned_bytes), 1, "cast"),
        0.0,
    )


def _frozen_cast_bytes(dtype: str, shards: Number, runtime: RuntimeSpec) -> Number:
    """`_cast_bytes` beside a frozen weight: nothing is transposed."""
    return FROZEN_CAST_BYTES[dtype] / (shards if runtime.narrow_exchanges else 1)


def _cast_bytes(dtype: str, shards: Number, runtime: RuntimeSpec) -> Number:
    """Bytes moved per element to cast an operand, of which each of `shards` ranks casts its share before the gathering.

    A transposed copy, where products need one, is written beside the cast; or it is made from the gathered operand,
    which is read once more for it.
    """
    ranks = shards if runtime.narrow_exchanges else 1
    share = CAST_BYTES[dtype] / ranks
    transposed = where(ranks > 1, 2 * FP8, FP8)
    return share + transposed * (runtime.fp8_copies - 1) if dtype == "fp8" else share


def is_narrow(hardware: HardwareSpec, dtype: str) -> bool:
    """True where products by weights are computed in 8 or 4 bits: the recipe asks for it, and the GPU can do it."""
    return dtype not in ("bf16", "fp16") and hardware.peak_flops(dtype) is not None


def product_s(
    hardware: HardwareSpec,
    dtype: str,
    power_fraction: float,
    count: Number,
    m: Number,
    n: Number,
    k: Number,
    result_bytes: int = BF16,
) -> Number:
    """Seconds of `count` products of m × k by k × n in one launch, timed alone; `result_bytes` are moved per result.

    max( max( FLOPs · (1 + ramp_k / k) / (power_fraction · peak),                      what the power limit sustains
              waves · tile FLOPs · (1 + ramp_k / k) / (wave_fraction · peak / num_sms) )  whole waves at the boost clock
             + accumulate_fraction · bytes of results beyond bf16 / bandwidth,         what a sum does not hide
         bytes / bandwidth ) + launch,  bandwidth = memory_fraction · HBM's
    with waves = ⌈count · ⌈m / a⌉ · ⌈n / b⌉ / num_sms⌉ for the best of a few tiles a × b. Idle SMs of a ragged last wave
    leave power to the others, so quantization shows only where it costs more than the power limit does.
    """
    gemm, num_sms = hardware.efficiency.gemm, hardware.num_sms
    narrow = is_narrow(hardware, dtype)
    wide_peak = hardware.peak_flops("bf16")
    assert wide_peak is not None, "HardwareSpec has bf16 or fp16"
    peak = hardware.peak_flops(dtype) or wide_peak
    # prologue and epilogue take the same time whatever the dtype of the products
    steps = k + gemm.ramp_k * peak / wide_peak
    flops_per_step = 2 * count * m * n
    grouped = where(count > 1, gemm.grouped_factor, 1.0)
    rate = _narrow_factor(gemm, dtype, narrow) * peak
    power_s = flops_per_step * steps / (power_fraction * rate)
    wave_s = steps * _tile_waves(hardware, count, m, n) * (num_sms / (gemm.wave_fraction * rate))
    operand = FP8 if narrow else BF16
    bytes_per_s = gemm.memory_fraction * hardware.hbm_bytes_per_s
    memory_s = count * (operand * (m * k + k * n) + result_bytes * m * n) / bytes_per_s
    accumulate_s = gemm.accumulate_fraction * count * (result_bytes - BF16) * m * n / bytes_per_s
    seconds = maximum(maximum(power_s, wave_s) / grouped + accumulate_s, memory_s)
    return seconds + launch_s(hardware)


def _narrow_factor(gemm: GemmEfficiency, dtype: str, narrow: bool) -> float:
    if not narrow or dtype == "nvfp4":
        return gemm.fp4_factor if narrow else 1.0
    return gemm.fp8_factor * (gemm.mx_factor if dtype == "mxfp8" else 1.0)


def _tile_waves(hardware: HardwareSpec, count: Number, m: Number, n: Number) -> Number:
    """FLOPs of one SM per step of the reduction: min over tiles of waves · 2·a·b / (the tile's efficiency)."""
    num_sms, is_cdna = hardware.num_sms, hardware.architecture.startswith("cdna")
    heights, widths, tiles = _tiles(is_cdna, hardware.efficiency.gemm.tile_overhead)
    rows = {a: ceil(m / a) * count for a in heights}
    columns = {b: ceil(n / b) for b in widths}
    best: Number = math.inf
    for a, b, flops in tiles:
        best = minimum(best, ceil(rows[a] * columns[b] / num_sms) * flops)
    return best


@cache
def _tiles(is_cdna: bool, overhead: float) -> tuple[set[int], set[int], tuple[tuple[int, int, float], ...]]:
    """Heights, widths, and of each tile both with 2·a·b / its efficiency.

    The efficiency is relative to a tile of 128 x 256, whose loss is part of wave_fraction.
    """
    tiles = CDNA_TILES if is_cdna else TILES
    losses = [(1 + overhead * (1 / a + 1 / b)) / (1 + overhead * (1 / 128 + 1 / 256)) for a, b in tiles]
    flops = tuple((a, b, 2 * a * b * loss) for (a, b), loss in zip(tiles, losses, strict=True))
    return {a for a, _ in tiles}, {b for _, b in tiles}, flops


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
    rate = peak * _head_dim_factor(attention, qk_dim, v_dim)
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
    sink_rows = op.has_sinks * op.count * op.batch * op.heads * op.q_len
    return seconds[0], seconds[1] + attention.sink_row_ns * MICRO / 1000 * sink_rows


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


TABLE_BYTES = 8
"""Bytes moved per parameter of the embedding table beyond ADAM_BYTES. Measured on all first stages alike; the cause is
unknown."""


ADAM_BYTES = 34
"""Bytes moved per parameter of the shard: master weight and two moments read and written (24), gradient read (4), bf16
copy (6)."""


HOST_ADAM_FRACTION = 0.7
"""Share of the host's memory bandwidth that these passes reach: of what threads of all ranks stream together. Qwen3-30B
on 16 H100 with a quarter to all of its optimizer on the host (Megatron-Bridge's notes on offloading) takes 1.5 ns a
parameter."""


def host_update_s(hardware: HardwareSpec, num_parameters: Number, runtime: RuntimeSpec) -> Number:
    """Seconds to update `num_parameters` on the host: fp32 gradients go there, Adam runs, fp32 weights come back."""
    copied_s = 2 * FP32 * num_parameters / hardware.host.bytes_per_s
    return copied_s + runtime.host_adam_bytes * num_parameters / (HOST_ADAM_FRACTION * hardware.host.memory_bytes_per_s)


def optimizer_s(
    hardware: HardwareSpec, num_parameters: Number, runtime: RuntimeSpec, num_embedding_parameters: Number = 0
) -> Number:
    """Seconds of one fused AdamW step on a shard of `num_parameters`, and of casting the result to bf16.

    `num_embedding_parameters` of the shard belong to the embedding table. The dp shards are in parameter order, so the
    first one holds as much of the table as fits into it, and is the slowest.
    """
    num_bytes = _adam_bytes(runtime) * num_parameters + TABLE_BYTES * num_embedding_parameters
    return stream_s(hardware, num_bytes, 0, "optimizer")


def _adam_bytes(runtime: RuntimeSpec) -> float:
    """Bytes that AdamW moves per parameter under a trainer."""
    if runtime.weight_bytes == BF16 and not runtime.master_bytes:
        return OPTIMIZERS["adamw"].moved_bytes(BF16)
    # narrower moments are read and written; masters that are the weights themselves stand elsewhere
    times = 2 if runtime.weight_bytes == BF16 else 1
    return ADAM_BYTES - times * (12 - runtime.optimizer_bytes)


def clip_s(hardware: HardwareSpec, shard: Number, whole: Number, runtime: RuntimeSpec) -> Number:
    """Seconds per step to measure and scale the main gradients of a shard, and to zero those of all `whole` parameters.

    The gradients are read once for the norm, read and written to scale them, and written once with zeros. Three
    launches a step are left out.
    """
    if not runtime.clips_gradients:
        return 0.0
    return stream_s(hardware, runtime.gradient_bytes * (3 * shard + whole), 0)


def accumulate_s(hardware: HardwareSpec, num_parameters: Number, gradient_bytes: int = FP32) -> Number:
    """Seconds to add bf16 gradients to main ones: per parameter 2 + 4 bytes read and 4 written where those are fp32."""
    # sums of one dtype are plain additions
    family = "accumulate" if gradient_bytes == FP32 else "copy"
    return stream_s(hardware, (BF16 + 2 * gradient_bytes) * num_parameters, 1, family)
