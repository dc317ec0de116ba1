"""Queries, keys and values of multi-head latent attention, through low-rank projections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.physics.layer.blocks import cast_copy, enter_tp, norm, rotary
from planner.physics.operators import BF16, Item, Operator, Saved
from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.specs.model_parts import MLASpec
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
