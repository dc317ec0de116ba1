"""`plan validate`: predictions beside published training runs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from planner.cli import options as o

if TYPE_CHECKING:
    from rich.table import Table

    from planner.validate.score import Outcomes, Score, Scored

RANKED_RIGHT = 0.95
"""A rank correlation that calls for no remark."""
EVIDENCE = "Evidence"
Family = Annotated[
    str | None, o.text(EVIDENCE, "--family", "NAME", "Only the runs of this source, one by one; all for every row.")
]
Regrets = Annotated[
    bool, o.text(EVIDENCE, "--regret", None, "Seconds lost by the layouts ranked first, beside the fastest measured.")
]
Add = Annotated[
    str | None, o.text(EVIDENCE, "--add", "FILE", "Keep a run of yours, which corrects plans: plan observe -o FILE.")
]
History = Annotated[
    str | None, o.text(EVIDENCE, "--history", "DIR", "Keep it there. [$PLANNER_HISTORY, else in your data folder]")
]


def validate_command(
    family: Family = None,
    regret: Regrets = False,
    add: Add = None,
    history: History = None,
    json: o.Json = False,
) -> None:
    """Hold the planner against published training runs, or against your own.

    \b
    Example:
      plan validate
      plan validate --family korthikanti
      plan validate --family ablations
      plan validate --regret
      plan validate --add observed.json
    """
    if add is not None or history is not None:
        _keep(add, history, json, alone=not (family or regret))
        return
    from planner.cli.output import dumps
    from planner.cli.validate_choices import NAME, show_pairs, show_regret
    from planner.errors import SpecError
    from planner.validate.rows import load_rows
    from planner.validate.score import evaluate_rows

    rows = load_rows()
    families = [*dict.fromkeys(row.family for row in rows), NAME]
    if family is not None and family not in (*families, "all"):
        raise SpecError(f"--family: {family!r} is unknown", f"one of {', '.join(families)}, all")
    if family == NAME:
        show_pairs(json, alone=not regret)
        return
    scored = evaluate_rows([row for row in rows if family in (None, "all", row.family)])
    if regret:
        show_regret(scored, json, each=family is not None)
    elif json:
        sys.stdout.write(dumps(_agreement_described(scored, family)))
    else:
        _show_agreement(scored, family)


def _keep(add: str | None, history: str | None, json: bool, alone: bool) -> None:
    """Keep a run; SpecError where another question is asked beside it, or none is named."""
    from planner.cli.validate_history import add_run
    from planner.errors import SpecError

    if add is None:
        raise SpecError("--history: without --add, no run is kept", "plan validate --add observed.json --history DIR")
    if not alone:
        raise SpecError("--add: stands beside other questions", "ask for them without --add")
    add_run(add, history, json)


def _agreement_described(scored: Sequence[Scored], family: str | None) -> dict[str, object]:
    """The agreement with published runs as plain data; of all families, with that of ablations and of memory."""
    from planner.cli.validate_choices import described_pairs, priced_pairs
    from planner.validate.score import (
        by_family,
        load_memory_rows,
        memory_coverage,
        memory_outcomes,
        months_of,
        production,
    )

    months = production(months_of(scored))
    answer: dict[str, object] = {
        "families": [asdict(score) for score in by_family(scored)],
        "rows": [_described(run) for run in scored],
    }
    answer |= {} if months is None else {"production": asdict(months)}
    if family:
        return answer
    outcomes = memory_outcomes(load_memory_rows(), scored)
    memory = {
        "memory_coverage": [asdict(each) for each in memory_coverage(scored)],
        "memory_outcomes": [asdict(each) for each in outcomes],
    }
    return answer | described_pairs(priced_pairs()) | memory


def _show_agreement(scored: Sequence[Scored], family: str | None) -> None:
    """Print a table of the families and what else was held against runs, or one of the runs of a family."""
    from planner.cli.output import show
    from planner.cli.validate_choices import pair_summary, priced_pairs, regret_summary
    from planner.validate.rows import HELD_OUT
    from planner.validate.score import by_family, months_of, production, says_production

    months, scores = production(months_of(scored)), by_family(scored)
    show(_family_table(scores) if family is None else _row_table(scored))
    if months is not None:
        show(says_production(months))
    if family is None:
        for line in (
            pair_summary(priced_pairs()),
            *regret_summary(scored),
            *_memory_lines(scored),
            *_noisy(scores[:-1]),
            *_unsupported(scored),
            f"held out, so that nothing is fitted to it: {', '.join(HELD_OUT)}",
        ):
            show(line)


def _described(run: Scored) -> dict[str, object]:
    row, layout = run.row, run.layout
    about = {
        "id": row.id, "source": row.source, "family": row.family, "trust": row.trust, "weight": row.weight,
        "assumed": row.assumed, "held_out": row.held_out, "measured_step_s": row.measured.step_s,
    }  # fmt: skip
    if layout is None:
        return {**about, "unsupported": str(run.error)}
    return {
        **about,
        "predicted_step_s": layout.step.step_s,
        "step_s_interval": layout.step.step_s_interval,
        "step_error": run.step_error,
        "memory_error": run.memory_error,
    }


def _family_table(scores: list[Score]) -> Table:
    from planner.report.format import percent
    from planner.report.pieces import columns

    def maybe(value: float | None, text: str = "{:.2f}") -> str:
        return "" if value is None else text.format(value)

    table = columns("l", *"rrrrrrrrr", gap=1)
    table.add_row("family", "n", "median", "p90", "mean", "bias", "worst", "rank", "memory", "in 80%", style="dim")
    for score in scores:
        memory = "" if score.memory_mean is None else percent(score.memory_mean)
        table.add_row(
            score.name, str(score.num_rows), percent(score.median), percent(score.p90), percent(score.mean),
            f"{100 * score.bias:+.1f}%", f"{100 * score.worst:+.1f}%", maybe(score.rank_correlation), memory,
            "" if score.coverage is None else percent(score.coverage, 0), style="bold" if score.name == "all" else None,
        )  # fmt: skip
    return table


def _noisy(scores: Sequence[Score]) -> list[str]:
    """Families whose measurements differ from each other so much that no prediction could rank their layouts right."""
    return [
        f"{score.name}: a run measured again differs by {100 * score.repeat_spread:.1f}%, so that a perfect prediction "
        f"would rank {score.rank_ceiling:.2f}"
        for score in scores
        if score.repeat_spread is not None and score.rank_ceiling is not None and score.rank_ceiling < RANKED_RIGHT
    ]


def _unsupported(scored: Sequence[Scored]) -> list[str]:
    """A line for each thing that runs did and that is not modelled: how many runs were not priced for it."""
    reasons = Counter(f"{run.row.family}: {run.error}" for run in scored if run.layout is None and run.row.counts)
    return [f"{count} unsupported of {reason}" for reason, count in reasons.most_common()]


def _row_table(scored: Sequence[Scored]) -> Table:
    from planner.report.format import seconds
    from planner.report.pieces import columns

    table = columns(None, *"rrrr")
    table.add_row("run", "measured", "predicted", "error", "memory", style="dim")
    for run in scored:
        measured = run.row.measured.step_s
        if run.layout is None:
            table.add_row(run.row.id, seconds(measured), f"unsupported: {run.error}", "", "")
            continue
        memory = "" if run.memory_error is None else f"{100 * run.memory_error:+.1f}%"
        predicted = seconds(run.layout.step.step_s)
        table.add_row(run.row.id, seconds(measured), predicted, f"{100 * run.step_error:+.1f}%", memory)
    return table


def _memory_lines(scored: Sequence[Scored]) -> Iterator[str]:
    """A sentence on the intervals, one on runs that ran out of memory, and one on runs that ran."""
    from planner.report.format import percent
    from planner.validate.score import load_memory_rows, memory_coverage, memory_outcomes

    for told, *kinds in filter(None, [memory_coverage(scored)]):
        each = ", ".join(f"{kind.kind} {percent(kind.coverage, 0)} of {kind.num_rows}" for kind in kinds)
        yield f"memory: {percent(told.coverage, 0)} of {told.num_rows} published peaks in their 80% interval ({each})"
    outcomes = memory_outcomes(load_memory_rows(), scored)
    yield f"ran out of memory: {_risks([outcome for outcome in outcomes if outcome.ran_out])}"
    yield f"ran: {_risks([outcome for outcome in outcomes if not outcome.ran_out])}"


def _risks(outcomes: Sequence[Outcomes]) -> str:
    """How many of some runs are given a risk above one half, in all and by family."""
    from planner.report.format import percent

    num_rows, num_likely = (sum(getattr(o, name) for o in outcomes) for name in ("num_rows", "num_likely"))
    mean = sum(o.mean_risk * o.num_rows for o in outcomes) / num_rows
    each = ", ".join(f"{o.name} {o.num_likely} of {o.num_rows}" for o in outcomes)
    return f"{num_likely} of {num_rows:,} given a risk above 50% ({each}), {percent(mean)} in the mean"
