"""Ranks that torchrun or Slurm has started, on one node or many: one rank among others, or stages spread over them.

No launcher watches these ranks. Threads end a process when a rank makes no progress: one speaks with the other ranks
through their store, and may block there; the other one looks at what the first has heard and ends the process, its
stacks first.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from planner.errors import PlannerError, ProbeError, SpecError
from planner.probe.launch.failure import EXIT_FAILED, hint_of, run_worker
from planner.probe.launch.process import stage_process
from planner.probe.launch.run_folder import removed_when_ended, run_folder, write_run
from planner.probe.rank.status import (
    BEAT_S,
    RESULT_FILE,
    SILENT_HINT,
    START_TIMEOUT_S,
    STATUS_FILE,
    Progress,
    SharedProgress,
    connect,
    hanging_rank,
    read_status,
)
from planner.probe.rank.worker import Worker
from planner.probe.result import MeasuredRun, RankFailure, RankResult
from planner.probe.run import Place, ProbeRun

MOST_POLL_S = 3.0
ALONE = ("start", "rendezvous")
"""Phases in which the ranks have no store yet."""


def meeting_hint(num_ranks: int) -> str:
    """The hint for ranks that do not find each other."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"the {num_ranks} ranks meet at {address}: all must be started; where that port is taken, set MASTER_PORT "
        "(torchrun --master-port)"
    )


class RankWatch:
    """The watch over one rank. `start` begins it, `end` ends it."""

    def __init__(self, run: ProbeRun, folder: Path, rank: int) -> None:
        self.run, self.folder, self.rank = run, folder, rank
        self.poll_s = min(MOST_POLL_S, run.timeout_s / 8)
        self.done = threading.Event()
        self.sentence = ""
        """The words of rank 0 about a rank that hangs."""
        self.heard_s: float | None = None
        """The time when rank 0 was last heard, None before the ranks are connected."""

    def start(self) -> None:
        for loop in (self._talk, self._look):
            threading.Thread(target=loop, daemon=True).start()

    def end(self) -> None:
        self.done.set()

    def name(self, rank: int) -> str:
        return f"rank {rank} ({self.run.place(rank)})"

    def own(self) -> Progress | None:
        return read_status(self.folder / STATUS_FILE.format(self.rank))

    def _talk(self) -> None:
        shared, spoken = None, ""
        while not self.done.wait(self.poll_s if shared else BEAT_S):
            own = self.own()
            if own is None or own.phase in ALONE:
                continue
            try:
                shared = shared or SharedProgress(connect(self.run.world_size), self.rank, self.run.world_size)
                shared.tell(own)
                if self.rank == 0:
                    self.sentence = self._judge(shared)
                    shared.decide(self.sentence)
                    self.heard_s = time.monotonic()
                elif (verdict := shared.verdict()) is not None and verdict[0] != spoken:
                    (spoken, self.sentence), self.heard_s = verdict, time.monotonic()
            except RuntimeError:  # rank 0 or torchrun, which hosts the store, is gone
                shared = None

    def _judge(self, shared: SharedProgress) -> str:
        progress = shared.all()
        rank = hanging_rank(progress, self.run.timeout_s)
        return "" if rank is None else f"{self.name(rank)} {progress[rank].hang(self.run.timeout_s)}"

    def _look(self) -> None:
        while not self.done.wait(self.poll_s):
            sentence = self.sentence or self._alone()
            if sentence:
                time.sleep(2 * self.poll_s if self.rank == 0 else 0)  # the others still read rank 0's verdict
                self._end_process(sentence)

    def _alone(self) -> str:
        """The words of this rank without the others: that rank 0, which judges, is silent, or that it hangs itself."""
        own = self.own()
        if own is None or not own.stands_still(self.run.timeout_s):
            return ""
        if self.heard_s is None:
            return f"{self.name(self.rank)} {own.hang(self.run.timeout_s)}"
        silent_s = time.monotonic() - self.heard_s
        if silent_s < own.still_s / 2:  # rank 0 watches
            return ""
        return (
            f"{self.name(0)} has stopped or is gone: rank {self.rank} in {own} has not heard of it for {silent_s:.0f} s"
        )

    def _end_process(self, sentence: str) -> None:
        own = self.own()
        hint = "--timeout gives slow ranks longer; stacks of this rank follow"
        if own is not None and own.phase == "rendezvous":
            hint = meeting_hint(self.run.world_size)
        elif "has stopped" in sentence:
            hint = f"{SILENT_HINT}; {hint}"
        sys.stderr.write(PlannerError(sentence, hint).lines())
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(EXIT_FAILED)


_FIRST_PORT, _NUM_PORTS = 29500, 1000


def joins_others() -> bool:
    """True if this process is one of several ranks. Variables that srun sets are translated into those of torchrun.

    A batch script has SLURM_NTASKS too and is one process; only processes that srun starts have SLURM_STEP_NUM_TASKS.
    Raises SpecError where a variable is no number.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS"):
        if not (value := os.environ.get(name, "0")).isdigit():
            raise SpecError(f"{name}={value}: no number", "torchrun and srun set it: unset it")
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


def run_rank(run: ProbeRun, rank: int) -> tuple[RankResult, ...] | RankFailure:
    """Run this process's rank. Returns all ranks' results on rank 0, none on other ranks, or the failure of this
    rank."""
    with run_folder(keeps_after_error=False) as folder, removed_when_ended(folder):
        return _run_in(folder, run, rank)


def _run_in(folder: Path, run: ProbeRun, rank: int) -> tuple[RankResult, ...] | RankFailure:
    write_run(folder, run)
    watch = RankWatch(run, folder, rank)
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


def rank_error(failure: RankFailure, run: ProbeRun) -> ProbeError:
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


_log = logging.getLogger(__name__)
_OUTCOME = "plan/outcome/{}"


Launch = Callable[..., MeasuredRun]
"""The function that starts ranks on this machine: `launch`."""


def run_stages(run: ProbeRun, stages: Sequence[int], launch: Launch) -> list[MeasuredRun] | None:
    """Run each stage alone and return what was measured, in the order of `stages`, up to the first that ran out of
    memory. Among ranks of torchrun or srun each runs its share on its own GPU; rank 0 returns all, the others None.

    Raises ProbeError where a stage fails, on rank 0 also for the stages of other ranks.
    """
    if joins_others():
        return _Spread(run, stages, launch).run_all()
    return _one_by_one(run, stages, launch)


def _one_by_one(
    run: ProbeRun, stages: Sequence[int], launch: Launch, device: int = 0, peers: int = 1
) -> list[MeasuredRun]:
    """`peers`: the ranks that run stages at the same time, which agree on their GPUs before the first."""
    outcomes: list[MeasuredRun] = []
    for stage in stages:
        child = partial(stage_process, first_device=device, num_peers=1 if outcomes else peers)
        outcomes.append(launch(run, child, ranks=(run.rank(Place(stage, 0, 0, 0)),)))
        if outcomes[-1].out_of_memory is not None:
            break
    return outcomes


class _Outcome(NamedTuple):
    """The outcome of one rank's stages: measurements, or the two lines of an error."""

    measured: list[MeasuredRun]
    error: tuple[str, str] | None = None

    def to_json(self) -> str:
        return json.dumps([[measured.model_dump(mode="json") for measured in self.measured], self.error])

    @classmethod
    def of_json(cls, text: str | bytes) -> _Outcome:
        measured, error = json.loads(text)
        return cls([MeasuredRun.model_validate(one) for one in measured], error and tuple(error))


class _Spread:
    """The stages of one probe, dealt out to ranks that others started."""

    def __init__(self, run: ProbeRun, stages: Sequence[int], launch: Launch) -> None:
        self.run, self.stages, self.launch = run, stages, launch
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.num_peers = min(self.world_size, len(stages))

    def share(self, rank: int) -> Sequence[int]:
        """The stages that a rank runs."""
        return self.stages[rank :: self.world_size]

    def _words(self, rank: int) -> str:
        return f"stage {', '.join(map(str, self.share(rank)))}"

    def run_all(self) -> list[MeasuredRun] | None:
        store = self._meet()
        if self.rank >= self.num_peers:
            return None
        shared = SharedProgress(connect(self.world_size), self.rank, self.world_size)
        with _telling(shared, self._words(self.rank)):
            outcome = self._run_own()
        if self.rank:
            if outcome.error is not None:
                _log.warning("rank %d: %s", self.rank, outcome.error[0])
            store.set(_OUTCOME.format(self.rank), outcome.to_json())
            return None
        outcomes = [outcome, *(self._receive(store, shared, rank) for rank in range(1, self.num_peers))]
        return self._in_order(outcomes)

    def _meet(self) -> Any:
        timeout = timedelta(seconds=max(self.run.timeout_s, START_TIMEOUT_S))
        try:
            return next(cast(Any, dist).rendezvous("env://", self.rank, self.world_size, timeout=timeout))[0]
        except RuntimeError as error:
            cause = str(error).splitlines()[0][:300]
            raise ProbeError(
                f"rank {self.rank} does not meet the others: {cause}", meeting_hint(self.world_size)
            ) from None

    def _run_own(self) -> _Outcome:
        device = int(os.environ.get("LOCAL_RANK", "0"))
        try:
            return _Outcome(_one_by_one(self.run, self.share(self.rank), self.launch, device, self.num_peers))
        except ProbeError as error:
            return _Outcome([], (error.message, error.hint))

    def _receive(self, store: Any, shared: SharedProgress, rank: int) -> _Outcome:
        """The outcome of another rank. Raises ProbeError where its process gives no more signs of life."""
        key, timeout_s = _OUTCOME.format(rank), max(self.run.timeout_s, START_TIMEOUT_S)
        while not store.check([key]):
            progress = shared.all()[rank]
            if time.monotonic() - progress.beat_s > timeout_s:
                raise ProbeError(
                    f"rank {rank} of {self.world_size}, which runs {self._words(rank)}, has stopped or is gone: no "
                    f"sign of life for {timeout_s:.0f} s",
                    "srun ends all ranks with the first that fails if it is told --kill-on-bad-exit=1",
                )
            time.sleep(BEAT_S)
        return _Outcome.of_json(store.get(key))

    def _in_order(self, outcomes: Sequence[_Outcome]) -> list[MeasuredRun]:
        """All measurements in the order of the stages."""
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                message, hint = outcome.error
                raise ProbeError(f"{message} (on rank {rank} of {self.world_size})", hint)
        by_rank = [iter(outcome.measured) for outcome in outcomes]
        ordered: list[MeasuredRun] = []
        for number in range(len(self.stages)):
            measured = next(by_rank[number % self.world_size], None)
            if measured is not None:
                ordered.append(measured)
            if measured is None or measured.out_of_memory is not None:
                break
        return ordered


@contextmanager
def _telling(shared: SharedProgress, phase: str) -> Iterator[None]:
    """Tell rank 0 that this process is alive, from a thread of its own."""
    done, start_s = threading.Event(), time.monotonic()

    def tell() -> None:
        while True:
            shared.tell(Progress(phase, "", start_s, time.monotonic()))
            if done.wait(4 * BEAT_S):
                return

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join(4 * BEAT_S)
