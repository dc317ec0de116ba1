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
    7. ends       gradients, parameters: any rank's exchange less what hides it, and less a chunk's pass of each rank
                  before it; optimizer: any rank's

Rows 1 to 3 are `HeldLayers`, row 4 is in `Quantities`, row 5 in `Times`, the others are the method of their name.

Sources: PHYSICS §5 for the bounds (Narayanan et al. 2021 for the orders). For 1F1B they meet the replay wherever stages
differ little, so the optimum is a certificate; the gap to the replay is reported, never hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pulp

from planner.errors import SolverError
from planner.search.ilp.layers import Expression, as_count
from planner.search.ilp.node import FULL, Node
from planner.search.ilp.time import Times
from planner.specs.training import Recompute
from planner.specs.units import GIB


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


_NO_HEURISTICS = {
    f"mip_heuristic_run_{name}": False for name in ("rins", "rens", "root_reduced_cost", "feasibility_jump")
}
"""Heuristics that solve programs of their own, which takes longer than a program this small."""
_SOUND = {"presolve_rule_off": 1 << 9}
"""Substituting equations of two variables, HiGHS 1.15.1 finds programs infeasible that are not."""


def solve(node: Node, time_limit_s: float) -> Solution | None:
    """Solve one node; None when no split fits and is quicker than the cutoff.

    Raises SolverError when the solver stops without an answer.
    """
    program = _Program(node)
    time_s = max(time_limit_s, 0.05)
    program.problem.solve(
        pulp.HiGHS(msg=False, timeLimit=time_s, gapRel=node.gap_fraction, threads=1, **_NO_HEURISTICS, **_SOUND)
    )
    status = program.problem.sol_status
    if status == pulp.LpSolutionInfeasible:
        return None
    if status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        raise SolverError(
            f"the solver found no split over {node.pp} stages within {time_limit_s:.3g} s",
            "raise --time-limit, or pin axes to shrink the search",
        )
    return program.solution(proven=status == pulp.LpSolutionOptimal)


class _Program(Times):
    """Builds the rows named above over one pulp problem."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._add_memory()
        self._add_ends()
        self.problem.setObjective(self.makespan + self.gradients + self.parameters + self.optimizer)

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
        sharded = node.sharded_each_time
        if sharded:
            exchanged_s = self._rank(0, "reduce_s") + (2 * self._rank(0, "gather_s") if sharded == 3 else 0.0)
            behind_s = self._rank(0, "total_s" if sharded == 3 else "backward_total_s")
            exposed_s = exchanged_s - node.fsdp_overlap_fraction * behind_s
            self.problem += self.gradients >= node.num_microbatches * exposed_s, "exposed_each_time"
            showing_s = node.num_microbatches * node.contention_fraction * exchanged_s
            self.problem += self.gradients >= showing_s, "showing_each_time"
        if sharded < 2:
            hidden, lead = node.gradient_overlap_fraction, node.lead_passes
            self._add_exchange(self.gradients, "reduce_s", hidden, "backward_total_s", lead)
        if sharded < 3:
            hidden = node.parameter_overlap_fraction
            self._add_exchange(self.parameters, "gather_s", hidden, "forward_total_s", 1 / node.vpp)
        for rank in range(node.pp):
            self.problem += self.optimizer >= self._rank(rank, "optimizer_s"), f"optimizer_{rank}"

    def _add_exchange(self, exposed: Any, exchange: str, fraction: float, way: str, lead: float) -> None:
        """What is exposed of it on each rank, less `lead` passes of each rank before."""
        node = self.node
        before: Expression = 0
        for rank in range(node.pp):
            exchanged_s, passing_s = self._rank(rank, exchange), self._rank(rank, way)
            late_s, hidden_s = exposed + before, fraction * passing_s
            name = f"{exchange}_{rank}"
            self.problem += late_s >= node.contention_fraction * exchanged_s, f"showing_{name}"
            self.problem += node.vpp * late_s >= exchanged_s - hidden_s, f"exposed_{name}_of_the_last_chunk"
            if node.vpp > 1:
                self.problem += late_s >= exchanged_s - node.passes_behind * hidden_s, f"exposed_{name}"
            before = self._named(f"before_{name}", before + lead * passing_s)

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
