"""One rank among others that torchrun or Slurm has started, on one node or many."""

from __future__ import annotations

import os
import re
from pathlib import Path

from planner.errors import ProbeError
from planner.probe.launch.folders import run_folder, write_run
from planner.probe.launch.interrupts import removed_when_ended
from planner.probe.result import Failure, RankResult
from planner.probe.run import ProbeRun
from planner.probe.worker.failure import run_worker
from planner.probe.worker.failure_kinds import hint_of
from planner.probe.worker.files import RESULT_FILE
from planner.probe.worker.watch import Watch, meeting_hint
from planner.probe.worker.worker import Worker

_FIRST_PORT, _NUM_PORTS = 29500, 1000


def joins_others() -> bool:
    """True if this process is one of several ranks. Variables that srun sets are translated into those of torchrun.

    A batch script has SLURM_NTASKS too and is one process; only processes that srun starts have SLURM_STEP_NUM_TASKS.
    """
    if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["SLURM_PROCID"], os.environ["SLURM_STEP_NUM_TASKS"]
        os.environ["LOCAL_RANK"] = os.environ.get("SLURM_LOCALID", "0")
        os.environ.setdefault("MASTER_ADDR", first_host(os.environ.get("SLURM_STEP_NODELIST", "localhost")))
        port = _FIRST_PORT + int(os.environ.get("SLURM_JOB_ID", "0")) % _NUM_PORTS
        os.environ.setdefault("MASTER_PORT", str(port))
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def first_host(nodes: str) -> str:
    """The first of Slurm's nodes: `gpu[07-12,20]-ib,login` begins with gpu07-ib."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]  # at commas outside of brackets
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first) or "localhost"


def run_rank(run: ProbeRun, rank: int) -> tuple[RankResult, ...] | Failure:
    """Run this process's rank. Returns all ranks' results on rank 0, none on other ranks, or the failure of this
    rank."""
    with run_folder(keeps_after_error=False) as folder, removed_when_ended(folder):
        return _run_in(folder, run, rank)


def _run_in(folder: Path, run: ProbeRun, rank: int) -> tuple[RankResult, ...] | Failure:
    write_run(folder, run)
    watch = Watch(run, folder, rank)
    watch.start()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    failure = run_worker(lambda: Worker(folder, rank, local_rank, local=False), folder, rank)
    watch.end()
    if failure is not None:
        return failure
    if rank:
        return ()
    paths = [folder / RESULT_FILE.format(other) for other in range(run.world_size)]
    return tuple(RankResult.model_validate_json(path.read_text()) for path in paths)


def rank_error(failure: Failure, run: ProbeRun) -> ProbeError:
    """The error that tells the user how a rank failed."""
    hint = hint_of(failure) or "--debug shows where"
    if failure.phase.startswith("rendezvous"):
        hint = meeting_hint(run.world_size)
    error = ProbeError(
        f"rank {failure.rank} ({run.place(failure.rank)}) failed in {failure.phase}: {failure.message}", hint
    )
    error.add_note(failure.traceback)  # which --debug prints
    error.follows_answer = failure.kind == "lost_peer"  # the rank that failed has the answer
    return error
