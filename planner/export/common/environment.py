"""The variables that any trainer's exchanges need on a plan's GPUs and network: a row for each, with its plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from planner.answer import Plan

LARGE = 1024
"""Ranks from which NCCL waits longer for a link: "very large networks", as its documentation says."""


class Row(NamedTuple):
    """A variable, its value, and the plans that have it."""

    name: str
    value: str
    is_needed: Callable[[Plan], bool] = lambda plan: True


def _has_nodes(plan: Plan) -> bool:
    return plan.parallelism.num_gpus_used > plan.cluster.node_size


_EVERYWHERE = (
    # exchanges go first where compute runs beside them (Megatron-Bridge's COMMON_RECIPE_ENV_VARS, AMD's Primus)
    Row("TORCH_NCCL_HIGH_PRIORITY", "1"),
    Row("NCCL_IB_TIMEOUT", "22", lambda plan: _has_nodes(plan) and plan.parallelism.num_gpus_used >= LARGE),
)
_ON_AMD = (
    Row("HSA_ENABLE_SDMA", "1"),
    # mixtures crash where scratch memory is reclaimed
    Row("HSA_NO_SCRATCH_RECLAIM", "1"),
    Row("GPU_MAX_HW_QUEUES", "2"),
    Row("RCCL_MSCCL_ENABLE", "0"),
    Row("NCCL_CHECKS_DISABLE", "1"),
    Row("NCCL_CROSS_NIC", "0", _has_nodes),
    # RoCE v2
    Row("NCCL_IB_GID_INDEX", "3", _has_nodes),
    Row("NCCL_PXN_DISABLE", "1", _has_nodes),
    Row("NCCL_P2P_NET_CHUNKSIZE", "524288", _has_nodes),
)
"""As AMD's own launcher sets them (AMD-AGI/Primus, runner/helpers/envs/base_env.sh, August 2026)."""


def variables_of(rows: Iterable[Row], plan: Plan) -> dict[str, str]:
    """The variables of the rows that a plan has."""
    return {row.name: row.value for row in rows if row.is_needed(plan)}


def node_environment(plan: Plan) -> dict[str, str]:
    """The variables of a plan, whichever trainer runs it."""
    return variables_of((*_EVERYWHERE, *(_ON_AMD if plan.cluster.hardware.is_amd else ())), plan)
