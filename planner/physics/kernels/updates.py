"""Updates of the weights: the optimizer on the GPU or the host, clipping, gradients that are summed."""

from __future__ import annotations

from planner.physics.kernels.streams import stream_s
from planner.physics.operators import BF16, FP32
from planner.shape import Number
from planner.specs.hardware import HardwareSpec
from planner.trainers.optimizers import OPTIMIZERS
from planner.trainers.spec import RuntimeSpec

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
