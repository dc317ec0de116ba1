"""The answers about runs for a terminal: one of phases, a running job that goes on, and the trial to do next."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.answer import Plan
from planner.decide.job import Resume
from planner.decide.next import NextAnswer, NextOutcome, days_of
from planner.decide.phases import PhasesAnswer
from planner.report.format import sentence, sentences
from planner.report.pieces import Parts, as_group, bullets, columns, listed, section
from planner.specs.base import grouped


@as_group
def render_phases(run: PhasesAnswer) -> Parts:
    """The whole answer, made for 80 columns."""
    yield Text(says_run(run), style="bold")
    yield section("The phases", listed("phases", run.phases, short=_short))
    layouts = [phase.plan.parallelism for phase in run.phases]
    differs = len({(layout.zero_stage, layout.shard_size < layout.dp * layout.cp) for layout in layouts}) > 1
    yield section("Their layouts", listed("phase_layouts", run.phases, short=_short, zero_differs=differs))
    if run.changes:
        yield section("Stops between them", listed("phase_stops", run.changes, short=_short))
    if kept := list(_kept(run)):
        yield section("Layouts that are kept", bullets(kept))
    if saved := dict.fromkeys(change.saved_as for change in run.changes if change.saved_as):
        names = ", ".join(_short(change.before) for change in run.changes if change.saved_as)
        yield Padding(Text(f"To be loaded in another layout, save with {', '.join(saved)}: {names}."), (0, 1))
    if ramps := list(_ramps(run)):
        yield section("Batches that grow", bullets(ramps))
    if packed := [says for phase in run.phases for says in sentences("phase_documents", phase=phase)]:
        yield section("Packed documents", bullets(packed))
    warnings = dict.fromkeys(f"{phase.name}: {warning}" for phase in run.phases for warning in phase.plan.warnings)
    if warnings:
        yield section("Warnings", bullets(warnings))
    gaps = [phase.plan.search.gap for phase in run.phases if phase.plan.search is not None]
    yield section("How sure", bullets(sentences("phases_sure", gaps=gaps)))


def says_run(run: PhasesAnswer) -> str:
    """Tokens, days, cost and energy of all phases, in two sentences."""
    return sentence("phases_in_all", run=run, total=run.total)


def _short(name: str) -> str:
    return name if len(name) <= 14 else f"{name[:13]}…"


def _kept(run: PhasesAnswer) -> Iterator[str]:
    """Phases that stay in a layout that is not their best, and why."""
    for before, phase in zip(run.phases, run.phases[1:], strict=False):
        yield from sentences("phase_kept", before=before, phase=phase)


def _ramps(run: PhasesAnswer) -> Iterator[str]:
    for phase in run.phases:
        if phase.batches:
            first, second = phase.batches[:2]
            samples = round(sum(batch.tokens for batch in phase.batches[:-1]) / phase.seq_length)
            yield from sentences(
                "phase_ramp", phase=phase, first=first, by=second.global_batch_size - first.global_batch_size,
                samples=samples, is_megatron=phase.plan.runtime_spec.family in _RAMPING,
            )  # fmt: skip


_RAMPING = ("megatron", "bridge", "primus-megatron")
"""Trainers whose batch grows by --rampup-batch-size."""
_SAME = 5e-4
"""Share by which two rates are shown as equal."""
_MEANINGS = (
    "pays after: the wait beyond which it loses less than waiting; loses: hours of training at the old rate, until all "
    "is as before after the usual repair"
)
_MANY = 6
"""Rows of spare nodes that are shown at most."""
_VERBS = {"split": "split", "reshard": "reshard", "stay": "stay as it is", "wait": "wait"}
_FAILED = {"nothing": "no node", "gpu": "a GPU", "node": "rest of a node", "switch": "a switch"}
_ANSWERS = {"stands_in": "spare stands in"}
_NAMES = {
    "detection_s": "detection", "restart_s": "start", "standby_restart_s": "start of a spare", "repair_s": "repair",
    "node_loss_fraction": "lost nodes", "storage_gb_per_s": "storage", "failures_per_1000_gpu_days": "failures",
}  # fmt: skip


@as_group
def render_resume(resume: Resume, plan: Plan) -> Parts:
    """The whole answer, made for 80 columns."""
    yield Text(says_resume(resume, plan), style="bold")
    if not resume.choices:
        return
    yield from map(Text, _advice(resume))
    meanings = [Text(_MEANINGS)] if resume.num_gpus_lost > 0 else []
    yield section("Ways to go on", Group(_ways(resume), *meanings, "", _notes(resume)))
    yield section("Failures of the job that goes on", _failures(resume))
    yield section("Spare nodes, GPU-hours a day", Group(_spares(resume), Text(_says_spares(resume))))
    yield section("Sources", bullets(_sources(resume)))


def says_resume(resume: Resume, plan: Plan) -> str:
    """One sentence: the way to go on, and its tokens a second against those before."""
    return sentence("resume", resume=resume, before=resume.before, plan=plan, verbs=_VERBS, change=_change)


def _change(fraction: float) -> str:
    return sentence("resume_rate", fraction=fraction, same=_SAME)


def _advice(resume: Resume) -> Iterator[str]:
    """Sentences on the wait that decides, on batches nearby, on spare nodes, and on the way back."""
    others = (choice for choice in resume.choices if choice.options)
    near = min(others, key=lambda choice: (choice.lost_until_repair_s or 0.0, -choice.tokens_per_s), default=None)
    return sentences("resume_advice", resume=resume, chosen=resume.chosen, near=near)


def _ways(resume: Resume) -> Table:
    """A row for each way; those that are closed have no figures."""
    ways = enumerate(resume.choices)
    table = listed("resume_ways", ways, 1, {resume.recommended}, resume=resume, same=_SAME)
    if resume.num_gpus_lost < 0:
        table.columns[-1].header = Text("")
    return table


def _notes(resume: Resume) -> Table:
    """Below the table, the layout of each way, what its checkpoint needs, and what it changes."""
    table = columns("llw", gap=1)
    for number, choice in enumerate(resume.choices, 1):
        about = sentences("resume_way", choice=choice, moving=("split", "reshard"), as_is=choice.loads == "as_is")
        table.add_row(str(number), choice.kind, Text("\n".join(about)))
    for closed in resume.closed:
        table.add_row("–", closed.kind, Text(closed.reason))
    return table


def _failures(resume: Resume) -> Table:
    rows = resume.failures
    table = listed("resume_failures", rows, 1, rate=_rate, taken=_FAILED, answers=_ANSWERS)
    lost = sum(row.gpu_hours_per_day for row in rows)
    table.add_row("together", "", _rate(sum(row.per_day for row in rows)), "", "", "", f"{lost:,.0f}")
    return table


def _rate(per_day: float) -> str:
    return f"{per_day:.2f}" if per_day >= 0.1 else f"{per_day:.3f}"


def _spares(resume: Resume) -> Table:
    numbers = _shown(resume)
    bold = {row for row, number in enumerate(numbers) if number == resume.num_spare_nodes_cheapest}

    def marks(number: int) -> Iterator[str]:
        return sentences("resume_mark", number=number, resume=resume)

    return listed("resume_spares", numbers, 1, bold, spares=resume.spares, marks=marks)


def _shown(resume: Resume) -> list[int]:
    """The numbers of spare nodes that tell most: none, one, those advised, cheapest and idle, and one more each."""
    told = (resume.num_spare_nodes_cheapest, resume.num_spare_nodes_advised, resume.num_idle_nodes)
    numbers = {0, 1, *(n for n in told if n is not None), (resume.num_spare_nodes_cheapest or 0) + 1}
    return sorted(number for number in numbers if number < len(resume.spares))[:_MANY]


def _says_spares(resume: Resume) -> str:
    cheapest, idle = resume.num_spare_nodes_cheapest or 0, resume.num_idle_nodes
    return sentence("resume_says_spares", cheapest=cheapest, idle=idle)


def _sources(resume: Resume) -> Iterator[str]:
    yield from sentences("resume_sources", row=resume.checkpoint)
    told = grouped((source, _NAMES.get(name, name)) for name, source in resume.sources.items())
    yield from (f"{', '.join(names)}: {source}" for source, names in told.items())


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
    title = f"Layouts: {len(answer.layouts)}, {known}; what a trial saves of {days_of(answer.run_days)}"
    return Group(*parts, section(title, listed("next_layouts", answer.layouts[:MOST_TRIALS])))


def _outcome(outcome: NextOutcome) -> str:
    return sentence("next_outcome", it=outcome)
