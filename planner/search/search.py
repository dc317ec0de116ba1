"""The whole search, and the file to read first: three specs in, one plan out.

Below the search stand its certificate (what was searched, what was left out, how sure the answer is), the order of
actions that is made to measure for the chosen layout, and the offers beside the best plan: a batch nearby that the GPUs
divide better, and what more risk would buy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

from planner.answer import BatchOffer, Plan, PricedLayout, RiskOffer, Searched, SearchReport
from planner.errors import Infeasible, SolverError
from planner.layout.candidate import Candidate
from planner.layout.confidence import headroom_bytes, memory_width, oom_probability
from planner.layout.evaluate import assemble, export_warnings, host_warnings, job_of
from planner.layout.price import price_layout
from planner.layout.variation import NUM_LAYOUTS, robust_steps, told_assumptions
from planner.physics.layers import ModelTotals
from planner.schedule.orders import SCHEDULES
from planner.schedule.replay import makespan_s
from planner.search.case import Case, Deadline
from planner.search.enumerate import check_expressible, num_rows, schedules_tried
from planner.search.frontier import choices_of, key_of
from planner.search.layouts import FoundLayouts, News, find_layouts, first_layouts
from planner.search.priced_shapes import MAX_SETS, Modules
from planner.search.recipes import LEAST_GAIN, REPLAN_GAIN, Recipes, narrower, pinned, with_recipe
from planner.search.safest import exceeds_risk, safer_first, standing, with_warning
from planner.search.why.misses import NothingFits, refused_by_states
from planner.search.why.remedy import with_remedy
from planner.search.why.room import with_room
from planner.shape import NEAR_FRACTION, liked_batch
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import SearchLimits, TrainingSpec
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES, written

FEW_ROWS = 100_000
"""Rows of raw axes that are searched at once under one recipe, without a first layout to beat."""
CONTENDERS, RANKED = 3, 10
"""Steps nearly as short as the best's around whose layouts switches are moved too, and candidates that are looked at:
of those that take equally long, which are alike, the first stands for all."""


def plan(
    model: ModelSpec | str,
    cluster: ClusterSpec,
    training: TrainingSpec,
    *,
    limits: SearchLimits | None = None,
    runtime: RuntimeSpec | str | None = None,
    news: News | None = None,
) -> Plan:
    """The fastest layout of `model` on `cluster` that fits, proven within the reported gap, and its alternatives.

    Without a `runtime` it is for the trainer of such jobs. `news` is told how the search stands while it runs.
    Raises Infeasible if no layout is legal and fits; the error has the nearest miss, and a remedy if one was found
    within the time limit. Raises SpecError if the inputs contradict each other.
    """
    model, training, runtime = job_of(model, cluster, training, runtime)
    return planned(Case(model, cluster, training, runtime, limits or SearchLimits()), news)


def planned(case: Case, news: News | None = None) -> Plan:
    """The plan of a case, as `plan` has it."""
    case = pinned(case)
    deadline = Deadline(case.limits.time_limit_s)
    try:
        found = search_dtypes(case, news)
    except Infeasible as error:
        raise with_remedy(error, case, deadline) from None
    return with_room(found.model_copy(update={"batch_offer": batch_offer(found, case, deadline)}), case)


def search_dtypes(case: Case, news: News | None = None) -> Plan:
    """The plan of one case in the dtype that is fastest, of its own and those that it allows; raises as `search`."""
    found = search(case, news)
    for narrow in narrower(case):
        with suppress(Infeasible):
            found = min(found, search(narrow), key=lambda other: (exceeds_risk(other, case), other.best.step.step_s))
    return found


def search(case: Case, news: News | None = None) -> Plan:
    """The plan of one case: the fastest layout within its risk or, with a warning, the safest that fits.

    Raises NothingLegal or NothingFits if there is none.
    """
    deadline = Deadline(case.limits.time_limit_s)
    nothing = None if Recipes.of(case).dividing() else refused_by_states(case)
    if nothing is None:
        try:
            return search_within_risk(case, deadline, news)
        except NothingFits as error:
            nothing = error
    for alike in safer_first(case):
        found: list[tuple[Plan, Case]] = []
        for safer in alike:
            try:
                found.append((search_within_risk(safer, deadline), safer))
            except (Infeasible, SolverError) as error:
                if isinstance(error, SolverError) and not found:
                    raise
                nothing = error if isinstance(error, NothingFits) else nothing
            if found and deadline.passed:
                break
        if found:
            return with_warning(*min(found, key=lambda each: each[0].best.step.step_s), case)
    raise nothing


def search_within_risk(case: Case, deadline: Deadline | None = None, news: News | None = None) -> Plan:
    """The plan of one case whose layouts are all within its risk. Raises NothingLegal or NothingFits."""
    started = time.monotonic()
    deadline = deadline or Deadline(case.limits.time_limit_s)
    check_expressible(case.limits, case.runtime)
    recipes = Recipes.of(case)
    starts = recipes.starts()
    # where a search is soon over by itself, a first one would only come on top
    first = None if len(starts) == 1 and num_rows(case) <= FEW_ROWS else first_layouts(case, recipes)
    known = None if first is None else recipes.refined(first.best, deadline)
    if known is not None:
        starts = [*starts, known.pricing.runtime]
    starts = list(dict.fromkeys([*starts, *recipes.offloading(starts)]))
    rounds = [find_layouts(case, starts, deadline, known=known, news=news)]
    best = recipes.refined(rounds[0].best, deadline)
    # the layout that was best for a bundle may not be so for a moved recipe, or for one that frees memory
    if abs(best.step_s / rounds[0].best.step_s - 1) > REPLAN_GAIN and not deadline.passed:
        rounds.append(find_layouts(case, [best.pricing.runtime], deadline, known=best))
        best = recipes.refined(rounds[1].best, deadline)
    branch = rounds[-1].branch
    branch.keep(best)
    beside = [first] if first is not None else []
    branch.run_alternatives([found.frontier for found in (*rounds[-1:], *beside)])
    best, *others = _ranked([*rounds, *beside], best, recipes, deadline)
    if AUTO in (case.limits.schedule or ()) and not best.pricing.runtime.compiled and not deadline.passed:
        best = made_to_measure(best)
    totals, fastest = best.pricing.totals, best
    stands = None
    if case.limits.top > 1 and not deadline.passed:
        stands = standing(best, others, case, recipes.base)
        best, *others = stands.candidates
    layouts = [_priced(candidate, best, totals) for candidate in (best, *others)]
    warnings = host_warnings(best.pricing, best.shape) + export_warnings(best.pricing)
    layouts[0] = layouts[0].model_copy(update={"warnings": warnings})
    layouts[0] = with_recipe(layouts[0], best, recipes, lambda less, runtime: _best_of(less, runtime, deadline))
    fastest_s = layouts[0].step.step_s if best is fastest else fastest.step_s
    report = certificate(rounds, recipes, fastest_s, time.monotonic() - started)
    rejections = rounds[0].branch.rejections
    if stands is not None:
        robust = robust_steps(layouts[:NUM_LAYOUTS], stands.assumed_s)
        layouts[0] = layouts[0].model_copy(update={"robust": robust, "recommendation": stands.reason})
    told = told_assumptions(best)
    answer = assemble(best.pricing, totals, layouts, told, report, rejections.counts, rejections.examples)
    return answer.model_copy(update={"risk_offer": risk_offer(best, recipes, deadline)})


def _ranked(rounds: list[FoundLayouts], best: Candidate, recipes: Recipes, deadline: Deadline) -> list[Candidate]:
    """The best candidate, and the fastest of the other grids, with the best's recipe where that is faster.

    A grid that was second under its own recipe may be first under the one that was found around the best.
    """
    known = {key_of(best.shape): best}
    for found in rounds:
        for key, other in found.branch.candidates.items():
            if key not in known or (other.step_s < known[key].step_s and known[key] is not best):
                known[key] = other
    most = recipes.case.limits.top
    ranked = sorted(known.values(), key=lambda other: other.step_s)[: max(most, RANKED) + 1]
    moved = (_with_recipe_of(best, other, recipes) for other in ranked)
    # the best has no switch that may cost
    fair = (recipes.plainest(other) if other.step_s < best.step_s else other for other in moved)
    others = sorted(fair, key=lambda other: other.step_s)
    unlike = [next(alike) for _, alike in groupby(others, key=lambda other: f"{other.step_s:.9g}")]
    near = [other for other in unlike if other.step_s < best.step_s * (1 + REPLAN_GAIN)][:CONTENDERS]
    if len(rounds[0].pricings) == 1:  # with one bundle, recipes are too much alike for that
        near = [other for other in near if other.step_s < best.step_s * (1 - LEAST_GAIN)]
    fastest = min((recipes.refined(other, deadline) for other in near), key=lambda o: o.step_s, default=best)
    if fastest.step_s < best.step_s * (1 - LEAST_GAIN):
        best = fastest
    return [best, *(other for other in others if key_of(other.shape) != key_of(best.shape))][: most + 1]


def _with_recipe_of(best: Candidate, other: Candidate, recipes: Recipes) -> Candidate:
    """The other candidate under the best one's runtime if that is legal, fits and is faster."""
    if other.pricing.runtime == best.pricing.runtime:
        return other
    moved = recipes.priced(other, best.pricing.runtime)
    return other if moved is None or not moved.fits or moved.step_s >= other.step_s else moved


def _priced(candidate: Candidate, best: Candidate, totals: ModelTotals) -> PricedLayout:
    runtime = candidate.pricing.runtime
    layout = price_layout(candidate, totals, exact=candidate is best)
    return layout if runtime == best.pricing.runtime else layout.model_copy(update={"runtime_spec": runtime})


def certificate(rounds: Sequence[FoundLayouts], recipes: Recipes, step_s: float, seconds: float) -> SearchReport:
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
        num_shapes=branches[0].num_shapes,
        num_fitting=branches[0].num_fitting,
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


def _module_sets(rounds: Sequence[FoundLayouts]) -> tuple[Modules, ...]:
    """The sets of modules that selective recomputing was tried with."""
    if not any(way.base == "selective" for found in rounds for shapes in found.priced for way in choices_of(shapes)):
        return ()
    sets = [
        modules
        for found in rounds
        for shapes in found.priced
        for modules in (shapes.module_sets.tables if shapes.module_sets else (shapes.pricing.selective_modules,))
    ]
    return tuple(dict.fromkeys(sets))


def _interleaves(schedules: Sequence[str]) -> bool:
    """True if ranks may hold several chunks under one of the schedules."""
    return any(SCHEDULES[name].max_vpp > 1 for name in schedules if name in SCHEDULES)


def _unsearched(rounds: Sequence[FoundLayouts], schedules: Sequence[str], recipes: Recipes) -> Iterator[str]:
    """The choices that the trainer could be told and the search left out, in words, but for tries around the best."""
    if rounds[0].pricings[0][0].runtime.uneven_chunks and _interleaves(schedules):
        yield "uneven inner chunks"
    all_sets = [shapes.module_sets for found in rounds for shapes in found.priced]
    if any(sets is not None and len(sets.tables) >= MAX_SETS for sets in all_sets):
        yield "other sets of modules"
    if recipes.offers_offloading:
        yield "activations on a host behind PCIe (--allow activation_offload)"
    if recipes.free:
        yield "other bundles of switches"
    elif recipes.has_switches:
        yield "switches other than those given" if recipes.case.limits.switches else "other switches"


AUTO = "auto"
MAX_ACTIONS = 24_000
"""Most actions of an order that is improved; with more, looking for a better order would take longer than the plan."""


def made_to_measure(candidate: Candidate) -> Candidate:
    """The candidate with the best order for its own stage times and memory, or unchanged if no order is better.

    In an order made to measure all chunks may end with the last micro-batch. They then hide less of their exchanges,
    so the seconds of the whole step decide which order is better.
    """
    shape = candidate.shape
    pp, vpp, num_microbatches = int(shape.pp), int(shape.vpp), candidate.num_microbatches
    if pp == 1 or 3 * pp * vpp * num_microbatches > MAX_ACTIONS:
        return candidate
    from planner.schedule.synthesis import synthesize

    room = candidate.activation_room_bytes
    try:
        better = synthesize(candidate.durations, candidate.placement, num_microbatches, room)
    except Infeasible:
        return candidate
    made = replace(candidate, made_order=replace(better.schedule, name=AUTO))
    named_s = makespan_s(candidate.order, candidate.durations) + sum(candidate.outside)
    return made if made.step_s < named_s else candidate


LEAST_BATCH_GAIN = 0.02
"""Least share of the tokens a second for which another batch is offered."""
FAR_FRACTION = 0.25
"""How far another batch may be where GPUs are idle under the one asked for."""
LEAST_RISK_GAIN = 1e-3
"""Least share of the step that more risk has to save for a word."""
RISKS = (0.3, 0.5)
"""Risks that are offered, the first one above the risk asked for."""


def batch_offer(found: Plan, case: Case, deadline: Deadline) -> BatchOffer | None:
    """Another batch nearby under which GPUs train more tokens a second; None if there is none or time is up.

    The layout is searched again for it, with the recipe of the best plan.
    """
    training = case.training
    nearby = FAR_FRACTION if found.parallelism.num_gpus_spare else NEAR_FRACTION
    other = liked_batch(training.global_batch_size, case.cluster.num_gpus, nearby)
    if other is None or other == training.global_batch_size:
        return None
    again = case.with_batch(other)
    best = _best_of(again, found.runtime_spec, deadline)
    tokens_per_s = again.training.tokens_per_step / best.step_s if best is not None else 0.0
    if best is None or tokens_per_s <= (1 + LEAST_BATCH_GAIN) * found.step.tokens_per_s:
        return None
    return BatchOffer(global_batch_size=other, step_s=best.step_s, tokens_per_s=tokens_per_s)


def _best_of(case: Case, runtime: RuntimeSpec, deadline: Deadline) -> Candidate | None:
    """The best layout of a case under a runtime; None where nothing fits, or time is up."""
    with suppress(Infeasible, SolverError):
        return None if deadline.passed else find_layouts(case, [runtime], deadline).best
    return None


def risk_offer(best: Candidate, recipes: Recipes, deadline: Deadline) -> RiskOffer | None:
    """The faster layout that a larger risk would buy; None if none was found, or where no rule or risk is asked about.

    The best layout with as few modules recomputed as then fit or, where that gains nothing, what a first search finds.
    """
    limits = recipes.case.limits
    riskier = next((risk for risk in RISKS if risk > limits.oom_risk), None)
    if limits.memory_headroom_gib is not None or limits.top == 1 or riskier is None or deadline.passed:
        return None
    case = recipes.case.limited(oom_risk=riskier)
    filling = best.priced_as(replace(best.pricing, headroom_bytes=headroom_bytes(best.pricing, case.limits)))
    fastest, most_s = recipes.recomputing_less(filling), best.step_s * (1 - LEAST_RISK_GAIN)
    found = first_layouts(case, recipes, deadline, filling) if fastest.step_s > most_s else None
    fastest = fastest if found is None else found.best
    if fastest.step_s > most_s:
        return None
    total_bytes = max(stage.total_bytes for stage in fastest.memory)
    capacity_bytes = best.pricing.cluster.hardware.memory_bytes
    risk = oom_probability(total_bytes, capacity_bytes, memory_width(fastest.pricing))
    return RiskOffer(oom_risk=riskier, oom_probability=risk, step_s=fastest.step_s)
