"""Seconds of an operator on one GPU: products, attention and memory-bound work.

The rates are those of the data sheet times a few achieved shares (`specs/hardware.py`); small shapes lose more, to
tiles, waves and launches. All sizes may be numpy arrays; one call prices thousands of shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.physics.cost import content, remembered
from planner.physics.kernels import (
    ATTENTION_BACKWARD_KERNELS,
    PassSeconds,
    attention_s,
    cast_s,
    gemm_s,
    is_narrow,
    stream_s,
)
from planner.physics.layer.recurrent import SCAN_STREAM_FRACTION, scan_flops_s
from planner.physics.operators import BF16, Operator
from planner.shape import Number, maximum
from planner.specs.hardware import HardwareSpec
from planner.specs.units import MICRO
from planner.trainers.spec import RuntimeSpec

DETERMINISTIC_BACKWARD, DETERMINISTIC_BLACKWELL = 1.6, 5.0
"""Seconds of attention's backward that adds the gradients of queries in a fixed order, over seconds of one that adds
them as they come. FlashAttention-3 loses up to 38% of its rate so (arXiv:2601.21824, H800). Blackwell's is what a GPT
of 7 billion parameters takes longer on GB200 in two layouts (Megatron-LM, gpt3_7b_*_memory_speed of its tests)."""
DETERMINISTIC_PERMUTE = 3.0
"""Seconds of permutations whose sums go in a fixed order: half of them are index_add after a sort instead of scatters
(Megatron-LM, docs/developer/determinism). Its share of a mixture's step, 15 to 17%, is where this guess is from."""


NARROW_ATTENTION, MX_ATTENTION = 1.5, 1.2
"""Rate of attention in 8 bits over that in 16: of Llama 2 70B with adapters on H100 (MLPerf v4.1), by hand; and where
blocks of 32 have scales, which other kernels write: DeepSeek-V3 and Qwen3 on GB300 (Megatron-Bridge), by hand."""
FP32_PRODUCT = 10.0
"""Seconds of a product of fp32 operands over those of a large one in bf16: 67 TFLOP/s beside about 650 on H100."""
SIZES_OF_KIND = {
    "gemm": (
        "count", "m", "n", "k", "weight", "trained", "wide", "input_shards", "gradient_shards", "takes_cast_input",
        "takes_cast_gradient", "backward_factor", "in_fp32",
    ),
    "attention": (
        "count", "batch", "heads", "kv_heads", "q_len", "kv_len", "window", "causal", "documents",
        "has_sinks", "calls_flash",
        "imbalance", "qk_dim", "v_dim",
    ),
    "elementwise": ("family", "forward_bytes", "backward_bytes", "forward_kernels", "backward_kernels"),
    "scan": (
        "family", "forward_bytes", "backward_bytes", "forward_kernels", "backward_kernels", "scan_flops",
        "backward_factor",
    ),
}  # fmt: skip
"""Fields of an operator of each kind that its seconds depend on."""
RUNTIME_OF_KIND = {
    "gemm": (
        "gradient_bytes", "fused_grad_accumulation", "groups_products", "fuses_experts", "rocm_narrow_factor",
        "rocm_product_factor", "narrow_factor", "block_factor", "casts_weights", "narrow_exchanges",
        "transposes_frozen", "fp8_copies",
    ),
    "attention": ("attention_kernel", "deterministic", "narrow_attention", "latent_attention_tflops"),
    "elementwise": ("deterministic",),
    "scan": ("deterministic",),
}  # fmt: skip
"""Fields of a trainer that the seconds of an operator of each kind depend on."""


def operator_seconds(op: Operator, hardware: HardwareSpec, dtype: str, runtime: RuntimeSpec) -> PassSeconds:
    """GPU seconds of `op` for one micro-batch in a training step; products by a weight are computed in `dtype`.

    They are worked out once for all recipes that share what they depend on.
    """
    if op.kind == "elementwise":
        return _operator_seconds(op, hardware, dtype, runtime)  # two sums: a memory of them would take longer
    sizes = [content(getattr(op, name)) for name in SIZES_OF_KIND[op.kind]]
    trainer = [getattr(runtime, name) for name in RUNTIME_OF_KIND[op.kind]]
    key = (op.kind, dtype, *sizes, *trainer)
    passes = remembered(hardware, key, lambda: _operator_seconds(op, hardware, dtype, runtime))
    return passes if op.has_backward else PassSeconds(passes[0], 0.0, 0.0)


def _operator_seconds(op: Operator, hardware: HardwareSpec, dtype: str, runtime: RuntimeSpec) -> PassSeconds:
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
        slow = efficiency.gemm_factor * (FP32_PRODUCT if op.in_fp32 else 1.0)
        narrow = op.is_cast and is_narrow(hardware, dtype)
        if hardware.is_amd:
            slow *= runtime.rocm_narrow_factor if narrow else runtime.rocm_product_factor
        if narrow:
            factor = runtime.block_factor if dtype == "mxfp8" else runtime.narrow_factor
            slow *= factor / efficiency.narrow_sustained_fraction
        forward, backward = slow * forward, slow * backward * op.backward_factor
        cast = cast_s(op, hardware, dtype, runtime)
        return PassSeconds(forward * forward_s + cast.forward_s, backward * dgrad_s + cast.dgrad_s, backward * wgrad_s)
    if op.kind == "attention":
        forward_s, backward_s = attention_s(op, hardware, runtime.attention_kernel)
        slow = efficiency.attention_factor
        if runtime.narrow_attention:
            slow /= MX_ATTENTION if dtype == "mxfp8" else NARROW_ATTENTION
        if (tflops := runtime.latent_attention_tflops) and op.qk_dim != op.v_dim:
            peak = hardware.peak_flops("bf16") or 0.0
            slow *= max(1.0, efficiency.kernel(runtime.attention_kernel).forward_fraction * peak / (1e12 * tflops))
        forward, backward = slow * forward, slow * backward
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
        passes_s = (maximum(slow * passes_s[0], scan_s), maximum(slow * passes_s[1], op.backward_factor * scan_s))
    slow = DETERMINISTIC_PERMUTE if runtime.deterministic and op.family == "permute" else 1.0
    return PassSeconds(slow * passes_s[0], slow * passes_s[1], 0.0)


def with_host(gpu: PassSeconds, host: PassSeconds, runtime: RuntimeSpec) -> PassSeconds:
    """Seconds of a part that takes the GPU `gpu` seconds to run and the host `host` seconds to issue.

    They are the longer of both, since the host runs ahead; in the backward over both gradients (`at_host_pace`).
    """
    if runtime.blocking_launches:
        return PassSeconds(gpu[0] + host[0], gpu[1] + host[1], gpu[2] + host[2])
    return PassSeconds(maximum(gpu.forward_s, host.forward_s), *at_host_pace(gpu[1:], host[1:]))


def at_host_pace(gpu_s: Sequence[Number], host_s: Sequence[Number]) -> tuple[Number, Number]:
    """Seconds of two passes in turn, which together take max(Σ gpu_s, Σ host_s), since the host runs ahead of the GPU.

    No pass is shorter than the time that the host needs to issue it. Where the host is late in one pass, and the GPU is
    the later of the two in the other pass, the other pass gets shorter by the delay. So neither pass gets longer where
    the GPU needs less time for either.
    """
    first_gpu_s, second_gpu_s = gpu_s
    first_host_s, second_host_s = host_s
    first_late_s = maximum(first_host_s - first_gpu_s, 0.0)
    second_late_s = maximum(second_host_s - second_gpu_s, 0.0)
    return (
        maximum(first_gpu_s - second_late_s, first_host_s),
        maximum(second_gpu_s - first_late_s, second_host_s),
    )


def issue_seconds(operators: Iterable[Operator], hardware: HardwareSpec, runtime: RuntimeSpec) -> PassSeconds:
    """Seconds that the host needs to issue all kernels of `operators`."""
    return summed(host_seconds(op, hardware, runtime) for op in operators)


def summed(seconds: Iterable[PassSeconds]) -> PassSeconds:
    """Seconds of all passes, one after another."""
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
    if op.kind != "elementwise" and not op.has_backward:
        return PassSeconds(op.count * each_s, 0.0, 0.0)
    if op.kind == "gemm":
        return PassSeconds(each_s, each_s, each_s if op.trained else 0.0)
    if op.kind == "attention":
        return PassSeconds(op.count * each_s, op.count * ATTENTION_BACKWARD_KERNELS * each_s, 0.0)
    forward, backward = op.forward_kernels * each_s, op.backward_kernels * each_s
    return PassSeconds(forward * (op.forward_bytes > 0), backward * (op.backward_bytes > 0), 0.0)
