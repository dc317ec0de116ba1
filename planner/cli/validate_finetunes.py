"""The part of `plan validate` on fine-tuning: steps, peaks and running out of memory on small boxes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from planner.validate.finetunes import Tuned

NAME = "finetune"
"""The name of this family on the command line."""


def priced_runs() -> list[Tuned]:
    """All published fine-tuning runs, priced."""
    from planner.validate.finetunes import load_finetunes, price_finetunes

    return price_finetunes(load_finetunes())


def show_runs(json: bool, alone: bool) -> None:
    """Print every run and the agreement of each source; `alone` is False where the user asks for more than that."""
    from planner.cli.output import dumps, show
    from planner.errors import SpecError

    if not alone:
        raise SpecError(
            f"--family {NAME}: has none of --plot, --plans, --regret and --unsaid",
            "leave them out, or name another family",
        )
    tuned = priced_runs()
    if json:
        sys.stdout.write(dumps(described(tuned)))
        return
    for part in (run_table(tuned), "", score_table(tuned)):
        show(part)
    for line in _left_out(tuned):
        show(line)


def run_table(tuned: Sequence[Tuned]) -> Table:
    """One run a line: measured step and peak with the errors of their predictions, and the risk beside the outcome."""
    from planner.report.format import seconds
    from planner.report.pieces import columns

    table = columns(None, *"rrrrr", gap=1)
    table.add_row("run", "step", "error", "GiB", "error", "risk", style="dim")
    for one in tuned:
        measured = one.row.measured
        if one.error is not None:
            table.add_row(one.row.id, "", "", "", "", "not priced")
            continue
        step = "" if measured.step_s is None else seconds(measured.step_s)
        peak = "" if measured.peak_memory_gib is None else f"{measured.peak_memory_gib:.1f}"
        table.add_row(one.row.id, step, _signed(one.step_error), peak, _signed(one.memory_error), _outcome(one))
    return table


def score_table(tuned: Sequence[Tuned]) -> Table:
    """A line for each source: median errors, shares inside intervals, and what was expected of runs that fit or not."""
    from planner.report.pieces import columns
    from planner.validate.finetunes import score_finetunes

    table = columns("l", *"rrrrrrrr", gap=1)
    table.add_row("source", "steps", "median", "inside", "peaks", "median", "inside", "fitted", "ran out", style="dim")
    for score in score_finetunes(tuned):
        table.add_row(
            score.name, str(score.num_steps or ""), _share(score.median_step_error), _share(score.step_coverage),
            str(score.num_peaks or ""), _share(score.median_memory_error), _share(score.memory_coverage),
            f"{score.num_ran - score.num_ran_likely_out}/{score.num_ran}" if score.num_ran else "",
            f"{score.num_out_likely_out}/{score.num_out}" if score.num_out else "",
            style="bold" if score.is_summary else None,
        )  # fmt: skip
    return table


def described(tuned: Sequence[Tuned]) -> dict[str, object]:
    """The runs and the agreement of their sources as plain data."""
    from planner.validate.finetunes import score_finetunes

    return {
        "finetune_scores": [asdict(score) for score in score_finetunes(tuned)],
        "finetunes": [_row(one) for one in tuned],
    }


def _row(one: Tuned) -> dict[str, object]:
    row = one.row
    told = {
        "id": row.id,
        "from": row.origin,
        "source": row.source,
        "address": row.address,
        "date": row.date,
        "trust": row.trust,
        "note": row.note,
        "measured": row.measured.model_dump(),
    }
    if one.layout is None:
        return {**told, "unsupported": str(one.error)}
    return {
        **told,
        "predicted_s": one.layout.step.step_s,
        "predicted_s_interval": list(one.step_s_interval),
        "step_error": one.step_error,
        "predicted_bytes": one.layout.worst_stage.memory.total_bytes,
        "memory_error": one.memory_error,
        "oom_probability": one.layout.oom_probability,
    }


def _left_out(tuned: Sequence[Tuned]) -> Iterator[str]:
    """Lines on two columns, and on why some runs were not priced."""
    yield "fitted, ran out: runs that did, those of which it was expected first"
    reasons = dict.fromkeys(str(one.error) for one in tuned if one.error is not None)
    for reason in reasons:
        yield f"{sum(str(one.error) == reason for one in tuned)} not priced: {reason}"


def _outcome(one: Tuned) -> str:
    if one.risk is None:
        return ""
    return f"{one.risk:.2f} {'out' if one.row.measured.ran_out else 'fits'}"


def _signed(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.0f}%"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"
