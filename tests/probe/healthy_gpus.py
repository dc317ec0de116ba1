"""Healthy GPUs: what a plan's ranks would measure if each kernel and each exchange took what our formulas say."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, log2
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_gpus import H200, MI300X, fake_gpu, fake_group
from healthy_kernels import Account, Prices, Recorder, recorded

from planner.answer import Plan
from planner.physics import compute
from planner.physics.communication import p2p_s
from planner.probe import probe as probing
from planner.probe.plan_runs import ranks_run
from planner.probe.plan_slice import ProbeOptions
from planner.probe.rank.groups import RankGroups
from planner.probe.rank.pipeline import Wires
from planner.probe.rank.training import RankTrainer, synthetic_batch, trainer_alone
from planner.probe.result import (
    ChunkSeconds,
    MeasuredRun,
    ProbedMemory,
    ProbeResult,
    RankResult,
    StepSeconds,
    TimedAction,
)
from planner.probe.run import Place, ProbeRun, needed_by
from planner.probe.run_price import in_eager_torch
from planner.schedule.actions import Action
from planner.schedule.replay import Durations, replay
from planner.specs.units import MICRO

FAKES = {"hopper": H200, "cdna3": MI300X}
"""The fake GPU that stands for a generation of silicon."""
LISTED = 0.84
"""Kernels of a dense layer's operators over those that it launches: 21 of 25 forward. The host's seconds of a kernel
are fitted to what is listed."""


@dataclass(frozen=True)
class Health:
    """How GPUs, links and hosts are, as factors on the seconds that we price."""

    slow: dict[str, float] = field(default_factory=dict)
    """Kinds of kernels that take longer: product, attention, stream, exchange."""
    host: float = 1.0
    """Seconds in which the host issues a kernel."""
    waits: float = 1.0
    """Seconds that ranks wait for the last of them in an exchange."""
    prefers: str = "cudnn"
    """The kernel that this version of torch takes for plain attention, where the GPU has it."""


HEALTHY = Health()


@dataclass
class RankAccounts:
    """What one rank ran: each action of each of its virtual stages once, and the parts of the step after them."""

    actions: dict[tuple[int, str], Account]
    reduce: Account
    optimizer: Account
    gather: Account
    attention_kernels: tuple[str, ...] = ()


def probed(plan: Plan, num_gpus: int | None, health: Health = HEALTHY) -> ProbeResult:
    """`plan probe` on so many healthy GPUs; None: each stage alone (`--stage all`)."""
    options = ProbeOptions(device="cuda", stages="all" if num_gpus is None else None, num_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: num_gpus or 1)

        def launch(run: ProbeRun, child: Any = None, ranks: Sequence[int] = ()) -> MeasuredRun:
            alone = bool(ranks)
            firsts = ranks or [run.rank(Place(stage, 0, 0, 0)) for stage in range(run.pp)]
            accounts = {rank: account_of(run, rank, alone, plan, health) for rank in firsts}
            return MeasuredRun(run=run, ranks=tuple(results(plan, run, accounts, alone, health)))

        patch.setattr(probing, "launch", launch)
        patch.setattr(probing, "capacity_bytes", lambda _: inf)
        result = probing.probe(plan, options)
    assert result is not None
    return result


def results(
    plan: Plan, run: ProbeRun, accounts: dict[int, RankAccounts], alone: bool, health: Health
) -> list[RankResult]:
    """What the ranks report: seconds as accounted, bytes as the plan says (other tests count those)."""
    eager = in_eager_torch(plan)
    prices = Prices(plan.cluster, eager.runtime_spec)
    seconds = {
        (run.place(rank).pp, stage, kind): seconds_of(account, prices, health)
        for rank, each in accounts.items()
        for (stage, kind), account in each.actions.items()
    }
    timeline = _timeline(plan, run, seconds) if not alone else None
    reports = []
    for rank, each in accounts.items():
        place = run.place(rank)
        own = {(stage, kind): s for (pp, stage, kind), s in seconds.items() if pp == place.pp}
        optimizer_s = seconds_of(each.optimizer, prices, health)
        planned_stage = place.pp if alone else _stages(plan, run)[place.pp]
        memory = eager.stages[planned_stage].memory
        spans = () if timeline is None else zip(
            run.ranks[place.pp], timeline.start_s[place.pp], timeline.end_s[place.pp], strict=True
        )  # fmt: skip
        reports.append(
            RankResult(
                rank=rank, stage=place.pp, dp=0, tp=0, torch_version=torch.__version__,
                device_name=plan.cluster.hardware.name, num_parameters=1,
                steps=(
                    StepSeconds(
                        pipeline_s=1.0, reduce_s=each.reduce.exchange_s, optimizer_s=optimizer_s,
                        gather_s=each.gather.exchange_s, step_s=1.0, loss=1.0, gradient_norm=1.0,
                    ),
                ),
                actions=tuple(
                    TimedAction(action=action, ready_s=start, start_s=start, end_s=end) for action, start, end in spans
                ),
                attention_kernels=each.attention_kernels,
                chunks=tuple(_chunk(stage, own) for stage in run.stages_of(place.pp)),
                peak_in_flight_chunks=1 if timeline is None else int(timeline.peak_in_flight_chunks[place.pp]),
                memory=ProbedMemory(
                    static_bytes=memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes,
                    peak_allocated_bytes=memory.peak_allocated_bytes,
                    peak_reserved_bytes=memory.peak_allocated_bytes,
                    device_used_bytes=memory.total_bytes,
                ),
            )
        )  # fmt: skip
    return reports


def _stages(plan: Plan, run: ProbeRun) -> list[int]:
    return list(ranks_run(plan, ProbeOptions(device="cuda"), run.world_size).stages)


def _chunk(stage: int, own: dict[tuple[int, str], float]) -> ChunkSeconds:
    whole = own.get((stage, "B"), own.get((stage, "I"), 0.0) + own.get((stage, "W"), 0.0))
    return ChunkSeconds(stage=stage, forward_s=own[stage, "F"], backward_s=whole, weight_grad_s=own.get((stage, "W")))


def seconds_of(account: Account, prices: Prices, health: Health) -> float:
    """Seconds of an action: what its kernels and exchanges take, or the host to issue them."""
    runtime, hardware = prices.runtime, prices.cluster.hardware
    waits_s = health.waits * runtime.collective_sync_us * MICRO
    waited_s = sum(waits_s * log2(len(exchange.ranks)) for exchange in account.exchanges)
    host_s = health.host * LISTED * compute.issue_s(hardware, runtime) * (len(account.kernels) + len(account.exchanges))
    return max(account.gpu_s + account.exchange_s + waited_s, host_s)


def _timeline(plan: Plan, run: ProbeRun, seconds: dict[tuple[int, int, str], float]) -> Any:
    """The step of all stages, with messages that take what the links need for them."""
    order, cluster = run.order, plan.cluster
    n = order.num_model_stages
    message_bytes = 2 * run.micro_batch_size * run.seq_length * run.model.hidden_size
    message_bytes //= run.tp if run.sequence_parallel else 1
    ranks = [run.rank(Place(order.stage_to_rank[stage], 0, 0, 0)) for stage in range(n)]
    of = [{kind: s for (_, stage, kind), s in seconds.items() if stage == virtual} for virtual in range(n)]
    hops = [float(p2p_s(message_bytes, abs(b - a), cluster, min(a, b))) if a != b else 0.0 for a, b in pairwise(ranks)]
    return replay(
        order,
        Durations(
            [each["F"] for each in of],
            [each.get("B", each.get("I", 0.0)) for each in of],
            [each.get("W", 0.0) for each in of],
            p2p_s=hops or 0.0,
        ),
    )


def account_of(run: ProbeRun, rank: int, alone: bool, plan: Plan, health: Health = HEALTHY) -> RankAccounts:
    """Run one micro-batch and the end of a step of a rank on a fake GPU."""
    gpu = FAKES[plan.cluster.hardware.architecture]
    columns = run.model.vocab_size // run.tp
    prices = Prices(plan.cluster, in_eager_torch(plan).runtime_spec, health.slow, columns)
    with ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        stack.enter_context(fake_gpu(gpu, monkeypatch, num_gpus=8))
        if not alone:
            stack.enter_context(fake_group(monkeypatch))
            dist.init_process_group("nccl", rank=rank, world_size=run.world_size)
        trainer = trainer_alone(run, rank, "cuda:0") if alone else _trainer_among(run, rank)
        kernel = health.prefers if plan.cluster.hardware.efficiency.cudnn is not None else "flash"
        recorder = stack.enter_context(recorded(prices, monkeypatch, kernel))
        return _account(trainer, recorder)


def _trainer_among(run: ProbeRun, rank: int) -> RankTrainer:
    return RankTrainer(run, RankGroups.of(run, rank), Wires(), "cuda:0")


def _account(trainer: RankTrainer, recorder: Recorder) -> RankAccounts:
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
    return RankAccounts(actions, reduce, optimizer, gather, tuple(sorted(recorder.attention_kernels)))
