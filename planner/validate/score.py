"""Errors of predictions against published runs: per row, per family, and in all; their memory, and production runs.

`data/memory_runs.jsonl` holds runs of which only this is published: whether they ran out of memory. They come from
searches over layouts, whose tables also have the layouts that failed. Runs of weeks and months are held against the
steps that are predicted to be sustained.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from planner.answer import PricedLayout, Sustained, half_width
from planner.errors import PlannerError, SpecError
from planner.layout.runs import Run, parse_run
from planner.shape import FloatArray
from planner.specs.base import Fields, Spec, grouped
from planner.specs.problems import nearest
from planner.specs.units import GIB
from planner.validate.rows import PRODUCTION, PublishedRun, load_rows, rows_of

MIN_RANKED = 3
"""The fewest layouts in a group whose order says something."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A published run with the planner's answer: a priced layout, or the error that says why there is none."""

    row: PublishedRun
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
    memory_mean: float | None
    """Mean |memory error| of the rows that report memory; `memory_worst` is the largest of them."""
    memory_worst: float | None
    num_memory_rows: int
    coverage: float | None
    """Share of rows whose measured step lies in the predicted 80% interval."""
    half_width: float | None = None
    """Mean half-width of these intervals, in natural logarithms."""
    naive: float | None = None
    """Median error of the median TFLOP/s of other families on such a GPU (`naive_errors`)."""


def validate_runs(family: str | None = None) -> list[Score]:
    """The planner's errors on the published runs that come with it, per family and in all: `plan validate`.

    Only rows that count are scored. `family` names one source. Raises SpecError if no family has that name.
    """
    rows = [row for row in load_rows() if row.counts]
    families = list(dict.fromkeys(row.family for row in rows))
    if family is not None and family not in families:
        raise SpecError(f"family: {family!r} is unknown", f"one of {', '.join(families)}{nearest(family, families)}")
    return by_family(evaluate_rows([row for row in rows if family in (None, row.family)]))


def evaluate_rows(rows: Iterable[PublishedRun]) -> list[Scored]:
    """Every row priced as `plan evaluate --runs` would."""
    priced: dict[str, Scored] = {}
    answers = []
    for row in rows:
        known = priced.get(row.run_key)
        if known is None or known.layout is None or known.run is None:
            answers.append(_priced(row))
            priced.setdefault(row.run_key, answers[-1])
        else:  # published again
            layout = known.layout.model_copy(update={"id": row.id})
            answers.append(Scored(row, layout, run=replace(known.run, id=row.id)))
    return answers


def _priced(row: PublishedRun) -> Scored:
    try:
        run = row.parsed()
        return Scored(row, run.evaluate(), run=run)
    except PlannerError as error:
        return Scored(row, None, error)


def score(name: str, scored: Iterable[Scored], naive: Mapping[str, float] | None = None) -> Score | None:
    """The errors of `scored` in numbers; None if no row was priced. `naive` are those of `naive_errors`."""
    answers = list(scored)
    priced = [answer for answer in answers if answer.layout is not None]
    if not priced:
        return None
    errors = np.array([answer.step_error for answer in priced])
    weights = np.array([answer.row.weight for answer in priced])
    sizes = np.abs(errors)
    worst = int(sizes.argmax())
    memory = [(abs(p.memory_error), p.row.weight) for p in priced if p.memory_error is not None]
    covered = [(float(p.in_interval), p.row.weight) for p in priced if p.in_interval is not None]
    intervals = [(p.layout.step.step_s_interval, p.row.weight) for p in priced if p.layout is not None]
    widths = [(half_width(interval), weight) for interval, weight in intervals if interval is not None]
    plain = [(naive[p.row.id], p.row.weight) for p in priced if naive and p.row.id in naive]
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
        rank_correlation=_mean([(spearman(*_per_sequence(group)), len(group)) for group in _ranked(priced)]),
        memory_mean=_mean(memory),
        memory_worst=max((error for error, _ in memory), default=None),
        num_memory_rows=len(memory),
        coverage=_mean(covered),
        half_width=_mean(widths),
        naive=_median(plain),
    )


MANY_NODES, MANY_SWITCHES = 32, 3
"""Nodes, and switches that a run says, from which on it counts among those of many."""
GROUPS: Mapping[str, Callable[[PublishedRun], bool]] = {
    "AMD GPUs": lambda row: row.on_amd,
    "mixtures": lambda row: row.is_mixture,
    "dense": lambda row: not row.is_mixture,
    f"{MANY_NODES} nodes or more": lambda row: row.run["num_gpus"] >= MANY_NODES * row.run.get("gpus_per_node", 8),
    f"{MANY_SWITCHES} switches or more": lambda row: len(row.run.get("features", {})) >= MANY_SWITCHES,
}
"""Kinds of runs that are scored together, across families."""


def by_family(scored: Iterable[Scored], counts: Callable[[PublishedRun], bool] = lambda row: row.counts) -> list[Score]:
    """A score per family, in order of appearance, over the rows for which `counts` is true; the last is over all.

    Before it stand those of `GROUPS` that span several families.
    """
    families = grouped((answer.row.family, answer) for answer in scored if counts(answer.row))
    every = [answer for members in families.values() for answer in members]
    naive = naive_errors(every)
    scores = [score(name, members, naive) for name, members in families.items()]
    for name, is_in in GROUPS.items():
        members = [answer for answer in every if is_in(answer.row)]
        if len({answer.row.family for answer in members}) > 1:
            scores.append(score(name, members, naive))
    scores.append(score("all", every, naive))
    return [s for s in scores if s is not None]


def naive_errors(scored: Iterable[Scored]) -> dict[str, float]:
    """|step error| of each run, by its id, at the median TFLOP/s that other families reach on such a GPU with such a
    model: dense or a mixture, in 16 bits or fewer. None of its own family; runs without any such are left out."""
    kinds: dict[tuple[str, bool, bool], list[tuple[str, str, float]]] = defaultdict(list)
    for answer in scored:
        if answer.layout is not None:
            row = answer.row
            layout = answer.layout
            reached = layout.step.model_tflops_per_gpu * layout.step.step_s / row.measured.step_s
            kind = row.run["hardware"], row.is_mixture, row.run.get("dtype", "bf16") in ("bf16", "fp16")
            kinds[kind].append((row.id, row.family, reached))
    errors: dict[str, float] = {}
    for members in kinds.values():
        for name, family, reached in members:
            if others := [tflops for _, other, tflops in members if other != family]:
                errors[name] = abs(reached / median(others) - 1)
    return errors


def weighted_quantile(values: FloatArray, weights: FloatArray, fraction: float) -> float:
    """The least value with at least `fraction` of the weight at or below it."""
    order = np.argsort(values)
    passed = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(passed, fraction * passed[-1] * (1 - 1e-12))])


def _median(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Weighted median of (value, weight) pairs; None if there are none."""
    if not pairs:
        return None
    values, weights = np.array(pairs).T
    return weighted_quantile(values, weights, 0.5)


def _mean(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Weighted mean of (value, weight) pairs; None if there are none."""
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs) if pairs else None


def _ranked(priced: list[Scored]) -> list[list[Scored]]:
    """Groups of the same model, GPUs and sequence length, large enough to rank."""
    pairs = ((answer.row.run, answer) for answer in priced)
    groups = grouped(
        ((run["model"]["name"], run["hardware"], run["num_gpus"], run["seq_length"]), answer) for run, answer in pairs
    )
    return [members for members in groups.values() if len(members) >= MIN_RANKED]


def _per_sequence(scored: Sequence[Scored]) -> tuple[FloatArray, FloatArray]:
    """Predicted and measured seconds per sequence."""
    predicted = [s.layout.step.step_s / s.row.run["global_batch_size"] for s in scored if s.layout is not None]
    return np.array(predicted), np.array([s.row.measured.step_s / s.row.run["global_batch_size"] for s in scored])


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
    run: Fields
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
    return rows_of(MemoryRow, "memory_runs.jsonl")


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
        memory = run.layout.worst_stage.memory
        low, high = memory.total_bytes_interval or (memory.total_bytes, memory.total_bytes)
        below = math.log(memory.total_bytes / low)
        above = below if kind.startswith("allocated") else math.log(high / memory.total_bytes)
        inside.setdefault(kind, []).append(float(-above <= math.log1p(error) <= below))
    told = [share for kind, shares in inside.items() if kind != "unverified" for share in shares]
    kinds = {"all but unverified": told, **inside} if told else inside
    return [
        Coverage(kind=kind, num_rows=len(shares), coverage=sum(shares) / len(shares)) for kind, shares in kinds.items()
    ]


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
    models = grouped((month.model, month.ratio) for month in months)
    return median(median(ratios) for ratios in models.values())


def says_production(found: Production) -> str:
    """A line for the reader of `plan validate`."""
    return (
        f"{PRODUCTION}: {found.num_inside} of {found.num_runs} runs of weeks and months lie in their sustained "
        f"interval ({found.num_inside_left_out} if the other models decide the factor); measured over benchmark "
        f"{found.least_ratio:.2f} to {found.most_ratio:.2f}, median {found.median_ratio:.2f}"
    )
