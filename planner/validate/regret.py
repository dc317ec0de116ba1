"""Regret: how much longer the layout ranked first took than the one that was measured best.

A sweep is one job of which a source published several layouts, run with one release of its software: all of the run is
the same but its parallelism and its switches. Regret is the measured seconds of the layout that the planner predicts to
be the fastest, over those of the fastest, − 1. It counts the order alone, and only its top: the number that a user of
the planner pays.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.shape import FloatArray
from planner.validate.rows import Row
from planner.validate.score import NUM_DRAWS, Scored, repeat_spread, weighted_quantile

OTHER_SPREADS = {"vtrain-single": 0.16, "vtrain-multi": 0.05, "ultrascale": 0.017}
"""Standard deviation of log seconds of families that measured nothing twice, read from what should not differ.

vtrain-single: 14 pairs of TP and micro-batch at which a layer's time is its host's, and the host does the same. At two
of them twice the tokens take a fifth less time. vtrain-multi: 20 layouts beside the mean of those with half and twice
as many stages. ultrascale: 50 pairs of ZeRO-0 and ZeRO-1, beside the difference predicted."""
NOISY = 0.02
"""A family is called noisy where its spread is more than this, which is more than its best layouts differ by."""
TIE = 1e-9
"""Layouts whose predictions are apart by less than this fraction share a place."""
_RELEASE = re.compile(r"\d\d\.\d\d[.\w]*|[A-Z]\w+ 20\d\d")


@dataclass(frozen=True, slots=True)
class PublishedSweep:
    """The layouts that a source measured for one job; arrays have one entry per layout."""

    family: str
    ids: tuple[str, ...]
    """The first run of each layout."""
    predicted_s: FloatArray
    measured_s: FloatArray
    """The geometric mean of all runs of the layout."""
    num_runs: FloatArray

    @property
    def best(self) -> int:
        """Position of the layout measured best."""
        return int(self.measured_s.argmin())

    @property
    def chosen(self) -> int:
        """Position of the layout predicted to be the fastest; the slowest of those that share the first place."""
        return max(self._first, key=lambda place: float(self.measured_s[place]))

    @property
    def regret(self) -> float:
        """The regret; its mean where several layouts share the first place."""
        return float(self.measured_s[self._first].mean() / self.measured_s.min() - 1)

    @property
    def random_regret(self) -> float:
        """The regret that a layout drawn by chance has on average."""
        return float(self.measured_s.mean() / self.measured_s.min() - 1)

    def noise_regret(self, spread: float) -> float:
        """The mean regret of a perfect prediction: measurements are predictions times lognormal noise of `spread`."""
        rng = np.random.default_rng(0)
        noise = rng.normal(0.0, spread / np.sqrt(self.num_runs), (NUM_DRAWS, len(self.ids)))
        seen = self.predicted_s * np.exp(noise)
        return float(np.mean(seen[:, self.predicted_s.argmin()] / seen.min(axis=1) - 1))

    @property
    def _first(self) -> list[int]:
        """Positions of the layouts that share the first place."""
        least_s = self.predicted_s.min() * (1 + TIE)
        return [place for place, predicted_s in enumerate(self.predicted_s) if predicted_s <= least_s]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regret:
    """The regret of a set of sweeps, as fractions; every sweep counts once."""

    name: str
    num_sweeps: int
    num_layouts: int
    mean: float
    median: float
    p90: float
    worst: float
    worst_id: str
    """The layout that was chosen in the worst sweep; `best_id` is the one measured best there."""
    best_id: str
    random_mean: float
    """The mean of layouts drawn by chance."""
    spread: float | None
    """Noise of the family's measurements, a standard deviation of log seconds; None where none is known."""
    noise_mean: float | None
    """The mean of a perfect prediction beside that noise."""

    @property
    def is_noisy(self) -> bool:
        """True where noise decides which of the best layouts was measured best."""
        return self.spread is not None and self.spread > NOISY


def sweeps(scored: Iterable[Scored]) -> list[PublishedSweep]:
    """All sweeps of two or more layouts among runs that count and could be priced, in order of appearance."""
    jobs: dict[str, dict[str, list[Scored]]] = defaultdict(lambda: defaultdict(list))
    for answer in scored:
        if answer.row.counts and answer.layout is not None:
            jobs[_job(answer.row)][answer.row.run_key].append(answer)
    return [_sweep([*layouts.values()]) for layouts in jobs.values() if len(layouts) > 1]


def _job(row: Row) -> str:
    """A key that is the same for runs of one sweep."""
    job = {name: value for name, value in row.run.items() if name not in ("parallelism", "features")}
    return json.dumps([row.family, _RELEASE.findall(row.source), job], sort_keys=True)


def _sweep(layouts: Sequence[Sequence[Scored]]) -> PublishedSweep:
    logs = [np.log([answer.row.measured.step_s for answer in runs]) for runs in layouts]
    return PublishedSweep(
        family=layouts[0][0].row.family,
        ids=tuple(runs[0].row.id for runs in layouts),
        predicted_s=np.array([runs[0].layout.step.step_s for runs in layouts if runs[0].layout is not None]),
        measured_s=np.array([float(np.exp(log.mean())) for log in logs]),
        num_runs=np.array([float(len(log)) for log in logs]),
    )


def spreads(rows: Iterable[Row]) -> dict[str, float]:
    """The noise of each family of which it is known: of runs measured again, or of what should not differ."""
    families: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.counts:
            families[row.family].append(row)
    found = {name: repeat_spread(members) or OTHER_SPREADS.get(name) for name, members in families.items()}
    return {name: spread for name, spread in found.items() if spread is not None}


def regrets(found: Sequence[PublishedSweep], noise: Mapping[str, float]) -> list[Regret]:
    """The regret of each family, in order of appearance; then of all that are not noisy, and of all sweeps."""
    families: dict[str, list[PublishedSweep]] = defaultdict(list)
    for sweep in found:
        families[sweep.family].append(sweep)
    scores = [_regret(name, members, noise) for name, members in families.items()]
    quiet = {score.name for score in scores if not score.is_noisy}
    rest = [sweep for sweep in found if sweep.family in quiet]
    together = [("without the noisy", rest)] if 0 < len(rest) < len(found) else []
    return scores + [_regret(name, members, noise) for name, members in (*together, ("all", found)) if members]


def _regret(name: str, members: Sequence[PublishedSweep], noise: Mapping[str, float]) -> Regret:
    values = np.array([sweep.regret for sweep in members])
    weights = np.ones(len(members))
    worst = members[int(values.argmax())]
    known = [sweep.noise_regret(noise.get(sweep.family, 0.0)) for sweep in members]
    return Regret(
        name=name,
        num_sweeps=len(members),
        num_layouts=sum(len(sweep.ids) for sweep in members),
        mean=float(values.mean()),
        median=weighted_quantile(values, weights, 0.5),
        p90=weighted_quantile(values, weights, 0.9),
        worst=float(values.max()),
        worst_id=worst.ids[worst.chosen],
        best_id=worst.ids[worst.best],
        random_mean=float(np.mean([sweep.random_regret for sweep in members])),
        spread=noise.get(name),
        noise_mean=float(np.mean(known)) if any(sweep.family in noise for sweep in members) else None,
    )
