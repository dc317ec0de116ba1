"""Stages that run alone: one after the other on this machine, or spread over the ranks of torchrun or srun."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from planner.errors import ProbeError
from planner.probe.launch.joined import joins_others
from planner.probe.result import MeasuredRun
from planner.probe.run import Place, ProbeRun
from planner.probe.worker.shared_progress import SharedProgress, connect
from planner.probe.worker.stage_worker import stage_process
from planner.probe.worker.status import BEAT_S, START_TIMEOUT_S, Progress
from planner.probe.worker.watch import meeting_hint

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
