"""The whole search, and the file to read first: three specs in, one plan out."""

from __future__ import annotations

import time
from contextlib import suppress

from planner.answer import Plan, PricedLayout
from planner.errors import Infeasible
from planner.layout.assemble import assemble
from planner.layout.assumptions import told_assumptions
from planner.layout.candidate import Candidate
from planner.layout.evaluate import export_warnings, host_warnings, runtime_of
from planner.layout.price import price_layout
from planner.layout.robust import NUM_LAYOUTS, robust_steps
from planner.physics.layers import ModelTotals
from planner.search.auto import AUTO, made_to_measure
from planner.search.case import Case
from planner.search.certificate import certificate
from planner.search.deadline import Deadline
from planner.search.enumerate import num_rows
from planner.search.first import first_layouts, some_layout
from planner.search.frontier import key_of
from planner.search.layouts import Found, News, find_layouts
from planner.search.offers import batch_offer, risk_offer
from planner.search.recipe_answer import with_recipe
from planner.search.recipes import LEAST_GAIN, REPLAN_GAIN, Recipes, narrower, pinned
from planner.search.safest import exceeds_risk, safer_first, standing, with_warning
from planner.search.schedules import check_expressible
from planner.search.why.misses import NothingFits
from planner.search.why.remedy import with_remedy
from planner.search.why.room import with_room
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import model_of
from planner.specs.training import SearchLimits, TrainingSpec
from planner.trainers.spec import RuntimeSpec

FEW_ROWS = 100_000
"""Rows of raw axes that are searched at once under one recipe, without a first layout to beat."""
CONTENDERS = 3
"""Candidates nearly as fast as the best around which switches are moved too."""


def plan(
    model: ModelSpec | str,
    cluster: ClusterSpec,
    training: TrainingSpec,
    *,
    limits: SearchLimits | None = None,
    runtime: RuntimeSpec | str = "megatron",
    news: News | None = None,
) -> Plan:
    """The fastest layout of `model` on `cluster` that fits, proven within the reported gap, and its alternatives.

    `news` is told how the search stands while it runs.
    Raises Infeasible if no layout is legal and fits; the error has the nearest miss, and a remedy if one was found
    within the time limit. Raises SpecError if the inputs contradict each other.
    """
    case = pinned(Case(model_of(model), cluster, training, runtime_of(runtime), limits or SearchLimits()))
    deadline = Deadline(case.limits.time_limit_s)
    try:
        found = search(case, news)
    except Infeasible as error:
        raise with_remedy(error, case, some_layout, deadline) from None
    for narrow in narrower(case):
        with suppress(Infeasible):
            found = min(found, search(narrow), key=lambda other: (exceeds_risk(other, case), other.best.step.step_s))
    return with_room(found.model_copy(update={"batch_offer": batch_offer(found, case, deadline)}), case)


def search(case: Case, news: News | None = None) -> Plan:
    """The plan of one case: the fastest layout within its risk or, with a warning, the safest that fits.

    Raises NothingLegal or NothingFits if there is none.
    """
    deadline = Deadline(case.limits.time_limit_s)
    try:
        return search_within_risk(case, deadline, news)
    except NothingFits as error:
        nothing = error
    for safer in safer_first(case):
        try:
            return with_warning(search_within_risk(safer, deadline), safer, case)
        except Infeasible as error:
            nothing = error if isinstance(error, NothingFits) else nothing
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
    moved = abs(best.step_s / rounds[0].best.step_s - 1) > REPLAN_GAIN
    again = [best.pricing.runtime] if moved else []
    if again and not deadline.passed:
        rounds.append(find_layouts(case, again, deadline, known=best))
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
    warnings = export_warnings(best.pricing) + host_warnings(best.pricing, best.shape)
    layouts[0] = layouts[0].model_copy(update={"warnings": warnings})
    layouts[0] = with_recipe(layouts[0], best, recipes)
    fastest_s = layouts[0].step.step_s if best is fastest else price_layout(fastest, totals).step.step_s
    report = certificate(rounds, recipes, fastest_s, time.monotonic() - started)
    rejections = rounds[0].rejections
    if stands is not None:
        robust = robust_steps(layouts[:NUM_LAYOUTS], stands.assumed_s)
        layouts[0] = layouts[0].model_copy(update={"robust": robust, "recommendation": stands.reason})
    told = told_assumptions(best)
    answer = assemble(best.pricing, totals, layouts, told, report, rejections.counts, rejections.examples)
    return answer.model_copy(update={"risk_offer": risk_offer(rounds[-1], best, recipes, deadline)})


def _ranked(rounds: list[Found], best: Candidate, recipes: Recipes, deadline: Deadline) -> list[Candidate]:
    """The best candidate, and the fastest of the other grids, with the best's recipe where that is faster.

    A grid that was second under its own recipe may be first under the one that was found around the best.
    """
    known = {key_of(best.shape): best}
    for found in rounds:
        for key, other in found.branch.candidates.items():
            if key not in known or (other.step_s < known[key].step_s and known[key] is not best):
                known[key] = other
    most = recipes.case.limits.top
    ranked = sorted(known.values(), key=lambda other: other.step_s)[: most + 1]
    others = sorted((_with_recipe_of(best, other, recipes) for other in ranked), key=lambda other: other.step_s)
    near = [other for other in others if other.step_s < best.step_s * (1 + REPLAN_GAIN)][:CONTENDERS]
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
