"""The section of `plan observe` on the replayed step, and on what one rank, stage or operation costs of it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from planner.observe.observation import Observed, Replayed
from planner.report.format import percent, seconds
from planner.report.pieces import Bar, bullets, headed, section

_MOST, _WIDEST_BAR = 8, 20


def ideal_sections(observed: Observed) -> Iterator[RenderableType]:
    """The replay and its changes; nothing where the files do not say what ranks take."""
    replayed, changes = observed.replayed, observed.what_if
    if replayed is None:
        return
    parts: list[RenderableType] = [Text(_says(replayed))]
    if changes:
        table = headed(("made as its peers", "the step", "less", ""), "l", "r", "r", None)
        for one in changes[:_MOST]:
            share = one.recoverable_s / replayed.step_s
            table.add_row(one.name, seconds(one.step_s, replayed.step_s), percent(share), Bar(share, _WIDEST_BAR))
        if len(changes) > _MOST:
            table.add_row(f"and {len(changes) - _MOST} that win less", "", "", "")
        parts.append(table)
    if replayed.notes:
        parts.append(bullets(list(replayed.notes)))
    yield section("If one thing were not slow", Group(*parts))


def _says(replayed: Replayed) -> str:
    like_s = replayed.measured_s
    told = f"Replayed from what its ranks take: {seconds(replayed.step_s, like_s)}, measured {seconds(like_s)}"
    if replayed.even_s is None:
        return f"{told}."
    if replayed.even_s > 0.995 * replayed.step_s:
        return f"{told}. No rank, stage or operation is slower than its peers."
    return f"{told}; with all of them as their peers {seconds(replayed.even_s, like_s)}."
