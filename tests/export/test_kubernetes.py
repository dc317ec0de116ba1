"""Manifests for Kubernetes: held against the recorded schemas of their kinds, and started as pods start them.

The preflight: run as users run it, on machines that have what a plan needs, or lack one thing of it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from samples import preflight_names
from tables import beside

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.export import bundle_of
from planner.export.launchers import kubernetes_manifest
from planner.export.trainer_files import ExportFile, LaunchCommand

TABLES = beside(__file__)

Planned = Callable[..., Plan]

SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "kubernetes_crds.json").read_text())
TYPES: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
TARGETS = {"kubernetes": "kubernetes.yaml", "kubernetes-jobset": "kubernetes-jobset.yaml"}
JOBS: dict[str, dict[str, Any]] = TABLES["jobs"]


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


@pytest.mark.parametrize(("job", "limits"), TABLES["pods_ask_for_the_vendors_gpus_and_the_network"])
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


@pytest.mark.parametrize(("network", "resource", "variable"), TABLES["files_fit_the_network"])
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


MODULES = TABLES["modules"]


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a node that has everything: packages, a checkout, data, a tokenizer, a shared folder."""
    for name, text in MODULES.items():
        put(tmp_path, name, text)
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron/core/package_info.py").write_text("__version__ = '0.20.0'\n")
    (tmp_path / "data.idx").touch()
    (tmp_path / "torchrun").write_text("#!/usr/bin/env bash\necho started\n")
    (tmp_path / "torchrun").chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path / "packages"), "MASTER_PORT": "1",
        "MEGATRON_PATH": str(tmp_path), "DATA_PATH": f"0.5 {tmp_path}/data 0.5 {tmp_path}/data",
        "TOKENIZER": "meta-llama/Llama-3.1-8B", "CHECKPOINTS": str(tmp_path / "new" / "folder"),
    }  # fmt: skip


def put(folder: Path, module: str, text: str) -> None:
    """Make a module of that text, which the preflight finds."""
    path = folder / "packages" / module.replace(".", "/")
    path.mkdir(parents=True, exist_ok=True)
    (path / "__init__.py").write_text(text)


def started(
    plan: Plan, folder: Path, environment: dict[str, str], *words: str, has_no_room: bool = False
) -> tuple[bool, list[str]]:
    """Run launch.sh: true if torchrun was started, and the lines of the preflight."""
    run = folder / "run"
    run.mkdir(exist_ok=True)
    for file in bundle_of(plan, "megatron").files:
        # this machine has what disk and shared memory it has
        text = re.sub(r'(_bytes\\": )[\d.e+]+', r"\g<1>0", file.text) if not has_no_room else file.text
        (run / file.name).write_text(text)
    done = subprocess.run(
        ["bash", str(run / "launch.sh"), *words],
        # isolated from the packages of the tests' own environment
        env={**environment, "PYTHONNOUSERSITE": "1"}, capture_output=True, text=True, timeout=60, cwd=run,
    )  # fmt: skip
    named = f"preflight: {socket.gethostname()}: "
    lines = [line.removeprefix(named) for line in done.stderr.splitlines() if line.startswith("preflight")]
    assert (done.returncode == 0) == (done.stdout == "started\n"), done.stderr
    return done.returncode == 0, lines


def test_a_node_that_has_everything_starts(planned: Planned, tmp_path: Path, machine: dict[str, str]) -> None:
    plan = planned("qwen3-30b-a3b", 16, ep=8, features={"dispatcher": "deepep"})
    assert started(plan, tmp_path, machine) == (True, [])


@pytest.mark.parametrize(("lacks", "says"), TABLES["each_missing_thing_is_one_line"])
def test_each_missing_thing_is_one_line(
    planned: Planned, tmp_path: Path, machine: dict[str, str], lacks: dict[str, str], says: str
) -> None:
    for name, value in lacks.items():
        if name == "GPUS_FOUND":
            put(tmp_path, "torch", MODULES["torch"].replace("8", value))
        elif name == "transformer_engine":
            put(tmp_path, name, f"__version__ = '{value}'\n")
        elif name == "megatron":
            (tmp_path / "megatron/core/package_info.py").write_text(f"__version__ = '{value}'\n")
        elif name in MODULES:
            put(tmp_path, name, value)
        else:
            machine[name] = value
    plan = planned("qwen3-30b-a3b", 16, ep=8, features={"dispatcher": "deepep"})
    has_started, lines = started(plan, tmp_path, machine)
    assert not has_started
    assert lines[0].startswith(says)
    assert len([line for line in lines if "=" not in line.split(" ")[0]]) == (2 if "/no/such is" in says else 1)
    assert any(line.startswith("PREFLIGHT=0") for line in lines)
    assert started(plan, tmp_path, machine | {"PREFLIGHT": "0"}) == (True, [])


def test_the_machine_is_looked_at(planned: Planned, tmp_path: Path, machine: dict[str, str]) -> None:
    """A taken port, no room for checkpoints or offloaded states, busy GPUs, a wrong clock, no card of the network."""
    programs = {
        "nvidia-smi": "case $1 in --query-compute-apps*) echo 4242, 30000;; *) echo 580.1;; esac",
        "timedatectl": "echo no",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    plan = planned("llama-3.1-405b", 1024, tp=8, pp=8)
    hardware = plan.cluster.hardware.model_copy(update={"network": "slingshot"})
    cluster, layout = plan.cluster, plan.parallelism.model_copy(update={"host_bytes": 2**50})
    plan = plan.model_copy(
        update={
            "cluster": cluster.model_copy(update={"hardware": hardware}),
            "best": plan.best.model_copy(update={"parallelism": layout}),
        }
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        has_started, lines = started(plan, tmp_path, machine | {"MASTER_PORT": port}, has_no_room=True)
    assert not has_started
    said = "\n".join(lines)
    for words in (
        "processes 4242 hold", "no card of the planned network slingshot", "two checkpoints take", "not synchronised",
        f"port {port} is taken", "what the plan offloads takes 8,388,608",
    ):  # fmt: skip
        assert words in said


def test_the_first_run_needs_no_data(planned: Planned, tmp_path: Path, machine: dict[str, str]) -> None:
    for name in ("DATA_PATH", "TOKENIZER", "CHECKPOINTS"):
        del machine[name]
    plan = planned("llama-3.1-8b", 16)
    has_started, lines = started(plan, tmp_path, machine | {"MOCK": "0"})
    assert not has_started
    assert [line.split(" ")[0] for line in lines] == ["DATA_PATH", "TOKENIZER", "CHECKPOINTS", "PREFLIGHT=0", "MOCK=1"]
    assert started(plan, tmp_path, machine | {"MOCK": "1"}) == (True, [])
    assert started(plan, tmp_path, machine) == (True, []), "where nothing is filled in, the run is a first one"
    assert not started(plan, tmp_path, machine | {"TOKENIZER": "gpt2"})[0], "where something is, it is training"


@pytest.mark.parametrize(("seconds", "place"), [(1.0, "inside"), (1.5, "outside")])
def test_the_first_run_prints_measured_beside_promised(
    planned: Planned, tmp_path: Path, machine: dict[str, str], seconds: float, place: str
) -> None:
    plan = planned("llama-3.1-8b", 16)
    ms = 1000 * seconds * plan.step.step_s
    torchrun = f"for i in 1 2 3; do echo 'elapsed time per iteration (ms): {ms:.1f} |'; done"
    (tmp_path / "torchrun").write_text(f"#!/usr/bin/env bash\n{torchrun}\nexit 3\n")
    run = tmp_path / "run"
    run.mkdir()
    for file in bundle_of(plan, "megatron").files:
        (run / file.name).write_text(file.text)
    environment = machine | {"MOCK": "1", "PREFLIGHT": "0"}
    done = subprocess.run(["bash", str(run / "launch.sh")], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, "the run's own status"
    assert f"{100 * (seconds - 1):+.1f}%, {place} the 80% interval" in done.stderr
    assert "plan observe" in done.stderr
    assert (run / "measured.log").read_text() == done.stdout


def test_a_machine_without_a_gpu_is_told_and_not_stopped(
    planned: Planned, tmp_path: Path, machine: dict[str, str]
) -> None:
    put(tmp_path, "torch", MODULES["torch"].replace("8", "0"))
    has_started, lines = started(planned("llama-3.1-8b", 16), tmp_path, machine)
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        assert has_started
        assert lines[0] == "8 GPUs wanted on this node, 0 found"
        assert lines[-1] == "no GPU is visible here: this is told, and nothing is stopped"


@pytest.mark.parametrize(("found", "starts"), [("0.16.2", True), ("0.20.0", False), ("0.160.0", False)])
def test_a_checkout_of_another_version_is_not_started(
    planned: Planned, tmp_path: Path, machine: dict[str, str], found: str, starts: bool
) -> None:
    plan = planned("llama-3.1-8b", 8)
    plan = plan.model_copy(update={"runtime_spec": plan.runtime_spec.model_copy(update={"version": "0.16"})})
    (tmp_path / "megatron/core/package_info.py").write_text(f'__version__ = "{found}"\n')
    says = [f"the options are for Megatron core 0.16, MEGATRON_PATH has {found}"]
    has_started, lines = started(plan, tmp_path, machine)
    assert (has_started, lines[:1]) == (starts, [] if starts else says)


def test_a_smaller_last_node_wants_fewer_gpus(planned: Planned, tmp_path: Path, machine: dict[str, str]) -> None:
    put(tmp_path, "torch", MODULES["torch"].replace("8", "4"))
    plan = planned("llama-3.1-8b", 12, tp=4)
    assert started(plan, tmp_path, machine | {"NODE_RANK": "1"}) == (True, [])
    assert started(plan, tmp_path, machine | {"NODE_RANK": "0"})[1][0] == "8 GPUs wanted on this node, 4 found"


def test_slurm_looks_at_every_node_before_it_starts_any(planned: Planned, tmp_path: Path) -> None:
    """srun is a recorder here; its first step is the preflight, and a failed one ends the job."""
    run = tmp_path / "run"
    run.mkdir()
    for file in bundle_of(planned("llama-3.1-8b", 16), "megatron").files:
        (run / file.name).write_text(file.text)
    for status in (0, 1):
        (tmp_path / "srun").write_text(f'#!/usr/bin/env bash\necho "$@" >> {tmp_path}/steps\nexit {status}\n')
        (tmp_path / "srun").chmod(0o755)
        (tmp_path / "steps").unlink(missing_ok=True)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CONTAINER_IMAGE": "image.sqsh"}
        done = subprocess.run(["bash", str(run / "launch.sbatch")], env=environment, cwd=run, timeout=60)
        steps = (tmp_path / "steps").read_text().splitlines()
        assert done.returncode == status
        assert len(steps) == 2 - status
        assert "preflight.py" in steps[0]
        assert all("--kill-on-bad-exit=1 --container-image=image.sqsh" in step for step in steps)
        assert "torchrun" in steps[-1] or status


def test_nothing_of_a_plan_leaves_the_checks(planned: Planned, tmp_path: Path, hostile_name: str) -> None:
    plan = planned("llama-3.1-8b", 8)
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"name": hostile_name})})
    text = next(file.text for file in bundle_of(plan, "megatron").files if file.name == "preflight.py")
    (tmp_path / "preflight.py").write_text(text)
    code = "import json, preflight; print(json.dumps(preflight.CHECKS))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    checks: dict[str, Any] = json.loads(done.stdout)
    assert checks["gpus"] == 8
    assert not list(tmp_path.glob("pwned"))


def test_releases_are_compared_as_numbers() -> None:
    release = preflight_names()["release"]
    assert release("2.10.0+cu130") > release("2.9") > release("2.8.0rc1") > release("")
