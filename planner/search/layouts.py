"""The fastest layouts of a job under a few recipes: shapes are priced under each, and searched together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.answer import Plan, SearchReport
from planner.layout.assemble import assemble
from planner.layout.candidate import Candidate
from planner.layout.evaluate import pricing_of
from planner.layout.price import price_layout
from planner.search.branch import Branch
from planner.search.case import Case
from planner.search.deadline import Deadline
from planner.search.enumerate import Rejections, enumerate_shapes
from planner.search.frontier import ANY_SET, ONE_SET, Frontier
from planner.search.ilp.translate import RecomputeChoice
from planner.search.priced_shapes import PricedShapes, fits, priced_shapes, with_module_sets, without_beaten
from planner.search.schedules import by_runtime, schedules_tried
from planner.search.why.misses import NothingFits, count_misfits
from planner.search.why.refused import NothingLegal
from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.specs.training import SearchLimits
from planner.trainers.load import switches_of
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES, read_recipe

Priced = Sequence[tuple[PricedShapes, SearchLimits]]
"""The same shapes, priced for one runtime each, with limits that name the schedules that it runs."""


@dataclass(frozen=True, slots=True)
class Standing:
    """A search over layouts in the middle: what its certificate would say if it ended now."""

    best: Candidate
    bound_s: float
    """No layout that fits has a shorter step, among those that this search is about."""
    num_shapes: int
    num_fitting: int
    num_ilps: int

    def plan(self) -> Plan:
        """The plan of the best layout so far, without alternatives, worth of switches and the like."""
        pricing = self.best.pricing
        totals = pricing.totals
        layout = price_layout(self.best, totals, exact=False)
        bound_s = min(self.bound_s, layout.step.step_s)
        report = SearchReport(
            num_shapes=self.num_shapes,
            num_fitting=self.num_fitting,
            num_ilps=self.num_ilps,
            outcome="feasible",
            lower_bound_s=bound_s,
            gap=layout.step.step_s / bound_s - 1,
        )
        return assemble(pricing, totals, [layout], (), report)


News = Callable[[Standing], None]
"""Something that is told how a search stands, as often as that changes."""


@dataclass(frozen=True)
class Found:
    """The end of one search over layouts."""

    branch: Branch
    frontier: Frontier
    priced: Priced
    rejections: Rejections
    num_fitting: int

    @property
    def best(self) -> Candidate:
        """The fastest candidate."""
        best = self.branch.best
        assert best is not None, "a search without a candidate raises"
        return best


def find_layouts(
    case: Case,
    runtimes: Sequence[RuntimeSpec],
    deadline: Deadline,
    known: Candidate | None = None,
    news: News | None = None,
) -> Found:
    """Search the layouts of a case under each of the runtimes; `known` is a candidate that others must beat.

    `news` is told how the search stands while it runs.

    Raises NothingLegal or NothingFits if there is no layout, and SolverError if the solver could not say so.
    """
    model, limits = case.model, case.limits
    legal_shapes, rejections = enumerate_shapes(model, case.cluster, case.training, limits, case.runtime)
    if not len(np.atleast_1d(legal_shapes.tp)):
        raise NothingLegal(rejections)
    deadline.check("enumerating shapes")
    choices: dict[RuntimeSpec, tuple[RecomputeChoice, ...]] = {}
    priced = []
    for shapes, tried in _priced(case, runtimes, legal_shapes, deadline):
        ways = recompute_choices(model, shapes.pricing.runtime, limits)
        if any(way.base == "selective" for way in ways):
            shapes = with_module_sets(shapes)
            deadline.check("pricing shapes")
        if shapes.module_sets is not None:
            ways = tuple(ANY_SET if way == ONE_SET else way for way in ways)
        choices[shapes.pricing.runtime] = ways
        priced.append((shapes, tried))
    may_fit = [fits(shapes, schedules_tried(tried, shapes.pricing.runtime)) for shapes, tried in priced]
    fitting = np.flatnonzero(np.any(may_fit, axis=0))
    count_misfits(case, priced[0][0], fitting, rejections)
    branch = Branch(limits, choices, deadline, rejections)
    if known is not None:
        branch.keep(known)
    if news is not None:
        branch.news = _teller(news, branch, len(np.atleast_1d(legal_shapes.tp)), len(fitting))
    frontier = branch.run([(shapes.take(fitting), tried) for shapes, tried in priced])
    branch.try_uneven_chunks(frontier)
    if branch.best is None and not branch.num_ilps and "no_schedule" in rejections.counts:
        raise NothingLegal(rejections)
    if branch.best is None and branch.failures:  # nobody knows whether those nodes have a layout that fits
        raise branch.failures[-1]
    if branch.best is None:
        rejections.counts.setdefault("does_not_fit", len(priced[0][0].kernel))
        raise NothingFits(case, rejections.counts)
    return Found(branch, frontier, priced, rejections, len(fitting))


def _teller(news: News, branch: Branch, num_shapes: int, num_fitting: int) -> Callable[[float], None]:
    """A function of the bound that tells how the search stands."""

    def tell(bound_s: float) -> None:
        best = branch.best
        if best is not None:
            news(Standing(best, bound_s, num_shapes, num_fitting, branch.num_ilps))

    return tell


def _priced(case: Case, runtimes: Sequence[RuntimeSpec], shapes: Shape, deadline: Deadline) -> Priced:
    """The shapes under each runtime that may recompute as the user allows, without what another runtime beats."""
    model, cluster, training, limits = case.model, case.cluster, case.training, case.limits
    priced = []
    for runtime in runtimes:
        for priced_as, tried in by_runtime(limits, runtime):
            if recompute_choices(model, priced_as, limits):
                pricing = pricing_of(model, cluster, training, priced_as, limits)
                priced.append((priced_shapes(pricing, shapes), tried))
                deadline.check("pricing shapes")
    kept = without_beaten([each for each, _ in priced], [_stricter(each.pricing.runtime) for each, _ in priced])
    return [
        (each, tried)
        for each, (_, tried) in zip(kept, priced, strict=True)
        if each.beaten is None or not each.beaten.all()
    ]


def _stricter(runtime: RuntimeSpec) -> frozenset[str]:
    """The switches that are not at their plainest value; they restrict the layouts that the runtime takes.

    So does each value of a switch that divides them, and in another way than its others do.
    """
    recipe = read_recipe(runtime, switches_of(runtime))
    moved = {name for name, value in recipe.items() if value != next(iter(SWITCHES[name].values))}
    dividing = {f"{name} {value}" for name, value in recipe.items() if SWITCHES[name].divides_layouts}
    return frozenset(moved | dividing)


def recompute_choices(model: ModelSpec, runtime: RuntimeSpec, limits: SearchLimits) -> tuple[RecomputeChoice, ...]:
    """The ways to recompute that the trainer can be told with its recipe and the user allows."""
    allowed = limits.recompute or ("none", *(("selective",) if runtime.has_sequence_parallel else ()), "full")
    if not runtime.recomputes_layers:
        allowed = tuple(mode for mode in allowed if mode != "full")
    choices = []
    if "none" in allowed and "full" in allowed and runtime.recompute_per_stage:
        choices.append(RecomputeChoice("none", "per_stage"))
    elif "none" in allowed and "full" in allowed and len(model.kinds) == 1 and runtime.recomputes_some_layers:
        # one number of layers for all stages counts layers, not kinds
        choices.append(RecomputeChoice("none", "one_count"))
    elif "none" in allowed:
        choices.append(RecomputeChoice("none", "none"))
    if "selective" in allowed:
        choices.append(RecomputeChoice("selective", "none"))
    if "full" in allowed and not (runtime.recompute_per_stage and "none" in allowed):
        choices.append(RecomputeChoice("none", "all"))
    return tuple(choices)
