"""The likely causes of what an observed run shows: how likely, by which evidence, what helps, what would tell more."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.observe.causes.hypotheses import HYPOTHESES
from planner.observe.observation import Cause, Remedy
from planner.report.format import percent, seconds
from planner.report.pieces import columns, section


def causes_section(causes: Iterable[Cause], step_s: float | None) -> RenderableType:
    """Every cause with what speaks for it, the likeliest first."""
    return section("Likely causes", Group(*(part for cause in causes for part in _cause(cause, step_s))))


def _cause(cause: Cause, step_s: float | None) -> Iterator[RenderableType]:
    known = HYPOTHESES.get(cause.name)
    where = f" ({cause.where})" if cause.where else ""
    head = Text(f"{percent(cause.likelihood, 0):>4}  {known.says if known else cause.name}{where}")
    head.append(f"  {cause.name}", style="dim")
    yield head
    yield Padding(_details(cause, step_s), (0, 0, 0, 6))


def _details(cause: Cause, step_s: float | None) -> Table:
    table = columns("l", None)
    table.add_row("seen", cause.evidence)
    if cause.seconds:
        share = f", {percent(cause.seconds / step_s)} of it" if step_s else ""
        table.add_row("takes", f"{seconds(cause.seconds)} of a step at most{share}")
    if cause.remedy is not None:
        table.add_row("helps", remedy_says(cause.remedy))
    if cause.test:
        table.add_row("to be sure", cause.test)
    return table


def remedy_says(remedy: Remedy) -> str:
    """The remedy in words, with its options and the step that it gives."""
    given = f"a step of {seconds(remedy.step_s)} by the price of this job" if remedy.step_s is not None else ""
    return "; ".join(part for part in (remedy.says, " ".join(remedy.options), given) if part)
