"""Frozen weights and the adapters beside them: the operators of a part, as LoRA or QLoRA trains them.

A frozen product has no weight gradient, and nothing is kept for one. Each target gets two small products beside it,
x[m, k] · A[k, r] and the result times B[r, n], which are trained. A frozen weight of 8 or 4 bits is turned into 16 bits
before each of its products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from planner.physics.adapter_split import Split, frozen_exchange
from planner.physics.operators import BF16, FP32, Collective, Item, Operator, Saved
from planner.shape import Shape
from planner.specs.training import AdapterSpec
from planner.trainers.spec import RuntimeSpec

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
    targets = _targets(adapters, runtime)
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


def _targets(adapters: AdapterSpec, runtime: RuntimeSpec) -> frozenset[str]:
    """Names of the products with an adapter."""
    fused = _FUSED if runtime.fused_projections else {}
    return frozenset(name for module in adapters.modules for name in fused.get(module, _OPERATORS[module]))


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
    frozen = replace(item, trained=False, saved=tuple(kept))
    if item.family in ("embedding", "bias"):
        frozen = replace(frozen, backward_bytes=0)
    is_packed = item.is_cast and adapters.base_bits < 16
    if is_packed:
        yield _unpacked(item, runtime)
    if item.kind != "gemm" or item.name not in targets:
        yield frozen
        return
    yield frozen if shape is None else replace(frozen, input_shards=1)
    parts = Split.of(item, adapters, shape)
    yield from _adapter(item, adapters, runtime, parts)
    yield from parts.exchanges(item, runtime)


def _unpacked(product: Operator, runtime: RuntimeSpec) -> Operator:
    """Turns a weight of 8 or 4 bits into 16 bits, before the product of the forward and that of the input gradient."""
    moved = (runtime.frozen_weight_bytes + BF16) * product.count * product.n * product.k
    return Operator(
        name=f"{product.name} dequantize", kind="elementwise", family="copy", modules=product.modules,
        forward_bytes=moved, backward_bytes=moved, forward_kernels=1, backward_kernels=1, working_bytes=0,
    )  # fmt: skip


def _adapter(product: Operator, adapters: AdapterSpec, runtime: RuntimeSpec, parts: Split) -> Iterator[Operator]:
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
