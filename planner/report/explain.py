"""The answers of `plan explain`: the best layout beside another or all that it beat, and `--recipe`'s switches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from rich.table import Table as RichTable
from rich.text import Text

from planner.answer import Layout, PricedLayout
from planner.report.causes import Difference, matters, memory_differences, step_differences
from planner.report.format import (
    LEAST_GAIN,
    MEMORY,
    corrections_title,
    fits_with,
    gibibytes,
    manner,
    named,
    seconds,
    sentence,
    sentences,
    signed_seconds,
    sizes,
)
from planner.report.pieces import Parts, as_group, bullets, columns, headed, listed, section
from planner.report.rows import Table
from planner.report.small import room_lines, rows_of
from planner.report.terminal import table
from planner.report.view import change_table
from planner.search.why.explanation import ChangedAssumption, Explanation
from planner.search.why.recipe import OtherValue, RecipeTable, SwitchWorth


def asked(pins: Mapping[str, Iterable[int | str]]) -> str:
    """The pins as they were typed."""
    return " ".join(f"--{axis.replace('_', '-')} {','.join(map(str, values))}" for axis, values in pins.items())


def _named(layout: Layout, best: Layout) -> str:
    """A layout's sizes, and how it is run where the best is run otherwise."""
    return ", ".join([sizes(layout), *(part for part in manner(layout) if part not in manner(best))])


@as_group
def render_explanation(answer: Explanation) -> Parts:
    """The whole answer, made for 80 columns."""
    yield Text(sentence("explain_question", answer=answer, asked=asked(answer.asked)), style="bold")
    yield ""
    yield Text(answer.says)
    if answer.hint and not answer.asked:
        yield Text(f"What helps: {answer.hint}.")
    if answer.corrections:
        found = columns("lw", ((correction.name, correction.says) for correction in answer.corrections))
        yield section(corrections_title(answer.corrections), found)
    if not answer.asked:
        yield from _small_job(answer)
        yield from _why_this(answer)
        return
    yield section("The layouts", _layouts(answer))
    if answer.reason is not None:
        yield from _why_refused(answer)
    if answer.pinned is not None and answer.verdict != "chosen":
        if answer.pinned.fits:
            differences = step_differences(answer.best, answer.pinned)
            shown = [difference for difference in differences if matters(difference, answer.best.step.step_s)]
            yield section("Where the seconds differ", _seconds(answer, answer.pinned, shown))
        yield section("Memory of the fullest stage, GiB", _memory(answer, answer.pinned))


def _small_job(answer: Explanation) -> Parts:
    """The room of a small job, and what to change first."""
    if answer.job_changes:
        goal = "seconds gained, then GiB saved a second" if answer.best.fits else "what makes it fit, then GiB saved"
        rows = rows_of(answer.job_changes, answer.capacity_bytes, answer.best.step.step_s)
        yield section(f"What to change first: one change at a time, by {goal}", table(change_table(rows)))
    if answer.room is not None:
        yield section("Room, all else as it is", table(Table(room_lines(answer.room))))


def _layouts(answer: Explanation) -> RichTable:
    best, pinned = answer.best, answer.pinned
    table = columns("lwr", [("best", sizes(best.parallelism), seconds(best.step.step_s))])
    if pinned is None:
        table.add_row("asked", asked(answer.asked), "none")
    elif answer.verdict != "chosen" or not pinned.fits:
        name, step = ("asked", seconds(pinned.step.step_s)) if pinned.fits else ("nearest", "does not fit")
        table.add_row(name, _named(pinned.parallelism, best.parallelism), step)
    return table


def _why_refused(answer: Explanation) -> Parts:
    if answer.rejections:
        refused = listed("refused_shapes", answer.rejections.items(), answer=answer)
        yield section("Refused shapes among those asked for, by reason", refused)
    if answer.lifts:
        lifts = listed("lifts", answer.lifts, beside_best=_beside_best(answer))
        yield section("What would lift it, one change at a time", lifts)
    elif answer.hint:
        yield section("What would lift it", bullets([answer.hint]))


def _beside_best(answer: Explanation) -> Callable[[Layout], str]:
    return partial(_named, best=answer.best.parallelism)


def _seconds(answer: Explanation, pinned: PricedLayout, shown: Iterable[Difference]) -> RichTable:
    best_s, other_s = answer.best.step.step_s, pinned.step.step_s
    whole = Difference(item="step_s", label="step", best=best_s, other=other_s)
    rows = [*shown, whole]
    return listed("explained_seconds", rows, bold={len(rows) - 1}, like_s=best_s)


def _memory(answer: Explanation, pinned: PricedLayout) -> RichTable:
    other = f"{'asked' if pinned.fits else 'nearest'}, stage {pinned.worst_stage.stage}"
    table = headed(("", f"best, stage {answer.best.worst_stage.stage}", other, "difference"), "lrrr")
    for difference in memory_differences(answer.best, pinned):
        if difference.best or difference.other:
            style = "bold" if difference.label == MEMORY["total_bytes"] else None
            row = (gibibytes(difference.best), gibibytes(difference.other), _signed_gib(difference.change))
            table.add_row(difference.label, *row, style=style)
    capacity = gibibytes(answer.capacity_bytes)
    table.add_row("of the GPU", capacity, capacity, "")
    table.add_row("fits with", fits_with(answer.best.oom_probability), fits_with(pinned.oom_probability), "")
    return table


def _signed_gib(change_bytes: float) -> str:
    size = gibibytes(abs(change_bytes))
    return size if float(size.replace(",", "")) == 0 else f"{'-' if change_bytes < 0 else '+'}{size}"


def _why_this(answer: Explanation) -> Parts:
    if answer.beaten:
        yield section("What decides against each alternative", _beaten(answer))
    if _moving(answer):
        yield section("Assumptions that would change the choice", _assumptions(answer))
    if answer.constraints:
        yield section("Which constraint binds", listed("constraints", answer.constraints))


def _moving(answer: Explanation) -> list[ChangedAssumption]:
    """All assumptions; of a small job those that move its step, since most of them are about many ranks."""
    step_s = answer.best.step.step_s
    return [
        other
        for other in answer.assumptions
        if not answer.job_changes or other.changes_the_choice or abs(other.kept_step_s / step_s - 1) > 1e-3
    ]


def _beaten(answer: Explanation) -> RichTable:
    table, step_s = columns("rrw"), answer.best.step.step_s
    for rank, beaten in enumerate(answer.beaten, start=1):
        name, cause = _beside_best(answer)(beaten.layout.parallelism), beaten.cause
        table.add_row(f"{rank}.", f"{beaten.layout.step.step_s / step_s - 1:+.1%}", Text(name, style="bold"))
        table.add_row("", "", Text(f"{signed_seconds(cause.difference_s, step_s)} {cause.label}: {cause.because}"))
    return table


def _assumptions(answer: Explanation) -> RichTable:
    table = columns("lw")
    for assumption in sorted(_moving(answer), key=lambda assumption: not assumption.changes_the_choice):
        table.add_row("yes" if assumption.changes_the_choice else "no", Text(f"if {assumption.says}"))
        if assumption.changes_the_choice:
            instead = sentences("changed_choice", it=assumption, beside_best=_beside_best(answer))
            table.add_row("", Text(next(instead)))
    return table


@as_group
def render_recipe_table(answer: RecipeTable) -> Parts:
    """The whole table, made for 80 columns."""
    yield Text(f"What is each switch worth? {answer.job}", style="bold")
    yield ""
    yield Text(f"{sizes(answer.parallelism)}: {seconds(answer.step_s)}")
    if not answer.switches:
        yield Text("The planner knows no switches of this trainer.")
        return
    yield section("Every switch, and the step with another value, the layout planned again", _worths(answer))
    others = [other for switch in answer.switches if switch.has_effect for other in switch.others]
    refused = [f"{named(other.switch, other.value)}: {other.rule}" for other in others if other.rule]
    if refused:
        yield section("Refused, by rule", bullets(refused))


def _worths(answer: RecipeTable) -> RichTable:
    """The chosen value of each switch in bold, and below it its others."""
    rows = (
        (switch, other)
        for switch in filter(_switch_matters, answer.switches)
        for other in (None, *(other for other in switch.others if not other.rule))
    )
    return listed("worth_of_switches", rows, step=partial(_other_step, answer))


def _switch_matters(switch: SwitchWorth) -> bool:
    """True if the switch has an effect on the chosen layout, or leads to another."""
    return switch.has_effect or any(abs(other.more_fraction or 0.0) >= LEAST_GAIN for other in switch.others)


def _other_step(answer: RecipeTable, other: OtherValue) -> tuple[str, str]:
    if other.step_s is None or other.more_fraction is None:
        return "none fits" if other.replanned else "not here", ""
    return seconds(other.step_s, answer.step_s), f"{other.more_fraction:+.1%}"
