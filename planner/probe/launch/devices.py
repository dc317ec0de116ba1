"""The device that ranks compute on: a GPU if torch sees one, else the CPU."""

from __future__ import annotations

import os

import torch

from planner.errors import ProbeError
from planner.probe.run import Device
from planner.probe.torch_build import this_build


def sees_gpu() -> bool:
    """True if torch sees a GPU. It is called before anything else asks for one, because it sets the number of queues
    that a GPU has."""
    os.environ.setdefault(*this_build().queues)
    return torch.cuda.is_available()


def default_device() -> Device:
    """The device to use unless the user names one: cuda, AMD's too, where torch sees a GPU, else cpu."""
    return "cuda" if sees_gpu() else "cpu"


def require_gpu(device: Device) -> None:
    """Raise ProbeError if the requested device is missing."""
    if device == "cuda" and not sees_gpu():
        raise ProbeError("--device cuda: torch sees no GPU", "run where there is one, or with --device cpu")
