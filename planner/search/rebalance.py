"""Layers moved between the stages of a plan whose ranks turned out to be unequally fast; all else stays as it is.

The integer program splits the layers again, with each rank's measured slowness in its time rows. It allows less than
the schedule does if chunks interleave (they have equal sizes), and it does not run if an order was made to measure. So
after it single layers are moved away from the busiest rank, as long as the replay gets faster. The answer is never a
split that the replay finds slower than before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from planner.answer import Plan, PricedLayout
from planner.errors import SolverError, SpecError
from planner.layout.candidate import Candidate, Split
from planner.layout.evaluate import whole_run_of
from planner.layout.price import layout_again, reprice
from planner.search.case import Deadline
from planner.search.ilp.node import RecomputeChoice, Whole, node_of, split_of
from planner.search.ilp.program import shorter, solve
from planner.specs.model import ModelSpec

MAX_TRIES = 4
"""Most programs solved; each leaves more bytes free on the ranks that the replay showed to be too full."""
LEAST_GAIN = 1e-6
MAX_FACTOR = 100.0


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """The same layout before and after layers moved, both priced with the measured slowness of the ranks."""

    before: PricedLayout
    after: PricedLayout
    plan: Plan
    """The plan with `after` as its best layout."""

    @property
    def gain_fraction(self) -> float:
        """Seconds saved, as a fraction of the step before."""
        return 1 - self.after.step.step_s / self.before.step.step_s


def rebalance(plan: Plan, rank_factors: Sequence[float], time_limit_s: float = 10.0) -> Rebalanced:
    """Split the layers of the plan's best layout for ranks that take `rank_factors` times as long as its profile says.

    Raises SpecError unless there is one positive factor for each pipeline rank.
    """
    pp = plan.parallelism.pp
    if len(rank_factors) != pp or not all(0 < factor <= MAX_FACTOR for factor in rank_factors):
        listed = ", ".join(f"{factor:g}" for factor in rank_factors)
        raise SpecError(f"rank_factors: {listed}: not {pp} factors above 0, at most {MAX_FACTOR:g}", "one a stage")
    slow = replace(reprice(plan, plan.best), rank_factors=tuple(rank_factors))
    balanced = _Rebalancing(plan, slow, Deadline(time_limit_s)).fastest()
    before, after = layout_again(plan, slow), layout_again(plan, balanced)
    if after.step.step_s >= before.step.step_s:
        after = before
    cost, goodput = whole_run_of(slow.pricing, after, plan.model.num_parameters)
    changes = {"best": after, "alternatives": (), "search": None, "run_cost": cost, "goodput": goodput}
    return Rebalanced(before, after, plan.model_copy(update=changes))


@dataclass(frozen=True, slots=True)
class _Rebalancing:
    """One layout whose ranks are unequally fast, and a deadline for the search of a faster split of its layers."""

    plan: Plan
    start: Candidate
    """The plan's layout, priced with the measured slowness of its ranks."""
    deadline: Deadline

    def fastest(self) -> Candidate:
        """The fastest split that was found; the old one if none is faster."""
        best = self.start
        solved = None if best.made_order is not None else self._solved()
        if solved is not None and _fitting_step_s(solved) < _fitting_step_s(best):
            best = solved
        while (moved := self._improved(best)) is not None:
            best = moved
        return best

    def _solved(self) -> Candidate | None:
        """The integer program's split; None if it gives none that fits."""
        start, short_bytes = self.start, list[float]()
        choice = recompute_of(start.split, self.plan)
        for _ in range(MAX_TRIES):
            node = node_of(
                start.pricing, start.table, choice, start.schedule, short_bytes, rank_factors=start.rank_factors
            )
            try:
                solution = solve(node, self.deadline.left_s, proves=False)
            except SolverError:  # out of time, or it failed: single layers may still move
                return None
            if solution is None:
                return None
            split = split_of(start.pricing, node, solution)
            candidate = start.with_split(replace(split, mtp_stage=start.split.mtp_stage))
            if candidate.fits:
                return candidate
            short_bytes = shorter(short_bytes, candidate.excess_bytes, solution.free_bytes)
        return None

    def _improved(self, candidate: Candidate) -> Candidate | None:
        """The first move of a layer off the busiest rank that makes the step shorter."""
        for split in self._moves(candidate):
            if self.deadline.passed:
                return None
            moved = candidate.with_split(split)
            if _fitting_step_s(moved) < _fitting_step_s(candidate) * (1 - LEAST_GAIN):
                return moved
        return None

    def _moves(self, candidate: Candidate) -> Iterator[Split]:
        """One layer less on a stage of the busiest rank and one more elsewhere, on the idlest rank first."""
        model, ranks, split = self.plan.model.spec, candidate.placement, candidate.split
        busy_s = [float(cost.total_s) for cost in candidate.rank_costs]
        busiest, last = busy_s.index(max(busy_s)), len(split.counts) - 1
        ends_may_be_empty = candidate.pricing.runtime.head_only_stage
        targets = sorted((j for j in range(last + 1) if ranks[j] != busiest), key=lambda j: (busy_s[ranks[j]], j))
        for target in targets:
            for source in (j for j in range(last + 1) if ranks[j] == busiest):
                least = 0 if ends_may_be_empty and source in (0, last) else 1
                if split.counts[source] > least:
                    counts = list(split.counts)
                    counts[source] -= 1
                    counts[target] += 1
                    yield recounted(split, tuple(counts), model)


def _fitting_step_s(candidate: Candidate) -> float:
    """Seconds of a step; infinite if the candidate does not fit, so that any candidate that fits is better."""
    return candidate.step_s if candidate.fits else inf


def recompute_of(split: Split, plan: Plan) -> RecomputeChoice:
    """The way in which a plan's layout recomputes, as a choice of the integer program."""
    if not split.recomputed:
        return RecomputeChoice(split.base, "none")
    if sum(map(sum, split.recomputed)) == sum(split.counts):
        return RecomputeChoice(split.base, "all")
    whole: Whole = "per_stage" if plan.runtime_spec.recompute_per_stage else "one_count"
    return RecomputeChoice(split.base, whole)


def recounted(split: Split, counts: tuple[int, ...], model: ModelSpec) -> Split:
    """`split` with other layer counts.

    A stage that recomputes all layers of a kind still does; other stages recompute no more layers than before.
    """
    changed = replace(split, counts=counts, recomputed=())
    if not split.recomputed:
        return changed
    recomputed = []
    for stage, chunk in enumerate(changed.chunks):
        old_layers, new_layers = (model.layers[first:last] for first, last in (split.chunks[stage], chunk))
        row = []
        for kind, count in zip(model.kinds, split.recomputed[stage], strict=True):
            num_layers = new_layers.count(kind)
            recomputes_all = 0 < count == old_layers.count(kind)
            row.append(num_layers if recomputes_all else min(count, num_layers))
        recomputed.append(tuple(row))
    return replace(changed, recomputed=tuple(recomputed))
