"""Core attention: one flash kernel, or three kernels with the scores in memory, and its exchange over cp."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.physics.operators import BF16, FP32, Collective, Item, Operator, Saved, matmul
from planner.shape import Number, Shape, maximum, minimum, where
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.model_parts import IndexerSpec
from planner.trainers.documents import calls_flash, head_dims, window_of
from planner.trainers.spec import RuntimeSpec

INDEX_NORM_PARAMETERS = 2
"""Weight and bias of the LayerNorm over a key of the indexer."""


def indexer(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Queries from the latents, one key head, a weight a head; scores of all keys before a query; the best of them.

    Every tensor-parallel rank holds the whole indexer and scores for itself. The kept keys' indices are what sparse
    attention reads.
    """
    spec = model.indexer
    assert spec is not None
    tokens, heads, width = shape.tokens, spec.index_n_heads, spec.index_head_dim
    rank = (model.mla.q_lora_rank if model.mla is not None else None) or model.hidden_size
    weights = (("index weights", heads, model.hidden_size),) if spec.weighs_heads else ()
    products = (("index q", heads * width, rank), ("index k", width, model.hidden_size), *weights)
    for name, columns, inputs in products:
        yield matmul(name, tokens, columns, inputs, Saved(name, (tokens, columns)), wide=True)
    yield Operator(
        name="index norm", kind="elementwise", family="norm", forward_bytes=2 * BF16 * tokens * width,
        backward_bytes=3 * BF16 * tokens * width, forward_kernels=1, backward_kernels=2,
        parameters=INDEX_NORM_PARAMETERS * width,
        saved=(Saved("statistics", (2, tokens), dtype="fp32"), Saved("index k normed", (tokens, width))),
    )  # fmt: skip
    if runtime.fuses_sparse_attention:
        yield scores(spec, shape, shape.seq_length / spec.tokens_per_key)
    else:
        yield from _written_scores(spec, shape)
    yield choice(spec, shape, shape.seq_length / spec.tokens_per_key)


def scores(spec: IndexerSpec, shape: Shape, keys: Number) -> Operator:
    """Scores of the `keys` of a sequence before each query, summed over the indexer's heads."""
    return Operator(
        name="index scores", kind="attention", batch=shape.micro_batch_size, heads=spec.index_n_heads, kv_heads=1,
        q_len=shape.seq_length / shape.cp, kv_len=keys, qk_dim=spec.index_head_dim, v_dim=0,
    )  # fmt: skip


def _written_scores(spec: IndexerSpec, shape: Shape) -> Iterator[Operator]:
    """The same in fp32, head by head in memory, where they are cut off at zero, weighted and summed."""
    keys, core = shape.seq_length / spec.tokens_per_key, ("core_attn",)
    written = Saved("index scores", (shape.tokens, spec.index_n_heads, keys), core, dtype="fp32")
    yield Operator(
        name="index scores", kind="gemm", weight=False, in_fp32=True, modules=core, count=shape.micro_batch_size,
        m=keys / shape.cp * spec.index_n_heads, n=keys, k=spec.index_head_dim, saved=(written,),
    )  # fmt: skip
    yield Operator(
        name="index sum", kind="elementwise", family="router", modules=core, forward_bytes=5 * written.num_bytes,
        backward_bytes=4 * written.num_bytes, forward_kernels=3, backward_kernels=3,
    )  # fmt: skip


def choice(spec: IndexerSpec, shape: Shape, keys: Number) -> Operator:
    """The best of the `keys` before each query, by scores that are read and written once."""
    chosen = minimum(spec.index_topk, keys)
    return Operator(
        name="index choice", kind="elementwise", family="router", forward_bytes=2 * FP32 * shape.tokens * keys / 2,
        forward_kernels=2, saved=(Saved("chosen keys", (shape.tokens, chosen), dtype="int32"),),
    )  # fmt: skip


def chunks_of(shape: Shape) -> Number:
    """Kernels of one attention: two where sequences are split, since each rank holds an early and a late chunk."""
    return where(shape.cp > 1, 2, 1)


def around_flash(
    shape: Shape, flash: Number, heads: Number, kv_heads: Number, qk_dim: int, v_dim: int, has_sinks: bool
) -> Iterator[Operator]:
    """Copies and sums around the kernel: of gathered keys and values, of values narrower than keys, of sinks."""
    yield _gathered(shape, heads, kv_heads, qk_dim, v_dim)
    if v_dim < qk_dim:
        yield _padded(shape, flash, heads, kv_heads, qk_dim, v_dim)
    if has_sinks:
        yield _sinks(shape, heads, v_dim)


def _copies(name: str, forward_bytes: Number, backward_bytes: Number, kernels: tuple[int, int]) -> Operator:
    """Copies and sums beside the kernel, which recomputing core attention repeats; kernels of forward and backward."""
    return Operator(
        name=name, kind="elementwise", family="copy", modules=("core_attn",), forward_bytes=forward_bytes,
        backward_bytes=backward_bytes, forward_kernels=kernels[0], backward_kernels=kernels[1], working_bytes=0.0,
    )  # fmt: skip


def _rows_of_keys(shape: Shape) -> Number:
    """Rows of keys that a rank's kernels take: chunks r and 2·cp − 1 − r see (2·cp + 1) / (2·cp) sequences together."""
    whole = shape.tokens * shape.cp
    return where(shape.cp > 1, whole * (1 + 1 / (2 * shape.cp)), whole)


def _gathered(shape: Shape, heads: Number, kv_heads: Number, qk_dim: int, v_dim: int) -> Operator:
    """Puts gathered keys and values in the order of the sequence, and sums the gradients that both chunks give them.

    FlashAttention-2 gives a gradient for every query head, and torch sums them over the heads of a group.
    """
    row = BF16 * kv_heads * (qk_dim + v_dim)
    whole, used = row * shape.tokens * shape.cp, row * _rows_of_keys(shape)
    query, value, output = (BF16 * shape.tokens * n for n in (heads * qk_dim, kv_heads * v_dim, heads * v_dim))
    # values are a view of the projection's output, which an exchange copies first
    ordered = 2 * whole + 2 * value
    per_head = where(heads > kv_heads, used * (heads / kv_heads + 1), 0.0)
    is_split = shape.cp > 1
    forward_bytes = is_split * (ordered + 2 * output)
    # gathered again; gradients zeroed, added for both chunks and put in the order of ranks; those of queries joined
    backward_bytes = is_split * (ordered + whole + 3 * used + 2 * whole + 2 * query + per_head)
    return _copies("gathered keys and values", forward_bytes, backward_bytes, (4, 16))


def _padded(shape: Shape, flash: Number, heads: Number, kv_heads: Number, qk_dim: int, v_dim: int) -> Operator:
    """Widens values to keys with zeros, and the output and its gradient in the backward; a pad writes all, then v."""
    values = BF16 * _rows_of_keys(shape) * kv_heads * (qk_dim + 2 * v_dim)
    outputs = BF16 * shape.tokens * heads * (qk_dim + 2 * v_dim)
    forward_bytes = flash * (values + BF16 * shape.tokens * heads * 2 * v_dim)
    return _copies("padded values", forward_bytes, flash * (values + 2 * outputs), (3, 6))


def _sinks(shape: Shape, heads: Number, v_dim: int) -> Operator:
    """Scales the output by the share that sinks leave, and computes the gradient of their logits from grad ∘ output."""
    output, statistics = BF16 * shape.tokens * heads * v_dim, FP32 * shape.tokens * heads
    # logaddexp, difference, exponential and cast of the log-sum-exp; the product reads and writes the output
    forward_bytes = 2 * output + 9 * statistics
    # grad ∘ output in bf16 (3), in fp32 (3), its row sums (2)
    return _copies("sinks", forward_bytes, 8 * output + 9 * statistics, (6, 9))


def kv_heads_per_rank(model: ModelSpec, shape: Shape) -> Number:
    """Key-value heads on a rank: k / tp, and at least one (replicated where tp exceeds k)."""
    return maximum(model.num_key_value_heads / shape.tp, 1.0)


def core_attention(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Core attention: one flash kernel, or QKᵀ, softmax and AV with the s² matrix in memory."""
    heads, kv_heads = model.num_attention_heads / shape.tp, kv_heads_per_rank(model, shape)
    qk_dim, v_dim = head_dims(model)
    if model.mla is not None:
        kv_heads = heads
    if (
        runtime.repeats_keys or (runtime.runs_transformers and not runtime.flash_attention)
    ) and model.num_key_value_heads < model.num_attention_heads:
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
        dtype = "fp32" if masks_scores else "bf16"
        is_capped = model.attn_logit_softcapping is not None
        yield from _unfused_core(shape, runtime, heads, qk_dim, v_dim, sinks, output, dtype, is_capped)
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
    window = window_of(model, kind, int(np.max(shape.seq_length)))  # shapes of one job have one length
    if model.indexer is not None and kind.attention in ("indexed", "sparse"):
        window = model.indexer.index_topk  # keys that a query attends to
    if runtime.takes_torch_attention:
        num_kernels, flash = chunks_of(shape), calls_flash(window, model.attention_sinks, shape.cp)
        yield from around_flash(shape, flash, heads, kv_heads, qk_dim, v_dim, model.attention_sinks)
    kept = [output, Saved("log-sum-exp", (shape.tokens, heads), core, dtype="fp32")]
    if runtime.keeps_gathered_keys:
        kept.append(Saved("gathered k, v", gathered, (*core, "op")))
    yield Operator(
        name="attention", kind="attention", modules=core, batch=shape.micro_batch_size * (shape.seq_length / span),
        heads=heads, kv_heads=kv_heads, count=num_kernels, q_len=span / shape.cp / num_kernels, kv_len=span,
        window=window, causal=model.causal,
        imbalance=1.0 if runtime.balances_context or kind.attention != "full" else 2 - 1 / shape.cp,
        qk_dim=qk_dim, v_dim=v_dim, has_sinks=model.attention_sinks, calls_flash=flash, parameters=sinks,
        saved=tuple(kept),
    )  # fmt: skip


def _repeated(shape: Shape, head_dim: int, heads: Number, kv_heads: Number) -> Operator:
    """Copies keys and values for every query head of their group, and sums the gradients of the copies."""
    moved = 2 * BF16 * shape.tokens * head_dim * (heads + kv_heads)
    return Operator(
        name="repeat k, v", kind="elementwise", family="copy", modules=("op",), forward_bytes=moved,
        backward_bytes=moved, forward_kernels=2, backward_kernels=2,
    )  # fmt: skip


def _merged(shape: Shape, head_bytes: Number, kv_bytes: Number, qk_dim: int, v_dim: int) -> Operator:
    """Sums the blocks of a ring: outputs with their weights, and the gradients of queries, keys and values.

    The first block is read and written. For each other block, the block and the sum are read and the sum is written.
    In some blocks one half of the queries or keys attends to nothing and is left out, so that a block has three
    quarters of its rows on average (Transformer Engine).
    """
    others = 0.75 * (shape.cp - 1)
    passes, rings = 2 + 3 * others, others > 0
    forward_bytes = rings * passes * v_dim * head_bytes
    backward_bytes = rings * (passes * qk_dim * head_bytes + 3 * (1 + others) * kv_bytes)
    return _copies("merge blocks", forward_bytes, backward_bytes, (2, 4))


def _unfused_core(
    shape: Shape, runtime: RuntimeSpec, heads: Number, qk_dim: int, v_dim: int, sinks: Number, output: Saved,
    dtype: str, is_capped: bool,
) -> Iterator[Operator]:  # fmt: skip
    """QKᵀ, softmax and AV as three kernels, of which the softmax keeps the probabilities.

    In fp32 a mask of the chosen keys is added to the scores in a pass of its own. Transformers scales, masks, casts to
    fp32, takes the softmax and casts back one after another, and keeps probabilities of both widths; a cap is three
    kernels more, and keeps its tanh.
    """
    core, q_len, keys, in_fp32 = ("core_attn",), shape.seq_length / shape.cp, shape.seq_length, dtype == "fp32"
    count = shape.micro_batch_size * heads
    scores = Saved("probabilities", (count, q_len, keys), core, dtype)
    kept: tuple[Saved, ...] = (scores,)
    kernels, read, written = 1, 2.0 + 3 * in_fp32, 3.0
    if runtime.dropout:  # reads and writes once more
        kept += scores._replace(name="dropped probabilities"), scores._replace(name="mask", dtype="uint8")
        kernels, read, written = 2, read + 2.5, 5.5
    if runtime.runs_as_traced:
        wide = scores._replace(name="probabilities in fp32", dtype="fp32")
        for name, family, forward, backward, num_kernels, tensors in (
            ("scale, mask", "residual", 6 + 6 * is_capped, 5 + 7 * is_capped, 2 + 3 * is_capped, (wide,)),
            ("casts", "cast", 6, 6, 2, (scores._replace(name="tanh"),) * is_capped),
        ):
            yield Operator(
                name=name, kind="elementwise", family=family, modules=core, forward_bytes=forward * scores.num_bytes,
                backward_bytes=backward * scores.num_bytes, forward_kernels=num_kernels, backward_kernels=num_kernels,
                saved=tensors,
            )  # fmt: skip
    yield Operator(
        name="scores", kind="gemm", modules=core, weight=False, count=count, m=q_len, n=keys, k=qk_dim, in_fp32=in_fp32,
    )  # fmt: skip
    # scale, mask and softmax in one kernel
    yield Operator(
        name="softmax", kind="elementwise", family="softmax", modules=core, forward_bytes=scores.num_bytes * read,
        backward_bytes=scores.num_bytes * written, forward_kernels=kernels, backward_kernels=kernels, parameters=sinks,
        saved=kept,
    )  # fmt: skip
    # queries, keys and values are strided views; the context is put in order, and the three gradients into one buffer
    context_bytes = BF16 * shape.tokens * heads * v_dim
    yield Operator(
        name="layout", kind="elementwise", family="strided", forward_bytes=2 * context_bytes,
        backward_bytes=8 * context_bytes, forward_kernels=1, backward_kernels=2,
    )  # fmt: skip
    yield Operator(
        name="values", kind="gemm", modules=core, weight=False, in_fp32=in_fp32, count=count, m=q_len, n=v_dim, k=keys,
        saved=(output,),
    )  # fmt: skip


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
