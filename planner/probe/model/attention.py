"""Attention of a decoder layer in eager torch: grouped-query, or through low-rank latents (MLA).

It runs in torch's own kernels, in the flash kernel called directly (windows, sinks), or over the keys and values of all
context-parallel ranks, which are gathered (Llama 3, arXiv:2407.21783 §3.3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import ProbeError
from planner.probe.model.layers import Linear, Norm
from planner.probe.model.peers import (
    Exchange,
    Surroundings,
    TensorPeers,
    apply,
    chunk_ends,
    enter,
    gather,
    mark,
    recomputable,
    scatter,
    shard,
    to_fp32,
)
from planner.probe.run import Device
from planner.probe.torch_build import on_gpu, this_build
from planner.specs.base import Texts
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.model_parts import MLASpec
from planner.trainers.documents import calls_flash, window_of


def takes_flash(x: Tensor) -> bool:
    """True if flash attention runs on x's device and dtype. The kernel takes windows and sinks, but no masks."""
    return on_gpu(x) and x.dtype in (torch.bfloat16, torch.float16)


def require_flash(cp: int, device: Device, hint: str) -> None:
    """Raise ProbeError where this build's flash attention computes something else than the model's attention over
    sequences split into `cp`."""
    if device == "cuda" and cp > 1 and not this_build().aligns_to_last_key:
        raise ProbeError(f"flash attention of torch {torch.__version__} takes no sequences split over cp {cp}", hint)


class Visibility(NamedTuple):
    """The keys that each query sees: mask, window and sinks of a whole sequence, as `core_attention` takes them."""

    mask: Tensor | None
    window: int
    sinks: Tensor | None


def flash_forward(q: Tensor, k: Tensor, v: Tensor, rules: Visibility) -> tuple[Tensor, ...]:
    """Output, log-sum-exp and random state of the flash kernel, whose causal mask is aligned to the last key.

    A sink is one more key of no value: it takes its share of the softmax from all others.
    """
    out, lse, state, unused, _ = _kernel(
        *(x.transpose(0, 1) for x in (q, k, _widened(v, q))), None, None, q.shape[0], k.shape[0], 0.0, True, False,
        **_window(rules),
    )  # fmt: skip
    out = out.transpose(0, 1)
    if v.shape[-1] < q.shape[-1]:
        out = out[..., : v.shape[-1]].contiguous()  # a view would keep the padding until the backward
    if rules.sinks is not None:
        lse_with_sinks = torch.logaddexp(lse, to_fp32(rules.sinks).view(-1, 1))
        out = out * (lse - lse_with_sinks).exp().permute(2, 0, 1).unsqueeze(-1).to(out.dtype)
        lse = lse_with_sinks
    return out, lse, state, unused


def flash_backward(
    grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, rules: Visibility, saved: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and sinks by the flash kernel's own backward. It is right with sinks too, because it starts
    from the output and the log-sum-exp that it is given."""
    lse, state, unused = saved
    dsinks = None
    if rules.sinks is not None:  # each took its share of rowsum(dO ∘ O) [batch, heads, queries]
        shares = (to_fp32(rules.sinks).view(-1, 1) - lse).exp()
        dsinks = -(shares * to_fp32(grad * out).sum(-1).permute(1, 2, 0)).sum((0, 2)).to(rules.sinks.dtype)
    grad, out, padded = (_widened(x, q) for x in (grad, out, v))
    grads = _kernel_backward(
        *(x.transpose(0, 1) for x in (grad, q, k, padded, out)), lse, None, None, q.shape[0], k.shape[0], 0.0, True,
        state, unused, **_window(rules),
    )  # fmt: skip
    dq, dk, dv = (x.transpose(0, 1) for x in grads)
    return dq, dk, dv[..., : v.shape[-1]], dsinks


_kernel: Any = torch.ops.aten._flash_attention_forward
_kernel_backward: Any = torch.ops.aten._flash_attention_backward


def _widened(x: Tensor, q: Tensor) -> Tensor:
    """x padded with zeros to the head dimension of q; x itself where it is as wide (padding by nothing would copy)."""
    missing = q.shape[-1] - x.shape[-1]
    return functional.pad(x, (0, missing)) if missing else x


def _window(rules: Visibility) -> dict[str, int]:
    return {"window_size_left": rules.window - 1, "window_size_right": 0} if rules.window else {}


def masked_attention(q: Tensor, k: Tensor, v: Tensor, rules: Visibility) -> Tensor:
    """The same by torch's own attention. It aligns causality to the first key, so that a mask says it where q is a part
    of the sequence, and a sink is one more key of zeros, whose score is the head's sink and whose value is zero."""
    num_queries, num_keys, v_dim, mask = q.shape[0], k.shape[0], v.shape[-1], rules.mask
    if mask is None and (rules.sinks is not None or num_queries < num_keys):
        mask = torch.full((num_keys, num_keys), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    if mask is not None:
        mask = mask[..., num_keys - num_queries : num_keys, :num_keys]
    if not on_gpu(q) and v_dim < q.shape[-1]:
        v = functional.pad(v, (0, q.shape[-1] - v_dim))
    if mask is not None and rules.sinks is not None:
        column = rules.sinks.view(-1, 1, 1).expand(-1, num_queries, 1)
        mask = torch.cat((mask.expand(1, len(column), num_queries, num_keys), column[None]), dim=-1)
        k, v = (torch.cat((x, x.new_zeros(1, *x.shape[1:]))) for x in (k, v))
    grouped = k.shape[2] != q.shape[2]
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return out.permute(2, 0, 1, 3)[..., :v_dim]


KERNELS = {
    "_flash_attention_forward": "flash",
    "_scaled_dot_product_flash_attention": "flash",
    "_cudnn_attention_forward": "cudnn",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_efficient_attention_forward": "efficient",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_fused_attention_overrideable": "other",
    # attention written out, the last resort: nothing else calls this softmax
    "_safe_softmax": "math",
}
"""Our names of torch's operators; profiles have numbers of flash and cudnn alone."""
WITH_A_MASK = " with a mask"
TAKES_MASKS = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention")
"""Operators whose fourth argument is a mask, or None."""


class KernelsSeen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down the kernels of attention that run within it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names: set[str] = set()

    @property
    def names(self) -> Texts:
        return tuple(sorted(self._names))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator = func.overloadpacket.__name__
        if operator in KERNELS:
            is_masked = operator in TAKES_MASKS and args[3] is not None
            self._names.add(KERNELS[operator] + (WITH_A_MASK if is_masked else ""))
        return func(*args, **(kwargs or {}))


ROTARY_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """Constants that all layers of a stage share: rotary angles [seq/cp, 1, 1, dim/2], masks of whole
    sequences [(1, heads,) seq, seq]."""

    cos: Tensor | None
    sin: Tensor | None
    window_mask: Tensor | None
    alibi: Tensor | None

    @classmethod
    def of(cls, model: ModelSpec, seq_length: int, around: Surroundings, like: Tensor) -> AttentionTables:
        """The tables of one sequence length, in the dtype and on the device of `like`."""
        cos = sin = alibi = None
        positions = torch.arange(seq_length, dtype=torch.float32)
        if model.position_embedding == "rope":
            dim = model.head_dim if model.mla is None else model.mla.qk_rope_head_dim
            frequencies = ROTARY_BASE ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
            angles = torch.outer(positions, frequencies)[:, None, None, :]
            cos, sin = (shard(table, around.cp).to(like) for table in (angles.cos(), angles.sin()))
        if model.position_embedding == "alibi":
            alibi = _alibi(model, positions, around.tp).to(like)[None]
        return cls(cos, sin, _window_mask(model, positions, like), alibi)


def _window_mask(model: ModelSpec, positions: Tensor, like: Tensor) -> Tensor | None:
    """[seq, seq], for windows that no kernel takes and for chunks shorter than the sequence."""
    if model.attention_chunk_size is not None and model.attention_chunk_size < len(positions):
        chunks = positions // model.attention_chunk_size
        near = chunks[:, None] == chunks
    elif model.sliding_window is not None and not takes_flash(like):
        near = positions[:, None] - positions < model.sliding_window
    else:
        return None
    return torch.where((positions[:, None] >= positions) & near, 0.0, -math.inf).to(like)


def _alibi(model: ModelSpec, positions: Tensor, tp: TensorPeers) -> Tensor:
    """[heads, seq, seq]"""
    heads = model.num_attention_heads
    distance = positions[:, None] - positions
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float32) / heads)
    slopes = slopes.chunk(tp.size)[tp.rank]
    return torch.where(distance >= 0, -distance * slopes[:, None, None], -math.inf)


def rotate(x: Tensor, tables: AttentionTables) -> Tensor:
    """Rotary embedding of x [seq, batch, heads, dim]: chunk, multiply, add, concatenate."""
    if tables.cos is None or tables.sin is None:
        return x
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * tables.cos - second * tables.sin, second * tables.cos + first * tables.sin), dim=-1)


class FlashAttention(torch.autograd.Function):
    """Causal attention of this rank's queries [seq/cp, batch, heads, dim] over the keys and values of all ranks, by the
    flash kernel itself: windows, learned sinks, and parts of sequences.

    Keys and values come as this rank's, and are kept as such: the others' are gathered again in backward. Returns
    [seq/cp, batch, heads, v dim].
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, window: int, sinks: Tensor | None, cp: TensorPeers
    ) -> Tensor:
        ctx.rules, ctx.cp = Visibility(None, window, None), cp
        keys, values, ends = gather(k, cp), gather(v, cp), chunk_ends(q, cp)
        rules = Visibility(None, window, sinks)
        parts = zip(q.chunk(len(ends)), ends, strict=True)
        done = [flash_forward(part, keys[:end], values[:end], rules) for part, end in parts]
        output = joined([out for out, *_ in done])
        ctx.save_for_backward(q, k, v, sinks, output, *(kept for _, *kernel_state in done for kept in kernel_state))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, *saved = ctx.saved_tensors
        rules, ends = ctx.rules._replace(sinks=sinks), chunk_ends(q, ctx.cp)
        if len(ends) == 1:
            dq, dk, dv, dsinks = flash_backward(grad, q, out, k, v, rules, saved)
            return dq, dk, dv, None, dsinks, None
        keys, values = gather(k, ctx.cp), gather(v, ctx.cp)
        keys_grad, values_grad = torch.zeros_like(keys), torch.zeros_like(values)
        sinks_grad = None if sinks is None else torch.zeros_like(sinks)
        q_grads = []
        half = len(saved) // 2
        for number, end in enumerate(ends):
            dout, part, part_out = (x.chunk(2)[number] for x in (grad.contiguous(), q, out))
            kernel_state = saved[number * half : (number + 1) * half]
            dq, dk, dv, dsinks = flash_backward(dout, part, part_out, keys[:end], values[:end], rules, kernel_state)
            q_grads.append(dq)
            keys_grad[:end].add_(dk)  # with += Python would copy the sum onto itself
            values_grad[:end].add_(dv)
            if sinks_grad is not None and dsinks is not None:
                sinks_grad += dsinks
        return torch.cat(q_grads), scatter(keys_grad, ctx.cp), scatter(values_grad, ctx.cp), None, sinks_grad, None


def core_attention(q: Tensor, k: Tensor, v: Tensor, rules: Visibility, cp: TensorPeers) -> Tensor:
    """Causal attention of this rank's q [seq/cp, batch, heads, dim] over k and v [seq/cp, batch, kv heads, dim].

    Returns [seq/cp, batch, heads·v dim]. A mask is added to the scores and replaces causality; which layers go to the
    flash kernel on a GPU is said in `trainers.documents`. Unequal head dimensions are padded on the CPU and in ROCm
    builds, whose kernels want them equal. The keys and values of all context-parallel ranks are gathered.
    """
    pads = this_build().pads_values and v.shape[-1] < q.shape[-1]
    calls = calls_flash(rules.window, rules.sinks is not None, cp.size) or pads
    if rules.mask is None and takes_flash(q) and calls:
        return apply(FlashAttention, q, k, v, rules.window, rules.sinks, cp).flatten(2)
    if cp.size > 1:
        k, v = (apply(Exchange, x, partial(gather, cp=cp), partial(scatter, cp=cp)) for x in (k, v))
    ends = chunk_ends(q, cp)
    parts = zip(q.chunk(len(ends)), ends, strict=True)
    return joined([masked_attention(part, k[:end], v[:end], rules) for part, end in parts]).flatten(2)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts one after another; a single one as it is, not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class CoreAttention(nn.Module):
    """The part that both kinds of attention share: the mask of the layer's kind, the core and the output projection."""

    key_heads: int
    """Key heads on one rank."""
    key_dim: int

    def __init__(self, model: ModelSpec, kind: LayerKind, around: Surroundings, v_dim: int) -> None:
        super().__init__()
        self.around = around
        self.slides = kind.attention != "full"
        self.model, self.kind = model, kind
        self.heads = model.num_attention_heads // around.tp.size
        self.output = Linear(
            model.num_attention_heads * v_dim, model.hidden_size, around, parallel="row", bias=model.output_bias
        )
        self.sinks = nn.Parameter(torch.empty(self.heads)) if model.attention_sinks else None
        mark(self.sinks, shard=(0, ((model.num_attention_heads, self.heads),)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tables: AttentionTables) -> Tensor:
        window = window_of(self.model, self.kind, q.shape[0] * self.around.cp.size)
        rules = Visibility(tables.window_mask if self.slides else tables.alibi, window, self.sinks)
        core = recomputable("core_attn", core_attention, self.around)
        out: Tensor = self.output(core(q, k, v, rules, self.around.cp))
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
        self.qkv = Linear(model.hidden_size, (q, kv, kv), around, parallel="column", bias=model.qkv_bias)
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
        hidden = model.hidden_size
        heads = model.num_attention_heads
        self.key_heads = self.heads
        self.key_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
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
        k_rope = k_rope if self.around.tp.size == 1 else enter(k_rope, self.around.tp)
        k_rope = rotate(k_rope.unsqueeze(2), tables).expand(-1, -1, self.heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, tables)), dim=-1)
        return self.attend(q, torch.cat((k_nope, k_rope), dim=-1), v, tables)
