"""Attention: projections of queries, keys and values, core attention, output projection.

Attention to a window and to keys that are compressed over time (DeepSeek-V4, 2026, §2.3): queries come through a low
rank; one head of keys, which are the values too, serves all of them. A `compressed_sparse` layer pools every few tokens
to one key and lets an indexer choose among them; a `heavily_compressed` layer pools many and attends to all. The output
passes through groups of heads, each projected to a low rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.physics.layer.blocks import (
    bias_gradients,
    cast_copy,
    dense_mlp,
    enter_tp,
    gradient_sums,
    is_packed,
    leave_tp,
    local_copies,
    norm,
    rotary,
    square,
)
from planner.physics.layer.core_attention import choice, core_attention, indexer, kv_heads_per_rank, scores
from planner.physics.operators import BF16, Collective, Item, Operator, Saved, matmul
from planner.shape import Number, Shape, minimum
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.model_parts import CompressedAttentionSpec, MLASpec
from planner.trainers.documents import head_dims
from planner.trainers.spec import RuntimeSpec


def latent_qkv(model: ModelSpec, mla: MLASpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Multi-head latent attention (MLA, DeepSeek-V2 §2.1): queries and key-values pass through low-rank projections.

    The down-projections are replicated over tp; the heads behind them are sharded.
    """
    heads = model.num_attention_heads / shape.tp
    tokens, shard = shape.tokens, shape.shard_tokens
    up, hidden, bias = ("mla_up_proj",), model.hidden_size, model.qkv_bias
    q_width = heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        query = matmul("q", tokens, q_width, hidden)
        yield from enter_tp("q", [query], hidden, shape, runtime)
    else:
        rank = mla.q_lora_rank
        yield matmul("q down", shard, rank, hidden, biases=bias)
        yield cast_copy("kv down", (shard, hidden), ("layernorm",))
        yield norm("q latent norm", rank, shard, model, runtime, module="mla_up_proj")
        both, gates = (2 * rank, heads * mla.v_head_dim) if mla.gates_by_latents else (rank, 0)
        columns = q_width + gates
        query = matmul("q up", tokens, columns, both, modules=up)
        yield from enter_tp("q up", [query], both, shape, runtime)
    rank = mla.kv_lora_rank
    down = rank + mla.qk_rope_head_dim
    yield matmul("kv down", shard, down, hidden, biases=bias)
    latent_norm = norm("kv latent norm", rank, shard, model, runtime, module="mla_up_proj")
    if not runtime.fused_rotary:
        # its input is a view of the down-projection's output, whose rotary part is kept along
        others = [one for one in latent_norm.saved if (one.name, one.dtype) != ("input", "bf16")]
        is_view = len(others) < len(latent_norm.saved)
        own = Saved("kv down", (shard, down)) if is_view else Saved("rotary part", (shard, mla.qk_rope_head_dim))
        latent_norm = replace(latent_norm, saved=(*others, own))
    yield latent_norm
    kv_width = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    keys = matmul("kv up", tokens, kv_width, rank, modules=up)
    yield from enter_tp("kv up", [keys], down, shape, runtime)
    yield from _assembled(model, mla, shape, runtime)


def _assembled(model: ModelSpec, mla: MLASpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Operator]:
    """Queries and keys of latent attention, rotated and put together from what does and does not rotate."""
    heads, tokens, up = model.num_attention_heads / shape.tp, shape.tokens, ("mla_up_proj",)
    qk_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    # eager: v is a view that keeps the up-projection's output, nope keys included
    v_width = mla.v_head_dim + (0 if runtime.fused_rotary else mla.qk_nope_head_dim)
    rope = rotary(heads * mla.qk_rope_head_dim + mla.qk_rope_head_dim, tokens, runtime, up)
    # rotation writes q anew and assembles k from its two parts: nope and the rope part shared by all heads
    assembled = BF16 * tokens * 2 * heads * qk_dim
    backward_bytes, family, kernels = 2 * assembled, "rotary", (1, 1)
    if runtime.runs_as_traced:  # gradients of heads are copied to rows, and parts joined for both projections
        joined = BF16 * tokens * heads * (mla.qk_nope_head_dim + 2 * mla.v_head_dim)
        backward_bytes, family, kernels = 4 * (1.5 * assembled + joined), "strided", (6, 16)
        yield from gradient_sums("latents", 2, BF16 * shape.shard_tokens * model.hidden_size, runtime)
    kept = (("q", qk_dim), ("k", qk_dim), ("v", v_width))
    yield Operator(
        name="assemble q, k", kind="elementwise", family=family, modules=up,
        forward_bytes=rope.forward_bytes + 2 * assembled, backward_bytes=rope.backward_bytes + backward_bytes,
        forward_kernels=rope.forward_kernels + kernels[0], backward_kernels=rope.backward_kernels + kernels[1],
        saved=tuple(Saved(name, (tokens, heads, width), up) for name, width in kept),
    )  # fmt: skip


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
        if (model.attn_output_gate or model.attn_head_gate) and not model.mla.gates_by_latents:
            per_head = model.mla.v_head_dim if model.attn_output_gate else 1
            gates = model.num_attention_heads * per_head / shape.tp
            product = matmul("output gate", shape.tokens, gates, model.hidden_size)
            yield from enter_tp("output gate", [product], model.hidden_size, shape, runtime)
    if kind.attention == "indexed":
        yield from indexer(model, shape, runtime)
    yield from core_attention(model, kind, shape, runtime)
    # the core's output has the layout of its queries, so that [seq, batch, heads·dim] is a view of it
    width = model.num_attention_heads * _value_dim(model) / shape.tp
    if kind.attention == "differential":
        # the same queries and keys to the other half of the values; the outputs' halves are subtracted and normed
        yield from core_attention(model, kind, shape, runtime)
        normed = norm("differential norm", width, shape.tokens, model, runtime)
        # what is subtracted, for the gradient of its factor; values of each half, once more for the other heads
        again = (
            Saved("subtracted", (shape.tokens, width)),
            Saved("v", (shape.tokens, kv_heads_per_rank(model, shape) * model.head_dim)),
        )
        yield replace(normed, parameters=4 * model.head_dim, saved=(*normed.saved, *again))
    if model.attn_output_gate or model.attn_head_gate:
        gates = width if model.attn_output_gate else model.num_attention_heads / shape.tp
        yield _output_gate(width, gates, shape)
    else:
        # attention keeps its output too, for the gradient
        yield cast_copy("attention output", (shape.tokens, width))
    hidden_bytes = BF16 * shape.tokens * model.hidden_size
    output = matmul(
        "attention output", shape.tokens, model.hidden_size, width, biases=model.output_bias, modules=("op",)
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
    return _query_columns(model, heads) + kv_heads * (model.head_dim + values) * (not model.shares_keys)


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
    rotates, own_keys = model.position_embedding == "rope", kv_heads * (not model.shares_keys)
    # eager: q and k are copies after rotation, and v is a view that keeps the whole buffer; else q, k, v are kept once
    keeps_buffer = rotates and not runtime.fused_rotary
    packed = is_packed("attention", model, runtime)
    parts = [("qkv", width, False)] if packed else _three(model, heads, kv_heads)
    products = []
    # three: rotation makes copies of queries and keys, and keeps nothing of what it reads
    copied = ("q", "k") if keeps_buffer else ()
    for name, kept, again in parts:
        modules = ("op",) if again else ()
        columns = cut if name == "qkv" else kept
        tensors = () if name in copied else (Saved(name, (shape.tokens, kept), modules),)
        products.append(
            matmul(name, shape.tokens, columns, model.hidden_size, *tensors, biases=model.qkv_bias, modules=modules)
        )
    yield from enter_tp("qkv", products, model.hidden_size, shape, runtime)
    if packed and runtime.runs_as_traced:
        # of chunks, the backward joins the gradients; each slice's is written among zeros, and all are added up
        passes = 2 if model.num_attention_heads == model.num_key_value_heads else 11
        yield Operator(
            name="qkv slices", kind="elementwise", family="strided", working_bytes=0, backward_kernels=8,
            backward_bytes=passes * BF16 * shape.tokens * width,
        )  # fmt: skip
    if model.query_rank is not None:
        yield from _queries_up(model, model.query_rank, heads, shape, runtime)
    if model.qk_norm:
        yield _qk_norm(model, shape, runtime, heads + own_keys, keeps_buffer)
    if rotates:
        width = (heads + own_keys) * model.head_dim
        operator = rotary(width, shape.tokens, runtime, ("op",), model.scales_rotation, model.rotary_in_fp32)
        turned = (("rotated q", heads), ("rotated k", own_keys))
        rotated = [Saved(name, (shape.tokens, number, model.head_dim)) for name, number in turned]
        yield _with_saved(operator, *rotated) if keeps_buffer else operator


def _qk_norm(model: ModelSpec, shape: Shape, runtime: RuntimeSpec, heads: Number, keeps_buffer: bool) -> Operator:
    """The norm of `heads` heads of queries and keys.

    Eager, its input is a view of the packed buffer, which is kept, and rotation, which reads its output, keeps nothing.
    """
    normed = norm(
        "qk norm", model.head_dim, shape.tokens * heads, model, runtime, saves_output=False,
        saves_input=not keeps_buffer, input_modules=("op",),
    )  # fmt: skip
    weights = {"head_dim": 2 - model.shares_keys, "plain": 0}.get(model.qk_norm_over, heads)
    if model.qk_norm_over == "hidden":
        # one row of statistics for all heads of queries, one for those of keys
        statistics, *others = normed.saved
        statistics = statistics._replace(dims=(*statistics.dims[:-1], 2 * shape.tokens))
        normed = replace(normed, saved=(statistics, *others))
    return _with_parameters(normed, weights * model.head_dim * model.norm_weight)


def _queries_up(model: ModelSpec, rank: int, heads: Number, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """The norm and the second product of low-rank queries (Step-3's multi-matrix factorization attention)."""
    yield norm("q latent norm", rank, shape.tokens, model, runtime, saves_input=False)
    width = heads * model.head_dim
    yield matmul("q up", shape.tokens, width, rank, Saved("q up", (shape.tokens, width)))


def _three(model: ModelSpec, heads: Number, kv_heads: Number) -> list[tuple[str, Number, bool]]:
    """The three projections: name, columns, and whether recomputing every other product (`op`) recomputes it."""
    parts = [("q", _query_columns(model, heads), False), ("k", kv_heads * model.head_dim, True)]
    return (
        parts[:1]
        if model.shares_keys
        else parts
        if model.values_are_keys
        else [*parts, ("v", kv_heads * _value_dim(model), False)]
    )


def _with_parameters(operator: Operator, parameters: Number) -> Operator:
    return replace(operator, parameters=parameters)


def _with_saved(operator: Operator, *saved: Saved) -> Operator:
    return replace(operator, saved=(*operator.saved, *saved))


def cross_attention(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Attention of a sequence to its images alone (Llama 3.2 Vision), whose tokens all such layers keep together."""
    tower, width, hidden = model.vision, model.head_dim, model.hidden_size
    seen = 1 if tower is None else tower.image_tokens * tower.images_per_sequence
    heads, kv_heads = model.num_attention_heads / shape.tp, kv_heads_per_rank(model, shape)
    rows, layers = shape.micro_batch_size * seen, sum(each.attention == "cross" for each in model.layers)
    images = Saved("image tokens", (rows, hidden / layers))
    for name, m, columns, kept in (
        ("cross q", shape.tokens, heads * width, ()), ("cross k, v", rows, 2 * kv_heads * width, (images,)),
    ):  # fmt: skip
        product = matmul(name, m, columns, hidden, *kept, Saved(name, (m, columns)))
        yield from enter_tp(name, [product], hidden, shape, runtime) if not kept else (product,)
    normed = norm("cross qk norm", width, shape.tokens * heads + rows * kv_heads, model, runtime, saves_input=False)
    yield _with_parameters(normed, 2 * width)
    yield Operator(
        name="attention", kind="attention", modules=("core_attn",), batch=shape.micro_batch_size, heads=heads,
        kv_heads=kv_heads, q_len=shape.seq_length / shape.cp, kv_len=seen, causal=False, qk_dim=width, v_dim=width,
        saved=(
            Saved("output", (shape.tokens, heads, width)),
            Saved("log-sum-exp", (shape.tokens, heads), ("core_attn",), dtype="fp32"),
        ),
    )  # fmt: skip
    output = matmul("attention output", shape.tokens, hidden, heads * width, modules=("op",))
    yield from leave_tp(output, BF16 * shape.tokens * hidden, shape)


def shared_block(model: ModelSpec, kind: LayerKind, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """A block of attention and MLP that several layers run (Zamba): it reads the residual beside the embedding.

    Adapters and the square matrix behind it are each layer's own.
    """
    model = model.of_layer(kind)
    hidden, tokens, heads = model.hidden_size, shape.tokens, model.num_attention_heads / shape.tp
    wide, width = model.model_copy(update={"hidden_size": 2 * hidden}), heads * model.head_dim
    assert model.intermediate_size is not None
    output = matmul("attention output", tokens, hidden, width, modules=("op",))
    block = (
        norm("block norm", 2 * hidden, shape.shard_tokens, model, runtime),
        *_qkv(wide, shape, runtime),
        *core_attention(model, kind, shape, runtime),
        *leave_tp(output, BF16 * tokens * hidden, shape),
        norm("block mlp norm", hidden, shape.shard_tokens, model, runtime),
        *dense_mlp(model, model.intermediate_size, shape, runtime, "mlp"),
    )
    for item in block:
        yield replace(item, parameters=0) if model.shares_weights and isinstance(item, Operator) else item
    mlp = 2 * model.intermediate_size / shape.tp
    for name, inputs, columns, rank in (
        *((name, 2 * hidden, 2 * hidden / shape.tp, model.block_adapter_ranks[0]) for name in ("q", "k", "v")),
        ("gate, up", hidden, mlp, model.block_adapter_ranks[1]),
    ):
        for part, n, k, kept in (
            ("down", rank, inputs, (Saved("latents", (tokens, rank)),)),
            ("up", columns, rank, ()),
        ):
            product = matmul(f"{name} {part}", tokens, n, k, *kept)
            yield from (product,) * bool(rank)
    yield Operator(name="block output", kind="elementwise", saved=(Saved("mlp output", (shape.shard_tokens, hidden)),))
    yield from square(model, shape)


def compressed_attention(
    model: ModelSpec, kind: LayerKind, spec: CompressedAttentionSpec, shape: Shape, runtime: RuntimeSpec
) -> Iterator[Item]:
    """Low-rank queries, one shared key head, its compression, core attention, grouped output; heads are split over tp.

    Every tensor-parallel rank compresses for itself: the weights of the key head and of its compression are replicated.
    """
    heads, width, tokens = model.num_attention_heads / shape.tp, model.head_dim, shape.tokens
    yield from _queries(model, spec, shape, runtime)
    yield from _keys("kv", model.hidden_size, width, model, shape, runtime)
    shares = kind.attention == "shared_compressed"
    rate = model.compress_rate if shares else spec.rate(kind.attention)
    if model.makes_keys if shares else rate:
        overlaps = not shares and spec.overlaps(rate)
        yield from _pooled(
            "compressed kv", model.hidden_size, width, rate, overlaps, model, shape, runtime, has_biases=not shares
        )
    if model.chooses_keys or kind.attention == "compressed_sparse":
        yield from _chosen(model, spec, rate, shares, shape, runtime)
    yield from _core(model, kind, rate, shape)
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
    output = matmul("attention output", tokens, model.hidden_size, rows, modules=("op",))
    yield from leave_tp(output, BF16 * tokens * model.hidden_size, shape)


def _queries(model: ModelSpec, spec: CompressedAttentionSpec, shape: Shape, runtime: RuntimeSpec) -> Iterator[Item]:
    """Queries through a low rank, normed over each head without weights, and rotated."""
    rank, heads, width = spec.q_lora_rank, model.num_attention_heads / shape.tp, model.head_dim
    up, hidden = ("mla_up_proj",), model.hidden_size
    yield matmul("q down", shape.shard_tokens, rank, hidden)
    yield cast_copy("kv", (shape.shard_tokens, hidden), ("layernorm",))
    yield norm("q latent norm", rank, shape.shard_tokens, model, runtime, module="mla_up_proj")
    columns = heads * width
    query = matmul("q up", shape.tokens, columns, rank, modules=up)
    yield from enter_tp("q up", [query], rank, shape, runtime)
    if spec.norms_queries:
        normed = norm("q norm", width, shape.tokens * heads, model, runtime, saves_output=False, module="mla_up_proj")
        yield replace(normed, parameters=0)
    turned = rotary(heads * model.rotary_dim, shape.tokens, runtime, up)
    yield replace(turned, saved=(Saved("q", (shape.tokens, heads, width), up),))


def _keys(
    name: str, inputs: Number, width: Number, model: ModelSpec, shape: Shape, runtime: RuntimeSpec
) -> Iterator[Item]:
    """The one head of keys that are values too, normed and rotated; every tensor-parallel rank gets all tokens'."""
    shard = shape.shard_tokens
    yield matmul(name, shard, width, inputs)
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
    name: str, inputs: int, width: int, rate: int, overlaps: bool, model: ModelSpec, shape: Shape, runtime: RuntimeSpec,
    has_biases: bool = True,
) -> Iterator[Item]:  # fmt: skip
    """Keys of windows of `rate` tokens: a softmax over gates weights what is projected; `overlaps`: two series of it.

    With two series a window pools its own tokens and those before it. A position in the window may have a bias of its
    own. Keys of single tokens are projected alone.
    """
    columns, shard = (2 if overlaps else 1) * width, shape.shard_tokens
    for part in ("values", "gates")[: 1 if rate == 1 else 2]:
        yield matmul(f"{name} {part}", shard, columns, inputs, Saved(part, (shard, columns), ("op",)))
    moved = BF16 * shard * columns
    yield Operator(
        name=f"{name} pool", kind="elementwise", family="softmax", modules=("op",),
        # gates and values are read, and rows written; the backward reads both again and writes two gradients
        forward_bytes=2 * moved + BF16 * shard * width / rate, backward_bytes=4 * moved,
        forward_kernels=1 if runtime.fused_norm else 6, backward_kernels=2 if runtime.fused_norm else 8,
        parameters=rate * columns * has_biases,
    )  # fmt: skip
    pooled = shard / rate
    yield norm(f"{name} norm", width, pooled, model, runtime, saves_output=False)
    turned = rotary(model.rotary_dim, pooled, runtime, ("op",))
    yield replace(turned, name=f"{name} rotary", saved=(Saved(name, (shape.tokens / rate, width)),))


def _chosen(
    model: ModelSpec, spec: CompressedAttentionSpec, rate: int, shares: bool, shape: Shape, runtime: RuntimeSpec
) -> Iterator[Item]:
    """The indexer: keys of its own, queries from the same latents, a weight a head, the best keys.

    Where keys are shared, those of the indexer are projected from them, by the layer that makes them.
    """
    indexer = model.indexer
    assert indexer is not None
    width, heads = indexer.index_head_dim, indexer.index_n_heads
    keys: Number = shape.seq_length / rate
    if not shares:
        yield from _pooled("index keys", model.hidden_size, width, rate, True, model, shape, runtime)
    elif model.makes_keys:
        rows = shape.tokens / rate
        yield matmul("index keys", rows, width, model.head_dim)
        yield norm("index norm", width, rows, model, runtime)
    elif spec.candidates is not None:
        keys = minimum(keys, spec.candidates)
    for name, columns, inputs in (
        ("index q", heads * width, spec.q_lora_rank),
        ("index weights", heads, model.hidden_size),
    ):
        yield matmul(name, shape.tokens, columns, inputs, Saved(name, (shape.tokens, columns)), wide=True)
    yield scores(indexer, shape, keys)
    yield choice(indexer, shape, keys)


def _core(model: ModelSpec, kind: LayerKind, rate: int, shape: Shape) -> Iterator[Item]:
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
    if not rate:
        return
    chosen = model.indexer.index_topk if kind.attention != "heavily_compressed" and model.indexer else 0
    yield replace(
        attended, name="attention to compressed keys", kv_len=shape.seq_length / rate, window=chosen, parameters=0,
        saved=(),
    )  # fmt: skip
