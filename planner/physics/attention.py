"""Attention: projections of queries, keys and values, core attention, output projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.physics.blocks import bias_gradients, cast_copy, enter_tp, leave_tp, local_copies, norm, rotary
from planner.physics.indexer import indexer
from planner.physics.operators import BF16, Collective, Item, Operator, Saved
from planner.physics.torch_attention import around_flash, chunks_of
from planner.shape import Number, Shape
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.model_parts import MLASpec
from planner.trainers.spec import RuntimeSpec
from planner.trainers.torch_attention import calls_flash, head_dims, window_of


def attention(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """QKV (or the latent projections), core attention, output projection."""
    model = model.of_layer(kind)
    if model.mla is None:
        yield from _qkv(model, shape, runtime)
    else:
        yield from _latent_qkv(model, model.mla, shape, runtime)
    if kind.attention == "indexed":
        yield from indexer(model, shape, runtime)
    yield from _core(model, kind, shape, runtime)
    # the core's output has the layout of its queries, so that [seq, batch, heads·dim] is a view of it
    width = model.num_attention_heads * _value_dim(model) / shape.tp
    if model.attn_output_gate or model.attn_head_gate:
        gates = width if model.attn_output_gate else model.num_attention_heads / shape.tp
        yield _output_gate(width, gates, shape)
    else:
        # attention keeps its output too, for the gradient
        yield cast_copy("attention output", (shape.tokens, width))
    hidden_bytes = BF16 * shape.tokens * model.hidden_size
    output = Operator(
        name="attention output",
        kind="gemm",
        modules=("op",),
        m=shape.tokens,
        n=model.hidden_size,
        k=width,
        parameters=width * model.hidden_size + (model.hidden_size if model.output_bias else 0),
    )
    yield from leave_tp(output, hidden_bytes, shape)
    biased = [(_qkv_width(model, shape), model.qkv_bias), (model.hidden_size, model.output_bias)]
    yield from bias_gradients("attention", [width for width, has_bias in biased if has_bias], shape, runtime)
    yield from local_copies("attention copies", hidden_bytes, shape, runtime)


def _output_gate(width: Number, gates: Number, shape: Shape) -> Operator:
    """The product of attention's output and a sigmoid of its gates, which keeps the sigmoid and gives the output."""
    num_bytes = BF16 * shape.tokens * width
    return Operator(
        name="attention gate", kind="elementwise", family="activation", modules=("op",), forward_bytes=5 * num_bytes,
        backward_bytes=8 * num_bytes, forward_kernels=2, backward_kernels=3,
        saved=(
            Saved("sigmoid", (shape.tokens, gates), ("op",)),
            Saved("gated output", (shape.tokens, width), ("op",), gemm_input=True),
        ),
    )  # fmt: skip


def _value_dim(model: ModelSpec) -> int:
    """Width of a value head."""
    return head_dims(model)[1]


def kv_heads_per_rank(model: ModelSpec, shape: Shape) -> Number:
    """Key-value heads on a rank: k / tp, and at least one (replicated where tp exceeds k)."""
    return np.maximum(model.num_key_value_heads / shape.tp, 1.0)


def _columns(model: ModelSpec, heads: Number, kv_heads: Number) -> Number:
    """Columns of the projection to so many heads of queries, their gates, keys and values."""
    values = 0 if model.values_are_keys else _value_dim(model)
    return _query_columns(model, heads) + kv_heads * (model.head_dim + values)


def _query_columns(model: ModelSpec, heads: Number) -> Number:
    """Columns of the projection to queries and their gates; those of a low rank are the same on all ranks."""
    gates = heads * model.head_dim * model.attn_output_gate + heads * model.attn_head_gate
    return (model.query_rank or heads * model.head_dim) + gates


def _qkv_width(model: ModelSpec, shape: Shape) -> Number:
    return _columns(model, model.num_attention_heads / shape.tp, kv_heads_per_rank(model, shape))


def _qkv(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    heads, kv_heads = model.num_attention_heads / shape.tp, kv_heads_per_rank(model, shape)
    width = _qkv_width(model, shape)
    # beyond one key-value head a rank Megatron cuts the projection further, and gathers what it gives
    cut = _columns(model, heads, model.num_key_value_heads / shape.tp)
    rotates = model.position_embedding == "rope"
    # eager: q and k are copies after rotation, and v is a view that keeps the whole buffer; else q, k, v are kept once
    keeps_buffer = rotates and not runtime.fused_rotary
    parts = [("qkv", width, False)] if runtime.fused_projections else _three(model, heads, kv_heads)
    products = []
    for name, kept, again in parts:
        modules = ("op",) if again else ()
        columns = cut if name == "qkv" else kept
        product = Operator(
            name=name,
            kind="gemm",
            modules=modules,
            m=shape.tokens,
            n=columns,
            k=model.hidden_size,
            parameters=columns * model.hidden_size + (columns if model.qkv_bias else 0),
            saved=(Saved(name, (shape.tokens, kept), modules),),
        )
        products.append(product)
    yield from enter_tp("qkv", products, model.hidden_size, shape, runtime)
    if model.query_rank is not None:
        yield from _queries_up(model, model.query_rank, heads, shape, runtime)
    if model.qk_norm:
        rows, row = shape.tokens * (heads + kv_heads), model.head_dim
        # eager: its input is a view of the buffer, and rotation, which reads its output, keeps nothing
        normed = norm("qk norm", row, rows, model, runtime, saves_output=False, saves_input=not keeps_buffer)
        weights = 2 if model.qk_norm_over == "head_dim" else heads + kv_heads
        if model.qk_norm_over == "hidden":
            # one row of statistics for all heads of queries, one for those of keys
            statistics, *others = normed.saved
            statistics = statistics._replace(dims=(*statistics.dims[:-1], 2 * shape.tokens))
            normed = replace(normed, saved=(statistics, *others))
        yield _with_parameters(normed, weights * model.head_dim * model.norm_weight)
    if rotates:
        width = (heads + kv_heads) * model.head_dim
        operator = rotary(width, shape.tokens, runtime, ("op",), model.scales_rotation)
        turned = (("rotated q", heads), ("rotated k", kv_heads))
        rotated = [Saved(name, (shape.tokens, number, model.head_dim)) for name, number in turned]
        yield _with_saved(operator, *rotated) if keeps_buffer else operator


def _queries_up(model: ModelSpec, rank: int, heads: Number, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """The norm and the second product of low-rank queries (Step-3's multi-matrix factorization attention)."""
    yield norm("q latent norm", rank, shape.tokens, model, runtime, saves_input=False)
    width = heads * model.head_dim
    yield Operator(
        name="q up", kind="gemm", m=shape.tokens, n=width, k=rank, parameters=width * rank,
        saved=(Saved("q up", (shape.tokens, width)),),
    )  # fmt: skip


def _three(model: ModelSpec, heads: Number, kv_heads: Number) -> list[tuple[str, Number, bool]]:
    """The three projections: name, columns, and whether recomputing every other product (`op`) recomputes it."""
    parts = [("q", _query_columns(model, heads), False), ("k", kv_heads * model.head_dim, True)]
    return parts if model.values_are_keys else [*parts, ("v", kv_heads * _value_dim(model), False)]


def _latent_qkv(model: ModelSpec, mla: MLASpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Multi-head latent attention (MLA, DeepSeek-V2 §2.1): queries and key-values pass through low-rank projections.

    The down-projections are replicated over tp; the heads behind them are sharded.
    """
    heads = model.num_attention_heads / shape.tp
    qk_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    tokens, shard = shape.tokens, shape.shard_tokens
    up, inputs = ("mla_up_proj",), model.hidden_size + model.qkv_bias
    q_width = heads * qk_dim
    if mla.q_lora_rank is None:
        query = Operator(
            name="q", kind="gemm", m=tokens, n=q_width, k=model.hidden_size, parameters=q_width * model.hidden_size
        )
        yield from enter_tp("q", [query], model.hidden_size, shape, runtime)
    else:
        rank = mla.q_lora_rank
        yield Operator(name="q down", kind="gemm", m=shard, n=rank, k=model.hidden_size, parameters=rank * inputs)
        yield cast_copy("kv down", (shard, model.hidden_size), ("layernorm",))
        yield norm("q latent norm", rank, shard, model, runtime, module="mla_up_proj")
        query = Operator(name="q up", kind="gemm", modules=up, m=tokens, n=q_width, k=rank, parameters=q_width * rank)
        yield from enter_tp("q up", [query], rank, shape, runtime)
    rank = mla.kv_lora_rank
    down = rank + mla.qk_rope_head_dim
    yield Operator(name="kv down", kind="gemm", m=shard, n=down, k=model.hidden_size, parameters=down * inputs)
    latent_norm = norm("kv latent norm", rank, shard, model, runtime, module="mla_up_proj")
    if not runtime.fused_rotary:
        # its input is a view of the down-projection's output, whose rotary part is kept along
        others = [one for one in latent_norm.saved if (one.name, one.dtype) != ("input", "bf16")]
        is_view = len(others) < len(latent_norm.saved)
        kept = Saved("kv down", (shard, down)) if is_view else Saved("rotary part", (shard, mla.qk_rope_head_dim))
        latent_norm = replace(latent_norm, saved=(*others, kept))
    yield latent_norm
    kv_width = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    keys = Operator(name="kv up", kind="gemm", modules=up, m=tokens, n=kv_width, k=rank, parameters=kv_width * rank)
    yield from enter_tp("kv up", [keys], down, shape, runtime)
    # eager: v is a view that keeps the up-projection's output, nope keys included
    v_width = mla.v_head_dim + (0 if runtime.fused_rotary else mla.qk_nope_head_dim)
    rope = rotary(heads * mla.qk_rope_head_dim + mla.qk_rope_head_dim, tokens, runtime, up)
    # rotation writes q anew and assembles k from its two parts: nope and the rope part shared by all heads
    assembled = BF16 * tokens * 2 * heads * qk_dim
    yield Operator(
        name="assemble q, k",
        kind="elementwise",
        family="rotary",
        modules=up,
        forward_bytes=rope.forward_bytes + 2 * assembled,
        backward_bytes=rope.backward_bytes + 2 * assembled,
        forward_kernels=rope.forward_kernels + 1,
        backward_kernels=rope.backward_kernels + 1,
        saved=tuple(
            Saved(name, (tokens, heads, width), up) for name, width in (("q", qk_dim), ("k", qk_dim), ("v", v_width))
        ),
    )


def _core(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Core attention: one flash kernel, or QKᵀ, softmax and AV with the s² matrix in memory."""
    heads, kv_heads = model.num_attention_heads / shape.tp, kv_heads_per_rank(model, shape)
    qk_dim, v_dim = head_dims(model)
    if model.mla is not None:
        kv_heads = heads
    if runtime.repeats_keys and model.num_key_value_heads < model.num_attention_heads:
        yield _repeated(shape, model.head_dim, heads, kv_heads)
        kv_heads = heads
    sinks = heads if model.attention_sinks else 0
    kv_bytes = BF16 * shape.tokens * kv_heads * (qk_dim + v_dim)
    q_bytes = BF16 * shape.tokens * heads * (qk_dim + v_dim)
    yield from _context_exchange(runtime, shape, kv_bytes, q_bytes)
    # exchanging heads for tokens, both the kernel's output and what comes back from the exchange are kept
    copies = np.where(shape.cp > 1, 2, 1) if runtime.cp_comm_type == "a2a" else 1
    output = Saved("output", (copies, shape.tokens, heads, v_dim))
    if not runtime.flash_attention:
        yield from _unfused_core(shape, runtime, heads, qk_dim, v_dim, sinks, output)
        return
    core, span = ("core_attn",), shape.seq_length
    gathered = shape.tokens * (shape.cp - 1), kv_heads, qk_dim + v_dim
    if kind.attention == "chunked":
        # as many sequences as there are chunks, each as long as one
        span = np.minimum(span, model.attention_chunk_size or span)
    if runtime.cp_comm_type == "p2p":
        yield _merged(shape, BF16 * shape.tokens * heads, kv_bytes, qk_dim, v_dim)
    num_kernels: Number = 1
    flash: Number = 0
    if runtime.takes_torch_attention:
        num_kernels, flash = chunks_of(shape), calls_flash(window_of(model, kind), model.attention_sinks, shape.cp)
        yield from around_flash(shape, flash, heads, kv_heads, qk_dim, v_dim, model.attention_sinks)
    yield Operator(
        name="attention",
        kind="attention",
        modules=core,
        batch=shape.micro_batch_size * (shape.seq_length / span),
        heads=heads,
        kv_heads=kv_heads,
        count=num_kernels,
        q_len=span / shape.cp / num_kernels,
        kv_len=span,
        window=_window(model, kind),
        imbalance=1.0 if runtime.balances_context or kind.attention != "full" else 2 - 1 / shape.cp,
        qk_dim=qk_dim,
        v_dim=v_dim,
        has_sinks=model.attention_sinks,
        calls_flash=flash,
        parameters=sinks,
        saved=(
            output,
            Saved("log-sum-exp", (shape.tokens, heads), core, dtype="fp32"),
            *((Saved("gathered k, v", gathered, (*core, "op")),) if runtime.keeps_gathered_keys else ()),
        ),
    )


def _window(model: ModelSpec, kind: LayerKind) -> int:
    """Keys that a query attends to; 0 for all before it."""
    if model.indexer is not None and kind.attention in ("indexed", "sparse"):
        return model.indexer.index_topk
    return window_of(model, kind)


def _repeated(shape: Shape, head_dim: int, heads: Number, kv_heads: Number) -> Operator:
    """Copies keys and values for every query head of their group, and sums the gradients of the copies."""
    moved = 2 * BF16 * shape.tokens * head_dim * (heads + kv_heads)
    return Operator(
        name="repeat k, v",
        kind="elementwise",
        family="copy",
        modules=("op",),
        forward_bytes=moved,
        backward_bytes=moved,
        forward_kernels=2,
        backward_kernels=2,
    )


def _merged(shape: Shape, head_bytes: Number, kv_bytes: Number, qk_dim: int, v_dim: int) -> Operator:
    """Sums the blocks of a ring: outputs with their weights, and the gradients of queries, keys and values.

    The first block is read and written. For each other block, the block and the sum are read and the sum is written.
    In some blocks one half of the queries or keys attends to nothing and is left out, so that a block has three
    quarters of its rows on average (Transformer Engine).
    """
    others = 0.75 * (shape.cp - 1)
    passes, rings = 2 + 3 * others, others > 0
    return Operator(
        name="merge blocks",
        kind="elementwise",
        family="copy",
        modules=("core_attn",),
        forward_bytes=rings * passes * v_dim * head_bytes,
        backward_bytes=rings * (passes * qk_dim * head_bytes + 3 * (1 + others) * kv_bytes),
        forward_kernels=2,
        backward_kernels=4,
        working_bytes=0.0,
    )


def _unfused_core(
    shape: Shape, runtime: RuntimeSpec, heads: Number, qk_dim: int, v_dim: int, sinks: Number, output: Saved
) -> Iterator[Operator]:
    """QKᵀ, softmax and AV as three kernels, of which the softmax keeps the probabilities."""
    core, q_len = ("core_attn",), shape.seq_length / shape.cp
    count = shape.micro_batch_size * heads
    scores = Saved("probabilities", (count, q_len, shape.seq_length), core)
    dropout = (scores._replace(name="dropped probabilities"), scores._replace(name="mask", dtype="uint8"))
    yield Operator(
        name="scores", kind="gemm", modules=core, weight=False, count=count, m=q_len, n=shape.seq_length, k=qk_dim
    )
    yield Operator(
        name="softmax",
        kind="elementwise",
        family="softmax",
        modules=core,
        # scale, mask and softmax in one kernel; dropout reads and writes once more
        forward_bytes=scores.num_bytes * (4.5 if runtime.dropout else 2),
        backward_bytes=scores.num_bytes * (5.5 if runtime.dropout else 3),
        forward_kernels=2 if runtime.dropout else 1,
        backward_kernels=2 if runtime.dropout else 1,
        parameters=sinks,
        saved=(scores, *(dropout if runtime.dropout else ())),
    )
    # queries, keys and values are strided views; the context is put in order, and the three gradients into one buffer
    context_bytes = BF16 * shape.tokens * heads * v_dim
    yield Operator(
        name="layout",
        kind="elementwise",
        family="strided",
        forward_bytes=2 * context_bytes,
        backward_bytes=8 * context_bytes,
        forward_kernels=1,
        backward_kernels=2,
    )
    yield Operator(
        name="values",
        kind="gemm",
        modules=core,
        weight=False,
        count=count,
        m=q_len,
        n=v_dim,
        k=shape.seq_length,
        saved=(output,),
    )


def _context_exchange(runtime: RuntimeSpec, shape: Shape, kv_bytes: Number, q_bytes: Number) -> Iterator[Collective]:
    """Exchange of keys and values over cp: by a ring, by an all-gather, or by an all-to-all of heads for tokens.

    The backward returns dK and dV, and fetches keys and values again where they were not kept.
    """
    if runtime.cp_comm_type == "a2a":
        for backward in (False, True):
            yield Collective(
                name="cp heads", kind="all_to_all", group="cp", num_bytes=kv_bytes + q_bytes, backward=backward
            )
        return
    kind, overlap = ("ring", "cp") if runtime.cp_comm_type == "p2p" else ("all_gather", "none")
    for backward, factor in ((False, 1), (True, 1 if runtime.keeps_gathered_keys else 2)):
        yield Collective(
            name="cp keys and values",
            kind=kind,  # type: ignore[arg-type]
            group="cp",
            num_bytes=factor * kv_bytes * shape.cp,
            overlap=overlap,  # type: ignore[arg-type]
            backward=backward,
            modules=("op",) if runtime.keeps_gathered_keys and not backward else (),
        )


def _with_parameters(operator: Operator, parameters: Number) -> Operator:
    return replace(operator, parameters=parameters)


def _with_saved(operator: Operator, *saved: Saved) -> Operator:
    return replace(operator, saved=(*operator.saved, *saved))
