"""The watch over a rank that no launcher watches: a thread that ends the process when the rank makes no progress."""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import threading
from pathlib import Path

from planner.probe.run import ProbeRun
from planner.probe.worker.failure import EXIT_FAILED
from planner.probe.worker.files import STATUS_FILE
from planner.probe.worker.status import read_status


def watch_progress(run: ProbeRun, folder: Path, rank: int, done: threading.Event) -> None:
    """End the process, stacks first, when its rank makes no progress."""
    while not done.wait(min(1.0, run.timeout_s / 4)):
        progress = read_status(folder / STATUS_FILE.format(rank))
        if progress is not None and progress.stands_still(run.timeout_s):
            name = f"rank {rank} ({run.place(rank)})"
            sys.stderr.write(f"error: {name} hangs in {progress}: no progress for {run.timeout_s:g} s\n")
            sys.stderr.write("hint: its stacks follow; --timeout gives slow ranks longer\n")
            sys.stderr.flush()
            faulthandler.dump_traceback(all_threads=True)
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(EXIT_FAILED)
