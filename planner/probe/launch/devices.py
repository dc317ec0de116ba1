"""The device that ranks compute on: what torch sees here, and what GPUs need before torch starts them."""

from __future__ import annotations

import os

import torch

from planner.errors import ProbeError
from planner.probe.run import Device

MAX_CONNECTIONS = "32"
"""Of the host to a GPU: each channel between ranks has a stream of its own, and of streams that share one of the usual
eight connections one that waits for a peer holds back the other. CUDA reads it once, and started ranks inherit it."""


def sees_gpu() -> bool:
    """Whether torch does; nothing asks CUDA for anything before."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", MAX_CONNECTIONS)
    return torch.cuda.is_available()


def default_device() -> Device:
    """cuda where torch sees a GPU."""
    return "cuda" if sees_gpu() else "cpu"


def require_gpu(device: Device) -> None:
    """Raise ProbeError where the device asked for is not there."""
    if device == "cuda" and not sees_gpu():
        raise ProbeError("--device cuda: torch sees no GPU", "run where there is one, or with --device cpu")
