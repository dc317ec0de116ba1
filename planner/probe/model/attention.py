"""Attention of a decoder layer in eager torch: grouped-query, or through low-rank latents (MLA)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.probe.model.attention_kernels import takes_flash
from planner.probe.model.attention_tables import AttentionTables, rotate
from planner.probe.model.context_attention import ContextAttention, FlashAttention
from planner.probe.model.linear import Linear
from planner.probe.model.marks import mark_shard
from planner.probe.model.norm import Norm
from planner.probe.model.peer_functions import Enter
from planner.probe.model.peers import TensorPeers, apply
from planner.probe.model.surroundings import Surroundings, recomputable
from planner.probe.torch_build import on_gpu, this_build
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.model_parts import MLASpec
from planner.trainers.torch_attention import calls_flash, window_of


def core_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: int, sinks: Tensor | None, cp: TensorPeers
) -> Tensor:
    """Causal attention of q [seq, batch, heads, dim] over k and v [seq, batch, kv heads, dim].

    Returns [seq, batch, heads·v dim]. `mask` is added to the scores and replaces causality where given; which layers
    go to the flash kernel on a GPU is said in `trainers.torch_attention`, elsewhere sinks are one more key with a logit
    of their own. Unequal head dimensions are padded on the CPU and in ROCm builds, whose kernels want them equal. Where
    sequences are split, the keys and values of all context-parallel ranks are gathered.
    """
    if cp.size > 1:
        return apply(ContextAttention, q, k, v, mask, window, sinks, cp).flatten(2)
    pads = this_build().pads_values and v.shape[-1] < q.shape[-1]
    if mask is None and takes_flash(q) and (calls_flash(window, sinks is not None, cp.size) or pads):
        return apply(FlashAttention, q, k, v, window, sinks).flatten(2)
    v_dim = v.shape[-1]
    if not on_gpu(q) and v_dim < q.shape[-1]:
        v = functional.pad(v, (0, q.shape[-1] - v_dim))
    if sinks is not None:
        k, v, mask = _with_sink(k, v, mask, sinks)
    grouped = k.shape[2] != q.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    out = out.permute(2, 0, 1, 3)[..., :v_dim]
    return out.reshape(*out.shape[:2], -1)


def _with_sink(k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One more key of zeros per head, whose score is the head's sink and whose value is zero."""
    seq = k.shape[0]
    if mask is None:
        mask = torch.full((seq, seq), -math.inf, dtype=k.dtype, device=k.device).triu(1)
    column = sinks.view(-1, 1, 1).expand(-1, seq, 1)
    mask = torch.cat((mask.expand(1, sinks.numel(), seq, seq), column[None]), dim=-1)
    k, v = (torch.cat((x, x.new_zeros(1, *x.shape[1:]))) for x in (k, v))
    return k, v, mask


class CoreAttention(nn.Module):
    """The part that both kinds of attention share: the mask of the layer's kind, the core and the output projection."""

    key_heads: int
    """Key heads on one rank."""
    key_dim: int

    def __init__(self, model: ModelSpec, kind: LayerKind, around: Surroundings, v_dim: int) -> None:
        super().__init__()
        self.around = around
        self.slides = kind.attention != "full"
        self.window = window_of(model, kind)
        self.heads = model.num_attention_heads // around.tp.size
        self.output = Linear(
            model.num_attention_heads * v_dim, model.hidden_size, around, parallel="row", bias=model.output_bias
        )
        self.sinks = nn.Parameter(torch.empty(self.heads)) if model.attention_sinks else None
        mark_shard(self.sinks, 0, ((model.num_attention_heads, self.heads),))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tables: AttentionTables) -> Tensor:
        mask = tables.window_mask if self.slides else tables.alibi
        core: Callable[..., Tensor] = recomputable("core_attn", core_attention, self.around)
        out: Tensor = self.output(core(q, k, v, mask, self.window, self.sinks, self.around.cp))
        return out


class Attention(CoreAttention):
    """Queries, keys and values in one GEMM and split into views; q and k normalised where the model does so."""

    def __init__(self, model: ModelSpec, kind: LayerKind, around: Surroundings) -> None:
        super().__init__(model, kind, around, model.head_dim)
        self.key_dim = model.head_dim
        self.key_heads = max(1, model.num_key_value_heads // around.tp.size)
        q = (model.num_attention_heads * model.head_dim, self.heads * model.head_dim)
        kv = (model.num_key_value_heads * model.head_dim, self.key_heads * model.head_dim)
        self.widths = [q[1], kv[1], kv[1]]
        self.qkv = Linear(
            model.hidden_size, q[0] + 2 * kv[0], around, parallel="column", bias=model.qkv_bias, sections=(q, kv, kv)
        )
        self.q_norm = Norm(model.head_dim, model, per_head=True) if model.qk_norm else nn.Identity()
        self.k_norm = Norm(model.head_dim, model, per_head=True) if model.qk_norm else nn.Identity()

    def forward(self, x: Tensor, tables: AttentionTables) -> Tensor:
        parts = self.qkv(x).split(self.widths, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.key_dim)) for part in parts)
        return self.attend(rotate(self.q_norm(q), tables), rotate(self.k_norm(k), tables), v, tables)


class LatentAttention(CoreAttention):
    """Multi-head latent attention (DeepSeek-V2 §2.1): down-projections on the sequence shard, then sharded heads."""

    def __init__(self, model: ModelSpec, mla: MLASpec, kind: LayerKind, around: Surroundings) -> None:
        super().__init__(model, kind, around, mla.v_head_dim)
        self.mla = mla
        hidden, heads = model.hidden_size, model.num_attention_heads
        self.key_heads, self.key_dim = self.heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim
        self.q_dims = [mla.qk_nope_head_dim, mla.qk_rope_head_dim]
        self.kv_dims = [mla.qk_nope_head_dim, mla.v_head_dim]
        if mla.q_lora_rank is None:
            self.q_down: nn.Module = nn.Identity()
            self.q_latent_norm: nn.Module = nn.Identity()
        else:
            self.q_down = Linear(hidden, mla.q_lora_rank, around)
            self.q_latent_norm = Norm(mla.q_lora_rank, model)
        self.q_up = Linear(mla.q_lora_rank or hidden, heads * sum(self.q_dims), around, parallel="column")
        self.kv_down = Linear(hidden, mla.kv_lora_rank + mla.qk_rope_head_dim, around)
        self.kv_latent_norm = Norm(mla.kv_lora_rank, model)
        self.kv_up = Linear(mla.kv_lora_rank, heads * sum(self.kv_dims), around, parallel="column")

    def forward(self, x: Tensor, tables: AttentionTables) -> Tensor:
        q = self.q_up(self.q_latent_norm(self.q_down(x))).unflatten(-1, (self.heads, -1))
        q_nope, q_rope = q.split(self.q_dims, dim=-1)
        latent, k_rope = self.kv_down(x).split([self.mla.kv_lora_rank, self.mla.qk_rope_head_dim], dim=-1)
        kv = self.kv_up(self.kv_latent_norm(latent)).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split(self.kv_dims, dim=-1)
        k_rope = k_rope if self.around.tp.size == 1 else apply(Enter, k_rope, self.around.tp)
        k_rope = rotate(k_rope.unsqueeze(2), tables).expand(-1, -1, self.heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, tables)), dim=-1)
        return self.attend(q, torch.cat((k_nope, k_rope), dim=-1), v, tables)
