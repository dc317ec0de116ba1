"""An order for unequal stages and limited memory that no named schedule beats, found by list scheduling.

The pipeline runs forward in time, one decision after the other. A rank chooses its next task in one of two ways: by a
rule, or along a reference order.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planner.errors import Infeasible
from planner.record import record
from planner.schedule.actions import KINDS, Action, F, I, Schedule, W
from planner.schedule.bounds import in_flight_bounds_s
from planner.schedule.orders import SCHEDULES, build_schedule, violation
from planner.schedule.replay import Durations, makespan_s, replay, stage_tables

NEVER = float("inf")

Task = tuple[int, int, int]
"""Kind (place in KINDS), virtual stage and micro-batch: an action as a plain tuple, for speed."""

Pick = Callable[["Shop", int, float], Task | float]
"""Function (shop, rank, time) that chooses the rank's next task among those that are ready, or gives the time at which
to ask again (NEVER: when an input arrives)."""


@record
class Problem:
    """A pipeline for which an order is wanted."""

    seconds: list[list[float]]
    """Seconds of each kind on each virtual stage; the backward is always split here."""
    hop_s: list[float]
    """Seconds of the transfer from stage j to j + 1, or back; 0 within a rank."""
    stage_to_rank: tuple[int, ...]
    sizes: list[float]
    """Relative size of each micro-batch."""
    saved_bytes: list[float]
    """Bytes that one micro-batch keeps on each stage; 1 where activations are counted one by one."""
    limit_bytes: list[float]
    """The most bytes that each rank may hold."""

    @classmethod
    def of(
        cls,
        durations: Durations,
        stage_to_rank: Sequence[int],
        num_microbatches: int,
        limit_bytes: Sequence[float] | None,
    ) -> Problem:
        """The problem of these durations; raises Infeasible when a rank cannot hold even one micro-batch."""
        table, boundaries_s = stage_tables(durations, stage_to_rank)
        pp, sizes = max(stage_to_rank) + 1, durations.microbatch_sizes
        problem = cls(
            seconds=table.tolist(),
            hop_s=boundaries_s[0].tolist(),
            stage_to_rank=tuple(stage_to_rank),
            sizes=[1.0] * num_microbatches if sizes is None else [float(size) for size in sizes],
            saved_bytes=[float(saved) for saved in durations.activation_bytes or [1.0] * len(stage_to_rank)],
            limit_bytes=[NEVER] * pp if limit_bytes is None else [float(limit) for limit in limit_bytes],
        )
        for rank, limit in enumerate(problem.limit_bytes):
            least = max(problem.sizes) * sum(problem.saved_bytes[stage] for stage in problem.stages(rank))
            if least > limit:
                raise Infeasible(
                    f"rank {rank} may hold {limit:g} bytes of activations, one micro-batch needs {least:g}",
                    hint="recompute activations, use smaller micro-batches or more pipeline ranks",
                )
        return problem

    def stages(self, rank: int) -> list[int]:
        """Virtual stages of the rank, from front to back."""
        return [stage for stage, holder in enumerate(self.stage_to_rank) if holder == rank]

    def schedule(self, order: Sequence[Sequence[Task]]) -> Schedule:
        """The order as action lists."""
        ranks = tuple(tuple(Action(KINDS[kind], stage, mb) for kind, stage, mb in tasks) for tasks in order)
        return Schedule("auto", ranks, self.stage_to_rank, len(self.sizes))


class Shop:
    """The tasks started so far, and the times from which each rank may start others."""

    def __init__(self, problem: Problem) -> None:
        num_stages, num_microbatches = len(problem.stage_to_rank), len(problem.sizes)
        self.problem = problem
        self.stages = [problem.stages(rank) for rank in range(max(problem.stage_to_rank) + 1)]
        self.arrival_s = [[[NEVER] * num_microbatches for _ in range(num_stages)] for _ in KINDS]
        """Time from which each task may start, by kind, stage and micro-batch; NEVER until it is known."""
        self.arrival_s[F][0] = [0.0] * num_microbatches
        self.num_forwards = [0] * num_stages
        self.num_gradients = [0] * num_stages
        self.owed: list[deque[tuple[int, int]]] = [deque() for _ in self.stages]
        """Stage and micro-batch, per rank, of the weight gradients that are still to come, oldest first."""
        self.held_bytes = [0.0] * len(self.stages)
        self.free_s = [0.0] * len(self.stages)
        self.order: list[list[Task]] = [[] for _ in self.stages]

    def has_room(self, rank: int, stage: int, microbatch: int) -> bool:
        """True where the rank can hold one more forward and still finish the oldest micro-batch under way.

        The second condition looks ahead, so that ranks with several stages do not deadlock: the oldest micro-batch
        always finds room on every rank that it still has to visit, and frees its activations when it is done.
        """
        saved, size = self.problem.saved_bytes, self.problem.sizes
        needed = self.held_bytes[rank] + saved[stage] * size[microbatch]
        if len(self.stages[rank]) > 1:
            oldest = min(self.num_forwards[other] for other in self.stages[rank])
            if microbatch != oldest:
                waiting = sum(saved[other] for other in self.stages[rank] if self.num_forwards[other] <= oldest)
                needed += waiting * size[oldest]
        return needed <= self.problem.limit_bytes[rank] * (1 + 1e-12)

    def start(self, rank: int, task: Task, now_s: float) -> tuple[float, int, float]:
        """Start the task; returns its end, the rank to which its result goes (−1: none), and when it arrives there."""
        kind, stage, microbatch = task
        problem = self.problem
        end_s = now_s + problem.seconds[kind][stage] * problem.sizes[microbatch]
        self.free_s[rank] = end_s
        self.order[rank].append(task)
        target, kept = stage, problem.saved_bytes[stage] * problem.sizes[microbatch]
        if kind == F:
            self.num_forwards[stage] += 1
            self.held_bytes[rank] += kept
            target = stage + 1
            if target == len(problem.stage_to_rank):
                self.arrival_s[I][stage][microbatch] = end_s
                return end_s, -1, end_s
            arrival_s = end_s + problem.hop_s[stage] * problem.sizes[microbatch]
        elif kind == I:
            self.num_gradients[stage] += 1
            self.owed[rank].append((stage, microbatch))
            self.arrival_s[W][stage][microbatch] = end_s
            target = stage - 1
            if target < 0:
                return end_s, -1, end_s
            arrival_s = end_s + problem.hop_s[target] * problem.sizes[microbatch]
        else:
            self.owed[rank].remove((stage, microbatch))
            self.held_bytes[rank] -= kept
            return end_s, -1, end_s
        self.arrival_s[kind][target][microbatch] = arrival_s
        return end_s, problem.stage_to_rank[target], arrival_s


def run(problem: Problem, pick: Pick, give_up_s: float = NEVER) -> tuple[float, list[list[Task]]] | None:
    """Let every rank pick tasks until all are done, and return makespan and order.

    None where ranks wait forever, and as soon as the makespan is certain to exceed give_up_s.
    """
    shop = Shop(problem)
    num_microbatches, total = len(problem.sizes), sum(problem.sizes)
    left_s = [total * sum(problem.seconds[kind][s] for s in stages for kind in (F, I, W)) for stages in shop.stages]
    left = 3 * len(problem.stage_to_rank) * num_microbatches
    asking: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(shop.stages))]
    while asking:
        now_s, rank = heapq.heappop(asking)
        if shop.free_s[rank] > now_s:
            continue
        choice = pick(shop, rank, now_s)
        if not isinstance(choice, tuple):
            if choice < NEVER:
                heapq.heappush(asking, (choice, rank))
            continue
        end_s, receiver, arrival_s = shop.start(rank, choice, now_s)
        left -= 1
        left_s[rank] -= end_s - now_s
        if end_s + left_s[rank] > give_up_s:
            return None
        heapq.heappush(asking, (end_s, rank))
        if receiver not in (-1, rank):
            heapq.heappush(asking, (max(arrival_s, shop.free_s[receiver]), receiver))
    return None if left else (max(shop.free_s), shop.order)


WINDOW = 24
"""Number of tasks of a reference order, from the next one on, among which a rank looks for one that is ready."""


@record
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


@record
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
    stage_to_rank: Sequence[int],
    num_microbatches: int,
    max_activation_bytes: Sequence[float] | None = None,
) -> Synthesis:
    """Best order found for these stages, never worse than the best named schedule that fits; the backward is split.

    max_activation_bytes limits the sum of durations.activation_bytes on each rank (the number of activations when those
    are not given).
    The first orders come from list scheduling under a few rules and along the named orders, with memory look-ahead.
    Then local search shifts one kind of task of one rank and schedules along the result. The same arguments give the
    same order; the search stops at the lower bound.
    Raises Infeasible when not even one micro-batch fits on a rank.
    """
    search = _Search(durations, Problem.of(durations, stage_to_rank, num_microbatches, max_activation_bytes))
    search.try_named()
    for pick in search.picks(random.Random(0)):
        if search.best_s <= search.bound_s * (1 + 1e-12):
            break
        search.attempt(pick)
    if search.schedule is None:
        raise Infeasible("no order was found within the activations that the ranks may hold", hint="allow them more")
    return Synthesis(search.schedule, search.best_s, min(search.bound_s, search.best_s), search.named, search.named_s)


class _Search:
    """Searches an order, and keeps the best so far."""

    def __init__(self, durations: Durations, problem: Problem) -> None:
        self._durations = durations
        self._problem = problem
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
            self._durations, problem.stage_to_rank, len(problem.sizes), chunks, splits_backward=True
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
            if schedule.stage_to_rank != problem.stage_to_rank or schedule.asynchronous:
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

    def picks(self, rng: random.Random) -> Iterator[Pick]:
        """Every rule, every reference, and the best order so far with tasks shifted, twice a stage."""
        for rule in itertools.product((0.5, 0.0, 1.0), (False, True), (False, True)):
            yield ByRule(*rule)
        for reference, overrun_fraction in itertools.product(self._references, (0.0, 0.5, 1.0)):
            yield ByReference(reference, overrun_fraction)
        for _ in range(2 * len(self._problem.stage_to_rank)):
            yield ByReference(_shifted(self._order, rng), rng.choice((0.0, 0.0, 0.5, 1.0)))

    def attempt(self, pick: Pick) -> None:
        """Schedule along the picks, and keep the order if it is the best."""
        makespan_and_order = run(self._problem, pick, give_up_s=self._order_s * (1 + 1e-12))
        if makespan_and_order is None:
            return
        self._order_s, self._order = makespan_and_order
        if self._order_s < self.best_s or self._durations.blocking_p2p:
            schedule = self._problem.schedule(self._order)
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
