"""The device that ranks compute on: a GPU if torch sees one, else the CPU."""

from __future__ import annotations

import logging
import os

import torch

from planner.errors import ProbeError
from planner.probe.run import Device
from planner.probe.torch_build import this_build

_log = logging.getLogger(__name__)


def sees_gpu() -> bool:
    """True if torch sees a GPU. It is called before anything else asks for one, because it sets the number of queues
    that a GPU has, whatever the environment says: training scripts often leave it at 1."""
    name, needed = this_build().queues
    inherited = os.environ.get(name, needed)
    too_few = not inherited.isdigit() or int(inherited) < int(needed)
    os.environ[name] = needed if too_few else inherited
    is_there = torch.cuda.is_available()
    is_first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    if is_there and too_few and is_first:
        _log.warning(
            "%s=%s of the environment is overridden by %s: channels between ranks would wait for each other",
            name, inherited, needed,
        )  # fmt: skip
    return is_there


def default_device() -> Device:
    """The device to use unless the user names one: cuda, AMD's too, where torch sees a GPU, else cpu."""
    return "cuda" if sees_gpu() else "cpu"


def require_gpu(device: Device) -> None:
    """Raise ProbeError if the requested device is missing."""
    if device == "cuda" and not sees_gpu():
        raise ProbeError("--device cuda: torch sees no GPU", "run where there is one, or with --device cpu")
