"""A worker in a process of its own: its log, its stacks, and the file that says why it failed."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from planner.errors import PlannerError
from planner.files import write_text
from planner.probe.result import Failure, Kind, Measured, OutOfMemory
from planner.probe.run import ProbeRun
from planner.probe.worker.worker import Worker

FAILURE_FILE, STACK_FILE, LOG_FILE = "rank{}.failure.json", "rank{}.stack", "rank{}.log"
EXIT_FAILED = 5
HINTS = {
    "host_memory": "this machine's memory is too small; on the CPU a smaller --scale or fewer --processes take less",
    "lost_peer": "the other ranks say more",
}
"""By the kind of a failure."""
NO_MEMORY = ("CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""What else than torch's own error says so of a GPU: the driver, cuBLAS and cuDNN."""
NO_HOST_MEMORY = "can't allocate memory"
"""What torch's allocator says of the host's, about which a plan says nothing."""
LOST_PEER = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "ncclRemoteError", "remote process exited",
    "ommunicator was aborted",
)  # fmt: skip
"""What gloo and NCCL say of a peer that is gone."""


def attempt(make: Callable[[], Worker], folder: Path, rank: int) -> Failure | None:
    """Run one rank; what went wrong, also written into the folder, or None."""
    worker: Worker | None = None
    try:
        worker = make()
        worker.main()
    except Exception as error:
        where = "start" if worker is None else str(worker.status)
        failure = failure_of(error, rank, None if worker is None else worker.run, where)
        if worker is not None:
            worker.status.at(failure.message)  # the status file has its space already
        with suppress(PlannerError):  # a full disk: the launcher still has the log
            write_text(folder / FAILURE_FILE.format(rank), failure.model_dump_json(), force=True)
        return failure
    return None


def child(folder: Path, rank: int, local_rank: int) -> None:
    """One of all the ranks of a run, as a process of its own."""
    in_its_own_process(lambda: Worker(folder, rank, local_rank, local=True), folder, rank)


def in_its_own_process(make: Callable[[], Worker], folder: Path, rank: int) -> None:
    """Run a worker beside its launcher and end the process: it outlives neither Ctrl-C there nor the launcher's end."""
    os.setsid()
    threading.Thread(target=_die_with_launcher, daemon=True).start()
    try:
        log = os.open(folder / LOG_FILE.format(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        stack = (folder / STACK_FILE.format(rank)).open("w")
    except FileNotFoundError:  # interrupted while this process was on its way, the launcher has cleared up already
        os._exit(EXIT_FAILED)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    failure = attempt(make, folder, rank)
    with suppress(OSError):  # a full disk
        print("" if failure is None else failure.traceback, flush=True)
    os._exit(0 if failure is None else EXIT_FAILED)  # threads of a lost process group must not hold the process back


def _die_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        multiprocessing.connection.wait([launcher.sentinel])
        os._exit(EXIT_FAILED)


def failure_of(error: BaseException, rank: int, run: ProbeRun | None, where: str) -> Failure:
    """An exception as the file that the launcher reads."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:500]
    return Failure(
        rank=rank,
        stage=0 if run is None else run.place(rank).pp,
        phase=where,
        kind=kind_of(error),
        message=text,
        traceback="".join(traceback.format_exception(error)),
        time_s=time.monotonic(),
        asked_bytes=asked_bytes(str(error)),
    )


def kind_of(error: BaseException) -> Kind:
    """What an exception says is missing."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or any(sign in text for sign in NO_MEMORY):
        return "out_of_memory"
    if isinstance(error, MemoryError) or NO_HOST_MEMORY in text:
        return "host_memory"
    return "lost_peer" if any(sign in text for sign in LOST_PEER) else "error"


def ran_out(run: ProbeRun, failure: Failure) -> Measured:
    """The result of a run that a GPU had no memory for."""
    fields = failure.model_dump(include=set(OutOfMemory.model_fields))
    return Measured(run=run, ranks=(), out_of_memory=OutOfMemory(**fields))


def asked_bytes(message: str) -> int | None:
    """What an allocator says it was asked for: `Tried to allocate 2.50 GiB`, `you tried to allocate 1024 bytes`."""
    match = re.search(r"ried to allocate ([0-9.]+) ?(bytes|KiB|MiB|GiB)", message)
    if match is None:
        return None
    return round(float(match[1]) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2]])
