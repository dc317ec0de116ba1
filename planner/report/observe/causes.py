"""The likely causes of what an observed run shows: how likely, by which evidence, what helps, what would tell more."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.observe.causes.hypotheses import HYPOTHESES
from planner.observe.observation import Cause, Observed, Remedy
from planner.report.format import percent, seconds
from planner.report.pieces import columns, section


def causes_section(observed: Observed) -> RenderableType | None:
    """Every cause with what speaks for it, the likeliest first, and what to measure next where none is sure."""
    parts = [part for cause in observed.causes for part in _cause(cause, observed.observation.step_s)]
    if observed.next_test:
        nothing = "No file shows why." if not parts else "None of these is sure."
        parts.append(Text(f"{nothing} To find out: {observed.next_test}."))
    return section("Likely causes", Group(*parts)) if parts else None


def _cause(cause: Cause, step_s: float | None) -> Iterator[RenderableType]:
    known = HYPOTHESES.get(cause.name)
    head = Text(f"{percent(cause.likelihood, 0):>4}  {known.at(cause.where) if known else cause.name}")
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
    by = "by the price of this job" if remedy.is_priced else "without it"
    given = f"a step of {seconds(remedy.step_s)} {by}" if remedy.step_s is not None else ""
    return "; ".join(part for part in (remedy.says, " ".join(remedy.options), given) if part)
