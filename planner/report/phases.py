"""The answer of `plan --phases` for a terminal: the phases, their layouts, what changes between them, the sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.answer import Interval, half_width
from planner.decide.phases import LayoutChange, PhaseAnswer, PhasesAnswer
from planner.report.format import digits, large, percent, seconds
from planner.report.labels import manner, sizes
from planner.report.months import duration
from planner.report.pieces import bullets, headed, section


def render_phases(run: PhasesAnswer) -> Group:
    """The whole answer, made for 80 columns."""
    return Group(*_sections(run))


def _sections(run: PhasesAnswer) -> Iterator[RenderableType]:
    yield Text(says(run), style="bold")
    yield section("The phases", _phases(run))
    yield section("Their layouts", _layouts(run))
    if run.changes:
        yield section("Stops between them", _stops(run))
    if kept := list(_kept(run)):
        yield section("Layouts that are kept", bullets(kept))
    if saved := dict.fromkeys(change.saved_as for change in run.changes if change.saved_as):
        names = [_short(change.before) for change in run.changes if change.saved_as]
        yield Padding(
            Text(f"To be loaded in another layout, save with {', '.join(saved)}: {', '.join(names)}."), (0, 1)
        )
    if ramps := list(_ramps(run)):
        yield section("Batches that grow", bullets(ramps))
    if packed := list(_packed(run)):
        yield section("Packed documents", bullets(packed))
    warnings = dict.fromkeys(f"{phase.name}: {warning}" for phase in run.phases for warning in phase.plan.warnings)
    if warnings:
        yield section("Warnings", bullets(warnings))
    yield section("How sure", bullets(_sure(run)))


def says(run: PhasesAnswer) -> str:
    """The sums in two sentences."""
    total, count = run.total, len(run.phases)
    cost = f"{large(total.gpu_hours)} GPU-hours"
    if total.usd is not None and total.usd_interval is not None:
        cost += f" · ${large(total.usd)} ({_span(total.usd_interval, large)})"
    if total.mwh is not None:
        cost += f" · {digits(total.mwh)} MWh"
    return (
        f"{large(total.tokens)} tokens in {count} phase{'' if count == 1 else 's'}: {digits(total.days)} days "
        f"({_span(total.days_interval, digits)}) · {cost}. "
        f"Effective {percent(total.effective_fraction)}; planned stops take {duration(total.stops_s)}."
    )


def _span(interval: Interval, write: Callable[[float], str]) -> str:
    return f"{write(interval[0])}–{write(interval[1])}"


def _phases(run: PhasesAnswer) -> Table:
    heads = ("phase", "tokens", "batch", "sequence", "step", "tokens/s", "MFU", "days", "±")
    table = headed(heads, "l", *["r"] * (len(heads) - 1), style="dim")
    for phase in run.phases:
        width = "–" if phase.days_interval is None else percent(half_width(phase.days_interval), 0)
        table.add_row(
            _short(phase.name), large(phase.tokens), _batch(phase), f"{phase.seq_length:,}", seconds(phase.step_s),
            large(phase.tokens_per_s), percent(phase.mfu), digits(phase.days), width,
        )  # fmt: skip
    return table


def _short(name: str) -> str:
    return name if len(name) <= 14 else f"{name[:13]}…"


def _batch(phase: PhaseAnswer) -> str:
    return f"…{phase.global_batch_size:,}" if phase.batches else f"{phase.global_batch_size:,}"


def _layouts(run: PhasesAnswer) -> Table:
    table = headed(("phase", "layout", ""), "l", None, "l", style="dim")
    layouts = [phase.plan.parallelism for phase in run.phases]
    differs = len({(layout.zero_stage, layout.shard_size < layout.dp * layout.cp) for layout in layouts}) > 1
    for phase, layout in zip(run.phases, layouts, strict=True):
        zero = f" · {manner(layout)[1]}" if differs else ""
        table.add_row(_short(phase.name), sizes(layout) + zero, "" if phase.layout == "first" else phase.layout)
    return table


def _days(days: float) -> str:
    return f"{digits(days)} days"


def _stops(run: PhasesAnswer) -> Table:
    """Every stop, what it is for, and what it would be to keep the layout."""
    table = headed(("stop", "for its", "takes", "to keep the layout"), "l", "l", "r", None, style="dim")
    for change in run.changes:
        names = f"{_short(change.before)} → {_short(change.after)}"
        table.add_row(names, change.why, duration(change.stop_s), _keeping(change))
    return table


def _keeping(change: LayoutChange) -> str:
    if not change.resharded:
        return "it is kept"
    if change.gains_days is None:
        return change.kept_refused or "a later phase cannot"
    saved = f" and save {duration(change.costs_days * 86_400)}" if change.costs_days else ""
    return f"would take {_days(change.gains_days)} more{saved}"


def _kept(run: PhasesAnswer) -> Iterator[str]:
    """Phases that stay in a layout that is not their best, and why."""
    for before, phase in zip(run.phases, run.phases[1:], strict=False):
        if phase.layout == "kept" and phase.own_days < phase.days:
            yield (
                f"{phase.name} keeps the layout of {before.name}: its own best, {phase.own_layout}, would save "
                f"{_days(phase.days - phase.own_days)}, less than changing to it costs"
            )


def _ramps(run: PhasesAnswer) -> Iterator[str]:
    for phase in run.phases:
        if phase.batches:
            grown = phase.batches[:-1]
            first, each = grown[0], grown[0].tokens
            by = phase.batches[1].global_batch_size - first.global_batch_size
            samples = round(sum(batch.tokens for batch in grown) / phase.seq_length)
            option = (
                f"; Megatron-LM: --rampup-batch-size {first.global_batch_size} {by} {samples} with --train-samples, "
                "which exported files leave to you"
                if phase.plan.runtime_spec.family in ("megatron", "bridge", "primus-megatron")
                else "; exported files leave it to you"
            )
            yield (
                f"{phase.name}: {first.global_batch_size:,} to {phase.global_batch_size:,} sequences by {by:,}, each "
                f"for {large(each)} tokens; steps take {seconds(first.step_s)} to {seconds(phase.step_s)}{option}"
            )


def _packed(run: PhasesAnswer) -> Iterator[str]:
    for phase in run.phases:
        if phase.plan.training.document_lengths is not None and phase.document_fraction < 1:
            yield (
                f"{phase.name}: {percent(phase.document_fraction)} of a sequence's attention is within its documents; "
                "MFU counts no more, and ranks wait for those with the longest ones"
            )


def _sure(run: PhasesAnswer) -> Iterator[str]:
    yield "Intervals hold 80%. Phases err together, by the same physics, so their ends are added up."
    yield "A stop writes the checkpoint, starts a job and reads it; batch and data alone can change without one."
    gaps = [phase.plan.search.gap for phase in run.phases if phase.plan.search is not None]
    if gaps:
        yield f"Each phase's own best layout is within {percent(max(gaps))} of the bound of its search."
