"""Short runs of a plan and of its next best layouts, each in its own folder, and the script that ranks their logs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.export import Bundle, bundle_of
from planner.export.launch.launchers import LAUNCH, promised
from planner.export.refusal import Inexpressible
from planner.files import FolderFile, write_folder

RANK, RUN, LIST = "rank_trials.py", "run_trials.sh", "trials.json"


_STEPS = {"torchtitan": " --training.steps 20"}
"""Options that end a run soon."""


@dataclass(frozen=True, slots=True)
class ShortRun:
    """One layout with the files that run it."""

    folder: str
    plan: Plan
    bundle: Bundle
    command: str
    """The command of the short run, in the trial's folder."""


def trials_of(
    plans: Sequence[Plan], to: str | Iterable[str], image: str | None, force: bool = False
) -> tuple[list[ShortRun], list[str]]:
    """The trials of a plan, which comes first, and of its alternatives; and notes on those that the target cannot run.

    Raises SpecError where a target has nothing to start.
    """
    trials: list[ShortRun] = []
    notes: list[str] = []
    for number, plan in enumerate(plans):
        try:
            bundle = bundle_of(plan, to, image, force)
        except Inexpressible as error:
            if not number:
                raise
            notes.append(f"{plan.parallelism} is no trial: {error.message}")
            continue
        command = bundle.first_run or _short_run(bundle)
        if not command:
            raise SpecError(
                f"--trials: {bundle.targets[0]} starts nothing by itself", "your own script trains: time it"
            )
        trials.append(ShortRun(f"trial-{number}", plan, bundle, command))
    return trials, notes


def _short_run(bundle: Bundle) -> str:
    """The launcher with a few steps, for a target whose files name no first run; nothing where none starts."""
    if LAUNCH not in {file.name for file in bundle.files}:
        return ""
    return f"bash {LAUNCH}{_STEPS.get(bundle.targets[0], '')}"


def write_trials(trials: Sequence[ShortRun], folder: Path, force: bool) -> list[Path]:
    """Write every trial into its folder, and beside them what runs and ranks them. The paths of all files."""
    rank = files("planner.export.launch").joinpath("node_check.py").read_text(encoding="utf-8")
    rows = json.dumps({"trials": [_row(trial) for trial in trials]}, indent=2) + "\n"
    together = [
        *(file for trial in trials for file in trial.bundle.folder_files(trial.folder)),
        FolderFile(LIST, rows.encode()),
        FolderFile(RANK, rank.encode(), executable=True),
        FolderFile(RUN, _run(trials).encode(), executable=True),
    ]
    return write_folder(folder, together, force)


def _row(trial: ShortRun) -> dict[str, Any]:
    """The facts about a trial that the ranking script needs."""
    return {"folder": trial.folder, **promised(trial.plan), "first_run": trial.command}


def _run(trials: Sequence[ShortRun]) -> str:
    """A script that starts the trials one after the other on this node's part of the cluster."""
    lines = [
        "#!/usr/bin/env bash",
        "# each trial's first run, one after the other; run this on every node as its launcher asks, or submit each",
        "# trial's own launcher and put what it prints into its folder",
        "set -uo pipefail",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
    ]
    for trial in trials:
        lines += [
            f"echo {trial.folder}: predicted {trial.plan.step.step_s:.3f} s a step",
            f'(cd {trial.folder} && {trial.command} "$@") > {trial.folder}/first_run.log 2>&1'
            f' || echo "{trial.folder} failed: see {trial.folder}/first_run.log"',
        ]
    return "\n".join([*lines, f"python3 {RANK} ."]) + "\n"
