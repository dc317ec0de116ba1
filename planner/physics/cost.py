"""The cost table: everything that search and schedule may know about one shape (or about thousands, as arrays).

Seconds that depend on a few numbers alone are remembered (`remembered`): what a switch does not change is worked out
once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from operator import add, attrgetter
from typing import Any, TypeVar

import numpy as np

from planner.record import record
from planner.shape import Number, Shape, maximum, where
from planner.specs.model import LayerKind
from planner.specs.training import Recompute


@record(slots=False)
class PartCost:
    """One part of a stage (a layer, the embedding, the head) on one rank: seconds of a micro-batch, bytes, parameters.

    Compute and exposed communication are apart: a stage's forward takes forward_s plus the forward exchanges.
    """

    forward_s: Number = 0.0
    input_grad_s: Number = 0.0
    """Seconds of the input gradients, and of all that is recomputed before them."""
    weight_grad_s: Number = 0.0
    tp_forward_s: Number = 0.0
    tp_backward_s: Number = 0.0
    cp_forward_s: Number = 0.0
    cp_backward_s: Number = 0.0
    ep_forward_s: Number = 0.0
    ep_backward_s: Number = 0.0
    live_bytes: Number = 0.0
    """Bytes kept from forward to backward, per micro-batch in flight."""
    transient_bytes: Number = 0.0
    """Bytes needed above the live bytes while this part's backward runs."""
    logits_bytes: Number = 0.0
    """Bytes that the loss holds; `transient_bytes` includes them."""
    weights_bytes: Number = 0.0
    gradients_bytes: Number = 0.0
    optimizer_bytes: Number = 0.0
    parameters: Number = 0.0
    """Parameters of the part on this rank, before ZeRO-3 sharding."""
    expert_parameters: Number = 0.0
    """Parameters of routed experts; `parameters` includes them."""
    wide_parameters: Number = 0.0
    """Trained parameters that stay in 16 bits under any recipe; `parameters` includes them."""
    frozen_parameters: Number = 0.0
    """Parameters without gradient or state; `parameters` includes them."""
    frozen_expert_parameters: Number = 0.0
    """Frozen parameters of routed experts; `expert_parameters` and `frozen_parameters` include them."""
    frozen_wide_parameters: Number = 0.0
    """Frozen parameters that stay in 16 bits; `frozen_parameters` includes them."""
    reference_parameters: Number = 0.0
    """Parameters of a reference model, whatever holds them; `parameters` does not include them."""
    reference_expert_parameters: Number = 0.0
    """Those of routed experts; `reference_parameters` includes them."""
    reference_wide_parameters: Number = 0.0
    """Those that stay in 16 bits; `reference_parameters` includes them."""
    state_bytes: Number = 0.0
    """Bytes of the states of an optimizer other than AdamW on the GPU, before sharding: of all but routed experts."""
    expert_state_bytes: Number = 0.0
    """`state_bytes` of routed experts."""
    state_update_s: Number = 0.0
    """Seconds of the update of an optimizer other than AdamW, before sharding: of all but routed experts."""
    expert_state_update_s: Number = 0.0
    """`state_update_s` of routed experts."""
    reduce_s: Number = 0.0
    """Seconds of the gradient reduction over data-parallel ranks, once per step (ZeRO-3: per micro-batch)."""
    gather_s: Number = 0.0
    """Seconds of the parameter all-gather, once per step (ZeRO-3: per pass of a micro-batch)."""
    optimizer_s: Number = 0.0
    tensors_s: Number = 0.0
    """Host seconds of an optimizer step that come tensor by tensor; `optimizer_s` includes them."""

    @cached_property
    def forward_total_s(self) -> Number:
        return self.forward_s + self.tp_forward_s + self.cp_forward_s + self.ep_forward_s

    @cached_property
    def input_grad_total_s(self) -> Number:
        """Seconds of the input gradients and of the backward's exchanges."""
        return self.input_grad_s + self.tp_backward_s + self.cp_backward_s + self.ep_backward_s

    @cached_property
    def exchanges_s(self) -> dict[str, tuple[Number, Number]]:
        """Seconds of exchanges in a forward and in a backward that compute does not hide, by group of ranks."""
        return {
            "tp": (self.tp_forward_s, self.tp_backward_s),
            "cp": (self.cp_forward_s, self.cp_backward_s),
            "ep": (self.ep_forward_s, self.ep_backward_s),
        }

    @cached_property
    def backward_total_s(self) -> Number:
        return self.input_grad_total_s + self.weight_grad_s

    @cached_property
    def total_s(self) -> Number:
        """Seconds of the forward and backward of one micro-batch, exchanges included."""
        return self.forward_total_s + self.backward_total_s

    @property
    def trained_expert_parameters(self) -> Number:
        """Parameters of routed experts that have a gradient and a state."""
        return self.expert_parameters - self.frozen_expert_parameters

    @property
    def trained_dense_parameters(self) -> Number:
        """All other parameters that have a gradient and a state."""
        return self.parameters - self.frozen_parameters - self.trained_expert_parameters

    @property
    def static_bytes(self) -> Number:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    def take(self, index: Any, taken: dict[int, Number]) -> PartCost:
        """The costs with every array replaced by its entry at `index`; `taken` has those by the arrays' identities."""
        return PartCost(*[_at(cost, index, taken) if type(cost) is np.ndarray else cost for cost in _costs(self)])

    def stacked(self, parts: Sequence[PartCost], index: Any) -> PartCost:
        """The entries at `index` of several parts, one part's after the other's; this has them where all are the same.

        Parts that share a quantity share its very array.
        """
        differing = {
            name: np.concatenate([np.broadcast_to(_at(cost, index, {}), len(index)) for cost in costs])
            for name, costs in zip(_NAMES, zip(*map(_costs, parts), strict=True), strict=True)
            if any(cost is not costs[0] for cost in costs)
        }
        return replace(self, **differing)

    def times(self, count: Number) -> PartCost:
        """Cost of `count` such parts on one rank.

        They run one after the other, so that the transient bytes of one are enough for all.
        """
        scaled = [count * cost for cost in _costs(self)]
        scaled[_TRANSIENT] = where(count > 0, self.transient_bytes, 0.0)
        return PartCost(*scaled)

    def changed_by(self, before: PartCost, after: PartCost, count: int = 1) -> PartCost:
        """Cost of this part after `count` of its parts that cost `before` have come to cost `after`."""
        times = {name: 1 if name == "transient_bytes" else count for name in _NAMES}
        return PartCost(
            **{
                name: getattr(self, name) + number * (getattr(after, name) - getattr(before, name))
                for name, number in times.items()
            }
        )

    def __add__(self, other: PartCost) -> PartCost:
        """Cost of both parts on one rank: a sum, but for the transient bytes, of which the larger number counts."""
        total = [*map(add, _costs(self), _costs(other))]
        total[_TRANSIENT] = maximum(self.transient_bytes, other.transient_bytes)
        return PartCost(*total)


_NAMES = tuple(f.name for f in fields(PartCost))
_TRANSIENT = _NAMES.index("transient_bytes")
_costs = attrgetter(*_NAMES)


def sum_parts(parts: Iterable[PartCost]) -> PartCost:
    """Cost of all `parts` on one rank."""
    return reduce(PartCost.__add__, parts, PartCost())


def _at(value: Number, index: Any, taken: dict[int, Number]) -> Number:
    """The entry of an array at `index`, which is taken once; a number's own where one shape is asked for."""
    if not isinstance(value, np.ndarray) or not value.ndim:
        return value
    if id(value) not in taken:
        taken[id(value)] = value.item(index) if isinstance(index, int) else value[index]
    return taken[id(value)]


@record(kw_only=True)
class CostTable:
    """Prices of one shape: a `PartCost` per layer kind and recompute mode, and one for each part of the end stages."""

    shape: Shape
    layers: dict[tuple[LayerKind, Recompute], PartCost]
    embedding: PartCost
    head: PartCost
    """Final norm, head, loss; where weights are tied, with the head's own copy of the embedding."""
    head_beside_embedding: PartCost
    """The head on a rank that holds the embedding too: without a copy of tied weights."""
    mtp: PartCost | None
    """All multi-token-prediction blocks, on a rank that holds the head."""
    mtp_recomputed: dict[Recompute, PartCost]
    """The multi-token-prediction blocks by recompute mode, where the trainer recomputes their layers."""
    p2p_s: Number
    """Seconds to hand one micro-batch's activation (or gradient) to the next stage."""
    usable_bytes: Number
    """Bytes that tensors may take on a rank."""
    tail_s: Number
    """Seconds per step on every rank: gradient-norm all-reduce, tied-embedding all-reduce, host overhead."""
    hidden_s: Number = 0.0
    """Seconds of a micro-batch's expert exchanges, in all layers, that could hide behind another micro-batch."""
    mtp_parts: tuple[PartCost, ...] = ()
    """One multi-token-prediction block, and the embedding's copy for them; `mtp` is made of them."""

    def take(self, index: Any) -> CostTable:
        """The prices at `index` of the arrays; parts that share an array share its entry."""
        taken: dict[int, Number] = {}
        head, beside = self.head.take(index, taken), self.head_beside_embedding
        numbers = {
            name: _at(getattr(self, name), index, taken) for name in ("p2p_s", "usable_bytes", "tail_s", "hidden_s")
        }
        return CostTable(
            shape=self.shape.take(index),
            layers={key: part.take(index, taken) for key, part in self.layers.items()},
            embedding=self.embedding.take(index, taken),
            head=head,
            head_beside_embedding=head if beside is self.head else beside.take(index, taken),
            mtp=None if self.mtp is None else self.mtp.take(index, taken),
            mtp_recomputed={mode: part.take(index, taken) for mode, part in self.mtp_recomputed.items()},
            mtp_parts=tuple(part.take(index, taken) for part in self.mtp_parts),
            **numbers,
        )


T = TypeVar("T")

MOST_BYTES = 8 << 20
"""Bytes of the keys of one owner, of which values take about as many, after which its memory begins anew."""
MOST_OWNERS = 8
"""Owners after which the memory begins anew."""
MOST_ELEMENTS = 2048
"""Elements of an array beyond which nothing is remembered."""
NUMBER_BYTES = 512
"""Bytes that an entry of numbers alone takes, about."""


@dataclass(slots=True)
class _Memory:
    """Values known of an owner, which lives as long, so that its identity is not another's."""

    owner: object
    values: dict[Hashable, Any] = field(default_factory=dict)
    num_bytes: int = 0


_known: dict[int, _Memory] = {}
"""The memory of each owner, by its identity."""


def content(value: Any) -> Hashable:
    """A key that is equal for equal numbers, and for arrays of equal numbers and shape; None for a large array."""
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype.char, value.tobytes()) if value.size <= MOST_ELEMENTS else None
    return value  # type: ignore[no-any-return]


def remembered(owner: object, key: tuple[Hashable, ...], work_out: Callable[[], T]) -> T:
    """The value that was worked out for this very owner under an equal key, or what is worked out now.

    A key with None in it is of something too large to be remembered.
    """
    if None in key:
        return work_out()
    memory = _known.get(id(owner))
    if memory is None:
        if len(_known) >= MOST_OWNERS:
            _known.clear()
        memory = _known[id(owner)] = _Memory(owner)
    if key not in memory.values:
        if memory.num_bytes > MOST_BYTES:
            memory.values.clear()
            memory.num_bytes = 0
        memory.values[key] = work_out()
        memory.num_bytes += NUMBER_BYTES + sum(
            len(part[2]) for part in key if isinstance(part, tuple) and len(part) == 3
        )
    return memory.values[key]  # type: ignore[no-any-return]
