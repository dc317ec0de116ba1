"""The GPUs of this machine as their drivers' tools list them, without torch."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from planner.doctor.findings import Gpu, Gpus
from planner.probe.verdict.evidence import is_named
from planner.specs.hardware import HardwareSpec
from planner.specs.registry import hardware_names, load_hardware
from planner.specs.units import GIB, MIB

PCI = Path("/sys/bus/pci/devices")
MOST_S = 20.0
"""Seconds that a driver's tool may take."""
_VENDORS = {"0x10de": ("NVIDIA", "nvidia-smi"), "0x1002": ("AMD", "rocm-smi")}
"""Names of PCI vendors, and the tool that comes with their driver."""
_DISPLAY, _ACCELERATOR = "0x03", "0x12"
"""Beginnings of the PCI classes of GPUs."""


def find_gpus() -> Gpus:
    """The GPUs that nvidia-smi or else rocm-smi lists; where neither does, what the PCI bus has, with the trouble."""
    trouble = ""
    for tool, arguments, read in (
        ("nvidia-smi", ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"], _nvidia),
        ("rocm-smi", ["--showproductname", "--showmeminfo", "vram", "--json"], _amd),
    ):
        path = shutil.which(tool)
        if path is None:
            continue
        try:
            ran = subprocess.run([path, *arguments], capture_output=True, text=True, errors="replace", timeout=MOST_S)
            gpus = tuple(read(ran.stdout)) if ran.returncode == 0 else ()
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            trouble = trouble or f"{tool} fails: {type(error).__name__}"
            continue
        if gpus:
            return Gpus(found_by=tool, gpus=gpus)
        said = (ran.stderr or ran.stdout).strip().splitlines()
        trouble = trouble or (f"{tool}: {said[0][:120]}" if ran.returncode and said else f"{tool} lists no GPU")
    on_bus = tuple(_on_bus())
    if on_bus and not trouble:
        trouble = f"{on_bus[0].vendor} on the PCI bus, but no {on_bus[0].tool}: is the driver installed?"
    return Gpus(found_by="PCI bus" if on_bus else "", gpus=tuple(card.gpu for card in on_bus), trouble=trouble)


def profile_of(gpu: Gpu) -> HardwareSpec | None:
    """The shipped profile that is named after the GPU; of several the one whose memory is nearest."""
    named = [profile for profile in map(load_hardware, hardware_names()) if is_named(profile, gpu.name)]
    words = gpu.name.lower()

    def distance(profile: HardwareSpec) -> tuple[float, int]:
        memory_gib = gpu.memory_gib or profile.memory_gib
        spelled = sum(part in words for part in profile.name.split("-"))
        return round(abs(profile.memory_gib / memory_gib - 1), 1), -spelled

    return min(named, key=distance, default=None)


def _nvidia(printed: str) -> Iterator[Gpu]:
    for row in csv.reader(printed.splitlines()):
        if len(row) == 3:
            name, memory_mib, driver = (cell.strip() for cell in row)
            known = memory_mib.replace(".", "", 1).isdigit()  # [N/A] where GPU and host share their memory
            yield Gpu(name=name, memory_gib=float(memory_mib) * MIB / GIB if known else None, driver=driver)


def _amd(printed: str) -> Iterator[Gpu]:
    for card, fields in sorted(json.loads(printed).items()):
        if card.startswith("card") and isinstance(fields, dict):
            told = {str(key).lower(): str(value) for key, value in fields.items()}  # spelled otherwise before ROCm 6
            name = told.get("card series") or told.get("device name") or card
            num_bytes = told.get("vram total memory (b)", "")
            yield Gpu(name=name, memory_gib=int(num_bytes) / GIB if num_bytes.isdigit() else None)


class _Card:
    """A GPU on the PCI bus, and the tool that would say more of it."""

    def __init__(self, vendor: str, device: str) -> None:
        self.vendor, self.tool = _VENDORS[vendor]
        self.gpu = Gpu(name=f"{self.vendor} PCI {vendor[2:]}:{device[2:]}")


def _on_bus() -> Iterator[_Card]:
    for device in sorted(PCI.glob("*")):
        try:
            kind, vendor, number = ((device / name).read_text().strip() for name in ("class", "vendor", "device"))
        except OSError:
            continue
        if kind.startswith((_DISPLAY, _ACCELERATOR)) and vendor in _VENDORS:
            yield _Card(vendor, number)
