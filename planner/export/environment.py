"""The environment variables that a plan's exchanges and recipe need, by trainer and vendor: a row for each."""

from __future__ import annotations

from functools import cache

from planner.answer import Plan
from planner.export.megatron.plan_options import is_fsdp, switch_arguments
from planner.export.spelling import runtime_of
from planner.export.trainer_files import settings
from planner.specs.base import Fields
from planner.specs.reading import shipped_table

LARGE = 1024
"""Ranks from which NCCL waits longer for a link."""
_BY_THREADS = ("efa", "slingshot", "tcp")
"""Networks that no InfiniBand verbs drive, so that NCCL's variables for them mean nothing."""


@cache
def networks() -> dict[str, Fields]:
    """The needs of each kind of network: the rows of networks.yaml."""
    found: dict[str, Fields] = shipped_table("export/networks.yaml")
    return found


def network_of(plan: Plan) -> Fields:
    """The row of the network between the plan's nodes; empty where nobody names its kind, or there is one node."""
    return networks().get(plan.cluster.hardware.network, {}) if _has_nodes(plan) else {}


def variables(plan: Plan, *names: str) -> dict[str, str]:
    """The variables of rows of settings.yaml that a plan has."""
    layout, network = plan.parallelism, plan.cluster.hardware.network
    has_nodes, has_verbs = _has_nodes(plan), network not in _BY_THREADS
    exchanges = runtime_of(plan).gradient_overlap_fraction > 0 and layout.dp * layout.cp > 1
    facts: Fields = {
        "has_nodes": has_nodes,
        "is_large": has_nodes and layout.num_gpus_used >= LARGE and has_verbs,
        "has_roce": has_nodes and has_verbs and network != "ib",
        # gradients or tokens are exchanged while layers run
        "beside_norms": overlaps_experts(plan) or exchanges,
    }
    return {variable: value for name in names for variable, value in settings(name, plan, **facts).items()}


def _has_nodes(plan: Plan) -> bool:
    return plan.parallelism.num_gpus_used > plan.cluster.node_size


def node_environment(plan: Plan) -> dict[str, str]:
    """The variables of a plan, whichever trainer runs it."""
    names = ("environment", *(("environment-amd",) if plan.cluster.hardware.is_amd else ()))
    of_network: dict[str, str] = network_of(plan).get("environment", {})
    return variables(plan, *names) | of_network


CONNECTIONS, CONNECTIONS_BESIDE_TP = 32, 8
"""Queues to the GPU: in 404 of Megatron-Bridge's recipes, and in those for H100 that overlap experts at TP 2."""
_UNORDERED = ("blackwell", "rubin")
"""Architectures on which CUDA_DEVICE_MAX_CONNECTIONS no longer orders communication before compute."""


def overlaps_experts(plan: Plan) -> bool:
    """Exchanges of experts were priced behind compute."""
    return plan.parallelism.ep > 1 and plan.runtime_spec.overlaps_experts


def megatron_environment(plan: Plan) -> dict[str, str]:
    """The variables of a plan."""
    is_amd = plan.cluster.hardware.is_amd
    own = variables(plan, "environment-megatron-amd" if is_amd else "environment-megatron")
    return connections(plan) | node_environment(plan) | own | ({} if is_amd else nvlink_topology(plan))


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


def primus_environment(plan: Plan) -> dict[str, str]:
    """The variables that differ from what the launcher sets; under FSDP it also sets the number of queues."""
    own = variables(plan, "environment-primus") | network_of(plan).get("environment", {})
    return own if is_fsdp(plan) else {**connections(plan), **own}
