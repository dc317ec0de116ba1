"""How far predictions are from published runs: per row, per family, and in all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.errors import PlannerError
from planner.physics.shape import FloatArray
from planner.plan import PricedLayout
from planner.search.runs import evaluate_lines
from planner.specs.units import GIB
from planner.validate.rows import Row

MIN_RANKED = 3
"""Layouts of one group whose order says something."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A published run and what the planner says of it: a priced layout, or why there is none."""

    row: Row
    layout: PricedLayout | None
    error: PlannerError | None = None

    @property
    def step_error(self) -> float:
        """predicted / measured − 1 of the step's seconds; only where the run was priced."""
        assert self.layout is not None
        return self.layout.step.step_s / self.row.measured.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """The same of peak memory, of the kind that was measured; None where nothing comparable was."""
        assert self.layout is not None
        measured = self.row.measured
        if measured.peak_memory_gib is None or measured.memory_kind in (None, "unverified"):
            return None
        stages = [stage.memory for stage in self.layout.stages]
        if measured.memory_kind == "allocated":
            predicted = max(memory.peak_allocated_bytes for memory in stages)
        elif measured.memory_kind == "allocated on rank 0":
            predicted = stages[0].peak_allocated_bytes
        else:
            predicted = max(memory.total_bytes for memory in stages)
        return predicted / (measured.peak_memory_gib * GIB) - 1

    @property
    def in_interval(self) -> bool | None:
        """Whether the measured step lies in the predicted interval; None where there is none."""
        assert self.layout is not None
        interval = self.layout.step.step_s_interval
        return None if interval is None else interval[0] <= self.row.measured.step_s <= interval[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of a set of rows, weighted by 1 / how often the same configuration was published; errors are fractions."""

    name: str
    num_rows: int
    num_unsupported: int
    median: float
    """Of |step error|; likewise p90 and mean."""
    p90: float
    mean: float
    bias: float
    """Mean signed step error: below zero where the planner is too optimistic."""
    worst: float
    worst_id: str
    rank_correlation: float | None
    """Spearman's, in groups of the same model, GPUs and sequence length, averaged over rows; None without groups."""
    memory_mean: float | None
    """Mean |memory error| of the rows that report memory; likewise worst."""
    memory_worst: float | None
    num_memory_rows: int
    coverage: float | None
    """Share of rows inside their 80% interval."""


def evaluate_rows(rows: Sequence[Row]) -> list[Scored]:
    """Every row priced as `plan evaluate --runs` would."""
    answers = evaluate_lines(row.to_line() for row in rows)
    return [Scored(row, answer.layout, answer.error) for row, answer in zip(rows, answers, strict=True)]


def score(name: str, scored: Iterable[Scored]) -> Score | None:
    """The errors of `scored` in numbers; None where no row was priced."""
    everything = list(scored)
    priced = [s for s in everything if s.layout is not None]
    if not priced:
        return None
    errors = np.array([s.step_error for s in priced])
    weights = np.array([s.row.weight for s in priced])
    size = np.abs(errors)
    worst = int(size.argmax())
    memory = [(abs(s.memory_error), s.row.weight) for s in priced if s.memory_error is not None]
    covered = [(float(s.in_interval), s.row.weight) for s in priced if s.in_interval is not None]
    return Score(
        name=name,
        num_rows=len(priced),
        num_unsupported=len(everything) - len(priced),
        median=weighted_quantile(size, weights, 0.5),
        p90=weighted_quantile(size, weights, 0.9),
        mean=float(np.average(size, weights=weights)),
        bias=float(np.average(errors, weights=weights)),
        worst=float(errors[worst]),
        worst_id=priced[worst].row.id,
        rank_correlation=_rank_correlation(priced),
        memory_mean=_mean(memory),
        memory_worst=max((error for error, _ in memory), default=None),
        num_memory_rows=len(memory),
        coverage=_mean(covered),
    )


def by_family(scored: Iterable[Scored], counts: Callable[[Row], bool] = lambda row: row.counts) -> list[Score]:
    """A score per family, in order of appearance, of the rows that `counts`; the last one is of all of them."""
    families: dict[str, list[Scored]] = defaultdict(list)
    for one in scored:
        if counts(one.row):
            families[one.row.family].append(one)
    scores = [score(name, members) for name, members in families.items()]
    scores.append(score("all", [one for members in families.values() for one in members]))
    return [s for s in scores if s is not None]


def weighted_quantile(values: FloatArray, weights: FloatArray, fraction: float) -> float:
    """The least value with at least `fraction` of the weight at or below it."""
    order = np.argsort(values)
    passed = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(passed, fraction * passed[-1] * (1 - 1e-12))])


def _mean(pairs: list[tuple[float, float]]) -> float | None:
    """Weighted mean of (value, weight) pairs; None of none."""
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs) if pairs else None


def _rank_correlation(priced: list[Scored]) -> float | None:
    groups: dict[tuple[object, ...], list[Scored]] = defaultdict(list)
    for one in priced:
        run = one.row.run
        groups[run["model"]["name"], run["hardware"], run["num_gpus"], run["seq_length"]].append(one)
    found = [(spearman(members), float(len(members))) for members in groups.values() if len(members) >= MIN_RANKED]
    return _mean(found)


def spearman(scored: Sequence[Scored]) -> float:
    """Rank correlation of predicted and measured seconds per sequence."""
    predicted, measured = [], []
    for one in scored:
        assert one.layout is not None
        batch = one.row.run["global_batch_size"]
        predicted.append(one.layout.step.step_s / batch)
        measured.append(one.row.measured.step_s / batch)
    a, b = (_ranks(np.array(values)) for values in (predicted, measured))
    if min(a.std(), b.std()) == 0.0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: FloatArray) -> FloatArray:
    """Positions in sorted order, ties sharing their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], dtype=float)
