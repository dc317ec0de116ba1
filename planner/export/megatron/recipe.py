"""A plan's recipe in Megatron-LM's options, and the environment that it needs."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.arguments import Arguments
from planner.export.common.recipe import recipe_of, runtime_of
from planner.export.common.spelling import spelling_of
from planner.export.megatron.switches import CAPACITY, SWITCH_OPTIONS
from planner.trainers.switches import Value

STASH = 1.2
"""Buffers of the paged stash, over what balanced experts keep (Megatron-Bridge's recipes for DeepSeek-V3)."""
NORM_MARGIN_SMS = 20
"""SMs that norms leave to exchanges that run beside them: 418 of Megatron-Bridge's recipes (perf_recipes, 0.7.0)."""
CONNECTIONS, CONNECTIONS_BESIDE_TP = 32, 8
"""Queues to the GPU: in 404 of Megatron-Bridge's recipes, and in those for H100 that overlap experts at TP 2."""
INFLIGHT = 1
"""Copies to the host, of one kind, that a graph of a whole iteration does not wait for: Megatron-Bridge's recipe of
DeepSeek-V3 for GB300."""
_NVIDIA = ("volta", "ampere", "hopper", "ada", "blackwell", "rubin")
_NO_SEGMENTS_IN_GRAPHS = ("0.14", "0.15")
"""Versions of Megatron core that refuse graphs beside expandable segments."""
_UNORDERED = ("blackwell", "rubin")
"""Architectures on which CUDA_DEVICE_MAX_CONNECTIONS no longer orders communication before compute."""


def switch_arguments(plan: Plan) -> Arguments:
    """The options that say the plan's recipe in its version's words; those of refused values are left out."""
    arguments: Arguments = {}
    for name, value in _recipe(plan).items():
        arguments |= spelling_of(SWITCH_OPTIONS, name, value, plan.runtime_spec.version) or {}
    if plan.model.spec.moe is not None:
        # allgather unless told
        arguments.setdefault("--moe-token-dispatcher-type", "alltoall")
        arguments |= _whole_mixture(plan)
    if plan.runtime_spec.cuda_graphs and plan.runtime_spec.offload_modules:
        arguments["--fine-grained-offloading-max-inflight-offloads"] = INFLIGHT
    if not plan.model.spec.gated_mlp:
        arguments.pop("--moe-mlp-glu-interleave-size", None)
    return arguments


def _recipe(plan: Plan) -> dict[str, Value]:
    recipe = dict(recipe_of(plan, SWITCH_OPTIONS))
    if plan.training.dtype == "fp16":
        # the other way about: gradients are 16 bits wide unless they are asked to be 32
        recipe.pop("bf16_gradients")
    return recipe


def _whole_mixture(plan: Plan) -> Arguments:
    """The room for tokens of experts in a graph that replays whatever their numbers are: no host sees these."""
    if not (plan.runtime_spec.cuda_graphs and plan.runtime_spec.fuses_experts):
        return {}
    return {
        "--moe-token-dispatcher-type": "flex",
        "--moe-flex-dispatcher-backend": "hybridep",
        "--moe-expert-rank-capacity-factor": CAPACITY,
        "--moe-paged-stash": True,
        "--moe-paged-stash-buffer-size-factor-cuda": STASH,
    }


def environment(plan: Plan) -> dict[str, str]:
    """The variables that the recipe needs or gains from, on GPUs of NVIDIA."""
    runtime, variables = plan.runtime_spec, _connections(plan)
    if plan.cluster.hardware.architecture.lower() not in _NVIDIA:
        return variables
    variables["NCCL_NVLS_ENABLE"] = "0"
    has_graphs = bool(runtime.cuda_graphs or runtime.graphed_modules)
    if has_graphs:
        # NCCL would register buffers of graphs, which have no fixed address in expandable segments
        variables["NCCL_GRAPH_REGISTER"] = "0"
    if not has_graphs or runtime.version not in _NO_SEGMENTS_IN_GRAPHS:
        variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    variables["TORCH_NCCL_AVOID_RECORD_STREAMS"] = "0" if runtime.cuda_graphs else "1"
    if _has_exchanges_beside_norms(plan):
        margin = str(NORM_MARGIN_SMS)
        variables |= {"NVTE_FWD_LAYERNORM_SM_MARGIN": margin, "NVTE_BWD_LAYERNORM_SM_MARGIN": margin}
    if runtime.fuses_experts:
        variables["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"
    if runtime.offload_modules:
        # Transformer Engine 2.10 and above would offload weights too
        variables["NVTE_CPU_OFFLOAD_V1"] = "1"
    return variables | nvlink_topology(plan)


def _connections(plan: Plan) -> dict[str, str]:
    """CUDA_DEVICE_MAX_CONNECTIONS: 1 orders communication before compute, more lets both run side by side.

    Up to Hopper, tensor and context parallelism want the order. FSDP refuses it, and overlapped exchanges of experts
    hide half as well under it (Megatron-LM, pull request 6311: 198.5 TFLOP/s with 32 connections, 191.1 with one).
    """
    layout = plan.parallelism
    in_order = layout.tp > 1 or layout.cp > 1
    if layout.zero_stage >= 2 or plan.cluster.hardware.architecture.lower() in _UNORDERED:
        number = CONNECTIONS
    elif overlaps_experts(plan):
        number = CONNECTIONS_BESIDE_TP if layout.tp > 1 else CONNECTIONS
    elif in_order:
        number = 1
    else:
        return {}
    return {"CUDA_DEVICE_MAX_CONNECTIONS": str(number)}


def overlaps_experts(plan: Plan) -> bool:
    """Exchanges of experts were priced behind compute."""
    return plan.parallelism.ep > 1 and plan.runtime_spec.overlaps_experts


def _has_exchanges_beside_norms(plan: Plan) -> bool:
    """Gradients or tokens are exchanged while layers run."""
    layout = plan.parallelism
    return overlaps_experts(plan) or (runtime_of(plan).gradient_overlap_fraction > 0 and layout.dp * layout.cp > 1)


def nvlink_topology(plan: Plan) -> dict[str, str]:
    """Variables from which HybridEP learns how many ranks of an exchange are joined by NVLink, and if across nodes."""
    if switch_arguments(plan).get("--moe-flex-dispatcher-backend") != "hybridep":
        return {}
    domain, ranks = plan.cluster.nvlink_domain_size, plan.parallelism.ep * plan.parallelism.etp
    joined = max(size for size in range(1, min(ranks, domain) + 1) if ranks % size == 0)
    return {
        "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN": str(joined),
        "NVLINK_DOMAIN_SIZE": str(domain),
        "USE_MNNVL": "1" if domain > plan.cluster.node_size else "0",
    }
