"""Finds an order for unequal stages and limited memory that no named schedule beats."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import Infeasible
from planner.schedule.actions import B, F, I, Schedule, W
from planner.schedule.bounds import in_flight_bounds_s
from planner.schedule.orders import SCHEDULES, build_schedule, violation
from planner.schedule.picks import ByReference, ByRule
from planner.schedule.replay import Durations, makespan_s, replay
from planner.schedule.shop import NEVER, Pick, Problem, Task, run
from planner.schedule.zero_bubble import v_placement


@dataclass(frozen=True, slots=True)
class Synthesis:
    """The best order found, the best named schedule, and a lower bound on the makespan of every order."""

    schedule: Schedule
    makespan_s: float
    lower_bound_s: float
    named: str | None
    """Name of the best named schedule that fits; None when none fits."""
    named_makespan_s: float

    @property
    def gap_fraction(self) -> float:
        """Relative distance of the order from the bound: makespan_s / lower_bound_s − 1."""
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0


def synthesize(
    durations: Durations,
    pp: int,
    num_microbatches: int,
    *,
    max_activation_bytes: Sequence[float] | None = None,
    stage_to_rank: Sequence[int] | None = None,
    splits_backward: bool = True,
    num_moves: int | None = None,
    seed: int = 0,
) -> Synthesis:
    """Best order found for these stages, never worse than the best named schedule that fits.

    max_activation_bytes limits the sum of durations.activation_bytes on each rank (the number of activations when those
    are not given). Without stage_to_rank, two stages per rank are tried in both placements, looped and V.
    The first orders come from list scheduling under a few rules and along the named orders, with memory look-ahead.
    Then local search shifts one kind of task of one rank and schedules along the result. The same seed gives the same
    order; the search stops at the lower bound.
    Raises Infeasible when not even one micro-batch fits on a rank.
    """
    tried = [tuple(stage_to_rank)] if stage_to_rank is not None else placements(pp, len(durations.forward_s))
    searches = [
        _Search(durations, placement, num_microbatches, max_activation_bytes, splits_backward) for placement in tried
    ]
    bound_s = min(search.bound_s for search in searches)
    for search in searches:
        search.try_named()
    for search in searches:
        search.try_rules(bound_s)
    best = min(searches, key=lambda search: search.best_s)
    best.move(2 * len(durations.forward_s) if num_moves is None else num_moves, bound_s, random.Random(seed))
    named = min(searches, key=lambda search: search.named_s)
    if best.schedule is None:
        raise Infeasible("no order was found within the activations that the ranks may hold", hint="allow them more")
    return Synthesis(best.schedule, best.best_s, min(bound_s, best.best_s), named.named, named.named_s)


def placements(pp: int, num_stages: int) -> list[tuple[int, ...]]:
    """Placements of the stages on pp ranks: looped, and with two stages per rank also as a V."""
    looped = tuple(range(pp)) * (num_stages // pp)
    return [looped, v_placement(pp)] if num_stages == 2 * pp and pp > 1 else [looped]


class _Search:
    """Searches an order for one placement, and keeps the best so far."""

    def __init__(
        self,
        durations: Durations,
        stage_to_rank: tuple[int, ...],
        num_microbatches: int,
        limit_bytes: Sequence[float] | None,
        splits_backward: bool,
    ) -> None:
        self._durations = durations
        self._splits_backward = splits_backward
        self._problem = Problem.of(durations, stage_to_rank, num_microbatches, limit_bytes)
        if not splits_backward:
            seconds = self._problem.seconds
            seconds[I], seconds[W] = seconds[B], [0.0] * len(stage_to_rank)
        self._references: list[list[list[Task]]] = []
        self._order: list[list[Task]] = []
        self._order_s = NEVER
        self.schedule: Schedule | None = None
        self.best_s = NEVER
        self.named: str | None = None
        self.named_s = NEVER
        self.bound_s = self._lower_bound_s()

    def _lower_bound_s(self) -> float:
        problem = self._problem
        chunks = []
        for rank, limit in enumerate(problem.limit_bytes):
            saved = min(problem.saved_bytes[stage] for stage in problem.stages(rank)) * min(problem.sizes)
            unlimited = len(problem.sizes) * len(problem.stages(rank))
            chunks.append(unlimited if saved * unlimited <= limit else int(limit / saved * (1 + 1e-9)))
        bounds_s = in_flight_bounds_s(
            self._durations,
            problem.stage_to_rank,
            len(problem.sizes),
            chunks,
            splits_backward=self._splits_backward,
        )
        return float(bounds_s.max())

    def try_named(self) -> None:
        """Price the named schedules of this placement that fit; keep all of them as references."""
        problem = self._problem
        pp, num_microbatches = max(problem.stage_to_rank) + 1, len(problem.sizes)
        vpp = len(problem.stage_to_rank) // pp
        for name in SCHEDULES:
            if name == "forward-only" or violation(name, pp, vpp, num_microbatches) is not None:
                continue
            schedule = build_schedule(name, pp, vpp, num_microbatches)
            splits = any(action.kind == "I" for actions in schedule.ranks for action in actions)
            if schedule.stage_to_rank != problem.stage_to_rank or schedule.asynchronous:
                continue
            if splits and not self._splits_backward:
                continue
            self._references.append(_split_tasks(schedule))
            replayed_s = makespan_s(schedule, self._durations)
            if replayed_s < self.named_s and self._fits(schedule):
                self.named, self.named_s = name, replayed_s
                self.schedule, self.best_s = schedule, replayed_s
                self._order, self._order_s = self._references[-1], replayed_s

    def _fits(self, schedule: Schedule) -> bool:
        peak_bytes = replay(schedule, self._durations).peak_activation_bytes
        return bool((peak_bytes <= np.array(self._problem.limit_bytes) * (1 + 1e-12)).all())

    def try_rules(self, bound_s: float) -> None:
        """Schedule by every rule and along every reference, until the bound is met."""
        for pick in self._picks():
            if self.best_s <= bound_s * (1 + 1e-12):
                return
            self._attempt(pick)

    def _picks(self) -> Iterator[Pick]:
        for rule in itertools.product((0.5, 0.0, 1.0), (False, True), (False, True)):
            yield ByRule(*rule)
        for reference, overrun_fraction in itertools.product(self._references, (0.0, 0.5, 1.0)):
            yield ByReference(reference, overrun_fraction)

    def move(self, num_moves: int, bound_s: float, rng: random.Random) -> None:
        """Shift tasks of the best order and schedule along the result, as often as num_moves or until the bound."""
        for _ in range(num_moves):
            if self.best_s <= bound_s * (1 + 1e-12):
                return
            self._attempt(ByReference(_shifted(self._order, rng), rng.choice((0.0, 0.0, 0.5, 1.0))))

    def _attempt(self, pick: Pick) -> None:
        makespan_and_order = run(self._problem, pick, give_up_s=self._order_s * (1 + 1e-12))
        if makespan_and_order is None:
            return
        self._order_s, self._order = makespan_and_order
        if self._order_s < self.best_s or self._durations.blocking_p2p:
            schedule = self._problem.schedule("auto", self._order, splits_backward=self._splits_backward)
            replayed_s = makespan_s(schedule, self._durations)
            if replayed_s < self.best_s:
                self.schedule, self.best_s = schedule, replayed_s


def _split_tasks(schedule: Schedule) -> list[list[Task]]:
    """The schedule's lists as tasks, with each full backward written as I and W."""
    kinds = {"F": (F,), "B": (I, W), "I": (I,), "W": (W,)}
    return [[(kind, stage, mb) for k, stage, mb in actions for kind in kinds[k]] for actions in schedule.ranks]


def _shifted(order: Sequence[Sequence[Task]], rng: random.Random) -> list[list[Task]]:
    """Move the tasks of one kind by a few places, in some part of one rank's list.

    The sequence of each stage's forwards stays the same, and so do those of its gradients and its weight gradients.
    """
    moved = [list(tasks) for tasks in order]
    rank = rng.randrange(len(order))
    tasks = moved[rank]
    chosen, places = rng.choice((F, I, W)), rng.choice((-6, -3, -2, -1, 1, 2, 3, 6))
    first, last = sorted((rng.randrange(len(tasks)), rng.randrange(len(tasks))))
    latest: dict[tuple[int, int], float] = {}
    keys = []
    for index, (kind, stage, _) in enumerate(tasks):
        key = index + (places + 0.5 if kind == chosen and first <= index <= last else 0.0)
        latest[kind, stage] = max(key, latest.get((kind, stage), key))
        keys.append(latest[kind, stage])
    moved[rank] = [tasks[index] for index in sorted(range(len(tasks)), key=keys.__getitem__)]
    return moved
