"""The open nodes, thousands of them as arrays: a node is a shape with a schedule, its vpp and a way to recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from planner.physics.pricing import Pricing
from planner.record import record
from planner.schedule.orders import SCHEDULES, chunks_in_flight, placement
from planner.search.bounds import (
    Orders,
    all_optimizers_s,
    coarse_bound_s,
    orders_of,
    pipeline_bound_s,
    rows_with_room,
    with_ends_s,
)
from planner.search.enumerate import scalar, schedules_of
from planner.search.ilp.node import RecomputeChoice, Whole
from planner.search.priced_shapes import Modules, PricedShapes
from planner.shape import BoolArray, FloatArray, IntArray, Shape, distinct
from planner.specs.model import ModelSpec
from planner.specs.training import Recompute, SearchLimits
from planner.trainers.rules.recipe import Setting, takes_shapes
from planner.trainers.spec import RuntimeSpec

BLOCK = 1024
"""Number of shapes opened at once: enough to be worth numpy's calls, few enough to stop early."""
BLOCK_RANKS = 1 << 16
"""Most pipeline ranks of such shapes together, each of which is bounded: deep models have thousands in a shape."""
WIDTHS = (0, 2, 4, 8, 16, 32, 1 << 30)
"""Limits of pp between which nodes are bounded together; nodes of about as many ranks leave few columns idle."""

FEW_CELLS = 1 << 12
"""Columns that nodes may leave idle beside wider ones, all nodes together: a call takes as long as so many do."""

BOUNDLESS_BYTES = 1e18
"""More bytes than any GPU has."""

ONE_SET = RecomputeChoice("selective", "none")
"""Selective recompute of one set of modules."""
ANY_SET = RecomputeChoice("selective", "any_modules")
"""Selective recompute of any set of modules; a node stands for all sets until they are opened one by one."""

KEPT, KEPT_OF_A_KEY = 32, 3
"""Numbers of grids whose cut nodes are remembered, and of nodes of each; the alternatives are chosen among them."""
LOOKED_AT = 1024
"""Most of the cut nodes that are looked at for that."""


def recompute_choices(model: ModelSpec, runtime: RuntimeSpec, limits: SearchLimits) -> tuple[RecomputeChoice, ...]:
    """The ways to recompute that the trainer can be told with its recipe and the user allows."""
    allowed = limits.recompute or ("none", *(("selective",) if runtime.has_sequence_parallel else ()), "full")
    if runtime.recomputes_unasked:
        allowed = tuple(mode for mode in allowed if mode != "none")
    if not runtime.recomputes_layers:
        allowed = tuple(mode for mode in allowed if mode != "full")
    choices = []
    if "none" in allowed and "full" in allowed and runtime.recompute_per_stage:
        choices.append(RecomputeChoice("none", "per_stage"))
    elif "none" in allowed and "full" in allowed and len(model.kinds) == 1 and runtime.recomputes_some_layers:
        # one number of layers for all stages counts layers, not kinds
        choices.append(RecomputeChoice("none", "one_count"))
    elif "none" in allowed:
        choices.append(RecomputeChoice("none", "none"))
    if "selective" in allowed:
        choices.append(RecomputeChoice("selective", "none"))
    if "full" in allowed and not (runtime.recompute_per_stage and "none" in allowed):
        choices.append(RecomputeChoice("none", "all"))
    return tuple(choices)


def choices_of(shapes: PricedShapes) -> tuple[RecomputeChoice, ...]:
    """The ways to recompute shapes; one way stands for all sets of modules where there are several."""
    choices = recompute_choices(shapes.pricing.model, shapes.pricing.runtime, shapes.limits)
    return tuple(ANY_SET if one == ONE_SET and shapes.module_sets is not None else one for one in choices)


Key = tuple[int, ...]
"""The grid and the micro-batch size; a reader takes two layouts with the same key for the same layout."""


def key_of(shape: Shape, row: int | tuple[()] = ()) -> Key:
    """The sizes by which a reader tells layouts apart, of a shape or of one row of many."""
    sizes = (shape.tp, shape.cp, shape.ep, shape.etp, shape.pp, shape.micro_batch_size)
    return tuple(int(np.asarray(size)[row]) for size in sizes)


Prices = tuple[RuntimeSpec, Modules, Shape]
"""The runtime, the recomputed modules and the shape that a cost table belongs to."""


@record
class Open:
    """A node not solved yet."""

    bound_s: float
    guess_s: float
    """A guess of the step in seconds; it only decides which node is solved first."""
    pricing: Pricing
    shape: Shape
    schedule: str
    choice: RecomputeChoice
    priced: PricedShapes | None = None
    """The block that the node was opened in, and its row there: what is known of its prices."""
    row: int = 0

    @property
    def prices(self) -> Prices:
        """The key of the node's cost table; vpp changes no price."""
        return self.pricing.runtime, self.pricing.selective_modules, replace(self.shape, vpp=1)


def few_of_a_key(nodes: Sequence[Open]) -> list[Open]:
    """The most promising nodes, the first of all ahead, with a few of each of the first `KEPT` grids."""
    taken: dict[Key, list[Open]] = {}
    for node in sorted(nodes, key=lambda node: node.guess_s):
        key = key_of(node.shape)
        if len(taken.get(key, ())) < KEPT_OF_A_KEY and (key in taken or len(taken) < KEPT):
            taken.setdefault(key, []).append(node)
    return [node for of_key in taken.values() for node in of_key]


@record
class Nodes:
    """Rows of shapes, each with a schedule that it may run."""

    shapes: PricedShapes
    """The shape of each row, vpp included."""
    schedules: Sequence[str]
    orders: Orders
    sets: Sequence[Modules] = ()
    """The modules that selective recompute means in each row; empty where it means the pricing's own."""

    def take(self, rows: IntArray) -> Nodes:
        """The nodes at `rows`."""
        schedules = [self.schedules[row] for row in rows.tolist()]
        sets = [self.sets[row] for row in rows.tolist()] if self.sets else ()
        return Nodes(self.shapes.take(rows), schedules, self.orders.take(rows), sets)

    def pricing(self, row: int) -> Pricing:
        """The prices of one row."""
        pricing = self.shapes.pricing
        return pricing.recomputing(self.sets[row]) if self.sets else pricing

    def rows_like(self, shape: Shape, schedule: str) -> list[int]:
        """The rows with the grid, micro-batches and chunks of a shape."""
        names = ("tp", "cp", "ep", "etp", "pp", "dp", "vpp", "micro_batch_size", "zero_stage")
        alike = [getattr(self.shapes.shape, name) == getattr(shape, name) for name in names]
        return [row for row in np.flatnonzero(np.all(alike, axis=0)).tolist() if self.schedules[row] == schedule]

    def by_pipeline(self, rows: IntArray) -> Iterator[IntArray]:
        """Places among `rows` of those with the same schedule, stages, ZeRO stage and micro-batches.

        Where stages interleave, it is enough that as many micro-batches are in flight.
        """
        shape, alike = self.shapes.shape, dict[tuple[Any, ...], list[int]]()
        columns = [np.asarray(axis)[rows] for axis in (shape.pp, shape.vpp, shape.num_microbatches, shape.zero_stage)]
        for place, (row, sizes) in enumerate(zip(rows.tolist(), np.stack(columns, axis=1).tolist(), strict=True)):
            schedule, (pp, vpp, steps, zero_stage) = self.schedules[row], sizes
            held = steps if vpp == 1 else chunks_in_flight(schedule, pp, vpp, steps)
            alike.setdefault((schedule, pp, vpp, zero_stage, held), []).append(place)
        yield from map(np.array, alike.values())

    def bound_s(self, choice: RecomputeChoice) -> FloatArray:
        """A lower bound of each row's step in seconds, recomputing as `choice` says; infinite if it cannot fit.

        Recomputed layers hide more of an exchange. So if some layers may be recomputed, the bound takes all of them to
        be recomputed during the exchange. If one number of recomputed layers holds for all ranks, recomputing adds no
        less to the step than it hides: the step is then also no shorter than without recompute and with boundless
        memory.
        """
        if choice.whole in ("none", "all"):
            return self._step_s(self.shapes, choice.mode, choice.mode)
        if choice.whole == "any_modules":
            return self._step_s(self.shapes.with_any_modules(), "none", "selective", choice.whole)
        bound_s = self._step_s(self.shapes, choice.mode, "full", choice.whole)
        if choice.whole == "one_count":
            boundless = replace(self.shapes, pricing=replace(self.shapes.pricing, headroom_bytes=-BOUNDLESS_BYTES))
            bound_s = np.maximum(bound_s, self._step_s(boundless, choice.mode, choice.mode))
        return bound_s

    def _step_s(
        self, shapes: PricedShapes, base: Recompute, exchanging: Recompute, whole: Whole = "none"
    ) -> FloatArray:
        rows, step_s = rows_with_room(shapes, base, whole, self.orders), np.full(len(shapes.kernel), np.inf)
        shapes, orders = shapes.take(rows), self.orders.take(rows)
        pipeline_s = pipeline_bound_s(shapes, base, whole, orders)
        step_s[rows] = np.where(np.isfinite(pipeline_s), with_ends_s(shapes, pipeline_s, base, exchanging), np.inf)
        return step_s

    def guess_s(self, choice: RecomputeChoice) -> FloatArray:
        """Seconds of the pipeline with layers spread as evenly as possible, and with its fill."""
        shapes, model = self.shapes, self.shapes.pricing.model
        mode = "none" if choice.whole == "any_modules" else choice.mode
        pp, vpp = shapes.shape.pp, shapes.shape.vpp
        mean_s = (shapes.work_s(mode) - shapes.ends_s()) / pp
        busiest = np.ceil(np.ceil(model.num_hidden_layers / pp) / vpp) * vpp / (model.num_hidden_layers / pp)
        fill_s = (pp - 1) * (mean_s / vpp + 2 * shapes.p2p_s)
        return shapes.shape.num_microbatches * mean_s * busiest + fill_s


def bound_of_shapes_s(shapes: PricedShapes) -> FloatArray:
    """A lower bound of each shape's step under any of the schedules tried; infinite where another recipe is better."""
    left = shapes.unbeaten
    pipeline_s = coarse_bound_s(left, any(SCHEDULES[name].splits_backward for name in shapes.schedules))
    return np.asarray(shapes.scattered(pipeline_s + all_optimizers_s(left) / left.shape.pp + left.tail_s, np.inf))


def blocks_of(order: IntArray, pps: IntArray) -> Iterator[IntArray]:
    """The shapes in this order, in blocks of at most `BLOCK` shapes and, but for single shapes, `BLOCK_RANKS` ranks."""
    ranks = np.cumsum(pps[order])
    start = 0
    while start < len(order):
        before = int(ranks[start - 1]) if start else 0
        end = int(np.searchsorted(ranks, before + BLOCK_RANKS, side="right"))
        end = min(max(end, start + 1), start + BLOCK)
        yield order[start:end]
        start = end


def nodes_of(shapes: PricedShapes) -> Iterator[tuple[IntArray, Nodes]]:
    """Every schedule that the shapes may run, as blocks: the index of each row's shape, and the rows."""
    pricing, shape, limits = shapes.pricing, shapes.shape, shapes.limits
    pps, steps = np.asarray(shape.pp), np.asarray(shape.num_microbatches)
    left = np.ones(len(pps), dtype=bool) if shapes.beaten is None else ~shapes.beaten
    for rows in _of_like_width(np.flatnonzero(left), pps):
        distinct, which = np.unique(np.stack([pps[rows], steps[rows]]), axis=1, return_inverse=True)
        options = [
            [(name, pp, vpp, m) for name, vpp in schedules_of(pp, m, pricing.model, limits, pricing.runtime)]
            for pp, m in distinct.T.tolist()
        ]
        kinds = [kind for option in options for kind in option]
        if not kinds:
            continue
        count = np.array([len(option) for option in options])
        first = np.cumsum(count) - count
        kind = np.concatenate([np.arange(first[w], first[w] + count[w]) for w in which])
        index = np.repeat(rows, count[which])
        chosen = shapes.take(index)
        vpps = np.array([vpp for _, _, vpp, _ in kinds])
        folded = np.array([placement(name, pp, vpp)[-1] == 0 for name, pp, vpp, _ in kinds])[kind]
        # where the pipeline folds, the head exchanges beside the embedding
        known = chosen.known if np.array_equal(folded, chosen.folded) else {}
        chosen = replace(chosen, shape=replace(chosen.shape, vpp=vpps[kind]), folded=folded, known=known)
        setting = Setting(pricing.model, pricing.cluster, pricing.training, pricing.runtime, chosen.shape)
        legal = np.broadcast_to(takes_shapes(setting), index.shape)
        legal = np.flatnonzero(legal)
        if len(legal) < len(index):
            chosen, index, kind = chosen.take(legal), index[legal], kind[legal]
        if len(index):
            orders = orders_of(kinds, pricing.model, pricing.runtime.head_only_stage).take(kind)
            yield index, Nodes(chosen, [kinds[k][0] for k in kind], orders)


def _of_like_width(rows: IntArray, pps: IntArray) -> Iterator[IntArray]:
    """The rows by their numbers of ranks, between limits of `WIDTHS`; few rows are not worth a group of their own."""
    held = rows[:0]
    for narrow, wide in pairwise(WIDTHS):
        new = rows[(pps[rows] > narrow) & (pps[rows] <= wide)]
        if len(held) and len(new) and len(held) * int(pps[new].max() - pps[held].max()) > FEW_CELLS:
            yield held
            held = rows[:0]
        held = np.sort(np.concatenate([held, new]))
    if len(held):
        yield held


@dataclass(slots=True)
class Frontier:
    """Open nodes: the most promising is taken, those that cannot win are cut."""

    _aside: list[Open] = field(default_factory=list)
    _nodes: list[Nodes] = field(default_factory=list)
    _first_opened: list[int] = field(default_factory=list)
    """Indices of the blocks that were opened under every choice."""
    _bound_s: FloatArray = field(default_factory=lambda: np.empty(0))
    _guess_s: FloatArray = field(default_factory=lambda: np.empty(0))
    _known: list[RecomputeChoice] = field(default_factory=list)
    """Every choice that any node was opened under."""
    _sharp: BoolArray = field(default_factory=lambda: np.empty(0, dtype=bool))
    """True for a node whose bound is of its own splits, or that has too many splits for that."""
    _place: IntArray = field(default_factory=lambda: np.empty((0, 3), dtype=np.int64))
    """Three indices of each open node: its block in `_nodes`, its row there, and its choice in `_known`."""

    @property
    def least_guess_s(self) -> float:
        return float(self._guess_s.min(initial=np.inf))

    @property
    def least_bound_s(self) -> float:
        return float(self._bound_s.min(initial=np.inf))

    def add(self, nodes: Nodes, least_s: FloatArray, choices: Sequence[RecomputeChoice] = ()) -> None:
        """Open nodes under every choice, or under those given; `least_s` is a lower bound of their step in seconds."""
        for choice in choices or choices_of(nodes.shapes):
            if choice not in self._known:
                self._known.append(choice)
            number = self._known.index(choice)
            bound_s = np.maximum(nodes.bound_s(choice), least_s)
            rows = np.flatnonzero(np.isfinite(bound_s))
            place = np.stack([np.full(len(rows), len(self._nodes)), rows, np.full(len(rows), number)], axis=1)
            self._bound_s = np.append(self._bound_s, bound_s[rows])
            self._guess_s = np.append(self._guess_s, np.maximum(nodes.guess_s(choice), bound_s)[rows])
            self._sharp = np.append(self._sharp, np.zeros(len(rows), dtype=bool))
            self._place = np.append(self._place, place, axis=0)
        if not choices:
            self._first_opened.append(len(self._nodes))
        self._nodes.append(nodes)

    def open_sets(self, most: int) -> bool:
        """Open the sets of modules of the `most` most promising nodes that stand for any set.

        Such nodes have one bound for all sets; now each set gets its own. False if the most promising node of
        all stands for no sets; then nothing is opened.
        """
        if not len(self._guess_s) or not self._stands_for_sets(int(np.argmin(self._guess_s))):
            return False
        ranked = np.argsort(self._guess_s, kind="stable")
        taken = [index for index in ranked.tolist() if self._stands_for_sets(index)][:most]
        place, bound_s = self._place[taken], self._bound_s[taken]
        self._keep(~np.isin(np.arange(len(self._guess_s)), taken))
        for block in distinct(place[:, 0]):
            at = place[:, 0] == block
            nodes, rows = self._nodes[block], place[at, 1]
            sets = nodes.shapes.module_sets
            assert sets is not None
            names = [modules for modules in sets.tables for _ in rows]
            every = np.tile(rows, len(sets.tables))
            some = nodes.take(every)
            some = replace(some, shapes=nodes.shapes.with_each_set(rows), sets=names)
            self.add(some, np.tile(bound_s[at], len(sets.tables)), (ONE_SET,))
        return True

    def sharpen(self, most: int, sharp_bound_s: Callable[[Nodes, IntArray, RecomputeChoice], FloatArray]) -> bool:
        """Bound the `most` most promising nodes anew, by their own splits; False if the first of all is bounded so.

        Nodes that stand for any set of modules keep the bound of all sets.

        `sharp_bound_s` is asked for the nodes of a block at some rows, under one choice.
        """
        if not len(self._guess_s) or self._sharp[np.argmin(self._guess_s)]:
            return False
        of_sets = np.array([choice.whole == "any_modules" for choice in self._known])[self._place[:, 2]]
        ranked = np.argsort(self._guess_s, kind="stable")
        taken = ranked[~(self._sharp | of_sets)[ranked]][:most]
        self._sharp[taken] = True
        for block, choice in sorted({*map(tuple, self._place[taken][:, [0, 2]].tolist())}):
            at = taken[(self._place[taken, 0] == block) & (self._place[taken, 2] == choice)]
            sharp_s = sharp_bound_s(self._nodes[block], self._place[at, 1], self._known[choice])
            self._bound_s[at] = np.maximum(self._bound_s[at], sharp_s)
            self._guess_s[at] = np.maximum(self._guess_s[at], self._bound_s[at])
        return True

    def _stands_for_sets(self, index: int) -> bool:
        return self._known[int(self._place[index, 2])].whole == "any_modules"

    def all_nodes(self) -> Sequence[Nodes]:
        """Every node that was opened, as blocks; nodes of single sets of modules stand in the block of all sets."""
        return [self._nodes[number] for number in self._first_opened]

    def cut(self, cutoff_s: float) -> float:
        """Close the nodes whose bound is not below `cutoff_s`, and return the least of their bounds."""
        lost = self._bound_s >= cutoff_s
        if not lost.any():
            return np.inf
        least_s = float(self._bound_s[lost].min())
        nearest = np.flatnonzero(lost)[np.argsort(self._guess_s[lost], kind="stable")[:LOOKED_AT]]
        rivals: dict[Key, list[int]] = {}
        for index in nearest.tolist():
            block, row, _ = self._place[index]
            of_key = rivals.setdefault(key_of(self._nodes[block].shapes.shape, int(row)), [])
            if len(of_key) < KEPT_OF_A_KEY:
                of_key.append(index)
            if len(rivals) >= KEPT:
                break
        self.put_aside([self._open(index) for of_key in rivals.values() for index in of_key])
        self._keep(~lost)
        return least_s

    def put_aside(self, nodes: Sequence[Open]) -> None:
        """Remember nodes that are not the best, since the alternatives are chosen among them."""
        self._aside += nodes
        if len(self._aside) > LOOKED_AT:
            self._aside = few_of_a_key(self._aside)

    @property
    def runners_up(self) -> list[Open]:
        """The most promising of the nodes that were cut or put aside."""
        return few_of_a_key(self._aside)

    def take(self) -> Open | None:
        """Remove the most promising node from the frontier and return it."""
        if not len(self._guess_s):
            return None
        index = int(np.argmin(self._guess_s))
        node = self._open(index)
        self._keep(np.arange(len(self._guess_s)) != index)
        return node

    def _open(self, index: int) -> Open:
        block, row, choice = self._place[index]
        nodes = self._nodes[block]
        shape = scalar(nodes.shapes.shape, int(row))
        bound_s, guess_s = float(self._bound_s[index]), float(self._guess_s[index])
        known = self._known[choice]
        return Open(bound_s, guess_s, nodes.pricing(row), shape, nodes.schedules[row], known, nodes.shapes, int(row))

    def _keep(self, kept: BoolArray) -> None:
        self._bound_s, self._guess_s, self._place = self._bound_s[kept], self._guess_s[kept], self._place[kept]
        self._sharp = self._sharp[kept]
