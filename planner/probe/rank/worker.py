"""One rank of a probe: joins the others, runs the steps, and leaves its measurements, or why it has none.

Where results are checked, rank 0 also trains the whole model by itself: loss, gradients and gradient norm of the
distributed run must equal those of one process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from planner.probe.model.attention import AttentionTables, KernelsSeen
from planner.probe.model.chunk import Chunk, initialise, shard_of
from planner.probe.model.peers import Surroundings
from planner.probe.rank.exchanges import barrier, measure_exchanges, slowest_s
from planner.probe.rank.gradients import ADAM, clip_scale
from planner.probe.rank.groups import (
    MEET_S,
    POLL_S,
    RESULT,
    START_TIMEOUT_S,
    WAITING,
    Identity,
    RankGroups,
    Status,
    require_agreement,
    what_runs,
)
from planner.probe.rank.pipeline import GroupWires, RankClock, StepRecord
from planner.probe.rank.training import RankTrainer, batch_seed, dtypes, empty_message, synthetic_batch
from planner.probe.result import ChunkSeconds, ProbeCheck, ProbedMemory, RankResult, StepSeconds, TimedAction, shown
from planner.probe.run import ChunkSpec, ProbeRun, repeats, spread_fraction
from planner.probe.torch_build import Monitor, watched
from planner.schedule.actions import Action
from planner.specs.base import Texts, grouped

REFERENCE = "reference is computed"
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest allowed error over the largest value. Errors come from sums over ranks, whose order differs."""


class OneProcess(NamedTuple):
    """The results of one process: losses and gradient norms of all steps, gradients of the first step."""

    losses: list[float]
    norms: list[float]
    grads: dict[str, Tensor]


def compute_reference(run: ProbeRun, num_steps: int, on_batch: Callable[[str], None]) -> OneProcess:
    """Train the whole model on the whole batch for `num_steps` steps; `on_batch` hears of each micro-batch."""
    around = Surroundings(balanced_routing=run.balanced_routing)
    dtype, _ = dtypes(run)
    layers = run.model.num_hidden_layers
    has_mtp = any(chunk.mtp for chunk in run.chunks)
    spec = ChunkSpec(first_layer=0, last_layer=layers, embedding=True, head=True, mtp=has_mtp)
    model = Chunk(run.model, spec, around).to(dtype)
    initialise(model, run.seed)
    tables = AttentionTables.of(run.model, run.whole_seq_length, around, torch.empty(0, dtype=dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, **cast(Any, ADAM))
    reference = OneProcess([], [], {})
    for step in range(num_steps):
        optimizer.zero_grad()
        total = 0.0
        for dp in range(run.dp):
            for microbatch in range(run.num_microbatches):
                on_batch(f"step {step}, micro-batch {dp * run.num_microbatches + microbatch}")
                seed = batch_seed(run, step, dp, microbatch)
                tokens, labels = synthetic_batch(run.model, run.whole_seq_length, run.micro_batch_size, seed, "cpu")
                loss = model(None, tokens, labels, tables) / (run.num_microbatches * run.dp)
                loss.backward()
                total += loss.item()
        grads = {name: cast(Tensor, p.grad) for name, p in model.named_parameters()}
        if step == 0:
            reference.grads.update({name: grad.clone() for name, grad in grads.items()})
        norm, scale = clip_scale(torch.stack([grad.square().sum() for grad in grads.values()]).sum(), run.max_norm)
        for grad in grads.values():
            grad.mul_(scale)
        optimizer.step()
        reference.losses.append(total)
        reference.norms.append(float(norm))
    return reference


def check_gradients(reference: OneProcess, trainer: RankTrainer) -> ProbeCheck:
    """Compare this rank's shard of the summed gradients with the gradients of one process."""
    names = {id(parameter): name for name, _, parameter in trainer.parameters.named}
    largest = max(float(grad.abs().max()) for grad in reference.grads.values())
    worst = 0.0
    worst_name = ""
    for parameter, elements, gradient in (part for flat in trainer.flat for part in flat.gradient_shards()):
        expected = shard_of(reference.grads[names[id(parameter)]], parameter, trainer.around).flatten()[elements]
        error = float((gradient - expected).abs().max()) / largest if gradient.numel() else 0.0
        if not error <= worst:  # also when it is no number
            worst = error
            worst_name = names[id(parameter)]
    passed = worst <= TOLERANCES[trainer.dtype]
    detail = f"largest error {worst:.1e} of the largest gradient, at {worst_name}" if worst else "equal to the last bit"
    return ProbeCheck(name="gradients", passed=passed, detail=detail)


def check_steps(reference: OneProcess, steps: list[StepSeconds], dtype: torch.dtype) -> list[ProbeCheck]:
    """Compare losses and gradient norms of all steps with those of one process."""
    checks = []
    for name, measured, expected in (
        ("loss", [step.loss for step in steps], reference.losses),
        ("gradient norm", [step.gradient_norm for step in steps], reference.norms),
    ):
        pairs = zip(measured, expected, strict=True)
        passed = all(a is not None and abs(a - b) <= TOLERANCES[dtype] * abs(b) for a, b in pairs)
        checks.append(
            ProbeCheck(name=name, passed=passed, detail=f"{shown(measured[-1], 6)}, one process {expected[-1]:.6f}")
        )
    return checks


def chunk_seconds(actions: Iterable[TimedAction]) -> tuple[ChunkSeconds, ...]:
    """Median seconds of each virtual stage's actions, which come in the order in which they ran."""
    pairs = ((Action.parse(timed.action), timed.end_s - timed.start_s) for timed in actions)
    seconds = grouped((action.stage, (action.kind, took_s)) for action, took_s in pairs)
    report = []
    for stage, own in sorted(seconds.items()):
        of_kind = grouped(own)
        medians = {kind: median(values) for kind, values in of_kind.items()}
        spreads = [spread for spread in map(spread_fraction, of_kind.values()) if spread is not None]
        apart_s = medians.get("I", 0.0) + medians.get("W", 0.0)
        report.append(
            ChunkSeconds(
                stage=stage, forward_s=medians.get("F", 0.0), backward_s=medians.get("B", apart_s),
                input_grad_s=medians.get("I"), weight_grad_s=medians.get("W"),
                spread_fraction=max(spreads, default=None),
            )
        )  # fmt: skip
    return tuple(report)


class StepLoop:
    """Counts steps and collects their seconds.

    After `run.warm_up_steps` steps warm up for `run.steady_s` more, and are measured for `run.most_s`, by the seconds
    of the slowest rank, so that all ranks run as many.
    """

    def __init__(self, run: ProbeRun, slowest: Callable[[float], float] = float) -> None:
        self.run, self.slowest = run, slowest
        self.warm_up, self.steps = list[StepSeconds](), list[StepSeconds]()
        self.actions: list[TimedAction] = []
        """The actions of all measured steps."""
        self.record = StepRecord()
        """The record of the last step."""

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """The number of each step, and the name of its phase. The caller runs it and calls `add`."""
        run = self.run
        yield from self._phase(self.warm_up, "warm-up", run.warm_up_steps)
        yield from self._phase(self.warm_up, "warm-up", self._as_many(run.steady_s, fewest=0))
        yield from self._phase(self.steps, "step {}", self._as_many(run.most_s, run.num_steps))

    def _phase(self, into: list[StepSeconds], name: str, count: int) -> Iterator[tuple[int, str]]:
        self.into = into
        for _ in range(count):
            yield len(self.warm_up) + len(self.steps), name.format(len(into))

    def _as_many(self, seconds: float, fewest: int) -> int:
        """Number of steps that take so long, as the last one that has warmed up."""
        return repeats(self.slowest(self.warm_up[-1].step_s), seconds, fewest) if seconds else fewest

    def add(self, record: StepRecord, seconds: StepSeconds) -> None:
        """Keep a step's measurements."""
        self.into.append(seconds)
        self.record = record
        self.actions += record.actions if self.into is self.steps else ()

    @property
    def last_cold(self) -> int:
        """The number of the last step that warms up however long steps take."""
        return max(0, self.run.warm_up_steps - 1)

    @property
    def all_steps(self) -> list[StepSeconds]:
        return [*self.warm_up, *self.steps]


class Worker:
    """One rank, which tells the store in which all meet of its progress and its results."""

    def __init__(
        self,
        run: ProbeRun,
        rank: int,
        local_rank: int,
        connect: Callable[[], Any],
        address: str = "",
        on_agreement: Callable[[list[str]], None] | None = None,
    ) -> None:
        """`connect` makes a connection to the store, of which this needs two. `address`: where this rank answers;
        `on_agreement` hears those of all ranks."""
        self.run, self.rank, self.local_rank = run, rank, local_rank
        self.store, self.status = connect(), Status(connect(), rank)
        self.address, self.on_agreement = address, on_agreement
        self.device: str = self.run.device
        self.attention_kernels: Texts = ()
        self.monitor = Monitor()

    def main(self) -> None:
        """Run all phases of the rank in order."""
        run = self.run
        self.status.enter("handshake")
        self.join()
        self.status.enter("build", f"groups {WAITING}")
        groups = RankGroups.of(run, self.rank, self.timeout)
        trainer = self.build(groups)
        static_bytes = self.static_memory()
        self.status.enter("rehearsal")
        with self.writing_down_attention():
            trainer.rehearse(self.status.at)
        reference = self.reference(run.warm_up_steps + run.num_steps) if run.check else None
        checks = []
        loop = StepLoop(run, partial(slowest_s, device=self.device))

        def one_step(step: int) -> tuple[StepRecord, StepSeconds]:
            def on_gradients() -> None:
                if reference is not None and step == 0:
                    checks.append(check_gradients(reference, trainer))

            return trainer.step(step, self.status.at, on_gradients, partial(self.start, trainer.clock))

        result = self.measure(trainer, loop, static_bytes, one_step)
        self.status.enter("exchanges")
        exchanges = measure_exchanges(trainer, self.status.at)
        self.status.enter("report")
        if reference is not None:
            checks += check_steps(reference, loop.all_steps, trainer.dtype)
        result = result.model_copy(update={"checks": tuple(checks), "exchanges": exchanges})
        self.write(result)
        self.barrier()
        self.status.enter("done")
        dist.destroy_process_group()

    def measure(
        self,
        trainer: RankTrainer,
        loop: StepLoop,
        static_bytes: int,
        one_step: Callable[[int], tuple[StepRecord, StepSeconds]],
    ) -> RankResult:
        """Run all steps, while the GPU is looked at. Returns the measurements of this rank."""
        for step, phase in loop:
            self.status.enter(phase)
            if trainer.clock.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            if step == loop.last_cold:
                self.monitor.begin_load()
            loop.add(*one_step(step))
        self.monitor.after()
        return self.report(trainer, loop, self.memory(static_bytes))

    def join(self) -> None:
        """Connect the ranks after checking that they run the same on devices of their own."""
        self.use_device()
        self.status.at(WAITING)
        limit_s = max(self.run.timeout_s, MEET_S)
        addresses = require_agreement(self.store, self.rank, self.run.world_size, self.identity(), limit_s)
        if self.on_agreement is not None:
            self.on_agreement(addresses)
        self.store.set_timeout(self.timeout)
        dist.init_process_group(
            "nccl" if self.run.device == "cuda" else "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.run.world_size,
            timeout=self.timeout,
        )

    @property
    def timeout(self) -> timedelta:
        """The timeout of a rank that waits for others, longer than the launcher's so that the launcher notices
        first."""
        return timedelta(seconds=2 * max(self.run.timeout_s, START_TIMEOUT_S))

    def use_device(self) -> None:
        """Compute on the GPU of this rank's number on its machine, or on the only one that it is shown."""
        if self.run.device == "cpu":
            return
        visible = torch.cuda.device_count()
        number = 0 if visible == 1 else self.local_rank
        if number >= visible:
            raise RuntimeError(f"no GPU for rank {self.rank}, number {number} of its machine: torch sees {visible}")
        self.monitor = watched(number)
        self.device = f"cuda:{number}"
        torch.cuda.set_device(self.device)

    def identity(self) -> Identity:
        device = "" if self.run.device == "cpu" else str(torch.cuda.get_device_properties(self.device).uuid)
        return Identity(os.uname().nodename, device, self.address, what_runs(self.run))

    def barrier(self) -> None:
        """Wait for all ranks, once this one's GPU has nothing left to compute."""
        if self.run.device == "cuda":
            torch.cuda.synchronize()
        self.status.at(WAITING)
        barrier(self.device)

    def start(self, clock: RankClock) -> None:
        """Start the clocks of all ranks together, which a barrier leaves some ten microseconds apart."""
        self.barrier()
        clock.start()

    def build(self, groups: RankGroups) -> RankTrainer:
        """Stages, optimizer state and wires of this rank."""
        self.status.at("")
        empty = partial(empty_message, self.run, groups.around.tp, self.device)
        wires = GroupWires(self.run, groups.place, groups.joined, empty)
        trainer = RankTrainer(self.run, groups, wires, self.device)
        self.status.at(f"channels {WAITING}")
        wires.open()
        return trainer

    @contextmanager
    def writing_down_attention(self) -> Iterator[None]:
        """Write down the kernels of attention that run within, on a GPU."""
        if self.run.device == "cpu":
            yield
            return
        with KernelsSeen() as seen:
            yield
        self.attention_kernels = seen.names

    def reference(self, num_steps: int) -> OneProcess:
        """The results of one process, which rank 0 computes and sends to the others.

        They wait in the store as long as it moves, which whoever watches the ranks sees, and so within no limit of
        their groups'.
        """
        self.status.enter("reference", "" if self.rank == 0 else WAITING)
        results = [compute_reference(self.run, num_steps, self.status.at) if self.rank == 0 else None]
        if self.rank == 0:
            self.store.set(REFERENCE, "")
        while not self.store.check([REFERENCE]):
            time.sleep(POLL_S)
        self.status.at(WAITING)
        dist.broadcast_object_list(results)
        return cast(OneProcess, results[0])

    def static_memory(self) -> int:
        return torch.cuda.memory_allocated() if self.run.device == "cuda" else 0

    def memory(self, static_bytes: int) -> ProbedMemory | None:
        """Device memory of the last step; None on the CPU."""
        if self.run.device == "cpu":
            return None
        free, total = torch.cuda.mem_get_info()
        return ProbedMemory(
            static_bytes=static_bytes,
            peak_allocated_bytes=torch.cuda.max_memory_allocated(),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(),
            device_used_bytes=total - free,
        )

    def report(self, trainer: RankTrainer, loop: StepLoop, memory: ProbedMemory | None) -> RankResult:
        """The measurements of this rank."""
        place = self.run.place(self.rank)
        return RankResult(
            rank=self.rank,
            stage=place.pp,
            dp=place.dp,
            cp=place.cp,
            tp=place.tp,
            torch_version=torch.__version__,
            device_name="cpu" if memory is None else torch.cuda.get_device_name(),
            num_parameters=trainer.num_parameters,
            steps=tuple(loop.steps),
            actions=tuple(loop.record.actions),
            chunks=chunk_seconds(loop.actions),
            peak_in_flight_chunks=loop.record.peak_in_flight,
            memory=memory,
            attention_kernels=self.attention_kernels,
            experts_one_by_one=trainer.experts_one_by_one,
            device_states=tuple(self.monitor.states),
        )

    def write(self, result: RankResult) -> None:
        self.store.set(RESULT.format(self.rank), result.model_dump_json())
