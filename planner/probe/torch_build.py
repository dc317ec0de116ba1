"""The build of torch at hand, and the device that ranks compute on.

CUDA's build is for NVIDIA's GPUs, ROCm's for AMD's, which torch presents as torch.cuda too. What differs between them
is a row here. No other module of the probe or of the profile asks which one it is.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from planner.errors import ProbeError
from planner.probe.device_state import Monitor, amd_driver, nvidia_driver, nvidia_state
from planner.probe.run import Device
from planner.specs.base import Fields

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Facts of a build of torch that the probe and the profile rest on."""

    runtime: str
    """The vendor's runtime and its version, such as CUDA 12.8."""
    queues: tuple[str, str]
    """The environment variable that says how many queues a GPU has, and the number that the ranks need.

    Each channel between ranks has a stream of its own. Streams that share a queue hold each other back: one that waits
    for a peer stops the other. The runtime reads the number once, and started ranks inherit it."""
    attention: Mapping[str, SDPBackend]
    """Fused attention kernels, as profiles name them."""
    pads_values: bool
    """Flash attention runs where values are narrower than keys only if they are padded, and no other kernel is sure to
    run there."""
    aligns_to_last_key: bool
    """Flash attention's causal mask is aligned to the last key where there are more keys than queries."""
    windows_since: tuple[int, int]
    """The first version of torch whose flash attention honours windows and returns a natural log-sum-exp."""
    takes_groups: Callable[[torch.device], bool]
    """True if torch._grouped_mm runs in bf16 on a device."""
    architecture_of: Callable[[Any], str]
    """The silicon generation of a device's properties."""
    driver: Callable[[], str]
    """The driver's version; empty where it does not say."""
    state: Callable[[str], Fields]
    """The state of the GPU with an id, as fields of DeviceState; none where the driver does not say."""


def this_build() -> TorchBuild:
    """The build of torch that is installed (on a CPU build, as for CUDA), or the one that is rehearsed."""
    if _rehearsed is not None:
        return _rehearsed
    return _rocm(torch.version.hip) if torch.version.hip else _cuda(torch.version.cuda)


def watched(number: int) -> Monitor:
    """The monitor of a GPU, which has looked at it once."""
    monitor = Monitor(partial(this_build().state, str(torch.cuda.get_device_properties(number).uuid)))
    monitor.before()
    return monitor


_rehearsed: TorchBuild | None = None
"""The build whose kernels a rehearsal without a GPU stands for."""


@contextmanager
def rehearsed_build(architecture: str) -> Iterator[TorchBuild]:
    """Tensors are taken for those of a GPU of `architecture`, wherever they are."""
    global _rehearsed
    build = _rocm(torch.version.hip or "7.0") if architecture.startswith("cdna") else _cuda(torch.version.cuda)
    if not architecture.startswith("cdna"):
        build = replace(build, takes_groups=lambda device: architecture in ("hopper", "blackwell"))
    _rehearsed = build
    try:
        yield build
    finally:
        _rehearsed = None


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
"""The names of exchanges of whole tensors, which torch 2.13 renamed."""


def gather_whole(whole: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    """Fill `whole` with the parts of all ranks of a group."""
    getattr(dist, GATHER)(whole, part, group=group)


def scatter_sum(part: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
    """Fill `part` with this rank's part of the sum of all ranks' `whole`."""
    getattr(dist, SCATTER)(part, whole, group=group)


def on_gpu(tensor: torch.Tensor) -> bool:
    """True for a tensor on a GPU, and for one that stands for such a tensor in a rehearsal."""
    return tensor.is_cuda or _rehearsed is not None


def torch_release() -> tuple[int, int]:
    """Major and minor version of torch; 2.10.0a0 of a vendor's container counts as 2.10."""
    major, minor = re.findall(r"\d+", torch.__version__)[:2]
    return int(major), int(minor)


CUDA_ARCHITECTURES = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell"}
"""Architecture by major compute capability."""
MINOR_ARCHITECTURES = {(7, 5): "turing", (8, 9): "ada"}
"""Those that share it with another."""
GROUPED_SINCE = {9: (2, 8), 10: (2, 9)}
"""The first torch whose grouped products run in bf16 as one kernel, by major compute capability. On all other GPUs
`torch._grouped_mm` goes expert by expert, and waits for the host to read where each begins (GroupedBlas.cpp)."""
ROCM_ARCHITECTURES = {"gfx90a": "cdna2", "gfx942": "cdna3", "gfx950": "cdna4", "gfx1250": "cdna5"}
"""Architecture by compiler target. Compute capability says 9.4 of MI300X, which has nothing to do with Hopper's 9.0."""


@cache
def _cuda(cuda: str | None) -> TorchBuild:
    def takes_groups(device: torch.device) -> bool:
        since = GROUPED_SINCE.get(torch.cuda.get_device_capability(device)[0])
        return since is not None and torch_release() >= since

    def architecture_of(properties: Any) -> str:
        sm = properties.major, properties.minor
        return MINOR_ARCHITECTURES.get(sm) or CUDA_ARCHITECTURES.get(sm[0], f"sm_{sm[0]}{sm[1]}")

    return TorchBuild(
        runtime=f"CUDA {cuda}",
        queues=("CUDA_DEVICE_MAX_CONNECTIONS", "32"),  # 8 by default
        attention={"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION},
        pads_values=False,
        aligns_to_last_key=True,
        windows_since=(0, 0),
        takes_groups=takes_groups,
        architecture_of=architecture_of,
        driver=nvidia_driver,
        state=nvidia_state,
    )


@cache
def _rocm(hip: str) -> TorchBuild:
    """The facts of ROCm builds.

    Flash attention is AOTriton's: its mask is aligned to the first key and values are as wide as keys (torch's
    mha_all_aot.hip, sdp_utils.cpp). It ignores windows before AOTriton 0.10, its log-sum-exp is to base 2 before 0.11
    (ROCm/aotriton#108), which torch has since 2.9. There is no cuDNN. Grouped products run expert by expert, or by
    Composable Kernel, since torch 2.10 (pytorch/pytorch#162419).
    """

    def takes_groups(device: torch.device) -> bool:
        return torch_release() >= (2, 10)

    def architecture_of(properties: Any) -> str:
        return ROCM_ARCHITECTURES.get(properties.gcnArchName.partition(":")[0], "cdna")

    return TorchBuild(
        runtime="ROCm " + ".".join(hip.split(".")[:2]),
        queues=("GPU_MAX_HW_QUEUES", "16"),  # 4 by default
        attention={"flash": SDPBackend.FLASH_ATTENTION},
        pads_values=True,
        aligns_to_last_key=False,
        windows_since=(2, 9),
        takes_groups=takes_groups,
        architecture_of=architecture_of,
        driver=amd_driver,
        state=lambda uuid: {},
    )


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
    """Raise ProbeError if the requested device is missing, or waits for each kernel.

    With CUDA_LAUNCH_BLOCKING a receive that is posted early waits for its sender, which waits for this rank.
    """
    if device == "cpu":
        return
    if not sees_gpu():
        raise ProbeError("--device cuda: torch sees no GPU", "run where there is one, or with --device cpu")
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise ProbeError("CUDA_LAUNCH_BLOCKING: ranks would wait for each other, and kernels for the host", "unset it")
