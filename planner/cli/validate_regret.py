"""The part of `plan validate` on regret: the seconds lost by running the layout that the planner ranks first."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from planner.validate.regret import PublishedSweep, Regret
    from planner.validate.score import Scored


def show_regret(scored: Sequence[Scored], json: bool, each: bool) -> None:
    """Print the regret of every family, or with `each` of every sweep."""
    from planner.cli.output import dumps, show
    from planner.validate.regret import regrets, spreads, sweeps

    found = sweeps(scored)
    scores = regrets(found, spreads(answer.row for answer in scored))
    if json:
        sys.stdout.write(dumps(described(found, scores)))
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


def summary(scored: Sequence[Scored]) -> Iterator[str]:
    """One line on all sweeps, where there are any."""
    from planner.validate.regret import regrets, sweeps

    for total in regrets(sweeps(scored), {})[-1:]:
        yield (
            f"regret: in {total.num_sweeps} jobs that were measured in several layouts, the one ranked first took "
            f"{_percent(total.mean)} longer than the fastest, one drawn by chance {_percent(total.random_mean)} "
            "(--regret lists them)"
        )


def described(found: Sequence[PublishedSweep], scores: Sequence[Regret]) -> Mapping[str, object]:
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
