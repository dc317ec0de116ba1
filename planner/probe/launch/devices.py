"""The device that ranks compute on: a GPU if torch sees one, else the CPU."""

from __future__ import annotations

import os

import torch

from planner.errors import ProbeError
from planner.probe.run import Device

MAX_CONNECTIONS = "32"
"""Number of connections from the host to a GPU. Each channel between ranks has a stream of its own. Streams that share
one of the usual eight connections hold each other back: one that waits for a peer stops the other. CUDA reads the
number once, and started ranks inherit it."""


def sees_gpu() -> bool:
    """True if torch sees a GPU. It is called before anything else asks CUDA for something, because it sets
    MAX_CONNECTIONS."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", MAX_CONNECTIONS)
    return torch.cuda.is_available()


def default_device() -> Device:
    """The device to use unless the user names one: cuda where torch sees a GPU, else cpu."""
    return "cuda" if sees_gpu() else "cpu"


def require_gpu(device: Device) -> None:
    """Raise ProbeError if the requested device is missing."""
    if device == "cuda" and not sees_gpu():
        raise ProbeError("--device cuda: torch sees no GPU", "run where there is one, or with --device cpu")
