"""Kernels of chunked recurrences: what one computes, moves and keeps, and its seconds on a GPU.

A chunked recurrence computes products of chunks on tensor cores and hands a state from chunk to chunk (Dao and Gu 2024,
§6; Yang et al. 2024, gated delta networks, §3.3). Its seconds are the longer of the products at a share of the peak and
of the bytes at a share of the bandwidth.
"""

from __future__ import annotations

from planner.physics.operators import BF16, Operator, Saved
from planner.shape import Number, Shape
from planner.specs.hardware import HardwareSpec

SCAN_BACKWARD = 3.0
"""FLOPs of the backward over those of the forward: the states are computed again, then two gradients for each product
(mamba_ssm's and flash-linear-attention's kernels keep no states)."""
SCAN_FRACTION = 0.2
"""Share of the peak in 16 bits that the products of a chunked recurrence reach. Their sides are 64 to 256 and each
waits for the one before. Assumed: half of what attention reaches at these sides; Mamba-2's scan at states of 64 to 256
is as fast as FlashAttention-2 at sequences of 2,048 (Dao and Gu 2024, figure 10)."""
SCAN_STREAM_FRACTION = 0.25
"""Share of a plain copy's bandwidth at which the bytes of a scan move. Five runs of Nemotron 3 Nano on GB300, GB200,
B300, B200 and H100 (Megatron-Bridge's performance summaries) take 0.94 to 1.12 times the predicted step with it, and
1.07 to 1.32 times without; what else such models lose is part of it."""
CORES_SCAN_FRACTION = 0.03
"""The same for a scan without tensor cores: fp32 cores have 1/15 of the peak on Hopper, and half of it is exponents."""
TRIANGLE_KERNELS = 2
"""Kernels of the delta rule that invert the triangle of each chunk."""


def scan(
    name: str, flops_per_token: Number, bytes_per_token: Number, shape: Shape, kernels: tuple[int, int],
    saved: tuple[Saved, ...], parameters: Number = 0, on_tensor_cores: bool = True,
) -> Operator:  # fmt: skip
    """A chunked recurrence that computes `flops_per_token` and moves `bytes_per_token` in its forward."""
    return Operator(
        name=name,
        kind="scan",
        family="scan" if on_tensor_cores else "scan_on_cores",
        scan_flops=flops_per_token * shape.tokens,
        backward_factor=SCAN_BACKWARD,
        forward_bytes=bytes_per_token * shape.tokens,
        # inputs again, gradients of inputs and outputs
        backward_bytes=SCAN_BACKWARD * bytes_per_token * shape.tokens,
        forward_kernels=kernels[0],
        backward_kernels=kernels[1],
        parameters=parameters,
        saved=saved,
    )


def scan_flops_s(op: Operator, hardware: HardwareSpec) -> Number:
    """Seconds of a scan's FLOPs in the forward: at a share of the peak that no run has measured."""
    peak = hardware.peak_flops("bf16")
    assert peak is not None, "HardwareSpec has bf16 or fp16"
    return op.scan_flops / ((SCAN_FRACTION if op.family == "scan" else CORES_SCAN_FRACTION) * peak)


def convolution(
    name: str, channels: Number, taps: int, shape: Shape, has_bias: bool, saved: tuple[Saved, ...] = ()
) -> Operator:
    """A causal convolution over time, one filter a channel, with its activation: as fast as memory is."""
    num_bytes = BF16 * shape.tokens * channels
    return Operator(
        name=name,
        kind="elementwise",
        family="activation",
        forward_bytes=2 * num_bytes,
        backward_bytes=3 * num_bytes,
        forward_kernels=1,
        backward_kernels=2,
        parameters=channels * (taps + has_bias),
        saved=saved,
    )


def gated_norm(name: str, width: Number, groups: Number, parameters: Number, shape: Shape) -> Operator:
    """A norm of a mixer's output and its gate, which the output projection reads; its inputs are kept already."""
    num_bytes = BF16 * shape.tokens * width
    return Operator(
        name=name,
        kind="elementwise",
        family="norm",
        modules=("op",),
        forward_bytes=3 * num_bytes,
        backward_bytes=5 * num_bytes,
        forward_kernels=1,
        backward_kernels=2,
        parameters=parameters,
        saved=(
            Saved("statistics", (shape.tokens, groups), dtype="fp32"),
            Saved("output", (shape.tokens, width), ("op",), gemm_input=True),
        ),
    )
