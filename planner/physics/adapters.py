"""Frozen weights and the adapters beside them: the operators of a part, as LoRA or QLoRA trains them.

A frozen product has no weight gradient, and nothing is kept for one. Each target gets two small products beside it,
x[m, k] · A[k, r] and the result times B[r, n], which are trained. A frozen weight of 8 or 4 bits is turned into 16 bits
before each of its products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from planner.physics.operators import BF16, FP32, Collective, Item, Operator, Saved
from planner.record import record
from planner.shape import Number, Shape
from planner.specs.training import EXPERTS, AdapterSpec
from planner.trainers.spec import RuntimeSpec

ROW_PARALLEL = frozenset({"attention output", "mlp down", "shared_experts down", "mamba out", "convolution out"})
"""Products whose rows are split over tensor-parallel ranks."""
WHOLE = frozenset({"q down", "kv down", "experts up", "experts down"})
"""Products that every tensor-parallel rank has whole, or that other ranks split."""


@record(kw_only=True)
class Shares:
    """Ranks that share the parts of one adapter: its A, its B, and the rows of its output and of its input."""

    rank: int
    is_row: bool = False
    shape: Shape | None = None
    down: Number = 1
    """Ranks that share the columns of A."""
    up: Number = 1
    """Ranks that share the columns of B, beyond those that share the product's."""
    outputs: Number = 1
    """Ranks that share the rows to which the adapter's output is added."""
    inputs: Number | None = None
    """Ranks that shared the rows of the input before it was gathered; none where it was not."""

    @classmethod
    def of(cls, product: Operator, adapters: AdapterSpec, shape: Shape | None) -> Shares:
        """The shares of an adapter beside `product`; without a shape, all of it is on each rank."""
        rank = adapters.rank
        if shape is None or product.name in WHOLE:
            return cls(rank=rank)
        if product.name in ROW_PARALLEL:
            return cls(rank=rank, is_row=True, shape=shape, up=shape.tp, outputs=shape.sequence_shards)
        return cls(rank=rank, shape=shape, down=shape.tp, inputs=shape.sequence_shards)

    def exchanges(self, product: Operator, runtime: RuntimeSpec) -> Iterator[Collective]:
        """The exchanges among the ranks that share the adapter, none of which hides behind a product.

        They come just before or after the product's own, in which the ranks have waited for each other already.
        The rows of A's output have its few columns. B's output beside a row-parallel product has the columns of one
        rank and all tokens, and is wanted with all columns and the tokens of one rank: ranks exchange the parts, or
        gather all columns and cut the tokens out (`a2a_experimental`). Without sequence parallelism a column-parallel
        product's adapter sums the gradients of its input by itself.
        """
        if self.shape is None:
            return
        name, rows = f"{product.name} adapter", BF16 * product.count * product.m
        hidden, columns = rows * self.rank, rows * product.n
        forward = Collective(
            name=f"{name} hidden", kind="all_reduce" if self.is_row else "all_gather", group="tp", num_bytes=hidden,
            modules=product.modules, waits=False,
        )  # fmt: skip
        yield forward
        yield replace(forward, name=f"{name} hidden grad", kind="all_reduce", backward=True, modules=())
        if not self.is_row:
            unsharded = rows * product.k * (1 - self.shape.sequence_parallel)
            yield replace(forward, name=f"{name} dgrad", kind="all_reduce", num_bytes=unsharded, backward=True)
            return
        parts = runtime.adapters_all_to_all
        gather = replace(forward, name=f"{name} output", kind="all_gather", num_bytes=columns)
        if parts:
            gather = replace(gather, kind="all_to_all", num_bytes=columns / self.shape.tp)
        yield gather
        again = gather.num_bytes * self.shape.sequence_parallel
        yield replace(gather, name=f"{name} output grad", num_bytes=again, backward=True, modules=())


def frozen_exchange(exchange: Collective, targets: frozenset[str], splits: bool) -> Iterator[Collective]:
    """An exchange beside frozen products.

    No input is gathered again for a weight's gradient, unless an adapter that kept no gathered input needs it. Where
    adapters are split, the input of a target is gathered once for both: in 16 bits, and not behind the product
    (Transformer Engine's return_layernorm_output_gathered, which user buffers cannot do).
    """
    feeds = any(product.name in targets for product in exchange.beside)
    if exchange.for_weight and (splits or not feeds):
        return
    beside = tuple(replace(product, trained=False) for product in exchange.beside)
    if splits and feeds and exchange.kind == "all_gather" and not exchange.backward:
        yield replace(exchange, beside=beside, cast=False, overlap="none")
        return
    yield replace(exchange, beside=beside)


_OPERATORS = {
    "q_proj": ("q", "qkv"), "k_proj": ("k", "qkv"), "v_proj": ("v", "qkv"), "o_proj": ("attention output",),
    "q_a_proj": ("q down",), "q_b_proj": ("q up",), "kv_a_proj_with_mqa": ("kv down",), "kv_b_proj": ("kv up",),
    "in_proj": ("mamba in", "convolution in"), "out_proj": ("mamba out", "convolution out"),
    "gate_proj": ("mlp gate", "shared_experts gate"), "up_proj": ("mlp up", "shared_experts up"),
    "down_proj": ("mlp down", "shared_experts down"),
    "experts.gate_up_proj": ("experts up",), "experts.down_proj": ("experts down",), "lm_head": ("head",),
}  # fmt: skip
"""The products that each target of an adapter is. Where query, key and value are one product, or gate and up, one
adapter of its width stands beside it."""
OF_ADAPTERS = (" adapter", " lora_A", " lora_B")
"""Ends of the names of what stands beside a frozen product."""
_FUSED = {"gate_proj": ("mlp up", "shared_experts up")}


def adapted(
    items: Sequence[Item], adapters: AdapterSpec | None, runtime: RuntimeSpec, shape: Shape | None = None
) -> tuple[Item, ...]:
    """The items of a part with frozen weights, and adapters beside the targets; the items themselves without any.

    `shape` says over how many ranks adapters are split; given none, they are whole.
    """
    if adapters is None:
        return tuple(items)
    targets = _targets(adapters, runtime, {item.name for item in items})
    copied = runtime.adapter_copies_input or adapters.dropout > 0
    read = frozenset[int]() if copied else _read_by_adapters(items, targets)
    split = runtime.splits_adapters
    each = (
        frozen_exchange(item, targets, split)
        if isinstance(item, Collective)
        else _adapted(item, index in read, targets, adapters, runtime, shape if split else None)
        for index, item in enumerate(items)
    )
    return tuple(chain.from_iterable(each))


def without_adapters(items: Sequence[Item]) -> tuple[Item, ...]:
    """The items of a part without the products and the copies of its adapters: as a reference model has them."""
    return tuple(item for item in items if not item.name.endswith(OF_ADAPTERS))


def _targets(adapters: AdapterSpec, runtime: RuntimeSpec, names: set[str]) -> frozenset[str]:
    """Names of the products with an adapter among operators of these names."""
    fused = {} if names.intersection(_OPERATORS["gate_proj"]) else _FUSED
    named = {*adapters.modules, *(EXPERTS if runtime.adapts_experts and adapters.adapts_mlps else ())}
    return frozenset(name for module in named for name in fused.get(module, _OPERATORS[module]))


def _read_by_adapters(items: Sequence[Item], targets: frozenset[str]) -> frozenset[int]:
    """Places of the operators whose kept output is the input of a target.

    A product that keeps its input itself is its own reader. What any other operator keeps for products is read by those
    behind it, up to the next operator that keeps an input.
    """
    read: set[int] = set()
    maker: int | None = None
    for index, item in enumerate(items):
        if isinstance(item, Collective):
            continue
        if any(tensor.is_cast for tensor in item.saved):
            maker = index
        if maker is not None and item.kind == "gemm" and item.name in targets:
            read.add(maker)
    return frozenset(read)


def _adapted(
    item: Operator, is_read: bool, targets: frozenset[str], adapters: AdapterSpec, runtime: RuntimeSpec,
    shape: Shape | None,
) -> Iterator[Item]:  # fmt: skip
    kept = [tensor for tensor in item.saved if not tensor.for_weight and (is_read or not tensor.is_cast)]
    # an adapter reads its input in 16 bits, and what keeps the input keeps it so
    kept = [tensor._replace(gemm_input=False) for tensor in kept if not tensor.cast_copy]
    is_packed = item.is_cast and adapters.base_bits < 16
    stays_wide = is_packed and item.expert and not runtime.packs_experts
    frozen = replace(item, trained=False, saved=tuple(kept), wide=item.wide or stays_wide)
    if item.family in ("embedding", "bias"):
        frozen = replace(frozen, backward_bytes=0)
    if is_packed and not stays_wide:
        yield _unpacked(item, runtime)
    if item.kind != "gemm" or item.name not in targets:
        yield frozen
        return
    yield frozen if shape is None else replace(frozen, input_shards=1)
    parts = Shares.of(item, adapters, shape)
    yield from _adapter(item, adapters, runtime, parts)
    yield from parts.exchanges(item, runtime)


def _unpacked(product: Operator, runtime: RuntimeSpec) -> Operator:
    """Turns a weight of 8 or 4 bits into 16 bits, before the product of the forward and that of the input gradient."""
    moved = (runtime.frozen_weight_bytes + BF16) * product.count * product.n * product.k
    return Operator(
        name=f"{product.name} dequantize", kind="elementwise", family="copy", modules=product.modules,
        forward_bytes=moved, backward_bytes=moved, forward_kernels=1, backward_kernels=1, working_bytes=0,
    )  # fmt: skip


def _adapter(product: Operator, adapters: AdapterSpec, runtime: RuntimeSpec, parts: Shares) -> Iterator[Operator]:
    """The two products of an adapter, and what goes around them: casts of the input, dropout, scale and sum."""
    rank, rows, modules = adapters.rank, product.count * product.m, product.modules
    inputs, outputs = rows * product.k, rows * product.n / parts.outputs
    copies, drops = runtime.adapter_copies_input, adapters.dropout > 0
    # copied: to the adapter's fp32, and back to 16 bits where the product is cast (torch.autocast)
    copied = 2 * (BF16 + FP32) * inputs * copies
    kept = [Saved("adapter input", (rows, product.k), modules)] if copies or drops else []
    if parts.inputs is not None and not kept:
        # beside the shard, which whatever made it keeps
        kept.append(Saved("adapter input", (rows * (1 - 1 / parts.inputs), product.k), modules))
    if drops and not runtime.recomputes_adapter_masks:
        kept.append(Saved("adapter dropout mask", (rows, product.k), modules, dtype="uint8"))
    yield Operator(
        name=f"{product.name} adapter", kind="elementwise", family="copy", modules=modules, trained=False,
        # the adapter's output is scaled (one read, one write) and added (two reads, one write); dropout reads, writes
        # and writes its mask. Backward: the scale, the mask, and the sum of both input gradients
        forward_bytes=copied + 5 * BF16 * outputs + 2.5 * BF16 * inputs * drops,
        backward_bytes=copied + 2 * BF16 * outputs + (3 + 2.5 * drops) * BF16 * inputs,
        forward_kernels=2 + 2 * copies + drops, backward_kernels=2 + 2 * copies + drops,
        saved=tuple(kept), working_bytes=BF16 * (inputs + outputs),
    )  # fmt: skip
    for name, n, k in (("lora_A", rank / parts.down, product.k), ("lora_B", product.n / parts.up, rank)):
        hidden = [Saved("adapter hidden", (rows, rank), modules)] if name == "lora_B" else []
        cast = [Saved("weight in 16 bits", (product.count * n, k), modules)] if runtime.adapter_weights_cast else []
        yield Operator(
            name=f"{product.name} {name}", kind="gemm", modules=modules, wide=True, count=product.count, m=product.m,
            n=n, k=k, parameters=product.count * n * k, expert=product.expert,
            saved=(*hidden, *cast),
        )  # fmt: skip
