"""What `plan probe -o` saved, read back; and what it says of the hardware, as a calibration."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from planner.errors import SpecError
from planner.specs.checking import checked
from planner.specs.cluster import ClusterSpec, HardwareSpec
from planner.specs.reading import label, load_yaml

if TYPE_CHECKING:
    from planner.probe.result import ProbeResult
    from planner.trainers.calibration import Calibration

_log = logging.getLogger(__name__)
MAX_BYTES = 2**28
"""Every action of every rank is in the file."""


def read_probe(path: str) -> ProbeResult:
    """The probe's result in a file, `-` for stdin; SpecError where the file holds none."""
    from planner.probe.result import ProbeResult

    data, where = load_yaml(path, MAX_BYTES), label(path)
    if not {"comparisons", "run", "ranks"} <= data.keys():
        raise SpecError(f"{where}: is no probe's result", "save one with plan probe plan.json -o probe.json")
    return checked(ProbeResult, data, where)


def read_calibration(path: str, cluster: ClusterSpec) -> Calibration:
    """What a saved probe measured beyond the profile of `cluster`, told as notes line by line."""
    from planner.profile.probe_calibration import from_probe

    result = read_probe(path)
    calibration = from_probe(result, cluster, label(path))
    doubt_device(result, cluster.hardware, label(path))
    for line in calibration.in_words():
        _log.info("%s: %s", label(path), line)
    return calibration


def doubt_device(result: ProbeResult, hardware: HardwareSpec, where: str) -> None:
    """Warn where GPUs that ran are not named as the hardware is."""
    if result.ranks and not _is_named(hardware, result.device):
        _log.warning("%s: ran on %s; is that %s?", where, result.device, hardware.name)


def _is_named(hardware: HardwareSpec, device: str) -> bool:
    """Whether the device's own name has the kind of GPU in it that the profile is named after (h200 in NVIDIA H200)."""
    words = set(re.split(r"[^a-z0-9]+", device.lower()))
    return any(name.lower().split("-")[0] in words for name in (hardware.name, *hardware.aliases))
