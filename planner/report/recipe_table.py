"""The answer of `plan explain --recipe`: every switch of the trainer, and the step with each of its other values."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.report.format import seconds
from planner.report.labels import sizes
from planner.report.pieces import bullets, columns, section
from planner.report.recipe import LEAST_GAIN, named
from planner.search.why.recipe import OtherValue, RecipeTable, SwitchWorth
from planner.trainers.switches import written


def render_recipe_table(answer: RecipeTable) -> Group:
    """The whole table, made for 80 columns."""
    return Group(*_sections(answer))


def _sections(answer: RecipeTable) -> Iterator[RenderableType]:
    yield Text(f"What is each switch worth? {answer.job}", style="bold")
    yield ""
    yield Text(f"{sizes(answer.parallelism)}: {seconds(answer.step_s)}")
    if not answer.switches:
        yield Text("The planner knows no switches of this trainer.")
        return
    yield section("Every switch, and the step with another value, everything else planned again", _values(answer))
    others = [other for switch in answer.switches if switch.has_effect for other in switch.others]
    refused = [f"{named(other.switch, other.value)}: {other.rule}" for other in others if other.rule]
    if refused:
        yield section("Refused, by rule", bullets(refused))


def _values(answer: RecipeTable) -> Table:
    """The chosen value of each switch in bold, and below it its others."""
    table = columns("l", "l", "r", "r", None)
    for switch in filter(_matters, answer.switches):
        note = "" if switch.has_effect else "no effect here"
        chosen = Text(written(switch.value), style="bold")
        table.add_row(switch.switch, chosen, "", "", Text(note, style="dim"))
        for other in (other for other in switch.others if not other.rule):
            table.add_row("", written(other.value), *_step(answer, other), Text(_note(other), style="dim"))
    return table


def _matters(switch: SwitchWorth) -> bool:
    """True if the switch has an effect on the chosen layout, or leads to another."""
    return switch.has_effect or any(abs(other.more_fraction or 0.0) >= LEAST_GAIN for other in switch.others)


def _step(answer: RecipeTable, other: OtherValue) -> tuple[str, str]:
    if other.step_s is None or other.more_fraction is None:
        return "none fits", ""
    return seconds(other.step_s, answer.step_s), f"{other.more_fraction:+.1%}"


def _note(other: OtherValue) -> str:
    here = "of this layout" if other.step_s is not None and not other.replanned else ""
    beside = ", ".join(f"{name}={written(value)}" for name, value in other.beside.items())
    parts = (here, f"with {beside}" if beside else "", f"changes {other.changes}" if other.changes else "")
    return ", ".join(part for part in parts if part)
