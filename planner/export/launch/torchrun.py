"""Launchers: one torchrun per node, started by hand, by Slurm or by Kubernetes, all with the same arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.bundle import ExportFile
from planner.export.common.arguments import Arguments, argv, shell_array, shell_words, slug

IMAGE = "nvcr.io/nvidia/pytorch:25.09-py3"
_MAX_CONFIG_MAP_BYTES = 1_000_000
"""etcd takes 1 MiB with everything around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What torchrun starts on every node."""

    program: str
    """Shell text behind torchrun's own options: a script's path, or `-m module`. May use PLAN_DIR."""
    arguments: Arguments
    words: tuple[str, ...] = ()
    """Arguments behind the named ones."""
    environment: dict[str, str] = field(default_factory=dict)
    forbidden: tuple[str, ...] = ()
    """Variables to unset."""
    setup: tuple[str, ...] = ()
    """Shell lines to run before."""
    comments: str = ""
    files: tuple[ExportFile, ...] = ()
    """Files the program reads from PLAN_DIR."""


def nodes_of(plan: Plan) -> tuple[int, int, int]:
    """(nodes, GPUs of each, GPUs of the last), equal where that takes no more nodes.

    A tensor-parallel group stays in one node, unless it is larger or the cluster has too few nodes for that.
    """
    used, node, tp = plan.parallelism.num_gpus_used, plan.cluster.node_size, plan.parallelism.tp
    if used <= node:
        return 1, used, used
    most = node - node % tp if tp <= node else node
    if _over(used, most) > _over(plan.cluster.num_gpus, node):
        most = node
    nodes = _over(used, most)
    each = used // nodes if used % nodes == 0 and used // nodes % tp == 0 else most
    return nodes, each, used - (nodes - 1) * each


def _over(gpus: int, node: int) -> int:
    """Nodes that so many GPUs take."""
    return -(-gpus // node)


def _torchrun(plan: Plan, rank: str) -> str:
    """Shell text that starts the ranks of node `rank`; torchrun numbers them by what each node starts."""
    nodes, gpus, last = nodes_of(plan)
    count, words = str(gpus), ""
    if last != gpus:
        count, words = '"$GPUS"', f"GPUS={gpus}; [[ {rank} == {nodes - 1} ]] && GPUS={last}; "
    run = f"{words}exec torchrun --nnodes {nodes} --nproc-per-node {count} --node-rank {rank}"
    return f'{run} --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"'


def torchrun_script(plan: Plan, command: Command) -> ExportFile:
    """launch.sh: runs this node's ranks; NODE_RANK and MASTER_ADDR say which node it is and where the first one is."""
    run = _torchrun(plan, '"${NODE_RANK:-0}"')
    lines = [
        "#!/usr/bin/env bash",
        command.comments.rstrip("\n"),
        *_per_node_note(plan),
        "set -euo pipefail",
        'PLAN_DIR="${PLAN_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}"',
        *_prologue(command),
        'export PLAN_DIR MASTER_ADDR="${MASTER_ADDR:-localhost}" MASTER_PORT="${MASTER_PORT:-29500}"',
        "",
        f"{run} \\\n  {command.program} {_passed(command)}",
    ]
    return ExportFile("launch.sh", "\n".join(lines) + "\n", executable=True)


def slurm_script(plan: Plan, command: Command) -> ExportFile:
    """launch.sbatch: one task per node; the first node of the allocation is where all ranks meet."""
    nodes, gpus, _ = nodes_of(plan)
    run = _torchrun(plan, '"${SLURM_NODEID:-0}"')
    lines = [
        "#!/usr/bin/env bash",
        f"#SBATCH --job-name={slug(plan.model.name)}",
        f"#SBATCH --nodes={nodes}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={gpus}",
        "#SBATCH --exclusive",
        "#SBATCH --output=%x-%j.out",
        command.comments.rstrip("\n"),
        "# submit from the folder that holds this file: sbatch launch.sbatch",
        "set -euo pipefail",
        'PLAN_DIR="${PLAN_DIR:-${SLURM_SUBMIT_DIR:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}}"',
        *_prologue(command),
        'if [[ -n "${SLURM_JOB_NODELIST:-}" ]]; then',
        '  mapfile -t HOSTS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        '  MASTER_ADDR="${HOSTS[0]}"',
        "fi",
        'export PLAN_DIR MASTER_ADDR="${MASTER_ADDR:-localhost}" MASTER_PORT="${MASTER_PORT:-29500}"',
        "",
        "srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c \\",
        f"  '{run} {command.program} \"$@\"' \\",
        f"  bash {_passed(command)}",
    ]
    return ExportFile("launch.sbatch", "\n".join(lines) + "\n", executable=True)


def _passed(command: Command) -> str:
    """The command's arguments and those of the launcher itself."""
    return '"${ARGUMENTS[@]}" "$@"' if command.arguments or command.words else '"$@"'


def _per_node_note(plan: Plan) -> Sequence[str]:
    nodes, *_ = nodes_of(plan)
    return [f"# run on each of {nodes} nodes with NODE_RANK=0..{nodes - 1} and MASTER_ADDR"] if nodes > 1 else []


def _prologue(command: Command) -> list[str]:
    lines = [f"export {name}={shell_words([value])}" for name, value in command.environment.items()]
    lines += [f"unset {name}" for name in command.forbidden]
    lines += command.setup
    if command.arguments or command.words:
        lines.append(shell_array("ARGUMENTS", command.arguments, command.words))
    return ["", *lines, ""] if lines else []


def kubernetes_manifest(plan: Plan, command: Command, image: str = IMAGE) -> ExportFile:
    """kubernetes.yaml: a Kubeflow PyTorchJob, one pod per node, and a ConfigMap with the files the program reads."""
    nodes, gpus, _ = nodes_of(plan)
    name = slug(plan.model.name)
    documents: list[dict[str, Any]] = []
    size = sum(len(file.text.encode()) for file in command.files)
    if size > _MAX_CONFIG_MAP_BYTES:
        raise SpecError(
            f"kubernetes: a ConfigMap holds 1 MiB, {', '.join(file.name for file in command.files)} are {size:,} bytes",
            "put the files on a shared volume and start launch.sh there",
        )
    if command.files:
        documents.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": f"{name}-plan"},
                "data": {file.name: file.text for file in command.files},
            }
        )
    replicas = {"Master": 1, "Worker": nodes - 1}
    pod = _pod(name, command, image, _torchrun(plan, '"$RANK"'), gpus)
    documents.append(
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": name},
            "spec": {
                "pytorchReplicaSpecs": {
                    role: {"replicas": count, "restartPolicy": "OnFailure", "template": {"spec": pod}}
                    for role, count in replicas.items()
                    if count
                }
            },
        }
    )
    text = yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=10_000, allow_unicode=True)
    return ExportFile("kubernetes.yaml", command.comments + text)


class _Plain(yaml.SafeDumper):
    """Repeats a value that occurs twice instead of naming it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Texts of several lines as such; what another YAML reader takes for a number, quoted."""
        style = "|" if "\n" in data else "'" if _is_number(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


_Plain.add_representer(str, _Plain.represent_str)


def _pod(name: str, command: Command, image: str, run: str, gpus: int) -> dict[str, Any]:
    script = "\n".join(
        [
            "set -euo pipefail",
            *(f"unset {variable}" for variable in command.forbidden),
            *command.setup,
            f'{run} {command.program} "$@"',
        ]
    )
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if command.files:
        volumes.append({"name": "plan", "configMap": {"name": f"{name}-plan"}})
        mounts.append({"name": "plan", "mountPath": "/plan"})
    container = {
        "name": "pytorch",
        "image": image,
        "command": ["bash", "-c", script, "bash"],
        "args": [*argv(command.arguments), *command.words],
        "env": [{"name": key, "value": value} for key, value in {**command.environment, "PLAN_DIR": "/plan"}.items()],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": mounts,
    }
    return {"containers": [container], "volumes": volumes}
