"""Seconds of an operator on one GPU: products, attention and memory-bound work.

The rates are those of the data sheet times a few achieved shares (`specs/efficiency.py`); small shapes lose more, to
tiles, waves and launches. All sizes may be numpy arrays; one call prices thousands of shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from planner.physics.layer.scans import SCAN_STREAM_FRACTION, scan_flops_s
from planner.physics.operators import BF16, FP32, Operator
from planner.shape import Number
from planner.specs.efficiency import AttentionEfficiency, GemmEfficiency
from planner.specs.hardware import HardwareSpec
from planner.specs.units import MICRO
from planner.trainers.spec import RuntimeSpec
from planner.trainers.torch_attention import torch_choice

TILES = ((128, 256), (256, 128), (128, 128), (64, 128), (128, 64))
"""Output tiles of one SM that the libraries choose from."""
CDNA_TILES = ((256, 256), (256, 192), (192, 256), *TILES)
"""Tiles of one compute unit: its 512 registers of 64 lanes on each of four units hold 256 x 256 sums of 32 bits. They
are what hipBLASLt and AITER name in most of their kernels for large products on gfx950."""
ALIGNED = 8
"""Number of 16-bit elements in the 16 bytes that tensor-core kernels load at once."""
EXPERT_STREAMS = 4
"""Streams that Transformer Engine spreads the products of experts over."""
QUERY_ROWS = 128
"""Number of queries in one attention tile."""
TABLE_BYTES = 8
"""Bytes moved per parameter of the embedding table beyond ADAM_BYTES. Measured on all first stages alike; the cause is
unknown."""
FP8 = 1
CAST_BYTES = {"fp8": 5, "mxfp8": 4, "nvfp4": 7}
"""Bytes moved per element that is cast: 16 bits are read, and the narrow copy is written. The 16 bits are read once
more where one scale holds for a whole tensor or a Hadamard transform comes first. Formats with a scale for each block
write a transposed copy as well, whose blocks run down the columns."""
ATTENTION_BACKWARD_KERNELS = 3
"""Number of kernels in the backward of attention: row sums of gradient · output, the gradients, and the cast of dq."""
ADAM_BYTES = 34
"""Bytes moved per parameter of the shard: master weight and two moments read and written (24), gradient read (4), bf16
copy (6)."""

DETERMINISTIC_BACKWARD, DETERMINISTIC_BLACKWELL = 1.6, 5.0
"""Seconds of attention's backward that adds the gradients of queries in a fixed order, over seconds of one that adds
them as they come. FlashAttention-3 loses up to 38% of its rate so (arXiv:2601.21824, H800). Blackwell's is what a GPT
of 7 billion parameters takes longer on GB200 in two layouts (Megatron-LM, gpt3_7b_*_memory_speed of its tests)."""
DETERMINISTIC_PERMUTE = 3.0
"""Seconds of permutations whose sums go in a fixed order: half of them are index_add after a sort instead of scatters
(Megatron-LM, docs/developer/determinism). Its share of a mixture's step, 15 to 17%, is where this guess is from."""
HOST_ADAM_BYTES = 80
"""Bytes that the host moves through its memory per parameter: torch's Adam on the CPU runs one pass after another, for
the decay (8), the two moments (32), the root, the quotient and its epsilon (24), the sum (16)."""
HOST_ADAM_FRACTION = 0.7
"""Share of the host's memory bandwidth that these passes reach: of what threads of all ranks stream together. Qwen3-30B
on 16 H100 with a quarter to all of its optimizer on the host (Megatron-Bridge's notes on offloading) takes 1.5 ns a
parameter."""


class PassSeconds(NamedTuple):
    """Seconds of the forward, of the input gradient and of the weight gradient; numbers or arrays."""

    forward_s: Number
    dgrad_s: Number
    wgrad_s: Number


def operator_seconds(op: Operator, hardware: HardwareSpec, dtype: str, runtime: RuntimeSpec) -> PassSeconds:
    """GPU seconds of `op` for one micro-batch in a training step; products by a weight are computed in `dtype`."""
    efficiency = hardware.efficiency
    forward, backward = 1 / efficiency.sustained_fraction, 1 / efficiency.backward_sustained_fraction
    if op.kind == "gemm":
        gradient_bytes = 2 * runtime.gradient_bytes if runtime.fused_grad_accumulation else BF16
        forward_s, dgrad_s, wgrad_s = gemm_s(
            op,
            hardware,
            dtype if op.is_cast else "bf16",
            runtime.groups_products or runtime.fuses_experts,
            gradient_bytes,
        )
        slow = efficiency.gemm_factor
        narrow = op.is_cast and is_narrow(hardware, dtype)
        if hardware.is_amd:
            slow *= runtime.rocm_narrow_factor if narrow else runtime.rocm_product_factor
        if narrow:
            slow *= runtime.narrow_factor / efficiency.narrow_sustained_fraction
        forward, backward = slow * forward, slow * backward * op.backward_factor
        cast = cast_s(op, hardware, dtype, runtime)
        return PassSeconds(forward * forward_s + cast.forward_s, backward * dgrad_s + cast.dgrad_s, backward * wgrad_s)
    if op.kind == "attention":
        forward_s, backward_s = attention_s(op, hardware, runtime.attention_kernel)
        forward, backward = forward * efficiency.attention_factor, backward * efficiency.attention_factor
        if runtime.deterministic:
            is_blackwell = hardware.architecture == "blackwell"
            backward *= DETERMINISTIC_BLACKWELL if is_blackwell else DETERMINISTIC_BACKWARD
        return PassSeconds(forward * forward_s, backward * backward_s, 0.0)
    passes_s = (
        stream_s(hardware, op.forward_bytes, op.forward_kernels, op.family),
        stream_s(hardware, op.backward_bytes, op.backward_kernels, op.family),
    )
    if op.kind == "scan":
        scan_s, slow = scan_flops_s(op, hardware), 1 / SCAN_STREAM_FRACTION
        passes_s = (np.maximum(slow * passes_s[0], scan_s), np.maximum(slow * passes_s[1], op.backward_factor * scan_s))
    slow = DETERMINISTIC_PERMUTE if runtime.deterministic and op.family == "permute" else 1.0
    return PassSeconds(slow * passes_s[0], slow * passes_s[1], 0.0)


def part_seconds(
    operators: Iterable[Operator], hardware: HardwareSpec, dtype: str, runtime: RuntimeSpec
) -> PassSeconds:
    """Seconds of operators that run one after another: max(Σ GPU, Σ host), since the host runs ahead of the GPU.

    In the backward, each sum is over both gradients (`at_host_pace`).
    """
    gpu, host = gpu_seconds(operators, hardware, dtype, runtime), issue_seconds(operators, hardware, runtime)
    return with_host(gpu, host, runtime)


def with_host(gpu: PassSeconds, host: PassSeconds, runtime: RuntimeSpec) -> PassSeconds:
    """Seconds of a part that takes the GPU `gpu` seconds to run and the host `host` seconds to issue."""
    if runtime.blocking_launches:
        return PassSeconds(gpu[0] + host[0], gpu[1] + host[1], gpu[2] + host[2])
    return PassSeconds(np.maximum(gpu.forward_s, host.forward_s), *at_host_pace(gpu[1:], host[1:]))


def at_host_pace(gpu_s: Sequence[Number], host_s: Sequence[Number]) -> tuple[Number, Number]:
    """Seconds of two passes in turn, which together take max(Σ gpu_s, Σ host_s), since the host runs ahead of the GPU.

    No pass is shorter than the time that the host needs to issue it. Where the host is late in one pass, and the GPU is
    the later of the two in the other pass, the other pass gets shorter by the delay. So neither pass gets longer where
    the GPU needs less time for either.
    """
    first_gpu_s, second_gpu_s = gpu_s
    first_host_s, second_host_s = host_s
    first_late_s = np.maximum(first_host_s - first_gpu_s, 0.0)
    second_late_s = np.maximum(second_host_s - second_gpu_s, 0.0)
    return (
        np.maximum(first_gpu_s - second_late_s, first_host_s),
        np.maximum(second_gpu_s - first_late_s, second_host_s),
    )


def gpu_seconds(operators: Iterable[Operator], hardware: HardwareSpec, dtype: str, runtime: RuntimeSpec) -> PassSeconds:
    """Seconds that the GPU needs for `operators`, one after another, if the host is never late."""
    return _sums(operator_seconds(op, hardware, dtype, runtime) for op in operators)


def issue_seconds(operators: Iterable[Operator], hardware: HardwareSpec, runtime: RuntimeSpec) -> PassSeconds:
    """Seconds that the host needs to issue all kernels of `operators`."""
    return _sums(host_seconds(op, hardware, runtime) for op in operators)


def _sums(seconds: Iterable[PassSeconds]) -> PassSeconds:
    forward_s: Number = 0.0
    dgrad_s: Number = 0.0
    wgrad_s: Number = 0.0
    for passes in seconds:
        forward_s, dgrad_s, wgrad_s = forward_s + passes[0], dgrad_s + passes[1], wgrad_s + passes[2]
    return PassSeconds(forward_s, dgrad_s, wgrad_s)


def issue_s(hardware: HardwareSpec, runtime: RuntimeSpec) -> float:
    """Host seconds to issue one kernel of an eager layer: none where CUDA graphs replay them."""
    return 0.0 if runtime.cuda_graphs else hardware.efficiency.host_us * runtime.host_factor * MICRO


def host_seconds(op: Operator, hardware: HardwareSpec, runtime: RuntimeSpec) -> PassSeconds:
    """Host seconds to issue the kernels of `op`, which bound small operators unless a CUDA graph replays them."""
    each_s = issue_s(hardware, runtime)
    if op.kind == "gemm":
        return PassSeconds(each_s, each_s, each_s)
    if op.kind == "attention":
        return PassSeconds(op.count * each_s, op.count * ATTENTION_BACKWARD_KERNELS * each_s, 0.0)
    forward, backward = op.forward_kernels * each_s, op.backward_kernels * each_s
    return PassSeconds(forward * (op.forward_bytes > 0), backward * (op.backward_bytes > 0), 0.0)


def gemm_s(
    op: Operator, hardware: HardwareSpec, dtype: str, grouped: bool = True, gradient_bytes: int = BF16
) -> PassSeconds:
    """Seconds of y = x·wᵀ, dx = dy·w and dw = dyᵀ·x, each timed alone.

    Without a weight both gradients are input gradients. Where `grouped`, one kernel computes the products of all
    experts; else a few are computed at a time, on streams beside each other. `gradient_bytes` are moved per weight for
    dw: it is written, and where it is added to a main gradient, that gradient is read as well.
    """
    gemm = hardware.efficiency.gemm
    count: Number = op.count if grouped or not op.weight else np.minimum(op.count, EXPERT_STREAMS)
    times = op.count / count
    forward_s = times * product_s(hardware, dtype, gemm.forward_fraction, count, op.m, op.n, op.k)
    dgrad_s = times * product_s(hardware, dtype, gemm.dgrad_fraction, count, op.m, op.k, op.n)
    wgrad_s = times * product_s(hardware, dtype, gemm.wgrad_fraction, count, op.n, op.k, op.m, gradient_bytes)
    if not op.weight:
        # heads lie in memory one after the other: rows of 16 bytes, or a fallback without tensor cores
        slow = np.where((op.n % ALIGNED) + (op.k % ALIGNED) == 0, 1.0, 1 / gemm.unaligned_factor)
        return PassSeconds(slow * forward_s, slow * (dgrad_s + wgrad_s), 0.0)
    return PassSeconds(forward_s, dgrad_s, wgrad_s)


def cast_s(op: Operator, hardware: HardwareSpec, dtype: str, runtime: RuntimeSpec) -> PassSeconds:
    """Seconds to cast operands of a narrow product: the input before the forward, the gradient before the backward.

    Weights are cast once a step, unless ZeRO-3 gathers them anew for every pass.
    """
    if not (op.is_cast and is_narrow(hardware, dtype)):
        return PassSeconds(0.0, 0.0, 0.0)
    weight = op.n * op.k if runtime.casts_weights else 0
    weight_bytes = weight * _cast_bytes(dtype, 1, runtime)
    input_bytes = 0 if op.takes_cast_input else op.m * op.k * _cast_bytes(dtype, op.input_shards, runtime)
    gradient_bytes = 0 if op.takes_cast_gradient else op.m * op.n * _cast_bytes(dtype, op.gradient_shards, runtime)
    return PassSeconds(
        stream_s(hardware, op.count * (input_bytes + weight_bytes), 1, "cast"),
        stream_s(hardware, op.count * (gradient_bytes + weight_bytes), 1, "cast"),
        0.0,
    )


def _cast_bytes(dtype: str, shards: Number, runtime: RuntimeSpec) -> Number:
    """Bytes moved per element to cast an operand, of which each of `shards` ranks casts its share before the gathering.

    A transposed copy, where products need one, is written beside the cast; or it is made from the gathered operand,
    which is read once more for it.
    """
    ranks = shards if runtime.narrow_exchanges else 1
    share = CAST_BYTES[dtype] / ranks
    transposed = np.where(ranks > 1, 2 * FP8, FP8)
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
    grouped = np.where(count > 1, gemm.grouped_factor, 1.0)
    rate = _narrow_factor(gemm, dtype, narrow) * peak
    power_s = flops_per_step * steps / (power_fraction * rate)
    wave_s = steps * _tile_waves(hardware, count, m, n) * (num_sms / (gemm.wave_fraction * rate))
    operand = FP8 if narrow else BF16
    bytes_per_s = gemm.memory_fraction * hardware.hbm_bytes_per_s
    memory_s = count * (operand * (m * k + k * n) + result_bytes * m * n) / bytes_per_s
    accumulate_s = gemm.accumulate_fraction * count * (result_bytes - BF16) * m * n / bytes_per_s
    seconds = np.maximum(np.maximum(power_s, wave_s) / grouped + accumulate_s, memory_s)
    return seconds + launch_s(hardware)


def _narrow_factor(gemm: GemmEfficiency, dtype: str, narrow: bool) -> float:
    if not narrow or dtype == "nvfp4":
        return gemm.fp4_factor if narrow else 1.0
    return gemm.fp8_factor * (gemm.mx_factor if dtype == "mxfp8" else 1.0)


def _tile_waves(hardware: HardwareSpec, count: Number, m: Number, n: Number) -> Number:
    """FLOPs of one SM per step of the reduction: min over tiles of waves · 2·a·b / (the tile's efficiency)."""
    overhead, num_sms = hardware.efficiency.gemm.tile_overhead, hardware.num_sms
    tiles = CDNA_TILES if hardware.architecture.startswith("cdna") else TILES
    rows = {a: np.ceil(m / a) * count for a in {a for a, _ in tiles}}
    columns = {b: np.ceil(n / b) for b in {b for _, b in tiles}}
    best: Number = np.inf
    for a, b in tiles:
        # relative to a tile of 128 x 256, whose loss is part of wave_fraction
        loss = (1 + overhead * (1 / a + 1 / b)) / (1 + overhead * (1 / 128 + 1 / 256))
        best = np.minimum(best, np.ceil(rows[a] * columns[b] / num_sms) * (2 * a * b * loss))
    return best


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
    qk_dim: Number = np.ceil(op.qk_dim / multiple) * multiple
    v_dim: Number = np.ceil(op.v_dim / multiple) * multiple
    rate = peak * _head_dim_factor(attention, qk_dim, v_dim) * (attention.sink_factor if op.has_sinks else 1.0)
    diagonal = np.minimum(op.width, op.q_len)
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
    return np.where(is_part, 2 * seen, diagonal), np.where(is_part, 2 * seeing, diagonal)


def _torch_attention_s(op: Operator, hardware: HardwareSpec, taken: str) -> tuple[Number, Number]:
    """`attention_s` in eager torch, where torch took a kernel, or is expected to take one if `taken` is empty.

    FlashAttention-2 wants values as wide as keys; they are padded.
    """
    flash = attention_s(replace(op, v_dim=op.qk_dim), hardware, "flash")
    taken = taken or torch_choice(hardware, int(op.qk_dim), int(op.v_dim))
    if taken == "flash" or hardware.efficiency.cudnn is None:
        return flash
    forward, backward = zip(flash, attention_s(op, hardware, "cudnn"), strict=True)
    return np.where(op.calls_flash, *forward), np.where(op.calls_flash, *backward)


def _head_dim_factor(attention: AttentionEfficiency, qk_dim: Number, v_dim: Number) -> Number:
    """Rate at these head dimensions over the rate at 128: wider heads amortise the softmax, until tiles must shrink."""
    dim, half = (qk_dim + v_dim) / 2, attention.half_head_dim
    return dim / (dim + half) * (1 + half / 128) * np.where(qk_dim > 128, attention.wide_factor, 1.0)


def launch_s(hardware: HardwareSpec) -> float:
    """Seconds that the start and the drain of one kernel take."""
    return hardware.efficiency.launch_us * hardware.efficiency.launch_factor * MICRO


def stream_s(hardware: HardwareSpec, num_bytes: Number, num_kernels: Number, family: str = "copy") -> Number:
    """Seconds of `num_kernels` memory-bound kernels that move `num_bytes` together: bytes / bandwidth + launches."""
    efficiency = hardware.efficiency
    bytes_per_s = efficiency.of_family(family) * hardware.hbm_bytes_per_s / efficiency.stream_factor
    return num_bytes / bytes_per_s + num_kernels * launch_s(hardware) * (num_bytes > 0)


def host_update_s(hardware: HardwareSpec, num_parameters: Number) -> Number:
    """Seconds to update `num_parameters` on the host: fp32 gradients go there, Adam runs, fp32 weights come back."""
    copied_s = 2 * FP32 * num_parameters / hardware.host.bytes_per_s
    return copied_s + HOST_ADAM_BYTES * num_parameters / (HOST_ADAM_FRACTION * hardware.host.memory_bytes_per_s)


def optimizer_s(
    hardware: HardwareSpec, num_parameters: Number, runtime: RuntimeSpec, num_embedding_parameters: Number = 0
) -> Number:
    """Seconds of one fused AdamW step on a shard of `num_parameters`, and of casting the result to bf16.

    `num_embedding_parameters` of the shard belong to the embedding table. The dp shards are in parameter order, so the
    first one holds as much of the table as fits into it, and is the slowest.
    """
    # narrower moments are read and written; masters that are the weights themselves stand elsewhere
    times = 2 if runtime.weight_bytes == BF16 else 1
    adam_bytes = ADAM_BYTES - times * (12 - runtime.optimizer_bytes)
    num_bytes = adam_bytes * num_parameters + TABLE_BYTES * num_embedding_parameters
    return stream_s(hardware, num_bytes, 0, "optimizer")


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
