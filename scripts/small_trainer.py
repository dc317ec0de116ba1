"""A small GPT that trains for real on CPUs: gloo, 1F1B of torch.distributed.pipelining, data and tensor parallel ranks.

What it leaves behind is what trainers leave: a log in Megatron-LM's form or a CSV, and a trace of torch.profiler for
each rank. `Fault` is what makes it slow; it acts on the program (sleeps, work, sockets, garbage), never on a file.
"""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import ProfilerActivity, profile, record_function, schedule

HIDDEN, HEADS, VOCABULARY = 128, 4, 512
PROFILED_STEPS = 4
TIMERS = ("forward-backward", "forward-compute", "backward-compute", "batch-generator", "all-grads-sync", "optimizer")
SO_MAX_PACING_RATE = 47
"""Linux' option of a socket: the most bytes per second that it sends; Python has no name for it."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The processes and the work of one of them."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    num_microbatches: int = 4
    micro_batch_size: int = 4
    seq_length: int = 64
    layers_per_stage: int = 2

    @property
    def num_ranks(self) -> int:
        return self.tp * self.dp * self.pp

    def __str__(self) -> str:
        sizes = {"tp": self.tp, "dp": self.dp, "pp": self.pp}
        return " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) + f" m{self.num_microbatches}"


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that makes a run slow; seconds are of one step."""

    kind: str = "healthy"
    ranks: tuple[int, ...] = ()
    seconds: float = 0.0
    every: int = 1
    """Steps from one occurrence to the next."""
    leaked_bytes: int = 0
    axis: str = ""
    """The group whose sockets are slow."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run and where it writes."""

    folder: Path
    layout: Layout
    fault: Fault = Fault()
    num_steps: int = 32
    log: str = "megatron"
    """`megatron`, or `csv`."""
    timers: str = "minmax"
    """`minmax` or `all` ranks as Megatron-LM prints them, or `none`."""
    seed: int = 0


class _Sum(torch.autograd.Function):
    """All-reduce of activations in the forward (row-parallel), or of gradients in the backward (column-parallel)."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any, forwards: bool) -> torch.Tensor:
        ctx.group, ctx.forwards = group, forwards
        if forwards:
            values = values.clone()
            dist.all_reduce(values, group=group)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        if not ctx.forwards:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


class Block(nn.Module):
    """A transformer layer, of which each tensor rank holds some heads and a part of the MLP."""

    def __init__(self, tp: int, group: Any) -> None:
        super().__init__()
        self.tp, self.group = tp, group
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN // tp), nn.Linear(HIDDEN // tp, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN // tp), nn.Linear(4 * HIDDEN // tp, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self._split(self.norm1(x))).view(batch, length, 3, HEADS // self.tp, HIDDEN // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self._sum(self.out(mixed.transpose(1, 2).reshape(batch, length, -1)))
        return x + self._sum(self.down(nn.functional.gelu(self.up(self._split(self.norm2(x))))))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(x, self.group, False) if self.tp > 1 else x  # type: ignore[no-any-return]

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(x, self.group, True) if self.tp > 1 else x  # type: ignore[no-any-return]


class Part(nn.Module):
    """The layers of one stage, the embedding before the first and the head behind the last; `before` runs in each."""

    def __init__(self, blocks: list[nn.Module], first: bool, last: bool, before: Callable[[], None]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if first else None
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(HIDDEN, VOCABULARY) if last else None
        self.before = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        x = self.embedding(x) if self.embedding is not None else x
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.head is not None else x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(slots=True)
class Timers:
    """Seconds of the current step by name."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIMERS, 0.0))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin


class Stage(PipelineStage):
    """A stage that annotates and times its passes as Megatron-LM does; waits for its neighbours are outside of them."""

    timers: Timers

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.timers("forward-compute"), record_function("forward_step"):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self.timers("backward-compute"), record_function("backward_step"):
            return super().backward_one_chunk(*args, **kwargs)


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    """Random tokens of one step each; `stall` runs before they are given."""

    def __init__(self, layout: Layout, seed: int, stall: Callable[[int], None]) -> None:
        self.shape = (layout.num_microbatches * layout.micro_batch_size, layout.seq_length + 1)
        self.seed, self.stall = seed, stall

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        self.stall(index)
        return torch.randint(VOCABULARY, self.shape, generator=torch.Generator().manual_seed(self.seed + index))


class Trainer:
    """One rank of a run."""

    def __init__(self, run: Run, rank: int) -> None:
        layout = run.layout
        self.run, self.rank, self.layout, self.timers = run, rank, layout, Timers()
        self.stage_index = rank // (layout.tp * layout.dp)
        self.leaked: list[torch.Tensor] = []
        self.pages = os.sysconf("SC_PAGE_SIZE")
        self.sockets: dict[str, set[int]] = {}
        self.groups = self._groups()
        torch.manual_seed(run.seed + self.stage_index)
        last = self.stage_index == layout.pp - 1
        blocks: list[nn.Module] = [Block(layout.tp, self.groups["tp"]) for _ in range(layout.layers_per_stage)]
        self.part = Part(blocks, self.stage_index == 0, last, self._before_forward)
        self.optimizer = torch.optim.AdamW(self.part.parameters(), lr=1e-4)
        data_rank = rank // layout.tp % layout.dp
        dataset = Tokens(layout, run.seed * 1000 + data_rank << 20, self._before_data)
        self.batches = iter(torch.utils.data.DataLoader(dataset, batch_size=None))
        self.schedule = None
        if layout.pp > 1:
            stage = Stage(
                self.part, self.stage_index, layout.pp, torch.device("cpu"), group=self.groups["pp"],
            )  # fmt: skip
            stage.timers = self.timers
            self.schedule = Schedule1F1B(stage, layout.num_microbatches, loss_fn=loss_of)
        self.step_number = 0
        self._prepare_fault()

    def _groups(self) -> dict[str, Any]:
        """This rank's group of each axis, and the sockets that came with it."""
        layout, mine = self.layout, {}
        axes = {
            "tp": (layout.tp, 1, "TENSOR_MODEL_PARALLEL_GROUP"),
            "dp": (layout.dp, layout.tp, "DATA_PARALLEL_GROUP"),
            "pp": (layout.pp, layout.tp * layout.dp, "PIPELINE_MODEL_PARALLEL_GROUP"),
        }
        for axis, (size, stride, description) in axes.items():
            mine[axis] = None
            if size == 1:
                continue
            for start in range(layout.num_ranks):
                if start // stride % size:
                    continue
                ranks = [start + stride * place for place in range(size)]
                before = _sockets()
                group = dist.new_group(ranks, group_desc=description)
                if self.rank in ranks:
                    mine[axis], self.sockets[axis] = group, _sockets() - before
        return mine

    # ---- what goes wrong ----

    def _prepare_fault(self) -> None:
        fault, layout = self.run.fault, self.layout
        if fault.kind == "slow_link" and self.sockets.get(fault.axis):
            tokens = layout.micro_batch_size * layout.seq_length
            gradients = sum(p.numel() for p in self.part.parameters()) * 4 * 2 * (layout.dp - 1) / layout.dp
            activations = tokens * HIDDEN * 4 * layout.num_microbatches
            num_bytes = {"dp": gradients, "pp": activations, "tp": 4 * layout.layers_per_stage * activations / 2}
            rate = round(num_bytes[fault.axis] / fault.seconds)
            for descriptor in self.sockets[fault.axis]:
                with socket.socket(fileno=os.dup(descriptor)) as link:
                    link.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
        if fault.kind == "computes" and self.rank in fault.ranks:
            self.extra = torch.randn(HIDDEN, HIDDEN)
            begin = time.process_time()
            for _ in range(200):
                self.extra @ self.extra
            self.num_extra = round(fault.seconds / layout.num_microbatches / ((time.process_time() - begin) / 200))
        if fault.kind == "host_bound":
            for module in self.part.modules():
                if not list(module.children()):
                    module.register_forward_pre_hook(self._python_loop)
            leaves = sum(not list(module.children()) for module in self.part.modules())
            self.loop_s = fault.seconds / layout.num_microbatches / leaves
        if fault.kind == "collects":
            gc.disable()
            begin = time.process_time()
            kept: list[list[object]] = [[None] for _ in range(20_000)]
            gc.collect()
            begin = time.process_time()
            gc.collect()
            per_object_s = (time.process_time() - begin) / (len(kept) + len(gc.get_objects()) - 20_000)
            kept += [[None] for _ in range(round(fault.seconds / per_object_s))]
            self.kept = kept

    def _python_loop(self, *_: Any) -> None:
        """Busy Python, as of trainers that decide in Python what to launch."""
        end, count = time.perf_counter() + self.loop_s, 0
        while time.perf_counter() < end:
            count += 1

    def _before_forward(self) -> None:
        fault = self.run.fault
        if self.rank not in fault.ranks:
            return
        if fault.kind == "sleeps":
            time.sleep(fault.seconds / self.layout.num_microbatches)
        if fault.kind == "computes":
            for _ in range(self.num_extra):
                self.extra @ self.extra

    def _before_data(self, index: int) -> None:
        fault = self.run.fault
        if fault.kind == "data_stall" and self.rank in fault.ranks and index % fault.every == fault.every - 1:
            time.sleep(fault.seconds * fault.every)

    def _after_step(self) -> None:
        fault = self.run.fault
        if fault.kind == "leaks" and self.rank in fault.ranks:
            self.leaked.append(torch.randn(fault.leaked_bytes // 4))
            if fault.seconds:  # statistics over everything that was ever seen: each step does more
                for values in self.leaked:
                    values.mean()
        if fault.kind == "collects" and self.step_number % fault.every == 0:
            gc.collect()

    # ---- a step ----

    def step(self) -> float:
        """One optimizer step; its loss, 0 where this rank has none."""
        self.step_number += 1
        self.timers.seconds.update(dict.fromkeys(TIMERS, 0.0))
        edge = self.stage_index in (0, self.layout.pp - 1)
        with self.timers("batch-generator"):
            batch = next(self.batches) if edge else torch.empty(0)
        with self.timers("forward-backward"):
            losses = self._pipelined(batch) if self.schedule is not None else self._accumulated(batch)
        if self.layout.dp > 1:
            with self.timers("all-grads-sync"), record_function("all-grads-sync"):
                self._sync_gradients()
        with self.timers("optimizer"):
            self._clip()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._after_step()
        return sum(float(loss.detach()) for loss in losses) / len(losses) if losses else 0.0

    def _pipelined(self, batch: torch.Tensor) -> list[torch.Tensor]:
        assert self.schedule is not None
        losses: list[torch.Tensor] = []
        inputs = (batch[:, :-1],) if self.stage_index == 0 else ()
        if self.stage_index == self.layout.pp - 1:
            self.schedule.step(*inputs, target=batch[:, 1:], losses=losses, return_outputs=False)
        else:
            self.schedule.step(*inputs, return_outputs=False)
        return losses

    def _accumulated(self, batch: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for part in batch.chunk(self.layout.num_microbatches):
            with self.timers("forward-compute"), record_function("forward_step"):
                loss = loss_of(self.part(part[:, :-1]), part[:, 1:]) / self.layout.num_microbatches
            with self.timers("backward-compute"), record_function("backward_step"):
                loss.backward()
            losses.append(loss * self.layout.num_microbatches)
        return losses

    def _sync_gradients(self) -> None:
        """All-reduce in buckets of one layer's size, all of them under way at once."""
        gradients = [p.grad for p in self.part.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / self.layout.dp
        works = [
            dist.all_reduce(bucket, group=self.groups["dp"], async_op=True)
            for bucket in flat.chunk(self.layout.layers_per_stage)
        ]
        for work in works:
            assert work is not None
            work.wait()
        for gradient, values in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(values.view_as(gradient))

    def _clip(self) -> None:
        """Scale gradients by their norm over all ranks, as every trainer does: each step ends on all ranks at once."""
        gradients = [p.grad for p in self.part.parameters() if p.grad is not None]
        norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        dist.all_reduce(norm)
        scale = float((1.0 / (norm.sqrt() + 1e-6)).clamp(max=1.0))
        for gradient in gradients:
            gradient.mul_(scale)

    def resident_bytes(self) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * self.pages


def _sockets() -> set[int]:
    """The descriptors of this process that are sockets with a peer."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(entry))) as candidate:
                candidate.getpeername()
                if candidate.family in (socket.AF_INET, socket.AF_INET6):
                    found.add(int(entry))
        except OSError:
            continue
    return found


class Log:
    """The log of a run, written by its last rank in Megatron-LM's form, or as CSV."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.path = run.folder / ("train.log" if run.log == "megatron" else "steps.csv")
        self.peaks = [0] * run.layout.num_ranks
        layout = run.layout
        if run.log == "megatron":
            head = (
                f"using world size: {layout.num_ranks}, data-parallel size: {layout.dp}, context-parallel size: 1, "
                f"tensor-model-parallel size: {layout.tp}, pipeline-model-parallel size: {layout.pp}\n"
                "------------------------ arguments ------------------------\n"
                + "".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in self._arguments())
                + "-------------------- end of arguments ---------------------\n"
            )
        else:
            head = "timestamp,step,step_time_s,memory_bytes,loss\n"
        self.path.write_text(head)

    def _arguments(self) -> list[tuple[str, object]]:
        fault, layout = self.run.fault, self.run.layout
        collects = fault.kind == "collects"
        return [
            ("log_interval", 1), ("manual_gc", collects), ("manual_gc_interval", fault.every if collects else 0),
            ("micro_batch_size", layout.micro_batch_size), ("seq_length", layout.seq_length),
            ("train_iters", self.run.num_steps),
        ]  # fmt: skip

    def add(self, number: int, seconds: float, loss: float, memory: list[int], timers: list[list[float]]) -> None:
        """Write what is printed after a step; `timers` by rank."""
        now, run, layout = datetime.now(), self.run, self.run.layout
        self.peaks = [max(pair) for pair in zip(self.peaks, memory, strict=True)]
        if run.log == "csv":
            text = f"{now.isoformat()},{number},{seconds:.6f},{max(memory)},{loss:.4f}\n"
        else:
            batch = layout.dp * layout.num_microbatches * layout.micro_batch_size
            text = (
                f" [{now}] iteration {number:8d}/{run.num_steps:8d} | consumed samples: {number * batch:12d} |"
                f" elapsed time per iteration (ms): {seconds * 1e3:.1f} | learning rate: 1.000000E-04 |"
                f" global batch size: {batch:5d} | lm loss: {loss:.6E} | number of skipped iterations:   0 |"
                f" number of nan iterations:   0 |\n"
            )
            if number % 2 == 0:
                text += "".join(self._memory(rank, number, used) for rank, used in enumerate(memory))
            text += self._timers(timers)
        with self.path.open("a") as file:
            file.write(text)

    def _memory(self, rank: int, number: int, used: int) -> str:
        return (
            f"[Rank {rank}] (after {number} iterations) memory (MB) | allocated: {used / 2**20:.2f} |"
            f" max allocated: {self.peaks[rank] / 2**20:.2f}\n"
        )

    def _timers(self, timers: list[list[float]]) -> str:
        if self.run.timers == "none":
            return ""
        by_name = dict(zip(TIMERS, zip(*timers, strict=True), strict=True))
        by_name = {name: values for name, values in by_name.items() if max(values) > 0}
        if self.run.timers == "all":
            lines = ["    times across ranks (ms):"]
            for name, values in by_name.items():
                lines.append(f"  {name}:")
                lines += [f"     rank {rank:2d}: {value * 1e3:.2f}" for rank, value in enumerate(values)]
        else:
            lines = ["(min, max) time across ranks (ms):"]
            for name, values in by_name.items():
                lines.append(f"    {(name + ' ').ljust(48, '.')}: ({min(values) * 1e3:.2f}, {max(values) * 1e3:.2f})")
        return "\n".join(lines) + "\n"


def rank_main(rank: int, run: Run) -> None:
    """Train as one rank of a run, and leave its trace; the last rank writes the log."""
    torch.set_num_threads(1)
    layout = run.layout
    dist.init_process_group(
        "gloo", init_method=f"file://{run.folder}/store", rank=rank, world_size=layout.num_ranks,
    )  # fmt: skip
    trainer = Trainer(run, rank)
    log = Log(run) if rank == layout.num_ranks - 1 else None
    plan = schedule(wait=run.num_steps - PROFILED_STEPS - 1, warmup=1, active=PROFILED_STEPS)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU], schedule=plan) as profiler:
        last_s = time.perf_counter()
        for number in range(1, run.num_steps + 1):
            loss = trainer.step()
            now_s = time.perf_counter()
            told = torch.tensor([trainer.resident_bytes(), *(trainer.timers.seconds[name] for name in TIMERS)]).double()
            gathered = [torch.empty_like(told) for _ in range(layout.num_ranks)]
            dist.all_gather(gathered, told)
            if log is not None:
                memory = [int(values[0]) for values in gathered]
                log.add(number, now_s - last_s, loss, memory, [values[1:].tolist() for values in gathered])
            last_s = now_s
            profiler.step()
    profiler.export_chrome_trace(str(run.folder / f"rank{rank}.json.gz"))
    dist.barrier()
    dist.destroy_process_group()
