"""A schedule replayed with given durations: start and end of each action, idle time by cause, activations in flight.

Four micro-batches over two stages, a second for each of forward, input gradient and weight gradient:

>>> from planner.schedule.orders import build_schedule
>>> second = [1.0, 1.0]
>>> timeline = replay(build_schedule("1f1b", 2, 1, 4), Durations(second, second, second))
>>> timeline.makespan_s, round(timeline.bubble_fraction, 3)
(15.0, 0.2)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import SpecError
from planner.record import record
from planner.schedule.actions import B, F, I, IntArray, Schedule, W
from planner.schedule.graph import Graph, compile_schedule, pair_positions
from planner.shape import BoolArray
from planner.shape import FloatArray as FloatArray

IDLE_CAUSES = ("fill", "activation", "gradient", "imbalance", "transfer", "drain")
"""Causes of a rank's idle time. fill: before its first action. activation, gradient: waits for an activation or a
gradient that would be there with equally long stages too. imbalance: the rest of such waits, which unequal stages
cause. transfer: the transfers themselves. drain: after its last action, until the last rank is done."""


@record(eq=False)
class Timing:
    """Seconds of all actions of a graph, as arrays of shape (n,) along its actions."""

    start_s: FloatArray
    end_s: FloatArray
    gap_s: FloatArray
    """Idle seconds of the rank right before the action."""
    hop_s: FloatArray
    """Seconds to transfer the result that the action consumes."""
    arrival_s: FloatArray
    """Time when that transfer is done; 0 for none."""
    transfer_s: FloatArray
    """Seconds of gap_s in which a transfer is under way."""
    compute_s: FloatArray


@record(eq=False, slots=False)
class Timeline:
    """Times of all actions of a replayed schedule.

    Per-rank tuples hold one array along `schedule.ranks[rank]`. Most properties are computed when they are first read.
    """

    schedule: Schedule
    graph: Graph
    timing: Timing
    evened: Callable[[], Timing]
    """Gives the timing of the same schedule with every stage as long as the average one."""
    saved_bytes: FloatArray | None
    """Bytes that each action's micro-batch keeps on its stage, along the graph; None to count activations instead."""

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from time 0 to the end of the last action of any rank."""
        return float(self.timing.end_s.max(initial=0.0))

    @cached_property
    def start_s(self) -> tuple[FloatArray, ...]:
        """Time when each action starts."""
        return self._by_rank(self.timing.start_s)

    @cached_property
    def end_s(self) -> tuple[FloatArray, ...]:
        """Time when each action ends."""
        return self._by_rank(self.timing.end_s)

    @cached_property
    def hop_s(self) -> tuple[FloatArray, ...]:
        """Seconds to transfer the result that each action consumes; 0 where there is none or it is on the same rank."""
        return self._by_rank(self.timing.hop_s)

    @cached_property
    def arrival_s(self) -> tuple[FloatArray, ...]:
        """Time when each action's input has arrived; 0 for the first stage's forwards and for weight gradients."""
        return self._by_rank(self.timing.arrival_s)

    @cached_property
    def busy_s(self) -> FloatArray:
        """Seconds of computation per rank."""
        return self._sums(self.timing.compute_s, np.ones(len(self.graph.kind), dtype=bool))

    @cached_property
    def transfer_s(self) -> FloatArray:
        """Seconds per rank in which it waits for a transfer that is under way."""
        return self._sums(self.timing.transfer_s, self.graph.previous != 0)

    @cached_property
    def idle_s(self) -> Mapping[str, FloatArray]:
        """Idle seconds per rank for each of IDLE_CAUSES; with busy_s they add up to makespan_s."""
        timing, even = self.timing, self.evened()
        first, forward = self.graph.previous == 0, self.graph.kind == F
        wait_s = np.maximum(0.0, timing.gap_s - timing.transfer_s)
        expected_s = np.minimum(wait_s, np.maximum(0.0, even.gap_s - even.transfer_s))
        last_end_s = np.array([end_s.max(initial=0.0) for end_s in self.end_s])
        return {
            "fill": self._sums(timing.gap_s, first),
            "activation": self._sums(expected_s, ~first & forward),
            "gradient": self._sums(expected_s, ~first & ~forward),
            "imbalance": self._sums(wait_s - expected_s, ~first),
            "transfer": self.transfer_s,
            "drain": self.makespan_s - last_end_s,
        }

    @cached_property
    def peak_in_flight_chunks(self) -> IntArray:
        """The most (virtual stage, micro-batch) activations held at once, per rank."""
        if self.schedule.forward_only:
            return np.ones(self.schedule.pp, dtype=np.int32)
        return np.array([np.cumsum(change).max(initial=0) for change in self._by_rank(self._changes)], dtype=np.int32)

    @property
    def peak_in_flight_microbatches(self) -> FloatArray:
        """The most activations held per rank, in micro-batches: all that a pp-th of the model saves of one is 1."""
        return self.peak_in_flight_chunks / self.schedule.vpp

    @cached_property
    def peak_activation_bytes(self) -> FloatArray:
        """The most activation bytes held at once, per rank; they depend on the order alone."""
        saved = self._by_rank(self._changes * self._unit)
        return np.array([np.cumsum(change).max(initial=0.0) for change in saved])

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the step, over all ranks: 1 − Σ busy_s / (pp · makespan_s)."""
        return 1 - float(self.busy_s.mean()) / self.makespan_s if self.makespan_s else 0.0

    @property
    def bubble_of_useful_fraction(self) -> float:
        """Idle time over useful time, (pp · makespan_s − Σ busy_s) / Σ busy_s: the ratio that papers print."""
        busy_s = float(self.busy_s.mean())
        return self.makespan_s / busy_s - 1 if busy_s else 0.0

    @property
    def span_s(self) -> FloatArray:
        """Seconds from first start to last end, per rank; a run without flushes repeats after the longest of them."""
        return np.array([end[-1] - start[0] for start, end in zip(self.start_s, self.end_s, strict=True)])

    @cached_property
    def _changes(self) -> FloatArray:
        """Change of the activations held, along the graph: +1 at a forward, −1 where one is freed.

        Runs without backwards keep nothing.
        """
        kind = self.graph.kind
        appears = (kind == F) & (not self.schedule.forward_only)
        changes: FloatArray = appears.astype(np.float64) - ((kind == B) | (kind == W))
        return changes

    @property
    def _unit(self) -> FloatArray:
        return np.ones(len(self.graph.kind)) if self.saved_bytes is None else self.saved_bytes

    @cached_property
    def activation_curves(self) -> list[tuple[FloatArray, FloatArray]]:
        """Times, per rank, when its activations change, at the start of a forward or the end of a weight gradient, and
        bytes held from each of these on; a number of activations where no bytes were given.

        A backward that ends at the time when a forward starts frees its activation before the forward takes memory.
        """
        curves = []
        for positions in self.graph.position:
            change = self._changes[positions - 1]
            index = positions[change != 0] - 1
            change = self._changes[index]
            times_s = np.where(change > 0, self.timing.start_s[index], self.timing.end_s[index])
            in_time = np.lexsort((change, times_s))
            curves.append((times_s[in_time], np.cumsum((change * self._unit[index])[in_time])))
        return curves

    def _by_rank(self, values: FloatArray) -> tuple[FloatArray, ...]:
        return tuple(values[positions - 1] for positions in self.graph.position)

    def _sums(self, seconds: FloatArray, where: BoolArray) -> FloatArray:
        total_s = np.zeros(self.schedule.pp)
        np.add.at(total_s, self.graph.rank[where], seconds[where])
        return total_s


STRETCH = 1 << 16
"""Number of actions whose numbers are Python's at a time."""


@record
class Durations:
    """Seconds and bytes of one micro-batch on each virtual stage of the model (index = virtual stage).

    Both copies of a bidirectional schedule take the same durations.
    """

    forward_s: Sequence[float]
    input_grad_s: Sequence[float]
    weight_grad_s: Sequence[float]
    p2p_s: float | Sequence[float] = 0.0
    """Seconds of one transfer (latency + bytes / bandwidth): one number, or one per boundary of stages j and j + 1."""
    blocking_p2p: bool = False
    """True: sender and receiver wait for the transfer; a send and a receive between the same two actions run at the
    same time (Megatron-LM 1F1B, torch). False: the transfer overlaps computation and only delays the receiver."""
    activation_bytes: Sequence[float] | None = None
    """Bytes that one micro-batch keeps on each stage from forward to weight gradient."""
    microbatch_sizes: Sequence[float] | None = None
    """Relative size per micro-batch (variable lengths), by which its seconds and bytes are multiplied."""
    slow_ranks: Mapping[int, float] = field(default_factory=dict)
    """Factor on all computation of a rank, such as {3: 1.2}."""
    slow_links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Factor on all transfers between two ranks, in both directions, such as {(2, 3): 4.0}."""
    pair_overlap_fraction: float = 0.0
    """Share of the shorter half of an overlapped forward-backward pair that the longer half hides (DualPipe)."""


def makespan_s(schedule: Schedule, durations: Durations) -> float:
    """Seconds from the first action to the end of the last: `replay(...).makespan_s` without the timeline."""
    graph = compile_schedule(schedule, _overlaps(schedule, durations))
    return max(_sweep(graph, _costs(schedule, graph, durations)))


def replay(schedule: Schedule, durations: Durations) -> Timeline:
    """Times of every action, which starts when its rank is free and its input has arrived.

    free = end of the action before (+ the exchange between the two, where transfers block);
    arrival = end on the neighbouring stage + p2p_s (nothing between stages of one rank). The makespan is that of
    `makespan_s` to the last bit. Raises SpecError for lists that miss or repeat an action, DeadlockError for lists that
    cannot be run.
    """
    graph = compile_schedule(schedule, _overlaps(schedule, durations))
    costs = _costs(schedule, graph, durations)

    def evened() -> Timing:
        return _timing(schedule, graph, _costs(schedule, graph, _evened(durations)))

    timing = _timing(schedule, graph, costs)
    return Timeline(schedule, graph, timing, evened, _saved_bytes(schedule, graph, durations))


def _evened(durations: Durations) -> Durations:
    """The same pipeline with every virtual stage as long as the average one."""

    def average(values: Sequence[float]) -> list[float]:
        return [float(np.mean(values))] * len(values)

    return replace(
        durations,
        forward_s=average(durations.forward_s),
        input_grad_s=average(durations.input_grad_s),
        weight_grad_s=average(durations.weight_grad_s),
        slow_ranks={},
    )


def _timing(schedule: Schedule, graph: Graph, costs: Costs) -> Timing:
    ends = np.array(_sweep(graph, costs))
    before = ends[graph.previous]
    free = before if costs.exchange_s is None else before + costs.exchange_s
    arrival = ends[graph.source] + costs.hop_s
    start_s, end_s = np.maximum(free, arrival), ends[1:]
    gap_s = start_s - before
    transfer_s = costs.hop_s if costs.exchange_s is None else np.maximum(costs.exchange_s, costs.hop_s)
    if graph.redirected:
        forward, backward = (positions - 1 for positions in pair_positions(schedule, graph))
        gap_s[forward] = start_s[backward] - before[forward]
        gap_s[backward] = 0.0
        start_s[forward], end_s[forward] = start_s[backward], end_s[backward]
    return Timing(
        start_s=start_s,
        end_s=end_s,
        gap_s=gap_s,
        hop_s=costs.hop_s,
        arrival_s=arrival,
        transfer_s=np.minimum(transfer_s, gap_s),
        compute_s=costs.compute_s,
    )


def _saved_bytes(schedule: Schedule, graph: Graph, durations: Durations) -> FloatArray | None:
    """Bytes that each action's micro-batch keeps on its stage."""
    if durations.activation_bytes is None:
        return None
    per_stage = _vector("activation_bytes", durations.activation_bytes, schedule.num_model_stages)
    saved = per_stage[graph.stage % schedule.num_model_stages]
    if durations.microbatch_sizes is not None:
        saved = saved * np.asarray(durations.microbatch_sizes, dtype=np.float64)[graph.microbatch]
    return saved


@record(eq=False)
class Costs:
    """Durations laid out along a graph's actions, arrays of shape (n,)."""

    compute_s: FloatArray
    hop_s: FloatArray
    """Seconds to transfer the result that each action consumes (0 when it comes from the same rank)."""
    exchange_s: FloatArray | None
    """Seconds of transfers that the rank itself waits for before each action; None when they overlap computation."""


def _overlaps(schedule: Schedule, durations: Durations) -> bool:
    return durations.pair_overlap_fraction > 0 and any(schedule.overlapped)


def _costs(schedule: Schedule, graph: Graph, durations: Durations) -> Costs:
    n = schedule.num_model_stages
    table, boundary_s = stage_tables(durations, schedule.stage_to_rank, schedule.num_directions)
    compute_s = table[graph.kind, graph.stage]
    if _overlaps(schedule, durations):
        _overlap_pairs(schedule, graph, compute_s, durations.pair_overlap_fraction)
    local = graph.stage % n
    boundary = np.where(graph.kind == F, local - 1, local)
    hop_s = np.where(graph.source > 0, boundary_s[graph.stage // n, boundary], 0.0)
    if durations.microbatch_sizes is not None:
        sizes = _vector("microbatch_sizes", durations.microbatch_sizes, schedule.num_microbatches)
        compute_s = compute_s * sizes[graph.microbatch]
        hop_s = hop_s * sizes[graph.microbatch]
    exchange_s = None
    if durations.blocking_p2p:
        sent_s = np.zeros(len(hop_s) + 1)
        sent_s[graph.source] = hop_s  # whatever is sent has one receiver
        sent_s[0] = 0.0
        exchange_s = np.maximum(sent_s[graph.previous], hop_s)
    return Costs(compute_s, hop_s, exchange_s)


def _overlap_pairs(schedule: Schedule, graph: Graph, compute_s: FloatArray, overlap_fraction: float) -> None:
    """Count all seconds of an overlapped pair with its backward: the longer half, and the exposed rest of the other."""
    forward, backward = (positions - 1 for positions in pair_positions(schedule, graph))
    longer = np.maximum(compute_s[forward], compute_s[backward])
    shorter = np.minimum(compute_s[forward], compute_s[backward])
    compute_s[backward] = longer + (1 - overlap_fraction) * shorter
    compute_s[forward] = 0.0


def stage_tables(
    durations: Durations, stage_to_rank: Sequence[int], num_directions: int = 1
) -> tuple[FloatArray, FloatArray]:
    """Seconds of each kind on each virtual stage, shape (4, stages), and of each boundary, shape (directions, n).

    Raises SpecError when a length does not match the schedule's number of stages, or a duration is negative.
    """
    n, copies = len(stage_to_rank) // num_directions, num_directions
    forward_s = _vector("forward_s", durations.forward_s, n)
    input_grad_s = _vector("input_grad_s", durations.input_grad_s, n)
    weight_grad_s = _vector("weight_grad_s", durations.weight_grad_s, n)
    rows = np.zeros((4, n))
    rows[F], rows[B], rows[I], rows[W] = forward_s, input_grad_s + weight_grad_s, input_grad_s, weight_grad_s
    table = np.tile(rows, copies)
    rank = np.array(stage_to_rank)
    for slow_rank, factor in durations.slow_ranks.items():
        table[:, rank == slow_rank] *= factor

    boundary_s = np.zeros((copies, n))
    if isinstance(durations.p2p_s, (int, float)):
        boundary_s[:, :-1] = durations.p2p_s
    else:
        boundary_s[:, :-1] = _vector("p2p_s", durations.p2p_s, n - 1)
    sender, receiver = rank.reshape(copies, n), np.roll(rank.reshape(copies, n), -1, axis=1)
    boundary_s[sender == receiver] = 0.0
    for (first, second), factor in durations.slow_links.items():
        crosses = ((sender == first) & (receiver == second)) | ((sender == second) & (receiver == first))
        boundary_s[crosses] *= factor
    return table, boundary_s


def _vector(name: str, values: Sequence[float], length: int) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    if array.shape != (length,):
        raise SpecError(f"{name} has {array.size} entries, the schedule needs {length}", f"give {length} of them")
    if not (array >= 0).all():
        raise SpecError(f"{name} holds {array.min()}: it must not be negative")
    return array


def _sweep(graph: Graph, costs: Costs) -> list[float]:
    """End of each action, behind the sentinel's 0: the time when both its rank and its input are ready, plus its
    seconds."""
    ends = [0.0]
    append = ends.append
    if costs.exchange_s is None:
        for before, origin, hop, compute in _rows(graph.previous, graph.source, costs.hop_s, costs.compute_s):
            free, arrival = ends[before], ends[origin] + hop
            append((free if free > arrival else arrival) + compute)
    else:
        waits = costs.hop_s, costs.exchange_s
        for before, origin, hop, exchange, compute in _rows(graph.previous, graph.source, *waits, costs.compute_s):
            free, arrival = ends[before] + exchange, ends[origin] + hop
            append((free if free > arrival else arrival) + compute)
    return ends


def _rows(*columns: IntArray | FloatArray) -> Iterator[tuple[Any, ...]]:
    """The columns row by row, as Python's numbers; a stretch of them at a time, since they are large."""
    starts = range(0, len(columns[0]), STRETCH)
    return chain.from_iterable(zip(*(one[at : at + STRETCH].tolist() for one in columns), strict=True) for at in starts)


@record(eq=False)
class Waves:
    """Seconds of a step of plain 1F1B on each rank (arrays along the ranks)."""

    start_s: FloatArray
    end_s: FloatArray
    busy_s: FloatArray
    transfer_s: FloatArray
    """Seconds in which the rank waits for a transfer that is under way."""


def one_f_one_b_waves(durations: Durations, num_microbatches: int, waits: bool = True) -> Waves:
    """`replay` of plain 1F1B to the last bit, without its actions: what all ranks run at a time is a wave of arrays.

    Counted in passes, rank r runs the forward of micro-batch m at r + m, until wave pp − 1. From then on ranks run a
    forward and a backward in turn, backward k at 2·pp − 1 − r + 2·k, and backwards alone when forwards are over. So
    each pass takes what its rank's neighbour has run last. Without `waits` only the ends are worked out.
    """
    pp, steps, blocks = len(durations.forward_s), num_microbatches, durations.blocking_p2p
    table, (hops_s,) = stage_tables(durations, range(pp))
    rank, before_s = np.arange(pp, dtype=np.int64), np.roll(hops_s, 1)
    # of a forward and a backward: place of its source among the ends, its transfer, the one behind it, its seconds
    each = (rank, before_s, hops_s, table[F]), (rank + 2, hops_s, before_s, table[B])
    turns = [[np.where(rank % 2 == parity, *pair) for pair in zip(*each, strict=True)] for parity in (0, 1)]
    ends, start_s, (busy_s, transfer_s, sent_s) = np.full(pp + 2, -np.inf), np.full(pp, np.inf), np.zeros((3, pp))
    ends[0] = ends[-1] = 0.0  # beside ranks that there are; the others have not begun

    def run(
        at: slice, source: NDArray[np.int64], hop_s: FloatArray, behind_s: FloatArray, compute_s: FloatArray
    ) -> None:
        own_s, wait_s = own[at], hop_s[at]
        arrival_s = seen[source[at]] + wait_s
        if blocks:
            wait_s = np.maximum(sent_s[at], wait_s)
            sent_s[at] = behind_s[at]
        begin_s = np.maximum(own_s + wait_s if blocks else own_s, arrival_s)
        if waits:
            waited_s = np.minimum(wait_s, begin_s - own_s)
            transfer_s[at] += np.where(np.isfinite(own_s), waited_s, 0.0)
            start_s[at] = np.minimum(start_s[at], begin_s)
            busy_s[at] += compute_s[at]
        ends[1:-1][at] = begin_s + compute_s[at]

    for wave in range(2 * (pp + steps) - 2):
        seen = ends.copy()
        own, over, first = seen[1:-1], wave - 2 * steps + 2, max(0, 2 * pp - 1 - wave)
        if wave < pp:
            run(slice(max(0, wave - steps + 1), wave + 1), *each[0])
        elif over <= first:
            run(slice(first, pp), *turns[wave % 2])
        else:  # ranks before `over` have no forward left, and rest every second wave
            run(slice(over, pp), *turns[wave % 2])
            run(slice(first + (first + wave + 1) % 2, min(over, pp, 2 * (pp + steps) - 2 - wave), 2), *each[1])
    return Waves(start_s, ends[1:-1], busy_s, transfer_s)
