"""kubernetes.yaml: a job of Kubeflow's Trainer, or a JobSet, which needs its controller alone; and their pods."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.environment import network_of
from planner.export.launch.launchers import LAUNCH, nodes_of, preflight, segment_of, torchrun_script
from planner.export.trainer_files import ExportFile, LaunchCommand, Placeholder, comment, slug

FOLDER = "/plan"
_MAX_CONFIG_MAP_BYTES = 1_000_000
"""etcd takes 1 MiB with everything around it."""
_RACK_LABEL = "nvidia.com/gpu.clique"
"""Nodes of one NVLink domain have the same value of it (NVIDIA's GPU feature discovery)."""
_CHANNEL = "imex-channel"

_RDMA = "rdma/rdma_shared_device_a"
CLAIM = Placeholder("claimName", "volume claim with data and checkpoints, mounted at /data", "training-data")


def places(plan: Plan, command: LaunchCommand) -> tuple[Placeholder, ...]:
    """Everything that the user fills in in a manifest."""
    return (*command.placeholders, CLAIM, *_network_cards(plan))


def _network_cards(plan: Plan) -> list[Placeholder]:
    """The resource of the network between nodes, by its kind; none on networks that pods have anyway."""
    kind = plan.cluster.hardware.network
    resource = network_of(plan).get("resource") if kind else _RDMA
    if nodes_of(plan)[0] == 1 or resource is None:
        return []
    says = "the cluster's RDMA resource"
    if kind == "efa":
        says = "EFA interfaces of a node: 32 on p5, 16 on p5e and p5en, 8 on p6-b200, 4 on p4d"
    return [Placeholder(resource, says, resource)]


def heading(plan: Plan, command: LaunchCommand) -> str:
    """Comment lines: the plan, and the values to fill in."""
    rows = [f"  {place.name}: {place.meaning}" for place in places(plan, command)]
    first_run = "first run: with MOCK set to '1', pods take a few steps and print what the plan promises"
    return command.comments + comment("\n".join(["fill in below:", *rows, *([first_run] if command.promise else [])]))


def config_map(plan: Plan, name: str, command: LaunchCommand) -> dict[str, Any]:
    """launch.sh, preflight.py and the files the program reads; SpecError if they are larger than a ConfigMap may be."""
    files = (torchrun_script(plan, command), preflight(plan, command), *command.files)
    size = sum(len(file.text.encode()) for file in files)
    if size > _MAX_CONFIG_MAP_BYTES:
        listed = ", ".join(file.name for file in files)
        raise SpecError(
            f"kubernetes: a ConfigMap holds 1 MiB, {listed} are {size:,} bytes",
            "put the files on a shared volume and start launch.sh there",
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{name}-plan"},
        "data": {file.name: file.text for file in files},
    }


def container(plan: Plan, name: str, command: LaunchCommand, addresses: str) -> dict[str, Any]:
    """A node's container; `addresses` is shell text that says which node it is and where the first one is."""
    variables = {place.name: "" for place in command.placeholders} | ({"MOCK": "0"} if command.promise else {})
    return {
        "name": name,
        "image": command.image,
        "command": ["bash", "-c", f'{addresses} exec bash {FOLDER}/{LAUNCH} "$@"', "bash"],
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": resources(plan),
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "plan", "mountPath": FOLDER},
            {"name": "data", "mountPath": "/data"},
        ],
    }


def resources(plan: Plan) -> dict[str, Any]:
    """The GPUs of the plan's vendor, and the network's cards where the job has several nodes."""
    _, gpus, _ = nodes_of(plan)
    vendor = "amd.com/gpu" if plan.cluster.hardware.is_amd else "nvidia.com/gpu"
    limits: dict[str, Any] = {vendor: gpus} | {card.default: 1 for card in _network_cards(plan)}
    claims = {"claims": [{"name": _CHANNEL}]} if segment_of(plan) > 1 else {}
    return {"limits": limits, "requests": dict(limits), **claims}


def pod_of(plan: Plan, name: str, containers: list[dict[str, Any]]) -> dict[str, Any]:
    """The pod around a node's container: shared memory, the plan's files, data, and its place in a rack."""
    pod: dict[str, Any] = {
        "hostIPC": True,
        "containers": containers,
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            {"name": "plan", "configMap": {"name": f"{name}-plan"}},
            {"name": "data", "persistentVolumeClaim": {"claimName": CLAIM.default}},
        ],
    }
    if segment_of(plan) > 1:
        pod["resourceClaims"] = [{"name": _CHANNEL, "resourceClaimTemplateName": f"{name}-{_CHANNEL}"}]
    return pod


def rack_annotations(plan: Plan) -> dict[str, str]:
    """Annotations that have Kueue put so many nodes into one NVLink domain; none where NVLink joins no nodes."""
    segment = segment_of(plan)
    if segment == 1:
        return {}
    return {
        "kueue.x-k8s.io/podset-slice-required-topology": _RACK_LABEL,
        "kueue.x-k8s.io/podset-slice-size": str(segment),
    }


def compute_domain(plan: Plan, name: str) -> list[dict[str, Any]]:
    """The domain in which GPUs of several nodes reach each other by NVLink (NVIDIA's DRA driver); none elsewhere."""
    if segment_of(plan) == 1:
        return []
    nodes, *_ = nodes_of(plan)
    channel = {"resourceClaimTemplate": {"name": f"{name}-{_CHANNEL}"}}
    return [
        {
            "apiVersion": "resource.nvidia.com/v1beta1",
            "kind": "ComputeDomain",
            "metadata": {"name": name},
            "spec": {"numNodes": nodes, "channel": channel},
        }
    ]


def manifest(filename: str, plan: Plan, command: LaunchCommand, documents: Iterable[dict[str, Any]]) -> ExportFile:
    """Documents in one YAML file, below the heading."""
    text = yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=10_000, allow_unicode=True)
    return ExportFile(filename, heading(plan, command) + text, placeholders=places(plan, command))


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


_API = "trainer.kubeflow.org"
_NODE = "node"
"""Kubeflow's Trainer looks for this name of the replicated job and of its container."""
_TRAINJOB_ADDRESSES = 'NODE_RANK="$PET_NODE_RANK" MASTER_ADDR="$PET_MASTER_ADDR" MASTER_PORT="$PET_MASTER_PORT"'


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


def jobset_manifest(plan: Plan, command: LaunchCommand) -> ExportFile:
    """kubernetes-jobset.yaml: a JobSet (jobset.x-k8s.io/v1alpha2), one indexed job whose pods are the nodes."""
    nodes, *_ = nodes_of(plan)
    name = _name(plan)
    # the name that JobSet gives the first pod, below the set's own
    addresses = f'NODE_RANK="$JOB_COMPLETION_INDEX" MASTER_ADDR="{name}-{_NODE}-0-0.{name}"'
    pod: dict[str, Any] = {
        "spec": {**pod_of(plan, name, [container(plan, _NODE, command, addresses)]), "restartPolicy": "Never"}
    }
    if annotations := rack_annotations(plan):
        pod["metadata"] = {"annotations": annotations}
    indexed = {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed", "backoffLimit": 0}
    job = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            # a pod that fails starts all again, from the last checkpoint
            "failurePolicy": {"maxRestarts": 3},
            "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": {**indexed, "template": pod}}}],
        },
    }
    documents = [config_map(plan, name, command), *compute_domain(plan, name), job]
    return manifest("kubernetes-jobset.yaml", plan, command, documents)
