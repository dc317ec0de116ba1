"""Three models that nobody knows, for the tests of `plan models trace`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

HIDDEN, LAYERS, VOCAB = 256, 4, 1000


class Attention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        parts = (one.view(batch, tokens, self.heads, -1).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, HIDDEN))


class GatedConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 4, groups=HIDDEN, padding=3)
        self.gate, self.out = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.gate(x).chunk(2, -1)
        value = self.conv(value.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return self.out(value * torch.sigmoid(gate))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(x)))


class Experts(nn.Module):
    """Eight experts of a fixed capacity: each takes its share of the tokens, whatever they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 8, bias=False)
        self.up = nn.Parameter(0.02 * torch.randn(8, HIDDEN, 2 * HIDDEN))
        self.down = nn.Parameter(0.02 * torch.randn(8, 2 * HIDDEN, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.router(x).softmax(-1).amax(-1, keepdim=True)
        rows = x.reshape(8, -1, HIDDEN)
        return torch.bmm(functional.silu(torch.bmm(rows, self.up)), self.down).reshape(x.shape) * weights


class Block(nn.Module):
    def __init__(self, mixer: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2, self.mixer, self.mlp = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN), mixer, mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Odd(nn.Module):
    def __init__(self, blocks: list[nn.Module], extra: bool = False) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.RMSNorm(HIDDEN)
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.extra = nn.Linear(HIDDEN, HIDDEN, bias=False) if extra else nn.Identity()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.extra(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def hybrid() -> nn.Module:
    return Odd([Block(Attention(4) if i % 2 else GatedConv(), Feed()) for i in range(LAYERS)])


def experts() -> nn.Module:
    return Odd([Block(Attention(8), Experts()) for _ in range(LAYERS)], extra=True)


class Unfused(Attention):
    """Attention in plain torch, whose scores are kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (one.view(batch, tokens, self.heads, -1).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).reshape(batch, tokens, HIDDEN))


def unfused() -> nn.Module:
    model = Odd([Block(Unfused(4), Feed()) for _ in range(LAYERS)])
    model.head.weight = model.embed.weight
    return model


class Chunked(Attention):
    """A scan in a loop over parts of 64 tokens, of which longer sequences have more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (one.view(batch, tokens, self.heads, -1).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        state, parts = x.new_zeros(batch, self.heads, q.shape[-1], q.shape[-1]), []
        for i in range(0, tokens, 64):
            a, b, c = (one[:, :, i : i + 64] for one in (q, k, v))
            parts.append(torch.tril(a @ b.transpose(-1, -2)) @ c + a @ state)
            state = 0.9 * state + b.transpose(-1, -2) @ c
        return self.out(torch.cat(parts, 2).transpose(1, 2).reshape(batch, tokens, HIDDEN))


def chunked() -> nn.Module:
    return Odd([Block(Chunked(4), Feed()) for _ in range(LAYERS)])


class Looped(Odd):
    """Two blocks, and two others that run three times each."""

    def __init__(self) -> None:
        super().__init__([Block(Attention(4), Feed()) for _ in range(2)])
        self.first = nn.ModuleList(Block(GatedConv(), Feed()) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in (*self.first, *self.blocks, *self.blocks, *self.blocks):
            x = block(x)
        return self.head(self.norm(x))


def looped() -> nn.Module:
    return Looped()


class Waits(nn.Module):
    """Its shapes depend on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids)[ids.nonzero()[:, 0]]


def waits() -> nn.Module:
    return Waits()


def weights() -> dict[str, torch.Tensor]:
    return {}
