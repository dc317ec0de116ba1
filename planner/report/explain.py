"""Why this and why not that, for eyes: the best layout beside the one asked for, or beside everything it beat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.answer import Layout, PricedLayout
from planner.report.causes import MEMORY, Difference, matters, memory_differences, step_differences
from planner.report.format import gibibytes, percent, seconds
from planner.report.pieces import bullets, columns, section
from planner.report.terminal import _manner as manner
from planner.report.terminal import _sizes as sizes
from planner.search.why.explanation import ChangedAssumption, Constraint, Explanation


def asked(pins: Mapping[str, Iterable[int | str]]) -> str:
    """The pins as they were typed."""
    return " ".join(f"--{axis.replace('_', '-')} {','.join(map(str, values))}" for axis, values in pins.items())


def _named(layout: Layout, best: Layout) -> str:
    """A layout's sizes, and how it is run where the best is run otherwise."""
    return ", ".join([sizes(layout), *(part for part in manner(layout) if part not in manner(best))])


def render_explanation(told: Explanation) -> Group:
    """The whole answer, made for 80 columns."""
    return Group(*_sections(told))


def _sections(told: Explanation) -> Iterator[RenderableType]:
    question = f"Why not {asked(told.asked)}?" if told.asked else "Why this layout?"
    yield Text(f"{question} {told.job}", style="bold")
    yield ""
    yield Text(told.says)
    if not told.asked:
        yield from _why_this(told)
        return
    yield section("The layouts", _layouts(told))
    if told.reason is not None:
        yield from _why_refused(told)
    if told.pinned is not None and told.verdict != "chosen":
        if told.pinned.fits:
            differences = step_differences(told.best, told.pinned)
            shown = [one for one in differences if matters(one, told.best.step.step_s)]
            yield section("Where the seconds differ", _seconds(told, told.pinned, shown))
        yield section("Memory of the fullest stage, GiB", _memory(told, told.pinned))


def _layouts(told: Explanation) -> Table:
    table = columns("l", None, "r")
    table.add_row("best", sizes(told.best.parallelism), seconds(told.best.step.step_s))
    if told.pinned is None:
        table.add_row("asked", asked(told.asked), "none")
    elif not told.pinned.fits:
        table.add_row("nearest", _named(told.pinned.parallelism, told.best.parallelism), "does not fit")
    elif told.verdict != "chosen":
        table.add_row("asked", _named(told.pinned.parallelism, told.best.parallelism), seconds(told.pinned.step.step_s))
    return table


def _why_refused(told: Explanation) -> Iterator[RenderableType]:
    table = columns("r", "l", None)
    for reason, count in told.rejections.items():
        example = Text(told.rejection_examples.get(reason, ""), style="dim")
        table.add_row(f"{count:,}", reason.replace("_", " "), example)
    if told.rejections:
        yield section("Refused shapes among those asked for, by reason", table)
    if told.lifts:
        yield section("What would lift it, one change at a time", _lifts(told))
    elif told.hint:
        yield section("What would lift it", bullets([told.hint]))


def _lifts(told: Explanation) -> Table:
    table = columns("l", None, "r", "r")
    for lift in told.lifts:
        table.add_row(
            lift.change,
            _named(lift.parallelism, told.best.parallelism),
            seconds(lift.step_s),
            f"{lift.more_fraction:+.1%}",
        )
    return table


def _heads(table: Table, *heads: str) -> None:
    table.add_row(*(Text(head, style="dim") for head in heads))


def _seconds(told: Explanation, pinned: PricedLayout, shown: Iterable[Difference]) -> Table:
    table, like_s = columns("l", "r", "r", "r"), told.best.step.step_s
    _heads(table, "", "best", "asked", "difference")
    for one in shown:
        table.add_row(one.label, seconds(one.best, like_s), seconds(one.other, like_s), _signed(one.change, like_s))
    step = (told.best.step.step_s, pinned.step.step_s)
    table.add_row("step", *(seconds(value, like_s) for value in step), _signed(step[1] - step[0], like_s), style="bold")
    return table


def _signed(change_s: float, like_s: float) -> str:
    size = seconds(abs(change_s), like_s)
    return f"{'-' if change_s < 0 else '+'}{size}" if size.strip("0. µms") else "0 s"


def _memory(told: Explanation, pinned: PricedLayout) -> Table:
    table = columns("l", "r", "r", "r")
    _heads(
        table,
        "",
        f"best, stage {told.best.worst_stage.stage}",
        f"{'asked' if pinned.fits else 'nearest'}, stage {pinned.worst_stage.stage}",
        "difference",
    )
    for one in memory_differences(told.best, pinned):
        if one.best or one.other:
            style = "bold" if one.label == MEMORY["total_bytes"] else None
            row = (gibibytes(one.best), gibibytes(one.other), _signed_gib(one.change))
            table.add_row(one.label, *row, style=style)
    capacity = gibibytes(told.capacity_bytes)
    table.add_row("of the GPU", capacity, capacity, "")
    return table


def _signed_gib(change_bytes: float) -> str:
    size = gibibytes(abs(change_bytes))
    return size if float(size.replace(",", "")) == 0 else f"{'-' if change_bytes < 0 else '+'}{size}"


def _why_this(told: Explanation) -> Iterator[RenderableType]:
    if told.beaten:
        yield section("What decides against each alternative", _beaten(told))
    yield section("Assumptions that would change the choice", _assumptions(told))
    yield section("Which constraint binds", _constraints(told.constraints))


def _beaten(told: Explanation) -> Table:
    table = columns("r", "r", None)
    for rank, one in enumerate(told.beaten, start=1):
        more = one.layout.step.step_s / told.best.step.step_s - 1
        table.add_row(
            f"{rank}.", f"{more:+.1%}", Text(_named(one.layout.parallelism, told.best.parallelism), style="bold")
        )
        like_s = told.best.step.step_s
        table.add_row("", "", Text(f"{_signed(one.cause.difference_s, like_s)} {one.cause.label}: {one.cause.because}"))
    return table


def _assumptions(told: Explanation) -> Table:
    table = columns("l", None)
    for one in sorted(told.assumptions, key=lambda one: not one.changes_the_choice):
        table.add_row("yes" if one.changes_the_choice else "no", Text(f"if {one.says}"))
        if one.changes_the_choice:
            table.add_row("", Text(_instead(one, told.best.parallelism), style="dim"))
    return table


def _instead(one: ChangedAssumption, best: Layout) -> str:
    if one.parallelism is None or one.step_s is None:
        return "nothing fits then"
    kept = f"today's choice {seconds(one.kept_step_s)}" if one.kept_fits else "today's choice does not fit"
    return f"{_named(one.parallelism, best)}: {seconds(one.step_s)}, {kept}"


def _constraints(constraints: Iterable[Constraint]) -> Table:
    table = columns("l", "l", None)
    for one in constraints:
        gain = f"{percent(one.gain_fraction)} more tokens a second" if one.binds else "nothing gained"
        table.add_row(one.name, "binds" if one.binds else "slack", f"{one.now}; with {one.moved}: {gain}")
    return table
