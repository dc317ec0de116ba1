"""The environment variables that a plan's exchanges and recipe need, by trainer and vendor: a row for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

from planner.answer import Plan
from planner.export.megatron.plan_options import is_fsdp, switch_arguments
from planner.export.spelling import runtime_of
from planner.specs.reading import shipped_table

LARGE = 1024
"""Ranks from which NCCL waits longer for a link: "very large networks", as its documentation says."""


_BY_THREADS = ("efa", "slingshot", "tcp")
"""Networks that no InfiniBand verbs drive, so that NCCL's variables for them mean nothing."""


@cache
def networks() -> dict[str, dict[str, Any]]:
    """The needs of each kind of network: the rows of networks.yaml."""
    found: dict[str, dict[str, Any]] = shipped_table("export/networks.yaml")
    return found


def network_of(plan: Plan) -> dict[str, Any]:
    """The row of the network between the plan's nodes; empty where nobody names its kind, or there is one node."""
    return networks().get(plan.cluster.hardware.network, {}) if _has_nodes(plan) else {}


class EnvironmentVariable(NamedTuple):
    """A variable, its value, and the plans that have it."""

    name: str
    value: str
    is_needed: Callable[[Plan], bool] = lambda plan: True


def _has_verbs(plan: Plan) -> bool:
    return plan.cluster.hardware.network not in _BY_THREADS


def _has_nodes(plan: Plan) -> bool:
    return plan.parallelism.num_gpus_used > plan.cluster.node_size


_EVERYWHERE = (
    # exchanges go first where compute runs beside them (Megatron-Bridge's COMMON_RECIPE_ENV_VARS, AMD's Primus)
    EnvironmentVariable("TORCH_NCCL_HIGH_PRIORITY", "1"),
    EnvironmentVariable(
        "NCCL_IB_TIMEOUT",
        "22",
        lambda plan: _has_nodes(plan) and plan.parallelism.num_gpus_used >= LARGE and _has_verbs(plan),
    ),
)
_NODES_ON_AMD = (
    EnvironmentVariable("HSA_ENABLE_SDMA", "1"),
    # mixtures crash where scratch memory is reclaimed
    EnvironmentVariable("HSA_NO_SCRATCH_RECLAIM", "1"),
    EnvironmentVariable("GPU_MAX_HW_QUEUES", "2"),
    EnvironmentVariable("RCCL_MSCCL_ENABLE", "0"),
    EnvironmentVariable("NCCL_CHECKS_DISABLE", "1"),
    EnvironmentVariable("NCCL_CROSS_NIC", "0", _has_nodes),
    # RoCE v2
    EnvironmentVariable(
        "NCCL_IB_GID_INDEX",
        "3",
        lambda plan: _has_nodes(plan) and _has_verbs(plan) and plan.cluster.hardware.network != "ib",
    ),
    EnvironmentVariable("NCCL_PXN_DISABLE", "1", _has_nodes),
    EnvironmentVariable("NCCL_P2P_NET_CHUNKSIZE", "524288", _has_nodes),
)
"""As AMD's own launcher sets them (AMD-AGI/Primus, runner/helpers/envs/base_env.sh, August 2026)."""


def variables_of(rows: Iterable[EnvironmentVariable], plan: Plan) -> dict[str, str]:
    """The variables of the rows that a plan has."""
    return {row.name: row.value for row in rows if row.is_needed(plan)}


def node_environment(plan: Plan) -> dict[str, str]:
    """The variables of a plan, whichever trainer runs it."""
    rows = (*_EVERYWHERE, *(_NODES_ON_AMD if plan.cluster.hardware.is_amd else ()))
    of_network: dict[str, str] = network_of(plan).get("environment", {})
    return variables_of(rows, plan) | of_network


NORM_MARGIN_SMS = 20
"""SMs that norms leave to exchanges that run beside them: 418 of Megatron-Bridge's recipes (perf_recipes, 0.7.0)."""
CONNECTIONS, CONNECTIONS_BESIDE_TP = 32, 8
"""Queues to the GPU: in 404 of Megatron-Bridge's recipes, and in those for H100 that overlap experts at TP 2."""
_NO_SEGMENTS_IN_GRAPHS = ("0.14", "0.15")
"""Versions of Megatron core that refuse graphs beside expandable segments."""
_UNORDERED = ("blackwell", "rubin")
"""Architectures on which CUDA_DEVICE_MAX_CONNECTIONS no longer orders communication before compute."""


def _has_graphs(plan: Plan) -> bool:
    return bool(plan.runtime_spec.cuda_graphs or plan.runtime_spec.graphed_modules)


def _takes_segments(plan: Plan) -> bool:
    return not _has_graphs(plan) or plan.runtime_spec.version not in _NO_SEGMENTS_IN_GRAPHS


def overlaps_experts(plan: Plan) -> bool:
    """Exchanges of experts were priced behind compute."""
    return plan.parallelism.ep > 1 and plan.runtime_spec.overlaps_experts


def _has_exchanges_beside_norms(plan: Plan) -> bool:
    """Gradients or tokens are exchanged while layers run."""
    layout = plan.parallelism
    return overlaps_experts(plan) or (runtime_of(plan).gradient_overlap_fraction > 0 and layout.dp * layout.cp > 1)


_ON_NVIDIA = (
    EnvironmentVariable("NCCL_NVLS_ENABLE", "0"),
    # NCCL would register buffers of graphs, which have no fixed address in expandable segments
    EnvironmentVariable("NCCL_GRAPH_REGISTER", "0", _has_graphs),
    EnvironmentVariable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", _takes_segments),
    EnvironmentVariable("TORCH_NCCL_AVOID_RECORD_STREAMS", "0", lambda plan: bool(plan.runtime_spec.cuda_graphs)),
    EnvironmentVariable("TORCH_NCCL_AVOID_RECORD_STREAMS", "1", lambda plan: not plan.runtime_spec.cuda_graphs),
    EnvironmentVariable("NVTE_FWD_LAYERNORM_SM_MARGIN", str(NORM_MARGIN_SMS), _has_exchanges_beside_norms),
    EnvironmentVariable("NVTE_BWD_LAYERNORM_SM_MARGIN", str(NORM_MARGIN_SMS), _has_exchanges_beside_norms),
    EnvironmentVariable("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1", lambda plan: plan.runtime_spec.fuses_experts),
    *(
        EnvironmentVariable(name, value, lambda plan: plan.runtime_spec.deterministic)
        for name, value in (
            ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"), ("NCCL_ALGO", "Ring"), ("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        )
    ),
    # Transformer Engine 2.10 and above would offload weights too
    EnvironmentVariable("NVTE_CPU_OFFLOAD_V1", "1", lambda plan: bool(plan.runtime_spec.offload_modules)),
)  # fmt: skip
_ON_AMD = (
    EnvironmentVariable("NVTE_CK_USES_BWD_V3", "1"),
    EnvironmentVariable("NVTE_USE_CAST_TRANSPOSE_TRITON", "1", lambda plan: plan.training.dtype in ("fp8", "mxfp8")),
    EnvironmentVariable("NVTE_ROCM_ENABLE_MXFP8", "1", lambda plan: plan.training.dtype == "mxfp8"),
    *(
        EnvironmentVariable(name, value, lambda plan: plan.runtime_spec.deterministic)
        for name, value in (
            ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"), ("NCCL_ALGO", "Ring"), ("ROCBLAS_DEFAULT_ATOMICS_MODE", "0"),
            ("TORCH_COMPILE_DISABLE", "1"),
        )
    ),
    EnvironmentVariable("NVTE_CPU_OFFLOAD_V1", "1", lambda plan: bool(plan.runtime_spec.offload_modules)),
)  # fmt: skip
"""Transformer Engine's own, as AMD's launcher sets them (AMD-AGI/Primus, base_env.sh, August 2026)."""


def megatron_environment(plan: Plan) -> dict[str, str]:
    """The variables of a plan."""
    is_amd = plan.cluster.hardware.is_amd
    variables = connections(plan) | node_environment(plan) | variables_of(_ON_AMD if is_amd else _ON_NVIDIA, plan)
    return variables if is_amd else variables | nvlink_topology(plan)


def connections(plan: Plan) -> dict[str, str]:
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


_ROWS = (
    EnvironmentVariable(
        "NCCL_IB_TIMEOUT", "22", lambda plan: plan.parallelism.num_gpus_used >= LARGE and _has_verbs(plan)
    ),
    EnvironmentVariable("PRIMUS_DETERMINISTIC", "1", lambda plan: plan.runtime_spec.deterministic),
)


def primus_environment(plan: Plan) -> dict[str, str]:
    """The variables that differ from what the launcher sets; under FSDP it also sets the number of queues."""
    variables = variables_of(_ROWS, plan) | network_of(plan).get("environment", {})
    return variables if is_fsdp(plan) else {**connections(plan), **variables}
