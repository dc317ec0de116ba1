"""One stage on one device, run as its rank would run it: neighbours, tp, cp and expert peers emulated.

Received activations are random and output gradients are ones, made on the device; a gather repeats the shard, a
reduce-scatter keeps its first part; experts get equal shares. Optimizer state is that of one data-parallel shard, and
under ZeRO-3 weights and gradients are.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from planner.probe.model.chunk import synthetic_batch
from planner.probe.model.peers import EmulatedPeers, ExpertPeers, Surroundings
from planner.probe.rank.fully_sharded import ShardedParameters
from planner.probe.rank.fully_sharded_alone import emulate_exchanges, groups_of_one
from planner.probe.rank.gradients import Sharding
from planner.probe.rank.pipeline import Timed
from planner.probe.rank.training import Trainer
from planner.probe.rank.wires import EmulatedWires, needed_by
from planner.probe.result import ChunkSeconds
from planner.probe.run import ProbeRun
from planner.probe.worker.process import in_its_own_process
from planner.probe.worker.worker import Worker, chunk_seconds
from planner.schedule.actions import Action

SPLIT_REPEATS = 3


def stage_child(folder: Path, rank: int, local_rank: int) -> None:
    """The stage of one rank alone, as a process of its own."""
    in_its_own_process(lambda: StageWorker(folder, rank, 0, local=True), folder, rank)


class StageWorker(Worker):
    """A rank without anybody else."""

    def main(self) -> None:
        run = self.run
        self.status.enter("build")
        self.use_device()
        trainer = trainer_alone(run, self.rank, self.device)
        static_bytes = self.static_memory()
        steps, actions = [], list[Timed]()
        for step in range(run.warm_up_steps + run.num_steps):
            self.status.enter("warm-up" if step < run.warm_up_steps else f"step {step - run.warm_up_steps}")
            if trainer.clock.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            record, seconds = trainer.step(step, self.status.at)
            steps.append(seconds)
            actions += record.actions if step >= run.warm_up_steps else ()
        result = self.report(trainer, steps[run.warm_up_steps :], record, self.memory(static_bytes))
        self.status.enter("input and weight gradients")
        chunks = tuple(self.split(trainer, seconds) for seconds in chunk_seconds(actions))
        self.status.enter("report")
        self.write(result.model_copy(update={"chunks": chunks}))
        self.status.enter("done")

    def split(self, trainer: Trainer, seconds: ChunkSeconds) -> ChunkSeconds:
        """Time input and weight gradients apart, a micro-batch at a time, where neither schedule nor sharding do."""
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


def trainer_alone(run: ProbeRun, rank: int, device: str) -> Trainer:
    """A rank's stages among emulated peers."""
    place = run.place(rank)
    around = Surroundings(
        tp=EmulatedPeers(run.tp, 0, run.sequence_parallel),
        ep=ExpertPeers(run.ep),
        cp=EmulatedPeers(run.cp),
        balanced_routing=run.balanced_routing,
        recomputed=frozenset(run.recompute_modules),
    )
    trainer: Trainer

    def make(kind: str) -> Tensor:
        return trainer.empty().normal_() if kind == "F" else torch.ones_like(trainer.empty())

    sizes = run.dp * run.cp, run.dp * run.cp * run.tp // run.ep
    is_sharded = run.fully_sharded and sizes[0] > 1
    groups = groups_of_one(*sizes) if is_sharded else (None, None)
    dense, expert = (Sharding(group, size, zero=run.zero) for group, size in zip(groups, sizes, strict=True))
    trainer = Trainer(
        run,
        place.pp,
        around,
        EmulatedWires(run.stages_of(place.pp), make),
        device,
        dense,
        expert,
        holders=lambda name, stage: (place.pp,),
    )
    for chunk in trainer.chunks.values() if is_sharded else ():
        emulate_exchanges(chunk)
    return trainer
