"""A trainer's fields in groups, each of which one part of the planner reads.

`RuntimeSpec` (spec.py, with those of the host) is all of them: a field stands in one group, and is read as its own.
"""

from typing import Any, Literal

from pydantic import ConfigDict

from planner.specs.base import Achieved, Fraction, Name, NonNegativeInt, Overhead, PositiveInt, Rate, Spec, Texts, Width
from planner.specs.training import Dtype, RankOrder
from planner.trainers.optimizers import BLOCK, OPTIMIZERS, Optimizer, OptimizerName

CHUNK_PARAMETERS = 2**18
"""The fewest parameters that a rank has in a bucket: 512 KiB in bf16, which NCCL's rings hand on at a time."""


class Group(Spec):
    """One group of a trainer's fields, validated as part of the whole."""

    model_config = ConfigDict(defer_build=True)


class Generation(Group):
    """The trainer and its day: the rules that it obeys, and what a run of it does unless it says otherwise."""

    name: Name
    """The name of the trainer, or of this kind of it."""
    trainer: str = ""
    """The shipped trainer that this is a kind of, whose rules and options it has; given none, that of its name."""
    rules: Texts = ()
    """Names of the rules that its layouts obey (trainers/rules/rules.yaml); given none, those of `trainer`."""
    export_rules: Texts = ()
    """Names of the rules that its export sets to models and dtypes; given none, those of `trainer`."""
    version: str = ""
    """The version of the software; empty for the newest one that the planner knows."""
    stand_in: str = ""
    """The trainer that a run of this name has on silicon of that one's: AMD's runs of Megatron-LM are Primus'."""
    year: PositiveInt | None = None
    """The year of the software; none for that of today."""
    architectures: Texts = ()
    """GPU architectures of its day, or the only ones that it runs on; empty for a trainer of today that runs on any."""
    models: Literal["any", "gpt"] = "any"
    """The models that its day knew: any, or GPTs as of 2021 in the layouts of their time."""
    later_features: Texts = ()
    """Features that came after it: a run that uses one is later. `scaling`: a recipe that says what shares a scale."""
    graphs_routing_on_racks: bool = False
    """A run on an NVL72 rack replays the routing of experts in CUDA graphs unless it says otherwise. Megatron-Bridge's
    recipes do so there since their first release, since Grace launches slowly; elsewhere some do and some do not."""
    runs_fuse_loss: bool = False
    """A run has Transformer Engine's cross-entropy unless it says otherwise, as NeMo and Megatron-Bridge set it up; the
    command line of Megatron-LM refuses it since core 0.18 (megatron/training/arguments.py)."""
    runs_keep_logits: bool = False
    """A run has no loss in chunks unless it says otherwise; plans are written for releases that have no other (TRL)."""
    runs_validate_later: bool = False
    """A run whose schedule splits the backward validates its optimizer's step later, unless it says otherwise."""
    dtypes: tuple[Dtype, ...] = ()
    """Dtypes of products that its recipes have; empty for all of the GPU's."""

    @property
    def family(self) -> str:
        """The trainer that this is, or is a generation of."""
        return self.trainer or self.name


class Kernels(Group):
    """The kernels of a layer and of the loss: what is fused, what is kept for the backward, how fast products are."""

    flash_attention: bool = True
    """Without: scores and probabilities (s² per head) are written to memory and kept."""
    masks_documents: bool = False
    """Attention stays within the documents that are packed into a sequence; without: it spans the whole sequence."""
    attention_kernel: Literal["fastest", "flash", "flash1", "sdpa", "sdpa-cudnn", "sdpa-flash"] = "fastest"
    """The fused attention kernel: the GPU's fastest (cuDNN's, FlashAttention-3), FlashAttention-2, or the first.

    `sdpa`: as `trainers.torch_attention` says of torch's own attention; behind a hyphen the kernel that torch took."""
    blackwell_attention: Literal["", "fastest"] = ""
    """`attention_kernel` on Blackwell, where a trainer takes another there."""
    fuses_sparse_attention: bool = False
    """A kernel scores keys and attends to the chosen ones alone; without: scores of all keys are written to memory, of
    the indexer and of attention, and masked (Megatron-LM, transformer/experimental_attention_variant/dsa.py)."""
    deterministic: bool = False
    """Kernels add up in a fixed order, so that two runs give the same bits."""
    fused_norm: bool = True
    """Without: a norm is several kernels in fp32, each of which passes over its input again."""
    copies_norm_input: bool = False
    """An unfused RMSNorm casts its input to fp32 and keeps the copy, and the normalized rows for its weight's gradient
    (modules of transformers; torch's own before 2.9)."""
    autocasts: bool = False
    """torch.autocast around whole fp32 weights: the residual stream and the rows of norms are fp32, and every product
    keeps its own 16-bit copies of its input and of its weight."""
    fused_rotary: bool = True
    """Without: chunk, negate, multiply, add, concatenate; and the QKV buffer stays alive through the view of v."""
    fused_activation: bool = True
    """Without: gated MLPs also keep act(gate)."""
    fused_projections: bool = True
    """Query, key and value are one product, and gate and up another; without: three and two."""
    groups_products: bool = True
    """One kernel computes the products of all experts of a rank; without: those of a few experts at a time."""
    narrow_attention: bool = False
    """Attention in 8 bits, forward and backward (`--fp8-dot-product-attention`)."""
    narrow_head: bool = False
    """Under an 8- or 4-bit recipe the head is of its dtype too."""
    fused_permute: bool = True
    """Without: routing keeps its int64 indices, and weighting the expert rows is a product that keeps both factors."""
    latent_attention_tflops: NonNegativeInt = 0
    """TFLOP/s of attention whose keys are wider than its values where no kernel is tuned for it; 0 if one is."""
    permute_factor: Rate = 1.0
    """Seconds of the permutations of tokens to rows of experts and back over those of fused kernels: above 1 where
    gathers and atomic additions of torch move the rows."""
    runs_transformers: bool = False
    """Layers are transformers' own code, whose routers may cast to fp32 and whose layers may drop out."""
    weights_expert_outputs: bool = False
    """Rows are weighted when they are back from the experts, and kept for the router's gradient; without: the experts
    weight them."""
    recomputes_mtp: bool = False
    """Layers of multi-token prediction are recomputed as all others are, except where those are counted by stage."""
    clones_embedding_shard: bool = True
    """Without: the sequence shard of the embedding is a view that keeps the whole output alive."""
    fused_cross_entropy: bool = True
    """Without: the loss makes fp32 copies of the logits."""
    loss_keeps_softmax: bool = False
    """Fused, it keeps the softmax of every logit in fp32 all the same (Megatron-LM, fusions/fused_cross_entropy.py);
    without: the gradient overwrites the logits (Transformer Engine)."""
    loss_parallel: bool = False
    """Unfused and split over ranks, the loss's backward has exponentials and 16-bit logits beside its gradients, too
    (torch.distributed.tensor.parallel.loss_parallel)."""
    loss_in_place: bool = False
    """Unfused, it makes one copy and overwrites it: shifted, exponentials, softmax, gradient (Megatron-LM,
    tensor_parallel/cross_entropy.py)."""
    loss_metrics: NonNegativeInt = 0
    """Number of metrics that compute the loss again from the logits of every micro-batch."""
    chunks_loss: bool = False
    """Head and loss are computed for so many tokens at a time as there is room for in a hidden state, gradients
    included: no logits of a whole micro-batch (Liger's fused linear cross-entropy)."""
    recomputes_logits: bool = False
    """A loss in chunks computes its logits once more in backward (TRL 1.16, trl/kernels/chunked_logprob.py); without:
    gradients leave the forward."""
    fused_grad_accumulation: bool = True
    """The weight-gradient GEMM adds into the fp32 main gradient itself."""
    rocm_product_factor: Rate = 1.0
    """Seconds of 16-bit products on AMD's GPUs over those of kernels tuned for their shapes: what this generation of
    software loses that takes what hipBLASLt proposes."""
    rocm_narrow_factor: Rate = 1.0
    """`rocm_product_factor` in 8 and 4 bits."""
    fused_bias_gradients: bool = True
    """Products give bias gradients along (Transformer Engine); without: each is a sum that reads the output's gradient
    once more."""
    clips_gradients: bool = True
    """Gradients are measured and scaled between backward and optimizer, and zeroed after."""
    copies_exchanged: bool = True
    """Sequence-parallel exchanges cost copies in a rank's own memory, unless kernels are fused."""
    is_runner: bool = False
    """The trainer is the planner's own runner (planner/probe), of which every kept tensor is known: what a stage hands
    on stays until its backward, and activations and biases keep what eager torch makes of them."""
    keeps_tables: bool = False
    """Every stage keeps rotary tables and token ids on the device."""
    hands_unused_gradients: bool = False
    """Weights that add into main gradients keep a bf16 gradient of their shape, never filled (Transformer Engine)."""
    compiled: bool = False
    """torch.compile fuses elementwise chains."""
    dropout: bool = False
    """Dropout after attention and MLP keeps a one-byte mask."""
    narrow_exchanges: bool = True
    """Tensor-parallel ranks cast what they gather before they send it; without (torchao's scales of rows): after."""
    casts_weights: bool = False
    """Weights are cast to 8 bits in every pass, since ZeRO-3 gathers them anew; without: once a step."""
    narrow_factor: Rate = 1.0
    """Seconds of 8- and 4-bit products over those of Transformer Engine's kernels."""
    block_factor: Rate = 1.0
    """`narrow_factor` of MXFP8, where a product takes no other longer."""
    narrows_by_torchao: bool = False
    """Products of 8 bits keep their inputs in 16; those of 4 bits are recomputed with torchtitan's `op`, each."""
    checks_nan: bool = True
    """The loss and the gradients are looked at for NaN in every step."""
    fuses_experts: bool = False
    """One kernel computes products, activations and casts of all experts of a rank, with token counts that the host
    does not know (Transformer Engine's operation fuser)."""
    fuses_mlp: bool = False
    """The activation of a dense MLP writes its output, and the gradient of its input, in the dtype that the products
    beside it read (Transformer Engine's operation fuser); without: both are cast in passes of their own."""
    head_backward_factor: Rate = 1.0
    """Seconds of the head's two gradient products over those of others of their size. Below 1 where weights are
    untrained and data made up: presumably the loss's gradient is then so nearly one value that its products take less
    power, and clocks stay up."""

    @property
    def keeps_softmax(self) -> bool:
        """True where the loss keeps its softmax in fp32 from the forward to the backward."""
        return self.loss_keeps_softmax or not self.fused_cross_entropy

    @property
    def takes_torch_attention(self) -> bool:
        """True where attention is torch's own, as `trainers.torch_attention` describes it."""
        return self.attention_kernel.startswith("sdpa")


class Memory(Group):
    """Bytes of weights, gradients and optimizer, what leaves the GPU, and what the allocator adds."""

    weight_bytes: PositiveInt = 2
    """Bytes per parameter of the weights; 4 where the sharded weights are the fp32 masters themselves (FSDP2)."""
    gradient_bytes: PositiveInt = 4
    """Bytes per parameter of the gradients that micro-batches add to."""
    fp16_gradient_bytes: PositiveInt | None = None
    """`gradient_bytes` in fp16, where that differs: scaled losses let gradients be summed in 16 bits."""
    counts_moments: bool = False
    """Memory follows the step: gradients are set to None after each, so that those of a single micro-batch are made
    while the backward frees activations, and what the head keeps is gone when layers need most; without: at once."""
    copies_to_buckets: bool = False
    """Gradients of replicas are copied into buckets that stay from step to step (DistributedDataParallel)."""
    sharding: Literal["", "ddp", "fsdp", "deepspeed"] = ""
    """The way to shard weights, gradients and optimizer where a trainer has several; empty where it has one."""
    narrow_activations: bool = False
    """Dense MLPs keep the input of their activation in 8 bits (activation_func_fp8_input_store)."""
    optimizer_offload_fraction: Fraction = 0.0
    """Share of the optimizer's states that stays in host memory, where the host updates it."""
    offloads_masters: bool = False
    """fp32 masters leave the GPU with the states (ZeRO-Offload, Megatron); without: the GPU keeps them."""
    uneven_fraction: Fraction = 0.12
    """Share of allocated memory that the allocator holds beside it where experts get other tokens in every layer and
    step, so that few blocks are used again. Ten mixtures that ms-swift fine-tuned reserved 6 to 49% more than the price
    without it, of dense models three 7 to 15%; two of Primus on AMD's GPUs took 7 and 10% less, where none is."""
    offloads_gradients: bool = False
    """Sharded gradients go to the host with the states (ZeRO-Offload from ZeRO-2 on, FSDP's CPUOffload)."""
    parameter_offload: bool = False
    """ZeRO-3's shards of weights, frozen ones too, wait on the host and are copied in for every gather
    (`offload_param`, `fsdp_offload_params`)."""
    host_adam_bytes: Rate = 80.0
    """Bytes that the host moves through its memory to update a parameter with Adam: torch's on the CPU runs one pass
    after another: the decay (8), the two moments (32), the root, the quotient and its epsilon (24), the sum (16)."""
    offload_modules: Texts = ()
    """Modules whose saved inputs go to host memory after the forward and come back before the backward."""
    offloaded_layers: NonNegativeInt = 0
    """Layers of which all that they keep for the backward waits in host memory."""
    shards_states_over_groups: bool = False
    """States of the optimizer are sharded over all ranks under ZeRO-3, weights and gradients over those of a group."""
    layers_at_once: PositiveInt = 1
    """Layers that are recomputed together where whole layers are: the first keeps its input, all are held at once."""
    weight_shards: PositiveInt = 1
    """Ranks of unlike data that share the weights and gradients of a tensor-parallel rank, beside what ZeRO shards."""
    widens_gradients: bool = False
    """The optimizer makes fp32 copies of gradients that are 16 bits wide (Megatron-LM, optimizer.py: .float())."""
    copies_moment: bool = False
    """The update is not fused: roots of all second moments stand beside them (torch's AdamW with foreach)."""
    kept_gradient_bytes: NonNegativeInt = 0
    """Bytes per parameter of 16-bit gradients beside the fp32 sums, zeroed after every micro-batch and never freed."""
    unsynced_gradient_bytes: NonNegativeInt = 0
    """Bytes per parameter of gradients that FSDP leaves whole until the last micro-batch (`no_sync`); 0 where each
    micro-batch shards its own."""
    optimizer_bytes: PositiveInt = 12
    """Bytes per parameter of fp32 master weights (unless they are the weights) and two Adam moments."""
    optimizer: OptimizerName = "adamw"
    """The optimizer (trainers/optimizers.py); `optimizer_bytes` says what AdamW's states would take."""
    asynchronous_checkpoints: bool = False
    """Checkpoints are written beside the training, which waits only until they are copied to host memory."""
    narrow_gradient_bytes: PositiveInt | None = None
    """`gradient_bytes` under an 8- or 4-bit recipe, where that differs: Megatron-Bridge's performance recipes sum and
    reduce gradients in bf16."""
    master_remainders: bool = False
    """Masters are kept without the 16 bits that 16-bit weights have; `optimizer_bytes` counts them whole."""
    narrow_parameters: bool = False
    """Under an 8- or 4-bit recipe the weights are of its dtype (Megatron's --fp8-param-gather, as in all recipes of
    Megatron-Bridge); without: 16-bit weights are cast, and both are kept."""
    fp8_copies: PositiveInt = 2
    """Copies of a tensor with one scale: as it is and transposed, since GPUs before Blackwell multiply by rows alone;
    on Blackwell one is enough."""
    vocab_divisible_by: PositiveInt = 128
    """The vocabulary is padded to a multiple of this times tp."""
    balances_in_buffers: bool = False
    """The numbers that balance the load of experts without a gradient (DeepSeek-V3) are buffers and no parameters."""
    splits_mtp_projection: bool = True
    """The projection before a multi-token-prediction block is split over tp; without: every rank has all of it."""
    reserved_gib: Overhead = 0.0
    """Device memory that this trainer takes beyond the tensors named here, whatever the layout, and others do not.

    Megatron-DeepSpeed: flat buckets to reduce and to gather (5·10⁸ elements each), the gradients laid out anew for the
    step, communicators for pairs of stages, blocks kept by an allocator that could not yet grow them."""
    memory_width: Width = 0.0
    """Half-width that this trainer adds to the 80% interval of a rank's memory, in natural logarithms; 0 where what its
    allocator takes beside counted tensors has been found to be as in Megatron."""
    step_width: Width = 0.0
    """Half-width that this trainer adds to the 80% interval of a step, in natural logarithms; 0 where published runs
    lie in their intervals without it."""

    @property
    def checkpoint_bytes_per_parameter(self) -> float:
        """Bytes that a checkpoint holds of each parameter: its weight, and what the optimizer keeps."""
        row = self.optimizer_row
        if row.name == "adamw":
            return self.weight_bytes + self.optimizer_bytes
        width = {8: 1 + 4 / BLOCK, 32: 4}.get(row.bits, self.moment_bytes)
        return self.weight_bytes + self.master_bytes + row.moments * width

    @property
    def optimizer_row(self) -> Optimizer:
        """The optimizer's states and the bytes that its update moves."""
        return OPTIMIZERS[self.optimizer]

    @property
    def master_bytes(self) -> int:
        """Bytes per parameter of fp32 masters beside 16-bit weights: 4, or 0 where there are none."""
        return 4 if self.weight_bytes == 2 and self.optimizer_bytes >= 8 else 0

    @property
    def moment_bytes(self) -> float:
        """Bytes of one of Adam's two moments."""
        return (self.optimizer_bytes - self.master_bytes) / 2

    @property
    def summed_gradient_bytes(self) -> int:
        """Bytes per parameter of the sums that ranks exchange, of which a narrower gradient may be left."""
        return max(self.gradient_bytes, self.unsynced_gradient_bytes)


class FineTuning(Group):
    """Frozen weights, the adapters beside them, and the forwards that an objective adds."""

    adapts_experts: bool = False
    """`all-linear` and `mlp` put adapters beside routed experts too (Megatron's linear_fc1 and linear_fc2 are theirs as
    well); without: those are named (peft: the weights of all experts are one tensor and no nn.Linear)."""
    frozen_weight_bytes: Rate = 2.0
    """Bytes per frozen weight of a linear layer (`for_adapters`)."""
    frozen_wide_bytes: Rate = 2.0
    """Bytes per frozen weight of all others: embedding, head, norms, routers."""
    packs_experts: bool = True
    """Weights of routed experts are in as few bits as those of other products; without: in 16, in a trainer without ep
    (transformers 5 stacks them, and bitsandbytes packs nn.Linear alone: its issue 1849)."""
    adapters_in_fp32: bool = False
    """Adapters, their gradients and their moments are in fp32 (peft); without: as this trainer keeps other weights."""
    packed_adapters_in_fp32: bool = False
    """`adapters_in_fp32` beside frozen weights of 8 and 4 bits; without: they are in 16 bits (trl's SFTTrainer)."""
    adapter_copies_input: bool = False
    """Each adapter of 16-bit weights keeps a copy of its input for itself: peft casts it to the adapter's dtype, and
    torch.autocast back; without: adapters and other readers of an input keep it once, as beside narrower weights."""
    adapter_weights_cast: bool = False
    """Adapters in fp32 are cast to 16 bits in every forward, and the copies kept for the backward (torch.autocast)."""
    recomputes_adapter_masks: bool = False
    """The masks of adapters' dropout are drawn again in the backward, and not kept (NeMo's dropout_recompute)."""
    splits_adapters: bool = False
    """Adapters are split over tensor-parallel ranks, A and B both, with exchanges of their own (Megatron); without:
    each rank has the whole A of a product whose columns are split, and the whole B of one whose rows are."""
    adapters_all_to_all: bool = False
    """Beside a row-parallel product, split adapters exchange columns for tokens (a2a_experimental); without: their
    output is gathered, and each rank cuts its tokens out."""
    transposes_frozen: bool = False
    """Frozen 8-bit weights are transposed for each of their input gradients on GPUs that multiply by rows alone
    (disable_parameter_transpose_cache); without: the transposed copy stays."""
    unpacks_frozen: bool = False
    """Frozen weights are in 8 or 4 bits that products do not read, and are turned into 16 bits before each."""
    plain_forwards: NonNegativeInt = 0
    """Forwards without a gradient for each micro-batch, of a reference model or the trained one (`for_objective`)."""
    critics: NonNegativeInt = 0
    """Models of the same size that are trained beside, and hold weights and states meanwhile (`for_objective`)."""
    frozen_copies: NonNegativeInt = 0
    """Models of the same size beside that are not trained, in 16 bits."""
    copies_weights: bool = False
    """A reference model's weights stand beside those that are trained, frozen and sharded as these are."""


class Overlaps(Group):
    """Exchanges: what they send, and which share of each hides behind compute."""

    tp_overlap_fraction: Fraction = 0.0
    """Share of tensor-parallel gathers and scatters that hides behind the GEMM they feed (user buffers, async TP). They
    go in pieces, one a rank, of which the first hides behind nothing."""
    mla_tp_overlap_fraction: Fraction = 0.0
    """`tp_overlap_fraction` in a model with latent attention: Megatron-LM has no user buffers for its projections, and
    switches them off for all layers where it meets one."""
    tp_async_overlap_fraction: Fraction = 0.0
    """Share that hides of the backward's second all-gather, behind dgrad, and of its reduce-scatter, behind wgrad."""
    keeps_gathered_inputs: bool = False
    """Tensor-parallel ranks keep what they gather for a column-parallel product until its weight gradient; without:
    each keeps its shard, and they gather it again."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a"] = "p2p"
    """The exchange of keys and values in context parallelism: ring, all-gather, or heads for tokens."""
    dynamic_cp: Literal["", "texts", "packs"] = ""
    """Each text is split over as few ranks as hold it, by itself (`texts`) or with others that fill them (`packs`);
    without: every packed sequence over all of cp."""
    repeats_keys: bool = False
    """Keys and values are copied for every query head before attention, and ranks exchange all the copies."""
    balances_context: bool = True
    """Ranks that split a sequence attend to equally many keys (the k-th part from each end goes to the k-th rank);
    without: the last of them attends to 2 - 1 / cp times the mean."""
    keeps_gathered_keys: bool = False
    """All-gathered keys and values are kept for the backward; without: they are gathered again."""
    cp_overlap_fraction: Fraction = 0.95
    """Share of the ring exchange that hides behind the attention to the block before, and no more seconds than that
    takes. A first guess, fitted to nothing."""
    ep_overlap_fraction: Fraction = 0.0
    """Share of expert exchanges inside NVLink that hides behind another micro-batch's products."""
    ep_overlap_network_fraction: Fraction = 0.0
    """`ep_overlap_fraction` of the part of an exchange that crosses the network."""
    delays_weight_gradients: bool = False
    """Weight gradients of experts wait until the exchange beside them, and hide it."""
    overlaps_shared_experts: bool = False
    """The products of shared experts run beside the exchanges of the routed ones."""
    dispatcher: Literal["", "allgather", "alltoall", "deepep", "hybridep"] = ""
    """The kernels that send tokens to their experts; empty for those that the GPU's links ask for."""
    dispatcher_transport: Literal["", "nccl", "nvshmem", "ibgda", "uccl", "hybridep", "mori"] = ""
    """The carrier of the dispatcher's bytes between nodes; empty for the one that its kernels have there."""
    deepep_sms: NonNegativeInt = 20
    """Streaming multiprocessors that DeepEP's kernels run on while they send tokens, and products do not: Megatron-LM's
    default (--moe-flex-dispatcher-num-sms)."""
    hybridep_sms: NonNegativeInt = 16
    """`deepep_sms` of HybridEP."""
    ep_row_bytes: Overhead = 0.0
    """A token's activation that is shorter than this takes as long as one of this length on the innermost links: rows
    are handed to the experts' ranks one by one."""
    gradient_overlap_fraction: Fraction = 0.9
    """Share of the last micro-batch's backward that reductions of gradients can hide behind. A first guess."""
    parameter_overlap_fraction: Fraction = 0.9
    """Share of the first micro-batch's forward that gathers of weights can hide behind. A first guess."""
    bucket_parameters: PositiveInt | None = None
    """Parameters whose gradients or weights are exchanged at a time, or more among many ranks; given none, a layer's
    (FSDP)."""
    gathers_tensors: bool = False
    """Weights are gathered one tensor at a time, or broadcast so by the ranks that updated them."""
    all_reduces_gradients: bool = False
    """Gradients of a sharded optimizer are all-reduced (hooks of DistributedDataParallel), not reduce-scattered."""
    contention_fraction: Fraction = 0.1708
    """Share of an exchange of gradients or weights by which a step is longer although compute hides it: its kernels
    take SMs and memory bandwidth from those that they run beside. Fitted (trainers/data/shared/nccl.yaml)."""
    fsdp_overlap_fraction: Fraction = 0.9
    """Share of a micro-batch's compute that ZeRO-3's gathers and reductions can hide behind. A first guess."""
    fsdp_rate_fraction: Achieved = 1.0
    """Share of the links' rate that ZeRO-3's exchanges reach; below 1 where they go one parameter at a time."""
    has_torch_stages: bool = False
    """torch.distributed.pipelining runs the pipeline: every micro-batch of a step has its own receive buffers, and
    sharded gradients are reduced, and waited for, after a stage's last backward (torch 2.13, pipelining/stage.py)."""
    scatters_p2p: bool = False
    """Tensor-parallel ranks each send a slice of what they hold in common to the next stage, which gathers it."""
    p2p_overlap: bool = False
    """Under 1F1B, sends and receives run beside compute."""
    interleaved_p2p_overlap: bool = True
    """Under interleaved schedules, sends and receives run beside compute."""
    overlaps_split_backwards: bool = True
    """Schedules that split the backward go with overlapped reductions of gradients and gathers of weights."""
    overlaps_split_p2p: bool = False
    """Under schedules that split the backward, sends and receives run beside compute, whatever they do under 1F1B."""
    validates_later: bool = False
    """Under schedules that split the backward, each rank steps its optimizer when its own gradients are there, and
    looks at their norm over all ranks later (Qi et al. 2023, §4): steps overlap as far as ranks begin and end in
    turn."""
    sends_tokens_once: bool = False
    """The dispatcher sends a token to a node once and there to a rank once, however many of its experts they hold
    (DeepEP, HybridEP)."""
    natural_imbalance: Rate = 1.0
    """Tokens of the fullest expert rank over the mean in runs of this trainer that do not say how they route: above 1
    where nothing forces a balance."""
    visits_experts_in_rows: bool = False
    """A benchmark's gate sends each token to experts that stand in a row, so that it visits one or two ranks."""

    def bucket_among(self, ranks: Any) -> Any:
        """Parameters that `ranks`, a number or an array, exchange at a time: `bucket_parameters`, or a chunk each."""
        if self.bucket_parameters is None:
            return None
        chunks = CHUNK_PARAMETERS * ranks
        return chunks + (self.bucket_parameters - chunks) * (chunks < self.bucket_parameters)

    @property
    def overlaps_experts(self) -> bool:
        """True where expert exchanges run beside the products of another micro-batch."""
        return self.ep_overlap_fraction > 0 or self.ep_overlap_network_fraction > 0


class Limits(Group):
    """The layouts that a trainer can express: schedules, ZeRO stages, orders of ranks, what can be recomputed."""

    schedules: Texts = ("1f1b", "interleaved-1f1b", "none")
    """Schedules of a pipeline that it runs."""
    zero_stages: tuple[int, ...] = (0, 1)
    """ZeRO stages that it has."""
    grouped_zero_stages: tuple[int, ...] = (2, 3)
    """Those of its ZeRO stages that can shard over a group of the ranks and repeat the shards in other groups."""
    rank_orders: tuple[RankOrder, ...] = ("tp-cp-ep-dp-pp",)
    """Orders in which it can number its ranks, its own first."""
    shards_pipelines: bool = True
    """Stages of a pipeline can shard gradients and weights too (ZeRO-2 and 3); without: a model without stages can."""
    uneven_chunks: bool = False
    """Interleaved stages may hold any number of layers each, as a layout string says."""
    recompute_per_stage: bool = False
    """Each stage may recompute its own number of layers; without: one setting holds for all."""
    recomputes_some_layers: bool = True
    """Some of the layers may be recomputed whole; without: all of them or none."""
    sequence_parallel: bool = True
    """Tensor parallelism comes with sequence parallelism where a run does not say."""
    has_sequence_parallel: bool = True
    """Sequence parallelism and selective recompute exist (Korthikanti et al. 2022)."""
    has_model_parallel: bool = True
    """Layers, tensors, sequences and experts can be split over ranks; without: weights are sharded and nothing else."""
    has_context_parallel: bool = True
    """Sequences can be split over ranks in attention too (Megatron-LM since 2023)."""
    checkpointed_parts: PositiveInt = 1
    """Parts of a layer that full recompute repeats one by one, each from an input of its own that it keeps."""
    stops_recompute_early: bool = False
    """Recomputing a layer ends with the last tensor that its backward needs: no down projection, no exchange after it
    (torch.utils.checkpoint, and graphs that torch.compile partitions); without: all of it runs again."""
    selective_recompute_modules: Texts = ("core_attn",)
    """Modules that it can recompute by themselves."""
    saves_products: bool = False
    """Recomputing by operators (`op`) saves every matrix product; without: every second one is recomputed (torchtitan).
    The activations of the last layer are never offloaded then."""
    recomputes_unasked: bool = False
    """Its compiler recomputes what `selective` does, and no option keeps it from that."""
    selective_default: Texts = ("core_attn",)
    """The modules that `selective` recomputes where none are named."""
    head_only_stage: bool = False
    """The last stage may hold the head and no decoder layer (and the first the embedding alone)."""
