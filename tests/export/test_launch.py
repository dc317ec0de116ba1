"""Launchers start what was exported: bash runs them with recorders in place of torchrun and srun."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.common.arguments import argv
from planner.export.common.header import slug
from planner.export.common.trainer_files import ExportFile, LaunchCommand
from planner.export.export import bundle_of
from planner.export.launch.kubernetes import kubernetes_manifest
from planner.export.launch.nodes import nodes_of
from planner.export.launch.shell import shell_array
from planner.export.megatron.arguments import megatron_arguments
from planner.export.targets import TRAINERS

Planned = Callable[..., Plan]

RECORDER = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps({{"argv": sys.argv, "env": dict(os.environ)}}) + "\\n")
"""
SRUN = '#!/usr/bin/env bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n'
SCONTROL = "#!/usr/bin/env bash\nprintf 'gpu07\\ngpu08\\n'\n"


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """run(script, *words, **environment): what torchrun was given."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("torchrun", RECORDER), ("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)

    def started(file: ExportFile, *words: str, **environment: str) -> dict[str, Any]:
        folder = tmp_path / "a folder's name"
        folder.mkdir(exist_ok=True)
        script = folder / file.name
        script.write_text(file.text)
        record = tmp_path / "record"
        record.unlink(missing_ok=True)
        env = {"PATH": f"{tools}:{os.environ['PATH']}", "RECORD": str(record), **environment}
        done = subprocess.run(
            ["bash", str(script), *words], env=env, cwd=folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        calls = [json.loads(line) for line in record.read_text().splitlines()]
        assert len(calls) == 1
        call: dict[str, Any] = calls[0]
        assert not list(folder.glob("pwned"))
        return call

    return started


def file_of(plan: Plan, *targets: str, name: str) -> ExportFile:
    return next(file for file in bundle_of(plan, targets).files if file.name == name)


def hostile(plan: Plan, name: str) -> Plan:
    spec = plan.model.spec.model_copy(update={"name": name})
    return plan.model_copy(update={"model": plan.model.model_copy(update={"name": name, "spec": spec})})


def test_torchrun_passes_every_argument(planned: Planned, run: Callable[..., Any], hostile_name: str) -> None:
    plan = planned("llama-3.1-405b", 2048, tp=8, pp=16, vpp=4, layers_per_stage=(1, *[2] * 62, 1))
    plan = hostile(plan, hostile_name)
    call = run(file_of(plan, "megatron", name="launch.sh"), "--save", "a b", NODE_RANK="3", MASTER_ADDR="node-0")
    arguments = argv(megatron_arguments(plan))
    assert "Et|(tt|)*62tL" in arguments
    assert call["argv"][-len(arguments) - 2 :] == [*arguments, "--save", "a b"]
    launcher = call["argv"][1 : -len(arguments) - 2]
    assert launcher[:6] == ["--nnodes", "256", "--nproc-per-node", "8", "--node-rank", "3"]
    assert launcher[6:] == [
        "--master-addr",
        "node-0",
        "--master-port",
        "29500",
        f"{call['env']['PWD']}/pretrain_gpt.py",
    ]
    assert call["env"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_slurm_meets_on_the_first_node(planned: Planned, run: Callable[..., Any], hostile_name: str) -> None:
    plan = hostile(planned("llama-3.1-70b", 64, tp=4, pp=8, vpp=2, layers_per_stage=(4, *[5] * 14, 6)), hostile_name)
    file = file_of(plan, "megatron", name="launch.sbatch")
    call = run(file, "--lr", "1", SLURM_JOB_NODELIST="gpu[07-08]", SLURM_NODEID="1")
    arguments = argv(megatron_arguments(plan))
    assert call["argv"][-len(arguments) - 2 :] == [*arguments, "--lr", "1"]
    launcher = call["argv"][1 : -len(arguments) - 2]
    assert launcher[4:8] == ["--node-rank", "1", "--master-addr", "gpu07"]
    directives = [line for line in file.text.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --nodes=8" in directives
    assert "#SBATCH --gpus-per-node=8" in directives
    assert not any("99" in line for line in directives), "a directive of the model's name"


def test_fsdp_overrides_what_the_shell_has(planned: Planned, run: Callable[..., Any]) -> None:
    plan = planned("llama-3.1-8b", 16, tp=2, zero_stage=3)
    call = run(file_of(plan, "megatron", name="launch.sh"), CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert call["env"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


@pytest.mark.parametrize(("torch_is_new", "binds"), [(True, True), (False, False)])
@pytest.mark.parametrize("name", ["launch.sh", "launch.sbatch"])
def test_ranks_are_bound_to_cpus_where_that_is_possible(
    planned: Planned, run: Callable[..., Any], tmp_path: Path, name: str, torch_is_new: bool, binds: bool
) -> None:
    for tool, status in (("numactl", 0), ("python3", 0 if torch_is_new else 1)):
        (tmp_path / "tools" / tool).write_text(f"#!/usr/bin/env bash\nexit {status}\n")
        (tmp_path / "tools" / tool).chmod(0o755)
    call = run(file_of(planned("llama-3.1-8b", 16), "megatron", name=name))
    assert (call["argv"][1:3] == ["--numa-binding", "node"]) == binds
    assert call["env"].get("NCCL_IGNORE_CPU_AFFINITY") == ("1" if binds else None)


@pytest.mark.parametrize(("found", "starts"), [("0.16.2", True), ("0.20.0", False), ("0.160.0", False)])
def test_a_checkout_of_another_version_is_not_started(
    planned: Planned, tmp_path: Path, found: str, starts: bool
) -> None:
    plan = planned("llama-3.1-8b", 8)
    plan = plan.model_copy(update={"runtime_spec": plan.runtime_spec.model_copy(update={"version": "0.16"})})
    script = tmp_path / "launch.sh"
    script.write_text(file_of(plan, "megatron", name="launch.sh").text)
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/package_info.py").write_text(f'__version__ = "{found}"\n')
    (tmp_path / "torchrun").write_text("#!/usr/bin/env bash\necho started\n")
    (tmp_path / "torchrun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MEGATRON_PATH": str(tmp_path)}
    done = subprocess.run(["bash", str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert (done.stdout == "started\n") == starts
    if not starts:
        assert done.stderr == f"the options are for Megatron core 0.16, MEGATRON_PATH holds {found}\n"
        assert done.returncode == 1


@pytest.mark.parametrize("target", ["megatron", "bridge", "torchtitan", "torch"])
def test_scripts_are_bash(planned: Planned, target: str, hostile_name: str, tmp_path: Path) -> None:
    runtime = {"torchtitan": "torchtitan", "torch": "torch-eager"}.get(target, "megatron")
    plan = hostile(planned("llama-3.1-8b", 16, runtime=runtime, tp=2, pp=2), hostile_name)
    for file in bundle_of(plan, [target]).files:
        if file.name.startswith("launch"):
            assert file.executable
            (tmp_path / file.name).write_text(file.text)
            done = subprocess.run(["bash", "-n", str(tmp_path / file.name)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            if shutil.which("shellcheck"):
                checked = subprocess.run(["shellcheck", str(tmp_path / file.name)], capture_output=True, text=True)
                assert checked.returncode == 0, checked.stdout


def test_torch_and_torchtitan_find_their_files(planned: Planned, run: Callable[..., Any]) -> None:
    titan = planned("llama-3.1-8b", 16, runtime="torchtitan", tp=2, pp=2)
    call = run(file_of(titan, "torchtitan", name="launch.sh"))
    assert call["argv"][-6:] == ["-m", "torchtitan.train", "--module", "planned_recipe", "--config", "plan"]
    assert call["env"]["PYTHONPATH"] == call["env"]["PLAN_DIR"]
    torch = planned("llama-3.1-8b", 16, runtime="torch-eager", tp=2, pp=2)
    call = run(file_of(torch, "torch", name="launch.sbatch"), SLURM_SUBMIT_DIR="/runs/my plan")
    assert call["argv"][-3:] == ["planner.probe.worker", "--config", "/runs/my plan/plan.torch.yaml"]


def test_kubernetes_manifest(planned: Planned, hostile_name: str) -> None:
    plan = hostile(planned("llama-3.1-8b", 32, runtime="torch-eager", tp=2, pp=4), hostile_name)
    bundle = bundle_of(plan, ["torch", "kubernetes"], image="registry/image:1")
    files = {file.name: file for file in bundle.files}
    config, job = yaml.safe_load_all(files["kubernetes.yaml"].text)
    assert config["data"]["plan.torch.yaml"] == files["plan.torch.yaml"].text
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {role: replicas[role]["replicas"] for role in replicas} == {"Master": 1, "Worker": 3}
    container = replicas["Worker"]["template"]["spec"]["containers"][0]
    assert container["image"] == "registry/image:1"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {"name": "PLAN_DIR", "value": "/plan"} in container["env"]
    assert job["metadata"]["name"] == slug(hostile_name)


def test_kubernetes_arguments_are_texts(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 8, tp=2)
    text = file_of(plan, "megatron", "kubernetes", name="kubernetes.yaml").text
    container = yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    assert container["args"] == argv(megatron_arguments(plan))
    assert "'1e-05'" in text, "another YAML reader would take it for a number"
    assert "Worker" not in yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]


def test_files_too_large_for_a_config_map_are_refused(planned: Planned) -> None:
    big = LaunchCommand(program="-m x", arguments={}, files=(ExportFile("schedule.csv", "x" * 1_100_000),))
    with pytest.raises(SpecError, match=r"schedule\.csv are 1,100,000 bytes"):
        kubernetes_manifest(planned("llama-3.1-8b", 8), big)


@pytest.mark.parametrize(
    ("gpus", "layout", "expected"),
    [
        (8, {"tp": 2}, (1, 8, 8)),
        (64, {"tp": 8}, (8, 8, 8)),
        (12, {"tp": 2, "pp": 3, "dp": 2}, (2, 6, 6)),
        (4, {}, (1, 4, 4)),
        (60, {"tp": 4}, (8, 8, 4)),
        (12, {"tp": 4}, (2, 8, 4)),
        (32, {"tp": 16}, (4, 8, 8)),
    ],
)
def test_nodes(planned: Planned, gpus: int, layout: dict[str, Any], expected: tuple[int, int, int]) -> None:
    assert nodes_of(planned("llama-3.2-1b", gpus, **layout)) == expected


def test_groups_stay_in_a_node_where_there_are_enough(planned: Planned) -> None:
    crossing = planned("gpt3-175b", 24, tp=3, dp=8, seq_length=3072)  # 8 groups of 3; three nodes hold 6 of them uncut
    assert nodes_of(crossing) == (3, 8, 8)
    larger = crossing.cluster.model_copy(update={"num_gpus": 32})
    assert nodes_of(crossing.model_copy(update={"cluster": larger})) == (4, 6, 6)


@pytest.mark.parametrize(("node", "gpus"), [("0", "8"), ("1", "4")])
def test_the_last_node_may_start_fewer_ranks(planned: Planned, run: Callable[..., Any], node: str, gpus: str) -> None:
    plan = planned("llama-3.1-8b", 12, tp=4)
    for target, variable in (("launch.sh", "NODE_RANK"), ("launch.sbatch", "SLURM_NODEID")):
        targets = ("megatron", "slurm") if target == "launch.sbatch" else ("megatron",)
        call = run(file_of(plan, *targets, name=target), **{variable: node})
        words = call["argv"]
        assert words[words.index("--nnodes") + 1] == "2"
        assert words[words.index("--nproc-per-node") + 1] == gpus
        assert words[words.index("--node-rank") + 1] == node
    text = file_of(plan, "megatron", "kubernetes", name="kubernetes.yaml").text
    container = yaml.safe_load(text)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert '[[ "$RANK" == 1 ]] && GPUS=4; exec torchrun' in container["command"][2]


def test_words_are_quoted() -> None:
    array = shell_array("ARGUMENTS", {"--layout": "Et|(tt|)*2tL", "--flag": True}, ["a=$(touch pwned)", "b c"])
    lines = ["--layout 'Et|(tt|)*2tL'", "--flag", "'a=$(touch pwned)'", "'b c'"]
    assert array == "\n".join(["ARGUMENTS=(", *(f"  {line}" for line in lines), ")"])


def started_by(file: ExportFile, run: Callable[..., Any]) -> dict[str, Any]:
    """What torchrun was given: by a shell launcher, or by a pod's container."""
    if file.name != "kubernetes.yaml":
        call: dict[str, Any] = run(file)
        return call
    job = list(yaml.safe_load_all(file.text))[-1]
    container = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    shell, flag, script, name = container["command"]
    assert (shell, flag, name) == ("bash", "-c", "bash")
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    pod = {"RANK": "0", "MASTER_ADDR": "pod-0", "MASTER_PORT": "23456"}
    found: dict[str, Any] = run(ExportFile("pod.sh", script), *container["args"], **variables, **pod)
    return found


PLANS: dict[str, dict[str, Any]] = {
    "megatron": {"model": "qwen3-30b-a3b", "ep": 8, "features": {"ep_overlap": True, "dispatcher": "alltoall"}},
    "bridge": {"model": "qwen3-30b-a3b", "ep": 8, "features": {"cuda_graph": "moe_router"}},
    "torchtitan": {"model": "llama-3.1-8b", "tp": 2, "runtime": "torchtitan"},
    "torch": {"model": "llama-3.1-8b", "tp": 2, "runtime": "torch-eager"},
}


@pytest.mark.parametrize("binds", [True, False])
@pytest.mark.parametrize(
    ("launcher", "name"),
    [("torchrun", "launch.sh"), ("slurm", "launch.sbatch"), ("kubernetes", "kubernetes.yaml")],
)
@pytest.mark.parametrize("target", PLANS)
def test_environment_and_binding_reach_the_ranks(
    planned: Planned, run: Callable[..., Any], tmp_path: Path, target: str, launcher: str, name: str, binds: bool
) -> None:
    for tool, status in (("numactl", 0 if binds else 1), ("python3", 0 if binds else 1)):
        (tmp_path / "tools" / tool).write_text(f"#!/usr/bin/env bash\nexit {status}\n")
        (tmp_path / "tools" / tool).chmod(0o755)
    plan = planned(gpus=16, **PLANS[target])
    call = started_by(file_of(plan, target, launcher, name=name), run)
    expected = TRAINERS[target].write(plan).command
    assert expected is not None
    assert {key: call["env"].get(key) for key in expected.environment} == expected.environment
    assert (call["argv"][1:3] == ["--numa-binding", "node"]) == binds
    assert call["env"].get("NCCL_IGNORE_CPU_AFFINITY") == ("1" if binds else None)
    assert target == "torch" or expected.environment, "the target has an environment of its own"
