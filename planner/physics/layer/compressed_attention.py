"""Attention to a window and to keys that are compressed over time (DeepSeek-V4, 2026, §2.3).

Queries come through a low rank; one head of keys, which are the values too, serves all of them. A `compressed_sparse`
layer pools every few tokens to one key and lets an indexer choose among them; a `heavily_compressed` layer pools many
and attends to all. The output passes through groups of heads, each projected to a low rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.physics.layer.blocks import cast_copy, enter_tp, leave_tp, norm, rotary
from planner.physics.layer.core_attention import choice, scores
from planner.physics.operators import BF16, Collective, Item, Operator, Saved
from planner.shape import Number, Shape
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.model_parts import CompressedAttentionSpec
from planner.trainers.spec import RuntimeSpec


def compressed_attention(
    model: ModelSpec, kind: LayerKind, spec: CompressedAttentionSpec, shape: Shape, runtime: RuntimeSpec
) -> Iterator[Item]:
    """Low-rank queries, one shared key head, its compression, core attention, grouped output; heads are split over tp.

    Every tensor-parallel rank compresses for itself: the weights of the key head and of its compression are replicated.
    """
    heads, width, tokens = model.num_attention_heads / shape.tp, model.head_dim, shape.tokens
    yield from _queries(model, spec, shape, runtime)
    yield from _keys("kv", model.hidden_size, width, model, shape, runtime)
    rate = spec.rate(kind.attention)
    if rate:
        yield from _pooled("compressed kv", model.hidden_size, width, rate, spec.overlaps(rate), model, shape, runtime)
    if kind.attention == "compressed_sparse":
        yield from _chosen(model, spec, rate, shape, runtime)
    yield from _core(model, kind, spec, shape)
    # the rotated part of the output is rotated back, since values are rotated keys
    yield replace(rotary(heads * model.rotary_dim, tokens, runtime, ("op",)), name="rotate back")
    groups, inner = spec.o_groups / shape.tp, model.num_attention_heads * width / spec.o_groups
    yield cast_copy("attention output", (tokens, heads * width))
    yield Operator(
        name="output groups", kind="gemm", modules=("op",), count=groups, m=tokens, n=spec.o_lora_rank, k=inner,
        parameters=groups * spec.o_lora_rank * inner,
        saved=(Saved("output latents", (tokens, groups * spec.o_lora_rank), ("op",), gemm_input=True),),
    )  # fmt: skip
    rows = groups * spec.o_lora_rank
    output = Operator(
        name="attention output", kind="gemm", modules=("op",), m=tokens, n=model.hidden_size, k=rows,
        parameters=rows * model.hidden_size,
    )  # fmt: skip
    yield from leave_tp(output, BF16 * tokens * model.hidden_size, shape)


def _queries(model: ModelSpec, spec: CompressedAttentionSpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Queries through a low rank, normed over each head without weights, and rotated."""
    rank, heads, width = spec.q_lora_rank, model.num_attention_heads / shape.tp, model.head_dim
    up, hidden = ("mla_up_proj",), model.hidden_size
    yield Operator(name="q down", kind="gemm", m=shape.shard_tokens, n=rank, k=hidden, parameters=rank * hidden)
    yield cast_copy("kv", (shape.shard_tokens, hidden), ("layernorm",))
    yield norm("q latent norm", rank, shape.shard_tokens, model, runtime, module="mla_up_proj")
    columns = heads * width
    query = Operator(name="q up", kind="gemm", modules=up, m=shape.tokens, n=columns, k=rank, parameters=columns * rank)
    yield from enter_tp("q up", [query], rank, shape, runtime)
    normed = norm("q norm", width, shape.tokens * heads, model, runtime, saves_output=False, module="mla_up_proj")
    yield replace(normed, parameters=0)
    turned = rotary(heads * model.rotary_dim, shape.tokens, runtime, up)
    yield replace(turned, saved=(Saved("q", (shape.tokens, heads, width), up),))


def _keys(
    name: str, inputs: Number, width: Number, model: ModelSpec, shape: Shape, runtime: RuntimeSpec
) -> Iterator[Item]:
    """The one head of keys that are values too, normed and rotated; every tensor-parallel rank gets all tokens'."""
    shard = shape.shard_tokens
    yield Operator(name=name, kind="gemm", m=shard, n=width, k=inputs, parameters=width * inputs)
    yield norm(f"{name} norm", width, shard, model, runtime, saves_output=False)
    yield replace(
        rotary(model.rotary_dim, shard, runtime, ("op",)), name=f"{name} rotary",
        saved=(Saved(name, (shape.tokens, width)),),
    )  # fmt: skip
    num_bytes = BF16 * shape.tokens * width * shape.sequence_parallel
    yield Collective(name=f"{name} gather", kind="all_gather", group="tp", num_bytes=num_bytes)
    yield Collective(name=f"{name} scatter", kind="reduce_scatter", group="tp", num_bytes=num_bytes, backward=True)
    # ranks that share a sequence hand each other their window's and all compressed keys
    yield Collective(
        name=f"{name} exchange", kind="all_gather", group="cp", num_bytes=BF16 * shape.tokens * width * shape.cp,
        overlap="cp",
    )  # fmt: skip


def _pooled(
    name: str, inputs: int, width: int, rate: int, overlaps: bool, model: ModelSpec, shape: Shape, runtime: RuntimeSpec
) -> Iterator[Item]:
    """Keys of windows of `rate` tokens: a softmax over gates weights what is projected; `overlaps`: two series of it.

    With two series a window pools its own tokens and those before it. A position in the window has a bias of its own.
    """
    columns, shard = (2 if overlaps else 1) * width, shape.shard_tokens
    for part in ("values", "gates"):
        yield Operator(
            name=f"{name} {part}", kind="gemm", m=shard, n=columns, k=inputs, parameters=columns * inputs,
            saved=(Saved(part, (shard, columns), ("op",)),),
        )  # fmt: skip
    moved = BF16 * shard * columns
    yield Operator(
        name=f"{name} pool", kind="elementwise", family="softmax", modules=("op",),
        # gates and values are read, and rows written; the backward reads both again and writes two gradients
        forward_bytes=2 * moved + BF16 * shard * width / rate, backward_bytes=4 * moved,
        forward_kernels=1 if runtime.fused_norm else 6, backward_kernels=2 if runtime.fused_norm else 8,
        parameters=rate * columns,
    )  # fmt: skip
    pooled = shard / rate
    yield norm(f"{name} norm", width, pooled, model, runtime, saves_output=False)
    turned = rotary(model.rotary_dim, pooled, runtime, ("op",))
    yield replace(turned, name=f"{name} rotary", saved=(Saved(name, (shape.tokens / rate, width)),))


def _chosen(
    model: ModelSpec, spec: CompressedAttentionSpec, rate: int, shape: Shape, runtime: RuntimeSpec
) -> Iterator[Item]:
    """The indexer: compressed keys of its own, queries from the same latents, a weight a head, the best keys."""
    indexer = model.indexer
    assert indexer is not None
    width, heads = indexer.index_head_dim, indexer.index_n_heads
    yield from _pooled("index keys", model.hidden_size, width, rate, True, model, shape, runtime)
    for name, columns, inputs in (
        ("index q", heads * width, spec.q_lora_rank),
        ("index weights", heads, model.hidden_size),
    ):
        yield Operator(
            name=name, kind="gemm", wide=True, m=shape.tokens, n=columns, k=inputs, parameters=columns * inputs,
            saved=(Saved(name, (shape.tokens, columns)),),
        )  # fmt: skip
    keys = shape.seq_length / rate
    yield scores(indexer, shape, keys)
    yield choice(indexer, shape, keys)


def _core(model: ModelSpec, kind: LayerKind, spec: CompressedAttentionSpec, shape: Shape) -> Iterator[Item]:
    """One kernel over the keys of the window and the compressed ones; what each attends to is counted by itself."""
    heads, width, core = model.num_attention_heads / shape.tp, model.head_dim, ("core_attn",)
    assert model.sliding_window is not None
    attended = Operator(
        name="attention", kind="attention", modules=core, batch=shape.micro_batch_size, heads=heads, kv_heads=1,
        q_len=shape.seq_length / shape.cp, kv_len=shape.seq_length, window=model.sliding_window, qk_dim=width,
        v_dim=width, has_sinks=model.attention_sinks, parameters=heads if model.attention_sinks else 0,
        saved=(
            Saved("output", (shape.tokens, heads, width)),
            Saved("log-sum-exp", (shape.tokens, heads), core, dtype="fp32"),
        ),
    )  # fmt: skip
    yield attended
    rate = spec.rate(kind.attention)
    if not rate:
        return
    chosen = model.indexer.index_topk if kind.attention == "compressed_sparse" and model.indexer else 0
    yield replace(
        attended, name="attention to compressed keys", kv_len=shape.seq_length / rate, window=chosen, parameters=0,
        saved=(),
    )  # fmt: skip
