"""The answer of `explain` as data: the best layout beside the one asked for, or beside everything it beat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from planner.answer import SCHEMA_VERSION, Layout, PricedLayout
from planner.report.causes import Cause, Difference, memory_differences, step_differences
from planner.specs.base import Spec

Verdict = Literal["chosen", "as_fast", "faster", "slower", "does_not_fit", "refused"]


class Change(Spec):
    """A change of what was asked that makes something fit, and what is the best then."""

    change: str
    parallelism: Layout
    step_s: float
    more_fraction: float
    """step_s over the best's, less one."""


class Beaten(Spec):
    """An alternative, and what decides against it."""

    layout: PricedLayout
    cause: Cause


class ChangedAssumption(Spec):
    """What a changed assumption would do to the choice."""

    name: str
    says: str
    changes_the_choice: bool
    parallelism: Layout | None
    """The choice then; null where nothing fits."""
    step_s: float | None
    kept_step_s: float
    """Seconds that today's choice would take then."""
    kept_fits: bool


class Constraint(Spec):
    """What a job has to obey, and what it would gain if it had not."""

    name: str
    now: str
    moved: str
    gain_fraction: float
    """More tokens a second."""
    binds: bool


class Explanation(Spec):
    """The answer to one question."""

    schema_version: Literal[1] = SCHEMA_VERSION
    job: str
    asked: dict[str, tuple[int | str, ...]]
    """The pins; none asks why the best is the best."""
    verdict: Verdict
    says: str
    """The answer in one sentence."""
    reason: str | None = None
    """The rule that refuses what was asked, or does_not_fit."""
    rejections: dict[str, int] = Field(default_factory=dict)
    rejection_examples: dict[str, str] = Field(default_factory=dict)
    lifts: tuple[Change, ...] = ()
    hint: str | None = None
    """A hint where no change of a pin helps."""
    capacity_bytes: int
    best: PricedLayout
    pinned: PricedLayout | None = None
    """The best layout that obeys the pins, or the one that lacks least memory."""
    cause: Cause | None = None
    beaten: tuple[Beaten, ...] = ()
    assumptions: tuple[ChangedAssumption, ...] = ()
    constraints: tuple[Constraint, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data, the differences between the two layouts worked out."""
        data = self.model_dump(mode="json")
        if self.pinned is not None:
            data["step_differences"] = _plain(step_differences(self.best, self.pinned), "_s")
            data["memory_differences"] = _plain(memory_differences(self.best, self.pinned), "_bytes")
        return data


def _plain(differences: Iterable[Difference], unit: str) -> list[dict[str, Any]]:
    return [
        {
            "item": difference.item,
            f"best{unit}": difference.best,
            f"pinned{unit}": difference.other,
            f"difference{unit}": difference.change,
        }
        for difference in differences
    ]
