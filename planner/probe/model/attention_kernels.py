"""Causal attention and its gradient, by torch's flash kernel or written out."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from planner.errors import ProbeError
from planner.probe.model.surroundings import to_fp32
from planner.probe.run import Device
from planner.probe.torch_build import on_gpu, this_build, torch_release
from planner.specs.model import ModelSpec


def takes_flash(x: Tensor) -> bool:
    """True if flash attention runs on x's device and dtype. The kernel takes windows and sinks, but no masks."""
    return on_gpu(x) and x.dtype in (torch.bfloat16, torch.float16)


def require_flash(model: ModelSpec, cp: int, device: Device, hint: str) -> None:
    """Raise ProbeError where this build's flash attention computes something else than the model's attention over
    sequences split into `cp`."""
    build = this_build()
    if device == "cpu":
        return
    if cp > 1 and not build.aligns_to_last_key:
        raise ProbeError(f"flash attention of torch {torch.__version__} takes no sequences split over cp {cp}", hint)
    if (model.sliding_window or model.attention_sinks) and torch_release() < build.windows_since:
        raise ProbeError(f"flash attention of torch {torch.__version__} takes no windows and sinks", hint)


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
        out, lse = out * (lse - lse_with_sinks).exp().permute(2, 0, 1).unsqueeze(-1).to(out.dtype), lse_with_sinks
    return out, lse, state, unused


def flash_backward(
    grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, rules: Visibility, saved: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and sinks by the flash kernel's own backward. It is right with sinks too, because it starts
    from the output and the log-sum-exp that it is given."""
    lse, state, unused = saved
    dsinks = (
        None if rules.sinks is None else _sinks_grad(rules.sinks, lse, to_fp32(grad * out).sum(-1).permute(1, 2, 0))
    )
    grad, out, padded = (_widened(x, q) for x in (grad, out, v))
    grads = _kernel_backward(
        *(x.transpose(0, 1) for x in (grad, q, k, padded, out)), lse, None, None, q.shape[0], k.shape[0], 0.0, True,
        state, unused, **_window(rules),
    )  # fmt: skip
    dq, dk, dv = (x.transpose(0, 1) for x in grads)
    return dq, dk, dv[..., : v.shape[-1]], dsinks


def _kernel(*arguments: Any, **options: Any) -> Any:
    return torch.ops.aten._flash_attention_forward(*arguments, **options)


def _kernel_backward(*arguments: Any, **options: Any) -> Any:
    return torch.ops.aten._flash_attention_backward(*arguments, **options)


def _sinks_grad(sinks: Tensor, lse: Tensor, row_sums: Tensor) -> Tensor:
    """Gradient of the sinks' logits: each sink took its share of rowsum(dO ∘ O) [batch, heads, queries]."""
    shares = (to_fp32(sinks).view(-1, 1) - lse).exp()
    return -(shares * row_sums).sum((0, 2)).to(sinks.dtype)


def _widened(x: Tensor, q: Tensor) -> Tensor:
    """x padded with zeros to the head dimension of q; x itself where it is as wide (padding by nothing would copy)."""
    missing = q.shape[-1] - x.shape[-1]
    return functional.pad(x, (0, missing)) if missing else x


def _window(rules: Visibility) -> dict[str, int]:
    return {"window_size_left": rules.window - 1, "window_size_right": 0} if rules.window else {}


def plain_forward(q: Tensor, k: Tensor, v: Tensor, rules: Visibility) -> tuple[Tensor, ...]:
    """Output and log-sum-exp [batch, heads, queries], written out in torch operations."""
    scores = _scores(q, k, rules)
    sums = scores
    if rules.sinks is not None:
        sums = torch.cat((scores, rules.sinks.view(-1, 1, 1).expand(*scores.shape[:3], 1)), dim=-1)
    lse = sums.logsumexp(dim=-1)
    probabilities = (scores - lse.unsqueeze(-1)).exp().to(q.dtype)
    return torch.einsum("bhqk,kbhd->qbhd", probabilities, _per_head(v, q)), lse


def plain_backward(
    grad: Tensor, q: Tensor, out: Tensor, k: Tensor, v: Tensor, rules: Visibility, saved: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and sinks (FlashAttention, arXiv:2205.14135 appendix B.4): P ∘ (dO·Vᵀ − rowsum(dO ∘ O))."""
    (lse,) = saved
    probabilities = (_scores(q, k, rules) - lse.unsqueeze(-1)).exp()
    row_sums = to_fp32(grad * out).sum(-1).permute(1, 2, 0)
    inner = torch.einsum("qbhd,kbhd->bhqk", to_fp32(grad), to_fp32(_per_head(v, q)))
    scores_grad = (probabilities * (inner - row_sums.unsqueeze(-1)) / math.sqrt(q.shape[-1])).to(q.dtype)
    dq = torch.einsum("bhqk,kbhd->qbhd", scores_grad, _per_head(k, q))
    dk = torch.einsum("bhqk,qbhd->kbhd", scores_grad, q)
    dv = torch.einsum("bhqk,qbhd->kbhd", probabilities.to(q.dtype), grad)
    dsinks = None if rules.sinks is None else _sinks_grad(rules.sinks, lse, row_sums)
    per_group = (*k.shape[:3], -1)
    return dq, dk.view(*per_group, k.shape[3]).sum(3), dv.view(*per_group, v.shape[3]).sum(3), dsinks


def _scores(q: Tensor, k: Tensor, rules: Visibility) -> Tensor:
    """q·kᵀ/√dim [batch, heads, queries, keys], −∞ where a query does not see a key; the last query has the last key."""
    scores = torch.einsum("qbhd,kbhd->bhqk", to_fp32(q), to_fp32(_per_head(k, q))) / math.sqrt(q.shape[-1])
    last = k.shape[0]
    if rules.mask is not None:
        return scores + rules.mask[..., last - q.shape[0] : last, :last]
    unseen = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(last - q.shape[0] + 1)
    return scores.masked_fill(unseen, -math.inf)


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values, repeated for each query head of their group."""
    return x.repeat_interleave(q.shape[2] // x.shape[2], dim=2)
