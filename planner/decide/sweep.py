"""Many jobs planned: a table of points, the Pareto front among them, and the fewest GPUs that meet a condition.

With more GPUs the same layouts are open and none has to be given up, since GPUs may stay idle. So a condition that
more GPUs can only help is met from some number of nodes on, and halving finds that number. One thing is in the way:
idle nodes count among those that a job waits for. A number of nodes that misses the condition by that alone is tried
again on just the nodes that its layout uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

from pydantic import Field

from planner.answer import SIGMAS_TO_END, Interval, Layout, Plan, half_width
from planner.decide.side_by_side import side_by_side
from planner.errors import PlannerError
from planner.search.case import Case
from planner.search.recipes import pinned
from planner.search.safest import exceeds_risk
from planner.search.search import search_dtypes
from planner.search.why.remedy import least_that
from planner.specs.base import Fields, Spec, filled
from planner.trainers.switches import Value


@dataclass(frozen=True, slots=True)
class Trial:
    """A job that is to be planned, and the options that tell it from the others of its sweep."""

    options: Mapping[str, Value]
    case: Case

    def on_gpus(self, num_gpus: int) -> Trial:
        """The same trial on another number of GPUs."""
        return Trial({**self.options, "gpus": num_gpus}, self.case.on_gpus(num_gpus))

    @property
    def num_gpus(self) -> int:
        return self.case.cluster.num_gpus


class Point(Spec):
    """One row of a sweep. Figures are null where nothing fits; days, money and energy where no tokens are given."""

    options: dict[str, Value]
    num_gpus: int
    fits: bool
    """True if a layout fits with no more risk of running out of memory than was accepted."""
    reason: str = ""
    """A sentence that tells why nothing fits, or that the risk is larger than was accepted."""
    layout: str = ""
    parallelism: Layout | None = None
    num_gpus_used: int | None = None
    oom_probability: float | None = None
    step_s: float | None = None
    step_s_interval: Interval | None = None
    tokens_per_s: float | None = None
    tokens_per_s_interval: Interval | None = None
    mfu: float | None = None
    mfu_interval: Interval | None = None
    scaling_efficiency: float | None = None
    """Tokens per second and GPU over those of the fewest GPUs with the same other options."""
    days: float | None = None
    days_interval: Interval | None = None
    usd: float | None = None
    usd_interval: Interval | None = None
    mwh: float | None = None
    mwh_interval: Interval | None = None
    deadline_probability: float | None = Field(default=None, ge=0, le=1)
    """The probability that the run ends in time, if there is a deadline."""


def planned(trial: Trial) -> Point:
    """Plan a trial. A job that cannot be planned is a point that does not fit, with the reason."""
    options = dict(trial.options)
    try:
        case = pinned(trial.case)
        plan = search_dtypes(case)
    except PlannerError as error:
        return Point(options=options, num_gpus=trial.num_gpus, fits=False, reason=error.message)
    return _point(plan, options, exceeds_risk(plan, case))


def _point(plan: Plan, options: dict[str, Value], is_risky: bool) -> Point:
    step, layout, cost = plan.step, plan.parallelism, plan.run_cost
    slow_fast = step.step_s_interval and step.step_s_interval[::-1]
    point = Point(
        options=options,
        num_gpus=plan.cluster.num_gpus,
        fits=plan.fits and not is_risky,
        reason=plan.warnings[0] if is_risky and plan.warnings else "",
        layout=str(layout),
        parallelism=layout,
        num_gpus_used=layout.num_gpus_used,
        oom_probability=plan.best.oom_probability,
        step_s=step.step_s,
        step_s_interval=step.step_s_interval,
        tokens_per_s=step.tokens_per_s,
        tokens_per_s_interval=_inverse(step.tokens_per_s, step.step_s, slow_fast),
        mfu=step.mfu,
        mfu_interval=_inverse(step.mfu, step.step_s, slow_fast),
    )
    if cost is None:
        return point
    figures = {name: getattr(cost, name) for name in ("days", "days_interval", "usd", "usd_interval", "mwh")}
    return point.model_copy(update={**figures, "mwh_interval": _like(cost.mwh, cost.days, cost.days_interval)})


def _inverse(value: float, step_s: float, slow_fast: Interval | None) -> Interval | None:
    """The interval of a rate, which falls as the step grows."""
    return None if slow_fast is None else (value * step_s / slow_fast[0], value * step_s / slow_fast[1])


def _like(value: float | None, other: float, interval: Interval | None) -> Interval | None:
    """The interval of a number that is in proportion to another one."""
    return None if value is None or interval is None else (value * interval[0] / other, value * interval[1] / other)


def with_deadline(point: Point, deadline_days: float | None) -> Point:
    """The point with the probability that its run ends by a deadline; days are lognormal through their interval."""
    if deadline_days is None or point.days is None or point.days_interval is None:
        return point
    middle = math.log(point.days_interval[0] * point.days_interval[1]) / 2
    sigma = half_width(point.days_interval) / SIGMAS_TO_END
    probability = (
        NormalDist(middle, sigma).cdf(math.log(deadline_days)) if sigma else float(point.days <= deadline_days)
    )
    return point.model_copy(update={"deadline_probability": probability})


def with_efficiency(points: list[Point]) -> list[Point]:
    """The points with their scaling efficiency, among those that differ in their number of GPUs only."""
    bases: dict[tuple[tuple[str, Value], ...], float] = {}
    efficiency: dict[int, float] = {}
    for place in sorted(range(len(points)), key=lambda place: points[place].num_gpus):
        point = points[place]
        if point.tokens_per_s is not None:
            others, rate = tuple(item for item in point.options.items() if item[0] != "gpus"), point.tokens_per_s
            efficiency[place] = rate / point.num_gpus / bases.setdefault(others, rate / point.num_gpus)
    return [point.model_copy(update={"scaling_efficiency": efficiency.get(n)}) for n, point in enumerate(points)]


PlanTrials = Callable[[Sequence[Trial]], list[Point]]
"""Plans trials and gives their points in order."""
NEIGHBOURS = 3
"""Numbers of nodes tried below the one that was found, should the condition be met there after all."""


@dataclass(frozen=True, slots=True)
class PlannedNodes:
    """Points of one job by their number of nodes, each planned once."""

    trial: Trial
    plan_all: PlanTrials
    most_nodes: int
    points: dict[int, Point] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.trial.case.cluster.node_size

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


SEARCH_S = 0.4
"""Seconds that a point takes: from eight on, processes are worth their start."""


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
        found = filled(pairs.items())
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

    def to_json(self) -> Fields:
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


def of_points(points: Iterable[Point], goal: Goal) -> Sweep:
    """The answer of points that are planned."""
    return Sweep(points=tuple(with_efficiency([with_deadline(p, goal.deadline_days) for p in points])), goal=goal)


def plan_all(trials: Sequence[Trial], advance: Callable[[], None] = lambda: None) -> list[Point]:
    """The point of each trial, many of them side by side; `advance` is called after each."""
    return side_by_side(planned, trials, SEARCH_S, advance)
