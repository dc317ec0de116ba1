"""The planner's own choice for the jobs that others published, beside the layouts that they ran.

A speed-up is the published layout's seconds of a step over the chosen layout's. Both are predicted in the same way, so
it says what the search gains in the model, not what was measured.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import numpy as np
from rich.table import Table

from planner.answer import Plan, PricedLayout
from planner.cli.output import dumps, progress, show
from planner.errors import PlannerError
from planner.layout.evaluate import selective_modules
from planner.layout.runs import Run
from planner.report.format import seconds
from planner.report.pieces import columns
from planner.search.case import Case
from planner.search.enumerate import enumerate_shapes, schedule_options
from planner.search.search import plan
from planner.specs.training import SearchLimits
from planner.validate.rows import PublishedRun
from planner.validate.score import Scored, weighted_quantile

TIME_LIMIT_S = 5.0
GAP = 0.01
"""A choice that is slower than a published layout by more than this is a finding, if it could have been that layout."""

Note = Literal["", "does not fit", "refused", "not searched", "out of time", "no plan", "slower"]
"""The reason why the published layout is not the choice: memory, the trainer's rules, or the limits of the search.
`slower` says that there is no such reason."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A published layout and the plan that the planner would have run instead; None if the search found none."""

    row: PublishedRun
    published: PricedLayout
    chosen: Plan | None
    note: Note

    @property
    def speedup(self) -> float | None:
        """The published layout's seconds of a step over the chosen layout's."""
        return None if self.chosen is None else self.published.step.step_s / self.chosen.step.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Speed-ups of a set of rows; median and least count the rows that fit, are not refused and have a plan."""

    name: str
    num_rows: int
    median: float | None
    """The median speed-up; a row weighs 1 / how often the same configuration was published."""
    least: float | None
    least_id: str | None
    num_misfits: int
    num_refused: int
    num_not_searched: int
    """Rows whose layout is faster than the choice but no candidate of the search, such as ZeRO over groups of ranks."""
    num_unfinished: int
    """Rows without a plan, or whose layout is faster than what was found in time."""
    num_slower: int
    """Rows that are findings: the published layout is faster, and the search could have chosen it."""


def counted(scored: Iterable[Scored]) -> list[Scored]:
    """The rows that are compared: those that count and could be priced."""
    return [answer for answer in scored if answer.row.counts and answer.layout is not None]


def plans_beside(
    scored: Sequence[Scored], done: Callable[[], None] = lambda: None, time_limit_s: float = TIME_LIMIT_S
) -> list[Beside]:
    """The choice beside each published layout, searched once per distinct job; `done` is called after every row."""
    chosen: dict[str, Plan | None] = {}
    beside = []
    for answer in counted(scored):
        run, published = answer.run, answer.layout
        assert run is not None
        assert published is not None
        job = _job(run)
        if job not in chosen:
            chosen[job] = _choice(run, time_limit_s)
        beside.append(Beside(answer.row, published, chosen[job], _note(run, published, chosen[job])))
        done()
    return beside


def gains(beside: Iterable[Beside]) -> list[Gain]:
    """Speed-ups per family, in order of appearance; the last entry is for all rows."""
    families: dict[str, list[Beside]] = defaultdict(list)
    for pair in beside:
        families[pair.row.family].append(pair)
    everything = [pair for members in families.values() for pair in members]
    return [_gain(name, members) for name, members in (*families.items(), ("all", everything)) if members]


def _gain(name: str, members: Sequence[Beside]) -> Gain:
    runnable = [(pair.speedup, pair.row) for pair in members if pair.note not in ("does not fit", "refused")]
    compared = [(speedup, row) for speedup, row in runnable if speedup is not None]
    speedups = np.array([speedup for speedup, _ in compared])
    weights = np.array([row.weight for _, row in compared])
    least, least_row = min(compared, key=lambda pair: pair[0]) if compared else (None, None)
    num_noted = partial(_num_noted, members)
    return Gain(
        name=name,
        num_rows=len(members),
        median=weighted_quantile(speedups, weights, 0.5) if compared else None,
        least=least,
        least_id=least_row.id if least_row else None,
        num_misfits=num_noted("does not fit"),
        num_refused=num_noted("refused"),
        num_not_searched=num_noted("not searched"),
        num_unfinished=num_noted("out of time", "no plan"),
        num_slower=num_noted("slower"),
    )


def _num_noted(members: Sequence[Beside], *notes: Note) -> int:
    return sum(pair.note in notes for pair in members)


def _job(run: Run) -> str:
    """A key that is the same for runs which ask the search the same question."""
    return "\n".join(spec.model_dump_json() for spec in (run.model, run.cluster, run.training, run.runtime))


def _choice(run: Run, time_limit_s: float) -> Plan | None:
    # published layouts are judged by their bytes, so are the planner's here
    limits = SearchLimits(top=1, time_limit_s=time_limit_s, memory_headroom_gib=0.0)
    try:
        return plan(run.model, run.cluster, run.training, limits=limits, runtime=run.runtime)
    except PlannerError:
        return None


def _note(run: Run, published: PricedLayout, chosen: Plan | None) -> Note:
    if not published.fits:
        return "does not fit"
    if any("refuses this layout" in warning for warning in published.warnings):
        return "refused"
    if chosen is None:
        return "no plan"
    if chosen.step.step_s <= published.step.step_s * (1 + GAP):
        return ""
    if not _searched(run, published):
        return "not searched"
    assert chosen.search is not None
    return "out of time" if chosen.search.outcome == "feasible" else "slower"


def _searched(run: Run, published: PricedLayout) -> bool:
    """True if the published layout, its split of layers aside, is a candidate of the search."""
    layout = published.parallelism
    pinned = SearchLimits(
        tp=(layout.tp,),
        cp=(layout.cp,),
        ep=(layout.ep,),
        etp=(layout.etp,),
        pp=(layout.pp,),
        micro_batch_size=(layout.micro_batch_size,),
    )
    shapes, _ = enumerate_shapes(Case(run.model, run.cluster, run.training, run.runtime, pinned))
    recompute = layout.recompute != "selective" or (
        set(layout.recompute_modules) == set(selective_modules(run.model, run.runtime))
    )
    wanted = (layout.dp, layout.zero_stage, layout.shard_size, layout.sequence_parallel, layout.vpp, layout.schedule)
    candidates = (
        (shape.dp, shape.zero_stage, shape.shard_size, bool(shape.sequence_parallel), shape.vpp, schedule)
        for index in range(np.size(shapes.tp))
        for shape, schedule in schedule_options(shapes.take(index), run.model, pinned, run.runtime)
    )
    return recompute and wanted in candidates


_log = logging.getLogger(__name__)


def searched_beside(scored: Sequence[Scored]) -> list[Beside]:
    with progress("searching", len(counted(scored))) as done:
        return plans_beside(scored, done)


def show_plans(scored: Sequence[Scored], as_json: bool, each: bool) -> None:
    """Print the choices beside the published layouts, by family or with `each` row by row."""
    beside = searched_beside(scored)
    if as_json:
        sys.stdout.write(dumps(described(beside)))
        return
    show(beside_table(beside) if each else gain_table(beside))
    point_out(beside)


def described(beside: Sequence[Beside]) -> dict[str, object]:
    return {
        "plan_families": [asdict(gain) for gain in gains(beside)],
        "plans": [
            {
                "id": pair.row.id,
                "published": pair.published.parallelism.model_dump(mode="json"),
                "published_step_s": pair.published.step.step_s,
                "chosen": None if pair.chosen is None else pair.chosen.parallelism.model_dump(mode="json"),
                "chosen_step_s": None if pair.chosen is None else pair.chosen.step.step_s,
                "outcome": None if pair.chosen is None or pair.chosen.search is None else pair.chosen.search.outcome,
                "speedup": pair.speedup,
                "note": pair.note,
            }
            for pair in beside
        ],
    }


def point_out(beside: Sequence[Beside]) -> None:
    """Warn of every published layout that the search could have chosen and that is faster than its choice."""
    for pair in beside:
        if pair.note == "slower" and pair.chosen is not None and pair.speedup is not None:
            _log.warning(
                "%s: the published layout is %.1f%% faster than the plan, %s",
                pair.row.id,
                100 * (1 / pair.speedup - 1),
                pair.chosen.parallelism,
            )


def gain_table(beside: Sequence[Beside]) -> Table:
    table = columns("lrrrrrrrr", gap=1)
    heads = ("family", "n", "median", "least", "no fit", "refused", "unsearched", "late", "slower")
    table.add_row(*heads, style="dim")
    for gain in gains(beside):
        table.add_row(
            gain.name, str(gain.num_rows), _times(gain.median), _times(gain.least), *_counts(gain),
            style="bold" if gain.name == "all" else None,
        )  # fmt: skip
    return table


def beside_table(beside: Sequence[Beside]) -> Table:
    table = columns("wrrrww")
    table.add_row("run", "published", "chosen", "speed-up", "choice", "", style="dim")
    for pair in beside:
        published = pair.published.step.step_s
        style = "bold red" if pair.note == "slower" else None
        if pair.chosen is None:
            table.add_row(pair.row.id, seconds(published), "", "", "", pair.note)
            continue
        layout, chosen = str(pair.chosen.parallelism), seconds(pair.chosen.step.step_s)
        table.add_row(pair.row.id, seconds(published), chosen, _times(pair.speedup), layout, pair.note, style=style)
    return table


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}×"


def _counts(gain: Gain) -> list[str]:
    numbers = (gain.num_misfits, gain.num_refused, gain.num_not_searched, gain.num_unfinished, gain.num_slower)
    return [str(number) if number else "" for number in numbers]
