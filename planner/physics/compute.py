"""Seconds of an operator on one GPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.physics.operators import Operator
from planner.physics.shape import Number
from planner.specs.cluster import HardwareSpec
from planner.specs.runtime import RuntimeSpec


class PassSeconds(NamedTuple):
    """Seconds of the forward, of the input gradient and of the weight gradient; numbers or arrays."""

    forward_s: Number
    dgrad_s: Number
    wgrad_s: Number


def operator_seconds(op: Operator, hardware: HardwareSpec, dtype: str, runtime: RuntimeSpec) -> PassSeconds:
    """Seconds of one micro-batch of `op`, pass by pass."""
    if op.kind == "elementwise":
        forward = stream_s(hardware, op.forward_bytes, op.forward_kernels, op.family)
        return PassSeconds(forward, stream_s(hardware, op.backward_bytes, op.backward_kernels, op.family), 0.0)
    flops_per_s = 0.7 * (hardware.peak_flops("bf16") or 1.0)
    seconds = op.forward_flops / flops_per_s
    if op.kind == "attention":
        return PassSeconds(seconds, 2.5 * seconds, 0.0)
    return PassSeconds(seconds, seconds, np.where(op.weight, seconds, seconds))


def stream_s(hardware: HardwareSpec, num_bytes: Number, num_kernels: Number, family: str = "copy") -> Number:
    """Seconds of `num_kernels` memory-bound kernels that move `num_bytes` together."""
    return np.maximum(num_bytes / (0.85 * hardware.hbm_bytes_per_s), num_kernels * 4e-6)


def optimizer_s(hardware: HardwareSpec, num_parameters: Number, runtime: RuntimeSpec) -> Number:
    """Seconds of one fused AdamW step on a shard of `num_parameters`."""
    return stream_s(hardware, 30 * num_parameters, 1, "optimizer")


def accumulate_s(hardware: HardwareSpec, num_parameters: Number) -> Number:
    """Seconds to add bf16 gradients into fp32 ones: 10 bytes per parameter."""
    return stream_s(hardware, 10 * num_parameters, 1, "accumulate")
