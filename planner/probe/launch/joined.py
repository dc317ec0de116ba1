"""One rank among those that torchrun, srun or mpirun started, on one node or many: no launcher watches them.

The ranks meet in a store, agree on what they run (`rank.groups`), and tell it their progress. One thread speaks with
the store, and may block there; another looks at what the first has heard, and ends the process where a rank stands
still, its stacks first. Each rank answers on a port of its own, so that a rank that is silent can be told apart: its
process is gone, or stopped, or no network leads to it.
"""

from __future__ import annotations

import faulthandler
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch.distributed as dist

from planner.errors import PlannerError, ProbeError, SpecError
from planner.probe.launch.process import CONSEQUENCES, EXIT_FAILED, HINTS, failed_rank, hint_of, run_worker
from planner.probe.rank.groups import (
    BEAT_S,
    MEET_S,
    Heard,
    failures_in,
    hanging_rank,
    listening,
    refuse_all,
    results_in,
    tcp_store,
)
from planner.probe.rank.worker import Worker
from planner.probe.result import RankFailure, RankResult
from planner.probe.run import ProbeRun

MOST_POLL_S, RING_S, CAUSE_S = 3.0, 3.0, 5.0
"""The longest pause between two looks; seconds that a rank takes to answer when it is rung; seconds in which a rank
that lost others finds out which one failed."""
_FIRST_PORT, _NUM_PORTS = 29500, 1000
STARTERS = {
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpirun (MPICH)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
}
"""The variables that other starters of ranks set: of the rank, of their number, and of the rank on its machine.
A batch script of Slurm has SLURM_NTASKS too and is one process; only what srun starts has SLURM_STEP_NUM_TASKS."""


def joins_others() -> bool:
    """True if this process is one of several ranks. Variables that srun and mpirun set become those of torchrun.

    Raises SpecError where a variable is no number, or ranks of mpirun on several machines are told no address.
    """
    known = os.environ
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", *(name for names in STARTERS.values() for name in names)):
        if not (value := known.get(name, "0")).isdigit():
            raise SpecError(f"{name}={value}: no number", "torchrun, srun and mpirun set it: unset it")
    for starter, (rank, size, local_rank) in STARTERS.items():
        if "RANK" not in known and rank in known and int(known.get(size, "1")) > 1:
            known.update(RANK=known[rank], WORLD_SIZE=known[size], LOCAL_RANK=known.get(local_rank, "0"))
            if "MASTER_ADDR" not in known:
                known["MASTER_ADDR"] = _address(starter, int(known[size]))
            port = _FIRST_PORT + int(known.get("SLURM_JOB_ID", "0")) % _NUM_PORTS
            known.setdefault("MASTER_PORT", str(port))
    world_size = int(known.get("WORLD_SIZE", "1"))
    if "RANK" not in known or world_size == 1:
        return False
    if int(known["RANK"]) >= world_size:
        raise SpecError(f"RANK={known['RANK']}: the ranks are 0 to {world_size - 1} (WORLD_SIZE)", "start each once")
    return True


def _address(starter: str, size: int) -> str:
    """The machine of rank 0: srun lists the machines; of mpirun it is this one, where all ranks are."""
    if starter == "srun":
        return first_host(os.environ.get("SLURM_STEP_NODELIST", "localhost"))
    if int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", os.environ.get("MPI_LOCALNRANKS", size))) < size:
        raise SpecError(
            "MASTER_ADDR: mpirun tells its ranks on several machines no address",
            "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500, where HOST has rank 0",
        )
    return "127.0.0.1"


def first_host(nodes: str) -> str:
    """The first of Slurm's nodes: `gpu[07-12,20]-ib,login` begins with gpu07-ib."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]  # at commas outside of brackets
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first) or "localhost"


def meeting_place() -> tuple[str, int]:
    return os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", _FIRST_PORT))


def _store(timeout_s: float, is_host: bool = False) -> Any:
    """A connection to the ranks' store, which torchrun hosts, or rank 0 (`is_host`)."""
    attempt = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return cast(Any, dist).PrefixStore(attempt, tcp_store(*meeting_place(), timeout_s, is_host))


def _came(rank: int, world_size: int, timeout_s: float) -> tuple[Any, int, int]:
    """The store, how often this rank has come to it, and the number of ranks that rank 0 was told of."""
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = _store(timeout_s, hosts)
    came = store.add(f"came {rank}", 1)
    if rank == 0:
        store.set("world size", str(world_size))
    return store, came, int(store.get("world size"))


def meet(rank: int, world_size: int, timeout_s: float) -> Any:
    """The store that all ranks share. Raises ProbeError where this rank does not find it, or is there already."""
    (host, port), found = meeting_place(), Future[tuple[Any, int, int]]()

    def come() -> None:
        try:
            found.set_result(_came(rank, world_size, timeout_s))
        except (RuntimeError, OSError) as error:
            found.set_exception(error)

    threading.Thread(target=come, daemon=True).start()
    try:  # what takes the call and is no store lets torch wait for ever
        store, came, expected = found.result(timeout_s + RING_S)
    except (RuntimeError, OSError) as error:
        taken = "address already in use" in str(error).lower()
        what = f"port {port} is taken" if taken else f"nobody answers at {host}:{port} for {timeout_s:.0f} s"
        raise ProbeError(
            f"rank {rank} of {world_size} does not meet the others: {what}",
            "another rank 0 or another run has it: set MASTER_PORT (torchrun --master-port)"
            if taken
            else "rank 0 is to be started there (MASTER_ADDR, MASTER_PORT), and the network has to lead to it",
        ) from None
    refused = ""
    if came > 1:
        refused = f"rank {rank} was started twice (RANK={rank}), here on {os.uname().nodename}"
    elif expected != world_size:
        refused = f"rank {rank} was told of {world_size} ranks, rank 0 of {expected} (WORLD_SIZE)"
    if refused:
        refuse_all(store, rank, world_size, refused)
        raise ProbeError(refused, HINTS["disagreement"])
    return store


class Bell:
    """A port on which a rank answers as long as its process runs."""

    def __init__(self, rank: int) -> None:
        host = meeting_place()[0]
        if rank:  # rank 0 is known by the address at which all meet
            with socket.create_connection(meeting_place(), RING_S) as way:
                host = way.getsockname()[0]
        self.server = listening(host)
        self.address = f"{host}|{self.server.getsockname()[1]}"
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        while True:
            caller, _ = self.server.accept()
            with suppress(OSError), caller:
                caller.sendall(b"here")


def ring(address: str) -> str:
    """The state of a silent rank by its port, in words that follow its name; empty where it answers."""
    host, _, port = address.partition("|")
    try:
        with socket.create_connection((host, int(port)), RING_S) as line:
            line.settimeout(RING_S)
            try:
                return "" if line.recv(4) else "is gone"
            except TimeoutError:
                return "has stopped"
    except (ConnectionRefusedError, ConnectionResetError):
        return "is gone"
    except OSError:
        return "cannot be reached"


_VERDICT = "stands still"
EXPLAINED = {
    "is gone": "its process was killed or has ended: its own output, or the kernel's log (dmesg), says why",
    "has stopped": "a signal (SIGSTOP) or a debugger stops its process",
    "cannot be reached": "the network to it is cut, or its machine is down",
    "answers, and its words do not arrive": "the network between it and the store (MASTER_ADDR, MASTER_PORT) is cut",
}
"""The hint for each way to be silent."""


class RankWatch:
    """The watch over one rank. `begin` begins it, `end` ends it."""

    def __init__(self, run: ProbeRun, rank: int) -> None:
        self.run, self.rank, self.bells = run, rank, list[str]()
        self.poll_s = min(MOST_POLL_S, run.timeout_s / 8)
        self.done = threading.Event()
        self.verdict: tuple[str, str] | None = None
        """The words of a rank about one that stands still, and a hint."""
        self.heard_s = time.monotonic()
        """The time when rank 0 was last heard."""

    def begin(self, bells: list[str]) -> None:
        """Watch ranks that answer at these addresses: rank 0 hears all, the others rank 0."""
        self.bells = bells
        self.heard = Heard(_store(RING_S), range(self.run.world_size if self.rank == 0 else 1))
        for loop in (self._talk, self._look):
            threading.Thread(target=loop, daemon=True).start()

    def end(self) -> None:
        self.done.set()

    def _talk(self) -> None:
        store = self.heard.store
        while not self.done.wait(self.poll_s):
            with suppress(RuntimeError):  # rank 0 or torchrun, which hosts the store, is gone
                self.heard.listen()
                if self.rank == 0 and (said := self._judge()) is not None:
                    store.set(_VERDICT, "|".join(said))
                if store.check([_VERDICT]):
                    sentence, _, hint = store.get(_VERDICT).decode().partition("|")
                    self.verdict = sentence, hint
                self.heard_s = max(self.heard_s, self.heard.progress[0].beat_s)

    def _judge(self) -> tuple[str, str] | None:
        """The rank that keeps the others from moving; one whose process is gone is named at once."""
        timeout_s = self.run.timeout_s
        for rank, progress in self.heard.progress.items():
            if rank == self.rank or progress.phase == "done" or progress.silent_s < 2 * self.poll_s + RING_S:
                continue
            silence = self._silence(rank)
            if silence == "is gone" or progress.is_silent(timeout_s):
                return self.named(rank, silence)
        rank_or_none = hanging_rank(self.heard.progress, timeout_s)
        if rank_or_none is None:
            return None
        said = f"{failed_rank(self.run, rank_or_none)} {self.heard.progress[rank_or_none].hang(timeout_s)}"
        return said, "--timeout gives slow ranks longer; stacks of this rank follow"

    def _silence(self, rank: int) -> str:
        return ring(self.bells[rank]) or "answers, and its words do not arrive"

    def named(self, rank: int, silence: str) -> tuple[str, str]:
        """The words for a rank that is silent, and their hint."""
        progress = self.heard.progress.get(rank)
        last = f": the last heard of it was {progress}" if progress is not None and progress.phase != "start" else ""
        host = self.bells[rank].partition("|")[0]
        return f"{failed_rank(self.run, rank)} on {host} {silence}{last}", EXPLAINED[silence]

    def cause(self, store: Any) -> tuple[str, str] | None:
        """The rank that failed, where this one has lost others: one that has said so, or one that is silent."""
        deadline = time.monotonic() + CAUSE_S
        while time.monotonic() < deadline:
            others = [rank for rank in range(self.run.world_size) if rank != self.rank]
            for rank in others:
                if (
                    (silence := ring(self.bells[rank]))
                    and silence != "has stopped"
                    and not self._has_failed(store, rank)
                ):
                    return self.named(rank, silence)
            for rank in others:
                if (failure := self._has_failed(store, rank)) is not None and failure.kind not in CONSEQUENCES:
                    return failure.in_words(self.run.place(rank)), hint_of(failure) or "its own output says more"
            time.sleep(BEAT_S)
        return self.verdict

    def _has_failed(self, store: Any, rank: int) -> RankFailure | None:
        with suppress(RuntimeError):
            return next(iter(failures_in(store, [rank])), None)
        return None

    def _look(self) -> None:
        while not self.done.wait(self.poll_s):
            if self.verdict is None and self.rank and time.monotonic() - self.heard_s > self._patience_s():
                self.verdict = self.named(0, self._silence(0))
            if self.verdict is not None:
                time.sleep(2 * self.poll_s if self.rank == 0 else 0)  # the others still read rank 0's verdict
                self._end_process(*self.verdict)

    def _patience_s(self) -> float:
        """Seconds for which rank 0, which judges, may be silent; a moment where its process is gone."""
        silent_s = time.monotonic() - self.heard_s
        is_gone = silent_s > 2 * self.poll_s + RING_S and ring(self.bells[0]) == "is gone"
        return 0.0 if is_gone else max(self.run.timeout_s, 4 * self.poll_s)

    def _end_process(self, sentence: str, hint: str) -> None:
        sys.stderr.write(PlannerError(sentence, hint).lines())
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(EXIT_FAILED)


def run_rank(make: Callable[[], ProbeRun], timeout_s: float) -> tuple[ProbeRun, tuple[RankResult, ...] | RankFailure]:
    """Run this process's rank of what `make` gives. Returns all ranks' results on rank 0, none on other ranks, or the
    failure of this rank where it is a result.

    Raises ProbeError where ranks do not meet, do not agree, or fail; the rank that failed is named.
    """
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    store = meet(rank, world_size, max(timeout_s, MEET_S))
    try:
        run = make()
    except PlannerError as error:
        refuse_all(store, rank, world_size, f"rank {rank} on {os.uname().nodename} refuses: {error.message}")
        raise
    return run, _run_in(run, rank, store)


def _run_in(run: ProbeRun, rank: int, store: Any) -> tuple[RankResult, ...] | RankFailure:
    bell, watch = Bell(rank), RankWatch(run, rank)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    failure = run_worker(Worker(run, rank, local_rank, partial(_store, MEET_S), bell.address, watch.begin))
    if failure is not None:
        cause = watch.cause(store) if watch.bells and failure.kind in CONSEQUENCES else None
        watch.end()
        if rank == 0:
            time.sleep(CAUSE_S if watch.bells and cause is None else BEAT_S)  # the others still read what it says
        if failure.kind == "out_of_memory":
            return failure
        raise _error(failure, run, cause)
    watch.end()
    return () if rank else results_in(store, range(run.world_size))


def _error(failure: RankFailure, run: ProbeRun, cause: tuple[str, str] | None) -> ProbeError:
    """The error that tells the user how a rank failed: another one where that is known."""
    said, hint = cause or (failure.in_words(run.place(failure.rank)), hint_of(failure) or "--debug shows where")
    error = ProbeError(said, hint)
    error.add_note(failure.traceback)  # which --debug prints
    error.follows_answer = failure.kind == "lost_peer"  # the rank that failed has the answer
    return error
