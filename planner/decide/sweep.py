"""Many jobs planned: a table of points, the Pareto front among them, and the answers to how many GPUs and which."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from planner.decide.point import Point, Trial, planned, with_deadline, with_efficiency
from planner.decide.processes import processes
from planner.specs.base import Spec

FEWEST_FOR_PROCESSES = 8
"""Processes take a second or two to start, which fewer points do not win back."""
Planner = Callable[[Iterable[Trial]], "list[Point]"]
"""Plans trials, as many at a time as there are processors, and gives their points in order."""


class Goal(Spec):
    """The terms that a run has to meet."""

    deadline_days: float | None = None
    budget_usd: float | None = None

    def is_met(self, point: Point) -> bool:
        """True if the point fits, ends in time and within the budget."""
        if not point.fits:
            return False
        in_time = self.deadline_days is None or (point.days is not None and point.days <= self.deadline_days)
        return in_time and (self.budget_usd is None or (point.usd is not None and point.usd <= self.budget_usd))


class Sweep(Spec):
    """The answer of a sweep."""

    points: tuple[Point, ...]
    goal: Goal = Goal()

    @property
    def pareto(self) -> list[int]:
        """Points that no other beats in both: days against dollars, or tokens per second against GPUs."""
        pairs = {number: _pair(point) for number, point in enumerate(self.points) if point.fits}
        found = {number: pair for number, pair in pairs.items() if pair is not None}
        return [number for number, pair in found.items() if not any(_beats(other, pair) for other in found.values())]

    @property
    def answers(self) -> dict[str, int | None]:
        """Indices of the points with the fewest GPUs, the least money and the shortest time that meet the goal."""
        met = [(number, point) for number, point in enumerate(self.points) if self.goal.is_met(point)]

        def least(measure: Callable[[Point], Any]) -> int | None:
            measured = [(measure(point), number) for number, point in met if None not in measure(point)]
            return min(measured)[1] if measured else None

        return {
            "fewest_gpus": least(lambda point: (point.num_gpus, point.step_s)),
            "cheapest": least(lambda point: (point.usd, point.num_gpus)),
            "fastest": least(lambda point: (point.days, point.usd) if point.days else (-(point.tokens_per_s or 0.0),)),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data in the contract's form."""
        points = [point.model_dump(mode="json") for point in self.points]
        return {"points": points, "pareto": self.pareto, "answers": self.answers, "goal": self.goal.model_dump()}


def _pair(point: Point) -> tuple[float, float] | None:
    """Two numbers of a point, both the better the smaller."""
    if point.days is not None:
        return None if point.usd is None else (point.days, point.usd)
    return None if point.tokens_per_s is None else (-point.tokens_per_s, point.num_gpus)


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one != other and one[0] <= other[0] and one[1] <= other[1]


def sweep(trials: Sequence[Trial], goal: Goal, plan_all: Planner) -> Sweep:
    """Plan every trial."""
    return of_points(plan_all(trials), goal)


def of_points(points: Iterable[Point], goal: Goal) -> Sweep:
    """The answer of points that are planned."""
    return Sweep(points=tuple(with_efficiency([with_deadline(p, goal.deadline_days) for p in points])), goal=goal)


@contextmanager
def planners(num_points: int, advance: Callable[[], None] = lambda: None) -> Any:
    """Something that plans trials in as many processes as there are processors, or here where there are few points."""
    with processes(num_points, FEWEST_FOR_PROCESSES, "planner.decide.point", advance) as each:
        yield lambda trials: each(planned, trials)
