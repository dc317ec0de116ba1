"""Layers moved between the stages of a plan whose ranks turned out to be unequally fast; all else stays as it is.

The integer program splits again with each rank's measured slowness in its time rows. Where its rows allow less than the
schedule does (interleaved chunks of equal size), or an order was made to measure, single layers are then moved away
from the busiest rank as long as the replay gets faster. Nothing is answered that the replay finds slower than before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.answer import Plan, PricedLayout
from planner.errors import SolverError, SpecError
from planner.layout.assemble import run_cost
from planner.layout.candidate import Candidate
from planner.layout.replan import layout_again, named_schedule, reprice
from planner.layout.split import Split
from planner.search.ilp.node import Whole
from planner.search.ilp.program import solve
from planner.search.ilp.translate import RecomputeChoice, node_of, split_of
from planner.search.retry import shorter
from planner.specs.model import ModelSpec

MAX_TRIES = 4
"""Programs solved, each with more left free on the ranks that the replay shows to be too full."""
LEAST_GAIN = 1e-6
MAX_FACTOR = 100.0


@dataclass(frozen=True, slots=True)
class Rebalanced:
    """The same layout before and after layers moved, both priced with the ranks as slow as they are."""

    before: PricedLayout
    after: PricedLayout
    plan: Plan
    """The plan with `after` as its best layout."""

    @property
    def gain_fraction(self) -> float:
        """Seconds saved, of the step before."""
        return 1 - self.after.step.step_s / self.before.step.step_s


def rebalance(plan: Plan, rank_factors: Sequence[float], time_limit_s: float = 10.0) -> Rebalanced:
    """Split the layers of the plan's best layout for ranks that take `rank_factors` times as long as its profile says.

    Raises SpecError where there is not one positive factor a pipeline rank.
    """
    pp = plan.parallelism.pp
    if len(rank_factors) != pp or not all(0 < factor <= MAX_FACTOR for factor in rank_factors):
        listed = ", ".join(f"{factor:g}" for factor in rank_factors)
        raise SpecError(f"rank_factors: {listed}: not {pp} factors above 0, at most {MAX_FACTOR:g}", "one a stage")
    case = _Case(plan, reprice(plan, plan.best), tuple(rank_factors), time.monotonic() + time_limit_s)
    before, after = case.price(case.priced.split), case.price(case.best())
    if after.step.step_s >= before.step.step_s:
        after = before
    changes = {"best": after, "alternatives": (), "search": None, "run_cost": run_cost(case.priced.pricing, after)}
    return Rebalanced(before, after, plan.model_copy(update=changes))


@dataclass(slots=True)
class _Case:
    """One layout, what its ranks are like, and how long to look."""

    plan: Plan
    priced: Candidate
    factors: tuple[float, ...]
    deadline_s: float

    @property
    def schedule(self) -> str:
        return named_schedule(self.plan.best, self.priced.order)

    def price(self, split: Split, exact: bool = True) -> PricedLayout:
        """The layout with `split`, its ranks as slow as they are."""
        return layout_again(self.plan, self._with(split), exact)

    def seconds(self, split: Split) -> float | None:
        """Of a step; None where the split does not fit."""
        candidate = self._with(split)
        return candidate.step_s if candidate.fits else None

    def _with(self, split: Split) -> Candidate:
        """The plan's candidate with another split, its ranks as slow as they are."""
        return replace(self.priced, split=split, rank_factors=self.factors)

    def best(self) -> Split:
        """The fastest split that was found; the old one where none is faster."""
        best, least_s = self.priced.split, self.seconds(self.priced.split)
        if least_s is None:  # the plan does not fit as it is: any split that does is better
            least_s = float("inf")
        solved = None if self.plan.best.actions else self._solved()
        if solved is not None:
            split, seconds = solved
            if seconds < least_s:
                best, least_s = split, seconds
        while True:
            step = self._improved(best, least_s)
            if step is None:
                return best
            best, least_s = step

    def _solved(self) -> tuple[Split, float] | None:
        """The integer program's split, and its replayed seconds."""
        priced, short_bytes = self.priced, list[float]()
        choice = recompute_of(priced.split, self.plan)
        for _ in range(MAX_TRIES):
            node = node_of(priced.pricing, priced.table, choice, self.schedule, short_bytes, rank_factors=self.factors)
            try:
                solution = solve(node, self.deadline_s - time.monotonic())
            except SolverError:  # out of time: single layers may still move
                return None
            if solution is None:
                return None
            split = replace(split_of(priced.pricing, node, solution), mtp_stage=priced.split.mtp_stage)
            seconds = self.seconds(split)
            if seconds is not None:
                return split, seconds
            short_bytes = shorter(short_bytes, self._with(split).excess_bytes, solution.free_bytes)
        return None

    def _improved(self, split: Split, least_s: float) -> tuple[Split, float] | None:
        """The first move of a layer off the busiest rank that makes the step shorter."""
        for moved in self._moves(split):
            if time.monotonic() > self.deadline_s:
                return None
            seconds = self.seconds(moved)
            if seconds is not None and seconds < least_s * (1 - LEAST_GAIN):
                return moved, seconds
        return None

    def _moves(self, split: Split) -> Iterator[Split]:
        """One layer less on a stage of the busiest rank and one more elsewhere, on the idlest rank first."""
        model, ranks = self.plan.model.spec, self.priced.order.stage_to_rank
        busy = [float(cost.total_s) for cost in self._with(split).rank_costs]
        busiest, last = busy.index(max(busy)), len(split.counts) - 1
        ends_may_be_empty = self.priced.pricing.runtime.head_only_stage
        targets = sorted((j for j in range(last + 1) if ranks[j] != busiest), key=lambda j: (busy[ranks[j]], j))
        for target in targets:
            for source in (j for j in range(last + 1) if ranks[j] == busiest):
                least = 0 if ends_may_be_empty and source in (0, last) else 1
                if split.counts[source] > least:
                    counts = list(split.counts)
                    counts[source] -= 1
                    counts[target] += 1
                    yield recounted(split, tuple(counts), model)


def recompute_of(split: Split, plan: Plan) -> RecomputeChoice:
    """How a plan's layout recomputes, as the integer program is told."""
    if not split.recomputed:
        return RecomputeChoice(split.base, "none")
    held = sum(split.counts)
    if sum(map(sum, split.recomputed)) == held:
        return RecomputeChoice(split.base, "all")
    whole: Whole = "per_stage" if plan.runtime_spec.recompute_per_stage else "one_count"
    return RecomputeChoice(split.base, whole)


def recounted(split: Split, counts: tuple[int, ...], model: ModelSpec) -> Split:
    """`split` with other layer counts: stages that recompute all of a kind still do, others no more than before."""
    changed = replace(split, counts=counts, recomputed=())
    if not split.recomputed:
        return changed
    recomputed = []
    for stage, (first, last) in enumerate(changed.chunks):
        old, new = (model.layers[a:b] for a, b in (split.chunks[stage], (first, last)))
        row = []
        for kind, whole in zip(model.kinds, split.recomputed[stage], strict=True):
            all_of_it = whole == old.count(kind) and whole > 0
            row.append(new.count(kind) if all_of_it else min(whole, new.count(kind)))
        recomputed.append(tuple(row))
    return replace(changed, recomputed=tuple(recomputed))
