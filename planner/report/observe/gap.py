"""The way from the predicted step to the measured one and to the wall time per step, term by term."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from planner.observe.gap.account import STEP_TERMS, WALL_TERMS
from planner.observe.observation import Observation, Observed, Term
from planner.report.format import bar, percent, seconds, signed_seconds
from planner.report.labels import LEAST_SHARE
from planner.report.pieces import bullets, headed, section
from planner.specs.reading import printable

_LABELS = {**STEP_TERMS, **WALL_TERMS}
_WIDEST_HALF, _LONGEST = 8, 300
_MOST_LINES, _WIDTH = 6, 76
_WORTH_A_SENTENCE = 0.01
"""Terms of at least this share of the step have their evidence shown, as many as fit; that of all is in --json."""


class SignedBar:
    """A bar to the right of its middle for seconds lost, to the left for seconds won."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(7, 2 * _WIDEST_HALF + 1)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        half = max(1, (min(2 * _WIDEST_HALF + 1, options.max_width) - 1) // 2)
        cells = bar(abs(self.fraction), half)
        won, lost = (cells[::-1], " " * half) if self.fraction < 0 else (" " * half, cells)
        yield Text.assemble((won, "green"), ("│", "dim"), (lost, "red"))


def gap_section(observed: Observed) -> RenderableType | None:
    """The waterfall from the predicted step to the wall time per step; None where there is nothing between them."""
    observation, prediction = observed.observation, observed.prediction
    step_s = observation.step_s
    if step_s is None or not (observed.waterfall or observed.beside):
        return None
    every = (*observed.waterfall, *observed.beside)
    largest_s = max(abs(term.seconds) for term in every)
    like_s = min(step_s, prediction.step_s) if prediction else step_s
    table = headed(("", "", "", "to win back"), "l", "r", "l", "r", style="dim")
    if prediction is not None and observed.waterfall:
        table.add_row("predicted step", seconds(prediction.step_s, like_s), "", "", style="bold")
        _add_terms(table, observed.waterfall, like_s, largest_s, LEAST_SHARE * step_s)
    table.add_row("measured step", seconds(step_s, like_s), "", "", style="bold")
    parts: list[RenderableType] = [table]
    if observed.beside:
        _add_terms(table, observed.beside, like_s, largest_s, LEAST_SHARE * step_s)
        wall_s = step_s + sum(term.seconds for term in observed.beside)
        table.add_row("wall time per step", seconds(wall_s, like_s), "", "", style="bold")
        parts += [Text(words, style="dim") for words in _whole(observation)]
    if said := list(_evidence(observed.waterfall, _WORTH_A_SENTENCE * step_s)):
        parts += ["", bullets(said)]
    return section("Where the seconds go", Group(*parts))


def _whole(observation: Observation) -> Iterator[str]:
    """One sentence on the wall time of the whole run."""
    if (wall := observation.wall) is not None:
        warm_up = f", {observation.num_warmup_steps:,} of them to warm up" if observation.num_warmup_steps else ""
        share = percent(min(1.0, wall.steps_s / wall.wall_s)) if wall.wall_s else "all"
        yield f"{seconds(wall.wall_s)} in all, {share} of it {observation.num_steps:,} steps{warm_up}"


def _evidence(terms: Sequence[Term], least_s: float) -> Iterator[str]:
    """The evidence of the largest terms, in a few lines."""
    lines = 0
    for term in sorted(terms, key=lambda term: -abs(term.seconds)):
        words = f"{_label(term)}: {printable(term.evidence, _LONGEST)}"
        lines += math.ceil(len(words) / _WIDTH)
        if abs(term.seconds) < least_s or lines > _MOST_LINES:
            return
        yield words


def _add_terms(table: Table, terms: Sequence[Term], like_s: float, largest_s: float, least_s: float) -> None:
    """A row for each term, those that would read as nothing together in one."""
    small = [term for term in terms if abs(term.seconds) < least_s]
    for term in terms:
        if term not in small:
            back = "" if not term.recoverable_s else seconds(term.recoverable_s, like_s)
            table.add_row(
                f"  {_label(term)}", signed_seconds(term.seconds, like_s), SignedBar(term.seconds / largest_s), back
            )
    total_s = sum(term.seconds for term in small)
    if signed_seconds(total_s, like_s) != "0 s":
        words = f"  {len(small)} smaller ones" if len(small) > 1 else f"  {_label(small[0])}"
        table.add_row(words, signed_seconds(total_s, like_s), SignedBar(total_s / largest_s), "")


def _label(term: Term) -> str:
    return _LABELS.get(term.term, printable(term.term.replace("_", " "), 40))
