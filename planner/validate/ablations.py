"""Pairs of published runs in one layout whose switches differ: the predicted gain of a switch beside the measured one.

`data/ablations.jsonl` holds one pair a line: the run that both have in common, in the form of `plan evaluate --runs`,
the features of each side (`off`, `on`), other fields of the run in which the sides differ (`off_run`, `on_run`:
recomputing, dtype), and what was measured of each. A side is priced as any run is; no number is fitted to a pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any, Literal

from pydantic import Field

from planner.errors import PlannerError
from planner.layout.runs import parse_run
from planner.specs.base import PositiveFloat, Spec
from planner.validate.rows import data_lines, model_fields

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


class Ablation(Spec):
    """One pair of published runs."""

    id: str
    """The switch first, then model, GPUs, and what tells the pair from others."""
    source: str
    """The document and the table that the numbers are from."""
    run: dict[str, Any]
    """The run that both sides have in common, in the form of `plan evaluate --runs`."""
    off: dict[str, Any]
    on: dict[str, Any]
    """Features of the run that only one side has, or has with this value."""
    off_run: dict[str, Any] = Field(default_factory=dict)
    on_run: dict[str, Any] = Field(default_factory=dict)
    """Other fields of the run that only one side has; those of `parallelism` are added to the common ones."""
    measured: Sides
    bundle: bool = False
    """True if several switches differ."""
    note: str = ""
    """The things that were inferred, and others that may differ."""

    def side(self, name: Literal["off", "on"]) -> dict[str, Any]:
        """The run of one side."""
        features, fields = (self.on, self.on_run) if name == "on" else (self.off, self.off_run)
        run = {**self.run, **fields}
        run["parallelism"] = {**self.run["parallelism"], **fields.get("parallelism", {})}
        run["features"] = {**self.run.get("features", {}), **features}
        return run


@dataclass(frozen=True, slots=True)
class Priced:
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
    models = model_fields()
    pairs = []
    for line in data_lines("ablations.jsonl"):
        model = line["run"]["model"]
        # a name that no published row has is one of model_specs/
        line["run"]["model"] = models.get(model, model) if isinstance(model, str) else model
        pairs.append(Ablation.model_validate(line))
    return tuple(pairs)


def priced(pair: Ablation) -> Priced:
    """Both sides priced as `plan evaluate --runs` would."""
    try:
        off_s, on_s = (
            parse_run({"id": pair.id, "run": pair.side(name)}, pair.id).evaluate().step.step_s for name in ("off", "on")
        )
    except PlannerError as error:
        return Priced(pair, error=error)
    return Priced(pair, off_s, on_s)


def switch_of(pair: Ablation) -> str:
    """The switches that differ, joined by plus signs; one name for a bundle of many."""
    if pair.bundle:
        return "bundle"
    layout = {*pair.off_run.get("parallelism", {}), *pair.on_run.get("parallelism", {})}
    fields = {*pair.off_run, *pair.on_run} - {"parallelism", "precision_recipe"}
    names = {*pair.off, *pair.on, *fields, *({"recompute"} if layout else ())}
    return "+".join(sorted(names))


def scores(answers: Iterable[Priced]) -> list[AblationScore]:
    """A score per switch, in order of appearance, then one of all bundles and one of all single switches."""
    by_switch: dict[str, list[Priced]] = {}
    for answer in answers:
        by_switch.setdefault(switch_of(answer.pair), []).append(answer)
    bundles = by_switch.pop("bundle", [])
    single = [answer for members in by_switch.values() for answer in members]
    groups = [*by_switch.items(), ("bundles", bundles), ("all single switches", single)]
    return [found for name, members in groups if (found := _score(name, members)) is not None]


def _score(name: str, members: Sequence[Priced]) -> AblationScore | None:
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
