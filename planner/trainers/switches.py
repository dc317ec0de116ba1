"""The performance switches of trainers: one row each, with its values and the fields of a runtime that a value sets.

A recipe is the value of every switch. It is no state of its own: a runtime's fields tell it (`Switch.value_of`). A
switch has one name everywhere: on the command line, among the features of a run, in JSON and in the notes of exports.
Which switches a trainer has, with which values and since which version, stands in the trainer's file (`switches:`).
Whether a value goes with a GPU, a model, a layout and the other switches is said by planner/trainers/rules/recipe.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.errors import Unsupported
from planner.trainers.optimizers import OPTIMIZERS

Value = bool | int | float | str
Fields = Mapping[str, Any]
"""Fields of RuntimeSpec, with the values that a switch gives them."""

EP_OVERLAP = 0.9
"""Share of expert exchanges inside NVLink that hides behind another micro-batch's products, where a recipe asks for it.
The kernels that send take a part of the GPU meanwhile (deepep_sms, hybridep_sms)."""
EP_NETWORK_OVERLAP = 0.8
"""Share of what crosses the network: Qwen3-30B on two nodes, 15% (HybridEP) and 24% (all-to-all) of whose step went
(Megatron-Bridge, pull requests 5094 and 3862)."""
OVERLAP = 0.9
"""Share of the window that reductions and gathers of a sharded optimizer fill: a first guess, fitted to nothing."""
ASYNC_TP = 0.688
"""Share of tensor-parallel exchanges that asynchronous tensor parallelism hides: fitted to torchtitan's published runs
(tools/calibrate runs, "asynchronous TP")."""
ROWWISE = 1.45
"""Seconds of torchao's 8-bit products with a scale for each row or block, over seconds with one for a tensor.

Llama 3 8B on eight H100: 6,150 tokens/s in bf16, 7,690 by tensors, 6,768 by rows (torchao's training benchmarks). 1.6
in torchtitan's report of June 2025 (70B, TP 8: by rows no faster than bf16), 1.5 for its mxfp8 on GB200."""
CAPACITY_HOST = 0.85
"""Host time of a mixture's layer that is left where experts take a fixed number of tokens: no counts are awaited."""
BF16_MOMENTS_BYTES = 8
"""Bytes per parameter of fp32 masters and two moments in bf16 (Megatron-LM, --exp-avg-dtype bf16)."""

ADAMW_BYTES = {"weight_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 4}
"""Bytes per parameter of a model in bf16 and torch's AdamW, whose moments are of the weights' dtype: no masters."""
_SHARDING: dict[Value, Fields] = {
    "ddp": ADAMW_BYTES
    | {
        "sharding": "ddp", "copies_to_buckets": True, "widens_gradients": False, "adapters_in_fp32": True,
        "adapter_copies_input": True, "reserved_gib": 0.0,
    },
    # weights that are trained are fp32 (accelerate, utils/fsdp_utils.py: fsdp2_prepare_model)
    "fsdp": {
        "sharding": "fsdp", "weight_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8, "copies_to_buckets": False,
        "widens_gradients": False, "adapters_in_fp32": True, "adapter_copies_input": True, "reserved_gib": 0.0,
    },
    # the engine casts the whole model to bf16, adapters too (deepspeed, runtime/engine.py: module.bfloat16()); its
    # buffer to gather weights is of 5·10⁸ elements, and that to reduce of hidden_size² (transformers' "auto")
    "deepspeed": {
        "sharding": "deepspeed", "weight_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 12,
        "copies_to_buckets": False, "widens_gradients": True, "adapters_in_fp32": False,
        "adapter_copies_input": False, "reserved_gib": 0.93,
    },
}  # fmt: skip
SHARDED_STAGES: dict[str, tuple[int, ...]] = {"ddp": (0,), "fsdp": (2, 3), "deepspeed": (1, 2, 3)}
"""ZeRO's stages that each value of `sharding` has."""

ROUTING = ("moe_router", "moe_preprocess")
"""Modules of a mixture's layer that a CUDA graph replays up to the exchange, where the host must know token counts."""


@dataclass(frozen=True, slots=True)
class Switch:
    """One switch of a trainer."""

    name: str
    says: str
    """The effect of the switch in a few words, as a report shows it."""
    values: Mapping[Value, Fields]
    """Each value that the search may choose, the plainest first, with the fields that it sets."""
    consent: Mapping[Value, str] = field(default_factory=dict)
    """Values that change numerics (or what is checked, or which tokens are trained on), and what they change. They are
    chosen with --allow NAME only."""
    also: Callable[[Any], Fields | None] = lambda value: None
    """The fields of a value that runs state and the search does not choose; None for a value that does not exist."""
    is_described: bool = False
    """True for a feature of runs that are priced, which the search never chooses."""
    shown_by: tuple[str, ...] = ()
    """The fields by which the value is recognized, where other fields that it sets are shared."""
    is_free: bool = False
    """True for a switch that never makes a step slower when it is on: the search does not try it off."""
    doubt_fraction: float = 0.0
    """Share of a step that a predicted gain was too large by in one of five published ablations. On a network that the
    host drives, where few were published, it counts twice."""
    only_saves_memory: bool = False
    """True for a switch that makes no layout faster by itself, but may let a faster one fit."""
    divides_layouts: bool = False
    """True for a switch whose values each need layouts that no other value allows."""
    source: str = ""
    """The evidence for what the switch gains."""

    def fields_of(self, value: Any) -> Fields | None:
        """The fields that `value` sets; None if the switch has no such value."""
        known = next((known for known in self.values if known == value and type(known) is type(value)), None)
        return self.also(value) if known is None else self.values[known]

    def value_of(self, runtime: Any) -> Value:
        """The value whose fields a runtime has; numbers match if both or neither are zero, a share is as it is."""

        def matches(fields: Fields) -> bool:
            names = self.shown_by or tuple(fields)
            return all(_alike(getattr(runtime, name), fields[name]) for name in names)

        def is_exact(fields: Fields) -> bool:
            return matches(fields) and all(getattr(runtime, name) == fields[name] for name in self.shown_by or fields)

        exact = (value for value, fields in self.values.items() if is_exact(fields))
        alike = (value for value, fields in self.values.items() if matches(fields))
        if (value := next(exact, None)) is None and self.also is _offloaded:
            return float(runtime.optimizer_offload_fraction)
        return next(alike, next(iter(self.values))) if value is None else value

    @property
    def touched(self) -> frozenset[str]:
        """All fields that the switch's values set."""
        return frozenset(name for fields in self.values.values() for name in fields)


def _alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, float) and not isinstance(found, bool):
        return bool(found) == bool(expected)
    return bool(found == expected)


def _flag(name: str, says: str, field_name: str, described: bool = False, **more: Any) -> Switch:
    """A switch that is one field of a runtime."""
    off_on: dict[Value, Fields] = {False: {field_name: False}, True: {field_name: True}}
    return Switch(name, says, off_on, also=lambda v: {field_name: bool(v)}, is_described=described, **more)


def _fraction(name: str, says: str, fields: tuple[str, ...], when_on: float, **more: Any) -> Switch:
    """A switch that hides a share of exchanges."""
    off_on: dict[Value, Fields] = {False: dict.fromkeys(fields, 0.0), True: dict.fromkeys(fields, when_on)}
    return Switch(name, says, off_on, also=lambda v: off_on[bool(v)], is_free=True, **more)


def _one_of(name: str, says: str, field_name: str, values: Iterable[str], described: bool = False) -> Switch:
    return Switch(name, says, {value: {field_name: value} for value in values}, is_described=described)


def _described(name: str, effect: Callable[[Any], Fields | None]) -> Switch:
    """A feature of runs that the search never chooses."""
    return Switch(name, "", {}, also=effect, is_described=True)


def _overlap_of_experts(on: bool, delayed: bool) -> Fields:
    return {
        "ep_overlap_fraction": EP_OVERLAP if on else 0.0,
        "ep_overlap_network_fraction": EP_NETWORK_OVERLAP if on else 0.0,
        "delays_weight_gradients": delayed,
    }


def _graphs(modules: tuple[str, ...], whole: bool = False) -> Fields:
    return {"cuda_graphs": whole, "graphed_modules": modules}


def _stated_graphs(value: Any) -> Fields | None:
    """The fields of a run's own words for its graphs, such as `transformer_engine[attn,moe_router]`."""
    if value in (True, "full_iteration", "full"):
        return _graphs((), whole=True)
    if not value or value == "none":
        return {}
    return _graphs((*(("attn",) if "attn" in str(value) else ()), *ROUTING))


_ONE_SCALE: Fields = {"narrow_factor": 1.0, "narrow_exchanges": True}
_RECIPES: dict[str, Fields] = {
    # gradients of bf16 training are summed in fp32; the mixed precision of older trainers was fp16
    "bf16": {"gradient_bytes": 4},
    "fp8-tensorwise": _ONE_SCALE,
    "fp8-rowwise": {"narrow_factor": ROWWISE, "narrow_exchanges": False},
}
_COMPILED = ("compiled", "fused_norm", "fused_activation", "fused_cross_entropy")
"""Fields of a trainer that relies on torch.compile, all of which it loses without it."""
_LIGER = ("fused_norm", "fused_rotary", "fused_activation", "fused_cross_entropy", "chunks_loss")
_GRADIENT_BYTES = ("gradient_bytes", "fp16_gradient_bytes", "narrow_gradient_bytes")
LEGACY_EXPERT_KERNELS = 7.6
"""Host time of an expert whose products are launched one by one, in kernels of an eager layer: layers of
DeepSeek-V2-Lite take 14.7 ms on eight MI355X with micro-batches of 1 and of 2 sequences (Primus, examples/moe_package,
figure 5)."""
TURBO_EXPERT_KERNELS = 3.8
"""The same where one launch holds all experts of a rank: half. Qwen3-235B on 32 MI355X, whose batch is not published,
excludes both as many as expert by expert (52% too slow) and Transformer Engine's 0.89 (30% too fast)."""
UNFUSED_PERMUTE = 4.0
"""Seconds of permutations by torch's gathers and atomic additions over those of one fused kernel, on AMD's GPUs:
DeepSeek-V2-Lite on eight MI355X, whose steps of 11.19 s with DeepEP take 10.01 with them fused (Primus, examples/
moe_package, figure 6)."""
FUSED_ROUTER_HOST = 0.85
"""Host time of a mixture's layer that is left where one kernel scores and routes: as where a graph replays routing
(graphed_routing_fraction)."""
_SYNC_FREE: dict[Value, Fields] = {
    0: {"fused_permute": False, "permute_factor": UNFUSED_PERMUTE, "moe_host_factor": 1.0, "awaits_token_counts": True},
    1: {
        "fused_permute": True, "permute_factor": 1.0, "moe_host_factor": FUSED_ROUTER_HOST, "awaits_token_counts": True,
    },
    2: {
        "fused_permute": True, "permute_factor": 1.0, "moe_host_factor": FUSED_ROUTER_HOST,
        "awaits_token_counts": False,
    },
}  # fmt: skip
_CAPACITY: Fields = {"sends_tokens_once": False, "awaits_token_counts": False, "moe_host_factor": CAPACITY_HOST}
"""Only the all-to-all among Megatron's dispatchers gives experts a fixed number of tokens; the host awaits no count."""


_EXCHANGED: dict[str, Fields] = {
    row.name: {"all_reduces_gradients": True} for row in OPTIMIZERS.values() if row.newton_schulz_steps
}
"""Fields of optimizers that need whole matrices: ranks divide these among them and all-reduce gradients
(Megatron-LM, use_layer_wise_distributed_optimizer)."""


def _offloaded(value: Any) -> Fields | None:
    """A share of the optimizer's states between 0 and 1."""
    is_share = isinstance(value, (int, float)) and 0 <= value <= 1
    return {"optimizer_offload_fraction": float(value)} if is_share else None


_ROWS = (
    Switch(
        "ep_overlap",
        "expert exchanges run beside the products of another micro-batch",
        {
            False: _overlap_of_experts(False, delayed=False),
            True: _overlap_of_experts(True, delayed=False),
            "delayed": _overlap_of_experts(True, delayed=True),
        },
        also=lambda value: _overlap_of_experts(bool(value), delayed=False),
        doubt_fraction=0.065,
        source="Megatron-Bridge, pull requests 3862 and 5094: 15 to 24% on Qwen3-30B; 1760: a loss on eager B200",
    ),
    Switch(
        "cuda_graph",
        "CUDA graphs replay these parts of a step",
        {
            "none": _graphs(()),
            "moe_router": _graphs(ROUTING),
            "attn+moe_router": _graphs(("attn", *ROUTING)),
            "full_iteration": _graphs((), whole=True),
        },
        also=_stated_graphs,
        doubt_fraction=0.013,
        source="Megatron-LM's guide to DeepSeek-V3 on GB200: 8.6% for attention and routing",
    ),
    Switch(
        "nan_checks",
        "the loss and the gradients are looked at for NaN",
        {True: {"checks_nan": True}, False: {"checks_nan": False}},
        consent={False: "checks"},
    ),
    _flag(
        "fused_experts", "one kernel computes the products, activations and casts of all experts", "fuses_experts",
        consent={True: "numerics"},
        source="GPT-OSS-120B on GB200, whose release without the kernel ran at 597 instead of 943 TFLOP/s",
    ),
    Switch(
        "dispatcher",
        "the kernels that send tokens to their experts",
        {
            "alltoall": {"dispatcher": "alltoall", "sends_tokens_once": False},
            "deepep": {"dispatcher": "deepep", "sends_tokens_once": True},
            "hybridep": {"dispatcher": "hybridep", "sends_tokens_once": True},
            "flex": {"dispatcher": "", "sends_tokens_once": True},
        },
        also=lambda value: {"dispatcher": value, "sends_tokens_once": False} if value == "allgather" else None,
        source="Megatron-LM's guide to DeepSeek-V3 on GB200: 5 to 14% from all-to-all to DeepEP to HybridEP",
    ),
    Switch(
        "sync_free_moe",
        "1: fused routing and permutation; 2: and the host awaits no token counts (turbo_sync_free_moe_stage)",
        _SYNC_FREE,
        # 3 fuses the activation, too, for more memory
        also=lambda value: _SYNC_FREE[2] if value == 3 else None,
        shown_by=("fused_permute", "awaits_token_counts"),
        doubt_fraction=0.01,
        source="Primus, examples/moe_package: 8 to 12% on DeepSeek-V2 and V2-Lite for 1",
    ),
    Switch(
        "grouped_gemm",
        "legacy: products of experts one by one on a few streams; turbo: one kernel for all (use_turbo_grouped_gemm)",
        {
            "legacy": {"groups_products": False, "expert_kernels": LEGACY_EXPERT_KERNELS},
            "turbo": {"groups_products": True, "expert_kernels": TURBO_EXPERT_KERNELS},
        },
        shown_by=("groups_products",),
        source="Primus, examples/moe_package, figure 1: 0 to 50% of these products on MI325X",
    ),
    _flag(
        "shared_expert_overlap", "shared experts run beside the exchanges of the others", "overlaps_shared_experts",
        doubt_fraction=0.02,
    ),
    Switch(
        "tp_comm_overlap",
        "tensor-parallel exchanges run beside the products that they feed",
        {False: {"tp_overlap_fraction": 0.0}, True: {}},
        # on: as much hides as the trainer's own runs say
        also=lambda value: {} if value else {"tp_overlap_fraction": 0.0},
        is_free=True,
    ),
    _fraction(
        "async_tp", "tensor-parallel exchanges run in pieces beside products",
        ("tp_overlap_fraction", "mla_tp_overlap_fraction"), ASYNC_TP,
        source="torchtitan, June 2025: 4 to 16% on Llama 70B",
    ),
    _fraction(
        "overlap_grad_reduce", "gradients are reduced behind the backward", ("gradient_overlap_fraction",), OVERLAP
    ),
    _fraction(
        "overlap_param_gather", "weights are gathered behind the forward", ("parameter_overlap_fraction",), OVERLAP
    ),
    Switch(
        "p2p_overlap",
        "pipeline sends run beside compute",
        {value: {"interleaved_p2p_overlap": value} for value in (False, True)},
        also=lambda value: {"p2p_overlap": bool(value), "interleaved_p2p_overlap": bool(value)},
        is_free=True,
    ),
    _one_of(
        "cp_comm_type", "the exchange of keys and values in context parallelism", "cp_comm_type",
        ("p2p", "all_gather", "a2a"),
    ),
    Switch(
        "cross_entropy_fusion",
        "one kernel computes the loss; native: a few do, and keep its softmax in fp32",
        {
            False: {"fused_cross_entropy": False},
            "native": {"fused_cross_entropy": True, "loss_keeps_softmax": True},
            True: {"fused_cross_entropy": True, "loss_keeps_softmax": False},
        },
        also=lambda value: {"fused_cross_entropy": bool(value), "loss_keeps_softmax": False},
        is_free=True,
    ),
    Switch(
        "bf16_gradients",
        "gradients are summed and reduced in bf16",
        {False: dict.fromkeys(_GRADIENT_BYTES, 4), True: dict.fromkeys(_GRADIENT_BYTES, 2)},
        consent={True: "numerics"},
        shown_by=("gradient_bytes",),
        source="all performance recipes of Megatron-Bridge",
    ),
    Switch(
        "bf16_moments",
        "Adam's moments are kept in bf16",
        {
            False: {"optimizer_bytes": 12, "master_remainders": False},
            # FusedAdam of Transformer Engine 2.1 (OptimizerConfig.store_param_remainders)
            True: {"optimizer_bytes": BF16_MOMENTS_BYTES, "master_remainders": True},
        },
        shown_by=("optimizer_bytes",),
        consent={True: "numerics"},
        source="performance recipes of Megatron-Bridge for DeepSeek-V3",
    ),
    Switch(
        "optimizer",
        "what is kept of past gradients, and how weights are updated (trainers/optimizers.py)",
        {name: {"optimizer": name, **_EXCHANGED.get(name, {})} for name in OPTIMIZERS},
        consent={name: "numerics" for name in OPTIMIZERS if name != "adamw"},
        shown_by=("optimizer",),
        source="states and passes counted in torch, transformers and bitsandbytes",
    ),
    Switch(
        "optimizer_offload",
        "a share of the optimizer's states stays on the host",
        {share: {"optimizer_offload_fraction": share} for share in (0.0, 0.5, 1.0)},
        also=_offloaded,
        only_saves_memory=True,
    ),
    Switch(
        "sharding",
        "what shards weights and optimizer: nothing (ddp), FSDP2 with fp32 masters, or DeepSpeed's ZeRO",
        _SHARDING,
        shown_by=("sharding",),
        divides_layouts=True,
        source="accelerate 1.15, utils/fsdp_utils.py: trained weights become fp32; DeepSpeed 0.19: bf16 and masters",
    ),
    Switch(
        "liger",
        "Liger kernels fuse norms, rotations and activations, and compute the loss in chunks; loss: the last alone",
        {
            False: dict.fromkeys(_LIGER, False),
            True: dict.fromkeys(_LIGER, True),
            "loss": {**dict.fromkeys(_LIGER, False), "chunks_loss": True},
        },
        shown_by=("chunks_loss", "fused_norm"),
        source="Hsu et al. 2024 (arxiv.org/abs/2410.10989): 20% more throughput and 60% less memory on average",
    ),
    Switch(
        "activation_offload",
        "the inputs of these modules wait in host memory for the backward",
        {
            "none": {"offload_modules": ()},
            "moe_act": {"offload_modules": ("moe_act",)},
            "core_attn+attn_proj": {"offload_modules": ("core_attn", "attn_proj")},
        },
        also=lambda value: {"offload_modules": tuple(value.split("+"))} if isinstance(value, str) else None,
        only_saves_memory=True,
    ),
    Switch(
        "compile",
        "torch.compile fuses the elementwise work of a layer",
        {False: dict.fromkeys(_COMPILED, False), True: {"compiled": True}},
        also=lambda value: {"compiled": True} if value else dict.fromkeys(_COMPILED, False),
        source="torchtitan, December 2024: 16% on Llama 8B",
    ),
    Switch(
        "token_drop",
        "experts take a fixed number of tokens, and drop the others",
        {
            False: {"awaits_token_counts": True, "moe_host_factor": 1.0},
            True: {"awaits_token_counts": False, "moe_host_factor": CAPACITY_HOST},
        },
        consent={True: "tokens"},
        shown_by=("awaits_token_counts",),
    ),
    Switch(
        "deterministic",
        "two runs give the same bits: attention and permutations add up in a fixed order",
        {False: {"deterministic": False}, True: {"deterministic": True}},
        consent={True: "numerics"},
        source="Megatron-LM's reference on determinism: 4% of a large dense model, about 15% of most, 17% of a mixture",
    ),
    # features of runs
    _one_of(
        "dispatcher_transport", "what carries the dispatcher's bytes between nodes", "dispatcher_transport",
        ("nccl", "nvshmem", "ibgda", "uccl", "hybridep", "mori"), True,
    ),
    _described("moe_capacity_factor", lambda value: _CAPACITY if value else {}),
    _described("moe_token_drop", lambda value: _CAPACITY if value else {}),
    _described("fp32_grad_accum", lambda value: dict.fromkeys(_GRADIENT_BYTES, 4 if value else 2)),
    _flag("experts_in_rows", "a gate of benchmarks", "visits_experts_in_rows", described=True),
    _flag("flash_attention", "fused attention", "flash_attention", described=True),
    _flag("activation_fusion", "fused activations", "fused_activation", described=True),
    _flag("optimizer_post_validation", "steps overlap", "validates_later", described=True),
    _flag("dropout", "dropout after attention and MLP", "dropout", described=True),
    _flag("fp8_output_proj", "the head is of the recipe's dtype too", "narrow_head", described=True),
    _flag("gradient_accumulation_fusion", "products add to gradients", "fused_grad_accumulation", described=True),
    _one_of("attention_kernel", "the kernel of attention", "attention_kernel", ("fastest", "flash", "flash1"), True),
    Switch(
        "loss_metrics", "more computations of the loss, for metrics", {n: {"loss_metrics": n} for n in range(3)},
        also=lambda value: {"loss_metrics": value} if type(value) is int and value >= 0 else None,
        is_described=True,
    ),
    _described(
        "cpu_offloading_num_layers",
        lambda value: {"offloaded_layers": value} if type(value) is int and value >= 0 else None,
    ),
    Switch(
        "natural_routing", "experts get the tokens that the data sends them", {False: {}, True: {}},
        also=lambda value: {}, is_described=True,
    ),
    _described("precision_recipe", lambda value: _RECIPES.get(str(value), {})),
    _flag("te_op_fuser", "activations of dense MLPs write what products read", "fuses_mlp", described=True),
    _flag(
        "activation_func_fp8_input_store", "dense MLPs keep 8 bits for their activation's gradient",
        "narrow_activations", described=True,
    ),
    _flag("lora_dropout_recompute", "adapters keep no masks", "recomputes_adapter_masks", described=True),
    _flag("lora_a2a", "split adapters exchange columns for tokens", "adapters_all_to_all", described=True),
    _flag("packed_documents", "texts are packed into a sequence", "packs_documents", described=True),
    _flag("fp8_params", "weights are kept in the recipe's dtype", "narrow_parameters", described=True),
    _described("reentrant_checkpoint", lambda value: {"stops_recompute_early": not value}),
    # what published rows describe and changes nothing
    *(
        _described(name, lambda value: {})
        for name in (
            "match", "uneven_pp", "flex_attention", "fp8_dot_product_attention",
        )
    ),
)  # fmt: skip

SWITCHES = {row.name: row for row in _ROWS}
"""All switches, by name."""


def written(value: Value) -> str:
    """A value as the command line takes it: `true`, `0.5`, `delayed`."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def parsed(name: str, text: str) -> Value | None:
    """The value of the switch `name` that a text means; None if it has no such value."""
    row = SWITCHES[name]
    known = next((value for value in row.values if written(value) == text.lower()), None)
    kind = type(next(iter(row.values)))
    if known is None and kind in (int, float):
        try:
            known = kind(text) if row.also(kind(text)) is not None else None
        except ValueError:
            return None
    return known


NOT_MODELLED = {"cpu_offload": "tensors kept in host memory"}
"""Features of runs whose effect is not priced."""
_IMPLIED_BY_WHOLE_GRAPHS: dict[str, Value] = {"ep_overlap": "delayed", "fused_experts": True, "nan_checks": False}
"""Published recipes that capture whole iterations of mixtures overlap their exchanges, delay weight gradients and fuse
the products of experts too (Megatron-Bridge since 26.06). Megatron-LM takes no checks for NaN beside such graphs."""


def read_recipe(runtime: Any, names: Iterable[str] = ()) -> dict[str, Value]:
    """The value of each switch of `names` that a runtime's fields tell; by default of all that a search may choose."""
    rows = [SWITCHES[name] for name in names] or [row for row in SWITCHES.values() if not row.is_described]
    return {row.name: row.value_of(runtime) for row in rows}


def changes(features: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of a RuntimeSpec with the values that `features` give them, and the names, or values, that are unknown.

    Raises Unsupported where a feature is on that is not modelled.
    """
    changed: dict[str, Any] = {}
    unknown = []
    # what graphs and capacities imply for other switches counts where a run does not state these itself
    for name, value in sorted(features.items(), key=lambda pair: (pair[0] != "cuda_graph", pair[0] == "dispatcher")):
        row = SWITCHES.get(name)
        if name in NOT_MODELLED:
            if value:
                raise Unsupported(
                    f"features: {name}: {NOT_MODELLED[name]} are not modelled",
                    "leave it out to price the run as if the GPU kept them",
                )
            continue
        fields = None if row is None else row.fields_of(value)
        if fields is None:
            unknown.append(name if row is None else f"{name}: {value!r:.60}")
            continue
        changed |= fields
        if name == "cuda_graph" and value in ("full", "full_iteration"):
            for other, implied in _IMPLIED_BY_WHOLE_GRAPHS.items():
                changed |= SWITCHES[other].values[implied]
    return changed, tuple(unknown)
