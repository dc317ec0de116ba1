"""One rank among others that torchrun or Slurm has started, on one node or many."""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from planner.answer import Plan
from planner.errors import ProbeError
from planner.files import write_text
from planner.probe.plan_side.gpu_run import ranks_result, ranks_run
from planner.probe.plan_side.laptop_run import laptop_result, laptop_run
from planner.probe.result import Failure, Measured, ProbeResult, RankResult
from planner.probe.run import ProbeRun
from planner.probe.verdict.outcome import Options
from planner.probe.worker.process import EXIT_FAILED, HINTS, attempt, ran_out
from planner.probe.worker.status import read_status
from planner.probe.worker.worker import RESULT_FILE, RUN_FILE, STATUS_FILE, Worker

_FIRST_PORT, _NUM_PORTS = 29500, 1000


def joins_others() -> bool:
    """Whether this process is one of several ranks; srun's variables are translated into torchrun's.

    A batch script has SLURM_NTASKS too and is one process: only what srun starts is a step.
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


def probe_joined(plan: Plan, options: Options) -> ProbeResult | None:
    """Run this process's rank; the result on rank 0 and where a GPU has no memory, None on the others.

    Raises ProbeError where the rank fails.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.device == "cuda":
        run, grid, stages = ranks_run(plan, options, world_size)
    else:
        run, grid = laptop_run(plan, options._replace(num_processes=world_size))
        stages = []
    if run.world_size != world_size:
        raise ProbeError(
            f"{world_size} ranks were started, the largest slice of the plan that fits has {run.world_size}",
            f"start {run.world_size} ranks: {run.pp} stages × dp {run.dp} × cp {run.cp} × tp {run.tp}",
        )
    folder = Path(tempfile.mkdtemp(prefix=f"plan-probe-{rank}-"))
    try:
        found = run_rank(run, folder, rank)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if isinstance(found, Failure):
        if found.kind != "out_of_memory":
            raise error_of(found, run)
        measured = ran_out(run, found)
    elif rank:
        return None
    else:
        measured = Measured(run=run, ranks=found)
    if options.device == "cuda":
        return ranks_result(plan, options, measured, grid, stages)
    return laptop_result(plan, options, measured, grid)


def run_rank(run: ProbeRun, folder: Path, rank: int) -> tuple[RankResult, ...] | Failure:
    """All ranks' results on rank 0, none on the others; or why this one has none."""
    write_text(folder / RUN_FILE, run.model_dump_json())
    done = threading.Event()
    threading.Thread(target=_watch, args=(run, folder, rank, done), daemon=True).start()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    failure = attempt(lambda: Worker(folder, rank, local_rank, local=False), folder, rank)
    done.set()
    if failure is not None:
        return failure
    if rank:
        return ()
    paths = [folder / RESULT_FILE.format(other) for other in range(run.world_size)]
    return tuple(RankResult.model_validate_json(path.read_text()) for path in paths)


def error_of(failure: Failure, run: ProbeRun) -> ProbeError:
    """What the rank's user is told."""
    hint = HINTS.get(failure.kind, "--debug shows where")
    if failure.phase.startswith("rendezvous"):
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        hint = f"the ranks meet at {address}; where that port is taken, set MASTER_PORT (torchrun --master-port)"
    error = ProbeError(
        f"rank {failure.rank} ({run.place(failure.rank)}) failed in {failure.phase}: {failure.message}", hint
    )
    error.add_note(failure.traceback)  # which --debug prints
    return error


def _watch(run: ProbeRun, folder: Path, rank: int, done: threading.Event) -> None:
    """End the process, stacks first, when its rank makes no progress."""
    while not done.wait(min(1.0, run.timeout_s / 4)):
        where = read_status(folder / STATUS_FILE.format(rank))
        if where is not None and where.stands_still(run.timeout_s):
            name = f"rank {rank} ({run.place(rank)})"
            sys.stderr.write(f"error: {name} hangs in {where}: no progress for {run.timeout_s:g} s\n")
            sys.stderr.write("hint: its stacks follow; --timeout gives slow ranks longer\n")
            sys.stderr.flush()
            faulthandler.dump_traceback(all_threads=True)
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(EXIT_FAILED)
