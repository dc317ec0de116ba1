"""Attention: projections of queries, keys and values, core attention, output projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.physics.layer.blocks import bias_gradients, cast_copy, enter_tp, leave_tp, local_copies, norm, rotary
from planner.physics.layer.compressed_attention import compressed_attention
from planner.physics.layer.core_attention import core_attention, indexer, kv_heads_per_rank
from planner.physics.operators import BF16, Item, Operator, Saved
from planner.shape import Number, Shape
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.model_parts import MLASpec
from planner.trainers.documents import head_dims
from planner.trainers.spec import RuntimeSpec


def latent_qkv(model: ModelSpec, mla: MLASpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
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


def attention(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """QKV (or the latent projections), core attention, output projection."""
    model = model.of_layer(kind)
    if model.compressed_attention is not None:
        yield from compressed_attention(model, kind, model.compressed_attention, shape, runtime)
        return
    if model.mla is None:
        yield from _qkv(model, shape, runtime)
    else:
        yield from latent_qkv(model, model.mla, shape, runtime)
        if model.attn_output_gate:
            gates = model.num_attention_heads * model.mla.v_head_dim / shape.tp
            product = Operator(
                name="output gate", kind="gemm", m=shape.tokens, n=gates, k=model.hidden_size,
                parameters=gates * model.hidden_size,
            )  # fmt: skip
            yield from enter_tp("output gate", [product], model.hidden_size, shape, runtime)
    if kind.attention == "indexed":
        yield from indexer(model, shape, runtime)
    yield from core_attention(model, kind, shape, runtime)
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
    # three: rotation makes copies of queries and keys, and keeps nothing of what it reads
    copied = ("q", "k") if keeps_buffer else ()
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
            saved=() if name in copied else (Saved(name, (shape.tokens, kept), modules),),
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


def _with_parameters(operator: Operator, parameters: Number) -> Operator:
    return replace(operator, parameters=parameters)


def _with_saved(operator: Operator, *saved: Saved) -> Operator:
    return replace(operator, saved=(*operator.saved, *saved))
