"""The trainer: which kernels it has, what it hides, what it shards, and what layouts it can express.

A runtime is data. The operator list asks it what is fused and saved, the cost model what is overlapped, the search what
is legal; nothing else in the planner knows one trainer from another.
"""

from pydantic import ConfigDict

from planner.specs.base import Fields, Fraction, Overhead, Said, Texts, retired
from planner.specs.hardware import HardwareSpec
from planner.specs.model import ModelSpec
from planner.specs.training import AdapterSpec, ObjectiveSpec
from planner.trainers.groups import FineTuning, Generation, Group, Kernels, Limits, Memory, Overlaps
from planner.trainers.shipped import RUNTIMES
from planner.trainers.switches import SHARDED_STAGES, changes

PACKED_BYTES = {4: 1 / 2 + 1 / 64 + 4 / (64 * 256), 8: 1.0, 16: 2.0}
"""Bytes of a frozen weight by its bits. In 4 bits 64 weights share a scale of 8 bits, and 256 scales one of fp32
(Dettmers et al. 2023, double quantization); in 8 bits a row shares one (LLM.int8)."""

BEFORE_FLASH = ("volta", "turing")
"""NVIDIA's GPUs before Ampere, for which cuDNN and FlashAttention-2 have no fused attention with a backward."""


class Host(Group):
    """Time of the host: launches of kernels, waits, graphs that replay them, and seconds of a step."""

    cuda_graphs: bool = False
    """A CUDA graph replays whole iterations: launch gaps disappear."""
    graphed_modules: Texts = ()
    """Modules of every layer that CUDA graphs replay, as Megatron-LM names them; the others are launched one by one."""
    blocking_launches: bool = False
    """Every kernel waits for the one before (CUDA_LAUNCH_BLOCKING=1): host time adds to GPU time."""
    collective_sync_us: Overhead = 0.0
    """Microseconds that ranks wait for the last one in an exchange of a layer, per doubling of the group; half as long
    in a CUDA graph. Kernels that send tokens and wait for each rank by itself (DeepEP, HybridEP) do not."""
    tp_jitter_fraction: Fraction = 0.0
    """Share of its compute by which the slowest rank of a tensor-parallel group keeps the others waiting, per doubling
    of the group."""
    host_factor: Overhead = 1.0
    """Host seconds of a kernel over the profile's host_us: above 1 by what this trainer's Python adds around it, below
    1 where one call issues several."""
    moe_kernels: Overhead = 0.0
    """Host time of a mixture-of-experts layer, forward and again backward, routing and exchanges included, counted in
    kernels of an eager layer. It shows unless the GPU takes longer or a CUDA graph replays the whole iteration."""
    expert_kernels: Overhead = 0.0
    """Host time for each expert of the rank, whose products and casts are launched one by one; counted likewise."""
    bias_kernels: Overhead = 0.0
    """The same for the biases of an expert that trains them: they are added and summed, and their gradients handed to
    the main ones, expert by expert."""
    awaits_token_counts: bool = True
    """The host waits for the numbers of tokens that experts get, and cannot run ahead of the GPU."""
    moe_host_factor: Overhead = 1.0
    """Factor on moe_kernels: below 1 where no counts are awaited."""
    graphed_attention_fraction: Fraction = 0.0
    """Share of moe_kernels that is gone where CUDA graphs replay attention (`graphed_modules`: attn)."""
    graphed_routing_fraction: Fraction = 0.0
    """Share of moe_kernels that is gone where they replay routing (moe_router, with moe_preprocess)."""
    narrow_host_factor: Overhead = 1.0
    """Factor on moe_kernels and expert_kernels in 8 or 4 bits: Transformer Engine's modules issue the casts as well."""
    ep_overlap_host_factor: Overhead = 1.0
    """Factor on both where exchanges hide behind another micro-batch's products: the layer runs in pieces, each with an
    autograd of its own. CUDA graphs of some of them take that back (Megatron-LM, pull request 2168)."""
    exchange_kernels: Overhead = 0.0
    """Host time to start an exchange of tensor- or context-parallel ranks, counted in kernels of an eager layer."""
    packs_documents: bool | None = None
    """Texts are packed into a sequence; null where nobody says."""
    document_kernels: Overhead = 0.0
    """Host time of a layer's pass for each text packed into its micro-batch, counted likewise: it is rotated alone."""
    index_kernels: Overhead = 0.0
    """Host time of a layer's pass for fused attention to chosen keys, counted likewise: chunks of scores, their best,
    the indexer's loss."""
    slice_kernels: Overhead = 0.0
    """The same for each slice of a text whose place an exchange of heads for tokens (cp_comm_type a2a) works out."""
    fetch_kernels: Overhead = 0.0
    """The same for each weight that ZeRO-3 shards: hooks of its module fetch and release it, in Python."""
    tensor_kernels: Overhead = 0.0
    """Host time of an optimizer step for each parameter tensor of the rank, counted likewise: hooks, copies to main
    gradients and back, zeroes. None where a CUDA graph replays the whole step."""
    microbatch_overhead_s: Overhead = 0.0
    """Host time per micro-batch and stage that no kernel hides."""
    step_overhead_s: Overhead = 0.0
    """Host time per optimizer step: data, logging, gradient norm on the host."""

    @property
    def launched_fraction(self) -> float:
        """Share of moe_kernels that the host still launches where CUDA graphs replay modules of a layer."""
        attention, routing = (name in self.graphed_modules for name in ("attn", "moe_router"))
        return 1 - self.graphed_attention_fraction * attention - self.graphed_routing_fraction * routing


class RuntimeSpec(Host, Limits, Overlaps, FineTuning, Memory, Kernels, Generation):
    """One trainer: its generation, kernels, memory, fine-tuning, overlaps, limits (groups.py) and host."""

    model_config = ConfigDict(defer_build=False)

    _retired = retired(
        "interleaved_microbatch_multiple",
        "min_microbatches_is_pp",
        "tuned_products",
        "stands_for",
        "shards_experts_apart",
    )

    def is_unmeasured_on(self, hardware: HardwareSpec) -> bool:
        """True of a trainer that a user describes, on a GPU that no run of theirs has timed."""
        return self.name not in RUNTIMES and hardware.efficiency.evidence != "probed"

    @property
    def runs_as_traced(self) -> bool:
        """True where transformers' own code runs kernel by kernel, as torch's trace of it has them."""
        return self.runs_transformers and not self.compiled

    @property
    def recomputes_layers(self) -> bool:
        """True where whole layers can be recomputed; neither overlapped exchanges, graphs of modules nor policies of
        operators allow it."""
        return not (self.overlaps_experts or self.graphed_modules or self.saves_products)

    @property
    def recomputable_modules(self) -> Texts:
        """The modules that can be recomputed by themselves beside the recipe's overlaps and graphs."""
        kept = set()
        if self.overlaps_experts or "moe_router" in self.graphed_modules:
            kept.add("moe")
        if self.overlaps_shared_experts:
            kept.add("shared_experts")
        return tuple(name for name in self.selective_recompute_modules if name not in kept)

    def in_dtype(self, dtype: str, architecture: str) -> "RuntimeSpec":
        """This runtime with what training in `dtype` on such silicon means for its bytes; the same if asked again."""
        update: Fields = {}
        gradient_bytes = {"bf16": None, "fp16": self.fp16_gradient_bytes}.get(dtype, self.narrow_gradient_bytes)
        if gradient_bytes is not None:
            update |= {"gradient_bytes": gradient_bytes, "kept_gradient_bytes": 0}
        if architecture == "blackwell":
            update |= {"fp8_copies": 1, "attention_kernel": self.blackwell_attention or self.attention_kernel}
        if architecture in BEFORE_FLASH and self.attention_kernel == "fastest" and not self.runs_transformers:
            # Transformer Engine falls back to scores in memory, and experts one by one are recomputed whole
            modules = tuple(name for name in self.selective_recompute_modules if name != "moe_act")
            update |= {"flash_attention": False, "selective_recompute_modules": modules}
        if dtype not in ("bf16", "fp16") and self.narrow_parameters:
            update["master_remainders"] = False
        return self.model_copy(update=update) if update else self

    def for_model(self, model: ModelSpec) -> "RuntimeSpec":
        """This runtime with transformers' kernel for sinks or capped scores, of which torch has none."""
        kernel = "fastest" if model.attention_sinks else "flash" if model.attn_logit_softcapping is not None else ""
        takes_other = kernel and self.runs_transformers and self.takes_torch_attention
        return self.model_copy(update={"attention_kernel": kernel}) if takes_other else self

    def for_adapters(self, adapters: AdapterSpec | None) -> "RuntimeSpec":
        """This runtime with what adapters mean for its bytes; the same if asked again."""
        if adapters is None:
            return self
        packed = adapters.base_bits < 16
        update: Fields = {"frozen_weight_bytes": PACKED_BYTES[adapters.base_bits], "unpacks_frozen": packed}
        if self.packed_adapters_in_fp32 if packed else self.adapters_in_fp32:
            update |= {"weight_bytes": 4, "gradient_bytes": 4, "kept_gradient_bytes": 0, "optimizer_bytes": 8}
        elif self.adapter_weights_cast:
            update["adapter_weights_cast"] = False
        if packed:
            update["adapter_copies_input"] = False
        if self.document_kernels and self.packs_documents is None:
            update["packs_documents"] = True
        return self.model_copy(update=update)

    def for_objective(self, objective: ObjectiveSpec) -> "RuntimeSpec":
        """This runtime with what an objective means for its passes and its weights; the same if asked again."""
        update = {
            "plain_forwards": objective.plain_forwards, "copies_weights": objective.copies_weights,
            "critics": objective.critics, "frozen_copies": objective.frozen_copies,
        }  # fmt: skip
        return self.model_copy(update=update) if any(update.values()) else self

    def dispatcher_on(self, hardware: HardwareSpec) -> str:
        """The kernels that send tokens to their experts: those of the recipe, or those that the GPU's links ask for."""
        if self.dispatcher or not self.sends_tokens_once:
            return self.dispatcher or "alltoall"
        return "hybridep" if hardware.nvlink_domain_size > hardware.gpus_per_node else "deepep"

    def for_zero_stage(self, zero_stage: int | None) -> "RuntimeSpec":
        """This runtime with a sharding library that offers a stated ZeRO stage, where its own does not."""
        if zero_stage is None or not self.sharding or zero_stage in SHARDED_STAGES[self.sharding]:
            return self
        value = next(value for value, stages in SHARDED_STAGES.items() if zero_stage in stages)
        return self.with_features({"sharding": value})[0]

    def for_schedules(self, split_backward: bool) -> "RuntimeSpec":
        """This runtime where backwards are split: layers run uncompiled, since a compiled one's backward is one node of
        the graph, whose donated buffers allow no second pass (torch 2.13); the loss stays compiled. Some trainers hide
        no exchange of gradients or weights then (`overlaps_split_backwards`)."""
        if not split_backward:
            return self
        changed: Fields = {}
        if self.compiled:
            changed |= {"compiled": False, "fused_norm": False, "fused_activation": False}
        if not self.overlaps_split_backwards:
            changed |= {"gradient_overlap_fraction": 0.0, "parameter_overlap_fraction": 0.0}
        if self.overlaps_split_p2p:
            changed["p2p_overlap"] = True
        return self.model_copy(update=changed) if changed else self

    def with_features(self, features: Said) -> "tuple[RuntimeSpec, Texts]":
        """This runtime with what a run's `features` switched on or off, and the names, or values, it does not know.

        Raises Unsupported where the run did what is not modelled.
        """
        changed, unknown = changes(features)
        return self.model_copy(update=changed), unknown
