"""The watch over a rank that no launcher watches: threads that end the process when a rank makes no progress.

One thread speaks with the other ranks through their store, and may block there. The other one looks at what the first
has heard and ends the process, its stacks first.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import sys
import threading
import time
from pathlib import Path

from planner.errors import PlannerError
from planner.probe.run import ProbeRun
from planner.probe.worker.failure import EXIT_FAILED
from planner.probe.worker.files import STATUS_FILE
from planner.probe.worker.shared_progress import SharedProgress, connect
from planner.probe.worker.status import BEAT_S, SILENT_HINT, Progress, hanging_rank, read_status

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


class Watch:
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
