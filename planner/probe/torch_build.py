"""The build of torch at hand, the device that ranks compute on, and the state of a GPU while it is measured.

CUDA's build is for NVIDIA's GPUs, ROCm's for AMD's, which torch presents as torch.cuda too. What differs between them
is a row here. No other module of the probe or of the profile asks which one it is.

Clocks, power, temperature and who else is on a GPU are as its driver tells: NVIDIA's is asked through nvidia-smi. A GPU
that it does not know, and AMD's, have an empty state.
"""

from __future__ import annotations

import csv
import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from planner.errors import ProbeError
from planner.probe.result import BUSY_FRACTION, DeviceState, When
from planner.probe.run import Device
from planner.specs.base import Fields

SYS, PROC = Path("/sys"), Path("/proc")
MOST_S = 20.0
"""Seconds that nvidia-smi may take; without a persistence daemon it first loads the driver's state."""
UNDER_LOAD_AFTER_S = 0.3
"""Seconds after the start of a step in which the GPU works on it."""
SETTLED_S = 1.5
"""Seconds after which a busy GPU is looked at again: a process that has just ended shows in its average."""
NVIDIA_FIELDS = {
    "clocks.sm": "clock_mhz",
    "clocks.max.sm": "max_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.draw": "power_w",
    "enforced.power.limit": "power_limit_w",
    "power.default_limit": "default_power_limit_w",
    "temperature.gpu": "temperature_c",
    "utilization.gpu": "busy_fraction",
}
"""nvidia-smi's names of fields, and ours."""
NVIDIA_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The bits of reasons, by their name since driver 535 and by their older one."""
REASONS = {
    0x002: "applications clocks setting",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clock setting",
}
"""NVML's bits (nvml.h, nvmlClocksEventReasons); 0x1 is idleness."""


def nvidia_state(uuid: str) -> Fields:
    """The state of the GPU with this id, as nvidia-smi reports it."""
    chosen = f"--id={uuid if uuid.startswith(('GPU-', 'MIG-')) else f'GPU-{uuid}'}"
    for reasons in NVIDIA_REASONS:
        rows = nvidia_rows(chosen, f"--query-gpu={','.join((*NVIDIA_FIELDS, reasons))}")
        if rows is None:  # a driver that does not answer is not asked again
            return {}
        for values in rows:
            if len(values) == len(NVIDIA_FIELDS) + 1:  # else an error about a name that this driver does not know
                processes = nvidia_rows(chosen, "--query-compute-apps=pid,process_name,used_gpu_memory") or []
                return _nvidia_fields(values) | _others(
                    [(row[0], ",".join(row[1:-1]), _number(row[-1])) for row in processes if row[0].isdigit()]
                )
    return {}


def nvidia_driver() -> str:
    """The version of NVIDIA's driver; empty where it does not say."""
    rows = nvidia_rows("--query-gpu=driver_version")
    return rows[0][0] if rows else ""


def nvidia_rows(*asked: str) -> list[list[str]] | None:
    """The rows that nvidia-smi prints; None where there is no such tool, or no answer in time."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, *asked, "--format=csv,noheader,nounits"]
    try:  # names of processes may be in any encoding
        ran = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=MOST_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [[cell.strip() for cell in row] for row in csv.reader(ran.stdout.splitlines()) if row]


def _nvidia_fields(values: list[str]) -> Fields:
    state = dict(zip(NVIDIA_FIELDS.values(), map(_number, values), strict=False))
    busy_percent = state["busy_fraction"]
    state["busy_fraction"] = None if busy_percent is None else busy_percent / 100
    return {**state, "throttle_reasons": tuple(_reasons(values[-1]))}


def _number(text: str) -> float | None:
    """A number of nvidia-smi, which writes [N/A] or [Not Supported] where it has none."""
    try:
        return float(text)
    except ValueError:
        return None


def _reasons(bits: str) -> Iterator[str]:
    with suppress(ValueError):
        active = int(bits, 16)
        yield from (reason for bit, reason in REASONS.items() if active & bit)


def amd_driver() -> str:
    """The version of AMD's driver; empty for the one that comes with the kernel, which has none of its own."""
    return _text(SYS / "module/amdgpu/version")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _others(processes: list[tuple[str, str, float | None]]) -> Fields:
    """The processes on a GPU (number, name, MiB) that are not of this run: neither this one, nor the one that started
    it, nor another that the same one has started.

    In a container the driver may give numbers of the host. Where this process computes and is not listed, nobody can be
    told from it.
    """
    launcher = multiprocessing.parent_process()
    own = {os.getpid(), os.getppid(), *(() if launcher is None else (launcher.pid,))}
    is_rank = launcher is not None or "RANK" in os.environ  # else a shell has started it, and perhaps another job
    siblings_of = str(os.getppid()) if is_rank else ""
    others = [row for row in processes if int(row[0]) not in own and _parent(row[0]) != siblings_of]
    held = [mib for _, _, mib in others if mib is not None]
    return {
        "other_processes": tuple(f"{Path(name).name or 'process'} ({pid})" for pid, name, _ in others),
        "other_bytes": round(sum(held) * 2**20) if held else None,
        "lists_this": any(int(pid) == os.getpid() for pid, _, _ in processes),
        "lists_run": len(others) < len(processes),
    }


def _parent(pid: str) -> str:
    """The number of a process's parent."""
    status = dict(line.split(":", 1) for line in _text(PROC / pid / "status").splitlines() if ":" in line)
    return status.get("PPid", "none").strip()


def state_of(fields: Fields, when: When) -> DeviceState:
    """The state that a driver's answer describes; `lists_this` of this process, `lists_run` of any of this run."""
    if when != "before" and not fields.get("lists_this"):
        fields = fields | {"other_processes": (), "other_bytes": None}
    if when == "before" and fields.get("lists_run") and not fields.get("other_processes"):
        fields = fields | {"busy_fraction": None}  # by ranks that share it
    return DeviceState(when=when, **{name: value for name, value in fields.items() if not name.startswith("lists_")})


class Monitor:
    """Looks at one GPU before, within and after a run."""

    def __init__(self, ask: Callable[[], Fields] | None = None) -> None:
        """`ask` gives the driver's answer, and nothing where the driver does not say."""
        self.ask, self.states = ask, list[DeviceState]()
        self._under_load: threading.Thread | None = None

    def before(self) -> None:
        """Look at the GPU on which this run has not begun to compute."""
        fields = self.ask() if self.ask else {}
        if self.ask and (fields.get("busy_fraction") or 0.0) > BUSY_FRACTION:
            time.sleep(SETTLED_S)
            fields = self.ask()
        self._keep(fields, "before")
        if not fields:
            self.ask = None

    def begin_load(self) -> None:
        """Look at the GPU soon, while it computes; the caller goes on."""
        if self.ask and self._under_load is None:
            self._under_load = threading.Thread(target=self._look_within, daemon=True)
            self._under_load.start()

    def _look_within(self) -> None:
        time.sleep(UNDER_LOAD_AFTER_S)
        self._keep(self.ask() if self.ask else {}, "within")

    def after(self) -> None:
        """Look at the GPU that has just computed."""
        if self._under_load is not None:
            self._under_load.join(2 * MOST_S)
        if self.ask:
            self._keep(self.ask(), "after")

    def _keep(self, fields: Fields, when: When) -> None:
        if fields:
            self.states.append(state_of(fields, when))


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
    """Flash attention's causal mask lets the last query see the last key where keys outnumber queries."""
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
    """A GPU's monitor, which has taken its first sample."""
    monitor = Monitor(partial(this_build().state, str(torch.cuda.get_device_properties(number).uuid)))
    monitor.before()
    return monitor


_rehearsed: TorchBuild | None = None
"""The build whose kernels a rehearsal without a GPU stands for."""


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
GROUPED = (9, 10)
"""Major compute capabilities whose grouped products run in bf16 as one kernel. On all other GPUs `torch._grouped_mm`
goes expert by expert, and waits for the host to read where each begins (GroupedBlas.cpp)."""
ROCM_ARCHITECTURES = {"gfx90a": "cdna2", "gfx942": "cdna3", "gfx950": "cdna4", "gfx1250": "cdna5"}
"""Architecture by compiler target. Compute capability says 9.4 of MI300X, which has nothing to do with Hopper's 9.0."""


@cache
def _cuda(cuda: str | None) -> TorchBuild:
    def takes_groups(device: torch.device) -> bool:
        return torch.cuda.get_device_capability(device)[0] in GROUPED

    def architecture_of(properties: Any) -> str:
        sm = properties.major, properties.minor
        return MINOR_ARCHITECTURES.get(sm) or CUDA_ARCHITECTURES.get(sm[0], f"sm_{sm[0]}{sm[1]}")

    return TorchBuild(
        runtime=f"CUDA {cuda}",
        queues=("CUDA_DEVICE_MAX_CONNECTIONS", "32"),  # 8 by default
        attention={"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION},
        pads_values=False,
        aligns_to_last_key=True,
        takes_groups=takes_groups,
        architecture_of=architecture_of,
        driver=nvidia_driver,
        state=nvidia_state,
    )


@cache
def _rocm(hip: str) -> TorchBuild:
    """The facts of ROCm builds.

    Flash attention is AOTriton's: its mask is aligned to the first key and values are as wide as keys (torch's
    mha_all_aot.hip, sdp_utils.cpp). There is no cuDNN. Grouped products run expert by expert, or by
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


OLDEST = (2, 9)
"""The oldest torch that ranks run on: its fully_shard sums gradients, its norms are one kernel, and ROCm's flash
attention honours windows (AOTriton 0.11)."""


def require_gpu(device: Device) -> None:
    """Raise ProbeError if torch is too old, or the requested device is missing, or waits for each kernel.

    With CUDA_LAUNCH_BLOCKING a receive that is posted early waits for its sender, which waits for this rank.
    """
    if torch_release() < OLDEST:
        raise ProbeError(f"torch {torch.__version__} is too old", "install torch 2.9 or newer")
    if device == "cpu":
        return
    if not sees_gpu():
        raise ProbeError("--device cuda: torch sees no GPU", "run where there is one, or with --device cpu")
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise ProbeError("CUDA_LAUNCH_BLOCKING: ranks would wait for each other, and kernels for the host", "unset it")
