"""One rank's training step: its pipeline, its gradients and its optimizer; the same loop on CPU and GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.probe.model.attention import AttentionTables
from planner.probe.model.chunk import Chunk, copy_shard, initialise, local, whole_name
from planner.probe.model.layers import Experts, takes_groups
from planner.probe.model.peers import EmulatedPeers, ExpertPeers, GroupPeers, Surroundings, TensorPeers, marks_of
from planner.probe.rank.gradients import (
    FlatParameters,
    ShardedParameters,
    Sharding,
    all_reduce_flat,
    clip_scale,
    shard_chunk,
)
from planner.probe.rank.groups import RankGroups, run_surroundings
from planner.probe.rank.pipeline import EmulatedWires, RankClock, RankPipeline, StepRecord, Wires
from planner.probe.result import StepSeconds
from planner.probe.run import ProbeRun, holders, needed_by
from planner.schedule.actions import Action
from planner.specs.base import Ints, grouped
from planner.specs.model import ModelSpec


def batch_seed(run: ProbeRun, step: int, dp: int, microbatch: int) -> int:
    return crc32(f"{run.seed} {step} {dp} {microbatch}".encode())


def synthetic_batch(model: ModelSpec, seq_length: int, batch: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and labels [seq, batch] of whole sequences, the same for the same seed on any rank."""
    generator = torch.Generator("cpu").manual_seed(seed)
    tokens = torch.randint(0, model.vocab_size, (seq_length, batch), generator=generator)
    labels = torch.randint(0, model.vocab_size, (seq_length, batch), generator=generator)
    return tokens.to(device), labels.to(device)


def dtypes(run: ProbeRun) -> tuple[torch.dtype, torch.dtype]:
    """dtype of weights and activations, and of gradients and optimizer state."""
    compute: torch.dtype = getattr(torch, run.dtype)
    return compute, torch.float64 if compute == torch.float64 else torch.float32


def build_chunk(run: ProbeRun, stage: int, around: Surroundings, device: str) -> Chunk:
    """The module of a virtual stage. Where results are checked, its values are a shard of the model that one process
    has.

    On the meta device the module has no values yet.
    """
    spec = run.chunk_of(stage)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtypes(run)[0])
    try:
        with torch.device(device):
            chunk = Chunk(run.model, spec, around)
            whole = Chunk(run.model, spec, Surroundings()) if run.check else chunk
    finally:
        torch.set_default_dtype(usual)
    if device != "meta":
        initialise(whole, run.seed)
    if whole is not chunk:
        copy_shard(whole, chunk, around)
    return chunk


class Parameters:
    """Parameters of a rank by the ranks over which gradients are summed: dense ones over dp·cp, experts over
    expert-dp."""

    def __init__(self, run: ProbeRun, chunks: dict[int, Chunk], groups: RankGroups) -> None:
        self.run = run
        self.named: list[tuple[str, int, nn.Parameter]] = [
            (whole_name(name, parameter), stage, parameter)
            for stage, chunk in chunks.items()
            for name, parameter in chunk.named_parameters()
        ]
        self.holders = {
            (name, stage): (groups.place.pp,) if groups.alone else holders(run, name, stage)
            for name, stage, _ in self.named
        }

    def of_kind(self, expert: bool, tp_rank: int, pp_rank: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Parameters whose squares this rank counts in the global norm, and the others."""
        counted: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        seen: set[str] = set()
        for name, stage, parameter in self.named:
            marks = marks_of(parameter)
            if marks.expert != expert:
                continue
            first_holder = self.holders[name, stage][0] == pp_rank and name not in seen
            seen.add(name)
            once = expert or marks.shard is not None or tp_rank == 0
            (counted if first_holder and once else others).append(parameter)
        return counted, others

    def partial_over_tp(self) -> Iterator[Tensor]:
        """Main gradients that must be summed over tensor-parallel ranks, each of which has a part."""
        for _, _, parameter in self.named:
            marks = marks_of(parameter)
            if not marks.expert and marks.partial in ("always", "sequence" if self.run.sequence_parallel else "always"):
                yield main_gradient(parameter)

    def replicas(self) -> dict[Ints, dict[str, list[Tensor]]]:
        """Main gradients of parameters that are held more than once, by holders and by name."""
        by_holders = grouped((self.holders[name, stage], (name, parameter)) for name, stage, parameter in self.named)
        return {
            pp_ranks: {
                name: [main_gradient(parameter) for parameter in replicas]
                for name, replicas in grouped(pairs).items()
                if len(pp_ranks) > 1 or len(replicas) > 1
            }
            for pp_ranks, pairs in by_holders.items()
        }


def main_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient that backward has added up for a parameter: its `main_grad` buffer, or this rank's rows."""
    main: Tensor | None = getattr(parameter, "main_grad", None)
    return local(parameter.grad) if main is None else main


def empty_message(run: ProbeRun, tp: TensorPeers, device: str) -> Tensor:
    """A buffer for one message: [seq/tp, batch, hidden] under sequence parallelism, else [seq, batch, hidden]."""
    length = run.seq_length // (tp.size if tp.sequence_parallel else 1)
    return torch.empty(length, run.micro_batch_size, run.model.hidden_size, dtype=dtypes(run)[0], device=device)


class RankTrainer:
    """A rank's stages and its training step, alone or among the ranks of its groups."""

    def __init__(self, run: ProbeRun, groups: RankGroups, wires: Wires, device: str) -> None:
        self.run, self.groups, self.around, self.device = run, groups, groups.around, device
        around, dense, expert, pp_rank = groups.around, groups.dense, groups.expert, groups.place.pp
        self.clock = RankClock(device)
        dtype, grad_dtype = dtypes(run)
        self.dtype = dtype
        stages, actions = run.stages_of(pp_rank), tuple(run.order.ranks[pp_rank])
        self.flat: list[FlatParameters | ShardedParameters] = []
        fully_sharded = run.fully_sharded and dense.group is not None
        is_meta = fully_sharded and not run.check  # the whole may be more than a device holds
        self.chunks = {stage: build_chunk(run, stage, around, "meta" if is_meta else device) for stage in stages}
        for chunk in self.chunks.values() if fully_sharded else ():
            shard_chunk(chunk, dense, expert, dtype, grad_dtype, gathers_again=run.pp == 1, device=device)
            if is_meta:
                initialise(chunk, run.seed)
        self.parameters = Parameters(run, self.chunks, groups)
        for is_expert, sharding in ((False, dense), (True, expert)):
            counted, others = self.parameters.of_kind(is_expert, around.tp.rank, pp_rank)
            if (counted or others) and fully_sharded and sharding.group is not None:
                self.flat.append(ShardedParameters(counted, others, sharding, run.learning_rate))
            elif counted or others:
                self.flat.append(FlatParameters(counted, others, sharding, grad_dtype, run.learning_rate))
        if self.clock.is_cuda:
            torch.cuda.empty_cache()  # what building needed for a moment is no part of the run
        tables = AttentionTables.of(run.model, run.whole_seq_length, around, self.empty())
        self.pipeline = RankPipeline(run.order, actions, self.chunks, wires, around, tables, self.clock)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for flat in self.flat for parameter in flat.parameters)

    @property
    def experts_one_by_one(self) -> bool:
        """True if this rank has experts, and torch no grouped product for its device and dtype."""
        has_experts = any(isinstance(part, Experts) for chunk in self.chunks.values() for part in chunk.modules())
        return has_experts and not takes_groups(self.empty())

    def empty(self) -> Tensor:
        """A buffer for one message."""
        return empty_message(self.run, self.around.tp, self.device)

    def rehearse(self, on_action: Callable[[str], None]) -> None:
        """Run one made-up micro-batch through every chunk, one after another, and drop its gradients; `on_action` hears
        of each action.

        A kernel is loaded when it is first launched, and a group is connected when it is first used. Both may wait
        until the GPU has finished its running work. Within a step that work can be a receive whose sender waits in the
        same way.
        """
        run = self.run
        batch = synthetic_batch(run.model, run.whole_seq_length, run.micro_batch_size, run.seed, self.device)
        for stage in self.chunks:
            for kind in "FIW" if run.order.splits_backward else "FB":
                action = Action(kind, stage, 0)
                on_action(f"{action} (computing)")
                received = None if needed_by(run.order, action) is None else torch.ones_like(self.empty())
                self.pipeline.run(action, received, [batch], 1.0)
        self.forget()

    def forget(self) -> None:
        """Drop all gradients."""
        for flat in self.flat:
            flat.forget()

    def step(
        self,
        step: int,
        on_action: Callable[[str], None],
        on_gradients: Callable[[], None] | None = None,
        start: Callable[[], None] | None = None,
    ) -> tuple[StepRecord, StepSeconds]:
        """Pipeline, reduction, clipping, optimizer, gathering. `on_gradients` is called after the reduction, `start`
        starts the clock, once there are batches.

        A GPU is not waited for before all of it is under way.
        """
        run = self.run
        batches = [
            synthetic_batch(run.model, run.whole_seq_length, run.micro_batch_size, seed, self.device)
            for seed in (batch_seed(run, step, self.groups.place.dp, mb) for mb in range(run.num_microbatches))
        ]
        (start or self.clock.start)()
        record = self.pipeline.step(batches, 1 / (run.num_microbatches * run.dp * run.cp), on_action)
        marks = [self.clock.mark()]
        on_action("gradients (computing)")
        self.reduce(on_action)
        marks.append(self.clock.mark())
        norm = self.squared_norm()
        marks.append(self.clock.mark())
        if dist.is_initialized():
            dist.all_reduce(norm)
        marks.append(self.clock.mark())
        if on_gradients is not None:
            on_gradients()
        marks.append(self.clock.mark())
        on_action("optimizer (computing)")
        for flat in self.flat:
            flat.step(clip_scale(norm, run.max_norm)[1])
        marks.append(self.clock.mark())
        for flat in self.flat:
            flat.gather()
        marks.append(self.clock.mark())
        return record, self._read(record, norm, marks, on_action)

    def _read(
        self, record: StepRecord, norm: Tensor, marks: Sequence[Any], on_action: Callable[[str], None]
    ) -> StepSeconds:
        """Wait for the running step and read its seconds; `marks` stand between its parts."""
        record.read(self.clock, on_action)
        on_action("gradients (waiting)")
        pipeline_s, reduced_s, measured_s, summed_s, resumed_s = map(self.clock.seconds, marks[:5])
        on_action("optimizer (waiting)")
        stepped_s, end_s = map(self.clock.seconds, marks[5:])
        on_action("loss (waiting)")
        return StepSeconds(
            pipeline_s=pipeline_s,
            reduce_s=reduced_s - pipeline_s,
            optimizer_s=(measured_s - reduced_s) + (stepped_s - resumed_s),
            gather_s=end_s - stepped_s,
            step_s=end_s - (resumed_s - summed_s),
            loss=self._over_all_ranks(record.loss if self.around.tp.rank == 0 else 0.0),
            gradient_norm=float(norm.sqrt()),
        )

    def reduce(self, on_action: Callable[[str], None]) -> None:
        """Sum gradients over every rank that has a part or a replica of them."""
        on_action("gradients (waiting)")
        if isinstance(self.around.tp, GroupPeers):
            all_reduce_flat(self.parameters.partial_over_tp(), self.around.tp.group)
        for pp_ranks, names in sorted(self.parameters.replicas().items()):
            self._sum_replicas(names, self.groups.joined.get(("replicas", pp_ranks)))
        for flat in self.flat:
            flat.reduce()

    def squared_norm(self) -> Tensor:
        """This rank's contribution to the square of the gradients' global norm."""
        return sum((flat.squared_norm() for flat in self.flat), torch.zeros((), device=self.device))

    @staticmethod
    def _sum_replicas(names: dict[str, list[Tensor]], group: Any) -> None:
        sums = [sum(grads[1:], grads[0]) for _, grads in sorted(names.items())]
        if group is not None:
            all_reduce_flat(sums, group)
        for total, (_, grads) in zip(sums, sorted(names.items()), strict=True):
            for grad in grads:
                grad.copy_(total)

    def _over_all_ranks(self, value: float) -> float:
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total)


LEARNING_RATE = 1e-9
"""The optimizer does all its work and moves no weight: nobody's loss makes the gradients."""


def groups_of_one(*sizes: int) -> list[Any]:
    """For each size, a group in which this process is rank 0 and no other rank exists; None for size 1."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=max(sizes), store=FakeStore())
    return [dist.new_group(list(range(size))) if size > 1 else None for size in sizes]


def emulate_exchanges(module: nn.Module) -> None:
    """Replace exchanges by copies on the device: a gather of weights repeats this rank's rows, a scatter of gradients
    keeps this rank's part."""
    from torch.distributed.fsdp import FSDPModule

    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_custom_all_gather(_RepeatedRows())  # type: ignore[arg-type]
            unit.set_custom_reduce_scatter(_OwnPart())  # type: ignore[arg-type]


class _Emulated:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _RepeatedRows(_Emulated):
    """Stands in for torch's `AllGather`: `input_tensor` is this rank's part of `output_tensor`."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        output_tensor.view(group.size(), -1)[1:].copy_(input_tensor)


class _OwnPart(_Emulated):
    """Stands in for torch's `ReduceScatter`."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        output_tensor.copy_(input_tensor.view(group.size(), -1)[0])


def trainer_alone(run: ProbeRun, rank: int, device: str) -> RankTrainer:
    """A rank's stages among emulated peers."""
    place = run.place(rank)
    tp, cp = EmulatedPeers(run.tp, 0, run.sequence_parallel), EmulatedPeers(run.cp)
    sizes = run.dp * run.cp, run.dp * run.cp * run.tp // run.ep
    is_sharded = run.fully_sharded and sizes[0] > 1
    groups = groups_of_one(*sizes) if is_sharded else (None, None)
    dense, expert = (Sharding(group, size, zero=run.zero) for group, size in zip(groups, sizes, strict=True))
    trainer = RankTrainer(
        run.model_copy(update={"learning_rate": LEARNING_RATE}),
        RankGroups(place, run_surroundings(run, tp, ExpertPeers(run.ep), cp), dense, expert, alone=True),
        EmulatedWires(run.stages_of(place.pp), lambda kind: empty_message(run, tp, device).normal_()),
        device,
    )
    for chunk in trainer.chunks.values() if is_sharded else ():
        emulate_exchanges(chunk)
    return trainer
