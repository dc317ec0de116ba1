"""One point of a sweep: a job with its options, and the figures of the plan that it gets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from pydantic import Field

from planner.answer import SIGMAS_TO_END, Interval, Plan, half_width
from planner.errors import PlannerError
from planner.search.case import Case
from planner.search.safest import exceeds_risk
from planner.search.search import search
from planner.specs.base import Spec
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
    case = trial.case.limited(top=1)
    options = dict(trial.options)
    try:
        plan = search(case)
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
    bases: dict[tuple[tuple[str, Value], ...], Point] = {}
    for point in sorted(points, key=lambda point: point.num_gpus):
        if point.tokens_per_s is not None:
            bases.setdefault(_others(point), point)
    return [_relative(point, bases.get(_others(point))) for point in points]


def _others(point: Point) -> tuple[tuple[str, Value], ...]:
    return tuple((name, value) for name, value in point.options.items() if name != "gpus")


def _relative(point: Point, base: Point | None) -> Point:
    if base is None or base.tokens_per_s is None or point.tokens_per_s is None:
        return point
    efficiency = point.tokens_per_s / point.num_gpus / (base.tokens_per_s / base.num_gpus)
    return point.model_copy(update={"scaling_efficiency": efficiency})
