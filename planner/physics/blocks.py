"""What both halves of a decoder layer are made of: exchanges at their ends, norms, residuals, copies, rotations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from planner.physics.operators import BF16, FP32, Collective, Item, Operator, Saved
from planner.shape import Number, Shape
from planner.specs.model import ModelSpec
from planner.trainers.spec import RuntimeSpec


def enter_tp(
    name: str,
    products: Sequence[Operator],
    num_bytes: Number,
    shape: Shape,
    runtime: RuntimeSpec,
    modules: tuple[str, ...] = (),
) -> Iterator[Item]:
    """Column-parallel products of one input of `num_bytes`, and its exchanges, sent as the products take it.

    Sequence parallel: gathered in forward; in backward gathered again for the wgrad, beside the dgrad, unless the whole
    was kept, and the dgrad reduce-scattered beside the wgrad. Else: the dgrad is all-reduced beside the wgrad.
    """
    sharded, whole = num_bytes * shape.sequence_parallel, num_bytes * (1 - shape.sequence_parallel)
    products = [replace(product, input_shards=shape.sequence_shards) for product in products]
    beside, cast = tuple(products), products[0].is_cast
    keeps = runtime.keeps_gathered_inputs
    again = (*modules, "op") if keeps else modules
    gather = Collective(
        name=f"{name} gather", kind="all_gather", group="tp", num_bytes=sharded, modules=again, cast=cast,
        overlap="tp", beside=beside,
    )  # fmt: skip
    yield gather
    if keeps:
        # beside the shard, which whatever made it keeps
        others = sharded * (1 - 1 / shape.tp)
        kept = Saved("gathered input", others, again, gemm_input=cast)
        yield Operator(name=f"{name} gathered", kind="elementwise", modules=again, saved=(kept,))
    else:
        yield replace(
            gather, name=f"{name} gather again", backward=True, modules=(), overlap="tp_async", beside_pass="dgrad_s"
        )
    scatter = Collective(
        name=f"{name} dgrad scatter", kind="reduce_scatter", group="tp", num_bytes=sharded, backward=True,
        overlap="tp_async", beside=beside, beside_pass="wgrad_s",
    )  # fmt: skip
    yield scatter
    yield replace(scatter, name=f"{name} dgrad reduce", kind="all_reduce", num_bytes=whole)
    yield from products


def leave_tp(product: Operator, num_bytes: Number, shape: Shape, modules: tuple[str, ...] = ()) -> Iterator[Item]:
    """A row-parallel product, or a lookup in rows, and the exchanges of its output of `num_bytes`.

    Sequence parallel: reduce-scattered in forward, its gradient gathered in backward. Else one all-reduce. That, and
    those of a lookup, are waited for.
    """
    sharded, whole = num_bytes * shape.sequence_parallel, num_bytes * (1 - shape.sequence_parallel)
    product = replace(product, gradient_shards=shape.sequence_shards)
    scatter = Collective(
        name=f"{product.name} scatter", kind="reduce_scatter", group="tp", num_bytes=sharded, modules=modules,
        overlap="tp" if product.kind == "gemm" else "none", beside=(product,),
    )  # fmt: skip
    yield product
    yield scatter
    yield Collective(name=f"{product.name} reduce", kind="all_reduce", group="tp", num_bytes=whole, modules=modules)
    yield replace(
        scatter, name=f"{product.name} grad gather", kind="all_gather", backward=True, modules=(),
        beside_pass="dgrad_s", cast=product.is_cast,
    )  # fmt: skip


def bias_gradients(name: str, widths: Sequence[Number], shape: Shape, runtime: RuntimeSpec) -> Iterator[Operator]:
    """Sums over tokens of output gradients, one for each product with a bias and so many columns."""
    if runtime.fused_bias_gradients or not widths:
        return
    yield Operator(
        name=f"{name} bias gradients",
        kind="elementwise",
        family="bias",
        backward_bytes=BF16 * shape.tokens * sum(widths),
        backward_kernels=len(widths),
        working_bytes=0,
    )


def local_copies(
    name: str, num_bytes: Number, shape: Shape, runtime: RuntimeSpec, modules: tuple[str, ...] = ()
) -> Iterator[Operator]:
    """Eager: what a half block's sequence-parallel exchanges of `num_bytes` pass through this rank's own memory.

    Forward: the gather writes the whole, the scatter cuts the shard out. Backward: the gather again, dgrad's shard cut
    out, and the output's gradient put back into the whole.
    """
    if runtime.fused_rotary:
        return
    whole = num_bytes * shape.sequence_parallel
    shard = whole / shape.tp
    yield Operator(
        name=name,
        kind="elementwise",
        family="copy",
        modules=modules,
        forward_bytes=whole + 3 * shard,
        backward_bytes=2 * whole + 5 * shard,
        forward_kernels=2,
        backward_kernels=4,
    )


def norm(
    name: str, width: Number, tokens: Number, model: ModelSpec, runtime: RuntimeSpec,
    saves_output: bool = True, saves_input: bool = True, output_is_cast: bool = True, module: str = "",
) -> Operator:  # fmt: skip
    """RMSNorm or LayerNorm over `width` features of `tokens` rows; keeps its input, its statistics and its output.

    Forward reads and writes once; backward reads input and gradient and writes one (eager torch reads both again for
    the weight's gradient). Unfused, each pass is made twice. `module` is what Megatron-LM recomputes it with: where the
    norm is part of the product behind it, that product's; by itself, `layernorm`; else only torchtitan's `op` does.
    """
    modules = (module, "op") if module else ("op",)
    num_bytes = BF16 * tokens * width
    # unfused: cast to fp32, square, mean, scale, cast back, weight
    passes, kernels = (1, 1) if runtime.fused_norm else (9, 6)
    statistics = FP32 * tokens * (2 if model.norm == "layernorm" else 1)
    saved = [Saved("statistics", statistics)]
    if saves_input:
        saved.append(Saved("input", num_bytes))
    if saves_output:
        saved.append(Saved("output", num_bytes, modules, gemm_input=output_is_cast))
    return Operator(
        name=name,
        kind="elementwise",
        family="norm",
        modules=modules,
        forward_bytes=2 * num_bytes * passes,
        backward_bytes=(3 if runtime.fused_rotary else 5) * num_bytes * passes,
        forward_kernels=kernels,
        backward_kernels=2 * kernels,
        parameters=width * (2 if model.has_norm_bias else 1),
        saved=tuple(saved),
    )


def cast_copy(name: str, num_bytes: Number, modules: tuple[str, ...] = ()) -> Operator:
    """What a narrow product keeps of an input of `num_bytes` that others keep too; its cast is part of the product."""
    return Operator(
        name=f"{name} cast", kind="elementwise", modules=modules,
        saved=(Saved("cast input", num_bytes, modules, cast_copy=True),),
    )  # fmt: skip


def residual(name: str, width: Number, tokens: Number, runtime: RuntimeSpec) -> Operator:
    """x + f(x): reads two, writes one; backward adds the two branches' gradients.

    Dropout keeps one byte an element, which forward writes and backward reads, masking the branch's gradient.
    """
    num_bytes = BF16 * tokens * width
    return Operator(
        name=name,
        kind="elementwise",
        family="residual",
        forward_bytes=(3.5 if runtime.dropout else 3) * num_bytes,
        backward_bytes=(5.5 if runtime.dropout else 3) * num_bytes,
        forward_kernels=1,
        backward_kernels=1,
        saved=(Saved("dropout mask", tokens * width),) if runtime.dropout else (),
    )


def rotary(width: Number, tokens: Number, runtime: RuntimeSpec, modules: tuple[str, ...]) -> Operator:
    """Rotary embedding of `width` query and key features a token.

    Fused: one kernel that reads and writes. Eager: neg, cat, two mul and an add (ten passes in all), for q and for k,
    on views of the QKV buffer.
    """
    num_bytes = BF16 * tokens * width
    fused = runtime.fused_rotary or runtime.compiled
    passes, kernels = (2, 1) if fused else (10, 10)
    return Operator(
        name="rotary",
        kind="elementwise",
        family="rotary" if fused else "strided",
        modules=modules,
        forward_bytes=passes * num_bytes,
        backward_bytes=passes * num_bytes,
        forward_kernels=kernels,
        backward_kernels=kernels,
    )
