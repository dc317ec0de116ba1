"""The fewest whole nodes that meet a condition, and the most that still do, found without planning all numbers.

With more GPUs the same layouts are open and none has to be given up, since GPUs may stay idle. So a condition that
more GPUs can only help is met from some number of nodes on, and halving finds that number. One thing is in the way:
idle nodes count among those that a job waits for. A number of nodes that misses the condition by that alone is tried
again on just the nodes that its layout uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.decide.point import Point, Trial
from planner.search.why.remedy import least_that

Plan = Callable[[Sequence[Trial]], list[Point]]
NEIGHBOURS = 3
"""Numbers of nodes tried below the one that was found, should the condition be met there after all."""


class Nodes:
    """Points of one job by their number of nodes, each planned once."""

    def __init__(self, trial: Trial, plan_all: Plan, most_nodes: int) -> None:
        self.trial, self.plan_all, self.most_nodes = trial, plan_all, most_nodes
        self.size = trial.case.cluster.node_size
        self.points: dict[int, Point] = {}

    def point(self, num_nodes: int) -> Point:
        self.plan([num_nodes])
        return self.points[num_nodes]

    def plan(self, numbers: Sequence[int]) -> None:
        """Plan those of the numbers that are not planned yet."""
        missing = [number for number in dict.fromkeys(numbers) if number not in self.points]
        if missing:
            points = self.plan_all([self.trial.on_gpus(number * self.size) for number in missing])
            self.points.update(zip(missing, points, strict=True))

    def first_that(self, holds: Callable[[Point], bool], least: int = 1) -> int | None:
        """The fewest nodes whose point `holds`; None if there are none up to the most."""
        low, high = least - 1, least
        while not self._holds(high, holds):
            if high >= self.most_nodes:
                return None
            low, high = high, min(2 * high, self.most_nodes)
        high = least_that(low, high, lambda num_nodes: self._holds(num_nodes, holds))
        below = range(max(least, high - NEIGHBOURS), high)
        self.plan(below)
        found = [number for number in sorted(self.points) if least <= number <= high and holds(self.points[number])]
        return found[0] if found else high

    def _holds(self, num_nodes: int, holds: Callable[[Point], bool]) -> bool:
        point = self.point(num_nodes)
        if holds(point):
            return True
        used = -(-(point.num_gpus_used or 0) // self.size)
        return 0 < used < num_nodes and holds(self.point(used))

    def last_that(self, holds: Callable[[Point], bool], first: int) -> int:
        """The most nodes whose point `holds`, from `first` on, where it does; the most of all where it always does."""
        low, high = first, first
        while holds(self.point(high)):
            low = high
            if high >= self.most_nodes:
                return low
            high = min(2 * high, self.most_nodes)
        return least_that(low, high, lambda num_nodes: not holds(self.point(num_nodes))) - 1
