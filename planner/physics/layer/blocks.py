"""The parts that both halves of a decoder layer share: exchanges at their ends, norms, residuals, copies, rotations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from planner.physics.operators import BF16, FP32, Collective, Item, Operator, Saved, matmul
from planner.shape import Number, Shape
from planner.specs.model import ModelSpec
from planner.trainers.spec import RuntimeSpec


def enter_tp(
    name: str,
    products: Sequence[Operator],
    width: Number,
    shape: Shape,
    runtime: RuntimeSpec,
    modules: tuple[str, ...] = (),
) -> Iterator[Item]:
    """Column-parallel products of one input of `width` features a token, and the exchanges of this input.

    The input is sent in the dtype in which the products read it. Under sequence parallelism it is gathered in the
    forward. In the backward it is gathered again for the wgrad, while the dgrad runs, unless the gathered input was
    kept; and the dgrad is reduce-scattered while the wgrad runs. Without sequence parallelism the dgrad is all-reduced
    while the wgrad runs.
    """
    num_bytes = BF16 * shape.tokens * width
    sharded, unsharded = num_bytes * shape.sequence_parallel, num_bytes * (1 - shape.sequence_parallel)
    shards = shape.sequence_shards
    products = [one if _same(one.input_shards, shards) else replace(one, input_shards=shards) for one in products]
    beside, cast = tuple(products), products[0].is_cast
    keeps = runtime.keeps_gathered_inputs
    again = (*modules, "op") if keeps else modules
    yield Collective(
        name=f"{name} gather", kind="all_gather", group="tp", num_bytes=sharded, modules=again, cast=cast,
        overlap="tp", beside=beside,
    )  # fmt: skip
    if keeps:
        # beside the shard, which whatever made it keeps
        others = shape.tokens * shape.sequence_parallel * (1 - 1 / shape.tp)
        kept = Saved("gathered input", (others, width), again, gemm_input=cast)
        yield Operator(name=f"{name} gathered", kind="elementwise", modules=again, saved=(kept,))
    else:
        yield Collective(
            name=f"{name} gather again", kind="all_gather", group="tp", num_bytes=sharded, cast=cast, backward=True,
            overlap="tp_async", beside=beside, beside_pass="dgrad_s", for_weight=True,
        )  # fmt: skip
    yield from gradient_sums(name, len(products), num_bytes, runtime, modules)
    yield Collective(
        name=f"{name} dgrad scatter", kind="reduce_scatter", group="tp", num_bytes=sharded, backward=True,
        overlap="tp_async", beside=beside, beside_pass="wgrad_s",
    )  # fmt: skip
    yield Collective(
        name=f"{name} dgrad reduce", kind="all_reduce", group="tp", num_bytes=unsharded, backward=True,
        overlap="tp_async", beside=beside, beside_pass="wgrad_s",
    )  # fmt: skip
    yield from products


def gradient_sums(
    name: str, readers: int, num_bytes: Number, runtime: RuntimeSpec, modules: tuple[str, ...] = ()
) -> Iterator[Operator]:
    """The sums of the gradients that the readers of one input of `num_bytes` give, which autograd adds one by one.

    Counted where transformers' own code was traced; what was measured of other trainers has them in its factors.
    """
    if readers > 1 and runtime.runs_as_traced:
        yield Operator(
            name=f"{name} gradient sums", kind="elementwise", family="residual", modules=modules,
            backward_bytes=3 * (readers - 1) * num_bytes, backward_kernels=readers - 1, working_bytes=0,
        )  # fmt: skip


def leave_tp(product: Operator, num_bytes: Number, shape: Shape, modules: tuple[str, ...] = ()) -> Iterator[Item]:
    """A row-parallel product, or a lookup in rows, and the exchanges of its output of `num_bytes`.

    Under sequence parallelism the output is reduce-scattered in the forward, and its gradient gathered in the backward.
    Without it the output is all-reduced. Nothing hides this all-reduce, nor the exchanges of a lookup.
    """
    sharded, unsharded = num_bytes * shape.sequence_parallel, num_bytes * (1 - shape.sequence_parallel)
    shards = shape.sequence_shards
    product = product if _same(product.gradient_shards, shards) else replace(product, gradient_shards=shards)
    overlap: Literal["tp", "none"] = "tp" if product.kind == "gemm" else "none"
    yield product
    yield Collective(
        name=f"{product.name} scatter", kind="reduce_scatter", group="tp", num_bytes=sharded, modules=modules,
        overlap=overlap, beside=(product,),
    )  # fmt: skip
    yield Collective(name=f"{product.name} reduce", kind="all_reduce", group="tp", num_bytes=unsharded, modules=modules)
    yield Collective(
        name=f"{product.name} grad gather", kind="all_gather", group="tp", num_bytes=sharded, backward=True,
        overlap=overlap, beside=(product,), beside_pass="dgrad_s", cast=product.is_cast,
    )  # fmt: skip


def _same(first: Number, second: Number) -> bool:
    """True for one number that is the other."""
    return isinstance(first, int) and isinstance(second, int) and first == second


def bias_gradients(name: str, widths: Sequence[Number], shape: Shape, runtime: RuntimeSpec) -> Iterator[Operator]:
    """Sums of output gradients over tokens, one for each product with a bias; `widths` are the products' columns."""
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
    """Copies in a rank's own memory that eager torch makes for the sequence-parallel exchanges of half a layer.

    Each exchange is of `num_bytes`. In the forward the gather writes the whole tensor, and the scatter cuts the shard
    out of it. In the backward the gather runs again, the dgrad's shard is cut out, and the shards of the output's
    gradient are put together to a whole tensor.
    """
    if runtime.fused_rotary:
        return
    gathered = num_bytes * shape.sequence_parallel
    shard = gathered / shape.tp
    backward_bytes, copies = 2 * gathered + 5 * shard, 1.0 * runtime.copies_exchanged
    yield Operator(
        name=name,
        kind="elementwise",
        family="copy",
        modules=modules,
        forward_bytes=copies * (gathered + 3 * shard),
        backward_bytes=copies * backward_bytes,
        forward_kernels=2,
        backward_kernels=4,
        working_bytes=2 / 3 * backward_bytes,  # tensors of that size there are in any case
    )


def norm(
    name: str, width: Number, tokens: Number, model: ModelSpec, runtime: RuntimeSpec,
    saves_output: bool = True, saves_input: bool = True, output_is_cast: bool = True, module: str = "",
    input_modules: tuple[str, ...] = (),
) -> Operator:  # fmt: skip
    """RMSNorm or LayerNorm over `width` features of `tokens` rows; keeps its input, its statistics and its output.

    The forward reads the input and writes the output. The backward reads input and gradient and writes a gradient
    (eager torch reads both again for the weight's gradient). An unfused norm is six kernels that make nine such
    passes; those of transformers move the rows 18 and 48 times, 20 and 54 where its weight multiplies in fp32.
    `module` is the module that Megatron-LM recomputes together with the norm: where the norm is part of the product
    behind it, that product's module; where the norm stands by itself, `layernorm`; where it is empty, only torchtitan's
    `op` recomputes the norm. `input_modules` are those that recompute what it reads.
    """
    modules = (module, "op") if module else ("op",)
    num_bytes = BF16 * tokens * width
    wide = model.zero_centered_norm if model.norm_in_fp32 is None else model.norm_in_fp32
    forward, backward, kernels = 2, 3 if runtime.fused_rotary else 5, 1
    if not runtime.fused_norm and model.norm != "layernorm":  # torch itself has one kernel for a LayerNorm
        # cast to fp32, square, mean, scale, cast back, weight
        forward, backward, kernels = 18, 9 * backward, 6
        if runtime.runs_as_traced:
            forward, backward = 18 + 2 * wide, 48 + 6 * wide
    saved = [Saved("statistics", (2 if model.norm == "layernorm" else 1, tokens), dtype="fp32")]
    if runtime.copies_norm_input and not runtime.fused_norm and model.norm == "rmsnorm":
        # the input in fp32, and the normalized rows before their weight
        rows = Saved("normalized", (tokens, width), for_weight=True, dtype="fp32" if wide else "bf16")
        saved += [Saved("input", (tokens, width), dtype="fp32"), rows]
    elif saves_input:
        saved.append(Saved("input", (tokens, width), input_modules))
    if saves_output:
        saved.append(Saved("output", (tokens, width), modules, gemm_input=output_is_cast))
    return Operator(
        name=name,
        kind="elementwise",
        family="norm",
        modules=modules,
        forward_bytes=forward * num_bytes,
        backward_bytes=backward * num_bytes,
        forward_kernels=kernels,
        backward_kernels=2 * kernels,
        parameters=width * (0 if not model.norm_weight else 2 if model.has_norm_bias else 1),
        saved=tuple(saved),
    )


def enter_half(
    name: str, model: ModelSpec, shape: Shape, runtime: RuntimeSpec, output_is_cast: bool = True, module: str = "",
    saves_input: bool = True,
) -> Iterator[Operator]:  # fmt: skip
    """The norm before half a layer; where there is none, the input itself, which the first products keep.

    An input that the other half's norm keeps is kept once (`saves_input`).
    """
    if model.num_residual_streams > 1:
        yield from gather_streams(name, model, shape, runtime)
    if model.attn_res_block_size is not None:
        yield attend_snapshots(name, model, shape, runtime)
    if model.pre_norms:
        yield norm(
            f"{name} norm", model.hidden_size, shape.shard_tokens, model, runtime,
            output_is_cast=output_is_cast, module=module, saves_input=saves_input,
            # experts read a sum whose last term `op` computes again
            input_modules=() if output_is_cast else ("op",),
        )  # fmt: skip
        if model.norm_gate_rank is not None and (name == "attention" or not output_is_cast):
            yield from _norm_gate(name, model.norm_gate_rank, model, shape, runtime)
        return
    kept = Saved("input", (shape.shard_tokens, model.hidden_size), gemm_input=output_is_cast)
    yield Operator(name=f"{name} input", kind="elementwise", saved=(kept,))


def _norm_gate(name: str, rank: int, model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Operator]:
    """A norm's output times a sigmoid of it, projected to a low rank, activated and projected back."""
    tokens, hidden = shape.shard_tokens, model.hidden_size
    both = (Saved("activated", (2, tokens, rank)),), (Saved("sigmoid", (tokens, hidden), dtype="fp32"),)
    for part, columns, inputs, kept in (("down", rank, hidden, both[0]), ("up", hidden, rank, both[1])):
        yield Operator(
            name=f"{name} norm gate {part}", kind="gemm", m=tokens, n=columns, k=inputs, parameters=hidden * rank,
            saved=kept,
        )  # fmt: skip
    gate = _passes(f"{name} norm gate", (2 * hidden, hidden), shape, runtime)
    yield replace(gate, forward_kernels=2, backward_kernels=4, saved=(Saved("gated", (tokens, hidden)),))


def leave_half(
    name: str, model: ModelSpec, shape: Shape, runtime: RuntimeSpec, adds: bool = True, terms: int = 2
) -> Iterator[Operator]:
    """The norm behind half a layer, if there is one, and the sum with the residual stream, if this half adds it."""
    if model.post_norms:
        yield norm(f"{name} post norm", model.hidden_size, shape.shard_tokens, model, runtime, saves_output=False)
    if model.num_residual_streams > 1:
        yield spread_streams(name, model, shape, runtime)
    elif adds:
        drops = model.residual_dropout and runtime.runs_transformers
        yield residual(f"{name} residual", model.hidden_size, shape.shard_tokens, runtime, terms, drops)


def cast_copy(name: str, dims: tuple[Number, ...], modules: tuple[str, ...] = ()) -> Operator:
    """The cast copy that a narrow product keeps of an input of `dims`, which other operators keep without a cast.

    The seconds of the cast are counted with the product.
    """
    return Operator(
        name=f"{name} cast", kind="elementwise", modules=modules,
        saved=(Saved("cast input", dims, modules, cast_copy=True),),
    )  # fmt: skip


def residual(
    name: str, width: Number, tokens: Number, runtime: RuntimeSpec, terms: int = 2, drops: bool = False
) -> Operator:
    """The sum x + f(x), which reads two tensors and writes one; the backward adds the two branches' gradients.

    A layer whose attention and MLP run side by side has one sum of three `terms`.

    Dropout keeps a mask of one byte an element: the forward writes it, and the backward reads it and masks the branch's
    gradient.
    """
    num_bytes, drops = BF16 * tokens * width, drops or runtime.dropout
    return Operator(
        name=name,
        kind="elementwise",
        family="residual",
        forward_bytes=(terms + (1.5 if drops else 1)) * num_bytes,
        backward_bytes=(terms + (3.5 if drops else 1)) * num_bytes,
        forward_kernels=1,
        backward_kernels=1,
        saved=(Saved("dropout mask", (tokens, width), dtype="uint8"),) if drops else (),
    )


def rotary(
    width: Number, tokens: Number, runtime: RuntimeSpec, modules: tuple[str, ...], scales: bool = False,
    wide: bool = False,
) -> Operator:  # fmt: skip
    """Rotary embedding of `width` query and key features a token.

    Where it is fused, one kernel reads and writes. Eager torch runs neg, cat, two mul and an add (ten passes in all),
    for q and for k, on views of the QKV buffer. Transformer Engine's kernel does not scale what it rotates: where yarn
    `scales` queries and keys, Megatron-Core rotates in eager torch. Where transformers casts to fp32 and back (`wide`),
    it moves the bytes of 22 passes, and of 25 backward, as torch's trace has it.
    """
    num_bytes = BF16 * tokens * width
    fused = runtime.compiled or (runtime.fused_rotary and not scales)
    passes, backward, kernels = (2, 2, 1) if fused else (10, 10, 10)
    if wide and not fused and runtime.runs_as_traced:
        passes, backward, kernels = 22, 25, 13
    return Operator(
        name="rotary",
        kind="elementwise",
        family="rotary" if fused else "strided",
        modules=modules,
        forward_bytes=passes * num_bytes,
        backward_bytes=backward * num_bytes,
        forward_kernels=kernels,
        backward_kernels=kernels,
    )


def is_packed(part: Literal["attention", "mlp"], model: ModelSpec, runtime: RuntimeSpec) -> bool:
    """True where the projections of half a layer are one product: the trainer's way, or the model's in transformers."""
    return runtime.fused_projections or (runtime.runs_transformers and model.packed_projections in (part, "all"))


def dense_mlp(model: ModelSpec, intermediate: int, shape: Shape, runtime: RuntimeSpec, module: str) -> Iterator[Item]:
    """Up (and gate) projection, activation, down projection, sharded over tp."""
    tokens, hidden, width = shape.tokens, model.hidden_size, intermediate / shape.tp
    factor = 2 if model.gated_mlp else 1
    modules = (module,)
    apart = model.gated_mlp and not is_packed("mlp", model, runtime)
    products = []
    for name in ("gate", "up") if apart else ("up",):
        columns = width if apart else factor * width
        # recomputing every other product recomputes this one
        again = (*modules, "op") if apart and name == "up" else modules
        product = Operator(
            name=f"{module} {name}",
            kind="gemm",
            modules=again,
            m=tokens,
            n=columns,
            k=hidden,
            parameters=columns * (hidden + model.has_mlp_bias),
            takes_cast_gradient=runtime.fuses_mlp,
            saved=(Saved(name, (tokens, columns), again, dtype="uint8" if runtime.narrow_activations else "bf16"),),
        )
        products.append(product)
    yield from enter_tp(f"{module} up", products, hidden, shape, runtime, modules)
    yield activation_of(
        f"{module} activation", model, tokens, width, runtime, modules, apart and runtime.runs_as_traced
    )
    down = Operator(
        name=f"{module} down",
        kind="gemm",
        modules=modules,
        m=tokens,
        n=hidden,
        k=width,
        takes_cast_input=runtime.fuses_mlp,
        parameters=hidden * (width + model.has_mlp_bias),
    )
    yield from leave_tp(down, BF16 * tokens * hidden, shape, modules)
    if model.has_mlp_bias:
        yield from bias_gradients(module, [factor * width, hidden], shape, runtime)
    yield from local_copies(f"{module} copies", BF16 * tokens * hidden, shape, runtime, modules)


def square(model: ModelSpec, shape: Shape) -> Iterator[Item]:
    """One square matrix in the place of half a layer (Nemotron-NAS), of which a tensor-parallel rank has its share."""
    rows, hidden = model.hidden_size / shape.tp, model.hidden_size
    product = matmul("linear", shape.tokens, hidden, rows)
    yield from leave_tp(product, BF16 * shape.tokens * hidden, shape)


def per_layer_input(model: ModelSpec, size: int, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """The part of a layer's own embedding that it adds: gated by the stream, projected, normed; whole on every rank."""
    hidden, tokens = model.hidden_size, shape.shard_tokens
    kept = tuple(Saved(name, (tokens, width)) for name, width in (("input", hidden), ("gate", size)))
    yield matmul("layer input gate", tokens, size, hidden, *kept)
    yield activation_of("layer input", model, tokens, size, runtime, ())
    yield matmul("layer input up", tokens, hidden, size)
    yield norm("layer input norm", hidden, tokens, model, runtime, saves_output=False)
    yield residual("layer input residual", hidden, tokens, runtime)


def activation_of(
    name: str, model: ModelSpec, rows: Number, width: Number, runtime: RuntimeSpec, modules: tuple[str, ...],
    apart: bool = False,
) -> Operator:  # fmt: skip
    """The activation act(gate)·up or act(x), which gives `width` features of `rows`.

    It keeps its output, and act(gate) where activation and product are not fused. Gate and up are tensors of their own
    where they lie `apart`, else views of one buffer, in which the backward joins their gradients.
    """
    modules = (*modules, "op")
    saved = [Saved("activation", (rows, width), modules, gemm_input=True)]
    num_bytes = saved[0].num_bytes
    fused = runtime.fused_activation or runtime.compiled
    if not model.gated_mlp and model.activation == "relu2" and not fused:
        # relu, then its square; backward: three kernels for the square, one for relu
        passes, backward, kernels = (4, 10, 2)
    elif not model.gated_mlp:
        passes, backward, kernels = (2, 3, 1)
    elif fused:
        passes, backward, kernels = (3, 5, 1)
    else:
        # silu (read, write) and product (two reads, write); backward: two products, silu's gradient, the concatenation
        passes, backward, kernels = (5, 9 if apart else 13, 2)
        saved.append(Saved("activated gate", (rows, width), modules))
    # x · sigmoid(1.702·x) in three kernels
    sigmoid = (Saved("sigmoid", (rows, width), modules),) * (model.activation == "quick_gelu" and runtime.is_runner)
    return Operator(
        name=name,
        kind="elementwise",
        family="strided" if len(saved) > 1 and not apart else "activation",
        modules=modules,
        forward_bytes=passes * num_bytes,
        backward_bytes=backward * num_bytes,
        forward_kernels=kernels,
        backward_kernels=2 * kernels,
        # the two learned numbers of xIELU
        parameters=2 if model.activation == "xielu" else 0,
        saved=(*saved, *sigmoid),
        # gradients of gate and up, and the buffer they are joined in, as what the product kept goes
        working_bytes=2 * num_bytes if len(saved) > 1 else None,
    )


SINKHORN_KERNELS = 2 * 20 * 2
"""Kernels that 20 rounds of normalizing rows and columns are where nothing fuses them: a sum and a division each."""


def _featurewise(
    name: str, rank: int, parameters: Number, model: ModelSpec, shape: Shape, runtime: RuntimeSpec
) -> Iterator[Operator]:
    """The mean of the normed streams, each feature weighted by a sigmoid of all of them through a low rank."""
    tokens, width = shape.shard_tokens, model.num_residual_streams * model.hidden_size
    yield replace(norm(f"{name} streams norm", width, tokens, model, runtime), parameters=parameters)
    for part, columns, inputs, kept in (("down", rank, width, 2 * rank), ("up", width, rank, width)):
        yield Operator(
            name=f"{name} maps {part}", kind="gemm", m=tokens, n=columns, k=inputs, parameters=width * rank,
            saved=(Saved(part, (tokens, kept)),),
        )  # fmt: skip
    yield _passes(f"{name} streams in", (2 * width, model.hidden_size), shape, runtime)


def ngrams(size: int, model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Operator]:
    """Embeddings of n-grams, whose projected values every stream adds through a gate (DeepSeek-V4.1).

    Qwen4 norms the values too, and passes them through a convolution.
    """
    tokens, hidden = shape.shard_tokens, model.hidden_size
    width, moved = model.num_residual_streams * hidden, BF16 * tokens * size
    yield Operator(
        name="n-gram embeddings", kind="elementwise", family="embedding", forward_bytes=2 * moved,
        backward_bytes=2 * moved, forward_kernels=2, backward_kernels=3, parameters=model.ngram_parameters / shape.tp,
    )  # fmt: skip
    columns = width + hidden
    yield matmul(
        "n-gram keys, values",
        tokens,
        columns,
        size,
        Saved("embeddings", (tokens, size)),
        Saved("values", (tokens, hidden)),
    )
    for name in ("key", "query") if model.stream_rank is None else ("key", "query", "value"):
        yield norm(f"n-gram {name} norm", width, tokens, model, runtime)
    gates = _passes("n-gram gates", (4 * width, 2 * width), shape, runtime)
    yield replace(gates, saved=(Saved("convolved", (tokens, width)),))


def gather_streams(name: str, model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> tuple[Operator, ...]:
    """The maps of a half layer, and the sum of n streams that it reads.

    The maps are n weights before, n behind and n² across: a product of all streams, normed, in fp32, by n·h × (2 + n)·n
    weights, a number and a factor for each kind of map; the n², which some models have not, are made doubly stochastic.
    """
    streams, tokens = model.num_residual_streams, shape.shard_tokens
    width, kinds = streams * model.hidden_size, 2 + model.mixes_streams
    if model.stream_rank is not None:
        back = matmul(f"{name} maps back", tokens, streams, width)
        return (*_featurewise(name, model.stream_rank, width, model, shape, runtime), back)
    maps = (2 + streams * model.mixes_streams) * streams
    product = Operator(
        name=f"{name} maps", kind="gemm", wide=True, m=tokens, n=maps, k=width, parameters=maps * width + maps + kinds,
        saved=(Saved("streams", (tokens, width)), Saved("maps", (3, tokens, maps), dtype="fp32")),
    )  # fmt: skip
    return product, _passes(f"{name} streams in", (width + 2 * width, model.hidden_size), shape, runtime)


def spread_streams(name: str, model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> Operator:
    """The streams of the next half: the old ones mixed, plus the half's output weighted for each."""
    width = model.num_residual_streams * model.hidden_size
    spread = _passes(f"{name} streams out", (width + model.hidden_size, width), shape, runtime)
    return replace(spread, saved=(Saved("half output", (shape.shard_tokens, model.hidden_size)),))


def attend_snapshots(name: str, model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> Operator:
    """The sum of the residual and its snapshots that half a layer reads, by a softmax over one score a row.

    A row's score is a product of its norm and a vector of h weights; the norm has h weights too. Snapshots are kept
    where they are taken, and what is mixed by the norm behind.
    """
    rows, hidden, tokens = 1 + model.mean_snapshots, model.hidden_size, shape.shard_tokens
    mixed = _passes(f"{name} snapshots", (2 * rows * hidden, hidden), shape, runtime)
    kept = (Saved("residual", (tokens, hidden)), Saved("scores", (tokens, rows), dtype="fp32"))
    return replace(mixed, parameters=2 * hidden, saved=kept)


def join_streams(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> tuple[Operator, ...]:
    """The one stream that the final norm reads: their mean, or by weights from a product of all of them."""
    streams, tokens = model.num_residual_streams, shape.shard_tokens
    width = streams * model.hidden_size
    passes = _passes("head streams in", (2 * width, model.hidden_size), shape, runtime)
    if model.stream_rank is not None:
        # no norm behind: the head's own has the weights of one stream's
        return tuple(_featurewise("head", model.stream_rank, width - model.hidden_size, model, shape, runtime))
    if not model.weighs_streams:
        return (passes,)
    product = Operator(
        name="head maps", kind="gemm", wide=True, m=tokens, n=streams, k=width,
        parameters=streams * width + streams + 1,
        saved=(Saved("streams", (tokens, width)), Saved("maps", (tokens, streams), dtype="fp32")),
    )  # fmt: skip
    return product, passes


def _passes(name: str, moved: tuple[Number, Number], shape: Shape, runtime: RuntimeSpec) -> Operator:
    """One pass over features that are `moved` (read, written) a token; three backward, in fp32 where nothing fuses."""
    features, fused = sum(moved), runtime.fused_norm or runtime.compiled
    num_bytes = (BF16 if fused else FP32 + BF16) * shape.shard_tokens * features
    return Operator(
        name=name, kind="elementwise", family="residual", forward_bytes=num_bytes, backward_bytes=2 * num_bytes,
        forward_kernels=2 if fused else 12 + SINKHORN_KERNELS,
        backward_kernels=4 if fused else 2 * (12 + SINKHORN_KERNELS),
    )  # fmt: skip
