"""Sums over a rank's layers, embedding and head, in seconds or bytes; they are linear in the layers that it holds.

A quantity is named as a field or property of `PartCost`, such as `forward_total_s`.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.search.ilp.formulation import Expression, add_up, scaled
from planner.search.ilp.layers import LayersOnRanks
from planner.search.ilp.node import FULL, Node
from planner.search.ilp.recompute import RecomputedLayers


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
