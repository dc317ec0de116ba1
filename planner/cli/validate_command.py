"""`plan validate`: predictions beside published runs, the choice among their layouts, and the gains of switches."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from planner.cli.options import Word

if TYPE_CHECKING:
    from rich.table import Table

    from planner.validate.choices import PricedPair, PublishedSweep, Regret
    from planner.validate.score import Outcomes, Score, Scored

RANKED_RIGHT = 0.95
"""A rank correlation that calls for no remark."""


def validate_command(
    family: Word = None,
    regret: bool = False,
    add: Word = None,
    history: Word = None,
    json: bool = False,
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
    from planner.cli.measurements import add_run
    from planner.errors import SpecError

    if add is None:
        raise SpecError("--history: without --add, no run is kept", "plan validate --add observed.json --history DIR")
    if not alone:
        raise SpecError("--add: stands beside other questions", "ask for them without --add")
    add_run(add, history, json)


def _agreement_described(scored: Sequence[Scored], family: str | None) -> dict[str, object]:
    """The agreement with published runs as plain data; of all families, with that of ablations and of memory."""
    from planner.validate.choices import harm, run_pairs
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
    pairs = priced_pairs()
    return answer | described_pairs(pairs) | {"harm": asdict(harm([*pairs, *run_pairs(scored)]))} | memory


def _show_agreement(scored: Sequence[Scored], family: str | None) -> None:
    """Print a table of the families and what else was held against runs, or one of the runs of a family."""
    from planner.cli.output import show
    from planner.validate.rows import HELD_OUT
    from planner.validate.score import GROUPS, by_family, months_of, production, says_production

    months, scores = production(months_of(scored)), by_family(scored)
    show(_family_table(scores) if family is None else _row_table(scored))
    if months is not None:
        show(says_production(months))
    if family is None:
        pairs = priced_pairs()
        for line in (
            pair_summary(pairs),
            harm_summary(pairs, scored),
            *regret_summary(scored),
            *_memory_lines(scored),
            *_noisy([score for score in scores if score.name not in (*GROUPS, "all")]),
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

    table = columns("lrrrrrrrrr", gap=1)
    table.add_row("family", "n", "median", "p90", "bias", "worst", "naive", "rank", "memory", "in 80%", style="dim")
    for score in scores:
        memory, coverage, naive = (
            "" if share is None else percent(share, digits)
            for share, digits in ((score.memory_mean, 1), (score.coverage, 0), (score.naive, 1))
        )
        table.add_row(
            score.name, str(score.num_rows), percent(score.median), percent(score.p90), f"{100 * score.bias:+.1f}%",
            f"{100 * score.worst:+.1f}%", naive, maybe(score.rank_correlation), memory, coverage,
            style="bold" if score.name == "all" else None,
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

    table = columns("wrrrr")
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

    table = columns("lrrrrrrrrr", gap=1)
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

    table = columns("rrrw")
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

    table = columns("wrrrl")
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

    table = columns("lrrrr", gap=1)
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


def harm_summary(answers: Sequence[PricedPair], scored: Sequence[Scored]) -> str:
    """One line on the switches that a plan would have chosen by itself, in all published pairs."""
    from planner.validate.choices import harm, run_pairs

    found = harm([*answers, *run_pairs(scored)])
    return (
        f"recipes: of {found.num_pairs} pairs of one switch, {found.num_chosen} are chosen by default; the worst made "
        f"the step {100 * found.worst:.1f}% longer ({found.worst_id}); {found.num_missed} that save over 5% are not"
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
