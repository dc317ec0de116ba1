"""The course of a run through its phases: the layout of each with which phases and stops together take least.

Staying in a layout costs nothing where the job can go on, which batch and data alone allow. Everything else is a stop:
the checkpoint is written, a new job starts and reads it. The best course is a shortest path, phase by phase. The
answer is written of it: what each phase takes, the stops between them, the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from planner.answer import Plan, PricedLayout
from planner.decide.job import CONVERSIONS, Loads, transfer, way_to_load
from planner.decide.phases import (
    GRID,
    BatchStep,
    LayoutChange,
    Phase,
    PhaseAnswer,
    PhaseLayouts,
    PhaseRun,
    PhasesAnswer,
    RunTotal,
    found,
    layouts_of,
    plan_in,
    run_in,
)
from planner.decide.side_by_side import side_by_side
from planner.errors import PlannerError, SpecError
from planner.months.losses import SECONDS_PER_DAY, losses_of
from planner.months.whole_run import Standstill
from planner.trainers.documents import attended_fraction, masked_documents
from planner.trainers.load import AXES, Checkpoint, checkpoint_of

Key = tuple[object, ...]
SECONDS_PER_HOUR = 3600
PHASE_S = 1.0
"""Seconds in which a phase is planned: from three on, processes are worth their start."""


def shortest(costs_s: Sequence[Mapping[Key, float]], change_s: Callable[[int, Key, Key], float]) -> list[Key]:
    """The layout of each phase with which `costs_s` of all phases and `change_s` before each but the first are least.

    `change_s` is of a phase, the layout before it and its own. Of equal courses, the one that changes less is taken.
    """
    paths: dict[Key, tuple[float, int, tuple[Key, ...]]] = {
        key: (seconds, 0, (key,)) for key, seconds in costs_s[0].items()
    }
    for number, costs in enumerate(costs_s[1:], start=1):
        longer = {}
        for key, seconds in costs.items():
            ways = (
                (so_far + change_s(number, path[-1], key) + seconds, moves + (path[-1] != key), path)
                for so_far, moves, path in paths.values()
            )
            total_s, moves, path = min(ways, key=lambda way: way[:2])
            longer[key] = (total_s, moves, (*path, key))
        paths = longer
    return list(min(paths.values(), key=lambda way: way[:2])[2])


def key_of(layout: PricedLayout) -> Key:
    """All that tells a layout from others, whatever its batch is; what its ranks hold comes first."""
    sizes = layout.parallelism.model_copy(update={"num_microbatches": 1, "num_gpus_spare": 0})
    recomputed = tuple((tuple(sorted(stage.recompute.items())), stage.num_recomputed) for stage in layout.stages)
    return held(layout), str(sizes), sizes.schedule, layout.actions, recomputed, layout.runtime_spec


def held(layout: PricedLayout) -> Key:
    """The share of the model that each rank holds: layouts that are alike in it need no other checkpoint."""
    chunks = tuple((stage.chunks, stage.holds) for stage in layout.stages)
    return (*(getattr(layout.parallelism, axis) for axis in GRID), chunks)


@dataclass(frozen=True)
class Course:
    """Phases with their own plans, the layouts that are tried, and what each phase takes in them."""

    phases: tuple[Phase, ...]
    found: tuple[PhaseLayouts, ...]
    reshard_s: float = 0.0
    known: dict[tuple[int, Key], PhaseRun | str] = field(default_factory=dict)
    """The run of each phase in a layout, or the reason why it cannot run there, as far as it was asked for."""

    @cached_property
    def layouts(self) -> dict[Key, tuple[PricedLayout, int]]:
        """All layouts, with the phase that each was found for."""
        pairs = [(layout, number) for number, plan in enumerate(self.found) for layout in plan.layouts]
        return {key_of(layout): (layout, number) for layout, number in reversed(pairs)}

    def other_kinds(self, number: int) -> list[tuple[int, ...]]:
        """ZeRO stages that a phase may have beside its plan's, of each kind of checkpoint that other phases write."""
        case = self.phases[number].case
        stages = [self._checkpoint(plan.plan, plan.layouts[0]).zero_stages for plan in self.found]
        may_have = case.limits.zero_stage or case.runtime.zero_stages
        kinds = dict.fromkeys(kind for kind in stages if kind != stages[number])
        chosen = [tuple(stage for stage in may_have if stage in kind) for kind in kinds]
        return [some for some in chosen if some]

    def _checkpoint(self, plan: Plan, layout: PricedLayout) -> Checkpoint:
        return checkpoint_of(layout.runtime_spec or plan.runtime_spec, layout.parallelism.zero_stage)

    def kept(self, number: int, before: Key) -> tuple[Key, PhaseRun | str]:
        """The best layout of a phase in which ranks hold what they held before, and its run or why it has none.

        Where the job goes on, nothing of the layout may change.
        """
        alike = {key: run for key, run in self.runs_of(number).items() if key[0] == before[0]}
        if alike and self.stops(number, before, before):
            return min(alike.items(), key=lambda pair: pair[1].wall_s)
        return before, self.run(number, before)

    def run(self, number: int, key: Key) -> PhaseRun | str:
        """The run of a phase in a layout, or the reason why it cannot run there.

        A layout has its own runtime, or that of the phase's plan where its own may not run.
        """
        if (number, key) not in self.known:
            (layout, origin), phase, own = self.layouts[key], self.phases[number], self.found[number].plan
            runtime = layout.runtime_spec if phase.has_runtime_of(self.phases[origin]) else None
            self.known[number, key] = run_in(phase, own, layout, runtime or own.runtime_spec)
        return self.known[number, key]

    @cached_property
    def _stops(self) -> list[tuple[Standstill, Standstill]]:
        """A stop before each phase: a checkpoint is written and a new job reads it. With it, one that is converted."""
        stops = []
        for own in (layouts.plan for layouts in self.found):
            operations, asynchronous = own.training.operations, own.runtime_spec.asynchronous_checkpoints
            losses = losses_of(own.cluster, operations, own.cluster.num_gpus, own.checkpoint_bytes, asynchronous)
            moved = transfer(losses)
            again = {"start": losses.restart_s, "read": moved}
            converted = {"save": moved, "convert": moved.times(CONVERSIONS), **again}
            stops.append((Standstill({"save": moved, **again}), Standstill(converted)))
        return stops

    def stop(self, number: int, before: Key, after: Key) -> Standstill | None:
        """The seconds of a stop between two layouts; None where the second cannot load the checkpoint of the first."""
        loads = self.loads(number, before, after)
        return None if loads is None else self._stops[number][loads == "convert"]

    def stops(self, number: int, before: Key, after: Key) -> bool:
        """True where a new job has to start between two layouts."""
        return number > 0 and bool(before != after or self.phases[number].changes_from(self.phases[number - 1]))

    def loads(self, number: int, before: Key, after: Key) -> Loads | None:
        """The way in which a layout loads the checkpoint of the phase before; None if it cannot.

        What has to be written again is saved in the other format from the start, since the change is planned.
        """
        if before[0] == after[0]:
            return "as_is"
        old, new = (self.layouts[key][0] for key in (before, after))
        row = self._checkpoint(self.found[number - 1].plan, old)
        other = {axis for axis in AXES if _axis(old, axis) != _axis(new, axis)}
        return way_to_load(row, other, new.parallelism.zero_stage, has_split=False)

    def change_s(self, number: int, before: Key, after: Key) -> float:
        """Seconds between the phase before and a phase; infinite where its layout cannot load the checkpoint."""
        if not self.stops(number, before, after):
            return 0.0
        stop = self.stop(number, before, after)
        return math.inf if stop is None else stop.value_s + (before[0] != after[0]) * self.reshard_s

    def chosen(self) -> list[Key]:
        """The layout of each phase with which the whole run takes least."""
        tried = [self.runs_of(number) for number in range(len(self.phases))]
        path = shortest([{key: run.wall_s for key, run in each.items()} for each in tried], self.change_s)
        for number in range(1, len(path)):
            if math.isinf(self.change_s(number, path[number - 1], path[number])):
                before, after = self.phases[number - 1].name, self.phases[number].name
                raise SpecError(
                    f"phase {after}: no layout found for it can load the checkpoint of phase {before}",
                    "give both the same --zero-stage, --pp and --tp",
                )
        return path

    def runs_of(self, number: int) -> dict[Key, PhaseRun]:
        """The runs of a phase in its own layouts and in the best of each other phase, as far as it can run there."""
        tried = [*self.found[number].layouts, *(plan.layouts[0] for plan in self.found)]
        runs = {key: self.run(number, key) for key in dict.fromkeys(map(key_of, tried))}
        return {key: run for key, run in runs.items() if isinstance(run, PhaseRun)}


def course_of(phases: Sequence[Phase], reshard_hours: float = 0.0, tick: Callable[[], None] = lambda: None) -> Course:
    """Plan every phase, also for the checkpoints that others write; `tick` is called after each.

    Raises the error of a phase that cannot be planned.
    """
    plans = []
    for phase, plan in zip(phases, side_by_side(found, phases, PHASE_S, tick), strict=True):
        if isinstance(plan, PlannerError):
            plan.args = (f"phase {phase.name}: {plan.message}",)
            plan.message = plan.args[0]
            raise plan
        plans.append(plan)
    course = Course(tuple(phases), tuple(plans), reshard_hours * SECONDS_PER_HOUR)
    asked = [(number, stages) for number in range(len(phases)) for stages in course.other_kinds(number)]
    cases = [phases[number].case.limited(zero_stage=stages, top=1) for number, stages in asked]
    for (number, _), more in zip(asked, side_by_side(layouts_of, cases, PHASE_S), strict=True):
        plans[number] = replace(plans[number], layouts=plans[number].layouts + more)
    course = replace(course, found=tuple(plans))
    for number, plan in enumerate(plans):
        if not course.runs_of(number):
            raise _no_layout(phases[number], plan, str(course.run(number, key_of(plan.layouts[0]))))
    return course


def _axis(layout: PricedLayout, axis: str) -> object:
    """A layout's value of an axis by which a checkpoint's row knows it."""
    if axis == "layers":
        return tuple((stage.chunks, stage.holds) for stage in layout.stages)
    return getattr(layout.parallelism, axis)


def _no_layout(phase: Phase, plan: PhaseLayouts, reason: str) -> SpecError:
    """The error of a batch that grows in steps which no layout found can run, with steps that the best one can."""
    sizes = plan.plan.parallelism
    quantum = sizes.dp * sizes.micro_batch_size * (sizes.pp if sizes.vpp > 1 else 1)
    first, *_, last = (batch.global_batch_size for batch in phase.batches)
    start = max(round(first / quantum), 1) * quantum
    wanted = phase.batches[1].global_batch_size - first if len(phase.batches) > 1 else quantum
    by = math.gcd(last - start, max(round(wanted / quantum), 1) * quantum)
    return SpecError(
        f"phase {phase.name}: rampup: no layout found runs every batch: {reason}",
        f"rampup: {{from: {start}, by: {by}, …}} suits the best layout of {last:,} sequences",
    )


COSTS = ("days", "days_interval", "gpu_hours", "usd", "usd_interval", "mwh")


def answer_of(course: Course, command: str = "") -> PhasesAnswer:
    """The answer of phases that are planned."""
    chosen = course.chosen()
    stops = [number for number, key in enumerate(chosen) if course.stops(number, chosen[number - 1], key)]
    answers = tuple(_phase(course, number, chosen) for number in range(len(chosen)))
    changes = tuple(_change(course, number, chosen) for number in stops)
    return PhasesAnswer(command=command, phases=answers, total=_total(course, answers, chosen), changes=changes)


def _run(course: Course, number: int, key: Key) -> PhaseRun:
    run = course.run(number, key)
    assert isinstance(run, PhaseRun), "a layout was chosen that runs"
    return run


def _phase(course: Course, number: int, chosen: Sequence[Key]) -> PhaseAnswer:
    phase, own, key = course.phases[number], course.found[number].plan, chosen[number]
    run, training, before = _run(course, number, key), phase.case.training, chosen[number - 1]
    kept = course.kept(number, before)[1] if number else ""
    plan = plan_in(phase, own, run)
    steps = [batch.tokens / batch.global_batch_size / training.seq_length for batch in phase.batches]
    tokens_per_s = run.cost.tokens / sum(count * step_s for count, step_s in zip(steps, run.steps_s, strict=True))
    grown = [
        BatchStep(global_batch_size=batch.global_batch_size, tokens=batch.tokens, steps=count, step_s=step_s)
        for batch, count, step_s in zip(phase.batches, steps, run.steps_s, strict=True)
    ]
    fastest = min(course.runs_of(number).values(), key=lambda other: other.wall_s)
    documents, step = masked_documents(training, plan.runtime_spec), plan.step
    return PhaseAnswer(
        name=phase.name,
        tokens=run.cost.tokens,
        steps=sum(steps),
        seq_length=training.seq_length,
        global_batch_size=training.global_batch_size,
        batches=tuple(grown) if phase.grows else (),
        num_gpus=own.cluster.num_gpus,
        dtype=training.dtype,
        document_fraction=2 * float(attended_fraction(documents, training.seq_length, 0)) if documents else 1.0,
        layout="first" if not number else "kept" if before[0] == key[0] else "resharded",
        stop_s=course.change_s(number, before, key) if number else 0.0,
        step_s=step.step_s,
        step_s_interval=step.step_s_interval,
        tokens_per_s=tokens_per_s,
        mfu=step.mfu * tokens_per_s / step.tokens_per_s,
        **{name: getattr(run.cost, name) for name in COSTS},
        effective_fraction=run.goodput.effective_fraction,
        own_layout=str(fastest.layout.parallelism),
        own_days=fastest.cost.days,
        kept_days=kept.cost.days if isinstance(kept, PhaseRun) else None,
        kept_refused="" if isinstance(kept, PhaseRun) else kept,
        plan=plan,
    )


def _change(course: Course, number: int, chosen: Sequence[Key]) -> LayoutChange:
    """The stop before a phase: what changes, what that saves as long as it stays, and what it costs."""
    before, after, stays = chosen[number - 1], chosen[number], number + 1
    while stays < len(chosen) and chosen[stays][0] == after[0]:
        stays += 1
    saved = 0.0 if before[0] == after[0] else _saved_days(course, range(number, stays), before, chosen)
    costs_s = course.change_s(number, before, after) - course.change_s(number, before, before)
    return LayoutChange(
        before=course.phases[number - 1].name,
        after=course.phases[number].name,
        resharded=before[0] != after[0],
        why=", ".join(course.phases[number].changes_from(course.phases[number - 1])) or "layout",
        from_layout=str(_run(course, number - 1, before).layout.parallelism),
        to_layout=str(_run(course, number, after).layout.parallelism),
        gains_days=saved,
        kept_refused="" if isinstance(kept := course.kept(number, before)[1], PhaseRun) else kept,
        costs_days=costs_s / SECONDS_PER_DAY,
        saved_as=_saved_as(course, number, before, after),
        stop_s=course.change_s(number, before, after),
    )


def _saved_days(course: Course, numbers: range, before: Key, chosen: Sequence[Key]) -> float | None:
    """Days that phases take more in the layout before them than in those chosen; None where one cannot run in it."""
    saved = 0.0
    for number in numbers:
        before, old = course.kept(number, before)
        if not isinstance(old, PhaseRun):
            return None
        saved += old.cost.days - _run(course, number, chosen[number]).cost.days
    return saved


def _saved_as(course: Course, number: int, before: Key, after: Key) -> str:
    """The option or the tool without which the other layout cannot load the checkpoint; empty if it needs none."""
    if course.loads(number, before, after) == "as_is":
        return ""
    row = checkpoint_of(course.found[number - 1].plan.runtime_spec, course.layouts[before][0].parallelism.zero_stage)
    return "" if row.rewritten is None else row.rewritten.ready or row.rewritten.says


def _total(course: Course, phases: Sequence[PhaseAnswer], chosen: Sequence[Key]) -> RunTotal:
    """Sums over phases and the stops before them, in which GPUs cost as much as in the phase."""
    spans = [_span(course, number, phase, chosen) for number, phase in enumerate(phases)]
    low, days, high = (sum(ends) for ends in zip(*spans, strict=True))

    def total(name: str, end: int = 1) -> float | None:
        values = [(getattr(phase, name), span[end] / phase.days) for phase, span in zip(phases, spans, strict=True)]
        return None if any(value is None for value, _ in values) else sum(value * share for value, share in values)

    usd_low, usd_high = total("usd", 0), total("usd", 2)
    return RunTotal(
        tokens=sum(phase.tokens for phase in phases),
        days=days,
        days_interval=(low, high),
        gpu_hours=total("gpu_hours") or 0.0,
        usd=total("usd"),
        usd_interval=None if usd_low is None or usd_high is None else (usd_low, usd_high),
        mwh=total("mwh"),
        stops_s=sum(phase.stop_s for phase in phases),
        effective_fraction=sum(phase.days * phase.effective_fraction for phase in phases) / days,
    )


def _span(course: Course, number: int, phase: PhaseAnswer, chosen: Sequence[Key]) -> tuple[float, float, float]:
    """Days of a phase and of the stop before it, with both ends of their interval."""
    low, high = phase.days_interval or (phase.days, phase.days)
    stop_s = (0.0, 0.0, 0.0)
    if course.stops(number, chosen[number - 1], chosen[number]):
        stop = course.stop(number, chosen[number - 1], chosen[number])
        assert stop is not None, "a course was chosen that can be loaded"
        low_s, high_s = stop.interval_s
        stop_s = (phase.stop_s - stop.value_s + low_s, phase.stop_s, phase.stop_s - stop.value_s + high_s)
    low_s, value_s, high_s = (seconds / SECONDS_PER_DAY for seconds in stop_s)
    return low + low_s, phase.days + value_s, high + high_s
