"""Branch and bound over shapes: the search branches on the shape, a node is a way to run it, and the replay judges.

Shapes are sorted by a coarse lower bound of their step. They are opened into nodes (schedule, vpp, recompute) as long
as that bound is below the most promising open node. Nodes with few splits are bounded again by these, hundreds at once.
The most promising node is solved (by its few splits, a dynamic program or an integer one) and replayed. A node is cut
if its bound is not below the replayed step of the best candidate so far (the incumbent). The search ends when no bound
is left below the incumbent less the gap that was asked for, or when time is up. In both cases it reports how far the
lowest bound is from the best step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from planner.errors import SolverError
from planner.layout.candidate import Candidate, Split, even_counts
from planner.physics.cost import CostTable
from planner.schedule.orders import SCHEDULES
from planner.search.bounds import share_ends
from planner.search.case import Deadline
from planner.search.chain import MAX_CELLS, best_split, has_room, is_deep
from planner.search.chunks import (
    bounded,
    least_step_s,
    promising,
    recomputing_first,
    splits_of,
)
from planner.search.enumerate import Rejections, no_schedule, scalar
from planner.search.frontier import (
    Frontier,
    Key,
    Nodes,
    Open,
    Prices,
    blocks_of,
    bound_of_shapes_s,
    choices_of,
    few_of_a_key,
    key_of,
    nodes_of,
)
from planner.search.ilp.node import (
    MAX_TRIES,
    Node,
    RecomputeChoice,
    node_of,
    shorter,
    split_of,
    splits_tried,
)
from planner.search.priced_shapes import PricedShapes
from planner.search.rebalance import SHAPES, improved, level_guess_s, level_split
from planner.shape import FloatArray, IntArray
from planner.specs.training import SearchLimits
from planner.trainers.rules.recipe import Setting, broken_recipe_rules

if TYPE_CHECKING:
    from planner.search.ilp.program import SolverFailed

SHARPENED, FIRST_SHARPENED = 2048, 256
"""Number of nodes that are bounded by their own splits together, once a layout is known and before."""
OPENED = 2048
"""Number of nodes that stand for any set of modules and are opened together."""
NOISE = 1e-4
"""Part of a bound by which a replay may be below it, since the solver stops at such a gap."""
MAX_FAILURES = 20
"""Most nodes at which the solver may fail before the search gives up."""
RUNNERS_UP = 48
"""Most nodes that are solved for alternatives once the best is proven."""
NEARLY = 0.99
"""Largest share of the step of a grid's alternative that another node of the grid must promise to be solved too."""
ALTERNATIVE_SLACK = 1.5
ALTERNATIVE_GAP = 0.01
"""The largest step of an alternative over the best step, and the gap to its own optimum that its program may leave."""


@dataclass(slots=True)
class Branch:
    """The state of one search."""

    limits: SearchLimits
    deadline: Deadline
    rejections: Rejections
    candidates: dict[Key, Candidate] = field(default_factory=dict)
    """The fastest candidate of each key."""
    num_shapes: int = 0
    """Legal shapes of the search, and those of them that can fit."""
    num_fitting: int = 0
    most_ilps: float = np.inf
    """Integer programs after which a search that has a layout ends."""
    num_ilps: int = 0
    failures: list[SolverFailed] = field(default_factory=list)
    """The reasons why nodes were left with the bound that they had before the solver was asked."""
    lower_bound_s: float = np.inf
    """Least bound of any node that was solved, cut, or left."""
    complete: bool = True
    tables: dict[Prices, CostTable] = field(default_factory=dict)
    """The cost table of each runtime, set of modules and shape; vpp does not change it."""
    news: Callable[[float], None] | None = None
    """Called with the lower bound of all layouts after each node, once there is a candidate."""
    slack: float | None = None
    """The largest step of an alternative over the best step; None while the search is for the best."""

    @property
    def best(self) -> Candidate | None:
        return min(self.candidates.values(), key=_rank, default=None)

    @property
    def cutoff_s(self) -> float:
        """`cutoff_beyond_s` of the gap that was asked for."""
        return self.cutoff_beyond_s(self.limits.gap_fraction)

    def cutoff_beyond_s(self, gap_fraction: float) -> float:
        """The seconds below which a node's bound must be for it to beat the incumbent by more than the gap."""
        best = self.best
        if best is None:
            return np.inf
        if self.slack is None:
            return best.step_s / (1 + gap_fraction)
        ranked = sorted(candidate.step_s for candidate in self.candidates.values())
        return ranked[self.limits.top] if len(ranked) > self.limits.top else best.step_s * self.slack

    def run(self, priced: Sequence[PricedShapes]) -> Frontier:
        """Search the shapes that can fit; the nodes that were cut stay in the frontier.

        `priced` has the same shapes several times, each time priced for one runtime.
        """
        if not priced:
            return Frontier()
        coarse = np.min([bound_of_shapes_s(shapes) for shapes in priced], axis=0)
        order = np.argsort(coarse, kind="stable")
        blocks = blocks_of(order, np.asarray(priced[0].shape.pp))
        block, frontier = next(blocks, None), Frontier()
        while True:
            cutoff = self.cutoff_s
            while block is not None and float(coarse[block[0]]) < min(cutoff, frontier.least_guess_s):
                if self._late():
                    break
                self._open([shapes.take(block) for shapes in priced], coarse[block], frontier)
                block = next(blocks, None)
            self._leave(frontier.cut(cutoff))
            sharpened = SHARPENED if self.candidates else FIRST_SHARPENED
            if not self._late() and (frontier.open_sets(OPENED) or frontier.sharpen(sharpened, self._sharp_bound_s)):
                continue
            node = frontier.take()
            if node is None or self._late():
                break
            self._solve(node)
            if key_of(node.shape) not in self.candidates:
                frontier.put_aside([node])
            if self.news is not None and self.candidates:
                unopened_s = float(coarse[block[0]]) if block is not None else np.inf
                self.news(min(self.lower_bound_s, frontier.least_bound_s, unopened_s))
        self._leave(min(frontier.least_bound_s, node.bound_s if node else np.inf))
        self._leave(float(coarse[block[0]]) if block is not None else np.inf)
        return frontier

    def _open(self, priced: Sequence[PricedShapes], coarse_s: FloatArray, frontier: Frontier) -> None:
        """Put all nodes of a block of shapes into the frontier."""
        opened = np.zeros(len(coarse_s), dtype=bool)
        for shapes in priced:
            share_ends(shapes)
            for rows, nodes in nodes_of(shapes):
                opened[rows] = True
                frontier.add(nodes, coarse_s[rows])
        if not opened.all():
            first = priced[0]
            shape, pricing = scalar(first.shape, int(np.argmin(opened))), first.pricing
            shape = replace(shape, vpp=min(self.limits.vpp or (1,)))
            reason, says = "no_schedule", no_schedule(shape, pricing.model, self.limits, pricing.runtime)
            setting = Setting(pricing.model, pricing.cluster, pricing.training, pricing.runtime, shape)
            if (rule := next(broken_recipe_rules(setting), None)) is not None:
                reason, says = "recipe", str(rule)
            self.rejections.add(reason, int((~opened).sum()), says)

    def try_same_grid(self, frontier: Frontier) -> None:
        """Price the best split under the other orders of ranks and groups of shards that its grid may have.

        They are mostly within the gap, so that no proof asks for them.
        """
        best = self.best
        for nodes in frontier.all_nodes() if best is not None else ():
            assert best is not None
            if nodes.shapes.pricing.runtime != best.pricing.runtime or self._late():
                continue
            for row in nodes.rows_like(best.shape, best.schedule):
                shape = scalar(nodes.shapes.shape, row)
                table = best.pricing.table(shape, best.split.priced_modes)
                other = Candidate(best.pricing, table, best.split, best.schedule)
                if other.fits:
                    self.keep(other)

    def try_uneven_chunks(self, frontier: Frontier) -> None:
        """Try inner chunks of different lengths in the shapes that could gain by them.

        They are judged by replay, and change no proof: that is about equal chunks.
        """
        best = self.best
        if best is None or not best.pricing.runtime.uneven_chunks or self.deadline.left_s <= 0:
            return
        fastest = sorted(self.candidates.values(), key=lambda candidate: candidate.step_s)[:SHAPES]
        for start in chain(self._level_starts(frontier), self._module_set_starts(frontier, fastest)):
            if self.deadline.passed:
                return
            level = start.with_split(level_split(start))
            if least_step_s(level) < self.cutoff_beyond_s(0.0) and level.fits:
                self.keep(improved(level, best.step_s))

    def _level_starts(self, frontier: Frontier) -> Iterator[Candidate]:
        """Candidates without a split yet: the shapes that level best with nothing recomputed, if that is allowed."""
        blocks = [n for n in frontier.all_nodes() if any(one.mode == "none" for one in choices_of(n.shapes))]
        ranked = [level_guess_s(nodes) for nodes in blocks]
        promising = [
            (float(step_s[row]), number, row)
            for number, step_s in enumerate(ranked)
            for row in np.argsort(step_s, kind="stable")[:SHAPES].tolist()
            if step_s[row] < self.cutoff_s
        ]
        for _, number, row in sorted(promising)[:SHAPES]:
            nodes = blocks[number]
            yield Candidate(nodes.shapes.pricing, nodes.shapes.table_of(row), Split(()), nodes.schedules[row])

    def _module_set_starts(self, frontier: Frontier, fastest: Sequence[Candidate]) -> Iterator[Candidate]:
        """Those of the fastest candidates that interleave and recompute modules, with every set and without a split."""
        all_sets = {nodes.shapes.pricing.runtime: nodes.shapes.module_sets for nodes in frontier.all_nodes()}
        for known in fastest:
            sets = all_sets.get(known.pricing.runtime)
            if sets and known.split.base == "selective" and SCHEDULES[known.schedule].bound == "interleaved":
                for pricing in sets.pricings.values():
                    table = pricing.selective_table(known.table)
                    yield Candidate(pricing, table, Split((), "selective"), known.schedule)

    def run_alternatives(self, frontiers: Sequence[Frontier]) -> None:
        """Solve more nodes of the frontiers, until none can be among the alternatives asked for.

        The most promising come first. They recompute the modules that the best layout does. These nodes leave the proof
        as it is.
        """
        best, proof = self.best, (self.lower_bound_s, self.complete)
        assert best is not None, "a search without a candidate raises"
        self.slack = ALTERNATIVE_SLACK
        nodes = few_of_a_key([self._beside(best, node) for frontier in frontiers for node in frontier.runners_up])
        nodes = [node for node in nodes if key_of(node.shape) not in self.candidates][:RUNNERS_UP]
        for node in nodes:
            if self._late():
                break
            known = self.candidates.get(key_of(node.shape))
            if node.bound_s < self.cutoff_beyond_s(0.0) and (known is None or node.guess_s < known.step_s * NEARLY):
                self.solve_choice(node, node.choice)
        self.lower_bound_s, self.complete = proof

    def _beside(self, best: Candidate, node: Open) -> Open:
        """A node as it is solved for an alternative: with the best layout's set of modules, or one way to recompute.

        How many layers to recompute is worth an integer program for the best layout, not for the runners-up.
        """
        several = node.choice.whole in ("one_count", "any_modules")
        choice = RecomputeChoice(node.choice.base, "none") if several else node.choice
        pricing, modules = node.pricing, best.pricing.selective_modules
        has_them = set(modules) <= set(pricing.runtime.recomputable_modules)
        if choice.mode == "selective" and best.split.base == "selective" and has_them:
            pricing = pricing.recomputing(modules)
        is_known = pricing.selective_modules == node.pricing.selective_modules
        return replace(node, pricing=pricing, choice=choice, priced=node.priced if is_known else None)

    def _table(self, node: Open) -> CostTable:
        """The prices of a node's shape."""
        if node.prices not in self.tables:
            known, row = node.priced, np.array([node.row])
            table = node.pricing.table(node.shape) if known is None else known.cost_table(row).take(0)
            self.tables[node.prices] = table
        return replace(self.tables[node.prices], shape=node.shape)

    def _sharp_bound_s(self, nodes: Nodes, rows: IntArray, choice: RecomputeChoice) -> FloatArray:
        """A lower bound of the step in seconds of nodes over all splits of each; 0 for one that has many."""
        shapes, bound_s = nodes.shapes, np.zeros(len(rows))
        layers, pricing = shapes.pricing.model.num_hidden_layers, shapes.pricing
        together = shapes.cost_table(rows)
        for places in nodes.by_pipeline(rows):
            one, schedule = scalar(shapes.shape, int(rows[places[0]])), nodes.schedules[int(rows[places[0]])]
            splits = splits_of(one, pricing, choice)
            is_chain = splits is None and int(one.vpp) == 1 and len(places) * layers * int(one.pp) < MAX_CELLS
            if int(one.pp) > 1 and (is_chain or splits is not None):
                alike = together.take(places)
                sizes = {name: getattr(one, name) for name in ("pp", "vpp", "num_microbatches", "zero_stage")}
                table = replace(alike, shape=replace(alike.shape, **sizes))
                if splits is None:
                    bound_s[places] = np.where(has_room(node_of(pricing, table, choice, schedule)), 0.0, np.inf)
                else:
                    steps = np.asarray(alike.shape.num_microbatches)
                    bound_s[places] = bounded(pricing, table, schedule, choice, splits, steps)[-1].min(axis=-1)
        return bound_s

    def _solve(self, node: Open) -> None:
        """Solve one node and remember its bound.

        If one number of recomputed layers holds for all stages, the number 0 is tried first. Mostly that fits, and is
        so fast that the node's own bound rules the other numbers out.
        """
        without = np.inf
        if node.choice.whole == "one_count":
            without = self.solve_choice(node, RecomputeChoice(node.choice.base, "none"))
            if node.bound_s >= self.cutoff_s:
                self._leave(node.bound_s)
                return
        self._leave(max(node.bound_s, min(without, self.solve_choice(node, node.choice))))

    def solve_choice(self, node: Open, choice: RecomputeChoice) -> float:
        """Find the node's best split and return a lower bound of all its splits, in seconds (∞: no split fits).

        A node that has few splits needs no program: each is bounded, and those that are left are replayed.
        """
        layout = Candidate(node.pricing, self._table(node), Split(()), node.schedule)
        splits = splits_of(layout.shape, node.pricing, choice)
        if splits is None:
            return self._solve_chain(node, choice, layout)
        cutoff_s = self.cutoff_s
        bound_s, candidates = promising(layout, choice, splits, cutoff_s)
        for least_s, candidate in candidates:
            if least_s >= self.cutoff_s or self._late():
                bound_s = min(bound_s, least_s)
                break
            if candidate.fits:
                self.keep(candidate)
                bound_s = min(bound_s, candidate.step_s)
                if self.slack is not None:  # one layout of a grid is enough beside the best
                    break
        return bound_s

    def _solve_chain(self, node: Open, choice: RecomputeChoice, layout: Candidate) -> float:
        """`solve_choice` where a rank may hold any number of layers: by a dynamic program, or by an integer one."""
        tail_s, bound_s, objective_s = float(layout.table.tail_s), 0.0, np.inf
        cutoff_s = self.cutoff_s - tail_s
        tries = splits_tried(layout, choice, lambda problem: best_split(self._of_gap(problem)), cutoff_s)
        for number, (solution, candidate) in enumerate(tries):
            if solution is None:
                return max(bound_s, self._solve_program(choice, layout))
            bound_s, objective_s = bound_s if number else solution.bound_s + tail_s, solution.objective_s
            if candidate is not None and candidate.fits:
                self.keep(candidate)
        # a program whose objective is below the cutoff rules nothing out
        step_s = objective_s + tail_s
        decided = step_s < max(bound_s * (1 + NOISE), self.cutoff_s) or is_deep(node.pricing.model, int(node.shape.pp))
        if decided or self.slack is not None or bound_s >= self.cutoff_s:
            return bound_s
        return max(bound_s, self._solve_program(choice, layout))

    def _solve_program(self, choice: RecomputeChoice, layout: Candidate) -> float:
        """Solve the integer program, replay its split and keep the fastest candidate of its key; the solver's bound.

        The bound is 0 if the solver's is not confirmed, or the replay is below it: then it is none.
        """
        from planner.search.ilp.program import SolverFailed, solve

        bound, pricing, table = np.inf, layout.pricing, layout.table
        if not self.candidates:
            self._try_even_split(choice, layout)
        # the program knows nothing of the seconds that every split of the shape takes
        tail_s = float(table.tail_s)
        short_bytes: list[float] = []
        for _ in range(MAX_TRIES):
            if self._late():
                return 0.0
            cutoff = self.cutoff_s
            problem = self._of_gap(node_of(pricing, table, choice, layout.schedule, short_bytes, cutoff - tail_s))
            self.num_ilps += 1
            try:
                # an alternative proves nothing, and bytes left free raise no bound
                left_s = self.deadline.left_for(bool(self.candidates))
                solution = solve(problem, left_s, proves=self.slack is None and not short_bytes)
            except SolverFailed as error:
                self.failures.append(error)
                return float(bound) if short_bytes else 0.0
            except SolverError:
                if not self.candidates:
                    raise
                # time is up; the candidates stand, unproven
                self.complete = False
                return 0.0
            if problem.of_mean_layers:
                bound = 0.0
            if solution is None:
                bound = min(bound, cutoff)
                break
            if not short_bytes:
                bound = min(bound, solution.bound_s + tail_s)
            if bound >= self.cutoff_beyond_s(0.0):
                break
            candidate = layout.with_split(split_of(pricing, problem, solution))
            if candidate.fits:
                self.keep(candidate)
                return float(bound) if candidate.step_s >= bound * (1 - NOISE) else 0.0
            short_bytes = shorter(short_bytes, candidate.excess_bytes, solution.free_bytes)
        return float(bound)

    def _of_gap(self, problem: Node) -> Node:
        """The node as it is solved: for an alternative with a wider gap."""
        return problem if self.slack is None else replace(problem, gap_fraction=ALTERNATIVE_GAP)

    def _try_even_split(self, choice: RecomputeChoice, layout: Candidate) -> None:
        """Keep the node's even split if it fits, so that no program of a deep model is waited for without a layout."""
        model = layout.pricing.model
        counts = even_counts(model.num_hidden_layers, len(layout.placement))
        split = recomputing_first(counts, choice, max(counts) if choice.whole != "none" else 0, model)
        candidate = layout.with_split(split)
        if candidate.fits:
            self.keep(candidate)

    def keep(self, candidate: Candidate) -> None:
        """Remember the candidate if it is the fastest of its key."""
        key = key_of(candidate.shape)
        known = self.candidates.get(key)
        if known is None or candidate.step_s < known.step_s:
            self.candidates[key] = candidate

    def _leave(self, bound_s: float) -> None:
        """Remember the least bound of the nodes that are not examined further."""
        self.lower_bound_s = min(self.lower_bound_s, bound_s)

    def _late(self) -> bool:
        """True if time is up or the solver keeps failing; the search then stops with the best candidate, unproven.

        Without a candidate it goes on whatever the time is. Raises SolverError if the solver keeps failing until then.
        """
        if len(self.failures) >= MAX_FAILURES:
            if not self.candidates:
                raise self.failures[-1]
            self.complete = False
            return True
        enough = bool(self.candidates) and self.num_ilps >= self.most_ilps
        if not enough and not self.deadline.gives_up(bool(self.candidates)):
            return False
        self.complete = False
        return True


def _rank(candidate: Candidate) -> tuple[float, ...]:
    """A key that sorts faster candidates first.

    Steps that are equal in their first five digits are sorted by memory, then by tensor parallelism, then by the number
    of stages.
    """
    shape, step_s = candidate.shape, candidate.step_s
    memory = max(float(part.static_bytes) for part in candidate.table.layers.values())
    return (float(f"{step_s:.5g}"), memory, float(shape.tp), float(shape.pp), step_s)
