"""The table of the best few layouts under changed assumptions, and the one of them that loses least."""

from __future__ import annotations

from dataclasses import dataclass

from planner.answer import AS_PLANNED, PricedLayout, RobustStep
from planner.report.format import percent, seconds


@dataclass(frozen=True, slots=True)
class Robust:
    """Steps of layouts under assumptions: `steps_s` has a row per layout, the best first, a column per assumption."""

    assumptions: tuple[str, ...]
    steps_s: tuple[tuple[float, ...], ...]

    @property
    def losses(self) -> tuple[float, ...]:
        """The most that each layout loses to the fastest of them, as a fraction, over all assumptions."""
        fastest_s = [min(column) for column in zip(*self.steps_s, strict=True)]
        return tuple(
            max(step_s / least_s for step_s, least_s in zip(row, fastest_s, strict=True)) - 1 for row in self.steps_s
        )

    @property
    def least(self) -> int:
        """The row that loses least; the first of those that lose the same."""
        return min(range(len(self.losses)), key=self.losses.__getitem__)

    @property
    def heads(self) -> tuple[str, ...]:
        """The titles of the columns: assumptions by their short names."""
        return ("", *(name.partition(":")[0] for name in self.assumptions), "loses at most")

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The cells of each layout, named as among the alternatives."""
        return tuple(
            (f"{rank}." if rank else "best", *(seconds(step_s) for step_s in row), percent(self.losses[rank]))
            for rank, row in enumerate(self.steps_s)
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """The layout that loses least, and the meaning of each assumption."""
        meanings = (name.partition(": ") for name in self.assumptions if name != AS_PLANNED)
        return self._choice, "; ".join(f"{name}: {meaning}" for name, _, meaning in meanings)

    @property
    def _choice(self) -> str:
        most, best = percent(self.losses[self.least]), percent(self.losses[0])
        if self.least:
            return f"Under all of these alternative {self.least} loses at most {most}, the fastest {best}."
        if self.losses[0] > 0:
            return f"Under all of these the fastest loses least, at most {most}."
        return "The fastest stays so under each of these."


def robust_of(layout: PricedLayout) -> Robust | None:
    """The table of a plan's best layout; None where nothing was compared or nothing matters."""
    rows: list[list[RobustStep]] = []
    for step in layout.robust:
        if step.assumption == AS_PLANNED or not rows:
            rows.append([])
        rows[-1].append(step)
    named = [tuple(step.assumption for step in row) for row in rows]
    if len(set(named)) != 1 or len(named[0]) < 2:
        return None
    return Robust(named[0], tuple(tuple(step.step_s for step in row) for row in rows))
