"""Two ways in which a rank chooses its next task: by a rule, or along a reference order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.schedule.actions import F, I, W
from planner.schedule.shop import NEVER, Shop, Task

WINDOW = 24
"""Number of tasks of a reference order, from the next one on, among which a rank looks for one that is ready."""


@dataclass(frozen=True, slots=True)
class ByRule:
    """Picks a gradient, else a forward, else a weight gradient that fits into the wait for either."""

    gap_fraction: float
    """Least wait in which a weight gradient is started, as a share of its seconds."""
    oldest_first: bool
    """True: of a gradient and a forward that are ready, run the one that arrived first. False: run the gradient."""
    weight_makes_room: bool
    """True: when a forward waits for memory, run a weight gradient even before a gradient that is ready."""

    def __call__(self, shop: Shop, rank: int, now_s: float) -> Task | float:
        gradient, gradient_s, next_s = self._first_gradient(shop, rank, now_s)
        forward, forward_s, blocked = None, NEVER, False
        for stage in shop.stages[rank]:
            microbatch = shop.num_forwards[stage]
            if microbatch == len(shop.problem.sizes):
                continue
            arrival_s = shop.arrival_s[F][stage][microbatch]
            if arrival_s == NEVER:
                continue
            if not shop.has_room(rank, stage, microbatch):
                blocked |= arrival_s <= now_s
            elif arrival_s <= now_s:
                forward, forward_s = (F, stage, microbatch), arrival_s
            else:
                next_s = min(next_s, arrival_s)
        owed = shop.owed[rank]
        if gradient and not (self.weight_makes_room and blocked and owed):
            return forward if forward and self.oldest_first and forward_s < gradient_s else gradient
        if forward:
            return forward
        if owed:
            stage, microbatch = owed[0]
            weight_s = shop.problem.seconds[W][stage] * shop.problem.sizes[microbatch]
            if blocked or next_s - now_s >= self.gap_fraction * weight_s:
                return W, stage, microbatch
        return next_s

    def _first_gradient(self, shop: Shop, rank: int, now_s: float) -> tuple[Task | None, float, float]:
        """The ready gradient of the oldest micro-batch, the time when it arrived, and the time when the next comes."""
        oldest, oldest_s, next_s = None, NEVER, NEVER
        for stage in shop.stages[rank]:
            microbatch = shop.num_gradients[stage]
            if microbatch == len(shop.problem.sizes):
                continue
            arrival_s = shop.arrival_s[I][stage][microbatch]
            if arrival_s > now_s:
                next_s = min(next_s, arrival_s)
            elif oldest is None or microbatch < oldest[2]:
                oldest, oldest_s = (I, stage, microbatch), arrival_s
        return oldest, oldest_s, next_s


class ByReference:
    """Follows a reference order, but fills the wait for the next task with later tasks that are ready and fit."""

    def __init__(self, reference: Sequence[Sequence[Task]], overrun_fraction: float) -> None:
        self._left = [list(reversed(tasks)) for tasks in reference]
        self._overrun_fraction = overrun_fraction
        """Share of a filling task that may run past the arrival of the task that is waited for."""

    def __call__(self, shop: Shop, rank: int, now_s: float) -> Task | float:
        left, arrival_s, problem = self._left[rank], shop.arrival_s, shop.problem
        until_s = NEVER
        for index in range(len(left) - 1, max(-1, len(left) - 1 - WINDOW), -1):
            task = left[index]
            kind, stage, microbatch = task
            ready_s = arrival_s[kind][stage][microbatch]
            if ready_s == NEVER or (kind == F and not shop.has_room(rank, stage, microbatch)):
                continue
            if ready_s > now_s:
                until_s = min(until_s, ready_s)
                continue
            seconds = problem.seconds[kind][stage] * problem.sizes[microbatch]
            if now_s + seconds * (1 - self._overrun_fraction) <= until_s:
                del left[index]
                return task
        return until_s
