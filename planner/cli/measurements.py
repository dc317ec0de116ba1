"""Measurements of a user, applied to a job: saved probes and observed runs as calibrations, and the runs kept."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from planner.errors import SpecError
from planner.saved import as_saved
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.problems import checked
from planner.specs.reading import printable, read_saved

if TYPE_CHECKING:
    from planner.observe.observation import Observed
    from planner.probe.result import ProbeResult
    from planner.specs.base import Fields
    from planner.trainers.calibration import Calibration
    from planner.trainers.spec import RuntimeSpec

_log = logging.getLogger(__name__)
_NOT_EDITED = "measurements are not for editing: run plan probe plan.json -o probe.json again"


def read_probe(path: str) -> ProbeResult:
    """The probe's result in a file, `-` for stdin; SpecError where the file holds none."""
    data, where = read_saved(path)
    if not is_probe(data):
        raise SpecError(f"{where}: is no probe's result", "save one with plan probe plan.json -o probe.json")
    return probe_of(data, where)


def is_probe(data: Fields) -> bool:
    """True if what a file held is a probe's result."""
    return {"comparisons", "run", "ranks"} <= data.keys()


def probe_of(data: Fields, where: str) -> ProbeResult:
    """The probe's result in what a file held; SpecError where a field is wrong, or was edited."""
    from planner.probe.result import ProbeResult

    return checked(ProbeResult, as_saved(data, where, _NOT_EDITED), where)


def doubt_device(result: ProbeResult, hardware: HardwareSpec, where: str) -> None:
    """Warn where GPUs that ran are not named as the hardware is."""
    from planner.probe.evidence import is_named

    if result.ranks and not is_named(hardware, result.device):
        _log.warning("%s: ran on %s; is that %s?", where, printable(result.device), hardware.name)


def read_calibration(path: str, cluster: ClusterSpec, trainer: str) -> Calibration:
    """The calibration of `cluster` by a saved probe, or by a run for a job of `trainer`. What it corrects is logged as
    notes, what was refused or left out as warnings."""
    from planner.observe.judge import is_observed, observed_of

    data, where = read_saved(path)
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
    from planner.probe.evidence import is_named, objection_to_device

    device = observed.observation.facts.hardware
    if device is None or hardware.architecture == "cpu":
        return
    if (objection := objection_to_device(device, "", hardware)) is not None:
        named = objection[1].partition(", or ")[2]
        raise SpecError(f"{where}: {objection[0]}", named or "observe a run on the GPUs that you plan for")
    if not is_named(hardware, device):
        _log.warning("%s: ran on %s; is that %s?", where, printable(device), hardware.name)


def with_history(cluster: ClusterSpec, runtime: RuntimeSpec, said: set[str] | None = None) -> ClusterSpec:
    """`cluster` corrected by the runs that are kept of it and of the trainer; as it is where none are.

    What was said once of a command with many jobs stands in `said`, and is not said again.
    """
    from planner.observe import default_folder

    folder = default_folder()
    if folder is None or not os.path.isdir(folder):
        return cluster
    from planner.observe.history import calibration_of, price_of_file, prices_of, runs_of, said_of

    prices = prices_of(folder, price_of_file)
    said = set() if said is None else said
    _say_once(logging.WARNING, said_of(prices.left_out, folder), said)
    known = calibration_of(runs_of(prices, cluster, runtime), cluster, folder)
    if known is None:
        return cluster
    calibration, found = known
    for correction in calibration.corrections(cluster.hardware, cluster.tiers):
        runs = f"{found.num_runs} {'run' if found.num_runs == 1 else 'runs'} of yours"
        text = f"{printable(str(folder))}: {correction.brief} by {runs}; --no-history leaves them out"
        _say_once(logging.INFO, text, said)
    return calibration.of_cluster(cluster)


def _say_once(level: int, text: str, said: set[str]) -> None:
    if text and text not in said:
        said.add(text)
        _log.log(level, "%s", text)
