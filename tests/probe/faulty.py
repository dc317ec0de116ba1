"""Ranks that fail on purpose: children for the launcher that break one thing and then run as usual."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from planner.probe.launch.process import Start, rank_process, stage_process
from planner.probe.model.chunk import Chunk
from planner.probe.rank import worker
from planner.probe.rank.gradients import FlatParameters
from planner.probe.rank.pipeline import GroupWires, RankPipeline
from planner.probe.rank.training import RankTrainer
from planner.probe.rank.worker import Worker

SICK_RANK = 1
NUM_CHUNKS = 2
ENDED = "ended"


def _mark() -> None:
    """Note the moment of the fault, for a script that asks how long it takes until the command ends."""
    mark = os.environ.get("PLAN_FAULT_MARK")
    if mark:
        Path(mark).write_text(str(time.time()))


def at(action_text: str, fault: Callable[[], None]) -> None:
    """Have `fault` happen when the rank comes to an action; to one of the first micro-batch, when it rehearses."""
    healthy = RankPipeline.run

    def run(self: RankPipeline, action: Any, *args: Any) -> Any:
        if str(action) == action_text:
            _mark()
            fault()
        return healthy(self, action, *args)

    RankPipeline.run = run  # type: ignore[method-assign]


def out_of_memory_error() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of …")


def raise_error() -> None:
    raise RuntimeError("boom\nand more")


def killed(start: Start, rank: int, local_rank: int) -> None:
    if rank == SICK_RANK:
        at("1F1", lambda: os.kill(os.getpid(), signal.SIGKILL))
    rank_process(start, rank, local_rank)


def raising(start: Start, rank: int, local_rank: int) -> None:
    if rank == SICK_RANK:
        at("1B1", raise_error)
    rank_process(start, rank, local_rank)


def out_of_memory(start: Start, rank: int, local_rank: int) -> None:
    if rank == SICK_RANK:
        at("1F1", out_of_memory_error)
    rank_process(start, rank, local_rank)


def stage_out_of_memory(start: Start, rank: int, local_rank: int) -> None:
    at("1F0", out_of_memory_error)
    stage_process(start, rank, local_rank)


def ended(start: Start, rank: int, local_rank: int) -> None:
    """One rank raises; then the other ends without a word, as where a library lost its peer and ends the process."""
    raised = start.folder / "raised"

    def fault() -> None:
        if rank == SICK_RANK:
            raised.touch()
            raise_error()
        while not raised.exists():
            time.sleep(0.01)
        os._exit(3)

    at("1B1" if rank == SICK_RANK else "0F2", fault)
    rank_process(start, rank, local_rank)


def hanging(start: Start, rank: int, local_rank: int) -> None:
    if rank == SICK_RANK:
        at("1F1", lambda: time.sleep(1000))
    rank_process(start, rank, local_rank)


def hanging_in_reduction(start: Start, rank: int, local_rank: int) -> None:
    if rank == SICK_RANK:
        RankTrainer.reduce = lambda *_: time.sleep(1000)  # type: ignore[method-assign,assignment,return-value]
    rank_process(start, rank, local_rank)


def hanging_in_optimizer(start: Start, rank: int, local_rank: int) -> None:
    if rank == SICK_RANK:
        FlatParameters.step = lambda *_: time.sleep(1000)  # type: ignore[method-assign,assignment]
    rank_process(start, rank, local_rank)


def hanging_at_its_end(start: Start, rank: int, local_rank: int) -> None:
    """One rank leaves a file beside the folder of its run, should it ever come to its end."""

    def late() -> None:
        time.sleep(60)
        (start.folder.parent / ENDED).touch()

    if rank == SICK_RANK:
        dist.destroy_process_group = late
    rank_process(start, rank, local_rank)


def diverged(start: Start, rank: int, local_rank: int) -> None:
    RankTrainer._over_all_ranks = lambda self, value: math.nan  # type: ignore[method-assign,assignment]
    rank_process(start, rank, local_rank)


def refusing_the_unrehearsed(start: Start, rank: int, local_rank: int) -> None:
    """No receive may be under way when a chunk runs for the first time."""
    done = {"forward": 0, "backward": 0}
    forward, backward, begin = Chunk.forward, torch.autograd.backward, GroupWires.begin

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            done[name] += 1
            return call(*args, **kwargs)

        return counting

    def begun(self: GroupWires) -> None:
        if min(done.values()) < NUM_CHUNKS:
            raise RuntimeError(f"not rehearsed: {done}")
        begin(self)

    Chunk.forward = counted("forward", forward)  # type: ignore[method-assign]
    torch.autograd.backward = counted("backward", backward)
    GroupWires.begin = begun  # type: ignore[method-assign]
    rank_process(start, rank, local_rank)


def other_torch(start: Start, rank: int, local_rank: int) -> None:
    if rank == SICK_RANK:
        torch.__version__ = "2.6.0"  # type: ignore[assignment]
    rank_process(start, rank, local_rank)


def leaving_its_pid(start: Start, rank: int, local_rank: int, hangs: bool = True) -> None:
    """Each rank leaves its number beside the folder of its run once it computes; rank 1 hangs then."""

    def leave() -> None:
        (start.folder.parent / f"pid{rank}").write_text(str(os.getpid()))

    at(f"{rank}F0", leave)
    if hangs:
        at("1F1", lambda: time.sleep(1000))
    rank_process(start, rank, local_rank)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _stopping_in(module: Any, name: str) -> Callable[[], None]:
    """A fault that stops the process where `name` of `module` is called first."""

    def fault() -> None:
        healthy = getattr(module, name)

        def stop_first(*args: Any, **kwargs: Any) -> Any:
            _mark()
            stop()
            return healthy(*args, **kwargs)

        setattr(module, name, stop_first)

    return fault


STOPS = {
    "build": _stopping_in(Worker, "build"), "reference": _stopping_in(worker, "compute_reference"),
    "rehearsal": _stopping_in(RankTrainer, "rehearse"), "step": lambda: at("1F1", stop),
    "exchanges": _stopping_in(worker, "measure_exchanges"),
}  # fmt: skip
"""Faults that stop a rank's process (SIGSTOP), by the phase in which they do."""


def stopped(start: Start, rank: int, local_rank: int, phase: str = "", sick_rank: int = SICK_RANK) -> None:
    if rank == sick_rank:
        STOPS[phase]()
    rank_process(start, rank, local_rank)


def slow_reference(start: Start, rank: int, local_rank: int, batch_s: float = 0.0) -> None:
    """Rank 0 takes longer over the results of one process than ranks wait for each other elsewhere."""
    healthy = worker.synthetic_batch

    def late(*args: Any) -> Any:
        time.sleep(batch_s)
        return healthy(*args)

    worker.synthetic_batch = late
    worker.START_TIMEOUT_S = 2.5
    rank_process(start, rank, local_rank)


def without_memory(start: Start, rank: int, local_rank: int) -> None:
    """The host's allocator refuses a rank's weights."""
    if rank == SICK_RANK:
        Worker.build = lambda *_: torch.empty(2**60)  # type: ignore[method-assign,assignment,return-value]
    rank_process(start, rank, local_rank)


def nccl_says(last_error: str, kind: str = "unhandled system error") -> None:
    """Raise what torch raises where NCCL fails."""
    raise dist.DistBackendError(
        f"NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:268, {kind} (run with NCCL_DEBUG=INFO for "
        f"details), NCCL version 2.21.5\nncclSystemError: System call (e.g. socket, malloc) or external library call "
        f"failed or device error. \nLast error:\n{last_error}"
    )


def nccl_fails(start: Start, rank: int, local_rank: int, last_error: str = "") -> None:
    if rank == SICK_RANK:
        at("1F1", lambda: nccl_says(last_error))
    rank_process(start, rank, local_rank)
