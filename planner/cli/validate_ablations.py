"""The part of `plan validate` on ablations: predicted gains of switches beside measured ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from planner.validate.ablations import Priced

NAME = "ablations"
"""The name of this family on the command line."""


def priced_pairs() -> list[Priced]:
    """All published pairs, priced."""
    from planner.validate.ablations import load_ablations, priced

    return [priced(pair) for pair in load_ablations()]


def show_pairs(json: bool, alone: bool) -> None:
    """Print every pair and the scores of each switch; `alone` is False where the user asks for more than that."""
    from planner.cli.output import dumps, show
    from planner.errors import SpecError

    if not alone:
        raise SpecError(
            f"--family {NAME}: has none of --plot, --plans and --regret", "leave them out, or name another family"
        )
    answers = priced_pairs()
    if json:
        sys.stdout.write(dumps(described(answers)))
        return
    for table in (pair_table(answers), "", score_table(answers)):
        show(table)


def pair_table(answers: Sequence[Priced]) -> Table:
    """One pair a line: measured and predicted gain, their difference in points, and whether the sign is right."""
    from planner.report.pieces import columns

    table = columns(None, *"rrr", "l")
    table.add_row("pair", "measured", "predicted", "error", "", style="dim")
    for answer in answers:
        measured = _points(answer.measured)
        if answer.error is not None:
            table.add_row(answer.pair.id, measured, f"unsupported: {answer.error}", "", "")
            continue
        wrong = "" if answer.sign_right else "wrong sign"
        table.add_row(answer.pair.id, measured, _points(answer.predicted), _points(answer.gain_error), wrong)
    return table


def score_table(answers: Sequence[Priced]) -> Table:
    """A line for each switch: pairs, share of right signs, median and worst error of the gain in points."""
    from planner.report.pieces import columns
    from planner.validate.ablations import scores

    table = columns("l", *"rrrr", gap=1)
    table.add_row("switch", "pairs", "sign right", "median error", "worst", style="dim")
    for score in scores(answers):
        table.add_row(
            score.name, str(score.num_pairs), f"{score.sign_right:.0%}", f"{100 * score.median_error:.1f}",
            _points(score.worst_error), style="bold" if score.name.startswith("all") else None,
        )  # fmt: skip
    return table


def summary(answers: Sequence[Priced]) -> str:
    """One line on all pairs in which a single switch differs."""
    from planner.validate.ablations import scores

    found = scores(answers)[-1]
    return (
        f"{NAME}: of {found.num_pairs} published pairs that differ in one switch, {found.sign_right:.0%} have the sign "
        f"predicted, with a median error of {100 * found.median_error:.1f} points (--family {NAME} lists them)"
    )


def described(answers: Sequence[Priced]) -> dict[str, object]:
    """The pairs and their scores as plain data."""
    from planner.validate.ablations import scores, switch_of

    return {
        "ablation_scores": [asdict(score) for score in scores(answers)],
        "ablations": [
            {
                "id": answer.pair.id,
                "source": answer.pair.source,
                "switch": switch_of(answer.pair),
                "bundle": answer.pair.bundle,
                "note": answer.pair.note,
                "measured_gain": answer.measured,
            }
            | (
                {"unsupported": str(answer.error)}
                if answer.error is not None
                else {
                    "predicted_gain": answer.predicted,
                    "gain_error": answer.gain_error,
                    "sign_right": answer.sign_right,
                    "predicted_s": {"off": answer.off_s, "on": answer.on_s},
                }
            )
            for answer in answers
        ],
    }


def _points(gain: float) -> str:
    return f"{100 * gain:+.1f}"
