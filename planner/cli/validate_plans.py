"""The part of `plan validate` on plans: the planner's own choices for published jobs, beside what was run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from planner.validate.plans import Beside, Gain
    from planner.validate.score import Scored

_log = logging.getLogger(__name__)


def searched_beside(scored: Sequence[Scored]) -> list[Beside]:
    from planner.cli.output import progress
    from planner.validate.plans import counted, plans_beside

    with progress("searching", len(counted(scored))) as done:
        return plans_beside(scored, done)


def described(beside: Sequence[Beside]) -> dict[str, object]:
    from planner.validate.plans import gains

    return {
        "plan_families": [asdict(gain) for gain in gains(beside)],
        "plans": [
            {
                "id": pair.row.id,
                "published": pair.published.parallelism.model_dump(mode="json"),
                "published_step_s": pair.published.step.step_s,
                "chosen": None if pair.chosen is None else pair.chosen.parallelism.model_dump(mode="json"),
                "chosen_step_s": None if pair.chosen is None else pair.chosen.step.step_s,
                "outcome": None if pair.chosen is None or pair.chosen.search is None else pair.chosen.search.outcome,
                "speedup": pair.speedup,
                "note": pair.note,
            }
            for pair in beside
        ],
    }


def point_out(beside: Sequence[Beside]) -> None:
    """Warn of every published layout that the search could have chosen and that is faster than its choice."""
    for pair in beside:
        if pair.note == "slower" and pair.chosen is not None and pair.speedup is not None:
            _log.warning(
                "%s: the published layout is %.1f%% faster than the plan, %s",
                pair.row.id,
                100 * (1 / pair.speedup - 1),
                pair.chosen.parallelism,
            )


def gain_table(beside: Sequence[Beside]) -> Table:
    from planner.report.pieces import columns
    from planner.validate.plans import gains

    table = columns("l", *"rrrrrrrr", gap=1)
    heads = ("family", "n", "median", "least", "no fit", "refused", "unsearched", "late", "slower")
    table.add_row(*heads, style="dim")
    for gain in gains(beside):
        table.add_row(
            gain.name, str(gain.num_rows), _times(gain.median), _times(gain.least), *_counts(gain),
            style="bold" if gain.name == "all" else None,
        )  # fmt: skip
    return table


def beside_table(beside: Sequence[Beside]) -> Table:
    from planner.report.format import seconds
    from planner.report.pieces import columns

    table = columns(None, "r", "r", "r", None, None)
    table.add_row("run", "published", "chosen", "speed-up", "choice", "", style="dim")
    for pair in beside:
        published = pair.published.step.step_s
        style = "bold red" if pair.note == "slower" else None
        if pair.chosen is None:
            table.add_row(pair.row.id, seconds(published), "", "", "", pair.note)
            continue
        layout, chosen = str(pair.chosen.parallelism), seconds(pair.chosen.step.step_s)
        table.add_row(pair.row.id, seconds(published), chosen, _times(pair.speedup), layout, pair.note, style=style)
    return table


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def _counts(gain: Gain) -> list[str]:
    numbers = (gain.num_misfits, gain.num_refused, gain.num_not_searched, gain.num_unfinished, gain.num_slower)
    return [str(number) if number else "" for number in numbers]
