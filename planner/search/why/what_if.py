"""The same search with one input changed: without the pins, under another assumption, or with one limit moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from planner.answer import Plan, PricedLayout
from planner.errors import Infeasible, SolverError
from planner.layout import assumptions
from planner.layout.candidate import Candidate
from planner.layout.price import price_layout
from planner.layout.replan import reprice, with_microbatches
from planner.physics.pricing import Pricing
from planner.search.case import Case
from planner.search.deadline import Deadline
from planner.search.first import first_layouts
from planner.search.layouts import find_layouts
from planner.search.recipes import Recipes
from planner.search.search import search
from planner.specs.units import gib

TIME_LIMIT_S = 10.0
"""Most seconds that a search may take if it is not one of the two main searches."""
MEMORY, ROOM = 0.05, 0.1
"""Fractions by which memory is changed: for an estimate that is too low, and for a larger GPU."""


def aside(case: Case) -> Plan:
    """The plan of a case beside the main one, without alternatives and with a short time limit."""
    return search(case.limited(top=1, time_limit_s=min(TIME_LIMIT_S, case.limits.time_limit_s)))


def soon(case: Case, known: Candidate | None) -> Plan:
    """The plan of the first layout that a search of the case finds, or of a `known` one that none of them beats.

    The switches of another layout are moved. Raises Infeasible if nothing fits.
    """
    deadline, recipes = Deadline(TIME_LIMIT_S), Recipes.of(case)
    found = first_layouts(case, recipes, deadline, known) or find_layouts(case, recipes.starts(), deadline)
    best = found.best if found.best is known else recipes.refined(found.best, deadline)
    return found.standing(best).plan()


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A case with one input changed."""

    name: str
    says: str
    case: Case
    runtime_changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the runtime that are changed, with their values; the present choice keeps its recipe beside them."""
    gives_room: bool = False
    """True if other layouts than those known may become possible."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The layout that is chosen under a change, beside the step that the present choice would take under it."""

    chosen: PricedLayout | None
    """The best layout under the change; None if nothing fits any more."""
    kept_s: float
    """Seconds of a step that the present choice takes under the change."""
    kept_fits: bool

    def moves(self, kept: PricedLayout, gap_fraction: float) -> bool:
        """True if another layout is the better choice under the change, by more than the gap of the searches."""
        if self.chosen is None or self.chosen.parallelism == kept.parallelism:
            return self.chosen is None
        return not self.kept_fits or self.chosen.step.step_s < self.kept_s * (1 - gap_fraction)


def outcome(what_if: WhatIf, now: Plan) -> Outcome:
    """Price the layouts of `now` under the change; search again if none of them fits, or if the change gives room."""
    kept, *others = (_repriced(now, what_if, layout) for layout in (now.best, *now.alternatives))
    fastest = min((one for one in (kept, *others) if one.fits), key=lambda one: one.step_s, default=None)
    chosen: PricedLayout | None
    try:
        if fastest is None or what_if.gives_room:
            chosen = soon(what_if.case, fastest).best
        else:
            chosen = price_layout(fastest, fastest.pricing.totals, exact=False)
    except (Infeasible, SolverError):
        chosen = None
    return Outcome(chosen, kept.run().makespan_s + sum(kept.outside), kept.fits)


def _repriced(now: Plan, what_if: WhatIf, layout: PricedLayout) -> Candidate:
    """A layout of `now`, with its recipe, under a change."""
    case = what_if.case
    steps = layout.parallelism.num_microbatches * case.training.global_batch_size // now.training.global_batch_size
    runtime = (layout.runtime_spec or now.runtime_spec).model_copy(update=what_if.runtime_changes)
    changed = {"cluster": case.cluster, "training": case.training, "runtime_spec": runtime}
    layout = layout if layout.actions else with_microbatches(layout, steps)
    layout = layout.model_copy(update={"runtime_spec": None})
    return reprice(now.model_copy(update=changed), layout, headroom_bytes=case.headroom_bytes)


def other_assumptions(case: Case) -> Iterator[WhatIf]:
    """Every assumption that this job makes, and an estimate of memory that is short, each changed by itself."""
    pricing = Pricing(model=case.model, training=case.training, cluster=case.cluster, runtime=case.runtime)
    for other in assumptions.other_assumptions(pricing):
        then = other.pricing
        changed = replace(case, training=then.training, cluster=then.cluster, runtime=then.runtime)
        fields = {name: value for name, value in then.runtime if value != getattr(case.runtime, name)}
        yield WhatIf(other.name, other.says, changed, fields)
    short = gib(case.headroom_bytes) + MEMORY * case.cluster.hardware.memory_gib
    says = f"{MEMORY:.0%} {'more ' if case.headroom_bytes else ''}of the memory must stay free"
    yield WhatIf("memory_headroom", says, case.limited(memory_headroom_gib=short))


def other_limits(case: Case) -> Iterator[WhatIf]:
    """The limits that the job has to obey, each moved by itself: memory, batch, NVLink domain."""
    cluster, hardware, training = case.cluster, case.cluster.hardware, case.training
    larger = hardware.model_copy(update={"memory_gib": hardware.memory_gib * (1 + ROOM)})
    more = replace(case, cluster=cluster.changed(hardware=larger))
    yield WhatIf("memory", f"{ROOM:.0%} more memory", more, gives_room=True)
    twice = training.model_copy(update={"global_batch_size": 2 * training.global_batch_size})
    yield WhatIf("batch", "twice the batch", replace(case, training=twice), gives_room=True)
    inner = cluster.tiers[0].num_gpus
    if len(cluster.tiers) > 1 and inner is not None and inner < cluster.num_gpus:
        outer = cluster.tiers[1].num_gpus
        if outer is None or 2 * inner < outer:
            tiers = (cluster.tiers[0].model_copy(update={"num_gpus": 2 * inner}), *cluster.tiers[1:])
            wider = hardware.model_copy(update={"tiers": tiers, "gpus_per_node": cluster.node_size})
            changed = cluster.changed(hardware=wider, gpus_per_node=None, network_gb_per_s=None, network_tiers=())
            yield WhatIf(
                "domain", f"{hardware.a_domain} of {2 * inner}", replace(case, cluster=changed), gives_room=True
            )
