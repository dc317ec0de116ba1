"""The course of a run through its phases: the layout of each with which phases and stops together take least.

Staying in a layout costs nothing where the job can go on, which batch and data alone allow. Everything else is a stop:
the checkpoint is written, a new job starts and reads it. The best course is a shortest path, phase by phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from planner.answer import Interval, PricedLayout
from planner.decide.phases import GRID, Asked, Found, Phase, Run, found, run_in, tried
from planner.decide.processes import Each
from planner.errors import PlannerError, SpecError
from planner.months.whole_run import planned_stop_s
from planner.trainers.spec import RuntimeSpec

Key = tuple[object, ...]
SECONDS_PER_HOUR = 3600


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
    """What each rank holds of the model: layouts that are alike in it need no other checkpoint."""
    chunks = tuple((stage.chunks, stage.holds) for stage in layout.stages)
    return (*(getattr(layout.parallelism, axis) for axis in GRID), chunks)


@dataclass(frozen=True)
class Course:
    """Phases with their own plans, the layouts that are tried, and what each phase takes in them."""

    phases: tuple[Phase, ...]
    found: tuple[Found, ...]
    reshard_s: float = 0.0
    known: dict[tuple[int, Key], Run | str] = field(default_factory=dict)
    """What each phase takes in a layout, or the reason why it cannot run there, as far as it was asked for."""

    @cached_property
    def layouts(self) -> dict[Key, tuple[PricedLayout, int]]:
        """All layouts, with the phase that each was found for."""
        pairs = [(layout, number) for number, plan in enumerate(self.found) for layout in plan.layouts]
        return {key_of(layout): (layout, number) for layout, number in reversed(pairs)}

    def tried(self, number: int) -> list[Key]:
        """The layouts that a phase is tried in: its own, and the best of the phases without a stop between them.

        Behind a stop any layout can be chosen, so that others matter only where resharding itself costs something.
        """
        phases = self.phases
        going_on = [i > 0 and phase.goes_on_from(phases[i - 1]) for i, phase in enumerate(phases)]
        others = [
            plan.layouts
            for i, plan in enumerate(self.found)
            if self.reshard_s or all(going_on[min(i, number) + 1 : max(i, number) + 1])
        ]
        layouts = (*self.found[number].layouts, *(layout for found in others for layout in found[:1]))
        return list(dict.fromkeys(map(key_of, layouts)))

    def asked(self, number: int) -> Asked:
        """What is to be tried in a phase; after a stop also the best layout that leaves all ranks what they hold."""
        before = self.phases[number - 1]
        stops = number > 0 and not self.phases[number].goes_on_from(before)
        layouts = tuple(self.in_phase(number, key) for key in self.tried(number))
        grid = self.found[number - 1].layouts[0] if stops else None
        return Asked(self.phases[number], self.found[number].plan, layouts, grid)

    def kept(self, number: int, before: Key) -> tuple[Key, Run | str]:
        """The best layout of a phase in which ranks hold what they held before, and its run or why it has none.

        Where the job goes on, nothing of the layout may change.
        """
        alike = {key: run for key, run in self.runs_of(number).items() if key[0] == before[0]}
        if alike and self.stops(number, before, before):
            return min(alike.items(), key=lambda pair: pair[1].wall_s)
        return before, self.run(number, before)

    def in_phase(self, number: int, key: Key) -> tuple[PricedLayout, RuntimeSpec]:
        """A layout and its runtime in a phase: its own, or that of the phase's plan where its own may not run."""
        layout, origin = self.layouts[key]
        own = self.found[number].plan.runtime_spec
        may_run = self.phases[number].has_runtime_of(self.phases[origin])
        return layout, (layout.runtime_spec or own) if may_run else own

    def run(self, number: int, key: Key) -> Run | str:
        """What a phase takes in a layout, or the reason why it cannot run there."""
        if (number, key) not in self.known:
            layout, runtime = self.in_phase(number, key)
            self.known[number, key] = run_in(self.phases[number], self.found[number].plan, layout, runtime)
        return self.known[number, key]

    def stop_s(self, number: int) -> tuple[float, Interval]:
        """Seconds of a stop before a phase, with their interval."""
        own = self.found[number].plan
        num_bytes = own.runtime_spec.checkpoint_bytes_per_parameter * own.model.num_parameters
        return planned_stop_s(own.cluster, own.training, own.cluster.num_gpus, num_bytes)

    def stops(self, number: int, before: Key, after: Key) -> bool:
        """True where a new job has to start between two layouts."""
        return number > 0 and (before != after or not self.phases[number].goes_on_from(self.phases[number - 1]))

    def change_s(self, number: int, before: Key, after: Key) -> float:
        """Seconds between the phase before and a phase."""
        stop_s = self._stops_s[number] if self.stops(number, before, after) else 0.0
        return stop_s + (self.reshard_s if before[0] != after[0] else 0.0)

    @cached_property
    def _stops_s(self) -> list[float]:
        return [self.stop_s(number)[0] for number in range(len(self.phases))]

    def chosen(self) -> list[Key]:
        """The layout of each phase with which the whole run takes least."""
        tried = [self.runs_of(number) for number in range(len(self.phases))]
        return shortest([{key: run.wall_s for key, run in each.items()} for each in tried], self.change_s)

    def runs_of(self, number: int) -> dict[Key, Run]:
        """What a phase takes in each layout that was tried and runs there."""
        return {key: run for (at, key), run in self.known.items() if at == number and isinstance(run, Run)}


def course_of(phases: Sequence[Phase], each: Each, reshard_hours: float = 0.0) -> Course:
    """Plan every phase, and try it in the layouts of the others. Raises the error of a phase that cannot be planned."""
    plans = []
    for phase, plan in zip(phases, each(found, phases), strict=True):
        if isinstance(plan, PlannerError):
            plan.message = f"phase {phase.name}: {plan.message}"
            raise plan
        plans.append(plan)
    course = Course(tuple(phases), tuple(plans), reshard_hours * SECONDS_PER_HOUR)
    asked = [course.asked(number) for number in range(len(phases))]
    for number, (answers, layout, run) in enumerate(each(tried, asked)):
        keys = course.tried(number)
        course.known.update({(number, key): answer for key, answer in zip(keys, answers, strict=True)})
        if layout is not None:
            plans[number] = replace(plans[number], layouts=(*plans[number].layouts, layout))
            course.known.setdefault((number, key_of(layout)), run)
        if not course.runs_of(number):
            raise _no_layout(phases[number], plans[number], str(answers[0]))
    return replace(course, found=tuple(plans))


def _no_layout(phase: Phase, plan: Found, reason: str) -> SpecError:
    """The error of a batch that grows in steps which no layout found can run, with steps that the best one can."""
    sizes = plan.plan.parallelism
    quantum = sizes.dp * sizes.micro_batch_size * (sizes.pp if sizes.vpp > 1 else 1)
    first, last = phase.batches[0].global_batch_size, phase.batches[-1].global_batch_size
    start = max(round(first / quantum), 1) * quantum
    wanted = phase.batches[min(1, len(phase.batches) - 1)].global_batch_size - first
    steps = [by for by in range(quantum, max(last - start, quantum) + 1, quantum) if (last - start) % by == 0]
    by = min(steps, key=lambda by: abs(by - wanted), default=quantum)
    return SpecError(
        f"phase {phase.name}: rampup: no layout found runs every batch: {reason}",
        f"rampup: {{from: {start}, by: {by}, …}} suits the best layout of {last:,} sequences",
    )
