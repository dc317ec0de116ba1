"""The coefficients of profiles and trainers that are fitted to published runs, with bounds and first guesses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

A100 = ("a100-sxm-80gb", "a100-sxm-40gb", "a800-sxm-80gb")
A100_PCIE = ("a100-pcie-80gb", "a100-pcie-only-80gb")
H100_500W = ("h100-sxm-96gb",)
H100 = ("h100-sxm-80gb", "h200-sxm-141gb", "h800-sxm-80gb", "gh200-96gb")
"""GPUs with the same silicon and the same power limit."""
B200 = ("b200-sxm-180gb", "b300-sxm-270gb")
GB200 = ("gb200-nvl72",)
GB300 = ("gb300-nvl72",)
BLACKWELL = (*B200, *GB200, *GB300)
SINCE_HOPPER = (*H100, *H100_500W, "h20-sxm-96gb", *BLACKWELL)
ULTRA = (B200[1], *GB300)
"""Blackwell Ultra: half as many FLOP/s again in 4 bits, and twice as many exponentials."""
DEEPSPEED = ("megatron-deepspeed",)
MEGATRON = ("megatron",)
TORCHTITAN = ("torchtitan", "torchtitan-2024", "torchtitan-2025")
NANOTRON = ("nanotron",)
NCCL_TRAINERS = (*MEGATRON, *TORCHTITAN, *NANOTRON, "torch-eager", "torch-fsdp")


@dataclass(frozen=True, slots=True)
class Coefficient:
    """One number of a hardware profile or of a runtime. The field at `path` says what it means."""

    name: str
    of: Literal["hardware", "runtime"]
    names: tuple[str, ...]
    """Profiles or runtimes that share it."""
    path: str
    start: float
    """First guess, from a data sheet, a benchmark of one GPU, or a sibling."""
    low: float
    high: float
    spread: float
    """Uncertainty of the first guess, as a standard deviation of its logarithm."""
    unit: str = ""
    feature: str | None = None
    """The feature that a run must have switched on for the coefficient to apply."""


COEFFICIENTS = (
    Coefficient("A100 products", "hardware", A100, "efficiency.gemm_factor", 0.93, 0.7, 1.3, 0.03),
    # timed alone (SimuMax), but at the limit of 300 W that it has in a step
    Coefficient("A100 PCIe products", "hardware", A100_PCIE, "efficiency.gemm_factor", 1.0, 0.7, 1.3, 0.05),
    Coefficient("A100 NVLink", "hardware", A100, "tiers.0.efficiency_fraction", 0.78, 0.4, 0.95, 0.1),
    Coefficient("A100 network", "hardware", A100, "tiers.1.efficiency_fraction", 0.8, 0.3, 0.95, 0.15),
    Coefficient("DeepSpeed waits per exchange", "runtime", DEEPSPEED, "collective_sync_us", 200, 1, 2000, 1.0, "µs"),
    Coefficient("DeepSpeed late ranks", "runtime", DEEPSPEED, "tp_jitter_fraction", 0.02, 0.0005, 0.2, 1.0),
    Coefficient("DeepSpeed host per kernel", "runtime", DEEPSPEED, "host_factor", 0.5, 0.1, 2, 0.5),
    Coefficient("nanotron host per kernel", "runtime", NANOTRON, "host_factor", 1.3, 0.5, 4, 0.5),
    # timed alone on B200 (SimuMax), they are quicker than in a step; rates of its siblings follow from their power
    Coefficient("Blackwell products", "hardware", BLACKWELL, "efficiency.gemm_factor", 1.05, 0.8, 1.3, 0.05),
    # GB200's recipes of 2025 are slower in 8 bits than those of 2026, and B200's are not; GB300's are of 2026
    Coefficient("Blackwell 8-bit", "hardware", (*B200, *GB300), "efficiency.gemm.fp8_factor", 1.2, 0.8, 1.6, 0.1),
    Coefficient("GB200 8-bit products", "hardware", GB200, "efficiency.gemm.fp8_factor", 1.1, 0.8, 1.6, 0.1),
    Coefficient("Blackwell block scales", "hardware", BLACKWELL, "efficiency.gemm.mx_factor", 0.96, 0.7, 1.1, 0.05),
    # nobody has timed products of 4 bits by themselves
    Coefficient("GB200 4-bit products", "hardware", GB200, "efficiency.gemm.fp4_factor", 0.93, 0.6, 1.4, 0.25),
    Coefficient("Blackwell Ultra 4-bit", "hardware", ULTRA, "efficiency.gemm.fp4_factor", 0.93, 0.6, 1.4, 0.25),
    # timed alone on H200, they are quicker than in a step
    Coefficient(
        "Hopper 8-bit in steps", "hardware", H100, "efficiency.narrow_sustained_fraction", 0.934, 0.73, 1, 0.03
    ),
    # gpt-oss in mxfp8 with whole iterations in graphs, where nothing but the GPU counts; nobody has timed it by itself
    Coefficient("attention with sinks", "hardware", SINCE_HOPPER, "efficiency.cudnn.sink_factor", 0.4, 0.2, 1.2, 0.2),
    # SimuMax's timings on B200, keys of 192
    Coefficient("Blackwell wide attention", "hardware", BLACKWELL, "efficiency.cudnn.wide_factor", 0.8, 0.6, 1.1, 0.1),
    Coefficient("Blackwell Ultra attention", "hardware", ULTRA, "efficiency.attention_factor", 0.85, 0.5, 1.1, 0.1),
    # as other kernels that turn tensors round (H200): nobody has timed these
    Coefficient("8-bit casts", "hardware", SINCE_HOPPER, "efficiency.family_fraction.cast", 0.6, 0.2, 1, 0.3),
    Coefficient("waits per exchange", "runtime", NCCL_TRAINERS, "collective_sync_us", 40, 1, 2000, 0.5, "µs"),
    # Qwen3 30B on B200, a sequence at a time; SimuMax's timings of GroupedLinear
    Coefficient("Megatron host per MoE layer", "runtime", MEGATRON, "moe_kernels", 70, 1, 300, 0.3),
    Coefficient("Megatron host per expert", "runtime", MEGATRON, "expert_kernels", 0.9, 0.2, 20, 0.3),
    Coefficient("Megatron host of 8 bits", "runtime", MEGATRON, "narrow_host_factor", 1.2, 1, 3, 0.2),
    # the pull request that let graphs replay parts of it (Megatron-LM 2168) says that it is more, not how much
    Coefficient("Megatron host of EP overlap", "runtime", MEGATRON, "ep_overlap_host_factor", 1.3, 1, 3, 0.2),
    # 8B on 32 B200 in one CUDA graph: 188 ms, of which 6 stay unexplained
    Coefficient("Megatron host per step", "runtime", MEGATRON, "step_overhead_s", 0.01, 0.0005, 0.1, 0.7, "s"),
    Coefficient("Megatron TP overlap", "runtime", MEGATRON, "tp_overlap_fraction", 0.5, 0.05, 0.95, 0.3),
    # kernels of NCCL take a sixth of the SMs, and memory bandwidth, from what runs beside them
    Coefficient("contention of exchanges", "runtime", NCCL_TRAINERS, "contention_fraction", 0.2, 0.01, 0.7, 0.5),
    Coefficient("Megatron EP rows", "runtime", MEGATRON, "ep_row_bytes", 8192, 100, 30000, 0.5, "B"),
    # clocks go with the power's cube root to its square root: 500 W against 700
    Coefficient("H100 500 W products", "hardware", H100_500W, "efficiency.gemm_factor", 1.15, 0.8, 1.4, 0.05),
    Coefficient("asynchronous TP", "runtime", TORCHTITAN, "tp_overlap_fraction", 0.75, 0.1, 0.95, 0.3, "", "async_tp"),
)
"""Few enough to be read one by one."""
