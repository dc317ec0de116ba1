"""Memory of published runs: how many peaks lie in their interval, and what risk those had that ran out of it.

`data/memory_runs.jsonl` holds runs of which only this is published: whether they ran out of memory. They come from
searches over layouts, whose tables also have the layouts that failed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from planner.answer import PricedLayout, half_width
from planner.errors import PlannerError
from planner.layout.runs import parse_run
from planner.specs.base import Spec
from planner.specs.units import GIB
from planner.validate.rows import data_lines, model_fields
from planner.validate.score import Scored

LIKELY = 0.5
"""Probability above which a run is expected to run out of memory."""


class MemoryRow(Spec):
    """One published run, of which a table says whether it ran out of memory."""

    id: str
    source: str
    """The document and the table, with its row."""
    family: str
    """A name for rows that come from one place, as in `rows.Row`."""
    trust: str
    run: dict[str, Any]
    """The run, in the form of `plan evaluate --runs`."""
    ran_out: bool

    def priced(self) -> PricedLayout:
        """The run's layout with its risk. Raises PlannerError if the run did what is not modelled."""
        return parse_run({"id": self.id, "run": self.run}, self.id).evaluate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The share of published peaks that lie in their predicted 80% interval, of one kind of measurement."""

    kind: str
    num_rows: int
    coverage: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """The predicted risks of runs of one family, those that ran out of memory apart from those that ran."""

    name: str
    ran_out: bool
    num_rows: int
    num_likely: int
    """Rows whose risk is above one half."""
    mean_risk: float


def load_memory_rows() -> tuple[MemoryRow, ...]:
    """All published runs with their outcome, in the order of their file."""
    models = model_fields()
    rows = []
    for line in data_lines("memory_runs.jsonl"):
        line["run"]["model"] = models[line["run"]["model"]]
        rows.append(MemoryRow.model_validate(line))
    return tuple(rows)


def memory_outcomes(rows: Iterable[MemoryRow], ran: Iterable[Scored]) -> list[Outcomes]:
    """The risks by family of `rows`, and of the scored runs, all of which ran."""
    risks: dict[tuple[str, bool], list[float]] = {}
    for row in rows:
        try:
            risk = row.priced().oom_probability
        except PlannerError:
            continue
        if risk is not None:
            risks.setdefault((row.family, row.ran_out), []).append(risk)
    for scored in ran:
        if scored.layout is not None and scored.row.counts and scored.layout.oom_probability is not None:
            risks.setdefault(("the runs scored", False), []).append(scored.layout.oom_probability)
    return [
        Outcomes(
            name=name,
            ran_out=ran_out,
            num_rows=len(values),
            num_likely=sum(value > LIKELY for value in values),
            mean_risk=sum(values) / len(values),
        )
        for (name, ran_out), values in risks.items()
    ]


def memory_coverage(scored: Sequence[Scored]) -> list[Coverage]:
    """The share of peaks inside their interval: of all trusted kinds together, and of each kind alone.

    A peak of the allocator is held against what the allocator is predicted to give out, in an interval as wide as that
    of the whole rank. The kind `unverified` is told apart: its source does not say what it measured.
    """
    inside: dict[str, list[float]] = {}
    for run in scored:
        if run.layout is None or not run.row.counts or run.row.measured.peak_memory_gib is None:
            continue
        error, kind = run.memory_error, run.row.measured.memory_kind or "unverified"
        if error is None:
            total = run.layout.worst_stage.memory.total_bytes
            error = total / (run.row.measured.peak_memory_gib * GIB) - 1
        width = half_width(run.layout.worst_stage.memory.total_bytes_interval or (1.0, 1.0))
        inside.setdefault(kind, []).append(float(abs(math.log1p(error)) <= width))
    told = [share for kind, shares in inside.items() if kind != "unverified" for share in shares]
    kinds = {"all but unverified": told, **inside} if told else inside
    return [
        Coverage(kind=kind, num_rows=len(shares), coverage=sum(shares) / len(shares)) for kind, shares in kinds.items()
    ]
