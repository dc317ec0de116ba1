"""Decoder layer, embedding, head and multi-token-prediction block, assembled from their halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from planner.physics.adapters import adapted
from planner.physics.layer.attention import attention, cross_attention, shared_block
from planner.physics.layer.blocks import (
    attend_snapshots,
    dense_mlp,
    enter_half,
    enter_tp,
    join_streams,
    leave_half,
    leave_tp,
    ngrams,
    norm,
    per_layer_input,
    square,
)
from planner.physics.layer.moe import mixture
from planner.physics.layer.recurrent import gated_delta, griffin, kimi_delta, lightning, mamba1, mamba2, short_conv
from planner.physics.operators import (
    BF16,
    FP32,
    Collective,
    Item,
    Operator,
    Saved,
    num_parameters,
    operators_of,
    within_documents,
)
from planner.shape import Number, Shape, ceil, minimum
from planner.specs.model import LayerKind, ModelSpec, VisionSpec
from planner.specs.model_parts import AttentionKind, Polynomial, TracedOperator
from planner.specs.training import AdapterSpec
from planner.trainers.documents import Documents
from planner.trainers.spec import RuntimeSpec

Mixer = Callable[[ModelSpec, LayerKind, Shape, RuntimeSpec], Iterator[Item]]

MIXERS: dict[AttentionKind, tuple[Mixer, ...]] = {
    "full": (attention,),
    "sliding": (attention,),
    "chunked": (attention,),
    "indexed": (attention,),
    "sparse": (attention,),
    "compressed_sparse": (attention,),
    "heavily_compressed": (attention,),
    "shared_compressed": (attention,),
    "mamba": (mamba1,),
    "mamba2": (mamba2,),
    "full_mamba2": (attention, mamba2),
    "differential": (attention,),
    "shared_mamba": (shared_block, mamba1),
    "shared_mamba2": (shared_block, mamba2),
    "griffin": (griffin,),
    "gated_delta": (gated_delta,),
    "kimi_delta": (kimi_delta,),
    "lightning": (lightning,),
    "conv": (short_conv,),
    "cross": (cross_attention,),
    "linear": (lambda model, kind, shape, runtime: square(model, shape),),
    "none": (),
}
"""The mixers of each kind of layer, which all read the same norm's output and are summed."""


def mixer_block(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Norm, the layer's mixers, residual; nothing for a layer that only has an MLP."""
    if model.traced is not None:
        yield from traced(model, kind, shape, runtime)
        return
    mixers = MIXERS[kind.attention]
    if not mixers:
        return
    module = "layernorm" if model.mla is not None or model.compressed_attention is not None else ""
    yield from enter_half("attention", model, shape, runtime, module=module)
    for mixer in mixers:
        yield from mixer(model, kind, shape, runtime)
    yield from leave_half(
        "attention", model, shape, runtime, adds=model.parallel_residual is None or kind.mlp == "none"
    )


def mlp_block(
    model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec, moe_imbalance: Number = 1.0
) -> Iterator[Item]:
    """Norm, dense MLP or experts, residual; nothing for a layer that has a mixer alone."""
    if kind.mlp == "none":
        return
    # the router keeps what experts take in as it is
    is_dense = kind.mlp != "moe"
    beside = model.parallel_residual if kind.attention != "none" else None
    if beside != "one_norm":
        yield from enter_half(
            "mlp", model, shape, runtime, output_is_cast=is_dense, module="mlp" if is_dense else "layernorm",
            saves_input=beside is None,
        )  # fmt: skip
    width = model.of_layer(kind).intermediate_size
    if kind.mlp == "linear":
        yield from square(model, shape)
    elif is_dense:
        assert width is not None
        yield from dense_mlp(model, width, shape, runtime, "mlp")
    else:
        assert model.moe is not None
        yield from mixture(model, model.moe, shape, runtime, moe_imbalance)
    yield from leave_half("mlp", model, shape, runtime, terms=2 if beside is None else 3)
    if model.per_layer_input_size is not None:
        yield from per_layer_input(model, model.per_layer_input_size, shape, runtime)


def decoder_layer(
    model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec, moe_imbalance: Number = 1.0
) -> tuple[Item, ...]:
    """The operators and exchanges of one decoder layer of `kind` on one rank, for one micro-batch."""
    replayed = runtime.graphed_modules if kind.mlp != "dense" else set(runtime.graphed_modules) & {"attn", "mlp"}
    own = model.of_layer(kind)
    vectors = own.vector_parameters
    items = (
        *((_graph_buffers(model, shape),) if replayed else ()),
        *((Operator(name="vectors", kind="elementwise", parameters=vectors),) if vectors else ()),
        *(() if own.ngram_size is None else ngrams(own.ngram_size, own, shape, runtime)),
        *mixer_block(model, kind, shape, runtime),
        *mlp_block(model, kind, shape, runtime, moe_imbalance),
    )
    if runtime.autocasts:
        items = (*items, _autocast_copies(model, shape, items))
    if own.shares_weights and shared_block not in MIXERS.get(kind.attention, ()):
        items = tuple(replace(item, parameters=0) if isinstance(item, Operator) else item for item in items)
    # layers that attend to images are left out where there are none
    left_out = kind.attention == "cross" and model.vision is None
    return (Operator(name="unused", kind="elementwise", parameters=num_parameters(items)),) if left_out else items


def _autocast_copies(model: ModelSpec, shape: Shape, items: tuple[Item, ...]) -> Operator:
    """The tensors that torch.autocast keeps of a layer beside those of an eager layer in 16 bits.

    Two norms keep rows of 4 bytes in place of 2, before and behind them (4 rows of 2 bytes), and each product of the
    5 that share inputs a copy of its own (3 more): 66 bytes a token and feature of a Llama with an MLP four times as
    wide, as saved tensors of transformers 5 count (torch 2.13, CPU).
    """
    rows = Saved("rows in fp32, copies of inputs", (7, shape.tokens, model.hidden_size))
    return Operator(
        name="autocast", kind="elementwise", saved=(rows, Saved("weights in 16 bits", (num_parameters(items),)))
    )


def _graph_buffers(model: ModelSpec, shape: Shape) -> Operator:
    """Copies into the buffers that a layer's CUDA graph reads: its input, and in the backward its output's gradient.

    Each micro-batch in flight has an input of its own (Megatron-LM, transformer/cuda_graphs.py). The output is one of
    the tensors that the backward keeps anyway.
    """
    static = Saved("static input", (shape.shard_tokens, model.residual_size))
    return Operator(
        name="graph buffers",
        kind="elementwise",
        family="copy",
        forward_bytes=2 * static.num_bytes,
        backward_bytes=2 * static.num_bytes,
        forward_kernels=1,
        backward_kernels=1,
        saved=(static,),
    )


def padded_vocab(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> Number:
    """Rows of the padded vocabulary: vocab_size rounded up to a multiple of vocab_divisible_by·tp, as trainers do."""
    multiple = runtime.vocab_divisible_by * shape.tp
    return ceil(model.vocab_size / multiple) * multiple


def embedding(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> tuple[Item, ...]:
    """Token lookup in a vocabulary sharded over tp, plus learned positions, plus BLOOM's norm."""
    hidden_bytes = BF16 * shape.tokens * model.hidden_size
    rows = padded_vocab(model, shape, runtime) / shape.tp
    # adding learned positions makes the shard a tensor of its own
    is_view = not runtime.clones_embedding_shard and model.position_embedding != "learned"
    kept_by_view = shape.tokens - shape.shard_tokens if is_view else 0
    lookup = Operator(
        name="embedding",
        kind="elementwise",
        family="embedding",
        forward_bytes=2 * hidden_bytes,
        backward_bytes=2 * hidden_bytes,
        forward_kernels=2,
        backward_kernels=3,
        parameters=rows * model.hidden_size
        + model.num_position_parameters
        + model.num_other_parameters
        + model.ngram_parameters / shape.tp,
        saved=(
            Saved("tokens", (shape.tokens,), dtype="int64"),
            Saved("whole output", (kept_by_view, model.hidden_size)),
        ),
    )
    extra = (
        (norm("embedding norm", model.hidden_size, shape.shard_tokens, model, runtime, saves_output=False),)
        if model.embedding_norm
        else ()
    )
    return (*leave_tp(lookup, hidden_bytes, shape), *extra, *_layer_embeddings(model, shape, runtime))


def _layer_embeddings(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> tuple[Item, ...]:
    """Embeddings that layers have of their own, and the product of the common one that is added to them (Gemma 4 E)."""
    if model.per_layer_input_size is None:
        return ()
    width, tokens = model.per_layer_input_size * len(model.layers), shape.shard_tokens
    rows = (model.per_layer_vocab_size or model.vocab_size) / shape.tp
    kept, moved = (Saved("layer inputs", (tokens, width)),), BF16 * tokens * width
    product = Operator(
        name="layer inputs", kind="gemm", m=tokens, n=width, k=model.hidden_size, parameters=width * model.hidden_size
    )
    lookup = Operator(
        name="layer embeddings", kind="elementwise", family="embedding", forward_bytes=2 * moved,
        backward_bytes=2 * moved, forward_kernels=2, backward_kernels=3, parameters=rows * width, saved=kept,
    )  # fmt: skip
    normed = norm("layer inputs norm", width, tokens, model, runtime, saves_output=False)
    return product, lookup, replace(normed, parameters=model.per_layer_input_size)


def vision_tower(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> tuple[Operator, ...]:
    """The operators over the images of a micro-batch: patches, the encoder's layers, the projector; none without one.

    Tensor- and context-parallel ranks each run all of it. A frozen tower keeps nothing and has no backward. A trained
    one keeps all that its layers do.
    """
    tower = model.vision
    if tower is None:
        return ()
    encoder, images = tower.encoder, shape.micro_batch_size * tower.images_per_sequence
    tile = min(tower.tile_tokens or tower.image_tokens, tower.image_tokens)
    patches, tiles = tile * tower.patches_per_token, images * tower.image_tokens / tile
    own = Shape(seq_length=patches + tower.num_extra_patches, micro_batch_size=tiles)
    first = _plain_product("patches", patches * tiles, tower.patch_values, encoder.hidden_size)
    first = replace(first, parameters=first.parameters + tower.other_parameters)
    layers = {
        kind: _of_tower((*mixer_block(encoder, kind, own, runtime), *mlp_block(encoder, kind, own, runtime)), tower)
        for kind in encoder.kinds
    }
    behind = [
        _plain_product("projector", rows * tower.image_tokens * images, inputs, outputs)
        for inputs, outputs, rows in tower.projector
    ]
    between = chain.from_iterable(layers[kind] for kind in encoder.layers)
    return (*_of_tower([first], tower), *between, *_of_tower(behind, tower))


def _plain_product(name: str, rows: Number, inputs: int, outputs: int) -> Operator:
    """A product by a weight that keeps its input."""
    kept = Saved("input", (rows, inputs))
    return Operator(name=name, kind="gemm", m=rows, n=outputs, k=inputs, parameters=inputs * outputs, saved=(kept,))


def _of_tower(items: Sequence[Item], tower: VisionSpec) -> tuple[Operator, ...]:
    """The operators among the items, in 16 bits and never recomputed; without gradients where the tower is frozen."""
    frozen = {"trained": False, "has_backward": False, "backward_bytes": 0, "backward_kernels": 0}
    changes: dict[str, Any] = {} if tower.is_trained else frozen
    return tuple(
        replace(
            op,
            name=f"vision {op.name}",
            wide=op.kind == "gemm",
            modules=(),
            saved=tuple(kept._replace(modules=()) for kept in op.saved if tower.is_trained),
            **changes,
        )
        for op in operators_of(items)
    )


def head(model: ModelSpec, shape: Shape, runtime: RuntimeSpec, shares_embedding: bool = False) -> tuple[Item, ...]:
    """Final norm, vocabulary-parallel head GEMM and cross-entropy.

    Where `shares_embedding`, the head's matrix is the embedding of the same rank, and its parameters are counted there.
    """
    joined: tuple[Item, ...] = join_streams(model, shape, runtime) if model.num_residual_streams > 1 else ()
    if model.attn_res_block_size is not None:
        joined = (attend_snapshots("final", model, shape, runtime),)
    final = norm("final norm", model.hidden_size, shape.shard_tokens, model, runtime)
    return (*joined, final, *_loss("head", model, shape, runtime, shares_embedding))


def _loss(name: str, model: ModelSpec, shape: Shape, runtime: RuntimeSpec, shares_weight: bool) -> tuple[Item, ...]:
    columns = padded_vocab(model, shape, runtime) / shape.tp
    logits = shape.tokens * columns
    # fused: bf16 logits are read and written once; else cast to fp32, read for maximum, sum and result, written, and
    # backward fills a gradient, reads it and the softmax, writes, and casts back to bf16
    passes = (2 * BF16, 2 * BF16) if runtime.fused_cross_entropy else (BF16 + 5 * FP32, BF16 + 5 * FP32)
    if runtime.fused_cross_entropy and runtime.loss_keeps_softmax:
        # cast; shifted, exponentials and their sum; divided by it; backward writes the softmax less one, and casts back
        passes = (BF16 + 5 * FP32, BF16 + 2 * FP32)
    if runtime.loss_in_place and not runtime.fused_cross_entropy:
        # cast, maximum, shifted, exponentials, their sum, divided by it; scaled and cast back
        passes = (BF16 + 9 * FP32, BF16 + 3 * FP32)
    # in chunks, each of as many logits as a hidden state has elements (liger_kernel/ops/fused_linear_cross_entropy.py)
    rows = shape.tokens * minimum(model.hidden_size / columns, 1.0) if runtime.chunks_loss else shape.tokens
    # a metric casts, normalizes and looks up
    metrics = runtime.loss_metrics * (BF16 + 3 * FP32)
    product = Operator(
        name="head",
        kind="gemm",
        wide=not runtime.narrow_head,
        backward_factor=runtime.head_backward_factor * (1.5 if runtime.recomputes_logits else 1.0),
        m=shape.tokens,
        n=columns,
        k=model.hidden_size,
        parameters=(0 if shares_weight else columns * model.hidden_size) + model.head_bias * columns,
        working_bytes=BF16 * rows * columns if runtime.chunks_loss else None,
    )
    return (
        *enter_tp(name, [product], model.hidden_size, shape, runtime),
        Operator(
            name="cross-entropy",
            kind="elementwise",
            family="loss",
            forward_bytes=(passes[0] + metrics) * logits,
            backward_bytes=passes[1] * logits,
            forward_kernels=3,
            backward_kernels=2,
            working_bytes=(FP32 + BF16) * logits * (shape.tp > 1) if runtime.loss_parallel else None,
            saved=(
                Saved("softmax", (rows, columns), dtype="fp32" if runtime.keeps_softmax else "bf16"),
                Saved("labels", (shape.tokens,), dtype="int64"),
            ),
        ),
        # maximum, target logit and sum of exponentials over the vocabulary shards: fp32 per token
        Collective(name="loss reduce", kind="all_reduce", group="tp", num_bytes=3 * FP32 * shape.tokens),
    )


def mtp_block(model: ModelSpec, shape: Shape, runtime: RuntimeSpec, moe_imbalance: Number = 1.0) -> tuple[Item, ...]:
    """One multi-token-prediction block (DeepSeek-V3 §2.2): two norms, 2h projected to h, decoder layer, shared head."""
    before, behind = around_mtp_layer(model, shape, runtime)
    layers = (decoder_layer(model, kind, shape, runtime, moe_imbalance) for kind in model.predicting_layers)
    return (*before, *chain.from_iterable(layers), *behind)


def around_mtp_layer(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """The operators of a multi-token-prediction block before its decoder layer, and those behind it."""
    hidden, tokens = model.hidden_size, shape.tokens
    tp = shape.tp if runtime.splits_mtp_projection else 1
    projection = Operator(
        name="mtp projection", kind="gemm", m=tokens / (shape.tp / tp), n=hidden / tp, k=2 * hidden,
        parameters=hidden / tp * 2 * hidden, saved=(Saved("input", (shape.shard_tokens, 2 * hidden)),),
    )  # fmt: skip
    entered: tuple[Item, ...] = (projection,)
    if runtime.splits_mtp_projection:
        *exchanges, product = enter_tp("mtp projection", [projection], 2 * hidden, shape, runtime)
        assert isinstance(product, Operator)
        entered = (*exchanges, *leave_tp(product, BF16 * tokens * hidden, shape))
    before = (
        norm("mtp embedding norm", hidden, shape.shard_tokens, model, runtime, saves_output=False),
        norm("mtp hidden norm", hidden, shape.shard_tokens, model, runtime, saves_output=False),
        *entered,
    )
    final = norm("mtp final norm", hidden, shape.shard_tokens, model, runtime)
    return before, (final, *_loss("mtp head", model, shape, runtime, shares_weight=True))


class ModelTotals(NamedTuple):
    """Parameters and FLOPs of the whole model, independent of any layout."""

    num_parameters: int
    """Parameters without those of multi-token-prediction blocks, as checkpoints are usually counted."""
    num_active_parameters: int
    """Parameters that one token visits: all but those of the experts it is not routed to."""
    model_flops_per_token: float
    """FLOPs per token, 3 × those of the forward: 6·(matmul parameters that a token meets, with the head but without the
    lookup) + 6·L·s·a·d for causal attention, of which what stays within documents counts. Frozen products count 2 ×,
    since they have no weight gradient, those of a frozen tower 1 ×, and adapters are computed too."""
    num_trained_parameters: int
    """Parameters that are trained: all of them, or those of adapters alone, which `num_parameters` leaves out."""
    num_vision_parameters: int
    """Parameters of the tower that makes tokens of images; `num_parameters` includes them."""
    num_predicting_parameters: int = 0
    """Those of multi-token-prediction blocks, which `num_parameters` leaves out."""


@lru_cache(64)
def model_totals(
    model: ModelSpec,
    runtime: RuntimeSpec,
    seq_length: int,
    documents: Documents = (),
    adapters: AdapterSpec | None = None,
) -> ModelTotals:
    """Parameters and model FLOPs per token of a sequence of `seq_length`, summed over the unsharded operators.

    Of attention, FLOPs count that stay within `documents`.
    """
    shape = Shape(seq_length=seq_length)
    plainly = {"flash_attention": True, "fuses_sparse_attention": True, "vocab_divisible_by": 1}
    plain = runtime.model_copy(update=plainly | {"balances_in_buffers": False})
    parts = [(decoder_layer(model, kind, shape, plain), model.layers.count(kind)) for kind in model.kinds]
    shares = model.tie_word_embeddings
    parts += [(embedding(model, shape, plain), 1), (head(model, shape, plain, shares_embedding=shares), 1)]
    seeing = vision_tower(model, shape, plain)
    total = num_parameters(seeing) + sum(num_parameters(items) * times for items, times in parts)
    idle = sum(num_parameters(items, expert=True) * times for items, times in parts)
    if model.moe is not None:
        visited = model.moe.num_experts_per_tok / (model.moe.num_experts + model.moe.num_zero_experts)
        idle *= 1 - visited / (1 + model.moe.image_ratio)
    # a token reads a few rows of the tables of n-grams
    idle += model.ngram_parameters + sum(one.ngram_parameters or 0 for one in model.layer_sizes or ())
    trained = float(total - num_parameters(seeing, trained=False))
    if adapters is not None:
        trained = sum(
            float(num_parameters(adapted(items, adapters, plain), trained=True) * times) for items, times in parts
        )
    predicting = 0.0
    if model.num_nextn_predict_layers:
        parts.append((mtp_block(model, shape, plain), model.num_nextn_predict_layers))
        predicting = float(num_parameters(parts[-1][0]) * model.num_nextn_predict_layers)
    masked = [(adapted(within_documents(items, shape, documents), adapters, plain), times) for items, times in parts]
    flops = sum(
        (1 + op.has_backward + (op.has_backward and (op.kind != "gemm" or op.trained)))
        * float(op.forward_flops)
        * times
        for items, times in (*masked, (seeing, 1))
        for op in operators_of(items)
    )
    sizes = (round(float(total)), round(float(total - idle)), flops / seq_length, round(trained))
    return ModelTotals(*sizes, round(float(num_parameters(seeing))), round(predicting))


def traced(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """The operators of a traced layer for a micro-batch on a rank; exchanges where weights are split over tp."""
    for row, operator in traced_operators(model, kind, shape):
        if row.split == "columns":
            yield from enter_tp(row.name, [operator], row.k[0], shape, runtime)
        elif row.split == "rows":
            yield from leave_tp(operator, BF16 * shape.tokens * row.n[0], shape)
        else:
            yield operator


def traced_operators(model: ModelSpec, kind: LayerKind, shape: Shape) -> Iterator[tuple[TracedOperator, Operator]]:
    """The traced operators of a layer, each with its sizes on a rank."""
    assert model.traced is not None
    for row in model.traced.layers[int(kind.attention.removeprefix("traced"))]:
        yield row, _operator(row, shape)


def _operator(row: TracedOperator, shape: Shape) -> Operator:
    """A traced operator of b sequences on one of tp ranks."""
    sequences, share = shape.micro_batch_size, 1 / shape.tp if row.split else 1.0
    length = shape.seq_length / shape.cp
    saved = tuple(
        Saved(row.name, (_at(one.num_bytes, length) * sequences / (shape.tp if one.is_sharded else 1),), dtype="bytes")
        for one in row.kept
    )
    parameters = row.parameters * share
    if row.kind == "gemm":
        m, n, k = (_at(size, length) for size in (row.m, row.n, row.k))
        count = _at(row.count, length) * (1 if row.weight else sequences)
        return Operator(
            name=row.name, kind="gemm", weight=row.weight, saved=saved, parameters=parameters,
            count=count * (share if row.split == "inside" else 1.0), m=m * (sequences if row.weight else 1),
            n=n * (share if row.split == "columns" else 1.0), k=k * (share if row.split == "rows" else 1.0),
        )  # fmt: skip
    if row.kind == "attention":
        return Operator(
            name=row.name, kind="attention", modules=("core_attn",), batch=sequences, heads=row.heads * share,
            kv_heads=row.kv_heads * share, q_len=_at(row.q_len, length), kv_len=_at(row.kv_len, length),
            qk_dim=row.qk_dim, v_dim=row.v_dim, saved=saved,
        )  # fmt: skip
    forward_bytes, backward_bytes = (_at(size, length) * sequences * share for size in (row.bytes, row.backward_bytes))
    return Operator(
        name=row.name, kind="elementwise", family=row.family, forward_bytes=forward_bytes,
        backward_bytes=backward_bytes, forward_kernels=row.kernels, backward_kernels=row.backward_kernels,
        parameters=parameters, saved=saved, working_bytes=2 / 3 * backward_bytes / max(row.kernels, 1),
    )  # fmt: skip


def _at(size: Polynomial, length: Number) -> Number:
    """A size at a length of the sequence."""
    constant, linear, square = size
    return constant + linear * length + square * length * length
