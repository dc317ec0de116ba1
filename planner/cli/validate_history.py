"""`plan validate --add`: a run of one's own is kept, and what all kept runs of its cluster and trainer ask for."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import PlannerError, SpecError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from planner.observe.history import KeptPrice, KernelPosterior

_log = logging.getLogger(__name__)


def add_run(path: str, folder: str | None, as_json: bool) -> None:
    """Keep an observed run in the folder of the user's runs, and show those of its cluster and trainer."""
    from planner.cli.measurements import refuse_device
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
    from planner.specs.reading import label

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
    from planner.observe.history_place import VARIABLE, default_folder

    folder = Path(given) if given else default_folder()
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
    from planner.specs.reading import printable

    table = columns(None, *"rrr")
    table.add_row("run", "measured", "predicted", "error", style="dim")
    for run in sorted(kept, key=lambda run: (run.job, run.source, run.file)):
        error = f"{100 * (run.predicted_s / run.measured_s - 1):+.1f}%"
        style = "bold" if run.file == added else None
        name = f"{printable(run.source, 40)}: {printable(run.job)}"
        table.add_row(name, seconds(run.measured_s), seconds(run.predicted_s), error, style=style)
    return table


def _sentences(folder: Path, name: str, is_new: bool, belongs: str, found: KernelPosterior) -> list[str]:
    from planner.observe.history_place import VARIABLE, default_folder
    from planner.specs.reading import printable

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
