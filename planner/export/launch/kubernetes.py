"""kubernetes.yaml: a job of Kubeflow's Trainer, or of the training operator that it replaced."""

from __future__ import annotations

from typing import Any

from planner.answer import Plan
from planner.export.common.header import slug
from planner.export.common.trainer_files import ExportFile, LaunchCommand
from planner.export.launch.nodes import nodes_of
from planner.export.launch.pods import (
    compute_domain,
    config_map,
    container,
    manifest,
    pod_of,
    rack_annotations,
)

_API = "trainer.kubeflow.org"
_NODE = "node"
"""Kubeflow's Trainer looks for this name of the replicated job and of its container."""
_TRAINJOB_ADDRESSES = 'NODE_RANK="$PET_NODE_RANK" MASTER_ADDR="$PET_MASTER_ADDR" MASTER_PORT="$PET_MASTER_PORT"'
_PYTORCHJOB_ADDRESSES = 'NODE_RANK="$RANK"'
"""The operator sets MASTER_ADDR and MASTER_PORT itself."""


def _name(plan: Plan) -> str:
    """The model's name as that of a Kubernetes object, which begins with a letter."""
    name = slug(plan.model.name)
    return name if name[0].isalpha() else f"job-{name}"


def kubernetes_manifest(plan: Plan, command: LaunchCommand) -> ExportFile:
    """kubernetes.yaml: a TrainJob (Kubeflow Trainer 2, trainer.kubeflow.org/v1alpha1) and the runtime of its pods."""
    nodes, gpus, _ = nodes_of(plan)
    name = _name(plan)
    node = container(plan, _NODE, command, _TRAINJOB_ADDRESSES)
    # these stand in the job; the rest of the container is the runtime's
    own = {key: node.pop(key) for key in ("command", "env", "resources")}
    pod: dict[str, Any] = {"spec": pod_of(plan, name, [node])}
    if annotations := rack_annotations(plan):
        pod["metadata"] = {"annotations": annotations}
    replicated = {
        "name": _NODE,
        "template": {
            "metadata": {"labels": {f"{_API}/trainjob-ancestor-step": "trainer"}},
            "spec": {"template": pod},
        },
    }
    runtime = {
        "apiVersion": f"{_API}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": name, "labels": {f"{_API}/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": nodes, "torch": {}},
            "template": {"spec": {"replicatedJobs": [replicated]}},
        },
    }
    job = {
        "apiVersion": f"{_API}/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {"apiGroup": _API, "kind": "TrainingRuntime", "name": name},
            "trainer": {
                "numNodes": nodes,
                "numProcPerNode": gpus,
                "image": command.image,
                "command": own["command"],
                "env": own["env"],
                "resourcesPerNode": own["resources"],
            },
        },
    }
    documents = [config_map(plan, name, command), *compute_domain(plan, name), runtime, job]
    return manifest("kubernetes.yaml", plan, command, documents)


def pytorchjob_manifest(plan: Plan, command: LaunchCommand) -> ExportFile:
    """kubernetes-pytorchjob.yaml: a PyTorchJob of the training operator (kubeflow.org/v1), now retired."""
    nodes, *_ = nodes_of(plan)
    name = _name(plan)
    pod = {"spec": pod_of(plan, name, [container(plan, "pytorch", command, _PYTORCHJOB_ADDRESSES)])}
    if annotations := rack_annotations(plan):
        pod["metadata"] = {"annotations": annotations}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "pytorchReplicaSpecs": {
                role: {"replicas": count, "restartPolicy": "OnFailure", "template": pod}
                for role, count in {"Master": 1, "Worker": nodes - 1}.items()
                if count
            }
        },
    }
    documents = [config_map(plan, name, command), *compute_domain(plan, name), job]
    return manifest("kubernetes-pytorchjob.yaml", plan, command, documents)
