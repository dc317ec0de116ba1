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
from functools import partial
from pathlib import Path
from statistics import median

import torch

from planner.probe.launch.failure import EXIT_FAILED, run_worker
from planner.probe.rank.clock import StepRecord
from planner.probe.rank.gradients import ShardedParameters
from planner.probe.rank.groups import require_agreement
from planner.probe.rank.rank_alone import trainer_alone
from planner.probe.rank.status import LOG_FILE, STACK_FILE, WAITING, connect
from planner.probe.rank.training import RankTrainer, unheard
from planner.probe.rank.worker import StepLoop, Worker
from planner.probe.repeats import Repeats, spread_fraction
from planner.probe.result import ChunkSeconds, StepSeconds
from planner.probe.run import Message


def rank_process(folder: Path, rank: int, local_rank: int) -> None:
    """The process of one rank among all ranks of a run."""
    run_in_own_process(lambda: Worker(folder, rank, local_rank, local=True), folder, rank)


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


SPLIT_REPEATS = 3


def stage_process(folder: Path, rank: int, local_rank: int, first_device: int = 0, num_peers: int = 1) -> None:
    """The process of one stage alone. `num_peers`: processes of torchrun or srun that run stages at the same time."""
    run_in_own_process(lambda: StageWorker(folder, rank, first_device + local_rank, num_peers), folder, rank)


class StageWorker(Worker):
    """The worker of a rank that runs without other ranks."""

    def __init__(self, folder: Path, rank: int, local_rank: int, num_peers: int = 1) -> None:
        super().__init__(folder, rank, local_rank, local=True)
        self.num_peers = num_peers

    def main(self) -> None:
        self.status.enter("handshake")
        self.use_device()
        if self.num_peers > 1:
            self.status.at(WAITING)
            store = connect(self.num_peers, self.timeout.total_seconds())
            require_agreement(store, int(os.environ["RANK"]), self.num_peers, self.identity())
        self.status.enter("build")
        trainer = trainer_alone(self.run, self.rank, self.device)

        def one_step(step: int) -> tuple[StepRecord, StepSeconds]:
            with self.writing_down_attention() if step == 0 else nullcontext():
                return trainer.step(step, self.status.at)

        result = self.measure(trainer, StepLoop(self.run), self.static_memory(), one_step)
        self.status.enter("input and weight gradients")
        chunks = tuple(self.split(trainer, seconds) for seconds in result.chunks)
        self.status.enter("report")
        self.write(result.model_copy(update={"chunks": chunks}))
        self.status.enter("done")

    def split(self, trainer: RankTrainer, seconds: ChunkSeconds) -> ChunkSeconds:
        """Time input and weight gradients apart, one micro-batch after another, unless the schedule has done so or
        sharding forbids it."""
        run, clock = self.run, trainer.clock
        if seconds.input_grad_s is not None or any(isinstance(flat, ShardedParameters) for flat in trainer.flat):
            return seconds
        batch, wires = trainer.own_batch(), trainer.pipeline.wires
        repeats = Repeats(SPLIT_REPEATS, run.steady_s, min(2 * run.steady_s, run.most_s))
        times: dict[str, list[float]] = {"F": [], "I": [], "W": []}
        while not repeats.suffice(len(times["W"]), sum(map(sum, times.values())), partial(spread_fraction, times["W"])):
            clock.start()
            marks = trainer.micro_batch(
                seconds.stage, batch, lambda kind: wires.receive(Message(kind, seconds.stage, 0)), unheard, "FIW"
            )
            for kind, (start, end) in marks.items():  # a GPU is waited for when all of it is under way
                times[kind].append(clock.seconds(end) - clock.seconds(start))
        return seconds.model_copy(update={"input_grad_s": median(times["I"]), "weight_grad_s": median(times["W"])})
