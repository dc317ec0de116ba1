"""The integer program of one shape: how many layers on which rank, and how many of them recomputed.

Ranks r = 0 … pp − 1, virtual stages j = chunk·pp + r; the first row of virtual stages is j = r. Maximal runs of equal
layers are numbered i, kinds κ. t, f, b are seconds of one micro-batch (forward plus backward, forward, backward;
exchanges included), M micro-batches, c seconds of a transfer.

    filled[r,i] ∈ ℕ      layers of run i on the first-row stages 0 … r (or, of a kind that recurs, on the stages 0 … j)
    chunk ∈ ℕ            layers of every virtual stage (interleaving only); the end stages have missing[end] ∈ ℕ fewer
    recomputed[r,κ] ∈ ℕ  layers of kind κ on rank r that are recomputed whole
    T, gradients, parameters, optimizer ≥ 0

    minimise T + gradients + parameters + optimizer
    1. layers     filled grows with r and reaches each run's length; the last run also fills the later chunks
    2. order      run i + 1 starts on or after the stage that finishes run i (binary finished[r,i])
    3. chunks     no stage is empty, unless it holds the embedding or the head and the trainer allows that; interleaved
                  stages are equal, but for the first and the last: the order stalls on unequal ones
    4. recompute  recomputed[r,κ] ≤ layers of κ on r; one number for all where the trainer has one setting
    5. time       T ≥ every lower bound of the schedule on every rank (any order; at most k in flight)
    6. memory     static + in flight · live + transient ≤ usable on every rank
    7. ends       gradients, parameters: exchange of the first rank less what hides it; optimizer: any rank's

Rows 1 to 3 are `HeldLayers`, the others the method of their name.

Sources: PHYSICS §5 for the bounds (Narayanan et al. 2021 for the orders). For 1F1B they meet the replay wherever stages
differ little, so the optimum is a certificate; the gap to the replay is reported, never hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import pulp

from planner.errors import SolverError
from planner.physics.cost import PartCost
from planner.search.ilp_layers import Expression, HeldLayers, Rows, as_count
from planner.specs.model import LayerKind
from planner.specs.training import Recompute
from planner.specs.units import GIB

_WAYS = ("forward_total_s", "backward_total_s")
_SLOWED = frozenset({*_WAYS, "input_grad_total_s", "total_s", "optimizer_s"})
"""What takes a slow rank longer."""
FULL: Recompute = "full"

Whole = Literal["none", "all", "one_count", "per_stage"]
"""How many layers are recomputed whole: none, all, the same number on every virtual stage, or each rank's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One shape to be split."""

    runs: Sequence[tuple[LayerKind, int]]
    layers: dict[tuple[LayerKind, Recompute], PartCost]
    embedding: PartCost
    head: PartCost
    """Everything the last virtual stage holds beside layers."""
    pp: int
    vpp: int
    num_microbatches: int
    base: Recompute
    """Mode of layers that are not recomputed whole."""
    whole: Whole
    in_flight: Sequence[float]
    """Micro-batches that each rank holds at its fullest, in units of all its chunks."""
    first_in_flight: float = 0.0
    """Of them, those of rank 0's first chunk alone (interleaving only)."""
    usable_bytes: float
    p2p_s: float
    bound: Literal["one_f_one_b", "interleaved", "any_order", "split_backward"]
    """Which lower bounds the schedule obeys."""
    placement: Sequence[int]
    """Rank of each virtual stage."""
    blocking_p2p: bool = False
    """Whether a rank waits for its transfers."""
    cutoff_s: float = math.inf
    """Solutions that take longer are of no interest."""
    gap_fraction: float = 1e-4
    """How near the optimum is near enough."""
    empty_ends: bool = False
    """The first and the last virtual stage may hold no decoder layer."""
    each_microbatch: bool = False
    """Weights are gathered and gradients reduced for every micro-batch (ZeRO-3 without a pipeline)."""
    gradient_overlap_fraction: float = 0.0
    parameter_overlap_fraction: float = 0.0
    short_bytes: Sequence[float] = ()
    """What each rank is to leave free of it, where a replay has shown that a split does not fit; empty: nothing."""
    of_mean_layers: bool = False
    """Layers of several kinds are taken as so many of their mean: a good split, but its bound proves nothing."""
    rank_factors: Sequence[float] = ()
    """How many times the costs' seconds each rank takes; empty: all take as long as the costs say."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Layers as the solver chose them."""

    counts: tuple[int, ...]
    """Decoder layers of each virtual stage, in model order."""
    recomputed: tuple[tuple[int, ...], ...]
    """Of each rank and kind, layers recomputed whole (one_count: of each virtual stage)."""
    bound_s: float
    """Proven lower bound of the objective; 0 where the solver was stopped."""
    free_bytes: tuple[float, ...]
    """What the memory row of each rank leaves."""


def solve(node: Node, time_limit_s: float) -> Solution | None:
    """Solve one node; None when no split fits and is quicker than the cutoff.

    Raises SolverError when the solver stops without an answer.
    """
    program = _Program(node)
    program.problem.solve(pulp.HiGHS(msg=False, timeLimit=max(time_limit_s, 0.05), gapRel=node.gap_fraction, threads=1))
    status = program.problem.sol_status
    if status == pulp.LpSolutionInfeasible:
        return None
    if status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise SolverError(
            f"the solver found no split over {node.pp} stages within {time_limit_s:.3g} s",
            "raise --time-limit, or pin axes to shrink the search",
        )
    return program.solution(proven=status == pulp.LpSolutionOptimal)


class _Program(Rows):
    """Builds the rows named above over one pulp problem."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.problem = pulp.LpProblem("split", pulp.LpMinimize)
        self.held = HeldLayers(
            self.problem, node.runs, pp=node.pp, vpp=node.vpp, placement=node.placement, empty_ends=node.empty_ends
        )
        self.kinds = self.held.kinds
        self._add_recompute()
        self._add_time()
        self._add_memory()
        self._add_ends()
        self.problem.setObjective(self.makespan + self.gradients + self.parameters + self.optimizer)

    def _named_free(self, name: str, expression: Expression) -> Any:
        """The same for an expression that may be negative."""
        variable = self.problem.add_variable(name, cat=pulp.LpContinuous)
        self.problem += variable == expression, f"is_{name}"
        return variable

    def _add_recompute(self) -> None:
        """Row 4: `whole[r][κ]` layers of kind κ that rank r recomputes whole."""
        node = self.node
        if node.whole in ("none", "all"):
            nothing: dict[LayerKind, Expression] = dict.fromkeys(self.kinds, 0)
            self.whole = [dict(row) if node.whole == "all" else dict(nothing) for row in self.held.by_kind]
            return
        most = sum(length for _, length in node.runs)
        self.common = self._variable("recomputed", most, integer=True) if node.whole == "one_count" else None
        self.whole = []
        for rank, row in enumerate(self.held.by_kind):
            counts: dict[LayerKind, Expression] = {}
            for number, (kind, held) in enumerate(row.items()):
                if self.common is not None:
                    counts[kind] = node.vpp * self.common
                else:
                    counts[kind] = self._variable(f"recomputed_{rank}_{number}", most, integer=True)
                self.problem += counts[kind] <= held, f"recompute_{rank}_{number}"
            self.whole.append(counts)

    def _layers(self, rank: int, quantity: str) -> Expression:
        """A linear quantity of the layers on a rank, under their modes."""
        node, slowness = self.node, self._slowness(rank, quantity)
        terms = pulp.LpAffineExpression()
        for kind, count in self.held.by_kind[rank].items():
            plain = slowness * float(getattr(node.layers[kind, node.base], quantity))
            terms.addterm(count, plain)
            if node.whole != "none":
                whole = slowness * float(getattr(node.layers[kind, FULL], quantity))
                terms += (whole - plain) * self.whole[rank][kind]
        return terms

    def _held(self, rank: int, quantity: str, last_row: bool | None = None) -> float:
        """The same of the embedding (in the first row of chunks) and the head (in the last) that a rank holds."""
        node = self.node
        embedding = rank == 0 and last_row is not True
        head = rank == node.placement[-1] and last_row is not False
        held = [part for part, here in ((node.embedding, embedding), (node.head, head)) if here]
        return self._slowness(rank, quantity) * sum(float(getattr(part, quantity)) for part in held)

    def _rank(self, rank: int, quantity: str) -> Expression:
        return self._layers(rank, quantity) + self._held(rank, quantity)

    def _slowness(self, rank: int, quantity: str) -> float:
        factors = self.node.rank_factors
        return factors[rank] if factors and quantity in _SLOWED else 1.0

    def _add_time(self) -> None:
        """Row 5."""
        self.makespan = self._variable("T", None if math.isinf(self.node.cutoff_s) else self.node.cutoff_s)
        if self.node.bound == "one_f_one_b":
            self._add_one_f_one_b()
        elif self.node.bound == "interleaved":
            self._add_interleaved()
        else:
            self._add_any_order()

    def _add_any_order(self) -> None:
        """Trip to the rank + M·t + trip back; no way back where weight gradients may follow the last input gradient."""
        node = self.node
        ways = _WAYS[:1] if node.bound == "split_backward" else _WAYS
        self._add_trips("input_grad_total_s" if node.bound == "split_backward" else "backward_total_s")
        before: Expression = 0
        for rank in range(node.pp):
            quickest = sum(min(self._per_layer(rank, way)) for way in ways)
            busy = node.num_microbatches * self._rank(rank, "total_s")
            self.problem += self.makespan >= busy + before + len(ways) * rank * node.p2p_s, f"time_{rank}"
            held = sum(self._held(rank, way, last_row=False) for way in ways)
            before = self._named(f"before_{rank}", before + self.held.first_row[rank] * quickest + held)

    def _add_trips(self, back: str) -> None:
        """One micro-batch's whole trip, and M − 1 more passes of any stage, there or `back`: long where M is small."""
        node, num_stages = self.node, self.node.pp * self.node.vpp
        hops = sum(a != b for a, b in pairwise(node.placement)) if node.pp > 1 else 0
        there = "forward_total_s"
        parts = [self._rank(rank, way) for rank in range(node.pp) for way in (there, back)]
        trip = self._named("trip", pulp.lpSum(parts) + 2 * hops * node.p2p_s)
        for way in (there, back):
            stages = [self._rank(rank, way) for rank in range(node.pp)] if node.vpp == 1 else []
            if node.vpp > 1 and num_stages > 2:  # any stage but the first and the last
                stages = [self.held.chunk * min(min(self._per_layer(rank, way)) for rank in range(node.pp))]
            for number, stage in enumerate(stages):
                self.problem += self.makespan >= trip + (node.num_microbatches - 1) * stage, f"trip_{number}_{way}"

    def _add_one_f_one_b(self) -> None:
        """At most k = min(M, pp − r) in flight: what of the trip below a rank k passes cannot fill is idle.

        Where transfers block, a rank spends c between any two of its 2M actions as well; but the first rank exchanges
        nothing between a backward and the next forward, nor the last between a forward and its backward.
        """
        node, pp = self.node, self.node.pp
        hop, pause = 2 * node.p2p_s, node.p2p_s if node.blocking_p2p and node.pp > 1 else 0.0
        forward, backward, before = [], [], [0]
        for rank in range(pp):
            forward.append(self._named(f"forward_{rank}", self._rank(rank, "forward_total_s")))
            backward.append(self._named(f"backward_{rank}", self._rank(rank, "backward_total_s")))
            before.append(self._named(f"trip_{rank}", before[-1] + forward[rank] + backward[rank]))
        for rank in range(pp):
            held = min(node.num_microbatches, pp - rank)
            steps = node.num_microbatches
            pauses = steps - 1 if rank == pp - 1 else steps + held - 1 if rank == 0 else 2 * steps - 1
            busy = steps * (forward[rank] + backward[rank]) + pauses * pause
            below = before[pp] - before[rank + 1] + (pp - 1 - rank) * hop - held * pause
            first, last = below - (held - 1) * forward[rank], below - (held - 1) * backward[rank]
            waits = [0, first, last] + ([first + last] if steps > held else [])
            for number, wait in enumerate(waits):
                self.problem += self.makespan >= busy + before[rank] + rank * hop + wait, f"time_{rank}_{number}"

    def _add_interleaved(self) -> None:
        """At most k chunks in flight: head + M·t + tail + what of the trip below a rank k chunk passes cannot fill.

        With s the rank's first virtual stage and e its last: head and tail are the trips through the chunks before s; a
        first gradient comes back after Σ_{j≥s} f_j + Σ_{j>e} b_j, the last one after Σ_{j>e} f_j + Σ_{j≥s} b_j.
        """
        node, pp = self.node, self.node.pp
        hop, chunks = node.p2p_s, node.num_microbatches * node.vpp
        total = {way: self._named(f"all_{way}", pulp.lpSum(self._rank(r, way) for r in range(pp))) for way in _WAYS}
        before: dict[str, Expression] = dict.fromkeys(_WAYS, 0)
        # of the last row, the stages behind the rank in question
        behind: dict[str, list[Expression]] = {way: [0] * (pp + 1) for way in _WAYS}
        for rank in reversed(range(pp)):
            for way in _WAYS:
                held = self.held.last_row[rank] * min(self._per_layer(rank, way)) + self._held(rank, way, last_row=True)
                behind[way][rank] = self._named(f"behind_{rank}_{way}", behind[way][rank + 1] + held)
        self._add_trips("backward_total_s")
        for rank in range(pp):
            trips = before["forward_total_s"] + before["backward_total_s"] + 2 * rank * hop
            busy = self._named(f"busy_{rank}", node.num_microbatches * self._rank(rank, "total_s") + trips)
            k = min(round(node.in_flight[rank] * node.vpp), chunks)
            hops = (pp * node.vpp - 1 - rank + pp - 1 - rank) * hop
            waits: list[Expression] = [0]
            for way, back in zip(_WAYS, reversed(_WAYS), strict=True):
                slowest = self.held.chunk * max(self._per_layer(rank, way)) + self._held(rank, way)
                wait = total[way] - before[way] + behind[back][rank + 1] + hops - k * slowest
                waits.append(self._named_free(f"wait_{rank}_{way}", wait))
            if chunks > k:
                waits.append(waits[1] + waits[2])
            for number, wait in enumerate(waits):
                self.problem += self.makespan - busy >= wait, f"time_{rank}_{number}"
            for way in _WAYS:
                held = self.held.first_row[rank] * min(self._per_layer(rank, way)) + self._held(
                    rank, way, last_row=False
                )
                before[way] = self._named(f"before_{rank}_{way}", before[way] + held)

    def _per_layer(self, rank: int, quantity: str) -> list[float]:
        """A quantity of each kind of layer in the modes it may be in; recomputation counts for the slower ones only."""
        node, slowness = self.node, self._slowness(rank, quantity)
        modes = {"none": (node.base,), "all": (FULL,)}.get(node.whole, (node.base, FULL))
        return [slowness * float(getattr(node.layers[kind, mode], quantity)) for kind in self.kinds for mode in modes]

    def _add_memory(self) -> None:
        """Row 6; the transient is the largest of the loss and of the backward of a layer that the rank holds."""
        node = self.node
        modes: tuple[Recompute, ...] = {"none": (node.base,), "all": (FULL,)}.get(node.whole, (node.base, FULL))
        self.needed: list[Expression] = []
        least = min(float(node.layers[k, mode].transient_bytes) for k in self.kinds for mode in modes[:1])
        for rank in range(node.pp):
            live = node.in_flight[rank] * self._layers(rank, "live_bytes") + self._held(rank, "live_bytes")
            if rank == 0:
                live = live + (node.in_flight[0] - 1) * float(node.embedding.live_bytes)
            if rank == 0 and node.vpp > 1:
                # what the first chunk lacks would be held more often than the others' layers
                kept = max(float(node.layers[k, mode].live_bytes) for k in self.kinds for mode in modes)
                live = live - max(node.first_in_flight - node.in_flight[0], 0.0) * kept * self.held.missing[0]
            transient = float(node.head.transient_bytes) if rank == node.placement[-1] else 0.0
            transient = max(transient, least)
            short = node.short_bytes[rank] if node.short_bytes else 0.0
            needed = self._rank(rank, "static_bytes") + live + transient + short
            self.needed.append(needed)
            self.problem += needed * (1 / GIB) <= node.usable_bytes / GIB, f"memory_{rank}"
            layers = [(count, kind, modes[0]) for kind, count in self.held.by_kind[rank].items()]
            layers += [(count, kind, mode) for mode in modes[1:] for kind, count in self.whole[rank].items()]
            for number, (count, kind, mode) in enumerate(layers):
                more = float(node.layers[kind, mode].transient_bytes) - transient
                if more > 0:
                    holds = self._variable(f"holds_{rank}_{number}", 1, integer=True)
                    self.problem += count <= self.held.num_layers * holds, f"holds_{rank}_{number}_any"
                    bytes_held = (needed + more * holds) * (1 / GIB)
                    self.problem += bytes_held <= node.usable_bytes / GIB, f"memory_{rank}_{number}"

    def _add_ends(self) -> None:
        """Row 7."""
        node = self.node
        self.gradients, self.parameters, self.optimizer = map(self._variable, ("gradients", "parameters", "optimizer"))
        if node.each_microbatch:
            exchanged = 2 * self._rank(0, "gather_s") + self._rank(0, "reduce_s")
            exposed = exchanged - node.gradient_overlap_fraction * self._rank(0, "total_s")
            self.problem += self.gradients >= node.num_microbatches * exposed, "exposed_exchange"
        else:
            hidden = node.gradient_overlap_fraction * self._rank(0, "backward_total_s")
            self.problem += self.gradients >= self._rank(0, "reduce_s") - hidden, "exposed_gradients"
            hidden = node.parameter_overlap_fraction * self._rank(0, "forward_total_s")
            self.problem += self.parameters >= self._rank(0, "gather_s") - hidden, "exposed_parameters"
        for rank in range(node.pp):
            self.problem += self.optimizer >= self._rank(rank, "optimizer_s"), f"optimizer_{rank}"

    def solution(self, proven: bool) -> Solution:
        info = self.problem.solverModel.getInfo()
        # one rank leaves nothing to choose: HiGHS solves a linear program, which has no dual bound of a MIP
        bound_s = info.mip_dual_bound if self.problem.isMIP() else info.objective_function_value
        whole = (
            self.whole if self.node.whole != "one_count" else [dict.fromkeys(self.kinds, self.common)] * self.node.pp
        )
        return Solution(
            counts=self.held.counts(),
            recomputed=tuple(tuple(map(as_count, row.values())) for row in whole),
            bound_s=float(bound_s if proven else 0.0),
            free_bytes=tuple(self.node.usable_bytes - float(pulp.value(needed)) for needed in self.needed),
        )
