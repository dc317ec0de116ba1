"""Rows 4 to 7 of the integer program: what is recomputed, seconds, memory, what comes outside the pipeline.

Row 4 of the integer program: the number of layers of each kind that are recomputed whole on each rank.

It is at most the number of layers that the rank holds. A trainer with one setting for all virtual stages gets one
variable.

Sums over a rank's layers, embedding and head, in seconds or bytes; they are linear in the layers that it holds.

A quantity is named as a field or property of `PartCost`, such as `forward_total_s`.

Row 5 of the integer program: T is at least every lower bound of the schedule on every rank, in seconds.

Row 6 of the integer program: the memory that a rank needs at its peak is at most the memory that it can use.

static + in flight · live + transient ≤ usable, in GiB. The transient bytes are the largest of those of the loss and of
the backward of any layer that the rank holds. For each kind and recompute mode that needs more than the least, a binary
variable is 1 if the rank holds such layers.

Row 7 of the integer program: seconds of a step outside the pipeline, on the rank where they are longest.

Gradients are reduced after the last backward, and parameters are gathered before the first forward. Only the seconds
that nothing hides count here. The optimizer comes last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from planner.physics.stage_memory import relaxed_peak_bytes
from planner.search.ilp.formulation import Expression, Formulation, LayersOnRanks, add_up, constant, scaled
from planner.search.ilp.node import FULL, PASSES, Node
from planner.specs.model import LayerKind
from planner.specs.training import Recompute
from planner.specs.units import GIB


@dataclass(frozen=True, slots=True)
class RecomputedLayers:
    """Layers that are recomputed whole, as expressions."""

    by_kind: list[dict[LayerKind, Expression]]
    """Layers of each rank by kind."""
    settings: list[dict[LayerKind, Expression]]
    """The numbers that the trainer is told for each rank and kind; with `one_count` they are for one virtual stage."""


def add_recompute(program: Formulation, node: Node, layers: LayersOnRanks) -> RecomputedLayers:
    """Add row 4."""
    if node.whole == "all":
        return RecomputedLayers(layers.by_kind, layers.by_kind)
    if node.whole == "none":
        none = [dict.fromkeys(node.kinds, constant(0)) for _ in layers.by_kind]
        return RecomputedLayers(none, none)
    settings: list[dict[LayerKind, Expression]] = []
    if node.whole == "one_count":
        meaning = "layers of every virtual stage that are recomputed whole"
        common = program.variable("recomputed", meaning, node.num_layers, integer=True)
        settings = [dict.fromkeys(node.kinds, common) for _ in layers.by_kind]
        by_kind = [dict.fromkeys(node.kinds, node.vpp * common) for _ in layers.by_kind]
    else:
        for rank in range(node.pp):
            settings.append({})
            for number, kind in enumerate(node.kinds):
                meaning = f"{kind} layers on rank {rank} that are recomputed whole"
                name = f"recomputed_{rank}_{number}"
                settings[rank][kind] = program.variable(name, meaning, node.num_layers, integer=True)
        by_kind = settings
    for rank, kinds in enumerate(layers.by_kind):
        for number, (kind, on_rank) in enumerate(kinds.items()):
            program.add_row("recompute", f"recompute_{rank}_{number}", by_kind[rank][kind] <= on_rank)
    return RecomputedLayers(by_kind, settings)


@dataclass(frozen=True, slots=True)
class RankSums:
    """Sums over what each rank holds; a slow rank's seconds are longer by its factor."""

    node: Node
    layers: LayersOnRanks
    recomputed: RecomputedLayers

    def total(self, rank: int, quantity: str) -> Expression:
        """A quantity of all that a rank holds."""
        return self.of_layers(rank, quantity) + self.of_ends(rank, quantity)

    def of_layers(self, rank: int, quantity: str) -> Expression:
        """A quantity of the layers on a rank, each in its recompute mode."""
        node, slowness = self.node, self.node.slowness(rank, quantity)
        terms = []
        for kind, number in self.layers.by_kind[rank].items():
            plain = slowness * float(getattr(node.layers[kind, node.base], quantity))
            terms.append(scaled(plain, number))
            if node.whole != "none":
                full = slowness * float(getattr(node.layers[kind, FULL], quantity))
                terms.append((full - plain) * self.recomputed.by_kind[rank][kind])
        return add_up(terms)

    def in_flight_bytes(self, rank: int) -> Expression:
        """Bytes that the layers of an interleaved rank keep, each for its chunk's micro-batches in flight.

        Recomputed layers are one number per chunk (one_count), or are spread evenly over the chunks (per_stage). In the
        second case each chunk with more than the mean in flight is taken to have one more of them.
        """
        node, weights = self.node, self.node.in_flight_of(rank)
        mean = sum(weights) / len(weights)
        uneven = 0.0 if node.whole == "one_count" else sum(max(weight - mean, 0.0) for weight in weights)
        terms = []
        for kind, number in self.layers.in_flight[rank].items():
            plain = float(node.layers[kind, node.modes[0]].live_bytes)
            terms.append(plain * number)
            if node.whole in ("one_count", "per_stage"):
                saved = plain - float(node.layers[kind, FULL].live_bytes)
                terms.append(-saved * (mean * self.recomputed.by_kind[rank][kind] + uneven))
        return add_up(terms)

    def of_ends(self, rank: int, quantity: str, *, first_row: bool = True, last_row: bool = True) -> float:
        """A quantity of the embedding and the head that a rank holds.

        The embedding is on a stage of the first row of virtual stages, the head on a stage of the last row. Either row
        can be left out.
        """
        node, parts = self.node, []
        if rank == 0 and first_row:
            parts.append(node.embedding)
        if rank == node.placement[-1] and last_row:
            parts.append(node.head)
        return node.slowness(rank, quantity) * sum(float(getattr(part, quantity)) for part in parts)

    def per_layer(self, rank: int, quantity: str) -> list[float]:
        """A quantity of one layer on a rank, for each kind and each recompute mode that the layer may be in."""
        node, slowness = self.node, self.node.slowness(rank, quantity)
        return [
            slowness * float(getattr(node.layers[kind, mode], quantity)) for kind in node.kinds for mode in node.modes
        ]


_WORDS = {"forward_total_s": "forward seconds", "backward_total_s": "backward seconds"}


def add_time(program: Formulation, sums: RankSums) -> Expression:
    """Add row 5 and return T, the seconds of the pipeline."""
    node = sums.node
    most_s = None if math.isinf(node.cutoff_s) else node.cutoff_s
    pipeline_s = program.variable("T", "seconds of the pipeline, from the first forward to the last backward", most_s)
    if node.bound == "one_f_one_b":
        _add_one_f_one_b(program, sums, pipeline_s)
    elif node.bound == "interleaved":
        _add_interleaved(program, sums, pipeline_s)
    else:
        _add_any_order(program, sums, pipeline_s)
    return pipeline_s


def _add_any_order(program: Formulation, sums: RankSums, pipeline_s: Expression) -> None:
    """Add T ≥ trip to the rank + M·t + trip back, for every rank.

    There is no trip back if weight gradients may follow the last input gradient.
    """
    node = sums.node
    splits = node.bound == "split_backward"
    passes = PASSES[:1] if splits else PASSES
    _add_trips(program, sums, pipeline_s, "input_grad_total_s" if splits else "backward_total_s")
    before_s = constant(0)
    for rank in range(node.pp):
        quickest_s = sum(min(sums.per_layer(rank, name)) for name in passes)
        busy_s = node.num_microbatches * sums.total(rank, "total_s")
        hops_s = len(passes) * rank * float(node.p2p_s)
        program.add_row("time", f"time_{rank}", pipeline_s >= busy_s + before_s + hops_s)
        ends_s = sum(sums.of_ends(rank, name, last_row=False) for name in passes)
        meaning = f"seconds of one micro-batch on the first-row stages 0 … {rank}, at least"
        trip_s = before_s + sums.layers.first_row[rank] * quickest_s + ends_s
        before_s = program.named("time", f"before_{rank}", meaning, trip_s)


def _add_trips(program: Formulation, sums: RankSums, pipeline_s: Expression, back: str) -> None:
    """Add T ≥ one micro-batch's whole trip + M − 1 more passes of any stage, there or `back`.

    These rows matter if M is small.
    """
    node = sums.node
    there = "forward_total_s"
    hops = sum(a != b for a, b in pairwise(node.placement)) if node.pp > 1 else 0
    trip_s = add_up(sums.total(rank, name) for rank in range(node.pp) for name in (there, back)) + 2 * hops * float(
        node.p2p_s
    )
    trip_s = program.named("time", "trip", "seconds of one micro-batch through all stages and back", trip_s)
    for name in (there, back):
        stages_s: list[Expression] = []
        if node.vpp == 1:
            stages_s = [sums.total(rank, name) for rank in range(node.pp)]
        elif node.num_stages > 2:  # any stage but the first and the last
            stages_s = [sums.layers.chunks.length * min(min(sums.per_layer(rank, name)) for rank in range(node.pp))]
        for number, stage_s in enumerate(stages_s):
            later_s = (node.num_microbatches - 1) * stage_s
            program.add_row("time", f"trip_{number}_{name}", pipeline_s >= trip_s + later_s)


def _add_one_f_one_b(program: Formulation, sums: RankSums, pipeline_s: Expression) -> None:
    """Add the rows of 1F1B: a rank is idle for the part of the trip below it that k passes cannot fill.

    Rank r has at most k = min(M, pp − r) micro-batches in flight. If transfers block, a rank also spends c between any
    two of its 2M actions. But the first rank exchanges nothing between a backward and the next forward, and the last
    rank nothing between a forward and its backward.
    """
    node, pp, steps = sums.node, sums.node.pp, sums.node.num_microbatches
    hop_s = 2 * float(node.p2p_s)
    pause_s = float(node.p2p_s) if node.blocking_p2p and pp > 1 else 0.0
    forward_s: list[Expression] = []
    backward_s: list[Expression] = []
    before_s = [constant(0)]
    for rank in range(pp):
        for name, quantity, passes_s in zip(("forward", "backward"), PASSES, (forward_s, backward_s), strict=True):
            meaning = f"seconds of one micro-batch's {name} on rank {rank}"
            passes_s.append(program.named("time", f"{name}_{rank}", meaning, sums.total(rank, quantity)))
        meaning = f"seconds of one micro-batch's forward and backward on the ranks 0 … {rank}"
        trip_s = before_s[-1] + forward_s[rank] + backward_s[rank]
        before_s.append(program.named("time", f"trip_{rank}", meaning, trip_s))
    for rank in range(pp):
        k = min(steps, pp - rank)
        pauses = steps - 1 if rank == pp - 1 else steps + k - 1 if rank == 0 else 2 * steps - 1
        busy_s = steps * (forward_s[rank] + backward_s[rank]) + pauses * pause_s
        below_s = before_s[pp] - before_s[rank + 1] + (pp - 1 - rank) * hop_s - k * pause_s
        first_s, last_s = below_s - (k - 1) * forward_s[rank], below_s - (k - 1) * backward_s[rank]
        waits_s = [constant(0), first_s, last_s]
        if steps > k:
            waits_s.append(first_s + last_s)
        for number, wait_s in enumerate(waits_s):
            least_s = busy_s + before_s[rank] + rank * hop_s + wait_s
            program.add_row("time", f"time_{rank}_{number}", pipeline_s >= least_s)


def _add_interleaved(program: Formulation, sums: RankSums, pipeline_s: Expression) -> None:
    """Add the rows of interleaved 1F1B: T ≥ head + M·t + tail + the part of the trip below that k passes cannot fill.

    A rank has at most k chunks in flight. Let s be the rank's first virtual stage and e its last. Head and tail are the
    trips through the chunks before s. The first gradient comes back after Σ_{j≥s} f_j + Σ_{j>e} b_j, the last one after
    Σ_{j>e} f_j + Σ_{j≥s} b_j.
    """
    node, pp, hop_s = sums.node, sums.node.pp, float(sums.node.p2p_s)
    num_chunks = node.num_microbatches * node.vpp
    all_s = {}
    for name in PASSES:
        meaning = f"{_WORDS[name]} of one micro-batch on all ranks"
        all_s[name] = program.named(
            "time", f"all_{name}", meaning, add_up(sums.total(rank, name) for rank in range(pp))
        )
    behind_s = _add_behind(program, sums)
    _add_trips(program, sums, pipeline_s, "backward_total_s")
    before_s = dict.fromkeys(PASSES, constant(0))
    for rank in range(pp):
        trips_s = before_s["forward_total_s"] + before_s["backward_total_s"] + 2 * rank * hop_s
        meaning = f"seconds that rank {rank} works, and of the trips to its first virtual stage and back"
        busy_s = node.num_microbatches * sums.total(rank, "total_s") + trips_s
        busy_s = program.named("time", f"busy_{rank}", meaning, busy_s)
        k = min(round(node.in_flight[rank] * node.vpp), num_chunks)
        hops_s = (node.num_stages - 1 - rank + pp - 1 - rank) * hop_s
        waits_s = [constant(0)]
        for name, back in zip(PASSES, reversed(PASSES), strict=True):
            slowest_s = sums.layers.chunks.length * max(sums.per_layer(rank, name)) + sums.of_ends(rank, name)
            wait_s = all_s[name] - before_s[name] + behind_s[back][rank + 1] + hops_s - k * slowest_s
            meaning = f"seconds of the trip below rank {rank} beyond the {_WORDS[name]} of {k} chunks; below 0: no wait"
            waits_s.append(program.named("time", f"wait_{rank}_{name}", meaning, wait_s, least=None))
        if num_chunks > k:
            waits_s.append(waits_s[1] + waits_s[2])
        for number, wait_s in enumerate(waits_s):
            program.add_row("time", f"time_{rank}_{number}", pipeline_s - busy_s >= wait_s)
        for name in PASSES:
            quickest_s = sums.layers.first_row[rank] * min(sums.per_layer(rank, name))
            trip_s = before_s[name] + (quickest_s + sums.of_ends(rank, name, last_row=False))
            meaning = f"{_WORDS[name]} of one micro-batch on the first-row stages 0 … {rank}, at least"
            before_s[name] = program.named("time", f"before_{rank}_{name}", meaning, trip_s)


def _add_behind(program: Formulation, sums: RankSums) -> dict[str, list[Expression]]:
    """The least seconds of a micro-batch on the last row's stages r … pp − 1, for each pass and each rank r."""
    pp = sums.node.pp
    behind_s = {name: [constant(0)] * (pp + 1) for name in PASSES}
    for rank in reversed(range(pp)):
        for name in PASSES:
            quickest_s = sums.layers.last_row[rank] * min(sums.per_layer(rank, name))
            stage_s = quickest_s + sums.of_ends(rank, name, first_row=False)
            meaning = f"{_WORDS[name]} of one micro-batch on the last-row stages {rank} … {pp - 1}, at least"
            behind_s[name][rank] = program.named(
                "time", f"behind_{rank}_{name}", meaning, behind_s[name][rank + 1] + stage_s
            )
    return behind_s


def add_memory(program: Formulation, sums: RankSums) -> list[Expression]:
    """Add row 6 and return the bytes that each rank needs, with the least transient bytes that it can have."""
    node = sums.node
    usable_gib = float(node.usable_bytes) / GIB
    least = min(float(node.layers[kind, node.modes[0]].transient_bytes) for kind in node.kinds)
    needed_bytes: list[Expression] = []
    for rank in range(node.pp):
        loss_bytes = float(node.head.transient_bytes) if rank == node.placement[-1] else 0.0
        transient_bytes = max(loss_bytes, least)
        short_bytes = node.short_bytes[rank] if node.short_bytes else 0.0
        peak = relaxed_peak_bytes(sums.total(rank, "static_bytes"), _live_bytes(sums, rank), transient_bytes)
        needed = peak + short_bytes
        needed_bytes.append(needed)
        program.add_row("memory", f"memory_{rank}", needed * (1 / GIB) <= usable_gib)
        for number, (on_rank, kind, mode) in enumerate(_layers_by_mode(sums, rank)):
            more_bytes = float(node.layers[kind, mode].transient_bytes) - transient_bytes
            if more_bytes > 0:
                meaning = f"1 if rank {rank} holds {kind} layers in mode {mode}"
                holds = program.variable(f"holds_{rank}_{number}", meaning, 1, integer=True)
                program.add_row("memory", f"holds_{rank}_{number}_any", on_rank <= node.num_layers * holds)
                with_backward = (needed + more_bytes * holds) * (1 / GIB)
                program.add_row("memory", f"memory_{rank}_{number}", with_backward <= usable_gib)
    return needed_bytes


def _live_bytes(sums: RankSums, rank: int) -> Expression:
    """Bytes that a rank keeps from forward to backward, for all micro-batches in flight."""
    node = sums.node
    in_flight = node.in_flight_of(rank)
    layers = in_flight[0] * sums.of_layers(rank, "live_bytes") if node.vpp == 1 else sums.in_flight_bytes(rank)
    live_bytes = layers + sums.of_ends(rank, "live_bytes")
    sending = sum(in_flight) - (in_flight[-1] if rank == node.placement[-1] else 0.0)
    live_bytes = live_bytes + sending * float(node.sent_bytes)
    if rank == 0:
        live_bytes = live_bytes + (in_flight[0] - 1) * float(node.embedding.live_bytes)
    return live_bytes


def _layers_by_mode(sums: RankSums, rank: int) -> Iterator[tuple[Expression, LayerKind, Recompute]]:
    """Layers of a rank by kind and recompute mode; those of the first mode may include those of the second."""
    first, *others = sums.node.modes
    for kind, on_rank in sums.layers.by_kind[rank].items():
        yield on_rank, kind, first
    for mode in others:
        for kind, on_rank in sums.recomputed.by_kind[rank].items():
            yield on_rank, kind, mode


_EXCHANGES = {"reduce_s": "gradient reduction", "gather_s": "parameter gathering"}


def add_ends(program: Formulation, sums: RankSums) -> Expression:
    """Add row 7 and return the seconds outside the pipeline: gradients + parameters + optimizer."""
    node = sums.node
    gradients_s = program.variable("gradients", "seconds of gradient reduction that nothing hides")
    parameters_s = program.variable("parameters", "seconds of parameter gathering that nothing hides")
    optimizer_s = program.variable("optimizer", "seconds of the slowest rank's optimizer")
    if node.sharded_each_time:
        _add_each_time(program, sums, gradients_s)
    if node.sharded_each_time < 2:
        hidden, lead = node.gradient_overlap_fraction, node.lead_passes
        _add_exchange(program, sums, gradients_s, "reduce_s", "backward_total_s", hidden, lead)
    if node.sharded_each_time < 3:
        hidden, lead = node.parameter_overlap_fraction, 1 / node.vpp
        _add_exchange(program, sums, parameters_s, "gather_s", "forward_total_s", hidden, lead)
    for rank in range(node.pp):
        program.add_row("ends", f"optimizer_{rank}", optimizer_s >= sums.total(rank, "optimizer_s"))
    return add_up((gradients_s, parameters_s, optimizer_s))


def _add_each_time(program: Formulation, sums: RankSums, gradients_s: Expression) -> None:
    """Add the rows of ZeRO-2 and ZeRO-3 at pp = 1.

    Gradients are reduced for every micro-batch, and with ZeRO-3 weights are gathered, too.
    """
    node, weights_too = sums.node, sums.node.sharded_each_time == 3
    exchanged_s = sums.total(0, "reduce_s") + (2 * sums.total(0, "gather_s") if weights_too else 0.0)
    behind_s = sums.total(0, "total_s" if weights_too else "backward_total_s")
    exposed_s = exchanged_s - node.fsdp_overlap_fraction * behind_s
    program.add_row("ends", "exposed_each_time", gradients_s >= node.num_microbatches * exposed_s)
    showing_s = node.num_microbatches * node.contention_fraction * exchanged_s
    program.add_row("ends", "showing_each_time", gradients_s >= showing_s)


def _add_exchange(
    program: Formulation,
    sums: RankSums,
    exposed_s: Expression,
    exchange: str,
    passing: str,
    hidden_fraction: float,
    lead: float,
) -> None:
    """Add the rows of one exchange: its seconds on a rank that the rank's own passes do not hide.

    `lead` passes of each rank before it are taken off.
    """
    node = sums.node
    before_s = constant(0)
    for rank in range(node.pp):
        exchanged_s, passing_s = sums.total(rank, exchange), sums.total(rank, passing)
        late_s, hidden_s = exposed_s + before_s, hidden_fraction * passing_s
        name = f"{exchange}_{rank}"
        program.add_row("ends", f"showing_{name}", late_s >= node.contention_fraction * exchanged_s)
        program.add_row("ends", f"exposed_{name}_of_the_last_chunk", node.vpp * late_s >= exchanged_s - hidden_s)
        if node.vpp > 1:
            hidden_behind_s = node.passes_behind * hidden_s
            program.add_row("ends", f"exposed_{name}", late_s >= exchanged_s - hidden_behind_s)
        meaning = f"seconds that the ranks 0 … {rank} leave the next rank for its {_EXCHANGES[exchange]}"
        before_s = program.named("ends", f"before_{name}", meaning, before_s + lead * passing_s)
