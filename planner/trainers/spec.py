"""The trainer: which kernels it has, what it hides, what it shards, and what layouts it can express.

A runtime is data. The operator list asks it what is fused and saved, the cost model what is overlapped, the search what
is legal; nothing else in the planner knows one trainer from another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from planner.specs.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Spec
from planner.trainers.features import changes

CHUNK_PARAMETERS = 2**18
"""Of each rank in a bucket of parameters, at least: 512 KiB in bf16, what NCCL's rings hand on at a time."""


class RuntimeSpec(Spec):
    """One trainer's kernels, overlaps and limits. `*_overlap_fraction`: share of a transfer hidden where it can be."""

    name: str
    trainer: str = ""
    """Whose layouts and options these are; given none, the name says it."""
    rules: tuple[str, ...] = ()
    """Names of the rules that its layouts obey (planner/trainers/rules/named.py); given none, those of `trainer`."""
    export_rules: tuple[str, ...] = ()
    """Names of the rules that its export sets to models and dtypes; given none, those of `trainer`."""
    # a generation of the past
    year: PositiveInt | None = None
    """The year of the software; none for that of today."""
    architectures: tuple[str, ...] = ()
    """The silicon of its day. Empty for software of today."""
    models: Literal["any", "gpt"] = "any"
    """Which models its day knew: all, or GPTs as of 2021, in the layouts of their time."""
    later_features: tuple[str, ...] = ()
    """Features that came after it: a run that uses one is later. `scaling`: a recipe that says what shares a scale."""
    graphs_routing_on_racks: bool = False
    """A run on an NVL72 rack replays the routing of experts in CUDA graphs unless it says otherwise. Megatron-Bridge's
    recipes do so there since their first release, since Grace launches slowly; elsewhere some do and some do not."""
    # kernels
    flash_attention: bool = True
    """Without: scores and probabilities (s² per head) are written to memory and kept."""
    attention_kernel: Literal["fastest", "flash", "flash1"] = "fastest"
    """Which fused kernel: the GPU's fastest (cuDNN's, FlashAttention-3), FlashAttention-2, or the first."""
    fused_norm: bool = True
    """Without: a norm is several kernels in fp32, each of which passes over its input again."""
    fused_rotary: bool = True
    """Without: chunk, negate, multiply, add, concatenate; and the QKV buffer stays alive through the view of v."""
    fused_activation: bool = True
    """Without: gated MLPs also keep act(gate)."""
    fused_projections: bool = True
    """Query, key and value are one product, and gate and up another; without: three and two."""
    groups_products: bool = True
    """One kernel computes the products of all experts of a rank; without: a few experts' at a time."""
    narrow_head: bool = False
    """Under an 8- or 4-bit recipe the head is of its dtype too."""
    fused_permute: bool = True
    """Without: routing keeps its int64 indices, and weighting the expert rows is a product that keeps both factors."""
    weights_expert_outputs: bool = False
    """Rows are weighted when they are back from the experts, and kept for the router's gradient; else within."""
    recomputes_mtp: bool = False
    """Layers of multi-token prediction are recomputed as all others are, but where those are counted by stage."""
    clones_embedding_shard: bool = True
    """Without: the sequence shard of the embedding is a view that keeps the whole output alive."""
    fused_cross_entropy: bool = True
    """Without: the loss makes fp32 copies of the logits."""
    loss_in_place: bool = False
    """Unfused, it makes one copy and overwrites it: shifted, exponentials, softmax, gradient (Megatron-LM,
    tensor_parallel/cross_entropy.py)."""
    loss_metrics: NonNegativeInt = 0
    """How many metrics compute the loss again from the logits of every micro-batch."""
    fused_grad_accumulation: bool = True
    """The weight-gradient GEMM adds into the fp32 main gradient itself."""
    tuned_products: bool = True
    """Kernels of products come from the vendor's tables, not from what torch chooses for itself: on AMD it matters."""
    fused_bias_gradients: bool = True
    """Products give them along (Transformer Engine); else each is a sum that reads the output's gradient once more."""
    clips_gradients: bool = True
    """Gradients are measured and scaled between backward and optimizer, and zeroed after."""
    keeps_tables: bool = False
    """Every stage keeps rotary tables and token ids on the device."""
    hands_unused_gradients: bool = False
    """Weights that add into main gradients keep a bf16 gradient of their shape, never filled (Transformer Engine)."""
    compiled: bool = False
    """torch.compile fuses elementwise chains."""
    cuda_graphs: bool = False
    """Launch gaps disappear."""
    dropout: bool = False
    """Dropout after attention and MLP keeps a one-byte mask."""
    narrow_exchanges: bool = True
    """Tensor-parallel ranks cast what they gather before they send it; else (torchao's scales of rows) after."""
    casts_weights: bool = False
    """Weights are cast to 8 bits in every pass, since ZeRO-3 gathers them anew; else once a step."""
    narrow_factor: PositiveFloat = 1.0
    """Seconds of 8- and 4-bit products are multiplied by this: what its kernels lose to Transformer Engine's."""
    # bytes per parameter
    weight_bytes: PositiveInt = 2
    """Of the weights a rank keeps; 4 where the sharded weights are the fp32 masters themselves (FSDP2)."""
    gradient_bytes: PositiveInt = 4
    fp16_gradient_bytes: PositiveInt | None = None
    """The same in fp16, where that differs: scaled losses let gradients be summed in 16 bits."""
    widens_gradients: bool = False
    """The optimizer makes fp32 copies of gradients that are 16 bits wide (Megatron-LM, optimizer.py: .float())."""
    kept_gradient_bytes: NonNegativeInt = 0
    """16-bit gradients beside fp32 main ones, zeroed after every micro-batch and never freed."""
    optimizer_bytes: PositiveInt = 12
    """fp32 master weights (unless they are the weights) and two Adam moments."""
    narrow_gradient_bytes: PositiveInt | None = None
    """Of main gradients under an 8- or 4-bit recipe, where that differs: Megatron-Bridge's performance recipes sum and
    reduce them in bf16."""
    narrow_parameters: bool = False
    """Under an 8- or 4-bit recipe the weights are of its dtype (Megatron's --fp8-param-gather, as in all recipes of
    Megatron-Bridge); else 16-bit weights are cast and stay beside."""
    fp8_copies: PositiveInt = 2
    """Of a tensor with one scale: as it is and transposed, since products by rows alone are what GPUs had before
    Blackwell, where one is enough."""
    vocab_divisible_by: PositiveInt = 128
    """The vocabulary is padded to a multiple of this times tp."""
    balances_in_buffers: bool = False
    """The numbers that balance the load of experts without a gradient (DeepSeek-V3) are buffers, no parameters."""
    splits_mtp_projection: bool = True
    """The projection before a multi-token-prediction block is split over tp; else every rank has all of it."""
    reserved_gib: NonNegativeFloat = 0.0
    """Device memory that this trainer takes beyond the tensors named here, whatever the layout, and others do not.

    Megatron-DeepSpeed: flat buckets to reduce and to gather (5·10⁸ elements each), the gradients laid out anew for the
    step, communicators for pairs of stages, blocks kept by an allocator that could not yet grow them. nvidia-smi showed
    11 GiB of it in the BLOOM trials (chronicles-prequel, 384 A100), with 15 as with 60 GiB of tensors beside it."""
    head_backward_factor: PositiveFloat = 1.0
    """Of the seconds of the head's two gradient products: measured in all stages with a head on one H200 (TP 1 and 2,
    4,096 and 8,192 tokens), where weights were untrained and data made up. Presumably the loss's gradient is then so
    nearly one value that its products take less power, and clocks stay up."""
    # overlap
    tp_overlap_fraction: Fraction = 0.0
    """Of tensor-parallel gathers and scatters, behind the GEMM they feed (user buffers, async TP): of all pieces, one a
    rank, but the first."""
    mla_tp_overlap_fraction: Fraction = 0.0
    """The same in a model with latent attention: Megatron-LM has no user buffers for its projections, and switches them
    off for all layers where it meets one."""
    tp_async_overlap_fraction: Fraction = 0.0
    """Of the backward's second all-gather behind dgrad and of its reduce-scatter behind wgrad."""
    keeps_gathered_inputs: bool = False
    """What tensor-parallel ranks gather for a column-parallel product is kept for its weight gradient; else each keeps
    its shard, and they gather it again."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """How context parallelism exchanges keys and values: ring, all-gather, or heads for tokens."""
    repeats_keys: bool = False
    """Keys and values are copied for every query head before attention, and exchanged so: each of them once a head."""
    balances_context: bool = True
    """Ranks that split a sequence attend to equally many keys (the k-th part from each end goes to the k-th rank);
    without, the last of them to 2 - 1 / cp times the mean."""
    keeps_gathered_keys: bool = False
    """All-gathered keys and values are kept for the backward; else they are gathered again."""
    cp_overlap_fraction: Fraction = 0.95
    """Of the ring exchange, behind the attention to the block before, as far as that takes as long."""
    ep_overlap_fraction: Fraction = 0.0
    ep_row_bytes: NonNegativeFloat = 0.0
    """A token's activation that is shorter than this takes as long on the innermost links: rows are handed to the
    experts' ranks one by one."""
    gradient_overlap_fraction: Fraction = 0.9
    """Of the window behind the last micro-batch's backward."""
    parameter_overlap_fraction: Fraction = 0.9
    """Of the window behind the first micro-batch's forward."""
    bucket_parameters: PositiveInt | None = None
    """Gradients and weights are exchanged so many parameters at a time, or more among many ranks; else a layer's are
    (FSDP)."""
    all_reduces_gradients: bool = False
    """A sharded optimizer's gradients are all-reduced too, not reduce-scattered (hooks of DistributedDataParallel)."""
    contention_fraction: Fraction = 0.1896
    """Of an exchange of gradients or weights, what a step takes longer though compute hides it: its kernels take SMs
    and memory bandwidth from those that they run beside. Fitted (trainers/data/shared/nccl.yaml)."""
    fsdp_overlap_fraction: Fraction = 0.9
    """Of a micro-batch's compute: what ZeRO-3 hides its gathers and reductions behind."""
    fsdp_rate_fraction: Fraction = 1.0
    """Share of the links' rate that ZeRO-3's exchanges reach: one parameter at a time, they are small."""
    has_torch_stages: bool = False
    """torch.distributed.pipelining runs the pipeline: every micro-batch of a step has its receive buffers, and sharded
    gradients are reduced, and waited for, after a stage's last backward (torch 2.13, pipelining/stage.py)."""
    scatters_p2p: bool = False
    """Stages exchange what tensor-parallel ranks hold in common in slices, one a rank, gathered on arrival."""
    p2p_overlap: bool = False
    """Under 1F1B, sends and receives run beside compute."""
    interleaved_p2p_overlap: bool = True
    """The same under interleaved schedules."""
    # what can be expressed
    schedules: tuple[str, ...] = ("1f1b", "interleaved-1f1b", "none")
    zero_stages: tuple[int, ...] = (0, 1)
    recompute_per_stage: bool = False
    """Each stage may recompute its own number of layers; else one setting holds for all."""
    sequence_parallel: bool = True
    """Whether tensor parallelism comes with sequence parallelism where a run does not say."""
    has_sequence_parallel: bool = True
    """Sequence parallelism and selective recompute exist (Korthikanti et al. 2022)."""
    has_model_parallel: bool = True
    """Layers, tensors, sequences and experts can be split over ranks; else weights are sharded, and that is all."""
    has_context_parallel: bool = True
    """Sequences can be split over ranks in attention too (Megatron-LM since 2023)."""
    stops_recompute_early: bool = False
    """Recomputing a layer ends with the last tensor that its backward needs: no down projection, no exchange after it
    (torch.utils.checkpoint, and graphs that torch.compile partitions); else all of it runs again."""
    selective_recompute_modules: tuple[str, ...] = ("core_attn",)
    selective_default: tuple[str, ...] = ("core_attn",)
    """What `selective` means where no modules are named."""
    head_only_stage: bool = False
    """The last stage may hold the head and no decoder layer (and the first the embedding alone)."""
    # host
    blocking_launches: bool = False
    """Every kernel waits for the one before (CUDA_LAUNCH_BLOCKING=1): host time adds to GPU time."""
    collective_sync_us: NonNegativeFloat = 0.0
    """Of an exchange in a layer beyond its bytes, per doubling of the group: ranks wait for the last (half as long in a
    CUDA graph), but where kernels that send tokens wait for each rank by itself (DeepEP, HybridEP)."""
    tp_jitter_fraction: Fraction = 0.0
    """Of its compute, by which the slowest rank of a tensor-parallel group keeps the others waiting, per doubling."""
    host_factor: NonNegativeFloat = 1.0
    """Of host_us: what this trainer's Python adds around a kernel, Transformer Engine's modules a third (small GPTs of
    Megatron-LM's CI on DGX H100); below 1 where one call issues several."""
    moe_kernels: NonNegativeFloat = 0.0
    """Host time of a mixture-of-experts layer, forward and again backward, in kernels of an eager layer: routing and
    exchanges too. The GPU's must hide it, unless a CUDA graph replays the whole iteration."""
    expert_kernels: NonNegativeFloat = 0.0
    """The same for each expert of the rank, whose products and casts are launched one by one."""
    awaits_token_counts: bool = True
    """How many tokens each expert gets comes to the host, which cannot run ahead of it."""
    moe_host_factor: NonNegativeFloat = 1.0
    """Of moe_kernels: less where CUDA graphs replay a part of the layer, or no counts are awaited."""
    narrow_host_factor: NonNegativeFloat = 1.0
    """Of both in 8 or 4 bits: Transformer Engine's modules issue the casts as well."""
    ep_overlap_host_factor: NonNegativeFloat = 1.0
    """Of both where exchanges hide behind another micro-batch's products: the layer runs in pieces, each with an
    autograd of its own. CUDA graphs of some of them take that back (Megatron-LM, pull request 2168)."""
    sends_tokens_once: bool = False
    """The dispatcher sends a token to a node once and there to a rank once, however many of its experts they hold
    (DeepEP, HybridEP)."""
    microbatch_overhead_s: NonNegativeFloat = 0.0
    """Host time per micro-batch and stage that no kernel hides."""
    step_overhead_s: NonNegativeFloat = 0.0
    """Host time per optimizer step: data, logging, gradient norm on the host."""

    def bucket_among(self, ranks: Any) -> Any:
        """Parameters that `ranks`, a number or an array, exchange at a time: `bucket_parameters`, or a chunk each."""
        if self.bucket_parameters is None:
            return None
        chunks = CHUNK_PARAMETERS * ranks
        return chunks + (self.bucket_parameters - chunks) * (chunks < self.bucket_parameters)

    @property
    def family(self) -> str:
        """The trainer that this is, or is a generation of."""
        return self.trainer or self.name

    def in_dtype(self, dtype: str, architecture: str) -> RuntimeSpec:
        """This runtime with what training in `dtype` on such silicon means for its bytes; the same if asked again."""
        update: dict[str, Any] = {}
        gradient_bytes = {"bf16": None, "fp16": self.fp16_gradient_bytes}.get(dtype, self.narrow_gradient_bytes)
        if gradient_bytes is not None:
            update |= {"gradient_bytes": gradient_bytes, "kept_gradient_bytes": 0}
        if architecture == "blackwell":
            update["fp8_copies"] = 1
        return self.model_copy(update=update) if update else self

    def for_schedules(self, split_backward: bool) -> RuntimeSpec:
        """This runtime where backwards are split: layers run uncompiled, since a compiled one's backward is one node of
        the graph, whose donated buffers allow no second pass (torch 2.13); the loss stays compiled."""
        if not (split_backward and self.compiled):
            return self
        return self.model_copy(update={"compiled": False, "fused_norm": False, "fused_activation": False})

    def with_features(self, features: Mapping[str, Any]) -> tuple[RuntimeSpec, tuple[str, ...]]:
        """This runtime with what a run's `features` switched on or off, and the names, or values, it does not know.

        Raises Unsupported where the run did what is not modelled.
        """
        changed, unknown = changes(features)
        return self.model_copy(update=changed), unknown
