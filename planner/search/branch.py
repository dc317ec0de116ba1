"""Branch and bound over shapes: the shape is the branching variable, each node an integer program, the replay the judge.

Shapes come in the order of a lower bound on their step. A shape whose bound is not below the incumbent's replayed time is cut;
the others are opened into nodes (schedule, vpp, recompute), most promising first, solved and replayed. The search ends when no
bound is left below the incumbent less the gap asked for, or when time is up; either way it says how far the bound is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from planner.physics.cost import CostTable, Pricing
from planner.physics.shape import FloatArray, Shape
from planner.search import bounds
from planner.search.candidates import Rejections, interleavings, scalar
from planner.search.ilp import solve
from planner.search.nodes import RecomputeChoice, node_of, split_of
from planner.search.price import split_fits, step_s
from planner.search.split import Split
from planner.specs.training import SearchLimits

BLOCK = 1024
"""Shapes refined at once: enough to be worth numpy's calls, few enough to stop early."""
SHRINK = 0.98
"""Memory planned with after a split that the replay showed not to fit."""
MAX_SHRINKS = 3


@dataclass(frozen=True, slots=True)
class Found:
    """One solved and replayed layout."""

    step_s: float
    table: CostTable
    split: Split
    schedule: str

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
        return np.inf if best is None else best.step_s * (1 - gap_fraction)

    def run(self, screen: bounds.Screen) -> None:
        """Search all shapes of `screen` (those that can fit)."""
        coarse = bounds.coarse_bound_s(screen)
        order = np.argsort(coarse, kind="stable")
        for start in range(0, len(order), BLOCK):
            block = order[start : start + BLOCK]
            if float(coarse[block[0]]) >= self.cutoff_s(self.limits.gap_fraction) or self._late():
                self._leave(float(coarse[block[0]]))
                break
            self._run_block(screen.take(block), coarse[block])

    def _run_block(self, screen: bounds.Screen, coarse: FloatArray) -> None:
        """Refine a block's bounds and work through its shapes, best bound first."""
        refined = np.maximum(coarse, self._refined_s(screen))
        for index in np.argsort(refined, kind="stable"):
            bound = float(refined[index])
            if not np.isfinite(bound):
                continue
            if bound >= self.cutoff_s(self.limits.gap_fraction) or self._late():
                self._leave(bound)
                return
            self._run_shape(scalar(screen.shape, int(index)), bound)

    def _refined_s(self, screen: bounds.Screen) -> FloatArray:
        """The best bound over recompute choices."""
        shape, limits = screen.shape, self.limits
        allowed = limits.schedule or self.pricing.runtime.schedules
        multiple = np.asarray(shape.num_microbatches) % np.asarray(shape.pp) == 0
        can = "interleaved-1f1b" in allowed and (limits.vpp is None or max(limits.vpp) > 1)
        interleaves = (np.asarray(shape.pp) > 1) & can
        if self.pricing.runtime.interleaved_microbatch_multiple:
            interleaves &= multiple
        best = np.full(len(screen.kernel), np.inf)
        for choice in self.choices:
            base = "full" if choice.whole == "all" else choice.base
            busiest = bounds.busiest_rank_s(screen, base, choice.whole in ("one_count", "per_stage"))
            best = np.minimum(best, bounds.schedule_bound_s(screen, busiest, base, interleaves))
        return best

    def _run_shape(self, shape: Shape, bound_s: float) -> None:
        """Open a shape into its nodes and solve those that can still win, the most promising first."""
        options = interleavings(shape, self.pricing.model, self.limits, self.pricing.runtime)
        if not options:
            self.rejections.add(
                "no_schedule", 1, f"no schedule runs pp {shape.pp} with {shape.num_microbatches} micro-batches"
            )
            return
        nodes = sorted(self._nodes(options, bound_s), key=lambda node: node.guess_s)
        for node in nodes:
            if node.bound_s >= self.cutoff_s(self.limits.gap_fraction):
                self._leave(node.bound_s)
            elif self._late():
                self.complete = False
                self._leave(node.bound_s)
            else:
                self._solve(node)

    def _nodes(self, options: list[tuple[Shape, str]], bound_s: float) -> Iterator[Open]:
        pricing = self.pricing
        table = pricing.table(options[0][0])
        for shape, schedule in options:
            one = replace(table, shape=shape)
            for choice in self.choices:
                mode = "full" if choice.whole == "all" else choice.base
                busy = sum(float(table.layers[k, mode].total_s) * n for k, n in pricing.kind_counts.items()) / int(
                    shape.pp
                )
                steps, pp, vpp = int(shape.num_microbatches), int(shape.pp), int(shape.vpp)
                fill = (pp - 1) * (busy / vpp + 2 * float(table.p2p_s))
                guess = steps * busy * unevenness(pricing.model.num_hidden_layers, pp, vpp) + fill
                plain = steps * busy + (pp - 1) * busy if vpp == 1 and len(pricing.kind_counts) == 1 else 0.0
                yield Open(max(bound_s, 0.0), max(guess, plain, bound_s), one, schedule, choice)

    def _solve(self, node: Open) -> None:
        """Solve one node, replay its split, and keep it where it is the fastest of its kind."""
        usable = 1.0
        for _ in range(MAX_SHRINKS):
            problem = node_of(self.pricing, node.table, node.choice, node.schedule, usable)
            self.num_ilps += 1
            solution = solve(problem, self.deadline_s - time.monotonic())
            if solution is None:
                return
            if usable == 1.0:
                self._leave(max(node.bound_s, solution.bound_s))
            if solution.bound_s >= self.cutoff_s(0.0):
                return
            split = split_of(self.pricing, problem, solution)
            if split_fits(self.pricing, node.table, split, node.schedule):
                seconds = step_s(self.pricing, node.table, split, node.schedule)
                self._keep(Found(seconds, node.table, split, node.schedule))
                return
            usable *= SHRINK

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
