"""Measurements of a user, applied to a job: saved probes and observed runs as calibrations, and the runs kept.

`plan validate --add` keeps one, and says what all of its cluster and trainer ask for.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import PlannerError, SpecError
from planner.saved import as_saved
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.problems import checked
from planner.specs.reading import SAVED, label, load_yaml, printable

if TYPE_CHECKING:
    from rich.table import Table

    from planner.observe.history import KeptPrice, KernelPosterior
    from planner.observe.observation import Observed
    from planner.probe.result import ProbeResult
    from planner.trainers.calibration import Calibration
    from planner.trainers.spec import RuntimeSpec

_log = logging.getLogger(__name__)
_NOT_EDITED = "measurements are not for editing: run plan probe plan.json -o probe.json again"


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
    from planner.observe.history import calibration_of, prices_of, runs_of, said_of

    prices = prices_of(folder, _priced)
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


def _priced(path: Path) -> KeptPrice:
    from planner.observe.history import price_of_file

    return price_of_file(path)


def _say_once(level: int, text: str, said: set[str]) -> None:
    if text and text not in said:
        said.add(text)
        _log.log(level, "%s", text)


def add_run(path: str, folder: str | None, as_json: bool) -> None:
    """Keep an observed run in the folder of the user's runs, and show those of its cluster and trainer."""
    from planner.cli.output import dumps, show
    from planner.observe.history import (
        belongs_to,
        calibration_of,
        keep,
        kept_run,
        name_of,
        price_of,
        price_of_file,
        prices_of,
        runs_of,
        said_of,
        text_of,
    )
    from planner.observe.judge import read_observed

    where, place = label(path), _folder(folder)
    observed = read_observed(path)
    run, left_out = kept_run(observed, where)
    cluster, runtime, name = run.plan.cluster, run.plan.runtime_spec, name_of(observed)
    refuse_device(observed, cluster.hardware, where)
    price_of(run, where)  # a run that teaches nothing is refused before anything is written
    is_new = keep(place, name, text_of(run))
    prices = prices_of(place, price_of_file)
    for sentence in (*(f"{where}: {text}" for text in left_out), said_of(prices.left_out, place)):
        if sentence:
            _log.warning("%s", sentence)
    kept = runs_of(prices, cluster, runtime)
    known = calibration_of(kept, cluster, place)
    if known is None:
        raise PlannerError(f"{place}: the run is gone again", "add it once more")
    belongs = belongs_to(cluster, runtime)
    if as_json:
        sys.stdout.write(dumps(_described(place, name, is_new, belongs, kept, known[1])))
        return
    show(_table(kept, name), "", *_sentences(place, name, is_new, belongs, known[1]))


def _folder(given: str | None) -> Path:
    from planner.observe import VARIABLE, folder_of

    folder = folder_of(given)
    if folder is None:
        raise SpecError("--history: there is no home folder to keep runs in", f"--history DIR, or {VARIABLE}=DIR")
    return folder


def _described(
    folder: Path, name: str, is_new: bool, belongs: str, kept: Sequence[KeptPrice], found: KernelPosterior
) -> dict[str, Any]:
    runs = [
        {
            "file": run.file, "source": run.source, "job": run.job, "measured_step_s": run.measured_s,
            "predicted_step_s": run.predicted_s, "kernels_log_factor": run.log_kernels,
        }
        for run in kept
    ]  # fmt: skip
    correction = {
        "kernels_factor": found.factor, "kernels_factor_interval": found.factor_interval,
        "step_width": found.step_width, "num_runs": found.num_runs, "num_jobs": found.num_jobs,
    }  # fmt: skip
    return {
        "history": str(folder), "added": name, "is_new": is_new, "cluster_and_trainer": belongs, "runs": runs,
        "correction": correction,
    }  # fmt: skip


def _table(kept: Sequence[KeptPrice], added: str) -> Table:
    from planner.report.format import seconds
    from planner.report.pieces import columns

    table = columns("wrrr")
    table.add_row("run", "measured", "predicted", "error", style="dim")
    for run in sorted(kept, key=lambda run: (run.job, run.source, run.file)):
        error = f"{100 * (run.predicted_s / run.measured_s - 1):+.1f}%"
        style = "bold" if run.file == added else None
        name = f"{printable(run.source, 40)}: {printable(run.job)}"
        table.add_row(name, seconds(run.measured_s), seconds(run.predicted_s), error, style=style)
    return table


def _sentences(folder: Path, name: str, is_new: bool, belongs: str, found: KernelPosterior) -> list[str]:
    from planner.observe import VARIABLE, default_folder

    low, high = found.factor_interval
    runs = f"{found.num_runs} {'run' if found.num_runs == 1 else 'runs'}"
    jobs = f"{found.num_jobs} {'job' if found.num_jobs == 1 else 'jobs'}"
    scatter = f", whose jobs lie {found.scatter:.1f} times as far apart as published ones" if found.scatter > 1 else ""
    path = printable(str(folder / name))
    return [
        f"{belongs}: kernels take × {found.factor:.3f} ({low:.3f} to {high:.3f}) by {runs} of {jobs}{scatter}",
        f"every later plan of such a job takes it, a dense step within ± {found.step_width:.0%}; --no-history does not"
        if folder == default_folder()
        else f"plans of such a job take it where {VARIABLE}={printable(str(folder))}",
        f"{'kept as' if is_new else 'was there already:'} {path}; rm forgets it",
    ]
