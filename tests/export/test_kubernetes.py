"""Manifests for Kubernetes: held against the recorded schemas of their kinds, and started as pods start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.export import bundle_of
from planner.export.launchers import kubernetes_manifest
from planner.export.trainer_files import ExportFile, LaunchCommand

Planned = Callable[..., Plan]

SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "kubernetes_crds.json").read_text())
TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
TARGETS = {"kubernetes": "kubernetes.yaml", "kubernetes-jobset": "kubernetes-jobset.yaml"}
JOBS: dict[str, dict[str, Any]] = {
    "one node": {"model": "llama-3.1-8b", "gpus": 8},
    "nodes": {"model": "llama-3.1-8b", "gpus": 32, "tp": 2, "pp": 4},
    "racks": {"model": "qwen3-30b-a3b", "gpus": 64, "ep": 64, "hardware": "gb200"},
    "amd": {"model": "llama-3.1-8b", "gpus": 16, "hardware": "mi300x"},
    "a smaller last node": {"model": "llama-3.1-8b", "gpus": 12, "tp": 4},
}


def faults(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    """What a Kubernetes API server would refuse, or drop as unknown."""
    kind = schema.get("type")
    if isinstance(kind, str) and not isinstance(value, TYPES[kind]):
        yield f"{path}: {value!r} is no {kind}"
    elif isinstance(value, dict):
        yield from (f"{path}: lacks {name}" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            if "properties" in schema and name not in schema["properties"]:
                known = name in schema["others"]
                yield f"{path}.{name}: {'used, and not recorded' if known else 'unknown'}"
            else:
                inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties") or {}
                yield from faults(item, inner, f"{path}.{name}")
    elif isinstance(value, list):
        for item in value:
            yield from faults(item, schema.get("items", {}), f"{path}[]")
    elif "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"


def documents(plan: Plan, target: str, **options: Any) -> dict[str, Any]:
    """The documents of a manifest by their kind."""
    files = {file.name: file for file in bundle_of(plan, [options.pop("trainer", "megatron"), target], **options).files}
    settings, *others = yaml.safe_load_all(files[TARGETS[target]].text)
    return {document["kind"]: document for document in others} | {"settings": settings}


def pod_template(found: dict[str, Any]) -> dict[str, Any]:
    job = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]
    template: dict[str, Any] = job["template"]["spec"]["template"]
    return template


def jobs_of(found: dict[str, Any]) -> dict[str, Any]:
    """The indexed job of a JobSet."""
    spec: dict[str, Any] = found["JobSet"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    return spec


def first_pod(found: dict[str, Any]) -> str:
    """The name that JobSet gives the first pod of a set's only job."""
    name, spec = found["JobSet"]["metadata"]["name"], found["JobSet"]["spec"]
    return f"{name}-{spec['replicatedJobs'][0]['name']}-0-0.{spec['network']['subdomain']}"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("job", JOBS)
def test_manifests_keep_to_the_schemas_of_their_kinds(planned: Planned, job: str, target: str) -> None:
    found = documents(planned(**JOBS[job]), target)
    kinds = {"TrainingRuntime", "TrainJob"} if target == "kubernetes" else {"JobSet"}
    assert set(found) == {"settings", "ConfigMap", *kinds, *(["ComputeDomain"] if job == "racks" else [])}
    for kind in set(found) - {"settings", "ConfigMap"}:
        assert list(faults(found[kind], SCHEMAS[kind], kind)) == []


def test_the_check_of_schemas_sees_what_is_wrong(planned: Planned) -> None:
    job = documents(planned("llama-3.1-8b", 8), "kubernetes")["TrainJob"]
    job["spec"]["trainer"] |= {"numNodes": "two", "replicas": 1}
    del job["spec"]["runtimeRef"]["name"]
    assert sorted(faults(job, SCHEMAS["TrainJob"], "TrainJob")) == [
        "TrainJob.spec.runtimeRef: lacks name",
        "TrainJob.spec.trainer.numNodes: 'two' is no integer",
        "TrainJob.spec.trainer.replicas: unknown",
    ]


@pytest.mark.parametrize(
    ("job", "limits"),
    [
        ("one node", {"nvidia.com/gpu": 8}),
        ("nodes", {"nvidia.com/gpu": 8, "rdma/rdma_shared_device_a": 1}),
        ("racks", {"nvidia.com/gpu": 4, "rdma/rdma_shared_device_a": 1}),
        ("amd", {"amd.com/gpu": 8, "rdma/rdma_shared_device_a": 1}),
    ],
)
def test_pods_ask_for_the_vendors_gpus_and_the_network(planned: Planned, job: str, limits: dict[str, int]) -> None:
    plan = planned(**JOBS[job])
    trainer = documents(plan, "kubernetes")["TrainJob"]["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"] == limits
    assert trainer["image"].startswith("rocm/" if job == "amd" else "nvcr.io/nvidia")
    indexed = jobs_of(documents(plan, "kubernetes-jobset"))
    pod = indexed["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"] == limits
    assert pod["containers"][0]["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert indexed["completions"] == indexed["parallelism"] == trainer["numNodes"]


@pytest.mark.parametrize(
    ("network", "resource", "variable"),
    [
        ("efa", "vpc.amazonaws.com/efa", "FI_PROVIDER=efa"),
        ("roce", "rdma/rdma_shared_device_a", "NCCL_IB_GID_INDEX=3"),
        ("ib", "rdma/rdma_shared_device_a", ""),
        ("slingshot", None, "NCCL_SOCKET_IFNAME=hsn"),
        ("tcp", None, "NCCL_IB_DISABLE=1"),
    ],
)
def test_files_fit_the_network(planned: Planned, network: str, resource: str | None, variable: str) -> None:
    plan = planned("llama-3.1-8b", 2048)
    hardware = plan.cluster.hardware.model_copy(update={"network": network})
    plan = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"hardware": hardware})})
    found = documents(plan, "kubernetes")
    limits = found["TrainJob"]["spec"]["trainer"]["resourcesPerNode"]["limits"]
    assert limits == {"nvidia.com/gpu": 8} | ({resource: 1} if resource else {})
    script = found["ConfigMap"]["data"]["launch.sh"]
    assert f"export {variable}" in script
    assert ("NCCL_IB_TIMEOUT" in script) == (network in ("ib", "roce"))
    assert (network == "roce") == ("NCCL_IB_GID_INDEX" in script)


def test_pods_of_a_rack_stay_together_and_reach_each_other(planned: Planned) -> None:
    found = documents(planned(**JOBS["racks"]), "kubernetes")
    template = pod_template(found)
    assert template["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-slice-required-topology": "nvidia.com/gpu.clique",
        "kueue.x-k8s.io/podset-slice-size": "16",
    }
    channel = found["ComputeDomain"]["spec"]["channel"]["resourceClaimTemplate"]["name"]
    assert template["spec"]["resourceClaims"] == [{"name": "imex-channel", "resourceClaimTemplateName": channel}]
    assert found["TrainJob"]["spec"]["trainer"]["resourcesPerNode"]["claims"] == [{"name": "imex-channel"}]
    assert "metadata" not in pod_template(documents(planned(**JOBS["nodes"]), "kubernetes"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("node", "gpus"), [("0", "8"), ("1", "4")])
def test_a_pod_starts_its_ranks(
    planned: Planned, tmp_path: Path, hostile_name: str, target: str, node: str, gpus: str
) -> None:
    plan = planned(**JOBS["a smaller last node"])
    spec = plan.model.spec.model_copy(update={"name": hostile_name})
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"name": hostile_name, "spec": spec})})
    found = documents(plan, target, image="registry/image:1")
    for name, text in found["ConfigMap"]["data"].items():
        (tmp_path / name).write_text(text)
    (tmp_path / "torchrun").write_text(f"#!{sys.executable}\nimport sys, json; print(json.dumps(sys.argv[1:]))\n")
    (tmp_path / "torchrun").chmod(0o755)
    if target == "kubernetes":
        container = found["TrainJob"]["spec"]["trainer"]
        addresses = {"PET_NODE_RANK": node, "PET_MASTER_ADDR": "pod-0", "PET_MASTER_PORT": "29400"}
    else:
        container = jobs_of(found)["template"]["spec"]["containers"][0]
        addresses = {"JOB_COMPLETION_INDEX": node}
    assert container["image"] == "registry/image:1"
    shell, flag, script, name = container["command"]
    assert (shell, flag, name) == ("bash", "-c", "bash")
    pod = pod_template(found) if target == "kubernetes" else jobs_of(found)["template"]
    assert pod["spec"]["containers"][0]["envFrom"] == [
        {"configMapRef": {"name": found["settings"]["metadata"]["name"]}}
    ]
    variables = found["settings"]["data"] | {"CHECKPOINTS": "/data/run"}
    done = subprocess.run(
        ["bash", "-c", script.replace("/plan/", f"{tmp_path}/"), "bash"],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", "PREFLIGHT": "0", **variables, **addresses},
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = json.loads(done.stdout)
    assert [words[words.index(f"--{key}") + 1] for key in ("nnodes", "nproc-per-node", "node-rank", "master-addr")] == [
        "2", gpus, node, "pod-0" if target == "kubernetes" else first_pod(found),
    ]  # fmt: skip
    assert words[words.index("--save") + 1] == "/data/run"
    assert not list(tmp_path.glob("pwned"))


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_filled_in_stands_at_the_top_or_is_marked(planned: Planned, target: str) -> None:
    bundle = bundle_of(planned(**JOBS["nodes"]), ["megatron", target])
    file = next(file for file in bundle.files if file.name == TARGETS[target])
    assert set(yaml.safe_load(file.text.split("\n---\n")[0])["data"]) == {
        "MEGATRON_PATH", "DATA_PATH", "TOKENIZER", "CHECKPOINTS", "MOCK",
    }  # fmt: skip
    for place in file.placeholders:
        begins = f"{place.name}: ''  # " if place.name.isupper() else f"{place.default}"
        lines = [line for line in file.text.splitlines() if begins in line and place.meaning in line]
        assert lines, place.name
    below = file.text.split("\n---\n", 1)[1]
    assert below.count("# fill in: ") == 3, "the claim, and the network's cards as limits and requests"
    assert {"claimName", "rdma/rdma_shared_device_a"} <= {place["name"] for place in bundle.manifest()["placeholders"]}


def test_objects_begin_with_a_letter(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 8)
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"name": "8B of mine"})})
    assert documents(plan, "kubernetes")["TrainJob"]["metadata"]["name"] == "job-8b-of-mine"


def test_files_too_large_for_a_config_map_are_refused(planned: Planned) -> None:
    big = LaunchCommand(program="-m x", arguments={}, files=(ExportFile("schedule.csv", "x" * 1_100_000),))
    with pytest.raises(SpecError, match=r"schedule\.csv are 1,11\d,\d{3} bytes"):
        kubernetes_manifest(planned("llama-3.1-8b", 8), big)
