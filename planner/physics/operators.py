"""The operators of a layer: parameters, FLOPs, seconds, bytes and traffic are all sums over this one list.

A decoder layer, the embedding and the head are tuples of `Operator` and `Collective`. A new architecture is a new
tuple; nothing else in the planner knows what a layer is made of. Sizes follow Korthikanti et al. 2022 §4, with m tokens
per rank, t = tp. Symbols: m = tokens, ms = shard_tokens, h = hidden_size, a / k = query / key-value heads,
d = head_dim, f = intermediate_size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce
from operator import mul
from typing import Any, Literal, NamedTuple

from planner.record import record
from planner.shape import Number, Shape, minimum, where
from planner.specs.base import Texts
from planner.trainers.documents import Documents, attended_fraction, rank_imbalance

BF16 = 2
FP32 = 4
INT64 = 8
INT32 = 4
DTYPE_BYTES = {"bf16": BF16, "fp32": FP32, "int64": INT64, "int32": INT32, "uint8": 1, "bytes": 1}
"""Bytes of an element; bf16 stands for fp16 too, and `bytes` for a sum of tensors whose shapes are not known."""
NARROW_BYTES = {"fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 1 / 2 + 1 / 16}
"""Bytes of one element in 8 or 4 bits, its scale included: MX formats have a byte of scale for 32 values, NVFP4 one
for 16."""

Group = Literal["tp", "cp", "ep", "etp"]


class Saved(NamedTuple):
    """A tensor kept from forward to backward, unless one of its `modules` is recomputed."""

    name: str
    dims: tuple[Number, ...]
    """Its dimensions on this rank, where sequence and micro-batch are one: tokens. One of no elements is not kept."""
    modules: tuple[str, ...] = ()
    dtype: str = "bf16"
    gemm_input: bool = False
    """True for a tensor that is kept only as the input of a GEMM: a narrow recipe keeps its cast copy instead."""
    for_weight: bool = False
    """True for a tensor that is kept only for the gradient of a weight that is no product's: a norm's."""
    cast_copy: bool = False
    """True for a tensor that only a narrow recipe keeps: the cast copy of a GEMM's input, which other recipes keep
    without a cast."""

    @property
    def num_bytes(self) -> Number:
        """Bytes in its own dtype."""
        return DTYPE_BYTES[self.dtype] * reduce(mul, self.dims)

    def bytes_in(self, dtype: str) -> Number:
        """Bytes kept where products are computed in `dtype`."""
        if dtype not in NARROW_BYTES:
            return 0.0 if self.cast_copy else self.num_bytes
        return self.num_bytes * (NARROW_BYTES[dtype] / BF16 if self.is_cast else 1.0)

    @property
    def is_cast(self) -> bool:
        """True where a narrow recipe keeps the tensor in its own dtype."""
        return self.gemm_input or self.cast_copy


@record(kw_only=True)
class Operator:
    """One computation of one micro-batch on one rank.

    gemm:        `count` products y[m, n] = x[m, k] · w[k, n]; backward is a dgrad and a wgrad of the same FLOPs.
    attention:   `batch`·`heads` attentions of `q_len` queries over `kv_len` keys (a `window` of them), causal or not,
                 `count` kernels one after another.
    elementwise: moves `forward_bytes` and `backward_bytes` through memory in so many kernels.
    scan:        an elementwise operator that computes `scan_flops` as well, and takes the longer of both.
    """

    name: str
    kind: Literal["gemm", "attention", "elementwise", "scan"]
    modules: tuple[str, ...] = ()
    """Recompute modules the operator belongs to: recomputing one runs this forward once more in the backward."""
    family: str = ""
    """Family of an elementwise operator: norm, activation, rotary, residual, permute, router, loss, softmax, embedding,
    bias, copy or strided."""
    count: Number = 1
    m: Number = 0
    n: Number = 0
    k: Number = 0
    weight: bool = True
    """True for a GEMM that multiplies by a weight: only such a GEMM has a weight gradient and can be narrow."""
    trained: bool = True
    """False where the parameters are frozen: they have no gradient and no optimizer state."""
    has_backward: bool = True
    """False where no gradient is wanted of what stands before: a frozen tower's operators run forward alone."""
    wide: bool = False
    """True for a GEMM that stays in 16 bits under an 8- or 4-bit recipe: the head, routers."""
    input_shards: Number = 1
    """Ranks that each hold one share of the input and cast it before the shares are gathered."""
    gradient_shards: Number = 1
    """Ranks that each hold one share of the output's gradient and cast it before the shares are gathered."""
    takes_cast_input: bool = False
    """True where the kernel before the product writes its input in the recipe's dtype already."""
    takes_cast_gradient: bool = False
    """`takes_cast_input` of the gradient of the product's output."""
    in_fp32: bool = False
    """True for a product of fp32 operands, which tensor cores do not take."""
    backward_factor: float = 1.0
    """Factor on the seconds of a product's two gradients; for a scan, FLOPs of the backward over the forward's."""
    scan_flops: Number = 0
    """FLOPs of a scan in the forward."""
    batch: Number = 0
    heads: Number = 0
    kv_heads: Number = 0
    q_len: Number = 0
    kv_len: Number = 0
    window: Number = 0
    """Keys that a query sees on a sliding layer; 0 for all keys."""
    causal: bool = True
    """Queries attend to the keys before them; else to all."""
    documents: Documents = ()
    """Documents that the queries' attention stays within; empty where it spans whole sequences."""
    has_sinks: bool = False
    """True where a learned logit per head takes part in the softmax."""
    calls_flash: Number = 0
    """True where eager torch's ranks call FlashAttention-2 themselves (`trainers.torch_attention`)."""
    imbalance: Number = 1.0
    """Work of the slowest rank over the mean, for an attention that is split over ranks."""
    qk_dim: Number = 0
    v_dim: Number = 0
    forward_bytes: Number = 0
    backward_bytes: Number = 0
    forward_kernels: int = 0
    backward_kernels: int = 0
    parameters: Number = 0
    """Parameters that this rank holds."""
    expert: bool = False
    """True where the parameters belong to routed experts: expert_dp ranks hold copies of them, not dp·cp."""
    saved: tuple[Saved, ...] = ()
    working_bytes: Number | None = None
    """Bytes that an elementwise operator needs for a moment in its backward; None: two thirds of `backward_bytes`."""

    @property
    def is_cast(self) -> bool:
        """True where an 8- or 4-bit recipe computes the operator in its own dtype."""
        return self.kind == "gemm" and self.weight and not self.wide

    @property
    def has_weight_gradient(self) -> bool:
        """True for a product by a weight that is trained."""
        return self.kind == "gemm" and self.weight and self.trained

    @property
    def gemm_flops(self) -> Number:
        """FLOPs of the products in the forward: 2·count·m·n·k."""
        return 2 * self.count * self.m * self.n * self.k

    @property
    def attended_fraction(self) -> Number:
        """Share of the q_len × kv_len square that is computed: ½ (causal), or window/kv_len less its corner, or what of
        either stays within documents; all of it where attention is not causal."""
        if not self.causal:
            return 1.0
        if self.documents:
            return attended_fraction(self.documents, self.kv_len, self.window)
        return self.width / self.kv_len * (1 - self.width / self.kv_len / 2)

    @property
    def width(self) -> Number:
        """The most keys that a query attends to; with documents, the length of the mean token's."""
        width: Number = where(self.window > 0, minimum(self.window, self.kv_len), self.kv_len)
        return minimum(width, 2 * self.kv_len * self.attended_fraction) if self.documents else width

    @property
    def attention_flops(self) -> Number:
        """FLOPs of attention in the forward: 2·b·a·q·kv·(d_qk + d_v), times the attended share."""
        return self._square * (self.qk_dim + self.v_dim)

    @property
    def _square(self) -> Number:
        """FLOPs per unit of head dimension of one product over the attended share of the q × kv square."""
        return 2 * self.count * self.batch * self.heads * self.q_len * self.kv_len * self.attended_fraction

    @property
    def forward_flops(self) -> Number:
        if self.kind == "gemm":
            return self.gemm_flops
        return self.attention_flops if self.kind == "attention" else self.scan_flops

    @property
    def backward_flops(self) -> Number:
        """FLOPs of the backward: for a product twice its forward (dgrad and wgrad), once if its weight is frozen.

        Attention computes QKᵀ again, dQ and dK (d_qk each), dP and dV (d_v each): 2.5 times the forward where the
        dimensions are equal.
        """
        if not self.has_backward:
            return 0.0
        if self.kind == "gemm":
            return (2 if self.has_weight_gradient else 1 + (not self.weight)) * self.gemm_flops
        if self.kind == "attention":
            return self._square * (3 * self.qk_dim + 2 * self.v_dim)
        return self.backward_factor * self.scan_flops

    def kept(self, recomputed: frozenset[str] = frozenset()) -> Iterator[Saved]:
        """The tensors kept for backward when the modules in `recomputed` are recomputed."""
        return (tensor for tensor in self.saved if recomputed.isdisjoint(tensor.modules))

    def saved_bytes(self, recomputed: frozenset[str] = frozenset(), dtype: str = "bf16") -> Number:
        """Bytes of the tensors that are `kept`."""
        return sum(tensor.bytes_in(dtype) for tensor in self.kept(recomputed))


@record(kw_only=True)
class Collective:
    """One exchange of a micro-batch among the ranks of `group`; `num_bytes` is the whole (gathered) tensor's size."""

    name: str
    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring"]
    group: Group
    num_bytes: Number
    overlap: Literal["none", "tp", "tp_async", "cp", "ep", "weights"] = "none"
    """Name of the runtime's overlap coefficient that says how much of the exchange is hidden."""
    beside: tuple[Operator, ...] = ()
    """Products that hide an exchange of tensor parallelism, at most for as long as they take in `beside_pass`."""
    beside_pass: Literal["forward_s", "dgrad_s", "wgrad_s"] = "forward_s"
    backward: bool = False
    modules: tuple[str, ...] = ()
    """Recompute modules that repeat the exchange; only forward exchanges have any."""
    for_weight: bool = False
    """True for an exchange that only the gradient of a weight needs."""
    shards: int = 1
    """Ranks that hold pieces of the group's weights and exchange these; 1 where the group itself exchanges."""
    waits: bool = True
    """False where another exchange just before made the ranks wait for the last of them."""
    cast: bool = False
    """True where the exchange carries an operand of a product: a narrow recipe casts it before it is sent."""
    choices: int = 0
    """Experts that each token visits, in an all-to-all that sends a token once to a unit of ranks however many of the
    token's experts are there; 0 where every visit is sent."""
    row_fraction: float = 0.0
    """Distance between the first and the last expert of a token that visits experts in a row, as a share of all
    experts; 0 where a token's experts are anywhere."""
    inner_factor: float = 1.0
    """Factor on the seconds over the innermost links: short rows go slower than long ones."""
    row_bytes: float = 1.0
    """Bytes of a token's row, of which an exchange with `choices` hands on one after the other."""
    transport: str = ""
    """The transport between nodes of such an exchange; empty for that of its network."""


Item = Operator | Collective


def matmul(
    name: str, m: Number, n: Number, k: Number, *saved: Saved, biases: Number = 0, modules: Texts = (),
    wide: bool = False,
) -> Operator:  # fmt: skip
    """The product of `m` rows by a weight of `k` × `n`, with so many biases a column; what it keeps goes with it."""
    return Operator(
        name=name, kind="gemm", modules=modules, wide=wide, m=m, n=n, k=k, parameters=n * (k + biases), saved=saved
    )


def operators_of(items: Iterable[Item]) -> list[Operator]:
    return [item for item in items if isinstance(item, Operator)]


def collectives_of(items: Iterable[Item]) -> list[Collective]:
    return [item for item in items if isinstance(item, Collective)]


def within_documents(items: Iterable[Item], shape: Shape, documents: Documents) -> tuple[Item, ...]:
    """The items, of which attention stays within documents and is as uneven over a sequence's ranks as they make it."""
    return tuple(_within(item, shape, documents) if documents else item for item in items)


def _within(item: Item, shape: Shape, documents: Documents) -> Item:
    if isinstance(item, Collective) or item.kind != "attention":
        return item
    uneven = item.imbalance if item.window else item.imbalance * rank_imbalance(documents, item.kv_len, shape.cp)
    return replace(item, documents=documents, imbalance=uneven)


def num_parameters(items: Iterable[Item], expert: bool | None = None, trained: bool | None = None) -> Number:
    """Parameters that the rank holds: those of routed experts (True), all others (False), or both (None).

    `trained` chooses likewise between those that are trained and those that are frozen.
    """
    return sum(
        op.parameters
        for op in operators_of(items)
        if (expert is None or op.expert == expert) and (trained is None or op.trained == trained)
    )


def num_tensors(items: Iterable[Item]) -> Number:
    """Trained parameters of a rank as trainers hold them: a tensor for each product, each expert's, and each norm."""
    trained = (op for op in operators_of(items) if op.trained)
    tensors = ((op.count if op.kind == "gemm" else 1) * (op.parameters > 0) for op in trained)
    return sum(tensors)


def wide_parameters(items: Iterable[Item], trained: bool = True) -> Number:
    """Parameters the rank holds in 16 bits under any recipe: embedding, head, norms, routers; trained or frozen."""
    return sum(op.parameters for op in operators_of(items) if not op.is_cast and op.trained == trained)


def saved_bytes(items: Iterable[Item], recomputed: frozenset[str] = frozenset(), dtype: str = "bf16") -> Number:
    """Bytes kept from forward to backward of one micro-batch."""
    return sum(op.saved_bytes(recomputed, dtype) for op in operators_of(items))


def up_to_last_saved(items: Sequence[Item]) -> Sequence[Item]:
    """Items that recomputing a layer has to run again: all up to the last operator that keeps a tensor."""
    last = max(index for index, item in enumerate(items) if isinstance(item, Operator) and item.saved)
    return items[: last + 1]


def with_gathered_weights(items: Sequence[Item], shards: int) -> tuple[Item, ...]:
    """Items whose weights are cut once more, over `shards` ranks of unlike data that gather them for each pass and
    scatter their gradients in 16 bits (Megatron-LM's generalized tensor parallelism); experts' are not."""
    products = tuple(op for op in operators_of(items) if op.has_weight_gradient and not op.expert)
    if shards == 1 or not products:
        return tuple(items)
    num_bytes = BF16 * sum(op.parameters for op in products)

    def exchange(name: str, kind: Any, beside_pass: Any) -> Collective:
        return Collective(
            name=name, kind=kind, group="tp", shards=shards, num_bytes=num_bytes, overlap="weights", beside=products,
            beside_pass=beside_pass, backward=beside_pass != "forward_s", cast=kind == "all_gather",
        )  # fmt: skip

    return (
        exchange("weights gather", "all_gather", "forward_s"),
        *items,
        exchange("weights gather again", "all_gather", "dgrad_s"),
        exchange("weight gradients scatter", "reduce_scatter", "wgrad_s"),
    )


def with_products_saved(items: Sequence[Item]) -> tuple[Item, ...]:
    """Items of which `op` recomputes no product, and keeps what each gives that is added to something else."""
    return tuple(_saved(item) if isinstance(item, Operator) and item.kind == "gemm" else item for item in items)


def _saved(product: Operator) -> Operator:
    kept = [tensor._replace(modules=_but_op(tensor.modules)) for tensor in product.saved]
    if "op" in product.modules and not kept:
        kept.append(Saved(f"{product.name} given", (product.m / product.gradient_shards, product.n)))
    return replace(product, modules=_but_op(product.modules), saved=tuple(kept))


def _but_op(modules: Texts) -> Texts:
    return tuple(name for name in modules if name != "op")


def kept_by_torchao(items: Sequence[Item], dtype: str) -> tuple[Item, ...]:
    """Items with what torchao's products keep: in 8 bits their inputs as they are, which they cast again.

    In 4 bits they keep the cast copy, and `op` recomputes them all: torch's list of operators that are dear to repeat
    has `mm` and `_scaled_mm`, and 4 bits go by another.
    """
    if dtype not in NARROW_BYTES:
        return tuple(items)
    keeps = _kept_in_4_bits if dtype == "nvfp4" else _kept_in_8_bits
    return tuple(keeps(item) if isinstance(item, Operator) else item for item in items)


def _kept_in_8_bits(operator: Operator) -> Operator:
    kept = (tensor._replace(gemm_input=False) for tensor in operator.saved if not tensor.cast_copy)
    return replace(operator, saved=tuple(kept))


def _kept_in_4_bits(operator: Operator) -> Operator:
    if operator.kind != "gemm" or operator.expert:
        return operator
    kept = (tensor._replace(modules=(*tensor.modules, "op")) for tensor in operator.saved)
    return replace(operator, modules=(*operator.modules, "op"), saved=tuple(kept))
