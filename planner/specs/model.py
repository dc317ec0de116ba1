"""The model: a sequence of layer kinds, in the words of a Hugging Face `config.json`."""

from __future__ import annotations

from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from planner.specs.base import Name, NonNegativeInt, PositiveFloat, PositiveInt, Spec
from planner.specs.optimizer import OptimizerDefaults

AttentionKind = Literal["full", "sliding", "chunked"]


class LayerKind(NamedTuple):
    """The make of a decoder layer; layers of the same kind cost the same."""

    attention: AttentionKind
    mlp: Literal["dense", "moe"]

    def __str__(self) -> str:
        return self.mlp if self.attention == "full" else f"{self.mlp}-{self.attention}"


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
    """One learned number per expert beside the router matrix (DeepSeek-V3, gpt-oss)."""

    @model_validator(mode="after")
    def _top_k_exists(self) -> MoESpec:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok ({self.num_experts_per_tok}) exceeds num_experts ({self.num_experts})"
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


_MOE_FIELDS = frozenset(MoESpec.model_fields)
_MLA_FIELDS = frozenset(MLASpec.model_fields)


class ModelSpec(Spec):
    """A decoder-only transformer. Field names follow Hugging Face where it has one."""

    flat_sections: ClassVar[tuple[str, ...]] = ("moe", "mla")
    """Sections whose fields may also be given at the top, as a `config.json` does."""

    name: Name
    """The model's name."""
    aliases: tuple[str, ...] = ()
    """Other names, in lower case."""
    source: str = ""
    """The model's report and its config."""
    num_hidden_layers: PositiveInt = Field(le=10_000)
    """Decoder layers."""
    hidden_size: PositiveInt = Field(le=10**6)
    """Width of the residual stream."""
    intermediate_size: PositiveInt | None = Field(default=None, le=10**7)
    """Width of the dense MLP; null when every layer is MoE."""
    num_attention_heads: PositiveInt = Field(le=10**5)
    """Query heads."""
    num_key_value_heads: PositiveInt
    """Key-value heads (grouped-query attention); given none, as many as query heads."""
    head_dim: PositiveInt
    """Width of a head; given none, hidden_size / num_attention_heads."""
    vocab_size: PositiveInt = Field(le=10**8)
    """Tokens of the vocabulary, before padding."""
    tie_word_embeddings: bool = False
    """Embedding and head share one matrix."""
    gated_mlp: bool = True
    """SwiGLU and its kin: gate and up projections; false for a plain two-matrix MLP."""
    activation: Literal["silu", "gelu", "relu", "relu2"] = "silu"
    """Activation of the MLP."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of the layers' norms."""
    bias: bool = False
    """Every linear layer of the block has a bias (and so has LayerNorm), unless a field below says otherwise."""
    norm_bias: bool | None = None
    """LayerNorms have biases; given none, as `bias`."""
    attention_bias: Literal["none", "qkv", "all"] | None = None
    """Projections of attention that have biases; given none, as `bias`."""
    mlp_bias: bool | None = None
    """Linear layers of the MLP have biases; given none, as `bias`."""
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys (Qwen3, Gemma 3)."""
    post_norms: bool = False
    """A second norm after attention and after the MLP (Gemma 2 and 3): four norms a layer."""
    embedding_norm: bool = False
    """A LayerNorm right after the embedding (BLOOM)."""
    attention_sinks: bool = False
    """One learned sink logit per query head (gpt-oss)."""
    position_embedding: Literal["rope", "learned", "alibi", "none"]
    """Kind of positions. Given none: rope where the MLP is gated, else learned where max_position_embeddings is set."""
    rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies: no size and no price depends on it, a trainer's configuration does."""
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    """Share of every head that is rotated; no size and no price depends on it either."""
    max_position_embeddings: PositiveInt | None = None
    """Rows of a learned position table; without meaning for the others."""
    sliding_window: PositiveInt | None = None
    """Keys each query sees on sliding layers, itself included."""
    attention_chunk_size: PositiveInt | None = None
    """Tokens of a chunk, beyond which a query sees no keys on such layers (Llama 4)."""
    sliding_window_pattern: PositiveInt | None = None
    """Every n-th layer has full attention, the others slide or attend in chunks; null: all do."""
    moe: MoESpec | None = None
    """The mixture of experts; null for dense models."""
    mla: MLASpec | None = None
    """Latent attention; null where attention is not latent."""
    num_nextn_predict_layers: NonNegativeInt = Field(default=0, le=16)
    """Multi-token-prediction blocks after the last layer (DeepSeek-V3)."""
    training: TrainingDefaults | None = None
    """The training that it was published with."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, data: Any) -> Any:
        """Gather flat MoE and MLA fields, and derive what a config may leave out."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for section, names in (("moe", _MOE_FIELDS), ("mla", _MLA_FIELDS)):
            flat = {key: data.pop(key) for key in names & data.keys()}
            if flat and data.get(section) is None:
                data[section] = flat
            elif flat:
                raise ValueError(f"{', '.join(sorted(flat))}: given both at the top and under {section}")
        heads, hidden = data.get("num_attention_heads"), data.get("hidden_size")
        if data.get("num_key_value_heads") is None:
            data["num_key_value_heads"] = heads
        if (
            data.get("head_dim") is None
            and isinstance(heads, int)
            and isinstance(hidden, int)
            and min(heads, hidden) > 0
        ):
            if hidden % heads:
                raise ValueError(
                    f"head_dim is missing and hidden_size ({hidden}) is no multiple of num_attention_heads ({heads})"
                )
            data["head_dim"] = hidden // heads
        if data.get("position_embedding") is None:
            rotary, learned = data.get("gated_mlp", True), data.get("max_position_embeddings") is not None
            data["position_embedding"] = "rope" if rotary else "learned" if learned else "none"
        return data

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is no multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.position_embedding == "learned" and self.max_position_embeddings is None:
            raise ValueError("position_embedding 'learned' needs max_position_embeddings")
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ValueError("sliding_window and attention_chunk_size: both given, layers slide or attend in chunks")
        if self.intermediate_size is None and any(kind.mlp == "dense" for kind in self.layers):
            raise ValueError("intermediate_size is missing and the model has dense layers")
        return self

    @cached_property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each decoder layer, first to last."""
        return tuple(LayerKind(self._attention(i), self._mlp(i)) for i in range(self.num_hidden_layers))

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct layer kinds, in order of first appearance."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def runs(self) -> tuple[tuple[LayerKind, int], ...]:
        """Maximal runs of layers of one kind, in order: (kind, length)."""
        return tuple((kind, len(list(group))) for kind, group in groupby(self.layers))

    @property
    def qkv_bias(self) -> bool:
        return self.bias if self.attention_bias is None else self.attention_bias != "none"

    @property
    def output_bias(self) -> bool:
        """True where attention's output projection has a bias."""
        return self.bias if self.attention_bias is None else self.attention_bias == "all"

    @property
    def has_mlp_bias(self) -> bool:
        return self.bias if self.mlp_bias is None else self.mlp_bias

    @property
    def has_norm_bias(self) -> bool:
        return self.norm == "layernorm" and (self.bias if self.norm_bias is None else self.norm_bias)

    @property
    def num_position_parameters(self) -> int:
        """Parameters of the learned position table."""
        return (self.max_position_embeddings or 0) * self.hidden_size if self.position_embedding == "learned" else 0

    def _attention(self, layer: int) -> AttentionKind:
        pattern = self.sliding_window_pattern
        if pattern is not None and (layer + 1) % pattern == 0:
            return "full"
        return "sliding" if self.sliding_window is not None else "chunked" if self.attention_chunk_size else "full"

    def _mlp(self, layer: int) -> Literal["dense", "moe"]:
        moe = self.moe
        if moe is None or layer < moe.first_k_dense_replace:
            return "dense"
        return "moe" if (layer - moe.first_k_dense_replace + 1) % moe.moe_layer_freq == 0 else "dense"
