"""A worker in a process of its own, which ends with its launcher; one kind runs a stage alone, its peers emulated."""

from __future__ import annotations

import faulthandler
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import torch

from planner.probe.launch.failure import EXIT_FAILED, run_worker
from planner.probe.rank.clock import StepRecord
from planner.probe.rank.rank_alone import trainer_alone
from planner.probe.rank.status import LOG_FILE, STACK_FILE
from planner.probe.rank.worker import StepLoop, Worker
from planner.probe.result import StepSeconds


def rank_process(folder: Path, rank: int, local_rank: int) -> None:
    """The process of one rank among all ranks of a run."""
    run_in_own_process(lambda: Worker(folder, rank, local_rank), folder, rank)


def run_in_own_process(make: Callable[[], Worker], folder: Path, rank: int) -> None:
    """Run a worker and end the process. The process ends early when its launcher is interrupted or ends."""
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
    failure = run_worker(make, folder, rank)
    with suppress(OSError):  # a full disk
        print("" if failure is None else failure.traceback, flush=True)
    os._exit(0 if failure is None else EXIT_FAILED)  # threads of a lost process group must not hold the process back


def _die_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        multiprocessing.connection.wait([launcher.sentinel])
        os._exit(EXIT_FAILED)


def stage_process(folder: Path, rank: int, local_rank: int) -> None:
    """The process of one stage alone."""
    run_in_own_process(lambda: StageWorker(folder, rank, local_rank), folder, rank)


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
