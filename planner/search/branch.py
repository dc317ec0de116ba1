"""Branch and bound over shapes: the shape is the branching variable, a node an integer program, the replay the judge.

Shapes come in the order of a lower bound on their step. A shape whose bound is not below the incumbent's replayed time
is cut; the others are opened into nodes (schedule, vpp, recompute), most promising first, solved and replayed. The
search ends when no bound is left below the incumbent less the gap asked for, or when time is up; either way it says how
far the bound is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from planner.errors import SolverError
from planner.physics.cost import CostTable, Pricing
from planner.physics.shape import FloatArray, Shape
from planner.schedule.actions import Schedule
from planner.schedule.orders import SCHEDULES, in_flight_microbatches
from planner.search import bounds
from planner.search.candidates import Rejections, chunks_tried, scalar, schedule_options, schedules_tried
from planner.search.ends import with_ends_s
from planner.search.ilp import solve
from planner.search.nodes import RecomputeChoice, node_of, split_of
from planner.search.pipeline import step_s
from planner.search.room import split_fits
from planner.search.split import Split
from planner.specs.training import SearchLimits

BLOCK = 1024
"""Shapes refined at once: enough to be worth numpy's calls, few enough to stop early."""
SHRINK = 0.98
"""Memory planned with after a split that the replay showed not to fit."""
MAX_SHRINKS = 3
RUNNERS_UP = 16
NODES_PER_ALTERNATIVE = 2
"""Shapes, and nodes of each, that are looked at for alternatives once the best is proven."""
ALTERNATIVE_SLACK = 1.5
ALTERNATIVE_GAP = 0.01
"""How many times slower than the best an alternative may be, and how near its own optimum it is solved."""


@dataclass(frozen=True, slots=True)
class Found:
    """One solved and replayed layout."""

    step_s: float
    table: CostTable
    split: Split
    schedule: str
    order: Schedule | None = None
    """Where the order was made to measure: its action lists."""

    @property
    def key(self) -> tuple[int, ...]:
        """What makes two layouts different ones to a reader: the grid and the micro-batch."""
        s = self.table.shape
        return tuple(int(v) for v in (s.tp, s.cp, s.ep, s.etp, s.pp, s.micro_batch_size))


@dataclass(frozen=True, slots=True)
class Open:
    """A node not solved yet."""

    bound_s: float
    guess_s: float
    """What it will probably take: where to look first, nothing more."""
    table: CostTable
    schedule: str
    choice: RecomputeChoice


@dataclass(slots=True)
class Branch:
    """The state of one search."""

    pricing: Pricing
    limits: SearchLimits
    choices: tuple[RecomputeChoice, ...]
    deadline_s: float
    rejections: Rejections
    found: dict[tuple[int, ...], Found] = field(default_factory=dict)
    """The fastest layout of each key."""
    num_ilps: int = 0
    lower_bound_s: float = np.inf
    """Least bound of any node that was solved, cut, or left."""
    complete: bool = True
    runners_up: list[tuple[Shape, FloatArray]] = field(default_factory=list)
    """Shapes that were cut, nearest first."""
    slack: float | None = None
    """Once alternatives are wanted: how many times slower than the best they may be."""

    @property
    def best(self) -> Found | None:
        return min(self.found.values(), key=self._order, default=None)

    def _order(self, found: Found) -> tuple[float, ...]:
        """Faster first; equal to a thousandth of a percent: less memory, less tensor parallelism, fewer stages."""
        shape = found.table.shape
        memory = max(float(part.static_bytes) for part in found.table.layers.values())
        return (float(f"{found.step_s:.5g}"), memory, float(shape.tp), float(shape.pp), found.step_s)

    def cutoff_s(self, gap_fraction: float) -> float:
        """A node whose bound is not below this cannot beat the incumbent by more than the gap."""
        best = self.best
        if best is None:
            return np.inf
        if self.slack is None:
            return best.step_s * (1 - gap_fraction)
        ranked = sorted(found.step_s for found in self.found.values())
        return ranked[self.limits.top] if len(ranked) > self.limits.top else best.step_s * self.slack

    def run(self, screen: bounds.Screen) -> None:
        """Search all shapes of `screen` (those that can fit)."""
        tried = schedules_tried(self.limits, self.pricing.runtime)
        coarse = bounds.coarse_bound_s(screen, any(SCHEDULES[name].splits_backward for name in tried))
        order = np.argsort(coarse, kind="stable")
        for start in range(0, len(order), BLOCK):
            block = order[start : start + BLOCK]
            if float(coarse[block[0]]) >= self.cutoff_s(self.limits.gap_fraction) or self._late():
                self._leave(float(coarse[block[0]]))
                break
            self._run_block(screen.take(block), coarse[block])

    def _run_block(self, screen: bounds.Screen, coarse: FloatArray) -> None:
        """Refine a block's bounds and work through its shapes, best bound first."""
        refined = np.maximum(self._refined_s(screen), coarse)
        order = [int(i) for i in np.argsort(refined.min(axis=0), kind="stable") if np.isfinite(refined[:, i].min())]
        for position, index in enumerate(order):
            bound = float(refined[:, index].min())
            if bound >= self.cutoff_s(self.limits.gap_fraction) or self._late():
                self._leave(bound)
                self.runners_up += [(scalar(screen.shape, i), refined[:, i]) for i in order[position:][:RUNNERS_UP]]
                return
            shape, known = scalar(screen.shape, index), len(self.found)
            self._run_shape(shape, refined[:, index])
            if len(self.found) == known:
                self.runners_up.append((shape, refined[:, index]))

    def run_alternatives(self) -> None:
        """Solve more shapes, best bound first, until none can be among the layouts asked for; they change no proof."""
        proof = self.lower_bound_s, self.complete
        self.slack = ALTERNATIVE_SLACK
        for shape, bounds_s in sorted(self.runners_up, key=lambda one: float(one[1].min()))[:RUNNERS_UP]:
            if float(bounds_s.min()) >= self.cutoff_s(0.0) or self._late():
                break
            options = schedule_options(shape, self.pricing.model, self.limits, self.pricing.runtime)
            if not options:
                continue
            for node in sorted(self._nodes(options, bounds_s), key=lambda node: node.guess_s)[:NODES_PER_ALTERNATIVE]:
                before = len(self.found)
                # how many layers to recompute is worth an integer program for the best layout, not for the runners-up
                choice = node.choice if node.choice.whole != "one_count" else RecomputeChoice(node.choice.base, "none")
                self._solve_choice(node, choice)
                if len(self.found) > before:
                    break
        self.lower_bound_s, self.complete = proof

    def _refined_s(self, screen: bounds.Screen) -> FloatArray:
        """Bounds per recompute choice (rows) and shape."""
        tried = set(schedules_tried(self.limits, self.pricing.runtime))
        pps, steps = np.asarray(screen.shape.pp), np.asarray(screen.shape.num_microbatches)
        interleaves = (pps > 1) & (steps % pps == 0) & ("interleaved-1f1b" in tried)
        interleaves &= np.isin(pps, [pp for pp in np.unique(pps[interleaves]) if self._has_chunks(int(pp))])
        others = bool(tried - {"none", "1f1b", "interleaved-1f1b"})
        only_plain = ~interleaves & ((pps == 1) | (not others))
        splits = any(SCHEDULES[name].splits_backward for name in tried)
        orders = bounds.Orders(only_plain, ~only_plain & (not splits), self._least_in_flight(screen))
        return np.array([self._bound_s(screen, choice, orders) for choice in self.choices])

    def _has_chunks(self, pp: int) -> bool:
        """Whether the layers can be cut into chunks that interleave."""
        pricing = self.pricing
        return any(v > 1 for v in chunks_tried("interleaved-1f1b", pp, pricing.model, self.limits, pricing.runtime))

    def _least_in_flight(self, screen: bounds.Screen) -> FloatArray:
        return bounds.least_in_flight(screen.shape, schedules_tried(self.limits, self.pricing.runtime))

    def _bound_s(self, screen: bounds.Screen, choice: RecomputeChoice, orders: bounds.Orders) -> FloatArray:
        base = "full" if choice.whole == "all" else choice.base
        whole = choice.whole in ("one_count", "per_stage")
        busiest = bounds.busiest_rank_s(screen, base, whole, orders)
        return with_ends_s(screen, bounds.schedule_bound_s(screen, busiest, base, orders), base)

    def _run_shape(self, shape: Shape, bounds_s: FloatArray) -> None:
        """Open a shape into its nodes and solve those that can still win, the most promising first."""
        options = schedule_options(shape, self.pricing.model, self.limits, self.pricing.runtime)
        if not options:
            chunks = "" if self.limits.vpp is None else f", vpp {', '.join(map(str, self.limits.vpp))}"
            where = f"pp {shape.pp}{chunks} with {shape.num_microbatches} micro-batches"
            self.rejections.add("no_schedule", 1, f"no schedule runs {where}")
            return
        nodes = sorted(self._nodes(options, bounds_s), key=lambda node: node.guess_s)
        for node in nodes:
            if node.bound_s >= self.cutoff_s(self.limits.gap_fraction):
                self._leave(node.bound_s)
            elif self._late():
                self.complete = False
                self._leave(node.bound_s)
            else:
                self._solve(node)

    def _nodes(self, options: list[tuple[Shape, str]], bounds_s: FloatArray) -> Iterator[Open]:
        """The schedules and recompute choices of a shape whose bounds allow a win, each with its own in-flight."""
        pricing = self.pricing
        table = pricing.table(options[0][0])
        for shape, schedule in options:
            one = replace(table, shape=shape)
            steps, pp, vpp = int(shape.num_microbatches), int(shape.pp), int(shape.vpp)
            in_flight = in_flight_microbatches(schedule, pp, vpp, steps)
            screen, plain = bounds.screen_of_one(pricing, one), np.array([schedule in ("none", "1f1b")])
            trips = ~plain & (not SCHEDULES[schedule].splits_backward)
            orders = bounds.Orders(plain, trips, np.array([in_flight]))
            for choice, shape_bound in zip(self.choices, bounds_s, strict=True):
                if shape_bound >= self.cutoff_s(self.limits.gap_fraction):
                    self._leave(float(shape_bound))
                    continue
                bound = max(float(shape_bound), float(self._bound_s(screen, choice, orders)[0]))
                if not np.isfinite(bound):
                    continue
                mode = "full" if choice.whole == "all" else choice.base
                busy = sum(float(table.layers[k, mode].total_s) * n for k, n in pricing.kind_counts.items()) / pp
                fill = (pp - 1) * (busy / vpp + 2 * float(table.p2p_s))
                guess = steps * busy * unevenness(pricing.model.num_hidden_layers, pp, vpp) + fill
                yield Open(bound, max(guess, bound), one, schedule, choice)

    def _solve(self, node: Open) -> None:
        """Solve one node and remember its bound.

        Where one number of recomputed layers holds for all stages, none is tried first: mostly it fits, and is fast
        enough for the node's own bound to rule the others out.
        """
        without = np.inf
        if node.choice.whole == "one_count":
            without = self._solve_choice(node, RecomputeChoice(node.choice.base, "none"))
            if node.bound_s >= self.cutoff_s(self.limits.gap_fraction):
                self._leave(node.bound_s)
                return
        self._leave(max(node.bound_s, min(without, self._solve_choice(node, node.choice))))

    def _solve_choice(self, node: Open, choice: RecomputeChoice) -> float:
        """Solve, replay, keep the split where it is the fastest of its kind; the solver's bound (∞: nothing fits)."""
        usable, bound = 1.0, np.inf
        for _ in range(MAX_SHRINKS):
            cutoff = self.cutoff_s(self.limits.gap_fraction)
            problem = node_of(self.pricing, node.table, choice, node.schedule, usable, cutoff)
            if self.slack is not None:
                problem = replace(problem, gap_fraction=ALTERNATIVE_GAP)
            self.num_ilps += 1
            try:
                solution = solve(problem, self.deadline_s - time.monotonic())
            except SolverError:
                if not self.found:
                    raise
                # time is up; what was found stands, unproven
                self.complete = False
                return 0.0
            if solution is None:
                bound = min(bound, cutoff)
                break
            bound = min(bound, solution.bound_s)
            if solution.bound_s >= self.cutoff_s(0.0):
                break
            split = split_of(self.pricing, problem, solution)
            if split_fits(self.pricing, node.table, split, node.schedule):
                seconds = step_s(self.pricing, node.table, split, node.schedule)
                self._keep(Found(seconds, node.table, split, node.schedule))
                break
            usable *= SHRINK
        return float(bound)

    def _keep(self, found: Found) -> None:
        known = self.found.get(found.key)
        if known is None or found.step_s < known.step_s:
            self.found[found.key] = found

    def _leave(self, bound_s: float) -> None:
        """Remember the least bound of what will not be looked at further."""
        self.lower_bound_s = min(self.lower_bound_s, bound_s)

    def _late(self) -> bool:
        """Whether time is up; the search then stops and its outcome is no proof."""
        if time.monotonic() < self.deadline_s or not self.found:
            return False
        self.complete = False
        return True


def unevenness(num_layers: int, pp: int, vpp: int) -> float:
    """Longest chunk of the busiest rank over its mean: what interleaving loses, roughly, where chunks differ."""
    busiest = -(-num_layers // pp)
    return -(-busiest // vpp) * vpp / (num_layers / pp) if vpp > 1 else busiest / (num_layers / pp)
