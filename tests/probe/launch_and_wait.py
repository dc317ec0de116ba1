"""A launcher in a process of its own, for tests that interrupt or kill it: python launch_and_wait.py RUN.json."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import faulty

from planner.probe.launch.launcher import launch
from planner.probe.run import ProbeRun


def main(run: ProbeRun, folder: Path | None = None) -> None:
    """Launch a run that never ends, with its files in `folder`, until a signal ends it."""
    tempfile.tempdir = None if folder is None else str(folder)
    try:
        launch(run, faulty.leaving_its_pid)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(ProbeRun.model_validate_json(Path(sys.argv[1]).read_text()))
