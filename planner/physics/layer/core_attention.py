"""Core attention: one flash kernel, or three kernels with the scores in memory, and its exchange over cp."""

from __future__ import annotations

from collections.abc import Iterator

from planner.physics.operators import BF16, Collective, Item, Operator, Saved
from planner.physics.torch_attention import around_flash, chunks_of
from planner.shape import Number, Shape, maximum, minimum, where
from planner.specs.model import LayerKind, ModelSpec
from planner.trainers.spec import RuntimeSpec
from planner.trainers.torch_attention import calls_flash, head_dims, window_of


def kv_heads_per_rank(model: ModelSpec, shape: Shape) -> Number:
    """Key-value heads on a rank: k / tp, and at least one (replicated where tp exceeds k)."""
    return maximum(model.num_key_value_heads / shape.tp, 1.0)


def core_attention(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
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
    copies = where(shape.cp > 1, 2, 1) if runtime.cp_comm_type == "a2a" else 1
    output = Saved("output", (copies, shape.tokens, heads, v_dim))
    masks_scores = kind.attention in ("indexed", "sparse") and not runtime.fuses_sparse_attention
    if masks_scores or not runtime.flash_attention:
        yield from _unfused_core(
            shape, runtime, heads, qk_dim, v_dim, sinks, output, "fp32" if masks_scores else "bf16"
        )
        return
    core, span = ("core_attn",), shape.seq_length
    gathered = shape.tokens * (shape.cp - 1), kv_heads, qk_dim + v_dim
    if kind.attention == "chunked":
        # as many sequences as there are chunks, each as long as one
        span = minimum(span, model.attention_chunk_size or span)
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
    shape: Shape,
    runtime: RuntimeSpec,
    heads: Number,
    qk_dim: int,
    v_dim: int,
    sinks: Number,
    output: Saved,
    dtype: str = "bf16",
) -> Iterator[Operator]:
    """QKᵀ, softmax and AV as three kernels, of which the softmax keeps the probabilities.

    In fp32 a mask of the chosen keys is added to the scores in a pass of its own.
    """
    core, q_len = ("core_attn",), shape.seq_length / shape.cp
    count = shape.micro_batch_size * heads
    masked = 3 if dtype == "fp32" else 0
    scores = Saved("probabilities", (count, q_len, shape.seq_length), core, dtype)
    dropout = (scores._replace(name="dropped probabilities"), scores._replace(name="mask", dtype="uint8"))
    yield Operator(
        name="scores",
        kind="gemm",
        modules=core,
        weight=False,
        count=count,
        m=q_len,
        n=shape.seq_length,
        k=qk_dim,
        in_fp32=masked > 0,
    )
    yield Operator(
        name="softmax",
        kind="elementwise",
        family="softmax",
        modules=core,
        # scale, mask and softmax in one kernel; dropout reads and writes once more
        forward_bytes=scores.num_bytes * ((4.5 if runtime.dropout else 2) + masked),
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
        in_fp32=masked > 0,
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
