"""Row 5 of the integer program: what each schedule takes at least, on every rank."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pulp

from planner.search.ilp.layers import Expression
from planner.search.ilp.node import WAYS, Node, Quantities


class Times(Quantities):
    """The makespan, above every lower bound of the node's schedule."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._add_time()

    def _named_free(self, name: str, expression: Expression) -> Any:
        """The same for an expression that may be negative."""
        variable = self.problem.add_variable(name, cat=pulp.LpContinuous)
        self.problem += variable == expression, f"is_{name}"
        return variable

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
        ways = WAYS[:1] if node.bound == "split_backward" else WAYS
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
        total = {way: self._named(f"all_{way}", pulp.lpSum(self._rank(r, way) for r in range(pp))) for way in WAYS}
        before: dict[str, Expression] = dict.fromkeys(WAYS, 0)
        # of the last row, the stages behind the rank in question
        behind: dict[str, list[Expression]] = {way: [0] * (pp + 1) for way in WAYS}
        for rank in reversed(range(pp)):
            for way in WAYS:
                held = self.held.last_row[rank] * min(self._per_layer(rank, way)) + self._held(rank, way, last_row=True)
                behind[way][rank] = self._named(f"behind_{rank}_{way}", behind[way][rank + 1] + held)
        self._add_trips("backward_total_s")
        for rank in range(pp):
            trips = before["forward_total_s"] + before["backward_total_s"] + 2 * rank * hop
            busy = self._named(f"busy_{rank}", node.num_microbatches * self._rank(rank, "total_s") + trips)
            k = min(round(node.in_flight[rank] * node.vpp), chunks)
            hops = (pp * node.vpp - 1 - rank + pp - 1 - rank) * hop
            waits: list[Expression] = [0]
            for way, back in zip(WAYS, reversed(WAYS), strict=True):
                slowest = self.held.chunk * max(self._per_layer(rank, way)) + self._held(rank, way)
                wait = total[way] - before[way] + behind[back][rank + 1] + hops - k * slowest
                waits.append(self._named_free(f"wait_{rank}_{way}", wait))
            if chunks > k:
                waits.append(waits[1] + waits[2])
            for number, wait in enumerate(waits):
                self.problem += self.makespan - busy >= wait, f"time_{rank}_{number}"
            for way in WAYS:
                held = self.held.first_row[rank] * min(self._per_layer(rank, way)) + self._held(
                    rank, way, last_row=False
                )
                before[way] = self._named(f"before_{rank}_{way}", before[way] + held)
