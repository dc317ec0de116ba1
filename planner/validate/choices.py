"""The use of predictions: the choice among measured layouts (regret), and the gain of a switch (ablations).

A sweep is one job of which a source published several layouts, run with one release of its software: all of the run is
the same but its parallelism and its switches. Regret is the measured seconds of the layout that the planner predicts to
be the fastest, over those of the fastest, − 1. It counts the order alone, and only its top: the number that a user of
the planner pays.

`data/ablations.jsonl` holds pairs of runs in one layout whose switches differ, one a line: the run that both have in
common, in the form of `plan evaluate --runs`, the features of each side (`off`, `on`), other fields of the run in which
the sides differ (`off_run`, `on_run`: recomputing, dtype), and what was measured of each. A side is priced as any run
is; no number is fitted to a pair.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Literal

import numpy as np
from pydantic import Field

from planner.errors import PlannerError
from planner.layout.runs import parse_run
from planner.shape import FloatArray
from planner.specs.base import Fields, PositiveFloat, Spec, Texts, grouped
from planner.trainers.stated import consent_of, least_gain
from planner.trainers.switches import SWITCHES
from planner.validate.rows import PublishedRun, rows_of
from planner.validate.score import Scored, weighted_quantile

TIE = 1e-9
"""Layouts whose predictions are apart by less than this fraction share a place."""
_RELEASE = re.compile(r"\d\d\.\d\d[.\w]*|[A-Z]\w+ 20\d\d")


@dataclass(frozen=True, slots=True)
class PublishedSweep:
    """The layouts that a source measured for one job; arrays have one entry per layout."""

    family: str
    ids: Texts
    """The first run of each layout."""
    predicted_s: FloatArray
    measured_s: FloatArray
    """The geometric mean of all runs of the layout."""

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


def sweeps(scored: Iterable[Scored]) -> list[PublishedSweep]:
    """All sweeps of two or more layouts among runs that count and could be priced, in order of appearance."""
    known = (answer for answer in scored if answer.row.counts and answer.layout is not None)
    jobs = grouped((job_key(answer.row), answer) for answer in known).values()
    layouts = (grouped((answer.row.run_key, answer) for answer in job) for job in jobs)
    return [_sweep([*found.values()]) for found in layouts if len(found) > 1]


def job_key(row: PublishedRun) -> str:
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
    )


def regrets(found: Sequence[PublishedSweep]) -> list[Regret]:
    """The regret of each family, in order of appearance, then of all sweeps."""
    families = grouped((sweep.family, sweep) for sweep in found)
    return [_regret(name, members) for name, members in (*families.items(), ("all", found)) if members]


def _regret(name: str, members: Sequence[PublishedSweep]) -> Regret:
    values = np.array([sweep.regret for sweep in members])
    weights = np.ones(len(members))
    worst = members[int(values.argmax())]
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
    )


SAME = 0.01
"""Gains within a point of zero have no sign: runs repeated on another day differ by as much."""


class Sides(Spec):
    """The numbers that the source reports of both sides."""

    off: PositiveFloat
    on: PositiveFloat
    unit: Literal["s", "tflops", "tokens_per_s"]

    @property
    def gain(self) -> float:
        """The measured gain (`gain_of`)."""
        return gain_of(self.off, self.on) if self.unit == "s" else gain_of(1 / self.off, 1 / self.on)

    @property
    def longer(self) -> float:
        """Share of the step by which it is longer with the switch."""
        return self.on / self.off - 1 if self.unit == "s" else self.off / self.on - 1


class Ablation(Spec):
    """One pair of published runs."""

    id: str
    """The switch first, then model, GPUs, and what tells the pair from others."""
    source: str
    """The document and the table that the numbers are from."""
    run: Fields
    """The run that both sides have in common, in the form of `plan evaluate --runs`."""
    off: Fields
    on: Fields
    """Features of the run that only one side has, or has with this value."""
    off_run: Fields = Field(default_factory=dict)
    on_run: Fields = Field(default_factory=dict)
    """Other fields of the run that only one side has; those of `parallelism` are added to the common ones."""
    measured: Sides
    bundle: bool = False
    """True if several switches differ."""
    note: str = ""
    """The things that were inferred, and others that may differ."""

    def side(self, name: Literal["off", "on"]) -> Fields:
        """The run of one side."""
        features, fields = (self.on, self.on_run) if name == "on" else (self.off, self.off_run)
        run = {**self.run, **fields}
        run["parallelism"] = {**self.run["parallelism"], **fields.get("parallelism", {})}
        run["features"] = {**self.run.get("features", {}), **features}
        return run


@dataclass(frozen=True, slots=True)
class PricedPair:
    """A pair with the predicted seconds of both sides, or the error that says why there are none."""

    pair: Ablation
    off_s: float = 0.0
    on_s: float = 0.0
    error: PlannerError | None = None

    @property
    def predicted(self) -> float:
        """The predicted gain (`gain_of`)."""
        return gain_of(self.off_s, self.on_s)

    @property
    def measured(self) -> float:
        return self.pair.measured.gain

    @property
    def gain_error(self) -> float:
        """Predicted less measured gain."""
        return self.predicted - self.measured

    @property
    def sign_right(self) -> bool:
        """True if prediction and measurement agree whether the switch helps."""
        if abs(self.measured) < SAME:
            return abs(self.predicted) < 2 * SAME
        return self.predicted * self.measured > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationScore:
    """How well the gains of a set of pairs are predicted; `num_unsupported` of them could not be priced."""

    name: str
    num_pairs: int
    num_unsupported: int
    sign_right: float
    """Share of pairs whose sign is right."""
    median_error: float
    """Median of |predicted − measured gain|, as a fraction of the step."""
    worst_error: float
    worst_id: str


def gain_of(off_s: float, on_s: float) -> float:
    """Seconds that a switch saves over the longer of the two steps: 0.2 for 5 s instead of 4 s, −0.2 the other way."""
    return (off_s - on_s) / max(off_s, on_s)


@cache
def load_ablations() -> tuple[Ablation, ...]:
    """All pairs that come with the package, in the order of their file."""
    return rows_of(Ablation, "ablations.jsonl")


def priced(pair: Ablation) -> PricedPair:
    """Both sides priced as `plan evaluate --runs` would."""
    try:
        off_s, on_s = (
            parse_run({"id": pair.id, "run": pair.side(name)}, pair.id).evaluate().step.step_s for name in ("off", "on")
        )
    except PlannerError as error:
        return PricedPair(pair, error=error)
    return PricedPair(pair, off_s, on_s)


def priced_pairs() -> list[PricedPair]:
    """All published pairs, priced."""
    return [priced(pair) for pair in load_ablations()]


def run_pairs(scored: Iterable[Scored]) -> list[PricedPair]:
    """The pairs among published runs of one family that differ in one switch (and in the chunks that it needs)."""

    def key(row: PublishedRun) -> str:
        axes = {k: v for k, v in row.run["parallelism"].items() if k not in ("vpp", "schedule")}
        return job_key(row) + json.dumps(axes, sort_keys=True)

    known = (answer for answer in scored if answer.layout is not None and _switches_of(answer))
    jobs = grouped((key(answer.row), answer) for answer in known)
    return [pair for runs in jobs.values() for off in runs for on in runs if (pair := _run_pair(off, on)) is not None]


def _switches_of(answer: Scored) -> Fields:
    features = answer.row.run.get("features", {})
    return {name: value for name, value in features.items() if name in SWITCHES and not SWITCHES[name].is_described}


def _run_pair(off: Scored, on: Scored) -> PricedPair | None:
    """The pair of two runs of which one has a switch at its plainest value; None where they differ otherwise."""
    before = _switches_of(off)
    after = _switches_of(on)
    moved = [name for name in {*before, *after} if before.get(name) != after.get(name)]
    if len(moved) != 1 or before.get(moved[0]) != SWITCHES[moved[0]].plainest:
        return None
    carriers = {run.row.run["features"].get("dispatcher_transport") for run in (off, on)}
    if off.layout is None or on.layout is None or (len(carriers) > 1 and moved != ["dispatcher"]):
        return None
    measured = Sides(off=off.row.measured.step_s, on=on.row.measured.step_s, unit="s")
    name = moved[0]
    pair = Ablation(
        id=on.row.id, source=on.row.source, run=on.row.run, off={name: before[name]}, on={name: after[name]},
        measured=measured,
    )  # fmt: skip
    return PricedPair(pair, off.layout.step.step_s, on.layout.step.step_s)


@dataclass(frozen=True, slots=True)
class Harm:
    """Published pairs whose switch the search would choose, and the one that cost most."""

    num_pairs: int
    num_chosen: int
    worst: float
    """The most by which a chosen switch made a measured step longer, as a fraction; below 0 where none did."""
    worst_id: str
    num_missed: int
    """Pairs whose switch saves more than `HARM` and is not chosen."""


HARM = 0.05
"""Share of a step that a switch chosen by default may have cost in no published pair."""


def harm(answers: Iterable[PricedPair]) -> Harm:
    """The pairs of one switch that needs no consent, and what came of those that the search would choose."""
    judged = [(answer, _is_chosen(answer)) for answer in answers if answer.error is None and _is_offered(answer.pair)]
    chosen = [answer for answer, is_chosen in judged if is_chosen]
    worst = max(chosen, key=lambda answer: -answer.measured, default=None)
    missed = [answer for answer, is_chosen in judged if not is_chosen and answer.measured > HARM]
    return Harm(
        num_pairs=len(judged),
        num_chosen=len(chosen),
        worst=0.0 if worst is None else worst.pair.measured.longer,
        worst_id="" if worst is None else worst.pair.id,
        num_missed=len(missed),
    )


def _is_offered(pair: Ablation) -> bool:
    """True for a single switch that a search may choose by itself, from the trainer's value to another."""
    names = {*pair.off, *pair.on}
    if pair.bundle or len(names) != 1 or pair.off_run or pair.on_run:
        return False
    row = SWITCHES.get(next(iter(names)))
    return (
        row is not None
        and not (row.is_described or row.only_saves_memory)
        and not any(value in row.consent for value in pair.on.values())
    )


def _is_chosen(answer: PricedPair) -> bool:
    """True where the switch's predicted gain is enough on the pair's hardware, and its transport is proven there."""
    (name, value), *_ = answer.pair.on.items()
    hardware = parse_run({"run": answer.pair.side("on")}).cluster.hardware
    if consent_of(name, value, hardware):
        return False
    return SWITCHES[name].is_free or answer.off_s / answer.on_s - 1 > least_gain(name, hardware)


def switch_of(pair: Ablation) -> str:
    """The switches that differ, joined by plus signs; one name for a bundle of many."""
    if pair.bundle:
        return "bundle"
    layout = {*pair.off_run.get("parallelism", {}), *pair.on_run.get("parallelism", {})}
    fields = {*pair.off_run, *pair.on_run} - {"parallelism", "precision_recipe"}
    names = {*pair.off, *pair.on, *fields, *({"recompute"} if layout else ())}
    return "+".join(sorted(names))


def scores(answers: Iterable[PricedPair]) -> list[AblationScore]:
    """A score per switch, in order of appearance, then one of all bundles and one of all single switches."""
    by_switch = grouped((switch_of(answer.pair), answer) for answer in answers)
    bundles = by_switch.pop("bundle", [])
    single = [answer for members in by_switch.values() for answer in members]
    groups = [*by_switch.items(), ("bundles", bundles), ("all single switches", single)]
    return [found for name, members in groups if (found := _score(name, members)) is not None]


def _score(name: str, members: Sequence[PricedPair]) -> AblationScore | None:
    known = [answer for answer in members if answer.error is None]
    if not known:
        return None
    worst = max(known, key=lambda answer: abs(answer.gain_error))
    return AblationScore(
        name=name,
        num_pairs=len(known),
        num_unsupported=len(members) - len(known),
        sign_right=sum(answer.sign_right for answer in known) / len(known),
        median_error=median(abs(answer.gain_error) for answer in known),
        worst_error=worst.gain_error,
        worst_id=worst.pair.id,
    )
