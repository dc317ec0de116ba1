"""Robust statistics of a run's steps: the median after the warm-up, its spread and drift, and outliers by name.

The noise is 1.4826 · the median of distances from the median, the standard deviation of a normal distribution; a single
slow step, or a tenth of them, moves neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from planner.observe.observation import Outlier, OutlierKind
from planner.shape import BoolArray, FloatArray, IntArray

SIGMA_OF_MAD = 1.4826
_OUTLIER_SIGMAS, _OUTLIER_FRACTION = 6.0, 0.05
"""A row is an outlier from both on: a step 5% longer is worth a word, and noise of 6σ is none."""
_MOST_WARMUP_FRACTION = 0.25
_LEAST_FOR_HALF, _LEAST_FOR_DRIFT, _MOST_FOR_DRIFT = 4, 20, 400
_SPELL_ROWS = 5
_FEW_FRACTION = 0.1
"""One of two or three rows from the begin of a run that is longer by so much is warm-up."""
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Steady:
    """The steps of a run, told apart."""

    step_s: float
    low_s: float
    high_s: float
    """The 10th and the 90th percentile after the warm-up."""
    warmup: BoolArray
    warmup_extra_s: float
    drift_fraction: float | None
    outliers: tuple[Outlier, ...] = field(default=())


def quantile(values: FloatArray, weights: FloatArray, fraction: float) -> float:
    """The least value at which that share of the weight is reached; the middle of two where it falls between them."""
    order = np.argsort(values, kind="stable")
    sums = np.cumsum(weights[order])
    target = fraction * sums[-1]
    at = int(np.searchsorted(sums, target * (1 - 1e-12)))
    ordered = values[order]
    if at + 1 < len(ordered) and abs(sums[at] - target) <= 1e-9 * sums[-1]:
        return float((ordered[at] + ordered[at + 1]) / 2)
    return float(ordered[min(at, len(ordered) - 1)])


def steady(
    numbers: IntArray,
    seconds: FloatArray,
    covers: FloatArray,
    starts: tuple[int, ...] = (0,),
    marks: Mapping[int, set[str]] | None = None,
    precision_fraction: float = 0.0,
) -> Steady:
    """Tell steady steps, warm-ups and outliers apart.

    `covers` is how many steps a row is the mean of, `starts` the rows that begin after a start of the trainer, `marks`
    what happened before a row.
    """
    warmup = np.zeros(len(seconds), bool)
    middle, noise = _level(seconds, covers)
    limit = _limit(middle, noise, precision_fraction)
    for start, end in pairwise((*starts, len(seconds))):
        most = max(1, int((end - start) * _MOST_WARMUP_FRACTION)) if end - start > 1 else 0
        if _LEAST_FOR_HALF <= end - start < _LEAST_FOR_DRIFT:  # of few rows, half may be warm-up: the others say it
            most = (end - start) // 2
            later = slice(end - (end - start + 1) // 2, end)
            limit = min(limit, _limit(*_level(seconds[later], covers[later]), precision_fraction))
        elif end - start < _LEAST_FOR_HALF and end > start + 1 and numbers[start] <= covers[start]:
            most = end - start - 1
            limit = (1 + _FEW_FRACTION) * float(seconds[start:end].min())
        row = start
        while row < start + most and seconds[row] > limit:
            warmup[row] = True
            row += 1
    kept = ~warmup
    middle, noise = _level(seconds[kept], covers[kept])
    slow = kept & (seconds > _limit(middle, noise, precision_fraction))
    extra = (seconds - middle) * covers
    drift = _drift(numbers[kept & ~slow], seconds[kept & ~slow], middle)
    return Steady(
        middle,
        quantile(seconds[kept], covers[kept], 0.1),
        quantile(seconds[kept], covers[kept], 0.9),
        warmup,
        float(extra[warmup].sum()),
        drift,
        tuple(_named(numbers, extra, slow, marks or {})),
    )


def _level(seconds: FloatArray, covers: FloatArray) -> tuple[float, float]:
    """The median, and the noise around it."""
    middle = quantile(seconds, covers, 0.5)
    return middle, SIGMA_OF_MAD * quantile(np.abs(seconds - middle), covers, 0.5)


def _limit(middle: float, noise: float, precision_fraction: float) -> float:
    """The seconds from which a row is an outlier."""
    return middle + max(_OUTLIER_SIGMAS * noise, (_OUTLIER_FRACTION + 2 * precision_fraction) * middle)


def _drift(numbers: IntArray, seconds: FloatArray, middle: float) -> float | None:
    """The slope over the whole run as a share of the step; None of too few rows."""
    if len(numbers) < _LEAST_FOR_DRIFT or numbers[-1] <= numbers[0]:
        return None
    return slope_of(numbers.astype(float), seconds) * float(numbers.max() - numbers.min()) / middle


def slope_of(x: FloatArray, y: FloatArray) -> float:
    """Theil and Sen's slope, the median of those of all pairs of points with growing x; of many, a part is taken."""
    rows = np.unique(np.linspace(0, len(x) - 1, _MOST_FOR_DRIFT).astype(int))
    first, second = np.triu_indices(len(rows), 1)
    apart = x[rows][second] - x[rows][first]
    risen = y[rows][second] - y[rows][first]
    slopes = risen[apart > 0] / apart[apart > 0]
    return float(np.median(slopes)) if len(slopes) else 0.0


def _named(numbers: IntArray, extra: FloatArray, slow: BoolArray, marks: Mapping[int, set[str]]) -> Iterator[Outlier]:
    """Outliers by what is known of them: marked ones, those in a row, those at equal distances, the others."""
    left = set(np.flatnonzero(slow).tolist())
    for kind, words in (("checkpoint", "checkpoint"), ("evaluation", "evaluation"), ("periodic", "gc")):
        rows = sorted(row for row in left if words in marks.get(row, ()))
        if rows:
            left -= set(rows)
            likely = "garbage collection, which the log names" if words == "gc" else ""
            yield _outlier(kind, numbers, extra, rows, _period(numbers[rows]), likely)  # type: ignore[arg-type]
    spells = [row for spell in _runs(sorted(left)) if len(spell) >= _SPELL_ROWS for row in spell]
    if spells:
        left -= set(spells)
        yield _outlier("slow_spell", numbers, extra, spells, None, "")
    rest = sorted(left)
    if rest:
        period = _period(numbers[rest])
        yield _outlier("periodic" if period else "unexplained", numbers, extra, rest, period, "")


def _outlier(
    kind: OutlierKind, numbers: IntArray, extra: FloatArray, rows: list[int], period: int | None, likely: str
) -> Outlier:
    return Outlier(
        kind=kind,
        steps=tuple(numbers[rows[:_SHOWN]].tolist()),
        num_steps=len(rows),
        extra_s=float(extra[rows].sum()),
        period_steps=period,
        likely=likely,
    )


def _runs(rows: list[int]) -> Iterator[list[int]]:
    """Rows that follow each other, a single one between them allowed for."""
    run: list[int] = []
    for row in rows:
        if run and row - run[-1] > 2:
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _period(numbers: IntArray) -> int | None:
    """The distance at which steps come back: four in five of the distances between them are whole multiples of it."""
    if len(numbers) < 4:
        return None
    apart = np.diff(numbers)
    period = int(np.median(apart))
    if period < 2:
        return None
    return period if np.count_nonzero(apart % period == 0) >= 0.8 * len(apart) else None
