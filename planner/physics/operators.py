"""What a layer is: the one list of operators that parameters, FLOPs, seconds, bytes and traffic are folds over.

A decoder layer, the embedding and the head are tuples of `Operator` and `Collective`. A new architecture is a new
tuple; nothing else in the planner knows what a layer is. Sizes follow Korthikanti et al. 2022 §4, with m tokens per
rank, t = tp. Symbols: m = tokens, ms = shard_tokens, h = hidden_size, a / k = query / key-value heads, d = head_dim,
f = intermediate_size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from planner.shape import Number

BF16 = 2
FP32 = 4
INT64 = 8
NARROW_BYTES = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
"""Of an element in 8 or 4 bits: MX formats have a byte of scale for 32 values, NVFP4 for 16."""

Group = Literal["tp", "cp", "ep", "etp"]


class Saved(NamedTuple):
    """A tensor kept from forward to backward, unless one of its `modules` is recomputed."""

    name: str
    num_bytes: Number
    modules: tuple[str, ...] = ()
    gemm_input: bool = False
    """Kept only as the input of a GEMM: a narrow recipe keeps its cast copy instead."""
    cast_copy: bool = False
    """Kept only by a narrow recipe, as the cast copy of a GEMM's input that others keep as it is."""

    def bytes_in(self, dtype: str) -> Number:
        """Bytes kept where products are computed in `dtype`; `num_bytes` counts elements of 16 bits."""
        if dtype not in NARROW_BYTES:
            return 0.0 if self.cast_copy else self.num_bytes
        return self.num_bytes * (NARROW_BYTES[dtype] / BF16 if self.gemm_input or self.cast_copy else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One computation of one micro-batch on one rank.

    gemm:        `count` products y[m, n] = x[m, k] · w[k, n]; backward is a dgrad and a wgrad of the same FLOPs.
    attention:   `batch`·`heads` causal attentions of `q_len` queries over `kv_len` keys (a `window` of them).
    elementwise: moves `forward_bytes` and `backward_bytes` through memory in so many kernels.
    """

    name: str
    kind: Literal["gemm", "attention", "elementwise"]
    modules: tuple[str, ...] = ()
    """Recompute modules the operator belongs to: recomputing one runs this forward once more in the backward."""
    family: str = ""
    """Of elementwise operators: norm, activation, rotary, residual, permute, router, loss, softmax, embedding, copy."""
    count: Number = 1
    m: Number = 0
    n: Number = 0
    k: Number = 0
    weight: bool = True
    """Whether the GEMM multiplies by a weight: only those have a weight gradient and can be narrow."""
    wide: bool = False
    """Stays in 16 bits under an 8- or 4-bit recipe: the head, routers."""
    input_shards: Number = 1
    """Ranks that each hold, and cast, a share of the input before it is gathered; next, of the output's gradient."""
    gradient_shards: Number = 1
    backward_factor: float = 1.0
    """Of the seconds of a product's two gradients."""
    batch: Number = 0
    heads: Number = 0
    kv_heads: Number = 0
    q_len: Number = 0
    kv_len: Number = 0
    window: Number = 0
    """Keys a query sees on a sliding layer; 0 for all."""
    has_sinks: bool = False
    """A learned logit per head takes part in the softmax."""
    imbalance: Number = 1.0
    """Of an attention split over ranks: the slowest one's share over the mean."""
    qk_dim: Number = 0
    v_dim: Number = 0
    forward_bytes: Number = 0
    backward_bytes: Number = 0
    forward_kernels: int = 0
    backward_kernels: int = 0
    parameters: Number = 0
    """Parameters this rank holds."""
    expert: bool = False
    """Parameters belong to routed experts: replicated over expert_dp ranks, not dp·cp."""
    saved: tuple[Saved, ...] = ()
    working_bytes: Number | None = None
    """Of elementwise operators: needed for a moment in the backward; given none, what its passes suggest."""

    @property
    def is_cast(self) -> bool:
        """Whether an 8- or 4-bit recipe computes this in its own dtype."""
        return self.kind == "gemm" and self.weight and not self.wide

    @property
    def gemm_flops(self) -> Number:
        """2·count·m·n·k: forward FLOPs of the products."""
        return 2 * self.count * self.m * self.n * self.k

    @property
    def attended_fraction(self) -> Number:
        """Share of the q_len × kv_len square that is computed: ½ (causal), or window/kv_len less its corner."""
        width = np.where(self.window > 0, np.minimum(self.window, self.kv_len), self.kv_len)
        return width / self.kv_len * (1 - width / self.kv_len / 2)

    @property
    def attention_flops(self) -> Number:
        """2·b·a·q·kv·(d_qk + d_v), times the attended share."""
        return self._square * (self.qk_dim + self.v_dim)

    @property
    def _square(self) -> Number:
        """FLOPs per unit of head dimension of one product over the attended share of the q × kv square."""
        return 2 * self.batch * self.heads * self.q_len * self.kv_len * self.attended_fraction

    @property
    def forward_flops(self) -> Number:
        if self.kind == "gemm":
            return self.gemm_flops
        return self.attention_flops if self.kind == "attention" else 0

    @property
    def backward_flops(self) -> Number:
        """Twice the forward of a product (dgrad and wgrad); of attention QKᵀ again, dQ and dK (d_qk), dP and dV (d_v):
        2.5 times the forward where the dimensions are equal."""
        if self.kind == "gemm":
            return 2 * self.gemm_flops
        return self._square * (3 * self.qk_dim + 2 * self.v_dim) if self.kind == "attention" else 0

    def saved_bytes(self, recomputed: frozenset[str] = frozenset(), dtype: str = "bf16") -> Number:
        """Bytes kept for backward when the modules in `recomputed` are recomputed."""
        return sum(tensor.bytes_in(dtype) for tensor in self.saved if recomputed.isdisjoint(tensor.modules))


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One exchange of a micro-batch among the ranks of `group`; `num_bytes` is the whole (gathered) tensor's size."""

    name: str
    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring"]
    group: Group
    num_bytes: Number
    overlap: Literal["none", "tp", "tp_async", "cp", "ep"] = "none"
    """Which of the runtime's overlap coefficients hides it."""
    beside: tuple[Operator, ...] = ()
    """Products that hide an exchange of tensor parallelism, at most for as long as they take in `beside_pass`."""
    beside_pass: Literal["forward_s", "dgrad_s", "wgrad_s"] = "forward_s"
    backward: bool = False
    modules: tuple[str, ...] = ()
    """Recompute modules that repeat the exchange; of forward exchanges only."""
    cast: bool = False
    """Carries what a product multiplies: a narrow recipe casts before it sends."""
    choices: int = 0
    """Of an all-to-all: experts that each token visits, where a unit of ranks gets a token once however many of its
    experts are among them; 0 where every visit is sent."""
    inner_factor: float = 1.0
    """Of its seconds on the innermost links: short rows go slower than long ones."""


Item = Operator | Collective


def operators_of(items: Iterable[Item]) -> list[Operator]:
    return [item for item in items if isinstance(item, Operator)]


def collectives_of(items: Iterable[Item]) -> list[Collective]:
    return [item for item in items if isinstance(item, Collective)]


def num_parameters(items: Iterable[Item], expert: bool | None = None) -> Number:
    """Parameters the rank holds, of routed experts only, of all but them, or of both (None)."""
    return sum(op.parameters for op in operators_of(items) if expert is None or op.expert == expert)


def wide_parameters(items: Iterable[Item]) -> Number:
    """Parameters the rank holds in 16 bits under any recipe: embedding, head, norms, routers."""
    return sum(op.parameters for op in operators_of(items) if not op.is_cast)


def saved_bytes(items: Iterable[Item], recomputed: frozenset[str] = frozenset(), dtype: str = "bf16") -> Number:
    """Bytes kept from forward to backward of one micro-batch."""
    return sum(op.saved_bytes(recomputed, dtype) for op in operators_of(items))


def up_to_last_saved(items: Sequence[Item]) -> Sequence[Item]:
    """What recomputing a layer has to run again: all up to the last operator that keeps a tensor."""
    last = max(index for index, item in enumerate(items) if isinstance(item, Operator) and item.saved)
    return items[: last + 1]
