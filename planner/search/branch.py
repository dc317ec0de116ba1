"""Branch and bound over shapes: the search branches on the shape, a node is an integer program, and the replay judges.

Shapes are sorted by a coarse lower bound of their step. They are opened into nodes (schedule, vpp, recompute) as long
as that bound is below the most promising open node. The most promising open node is solved and replayed. A node is cut
if its bound is not below the replayed step of the best candidate so far (the incumbent). The search ends when no bound
is left below the incumbent less the gap that was asked for, or when time is up. In both cases it reports how far the
lowest bound is from the best step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain

import numpy as np

from planner.errors import SolverError
from planner.layout.candidate import Candidate
from planner.layout.split import Split
from planner.physics.cost import CostTable
from planner.schedule.orders import SCHEDULES
from planner.search.deadline import Deadline
from planner.search.enumerate import Rejections, scalar
from planner.search.exhaustive import few_splits, fitting, least_step_s
from planner.search.frontier import Frontier, Open, Prices, blocks_of, bound_of_shapes_s, nodes_of
from planner.search.ilp.program import SolverFailed, solve
from planner.search.ilp.retry import shorter
from planner.search.ilp.translate import RecomputeChoice, node_of, split_of, with_shorter_chunks
from planner.search.priced_shapes import PricedShapes
from planner.search.uneven import SHAPES, improved, level_guess_s, level_split
from planner.shape import FloatArray, Shape
from planner.specs.training import SearchLimits
from planner.trainers.spec import RuntimeSpec

PRICED = 16
"""Number of nodes that are priced together with the one that is solved next."""
OPENED = 128
"""Number of nodes that stand for any set of modules and are opened together."""
NOISE = 1e-4
"""Part of a bound by which a replay may be below it, since the solver stops at such a gap."""
MAX_FAILURES = 20
"""Most nodes at which the solver may fail before the search gives up."""
MAX_TRIES = 4
"""Most programs solved for a node; each leaves more bytes free on the ranks that the replay showed to be too full."""
RUNNERS_UP = 16
NODES_PER_ALTERNATIVE = 2
"""Numbers of shapes, and of nodes of each shape, that are solved for alternatives once the best is proven."""
ALTERNATIVE_SLACK = 1.5
ALTERNATIVE_GAP = 0.01
"""The largest step of an alternative over the best step, and the gap to its own optimum that its program may leave."""


Key = tuple[int, ...]
"""The grid and the micro-batch size; a reader takes two layouts with the same key for the same layout."""


def key_of(shape: Shape) -> Key:
    """The sizes by which a reader tells layouts apart."""
    return tuple(int(v) for v in (shape.tp, shape.cp, shape.ep, shape.etp, shape.pp, shape.micro_batch_size))


@dataclass(slots=True)
class Branch:
    """The state of one search."""

    limits: SearchLimits
    choices: Mapping[RuntimeSpec, tuple[RecomputeChoice, ...]]
    """The ways to recompute that each runtime knows."""
    deadline: Deadline
    rejections: Rejections
    candidates: dict[Key, Candidate] = field(default_factory=dict)
    """The fastest candidate of each key."""
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

    def cutoff_s(self, gap_fraction: float) -> float:
        """The seconds below which a node's bound must be for it to beat the incumbent by more than the gap."""
        best = self.best
        if best is None:
            return np.inf
        if self.slack is None:
            return best.step_s / (1 + gap_fraction)
        ranked = sorted(candidate.step_s for candidate in self.candidates.values())
        return ranked[self.limits.top] if len(ranked) > self.limits.top else best.step_s * self.slack

    def run(self, priced: Sequence[tuple[PricedShapes, SearchLimits]]) -> Frontier:
        """Search the shapes that can fit; the nodes that were cut stay in the frontier.

        `priced` has the same shapes several times: each time they are priced for one runtime, with limits that name the
        schedules which this runtime runs.
        """
        coarse = np.min([bound_of_shapes_s(shapes, limits) for shapes, limits in priced], axis=0)
        order = np.argsort(coarse, kind="stable")
        blocks = blocks_of(order, np.asarray(priced[0][0].shape.pp))
        block, frontier = next(blocks, None), Frontier(self.choices)
        while True:
            cutoff = self.cutoff_s(self.limits.gap_fraction)
            while block is not None and float(coarse[block[0]]) < min(cutoff, frontier.least_guess_s):
                if self._late():
                    break
                self._open([(shapes.take(block), limits) for shapes, limits in priced], coarse[block], frontier)
                block = next(blocks, None)
            self._leave(frontier.cut(cutoff))
            if not self._late() and frontier.open_sets(OPENED):
                continue
            node = frontier.take()
            if node is None or self._late():
                break
            if node.prices not in self.tables:
                self._price([node, *frontier.most_promising(PRICED)])
            self._solve(node)
            if key_of(node.shape) not in self.candidates:
                frontier.put_aside([node])
            if self.news is not None and self.candidates:
                unopened_s = float(coarse[block[0]]) if block is not None else np.inf
                self.news(min(self.lower_bound_s, frontier.least_bound_s, unopened_s))
        self._leave(min(frontier.least_bound_s, node.bound_s if node else np.inf))
        self._leave(float(coarse[block[0]]) if block is not None else np.inf)
        return frontier

    def _open(
        self, priced: Sequence[tuple[PricedShapes, SearchLimits]], coarse_s: FloatArray, frontier: Frontier
    ) -> None:
        """Put all nodes of a block of shapes into the frontier."""
        opened = np.zeros(len(coarse_s), dtype=bool)
        for shapes, limits in priced:
            for rows, nodes in nodes_of(shapes, limits):
                opened[rows] = True
                frontier.add(nodes, coarse_s[rows])
        if not opened.all():
            shape = scalar(priced[0][0].shape, int(np.argmin(opened)))
            chunks = "" if self.limits.vpp is None else f", vpp {', '.join(map(str, self.limits.vpp))}"
            where = f"pp {shape.pp}{chunks} with {shape.num_microbatches} micro-batches"
            self.rejections.add("no_schedule", int((~opened).sum()), f"no schedule runs {where}")

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
            if least_step_s(level) < self.cutoff_s(0.0) and level.fits:
                self.keep(improved(level, best.step_s))

    def _level_starts(self, frontier: Frontier) -> Iterator[Candidate]:
        """Candidates without a split yet: the shapes that level best with nothing recomputed, if that is allowed."""
        plain = {runtime for runtime, choices in self.choices.items() if any(c.mode == "none" for c in choices)}
        blocks = [nodes for nodes in frontier.all_nodes() if nodes.shapes.pricing.runtime in plain]
        ranked = [level_guess_s(nodes) for nodes in blocks]
        promising = [
            (float(step_s[row]), number, row)
            for number, step_s in enumerate(ranked)
            for row in np.argsort(step_s, kind="stable")[:SHAPES].tolist()
            if step_s[row] < self.cutoff_s(self.limits.gap_fraction)
        ]
        for _, number, row in sorted(promising)[:SHAPES]:
            nodes = blocks[number]
            shape, pricing = scalar(nodes.shapes.shape, row), nodes.shapes.pricing
            yield Candidate(pricing, pricing.table(shape), Split(()), nodes.schedules[row])

    def _module_set_starts(self, frontier: Frontier, fastest: Sequence[Candidate]) -> Iterator[Candidate]:
        """Those of the fastest candidates that interleave and recompute modules, with every set and without a split."""
        all_sets = {nodes.shapes.pricing.runtime: nodes.shapes.module_sets for nodes in frontier.all_nodes()}
        for known in fastest:
            sets = all_sets.get(known.pricing.runtime)
            if sets and known.split.base == "selective" and SCHEDULES[known.schedule].bound == "interleaved":
                for pricing in sets.pricings.values():
                    table = pricing.selective_table(known.table)
                    yield Candidate(pricing, table, Split((), "selective"), known.schedule)

    def run_alternatives(self, frontier: Frontier) -> None:
        """Solve more nodes, the most promising first, until none can be among the alternatives asked for.

        These nodes leave the proof as it is.
        """
        proof = self.lower_bound_s, self.complete
        self.slack = ALTERNATIVE_SLACK
        self._price(frontier.runners_up[:RUNNERS_UP])
        tried: dict[tuple[int, ...], int] = {}
        for node in frontier.runners_up:
            key = key_of(node.shape)
            if (
                key in self.candidates
                or tried.get(key, 0) >= NODES_PER_ALTERNATIVE
                or node.bound_s >= self.cutoff_s(0.0)
            ):
                continue
            if len(tried) >= RUNNERS_UP or self._late():
                break
            tried[key] = tried.get(key, 0) + 1
            # how many layers to recompute is worth an integer program for the best layout, not for the runners-up
            several = node.choice.whole in ("one_count", "any_modules")
            choice = RecomputeChoice(node.choice.base, "none") if several else node.choice
            self.solve_choice(node, choice)
        self.lower_bound_s, self.complete = proof

    def _price(self, nodes: Sequence[Open]) -> None:
        """Price the shapes of several nodes together, which takes little longer than one."""
        new = {node.prices: node.pricing for node in nodes if node.prices not in self.tables}
        for pricing in {prices[:2]: pricing for prices, pricing in new.items()}.values():
            alike = [prices for prices in new if prices[:2] == (pricing.runtime, pricing.selective_modules)]
            columns = {f.name: np.array([getattr(shape, f.name) for *_, shape in alike]) for f in fields(Shape)}
            together = pricing.table(Shape(**columns))
            self.tables |= {prices: together.take(row) for row, prices in enumerate(alike)}

    def _table(self, node: Open) -> CostTable:
        """The prices of a node's shape."""
        self._price([node])
        return replace(self.tables[node.prices], shape=node.shape)

    def _solve(self, node: Open) -> None:
        """Solve one node and remember its bound.

        If one number of recomputed layers holds for all stages, the number 0 is tried first. Mostly that fits, and is
        so fast that the node's own bound rules the other numbers out.
        """
        without = np.inf
        if node.choice.whole == "one_count":
            without = self.solve_choice(node, RecomputeChoice(node.choice.base, "none"))
            if node.bound_s >= self.cutoff_s(self.limits.gap_fraction):
                self._leave(node.bound_s)
                return
        self._leave(max(node.bound_s, min(without, self.solve_choice(node, node.choice))))

    def solve_choice(self, node: Open, choice: RecomputeChoice) -> float:
        """Find the node's best split and return a lower bound of all its splits, in seconds (∞: no split fits).

        If the program's bound leaves a gap to its replay, and the node has few splits, each of them is tried.
        """
        bound_s = self._solve_program(node, choice)
        if self.slack is not None or bound_s >= self.cutoff_s(self.limits.gap_fraction):
            return bound_s
        shape = Candidate(node.pricing, self._table(node), Split(()), node.schedule)
        splits = few_splits(shape, choice)
        if splits is None:
            return bound_s
        fastest_s = np.inf
        for split in splits:
            if self._late():
                return bound_s
            for candidate in fitting(shape, choice, [split]):
                least_s = least_step_s(candidate)
                if least_s < self.cutoff_s(self.limits.gap_fraction):
                    self.keep(candidate)
                    least_s = candidate.step_s
                fastest_s = min(fastest_s, least_s)
        return max(bound_s, fastest_s)

    def _solve_program(self, node: Open, choice: RecomputeChoice) -> float:
        """Solve the integer program, replay its split and keep the fastest candidate of its key; the solver's bound.

        The bound is 0 if the solver's is not confirmed, or the replay is below it: then it is none.
        """
        bound, pricing, table = np.inf, node.pricing, self._table(node)
        # the program knows nothing of the seconds that every split of the shape takes
        tail_s = float(table.tail_s)
        short_bytes: list[float] = []
        for _ in range(MAX_TRIES):
            if self._late():
                return 0.0
            cutoff = self.cutoff_s(self.limits.gap_fraction)
            problem = node_of(pricing, table, choice, node.schedule, short_bytes, cutoff - tail_s)
            if self.slack is not None:
                problem = replace(problem, gap_fraction=ALTERNATIVE_GAP)
            self.num_ilps += 1
            try:
                # an alternative proves nothing, and bytes left free raise no bound
                solution = solve(problem, self.deadline.left_s, proves=self.slack is None and not short_bytes)
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
            if bound >= self.cutoff_s(0.0):
                break
            variants = (solution, *with_shorter_chunks(problem, solution))
            splits = [split_of(pricing, problem, variant) for variant in variants]
            candidates = [Candidate(pricing, table, split, node.schedule) for split in splits]
            fitting = [candidate for candidate in candidates if candidate.fits]
            for candidate in fitting:
                self.keep(candidate)
            if fitting:
                fastest_s = min(candidate.step_s for candidate in fitting)
                return float(bound) if fastest_s >= bound * (1 - NOISE) else 0.0
            short_bytes = shorter(short_bytes, candidates[0].excess_bytes, solution.free_bytes)
        return float(bound)

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

        Raises SolverError if there is no candidate yet.
        """
        if len(self.failures) >= MAX_FAILURES:
            if not self.candidates:
                raise self.failures[-1]
            self.complete = False
            return True
        if not self.deadline.passed:
            return False
        if not self.candidates:
            self.deadline.check("solving nodes")
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
