"""A rank that fails: the record of its exception, and the file that tells the launcher."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from planner.errors import PlannerError
from planner.files import write_text
from planner.probe.result import Failure, MeasuredRun, OutOfMemory
from planner.probe.run import ProbeRun
from planner.probe.worker.failure_kinds import asked_bytes, kind_of, message_of
from planner.probe.worker.files import FAILURE_FILE
from planner.probe.worker.worker import Worker

EXIT_FAILED = 5


def run_worker(make: Callable[[], Worker], folder: Path, rank: int) -> Failure | None:
    """Run one rank to its end. Returns its failure, which is also written into the folder, or None."""
    worker: Worker | None = None
    try:
        worker = make()
        worker.main()
    except Exception as error:
        phase = "start" if worker is None else str(worker.status)
        failure = failure_of(error, rank, None if worker is None else worker.run, phase)
        if worker is not None:
            worker.status.at(failure.message)  # the status file has its space already
        with suppress(PlannerError):  # a full disk: the launcher still has the log
            write_text(folder / FAILURE_FILE.format(rank), failure.model_dump_json(), force=True)
        return failure
    return None


def failure_of(error: BaseException, rank: int, run: ProbeRun | None, phase: str) -> Failure:
    """The record of an exception, as the launcher reads it from a file."""
    return Failure(
        rank=rank,
        stage=0 if run is None else run.place(rank).pp,
        phase=phase,
        kind=kind_of(error),
        message=message_of(error),
        traceback="".join(traceback.format_exception(error)),
        time_s=time.monotonic(),
        asked_bytes=asked_bytes(str(error)),
    )


def out_of_memory_result(run: ProbeRun, failure: Failure) -> MeasuredRun:
    """The result of a run in which a GPU ran out of memory."""
    fields = failure.model_dump(include=set(OutOfMemory.model_fields))
    return MeasuredRun(run=run, ranks=(), out_of_memory=OutOfMemory(**fields))
