"""Products of matrices: power, whole waves of tiles, memory; and the casts of narrow ones."""

from __future__ import annotations

import math
from functools import cache, partial

from planner.physics.kernels.streams import PassSeconds, launch_s, stream_s
from planner.physics.operators import BF16, Operator
from planner.shape import Number, ceil, maximum, minimum, where
from planner.specs.efficiency import GemmEfficiency
from planner.specs.hardware import HardwareSpec
from planner.trainers.spec import RuntimeSpec

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
