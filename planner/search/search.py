"""The whole search, and the file to read first: three specs in, one plan out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from planner.answer import Plan, PricedLayout, Searched, SearchReport
from planner.errors import Infeasible
from planner.layout.assemble import assemble
from planner.layout.assumptions import told_assumptions
from planner.layout.candidate import Candidate
from planner.layout.evaluate import pricing_of, runtime_of
from planner.layout.expressible import export_warnings
from planner.layout.price import price_layout
from planner.physics.layers import ModelTotals, model_totals
from planner.schedule.orders import SCHEDULES
from planner.search.auto import AUTO, made_to_measure
from planner.search.branch import Branch, key_of
from planner.search.case import Case
from planner.search.deadline import Deadline
from planner.search.enumerate import enumerate_shapes
from planner.search.frontier import ANY_SET, ONE_SET
from planner.search.ilp.translate import RecomputeChoice
from planner.search.module_sets import MAX_SETS, Modules
from planner.search.priced_shapes import PricedShapes, fits, priced_shapes
from planner.search.schedules import by_runtime, check_expressible, schedules_tried
from planner.search.why.misses import NothingFits, count_misfits
from planner.search.why.refused import NothingLegal
from planner.search.why.remedy import with_remedy
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import model_of
from planner.specs.training import SearchLimits, TrainingSpec
from planner.trainers.spec import RuntimeSpec


def plan(
    model: ModelSpec | str,
    cluster: ClusterSpec,
    training: TrainingSpec,
    *,
    limits: SearchLimits | None = None,
    runtime: RuntimeSpec | str = "megatron",
) -> Plan:
    """The fastest layout of `model` on `cluster` that fits, proven within the reported gap, and its alternatives.

    Raises Infeasible if no layout is legal and fits; the error has the nearest miss, and a remedy if one was found
    within the time limit. Raises SpecError if the inputs contradict each other.
    """
    case = Case(model_of(model), cluster, training, runtime_of(runtime), limits or SearchLimits())
    deadline = Deadline(case.limits.time_limit_s)
    try:
        return search(case)
    except Infeasible as error:
        raise with_remedy(error, case, search, deadline) from None


def search(case: Case) -> Plan:
    """The plan of one case. Raises NothingLegal or NothingFits if there is none."""
    started = time.monotonic()
    deadline = Deadline(case.limits.time_limit_s)
    model, cluster, training, runtime, limits = case.model, case.cluster, case.training, case.runtime, case.limits
    check_expressible(limits, runtime)
    pricings = [
        (pricing_of(model, cluster, training, priced_as, limits), tried)
        for priced_as, tried in by_runtime(limits, runtime)
    ]
    legal_shapes, rejections = enumerate_shapes(model, cluster, training, limits, runtime)
    if not len(np.atleast_1d(legal_shapes.tp)):
        raise NothingLegal(rejections)
    deadline.check("enumerating shapes")
    choices = recompute_choices(model, runtime, limits)
    with_sets = any(choice.base == "selective" for choice in choices)
    priced = [(priced_shapes(pricing, legal_shapes, with_sets), tried) for pricing, tried in pricings]
    if priced[0][0].module_sets is not None:
        choices = tuple(ANY_SET if choice == ONE_SET else choice for choice in choices)
    deadline.check("pricing shapes")
    may_fit = [fits(shapes, schedules_tried(tried, shapes.pricing.runtime)) for shapes, tried in priced]
    shapes, fitting = priced[0][0], np.flatnonzero(np.any(may_fit, axis=0))
    count_misfits(case, shapes, fitting, rejections)
    branch = Branch(limits, choices, deadline, rejections)
    frontier = branch.run([(shapes.take(fitting), tried) for shapes, tried in priced])
    branch.try_uneven_chunks(frontier)
    branch.run_alternatives(frontier)
    best = branch.best
    if (
        best is not None
        and AUTO in (limits.schedule or ())
        and not best.pricing.runtime.compiled
        and not deadline.passed
    ):
        best = made_to_measure(best)
    if best is None and not branch.num_ilps and "no_schedule" in rejections.counts:
        raise NothingLegal(rejections)
    if best is None:
        rejections.counts.setdefault("does_not_fit", len(shapes.kernel))
        raise NothingFits(case, rejections.counts)
    others = (other for key, other in branch.candidates.items() if key != key_of(best.shape))
    candidates = [best, *sorted(others, key=lambda other: other.step_s)[: limits.top]]
    totals = model_totals(model, runtime, training.seq_length)
    layouts = [_priced(candidate, best, totals) for candidate in candidates]
    layouts[0] = layouts[0].model_copy(update={"warnings": export_warnings(best.pricing)})
    step_s, seconds = layouts[0].step.step_s, time.monotonic() - started
    report = _report(branch, priced, step_s, len(fitting), seconds)
    told = told_assumptions(best)
    return assemble(best.pricing, totals, layouts, told, report, rejections.counts, rejections.examples)


def recompute_choices(model: ModelSpec, runtime: RuntimeSpec, limits: SearchLimits) -> tuple[RecomputeChoice, ...]:
    """The ways to recompute that the trainer can be told and the user allows."""
    allowed = limits.recompute or ("none", *(("selective",) if runtime.has_sequence_parallel else ()), "full")
    choices = []
    if "none" in allowed and "full" in allowed and runtime.recompute_per_stage:
        choices.append(RecomputeChoice("none", "per_stage"))
    elif "none" in allowed and "full" in allowed and len(model.kinds) == 1:
        # one number of layers for all stages counts layers, not kinds
        choices.append(RecomputeChoice("none", "one_count"))
    elif "none" in allowed:
        choices.append(RecomputeChoice("none", "none"))
    if "selective" in allowed:
        choices.append(RecomputeChoice("selective", "none"))
    if "full" in allowed and not (runtime.recompute_per_stage and "none" in allowed):
        choices.append(RecomputeChoice("none", "all"))
    return tuple(choices)


def _priced(candidate: Candidate, best: Candidate, totals: ModelTotals) -> PricedLayout:
    runtime = candidate.pricing.runtime
    layout = price_layout(candidate, totals, exact=candidate is best)
    return layout if runtime == best.pricing.runtime else layout.model_copy(update={"runtime_spec": runtime})


def _report(
    branch: Branch,
    priced: Sequence[tuple[PricedShapes, SearchLimits]],
    step_s: float,
    num_fitting: int,
    seconds: float,
) -> SearchReport:
    """A report of how sure the answer is: proven within the asked gap, bounded by a wider one, or stopped by time.

    The gap is how far the replayed best step is above the least bound of all nodes. A best layout with uneven chunks
    may be faster than that bound, which is about equal chunks; then there is no gap.
    """
    bound_s = min(branch.lower_bound_s, step_s)
    tried = [name for shapes, limits in priced for name in schedules_tried(limits, shapes.pricing.runtime)]
    schedules = tuple(name for name in dict.fromkeys(tried) if name != "none")
    gap = step_s / bound_s - 1
    is_closed = gap <= branch.limits.gap_fraction * (1 + 1e-9)
    return SearchReport(
        num_shapes=len(priced[0][0].kernel),
        num_fitting=num_fitting,
        num_ilps=branch.num_ilps,
        seconds=seconds,
        outcome="feasible" if not branch.complete else "proven" if is_closed else "bounded",
        lower_bound_s=bound_s,
        gap=gap,
        asked_gap_fraction=branch.limits.gap_fraction,
        schedules=schedules,
        searched=Searched(
            schedules=schedules,
            recompute_modules=_module_sets(branch, priced),
            switches={},
            chunks="equal" if _interleaves(schedules) else "any",
        ),
        unsearched=tuple(_unsearched(priced[0][0], schedules)),
    )


def _module_sets(branch: Branch, priced: Sequence[tuple[PricedShapes, SearchLimits]]) -> tuple[Modules, ...]:
    """The sets of modules that selective recomputing was tried with."""
    if all(choice.base != "selective" for choice in branch.choices):
        return ()
    sets = [
        modules
        for shapes, _ in priced
        for modules in (shapes.module_sets.tables if shapes.module_sets else (shapes.pricing.selective_modules,))
    ]
    return tuple(dict.fromkeys(sets))


def _interleaves(schedules: Sequence[str]) -> bool:
    """True if ranks may hold several chunks under one of the schedules."""
    return any(SCHEDULES[name].max_vpp > 1 for name in schedules if name in SCHEDULES)


def _unsearched(shapes: PricedShapes, schedules: Sequence[str]) -> Iterator[str]:
    """The choices that the trainer could be told and the search left out, in words."""
    if shapes.pricing.runtime.uneven_chunks and _interleaves(schedules):
        yield "uneven inner chunks but those tried around the best"
    if shapes.module_sets is not None and len(shapes.module_sets.tables) >= MAX_SETS:
        yield "other sets of modules"
    yield "switches other than the trainer's defaults"
