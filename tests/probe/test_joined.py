"""Ranks that torchrun or srun started: each is a process of its own, and says for itself what became of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import TINY

pytest.importorskip("torch", reason="needs the probe extra (torch)")

from planner.layout.evaluate import evaluate
from planner.probe.launch.joined import first_host, joins_others
from planner.probe.result import ProbeResult
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware
from planner.specs.training import Parallelism, TrainingSpec

HERE = Path(__file__).parent
COMMAND = "import sys, faulty; from planner.cli import main; {}; sys.exit(main(sys.argv[1:]))"


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    """Of two stages."""
    plan = evaluate(
        ModelSpec(num_hidden_layers=6, **TINY),
        ClusterSpec(hardware=load_hardware("h100"), num_gpus=2),
        TrainingSpec(seq_length=32, global_batch_size=8),
        Parallelism(pp=2),
        runtime="torch-eager",
    )
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    return str(path)


def joined(
    plan_file: str, rank: int, world_size: int, port: int, *options: str, fault: str = "0"
) -> subprocess.Popen[str]:
    """A rank to which `fault`, a statement, happens first."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    arguments = ["probe", plan_file, "--device", "cpu", "--steps", "1", "--json", *options]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(fault), *arguments],
        env={
            **os.environ,
            "PYTHONPATH": f"{HERE.parent.parent}{os.pathsep}{HERE}",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            **{name: str(value) for name, value in environment.items()},
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_ranks_that_torchrun_starts(plan_file: str) -> None:
    port = free_port()
    ranks = [joined(plan_file, rank, 2, port) for rank in range(2)]
    outputs = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert ProbeResult.model_validate_json(outputs[0][0]).agrees
    assert outputs[1][0] == ""


def test_a_port_in_use_and_a_wrong_number_of_ranks(plan_file: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ranks = [joined(plan_file, 0, 2, port), joined(plan_file, 2, 3, port)]
        (_, in_use), (_, too_many) = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [5, 5]
    assert "error: rank 0 (stage 0, dp 0, cp 0, tp 0) failed in rendezvous" in in_use
    assert "set MASTER_PORT" in in_use
    assert str(port) in in_use
    assert "Traceback" not in in_use
    assert "3 ranks were started, the largest slice of the plan that fits has 2" in too_many


def test_out_of_memory_is_a_result(plan_file: str) -> None:
    port, fault = free_port(), "faulty._at('1F1', faulty._out_of_memory)"
    ranks = [joined(plan_file, rank, 2, port, fault=fault) for rank in range(2)]
    outputs = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [5, 6]
    result = ProbeResult.model_validate_json(outputs[1][0])
    assert result.out_of_memory is not None
    assert (result.out_of_memory.stage, result.out_of_memory.asked_bytes) == (1, 5 * 2**29)
    assert result.predicted_bytes
    assert result.slice.verified == ()
    assert outputs[0][0] == ""
    assert "the other ranks say more" in outputs[0][1]
    assert not any("Traceback" in told for _, told in outputs)


def test_a_traceback_is_shown_where_it_is_asked_for(plan_file: str) -> None:
    port, fault = free_port(), "faulty._at('1B1', faulty._raise)"
    ranks = [joined(plan_file, rank, 2, port, "--debug", fault=fault) for rank in range(2)]
    outputs = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [5, 5]
    assert "error: rank 1 (stage 1, dp 0, cp 0, tp 0) failed in step 0, at 1B1" in outputs[1][1]
    for _, told in outputs:
        assert "Traceback" in told
        assert "pipeline.py" in told


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[07-12,20],login", "gpu07"),
        ("a1,a2", "a1"),
        ("single", "single"),
        ("n-[1,3]", "n-1"),
        ("node[1-2]-ib,login", "node1-ib"),
        ("r[1-2]n[3,5]", "r1n3"),
        ("", "localhost"),
    ],
)
def test_first_host_of_slurm(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("set_by_slurm", "joins"),
    [
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, False),  # a batch script
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}, True),
    ],
)
def test_only_what_srun_starts_is_one_of_several(
    set_by_slurm: dict[str, str], joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    for name, value in {**set_by_slurm, "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_ID": "5"}.items():
        monkeypatch.setenv(name, value)
    assert joins_others() == joins
    variables = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
    assert variables == (["3", "4", "1", "n3", "29505"] if joins else [None] * 5)
