"""One rank of a probe: joins the others, runs the steps, and leaves its measurements, or why it has none."""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from planner.errors import PlannerError
from planner.files import write_text
from planner.probe.grid import Grid
from planner.probe.reference import (
    check_gradients,
    check_steps,
    compute_reference,
    load_reference,
    save_reference,
)
from planner.probe.result import Check, Failure, RankMemory, RankResult, StepSeconds, TimedAction
from planner.probe.run import ProbeRun
from planner.probe.status import Status
from planner.probe.training import Trainer, dtypes
from planner.probe.wires import GroupWires

RUN_FILE, RESULT_FILE, FAILURE_FILE = "run.json", "rank{}.json", "rank{}.failure.json"
STATUS_FILE, STACK_FILE, LOG_FILE = "rank{}.status", "rank{}.stack", "rank{}.log"
REFERENCE_FILE = "reference.pt"
EXIT_FAILED = 5


class Worker:
    """One rank in one folder."""

    def __init__(self, folder: Path, rank: int, local_rank: int, local: bool) -> None:
        """`local`: all ranks share the folder, and meet in a file there; else as MASTER_ADDR and MASTER_PORT say."""
        self.folder, self.rank, self.local = folder, rank, local
        self.run = ProbeRun.model_validate_json((folder / RUN_FILE).read_text())
        self.status = Status(folder / STATUS_FILE.format(rank))
        self.device = "cpu" if self.run.device == "cpu" else f"cuda:{local_rank}"

    def main(self) -> None:
        """All phases, in order."""
        run = self.run
        self.status.enter("rendezvous")
        self.join()
        self.status.enter("build")
        grid = Grid(run, self.rank)
        trainer = self.build(grid)
        memory = self.static_memory()
        num_steps = run.warm_up_steps + run.num_steps
        if run.check:
            self.status.enter("reference")
            if self.rank == 0:
                save_reference(compute_reference(run, num_steps), self.folder / REFERENCE_FILE)
            dist.barrier()
        steps, checks = [], []
        for step in range(num_steps):
            self.status.enter("warm-up" if step < run.warm_up_steps else f"step {step - run.warm_up_steps}")
            self.barrier()
            if trainer.clock.is_cuda and step == num_steps - 1:
                torch.cuda.reset_peak_memory_stats()
            check = (lambda: checks.append(self.check(trainer))) if run.check and step == 0 else (lambda: None)
            record, seconds = trainer.step(step, self.status.at, check)
            steps.append(seconds)
        self.status.enter("report")
        if run.check:
            checks += check_steps(load_reference(self.folder / REFERENCE_FILE), steps, dtypes(run)[0])
        self.report(trainer, steps[run.warm_up_steps :], record, checks, memory)
        self.barrier()
        self.status.enter("done")
        dist.destroy_process_group()

    def join(self) -> None:
        """Meet the other ranks, and make sure that all of them run the same software on devices of their own."""
        if self.run.device == "cuda":
            torch.cuda.set_device(self.device)
        backend = "gloo" if self.run.device == "cpu" else "nccl"
        dist.init_process_group(
            backend,
            init_method=None if self.local else "env://",
            store=cast(Any, dist).FileStore(str(self.folder / "store"), self.run.world_size) if self.local else None,
            rank=self.rank,
            world_size=self.run.world_size,
            timeout=timedelta(seconds=2 * self.run.timeout_s + 30),  # the launcher is to notice first
        )
        mine = (torch.__version__, os.uname().nodename, self.device_id())
        everyone: list[Any] = [None] * self.run.world_size
        dist.all_gather_object(everyone, mine)
        agree(everyone)

    def device_id(self) -> str:
        return "" if self.run.device == "cpu" else str(torch.cuda.get_device_properties(self.device).uuid)

    def barrier(self) -> None:
        if self.run.device == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def build(self, grid: Grid) -> Trainer:
        """Stages, optimizer state and wires of this rank."""
        run, place = self.run, grid.place
        trainer: Trainer

        def empty() -> Any:
            return trainer.empty()

        wires = GroupWires(run.order, place.pp, grid.beside, grid.wires, empty)
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
        for flat in trainer.flat:
            flat.allocate_state()
        return trainer

    def check(self, trainer: Trainer) -> Check:
        reference = load_reference(self.folder / REFERENCE_FILE)
        return check_gradients(reference, trainer.parameters, trainer.flat, trainer.around, dtypes(self.run)[0])

    def static_memory(self) -> int:
        return torch.cuda.memory_allocated() if self.run.device == "cuda" else 0

    def report(
        self, trainer: Trainer, steps: list[StepSeconds], record: Any, checks: list[Check], static_bytes: int
    ) -> None:
        """Write what was measured."""
        place = self.run.place(self.rank)
        memory = None
        if trainer.clock.is_cuda:
            free, total = torch.cuda.mem_get_info()
            memory = RankMemory(
                static_bytes=static_bytes,
                peak_allocated_bytes=torch.cuda.max_memory_allocated(),
                peak_reserved_bytes=torch.cuda.max_memory_reserved(),
                device_used_bytes=total - free,
            )
        result = RankResult(
            rank=self.rank,
            stage=place.pp,
            dp=place.dp,
            tp=place.tp,
            torch_version=torch.__version__,
            device_name="cpu" if memory is None else torch.cuda.get_device_name(),
            num_parameters=trainer.num_parameters,
            steps=tuple(steps),
            actions=tuple(
                TimedAction(action=str(timed.action), ready_s=timed.ready_s, start_s=timed.start_s, end_s=timed.end_s)
                for timed in record.actions
            ),
            peak_in_flight_chunks=record.peak_in_flight,
            memory=memory,
            checks=tuple(checks),
        )
        write_text(self.folder / RESULT_FILE.format(self.rank), result.model_dump_json(), force=True)


def agree(everyone: list[tuple[str, str, str]]) -> None:
    """Raise where ranks run different versions of torch, or two of them share one GPU (NCCL refuses that)."""
    devices: dict[tuple[str, str], int] = {}
    for rank, (version, host, device) in enumerate(everyone):
        if version != everyone[0][0]:
            raise RuntimeError(f"rank {rank} on {host} runs torch {version}, rank 0 runs torch {everyone[0][0]}")
        if device and (host, device) in devices:
            raise RuntimeError(f"ranks {devices[host, device]} and {rank} share one GPU ({device} of {host})")
        devices[host, device] = rank


def failure_of(error: BaseException, rank: int, run: ProbeRun | None, where: str) -> Failure:
    """An exception as the file that the launcher reads."""
    text = f"{type(error).__name__}: {error}".splitlines()[0][:500]
    memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
    lost = any(sign in str(error) for sign in ("Connection closed by peer", "Connection reset by peer", "Broken pipe"))
    return Failure(
        rank=rank,
        stage=0 if run is None else run.place(rank).pp,
        phase=where,
        kind="out_of_memory" if memory else "lost_peer" if lost else "error",
        message=text,
        traceback="".join(traceback.format_exception(error)),
        time_s=time.monotonic(),
        asked_bytes=asked_bytes(str(error)) if memory else None,
    )


def asked_bytes(message: str) -> int | None:
    """What an allocator says it was asked for: `Tried to allocate 2.50 GiB`, `you tried to allocate 1024 bytes`."""
    match = re.search(r"ried to allocate ([0-9.]+) ?(bytes|KiB|MiB|GiB)", message)
    if match is None:
        return None
    return round(float(match[1]) * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2]])


def attempt(folder: Path, rank: int, local_rank: int, local: bool = True) -> Failure | None:
    """Run one rank; what went wrong, also written into the folder, or None."""
    worker: Worker | None = None
    try:
        worker = Worker(folder, rank, local_rank, local)
        worker.main()
    except Exception as error:
        where = "start" if worker is None else worker.status.phase
        failure = failure_of(error, rank, None if worker is None else worker.run, where)
        with suppress(PlannerError):  # a full disk: the launcher still has the log
            write_text(folder / FAILURE_FILE.format(rank), failure.model_dump_json(), force=True)
        traceback.print_exc()
        return failure
    return None


def child(folder: Path, rank: int, local_rank: int) -> None:
    """A rank as a process of its own, beside its launcher: it outlives neither Ctrl-C there nor the launcher's end."""
    os.setsid()
    threading.Thread(target=_die_with_launcher, daemon=True).start()
    log = os.open(folder / LOG_FILE.format(rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack = (folder / STACK_FILE.format(rank)).open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    failure = attempt(folder, rank, local_rank)
    sys.stdout.flush()
    os._exit(0 if failure is None else EXIT_FAILED)  # threads of a lost process group must not hold the process back


def _die_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    if launcher is not None:
        multiprocessing.connection.wait([launcher.sentinel])
        os._exit(EXIT_FAILED)
