"""Sections of a model's spec: experts, latent attention, rotary scaling, and the training it was published with."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from planner.specs.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Spec
from planner.specs.optimizer import OptimizerDefaults

AttentionKind = Literal[
    "full", "sliding", "chunked", "indexed", "sparse", "mamba", "mamba2", "full_mamba2", "gated_delta", "kimi_delta",
    "lightning", "conv", "none",
]  # fmt: skip
"""Ways to mix tokens. `indexed` layers choose the keys that they attend to, `sparse` ones take an earlier layer's
choice; `full_mamba2` layers attend and scan side by side."""
MlpKind = Literal["dense", "moe", "none"]
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "xielu"]

NEEDS: dict[AttentionKind, str] = {
    "sliding": "sliding_window", "chunked": "attention_chunk_size", "indexed": "indexer", "sparse": "indexer",
    "mamba": "mamba", "mamba2": "mamba", "full_mamba2": "mamba", "gated_delta": "linear_attention",
    "kimi_delta": "linear_attention", "lightning": "linear_attention", "conv": "short_conv_kernel",
}  # fmt: skip
"""The field of a model without which it cannot have layers of a kind."""
SPARSE: frozenset[AttentionKind] = frozenset({"indexed", "sparse"})
"""Kinds of attention to chosen keys."""

ScoringFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]


class MoESpec(Spec):
    """The mixture-of-experts part of a model."""

    num_experts: PositiveInt
    """Routed experts per MoE layer."""
    num_experts_per_tok: PositiveInt
    """Routed experts that each token visits (top-k)."""
    moe_intermediate_size: PositiveInt
    """Width of one routed expert."""
    shared_expert_intermediate_size: NonNegativeInt = 0
    """Total width of the shared experts, which every token visits; 0 for none."""
    shared_expert_gate: bool = False
    """A learned scalar gate on the shared expert (Qwen2-MoE)."""
    first_k_dense_replace: NonNegativeInt = 0
    """The first k layers have a dense MLP."""
    moe_layer_freq: PositiveInt = 1
    """Every n-th layer (the n-th, 2n-th, …) after the first k is MoE."""
    router_bias: bool = False
    """One number per expert beside the router matrix (DeepSeek-V3, gpt-oss)."""
    balancing_bias: bool | None = None
    """The router's bias steers the load and is not learned by a gradient (DeepSeek-V3). Given none: it does so where
    there is one and the experts have no biases."""
    bias_update_rate: NonNegativeFloat | None = None
    """Step by which a balancing bias moves; given none, the trainer's."""
    scoring_func: ScoringFunction | None = None
    """Function that turns router logits into scores. Given none: sigmoid under a balancing bias, else softmax."""
    norm_topk_prob: bool = True
    """The scores of the chosen experts are divided by their sum."""
    routed_scaling_factor: PositiveFloat = 1.0
    """Factor on the scores of the chosen experts."""
    scores_on_input: bool = False
    """Scores scale what goes into an expert, not what comes out (Llama 4)."""
    n_group: PositiveInt | None = None
    """Groups of experts from which `topk_group` are chosen first (DeepSeek-V2 and V3)."""
    topk_group: PositiveInt | None = None
    """Groups that a token may visit."""
    router_aux_loss_coef: NonNegativeFloat | None = None
    """Weight of the load-balancing loss; given none, it was not published."""
    seq_aux: bool = False
    """The load-balancing loss is of each sequence and not of the whole batch (DeepSeek)."""
    expert_norms: bool = False
    """Norms before the experts, behind them and behind the shared expert, and scales in the router (Gemma 4)."""
    num_zero_experts: NonNegativeInt = 0
    """Experts beside the routed ones that give a token back as it is (LongCat)."""
    latent_size: PositiveInt | None = None
    """Width to which tokens are projected before they are sent to experts (Nemotron 3 Super); null: hidden_size."""
    router_z_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss on the square of the logits' log-sum-exp (ST-MoE)."""

    @model_validator(mode="after")
    def _top_k_exists(self) -> MoESpec:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) exceeds num_experts ({self.num_experts})"
            )
        groups, chosen = self.n_group or 1, self.topk_group or 1
        if chosen > groups or self.num_experts % groups:
            raise ValueError(
                f"n_group ({groups}) and topk_group ({chosen}): need equal groups of the {self.num_experts} experts, "
                "and no more chosen than there are"
            )
        return self


class MLASpec(Spec):
    """Multi-head latent attention (DeepSeek-V2, 2024): low-rank queries and key-values."""

    q_lora_rank: PositiveInt | None = None
    """Rank of the query down-projection; null when queries are projected directly."""
    kv_lora_rank: PositiveInt
    """Rank of the latents that keys and values share."""
    qk_nope_head_dim: PositiveInt
    """Width of a query or key head without rotary positions."""
    qk_rope_head_dim: PositiveInt
    """Width of its rotated part."""
    v_head_dim: PositiveInt
    """Width of a value head."""


class RopeScalingSpec(Spec):
    """How rotary frequencies are stretched to longer sequences, as `rope_scaling` of a config says it.

    A trainer's configuration depends on it, and the kernels that rotate where it scales too.
    """

    rope_type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    """The method."""
    factor: PositiveFloat | None = None
    """How many times longer the sequences are than those of `original_max_position_embeddings`."""
    original_max_position_embeddings: PositiveInt | None = None
    """Positions that the model was trained with at first."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: wavelengths beyond the original positions over this are divided by the factor."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: wavelengths below the original positions over this stay as they are."""
    beta_fast: PositiveFloat | None = None
    """yarn: turns above which a frequency stays as it is."""
    beta_slow: PositiveFloat | None = None
    """yarn: turns below which a frequency is divided by the factor."""
    mscale: NonNegativeFloat | None = None
    """yarn: weight of the factor's logarithm in the scale of rotated queries and keys."""
    mscale_all_dim: NonNegativeFloat | None = None
    """yarn: the same for whole heads."""
    attention_factor: PositiveFloat | None = None
    """yarn, longrope: scale of rotated queries and keys; given none, it follows from the factor."""
    truncate: bool | None = None
    """yarn: bounds of the ramp are rounded to whole dimensions; given none, they are."""
    short_factor: tuple[PositiveFloat, ...] | None = Field(default=None, repr=False)
    """longrope: a divisor per frequency up to the original positions."""
    long_factor: tuple[PositiveFloat, ...] | None = Field(default=None, repr=False)
    """longrope: a divisor per frequency beyond them."""

    @property
    def yarn_scale(self) -> float:
        """The scale that yarn gives rotated queries and keys: (0.1·mscale·ln(factor) + 1) over that of whole heads.

        As transformers computes it, which takes 1 and 0 for the two weights unless both are given.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        growth = 0.1 * math.log(max(self.factor or 1.0, 1.0))
        if self.mscale and self.mscale_all_dim:
            return (growth * self.mscale + 1) / (growth * self.mscale_all_dim + 1)
        return growth + 1


class TrainingDefaults(Spec):
    """The training that the model was published with; used where the user says nothing."""

    seq_length: PositiveInt
    """Tokens of a sequence."""
    tokens_per_step: PositiveInt
    """Tokens of an optimizer step."""
    optimizer: OptimizerDefaults | None = None
    """How its weights were learned."""
    source: str = ""
    """Source of these numbers."""
