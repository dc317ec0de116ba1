"""The answers of `plan validate`: predictions beside published runs, and the runs that a user keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from planner.observe import VARIABLE, default_folder
from planner.observe.history import KeptPrice, KernelPosterior
from planner.report.format import percent, seconds
from planner.report.pieces import Parts, headed
from planner.specs.base import Fields, Texts
from planner.specs.reading import printable
from planner.validate.choices import (
    PricedPair,
    PublishedSweep,
    Regret,
    harm,
    regrets,
    run_pairs,
    scores,
    spreads,
    sweeps,
    switch_of,
)
from planner.validate.rows import HELD_OUT
from planner.validate.score import (
    GROUPS,
    Outcomes,
    Score,
    Scored,
    by_family,
    load_memory_rows,
    memory_coverage,
    memory_outcomes,
    months_of,
    production,
    says_production,
)

RANKED_RIGHT = 0.95
"""A rank correlation that calls for no remark."""
PAIRS = "ablations"
"""The name of the published pairs on the command line."""


def agreement_json(scored: Sequence[Scored], pairs: Sequence[PricedPair]) -> dict[str, object]:
    """The agreement with published runs as plain data; of all families, with that of their pairs and of memory."""
    months = production(months_of(scored))
    answer: dict[str, object] = {"families": _plain(by_family(scored)), "rows": [_described(run) for run in scored]}
    answer |= {} if months is None else {"production": asdict(months)}
    if not pairs:
        return answer
    return answer | pairs_json(pairs) | {
        "harm": asdict(harm([*pairs, *run_pairs(scored)])),
        "memory_coverage": _plain(memory_coverage(scored)),
        "memory_outcomes": _plain(memory_outcomes(load_memory_rows(), scored)),
    }  # fmt: skip


def render_agreement(scored: Sequence[Scored], pairs: Sequence[PricedPair]) -> Parts:
    """A table of the families and what else was held against runs; without pairs, one of the runs of a family."""
    months, families = production(months_of(scored)), by_family(scored)
    yield _family_table(families) if pairs else _row_table(scored)
    if months is not None:
        yield says_production(months)
    if pairs:
        yield _says_pairs(pairs)
        yield _says_harm(pairs, scored)
        yield from _says_regret(scored)
        yield from _says_memory(scored)
        yield from _noisy([score for score in families if score.name not in (*GROUPS, "all")])
        reasons = Counter(f"{run.row.family}: {run.error}" for run in scored if run.layout is None and run.row.counts)
        yield from (f"{count} unsupported of {reason}" for reason, count in reasons.most_common())
        yield f"held out, so that nothing is fitted to it: {', '.join(HELD_OUT)}"


def _plain(scored: Sequence[Any]) -> list[Fields]:
    return [asdict(each) for each in scored]


def _described(run: Scored) -> dict[str, object]:
    row, layout = run.row, run.layout
    about = {
        "id": row.id, "source": row.source, "family": row.family, "trust": row.trust, "weight": row.weight,
        "assumed": row.assumed, "held_out": row.held_out, "measured_step_s": row.measured.step_s,
    }  # fmt: skip
    if layout is None:
        return {**about, "unsupported": str(run.error)}
    return {
        **about, "predicted_step_s": layout.step.step_s, "step_s_interval": layout.step.step_s_interval,
        "step_error": run.step_error, "memory_error": run.memory_error,
    }  # fmt: skip


def _known(value: float | None, write: Callable[[float], str] = percent) -> str:
    return "" if value is None else write(value)


def _signed(share: float | None) -> str:
    return _known(share, lambda value: f"{100 * value:+.1f}%")


def _family_table(families: Sequence[Score]) -> Table:
    heads = ("family", "n", "median", "p90", "bias", "worst", "naive", "rank", "memory", "in 80%")
    rows = (
        (
            score.name, str(score.num_rows), percent(score.median), percent(score.p90), _signed(score.bias),
            _signed(score.worst), _known(score.naive), _known(score.rank_correlation, "{:.2f}".format),
            _known(score.memory_mean), _known(score.coverage, "{:.0%}".format),
        )
        for score in families
    )  # fmt: skip
    return headed(heads, "lrrrrrrrrr", rows, 1, _of_all(families))


def _of_all(scored: Sequence[Any]) -> set[int]:
    """The numbers of the rows of all families or pairs."""
    return {number for number, score in enumerate(scored) if score.name.startswith("all")}


def _noisy(families: Sequence[Score]) -> Iterator[str]:
    """Families whose measurements differ from each other so much that no prediction could rank their layouts right."""
    for score in families:
        if score.repeat_spread is not None and score.rank_ceiling is not None and score.rank_ceiling < RANKED_RIGHT:
            yield (
                f"{score.name}: a run measured again differs by {percent(score.repeat_spread)}, so that a perfect "
                f"prediction would rank {score.rank_ceiling:.2f}"
            )


def _row_table(scored: Sequence[Scored]) -> Table:
    rows = (
        (run.row.id, seconds(run.row.measured.step_s), f"unsupported: {run.error}", "", "")
        if run.layout is None else
        (run.row.id, seconds(run.row.measured.step_s), seconds(run.layout.step.step_s), _signed(run.step_error),
         _signed(run.memory_error))
        for run in scored
    )  # fmt: skip
    return headed(("run", "measured", "predicted", "error", "memory"), "wrrrr", rows)


def _says_memory(scored: Sequence[Scored]) -> Iterator[str]:
    """A sentence on the intervals, one on runs that ran out of memory, and one on runs that ran."""
    for told, *kinds in filter(None, [memory_coverage(scored)]):
        each = ", ".join(f"{kind.kind} {percent(kind.coverage, 0)} of {kind.num_rows}" for kind in kinds)
        yield f"memory: {percent(told.coverage, 0)} of {told.num_rows} published peaks in their 80% interval ({each})"
    outcomes = memory_outcomes(load_memory_rows(), scored)
    for name, ran_out in (("ran out of memory", True), ("ran", False)):
        yield f"{name}: {_risks([outcome for outcome in outcomes if outcome.ran_out == ran_out])}"


def _risks(outcomes: Sequence[Outcomes]) -> str:
    """How many of some runs are given a risk above one half, in all and by family."""
    num_rows, num_likely = sum(one.num_rows for one in outcomes), sum(one.num_likely for one in outcomes)
    mean = sum(one.mean_risk * one.num_rows for one in outcomes) / num_rows
    each = ", ".join(f"{one.name} {one.num_likely} of {one.num_rows}" for one in outcomes)
    return f"{num_likely} of {num_rows:,} given a risk above 50% ({each}), {percent(mean)} in the mean"


def regret_json(scored: Sequence[Scored]) -> Mapping[str, object]:
    """The regret of every family and of every sweep as plain data."""
    found, totals = _regrets(scored)
    return {"regret": _plain(totals), "sweeps": [_sweep_json(sweep) for sweep in found]}


def render_regret(scored: Sequence[Scored], each: bool) -> Parts:
    """The regret of every family, or with `each` of every sweep."""
    found, totals = _regrets(scored)
    if not found:
        yield "no job of these runs was measured in more than one layout"
    elif each:
        yield sweep_table(found)
    else:
        yield _regret_table(totals)
        yield from remarks(totals)


def _regrets(scored: Sequence[Scored]) -> tuple[list[PublishedSweep], list[Regret]]:
    found = sweeps(scored)
    return found, regrets(found, spreads(answer.row for answer in scored))


def _sweep_json(sweep: PublishedSweep) -> dict[str, object]:
    steps = zip(sweep.ids, sweep.predicted_s.tolist(), sweep.measured_s.tolist(), strict=True)
    return {
        "family": sweep.family, "regret": sweep.regret, "random_regret": sweep.random_regret,
        "chosen_id": sweep.ids[sweep.chosen], "best_id": sweep.ids[sweep.best],
        "layouts": [dict(zip(("id", "predicted_s", "measured_s"), step, strict=True)) for step in steps],
    }  # fmt: skip


def _regret_table(totals: Sequence[Regret]) -> Table:
    """A line for each family; the last one is of all sweeps."""
    heads = ("family", "n", "runs", "mean", "median", "p90", "worst", "random", "noise", "perfect")
    rows = (
        (
            score.name, str(score.num_sweeps), str(score.num_layouts), *map(_fine, (
                score.mean, score.median, score.p90, score.worst, score.random_mean, score.spread, score.noise_mean,
            )),
        )
        for score in totals
    )  # fmt: skip
    return headed(heads, "lrrrrrrrrr", rows, 1, _of_all(totals))


def sweep_table(found: Sequence[PublishedSweep]) -> Table:
    """A line for each sweep, the largest regret first: the layout that is ranked first, and the one measured best."""
    rows = (
        (
            _fine(sweep.regret) if place == sweep.chosen else "", str(len(sweep.ids)) if place == sweep.chosen else "",
            seconds(float(sweep.measured_s[place])), Text(sweep.ids[place], overflow="fold"),
        )
        for sweep in sorted(found, key=lambda sweep: -sweep.regret)
        for place in dict.fromkeys((sweep.chosen, sweep.best))
    )  # fmt: skip
    return headed(("regret", "runs", "took", "ranked first, then measured best"), "rrrw", rows)


def remarks(totals: Sequence[Regret]) -> Iterator[str]:
    """The words for the columns, the worst sweep, and the families whose noise decides."""
    last = totals[-1]
    yield (
        "n jobs of which a source measured several layouts (runs); mean to worst: how much longer the one ranked first "
        "took than the fastest; random: one drawn by chance; noise: how far the same run is from itself; perfect: what "
        "a perfect prediction would lose to that noise"
    )
    if last.worst > 0:
        yield f"worst: {last.worst_id} was chosen, {last.best_id} was fastest"
    if noisy := [f"{score.name} ({_fine(score.spread)})" for score in totals if score.is_noisy]:
        yield f"noisy: {', '.join(noisy)}"


def _says_regret(scored: Sequence[Scored]) -> Iterator[str]:
    """One line on all sweeps, where there are any."""
    for total in regrets(sweeps(scored), {})[-1:]:
        yield (
            f"regret: in {total.num_sweeps} jobs that were measured in several layouts, the one ranked first took "
            f"{_fine(total.mean)} longer than the fastest, one drawn by chance {_fine(total.random_mean)} "
            "(--regret lists them)"
        )


def _fine(value: float | None) -> str:
    """A share with the digits that tell two good scores apart; empty where it is not known."""
    return _known(value, lambda share: f"{100 * share:.{2 if share < 0.1 else 0}f}%")


def render_pairs(answers: Sequence[PricedPair]) -> Parts:
    """Every pair, and the scores of each switch."""
    yield headed(("pair", "measured", "predicted", "error", ""), "wrrrl", map(_pair, answers))
    yield ""
    found = scores(answers)
    rows = (
        (score.name, str(score.num_pairs), f"{score.sign_right:.0%}", f"{100 * score.median_error:.1f}",
         _points(score.worst_error))
        for score in found
    )  # fmt: skip
    yield headed(("switch", "pairs", "sign right", "median error", "worst"), "lrrrr", rows, 1, _of_all(found))


def _pair(answer: PricedPair) -> Texts:
    """Measured and predicted gain, their difference in points, and whether the sign is right."""
    measured = answer.pair.id, _points(answer.measured)
    if answer.error is not None:
        return *measured, f"unsupported: {answer.error}", "", ""
    wrong = "" if answer.sign_right else "wrong sign"
    return *measured, _points(answer.predicted), _points(answer.gain_error), wrong


def _says_pairs(answers: Sequence[PricedPair]) -> str:
    """One line on all pairs in which a single switch differs."""
    found = scores(answers)[-1]
    return (
        f"{PAIRS}: of {found.num_pairs} published pairs that differ in one switch, {found.sign_right:.0%} have the "
        f"sign predicted, with a median error of {100 * found.median_error:.1f} points (--family {PAIRS} lists them)"
    )


def _says_harm(answers: Sequence[PricedPair], scored: Sequence[Scored]) -> str:
    """One line on the switches that a plan would have chosen by itself, in all published pairs."""
    found = harm([*answers, *run_pairs(scored)])
    return (
        f"recipes: of {found.num_pairs} pairs of one switch, {found.num_chosen} are chosen by default; the worst made "
        f"the step {percent(found.worst)} longer ({found.worst_id}); {found.num_missed} that save over 5% are not"
    )


def pairs_json(answers: Sequence[PricedPair]) -> dict[str, object]:
    """The pairs and their scores as plain data."""
    return {"ablation_scores": _plain(scores(answers)), "ablations": [_pair_json(answer) for answer in answers]}


def _pair_json(answer: PricedPair) -> dict[str, object]:
    pair = answer.pair
    about = {
        "id": pair.id, "source": pair.source, "switch": switch_of(pair), "bundle": pair.bundle, "note": pair.note,
        "measured_gain": answer.measured,
    }  # fmt: skip
    if answer.error is not None:
        return {**about, "unsupported": str(answer.error)}
    return {
        **about, "predicted_gain": answer.predicted, "gain_error": answer.gain_error, "sign_right": answer.sign_right,
        "predicted_s": {"off": answer.off_s, "on": answer.on_s},
    }  # fmt: skip


def _points(gain: float) -> str:
    return f"{100 * gain:+.1f}"


def kept_json(
    folder: Path, name: str, is_new: bool, belongs: str, kept: Sequence[KeptPrice], found: KernelPosterior
) -> Fields:
    """A run that is kept now, and those of its cluster and trainer, as plain data."""
    runs = [
        {
            "file": run.file, "source": run.source, "job": run.job, "measured_step_s": run.measured_s,
            "predicted_step_s": run.predicted_s, "kernels_log_factor": run.log_kernels,
        }
        for run in kept
    ]  # fmt: skip
    correction = {
        "kernels_factor": found.factor, "kernels_factor_interval": found.factor_interval,
        "step_width": found.step_width, "num_runs": found.num_runs, "num_jobs": found.num_jobs,
    }  # fmt: skip
    return {
        "history": str(folder), "added": name, "is_new": is_new, "cluster_and_trainer": belongs, "runs": runs,
        "correction": correction,
    }  # fmt: skip


def render_kept(
    folder: Path, name: str, is_new: bool, belongs: str, kept: Sequence[KeptPrice], found: KernelPosterior
) -> Parts:
    """The runs of a cluster and trainer that are kept, the one added now in bold, and what they ask for together."""
    ordered = sorted(kept, key=lambda run: (run.job, run.source, run.file))
    rows = (
        (f"{printable(run.source, 40)}: {printable(run.job)}", seconds(run.measured_s), seconds(run.predicted_s),
         _signed(run.predicted_s / run.measured_s - 1))
        for run in ordered
    )  # fmt: skip
    added = {number for number, run in enumerate(ordered) if run.file == name}
    yield headed(("run", "measured", "predicted", "error"), "wrrr", rows, bold=added)
    yield ""
    low, high = found.factor_interval
    runs, jobs = (
        f"{n} {what}{'' if n == 1 else 's'}" for n, what in ((found.num_runs, "run"), (found.num_jobs, "job"))
    )
    scatter = f", whose jobs lie {found.scatter:.1f} times as far apart as published ones" if found.scatter > 1 else ""
    yield f"{belongs}: kernels take × {found.factor:.3f} ({low:.3f} to {high:.3f}) by {runs} of {jobs}{scatter}"
    if folder == default_folder():
        within = f"a dense step within ± {found.step_width:.0%}"
        yield f"every later plan of such a job takes it, {within}; --no-history does not"
    else:
        yield f"plans of such a job take it where {VARIABLE}={printable(str(folder))}"
    yield f"{'kept as' if is_new else 'was there already:'} {printable(str(folder / name))}; rm forgets it"
