"""The answers about runs for a terminal: one of phases, a running job that goes on, and the trial to do next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.answer import Interval, Plan, half_width
from planner.decide.job import Choice, Failure, Resume
from planner.decide.next import NextAnswer, NextOutcome, days_of
from planner.decide.phases import LayoutChange, PhaseAnswer, PhasesAnswer
from planner.report.format import digits, duration, fits_with, large, manner, percent, seconds, sizes, span
from planner.report.pieces import Parts, as_group, bullets, columns, headed, section


@as_group
def render_phases(run: PhasesAnswer) -> Parts:
    """The whole answer, made for 80 columns."""
    yield Text(says_run(run), style="bold")
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


def says_run(run: PhasesAnswer) -> str:
    """The sums in two sentences."""
    total, count = run.total, len(run.phases)
    cost = f"{large(total.gpu_hours)} GPU-hours"
    if total.usd is not None and total.usd_interval is not None:
        cost += f" · ${large(total.usd)} ({_span(total.usd_interval, large)})"
    stops = f"; planned stops take {duration(total.stops_s)}" if total.stops_s else ""
    if total.mwh is not None:
        cost += f" · {digits(total.mwh)} MWh"
    return (
        f"{large(total.tokens)} tokens in {count} phase{'' if count == 1 else 's'}: {digits(total.days)} days "
        f"({_span(total.days_interval, digits)}) · {cost}. "
        f"Effective {percent(total.effective_fraction)}{stops}."
    )


def _span(interval: Interval, write: Callable[[float], str]) -> str:
    return f"{write(interval[0])}–{write(interval[1])}"


def _phases(run: PhasesAnswer) -> Table:
    heads = ("phase", "tokens", "batch", "sequence", "step", "tokens/s", "MFU", "days", "±")
    table = headed(heads, "l" + "r" * (len(heads) - 1))
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
    table = headed(("phase", "layout", ""), "lwl")
    layouts = [phase.plan.parallelism for phase in run.phases]
    differs = len({(layout.zero_stage, layout.shard_size < layout.dp * layout.cp) for layout in layouts}) > 1
    for phase, layout in zip(run.phases, layouts, strict=True):
        zero = f" · {manner(layout)[1]}" if differs else ""
        table.add_row(_short(phase.name), sizes(layout) + zero, "" if phase.layout == "first" else phase.layout)
    return table


def _days(days: float) -> str:
    return f"{digits(days)} days" if days >= 1 else duration(days * 86_400)


def _stops(run: PhasesAnswer) -> Table:
    """Every stop, what it is for, and what it would be to keep the layout."""
    table = headed(("stop", "for its", "takes", "to keep the layout"), "llrw")
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


_FAILED = {"nothing": "no node", "gpu": "a GPU", "node": "rest of a node", "switch": "a switch"}
_ANSWERS = {
    "restarts": "restarts",
    "stands_in": "spare stands in",
    "splits": "splits",
    "reshards": "reshards",
    "waits": "waits",
}
_HOUR_S = 3600.0
_SAME = 5e-4
"""Share by which two rates are shown as equal."""
_MEANINGS = (
    "pays after: the wait beyond which it loses less than waiting; loses: hours of training at the old rate, until all "
    "is as before after the usual repair"
)
_MANY = 6
"""Rows of spare nodes that are shown at most."""


@as_group
def render_resume(resume: Resume, plan: Plan) -> Parts:
    """The whole answer, made for 80 columns."""
    yield Text(says_resume(resume, plan), style="bold")
    if not resume.choices:
        return
    yield from map(Text, _advice(resume))
    meanings = [Text(_MEANINGS)] if resume.num_gpus_lost > 0 else []
    yield section("Ways to go on", Group(_table(resume), *meanings, *_notes(resume)))
    yield section("Failures of the job that goes on", _failures(resume.failures))
    yield section("Spare nodes, GPU-hours a day", Group(_spares(resume), Text(_says_spares(resume))))
    yield section("Sources", bullets(_sources(resume)))


def says_resume(resume: Resume, plan: Plan) -> str:
    """One sentence: the way to go on, and its tokens a second against those before."""
    before = resume.before
    if not resume.choices:
        return f"Nothing to do: the plan is for {before.num_gpus:,} GPUs."
    chosen = resume.chosen
    gpus = f"{before.num_gpus:,} → {resume.num_gpus:,} × {plan.cluster.hardware.name}"
    job = f"{plan.model.name}, {plan.runtime}, {gpus}"
    return f"{job}: {_VERBS[chosen.kind]}, {_change(chosen.rate_fraction)}."


_VERBS = {"split": "split", "reshard": "reshard", "stay": "stay as it is", "wait": "wait"}


def _change(fraction: float) -> str:
    if abs(fraction - 1) < _SAME:
        return "as many tokens a second as before"
    return f"{percent(abs(fraction - 1))} {'more' if fraction > 1 else 'fewer'} tokens a second than before"


def _advice(resume: Resume) -> Iterator[str]:
    """Sentences on the wait that decides, on batches nearby, on spare nodes, and on the way back."""
    chosen = resume.chosen
    if resume.num_gpus_lost > 0:
        repair = _around(resume.repair_s, resume.repair_s_interval)
        yield (
            f"Going on pays if the lost GPUs are away for over {duration(chosen.break_even_wait_s or 0.0)}; the usual "
            f"repair takes {repair}. With a spare for each lost node, all would be as before in "
            f"{duration(resume.standby_s)}."
        )
        if chosen.return_pays_s is not None:
            yield (
                f"Once they are back, returning pays if the job then runs for over {duration(chosen.return_pays_s)} "
                "without another stop."
            )
    elif chosen.break_even_wait_s is not None:
        yield f"The stop pays if the job runs for over {duration(chosen.break_even_wait_s)} after it."
    near = [choice for choice in resume.choices if choice.options]
    if near:
        best = min(near, key=lambda choice: (choice.lost_until_repair_s or 0.0, -choice.tokens_per_s))
        more = percent(best.tokens_per_s / chosen.tokens_per_s - 1)
        yield (
            f"Of other batches {' '.join(best.options)} loses least: {more} more tokens a second. It changes "
            f"convergence: {best.convergence[0]}."
        )


def _table(resume: Resume) -> Table:
    """A row for each way; those that are closed have no figures."""
    grows = resume.num_gpus_lost < 0
    heads = ("", "", "GPUs", "idle", "batch", "tokens/s", "change", "back in", "pays after", "loses")
    table = headed(heads, "llrrrrrrrr", gap=1)
    for number, choice in enumerate(resume.choices):
        mark = "→" if number == resume.recommended else " "
        cells = [f"{choice.global_batch_size:,}", large(choice.tokens_per_s)]
        lost = "–" if choice.lost_until_repair_s is None else f"{choice.lost_until_repair_s / _HOUR_S:.1f} h"
        pays = "–" if choice.break_even_wait_s is None else duration(choice.break_even_wait_s)
        back = duration(choice.back_s) if choice.back_s else "–"
        change = choice.rate_fraction - 1
        rate = f"{change:+.1%}" if abs(change) >= _SAME else "–"
        gpus = [f"{choice.num_gpus_used:,}", f"{choice.num_gpus_idle:,}"]
        style = "bold" if number == resume.recommended else ""
        table.add_row(f"{mark}{number + 1}", choice.kind, *gpus, *cells, rate, back, pays, lost, style=style)
    if grows:
        table.columns[-1].header = Text("")
    return table


def _notes(resume: Resume) -> Parts:
    """Below the table, the layout of each way, what its checkpoint needs, and what it changes."""
    yield Text("")
    table = columns("llw", gap=1)
    for number, choice in enumerate(resume.choices):
        lines = [choice.layout]
        if choice.kind == "wait":
            lines.append(f"back {duration(choice.back_s)} after the lost GPUs are")
        elif choice.kind != "stay":
            lines += list(_conditions(choice))
        table.add_row(str(number + 1), choice.kind, Text("\n".join(lines)))
    for closed in resume.closed:
        table.add_row("–", closed.kind, Text(closed.reason))
    yield table


def _conditions(choice: Choice) -> Iterator[str]:
    loads = "the checkpoint loads as it is" if choice.loads == "as_is" else "the checkpoint"
    needs = "; ".join(choice.needs)
    ready = "" if choice.ready_back_s is None else f" (back in {duration(choice.ready_back_s)} had it been saved so)"
    joint = "" if not needs else "; " if choice.loads == "as_is" else ": "
    yield f"{loads}{joint}{needs}{ready}"
    if choice.oom_probability is not None and choice.oom_probability >= 0.01:
        yield f"fits with {fits_with(choice.oom_probability)}"
    if choice.convergence:
        yield f"changes convergence: {', '.join(choice.convergence)}"
    if choice.execution:
        yield f"changes execution: {', '.join(choice.execution)}"


def _failures(failures: Iterable[Failure]) -> Table:
    heads = ("lost", "nodes", "a day", "the job", "each loses", "tokens/s then", "GPU-h a day")
    table = headed(heads, "lrrlrrr", gap=1)
    total = 0.0
    for failure in failures:
        total += failure.gpu_hours_per_day
        table.add_row(
            _FAILED[failure.taken],
            f"{failure.num_nodes:,}",
            _rate(failure.per_day),
            _ANSWERS[failure.job],
            duration(failure.lost_s),
            large(failure.tokens_per_s),
            f"{failure.gpu_hours_per_day:,.0f}",
        )
    table.add_row("together", "", _rate(sum(failure.per_day for failure in failures)), "", "", "", f"{total:,.0f}")
    return table


def _rate(per_day: float) -> str:
    return f"{per_day:.2f}" if per_day >= 0.1 else f"{per_day:.3f}"


def _spares(resume: Resume) -> Table:
    table = headed(("spare nodes", "none free", "idle", "lost", "together", ""), "rrrrrl", gap=1)
    for number in _shown(resume):
        row = resume.spares[number]
        none_free = "under 0.1%" if row.none_free_fraction < 1e-3 else percent(row.none_free_fraction)
        table.add_row(
            f"{number:,}",
            none_free,
            f"{row.idle_gpu_hours:,.0f}",
            f"{row.lost_gpu_hours:,.0f}",
            f"{row.gpu_hours:,.0f}",
            ", ".join(_marks(number, resume)),
            style="bold" if number == resume.num_spare_nodes_cheapest else "",
        )
    return table


def _shown(resume: Resume) -> list[int]:
    """The numbers of spare nodes that tell most: none, one, those advised, cheapest and idle, and one more each."""
    told = (resume.num_spare_nodes_cheapest, resume.num_spare_nodes_advised, resume.num_idle_nodes)
    numbers = {0, 1, *(n for n in told if n is not None), (resume.num_spare_nodes_cheapest or 0) + 1}
    return sorted(number for number in numbers if number < len(resume.spares))[:_MANY]


def _marks(number: int, resume: Resume) -> Iterator[str]:
    if number == resume.num_spare_nodes_cheapest:
        yield "cheapest"
    if number == resume.num_spare_nodes_advised:
        yield "one is free in 99%"
    if number and number == resume.num_idle_nodes:
        yield "idle anyway"


def _says_spares(resume: Resume) -> str:
    cheapest, idle = resume.num_spare_nodes_cheapest or 0, resume.num_idle_nodes
    if idle and cheapest <= idle:
        return f"The {idle:,} idle node{'s' if idle > 1 else ''} can stand in; more spare nodes do not pay."
    if not cheapest:
        return "No spare node pays."
    return f"{cheapest:,} spare node{'s' if cheapest > 1 else ''} pay{'' if cheapest > 1 else 's'}."


def _sources(resume: Resume) -> Iterator[str]:
    row = resume.checkpoint
    yield f"checkpoint ({row.format}): {row.source}"
    if row.rewritten is not None:
        yield f"{row.rewritten.says}: {row.rewritten.source}"
    told: dict[str, list[str]] = {}
    for name, source in resume.sources.items():
        told.setdefault(source, []).append(_NAMES.get(name, name))
    yield from (f"{', '.join(names)}: {source}" for source, names in told.items())


_NAMES = {
    "detection_s": "detection",
    "restart_s": "start",
    "standby_restart_s": "start of a spare",
    "repair_s": "repair",
    "node_loss_fraction": "lost nodes",
    "storage_gb_per_s": "storage",
    "failures_per_1000_gpu_days": "failures",
}


def _around(value_s: float, interval: Interval) -> str:
    return f"{duration(value_s)} ({duration(interval[0])} to {duration(interval[1])})"


MOST_TRIALS = 8
"""Rows of layouts that a trial could run."""


def render_next(answer: NextAnswer) -> Group:
    """The trial to do next, what it decides, and what is known of the layouts."""
    known = f"{answer.num_measured} measured" if answer.num_measured else "none measured"
    head = f"next  {answer.proposed}" if answer.proposed else f"stop  train with {answer.favourite}"
    parts: list[RenderableType] = [Text(head, style="bold"), Padding(Text(answer.says), (0, 0, 0, 6))]
    if len(answer.outcomes) > 1:
        parts.append(section("What it decides", bullets(map(_outcome, answer.outcomes))))
    elif answer.outcomes:
        parts.append(section("What it decides", "Nothing by itself: what is run next is held against it."))
    table = headed(("", "layout", "step", "80% interval", "fastest", "saves"), "rwrrrr")
    for one in answer.layouts[:MOST_TRIALS]:
        step = "measured" if one.measured_s else percent(one.saved_fraction, 2)
        low, high = one.expected_s_interval
        ends = span(low, high, one.expected_s)
        table.add_row(str(one.number), one.name, seconds(one.expected_s), ends, percent(one.fastest_fraction, 0), step)
    parts.append(
        section(
            f"Layouts: {len(answer.layouts)}, {known}; what a trial saves of {days_of(answer.run_days)}",
            table,
        )
    )
    return Group(*parts)


def _outcome(outcome: NextOutcome) -> str:
    low, high = outcome.from_s, outcome.to_s
    where = f"above {seconds(low)}" if high is None else f"{seconds(low)} to {seconds(high)}"
    where = where if low or high is None else f"below {seconds(high)}"
    return f"{where} ({percent(outcome.probability_fraction, 0)}): train with {outcome.layout}"
