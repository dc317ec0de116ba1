"""Layers that scan, written in torch from their papers: chunked products, and kernels that keep what fused ones keep.

`Kernel` stands for a fused kernel: it computes, keeps the tensors that mamba_ssm 2.2 or flash-linear-attention 0.4 keep
for the backward (`save_for_backward` of their autograd functions), and gives gradients of the right shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.specs.model_parts import LinearAttentionSpec, MambaSpec


class Kernel(torch.autograd.Function):
    """compute(*inputs) → (outputs, kept tensors)."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., tuple[Any, tuple[Tensor, ...]]], *inputs: Tensor) -> Any:
        outputs, kept = compute(*inputs)
        ctx.save_for_backward(*kept)
        ctx.shapes = [(x.shape, x.dtype) for x in inputs]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *(torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes)


def run(compute: Callable[..., tuple[Any, tuple[Tensor, ...]]], *inputs: Tensor) -> Any:
    return Kernel.apply(compute, *inputs)


def causal(x: Tensor, convolution: nn.Conv1d) -> Tensor:
    """A causal convolution over the sequence; x is [batch, seq, channels]."""
    weight = convolution.weight
    mixed = functional.conv1d(
        x.transpose(1, 2), weight, convolution.bias, padding=weight.shape[-1] - 1, groups=len(weight)
    )
    return mixed[..., : x.shape[1]].transpose(1, 2)


def filters(channels: int, taps: int, bias: bool) -> nn.Conv1d:
    return nn.Conv1d(channels, channels, taps, padding=taps - 1, groups=channels, bias=bias)


class GatedNorm(nn.Module):
    """RMSNorm(x) · silu(z) in one kernel, which keeps its inputs and a statistic for each of `groups` of a token."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.weight, self.groups = nn.Parameter(torch.ones(width)), groups

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        def compute(x: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            rows = x.unflatten(-1, (self.groups, -1)).float()
            root = rows.square().mean(-1).rsqrt()
            normed = (rows * root[..., None]).flatten(-2) * weight.repeat(x.shape[-1] // len(weight))
            return (normed * functional.silu(z.float())).to(x.dtype), (x, z, root)

        return run(compute, x, z, self.weight)  # type: ignore[no-any-return]


def ssd(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """Chunked duality (Dao and Gu 2024, listing 1): x [b, l, h, p], decay [b, l, h], b and c [b, l, g, n]."""
    x, decay, b, c = (t.unflatten(1, (-1, chunk)) for t in (x, decay, b, c))
    heads, groups = x.shape[3], b.shape[3]
    total = decay.cumsum(2)
    scores = torch.einsum("zclgn,zcsgn->zcgls", c, b).repeat_interleave(heads // groups, 2)
    mask = torch.ones(chunk, chunk).tril()
    within = torch.exp(total[:, :, :, None] - total[:, :, None]).permute(0, 1, 4, 2, 3) * mask
    y = torch.einsum("zchls,zcshp->zclhp", scores * within, x)
    spread = b.repeat_interleave(heads // groups, 3) * torch.exp(total[:, :, -1:] - total)[..., None]
    added = torch.einsum("zcshn,zcshp->zchpn", spread, x)
    states, state = [], torch.zeros_like(added[:, 0])
    for index in range(added.shape[1]):
        states.append(state)
        state = state * torch.exp(total[:, index, -1])[..., None, None] + added[:, index]
    read = c.repeat_interleave(heads // groups, 3) * torch.exp(total)[..., None]
    return (y + torch.einsum("zclhn,zchpn->zclhp", read, torch.stack(states, 1))).flatten(1, 2)


class Mamba2(nn.Module):
    """Mamba-2 as `mamba_split_conv1d_scan_combined` runs it, which keeps the projection and the output."""

    def __init__(self, hidden: int, spec: MambaSpec) -> None:
        super().__init__()
        assert spec.num_heads is not None
        self.spec, self.heads, width = spec, spec.num_heads, spec.intermediate_size
        self.both = 2 * spec.n_groups * spec.state_size
        self.into = nn.Linear(hidden, 2 * width + self.both + self.heads, bias=False)
        self.convolution = filters(width + self.both, spec.conv_kernel, spec.conv_bias)
        self.decay, self.skip, self.step = (nn.Parameter(torch.zeros(self.heads)) for _ in range(3))
        self.norm = GatedNorm(width, spec.n_groups)
        self.out = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        spec, width = self.spec, self.spec.intermediate_size

        def compute(projected: Tensor, *weights: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            _, mixed, steps = projected.float().split([width, width + self.both, self.heads], -1)
            mixed = functional.silu(causal(mixed.to(projected.dtype), self.convolution)).float()
            values, b, c = mixed.split([width, self.both // 2, self.both // 2], -1)
            step = functional.softplus(steps + self.step.float())
            heads = values.unflatten(-1, (self.heads, -1))
            b, c = (t.unflatten(-1, (spec.n_groups, -1)) for t in (b, c))
            y = ssd(heads * step[..., None], -step * self.decay.float().exp(), b, c, spec.chunk_size)
            output = (y + heads * self.skip.float()[:, None]).flatten(2).to(projected.dtype)
            return output, (projected, output)

        projected = self.into(x)
        y = run(compute, projected, self.step, self.decay, self.skip, *self.convolution.parameters())
        return self.out(self.norm(y, projected[..., :width]))  # type: ignore[no-any-return]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """The chunked gated delta rule (Yang et al. 2024): all [b, h, l, d], g a decay a head or a channel, beta [b, h, l].

    Gives the output, the triangles of all chunks, and the decays summed within a chunk.
    """
    q, k, v, g, beta = (t.unflatten(2, (-1, chunk)) for t in (q, k, v, g, beta))
    total = g.cumsum(3)
    lower = torch.ones(chunk, chunk).tril(-1)
    keys = k * beta[..., None]
    pairs = (keys * total.exp()) @ (k * (-total).exp()).transpose(-1, -2) * lower
    identity = torch.eye(chunk)
    triangle = torch.linalg.solve_triangular(identity + pairs, identity.expand_as(pairs), upper=False)
    values, erased = triangle @ (v * beta[..., None]), triangle @ (keys * total.exp())
    scores = (q * total.exp()) @ (k * (-total).exp()).transpose(-1, -2) * torch.ones(chunk, chunk).tril()
    state = torch.zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outputs = []
    for index in range(q.shape[2]):
        new = values[:, :, index] - erased[:, :, index] @ state
        outputs.append((q[:, :, index] * total[:, :, index].exp()) @ state + scores[:, :, index] @ new)
        last = total[:, :, index, -1:]
        kept = last.exp().transpose(-1, -2)
        state = state * kept + (k[:, :, index] * (last - total[:, :, index]).exp()).transpose(-1, -2) @ new
    return torch.stack(outputs, 2).flatten(2, 3), triangle, total


class GatedDelta(nn.Module):
    """Gated delta net (Qwen3-Next): one projection to q, k, v, z and one to decay and step."""

    def __init__(self, hidden: int, spec: LinearAttentionSpec) -> None:
        super().__init__()
        self.spec, self.keys = spec, spec.num_key_heads * spec.key_head_dim
        self.values = spec.num_value_heads * spec.value_head_dim
        self.into = nn.Linear(hidden, 2 * (self.keys + self.values), bias=False)
        self.gates = nn.Linear(hidden, 2 * spec.num_value_heads, bias=False)
        self.convolution = filters(2 * self.keys + self.values, spec.conv_kernel or 1, bias=False)
        self.decay, self.step = (nn.Parameter(torch.zeros(spec.num_value_heads)) for _ in range(2))
        self.norm = GatedNorm(spec.value_head_dim, spec.num_value_heads)
        self.out = nn.Linear(self.values, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        spec, channels = self.spec, 2 * self.keys + self.values

        def compute(projected: Tensor, gates: Tensor, *weights: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            dtype = projected.dtype
            mixed = functional.silu(causal(projected[..., :channels], self.convolution))
            q, k, v = mixed.split([self.keys, self.keys, self.values], -1)
            q, k = (t.unflatten(-1, (spec.num_key_heads, -1)) for t in (q, k))
            q, k = (t.repeat_interleave(spec.num_value_heads // spec.num_key_heads, 2).float() for t in (q, k))
            roots = [t.square().sum(-1).rsqrt() for t in (q, k)]
            q, k = (t * root[..., None] for t, root in zip((q, k), roots, strict=True))
            v = v.unflatten(-1, (spec.num_value_heads, -1)).contiguous()
            a, b = gates.float().chunk(2, -1)
            beta, g = b.sigmoid(), -self.decay.float().exp() * functional.softplus(a + self.step.float())
            heads = (t.transpose(1, 2) for t in (q, k, v.float(), g[..., None], beta))
            o, triangle, total = delta_rule(*heads, spec.chunk_size)
            o = o.transpose(1, 2).flatten(2).to(dtype).contiguous()
            kept = (projected, gates, q.to(dtype), k.to(dtype), v, total, beta.to(dtype), *roots, triangle.to(dtype), o)
            return o, kept

        projected, gates = self.into(x), self.gates(x)
        o = run(compute, projected, gates, self.decay, self.step, *self.convolution.parameters())
        return self.out(self.norm(o, projected[..., channels:]))  # type: ignore[no-any-return]


class Lightning(nn.Module):
    """Lightning attention (MiniMax-01): chunks with a fixed decay, a norm over all heads, a gate."""

    def __init__(self, hidden: int, spec: LinearAttentionSpec) -> None:
        super().__init__()
        self.spec, width = spec, spec.num_value_heads * spec.value_head_dim
        self.into, self.gate = nn.Linear(hidden, 3 * width, bias=False), nn.Linear(hidden, width, bias=False)
        self.weight = nn.Parameter(torch.ones(width))
        self.out = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def compute(mixed: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            q, k, v = (t.unflatten(1, (-1, self.spec.chunk_size)) for t in self._heads(mixed))
            scores = torch.einsum("zclhd,zcshd->zchls", q, k).tril()
            y, state = torch.einsum("zchls,zcshd->zclhd", scores, v), torch.zeros(1, 1, 1, 1)
            added = torch.einsum("zcshd,zcshe->zchde", k, v)
            states = torch.stack([state + added[:, :i].sum(1) for i in range(added.shape[1])], 1)
            o = (y + torch.einsum("zclhd,zchde->zclhe", q, states)).flatten(1, 2).flatten(2).to(mixed.dtype)
            return o, (mixed, o)

        def norm(o: Tensor, weight: Tensor, gate: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            root = o.float().square().mean(-1).rsqrt()
            normed, opened = (o * root[..., None] * weight).to(o.dtype), gate.sigmoid()
            return normed * opened, (o, root, normed, opened, gate)

        mixed = functional.silu(self.into(x))
        return self.out(run(norm, run(compute, mixed), self.weight, self.gate(x)))  # type: ignore[no-any-return]

    def _heads(self, mixed: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.unflatten(-1, (self.spec.num_value_heads, -1)).float() for t in mixed.chunk(3, -1))


class ShortConv(nn.Module):
    """The short convolution of LFM2, between two gates."""

    def __init__(self, hidden: int, taps: int) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.convolution = filters(hidden, taps, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def compute(before: Tensor, *weights: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            return causal(before, self.convolution).contiguous(), (before,)

        b, c, values = self.into(x).chunk(3, -1)
        return self.out(c * run(compute, b * values, *self.convolution.parameters()))  # type: ignore[no-any-return]
