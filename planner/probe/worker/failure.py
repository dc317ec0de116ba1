"""A rank that fails: what its exception means, and the file that tells the launcher."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from planner.errors import PlannerError
from planner.files import write_text
from planner.probe.result import Failure, FailureKind, MeasuredRun, OutOfMemory
from planner.probe.run import ProbeRun
from planner.probe.worker.files import FAILURE_FILE
from planner.probe.worker.worker import Worker

EXIT_FAILED = 5
HINTS = {
    "host_memory": "this machine's memory is too small; on the CPU a smaller --scale or fewer --processes take less",
    "lost_peer": "the other ranks say more",
}
"""The hint for each kind of failure that has one."""
NO_MEMORY = ("CUDA error: out of memory", "HIP error: out of memory", "STATUS_ALLOC_FAILED")
"""Texts by which the driver, cuBLAS, hipBLAS and cuDNN say that a GPU's memory is used up; torch raises its own
error."""
NO_HOST_MEMORY = "can't allocate memory"
"""Text by which torch's allocator says that the host's memory is used up; the plan does not predict host memory."""
LOST_PEER = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError", "remote process exited",
    "ommunicator was aborted",
)  # fmt: skip
"""Texts by which gloo and NCCL (RCCL has NCCL's) say that a peer is gone."""


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
    first_line = f"{type(error).__name__}: {error}".splitlines()[0][:500]
    return Failure(
        rank=rank,
        stage=0 if run is None else run.place(rank).pp,
        phase=phase,
        kind=kind_of(error),
        message=first_line,
        traceback="".join(traceback.format_exception(error)),
        time_s=time.monotonic(),
        asked_bytes=asked_bytes(str(error)),
    )


def kind_of(error: BaseException) -> FailureKind:
    """The kind of failure that an exception means."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(message in text for message in NO_MEMORY):
        return "out_of_memory"
    if isinstance(error, MemoryError) or NO_HOST_MEMORY in text:
        return "host_memory"
    return "lost_peer" if any(message in text for message in LOST_PEER) else "error"


def out_of_memory_result(run: ProbeRun, failure: Failure) -> MeasuredRun:
    """The result of a run in which a GPU ran out of memory."""
    fields = failure.model_dump(include=set(OutOfMemory.model_fields))
    return MeasuredRun(run=run, ranks=(), out_of_memory=OutOfMemory(**fields))


def asked_bytes(message: str) -> int | None:
    """The bytes that an allocator was asked for, from its message: `Tried to allocate 2.50 GiB`, `you tried to allocate
    1024 bytes`."""
    match = re.search(r"ried to allocate ([0-9.]+) ?(bytes|KiB|MiB|GiB)", message)
    if match is None:
        return None
    return round(float(match[1]) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2]])
