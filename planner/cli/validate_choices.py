"""The parts of `plan validate` on choices: seconds lost by the layout ranked first, and predicted gains of switches."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from planner.validate.choices import PricedPair, PublishedSweep, Regret
    from planner.validate.score import Scored


def show_regret(scored: Sequence[Scored], json: bool, each: bool) -> None:
    """Print the regret of every family, or with `each` of every sweep."""
    from planner.cli.output import dumps, show
    from planner.validate.choices import regrets, spreads, sweeps

    found = sweeps(scored)
    scores = regrets(found, spreads(answer.row for answer in scored))
    if json:
        sys.stdout.write(dumps(described_regret(found, scores)))
    elif not found:
        show("no job of these runs was measured in more than one layout")
    else:
        show(sweep_table(found) if each else regret_table(scores))
        for line in () if each else remarks(scores):
            show(line)


def regret_table(scores: Sequence[Regret]) -> Table:
    """A line for each family; the last one is of all sweeps."""
    from planner.report.pieces import columns

    table = columns("l", *"rrrrrrrrr", gap=1)
    heads = ("family", "n", "runs", "mean", "median", "p90", "worst", "random", "noise", "perfect")
    table.add_row(*heads, style="dim")
    for score in scores:
        shares = (score.mean, score.median, score.p90, score.worst, score.random_mean, score.spread, score.noise_mean)
        table.add_row(
            score.name, str(score.num_sweeps), str(score.num_layouts), *map(_percent, shares),
            style="bold" if score.name == "all" else None,
        )  # fmt: skip
    return table


def sweep_table(found: Sequence[PublishedSweep]) -> Table:
    """A line for each sweep, the largest regret first: the layout that is ranked first, and the one measured best."""
    from rich.text import Text

    from planner.report.format import seconds
    from planner.report.pieces import columns

    table = columns("r", "r", "r", None)
    table.add_row("regret", "runs", "took", "ranked first, then measured best", style="dim")
    for sweep in sorted(found, key=lambda sweep: -sweep.regret):
        for place in dict.fromkeys((sweep.chosen, sweep.best)):
            lead = (_percent(sweep.regret), str(len(sweep.ids))) if place == sweep.chosen else ("", "")
            table.add_row(*lead, seconds(float(sweep.measured_s[place])), Text(sweep.ids[place], overflow="fold"))
    return table


def remarks(scores: Sequence[Regret]) -> list[str]:
    """The words for the columns, the worst sweep, and the families whose noise decides."""
    last = scores[-1]
    lines = [
        "n jobs of which a source measured several layouts (runs); mean to worst: how much longer the one ranked first "
        "took than the fastest; random: one drawn by chance; noise: how far the same run is from itself; perfect: what "
        "a perfect prediction would lose to that noise"
    ]
    if last.worst > 0:
        lines.append(f"worst: {last.worst_id} was chosen, {last.best_id} was fastest")
    noisy = [f"{score.name} ({_percent(score.spread)})" for score in scores if score.is_noisy]
    if noisy:
        lines.append(f"noisy: {', '.join(noisy)}")
    return lines


def regret_summary(scored: Sequence[Scored]) -> Iterator[str]:
    """One line on all sweeps, where there are any."""
    from planner.validate.choices import regrets, sweeps

    for total in regrets(sweeps(scored), {})[-1:]:
        yield (
            f"regret: in {total.num_sweeps} jobs that were measured in several layouts, the one ranked first took "
            f"{_percent(total.mean)} longer than the fastest, one drawn by chance {_percent(total.random_mean)} "
            "(--regret lists them)"
        )


def described_regret(found: Sequence[PublishedSweep], scores: Sequence[Regret]) -> Mapping[str, object]:
    """The scores and the sweeps as plain data."""
    return {
        "regret": [asdict(score) for score in scores],
        "sweeps": [
            {
                "family": sweep.family,
                "regret": sweep.regret,
                "random_regret": sweep.random_regret,
                "chosen_id": sweep.ids[sweep.chosen],
                "best_id": sweep.ids[sweep.best],
                "layouts": [
                    {"id": name, "predicted_s": float(predicted_s), "measured_s": float(measured_s)}
                    for name, predicted_s, measured_s in zip(
                        sweep.ids, sweep.predicted_s, sweep.measured_s, strict=True
                    )
                ],
            }
            for sweep in found
        ],
    }


def _percent(value: float | None) -> str:
    """A share with the digits that tell two good scores apart; empty where it is not known."""
    return "" if value is None else f"{100 * value:.{2 if value < 0.1 else 0}f}%"


NAME = "ablations"
"""The name of this family on the command line."""


def priced_pairs() -> list[PricedPair]:
    """All published pairs, priced."""
    from planner.validate.choices import load_ablations, priced

    return [priced(pair) for pair in load_ablations()]


def show_pairs(json: bool, alone: bool) -> None:
    """Print every pair and the scores of each switch; `alone` is False where the user asks for more than that."""
    from planner.cli.output import dumps, show
    from planner.errors import SpecError

    if not alone:
        raise SpecError(f"--family {NAME}: has no --regret", "leave them out, or name another family")
    answers = priced_pairs()
    if json:
        sys.stdout.write(dumps(described_pairs(answers)))
        return
    for table in (pair_table(answers), "", switch_table(answers)):
        show(table)


def pair_table(answers: Sequence[PricedPair]) -> Table:
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


def switch_table(answers: Sequence[PricedPair]) -> Table:
    """A line for each switch: pairs, share of right signs, median and worst error of the gain in points."""
    from planner.report.pieces import columns
    from planner.validate.choices import scores

    table = columns("l", *"rrrr", gap=1)
    table.add_row("switch", "pairs", "sign right", "median error", "worst", style="dim")
    for score in scores(answers):
        table.add_row(
            score.name, str(score.num_pairs), f"{score.sign_right:.0%}", f"{100 * score.median_error:.1f}",
            _points(score.worst_error), style="bold" if score.name.startswith("all") else None,
        )  # fmt: skip
    return table


def pair_summary(answers: Sequence[PricedPair]) -> str:
    """One line on all pairs in which a single switch differs."""
    from planner.validate.choices import scores

    found = scores(answers)[-1]
    return (
        f"{NAME}: of {found.num_pairs} published pairs that differ in one switch, {found.sign_right:.0%} have the sign "
        f"predicted, with a median error of {100 * found.median_error:.1f} points (--family {NAME} lists them)"
    )


def described_pairs(answers: Sequence[PricedPair]) -> dict[str, object]:
    """The pairs and their scores as plain data."""
    from planner.validate.choices import scores, switch_of

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
