"""The phases of one run: the layouts that are good for each, and what each of them, or another phase's, takes of it.

A layout that was chosen for one job is kept in another, with other tokens, sequences, batches or GPUs. The answer's
types stand first: each phase with its plan, the changes of layout between them, and the sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NamedTuple

from planner.answer import Goodput, Interval, Plan, PricedLayout, RunCost
from planner.errors import PlannerError, SpecError
from planner.layout.candidate import Candidate
from planner.layout.confidence import headroom_bytes
from planner.layout.evaluate import assemble, export_warnings, whole_run_of
from planner.layout.price import price_layout, reprice, with_microbatches
from planner.layout.variation import setting_of, told_assumptions
from planner.months.losses import SECONDS_PER_DAY
from planner.schedule.orders import violation
from planner.search.case import Case
from planner.search.safest import exceeds_risk
from planner.search.search import planned, search
from planner.specs.base import Fields, Spec
from planner.specs.training import SearchLimits, TrainingSpec
from planner.specs.units import gib
from planner.trainers.rules.recipe import broken_recipe_rules, rules_for
from planner.trainers.rules.rule_rows import first_broken, rules_of
from planner.trainers.spec import RuntimeSpec


def kept(
    plan: Plan, layout: PricedLayout, runtime: RuntimeSpec, training: TrainingSpec, limits: SearchLimits
) -> Candidate | str:
    """The layout in the job of `plan`, in a step of `training`; the reason where it cannot run there or fit."""
    chosen, batch = layout.parallelism, training.global_batch_size
    if chosen.num_gpus_used > plan.cluster.num_gpus:
        return f"it takes {chosen.num_gpus_used:,} GPUs"
    per_microbatch = chosen.dp * chosen.micro_batch_size
    if batch % per_microbatch:
        return f"dp {chosen.dp} × micro-batch {chosen.micro_batch_size} does not divide a batch of {batch:,}"
    job = plan.model_copy(update={"training": training, "runtime_spec": runtime})
    num_microbatches = batch // per_microbatch
    try:
        if not layout.actions and (error := violation(chosen.schedule, chosen.pp, chosen.vpp, num_microbatches)):
            return error.message
        moved = with_microbatches(layout.model_copy(update={"runtime_spec": runtime}), num_microbatches)
    except SpecError:
        return "its order was made to measure for another number of micro-batches"
    return refused(reprice(job, moved), limits)


def refused(candidate: Candidate, limits: SearchLimits) -> Candidate | str:
    """The candidate, or the reason why the trainer refuses it or its fullest rank has too little memory."""
    pricing, shape = candidate.pricing, candidate.shape
    if rule := first_broken((*rules_of("etp"), *rules_for(pricing.runtime)), pricing.model, pricing.training, shape):
        return rule.message(pricing.model, pricing.training, shape)
    for broken in broken_recipe_rules(setting_of(candidate)):
        return str(broken)
    excess, asked_bytes = max(candidate.excess_bytes), headroom_bytes(pricing, limits)
    short_bytes = excess + asked_bytes - pricing.headroom_bytes
    left = f" with {gib(asked_bytes):.1f} left free" if asked_bytes else ""
    stage = candidate.excess_bytes.index(excess)
    return f"it lacks {gib(short_bytes):,.1f} GiB on stage {stage}{left}" if short_bytes > 0 else candidate


def plan_of(candidate: Candidate) -> Plan:
    """The plan whose best layout is the candidate, in whose job nothing was searched."""
    pricing = candidate.pricing
    layout = price_layout(candidate, pricing.totals)
    layout = layout.model_copy(update={"warnings": export_warnings(pricing)})
    return assemble(pricing, pricing.totals, [layout], told_assumptions(candidate))


class BatchStep(Spec):
    """One batch of a phase whose batch grows."""

    global_batch_size: int
    tokens: float
    steps: float
    step_s: float


class PhaseAnswer(Spec):
    """One phase, in the layout that is best for the run as a whole."""

    name: str
    tokens: float
    steps: float
    """Optimizer steps of all batches together."""
    seq_length: int
    global_batch_size: int
    """Sequences of a step; of a batch that grows, at the end."""
    batches: tuple[BatchStep, ...] = ()
    """The batches of a phase whose batch grows, in order; empty where it stays."""
    num_gpus: int
    dtype: str
    document_fraction: float = 1.0
    """Share of a whole sequence's attention that stays within its documents; 1 where sequences are not masked."""
    layout: Literal["first", "kept", "resharded"]
    """`kept` if the ranks hold what they held in the phase before, which needs no other checkpoint."""
    stop_s: float
    """Seconds of the planned stop before the phase; 0 where the job goes on."""
    step_s: float
    step_s_interval: Interval | None = None
    tokens_per_s: float
    """Tokens a second of a benchmark's steps, over all batches."""
    mfu: float
    days: float
    """Days of the phase as months of training see them, without the stop before it."""
    days_interval: Interval | None = None
    gpu_hours: float
    usd: float | None = None
    usd_interval: Interval | None = None
    mwh: float | None = None
    effective_fraction: float
    own_layout: str
    """The layout that would be best for the phase by itself."""
    own_days: float
    kept_days: float | None = None
    """Days in the layout of the phase before; null in the first phase, and where that layout cannot run."""
    kept_refused: str = ""
    """The reason why the layout of the phase before cannot run."""
    plan: Plan


class LayoutChange(Spec):
    """A stop between two phases, and what it buys."""

    before: str
    """Name of the phase before the stop."""
    after: str
    resharded: bool
    """True if the layout changes, false if the job starts anew in the same one."""
    why: str
    """The reason of the stop."""
    from_layout: str
    to_layout: str
    gains_days: float | None = None
    """Days that the changed layout saves in the phases in which it is kept; null where the old one cannot run there."""
    kept_refused: str = ""
    """The reason why the old layout cannot run in the phase after the stop."""
    costs_days: float
    """Days that changing the layout costs, beyond a stop that would be there without it."""
    saved_as: str = ""
    """The option with which the phase before saves, or the tool that converts its checkpoint, for the other layout."""
    stop_s: float


class RunTotal(Spec):
    """The sums over all phases and stops. Phases err together, by the same physics, so that the ends of their intervals
    are added up."""

    tokens: float
    days: float
    days_interval: Interval
    gpu_hours: float
    usd: float | None = None
    usd_interval: Interval | None = None
    mwh: float | None = None
    stops_s: float
    effective_fraction: float
    """Share of the whole time in which steps are made."""


class PhasesAnswer(Spec):
    """A run of phases."""

    command: str = ""
    phases: tuple[PhaseAnswer, ...]
    total: RunTotal
    changes: tuple[LayoutChange, ...]

    def to_json(self) -> Fields:
        """Plain data in the contract's form; the plans in it are such as commands read."""
        data = self.model_dump(mode="json", exclude={"phases": {"__all__": {"plan"}}})
        for phase, told in zip(self.phases, data["phases"], strict=True):
            told["plan"] = phase.plan.to_json()
        return {"schema_version": 1, **data}


GRID = ("tp", "cp", "ep", "etp", "pp", "vpp", "dp", "zero_stage", "shard_size", "rank_order")
"""Sizes that decide what each rank holds of a model."""
RUNNERS_UP = 2
"""Layouts beside the best of a phase that may be kept through several."""


class Batch(NamedTuple):
    """A batch, in sequences, and the tokens that are trained with it."""

    global_batch_size: int
    tokens: float


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase that is to be planned."""

    name: str
    case: Case
    """Its job; the batch is the last one of those that grow, and the tokens are those of the whole phase."""
    batches: tuple[Batch, ...]
    """Its batches in order, of which the last is the job's."""
    command: str = ""
    """The command line that plans this phase alone; empty if none does."""

    @property
    def grows(self) -> bool:
        """True where the batch grows."""
        return len(self.batches) > 1

    @property
    def divisor(self) -> int:
        """The largest batch that divides all of its batches."""
        return math.gcd(*(batch.global_batch_size for batch in self.batches))

    def changes_from(self, other: Phase) -> list[str]:
        """The things that differ from another phase and that no running job changes: all but the batch and the data."""
        ours, theirs = self.case, other.case
        same = {"global_batch_size": 1, "tokens": None, "document_lengths": None, "seq_length": 1, "dtype": "bf16"}
        one, two = (case.training.model_copy(update=same) for case in (ours, theirs))
        changes = {
            "sequence": ours.training.seq_length != theirs.training.seq_length,
            "dtype": ours.training.dtype != theirs.training.dtype,
            "GPUs": ours.cluster != theirs.cluster,
            "switches": (ours.runtime, ours.limits) != (theirs.runtime, theirs.limits),
            "layout": one != two,
        }
        return [name for name, changed in changes.items() if changed]

    def has_runtime_of(self, other: Phase) -> bool:
        """True where the same recipe may run: dtype, trainer, stated switches and the kind of GPU are the same."""
        is_same_gpu = self.case.cluster.hardware == other.case.cluster.hardware
        return is_same_gpu and not {"dtype", "switches"} & {*self.changes_from(other)}


@dataclass(frozen=True, slots=True)
class PhaseLayouts:
    """A phase's own plan, and layouts that are good for it, the best first; each has its runtime."""

    plan: Plan
    layouts: tuple[PricedLayout, ...]


def found(phase: Phase) -> PhaseLayouts | PlannerError:
    """Plan a phase by itself; the error where it cannot be planned.

    Where the batch grows, layouts of the largest batch that divides all others are candidates too: one runs all
    batches if its micro-batches divide this one.
    """
    case = phase.case
    try:
        own = planned(case)
    except PlannerError as error:
        return error
    layouts = _layouts(own)
    if phase.grows:
        layouts += layouts_of(case.with_batch(phase.divisor))
    return PhaseLayouts(own, layouts)


def layouts_of(case: Case) -> tuple[PricedLayout, ...]:
    """The best layouts of a case; none where nothing is found."""
    with suppress(PlannerError):
        return _layouts(search(case))
    return ()


def _layouts(found: Plan) -> tuple[PricedLayout, ...]:
    named = (found.best, *found.alternatives[:RUNNERS_UP])
    return tuple(
        layout.model_copy(update={"runtime_spec": layout.runtime_spec or found.runtime_spec}) for layout in named
    )


@dataclass(frozen=True, slots=True)
class PhaseRun:
    """The seconds and the cost of a phase in one layout."""

    layout: PricedLayout
    steps_s: tuple[float, ...]
    """Seconds of a step with each of the phase's batches."""
    cost: RunCost
    goodput: Goodput
    candidate: Candidate | None = None
    """The layout with its prices, where it is not that of the phase's own plan."""

    @property
    def wall_s(self) -> float:
        return self.cost.days * SECONDS_PER_DAY


def run_in(phase: Phase, own: Plan, layout: PricedLayout, runtime: RuntimeSpec) -> PhaseRun | str:
    """The run of a phase in a layout, with every batch of it."""
    is_own = layout.model_copy(update={"runtime_spec": None}) == own.best
    if is_own and not phase.grows and own.run_cost is not None and own.goodput is not None:
        return PhaseRun(own.best, (own.step.step_s,), own.run_cost, own.goodput)
    candidates = _with_each_batch(phase, own, layout, runtime)
    if isinstance(candidates, str):
        return candidates
    pricing = candidates[-1].pricing
    priced = own.best if is_own else price_layout(candidates[-1], pricing.totals, exact=False)
    steps_s = (*(candidate.step_s for candidate in candidates[:-1]), priced.step.step_s)
    factor = _longer_factor(phase, steps_s)
    cost, goodput = whole_run_of(pricing, priced, pricing.totals.num_parameters, factor)
    assert cost is not None, "a phase has tokens"
    assert goodput is not None, "a phase has tokens"
    return PhaseRun(priced, steps_s, cost, goodput, None if priced == own.best else candidates[-1])


def _with_each_batch(phase: Phase, own: Plan, layout: PricedLayout, runtime: RuntimeSpec) -> list[Candidate] | str:
    """The layout with each of the phase's batches, or the reason why one of them cannot be run."""
    # what the search took with a warning, where nothing is as safe as was asked for, is legal here too
    case = phase.case.filling if exceeds_risk(own, phase.case) else phase.case
    for axis in GRID:
        size = getattr(layout.parallelism, axis)
        if size not in case.pins.get(axis, (size,)):
            return f"{axis} is pinned, and not to {size}"
    candidates = []
    for batch in phase.batches:
        training = case.training.model_copy(update={"global_batch_size": batch.global_batch_size})
        candidate = kept(own, layout, runtime, training, case.limits)
        if isinstance(candidate, str):
            return candidate
        candidates.append(candidate)
    return candidates


def _longer_factor(phase: Phase, steps_s: Sequence[float]) -> float:
    """Seconds of all steps over those of as many tokens with the last batch."""
    per_sequence = [
        batch.tokens * step_s / batch.global_batch_size for batch, step_s in zip(phase.batches, steps_s, strict=True)
    ]
    last = sum(batch.tokens for batch in phase.batches) * steps_s[-1] / phase.batches[-1].global_batch_size
    return sum(per_sequence) / last


def plan_in(phase: Phase, own: Plan, run: PhaseRun) -> Plan:
    """The plan of a phase in the layout of a run: the phase's own plan where that has this layout."""
    chosen = own if run.candidate is None else plan_of(run.candidate)
    return chosen.model_copy(update={"run_cost": run.cost, "goodput": run.goodput, "command": phase.command})
