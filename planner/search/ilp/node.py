"""The numbers that the integer program of one shape is built from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.physics.cost import PartCost
from planner.schedule.orders import Bound
from planner.shape import Number
from planner.specs.model import LayerKind
from planner.specs.training import Recompute

PASSES = ("forward_total_s", "backward_total_s")
"""The two passes of a micro-batch through a stage, as `PartCost` names their seconds, exchanges included."""
_SLOWED = frozenset({*PASSES, "input_grad_total_s", "total_s", "optimizer_s"})
"""Quantities in seconds that are longer on a slow rank."""
FULL: Recompute = "full"

Whole = Literal["none", "all", "one_count", "per_stage", "any_modules"]
"""The number of layers that are recomputed whole: none, all, one number for every virtual stage, or a number per rank.

`any_modules` stands for any set of modules of a layer instead of whole layers.
"""

Runs = Sequence[tuple[LayerKind, int]]
"""The model's layers as maximal runs of equal layers: kind and number of layers of each run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One shape whose layers are to be split: schedule, prices and limits, as the rows of the program need them.

    Where splits are bounded (`search/splits/chain.py`) it may be several shapes with one pipeline, its prices arrays.
    """

    runs: Runs
    layers: dict[tuple[LayerKind, Recompute], PartCost]
    """Costs of one layer by its kind and recompute mode."""
    embedding: PartCost
    head: PartCost
    """Costs of everything the last virtual stage holds beside layers."""
    pp: int
    vpp: int
    num_microbatches: int
    base: Recompute
    """Recompute mode of layers that are not recomputed whole."""
    whole: Whole
    in_flight: Sequence[float]
    """Micro-batches that each rank holds at its peak; a micro-batch in all of the rank's chunks counts as 1."""
    chunk_in_flight: Sequence[Sequence[float]] = ()
    """Micro-batches of each chunk that each rank holds at its peak; empty if it holds as many of every chunk."""
    usable_bytes: Number
    sent_bytes: Number = 0.0
    """Bytes that each virtual stage but the last keeps of a micro-batch because it sent them."""
    p2p_s: Number
    bound: Bound
    """The lower bounds that hold for the schedule."""
    placement: Sequence[int]
    """Rank of each virtual stage."""
    blocking_p2p: bool = False
    """True if a rank waits for its transfers."""
    cutoff_s: float = math.inf
    """Seconds of a step; slower solutions are not wanted."""
    gap_fraction: float = 1e-4
    """The relative gap to the optimum at which the solver may stop."""
    empty_ends: bool = False
    """True if the first and the last virtual stage may hold no decoder layer."""
    sharded_each_time: int = 0
    """The ZeRO stage that exchanges for every micro-batch, or 0 (`outside_pipeline.sharded_each_time`).

    With 2 gradients are reduced for every micro-batch; with 3 weights are also gathered twice.
    """
    passes_behind: float = 1.0
    """Micro-batches of a rank that hide what it exchanges (`orders.passes_behind`)."""
    lead_passes: float = 1.0
    """Micro-batches whose backward a rank has left when the rank behind it is done (`orders.lead_passes`)."""
    contention_fraction: float = 0.0
    fsdp_overlap_fraction: float = 0.0
    gradient_overlap_fraction: float = 0.0
    parameter_overlap_fraction: float = 0.0
    short_bytes: Sequence[float] = ()
    """Bytes that each rank is to leave free since a replay showed that a split does not fit; empty for none."""
    of_mean_layers: bool = False
    """True if every layer is priced as the mean of several kinds: the split is good, but its bound proves nothing."""
    rank_factors: Sequence[float] = ()
    """The factor by which each rank is slower than the costs say; empty if no rank is slower."""

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return sum(length for _, length in self.runs)

    @property
    def num_stages(self) -> int:
        """Virtual stages of the pipeline."""
        return self.pp * self.vpp

    @property
    def kinds(self) -> list[LayerKind]:
        """Kinds of layers, in the order in which the model first has them."""
        return list(dict.fromkeys(kind for kind, _ in self.runs))

    @property
    def modes(self) -> tuple[Recompute, ...]:
        """Recompute modes that a layer may be in."""
        only: dict[Whole, tuple[Recompute, ...]] = {"none": (self.base,), "all": (FULL,)}
        return only.get(self.whole, (self.base, FULL))

    def in_flight_of(self, rank: int) -> Sequence[float]:
        """Micro-batches of each of the rank's chunks that it holds at its peak."""
        return self.chunk_in_flight[rank] if self.chunk_in_flight else [self.in_flight[rank]] * self.vpp

    def slowness(self, rank: int, quantity: str) -> float:
        """The factor on a rank's quantity for the slowness of the rank; 1 for all quantities but those in `_SLOWED`."""
        return self.rank_factors[rank] if self.rank_factors and quantity in _SLOWED else 1.0
