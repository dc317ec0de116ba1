"""The view-models of a plan's reports: sections of tables, and their rows, which terminal and page each draw once.

A row holds numbers with their units, and gives the texts of its columns, which every report shows alike. So do the
figures of months of training: the sustained step, what the whole run costs, and the share of it that trains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal

from planner.answer import AS_PLANNED, Goodput, Plan, PricedLayout, RobustStep, RunCost, StagePlan
from planner.record import record
from planner.report.format import (
    SURE,
    brief_digits,
    differences,
    digits,
    duration,
    ends,
    fits_with,
    gibibytes,
    large,
    manner,
    percent,
    seconds,
    sizes,
    span,
)
from planner.specs.base import Texts

Unit = Literal[
    "s", "tokens/s", "TFLOP/s", "fraction", "bytes", "days", "GPU-hours", "USD", "MWh", "1/day", "examples", "steps"
]


@record
class Figure:
    """A key figure and how it is written."""

    name: str
    unit: Unit
    brief: str
    """The value in its unit."""
    ends: str = ""
    """The interval in brackets, if there is one."""

    @property
    def text(self) -> str:
        """Both as one text."""
        return f"{self.brief} ({self.ends})" if self.ends else self.brief


@record
class Table:
    """Rows of texts; `align` says of each column l, r, n (left, on one line) or w (left, and wraps)."""

    rows: tuple[Texts, ...]
    align: str = "nw"
    heads: Texts = ()
    bars: tuple[float, ...] = ()
    """The share that a bar behind each row fills; above 1 it is too much."""
    has_narrow_heads: bool = False
    """True where headings wrap to the width of the cells below them."""
    notes: Texts = ()
    """Sentences below it."""


@record
class ReportSection:
    """A part of a report, by the name that `--show` has for it."""

    name: str
    title: str
    parts: tuple[Table | tuple[Entry, ...] | Texts, ...]
    """Tables, layouts beside each other, and lists of sentences."""


@record
class StageRow:
    """One pipeline stage, or a run of neighbouring stages that hold the same."""

    stages: tuple[StagePlan, ...]
    capacity_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Bytes that the fullest rank of these stages needs."""
        return max(stage.memory.total_bytes for stage in self.stages)

    @property
    def filled_fraction(self) -> float:
        """Share of the GPU's memory that the fullest rank needs; above 1 where it does not fit."""
        return self.peak_bytes / self.capacity_bytes

    @property
    def cells(self) -> Texts:
        """The texts of STAGE_HEADS; milliseconds are of one micro-batch, exchanges included, on the slowest stage."""
        first, last = self.stages[0], self.stages[-1]
        alone = len(self.stages) == 1
        forward_s = max(stage.forward_s + stage.forward_comm_s for stage in self.stages)
        backward_s = max(stage.backward_s + stage.backward_comm_s for stage in self.stages)
        return (
            str(first.stage) if alone else f"{first.stage}–{last.stage}",
            _layers(first) if alone else f"{first.num_layers} each",
            "+".join(first.holds).replace("embedding", "embed"),
            _recomputed(first),
            _first_to_last(first.in_flight_microbatches, last.in_flight_microbatches),
            f"{1e3 * forward_s:,.1f}",
            f"{1e3 * backward_s:,.1f}",
            self._gibibytes,
        )

    @property
    def _gibibytes(self) -> str:
        """GiB of the fullest, marked where it does not fit, and of the emptiest where that is another number."""
        most = gibibytes(self.peak_bytes)
        least = gibibytes(min(stage.memory.total_bytes for stage in self.stages))
        return most + ("!" if self.filled_fraction > 1 else "") + (f"–{least}" if least != most else "")


STAGE_HEADS = ("stage", "layers", "holds", "recompute", "in flight", "fwd ms", "bwd ms", "GiB")
RECOMPUTE_COLUMN = STAGE_HEADS.index("recompute")


def shown_cells(cells: Texts, mixes_recompute: bool) -> list[str]:
    """A row of the stages; recompute has a column only where stages mix it."""
    return [cell for column, cell in enumerate(cells) if mixes_recompute or column != RECOMPUTE_COLUMN]


@record
class StepShare:
    """One item of the step, in seconds on the rank that decides it."""

    name: str
    value_s: float
    step_s: float

    @property
    def fraction(self) -> float:
        return self.value_s / self.step_s

    @property
    def cells(self) -> tuple[str, str, str]:
        return self.name, seconds(self.value_s, self.step_s), percent(self.fraction)


@record
class Entry:
    """A layout in one line beside others: sizes, seconds, memory; how it is run and what it trades."""

    name: str
    layout: PricedLayout
    beside: PricedLayout | None = None
    """The layout that it is compared with; None for that layout itself."""

    @property
    def sizes(self) -> str:
        return sizes(self.layout.parallelism)

    @property
    def step(self) -> str:
        return seconds(self.layout.step.step_s)

    @property
    def more(self) -> str:
        """By how much its step is longer."""
        return "" if self.beside is None else f"{self.layout.step.step_s / self.beside.step.step_s - 1:+.1%}"

    @property
    def peak(self) -> str:
        """GiB of the fullest rank, marked where they do not fit."""
        return gibibytes(self.layout.worst_stage.memory.total_bytes) + ("" if self.layout.fits else "!")

    @property
    def fit(self) -> str:
        """The probability that it fits; empty where it is not known."""
        return fits_with(self.layout.oom_probability)

    @property
    def manner(self) -> str:
        """How it is run, where the layout that it is compared with is run otherwise."""
        ways = manner(self.layout.parallelism)
        if self.beside is not None:
            known = manner(self.beside.parallelism)
            ways = (*(part for part in ways if part not in known), *differences(self.layout, self.beside))
        return ", ".join(ways)

    @property
    def how(self) -> str:
        """How it is run, and what it trades."""
        return "; ".join(filter(None, (self.manner, self.layout.trade)))

    @property
    def unsure(self) -> str:
        """The probability that it fits where that is below 99%."""
        return "" if self.fit in ("", SURE) else f"fits with {self.fit}"

    @property
    def remark(self) -> str:
        """The whole entry as one line."""
        return "; ".join(filter(None, (self.how, self.unsure)))


def runs_of_stages(rows: Iterable[StageRow]) -> tuple[StageRow, ...]:
    """Neighbouring stages that hold the same, as one row each."""
    runs: list[StageRow] = []
    for row in rows:
        before, stage = runs[-1].stages[-1] if runs else None, row.stages[0]
        if before and _held(before) == _held(stage):
            runs[-1] = StageRow((*runs[-1].stages, *row.stages), row.capacity_bytes)
        else:
            runs.append(row)
    return tuple(runs)


def _held(stage: StagePlan) -> tuple[object, ...]:
    return stage.num_layers, stage.holds, stage.recompute


def _layers(stage: StagePlan) -> str:
    """`7 (0–6)`, or `8 in 4 chunks`."""
    if len(stage.chunks) > 1:
        return f"{stage.num_layers} in {len(stage.chunks)} chunks"
    first, end = stage.chunks[0] if stage.chunks else (0, 0)
    return f"{stage.num_layers} ({first}–{end - 1})" if end > first else "0"


def chunks(ranges: Sequence[tuple[int, int]]) -> str:
    """`0–6`, `3, 19, 35`, or `2–3, then every 16 on to 114–115` where as many come again and again."""
    held = [(first, end) for first, end in ranges if end > first]
    gaps = {after[0] - before[0] for before, after in pairwise(held)}
    sizes = {end - first for first, end in held}
    if len(held) > 3 and len(gaps) == len(sizes) == 1:
        return f"{_range(*held[0])}, then every {gaps.pop()} on to {_range(*held[-1])}"
    return ", ".join(_range(first, end) for first, end in held)


def _range(first: int, end: int) -> str:
    return f"{first}–{end - 1}" if end > first + 1 else str(first)


def _recomputed(stage: StagePlan) -> str:
    return ", ".join(f"{count} {mode}" for mode, count in stage.recompute.items() if count and mode != "none") or "none"


def _first_to_last(*values: float) -> str:
    """One number, or two where the first differs from the last."""
    first, last = (f"{round(value, 2):g}" for value in values)
    return first if first == last else f"{first}–{last}"


@record
class Robust:
    """Steps of layouts under assumptions: `steps_s` has a row per layout, the best first, a column per assumption."""

    assumptions: Texts
    steps_s: tuple[tuple[float, ...], ...]

    def beside_best(self, rank: int) -> tuple[tuple[float, str], ...]:
        """How much longer a layout's step is than the best's under each changed assumption, as a fraction, the most
        first, with the assumption's short name."""
        pairs = zip(self.assumptions, self.steps_s[rank], self.steps_s[0], strict=True)
        return tuple(
            sorted(((s / best_s - 1, n.partition(":")[0]) for n, s, best_s in pairs if n != AS_PLANNED), reverse=True)
        )

    @property
    def losses(self) -> tuple[float, ...]:
        """The most that each layout loses to the fastest of them, as a fraction, over all assumptions."""
        fastest_s = [min(column) for column in zip(*self.steps_s, strict=True)]
        return tuple(
            max(step_s / least_s for step_s, least_s in zip(row, fastest_s, strict=True)) - 1 for row in self.steps_s
        )

    @property
    def least(self) -> int:
        """The row that loses least; the first of those that lose the same."""
        return min(range(len(self.losses)), key=self.losses.__getitem__)

    @property
    def heads(self) -> Texts:
        """The titles of the columns: assumptions by their short names."""
        return ("", *(name.partition(":")[0] for name in self.assumptions), "loses at most")

    @property
    def rows(self) -> tuple[Texts, ...]:
        """The cells of each layout, named as among the alternatives."""
        return tuple(
            (f"{rank}." if rank else "best", *(seconds(step_s) for step_s in row), percent(self.losses[rank]))
            for rank, row in enumerate(self.steps_s)
        )

    @property
    def remarks(self) -> Texts:
        """The layout that loses least, and the meaning of each assumption."""
        meanings = (name.partition(": ") for name in self.assumptions if name != AS_PLANNED)
        return self._choice, "; ".join(f"{name}: {meaning}" for name, _, meaning in meanings)

    @property
    def in_brief(self) -> str:
        """How the fastest stands if one of the assumptions fails, in a few words."""
        most, best = percent(self.losses[self.least]), percent(self.losses[0])
        is_behind = best != percent(0.0)
        if self.least and is_behind:
            return f"if one fails {best} behind, alternative {self.least} {most}"
        if is_behind:
            return f"if one fails {best} behind"
        tried = len(self.assumptions) - 1
        return f"the fastest under {f'each of {tried} others' if tried > 1 else 'the one other'}"

    @property
    def _choice(self) -> str:
        most, best = percent(self.losses[self.least]), percent(self.losses[0])
        if self.least:
            return f"Under all of these alternative {self.least} loses at most {most}, the fastest {best}."
        if self.losses[0] > 0:
            return f"Under all of these the fastest loses least, at most {most}."
        return "The fastest stays so under each of these."


def robust_of(layout: PricedLayout) -> Robust | None:
    """The table of a plan's best layout; None where nothing was compared or nothing matters."""
    rows: list[list[RobustStep]] = []
    for step in layout.robust:
        if step.assumption == AS_PLANNED or not rows:
            rows.append([])
        rows[-1].append(step)
    named = [tuple(step.assumption for step in row) for row in rows]
    if len(set(named)) != 1 or len(named[0]) < 2:
        return None
    return Robust(named[0], tuple(tuple(step.step_s for step in row) for row in rows))


_DAY_S = 86_400.0
_MATTERS = 0.01
"""Share of the time that checkpoints take from which their source is shown."""


def sustained_figure(layout: PricedLayout) -> Figure | None:
    """The sustained step with its interval."""
    found = layout.sustained
    if found is None:
        return None
    ends = span(*found.step_s_interval, like_s=found.step_s)
    return Figure("sustained over months", "s", seconds(found.step_s), ends)


def mfu_name(plan: Plan) -> str:
    """The name of a step's FLOP/s over a peak: that of bf16 whatever products compute in, or fp16 where it has none."""
    return f"MFU of {plan.cluster.hardware.usual_dtype}"


def quoted_figures(plan: Plan) -> tuple[Figure, Figure, Figure, Figure]:
    """The step, its tokens a second and its MFU, which every report quotes, and its interval."""
    step = plan.step
    interval_s = step.step_s_interval or (step.step_s, step.step_s)
    return (
        Figure("step", "s", seconds(step.step_s)),
        Figure("tokens/s", "tokens/s", f"{step.tokens_per_s:,.0f}"),
        Figure(mfu_name(plan), "fraction", percent(step.mfu)),
        Figure("80% interval", "s", span(*interval_s, like_s=step.step_s)),
    )


def cost_figures(plan: Plan) -> tuple[Figure, ...]:
    """Days, GPU-hours, dollars and energy of the whole run, as far as they are known."""
    cost = plan.run_cost
    if cost is None:
        return ()
    figures = [
        Figure("time", "days", *_time(cost)),
        Figure("GPU time", "GPU-hours", f"{large(cost.gpu_hours)} GPU-hours"),
    ]
    if cost.usd is not None:
        figures.append(Figure("price", "USD", f"${large(cost.usd)}", ends(cost.usd_interval, large)))
    if cost.mwh is not None:
        figures.append(Figure("energy", "MWh", f"{digits(cost.mwh)} MWh"))
    return (*figures, *_example_figures(cost))


def _time(cost: RunCost) -> tuple[str, str]:
    """The days of a run and their interval; those of a run of examples that ends within two days as hours or less."""
    if cost.num_steps is None or cost.days >= 2:
        return f"{digits(cost.days)} days", ends(cost.days_interval, digits)
    return duration(cost.days * _DAY_S), ends(cost.days_interval, lambda days: duration(days * _DAY_S))


def _example_figures(cost: RunCost) -> Iterator[Figure]:
    """The examples and steps of a run that is stated in them, and what padding takes."""
    if cost.num_steps is None:
        return
    if cost.examples is not None and cost.epochs is not None:
        seen = f"{cost.examples:,} examples × {cost.epochs:g} epoch{'' if cost.epochs == 1 else 's'}"
        yield Figure("examples", "examples", seen)
    yield Figure("steps", "steps", f"{math.ceil(cost.num_steps - 1e-6):,} steps")
    if cost.padding_fraction is not None and cost.packed_days is not None:
        packed = duration(cost.packed_days * _DAY_S) if cost.packed_days < 2 else f"{digits(cost.packed_days)} days"
        padding = f"padding {percent(cost.padding_fraction)} of tokens; packed it takes {packed}"
        yield Figure("padding", "fraction", padding)


def goodput_figures(plan: Plan) -> tuple[Figure, ...]:
    """The share of the run's time that trains, and what takes the rest."""
    found = plan.goodput
    if found is None:
        return ()
    ends = "–".join(f"{100 * end:.1f}" for end in found.interval)
    saved = f"checkpoint {duration(found.checkpoint_s)} every {duration(found.checkpoint_interval_s)}"
    return (
        Figure("effective", "fraction", percent(found.effective_fraction), ends),
        Figure("interruptions", "1/day", _interruptions(found)),
        Figure("restart", "s", f"restart {duration(found.restart_s)}{_spares(found)}"),
        Figure("checkpoints", "s", saved),
        Figure("evaluation", "fraction", f"evaluation {percent(found.evaluation_fraction)}"),
    )


def _interruptions(found: Goodput) -> str:
    rate = found.failures_per_day
    if rate >= 1:
        return f"{brief_digits(rate)} interruptions a day"
    return f"an interruption every {brief_digits(1 / rate)} days" if rate else "no interruptions"


def _spares(found: Goodput) -> str:
    count = found.num_spare_nodes
    if count is None:
        return ""
    return f" with {count} spare node{'' if count == 1 else 's'}" if count else " on average, without spare nodes"


def says_sources(plan: Plan) -> list[tuple[str, str]]:
    """A subject and a source each, of the sustained step and, with a whole run, of what takes most of its time."""
    sustained, goodput = plan.best.sustained, plan.goodput
    lines = [] if sustained is None else [("sustained", sustained.source)]
    if goodput is None:
        return lines
    shown = {"failures": "failures_per_day", "restart": "restart_s"}
    if goodput.checkpoint_s > _MATTERS * goodput.checkpoint_interval_s:
        shown["checkpoint"] = "checkpoint_s"
    return lines + [(name, goodput.sources[field]) for name, field in shown.items() if field in goodput.sources]
