"""`plan validate`: predictions beside published training runs."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from planner.cli import options as o

if TYPE_CHECKING:
    from rich.table import Table

    from planner.validate.score import Score, Scored

EVIDENCE = "Evidence"
Family = Annotated[
    str | None, o.text(EVIDENCE, "--family", "NAME", "Only the runs of this source, one by one; all for every row.")
]


def validate_command(family: Family = None, json: o.Json = False) -> None:
    """Hold the planner against published training runs.

    \b
    Example:
      plan validate
      plan validate --family korthikanti
    """
    from planner.cli.output import dumps, show
    from planner.errors import SpecError
    from planner.validate.rows import load_rows
    from planner.validate.score import by_family, evaluate_rows

    rows = load_rows()
    families = list(dict.fromkeys(row.family for row in rows))
    if family is not None and family not in (*families, "all"):
        raise SpecError(f"--family: {family!r} is unknown", f"one of {', '.join(families)}, all")
    scored = evaluate_rows([row for row in rows if family in (None, "all", row.family)])
    scores = by_family(scored)
    if json:
        listed = [_described(one) for one in scored]
        sys.stdout.write(dumps({"families": [asdict(one) for one in scores], "rows": listed}))
    elif family is not None:
        show(_row_table(scored))
    else:
        show(_family_table(scores))


def _described(one: Scored) -> dict[str, object]:
    row, layout = one.row, one.layout
    about = {
        "id": row.id, "source": row.source, "family": row.family, "trust": row.trust, "weight": row.weight,
        "assumed": row.assumed, "measured_step_s": row.measured.step_s,
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
