"""The attention half of a decoder layer: norm, projections, core attention, output projection, residual."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from planner.physics.operators import BF16, FP32, Collective, Item, Operator, Saved
from planner.physics.shape import Number, Shape
from planner.specs.model import LayerKind, MLASpec, ModelSpec
from planner.specs.runtime import RuntimeSpec


def enter_tp(
    name: str, num_bytes: Number, shape: Shape, modules: tuple[str, ...] = (), cast: bool = True
) -> Iterator[Collective]:
    """Exchanges of a column-parallel GEMM's input of `num_bytes`, sent as the product takes it where it is `cast`.

    Sequence parallel: gathered in forward; in backward gathered again for the wgrad, and the dgrad reduce-scattered.
    Else: the dgrad is all-reduced.
    """
    sharded, whole = num_bytes * shape.sequence_parallel, num_bytes * (1 - np.asarray(shape.sequence_parallel))
    yield Collective(
        name=f"{name} gather",
        kind="all_gather",
        group="tp",
        num_bytes=sharded,
        overlap="tp",
        modules=modules,
        cast=cast,
    )
    yield Collective(
        name=f"{name} gather again",
        kind="all_gather",
        group="tp",
        num_bytes=sharded,
        overlap="tp_async",
        backward=True,
        cast=cast,
    )
    yield Collective(
        name=f"{name} dgrad scatter",
        kind="reduce_scatter",
        group="tp",
        num_bytes=sharded,
        overlap="tp_async",
        backward=True,
    )
    yield Collective(
        name=f"{name} dgrad reduce", kind="all_reduce", group="tp", num_bytes=whole, overlap="tp_async", backward=True
    )


def leave_tp(name: str, num_bytes: Number, shape: Shape, modules: tuple[str, ...] = ()) -> Iterator[Collective]:
    """Exchanges of a row-parallel GEMM's output: reduce-scatter and its all-gather in backward, or one all-reduce."""
    sharded, whole = num_bytes * shape.sequence_parallel, num_bytes * (1 - np.asarray(shape.sequence_parallel))
    yield Collective(
        name=f"{name} scatter", kind="reduce_scatter", group="tp", num_bytes=sharded, overlap="tp", modules=modules
    )
    yield Collective(
        name=f"{name} reduce", kind="all_reduce", group="tp", num_bytes=whole, overlap="tp", modules=modules
    )
    yield Collective(
        name=f"{name} grad gather",
        kind="all_gather",
        group="tp",
        num_bytes=sharded,
        overlap="tp",
        backward=True,
        cast=name != "embedding",
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
    saves_output: bool = True, saves_input: bool = True, output_is_cast: bool = True,
) -> Operator:  # fmt: skip
    """RMSNorm or LayerNorm over `width` features of `tokens` rows; keeps its input, its statistics and its output.

    Forward reads and writes once; backward reads input and gradient and writes one (eager torch reads both again for
    the weight's gradient). Unfused, each pass is made twice.
    """
    num_bytes = BF16 * tokens * width
    # unfused: cast to fp32, square, mean, scale, cast back, weight
    passes, kernels = (1, 1) if runtime.fused_norm else (9, 6)
    statistics = FP32 * tokens * (2 if model.norm == "layernorm" else 1)
    saved = [Saved("statistics", statistics)]
    if saves_input:
        saved.append(Saved("input", num_bytes))
    if saves_output:
        saved.append(Saved("output", num_bytes, ("layernorm", "op"), gemm_input=output_is_cast))
    return Operator(
        name=name,
        kind="elementwise",
        family="norm",
        modules=("layernorm", "op"),
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


def attention_block(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Norm, QKV (or the latent projections), core attention, output projection, residual."""
    yield norm("attention norm", model.hidden_size, shape.shard_tokens, model, runtime)
    v_dim = model.head_dim if model.mla is None else model.mla.v_head_dim
    if model.mla is None:
        yield from _qkv(model, shape, runtime)
    else:
        yield from _latent_qkv(model, model.mla, shape, runtime)
    yield from _core(model, kind, shape, runtime)
    # the core's output has the layout of its queries, so that [seq, batch, heads·dim] is a view of it
    width = model.num_attention_heads * v_dim / shape.tp
    # attention keeps its output too, for the gradient
    yield cast_copy("attention output", BF16 * shape.tokens * width)
    hidden_bytes = BF16 * shape.tokens * model.hidden_size
    yield Operator(
        name="attention output",
        kind="gemm",
        modules=("op",),
        m=shape.tokens,
        n=model.hidden_size,
        k=width,
        parameters=width * model.hidden_size + (model.hidden_size if model.output_bias else 0),
    )
    yield from leave_tp("attention output", hidden_bytes, shape)
    yield from local_copies("attention copies", hidden_bytes, shape, runtime)
    if model.post_norms:
        yield norm("attention post norm", model.hidden_size, shape.shard_tokens, model, runtime, saves_output=False)
    yield residual("attention residual", model.hidden_size, shape.shard_tokens, runtime)


def kv_heads_per_rank(model: ModelSpec, shape: Shape) -> Number:
    """Key-value heads on a rank: k / tp, and at least one (replicated where tp exceeds k)."""
    return np.maximum(model.num_key_value_heads / np.asarray(shape.tp, dtype=float), 1.0)


def _qkv(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    heads, kv_heads = model.num_attention_heads / shape.tp, kv_heads_per_rank(model, shape)
    width = (heads + 2 * kv_heads) * model.head_dim
    # beyond one key-value head a rank Megatron cuts the projection further, and gathers what it gives
    cut = (heads + 2 * model.num_key_value_heads / np.asarray(shape.tp, dtype=float)) * model.head_dim
    yield from enter_tp("qkv", BF16 * shape.tokens * model.hidden_size, shape)
    rotates = model.position_embedding == "rope"
    # eager: q and k are copies after rotation, and v is a view that keeps the whole buffer; else q, k, v are kept once
    keeps_buffer = rotates and not runtime.fused_rotary
    parts = [("qkv", width, False)] if runtime.fused_projections else _three(model, heads, kv_heads)
    for name, kept, again in parts:
        modules = ("op",) if again else ()
        columns = cut if name == "qkv" else kept
        yield Operator(
            name=name,
            kind="gemm",
            modules=modules,
            m=shape.tokens,
            n=columns,
            k=model.hidden_size,
            parameters=columns * model.hidden_size + (columns if model.qkv_bias else 0),
            saved=(Saved(name, BF16 * shape.tokens * kept, modules),),
        )
    if model.qk_norm:
        rows = shape.tokens * (heads + kv_heads)
        # eager: its input is a view of the buffer, and rotation, which reads its output, keeps nothing
        per_head = norm(
            "qk norm", model.head_dim, rows, model, runtime, saves_output=False, saves_input=not keeps_buffer
        )
        yield _with_parameters(per_head, 2 * model.head_dim)
    if rotates:
        rotated = (heads + kv_heads) * model.head_dim
        operator = rotary(rotated, shape.tokens, runtime, ("op",))
        yield _with_saved(operator, Saved("rotated q, k", BF16 * shape.tokens * rotated)) if keeps_buffer else operator


def _three(model: ModelSpec, heads: Number, kv_heads: Number) -> list[tuple[str, Number, bool]]:
    """Projections apart: name, columns, and whether recomputing every other product (`op`) recomputes it."""
    rows = kv_heads * model.head_dim
    return [("q", heads * model.head_dim, False), ("k", rows, True), ("v", rows, False)]


def _latent_qkv(model: ModelSpec, mla: MLASpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """MLA (DeepSeek-V2 §2.1): queries and key-values through low ranks replicated over tp; heads sharded after."""
    heads = model.num_attention_heads / shape.tp
    qk_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    tokens, shard = shape.tokens, shape.shard_tokens
    up = ("mla_up_proj",)
    q_width = heads * qk_dim
    if mla.q_lora_rank is None:
        yield from enter_tp("q", BF16 * tokens * model.hidden_size, shape)
        yield Operator(
            name="q", kind="gemm", m=tokens, n=q_width, k=model.hidden_size, parameters=q_width * model.hidden_size
        )
    else:
        rank = mla.q_lora_rank
        yield Operator(
            name="q down", kind="gemm", m=shard, n=rank, k=model.hidden_size, parameters=rank * model.hidden_size
        )
        yield cast_copy("kv down", BF16 * shard * model.hidden_size, ("layernorm",))
        yield norm("q latent norm", rank, shard, model, runtime)
        yield from enter_tp("q up", BF16 * tokens * rank, shape)
        yield Operator(name="q up", kind="gemm", modules=up, m=tokens, n=q_width, k=rank, parameters=q_width * rank)
    rank = mla.kv_lora_rank
    down = rank + mla.qk_rope_head_dim
    yield Operator(
        name="kv down", kind="gemm", m=shard, n=down, k=model.hidden_size, parameters=down * model.hidden_size
    )
    latent_norm = norm("kv latent norm", rank, shard, model, runtime)
    if not runtime.fused_rotary:
        # its input is a view of the down-projection's output, whose rotary part is kept along
        latent_norm = _with_saved(latent_norm, Saved("rotary part", BF16 * shard * mla.qk_rope_head_dim))
    yield latent_norm
    yield from enter_tp("kv up", BF16 * tokens * down, shape)
    kv_width = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    yield Operator(name="kv up", kind="gemm", modules=up, m=tokens, n=kv_width, k=rank, parameters=kv_width * rank)
    # eager: v is a view that keeps the up-projection's output, nope keys included
    kept = heads * (2 * qk_dim + mla.v_head_dim + (0 if runtime.fused_rotary else mla.qk_nope_head_dim))
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
        saved=(Saved("q, k, v", BF16 * tokens * kept, up),),
    )


def _core(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Core attention: one flash kernel, or QKᵀ, softmax and AV with the s² matrix in memory."""
    heads, kv_heads = model.num_attention_heads / shape.tp, kv_heads_per_rank(model, shape)
    if model.mla is None:
        qk_dim = v_dim = model.head_dim
    else:
        qk_dim, v_dim = model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim, model.mla.v_head_dim
        kv_heads = heads
    sinks = heads if model.attention_sinks else 0
    kv_bytes = BF16 * shape.tokens * kv_heads * (qk_dim + v_dim)
    q_bytes = BF16 * shape.tokens * heads * (qk_dim + v_dim)
    yield from _context_exchange(runtime, shape, kv_bytes, q_bytes)
    # exchanging heads for tokens, both the kernel's output and what comes back from the exchange are kept
    copies = np.where(np.asarray(shape.cp) > 1, 2, 1) if runtime.cp_comm_type == "a2a" else 1
    output = Saved("output", copies * BF16 * shape.tokens * heads * v_dim)
    if not runtime.flash_attention:
        yield from _unfused_core(shape, runtime, heads, qk_dim, v_dim, sinks, output)
        return
    core = ("core_attn",)
    yield Operator(
        name="attention",
        kind="attention",
        modules=core,
        batch=shape.micro_batch_size,
        heads=heads,
        kv_heads=kv_heads,
        q_len=shape.seq_length / shape.cp,
        kv_len=shape.seq_length,
        window=model.sliding_window or 0 if kind.attention == "sliding" else 0,
        qk_dim=qk_dim,
        v_dim=v_dim,
        parameters=sinks,
        saved=(output, Saved("log-sum-exp", FP32 * shape.tokens * heads, core)),
    )


def _unfused_core(
    shape: Shape, runtime: RuntimeSpec, heads: Number, qk_dim: int, v_dim: int, sinks: Number, output: Saved
) -> Iterator[Operator]:
    """QKᵀ, softmax and AV, each a kernel of its own; keeps the probabilities."""
    core, q_len = ("core_attn",), shape.seq_length / shape.cp
    count = shape.micro_batch_size * heads
    scores_bytes = BF16 * count * q_len * shape.seq_length
    dropout = (Saved("dropped probabilities", scores_bytes, core), Saved("mask", scores_bytes / BF16, core))
    yield Operator(
        name="scores", kind="gemm", modules=core, weight=False, count=count, m=q_len, n=shape.seq_length, k=qk_dim
    )
    yield Operator(
        name="softmax",
        kind="elementwise",
        family="softmax",
        modules=core,
        # scale, mask and softmax in one kernel; dropout reads and writes once more
        forward_bytes=scores_bytes * (4.5 if runtime.dropout else 2),
        backward_bytes=scores_bytes * (5.5 if runtime.dropout else 3),
        forward_kernels=2 if runtime.dropout else 1,
        backward_kernels=2 if runtime.dropout else 1,
        parameters=sinks,
        saved=(Saved("probabilities", scores_bytes, core), *(dropout if runtime.dropout else ())),
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
    """Key-value exchange over cp: ring or all-gather (backward also returns dK, dV), or heads for tokens all-to-all."""
    if runtime.cp_comm_type == "a2a":
        for backward in (False, True):
            yield Collective(
                name="cp heads", kind="all_to_all", group="cp", num_bytes=kv_bytes + q_bytes, backward=backward
            )
        return
    kind, overlap = ("ring", "cp") if runtime.cp_comm_type == "p2p" else ("all_gather", "none")
    for backward, factor in ((False, 1), (True, 2)):
        yield Collective(
            name="cp keys and values",
            kind=kind,  # type: ignore[arg-type]
            group="cp",
            num_bytes=factor * kv_bytes * shape.cp,
            overlap=overlap,  # type: ignore[arg-type]
            backward=backward,
        )


def _with_parameters(operator: Operator, parameters: Number) -> Operator:
    return replace(operator, parameters=parameters)


def _with_saved(operator: Operator, *saved: Saved) -> Operator:
    return replace(operator, saved=(*operator.saved, *saved))
