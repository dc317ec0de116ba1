"""Layers moved between ranks that are not equally busy: in inner chunks of unequal lengths, and off slow ranks.

Interleaved splits whose inner chunks differ are tried around the best layout if the trainer takes a layout string. The
search proves its answer among splits into equal chunks, of which only the first and the last may be shorter. The rank
that holds the head then often needs fewer layers than such chunks can give it. Here every rank gets the number of
layers that makes the ranks' seconds about equal, whatever the lengths of its chunks. These splits are judged by replay,
like all others; nothing is proven about them.

Where a plan's ranks turned out to be unequally fast, the integer program splits its layers again, with each rank's
measured slowness in its time rows. It allows less than the schedule does if chunks interleave (they have equal sizes),
and it does not run if an order was made to measure.

After both, single layers are moved off the busiest rank, as long as the replay gets faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil, inf

import numpy as np

from planner.answer import Plan, PricedLayout
from planner.errors import SolverError, SpecError
from planner.layout.candidate import FULL, Candidate, Split
from planner.layout.evaluate import whole_run_of
from planner.layout.price import layout_again, reprice
from planner.physics.cost import PartCost
from planner.record import record
from planner.schedule.orders import SCHEDULES
from planner.search.bounds import busiest_rank_s, exceeds_all_ranks, schedule_bound_s
from planner.search.case import Deadline
from planner.search.frontier import Nodes
from planner.search.ilp.node import RecomputeChoice, Whole, splits_tried
from planner.shape import FloatArray
from planner.specs.model import ModelSpec

SHAPES = 6
"""Number of shapes that are tried, the most promising first."""
NEAR = 1.01
"""The largest step of a split whose layers are moved, over the best step."""
MOVES = 24
"""Most replays of moved layers in one shape."""
LEVEL_GAIN, LEAST_GAIN = 1e-4, 1e-6
"""Least share of the step that a move saves, beside the best layout and in a plan whose ranks are slow."""
MAX_FACTOR = 100.0


def level_guess_s(nodes: Nodes) -> FloatArray:
    """Seconds of each row if its ranks held any number of layers, none recomputed; infinite without interleaving."""
    interleaves = np.array([SCHEDULES[name].bound == "interleaved" for name in nodes.schedules], dtype=bool)
    step_s, lack = np.full(len(interleaves), np.inf), exceeds_all_ranks(nodes.shapes, ("none",), nodes.orders)
    rows = np.flatnonzero(interleaves & ~lack)
    shapes, orders = nodes.shapes.take(rows), nodes.orders.take(rows)
    busiest = busiest_rank_s(shapes, "none", False, orders, np.zeros(orders.full.shape))
    step_s[rows] = schedule_bound_s(shapes, busiest, "none", orders) + shapes.tail_s
    return step_s


def level_split(candidate: Candidate) -> Split:
    """A split whose ranks take about as long as each other: the rank that takes least gets the next layer.

    It recomputes as the candidate's own split does: all layers, or as many of each rank. A rank's chunks are as equal
    as possible. If they cannot be equal, the first rank has fewer layers in its first chunk and the other ranks in
    their last; a layer too many is in the rank's first chunk.
    """
    shape, model, table = candidate.shape, candidate.pricing.model, candidate.table
    pp, vpp, layers = int(shape.pp), int(shape.vpp), model.num_hidden_layers
    own, counted = candidate.split, candidate.pricing.kind_counts
    first = own.recompute_num_layers
    mode = own.recompute if first is None else own.base
    mean_s = sum(float(table.layers[kind, mode].total_s) * count for kind, count in counted.items()) / layers
    beside = np.zeros(pp)
    beside[0] += float(table.embedding.total_s)
    last: list[PartCost] = [table.head, *([table.mtp] if table.mtp is not None else [])]
    beside[-1] += sum(float(part.total_s) for part in last)
    may_be_empty = candidate.pricing.runtime.head_only_stage
    num_layers = np.full(pp, vpp)
    if may_be_empty:
        num_layers[[0, -1]] -= 1
    for _ in range(layers - int(num_layers.sum())):
        num_layers[int(np.argmin(beside + (num_layers + 1) * mean_s))] += 1
    chunk = max(round(layers / (pp * vpp)), 1)
    rows = [_chunks(int(count), vpp, chunk, first=rank == 0, may_be_empty=may_be_empty and rank in (0, pp - 1))
            for rank, count in enumerate(num_layers)]  # fmt: skip
    split = Split(tuple(rows[rank][row] for row in range(vpp) for rank in range(pp)), own.base)
    if own.recompute != FULL:
        return split
    return split.recomputing(model, first and ceil(first * len(own.counts) / (pp * vpp)))


def _chunks(count: int, vpp: int, chunk: int, *, first: bool, may_be_empty: bool) -> list[int]:
    """Layers of each chunk of a rank that holds `count` layers, as near to `chunk` each as possible."""
    counts = [chunk] * vpp
    order = list(range(vpp)) if first else list(reversed(range(vpp)))
    while sum(counts) > count:
        row = next(row for row in order if counts[row] > (0 if may_be_empty and row == order[0] else 1))
        counts[row] -= 1
    row = 0
    while sum(counts) < count:
        counts[row % vpp] += 1
        row += 1
    return counts


def improved(candidate: Candidate, best_s: float) -> Candidate:
    """The candidate after moves of single layers to its idlest rank; each makes it faster and leaves it fitting."""
    if candidate.step_s > NEAR * best_s:
        return candidate
    left = iter(range(MOVES))
    return _after_moves(candidate, LEVEL_GAIN, lambda: next(left, None) is None, most_targets=1)


def _after_moves(
    candidate: Candidate, least_gain: float, is_over: Callable[[], bool], most_targets: int | None = None
) -> Candidate:
    """The candidate after the first moves of a layer off its busiest rank that make it faster, until none does."""
    moves = _moves(candidate, most_targets)
    while (moved := next(moves, None)) is not None and not is_over():
        if _fitting_step_s(moved) < _fitting_step_s(candidate) * (1 - least_gain):
            candidate, moves = moved, _moves(moved, most_targets)
    return candidate


def _moves(candidate: Candidate, most_targets: int | None) -> Iterator[Candidate]:
    """The candidate with a layer less on a stage of its busiest rank, the last first, and one more elsewhere.

    The idlest ranks come first.
    """
    model, ranks, split = candidate.pricing.model, candidate.placement, candidate.split
    busy_s, last = [float(cost.total_s) for cost in candidate.rank_costs], len(split.counts) - 1
    busiest = busy_s.index(max(busy_s))
    least = [0 if candidate.pricing.runtime.head_only_stage and stage in (0, last) else 1 for stage in range(last + 1)]
    *others, latest = (stage for stage in range(last + 1) if ranks[stage] == busiest)
    targets = sorted((j for j in range(last + 1) if ranks[j] != busiest), key=lambda j: (busy_s[ranks[j]], j))
    for target in targets[:most_targets]:
        for source in (latest, *others):
            if split.counts[source] > least[source]:
                moved = list(split.counts)
                moved[source] -= 1
                moved[target] += 1
                yield candidate.with_split(recounted(split, tuple(moved), model))


@record
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
    deadline = Deadline(time_limit_s)
    solved = slow if slow.made_order is not None else _solved(slow, recompute_of(slow.split, plan), deadline)
    start = min(slow, solved, key=_fitting_step_s)
    balanced = _after_moves(start, LEAST_GAIN, lambda: deadline.passed)
    before, after = layout_again(plan, slow), layout_again(plan, balanced)
    if after.step.step_s >= before.step.step_s:
        after = before
    cost, goodput = whole_run_of(slow.pricing, after, plan.model.num_parameters)
    changes = {"best": after, "alternatives": (), "search": None, "run_cost": cost, "goodput": goodput}
    return Rebalanced(before, after, plan.model_copy(update=changes))


def _solved(start: Candidate, choice: RecomputeChoice, deadline: Deadline) -> Candidate:
    """The integer program's split; as it was if it gives none that fits, is out of time or fails."""
    from planner.search.ilp.program import solve

    with suppress(SolverError):
        tries = splits_tried(start, choice, lambda node: solve(node, deadline.left_s, proves=False))
        return next((found for _, found in tries if found is not None and found.fits), start)
    return start


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
