"""Healthy GPUs: what a plan's ranks would measure if each kernel and each exchange took what our formulas say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_gpus import FakeGPU, fake_gpu, fake_group
from healthy_kernels import Account, Prices, recorded

from planner.answer import Plan
from planner.probe.plan_side.eager import in_eager_torch
from planner.probe.rank.batches import synthetic_batch
from planner.probe.rank.groups import RankGroups
from planner.probe.rank.messages import needed_by
from planner.probe.rank.rank_alone import trainer_alone
from planner.probe.rank.training import Trainer
from planner.probe.rank.wires import Wires
from planner.probe.run import ProbeRun
from planner.schedule.actions import Action


@dataclass
class RankAccounts:
    """What one rank ran: each action of each of its virtual stages once, and the parts of the step after them."""

    actions: dict[tuple[int, str], Account]
    reduce: Account
    optimizer: Account
    gather: Account


def account_of(
    run: ProbeRun, rank: int, alone: bool, prices: Prices, gpu: FakeGPU, kernel: str = "fastest"
) -> RankAccounts:
    """Run one micro-batch and the end of a step of a rank on a fake GPU."""
    with ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.enter_context(fake_gpu(gpu, monkeypatch, num_gpus=8))
        if not alone:
            stack.enter_context(fake_group(monkeypatch))
            dist.init_process_group("nccl", rank=rank, world_size=run.world_size)
        trainer = trainer_alone(run, rank, "cuda:0") if alone else _trainer_among(run, rank)
        recorder = stack.enter_context(recorded(prices, monkeypatch, kernel))
        return _account(trainer, recorder)


def _trainer_among(run: ProbeRun, rank: int) -> Trainer:
    grid = RankGroups(run, rank)
    place = grid.place
    return Trainer(
        run, place.pp, grid.around, Wires(), "cuda:0", grid.dense, grid.expert, grid.holders, grid.replicas, place.dp
    )


def _account(trainer: Trainer, recorder: Any) -> RankAccounts:
    run = trainer.run
    batch = synthetic_batch(run.model, run.whole_seq_length, run.micro_batch_size, run.seed, trainer.device)
    actions: dict[tuple[int, str], Account] = {}
    for stage in trainer.chunks:
        for kind in "FIW" if run.order.splits_backward else "FB":
            action = Action(kind, stage, 0)
            received = None if needed_by(run.order, action) is None else torch.ones_like(trainer.empty())
            with recorder.during(str(action), "forward" if kind == "F" else "backward") as account:
                trainer.pipeline.run(action, received, [batch], 1.0)
            actions[stage, kind] = account
    with recorder.during("reduce") as reduce:
        trainer.reduce(lambda at: None)
    with recorder.during("optimizer") as optimizer:
        norm = trainer.squared_norm()
        for flat in trainer.flat:
            flat.step(norm)
    with recorder.during("gather") as gather:
        for flat in trainer.flat:
            flat.gather()
    return RankAccounts(actions, reduce, optimizer, gather)
