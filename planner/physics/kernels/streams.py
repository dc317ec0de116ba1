"""Memory-bound kernels: bytes over bandwidth, and launches."""

from __future__ import annotations

from typing import NamedTuple

from planner.shape import Number
from planner.specs.hardware import HardwareSpec
from planner.specs.units import MICRO


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
