"""A launcher in a process of its own, for tests that interrupt or kill it: python launch_and_wait.py RUN.json."""

from __future__ import annotations

import sys
from pathlib import Path

import faulty

from planner.probe.launch.launcher import launch
from planner.probe.run import ProbeRun

if __name__ == "__main__":
    try:
        launch(ProbeRun.model_validate_json(Path(sys.argv[1]).read_text()), faulty.leaving_its_pid)
    except KeyboardInterrupt:
        sys.exit(130)
