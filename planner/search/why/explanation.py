"""The answer of `explain` as data: the best layout beside the one that was asked about, or beside all that it beat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field

from planner.answer import SCHEMA_VERSION, Change, Layout, PricedLayout, Room
from planner.report.causes import Cause, Difference, memory_differences, step_differences
from planner.specs.base import Spec
from planner.specs.hardware import Correction

Verdict = Literal["chosen", "as_fast", "faster", "slower", "does_not_fit", "refused"]


class Lift(Spec):
    """A change of the request that makes some layout fit, and the best layout after it."""

    change: str
    parallelism: Layout
    step_s: float
    more_fraction: float
    """step_s over the best layout's step_s, less one."""


class Beaten(Spec):
    """An alternative, and the cause that decides against it."""

    layout: PricedLayout
    cause: Cause


class ChangedAssumption(Spec):
    """A changed assumption, and its effect on the choice."""

    name: str
    says: str
    changes_the_choice: bool
    parallelism: Layout | None
    """The choice under the changed assumption; null if nothing fits."""
    step_s: float | None
    kept_step_s: float
    """Seconds of a step that the present choice would take under the changed assumption."""
    kept_fits: bool


class Constraint(Spec):
    """A limit that the job has to obey, and the gain if it were moved."""

    name: str
    now: str
    moved: str
    gain_fraction: float
    """Tokens per second after the limit is moved, over those now, less one."""
    binds: bool


class Explanation(Spec):
    """The answer to one question of why."""

    schema_version: Literal[1] = SCHEMA_VERSION
    job: str
    asked: dict[str, tuple[int | str, ...]]
    """The pinned axes and their values; if there are none, the question is why the best layout is the best."""
    verdict: Verdict
    says: str
    """The answer in one sentence."""
    reason: str | None = None
    """The name of the rule that refuses the pins, or does_not_fit."""
    rejections: dict[str, int] = Field(default_factory=dict)
    rejection_examples: dict[str, str] = Field(default_factory=dict)
    lifts: tuple[Lift, ...] = ()
    hint: str | None = None
    """A hint, for pins of which no single change helps."""
    capacity_bytes: int
    corrections: tuple[Correction, ...] = ()
    """The numbers of the hardware that a probe measured."""
    best: PricedLayout
    pinned: PricedLayout | None = None
    """The best layout that obeys the pins; if none fits, the one that lacks least memory."""
    cause: Cause | None = None
    beaten: tuple[Beaten, ...] = ()
    assumptions: tuple[ChangedAssumption, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    room: Room | None = None
    """The largest micro-batch, sequence and models that fit; null for a job that is not small."""
    job_changes: tuple[Change, ...] = ()
    """The changes of a small job with their bytes and seconds, what helps most first."""

    def to_json(self) -> dict[str, Any]:
        """The explanation as plain data, with the differences between the two layouts."""
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
