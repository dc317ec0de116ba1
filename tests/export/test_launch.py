"""Launchers start what was exported: bash runs them with recorders in place of torchrun and srun.

`plan export --trials`: the next best layouts as short runs, and a script that ranks their logs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from samples import preflight_names
from tables import beside

from planner.answer import Plan
from planner.export.export import bundle_of, trials_of, write_trials
from planner.export.import_run import read_configuration
from planner.export.launchers import nodes_of, shell_array
from planner.export.targets import TRAINERS
from planner.export.trainer_files import ExportFile, ShellText, argv
from planner.specs.units import GIB

TABLES = beside(__file__)

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
        env = {"PATH": f"{tools}:{os.environ['PATH']}", "RECORD": str(record), "PREFLIGHT": "0", **environment}
        done = subprocess.run(
            ["bash", str(script), *words], env=env, cwd=folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        calls = [json.loads(line) for line in record.read_text().splitlines()]
        assert len(calls) == 1
        call: dict[str, Any] = {**calls[0], "stderr": done.stderr}
        assert not list(folder.glob("pwned"))
        return call

    return started


def words_of(plan: Plan, part: str = "training_run", **values: str) -> list[str]:
    """The words of Megatron-LM's command line, with the values that the user fills in."""
    command = TRAINERS["megatron"].write(plan).command
    assert command is not None
    words = argv({**command.arguments, **getattr(command, part).arguments})
    return [word for text in words for word in filled(text, values)]


def filled(text: str, values: dict[str, str]) -> list[str]:
    if not isinstance(text, ShellText):
        return [text]
    found = re.sub(r"\$\{(\w+)\}", lambda name: values.get(name[1], ""), text.unquoted)
    return [found] if '"' in text else found.split()


FILLED = {"DATA_PATH": "0.7 /data/a 0.3 /data/b", "TOKENIZER": "/models/a b", "CHECKPOINTS": "/runs/x y"}


def file_of(plan: Plan, *targets: str, name: str) -> ExportFile:
    return next(file for file in bundle_of(plan, targets).files if file.name == name)


def hostile(plan: Plan, name: str) -> Plan:
    spec = plan.model.spec.model_copy(update={"name": name})
    return plan.model_copy(update={"model": plan.model.model_copy(update={"name": name, "spec": spec})})


def test_torchrun_passes_every_argument(planned: Planned, run: Callable[..., Any], hostile_name: str) -> None:
    plan = planned("llama-3.1-405b", 2048, tp=8, pp=16, vpp=4, layers_per_stage=(1, *[2] * 62, 1))
    plan = hostile(plan, hostile_name)
    file = file_of(plan, "megatron", name="launch.sh")
    call = run(file, "--save", "a b", NODE_RANK="3", MASTER_ADDR="node-0", MEGATRON_PATH="/m", **FILLED)
    arguments = words_of(plan, **FILLED)
    assert "Et|(tt|)*62tL" in arguments
    at = arguments.index("--data-path")
    assert arguments[at + 1 : at + 5] == ["0.7", "/data/a", "0.3", "/data/b"]
    assert call["argv"][-len(arguments) - 2 :] == [*arguments, "--save", "a b"]
    launcher = call["argv"][1 : -len(arguments) - 2]
    assert launcher[:6] == ["--nnodes", "256", "--nproc-per-node", "8", "--node-rank", "3"]
    assert launcher[6:] == ["--master-addr", "node-0", "--master-port", "29500", "/m/pretrain_gpt.py"]
    assert call["env"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


def test_slurm_meets_on_the_first_node(planned: Planned, run: Callable[..., Any], hostile_name: str) -> None:
    plan = hostile(planned("llama-3.1-70b", 64, tp=4, pp=8, vpp=2, layers_per_stage=(4, *[5] * 14, 6)), hostile_name)
    file = file_of(plan, "megatron", name="launch.sbatch")
    call = run(file, "--lr", "1", SLURM_JOB_NODELIST="gpu[07-08]", SLURM_NODEID="1", **FILLED)
    arguments = words_of(plan, **FILLED)
    assert call["argv"][-len(arguments) - 2 :] == [*arguments, "--lr", "1"]
    launcher = call["argv"][1 : -len(arguments) - 2]
    assert launcher[4:8] == ["--node-rank", "1", "--master-addr", "gpu07"]
    directives = [line for line in file.text.splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --nodes=8" in directives
    assert "#SBATCH --gpus-per-node=8" in directives
    assert not any("99" in line for line in directives), "a directive of the model's name"


def test_the_first_run_is_on_mock_data_and_says_what_was_planned(planned: Planned, run: Callable[..., Any]) -> None:
    plan = planned("qwen3-30b-a3b", 16, ep=8)
    for name in ("launch.sh", "launch.sbatch"):
        call = run(file_of(plan, "megatron", name=name), MOCK="1")
        words = words_of(plan, "first_run")
        assert call["argv"][-len(words) :] == words
        assert {"--mock-data", "--moe-router-force-load-balancing"} <= set(words)
        assert not {"--save", "--load", "--data-path"} & set(words)
        assert f"planned step: {plan.best.step.step_s:.4g} s" in call["stderr"]
        assert f"{plan.stages[0].memory.peak_allocated_bytes / GIB:.1f}" in call["stderr"]
    launch = file_of(plan, "megatron", name="launch.sh")
    assert "planned step" not in run(launch, MOCK="0")["stderr"]
    assert "planned step" not in run(launch, **FILLED)["stderr"]
    unasked = run(launch)
    assert "nothing is filled in: this is a first run" in unasked["stderr"]
    assert "--mock-data" in unasked["argv"]


def test_placeholders_stand_in_one_block_at_the_top(planned: Planned, run: Callable[..., Any]) -> None:
    plan = planned("llama-3.1-8b", 16)
    bundle = bundle_of(plan, ["megatron"])
    for file in bundle.files:
        if not file.placeholders or not file.executable:
            continue
        block = file.text.split("# ----")[1:2]
        names = re.findall(r"^(\w+)=", block[0], re.MULTILINE)
        assert names == [place.name for place in file.placeholders]
    listed = {place["name"]: place for place in bundle.manifest()["placeholders"]}
    assert {"DATA_PATH", "TOKENIZER", "CHECKPOINTS", "MEGATRON_PATH"} <= set(listed)
    filled_in = file_of(plan, "megatron", name="launch.sh").text.replace('DATA_PATH="${DATA_PATH:-}"', "DATA_PATH=/x")
    assert "/x" in run(ExportFile("launch.sh", filled_in))["argv"]


@pytest.mark.parametrize(("ends", "minutes"), [(0, None), (7200, 104)])
def test_training_saves_before_slurm_ends_it(
    planned: Planned, run: Callable[..., Any], tmp_path: Path, ends: int, minutes: int | None
) -> None:
    date = tmp_path / "tools" / "date"
    date.write_text("#!/usr/bin/env bash\necho 60\n")
    date.chmod(0o755)
    environment = {"SLURM_JOB_END_TIME": str(ends)} if ends else {}
    file = file_of(planned("llama-3.1-8b", 16), "megatron", name="launch.sbatch")
    words = run(file, MOCK="0", **environment)["argv"]
    assert ("--exit-duration-in-mins" in words) == (minutes is not None)
    if minutes is not None:
        assert words[words.index("--exit-duration-in-mins") + 1] == str(minutes)
        assert "--exit-duration-in-mins" not in run(file, MOCK="1", **environment)["argv"]


@pytest.mark.parametrize(("gpus", "hardware", "expected"), TABLES["nodes_of_a_rack_are_asked_for_together"])
def test_nodes_of_a_rack_are_asked_for_together(
    planned: Planned, gpus: int, hardware: str, expected: list[str]
) -> None:
    text = file_of(planned("llama-3.1-8b", gpus, hardware=hardware, batch=gpus * 4), "megatron", name="launch.sbatch")
    assert all(f"#SBATCH {directive}\n" in text.text for directive in expected)
    assert "--segment" not in file_of(planned("llama-3.1-8b", 64), "megatron", name="launch.sbatch").text


def test_fsdp_overrides_what_the_shell_has(planned: Planned, run: Callable[..., Any]) -> None:
    plan = planned("llama-3.1-8b", 16, tp=2, zero_stage=3)
    call = run(file_of(plan, "megatron", name="launch.sh"), CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert call["env"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


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


@pytest.mark.parametrize(("gpus", "layout", "expected"), TABLES["nodes"])
def test_nodes(planned: Planned, gpus: int, layout: dict[str, Any], expected: list[int]) -> None:
    assert [*nodes_of(planned("llama-3.2-1b", gpus, **layout))] == expected


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
        assert read_configuration(file_of(plan, *targets, name=target).text).run["num_gpus"] == 12


def test_words_are_quoted() -> None:
    array = shell_array("ARGUMENTS", {"--layout": "Et|(tt|)*2tL", "--flag": True}, ["a=$(touch pwned)", "b c"])
    lines = ["--layout 'Et|(tt|)*2tL'", "--flag", "'a=$(touch pwned)'", "'b c'"]
    assert array == "\n".join(["ARGUMENTS=(", *(f"  {line}" for line in lines), ")"])


PLANS: dict[str, dict[str, Any]] = TABLES["plans"]


@pytest.mark.thorough(4)
@pytest.mark.parametrize("tools", [(0, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize(("launcher", "name"), [("torchrun", "launch.sh"), ("slurm", "launch.sbatch")])
@pytest.mark.parametrize("target", PLANS)
def test_environment_and_binding_reach_the_ranks(
    planned: Planned, run: Callable[..., Any], tmp_path: Path, target: str, launcher: str, name: str, tools: Any
) -> None:
    for tool, status in zip(("numactl", "python3"), tools, strict=True):
        (tmp_path / "tools" / tool).write_text(f"#!/usr/bin/env bash\nexit {status}\n")
        (tmp_path / "tools" / tool).chmod(0o755)
    plan = planned(gpus=16, **PLANS[target])
    call = run(file_of(plan, target, launcher, name=name))
    expected = TRAINERS[target].write(plan).command
    assert expected is not None
    assert {key: call["env"].get(key) for key in expected.environment} == expected.environment
    binds = not any(tools)
    assert (call["argv"][1:3] == ["--numa-binding", "node"]) == binds
    assert call["env"].get("NCCL_IGNORE_CPU_AFFINITY") == ("1" if binds else None)
    assert target == "torch" or expected.environment, "the target has an environment of its own"


def test_trials_run_and_are_ranked(planned: Planned, tmp_path: Path) -> None:
    plans = [planned("llama-3.1-8b", 16, tp=tp) for tp in (1, 2, 4)]
    trials, notes = trials_of(plans, "megatron", None, force=True)
    assert [trial.folder for trial in trials] == ["trial-0", "trial-1", "trial-2"]
    assert notes == []
    write_trials(trials, tmp_path, force=False)
    run = (tmp_path / "run_trials.sh").read_text()
    assert run.count("MOCK=1 bash launch.sh") == 3
    assert (tmp_path / "trial-1" / "launch.sh").is_file()
    for number, ms in ((0, 4000.0), (2, 2500.0)):
        lines = [
            f"iteration {i}/ 20 | elapsed time per iteration (ms): {60_000 if i < 5 else ms} |\n" for i in range(20)
        ]
        (tmp_path / f"trial-{number}" / "first_run.log").write_text("".join(lines))
    out = subprocess.run(
        [sys.executable, str(tmp_path / "rank_trials.py")], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["trial-2", "trial-0", "trial-1"], "the fastest first, those without a log last"
    assert rows[0][1] == "2.500", "the first steps are left out"
    assert rows[0][3] == f"{plans[2].step.step_s:.3f}"


@pytest.mark.parametrize(("line", "seconds"), TABLES["logs_of_other_trainers"])
def test_logs_of_other_trainers(line: str, seconds: float, tmp_path: Path) -> None:
    trial = {
        "folder": "trial-0", "layout": "x", "step_s": 2.0, "tokens_per_step": 65536, "global_batch_size": 32,
        "num_gpus": 8,
    }  # fmt: skip
    (tmp_path / "trial-0").mkdir()
    (tmp_path / "trial-0" / "a.log").write_text(f"{line}\n" * 3)
    (tmp_path / "trials.json").write_text(json.dumps({"trials": [trial]}))
    assert preflight_names()["measured_s"](tmp_path / "trial-0", trial) == (pytest.approx(seconds), 3)


def test_a_target_without_a_first_run_of_its_own(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 16, runtime="torchtitan", zero_stage=3)
    trials, _ = trials_of([plan], "torchtitan", None, force=True)
    assert trials[0].command.startswith(("bash launch.sh", "MOCK=1 bash launch.sh"))
