"""The changes of a small job as rows of a table."""

from __future__ import annotations

from dataclasses import dataclass

from planner.answer import Change, Plan
from planner.report.format import gibibytes, signed_seconds
from planner.specs.units import gib

SHOWN_CHANGES = 4
"""Changes on the first screen that fit."""
WORTH_BYTES, WORTH_SHARE = 2**29, 0.02
"""Bytes, and the share of a step, below which a change waits for `plan explain`."""
_ASKED_ABOUT = ("checkpointing", "micro-batch", "trained")
"""Kinds of changes that are shown though they do not fit."""


@dataclass(frozen=True, slots=True)
class ChangeRow:
    """A change, and the texts of its columns."""

    change: str
    gib: str
    seconds: str
    remark: str
    words: tuple[str, ...]
    """Words of the command line that make the change."""

    @property
    def options(self) -> str:
        return " ".join(self.words)

    @property
    def cells(self) -> tuple[str, ...]:
        return self.change, self.gib, self.seconds, self.remark


def shown_changes(plan: Plan) -> tuple[ChangeRow, ...]:
    """The first change of each kind that fits and is worth a look, and those asked about most that do not fit."""
    fitting = [change for change in plan.changes if change.fits and _is_worth_a_look(change, plan.step.step_s)]
    misfits = [change for change in plan.changes if not change.fits and change.kind in _ASKED_ABOUT]
    return change_rows(plan, (*_one_of_a_kind(fitting)[:SHOWN_CHANGES], *_one_of_a_kind(misfits)))


def _is_worth_a_look(change: Change, step_s: float) -> bool:
    return abs(change.bytes) >= WORTH_BYTES or abs(change.seconds) >= WORTH_SHARE * step_s


def _one_of_a_kind(changes: list[Change]) -> list[Change]:
    """The first change of each kind."""
    return list({change.kind: change for change in reversed(changes)}.values())[::-1]


def change_rows(plan: Plan, changes: tuple[Change, ...]) -> tuple[ChangeRow, ...]:
    """Rows of changes, beside the GPU's memory and the step of the plan."""
    capacity, step_s = plan.cluster.hardware.memory_bytes, plan.step.step_s
    return rows_of(changes, capacity, step_s)


def rows_of(changes: tuple[Change, ...], capacity_bytes: int, step_s: float) -> tuple[ChangeRow, ...]:
    """Rows of changes beside the memory that a GPU has and the step as it is."""
    rows = []
    for change in changes:
        lacking = change.total_bytes - capacity_bytes
        misfit = f"does not fit by {gibibytes(lacking)} GiB" if lacking > 0 else "fits too narrowly"
        alters = f"changes {change.changes}" if change.changes else ""
        remark = "; ".join(filter(None, ("" if change.fits else misfit, alters)))
        size = f"{gib(change.bytes):+,.1f} GiB"
        rows.append(ChangeRow(change.change, size, signed_seconds(change.seconds, step_s), remark, change.options))
    return tuple(rows)
