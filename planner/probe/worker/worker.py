"""One rank of a probe: joins the others, runs the steps, and leaves its measurements, or why it has none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from planner.files import write_text
from planner.probe.device_state import Monitor
from planner.probe.model.kernels_seen import KernelsSeen
from planner.probe.rank.build_chunk import dtypes
from planner.probe.rank.clock import Clock
from planner.probe.rank.common_clock import start_together
from planner.probe.rank.exchanges import barrier, measure_exchanges
from planner.probe.rank.groups import RankGroups
from planner.probe.rank.quiet_chunks import with_quiet_seconds
from planner.probe.rank.reference import Reference, check_gradients, check_steps, compute_reference
from planner.probe.rank.shared_gpu import HostWires, as_another_host
from planner.probe.rank.training import Trainer
from planner.probe.rank.wires import GroupWires
from planner.probe.result import Check, ChunkSeconds, RankMemory, RankResult, TimedAction
from planner.probe.run import ProbeRun
from planner.probe.torch_build import this_build
from planner.probe.worker.chunk_seconds import chunk_seconds
from planner.probe.worker.files import RESULT_FILE, RUN_FILE, STATUS_FILE
from planner.probe.worker.handshake import Identity, require_agreement
from planner.probe.worker.status import START_TIMEOUT_S, WAITING, StatusFile
from planner.probe.worker.step_loop import StepLoop


class Worker:
    """One rank, which keeps its files in one folder."""

    def __init__(self, folder: Path, rank: int, local_rank: int, local: bool) -> None:
        """`local`: all ranks share the folder, and meet in a file there; else as MASTER_ADDR and MASTER_PORT say."""
        self.folder, self.rank, self.local_rank, self.local = folder, rank, local_rank, local
        self.run = ProbeRun.model_validate_json((folder / RUN_FILE).read_text())
        self.status = StatusFile(folder / STATUS_FILE.format(rank))
        self.device: str = self.run.device
        self.clock_error_s: float | None = None
        """The most by which this rank's clock may differ from rank 0's in the last step."""
        self.attention_kernels: tuple[str, ...] = ()
        self.monitor = Monitor()

    def main(self) -> None:
        """Run all phases of the rank in order."""
        run = self.run
        self.status.enter("rendezvous", WAITING)
        store = self.meet()
        self.status.enter("handshake")
        self.join(store)
        self.status.enter("build", f"groups {WAITING}")
        grid = RankGroups(run, self.rank)
        trainer = self.build(grid)
        static_bytes = self.static_memory()
        self.status.enter("rehearsal")
        with self.writing_down_attention():
            trainer.rehearse(self.status.at)
        reference = self.reference(run.warm_up_steps + run.num_steps) if run.check else None
        checks: list[Check] = []
        loop = StepLoop(run, self.agree)
        for step, phase in loop:
            self.status.enter(phase)
            if trainer.clock.is_cuda:
                torch.cuda.reset_peak_memory_stats()
            on_gradients = partial(self.check, trainer, reference, checks) if step == 0 else None
            if step == loop.last_cold:
                self.monitor.begin_load()
            loop.add(*trainer.step(step, self.status.at, on_gradients, partial(self.start, trainer.clock)))
        self.monitor.after()
        result = self.report(trainer, loop, self.memory(static_bytes))
        self.status.enter("chunks without messages")
        chunks = self.quiet(trainer, result.chunks)
        self.status.enter("exchanges")
        exchanges = measure_exchanges(trainer, self.status.at)
        self.status.enter("report")
        if reference is not None:
            checks += check_steps(reference, loop.all_steps, dtypes(run)[0])
        result = result.model_copy(update={"checks": tuple(checks), "exchanges": exchanges, "chunks": chunks})
        self.write(result)
        self.gather(result)
        self.barrier()
        self.status.enter("done")
        dist.destroy_process_group()

    def meet(self) -> Any:
        """The store that all ranks share."""
        untyped = cast(Any, dist)
        if self.local:
            return untyped.FileStore(str(self.folder / "store"), self.run.world_size)
        return next(untyped.rendezvous("env://", self.rank, self.run.world_size, timeout=self.timeout))[0]

    def join(self, store: Any) -> None:
        """Connect the ranks after checking that they run the same software on devices of their own."""
        self.use_device()
        store.set_timeout(self.timeout)
        self.status.at(WAITING)
        require_agreement(store, self.rank, self.run.world_size, self.identity())
        if self.run.ranks_per_gpu > 1:
            os.environ.update(as_another_host(self.rank))
        dist.init_process_group(
            self.run.exchanges_by,
            store=store,
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
        number = 0 if visible == 1 else self.local_rank // self.run.ranks_per_gpu
        if number >= visible:
            raise RuntimeError(f"no GPU for rank {self.rank}, number {number} of its machine: torch sees {visible}")
        self.monitor = Monitor(partial(this_build().state, str(torch.cuda.get_device_properties(number).uuid)))
        self.monitor.before()
        self.device = f"cuda:{number}"
        torch.cuda.set_device(self.device)

    def device_id(self) -> str:
        """The unique id of the GPU, and of the rank's share where several ranks have it; empty on a CPU."""
        if self.run.device == "cpu":
            return ""
        uuid, shares = torch.cuda.get_device_properties(self.device).uuid, self.run.ranks_per_gpu
        return str(uuid) if shares == 1 else f"{uuid}, share {self.local_rank % shares} of {shares}"

    def identity(self) -> Identity:
        return Identity(torch.__version__, os.uname().nodename, self.device_id())

    def barrier(self) -> None:
        """Wait for all ranks, once this one's GPU has nothing left to compute."""
        if self.run.device == "cuda":
            torch.cuda.synchronize()
        self.status.at(WAITING)
        barrier(self.device)

    def agree(self, enough: bool) -> bool:
        """True if all ranks have enough."""
        self.status.at(WAITING)
        all_enough = torch.tensor(float(enough), device=self.device)
        dist.all_reduce(all_enough, dist.ReduceOp.MIN)
        return float(all_enough) > 0

    def start(self, clock: Clock) -> None:
        """Start the clocks of all ranks together. On the CPU of one machine all clocks are the same."""
        self.barrier()
        is_shared = self.local and not clock.is_cuda
        self.clock_error_s = start_together(clock, self.rank, self.device, is_shared)

    def build(self, grid: RankGroups) -> Trainer:
        """Stages, optimizer state and wires of this rank."""
        run, place = self.run, grid.place
        self.status.at("")
        trainer: Trainer

        def empty() -> Any:
            return trainer.empty()

        passes_host = run.device == "cuda" and run.exchanges_by == "gloo"
        wires = (HostWires if passes_host else GroupWires)(run.order, place.pp, grid.beside, grid.wires, empty)
        trainer = Trainer(
            run,
            place.pp,
            grid.around,
            wires,
            self.device,
            grid.dense,
            grid.expert,
            grid.holders,
            grid.replicas,
            place.dp,
        )
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

    def reference(self, num_steps: int) -> Reference:
        """The results of one process, which rank 0 computes and sends to the others."""
        self.status.enter("reference", "" if self.rank == 0 else WAITING)
        results: list[Any] = [compute_reference(self.run, num_steps, self.status.at) if self.rank == 0 else None]
        dist.broadcast_object_list(results)
        return cast(Reference, results[0])

    def quiet(self, trainer: Trainer, chunks: tuple[ChunkSeconds, ...]) -> tuple[ChunkSeconds, ...]:
        """The seconds of chunks on GPUs, also without the messages between stages."""
        if self.run.device == "cpu" or self.run.pp == 1:
            return chunks
        self.barrier()
        return with_quiet_seconds(trainer, chunks, self.status.at)

    def check(self, trainer: Trainer, reference: Reference | None, checks: list[Check]) -> None:
        if reference is not None:
            dtype = dtypes(self.run)[0]
            checks.append(check_gradients(reference, trainer.parameters, trainer.flat, trainer.around, dtype))

    def static_memory(self) -> int:
        return torch.cuda.memory_allocated() if self.run.device == "cuda" else 0

    def memory(self, static_bytes: int) -> RankMemory | None:
        """Device memory of the last step; None on the CPU."""
        if self.run.device == "cpu":
            return None
        free, total = torch.cuda.mem_get_info()
        return RankMemory(
            static_bytes=static_bytes,
            peak_allocated_bytes=torch.cuda.max_memory_allocated(),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(),
            device_used_bytes=total - free,
        )

    def report(self, trainer: Trainer, loop: StepLoop, memory: RankMemory | None) -> RankResult:
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
            actions=tuple(
                TimedAction(action=str(timed.action), ready_s=timed.ready_s, start_s=timed.start_s, end_s=timed.end_s)
                for timed in loop.record.actions
            ),
            chunks=chunk_seconds(loop.actions),
            peak_in_flight_chunks=loop.record.peak_in_flight,
            memory=memory,
            clock_error_s=self.clock_error_s,
            attention_kernels=self.attention_kernels,
            experts_one_by_one=trainer.experts_one_by_one,
            device_states=tuple(self.monitor.states),
        )

    def gather(self, result: RankResult) -> None:
        """Collect the results of all ranks in rank 0's folder, where ranks have folders of their own."""
        if self.local:
            return
        self.status.at(WAITING)
        results: list[Any] = [None] * self.run.world_size
        dist.all_gather_object(results, result)
        for other in results if self.rank == 0 else ():
            self.write(other)

    def write(self, result: RankResult) -> None:
        write_text(self.folder / RESULT_FILE.format(result.rank), result.model_dump_json(), force=True)
