"""Errors of predictions against published runs: per row, per family, and in all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.answer import PricedLayout
from planner.errors import PlannerError, SpecError
from planner.layout.runs import Run
from planner.shape import FloatArray
from planner.specs.problems import nearest
from planner.specs.units import GIB
from planner.validate.rows import Row, load_rows

MIN_RANKED = 3
"""The fewest layouts in a group whose order says something."""
MIN_REPEATS = 5
"""The fewest repeated measurements that tell how far two measurements of the same run are apart."""
NUM_DRAWS = 200
"""Number of draws of noise for the rank correlation that a perfect prediction would seem to have."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A published run with the planner's answer: a priced layout, or the error that says why there is none."""

    row: Row
    layout: PricedLayout | None
    error: PlannerError | None = None
    run: Run | None = None
    """The run as it was priced."""

    @property
    def step_error(self) -> float:
        """Error of the step, predicted / measured seconds − 1; only for a run that was priced."""
        assert self.layout is not None
        return self.layout.step.step_s / self.row.measured.step_s - 1

    @property
    def memory_error(self) -> float | None:
        """Error of the peak memory, predicted / measured − 1, of the kind measured; None if no kind can be compared."""
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
        """True if the measured step lies in the predicted interval; None if there is no interval."""
        assert self.layout is not None
        interval = self.layout.step.step_s_interval
        return None if interval is None else interval[0] <= self.row.measured.step_s <= interval[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of a set of rows, as fractions; a row weighs 1 / how often the same configuration was published."""

    name: str
    num_rows: int
    num_unsupported: int
    median: float
    """Median of |step error|; `p90` and `mean` are of the same values."""
    p90: float
    mean: float
    bias: float
    """Mean signed step error: below zero if the planner is too optimistic."""
    worst: float
    worst_id: str
    rank_correlation: float | None
    """Spearman's rank correlation within groups of the same model, GPUs and sequence length, averaged over rows; None
    without groups."""
    repeat_spread: float | None
    """Standard deviation of log seconds over repeated measurements of the same run; None if too few are published."""
    rank_ceiling: float | None
    """The rank correlation that a perfect prediction would have with measurements of that spread."""
    memory_mean: float | None
    """Mean |memory error| of the rows that report memory; `memory_worst` is the largest of them."""
    memory_worst: float | None
    num_memory_rows: int
    coverage: float | None
    """Share of rows whose measured step lies in the predicted 80% interval."""


def validate_runs(family: str | None = None) -> list[Score]:
    """The planner's errors on the published runs that come with it, per family and in all: `plan validate`.

    Only rows that count are scored. `family` names one source. Raises SpecError if no family has that name.
    """
    rows = [row for row in load_rows() if row.counts]
    families = list(dict.fromkeys(row.family for row in rows))
    if family is not None and family not in families:
        raise SpecError(f"family: {family!r} is unknown", f"one of {', '.join(families)}{nearest(family, families)}")
    return by_family(evaluate_rows([row for row in rows if family in (None, row.family)]))


def evaluate_rows(rows: Iterable[Row]) -> list[Scored]:
    """Every row priced as `plan evaluate --runs` would."""
    rows = list(rows)
    priced: dict[str, Scored] = {}
    for row in rows:
        if row.run_key not in priced:
            priced[row.run_key] = _priced(row)
    return [_of_row(priced[row.run_key], row) for row in rows]


def _of_row(known: Scored, row: Row) -> Scored:
    """The answer to a row whose run was priced, perhaps for another that published it too."""
    if known.row is row or known.layout is None or known.run is None:
        return known if known.row is row else _priced(row)
    return Scored(row, known.layout.model_copy(update={"id": row.id}), run=replace(known.run, id=row.id))


def _priced(row: Row) -> Scored:
    try:
        run = row.parsed()
        return Scored(row, run.evaluate(), run=run)
    except PlannerError as error:
        return Scored(row, None, error)


def score(name: str, scored: Iterable[Scored]) -> Score | None:
    """The errors of `scored` in numbers; None if no row was priced."""
    answers = list(scored)
    priced = [answer for answer in answers if answer.layout is not None]
    if not priced:
        return None
    errors = np.array([answer.step_error for answer in priced])
    weights = np.array([answer.row.weight for answer in priced])
    sizes = np.abs(errors)
    worst = int(sizes.argmax())
    memory = [(abs(p.memory_error), p.row.weight) for p in priced if p.memory_error is not None]
    spread, groups = repeat_spread([answer.row for answer in priced]), _ranked(priced)
    covered = [(float(p.in_interval), p.row.weight) for p in priced if p.in_interval is not None]
    return Score(
        name=name,
        num_rows=len(priced),
        num_unsupported=len(answers) - len(priced),
        median=weighted_quantile(sizes, weights, 0.5),
        p90=weighted_quantile(sizes, weights, 0.9),
        mean=float(np.average(sizes, weights=weights)),
        bias=float(np.average(errors, weights=weights)),
        worst=float(errors[worst]),
        worst_id=priced[worst].row.id,
        rank_correlation=_mean([(spearman(*_per_sequence(group)), len(group)) for group in groups]),
        repeat_spread=spread,
        rank_ceiling=None if spread is None else _rank_ceiling(groups, spread),
        memory_mean=_mean(memory),
        memory_worst=max((error for error, _ in memory), default=None),
        num_memory_rows=len(memory),
        coverage=_mean(covered),
    )


def by_family(scored: Iterable[Scored], counts: Callable[[Row], bool] = lambda row: row.counts) -> list[Score]:
    """A score per family, in order of appearance, over the rows for which `counts` is true; the last is over all.

    Before it stands one over the families on AMD's GPUs, if there are several.
    """
    families: dict[str, list[Scored]] = defaultdict(list)
    for answer in scored:
        if counts(answer.row):
            families[answer.row.family].append(answer)
    scores = [score(name, members) for name, members in families.items()]
    amd = [members for members in families.values() if members[0].row.on_amd]
    if len(amd) > 1:
        scores.append(score("AMD GPUs", [answer for members in amd for answer in members]))
    scores.append(score("all", [answer for members in families.values() for answer in members]))
    return [s for s in scores if s is not None]


def weighted_quantile(values: FloatArray, weights: FloatArray, fraction: float) -> float:
    """The least value with at least `fraction` of the weight at or below it."""
    order = np.argsort(values)
    passed = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(passed, fraction * passed[-1] * (1 - 1e-12))])


def _mean(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Weighted mean of (value, weight) pairs; None if there are none."""
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs) if pairs else None


def repeat_spread(rows: Sequence[Row]) -> float | None:
    """Spread of repeated measurements: √( Σ (log seconds − their mean)² / Σ (n − 1) ), runs measured n > 1 times."""
    log_seconds: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        log_seconds[row.run_key].append(np.log(row.measured.step_s))
    num_repeats = sum(len(logs) - 1 for logs in log_seconds.values())
    if num_repeats < MIN_REPEATS:
        return None
    return float(np.sqrt(sum(len(logs) * np.var(logs) for logs in log_seconds.values()) / num_repeats))


def _ranked(priced: list[Scored]) -> list[list[Scored]]:
    """Groups of the same model, GPUs and sequence length, large enough to rank."""
    groups: dict[tuple[object, ...], list[Scored]] = defaultdict(list)
    for answer in priced:
        run = answer.row.run
        groups[run["model"]["name"], run["hardware"], run["num_gpus"], run["seq_length"]].append(answer)
    return [members for members in groups.values() if len(members) >= MIN_RANKED]


def _per_sequence(scored: Sequence[Scored]) -> tuple[FloatArray, FloatArray]:
    """Predicted and measured seconds per sequence."""
    predicted = [s.layout.step.step_s / s.row.run["global_batch_size"] for s in scored if s.layout is not None]
    return np.array(predicted), np.array([s.row.measured.step_s / s.row.run["global_batch_size"] for s in scored])


def _rank_ceiling(groups: Sequence[Sequence[Scored]], spread: float) -> float | None:
    """The mean rank correlation of the predictions with themselves times lognormal noise.

    The predictions are taken for the truth, and the noise for errors of measurement.
    """
    rng = np.random.default_rng(0)
    ceilings = []
    for group in groups:
        truth, _ = _per_sequence(group)
        ranks, noise = _ranks(truth), np.exp(rng.normal(0.0, spread, (NUM_DRAWS, len(truth))))
        # noise leaves no ties: positions in sorted order are the ranks
        seen = np.corrcoef(ranks, (truth * noise).argsort(axis=1).argsort(axis=1))[0, 1:] if ranks.std() else 0.0
        ceilings.append((float(np.mean(seen)), len(group)))
    return _mean(ceilings)


def spearman(a: FloatArray, b: FloatArray) -> float:
    """Spearman's rank correlation; 0 if one of the two does not vary."""
    a, b = _ranks(a), _ranks(b)
    if min(a.std(), b.std()) == 0.0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: FloatArray) -> FloatArray:
    """Positions in sorted order; equal values share the mean of their positions."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], dtype=float)
