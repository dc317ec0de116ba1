"""The one short run that is worth most: what is known of the steps of a plan's layouts, and what measuring one saves.

A layout's step is its prediction times exp(error). Errors are normal with mean 0, and layouts of one job that resemble
each other err together: with w the half-width of a step's interval, x a layout's sizes in doublings and p the shares of
the seconds of its step,

    cov(i, k) / wᵢ·w_k = SIZES²·exp(−|xᵢ−x_k|² / 2·SIZES_LENGTH²)
                       + SHARES²·exp(−|pᵢ−p_k| / SHARES_LENGTH) + OWN²·[i = k]

Measured steps condition this distribution. The favourite, which one would train with, has the least median, within 1%
one that was measured. A trial of k moves all medians μ, and perhaps the favourite, from f to f'; the knowledge gradient
is what that saves:

    saved(k) = E[μ_f − μ_f' given k's step], as a share of the step

It is worth the GPU-minutes of the run that it saves, less those of the trial. The favourite is measured before others:
its steps are the run's own (docs/NEXT.md has the replay that decided so).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from planner.answer import (
    SIGMAS_TO_END,
    Count,
    Interval,
    Plan,
    PositiveSeconds,
    PricedLayout,
    Quantity,
    StepTime,
    half_width,
)
from planner.layout.price import price_layout, reprice
from planner.layout.variation import switch_variants
from planner.shape import FloatArray
from planner.specs.base import Fraction, NonNegativeInt, PositiveFloat, Spec
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES, written

SIZES, SIZES_LENGTH, SHARES, SHARES_LENGTH, OWN = 0.50, 2.0, 0.34, 0.3, 0.21
"""The covariance of the errors of one job's layouts, fitted to 658 published layouts of 140 jobs. Held out source by
source they have −1.05 nats a layout with it, and −0.93 with an error of the job and one of the layout alone
(`tools/replay_next --fit`)."""
_WIDTHS_PER_SIGMA = 1 / math.sqrt(SIZES**2 + SHARES**2 + OWN**2)
"""Half-widths that are shown for a standard deviation: errors scatter less than the intervals of plans say, which hold
until something is measured."""
REPEAT_SIGMA = 0.005
"""Standard deviation of a step measured again, in natural logarithms: quiet sources repeat a run within 0.5%."""
STARTUP_MINUTES = 5.0
"""Minutes that a trial takes beside its steps: a job starts, compiles and loads."""
DEFAULT_DAYS = 1.0
"""Days of the run that pays for the trial where neither the plan nor the user says them."""
NEAR = 0.01
"""Difference of two medians, in natural logarithms, for which nobody leaves a layout that was measured or planned."""
LEAST_SAVED = 1e-4
"""Least share of the run that a trial has to save, however long the run is: a step repeats no better."""
LEAST_CHANCE = 0.03
"""Ranges of a trial's steps that are less likely are told with the range before."""
_DRAWS = 4000
_GRID = np.linspace(-4.0, 4.0, 161)
_WEIGHTS = np.exp(-(_GRID**2) / 2) / np.exp(-(_GRID**2) / 2).sum()
_SIZE_AXES = ("tp", "cp", "ep", "pp", "vpp", "micro_batch_size")


@dataclass(frozen=True, slots=True)
class TrialChoice:
    """A layout with its switches that can be run."""

    name: str
    layout: PricedLayout
    runtime: RuntimeSpec

    @property
    def key(self) -> tuple[object, ...]:
        """The same for runs of one layout and recipe."""
        layout, recipe = self.layout, tuple(sorted(self.layout.recipe.items()))
        return str(layout.parallelism), layout.parallelism.schedule, tuple(s.chunks for s in layout.stages), recipe


@dataclass(frozen=True, slots=True)
class MeasuredChoice:
    """A choice that was run."""

    choice: TrialChoice
    step_s: float
    width: float
    """Half-width that its own steps give it, in natural logarithms."""


def covariance(layouts: Sequence[PricedLayout]) -> FloatArray:
    """The covariance of the logarithms of the steps of one job's layouts."""
    widths = np.array([half_width(layout.step.step_s_interval or (1.0, 1.0)) for layout in layouts])
    by_sizes, by_shares = likeness(layouts)
    alike = SIZES**2 * by_sizes + SHARES**2 * by_shares + OWN**2 * np.eye(len(widths))
    return np.outer(widths, widths) * alike


def likeness(layouts: Sequence[PricedLayout]) -> tuple[FloatArray, FloatArray]:
    """How much alike each two layouts are, by their sizes and by where their seconds go: 1 where they are the same."""
    sizes = np.array([sizes_of(layout) for layout in layouts])
    shares = np.array([_shares(layout.step) for layout in layouts])
    apart = ((sizes[:, None] - sizes[None]) ** 2).sum(axis=-1)
    unlike = np.abs(shares[:, None] - shares[None]).sum(axis=-1)
    return np.exp(-apart / (2 * SIZES_LENGTH**2)), np.exp(-unlike / SHARES_LENGTH)


def sizes_of(layout: PricedLayout) -> list[float]:
    """The sizes of a layout in doublings, how it recomputes, and how ZeRO shards."""
    grid, layers = layout.parallelism, sum(stage.num_layers for stage in layout.stages)
    recomputed = sum(stage.recompute.get("full", 0) for stage in layout.stages) / max(layers, 1)
    doublings = [math.log2(getattr(grid, axis)) for axis in _SIZE_AXES]
    return [*doublings, recomputed, float(grid.recompute == "selective"), float(grid.zero_stage)]


def _shares(step: StepTime) -> list[float]:
    """The shares of a step's seconds, by what they go to."""
    return [seconds / step.step_s for _, seconds in step.breakdown]


@dataclass(frozen=True, slots=True)
class Belief:
    """The distribution of the logarithms of steps."""

    mean: FloatArray
    covariance: FloatArray

    def given(self, place: int, log_step: float, sigma: float) -> Belief:
        """The distribution after a step was measured, whose logarithm errs by `sigma`."""
        gain = self.covariance[:, place] / (self.covariance[place, place] + sigma**2)
        moved = self.mean + gain * (log_step - self.mean[place])
        return Belief(moved, self.covariance - np.outer(gain, self.covariance[place]))

    def _outcomes(self, place: int) -> tuple[FloatArray, FloatArray]:
        """All means, a row for each step that a trial may show, and those steps' logarithms."""
        sigma = math.sqrt(self.covariance[place, place] + REPEAT_SIGMA**2)
        rows = self.mean + _GRID[:, None] * (self.covariance[:, place] / sigma)
        return rows, self.mean[place] + sigma * _GRID

    def saved(self, place: int, order: Sequence[int]) -> float:
        """The share of the step that knowing this one saves: the knowledge gradient."""
        rows, _ = self._outcomes(place)
        after = rows[np.arange(len(rows)), _first_near(rows, order)]
        return max(0.0, float(_WEIGHTS @ (rows[:, self.favoured(order)] - after)))

    def favoured(self, order: Sequence[int]) -> int:
        """The first of `order` whose median is within 1% of the least."""
        return _first_near(self.mean[None], order)[0]

    def decisions(self, place: int, order: Sequence[int]) -> list[tuple[int, float, float]]:
        """The favourite after each range of a trial's steps, from the shortest on: its place, the range's end as a
        logarithm, and the probability of the range."""
        rows, logs = self._outcomes(place)
        best = np.array(_first_near(rows, order))
        ends = [*np.flatnonzero(np.diff(best)).tolist(), len(best) - 1]
        starts = [0, *(end + 1 for end in ends[:-1])]
        return [
            (int(best[a]), float(logs[b]), float(_WEIGHTS[a : b + 1].sum())) for a, b in zip(starts, ends, strict=True)
        ]

    def fastest(self, favourite: int) -> tuple[FloatArray, float]:
        """The probability of each to be the fastest, and the share of the step that the favourite loses to it in the
        mean."""
        size = len(self.mean)
        root = np.linalg.cholesky(self.covariance + 1e-12 * np.eye(size))
        logs = self.mean + np.random.default_rng(0).normal(size=(_DRAWS, size)) @ root.T
        chances = np.bincount(logs.argmin(axis=1), minlength=size) / _DRAWS
        return chances, max(0.0, float(np.mean(logs[:, favourite] - logs.min(axis=1))))


def _first_near(rows: FloatArray, order: Sequence[int]) -> list[int]:
    """The first place, by `order`, whose number is within 1% of the least of its row."""
    near = rows[:, list(order)] <= rows.min(axis=1, keepdims=True) + NEAR
    return [order[first] for first in near.argmax(axis=1).tolist()]


class NextLayout(Spec):
    """One layout that could be run, and what its measurement is worth."""

    name: str
    """The layout, and the switch in which it differs from the plan's best."""
    number: NonNegativeInt
    """0 for the plan's best layout, N for its N-th alternative, then switches; --skip takes it."""
    predicted_s: PositiveSeconds
    expected_s: PositiveSeconds
    """Median of its step by all that was measured."""
    expected_s_interval: Interval
    """80% interval of the same."""
    measured_s: PositiveSeconds | None = None
    fastest_fraction: Fraction
    """Probability that it is the fastest of these."""
    saved_fraction: Quantity
    """The share of the run that measuring it saves in the mean."""
    saved_gpu_minutes: Quantity
    trial_gpu_minutes: Quantity


class NextOutcome(Spec):
    """A range of a trial's steps, and the decision that follows."""

    from_s: Quantity
    to_s: PositiveSeconds | None
    """Null for the longest."""
    probability_fraction: Fraction
    layout: str
    """The layout to train with then."""


class NextAnswer(Spec):
    """The answer of `plan next`."""

    schema_version: Literal[1] = 1
    model: str
    num_gpus: Count
    run_days: PositiveFloat
    """Days of the run that is to pay for a trial."""
    favourite: str
    """The layout to train with by what is known now."""
    regret_fraction: Quantity
    """The share of the run that the favourite loses in the mean to the fastest of these."""
    proposed: str | None
    """The layout to run next; null where no trial pays."""
    says: str
    """The reason, in a sentence."""
    outcomes: tuple[NextOutcome, ...] = ()
    layouts: tuple[NextLayout, ...]
    """All layouts, those worth most first."""
    num_measured: Count


@dataclass(slots=True)
class NextRun:
    """The choices of a job, and what is believed of their steps."""

    num_gpus: int
    choices: list[TrialChoice]
    measured: Sequence[MeasuredChoice] = ()
    days: float = DEFAULT_DAYS
    trial_steps: int = 20
    skipped: frozenset[int] = frozenset()
    """Numbers of layouts that cannot be run."""
    belief: Belief = field(init=False)
    done: dict[int, float] = field(init=False, default_factory=dict)
    """The measured step of each choice that was run, by its place."""

    def __post_init__(self) -> None:
        known = {choice.key: place for place, choice in enumerate(self.choices)}
        for run in self.measured:
            if run.choice.key not in known:
                known[run.choice.key] = len(self.choices)
                self.choices = [*self.choices, run.choice]
        layouts = [choice.layout for choice in self.choices]
        logs = np.log([layout.step.step_s for layout in layouts])
        self.belief = Belief(logs, covariance(layouts))
        for run in self.measured:
            place = known[run.choice.key]
            sigma = math.hypot(REPEAT_SIGMA, run.width / SIGMAS_TO_END)
            self.belief = self.belief.given(place, math.log(run.step_s), sigma)
            self.done[place] = run.step_s

    @property
    def favourite(self) -> int:
        """The place of the choice that one would train with."""
        return self.belief.favoured(self.order)

    @property
    def order(self) -> list[int]:
        """All places, those that were run first."""
        return sorted(range(len(self.choices)), key=lambda place: place not in self.done)

    @property
    def run_minutes(self) -> float:
        """GPU-minutes of the run."""
        return self.days * 24 * 60 * self.num_gpus

    def trial_minutes(self, place: int) -> float:
        """GPU-minutes of a trial."""
        steps_s = self.trial_steps * math.exp(self.belief.mean[place])
        return self.num_gpus * (STARTUP_MINUTES + steps_s / 60)

    def saved(self, place: int) -> float:
        """The share of the run that a trial saves in the mean: nothing where it runs out of memory."""
        runs = 1 - (self.choices[place].layout.oom_probability or 0.0)
        return runs * self.belief.saved(place, self.order)

    def proposed(self) -> int | None:
        """The place of the choice to run next; None where no trial pays."""
        open_ = [p for p in range(len(self.choices)) if p not in self.done and p not in self.skipped]
        paying = [p for p in open_ if self._pays(p)]
        if not paying:
            return None
        if self.favourite in open_:
            return self.favourite
        return max(paying, key=lambda place: self.saved(place) / self.trial_minutes(place))

    def _pays(self, place: int) -> bool:
        saved = self.saved(place)
        return saved >= LEAST_SAVED and saved * self.run_minutes > self.trial_minutes(place)


def choices_of(plan: Plan) -> list[TrialChoice]:
    """The layouts that a plan carries, and the best one with each switch at another value that needs no consent."""
    plain = [layout for layout in (plan.best, *plan.alternatives) if layout.fits]
    named = [TrialChoice(str(layout.parallelism), layout, layout.runtime_spec or plan.runtime_spec) for layout in plain]
    known = {choice.key for choice in named}
    return [*named, *(choice for choice in _switched(plan) if choice.key not in known)]


def _switched(plan: Plan) -> Iterator[TrialChoice]:
    candidate = reprice(plan, plan.best)
    for name, value, other in switch_variants(candidate):
        if SWITCHES[name].only_saves_memory or not other.fits:
            continue
        yield TrialChoice(
            f"the best with {name}={written(value)}", price_layout(other, exact=False), other.pricing.runtime
        )


def choice_of(plan: Plan, run: Plan) -> TrialChoice:
    """The layout of another plan of the same job as a choice of this one, at this one's prices."""
    runtime = run.best.runtime_spec or run.runtime_spec
    best = run.best.model_copy(update={"runtime_spec": runtime})
    candidate = reprice(plan, best)
    return TrialChoice(str(run.parallelism), price_layout(candidate, exact=False), runtime)


def other_job(plan: Plan, run: Plan) -> str:
    """The first thing in which a run is of another job than the plan, in words; empty where it is of the same."""
    pairs = {
        "the model": (run.model.spec, plan.model.spec, run.model.name),
        "GPUs": (run.cluster.num_gpus, plan.cluster.num_gpus, f"{run.cluster.num_gpus:,}"),
        "the hardware": (run.cluster.hardware.name, plan.cluster.hardware.name, run.cluster.hardware.name),
        "the trainer": (run.runtime_spec.family, plan.runtime_spec.family, run.runtime_spec.family),
        "the batch": (_batch(run), _batch(plan), f"{run.training.global_batch_size} × {run.training.seq_length}"),
        "the training": (_training(run), _training(plan), run.training.dtype),
    }
    return next((f"{name}: {said}" for name, (its, ours, said) in pairs.items() if its != ours), "")


def _batch(plan: Plan) -> tuple[int, int]:
    return plan.training.global_batch_size, plan.training.seq_length


def _training(plan: Plan) -> tuple[object, ...]:
    training = plan.training
    return training.dtype, training.adapters, training.objective


def next_answer(run: NextRun, model: str) -> NextAnswer:
    """The answer to which short run should be next."""
    place, favourite = run.proposed(), run.favourite
    chances, regret = run.belief.fastest(favourite)
    layouts = [_described(run, i, float(chances[i])) for i in range(len(run.choices))]
    shown = sorted(layouts, key=lambda one: (-one.saved_fraction, one.expected_s))
    return NextAnswer(
        model=model,
        num_gpus=run.num_gpus,
        run_days=run.days,
        favourite=run.choices[favourite].name,
        regret_fraction=regret,
        proposed=None if place is None else run.choices[place].name,
        says=_reason(run, place, regret, shown[0]),
        outcomes=() if place is None else tuple(_outcomes(run, place)),
        layouts=tuple(shown),
        num_measured=len(run.measured),
    )


def _described(run: NextRun, place: int, chance: float) -> NextLayout:
    choice, log = run.choices[place], float(run.belief.mean[place])
    width = _WIDTHS_PER_SIGMA * math.sqrt(max(float(run.belief.covariance[place, place]), 0.0))
    saved = 0.0 if place in run.done else run.saved(place)
    return NextLayout(
        name=choice.name,
        number=place,
        predicted_s=choice.layout.step.step_s,
        expected_s=math.exp(log),
        expected_s_interval=(math.exp(log - width), math.exp(log + width)),
        measured_s=run.done.get(place),
        fastest_fraction=chance,
        saved_fraction=saved,
        saved_gpu_minutes=saved * run.run_minutes,
        trial_gpu_minutes=run.trial_minutes(place),
    )


def days_of(days: float) -> str:
    """A number of days in words."""
    return "a day" if days == 1 else f"{days:.3g} days"


def _reason(run: NextRun, place: int | None, regret: float, most: NextLayout) -> str:
    if place is None:
        return (
            f"no trial pays: the most that one saves is {most.saved_fraction:.2%} of {days_of(run.days)}, "
            f"{most.saved_gpu_minutes:,.0f} GPU-minutes for {most.trial_gpu_minutes:,.0f}"
        )
    if place == run.favourite:
        return (
            f"one would train with it, nothing measured it, and it loses {regret:.1%} in the mean to the fastest of "
            f"{len(run.choices)} layouts"
        )
    saved = run.saved(place)
    return (
        f"saves {saved:.2%} of {days_of(run.days)} in the mean, {saved * run.run_minutes:,.0f} GPU-minutes "
        f"for {run.trial_minutes(place):,.0f}"
    )


def _outcomes(run: NextRun, place: int) -> Iterator[NextOutcome]:
    ranges: list[tuple[int, float, float]] = []
    for best, log_end, probability in run.belief.decisions(place, run.order):
        if ranges and (probability < LEAST_CHANCE or best == ranges[-1][0]):
            best, probability = ranges[-1][0], ranges.pop()[2] + probability
        ranges.append((best, log_end, probability))
    from_s = 0.0
    for number, (best, log_end, probability) in enumerate(ranges, 1):
        to_s = math.exp(log_end) if number < len(ranges) else None
        yield NextOutcome(
            from_s=from_s, to_s=to_s, probability_fraction=min(probability, 1.0), layout=run.choices[best].name
        )
        from_s = to_s or from_s


def trial_plan(plan: Plan, run: NextRun, place: int) -> Plan:
    """The plan of a trial: the choice as its best layout, all others as its alternatives, those worth most first."""
    chosen = run.choices[place]
    others = [i for i in range(len(run.choices)) if i not in (place, *run.done)]
    others.sort(key=lambda i: -run.saved(i))
    alternatives = tuple(
        run.choices[i].layout.model_copy(
            update={"runtime_spec": None if run.choices[i].runtime == chosen.runtime else run.choices[i].runtime}
        )
        for i in others
    )
    best = chosen.layout.model_copy(update={"runtime_spec": None})
    return plan.model_copy(
        update={"best": best, "runtime_spec": chosen.runtime, "alternatives": alternatives, "command": ""}
    )
