"""The worker of one stage alone on one device, run as its rank would run it, its peers emulated."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch

from planner.probe.rank.batches import synthetic_batch
from planner.probe.rank.fully_sharded import ShardedParameters
from planner.probe.rank.messages import needed_by
from planner.probe.rank.rank_alone import trainer_alone
from planner.probe.rank.training import Trainer
from planner.probe.result import ChunkSeconds
from planner.probe.worker.process import run_in_own_process
from planner.probe.worker.step_loop import StepLoop
from planner.probe.worker.worker import Worker
from planner.schedule.actions import Action

SPLIT_REPEATS = 3


def stage_process(folder: Path, rank: int, local_rank: int) -> None:
    """The process of one stage alone."""
    run_in_own_process(lambda: StageWorker(folder, rank, 0, local=True), folder, rank)


class StageWorker(Worker):
    """The worker of a rank that runs without other ranks."""

    def main(self) -> None:
        run = self.run
        self.status.enter("build")
        self.use_device()
        trainer = trainer_alone(run, self.rank, self.device)
        static_bytes = self.static_memory()
        loop = StepLoop(run)
        for step, phase in loop:
            self.status.enter(phase)
            if trainer.clock.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            if step == loop.last_cold:
                self.monitor.begin_load()
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
        times: dict[str, list[float]] = {"F": [], "I": [], "W": []}
        for _ in range(SPLIT_REPEATS):
            clock.start()
            for kind in times:
                action = Action(kind, seconds.stage, 0)
                needed = needed_by(run.order, action)
                received = None if needed is None else pipeline.wires.receive(needed)
                start = clock.mark()
                pipeline.run(action, received, [batch], 1.0)
                times[kind].append(clock.seconds(clock.mark()) - clock.seconds(start))
        return seconds.model_copy(update={"input_grad_s": median(times["I"]), "weight_grad_s": median(times["W"])})
