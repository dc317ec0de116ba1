"""The model: a sequence of layer kinds, in the words of a Hugging Face `config.json`."""

from functools import cached_property
from itertools import groupby
from typing import Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from planner.specs.base import Name, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Spec, multiple
from planner.specs.model_parts import (
    NEEDS,
    SPARSE,
    Activation,
    AttentionKind,
    CompressedAttentionSpec,
    IndexerSpec,
    LayerSizesSpec,
    LinearAttentionSpec,
    MambaSpec,
    MLASpec,
    MlpKind,
    MoESpec,
    RopeScalingSpec,
    ScoringFunction,
    TracedSpec,
    TrainingDefaults,
)


class LayerKind(NamedTuple):
    """The make of a decoder layer; layers of the same kind cost the same."""

    attention: AttentionKind
    mlp: MlpKind
    sizes: int = 0
    """Number of the layer's sizes among those that layers have, from 1 on; 0 for those of the model."""

    def __str__(self) -> str:
        both = f"{self.mlp}-{self.attention}"
        name = self.attention if self.mlp == "none" else self.mlp if self.attention in ("full", "none") else both
        return f"{name} {self.sizes}" if self.sizes else name


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
    activation: Activation = "silu"
    """Activation of the MLP; `gelu_tanh` is its approximation by a tanh, `quick_gelu` x·sigmoid(1.702·x)."""
    swiglu_limit: PositiveFloat | None = None
    """Gate and up projections are clamped to this (gpt-oss); null for no clamp."""
    glu_linear_offset: NonNegativeFloat = 0.0
    """Number that is added to the up projection before the product with the activated gate (1 in gpt-oss)."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of the layers' norms."""
    norm_weight: bool = True
    """Norms have weights (not in OLMo)."""
    norm_eps: PositiveFloat | None = None
    """Number under the root of a norm (rms_norm_eps, layer_norm_eps); given none, 1e-5."""
    zero_centered_norm: bool = False
    """Norms multiply by 1 + weight (Gemma, Qwen3-Next)."""
    norm_in_fp32: bool | None = None
    """Weights of norms multiply in fp32 before the cast back (OLMo 2); given none, as `zero_centered_norm`."""
    rotary_in_fp32: bool = False
    """Transformers rotates queries and keys in fp32 (OLMo 2, ERNIE 4.5)."""
    packed_projections: Literal["none", "attention", "mlp", "all"] = "none"
    """Projections of one matrix in transformers: query, key and value (GPT-NeoX), gate and up (GLM-4), or both."""
    bias: bool = False
    """Every linear layer of the block has a bias (and so has LayerNorm), unless a field below says otherwise."""
    norm_bias: bool | None = None
    """LayerNorms have biases; given none, as `bias`."""
    attention_bias: Literal["none", "qkv", "output", "all"] | None = None
    """Projections of attention that have biases; given none, as `bias`."""
    mlp_bias: bool | None = None
    """Linear layers of the MLP have biases; given none, as `bias`."""
    head_bias: bool = False
    """The head has a bias (Phi, GPT-J)."""
    qk_norm: bool = False
    """Norms on queries and keys (Qwen3, Gemma 3)."""
    qk_norm_over: Literal["head_dim", "per_head", "hidden", "plain"] = "head_dim"
    """Extent of such a norm: a head, with one weight for all heads; a head, with a weight for each; all heads at once
    (OLMo 2); a head, without weights."""
    norm_gate_rank: PositiveInt | None = None
    """Rank of a gate on what the norms before attention and experts give (A.X-K2); null for none."""
    pre_norms: bool = True
    """A norm before attention and before the MLP; false where the norms are after them alone (OLMo 2, EXAONE 4)."""
    post_norms: bool = False
    """A norm after attention and after the MLP, before the residual sum; beside `pre_norms` there are four a layer."""
    parallel_residual: Literal["one_norm", "two_norms"] | None = None
    """Attention and MLP both read the layer's input, through one norm (Falcon-7B, Command R) or one each (GPT-NeoX);
    null where the MLP reads what attention adds to."""
    embedding_norm: bool = False
    """A LayerNorm right after the embedding (BLOOM)."""
    attention_sinks: bool = False
    """One learned sink logit per query head (gpt-oss)."""
    attn_head_gate: bool = False
    """The attention's output is multiplied by one sigmoid for each head (Step-3.5)."""
    query_rank: PositiveInt | None = None
    """Rank of the projection to queries where attention is not latent (Step-3); null for a full one."""
    value_head_dim: PositiveInt | None = None
    """Width of a value head (MiMo-V2); given none, head_dim. Latent attention has its own."""
    values_are_keys: bool = False
    """Values are the keys before their norm and rotation: there is no projection of values (Gemma 4)."""
    sliding_heads: LayerSizesSpec | None = None
    """Heads of the sliding layers where they differ from those of the others; null where they do not."""
    layer_sizes: tuple[LayerSizesSpec, ...] | None = Field(default=None, repr=False)
    """Sizes of each layer where they differ from the model's, `{}` where they do not; a shorter list repeats."""
    shares_keys: bool = False
    """Keys and values are an earlier layer's; said of layers by `layer_sizes`."""
    shares_weights: bool = False
    """All weights are an earlier layer's, which runs again; said of layers by `layer_sizes`."""
    block_adapter_ranks: tuple[NonNegativeInt, NonNegativeInt] = (0, 0)
    """Ranks of adapters of attention and MLP that each run of a shared block has of its own (Zamba 2); 0 for none."""
    compress_rate: PositiveInt = 1
    """Tokens of a compressed key on `shared_compressed` layers; said by `layer_sizes`, as are the next two."""
    makes_keys: bool = False
    """Such a layer compresses keys, for itself and for those behind it."""
    chooses_keys: bool = False
    """Such a layer chooses among them, for itself and for those behind it."""
    per_layer_input_size: PositiveInt | None = Field(default=None, le=10**5)
    """Width of an embedding that each layer has of its own (Gemma 4 E); null for none."""
    per_layer_vocab_size: PositiveInt | None = Field(default=None, le=10**8)
    """Tokens of it; given none, vocab_size."""
    vector_parameters: NonNegativeInt = Field(default=0, le=10**9)
    """Parameters of a layer that no other field counts: vectors that scale, gate or are added, in no time."""
    other_parameters: NonNegativeInt = Field(default=0, le=10**12)
    """Parameters beside layers, embedding and head that no other field counts."""
    attention_multiplier: PositiveFloat | None = None
    """Scale of the attention logits; given none, 1 / √(width of a query head)."""
    attn_logit_softcapping: PositiveFloat | None = None
    """Attention logits are squeezed between ± this by a tanh (Gemma 2)."""
    final_logit_softcapping: PositiveFloat | None = None
    """The same for the logits of the vocabulary."""
    attn_output_gate: bool = False
    """The attention's output is multiplied by a sigmoid of a projection as wide as the queries (Qwen3-Next)."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor on the embedding (Granite; √hidden_size in Gemma)."""
    residual_dropout: bool = False
    """Transformers drops out what attention and MLP add to the residual stream (Seed-OSS)."""
    residual_multiplier: PositiveFloat = 1.0
    """Factor on what attention and the MLP add to the residual stream (Granite)."""
    logits_scaling: PositiveFloat = 1.0
    """Number by which the logits of the vocabulary are divided (Granite)."""
    causal: bool = True
    """Tokens attend to those before them alone; false where each attends to all (the layers of a vision tower)."""
    position_embedding: Literal["rope", "learned", "alibi", "none"]
    """Kind of positions. Given none: rope where the MLP is gated, else learned where max_position_embeddings is set."""
    rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies: no size and no price depends on it, a trainer's configuration does."""
    rope_local_base_freq: PositiveFloat | None = None
    """Base of the rotary frequencies on sliding layers (Gemma 3); given none, `rope_theta`."""
    rope_scaling: RopeScalingSpec | None = None
    """Stretching of the rotary frequencies; null for none."""
    no_rope_layer_interval: PositiveInt | None = None
    """Every n-th layer has no rotary positions (SmolLM3, Llama 4); null: all have them."""
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False, strict=True)
    """Share of every head that is rotated; no size and no price depends on it either."""
    max_position_embeddings: PositiveInt | None = None
    """Rows of a learned position table; without meaning for the others."""
    sliding_window: PositiveInt | None = None
    """Keys each query sees on sliding layers, itself included."""
    attention_chunk_size: PositiveInt | None = None
    """Tokens of a chunk, beyond which a query sees no keys on such layers (Llama 4)."""
    sliding_window_pattern: PositiveInt | None = None
    """Every n-th layer has full attention, the others slide or attend in chunks; null: all do."""
    layer_types: tuple[AttentionKind, ...] | None = None
    """Attention of each layer, where no pattern above says it; a shorter list repeats."""
    mlp_layer_types: tuple[MlpKind, ...] | None = None
    """MLP of each layer, where first_k_dense_replace and moe_layer_freq do not say it; a shorter list repeats."""
    moe: MoESpec | None = None
    """The mixture of experts; null for dense models."""
    mla: MLASpec | None = None
    """Latent attention; null where attention is not latent."""
    indexer: IndexerSpec | None = None
    """The choice of keys on layers of sparse attention; null where there are none."""
    compressed_attention: CompressedAttentionSpec | None = None
    """Attention to a window and to compressed keys, on all layers (DeepSeek-V4); null where there is none."""
    num_residual_streams: PositiveInt = Field(default=1, le=64)
    """Streams of the residual that hyper-connections mix (DeepSeek-V4: hc_mult); 1 for a plain sum."""
    mixes_streams: bool = True
    """A map of n × n weights mixes the streams; false where halves of layers alone add to them (Hunyuan 4)."""
    weighs_streams: bool = True
    """The head reads streams by weights of their own; false where it reads their mean (GLM-5 Next)."""
    stream_rank: PositiveInt | None = None
    """Rank of the weights by which half a layer reads each feature of the streams, which are normed (Qwen4)."""
    ngram_size: PositiveInt | None = Field(default=None, le=10**6)
    """Width of an embedding of n-grams that a layer adds to the streams; said of layers by `layer_sizes` (Qwen4)."""
    ngram_parameters: NonNegativeInt = Field(default=0, le=10**13)
    """Parameters of its table; of a table beside the embedding, where no layer has one (LongCat-Flash-Lite)."""
    attn_res_block_size: PositiveInt | None = None
    """Layers between snapshots of the residual, to all of which every half layer attends (Kimi-K3); null for none."""
    mamba: MambaSpec | None = None
    """State-space mixers; null where there are none."""
    linear_attention: LinearAttentionSpec | None = None
    """Linear attention; null where there is none."""
    short_conv_kernel: PositiveInt | None = None
    """Taps of the convolution of `conv` layers (LFM2)."""
    traced: TracedSpec | None = Field(default=None, repr=False)
    """Layers of a module that was traced (`plan models trace`); null where the planner knows the layers."""
    num_nextn_predict_layers: NonNegativeInt = Field(default=0, le=16)
    """Multi-token-prediction blocks after the last layer (DeepSeek-V3)."""
    mtp_loss_scaling_factor: NonNegativeFloat | None = None
    """Weight of the multi-token-prediction loss; given none, the trainer's."""
    vision: "VisionSpec | None" = None
    """The tower that makes tokens of images; null where text alone is trained on."""
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

    _whole_groups = multiple("num_attention_heads", "num_key_value_heads")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.position_embedding == "learned" and self.max_position_embeddings is None:
            raise ValueError("position_embedding 'learned' needs max_position_embeddings")
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise ValueError("sliding_window and attention_chunk_size: both given, layers slide or attend in chunks")
        self._check_patterns()
        if not (self.pre_norms or self.post_norms or self.stream_rank):
            raise ValueError("pre_norms and post_norms: both false, a layer needs norms before or after its halves")
        if any(kind.mlp == "dense" and self.of_layer(kind).intermediate_size is None for kind in self.kinds):
            raise ValueError("intermediate_size is missing and the model has dense layers")
        return self

    def _check_patterns(self) -> None:
        """Each list of layers has an entry, none is stated twice, and what its entries need is there."""
        for name in ("layer_types", "mlp_layer_types", "layer_sizes"):
            listed = getattr(self, name)
            if listed is not None and not 0 < len(listed) <= self.num_hidden_layers:
                raise ValueError(f"{name}: {len(listed)} entries for {self.num_hidden_layers} layers")
        if self.layer_types is not None and self.sliding_window_pattern is not None:
            raise ValueError("layer_types and sliding_window_pattern: both given, one of them says which layers slide")
        kinds = {kind.attention for kind in self.kinds}
        if (self.compressed_attention is not None) != bool(
            kinds & {"compressed_sparse", "heavily_compressed", "shared_compressed"}
        ):
            raise ValueError("compressed_attention: goes with layers whose keys are compressed")
        if self.compressed_attention is not None and self.sliding_window is None:
            raise ValueError("sliding_window is missing and compressed_attention attends to a window")
        for kind, name in NEEDS.items():
            if kind in kinds and getattr(self, name) is None:
                raise ValueError(f"{name} is missing and layer_types has {kind} layers")
        if any(kind[:2] == ("none", "none") for kind in self.kinds):
            raise ValueError("layer_types and mlp_layer_types: a layer is none in both, it does nothing")
        if self.moe is None and any(kind.mlp == "moe" for kind in self.kinds):
            raise ValueError("moe is missing and mlp_layer_types has moe layers")

    @cached_property
    def layers(self) -> tuple[LayerKind, ...]:
        """The kind of each decoder layer, first to last."""
        return tuple(LayerKind(self._attention(i), self._mlp(i), self._sizes(i)) for i in range(self.num_hidden_layers))

    @cached_property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct layer kinds, in order of first appearance."""
        return tuple(dict.fromkeys(self.layers))

    @cached_property
    def predicting_layers(self) -> tuple[LayerKind, ...]:
        """The layers of a multi-token-prediction block: one like the last, which chooses keys itself (GLM-5.2); where
        each is half a layer, attention and the MLP (Nemotron 3's pattern ends in `/*E`)."""
        last = self.layers[-1]
        if last.attention == "sparse":
            last = next((kind for kind in self.kinds if kind[:2] == ("indexed", last.mlp)), last)
        attends = next((kind for kind in self.kinds if kind[:2] == ("full", "none")), None)
        mlp = next((kind for kind in reversed(self.kinds) if kind.attention == "none"), None)
        return (last,) if attends is None or mlp is None else (attends, mlp)

    def without_predictions(self) -> Self:
        """The model as a trainer without multi-token prediction trains it."""
        return self.model_copy(update={"num_nextn_predict_layers": 0})

    @cached_property
    def runs(self) -> tuple[tuple[LayerKind, int], ...]:
        """Maximal runs of layers of one kind, in order: (kind, length)."""
        return tuple((kind, len(list(group))) for kind, group in groupby(self.layers))

    @cached_property
    def state_kinds(self) -> frozenset[AttentionKind]:
        """The kinds of layers that hand a state from token to token, or mix them by a convolution."""
        return (
            frozenset(kind.attention for kind in self.kinds)
            - {"full", "sliding", "chunked", "cross", "differential", "none"}
            - SPARSE
        )

    def of_layer(self, kind: LayerKind) -> "ModelSpec":
        """The model with the sizes that layers of `kind` have."""
        return self._of_kinds.get((kind.attention == "sliding", kind.sizes), self)

    @cached_property
    def _of_kinds(self) -> "dict[tuple[bool, int], ModelSpec]":
        # never the model itself: two equal ones that hold themselves could not be compared
        none = LayerSizesSpec()
        own = {
            (slides, number): [
                one for one in (self.sliding_heads if slides else None, sizes) if one not in (None, none)
            ]
            for slides in (False, True)
            for number, sizes in enumerate((none, *self._distinct_sizes))
        }
        return {
            key: self.model_copy(update={name: value for one in parts for name, value in one if value is not None})
            for key, parts in own.items()
            if parts
        }

    @cached_property
    def _distinct_sizes(self) -> tuple[LayerSizesSpec, ...]:
        return tuple(dict.fromkeys(sizes for sizes in self.layer_sizes or () if sizes != LayerSizesSpec()))

    def _sizes(self, layer: int) -> int:
        if not self.layer_sizes:
            return 0
        sizes = self.layer_sizes[layer % len(self.layer_sizes)]
        return self._distinct_sizes.index(sizes) + 1 if sizes in self._distinct_sizes else 0

    @property
    def num_other_parameters(self) -> int:
        """Parameters beside layers, embedding and head."""
        return self.other_parameters + (0 if self.traced is None else self.traced.other_parameters)

    @property
    def residual_size(self) -> float:
        """Features of a token between layers: hidden_size, for each of the residual's streams and mean snapshots."""
        return (self.num_residual_streams + self.mean_snapshots) * self.hidden_size

    @property
    def mean_snapshots(self) -> float:
        """Snapshots of the residual that the mean layer attends to."""
        block = self.attn_res_block_size
        return 0.0 if block is None else sum(layer // block + 1 for layer in range(len(self.layers))) / len(self.layers)

    @property
    def rotary_dim(self) -> int:
        """Features of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def qkv_bias(self) -> bool:
        return self.bias if self.attention_bias is None else self.attention_bias in ("qkv", "all")

    @property
    def output_bias(self) -> bool:
        """True where attention's output projection has a bias."""
        return self.bias if self.attention_bias is None else self.attention_bias in ("output", "all")

    @property
    def has_mlp_bias(self) -> bool:
        return self.bias if self.mlp_bias is None else self.mlp_bias

    @property
    def has_norm_bias(self) -> bool:
        return self.norm == "layernorm" and (self.bias if self.norm_bias is None else self.norm_bias)

    @property
    def scales_rotation(self) -> bool:
        """Yarn scales the queries and keys it rotates, which fused kernels do not (latent attention has its own)."""
        scaling = None if self.mla else self.rope_scaling
        return scaling is not None and scaling.rope_type == "yarn" and scaling.yarn_scale != 1.0

    @property
    def balances_by_bias(self) -> bool:
        """The router adds a number per expert that steers the load without a gradient (DeepSeek-V3).

        The bias of a router that is a linear layer with a bias is none.
        """
        moe = self.moe
        if moe is None or not moe.router_bias:
            return False
        return not self.has_mlp_bias if moe.balancing_bias is None else moe.balancing_bias

    @property
    def scoring_func(self) -> ScoringFunction:
        """The function that turns router logits into scores."""
        given = None if self.moe is None else self.moe.scoring_func
        return given or ("sigmoid" if self.balances_by_bias else "softmax")

    @property
    def num_position_parameters(self) -> int:
        """Parameters of the learned position table."""
        return (self.max_position_embeddings or 0) * self.hidden_size if self.position_embedding == "learned" else 0

    def _attention(self, layer: int) -> AttentionKind:
        if self.layer_types is not None:
            return self.layer_types[layer % len(self.layer_types)]
        pattern = self.sliding_window_pattern
        if pattern is not None and (layer + 1) % pattern == 0:
            return "full"
        return "sliding" if self.sliding_window is not None else "chunked" if self.attention_chunk_size else "full"

    def _mlp(self, layer: int) -> MlpKind:
        moe = self.moe
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types[layer % len(self.mlp_layer_types)]
        if moe is None or layer < moe.first_k_dense_replace:
            return "dense"
        return "moe" if (layer - moe.first_k_dense_replace + 1) % moe.moe_layer_freq == 0 else "dense"


class VisionSpec(Spec):
    """A tower that makes tokens of images: layers over patches, and a projector to the language model's width.

    It runs on the first pipeline stage, whole on each tensor- and context-parallel rank, and in 16 bits.
    """

    encoder: ModelSpec
    """The layers that patches pass through, as those of a model; each patch attends to all of its image, or of its
    window (attention_chunk_size)."""
    patch_values: PositiveInt = Field(le=10**6)
    """Numbers of a patch, which one product turns into the encoder's width."""
    patches_per_token: PositiveInt = Field(default=1, le=10**4)
    """Patches that are merged to one token of the language model."""
    num_extra_patches: NonNegativeInt = Field(default=0, le=10**4)
    """Patches of an image that are none of its own: a class token."""
    projector: tuple[tuple[PositiveInt, PositiveInt, PositiveInt], ...] = ()
    """Products behind the encoder: features in, features out, rows a token."""
    other_parameters: NonNegativeInt = 0
    """Parameters beside the layers and the weights of products: norms, biases, positions."""
    image_tokens: PositiveInt = Field(default=1024, le=2**27)
    """Tokens of the language model that an image becomes; of the sequence where the next field says so."""
    tile_tokens: PositiveInt | None = None
    """Those of a tile, which the tower sees by itself (InternVL, LLaVA-NeXT); null where it sees whole images."""
    in_sequence: bool = True
    """The tokens are part of the sequence; false where `cross` layers alone read them (Llama 3.2 Vision)."""
    images_per_sequence: PositiveInt = Field(default=1, le=10**6)
    """Images of a sequence."""
    is_trained: bool = False
    """The tower is trained; a frozen one runs forward alone, and keeps nothing."""


ModelSpec.model_rebuild()
