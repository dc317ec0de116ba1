"""The fastest layouts of a job under a few recipes: shapes are priced under each, and searched together.

A search has a first layout whatever its time limit is: the fastest of those that tuned recipes would try.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from planner.answer import Plan, SearchReport
from planner.errors import Infeasible
from planner.layout.candidate import Candidate
from planner.layout.evaluate import assemble, pricing_of
from planner.layout.price import price_layout
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import fits_host
from planner.record import record
from planner.search.branch import Branch
from planner.search.case import PATIENCE_S, Case, Deadline
from planner.search.enumerate import Bar, by_runtime, enumerate_shapes
from planner.search.frontier import ONE_SET, Frontier, bound_of_shapes_s, choices_of, recompute_choices
from planner.search.priced_shapes import (
    PricedShapes,
    fits,
    priced_shapes,
    with_module_sets,
    with_used_kernels,
    without,
    without_beaten,
)
from planner.search.recipes import Recipes
from planner.search.why.misses import NothingFits, NothingLegal, count_misfits
from planner.shape import FloatArray, Shape, divisors
from planner.specs.training import SearchLimits
from planner.trainers.load import switches_of
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES, read_recipe

MOST_FIRST_ILPS = 4
"""Integer programs of a first search, which those of very deep models would fill with minutes."""


@record(slots=False)
class Standing:
    """A search over layouts in the middle or at its end: what its certificate would say."""

    branch: Branch
    bound_s: float
    """No layout that fits has a shorter step, among those that this search is about."""

    @property
    def best(self) -> Candidate:
        """The fastest candidate."""
        best = self.branch.best
        assert best is not None, "a search without a candidate raises, or has no news"
        return best

    def plan(self) -> Plan:
        """The plan of the best layout so far, without alternatives, worth of switches and the like."""
        pricing, branch = self.best.pricing, self.branch
        totals = pricing.totals
        layout = price_layout(self.best, totals, exact=False)
        bound_s = min(self.bound_s, layout.step.step_s)
        report = SearchReport(
            num_shapes=branch.num_shapes,
            num_fitting=branch.num_fitting,
            num_ilps=branch.num_ilps,
            outcome="feasible",
            lower_bound_s=bound_s,
            gap=layout.step.step_s / bound_s - 1,
        )
        return assemble(pricing, totals, [layout], (), report)


News = Callable[[Standing], None]
"""A listener for the state of a search, called when it changes."""


@record(slots=False)
class FoundLayouts(Standing):
    """The end of one search over layouts."""

    frontier: Frontier
    priced: Sequence[PricedShapes]
    """The same shapes, priced for one runtime each."""
    pricings: tuple[tuple[Pricing, SearchLimits], ...]
    """The prices that shapes were searched under, with the schedules of each."""


def find_layouts(
    case: Case,
    runtimes: Sequence[RuntimeSpec],
    deadline: Deadline,
    known: Candidate | None = None,
    news: News | None = None,
    is_first: bool = False,
) -> FoundLayouts:
    """Search the layouts of a case under each of the runtimes; `known` is a candidate that others must beat.

    `news` is told how the search stands while it runs. A search that is only the first one proves nothing, and tries
    no uneven chunks.

    Raises NothingLegal or NothingFits if there is no layout, and SolverError if the solver could not say so.
    """
    limits = case.limits
    tried = _pricings(case, runtimes)
    bar = None
    if known is not None:
        bar = Bar(known.step_s / (1 + limits.gap_fraction), lambda kernels: _least_work_s(tried, kernels))
    legal_shapes, rejections = enumerate_shapes(case, bar)
    num_shapes = np.size(legal_shapes.tp)
    if not num_shapes and known is None:
        raise NothingLegal(rejections, case)
    all_priced = _promising(tried, legal_shapes, bar) if num_shapes else []
    fitting = np.flatnonzero(np.any(list(map(fits, all_priced)), axis=0)) if all_priced else np.zeros(0, int)
    if all_priced:
        count_misfits(case, all_priced[0], fitting, rejections)
    taken = [_on_their_hosts(shapes.take(fitting)) for shapes in all_priced if len(fitting)]
    priced = [_with_sets(with_used_kernels(shapes)) for shapes in taken if not shapes.is_beaten]
    branch = Branch(limits, deadline, rejections, num_shapes=num_shapes, num_fitting=len(fitting))
    if is_first:
        branch.most_ilps = MOST_FIRST_ILPS
    if known is not None:
        branch.keep(known)
    if bar is not None:
        branch.lower_bound_s = bar.passed_over_s
    if news is not None:
        branch.news = _teller(news, branch)
    frontier = branch.run(priced)
    if not is_first:
        branch.try_same_grid(frontier)
        branch.try_uneven_chunks(frontier)
    if branch.best is None:
        raise _no_layout(case, branch)
    return FoundLayouts(branch, branch.lower_bound_s, frontier, priced, tuple(tried))


def _no_layout(case: Case, branch: Branch) -> Exception:
    """The reason why a search found no layout: none is legal, the solver failed, or none fits."""
    counts = branch.rejections.counts
    if not branch.num_ilps and counts.keys() & {"no_schedule", "recipe"}:
        return NothingLegal(branch.rejections, case)
    if branch.failures:  # nobody knows whether those nodes have a layout that fits
        return branch.failures[-1]
    counts.setdefault("does_not_fit", branch.num_shapes)
    return NothingFits(case, counts)


def _pricings(case: Case, runtimes: Sequence[RuntimeSpec]) -> list[tuple[Pricing, SearchLimits]]:
    """The prices under each runtime that may recompute as the user allows, with limits that name its schedules.

    Runtimes that mean the same for the job are priced once.
    """
    priced = {
        (pricing.runtime, tried.schedule): (pricing, tried)
        for runtime in runtimes
        for priced_as, tried in by_runtime(case.limits, runtime)
        if recompute_choices(case.model, priced_as, case.limits)
        for pricing in [pricing_of(case.model, case.cluster, case.training, priced_as, case.limits)]
    }
    return list(priced.values())


def _least_work_s(tried: Sequence[tuple[Pricing, SearchLimits]], kernels: Shape) -> FloatArray:
    """The least seconds of a micro-batch through the whole model under any of the prices."""
    return np.asarray(reduce(np.minimum, [pricing.least_work_s(kernels) for pricing, _ in tried]))


def _promising(pricings: Sequence[tuple[Pricing, SearchLimits]], shapes: Shape, bar: Bar | None) -> list[PricedShapes]:
    """The shapes under each runtime, without those that another runtime beats, or that the bar beats under all."""
    all_priced = [priced_shapes(pricing, shapes, limits) for pricing, limits in pricings]
    kept = without_beaten(all_priced, [_stricter(pricing.runtime) for pricing, _ in pricings])
    if bar is not None:
        promising = [bar.passes(bound_of_shapes_s(each)) for each in kept]
        left = np.flatnonzero(np.any(promising, axis=0))
        kept = [without(each, ~mask).take(left) for each, mask in zip(kept, promising, strict=True)]
    return [each for each in kept if not each.is_beaten]


def _on_their_hosts(shapes: PricedShapes) -> PricedShapes:
    """The shapes without those whose host has too little memory for what waits there."""
    fit = np.broadcast_to(fits_host(shapes.pricing, shapes.shape), np.shape(shapes.shape.tp))
    return without(shapes, np.logical_not(fit))


def _with_sets(shapes: PricedShapes) -> PricedShapes:
    """The shapes with every useful set of modules to recompute, where that is tried."""
    return with_module_sets(shapes) if ONE_SET in choices_of(shapes) else shapes


def _teller(news: News, branch: Branch) -> Callable[[float], None]:
    """A function of the bound that tells how the search stands."""
    return lambda bound_s: news(Standing(branch, bound_s))


def _stricter(runtime: RuntimeSpec) -> frozenset[str]:
    """The switches that are not at their plainest value; they restrict the layouts that the runtime takes.

    So does each value of a switch that divides them, and in another way than its others do.
    """
    recipe = read_recipe(runtime, switches_of(runtime))
    moved = {name for name, value in recipe.items() if value != SWITCHES[name].plainest}
    dividing = {f"{name} {value}" for name, value in recipe.items() if SWITCHES[name].divides_layouts}
    return frozenset(moved | dividing)


BATCHES = (1, 2, 4)
"""Micro-batch sizes that are tried, where they divide the batch."""
LEAST_CP_TOKENS = 4096
"""Least tokens of a sequence on a context-parallel rank."""
FEW_STAGES = (1, 2, 4, 8, 16)
"""Numbers of stages that are tried beside those that divide the number of GPUs."""
BUNDLES_TRIED = 2
"""Bundles of switches that are tried, those that promise most."""
FIRST_GAP = 0.05
"""Gap at which the first layout is good enough."""


def first_layouts(
    case: Case,
    recipes: Recipes,
    deadline: Deadline | None = None,
    known: Candidate | None = None,
    starts: Sequence[RuntimeSpec] = (),
) -> FoundLayouts | None:
    """A search for a layout within `FIRST_GAP`: among few shapes under the quickest bundles, else with small batches.

    Bundles to start from may be given.

    Without a deadline it has `PATIENCE_S`; others must beat a `known` candidate, with its recipe, by the gap that was
    asked for.
    None if it does not say whether anything fits. Raises NothingFits if nothing does: what does not fit in the smallest
    micro-batch fits in none. Raises SolverError if the solver fails.
    """
    deadline = deadline or Deadline(PATIENCE_S)
    gap_fraction = max(FIRST_GAP, case.limits.gap_fraction) if known is None else case.limits.gap_fraction
    narrow, light = (
        case.limited(top=1, gap_fraction=gap_fraction, **limits) for limits in (_narrow(case), _light(case))
    )
    starts = [known.pricing.runtime] if known is not None else starts or _quickest(narrow, recipes.starts())
    try:
        return find_layouts(narrow, starts, deadline, known, is_first=True)
    except Infeasible:
        pass
    try:
        return find_layouts(light, recipes.starts(), deadline, is_first=True)
    except NothingFits:
        if case.runtime.counts_moments:  # a step's only micro-batch may free its activations for gradients
            return None
        raise
    except Infeasible:
        return None


def some_layout(
    case: Case, deadline: Deadline, known: Candidate | None = None, starts: Sequence[RuntimeSpec] = ()
) -> Plan:
    """The plan of the first layout of a case that is found to fit, or of a `known` one that none of the first beats.

    It is searched for under the recipes of `starts`, or that of the known one. Raises Infeasible if there is none,
    SolverError if time is up before that is known.
    """
    recipes = Recipes.of(case)
    found = first_layouts(case, recipes, deadline, known, starts) or find_layouts(case, recipes.starts(), deadline)
    return found.plan()


def _quickest(case: Case, runtimes: Sequence[RuntimeSpec]) -> list[RuntimeSpec]:
    """The `BUNDLES_TRIED` runtimes under which the least work of any kernel is the least, over a few kernels."""
    if len(runtimes) <= BUNDLES_TRIED:
        return list(runtimes)
    moe, limits = case.model.moe, case.limits
    eps = limits.ep or ([1] if moe is None else divisors(moe.num_experts, case.cluster.num_gpus))
    tps = limits.tp or [tp for tp in (1, 2, 4, 8) if tp <= case.cluster.nvlink_domain_size]
    tp, cp, ep, size = np.ix_(tps, limits.cp or [1], eps, limits.micro_batch_size or [1])
    kernels = Shape(
        tp=tp, cp=cp, ep=ep, dp=ep, micro_batch_size=size, seq_length=case.training.seq_length,
        sequence_parallel=(tp > 1) * int(case.runtime.has_sequence_parallel),
    )  # fmt: skip
    least_s = []
    for runtime in runtimes:
        pricing = pricing_of(case.model, case.cluster, case.training, runtime, case.limits)
        least_s.append(float(np.min(pricing.least_work_s(kernels) * tp * cp / size)))
    return [runtimes[index] for index in sorted(np.argsort(least_s, kind="stable")[:BUNDLES_TRIED].tolist())]


def _light(case: Case) -> dict[str, Any]:
    """The smallest micro-batch that the user and the objective allow and the batch divides into."""
    batch, least = case.training.global_batch_size, case.training.objective.row.num_sequences
    sizes = [size for size in case.limits.micro_batch_size or (least,) if batch % size == 0]
    return {"micro_batch_size": (min(sizes),)} if sizes else {}


def _narrow(case: Case) -> dict[str, Any]:
    """The values of each axis that the user left free."""
    training, cluster, layers = case.training, case.cluster, case.model.num_hidden_layers
    gpus = cluster.num_gpus
    stages = {*divisors(gpus, layers), *(pp for pp in FEW_STAGES if pp <= min(layers, gpus))}
    few: dict[str, list[int]] = {
        "micro_batch_size": [size for size in BATCHES if training.global_batch_size % size == 0],
        "cp": [
            cp for cp in divisors(training.seq_length, gpus) if cp == 1 or training.seq_length >= cp * LEAST_CP_TOKENS
        ],
        "etp": [1],
        "pp": sorted(stages),
    }
    return {axis: tuple(values) for axis, values in few.items() if values and getattr(case.limits, axis) is None}
