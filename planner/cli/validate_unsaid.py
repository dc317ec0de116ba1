"""The part of `plan validate` on switches that runs do not say."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.validate.score import Scored


def show_unsaid(scored: Sequence[Scored], json: bool) -> None:
    """Print how many runs are inside their intervals, with and without what they say of their switches."""
    from planner.cli.output import dumps, show
    from planner.report.format import percent
    from planner.report.pieces import columns
    from planner.validate.unsaid import unsaid_runs

    found = unsaid_runs(scored)
    if json:
        sys.stdout.write(dumps({"unsaid": [asdict(kind) for kind in found]}))
        return
    if not found:
        show("none of these runs counts")
        return
    table = columns("l", *"rrrrr", gap=1)
    table.add_row("runs", "n", "in 80%", "unsaid", "± said", "± unsaid", style="dim")
    for kind in found:
        shares = (percent(kind.said_coverage, 0), percent(kind.coverage, 0))
        table.add_row(kind.name, str(kind.num_runs), *shares, percent(kind.said_width), percent(kind.width))
    show(table)
    show("unsaid: the same runs without what they say of their switches, inside the intervals that they then get")
