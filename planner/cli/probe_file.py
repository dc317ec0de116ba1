"""Files that `plan probe -o` saved, read back as results."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from planner.errors import SpecError
from planner.saved import as_saved
from planner.specs.hardware import HardwareSpec
from planner.specs.problems import checked
from planner.specs.reading import label, load_yaml, printable
from planner.specs.reading.limits import SAVED

if TYPE_CHECKING:
    from planner.probe.result import ProbeResult

_log = logging.getLogger(__name__)
_HINT = "measurements are not for editing: run plan probe plan.json -o probe.json again"


def read_probe(path: str) -> ProbeResult:
    """The probe's result in a file, `-` for stdin; SpecError where the file holds none."""
    data, where = load_yaml(path, SAVED), label(path)
    if not is_probe(data):
        raise SpecError(f"{where}: is no probe's result", "save one with plan probe plan.json -o probe.json")
    return probe_of(data, where)


def is_probe(data: dict[str, Any]) -> bool:
    """True if what a file held is a probe's result."""
    return {"comparisons", "run", "ranks"} <= data.keys()


def probe_of(data: dict[str, Any], where: str) -> ProbeResult:
    """The probe's result in what a file held; SpecError where a field is wrong, or was edited."""
    from planner.probe.result import ProbeResult

    return checked(ProbeResult, as_saved(data, where, _HINT), where)


def doubt_device(result: ProbeResult, hardware: HardwareSpec, where: str) -> None:
    """Warn where GPUs that ran are not named as the hardware is."""
    from planner.probe.verdict.evidence import is_named

    if result.ranks and not is_named(hardware, result.device):
        _log.warning("%s: ran on %s; is that %s?", where, printable(result.device), hardware.name)
