"""The variables that a plan's recipe needs or gains from: a row for each, with the plans that have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from planner.answer import Plan
from planner.export.common.recipe import runtime_of
from planner.export.megatron.recipe import switch_arguments

NORM_MARGIN_SMS = 20
"""SMs that norms leave to exchanges that run beside them: 418 of Megatron-Bridge's recipes (perf_recipes, 0.7.0)."""
CONNECTIONS, CONNECTIONS_BESIDE_TP = 32, 8
"""Queues to the GPU: in 404 of Megatron-Bridge's recipes, and in those for H100 that overlap experts at TP 2."""
_NO_SEGMENTS_IN_GRAPHS = ("0.14", "0.15")
"""Versions of Megatron core that refuse graphs beside expandable segments."""
_UNORDERED = ("blackwell", "rubin")
"""Architectures on which CUDA_DEVICE_MAX_CONNECTIONS no longer orders communication before compute."""
_LARGE = 1024
"""Ranks from which NCCL waits longer for a link: "very large networks", as its documentation says."""


class _Row(NamedTuple):
    """A variable, its value, and the plans that have it."""

    name: str
    value: str
    is_needed: Callable[[Plan], bool] = lambda plan: True


def _has_graphs(plan: Plan) -> bool:
    return bool(plan.runtime_spec.cuda_graphs or plan.runtime_spec.graphed_modules)


def _takes_segments(plan: Plan) -> bool:
    return not _has_graphs(plan) or plan.runtime_spec.version not in _NO_SEGMENTS_IN_GRAPHS


def _has_nodes(plan: Plan) -> bool:
    return plan.parallelism.num_gpus_used > plan.cluster.node_size


def overlaps_experts(plan: Plan) -> bool:
    """Exchanges of experts were priced behind compute."""
    return plan.parallelism.ep > 1 and plan.runtime_spec.overlaps_experts


def _has_exchanges_beside_norms(plan: Plan) -> bool:
    """Gradients or tokens are exchanged while layers run."""
    layout = plan.parallelism
    return overlaps_experts(plan) or (runtime_of(plan).gradient_overlap_fraction > 0 and layout.dp * layout.cp > 1)


_EVERYWHERE = (
    _Row("NCCL_IB_TIMEOUT", "22", lambda plan: _has_nodes(plan) and plan.parallelism.num_gpus_used >= _LARGE),
)
_ON_NVIDIA = (
    _Row("NCCL_NVLS_ENABLE", "0"),
    # NCCL would register buffers of graphs, which have no fixed address in expandable segments
    _Row("NCCL_GRAPH_REGISTER", "0", _has_graphs),
    _Row("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", _takes_segments),
    _Row("TORCH_NCCL_AVOID_RECORD_STREAMS", "0", lambda plan: bool(plan.runtime_spec.cuda_graphs)),
    _Row("TORCH_NCCL_AVOID_RECORD_STREAMS", "1", lambda plan: not plan.runtime_spec.cuda_graphs),
    # exchanges go first where compute runs beside them (Megatron-Bridge's COMMON_RECIPE_ENV_VARS)
    _Row("TORCH_NCCL_HIGH_PRIORITY", "1"),
    _Row("NVTE_FWD_LAYERNORM_SM_MARGIN", str(NORM_MARGIN_SMS), _has_exchanges_beside_norms),
    _Row("NVTE_BWD_LAYERNORM_SM_MARGIN", str(NORM_MARGIN_SMS), _has_exchanges_beside_norms),
    _Row("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1", lambda plan: plan.runtime_spec.fuses_experts),
    # Transformer Engine 2.10 and above would offload weights too
    _Row("NVTE_CPU_OFFLOAD_V1", "1", lambda plan: bool(plan.runtime_spec.offload_modules)),
)
_ON_AMD = (
    _Row("HSA_ENABLE_SDMA", "1"),
    # mixtures crash where scratch memory is reclaimed
    _Row("HSA_NO_SCRATCH_RECLAIM", "1"),
    _Row("GPU_MAX_HW_QUEUES", "2"),
    _Row("TORCH_NCCL_HIGH_PRIORITY", "1"),
    _Row("RCCL_MSCCL_ENABLE", "0"),
    _Row("NCCL_CHECKS_DISABLE", "1"),
    _Row("NCCL_CROSS_NIC", "0", _has_nodes),
    # RoCE v2
    _Row("NCCL_IB_GID_INDEX", "3", _has_nodes),
    _Row("NCCL_PXN_DISABLE", "1", _has_nodes),
    _Row("NCCL_P2P_NET_CHUNKSIZE", "524288", _has_nodes),
    _Row("NVTE_CK_USES_BWD_V3", "1"),
    _Row("NVTE_USE_CAST_TRANSPOSE_TRITON", "1", lambda plan: plan.training.dtype in ("fp8", "mxfp8")),
    _Row("NVTE_ROCM_ENABLE_MXFP8", "1", lambda plan: plan.training.dtype == "mxfp8"),
)
"""As AMD's own launcher sets them (AMD-AGI/Primus, runner/helpers/envs/base_env.sh, August 2026)."""


def environment(plan: Plan) -> dict[str, str]:
    """The variables of a plan."""
    vendor = _ON_AMD if plan.cluster.hardware.is_amd else _ON_NVIDIA
    variables = _connections(plan)
    variables |= {row.name: row.value for row in (*_EVERYWHERE, *vendor) if row.is_needed(plan)}
    return variables if plan.cluster.hardware.is_amd else variables | nvlink_topology(plan)


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
