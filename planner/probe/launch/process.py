"""The process of a rank, which ends with its launcher, and what becomes of one that fails: its meaning, its record."""

from __future__ import annotations

import faulthandler
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from planner.errors import ProbeError
from planner.probe.rank.groups import FAILURE, START_TIMEOUT_S, tcp_store
from planner.probe.rank.pipeline import StepRecord
from planner.probe.rank.training import trainer_alone
from planner.probe.rank.worker import StepLoop, Worker
from planner.probe.result import FailureKind, MeasuredRun, RankFailure, RankOutOfMemory, StepSeconds
from planner.probe.run import ProbeRun
from planner.specs.reading import shipped_table

_FAILURES = shipped_table("probe/launch/failures.yaml")
HINTS: dict[FailureKind, str] = _FAILURES["hints"]
"""The hint for each kind of failure that has one."""
CONSEQUENCES: tuple[FailureKind, ...] = ("network", "lost_peer")
"""Kinds that a rank may see because another one has failed; the least telling comes last."""
_NCCL = re.compile(r"NCCL error in: \S+?,? (?P<kind>[^\n]*?)(?: \(run with [^\n]*?\))?, NCCL version (?P<version>\S+)")
_GLOO = re.compile(r"\[/\S+:\d+\] |\. This is typically caused by .*")
"""The parts of gloo's messages that say nothing about this run: a line of its source, and advice."""
DISK_HINT = "free some space, or set TMPDIR to a folder that has some"


def failed_rank(run: ProbeRun, rank: int) -> str:
    """The name of a rank, with its place."""
    return f"rank {rank} ({run.place(rank)})"


def hint_of(failure: RankFailure) -> str:
    """The hint for a failure; empty where there is none."""
    return DISK_HINT if "No space left on device" in failure.message else HINTS.get(failure.kind, "")


def kind_of(error: BaseException) -> FailureKind:
    """The kind of failure that an exception means. NCCL's last error, where there is one, says it better than the
    rest."""
    if isinstance(error, ProbeError):
        return "disagreement"
    if isinstance(error, torch.OutOfMemoryError):
        return "out_of_memory"
    if isinstance(error, MemoryError):
        return "host_memory"
    text = str(error)
    return _kind_in(last_error(text)) or _kind_in(text) or "error"


def _kind_in(text: str) -> FailureKind | None:
    return next((kind for kind, texts in _FAILURES["texts"] if any(known in text for known in texts)), None)


def message_of(error: BaseException) -> str:
    """The exception in one line: its first line, or what NCCL says of an error of its own."""
    text = str(error)
    if isinstance(error, ProbeError):
        return text
    name = type(error).__name__
    nccl = _NCCL.search(text)
    if nccl is not None:
        cause = last_error(text) or next((line for line in text.splitlines()[1:] if line.strip()), "no cause is known")
        return f"{name}: NCCL {nccl['version']}: {nccl['kind']}: {cause.strip()}"[:500]
    line = f"{name}: {text}".splitlines()[0]
    return _GLOO.sub("", line)[:500]


def last_error(text: str) -> str:
    """The line that NCCL keeps of what went wrong, by which torch ends its message; empty where there is none."""
    lines = text.partition("Last error:")[2].splitlines()
    return next((line.strip() for line in lines if line.strip()), "")


def asked_bytes(message: str) -> int | None:
    """The bytes that an allocator was asked for, from its message: `Tried to allocate 2.50 GiB`, `you tried to allocate
    1024 bytes`, `Failed to CUDA calloc async 4194304 bytes`."""
    pattern = r"(?:ried to allocate|Failed to CUDA [cm]alloc(?: async)?) ([0-9.]+) ?(bytes|KiB|MiB|GiB)"
    match = re.search(pattern, message)
    if match is None:
        return None
    return round(float(match[1]) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2]])


EXIT_FAILED = 5


def run_worker(worker: Worker) -> RankFailure | None:
    """Run one rank to its end. Returns its failure, which the store is told too, or None."""
    try:
        worker.main()
    except Exception as error:
        failure = failure_of(error, worker.rank, worker.run, str(worker.status))
        with suppress(RuntimeError):  # who hosts the store is gone
            worker.store.set(FAILURE.format(worker.rank), failure.model_dump_json())
        return failure
    return None


def failure_of(error: BaseException, rank: int, run: ProbeRun, phase: str) -> RankFailure:
    """The record of an exception."""
    return RankFailure(
        rank=rank,
        stage=run.place(rank).pp,
        phase=phase,
        kind=kind_of(error),
        message=message_of(error),
        traceback="".join(traceback.format_exception(error)),
        time_s=time.monotonic(),
        asked_bytes=asked_bytes(str(error)),
    )


def out_of_memory_result(run: ProbeRun, failure: RankFailure) -> MeasuredRun:
    """The result of a run in which a GPU ran out of memory."""
    fields = failure.model_dump(include=set(RankOutOfMemory.model_fields))
    return MeasuredRun(run=run, ranks=(), out_of_memory=RankOutOfMemory(**fields))


class Start(NamedTuple):
    """All that the process of a rank is given."""

    run: ProbeRun
    port: int
    """Port of the launcher's store, on this machine."""
    folder: Path
    """Folder for the log of each rank, in which its stacks stand too."""


LOCALHOST = "127.0.0.1"


def rank_process(start: Start, rank: int, local_rank: int, worker: type[Worker] = Worker) -> None:
    """The process of one rank among all ranks of a run. It ends early when its launcher is interrupted or ends."""
    os.setsid()
    threading.Thread(target=_die_with_launcher, daemon=True).start()
    try:
        log = os.open(start.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    except FileNotFoundError:  # interrupted while this process was on its way, the launcher has cleared up already
        os._exit(EXIT_FAILED)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    connect = partial(tcp_store, LOCALHOST, start.port, START_TIMEOUT_S)
    failure = run_worker(worker(start.run, rank, local_rank, connect))
    with suppress(OSError):  # a full disk
        print("" if failure is None else failure.traceback, flush=True)
    os._exit(0 if failure is None else EXIT_FAILED)  # threads of a lost process group must not hold the process back


def _die_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        multiprocessing.connection.wait([launcher.sentinel])
        os._exit(EXIT_FAILED)


class StageWorker(Worker):
    """The worker of a rank that runs without other ranks."""

    def main(self) -> None:
        self.status.enter("build")
        self.use_device()
        trainer = trainer_alone(self.run, self.rank, self.device)

        def one_step(step: int) -> tuple[StepRecord, StepSeconds]:
            with self.writing_down_attention() if step == 0 else nullcontext():
                return trainer.step(step, self.status.at)

        result = self.measure(trainer, StepLoop(self.run), self.static_memory(), one_step)
        self.status.enter("report")
        self.write(result)
        self.status.enter("done")


stage_process = partial(rank_process, worker=StageWorker)
"""The process of one stage alone."""
