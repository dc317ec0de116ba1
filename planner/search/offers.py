"""Offers beside the best plan: the batch nearby that a number of GPUs divides well, and what more risk would buy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from planner.answer import BatchOffer, Plan, RiskOffer
from planner.errors import Infeasible, SolverError
from planner.layout.candidate import Candidate, Split
from planner.layout.confidence import headroom_bytes, memory_width, oom_probability
from planner.search.bounds import free_bytes, layer_bytes
from planner.search.branch import Branch
from planner.search.case import Case, Deadline
from planner.search.enumerate import Rejections, scalar
from planner.search.frontier import Key, Nodes, Open, key_of
from planner.search.ilp.node import RecomputeChoice
from planner.search.layouts import FoundLayouts, find_layouts
from planner.search.recipes import Recipes
from planner.search.uneven import level_split
from planner.shape import liked_batch

LEAST_BATCH_GAIN = 0.02
"""Least share of the tokens a second for which another batch is offered."""
LEAST_RISK_GAIN = 1e-3
"""Least share of the step that more risk has to save for a word."""
RISKS = (0.3, 0.5)
"""Risks that are offered, the first one above the risk asked for."""
MOST_PRICED, MOST_SOLVED = 8, 2
"""Shapes that are priced, and those of them that are solved, to say what more risk would buy: a few percent of the time
that the answer takes."""
PLAIN = RecomputeChoice("none", "none")


def batch_offer(found: Plan, case: Case, deadline: Deadline) -> BatchOffer | None:
    """Another batch nearby under which GPUs train more tokens a second; None if there is none or time is up.

    The layout is searched again for it, with the recipe of the best plan.
    """
    training = case.training
    other = liked_batch(training.global_batch_size, case.cluster.num_gpus)
    if other is None or other == training.global_batch_size or deadline.passed:
        return None
    again = case.with_batch(other)
    try:
        best = find_layouts(again, [found.runtime_spec], deadline).best
    except (Infeasible, SolverError):
        return None
    tokens_per_s = again.training.tokens_per_step / best.step_s
    if tokens_per_s <= (1 + LEAST_BATCH_GAIN) * found.step.tokens_per_s:
        return None
    return BatchOffer(global_batch_size=other, step_s=best.step_s, tokens_per_s=tokens_per_s)


def risk_offer(found: FoundLayouts, best: Candidate, recipes: Recipes, deadline: Deadline) -> RiskOffer | None:
    """The faster layout that a larger risk would buy; None if none was found, or where no rule or risk is asked about.

    Of the nodes that were opened, the most promising ones are tried with nothing recomputed, as a rank that may fill
    its GPU has it; only a few of them, so that the answer takes next to no longer.
    """
    limits = recipes.case.limits
    riskier = next((risk for risk in RISKS if risk > limits.oom_risk), None)
    if limits.memory_headroom_gib is not None or limits.top == 1 or riskier is None or deadline.passed:
        return None
    headroom = headroom_bytes(best.pricing, limits.model_copy(update={"oom_risk": riskier}))
    branch = Branch(limits, found.branch.choices, deadline, Rejections())
    branch.keep(best)
    nearest = sorted(_promising(found, best, headroom), key=lambda candidate: max(candidate.excess_bytes))
    for candidate in nearest[:MOST_SOLVED]:
        if candidate.fits:
            branch.keep(candidate)
        elif branch.best is best:
            node = Open(0.0, 0.0, candidate.pricing, candidate.shape, candidate.schedule, PLAIN)
            branch.solve_choice(node, PLAIN)
    fastest = branch.best or best
    fastest = recipes.priced(fastest, best.pricing.runtime) or fastest
    if fastest.step_s > best.step_s * (1 - LEAST_RISK_GAIN) or not fastest.fits:
        return None
    total_bytes = max(stage.total_bytes for stage in fastest.memory)
    capacity_bytes = best.pricing.cluster.hardware.memory_bytes
    risk = oom_probability(total_bytes, capacity_bytes, memory_width(fastest.pricing))
    return RiskOffer(oom_risk=riskier, oom_probability=risk, step_s=fastest.step_s)


def _promising(found: FoundLayouts, best: Candidate, headroom: float) -> Iterator[Candidate]:
    """Grids that may fit beside a smaller headroom without recompute, with the shortest guessed steps, split level."""
    plain = {runtime for runtime, ways in found.branch.choices.items() if any(way.mode == "none" for way in ways)}
    blocks = [nodes for nodes in found.frontier.all_nodes() if nodes.shapes.pricing.runtime in plain]
    own = [nodes for nodes in blocks if nodes.shapes.pricing.runtime == best.pricing.runtime]
    rows = list[tuple[float, int, int]]()
    for number, nodes in enumerate(own or blocks):
        guess_s = nodes.guess_s(PLAIN)
        quick = np.flatnonzero(guess_s < best.step_s)
        filling = quick[_may_fill(nodes.take(quick), headroom)]
        rows += [(float(guess_s[row]), number, row) for row in filling.tolist()]
    grids = set[Key]()
    for _, number, row in sorted(rows):
        nodes = (own or blocks)[number]
        shape = scalar(nodes.shapes.shape, row)
        if key_of(shape) not in grids:
            grids.add(key_of(shape))
            pricing = replace(nodes.shapes.pricing, headroom_bytes=headroom)
            table = replace(nodes.shapes, pricing=pricing).table_of(row)
            start = Candidate(pricing, table, Split(()), nodes.schedules[row])
            yield start.with_split(level_split(start))
        if len(grids) == MOST_PRICED:
            return


def _may_fill(nodes: Nodes, headroom: float) -> npt.NDArray[np.bool_]:
    """True for rows whose ranks together have room for the layers beside `headroom`, and not beside the present one.

    Layers spread evenly must lack room on some rank now, or the search has seen the layout.
    """
    shapes, in_flight = nodes.shapes, nodes.orders.in_flight
    counts = np.array(list(shapes.pricing.kind_counts.values()))
    needed = np.average(layer_bytes(shapes, "none", in_flight), axis=0, weights=counts)
    pp = np.asarray(shapes.shape.pp)[:, None]
    exists = np.arange(in_flight.shape[1])[None, :] < pp
    now, then = (
        np.where(exists, free_bytes(replace(shapes, pricing=pricing), ("none",), in_flight.shape[1]) / needed, np.inf)
        for pricing in (shapes.pricing, replace(shapes.pricing, headroom_bytes=headroom))
    )
    together = np.where(exists, then, 0.0).sum(axis=1)
    return np.asarray((now.min(axis=1) < counts.sum() / pp[:, 0]) & (together >= counts.sum()))
