"""The worker of one stage alone on one device, run as its rank would run it, its peers emulated."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median

import torch

from planner.probe.rank.batches import synthetic_batch
from planner.probe.rank.fully_sharded import ShardedParameters
from planner.probe.rank.messages import needed_by
from planner.probe.rank.rank_alone import trainer_alone
from planner.probe.rank.training import Trainer
from planner.probe.repeats import Repeats, spread_fraction
from planner.probe.result import ChunkSeconds
from planner.probe.worker.handshake import require_agreement
from planner.probe.worker.process import run_in_own_process
from planner.probe.worker.shared_progress import connect
from planner.probe.worker.status import WAITING
from planner.probe.worker.step_loop import StepLoop
from planner.probe.worker.worker import Worker
from planner.schedule.actions import Action

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
        run = self.run
        self.status.enter("handshake")
        self.use_device()
        if self.num_peers > 1:
            self.status.at(WAITING)
            store = connect(self.num_peers, self.timeout.total_seconds())
            require_agreement(store, int(os.environ["RANK"]), self.num_peers, self.identity())
        self.status.enter("build")
        trainer = trainer_alone(run, self.rank, self.device)
        static_bytes = self.static_memory()
        loop = StepLoop(run)
        for step, phase in loop:
            self.status.enter(phase)
            if trainer.clock.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            if step == loop.last_cold:
                self.monitor.begin_load()
            with self.writing_down_attention() if step == 0 else nullcontext():
                loop.add(*trainer.step(step, self.status.at))
        self.monitor.after()
        result = self.report(trainer, loop, self.memory(static_bytes))
        self.status.enter("input and weight gradients")
        chunks = tuple(self.split(trainer, seconds) for seconds in result.chunks)
        self.status.enter("report")
        self.write(result.model_copy(update={"chunks": chunks}))
        self.status.enter("done")

    def split(self, trainer: Trainer, seconds: ChunkSeconds) -> ChunkSeconds:
        """Time input and weight gradients apart, one micro-batch after another, unless the schedule has done so or
        sharding forbids it."""
        run, pipeline, clock = self.run, trainer.pipeline, trainer.clock
        if seconds.input_grad_s is not None or any(isinstance(flat, ShardedParameters) for flat in trainer.flat):
            return seconds
        batch = synthetic_batch(run.model, run.whole_seq_length, run.micro_batch_size, run.seed, self.device)
        repeats = Repeats(SPLIT_REPEATS, run.steady_s, min(2 * run.steady_s, run.most_s))
        times: dict[str, list[float]] = {"F": [], "I": [], "W": []}
        while not repeats.suffice(len(times["W"]), sum(map(sum, times.values())), partial(spread_fraction, times["W"])):
            clock.start()
            marks = {}
            for kind in times:
                action = Action(kind, seconds.stage, 0)
                needed = needed_by(run.order, action)
                received = None if needed is None else pipeline.wires.receive(needed)
                start = clock.mark()
                pipeline.run(action, received, [batch], 1.0)
                marks[kind] = start, clock.mark()
            for kind, (start, end) in marks.items():  # a GPU is waited for when all of it is under way
                times[kind].append(clock.seconds(end) - clock.seconds(start))
        return seconds.model_copy(update={"input_grad_s": median(times["I"]), "weight_grad_s": median(times["W"])})
