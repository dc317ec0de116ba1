"""Files that `plan probe -o` and `plan observe -o` saved, as calibrations of the hardware."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from planner.cli.probe_file import doubt_device, is_probe, probe_of
from planner.errors import SpecError
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.reading import label, load_yaml, printable
from planner.specs.reading.limits import SAVED

if TYPE_CHECKING:
    from planner.observe.observation import Observed
    from planner.probe.result import ProbeResult
    from planner.trainers.calibration import Calibration

_log = logging.getLogger(__name__)


def read_calibration(path: str, cluster: ClusterSpec, trainer: str) -> Calibration:
    """The calibration of `cluster` by a saved probe, or by a run for a job of `trainer`. What it corrects is logged as
    notes, what was refused or left out as warnings."""
    from planner.observe.saved import is_observed, observed_of

    data, where = load_yaml(path, SAVED), label(path)
    if is_observed(data):
        calibration = _by_run(observed_of(data, where), cluster, trainer, where)
    elif is_probe(data):
        calibration = _by_probe(probe_of(data, where), cluster, where)
    else:
        hint = "save one with plan probe plan.json -o probe.json, or plan observe train.log -o observed.json"
        raise SpecError(f"{where}: is no probe's result, and no observed run", hint)
    for correction in calibration.corrections(cluster.hardware, cluster.tiers):
        log = _log.warning if correction.verdict == "refused" else _log.info
        log("%s: %s: %s", where, correction.name, correction.says)
    return calibration


def _by_probe(result: ProbeResult, cluster: ClusterSpec, where: str) -> Calibration:
    from planner.profile.probe_calibration import from_probe

    calibration = from_probe(result, cluster, where)
    doubt_device(result, cluster.hardware, where)
    for condition in result.conditions:
        _log.warning("%s: %s", where, condition.text)
    return calibration


def _by_run(observed: Observed, cluster: ClusterSpec, trainer: str, where: str) -> Calibration:
    """Raises SpecError where the log names another GPU than the hardware's, or the run teaches nothing."""
    from planner.observe.calibration_by_run import from_run

    refuse_device(observed, cluster.hardware, where)
    calibration = from_run(observed, cluster, where)
    if observed.plan is not None and (its := observed.plan.runtime_spec.family) != trainer:
        _log.warning("%s: is a run of %s: how far it is from its price may not hold for %s", where, its, trainer)
    for warning in calibration.warnings:
        _log.warning("%s: %s", where, warning)
    return calibration


def refuse_device(observed: Observed, hardware: HardwareSpec, where: str) -> None:
    """Raise SpecError where a run's files name another GPU than `hardware`; warn where they name one nobody knows."""
    from planner.probe.verdict.evidence import is_named, objection_to_device

    device = observed.observation.facts.hardware
    if device is None or hardware.architecture == "cpu":
        return
    if (objection := objection_to_device(device, "", hardware)) is not None:
        named = objection[1].partition(", or ")[2]
        raise SpecError(f"{where}: {objection[0]}", named or "observe a run on the GPUs that you plan for")
    if not is_named(hardware, device):
        _log.warning("%s: ran on %s; is that %s?", where, printable(device), hardware.name)
