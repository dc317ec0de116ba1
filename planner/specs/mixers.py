"""Sections of a model's spec for layers that mix tokens otherwise than by plain attention."""

from __future__ import annotations

from pydantic import model_validator

from planner.specs.base import PositiveInt, Spec


class SlidingHeadsSpec(Spec):
    """Heads of the sliding layers, as far as they differ from those of the other layers (Gemma 4, MiMo-V2)."""

    num_attention_heads: PositiveInt | None = None
    """Query heads."""
    num_key_value_heads: PositiveInt | None = None
    """Key-value heads."""
    head_dim: PositiveInt | None = None
    """Width of a query or key head."""
    value_head_dim: PositiveInt | None = None
    """Width of a value head."""
    attention_sinks: bool | None = None
    """One learned sink logit per query head."""
    values_are_keys: bool | None = None
    """Values are the keys before their norm and rotation: there is no projection of values."""


class MambaSpec(Spec):
    """State-space mixers: Mamba (Gu and Dao, 2023) on `mamba` layers, Mamba-2 (Dao and Gu, 2024) on `mamba2` layers."""

    state_size: PositiveInt
    """Width of the state of a channel (N)."""
    intermediate_size: PositiveInt
    """Channels of all heads together (expand · hidden_size in most models)."""
    num_heads: PositiveInt | None = None
    """Heads of Mamba-2; null for Mamba."""
    n_groups: PositiveInt = 1
    """Groups of heads that share their B and C."""
    conv_kernel: PositiveInt = 4
    """Taps of the convolution."""
    conv_bias: bool = True
    """The convolution has a bias."""
    proj_bias: bool = False
    """The projections in and out have biases."""
    time_step_rank: PositiveInt | None = None
    """Rank of Mamba's time steps; null for Mamba-2."""
    chunk_size: PositiveInt = 256
    """Tokens of a chunk of Mamba-2's algorithm."""
    gated_norm: bool = True
    """A norm after Mamba-2's gate (not in Falcon-H1)."""
    inner_norms: bool = False
    """Norms of Mamba's time steps, B and C (Jamba)."""

    @model_validator(mode="after")
    def _heads_are_whole(self) -> MambaSpec:
        if self.num_heads is not None and self.intermediate_size % self.num_heads:
            raise ValueError(
                f"intermediate_size ({self.intermediate_size}) is no multiple of num_heads ({self.num_heads})"
            )
        if self.num_heads is not None and self.num_heads % self.n_groups:
            raise ValueError(f"num_heads ({self.num_heads}) is no multiple of n_groups ({self.n_groups})")
        return self


class LinearAttentionSpec(Spec):
    """Linear attention with a state per head: gated delta net, Kimi delta attention, lightning attention."""

    num_key_heads: PositiveInt
    """Heads of queries and keys."""
    num_value_heads: PositiveInt
    """Heads of values, and of the state."""
    key_head_dim: PositiveInt
    """Width of a query or key head."""
    value_head_dim: PositiveInt
    """Width of a value head."""
    conv_kernel: PositiveInt | None = None
    """Taps of the convolution over queries, keys and values; null for none (lightning attention)."""
    gate_rank: PositiveInt | None = None
    """Rank of the projections to the forget gate and the output gate (Kimi delta attention); null: they are full."""
    chunk_size: PositiveInt = 64
    """Tokens of a chunk of the algorithm."""

    @model_validator(mode="after")
    def _heads_are_whole(self) -> LinearAttentionSpec:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads ({self.num_value_heads}) is no multiple of num_key_heads ({self.num_key_heads})"
            )
        return self


class IndexerSpec(Spec):
    """The indexer of sparse attention (DeepSeek-V3.2), which chooses the keys that a query attends to."""

    index_n_heads: PositiveInt
    """Heads that score all keys before the query."""
    index_head_dim: PositiveInt
    """Width of such a head."""
    index_topk: PositiveInt
    """Keys that each query attends to."""
