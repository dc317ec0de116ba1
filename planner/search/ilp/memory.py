"""Row 6 of the integer program: the memory that a rank needs at its peak is at most the memory that it can use.

static + in flight · live + transient ≤ usable, in GiB. The transient bytes are the largest of those of the loss and of
the backward of any layer that the rank holds. For each kind and recompute mode that needs more than the least, a binary
variable is 1 if the rank holds such layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from planner.physics.stage_memory import relaxed_peak_bytes
from planner.search.ilp.formulation import Expression, Formulation
from planner.search.ilp.rank_sums import RankSums
from planner.specs.model import LayerKind
from planner.specs.training import Recompute
from planner.specs.units import GIB


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
