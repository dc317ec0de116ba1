"""Row 4 of the integer program: the number of layers of each kind that are recomputed whole on each rank.

It is at most the number of layers that the rank holds. A trainer with one setting for all virtual stages gets one
variable.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.search.ilp.formulation import Expression, Formulation, constant
from planner.search.ilp.layers import LayersOnRanks
from planner.search.ilp.node import Node
from planner.specs.model import LayerKind


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
