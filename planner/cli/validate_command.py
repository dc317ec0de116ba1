"""`plan validate`: predictions beside published training runs."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from planner.cli import options as o

if TYPE_CHECKING:
    from rich.table import Table

    from planner.validate.plans import Beside, Gain
    from planner.validate.score import Score, Scored

RANKED_RIGHT = 0.95
"""A rank correlation that calls for no remark."""
_log = logging.getLogger(__name__)
EVIDENCE = "Evidence"
Family = Annotated[
    str | None, o.text(EVIDENCE, "--family", "NAME", "Only the runs of this source, one by one; all for every row.")
]
Plans = Annotated[
    bool, o.text(EVIDENCE, "--plans", None, "The planner's own choices for these jobs, beside the published layouts.")
]
Plot = Annotated[
    str | None, o.text(o.OUTPUT, "--plot", "FILE", "Draw predicted against measured as HTML; - is stdout.")
]
Force = Annotated[bool, o.text(o.OUTPUT, "--force", None, "Let --plot replace a file.")]


def validate_command(
    family: Family = None, plans: Plans = False, json: o.Json = False, plot: Plot = None, force: Force = False
) -> None:
    """Hold the planner against published training runs.

    \b
    Example:
      plan validate
      plan validate --family korthikanti
      plan validate --plot predicted.html
      plan validate --family bloom --plans
    """
    from planner.cli.output import dumps, show
    from planner.errors import SpecError
    from planner.files import STDOUT, refuse_to_overwrite
    from planner.validate.rows import HELD_OUT, load_rows
    from planner.validate.score import by_family, evaluate_rows

    if plot is not None:
        refuse_to_overwrite(plot, force)
    rows = load_rows()
    families = list(dict.fromkeys(row.family for row in rows))
    if family is not None and family not in (*families, "all"):
        raise SpecError(f"--family: {family!r} is unknown", f"one of {', '.join(families)}, all")
    scored = evaluate_rows([row for row in rows if family in (None, "all", row.family)])
    if plot is not None:
        _draw(plot, [one for one in scored if family is not None or one.row.counts], force)
        if plot == STDOUT:
            return
    beside = _beside(scored) if plans else []
    if json:
        answer = {"families": [asdict(one) for one in by_family(scored)], "rows": [_described(one) for one in scored]}
        sys.stdout.write(dumps({**answer, **_plans_described(beside)} if plans else answer))
    elif plans:
        show(_gain_table(beside) if family is None else _beside_table(beside))
        _point_out(beside)
    else:
        scores = by_family(scored)
        show(_family_table(scores) if family is None else _row_table(scored))
        if family is None:
            for line in (
                *_noisy(scores[:-1]),
                *_unsupported(scored),
                f"held out, so that nothing is fitted to it: {', '.join(HELD_OUT)}",
            ):
                show(line)


def _draw(target: str, scored: Sequence[Scored], force: bool) -> None:
    from planner.files import STDOUT, write_text
    from planner.report.scatter import Point, scatter_page

    points = [
        Point(one.row.id, one.row.family, one.row.measured.step_s, one.layout.step.step_s, one.row.counts)
        for one in scored
        if one.layout is not None
    ]
    write_text(target, scatter_page(points), force)
    if target != STDOUT:
        _log.info("wrote %s", target)


def _beside(scored: Sequence[Scored]) -> list[Beside]:
    from planner.cli.output import progress
    from planner.validate.plans import counted, plans_beside

    with progress("searching", len(counted(scored))) as done:
        return plans_beside(scored, done)


def _point_out(beside: Sequence[Beside]) -> None:
    """Findings, on stderr: what the search could have chosen and did not, though it is faster."""
    for one in beside:
        if one.note == "slower" and one.chosen is not None and one.speedup is not None:
            _log.warning(
                "%s: the published layout is %.1f%% faster than the plan, %s", one.row.id, 100 * (1 / one.speedup - 1),
                one.chosen.parallelism,
            )  # fmt: skip


def _plans_described(beside: Sequence[Beside]) -> dict[str, object]:
    from planner.validate.plans import gains

    return {
        "plan_families": [asdict(one) for one in gains(beside)],
        "plans": [
            {
                "id": one.row.id,
                "published": one.published.parallelism.model_dump(mode="json"),
                "published_step_s": one.published.step.step_s,
                "chosen": None if one.chosen is None else one.chosen.parallelism.model_dump(mode="json"),
                "chosen_step_s": None if one.chosen is None else one.chosen.step.step_s,
                "outcome": None if one.chosen is None or one.chosen.search is None else one.chosen.search.outcome,
                "speedup": one.speedup,
                "note": one.note,
            }
            for one in beside
        ],
    }


def _described(one: Scored) -> dict[str, object]:
    row, layout = one.row, one.layout
    about = {
        "id": row.id, "source": row.source, "family": row.family, "trust": row.trust, "weight": row.weight,
        "assumed": row.assumed, "held_out": row.held_out, "measured_step_s": row.measured.step_s,
    }  # fmt: skip
    if layout is None:
        return {**about, "unsupported": str(one.error)}
    return {
        **about,
        "predicted_step_s": layout.step.step_s,
        "step_s_interval": layout.step.step_s_interval,
        "step_error": one.step_error,
        "memory_error": one.memory_error,
    }


def _family_table(scores: list[Score]) -> Table:
    from planner.report.format import percent
    from planner.report.pieces import columns

    def maybe(value: float | None, text: str = "{:.2f}") -> str:
        return "" if value is None else text.format(value)

    table = columns("l", *"rrrrrrrrr", gap=1)
    table.add_row("family", "n", "median", "p90", "mean", "bias", "worst", "rank", "memory", "in 80%", style="dim")
    for one in scores:
        memory = "" if one.memory_mean is None else percent(one.memory_mean)
        table.add_row(
            one.name, str(one.num_rows), percent(one.median), percent(one.p90), percent(one.mean),
            f"{100 * one.bias:+.1f}%", f"{100 * one.worst:+.1f}%", maybe(one.rank_correlation), memory,
            "" if one.coverage is None else percent(one.coverage, 0), style="bold" if one.name == "all" else None,
        )  # fmt: skip
    return table


def _noisy(scores: Sequence[Score]) -> list[str]:
    """Families whose measurements differ from each other so much that no prediction could rank their layouts right."""
    return [
        f"{one.name}: a run measured again differs by {100 * one.repeat_spread:.1f}%, so that a perfect prediction "
        f"would rank {one.rank_ceiling:.2f}"
        for one in scores
        if one.repeat_spread is not None and one.rank_ceiling is not None and one.rank_ceiling < RANKED_RIGHT
    ]


def _unsupported(scored: Sequence[Scored]) -> list[str]:
    """How many runs were not priced, by what they did that is not modelled."""
    why = Counter(f"{one.row.family}: {one.error}" for one in scored if one.layout is None and one.row.counts)
    return [f"{count} unsupported of {reason}" for reason, count in why.most_common()]


def _row_table(scored: list[Scored]) -> Table:
    from planner.report.format import seconds
    from planner.report.pieces import columns

    table = columns(None, *"rrrr")
    table.add_row("run", "measured", "predicted", "error", "memory", style="dim")
    for one in scored:
        measured = one.row.measured.step_s
        if one.layout is None:
            table.add_row(one.row.id, seconds(measured), f"unsupported: {one.error}", "", "")
            continue
        memory = "" if one.memory_error is None else f"{100 * one.memory_error:+.1f}%"
        predicted = seconds(one.layout.step.step_s)
        table.add_row(one.row.id, seconds(measured), predicted, f"{100 * one.step_error:+.1f}%", memory)
    return table


def _gain_table(beside: Sequence[Beside]) -> Table:
    from planner.report.pieces import columns
    from planner.validate.plans import gains

    table = columns("l", *"rrrrrrrr", gap=1)
    heads = ("family", "n", "median", "least", "no fit", "refused", "unsearched", "late", "slower")
    table.add_row(*heads, style="dim")
    for one in gains(beside):
        table.add_row(
            one.name, str(one.num_rows), _times(one.median), _times(one.least), *_counts(one),
            style="bold" if one.name == "all" else None,
        )  # fmt: skip
    return table


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def _counts(one: Gain) -> list[str]:
    numbers = (one.num_misfits, one.num_refused, one.num_not_searched, one.num_unfinished, one.num_slower)
    return [str(number) if number else "" for number in numbers]


def _beside_table(beside: Sequence[Beside]) -> Table:
    from planner.report.format import seconds
    from planner.report.pieces import columns

    table = columns(None, "r", "r", "r", None, None)
    table.add_row("run", "published", "chosen", "speed-up", "choice", "", style="dim")
    for one in beside:
        published = one.published.step.step_s
        style = "bold red" if one.note == "slower" else None
        if one.chosen is None:
            table.add_row(one.row.id, seconds(published), "", "", "", one.note)
            continue
        layout, chosen = str(one.chosen.parallelism), seconds(one.chosen.step.step_s)
        table.add_row(one.row.id, seconds(published), chosen, _times(one.speedup), layout, one.note, style=style)
    return table
