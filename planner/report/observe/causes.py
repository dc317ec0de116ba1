"""The rows of the gap whose mechanism an observed run's files show: what, by which numbers, and what helps."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.observe.gap.rows import GAP_ROWS, OF_MEMORY
from planner.observe.observation import GapCause, GapRemedy, Observed
from planner.report.format import percent, seconds
from planner.report.pieces import columns, section


def conclusion(observed: Observed) -> str:
    """The sentence of the verdict, with the row that takes most of the gap where one is shown for it."""
    says, is_memory = observed.says, observed.verdict == "memory"
    fitting = [cause for cause in observed.causes if (cause.name in OF_MEMORY) == is_memory]
    if not fitting or observed.verdict == "fast":
        return says
    clause = _clause(fitting[0])
    if observed.verdict == "slow":
        return f"slow: {clause}; {says.removeprefix('slow: ')}"
    return f"{says}; {clause}" if says else clause


def causes_section(observed: Observed) -> RenderableType | None:
    """Every row that is shown, and what to record next where none is."""
    parts = [part for cause in observed.causes for part in _cause(cause, observed.observation.step_s)]
    if observed.next_test:
        parts.append(Text(f"No file shows where the time went. Record next: {observed.next_test}."))
    return section("What the files show", Group(*parts)) if parts else None


def _clause(cause: GapCause) -> str:
    row = GAP_ROWS.get(cause.name)
    text = row.at(cause.where) if row else cause.name
    return text if not cause.seconds else f"{text}, {seconds(cause.seconds)} of a step"


def _cause(cause: GapCause, step_s: float | None) -> Iterator[RenderableType]:
    row = GAP_ROWS.get(cause.name)
    head = Text(row.at(cause.where) if row else cause.name)
    head.append(f"  {cause.name}", style="dim")
    yield head
    yield Padding(_details(cause, step_s), (0, 0, 0, 3))


def _details(cause: GapCause, step_s: float | None) -> Table:
    table = columns("l", None)
    table.add_row("seen", cause.evidence)
    if cause.seconds:
        share = f", {percent(cause.seconds / step_s)} of it" if step_s else ""
        table.add_row("takes", f"{seconds(cause.seconds)} of a step{share}")
    if cause.remedy is not None:
        table.add_row("helps", remedy_says(cause.remedy))
    return table


def remedy_says(remedy: GapRemedy) -> str:
    """The remedy in words, with its options and the step that it gives."""
    by = "by the price of this job" if remedy.is_priced else "without it"
    given = f"a step of {seconds(remedy.step_s)} {by}" if remedy.step_s is not None else ""
    return "; ".join(part for part in (remedy.says, " ".join(remedy.options), given) if part)
