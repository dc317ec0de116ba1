"""Splits of a chain of layers without an integer program: a dynamic program for 1F1B, and a closed form.

A stage holds the layers first … last − 1 of the model, so that each of its sums is a difference of two prefix sums.
For plain 1F1B `best_split` takes the rows 5 to 7 of the integer program (`ilp/program.py`) as functions of a rank r and
the layers p … p + n that it holds, for what comes before a rank and below it follows from p:

    f[r, p + n] = min over n of max(f[r − 1, p], row[r, p, n])

which is the least of the longest row over all splits, in pp · L · n steps. Where these are too many, and all layers are
of one kind, each row is the largest of a few that are linear in p and n, and no rank gains by beginning earlier: ranks
that take as many layers as a limit lets them reach as far as any split does, and the limit is found by trying a few.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from planner.physics.stage_memory import relaxed_peak_bytes
from planner.record import record
from planner.search.ilp.node import (
    FULL,
    PASSES,
    Chain,
    Node,
    Solution,
    beside_layers,
    layers_before,
    of_kinds,
)
from planner.shape import BoolArray, FloatArray, IntArray
from planner.specs.model import ModelSpec
from planner.specs.training import Recompute

MAX_CELLS = 1 << 18
"""Most combinations of rank, first layer and number of layers in a dynamic program, which has a dozen such arrays."""
CLOSE = 1e-4
"""Gap of an objective to its bound at which a split is the best."""
DEEP = 1 << 18
"""Least combinations of rank and first layer that no integer program is asked about either."""
FAR_S = 1e30
"""Seconds that stand for no limit."""
NUM_LIMITS = 12
"""Limits of the seconds outside the pipeline by which splits are divided."""
TINY = 1e-9
"""Relative difference of sums that count as equal."""


def best_split(node: Node) -> Solution | None:
    """The split of a node of plain 1F1B whose longest row is the shortest; None where a dynamic program does not help.

    Two bounds hold: a rank's row with its own seconds outside the pipeline, longest over the ranks; and the longest row
    plus the longest exchanges and optimizer, each least by itself. The greater one is the solution's bound. It has no
    counts where no split is below the cutoff.
    """
    if node.bound != "one_f_one_b" or node.pp == 1 or node.vpp > 1 or node.rank_factors:
        return None
    if node.whole == "per_stage" and len(node.kinds) > 1:
        return None
    if node.pp * node.num_layers < DEEP and not has_room(node):
        return Solution((), (), np.inf, np.inf, ())
    if node.whole != "one_count":
        rows = _rows_of(node, -1 if node.whole == "per_stage" else 0, node.cutoff_s)
        return None if rows is None else rows.best()
    return _best_count(node)


def has_room(node: Node) -> BoolArray:
    """False where no split leaves every rank memory: ranks that take as many layers as theirs has room for miss the
    last.

    A rank that begins later ends no earlier, so none of them gains by taking fewer. Where the node is of several
    shapes, there is one of each.
    """
    before = layers_before(tuple(node.runs))
    static, live, transient = (
        np.min([of_kinds(node, name, mode) for mode in node.modes], axis=0)
        for name in ("static_bytes", "live_bytes", "transient_bytes")
    )
    of_first, usable = [each @ before.T for each in (static, live)], np.asarray(node.usable_bytes)[..., None]
    shape = np.broadcast_shapes(of_first[0].shape, of_first[1].shape, usable.shape)
    totals = [np.broadcast_to(each, shape) for each in of_first]
    first, fits = np.zeros(shape[:-1], dtype=np.int64), np.ones(shape[:-1], dtype=bool)
    fewest = _fewest(node, np.arange(node.pp), 0)
    beside_static, beside_live, loss = beside_layers(node)
    for rank in range(node.pp):
        at, one = first[..., None], slice(rank, rank + 1)
        static_bytes, live_bytes = (each - np.take_along_axis(each, at, axis=-1) for each in totals)
        held = before > before[first][..., None, :]
        largest = np.maximum((transient[..., None, :] * held).max(axis=-1), loss[..., one])
        needed = relaxed_peak_bytes(static_bytes, node.in_flight[rank] * live_bytes, largest)
        needed = needed + (beside_static + beside_live)[..., one]
        reached = np.count_nonzero(needed <= usable * (1 + TINY), axis=-1) - 1
        fits &= (first >= node.num_layers) | (reached - first >= fewest[rank])
        first = np.maximum(np.maximum(reached, first), 0)
        if not (fits & (first < node.num_layers)).any():
            break
    return fits & (first >= node.num_layers)


def is_deep(model: ModelSpec, pp: int) -> bool:
    """True if the layers are so many that the best split found by `best_split` stands with its gap."""
    return pp * model.num_hidden_layers >= DEEP


def _best_count(node: Node) -> Solution | None:
    """The best split with one number of recomputed layers for all ranks, of layers of one kind: no others have such.

    Every rank holds so many layers. Larger numbers are tried until they are slower even with boundless memory.
    """
    best, numbers = Solution((), (), np.inf, np.inf, ()), range(node.num_layers // node.pp + 1)
    # those too small for all layers to have memory are passed over; the larger ones have more
    for number in numbers[bisect_left(numbers, node.num_layers, key=lambda each: _Line.of(node, each).room.sum()) :]:
        most_s = min(node.cutoff_s, best.bound_s)
        rows = _rows_of(node, number, most_s)
        if rows is None:
            return None
        best = min(best, rows.best(), key=lambda solution: solution.bound_s)
        if not rows.beats(min(most_s, best.bound_s)):
            break
    return best


def _rows_of(node: Node, number: int, most_s: float) -> _Cells | _Line | None:
    """The rows where `number` layers of each rank are recomputed whole; None if they are too many to look at.

    With −1 each rank recomputes as few as its memory asks for.
    """
    cells = _Cells.of(node, number, most_s)
    if cells is None and len(node.kinds) == 1 and number >= 0:
        return _Line.of(node, number)
    return cells


@record
class _Rows:
    """Rows 5 to 7 of the program on any ranks that hold any layers, each as its parts: it is the largest of them."""

    row_s: list[FloatArray]
    """Seconds of the pipeline."""
    ends_s: list[list[FloatArray]]
    """Seconds of the gradients, the parameters and the optimizer."""
    free_bytes: FloatArray

    @classmethod
    def of(cls, node: Node, rank: IntArray, first: IntArray, last: IntArray, number: int) -> _Rows:
        """The rows of ranks that hold the layers first … last − 1, of which `number` are recomputed whole."""
        free, recomputed = _memory(node, first, last, number)
        chain = Chain.of(node, first, last, recomputed)
        forward_s, backward_s = (_with_ends(chain, name, rank) for name in PASSES)
        # the trips before each first layer, less what is recomputed on other ranks, and that with `number` on each
        trips = [_before(node, name, node.modes[0]) for name in PASSES]
        again_s = _again_s(node) * max(number, 0) * (node.whole == "one_count")
        ends = [[float(getattr(part, name)) for name in PASSES] for part in (node.embedding, node.head)]
        before_s = np.sum(trips, axis=0)[first] + (rank > 0) * sum(ends[0]) + rank * again_s
        below_s = sum(trip[-1] - trip[last] for trip in trips) + (rank < node.pp - 1) * sum(ends[1])
        below_s = below_s + (node.pp - 1 - rank) * again_s
        slowest = [
            _before(node, name, node.modes[-1])[first] + (rank > 0) * e for name, e in zip(PASSES, ends[0], strict=True)
        ]
        rows_s = _rows_s(node, rank, forward_s, backward_s, before_s, below_s)
        return cls(rows_s, _ends_s(chain, rank, (forward_s, backward_s), slowest), free)


def _largest(parts: Sequence[FloatArray]) -> FloatArray:
    return reduce(np.maximum, parts)


@record
class _Cells:
    """Rows of the program for each rank, first layer and number of layers; infinite where memory is short."""

    node: Node
    row_s: FloatArray
    """Seconds of the pipeline that each cell asks for."""
    boundless_s: FloatArray
    """The same where memory is no matter."""
    ends_s: tuple[FloatArray, ...]
    """Seconds of the gradients, the parameters and the optimizer that each cell asks for."""
    number: int
    """Layers of each rank that are recomputed whole; −1 for as few as its memory asks for."""

    @classmethod
    def of(cls, node: Node, number: int, most_s: float) -> _Cells | None:
        """The cells of `_rows_of`, without those that take longer than `most_s` by themselves; None if too many."""
        layers, steps = node.num_layers, node.num_microbatches
        quickest_s = sum(min(float(getattr(part, name)) for part in node.layers.values()) for name in PASSES)
        most = layers if not np.isfinite(most_s) else min(layers, int(most_s / max(steps * quickest_s, 1e-30)) + 1)
        if node.pp * (layers + 1) * (most + 1) > MAX_CELLS:
            return None
        rank, first, count = np.ogrid[: node.pp, : layers + 1, : most + 1]
        last = np.minimum(first + count, layers)
        rows = _Rows.of(node, rank, first, last, number)
        legal = (first + count <= layers) & (count >= _fewest(node, rank, number))
        legal &= np.where(rank == 0, first == 0, True) & np.where(rank == node.pp - 1, first + count == layers, True)
        row_s = np.where(legal, _largest(rows.row_s), np.inf)
        fits = rows.free_bytes >= -TINY * node.usable_bytes
        ends_s = tuple(_largest(parts) for parts in rows.ends_s)
        return cls(node, np.where(fits, row_s, np.inf), row_s, ends_s, number)

    def beats(self, limit_s: float) -> bool:
        """True if some split's bound is below the limit where memory is no matter."""
        return self.bound_s(self.boundless_s) < limit_s

    def bound_s(self, row_s: FloatArray) -> float:
        """A lower bound of the objective of every split, whose ranks' rows are `row_s`."""
        return float(_bottlenecks((row_s + sum(self.ends_s))[None])[0][0])

    def best(self) -> Solution:
        """The best split that is found, and the bound; without counts where no split is below the cutoff.

        Where the bound leaves a gap, splits are divided by their longest seconds outside the pipeline: between two
        limits, the objective is at least the lower limit and the longest row among splits below the upper one.
        """
        node, beside_s = self.node, sum(self.ends_s)
        possible = np.isfinite(self.row_s)
        ends_s = [np.where(possible, each, np.inf) for each in self.ends_s]
        least, choices = _bottlenecks(np.stack([self.row_s + beside_s, self.row_s, *ends_s]), 2)
        bound_s = max(float(least[0]), float(least[1:].sum()))
        if bound_s >= node.cutoff_s or not np.isfinite(bound_s):
            return Solution((), (), np.inf, bound_s, ())
        best = min((self._read(each) for each in choices), key=lambda solution: solution.objective_s)
        if best.objective_s > bound_s * (1 + max(CLOSE, node.gap_fraction)):
            limits_s = np.linspace(
                float(_bottlenecks(np.where(possible, beside_s, np.inf)[None])[0][0]),
                best.objective_s - float(least[1]),
                NUM_LIMITS,
            )
            below = np.where(beside_s <= limits_s[:, None, None, None] * (1 + TINY), self.row_s, np.inf)
            rows_s, choices = _bottlenecks(below, NUM_LIMITS)
            # splits whose ends are longer than the last limit are slower than the best one
            divided_s = np.minimum((rows_s[1:] + limits_s[:-1]).min(), best.objective_s)
            bound_s = max(bound_s, min(float(rows_s[0] + limits_s[0]), float(divided_s)))
            found = [self._read(each) for each, row_s in zip(choices, rows_s, strict=True) if np.isfinite(row_s)]
            best = min([best, *found], key=lambda solution: solution.objective_s)
        return replace(best, bound_s=bound_s)

    def _read(self, choices: Sequence[IntArray]) -> Solution:
        """The split that a dynamic program chose."""
        ends = [self.node.num_layers]
        for choice in reversed(choices):
            ends.append(ends[-1] - int(choice[ends[-1]]))
        return _solution(self.node, np.array(ends[-2::-1]), self.number)


@record
class _Line:
    """Rows of layers of one kind, each the largest of parts that are linear in a rank's first layer and its number.

    Each part is (seconds of no layer from the first on, seconds a layer before, seconds a layer held), arrays (part,
    rank). A part that does not rise with what a rank holds limits nothing.
    """

    node: Node
    number: int
    parts: list[FloatArray]
    """Parts of the row, the gradients, the parameters and the optimizer: arrays (3, part, rank)."""
    fewest: IntArray
    room: FloatArray
    """Layers that each rank has memory for."""

    @classmethod
    def of(cls, node: Node, number: int) -> _Line:
        rank, first, count = np.ogrid[: node.pp, :2, max(number, 1) : max(number, 1) + 2]
        rows = _Rows.of(node, rank, first, np.minimum(first + count, node.num_layers), number)
        parts = []
        for each in (rows.row_s, *rows.ends_s):
            s = np.stack(np.broadcast_arrays(*each))
            s = np.broadcast_to(s, (len(each), node.pp, 2, 2))
            held_s = s[..., 0, 1] - s[..., 0, 0]
            parts.append(np.stack([s[..., 0, 0] - held_s * count[0, 0, 0], s[..., 1, 0] - s[..., 0, 0], held_s]))
        free = np.broadcast_to(rows.free_bytes, (node.pp, 2, 2))[:, 0]
        fewest = _fewest(node, np.arange(node.pp), number)
        layer_bytes = np.maximum(free[:, 0] - free[:, 1], 1.0)
        room = np.floor(free[:, 0] / layer_bytes + TINY * node.num_layers) + count[0, 0, 0]
        return cls(node, number, parts, fewest, np.where(fewest == 0, np.maximum(room, 0), room))

    def beats(self, limit_s: float) -> bool:
        """False if memory has room and still no split's longest row is below the limit."""
        return not self.has_room or bool(self._within(0, np.array([min(limit_s, FAR_S)]), self.room + np.inf)[0][0])

    @property
    def has_room(self) -> bool:
        return bool((self.room >= self.fewest).all() and self.room.sum() >= self.node.num_layers)

    def best(self) -> Solution:
        """The best split that is found, and the bound; without counts where no split is below the cutoff."""
        node = self.node
        if not self.has_room:
            return Solution((), (), np.inf, np.inf, ())
        works, counts = self._within(0, np.array([min(node.cutoff_s, FAR_S)]), self.room)
        if not works[0]:
            return Solution((), (), np.inf, node.cutoff_s, ())
        best, bounds_s = _solution(node, self._shared(counts[:, 0]), self.number), np.zeros(len(self.parts))
        # parts of the row that fall are looked at by themselves, for the splits that stay within them are less even
        later = range(0 if self._falling(0).any() else 1, len(self.parts))
        for table, falls in ((0, False), *((table, True) for table in later)):
            none_s, before_s, held_s = self.parts[table]
            given = np.array(best.counts)
            low_s, high_s = 0.0, float((none_s + before_s * (given.cumsum() - given) + held_s * given).max())
            for _ in range(3 * (high_s > 0)):
                limits_s = np.linspace(low_s, high_s, 33)
                works, counts = self._within(table, limits_s, self.room, falls)
                at = int(np.argmax(works)) if works.any() else len(limits_s) - 1
                low_s, high_s = float(limits_s[max(at - 1, 0)]), float(limits_s[at])
            bounds_s[table] = low_s
            if table == 0 and works.any():
                splits = [self._shared(counts[:, at]), self._filled(counts[:, at])]
                found = [_solution(node, ends, self.number) for ends in splits]
                best = min([best, *found], key=lambda solution: solution.objective_s)
        bound_s = float(bounds_s.sum())
        if bound_s >= node.cutoff_s:
            return Solution((), (), np.inf, bound_s, ())
        return replace(best, bound_s=bound_s)

    def _within(
        self, table: int, limits_s: FloatArray, room: FloatArray, falls: bool = True
    ) -> tuple[BoolArray, FloatArray]:
        """True for each limit that some split stays within, and the most layers of each rank (rows) that do.

        A part that falls is looked at where `falls`.
        """
        node, (none_s, before_s, held_s) = self.node, self.parts[table]
        least_s, falling = TINY * np.abs(none_s).max(), self._falling(table) * falls
        rises = held_s > least_s
        inverse = 1 / np.where(rises, held_s, 1.0)
        none_s, before_s = np.where(rises, none_s, -FAR_S) * inverse, np.where(rises, before_s, 0.0) * inverse
        after = self.fewest[::-1].cumsum()[::-1] - self.fewest
        first, counts = np.zeros(len(limits_s)), np.zeros((node.pp, len(limits_s)))
        works: BoolArray = np.ones(len(limits_s), dtype=bool)
        for rank in range(node.pp):
            most = limits_s * inverse[:, rank, None] - none_s[:, rank, None] - before_s[:, rank, None] * first
            counts[rank] = np.minimum(np.floor(most.min(axis=0) + TINY * node.num_layers), room[rank])
            works &= counts[rank] >= self.fewest[rank]
            counts[rank] = np.maximum(counts[rank], self.fewest[rank])
            reached = first + counts[rank]
            held = np.minimum(counts[rank], node.num_layers - after[rank] - first)
            late_s, later_s, less_s = falling[:, :, rank, None]
            works &= (late_s + later_s * first + less_s * held <= limits_s + least_s).all(axis=0)
            first = np.minimum(reached, node.num_layers - after[rank])
        return works & (reached >= node.num_layers), counts

    def _falling(self, table: int) -> FloatArray:
        """The parts that are least where a rank begins as late as it can and holds as many layers as it then may."""
        none_s, before_s, held_s = self.parts[table]
        least_s = TINY * np.abs(none_s).max()
        return np.asarray(self.parts[table] * ((before_s <= held_s + least_s) & (held_s <= least_s)))

    def _shared(self, most: FloatArray) -> IntArray:
        """The last layer of ranks that hold about the same share of the most that they may hold."""
        ends = np.floor(most.cumsum() * (self.node.num_layers / most.sum()) + 0.5)
        return np.asarray(np.maximum(ends, self.fewest.cumsum()), dtype=np.int64)

    def _filled(self, most: FloatArray) -> IntArray:
        """The last layer of ranks that hold the most that they may hold, as long as layers are left."""
        after = self.fewest[::-1].cumsum()[::-1] - self.fewest
        return np.asarray(np.minimum(most.cumsum(), self.node.num_layers - after), dtype=np.int64)


def _fewest(node: Node, rank: IntArray, number: int) -> IntArray:
    """The fewest layers of a rank."""
    is_end = (rank == 0) | (rank == node.pp - 1)
    return np.where(is_end & node.empty_ends, max(number, 0), max(number, 1))


def _solution(node: Node, last: IntArray, number: int) -> Solution:
    """The split whose ranks end at these layers, with its objective; its bound is set by those who know one."""
    counts = np.diff(last, prepend=0)
    first = last - counts
    free, again = _memory(node, first[:, None, None], last[:, None, None], number)
    free, again = np.broadcast_to(free, (node.pp, 1, 1))[:, 0, 0], np.broadcast_to(again, (node.pp, 1, 1))[:, 0, 0]
    told = (counts if node.whole == "all" else again).tolist()
    settings = tuple((count,) * len(node.kinds) for count in told)
    return Solution(tuple(counts.tolist()), settings, _objective_s(node, first, last, again), 0.0, tuple(free.tolist()))


def _again_s(node: Node) -> float:
    """Seconds by which a layer of the only kind takes longer where it is recomputed whole; 0 if none may be."""
    base, full = (node.layers.get((node.kinds[0], mode)) for mode in (node.modes[0], FULL))
    if base is None or full is None:
        return 0.0
    return sum(float(getattr(full, name)) - float(getattr(base, name)) for name in PASSES)


def _objective_s(node: Node, first: IntArray, last: IntArray, recomputed: IntArray) -> float:
    """The program's objective in seconds for one split, given rank by rank."""
    rank, chain = np.arange(node.pp), Chain.of(node, first, last, recomputed)
    passes = [_with_ends(chain, name, rank) for name in PASSES]
    before = [np.concatenate([[0.0], each.cumsum()]) for each in passes]
    trips_s = np.sum(before, axis=0)
    rows_s = _rows_s(node, rank, passes[0], passes[1], trips_s[:-1], trips_s[-1] - trips_s[1:])
    ends_s = _ends_s(chain, rank, passes, [each[:-1] for each in before])
    return sum(float(_largest(parts).max()) for parts in (rows_s, *ends_s))


def _with_ends(chain: Chain, quantity: str, rank: IntArray) -> FloatArray:
    """A quantity of each cell's layers, with the embedding on the first rank and the head on the last."""
    node = chain.node
    embedding, head = (float(getattr(part, quantity)) for part in (node.embedding, node.head))
    return np.asarray(chain.total(quantity) + (rank == 0) * embedding + (rank == node.pp - 1) * head)


def _memory(node: Node, first: IntArray, last: IntArray, number: int) -> tuple[FloatArray, IntArray]:
    """Bytes that row 6 of the program leaves free in each cell, and the layers that are recomputed whole there."""
    static, live, transient = (each[:, None, None] for each in beside_layers(node))
    held = np.asarray(node.in_flight, dtype=float)[:, None, None]
    again = np.minimum(np.full_like(first, max(number, 0)), last - first)
    chain = Chain.of(node, first, last, again)
    free = node.usable_bytes - static - live - np.maximum(transient, chain.transient_bytes())
    free = free - chain.total("static_bytes") - held * chain.total("live_bytes")
    if number >= 0:
        return free, again
    kept = [float(node.layers[node.kinds[0], mode].live_bytes) for mode in (node.base, FULL)]
    saved = kept[0] - kept[1]
    again = np.clip(np.ceil(-free / (held * max(saved, 1.0)) - TINY), 0, last - first).astype(np.int64)
    return free + held * saved * again, again


def _rows_s(
    node: Node, rank: IntArray, forward_s: FloatArray, backward_s: FloatArray, before_s: FloatArray, below_s: FloatArray
) -> list[FloatArray]:
    """Rows 5 of the program for plain 1F1B (`ilp/program.py`): a rank with such seconds on it, before and below it."""
    pp, steps = node.pp, node.num_microbatches
    hop_s, pause_s = 2 * node.p2p_s, node.p2p_s if node.blocking_p2p else 0.0
    k = np.minimum(steps, pp - rank)
    pauses = np.where(rank == pp - 1, steps - 1, np.where(rank == 0, steps + k - 1, 2 * steps - 1))
    below_s = below_s + (pp - 1 - rank) * hop_s - k * pause_s
    first_s, last_s = below_s - (k - 1) * forward_s, below_s - (k - 1) * backward_s
    busy_s = steps * (forward_s + backward_s) + pauses * pause_s + before_s + rank * hop_s
    return [busy_s + wait_s for wait_s in (0.0, first_s, last_s, np.where(steps > k, first_s + last_s, first_s))]


def _before(node: Node, quantity: str, mode: Recompute) -> FloatArray:
    """A quantity of the model's first 0, 1 … L layers in one recompute mode."""
    return layers_before(tuple(node.runs)) @ of_kinds(node, quantity, mode)


def _ends_s(
    chain: Chain, rank: IntArray, passes: Sequence[FloatArray], before: Sequence[FloatArray]
) -> list[list[FloatArray]]:
    """Row 7 of the program (`ilp/program.py`): seconds of gradients, of parameters and of the optimizer, each as parts.

    `passes` are seconds of a forward and a backward on the rank, `before` at most those on all ranks before it.
    """
    node, ends = chain.node, []
    for exchange, passing_s, before_s, fraction, lead in (
        ("reduce_s", passes[1], before[1], node.gradient_overlap_fraction, node.lead_passes),
        ("gather_s", passes[0], before[0], node.parameter_overlap_fraction, 1.0),
    ):
        exchanged_s = _with_ends(chain, exchange, rank)
        shown_s = node.contention_fraction * exchanged_s, exchanged_s - fraction * passing_s
        ends.append([*(each_s - lead * before_s for each_s in shown_s), np.zeros(1)])
    return [*ends, [_with_ends(chain, "optimizer_s", rank)]]


def _bottlenecks(tables: FloatArray, wanted: int = 0) -> tuple[FloatArray, list[list[IntArray]]]:
    """The least of the largest cell over all splits, for each table (rank, first, count), and choices of the first few.

    A choice is the number of layers of a rank that ends at a layer; among equal ones, the one nearest to the mean.
    """
    number, pp, ends, counts = tables.shape
    # cells by their last layer: [table, last, count]
    last, count = np.arange(ends)[:, None], np.arange(counts)[None, :]
    exists, first = last >= count, np.maximum(last - count, 0)
    reached = np.where(np.arange(ends) == 0, 0.0, np.inf) * np.ones((number, 1))
    order = np.argsort(np.abs(np.arange(counts) - (ends - 1) / pp), kind="stable")
    choices: list[list[IntArray]] = [[] for _ in range(wanted)]
    for rank in range(pp):
        cells = np.where(exists, np.maximum(reached[:, first], tables[:, rank][:, first, count]), np.inf)
        reached = cells.min(axis=2)
        for table, chosen in enumerate(choices):
            best = cells[table][:, order] <= reached[table][:, None] * (1 + TINY)
            chosen.append(order[np.argmax(best, axis=1)])
    return reached[:, -1], choices
