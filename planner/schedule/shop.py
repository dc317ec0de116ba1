"""A pipeline that runs forward in time, one decision after the other; list scheduling builds orders with it."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.errors import Infeasible
from planner.schedule.actions import KINDS, Action, F, I, Schedule, W
from planner.schedule.replay import Durations, stage_tables

NEVER = float("inf")

Task = tuple[int, int, int]
"""Kind (place in KINDS), virtual stage and micro-batch: an action as a plain tuple, for speed."""

Pick = Callable[["Shop", int, float], Task | float]
"""Function (shop, rank, time) that chooses the rank's next task among those that are ready, or gives the time at which
to ask again (NEVER: when an input arrives)."""


@dataclass(frozen=True, slots=True)
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

    def schedule(self, name: str, order: Sequence[Sequence[Task]], *, splits_backward: bool) -> Schedule:
        """The order as action lists; without a split backward, I is written as B and W is left out."""
        spelled = KINDS if splits_backward else KINDS.replace("I", "B")
        ranks = tuple(
            tuple(Action(spelled[kind], stage, mb) for kind, stage, mb in tasks if splits_backward or kind != W)
            for tasks in order
        )
        return Schedule(name, ranks, self.stage_to_rank, len(self.sizes), splits_backward=splits_backward)


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
