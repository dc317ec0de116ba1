"""What each rank of a simulated run does in a step: kernels by family, exchanges by group, waits, host gaps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from simulated_pieces import Piece, Place, computed_s, whole_s
from simulated_truths import Truth, _again

from planner.layout.candidate import Candidate
from planner.layout.compute_terms import compute_terms
from planner.layout.outside_pipeline import sharded_each_time
from planner.layout.step.beside import beside_pipeline
from planner.layout.step.inside import exchanges_of_passes
from planner.physics.cost import PartCost
from planner.physics.memory import sent_bytes
from planner.physics.operators import collectives_of
from planner.physics.passes import COMM_GROUPS
from planner.schedule.replay import replay
from planner.schedule.timeline import Timeline

STEP_GAP_S = 4e-6
"""Launch of a kernel before its start, where the GPU waited for the host."""
HIDES = {"tp": "all_gather", "cp": "all_gather", "ep": "all_to_all"}
SHOWS = {"tp": "reduce_scatter", "cp": "all_gather", "ep": "all_to_all"}
"""Collectives of each group that run beside computing, and that show behind it."""
NORM_S = 20e-6
"""An all-reduce of one number."""
CHUNKS = 2
"""Times that the families of kernels take turns in a pass; real passes do so once a layer."""


class Simulated:
    """A truth as its ranks live it."""

    def __init__(self, truth: Truth) -> None:
        self.truth, self.candidate = truth, truth.candidate
        self.shape = self.candidate.shape
        self.even = replace(self.candidate, rank_factors=()) if truth.slow_stage is not None else self.candidate
        self.balanced = truth.healthy if truth.cause == "expert_imbalance" else self.even
        self._quick: dict[int, Candidate] = {}
        self.timers: dict[int, dict[str, float]] = {}
        """Timers of ranks, once they are worked out."""

    @cached_property
    def timeline(self) -> Timeline:
        """The step of the ranks that work with the slow GPU, or of all."""
        return replay(self.candidate.order, self.candidate.durations)

    @cached_property
    def even_timeline(self) -> Timeline:
        """The step of the replicas that have no slow GPU."""
        return self.timeline if self.even is self.candidate else replay(self.even.order, self.even.durations)

    @cached_property
    def slow(self) -> Place | None:
        """The slow GPU: the second of its tensor-parallel or expert group, where there is one."""
        if self.truth.slow_stage is None:
            return None
        shape = self.shape
        tp, cp, dp, ep = (int(size) for size in (shape.tp, shape.cp, shape.dp, shape.ep))
        first = self.truth.slow_stage * tp * cp * dp
        within = 1 if tp > 1 or cp > 1 or (ep > 1 and dp > 1) or dp > 1 else 0
        return Place.of(self.candidate, first + within)

    def works_with_slow(self, place: Place) -> bool:
        """True for the ranks of the slow GPU's replica, or of the replicas that its experts serve."""
        if self.slow is None:
            return False
        ep = max(1, int(self.shape.ep))
        return place.dp // ep == self.slow.dp // ep if ep > 1 else place.dp == self.slow.dp

    @cached_property
    def exchanges(self) -> dict[tuple[int, str], dict[str, tuple[float, float]]]:
        """(exposed, hidden) seconds of each group, by virtual stage and kind of action."""
        found = {}
        for key, exchanges in exchanges_of_passes(self.even, "pass").items():
            found[key] = {one.group: (one.exposed_s, one.hidden_s) for one in exchanges}
        return found

    @cached_property
    def exchanged_bytes(self) -> dict[tuple[str, bool], float]:
        """Bytes that a layer exchanges, by group and whether in its backward."""
        totals: dict[tuple[str, bool], float] = {}
        pricing = self.candidate.pricing
        for item in collectives_of(pricing.layer(pricing.model.layers[-1], self.shape)):
            key = ("ep" if item.group == "etp" else item.group, item.backward)
            totals[key] = totals.get(key, 0.0) + float(item.num_bytes)
        return totals

    @cached_property
    def families(self) -> dict[int, dict[str, float]]:
        """Shares of a rank's computing by family, the host's part left out."""
        told = {}
        for rank in range(int(self.shape.pp)):
            terms, softmax_s = compute_terms(self._hostless, rank), 0.0
            if not self.candidate.pricing.runtime.flash_attention:
                fused = compute_terms(self.truth.healthy, rank)
                softmax_s = max(0.0, terms["memory_bound_s"] - fused["memory_bound_s"])
            gemm = terms["products_s"] + terms["ends_s"] + 0.6 * terms["recompute_s"]
            seconds = {
                "gemm": gemm, "attention": terms["attention_s"] + 0.15 * terms["recompute_s"], "softmax": softmax_s,
                "memory": terms["memory_bound_s"] - softmax_s + 0.25 * terms["recompute_s"]
                + max(0.0, terms["other_compute_s"]),
            }  # fmt: skip
            told[rank] = {name: value / sum(seconds.values()) for name, value in seconds.items() if value > 0}
        return told

    @property
    def _hostless(self) -> Candidate:
        return self._without_host(self.even)

    def _without_host(self, candidate: Candidate) -> Candidate:
        """The candidate with hosts that are never late."""
        if id(candidate) not in self._quick:
            efficiency = candidate.pricing.cluster.hardware.efficiency
            quick = efficiency.model_copy(update={"host_us": 1e-3})
            self._quick[id(candidate)] = candidate.priced_as(_again(candidate.pricing, {"efficiency": quick}))
        return self._quick[id(candidate)]

    def gap_fraction(self, stage: int, kind: str, waits: bool) -> float:
        """Share of a pass's computing seconds in which the GPU waits for its host; `waits` for ranks with less work."""
        candidate = self.balanced if waits else self.even
        with_host, without = (computed_s(c, stage, kind) for c in (candidate, self._without_host(candidate)))
        return max(0.0, 1 - without / with_host) if with_host else 0.0

    def step(self, place: Place, number: int) -> Iterator[Piece]:
        """All that a rank does in one step."""
        sharded = sharded_each_time(int(self.shape.zero_stage), int(self.shape.pp))
        if sharded:
            yield from self._sharded_step(place, number, sharded)
            return
        together = self.works_with_slow(place)
        candidate = self.candidate if together or self.slow is None else self.even
        timeline = self.timeline if candidate is self.candidate else self.even_timeline
        begin_s, idle_from = self.truth.stall_s, self.truth.stall_s
        rank = place.stage
        for index, action in enumerate(candidate.order.ranks[rank]):
            start_s, end_s = (begin_s + float(times[rank][index]) for times in (timeline.start_s, timeline.end_s))
            if start_s > idle_from + 1e-7:
                yield self._received(idle_from, start_s - idle_from)
            yield from self._pass(place, number, action.stage, action.kind, action.microbatch, start_s, end_s)
            idle_from = end_s
        yield from self._behind(place, candidate, timeline, idle_from)

    def _received(self, start_s: float, length_s: float) -> Piece:
        pricing = self.candidate.pricing
        num_bytes = float(sent_bytes(pricing.model, self.shape, pricing.runtime))
        return Piece(start_s, length_s, "comm", "pp", "send_recv", num_bytes)

    def _pass(
        self, place: Place, number: int, stage: int, kind: str, microbatch: int, start_s: float, end_s: float
    ) -> Iterator[Piece]:
        """Families of kernels in turns, hidden exchanges beside them, those that show behind them."""
        host_s = self.candidate.pricing.runtime.microbatch_overhead_s / 2 if kind != "W" else 0.0
        exchanges = self.exchanges.get((stage, kind), {})
        shown_s = sum(exposed for exposed, _ in exchanges.values())
        compute_s = max(0.0, end_s - start_s - shown_s - host_s)
        own_s = self._own_s(place, number, stage, kind, microbatch, compute_s)
        waits_s, phase = compute_s - own_s, f"{'F' if kind == 'F' else 'B'}{microbatch}.{stage}"
        gap_s = own_s * self.gap_fraction(stage, kind, waits_s > 0) + host_s
        at_s, shares = start_s, self.families[place.stage]
        for _ in range(CHUNKS):
            for family, share in shares.items():
                at_s += gap_s / CHUNKS / len(shares)
                length_s = (own_s - gap_s + host_s) * share / CHUNKS
                if length_s > 0:
                    yield Piece(at_s, length_s, family, late=gap_s > 1e-6, phase=phase)
                at_s += length_s
        for index, group in enumerate(sorted(exchanges, key=lambda name: -COMM_GROUPS.index(name))):
            exposed_s, hidden_s = exchanges[group]
            num_bytes = self._bytes(group, stage, kind)
            whole_s = max(exposed_s + hidden_s, 1e-9)
            hidden_s = min(hidden_s, max(0.0, own_s))
            if hidden_s > 1e-6:
                begin_s, share = start_s + 1e-7 * index, hidden_s / whole_s
                yield Piece(begin_s, hidden_s, "comm", group, HIDES[group], num_bytes * share, False, phase)
            late_s = waits_s if self._waits_in(group, exchanges) else 0.0
            if exposed_s + late_s > 1e-7:
                yield Piece(
                    at_s, exposed_s + late_s, "comm", group, SHOWS[group], num_bytes * exposed_s / whole_s, False, phase
                )
                at_s += exposed_s + late_s

    def _waits_in(self, group: str, exchanges: dict[str, tuple[float, float]]) -> bool:
        """True for the exchange at which ranks wait for the slowest of them."""
        return group == ("ep" if self.truth.cause == "expert_imbalance" or "tp" not in exchanges else "tp") or (
            len(exchanges) == 1
        )

    def _own_s(self, place: Place, number: int, stage: int, kind: str, microbatch: int, compute_s: float) -> float:
        """What a rank itself computes in a pass, of the seconds that the slowest of its groups takes."""
        if self.truth.cause == "expert_imbalance":
            ep = int(self.shape.ep)
            fullest = (7 * number + 3 * microbatch + stage + (kind == "F")) % ep
            return compute_s if place.dp % ep == fullest else computed_s(self.balanced, stage, kind)
        slow = self.slow
        if slow is None or not self.works_with_slow(place) or place.stage != slow.stage or place.rank == slow.rank:
            return compute_s
        return min(compute_s, computed_s(self.even, stage, kind))

    def _bytes(self, group: str, stage: int, kind: str) -> float:
        first, last = self.candidate.split.chunks[stage]
        return (last - first) * self.exchanged_bytes.get((group, kind != "F"), 0.0)

    def _behind(self, place: Place, candidate: Candidate, timeline: Timeline, idle_from: float) -> Iterator[Piece]:
        """Gradients, gathers, the wait for the slowest replica, the optimizer, the tail."""
        begin_s, cost = self.truth.stall_s, candidate.rank_costs[place.stage]
        late_s, ended = self.timeline.makespan_s - timeline.makespan_s, idle_from
        spans = list(beside_pipeline(candidate, timeline, place.stage))
        pieces = sum(span.name == "reduce gradients" for span in spans)
        for span in spans:
            start_s, length_s = begin_s + span.start_s, span.end_s - span.start_s
            if span.name == "reduce gradients":
                width = self.candidate.pricing.runtime.gradient_bytes / pieces
                yield from self._reduced(start_s, length_s, cost, "reduce_scatter", width)
                ended = max(ended, start_s + length_s)
            elif span.name == "exposed exchanges":
                width = 2 * min(1.0, length_s / float(cost.gather_s)) if float(cost.gather_s) else 2.0
                yield from self._reduced(ended, length_s, cost, "all_gather", width)
                ended += length_s
            elif span.name == "optimizer":
                # the norm of all gradients is known when the last rank is there
                group = "model" if candidate is self.candidate and int(self.shape.tp * self.shape.pp) > 1 else "dp"
                norm_s = late_s + start_s - ended + NORM_S
                yield Piece(ended, norm_s, "comm", group, "all_reduce", 4.0)
                yield Piece(ended + norm_s, max(0.0, length_s - NORM_S), "optimizer", phase="O")
            else:
                yield Piece(start_s + late_s + 0.7 * length_s, 0.3 * length_s, "elementwise", late=True)

    def _reduced(
        self, start_s: float, length_s: float, cost: PartCost, collective: str, width_bytes: float
    ) -> Iterator[Piece]:
        """An exchange of gradients or weights: those of experts among the ranks that hold the same ones."""
        experts = float(cost.expert_parameters) if int(self.shape.ep) < int(self.shape.dp * self.shape.cp) else 0.0
        share = experts / float(cost.parameters)
        dense = float(cost.parameters) - float(cost.expert_parameters)
        yield Piece(start_s, (1 - share) * length_s, "comm", "dp", collective, dense * width_bytes)
        if share:
            start_s += (1 - share) * length_s
            yield Piece(start_s, share * length_s, "comm", "edp", collective, experts * width_bytes)

    def _sharded_step(self, place: Place, number: int, sharded: int) -> Iterator[Piece]:
        """Without a pipeline, and with weights or gradients that are exchanged in every micro-batch."""
        actions = self.candidate.order.ranks[0]
        outside, cost = self.candidate.outside, self.candidate.rank_costs[0]
        # ZeRO-2 exchanges gradients alone; its one gather of weights is counted with them
        shows = {"F": float(sharded == 3), "B": 1.0 if sharded == 3 else 2.0}
        gathers = float(cost.gather_s) if sharded == 3 else 0.0
        exchanged_s = {"F": gathers, "B": gathers + float(cost.reduce_s)}
        gathered = float(cost.parameters) * 2 * (sharded == 3)
        reduced = float(cost.parameters) * self.candidate.pricing.runtime.gradient_bytes
        moved_bytes = {"F": gathered, "B": gathered + reduced}
        slow, at_s = self.slow, self.truth.stall_s
        for action in actions:
            pass_s = whole_s(self.candidate, action.stage, action.kind)
            own_s = pass_s if slow is None or place.rank == slow.rank else whole_s(self.even, 0, action.kind)
            yield from self._pass(place, number, action.stage, action.kind, action.microbatch, at_s, at_s + own_s)
            exchange_s, num_bytes = exchanged_s[action.kind], moved_bytes[action.kind]
            shown_s = shows[action.kind] * outside.exposed_dp_s / len(actions)
            hidden_s = min(max(0.0, exchange_s - shown_s), own_s)
            name = "all_gather" if action.kind == "F" or sharded == 3 else "reduce_scatter"
            phase = f"{action.kind}{action.microbatch}.0"
            if hidden_s > 0:
                yield Piece(at_s, hidden_s, "comm", "dp", name, num_bytes * hidden_s / exchange_s, False, phase)
            last_s = shown_s + pass_s - own_s
            if last_s > 1e-7:
                share = shown_s / (hidden_s + shown_s) if hidden_s + shown_s else 0.0
                name = "reduce_scatter" if action.kind == "B" else "all_gather"
                yield Piece(at_s + own_s, last_s, "comm", "dp", name, num_bytes * share, False, phase)
            at_s += pass_s + shown_s
        yield Piece(at_s, outside.optimizer_s, "optimizer", phase="O")
        if outside.tail_s > 0:
            yield Piece(
                at_s + outside.optimizer_s + 0.7 * outside.tail_s, 0.3 * outside.tail_s, "elementwise", late=True
            )
