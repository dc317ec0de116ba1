"""Everything that a report shows of a plan, worked out once: numbers with their units, and the words they are told in.

`terminal` and `html` only lay these lines out, so that both say the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from planner.answer import Plan, PricedLayout
from planner.report import small
from planner.report.format import digits, fits_with, gibibytes, percent, seconds, span
from planner.report.labels import (
    BREAKDOWN,
    EVIDENCE,
    LEAST_SHARE,
    RANKED_FIRST,
    corrected,
    corrections_title,
    manner,
    says_unsaid,
)
from planner.report.months import cost_figures, goodput_figures, says_sources, sustained_figure
from planner.report.proof import says_bound, says_outcome
from planner.report.recipe import environment_of, recipe_heading, recipe_lines
from planner.report.rows import Entry, Figure, Rejection, Robust, StageRow, StepShare, entry_of, robust_of
from planner.report.small import ChangeRow
from planner.specs.training import TrainingSpec


@dataclass(frozen=True, slots=True)
class View:
    """All lines of a report, in their order."""

    job: str
    """Model, GPUs and trainer."""
    command: str
    """The command line that made the plan; empty where none did."""
    layout: str
    fits: bool
    manner: tuple[str, ...]
    placement: tuple[str, ...]
    """The tier that each group of ranks spans, in words."""
    batch: str
    batch_offer: str
    """Another batch that gives more tokens a second; empty where there is none."""
    misfit: str
    """By how much a layout does not fit; empty where it does."""
    fit: str
    """The probability that it fits, in words; empty where it is not known, and where it does not."""
    corrected: tuple[str, ...]
    """The numbers of the hardware that were measured, before and after; empty without a calibration."""
    figures: tuple[Figure, ...]
    sustained: Figure | None
    """The step over months, where something is known of it."""
    peak: Figure
    """Memory of the fullest stage."""
    tokens: float | None
    """Tokens of the whole run, where a run was asked for."""
    cost: tuple[Figure, ...]
    goodput: tuple[Figure, ...]
    """The share of the whole run's time that trains, and what takes the rest."""
    given_and_own: tuple[Entry, ...]
    """The layout that was given and the planner's own choice for the same job, where there is one."""
    capacity_bytes: int
    stages: tuple[StageRow, ...]
    recipe_heading: str
    recipe: tuple[tuple[str, str], ...]
    """A subject and a sentence each, about the switches of the best layout; empty where they are not known."""
    step_s: float
    breakdown: tuple[StepShare, ...]
    """The items of the step, the largest first, those below LEAST_SHARE left out."""
    best: Entry
    alternatives: tuple[Entry, ...]
    robust: Robust | None
    """The best few layouts under changed assumptions; None where these move nothing."""
    rejections: tuple[Rejection, ...]
    """The most frequent reason first."""
    corrections_heading: str
    corrections: tuple[tuple[str, str], ...]
    """A subject and a sentence each, on what was corrected, confirmed, or asked for in vain. Likewise below."""
    proof: tuple[tuple[str, str], ...]
    """Evidence, and what the search proved."""
    sources: tuple[tuple[str, str], ...]
    """The sources of the sustained step and of what a whole run loses."""
    risk: tuple[tuple[str, str], ...]
    """The things that could turn out otherwise: memory, what a run left unsaid, alternatives as fast."""
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]
    room: tuple[tuple[str, str], ...] = ()
    """A subject and a sentence each on the largest batch, sequence and model; empty for a job that is not small."""
    changes: tuple[ChangeRow, ...] = ()
    """The changes of a small job, what helps most first."""

    @property
    def capacity(self) -> str:
        return f"{gibibytes(self.capacity_bytes)} GiB"

    @property
    def how_sure(self) -> tuple[tuple[str, str], ...]:
        """A subject and a sentence each, all that is known of it."""
        return *self.proof, *self.sources, *self.risk

    @property
    def mixes_recompute(self) -> bool:
        """True where some layers are recomputed otherwise than others."""
        modes = {mode for row in self.stages for s in row.stages for mode, count in s.recompute.items() if count}
        return len(modes) > 1

    @property
    def headings(self) -> dict[str, str]:
        """The titles of the sections that every report has."""
        return {
            "given_and_own": "Beside the planner's own choice",
            "recipe": self.recipe_heading,
            "stages": f"Stages, on GPUs of {self.capacity}",
            "room": "Room, all else as it is",
            "changes": "What to change first, one change at a time",
            "memory": f"Memory, of {self.capacity} a GPU",
            "breakdown": f"Where the {seconds(self.step_s)} of a step go",
            "timeline": "The timeline of a step",
            "alternatives": "Alternatives, and what each trades",
            "months": "The whole run" if self.tokens else "Over months",
            "robust": "If an assumption turns out otherwise: the step",
            "rejections": "Rejected shapes, by reason",
            "corrections": self.corrections_heading,
            "risk": "Risk",
            "how_sure": "How sure",
            "assumptions": "Assumptions that move the step of this layout",
            "warnings": "Warnings",
        }


def _batch(training: TrainingSpec) -> str:
    """Words for the sequences of a step, in pairs where the objective compares two answers."""
    objective, sequences = training.objective, training.global_batch_size
    pairs = f"{sequences // 2:,} pairs, " if objective.has_pairs else ""
    loss = "" if objective.name == "lm" else f", {objective.name}"
    return f"{pairs}{sequences:,} sequences of {training.seq_length:,} tokens a step, {training.dtype}{loss}"


def view_of(plan: Plan, own: PricedLayout | None = None) -> View:
    """The lines of a plan, or of one evaluated layout beside `own`, the planner's choice for the same job."""
    best, training, hardware = plan.best, plan.training, plan.cluster.hardware
    is_tuning = small.is_small(plan)
    ways = (
        (*small.trained(plan), *small.manner(best.parallelism, best.worst_stage, plan.runtime_spec.sharding))
        if is_tuning
        else manner(best.parallelism)
    )
    return View(
        job=f"{plan.model.name} on {plan.cluster.num_gpus:,} × {hardware.name}, {plan.runtime}",
        command=plan.command,
        layout=str(best.parallelism),
        fits=best.fits,
        manner=ways,
        placement=tuple(map(str, best.placement)),
        batch=_batch(training),
        batch_offer=_batch_offer(plan),
        misfit="" if best.fits else _misfit(best, hardware.memory_bytes),
        fit=_fit(best) if best.fits else "",
        corrected=corrected(hardware.corrections),
        figures=_figures(plan),
        sustained=None if is_tuning else sustained_figure(best),
        peak=_peak(best),
        tokens=None if plan.run_cost is None else plan.run_cost.tokens,
        cost=cost_figures(plan),
        goodput=goodput_figures(plan),
        given_and_own=() if own is None else (entry_of("given", best), entry_of("own", own, best)),
        capacity_bytes=hardware.memory_bytes,
        stages=tuple(StageRow((stage,), hardware.memory_bytes) for stage in plan.stages),
        recipe_heading=recipe_heading(best),
        recipe=recipe_lines(best, environment_of(plan)),
        step_s=plan.step.step_s,
        breakdown=_breakdown(plan),
        best=entry_of("best", best),
        alternatives=tuple(entry_of(f"{rank}.", other, best) for rank, other in enumerate(plan.alternatives, start=1)),
        robust=None if is_tuning else robust_of(best),
        rejections=tuple(
            Rejection(count, reason.replace("_", " "), plan.rejection_examples.get(reason, ""))
            for reason, count in sorted(plan.rejections.items(), key=lambda item: (-item[1], item[0]))
        ),
        corrections_heading=corrections_title(hardware.corrections),
        corrections=tuple((correction.name, correction.says) for correction in hardware.corrections),
        proof=tuple(_proof(plan)),
        sources=() if is_tuning else tuple(says_sources(plan)),
        risk=tuple(_risk(plan)),
        assumptions=(small.assumed(plan),) if is_tuning and small.assumed(plan) else plan.assumptions,
        warnings=plan.warnings,
        room=small.room_lines(plan.room),
        changes=small.change_rows(plan, plan.changes),
    )


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
    peak_bytes = layout.worst_stage.memory.total_bytes
    return Figure("fullest stage", (peak_bytes,), "bytes", f"{gibibytes(peak_bytes)} GiB")


def _figures(plan: Plan) -> tuple[Figure, ...]:
    """The six numbers that people quote; the bubble stands where the interval is not known."""
    step, interval_s = plan.step, plan.step.step_s_interval
    if interval_s is None:
        bubble = StepShare(BREAKDOWN["bubble_s"], step.breakdown.bubble_s, step.step_s)
        sure = Figure(bubble.name, (bubble.fraction,), "fraction", percent(bubble.fraction))
    else:
        sure = Figure("80% interval", interval_s, "s", span(*interval_s, like_s=step.step_s))
    flops, each = step.model_tflops_per_gpu, step.tokens_per_s_per_gpu
    return (
        Figure("step", (step.step_s,), "s", seconds(step.step_s)),
        Figure("tokens/s", (step.tokens_per_s,), "tokens/s", f"{step.tokens_per_s:,.0f}"),
        Figure("TFLOP/s/GPU", (flops,), "TFLOP/s", digits(flops)),
        sure,
        Figure("tokens/s/GPU", (each,), "tokens/s", f"{each:,.1f}"),
        Figure("MFU", (step.mfu,), "fraction", percent(step.mfu)),
    )


def _breakdown(plan: Plan) -> tuple[StepShare, ...]:
    step_s = plan.step.step_s
    shares = [StepShare(label, getattr(plan.step.breakdown, name), step_s) for name, label in BREAKDOWN.items()]
    return tuple(share for share in sorted(shares, key=lambda share: -share.value_s) if share.fraction >= LEAST_SHARE)


def _proof(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "evidence", EVIDENCE[plan.evidence]
    search = plan.search
    if search is not None:
        took = "" if search.seconds is None else f" in {seconds(search.seconds)}"
        counts = f"{search.num_shapes:,} legal shapes, {search.num_fitting:,} can fit"
        yield "search", f"{counts}, {search.num_ilps:,} solved as ILP{took}"
        yield "solver", f"{says_outcome(search)}: {says_bound(search)}"


def _risk(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.best.unsaid:
        yield "not said", says_unsaid(plan.best)
    if plan.best.oom_probability is not None:
        yield "memory", _memory(plan)
    if plan.undecided:
        count, total = len(plan.undecided), len(plan.alternatives)
        overlap = f"intervals of {count} of {total} overlap the best's: plan probe can tell them apart"
        yield "alternatives", f"{overlap}; {RANKED_FIRST}"


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
