"""What the integer program is of: one shape to be split, and what a rank's layers and ends come to as sums of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pulp

from planner.physics.cost import PartCost
from planner.search.ilp.layers import Expression, HeldLayers, Rows
from planner.specs.model import LayerKind
from planner.specs.training import Recompute

WAYS = ("forward_total_s", "backward_total_s")
_SLOWED = frozenset({*WAYS, "input_grad_total_s", "total_s", "optimizer_s"})
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
    sharded_each_time: int = 0
    """2: gradients are reduced for every micro-batch; 3: and weights gathered twice (`ends.sharded_each_time`)."""
    passes_behind: float = 1.0
    """Micro-batches of a rank that hide what it exchanges (`orders.passes_behind`)."""
    lead_passes: float = 1.0
    """Micro-batches whose backward a rank has left when the one behind it is done (`orders.lead_passes`)."""
    contention_fraction: float = 0.0
    fsdp_overlap_fraction: float = 0.0
    gradient_overlap_fraction: float = 0.0
    parameter_overlap_fraction: float = 0.0
    short_bytes: Sequence[float] = ()
    """What each rank is to leave free of it, where a replay has shown that a split does not fit; empty: nothing."""
    of_mean_layers: bool = False
    """Layers of several kinds are taken as so many of their mean: a good split, but its bound proves nothing."""
    rank_factors: Sequence[float] = ()
    """How many times the costs' seconds each rank takes; empty: all take as long as the costs say."""


class Quantities(Rows):
    """Layers and recomputation of a node as variables (rows 1 to 4), and linear quantities of a rank."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.problem = pulp.LpProblem("split", pulp.LpMinimize)
        self.held = HeldLayers(
            self.problem, node.runs, pp=node.pp, vpp=node.vpp, placement=node.placement, empty_ends=node.empty_ends
        )
        self.kinds = self.held.kinds
        self._add_recompute()

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

    def _per_layer(self, rank: int, quantity: str) -> list[float]:
        """A quantity of each kind of layer in the modes it may be in; recomputation counts for the slower ones only."""
        node, slowness = self.node, self._slowness(rank, quantity)
        modes = {"none": (node.base,), "all": (FULL,)}.get(node.whole, (node.base, FULL))
        return [slowness * float(getattr(node.layers[kind, mode], quantity)) for kind in self.kinds for mode in modes]
