"""The variables of a plan under Primus, whose launcher sets what AMD's GPUs need (runner/helpers/envs) by itself."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.environment import LARGE, Row, variables_of
from planner.export.megatron.environment import connections
from planner.export.megatron.runtime import is_fsdp

_ROWS = (
    Row("NCCL_IB_TIMEOUT", "22", lambda plan: plan.parallelism.num_gpus_used >= LARGE),
    Row("PRIMUS_DETERMINISTIC", "1", lambda plan: plan.runtime_spec.deterministic),
)


def environment(plan: Plan) -> dict[str, str]:
    """The variables that differ from what the launcher sets; under FSDP it also sets the number of queues."""
    variables = variables_of(_ROWS, plan)
    return variables if is_fsdp(plan) else {**connections(plan), **variables}
