"""The answers of `plan validate`: predictions beside published runs, and the runs that a user keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from planner.observe import VARIABLE, default_folder
from planner.observe.history import KeptPrice, KernelPosterior
from planner.report.format import percent, sentences
from planner.report.pieces import Parts, listed
from planner.specs.base import Fields
from planner.specs.reading import printable
from planner.validate.choices import (
    PricedPair,
    PublishedSweep,
    Regret,
    harm,
    regrets,
    run_pairs,
    scores,
    sweeps,
    switch_of,
)
from planner.validate.rows import HELD_OUT
from planner.validate.score import (
    Scored,
    by_family,
    load_memory_rows,
    memory_coverage,
    memory_outcomes,
    months_of,
    production,
    says_production,
)

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
    if pairs:
        yield listed("families", families, 1, _of_all(families), signed=_signed, known=_known)
    else:
        yield listed("published_runs", scored, signed=_signed)
    if months is not None:
        yield says_production(months)
    if pairs:
        found = harm([*pairs, *run_pairs(scored)])
        yield from sentences("agreement_pairs", pairs=PAIRS, all=scores(pairs)[-1], harm=found)
        for total in regrets(sweeps(scored))[-1:]:
            yield from sentences("agreement_regret", total=total, fine=_fine)
        yield from _says_memory(scored)
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


def _of_all(scored: Sequence[Any]) -> set[int]:
    """The numbers of the rows of all families or pairs."""
    return {number for number, score in enumerate(scored) if score.name.startswith("all")}


def _says_memory(scored: Sequence[Scored]) -> Iterator[str]:
    """A sentence on the intervals, one on runs that ran out of memory, and one on runs that ran."""
    for told, *kinds in filter(None, [memory_coverage(scored)]):
        yield from sentences("agreement_memory", told=told, kinds=kinds)
    outcomes = memory_outcomes(load_memory_rows(), scored)
    for name, ran_out in (("ran out of memory", True), ("ran", False)):
        found = [outcome for outcome in outcomes if outcome.ran_out == ran_out]
        num_rows = sum(one.num_rows for one in found)
        yield from sentences("agreement_risks", name=name, found=found, num_rows=num_rows)


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
        yield listed("regret", totals, 1, _of_all(totals), fine=_fine)
        yield from remarks(totals)


def _regrets(scored: Sequence[Scored]) -> tuple[list[PublishedSweep], list[Regret]]:
    found = sweeps(scored)
    return found, regrets(found)


def _sweep_json(sweep: PublishedSweep) -> dict[str, object]:
    steps = zip(sweep.ids, sweep.predicted_s.tolist(), sweep.measured_s.tolist(), strict=True)
    return {
        "family": sweep.family, "regret": sweep.regret, "random_regret": sweep.random_regret,
        "chosen_id": sweep.ids[sweep.chosen], "best_id": sweep.ids[sweep.best],
        "layouts": [dict(zip(("id", "predicted_s", "measured_s"), step, strict=True)) for step in steps],
    }  # fmt: skip


def sweep_table(found: Sequence[PublishedSweep]) -> Table:
    """A line for each sweep, the largest regret first: the layout that is ranked first, and the one measured best."""
    places = (
        (sweep, place)
        for sweep in sorted(found, key=lambda sweep: -sweep.regret)
        for place in dict.fromkeys((sweep.chosen, sweep.best))
    )
    return listed("sweep_regret", places, fine=_fine, fold=partial(Text, overflow="fold"))


def remarks(totals: Sequence[Regret]) -> Iterator[str]:
    """The words for the columns, and the worst sweep."""
    return sentences("regret_remarks", last=totals[-1])


def _fine(value: float | None) -> str:
    """A share with the digits that tell two good scores apart; empty where it is not known."""
    return _known(value, lambda share: f"{100 * share:.{2 if share < 0.1 else 0}f}%")


def render_pairs(answers: Sequence[PricedPair]) -> Parts:
    """Every pair, and the scores of each switch."""
    yield listed("pairs", answers, points=_points)
    yield ""
    found = scores(answers)
    yield listed("switches", found, 1, _of_all(found), points=_points)


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
    added = {number for number, run in enumerate(ordered) if run.file == name}
    yield listed("kept_runs", ordered, bold=added, printable=printable, signed=_signed)
    yield ""
    yield from sentences(
        "kept_correction", belongs=belongs, found=found, is_default=folder == default_folder(), variable=VARIABLE,
        folder=printable(str(folder)), is_new=is_new, path=printable(str(folder / name)),
    )  # fmt: skip
