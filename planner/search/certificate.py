"""The certificate of a search: what was searched, what was left out, and how sure the answer is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.answer import Searched, SearchReport
from planner.schedule.orders import SCHEDULES
from planner.search.layouts import Found
from planner.search.module_sets import MAX_SETS, Modules
from planner.search.recipes import Recipes
from planner.search.schedules import schedules_tried
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES, written


def certificate(rounds: Sequence[Found], recipes: Recipes, step_s: float, seconds: float) -> SearchReport:
    """A report of how sure the answer is: proven within the asked gap, bounded by a wider one, or stopped by time.

    The gap is how far the replayed best step is above the least bound of all nodes of all rounds. A best layout with
    uneven chunks, or with a switch that was moved around it, may be faster than that bound; then there is no gap.
    """
    branches = [found.branch for found in rounds]
    pricings = [pair for found in rounds for pair in found.pricings]
    limits = recipes.case.limits
    bound_s = min(step_s, *(branch.lower_bound_s for branch in branches))
    tried = [name for pricing, some in pricings for name in schedules_tried(some, pricing.runtime)]
    schedules = tuple(name for name in dict.fromkeys(tried) if name != "none")
    gap = step_s / bound_s - 1
    is_closed = gap <= limits.gap_fraction * (1 + 1e-9)
    is_complete = all(branch.complete for branch in branches)
    return SearchReport(
        num_shapes=rounds[0].num_shapes,
        num_fitting=rounds[0].num_fitting,
        num_ilps=sum(branch.num_ilps for branch in branches),
        seconds=seconds,
        outcome="feasible" if not is_complete else "proven" if is_closed else "bounded",
        lower_bound_s=bound_s,
        gap=gap,
        asked_gap_fraction=limits.gap_fraction,
        schedules=schedules,
        searched=Searched(
            schedules=schedules,
            recompute_modules=_module_sets(rounds),
            switches=_switches(recipes, [pricing.runtime for pricing, _ in pricings]),
            chunks="equal" if _interleaves(schedules) else "any",
        ),
        unsearched=tuple(_unsearched(rounds, schedules, recipes)),
    )


def _switches(recipes: Recipes, runtimes: Sequence[RuntimeSpec]) -> dict[str, tuple[str, ...]]:
    """The values of the switches that were free, among those that the layouts were searched under."""
    values = {name: dict.fromkeys(SWITCHES[name].value_of(runtime) for runtime in runtimes) for name in recipes.free}
    return {name: tuple(map(written, tried)) for name, tried in values.items()}


def _module_sets(rounds: Sequence[Found]) -> tuple[Modules, ...]:
    """The sets of modules that selective recomputing was tried with."""
    if not any(way.base == "selective" for found in rounds for ways in found.branch.choices.values() for way in ways):
        return ()
    sets = [
        modules
        for found in rounds
        for shapes, _ in found.priced
        for modules in (shapes.module_sets.tables if shapes.module_sets else (shapes.pricing.selective_modules,))
    ]
    return tuple(dict.fromkeys(sets))


def _interleaves(schedules: Sequence[str]) -> bool:
    """True if ranks may hold several chunks under one of the schedules."""
    return any(SCHEDULES[name].max_vpp > 1 for name in schedules if name in SCHEDULES)


def _unsearched(rounds: Sequence[Found], schedules: Sequence[str], recipes: Recipes) -> Iterator[str]:
    """The choices that the trainer could be told and the search left out, in words, but for tries around the best."""
    if rounds[0].pricings[0][0].runtime.uneven_chunks and _interleaves(schedules):
        yield "uneven inner chunks"
    all_sets = [shapes.module_sets for found in rounds for shapes, _ in found.priced]
    if any(sets is not None and len(sets.tables) >= MAX_SETS for sets in all_sets):
        yield "other sets of modules"
    if recipes.offloads_slowly:
        yield "activations on a host behind PCIe"
    if recipes.free:
        yield "other bundles of switches"
    elif recipes.has_switches:
        yield "switches other than those given" if recipes.case.limits.switches else "other switches"
