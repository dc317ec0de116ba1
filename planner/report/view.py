"""Everything that a report shows of a plan, worked out once: what stands at its top, and its sections in their order.

`terminal` and `page` only draw these, so that both say the same.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain, pairwise
from typing import Literal

from planner.answer import Plan, PricedLayout, SearchReport
from planner.record import record
from planner.report import small
from planner.report.format import (
    BREAKDOWN,
    EVIDENCE,
    LEAST_SHARE,
    RANKED_FIRST,
    corrected,
    corrections_title,
    digits,
    environment_of,
    fits_with,
    gibibytes,
    is_proven,
    large,
    manner,
    percent,
    recipe_heading,
    recipe_lines,
    recomputed_modules,
    says_bound,
    says_outcome,
    seconds,
    unsure,
)
from planner.report.rows import (
    STAGE_HEADS,
    Entry,
    Figure,
    ReportSection,
    Robust,
    StageRow,
    StepShare,
    Table,
    cost_figures,
    goodput_figures,
    quoted_figures,
    robust_of,
    runs_of_stages,
    says_sources,
    shown_cells,
    sustained_figure,
)
from planner.report.small import ChangeRow
from planner.specs.base import Texts
from planner.specs.training import TrainingSpec

SECTIONS = (
    "given", "sure", "seconds", "alternatives", "robust", "room", "changes", "stages", "timeline", "recipe", "months",
    "rejected", "proof", "corrections", "assumptions", "warnings",
)  # fmt: skip
"""Names of all sections in the order in which every report shows them: what, how fast and how sure, where the seconds
go, what else there is, memory, the timeline, and the rest."""
_FREE_LIMIT_S = 30.0
"""Seconds of a search without `--time-limit`."""


@record
class Line:
    """A line at the top of a report: parts between which it may break."""

    parts: Texts
    role: Literal["", "lead", "soft", "offer", "alarm"] = ""
    is_brief: bool = True
    """False where it waits for the full report."""


@record(slots=False)
class View:
    """A plan as its reports show it; its sections are worked out when they are asked for."""

    plan: Plan
    own: PricedLayout | None
    """The planner's choice for the same job, beside an evaluated layout."""
    job: str
    """Model, GPUs and trainer."""
    command: str
    """The command line that made the plan; empty where none did."""
    layout: str
    fits: bool
    is_small: bool
    lines: tuple[Line, ...]
    """The lines above the figures, each without empty parts."""
    figures: tuple[Figure, ...]
    """The six numbers that people quote."""
    below: tuple[Line, ...]
    """The lines below the figures: over months, and the whole run."""
    sustained: Figure | None
    peak: Figure
    """Memory of the fullest stage."""
    fit: str
    """The probability that it fits, in words; empty where it is not known, and where it does not."""
    tokens: float | None
    """Tokens of the whole run, where a run was asked for."""
    cost: tuple[Figure, ...]
    goodput: tuple[Figure, ...]
    capacity_bytes: int
    step_s: float
    stages: tuple[StageRow, ...]
    breakdown: tuple[StepShare, ...]
    """The items of the step, the largest first, those below LEAST_SHARE left out."""
    best: Entry
    alternatives: tuple[Entry, ...]
    robust: Robust | None
    """The best few layouts under changed assumptions; None where these move nothing."""
    changes: tuple[ChangeRow, ...]

    @property
    def capacity(self) -> str:
        return f"{gibibytes(self.capacity_bytes)} GiB"

    @property
    def mixes_recompute(self) -> bool:
        """True where some layers are recomputed otherwise than others."""
        modes = {mode for row in self.stages for s in row.stages for mode, count in s.recompute.items() if count}
        return len(modes) > 1

    def section(self, name: str) -> ReportSection | None:
        """A section by its name; None where it is empty."""
        return next((section for section in self._filled if section.name == name), None)

    @cached_property
    def sections(self) -> tuple[ReportSection, ...]:
        """The sections that are not empty, in the order of SECTIONS."""
        return tuple(sorted(self._filled, key=lambda section: SECTIONS.index(section.name)))

    @property
    def _filled(self) -> Iterator[ReportSection]:
        sections = chain(_answers(self), _reasons(self))
        return (section for section in sections if any(section.parts))

    @property
    def recipe(self) -> tuple[tuple[str, str], ...]:
        """The lines of the recipe, with the variables that it needs."""
        return recipe_lines(self.plan.best, environment_of(self.plan))


def view_of(plan: Plan, own: PricedLayout | None = None) -> View:
    """The view of a plan, or of one evaluated layout beside `own`, the planner's choice for the same job."""
    best, is_tuning = plan.best, small.is_small(plan)
    figures, step_s = small.figures(plan) if is_tuning else _figures(plan), plan.step.step_s
    shares = small.step_items(plan) if is_tuning else _breakdown(plan)
    others = tuple(Entry(f"{rank}.", other, best) for rank, other in enumerate(plan.alternatives, start=1))
    robust = None if is_tuning else robust_of(best)
    stages = tuple(StageRow((stage,), plan.cluster.hardware.memory_bytes) for stage in plan.stages)
    return View(
        plan=plan, own=own,
        job=f"{plan.model.name} on {plan.cluster.num_gpus:,} × {plan.cluster.hardware.name}, {plan.runtime}",
        command=plan.command, layout=str(best.parallelism), fits=best.fits, is_small=is_tuning,
        lines=tuple(_kept(_lines(plan))), figures=figures, below=tuple(_kept(_below(plan))),
        sustained=None if is_tuning else sustained_figure(best), peak=_peak(best), fit=_fit(best) if best.fits else "",
        tokens=None if plan.run_cost is None else plan.run_cost.tokens, cost=cost_figures(plan),
        goodput=goodput_figures(plan), capacity_bytes=plan.cluster.hardware.memory_bytes, step_s=step_s, stages=stages,
        breakdown=shares, best=Entry("best", best), alternatives=others, robust=robust,
        changes=small.rows_of(plan.changes, plan.cluster.hardware.memory_bytes, step_s),
    )  # fmt: skip


def _answers(view: View) -> Iterator[ReportSection]:
    """The sections that say what was chosen, where its seconds and bytes go, and what else there is."""
    plan, own = view.plan, view.own
    if own is not None:
        pair = (Entry("given", plan.best), Entry("own", own, plan.best))
        yield ReportSection("given", "Beside the planner's own choice", (pair,))
    yield ReportSection("seconds", f"Where the {seconds(view.step_s)} of a step go", (seconds_table(view.breakdown),))
    if view.is_small:
        items = small.memory_items(plan)
        rows = tuple((name, f"{gibibytes(size)} GiB") for name, size in items.items())
        table = Table(rows, "nr", bars=tuple(size / view.capacity_bytes for size in items.values()))
        yield ReportSection("stages", f"Memory of the fullest GPU, of {view.capacity}", (table,))
        yield ReportSection("room", "Room, all else as it is", _table(small.room_lines(plan.room)))
        yield ReportSection(
            "changes", "What to change first, one change at a time", (change_table(view.changes),) * bool(view.changes)
        )
    else:
        yield ReportSection("stages", f"Stages, on GPUs of {view.capacity}", (stage_table(view),))
    if view.alternatives:
        yield ReportSection("alternatives", "Alternatives, and what each trades", (view.alternatives,))
    if view.robust is not None:
        robust = view.robust
        table = Table(robust.rows, "n" + "r" * (len(robust.heads) - 1), robust.heads, (), True, robust.remarks)
        yield ReportSection("robust", "If an assumption turns out otherwise: the step", (table,))


def _reasons(view: View) -> Iterator[ReportSection]:
    """The sections that say how sure all that is, and what it rests on."""
    plan, search, hardware = view.plan, view.plan.search, view.plan.cluster.hardware
    yield ReportSection("recipe", recipe_heading(plan.best), _table(view.recipe))
    yield ReportSection("sure", "How sure", _table(tuple(_sure(plan))))
    if search is not None:
        yield ReportSection("proof", "The proof, and what it holds for", _table(tuple(_proof(search))))
    months = [(figure.name, figure.text) for figure in (*filter(None, [view.sustained]), *view.cost, *view.goodput)]
    sources = () if view.is_small else says_sources(plan)
    title = "The whole run" if view.tokens else "Over months"
    months = [] if view.is_small and not view.tokens else months
    yield ReportSection("months", title, _table((*months, *((f"source: {name}", source) for name, source in sources))))
    rejections = sorted(plan.rejections.items(), key=lambda item: (-item[1], item[0]))
    rows = tuple(
        (f"{count:,}", reason.replace("_", " "), plan.rejection_examples.get(reason, ""))
        for reason, count in rejections
    )
    if rows:
        yield ReportSection(
            "rejected", "Rejected shapes, by reason", (Table(rows, "rnw", ("shapes", "reason", "for example")),)
        )
    found = hardware.corrections
    yield ReportSection("corrections", corrections_title(found), _table(tuple((one.name, one.says) for one in found)))
    assumed = small.assumed(plan) if view.is_small else ""
    title = "Assumed" if assumed else "Assumptions that move the step of this layout"
    yield ReportSection("assumptions", title, ((assumed,) if assumed else plan.assumptions,))
    yield ReportSection("warnings", "Warnings", (plan.warnings,))


def _table(pairs: Iterable[tuple[str, str]]) -> tuple[Table, ...]:
    """Subjects and sentences; nothing where there are none."""
    rows = tuple(pairs)
    return (Table(rows),) if rows else ()


def seconds_table(shares: Iterable[StepShare]) -> Table:
    """A row for each item of the step, with its share as a bar."""
    shares = tuple(shares)
    return Table(tuple(share.cells for share in shares), "nrr", bars=tuple(share.fraction for share in shares))


def stage_table(view: View) -> Table:
    """A row for each run of neighbouring stages that hold the same."""
    mixed, rows = view.mixes_recompute, runs_of_stages(view.stages)
    cells = tuple(tuple(shown_cells(row.cells, mixed)) for row in rows)
    return Table(cells, "rnn" + "n" * mixed + "rrrr", tuple(shown_cells(STAGE_HEADS, mixed)),
                 tuple(row.filled_fraction for row in rows))  # fmt: skip


def change_table(rows: Iterable[ChangeRow]) -> Table:
    """The changes of a small job, each with the options that make it."""
    cells = tuple(
        (row.change, row.gib, row.seconds, "; ".join(filter(None, (row.options, row.remark)))) for row in rows
    )
    return Table(cells, "wrrw", ("change", "GiB", "step", "options, and what it changes beside"))


def _kept(lines: Iterable[Line]) -> Iterator[Line]:
    """Lines without their empty parts, those that have any other."""
    for line in lines:
        parts = tuple(filter(None, line.parts))
        if parts:
            yield Line(parts, line.role, line.is_brief)


def _lines(plan: Plan) -> Iterator[Line]:
    """Lines of what is trained and how, whether it fits, and what the search proved."""
    best, hardware, search = plan.best, plan.cluster.hardware, plan.search
    offer, seen = Line((_batch_offer(plan),), "offer"), Line((_seen(plan),))
    outcome = () if search is None else (_outcome(search),)
    measured = Line(corrected(hardware.corrections), "soft")
    if small.is_small(plan):
        yield Line(small.trained(plan))
        yield Line((small.fit(plan),), "lead" if best.fits else "alarm")
        yield Line(small.manner(best.parallelism, best.worst_stage, plan.runtime_spec.sharding))
        yield from (Line((_batch(plan.training), *outcome)), offer, seen, measured)
    else:
        yield Line((str(best.parallelism),), "lead")
        yield Line(manner(best.parallelism, is_brief=True))
        yield Line(
            (f"recomputed: {', '.join(modules)}" if (modules := recomputed_modules(best.parallelism)) else "",),
            is_brief=False,
        )
        yield Line(tuple(map(str, best.placement)), "soft", is_brief=False)
        yield from (Line((f"{_batch(plan.training)}{_scaling(best)}",)), offer, seen)
        yield Line((*outcome, _fit(best)) if best.fits else ())
        yield Line(_recommended(best))
        yield Line(("" if best.fits else _misfit(best, hardware.memory_bytes),), "alarm")
        yield measured
    # the trainer's refusal of a given layout, or what it took to fit: a switch, or more risk than was asked for
    yield Line(best.warnings[:1], "offer")
    if search is not None and search.outcome == "feasible":
        yield Line((f"The search stopped early: {longer(plan)} goes on",), "offer")


def _outcome(search: SearchReport) -> str:
    """The outcome with its gap, and that it holds for some switches only where others were pinned."""
    says = says_outcome(search)
    values = search.searched.switches.values() if search.searched else ()
    are_pinned = is_proven(search) and any(len(each) < 2 for each in values)
    return says.replace("proven", "proven for these switches", 1) if are_pinned else says


def _recommended(best: PricedLayout) -> Texts:
    """The cost of a layout that comes before a faster one, and the reason."""
    reason = best.recommendation
    if reason is None:
        return ()
    cost = f"{percent(max(best.step.step_s / reason.fastest_step_s - 1, 0))} behind the fastest found (--fastest)"
    loses = ""
    if reason.worst_loss_fraction is not None and reason.fastest_worst_loss_fraction is not None:
        named, lost = reason.assumption.partition(":")[0], reason.fastest_worst_loss_fraction
        loses = f"which loses {percent(lost)} under {named}, this {percent(reason.worst_loss_fraction)}"
    is_simpler = reason.chunks < reason.fastest_chunks
    return cost, loses, f"{reason.chunks} chunks, not {reason.fastest_chunks}" if is_simpler else ""


def _scaling(layout: PricedLayout) -> str:
    """The scales of products in 8 or 4 bits, beside those that the model was published with."""
    scales = layout.narrow_scaling
    if scales is None or scales.scaling in ("mxfp8", "nvfp4"):
        return ""
    published = "" if scales.published in (None, scales.scaling) else f", published {scales.published}"
    return f" {scales.scaling}{published}"


def longer(plan: Plan) -> str:
    """The option that lets a search that stopped early go on: four times the seconds that it had."""
    words = shlex.split(plan.command)
    given = [after for word, after in pairwise(words) if word == "--time-limit"]
    return f"--time-limit {4 * float(given[-1] if given else _FREE_LIMIT_S):g}"


def _below(plan: Plan) -> Iterator[Line]:
    """The sustained step, and the time and cost of the whole run."""
    if small.is_small(plan):
        yield Line((small.how_long(plan),))
        return
    sustained, cost, goodput = sustained_figure(plan.best), cost_figures(plan), goodput_figures(plan)
    if sustained is not None:
        yield Line((f"{sustained.name} {sustained.text}",))
    if plan.run_cost is not None:
        yield Line((f"{large(plan.run_cost.tokens)} tokens: {cost[0].text}", *(figure.text for figure in cost[1:])))
    if goodput:
        effective, *rest = goodput
        yield Line((f"{effective.name} {effective.text}", *(figure.text for figure in rest)))


def _seen(plan: Plan) -> str:
    """The images of a sequence and the tower that sees them; empty for a model of text alone."""
    vision = plan.model.spec.vision
    if vision is None:
        return ""
    number, state = vision.images_per_sequence, "trained" if vision.is_trained else "frozen"
    images = f"{number} image{'s' * (number > 1)} of {vision.image_tokens:,} tokens in each"
    return f"{images}; a {state} tower of {large(plan.model.num_vision_parameters)} on stage 0"


def _batch(training: TrainingSpec) -> str:
    """Words for the sequences of a step, in pairs where the objective compares two answers."""
    objective, sequences = training.objective, training.global_batch_size
    pairs = f"{sequences // 2:,} pairs, " if objective.has_pairs else ""
    loss = "" if objective.name == "lm" else f", {objective.name}"
    return f"{pairs}{sequences:,} sequences of {training.seq_length:,} tokens a step, {training.dtype}{loss}"


def _misfit(layout: PricedLayout, capacity_bytes: int) -> str:
    worst = layout.worst_stage
    return (
        f"Does not fit: stage {worst.stage} needs {gibibytes(worst.memory.total_bytes)} GiB, "
        f"{gibibytes(worst.memory.total_bytes - capacity_bytes)} more than the GPU's {gibibytes(capacity_bytes)}"
    )


def _fit(layout: PricedLayout) -> str:
    return "" if layout.oom_probability is None else f"fits with {fits_with(layout.oom_probability)}"


def _batch_offer(plan: Plan) -> str:
    offer, size = plan.batch_offer, plan.training.global_batch_size
    if offer is None:
        return ""
    gained, larger = offer.tokens_per_s / plan.step.tokens_per_s - 1, offer.global_batch_size / size - 1
    return f"--global-batch-size {offer.global_batch_size} ({larger:+.1%}) gives {percent(gained)} more tokens/s"


def _peak(layout: PricedLayout) -> Figure:
    return Figure("fullest stage", "bytes", f"{gibibytes(layout.worst_stage.memory.total_bytes)} GiB")


def _figures(plan: Plan) -> tuple[Figure, ...]:
    """The six numbers that people quote; the bubble stands where the interval is not known."""
    step, (first, rate, mfu, sure) = plan.step, quoted_figures(plan)
    if step.step_s_interval is None:
        sure = Figure(BREAKDOWN["bubble_s"], "fraction", percent(step.breakdown.bubble_s / step.step_s))
    flops = Figure("TFLOP/s/GPU", "TFLOP/s", digits(step.model_tflops_per_gpu))
    each = Figure("tokens/s/GPU", "tokens/s", f"{step.tokens_per_s_per_gpu:,.1f}")
    return first, rate, flops, sure, each, mfu


def _breakdown(plan: Plan) -> tuple[StepShare, ...]:
    step_s = plan.step.step_s
    shares = [StepShare(label, getattr(plan.step.breakdown, name), step_s) for name, label in BREAKDOWN.items()]
    return tuple(share for share in sorted(shares, key=lambda share: -share.value_s) if share.fraction >= LEAST_SHARE)


def _sure(plan: Plan) -> Iterator[tuple[str, str]]:
    """A subject and a sentence each: the evidence, switches left unsaid, the risk, what intervals cannot tell apart."""
    yield "evidence", EVIDENCE[plan.evidence]
    yield from unsure(plan)
    if plan.best.oom_probability is not None:
        yield "memory", _memory(plan)
    hardware = plan.cluster.hardware
    if small.is_small(plan):
        if plan.training.operations.usd_per_gpu_hour is None and hardware.usd_per_gpu_hour is not None:
            yield "price", f"${hardware.usd_per_gpu_hour:g}: {hardware.price_source.partition('. ')[0]}"
    elif plan.undecided:
        count, total = len(plan.undecided), len(plan.alternatives)
        overlap = f"intervals of {count} of {total} overlap the best's: plan probe can tell them apart"
        yield "alternatives", f"{overlap}; {RANKED_FIRST}"


def _proof(search: SearchReport) -> Iterator[tuple[str, str]]:
    took = "" if search.seconds is None else f" in {seconds(search.seconds)}"
    counts = f"{search.num_shapes:,} legal shapes, {search.num_fitting:,} can fit"
    counts = counts if search.num_shapes else "no legal shape may beat the first one found"
    yield "search", f"{counts}, {search.num_ilps:,} solved as ILP{took}"
    yield "solver", f"{says_outcome(search)}: {says_bound(search)}"


def _memory(plan: Plan) -> str:
    """The probability that the plan fits, the interval that it is from, and what more risk would buy."""
    memory, offer = plan.best.worst_stage.memory, plan.risk_offer
    capacity = gibibytes(plan.cluster.hardware.memory_bytes)
    interval = "–".join(map(gibibytes, memory.total_bytes_interval or (memory.total_bytes,)))
    says = f"{_fit(plan.best)}: the fullest rank needs {interval} GiB (80% interval) of {capacity}"
    if offer is None:
        return says
    faster = percent(1 - offer.step_s / plan.step.step_s)
    return f"{says}; --oom-risk {offer.oom_risk:g}: {faster} faster, fits with {fits_with(offer.oom_probability)}"
