"""The small GPT: transformer layers of tensor parallel ranks, the stages that they make, and random tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from small_gpt.job import Layout
from torch import nn

HIDDEN, HEADS, VOCABULARY = 128, 4, 512


class _Sum(torch.autograd.Function):
    """All-reduce of activations in the forward (row-parallel), or of gradients in the backward (column-parallel)."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any, forwards: bool) -> torch.Tensor:
        ctx.group, ctx.forwards = group, forwards
        if forwards:
            values = values.clone()
            dist.all_reduce(values, group=group)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        if not ctx.forwards:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None, None


class Block(nn.Module):
    """A transformer layer, of which each tensor rank holds some heads and a part of the MLP."""

    def __init__(self, tp: int, group: Any) -> None:
        super().__init__()
        self.tp, self.group = tp, group
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN // tp), nn.Linear(HIDDEN // tp, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN // tp), nn.Linear(4 * HIDDEN // tp, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self._split(self.norm1(x))).view(batch, length, 3, HEADS // self.tp, HIDDEN // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self._sum(self.out(mixed.transpose(1, 2).reshape(batch, length, -1)))
        return x + self._sum(self.down(nn.functional.gelu(self.up(self._split(self.norm2(x))))))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(x, self.group, False) if self.tp > 1 else x  # type: ignore[no-any-return]

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(x, self.group, True) if self.tp > 1 else x  # type: ignore[no-any-return]


class Part(nn.Module):
    """The layers of one stage, the embedding before the first and the head behind the last; `before` runs in each."""

    def __init__(self, blocks: list[nn.Module], first: bool, last: bool, before: Callable[[], None]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if first else None
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(HIDDEN, VOCABULARY) if last else None
        self.before = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before()
        x = self.embedding(x) if self.embedding is not None else x
        for block in self.blocks:
            x = block(x)
        return self.head(x) if self.head is not None else x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Tokens(torch.utils.data.Dataset[torch.Tensor]):
    """Random tokens of one step each; `stall` runs before they are given."""

    def __init__(self, layout: Layout, seed: int, stall: Callable[[int], None]) -> None:
        self.shape = (layout.num_microbatches * layout.micro_batch_size, layout.seq_length + 1)
        self.seed, self.stall = seed, stall

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        self.stall(index)
        return torch.randint(VOCABULARY, self.shape, generator=torch.Generator().manual_seed(self.seed + index))
