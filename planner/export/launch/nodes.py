"""The nodes that a layout's ranks take, and the line that starts the ranks of one node."""

from __future__ import annotations

from planner.answer import Plan
from planner.export.common.trainer_files import LaunchCommand


def nodes_of(plan: Plan) -> tuple[int, int, int]:
    """(nodes, GPUs of each, GPUs of the last), equal where that takes no more nodes.

    A tensor-parallel group stays in one node, unless it is larger or the cluster has too few nodes for that.
    """
    used, node, tp = plan.parallelism.num_gpus_used, plan.cluster.node_size, plan.parallelism.tp
    if used <= node:
        return 1, used, used
    largest = node - node % tp if tp <= node else node
    if _num_nodes(used, largest) > _num_nodes(plan.cluster.num_gpus, node):
        largest = node
    nodes = _num_nodes(used, largest)
    gpus_per_node = used // nodes if used % nodes == 0 and used // nodes % tp == 0 else largest
    return nodes, gpus_per_node, used - (nodes - 1) * gpus_per_node


def _num_nodes(num_gpus: int, gpus_per_node: int) -> int:
    return -(-num_gpus // gpus_per_node)


def segment_of(plan: Plan) -> int:
    """Nodes that are asked for in one NVLink domain; 1 where NVLink joins no nodes.

    Slurm wants a number that divides the nodes (`--segment`).
    """
    nodes, gpus, _ = nodes_of(plan)
    most = plan.cluster.nvlink_domain_size // gpus if plan.cluster.is_rack else 1
    return max(size for size in range(1, max(1, min(nodes, most)) + 1) if nodes % size == 0)


def last_node_lines(plan: Plan, rank: str) -> list[str]:
    """Shell lines that set GPUS on node `rank`, where the last node starts fewer ranks; none elsewhere."""
    nodes, gpus, last = nodes_of(plan)
    return [] if last == gpus else [f"export GPUS={gpus}; [[ {rank} != {nodes - 1} ]] || GPUS={last}"]


def start_line(plan: Plan, command: LaunchCommand, rank: str) -> str:
    """Shell text that starts the ranks of node `rank`; torchrun numbers them by the ranks that each node starts."""
    nodes, gpus, last = nodes_of(plan)
    count = str(gpus) if last == gpus else '"$GPUS"'
    if command.starts_ranks:
        return f"exec env NNODES={nodes} NODE_RANK={rank} GPUS_PER_NODE={count} {command.program}"
    binding = '${NUMA_BINDING:+--numa-binding "$NUMA_BINDING"}'
    run = f"exec torchrun {binding} --nnodes {nodes} --nproc-per-node {count} --node-rank {rank}"
    return f'{run} --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" {command.program}'
