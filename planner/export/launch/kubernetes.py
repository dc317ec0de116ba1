"""kubernetes.yaml: a job of Kubeflow's training operator with one pod per node."""

from __future__ import annotations

from typing import Any

import yaml

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.common.arguments import argv
from planner.export.common.header import slug
from planner.export.common.trainer_files import ExportFile, LaunchCommand
from planner.export.launch.nodes import nodes_of, torchrun_line
from planner.export.launch.shell import CPU_BINDING

_MAX_CONFIG_MAP_BYTES = 1_000_000
"""etcd takes 1 MiB with everything around it."""


def kubernetes_manifest(plan: Plan, command: LaunchCommand) -> ExportFile:
    """kubernetes.yaml: a Kubeflow PyTorchJob, one pod per node, and a ConfigMap with the files the program reads."""
    nodes, gpus, _ = nodes_of(plan)
    name = slug(plan.model.name)
    documents = [_config_map(name, command)] if command.files else []
    replicas = {"Master": 1, "Worker": nodes - 1}
    pod = _pod(name, command, torchrun_line(plan, '"$RANK"'), gpus)
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


def _config_map(name: str, command: LaunchCommand) -> dict[str, Any]:
    """The files the program reads; SpecError where they are larger than a ConfigMap may be."""
    size = sum(len(file.text.encode()) for file in command.files)
    if size > _MAX_CONFIG_MAP_BYTES:
        raise SpecError(
            f"kubernetes: a ConfigMap holds 1 MiB, {', '.join(file.name for file in command.files)} are {size:,} bytes",
            "put the files on a shared volume and start launch.sh there",
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-plan"},
        "data": {file.name: file.text for file in command.files},
    }


def _pod(name: str, command: LaunchCommand, run: str, gpus: int) -> dict[str, Any]:
    script = "\n".join(
        [
            "set -euo pipefail",
            *CPU_BINDING,
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
        "image": command.image,
        "command": ["bash", "-c", script, "bash"],
        "args": [*argv(command.arguments), *command.words],
        "env": [{"name": key, "value": value} for key, value in {**command.environment, "PLAN_DIR": "/plan"}.items()],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": mounts,
    }
    return {"containers": [container], "volumes": volumes}


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
