"""The GPUs that a probe ran on, held against those that a profile is of, by their names."""

from __future__ import annotations

import re

from planner.specs.hardware import HardwareSpec
from planner.specs.registry import hardware_names, load_hardware

VENDORS = {
    "AMD": {"amd", "instinct", "radeon", "gfx90a", "gfx942", "gfx950"},
    "NVIDIA": {"nvidia", "tesla", "quadro", "geforce"},
}
"""Words of a device's name that tell who made it."""


CARDS = {"pcie", "nvl"}
"""Forms of a GPU, with other clocks and links than it has on a board, that names of devices and of profiles tell."""
SERIES = {"rtx", "pro", "dgx"}
"""First words of names of many GPUs, as numbers are: one of them is told by all words of its name."""
_UNTOLD = re.compile(r"\d+gb|nvlink")
"""Words of a profile's name that no device's name has: its memory and its bridges."""


def is_named(hardware: HardwareSpec, device: str) -> bool:
    """True where the device's own name holds the kind of GPU that the profile is named after (h200 in NVIDIA H200)."""
    return any(_names(name, device) for name in (hardware.name, *hardware.aliases))


def objection_to_device(device: str, torch_version: str, hardware: HardwareSpec) -> tuple[str, str] | None:
    """The reason why seconds of a GPU say nothing about `hardware`, and a hint; None where they may.

    A profile of the user's own may have any name. Its silicon and its vendor have to be those of the GPU.
    """
    if is_named(hardware, device):
        return None
    ours, theirs = "AMD" if hardware.is_amd else "NVIDIA", _vendor(device, torch_version)
    known = hardware_names()
    named = [name for name, aliases in known.items() if any(_names(one, device) for one in (name, *aliases))]
    alike = named or [name for name in known if name.split("-")[0] in _words(device)]
    shipped = [load_hardware(name) for name in alike]
    nearest = max(shipped, key=lambda one: sum(part in device.lower() for part in one.name.split("-")), default=None)
    hint = f"probe on {hardware.name}" + (f", or plan with --hardware {nearest.name}" if nearest else "")
    if theirs is not None and ours != theirs:
        return f"ran on {device}, a GPU of {theirs}; {hardware.name} is {ours}'s", hint
    silicon = sorted({one.architecture for one in shipped})
    if silicon and hardware.architecture.lower() not in silicon:
        return f"ran on {device} ({', '.join(silicon)}); {hardware.name} is {hardware.architecture}", hint
    if shipped and hardware.name in hardware_names():
        return f"ran on {device}, which is another GPU than {hardware.name}", hint
    return None


def _vendor(device: str, torch_version: str) -> str | None:
    if "rocm" in torch_version:
        return "AMD"
    words = _words(device)
    return next((vendor for vendor, known in VENDORS.items() if words & known), None)


def _names(name: str, device: str) -> bool:
    """True if a profile's name is that of a device: h200-sxm-141gb of NVIDIA H200."""
    kind, *rest = name.lower().split("-")
    words = _words(device)
    if kind in SERIES or kind.isdigit():
        return {kind, *(word for word in rest if not _UNTOLD.fullmatch(word))} <= words
    return kind in words and CARDS & words == CARDS & {kind, *rest}


def _words(text: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", text.lower()))
