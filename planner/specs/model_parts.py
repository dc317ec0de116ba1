"""Sections of a model's spec: experts, mixers, latent attention, rotary scaling, training as it was published.

So are layers as lists of operators that were traced from a user's own module (`plan models trace`).
"""

import math
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from planner.specs.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Spec, multiple


class OptimizerDefaults(Spec):
    """AdamW and the schedule of its learning rate, as a model was published with them. They cost no time."""

    learning_rate: PositiveFloat
    """Rate after the warm-up."""
    min_learning_rate: NonNegativeFloat
    """Rate at the end."""
    warmup_steps: PositiveInt
    """Steps over which the rate rises from nothing."""
    decay_style: Literal["cosine", "linear"] = "cosine"
    """Curve on which the rate falls."""
    decay_fraction: Fraction = 1.0
    """Share of the steps, the last ones, over which it falls; before them it is constant."""
    weight_decay: NonNegativeFloat = 0.1
    """Share of the weights, times the rate, that a step takes away."""
    beta1: Fraction = 0.9
    """Share of the mean of gradients that a step keeps."""
    beta2: Fraction = 0.95
    """Share of the mean of squared gradients that a step keeps."""
    epsilon: PositiveFloat = 1e-8
    """Term beside the root of the squared gradients' mean."""
    clip_grad: NonNegativeFloat = 1.0
    """Norm of all gradients above which they are scaled down."""
    init_std: PositiveFloat = Field(default=0.02, le=1)
    """Standard deviation of initial weights."""
    source: str = ""
    """Source of these numbers; the others are defaults."""


class MLASpec(Spec):
    """Multi-head latent attention (DeepSeek-V2, 2024): low-rank queries and key-values."""

    q_lora_rank: PositiveInt | None = None
    """Rank of the query down-projection; null when queries are projected directly."""
    gates_by_latents: bool = False
    """Queries and gates of the output come from the latents beside their norm's output, in one product (A.X-K2)."""
    kv_lora_rank: PositiveInt
    """Rank of the latents that keys and values share."""
    qk_nope_head_dim: PositiveInt
    """Width of a query or key head without rotary positions."""
    qk_rope_head_dim: NonNegativeInt
    """Width of its rotated part."""
    v_head_dim: PositiveInt
    """Width of a value head."""


class LayerSizesSpec(Spec):
    """Sizes of some layers, as far as they differ from the model's: heads of sliding layers (Gemma 4, MiMo-V2),
    those of any layer (Nemotron-NAS)."""

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
    intermediate_size: PositiveInt | None = None
    """Width of the dense MLP."""
    shares_keys: bool | None = None
    """Keys and values are an earlier layer's: there is no projection to them (Gemma 4 E)."""
    mla: MLASpec | None = None
    """Latent attention."""
    vector_parameters: NonNegativeInt | None = None
    """Parameters of a layer that are vectors."""
    shares_weights: bool | None = None
    """All weights are those of an earlier layer, which runs again (Ouro); of a shared block, its own (Zamba)."""
    compress_rate: PositiveInt | None = None
    """Tokens of a compressed key on `shared_compressed` layers."""
    makes_keys: bool | None = None
    """Such a layer compresses keys, for itself and for those behind it."""
    chooses_keys: bool | None = None
    """Such a layer chooses among them, for itself and for those behind it."""
    ngram_size: PositiveInt | None = None
    """Width of an embedding of n-grams that the layer adds to the streams."""
    ngram_parameters: NonNegativeInt | None = None
    """Parameters of its table."""


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

    _whole_heads = multiple("intermediate_size", "num_heads")
    _whole_groups = multiple("num_heads", "n_groups")


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
    full_output_gate: bool = False
    """The output gate has a full projection beside a forget gate of low rank (Kimi-K3)."""
    chunk_size: PositiveInt = 64
    """Tokens of a chunk of the algorithm."""

    _whole_heads = multiple("num_value_heads", "num_key_heads")


class CompressedAttentionSpec(Spec):
    """Attention to a window and to keys compressed over time (DeepSeek-V4): one shared head of keys that are values."""

    q_lora_rank: PositiveInt
    """Rank of the projection to queries."""
    o_groups: PositiveInt
    """Groups of heads whose outputs are projected by themselves."""
    o_lora_rank: PositiveInt
    """Width to which each group is projected, before all of them are mixed."""
    sparse_rate: PositiveInt = 4
    """Tokens that one key of a `compressed_sparse` layer stands for."""
    heavy_rate: PositiveInt = 128
    """Tokens that one key of a `heavily_compressed` layer stands for."""
    norms_queries: bool = True
    """Heads of queries are normed, without weights (not in DeepSeek-V4.1)."""
    candidates: PositiveInt | None = None
    """Keys among which `shared_compressed` layers choose that make none; null for all."""

    def rate(self, attention: str) -> int:
        """Tokens of a compressed key on layers of a kind; 0 where only the window is attended to."""
        return {"compressed_sparse": self.sparse_rate, "heavily_compressed": self.heavy_rate}.get(attention, 0)

    def overlaps(self, rate: int) -> bool:
        """True where a key pools the tokens of two windows: on `compressed_sparse` layers."""
        return rate == self.sparse_rate


class IndexerSpec(Spec):
    """The indexer of sparse attention (DeepSeek-V3.2), which chooses the keys that a query attends to."""

    index_n_heads: PositiveInt
    """Heads that score all keys before the query."""
    index_head_dim: PositiveInt
    """Width of such a head."""
    index_topk: PositiveInt
    """Keys that each query attends to."""
    tokens_per_key: PositiveInt = 1
    """Tokens whose keys are pooled to the one that is scored (Qwen4, GLM-5 Next)."""
    weighs_heads: bool = True
    """A weight for each head and token, of a projection of its own (not in MiniMax-M3)."""


AttentionKind = Literal[
    "full", "sliding", "chunked", "indexed", "sparse", "compressed_sparse", "heavily_compressed", "shared_compressed",
    "mamba", "mamba2", "full_mamba2", "shared_mamba", "shared_mamba2", "griffin", "gated_delta", "kimi_delta",
    "lightning", "conv", "cross", "differential", "linear", "none",
    "traced0", "traced1", "traced2", "traced3", "traced4", "traced5", "traced6", "traced7",
]  # fmt: skip
"""Ways to mix tokens. `indexed` layers choose the keys that they attend to, `sparse` ones take an earlier layer's
choice, `shared_compressed` ones an earlier layer's compressed keys too (DeepSeek-V4.1); `full_mamba2` layers attend and
scan side by side, `shared_mamba` and `shared_mamba2` ones scan behind a block of attention and MLP that layers share
(Zamba), `griffin` ones have RecurrentGemma's scan; `differential` ones subtract two attentions (DiffLlama), `linear`
ones have one square matrix in attention's place, `cross` ones attend to images alone; `traced` ones are lists of
operators of a user's own module."""
MlpKind = Literal["dense", "moe", "linear", "none"]
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "xielu", "situ"]

NEEDS: dict[AttentionKind, str] = {
    "sliding": "sliding_window", "chunked": "attention_chunk_size", "indexed": "indexer", "sparse": "indexer",
    "compressed_sparse": "indexer", "heavily_compressed": "compressed_attention",
    "shared_compressed": "indexer",
    "mamba": "mamba", "mamba2": "mamba", "full_mamba2": "mamba", "shared_mamba": "mamba", "shared_mamba2": "mamba",
    "griffin": "mamba", "gated_delta": "linear_attention",
    "kimi_delta": "linear_attention", "lightning": "linear_attention", "conv": "short_conv_kernel", "traced0": "traced",
}  # fmt: skip
"""The field of a model without which it cannot have layers of a kind."""
SPARSE: frozenset[AttentionKind] = frozenset(
    {"indexed", "sparse", "compressed_sparse", "heavily_compressed", "shared_compressed"}
)
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
    image_expert_intermediate_size: NonNegativeInt = 0
    """Width of as many experts again, to which tokens of images go (ERNIE-4.5-VL); 0 for none."""
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
    router_in_fp32: bool | None = None
    """Transformers computes the router's logits in fp32. Given none: it does so where a bias balances."""
    row_weights_in_fp32: bool | None = None
    """Its router's weights stay in fp32, and the rows that they weight with them (Mixtral). Given none: as logits."""
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
    output_norm: bool = False
    """A norm over what routed and shared experts give together (A.X-K1)."""
    latent_norm: bool = False
    """A norm over the experts' outputs in the latent width, before they are projected back (Kimi-K3)."""
    router_z_loss_coef: NonNegativeFloat = 0.0
    """Weight of the loss on the square of the logits' log-sum-exp (ST-MoE)."""

    @property
    def image_ratio(self) -> float:
        """Parameters of the experts for images over those of the others."""
        return self.image_expert_intermediate_size / self.moe_intermediate_size

    @model_validator(mode="after")
    def _top_k_exists(self) -> Self:
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


Scaling = Literal["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"]
"""Values that share a scale: a tensor, a row, a block of 128 × 128 (1 × 128 of activations), 32, or 16."""


class TrainingDefaults(Spec):
    """The training that the model was published with; used where the user says nothing."""

    seq_length: PositiveInt
    """Tokens of a sequence."""
    tokens_per_step: PositiveInt
    """Tokens of an optimizer step."""
    scaling: Scaling | None = None
    """The scales of its products in 8 bits; null where it was trained in 16, or nothing says."""
    optimizer: OptimizerDefaults | None = None
    """How its weights were learned."""
    source: str = ""
    """Source of these numbers."""


Polynomial = tuple[float, float, float]
"""A size of one sequence of s tokens: c₀ + c₁·s + c₂·s², as three lengths that were traced have it."""


class TracedTensor(Spec):
    """A tensor that is kept for the backward."""

    num_bytes: Polynomial
    """Bytes of one sequence."""
    is_sharded: bool = False
    """Each tensor-parallel rank keeps its share."""


class TracedOperator(Spec):
    """One operation of a layer on one sequence, or several element by element one after another."""

    name: str = Field(max_length=200)
    kind: Literal["gemm", "attention", "elementwise"]
    count: Polynomial = (1.0, 0.0, 0.0)
    m: Polynomial = (0.0, 0.0, 0.0)
    n: Polynomial = (0.0, 0.0, 0.0)
    k: Polynomial = (0.0, 0.0, 0.0)
    weight: bool = False
    """The product is by a weight."""
    heads: NonNegativeInt = 0
    kv_heads: NonNegativeInt = 0
    q_len: Polynomial = (0.0, 0.0, 0.0)
    kv_len: Polynomial = (0.0, 0.0, 0.0)
    qk_dim: NonNegativeInt = 0
    v_dim: NonNegativeInt = 0
    bytes: Polynomial = (0.0, 0.0, 0.0)
    """Bytes that element-by-element kernels move in a forward."""
    backward_bytes: Polynomial = (0.0, 0.0, 0.0)
    """Bytes that they move in the backward, as autograd ran it; some operations have no other."""
    family: Literal["residual", "norm", "strided", "permute", "cast"] = "residual"
    """Family of such kernels, which reach shares of the memory's bandwidth of their own."""
    kernels: NonNegativeInt = 0
    backward_kernels: NonNegativeInt = 0
    parameters: NonNegativeInt = 0
    split: Literal["", "columns", "rows", "inside"] = ""
    """Its share on a tensor-parallel rank: columns or rows of a weight, or what lies between them; empty: all of it."""
    kept: tuple[TracedTensor, ...] = ()


class TracedSpec(Spec):
    """The layers of a model that no table knows, as torch runs them, and the rest of its parameters."""

    source: str = Field(max_length=2000)
    """The module that was traced, and with which torch."""
    layers: tuple[tuple[TracedOperator, ...], ...]
    """The operators of each kind of layer: `traced0` first."""
    other_parameters: NonNegativeInt = 0
    """Parameters beside the layers, the embedding and the head."""
    is_split: bool = False
    """A plan of sharding was given, so that tensor parallelism can split the layers."""
    is_looped: bool = False
    """Layers run again after others, or share weights: they stand on one pipeline stage."""

    @model_validator(mode="after")
    def _has_a_backward(self) -> Self:
        moving = [one for layer in self.layers for one in layer if any(one.bytes)]
        if moving and not any(any(one.backward_bytes) for one in moving):
            module = self.source.rpartition(", torch ")[0] or "module:FILE.py:FACTORY"
            hint = f"trace the module again: plan models trace {module} -o model.yaml --force"
            raise PydanticCustomError("no_backward", "no operation has backward_bytes", {"hint": hint})
        return self
