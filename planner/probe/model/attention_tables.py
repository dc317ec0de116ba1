"""Constants that attention layers share: rotary angles and masks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.probe.model.attention_kernels import takes_flash
from planner.probe.model.peers import TensorPeers
from planner.probe.model.split_sequence import shard
from planner.probe.model.surroundings import Surroundings
from planner.specs.model import ModelSpec

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
    heads, distance = model.num_attention_heads, positions[:, None] - positions
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float32) / heads)
    slopes = slopes.chunk(tp.size)[tp.rank]
    return torch.where(distance >= 0, -distance * slopes[:, None, None], -math.inf)


def rotate(x: Tensor, tables: AttentionTables) -> Tensor:
    """Rotary embedding of x [seq, batch, heads, dim]: chunk, multiply, add, concatenate."""
    if tables.cos is None or tables.sin is None:
        return x
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * tables.cos - second * tables.sin, second * tables.cos + first * tables.sin), dim=-1)
