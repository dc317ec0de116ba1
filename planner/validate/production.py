"""Published production runs beside the steps that are predicted to be sustained over months."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from planner.answer import Sustained, half_width
from planner.validate.rows import PRODUCTION
from planner.validate.score import Scored


@dataclass(frozen=True, slots=True)
class Month:
    """One production run: its measured step, the benchmark step predicted for it, and the sustained one."""

    id: str
    model: str
    measured_s: float
    benchmark_s: float
    sustained: Sustained

    @property
    def ratio(self) -> float:
        """Measured seconds over those that a benchmark is predicted to take."""
        return self.measured_s / self.benchmark_s

    @property
    def inside(self) -> bool:
        """True if the measured step lies in the sustained step's interval."""
        low_s, high_s = self.sustained.step_s_interval
        return low_s <= self.measured_s <= high_s

    def inside_around(self, factor: float) -> bool:
        """True if it would lie in an interval as wide, around another factor on the benchmark."""
        return abs(math.log(self.ratio / factor)) <= half_width(self.sustained.step_s_interval)


@dataclass(frozen=True, slots=True)
class Production:
    """The agreement of production runs with their sustained steps."""

    num_runs: int
    num_inside: int
    num_inside_left_out: int
    """Runs inside an interval around the median of the runs of all other models."""
    least_ratio: float
    median_ratio: float
    """Measured over benchmark, over models: each counts once."""
    most_ratio: float


def months_of(scored: Iterable[Scored]) -> list[Month]:
    """The production runs that were priced, in their order."""
    return [
        Month(answer.row.id, answer.row.run["model"]["name"], answer.row.measured.step_s, layout.step.step_s, sustained)
        for answer in scored
        if answer.row.family == PRODUCTION
        and (layout := answer.layout) is not None
        and (sustained := layout.sustained) is not None
    ]


def production(months: Sequence[Month]) -> Production | None:
    """Shares and ratios of production runs; None if there are none, or of one model only."""
    if len({month.model for month in months}) < 2:
        return None
    ratios = [month.ratio for month in months]
    left_out = (month.inside_around(median_ratio(m for m in months if m.model != month.model)) for month in months)
    return Production(
        num_runs=len(months),
        num_inside=sum(month.inside for month in months),
        num_inside_left_out=sum(left_out),
        least_ratio=min(ratios),
        median_ratio=median_ratio(months),
        most_ratio=max(ratios),
    )


def median_ratio(months: Iterable[Month]) -> float:
    """The median over models; a model that several runs trained counts once, with the median of its runs."""
    models: dict[str, list[float]] = {}
    for month in months:
        models.setdefault(month.model, []).append(month.ratio)
    return median(median(ratios) for ratios in models.values())


def says_production(found: Production) -> str:
    """A line for the reader of `plan validate`."""
    return (
        f"{PRODUCTION}: {found.num_inside} of {found.num_runs} runs of weeks and months lie in their sustained "
        f"interval ({found.num_inside_left_out} if the other models decide the factor); measured over benchmark "
        f"{found.least_ratio:.2f} to {found.most_ratio:.2f}, median {found.median_ratio:.2f}"
    )
