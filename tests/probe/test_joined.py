"""Ranks that torchrun or srun started: each is a process of its own, and says for itself what became of it."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tables import beside
from tiny import TINY

pytest.importorskip("torch", reason="needs the probe extra (torch)")

import faulty_joined
import torch.distributed as dist

from planner.cli.measurements import probe_of
from planner.errors import ProbeError, SpecError
from planner.layout.evaluate import evaluate
from planner.probe.launch import joined as launch_joined
from planner.probe.launch.joined import first_host, joins_others
from planner.probe.launch.launcher import process_context
from planner.probe.rank.groups import tcp_store
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware
from planner.specs.training import Parallelism, TrainingSpec

TABLES = beside(__file__)

HERE = Path(__file__).parent
PATIENCE_S = 600.0
"""After this a test has hung; a busy machine takes long, and no test fails for that."""


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    """Of two stages."""
    plan = evaluate(
        ModelSpec(num_hidden_layers=6, **TINY), ClusterSpec(hardware=load_hardware("h100"), num_gpus=2),
        TrainingSpec(seq_length=32, global_batch_size=8), Parallelism(pp=2), runtime="torch-eager",
    )  # fmt: skip
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan.to_json()))
    return str(path)


class Joined:
    """A rank among ranks that torchrun started, to which `fault` happens first, in a process that knows torch."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world_size: int,
        port: int,
        *arguments: str,
        fault: Any = None,
        **environment: str,
    ) -> None:
        self.outputs = [folder / f"{name}{rank}" for name in ("out", "err")]
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
        environment = {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in variables.items()}}
        self.process = process_context().Process(
            target=faulty_joined.rank, args=(arguments, environment, list(map(str, self.outputs)), fault)
        )
        self.process.start()

    def end(self) -> tuple[int, str, str]:
        """The exit code, stdout and stderr."""
        self.process.join(PATIENCE_S)
        assert self.process.exitcode is not None
        out, err = (path.read_text() if path.exists() else "" for path in self.outputs)
        return self.process.exitcode, out, err


def joined(plan_file: str, *options: str, world_size: int = 2, faults: Sequence[Any] = (None, None)) -> list[Joined]:
    port, folder = free_port(), Path(plan_file).parent
    arguments = ("probe", plan_file, "--device", "cpu", "--steps", "1", "--json", *options)
    return [Joined(folder, rank, world_size, port, *arguments, fault=fault) for rank, fault in enumerate(faults)]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def free_port() -> int:
    """Below those that connections are given: one would have it before a rank that imports torch listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 30_000)))
        return int(free.getsockname()[1])


def test_ranks_that_torchrun_starts(plan_file: str) -> None:
    """The only test here with processes that import torch themselves."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "planner.cli", "probe", plan_file, "--device", "cpu", "--steps", "1", "--json"]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=HERE.parent.parent,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert probe_of(json.loads(outputs[0][0]), "stdout").agrees
    assert outputs[1][0] == ""


def test_a_port_in_use_and_a_rank_0_that_does_not_answer(plan_file: str, tmp_path: Path) -> None:
    arguments = ("probe", plan_file, "--device", "cpu", "--timeout", "1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ranks = [
            Joined(tmp_path, 0, 2, port, *arguments),
            Joined(tmp_path, 2, 3, port, *arguments, fault=faulty_joined.hasty),
        ]
        (code, _, in_use), (other_code, _, nobody) = [rank.end() for rank in ranks]
    assert (code, other_code) == (5, 5)
    assert f"port {port} is taken" in in_use
    assert "set MASTER_PORT" in in_use
    assert "Traceback" not in in_use
    assert f"nobody answers at 127.0.0.1:{port}" in nobody


def test_out_of_memory_is_a_result(plan_file: str) -> None:
    lost, failed = [rank.end() for rank in joined(plan_file, faults=[None, faulty_joined.out_of_memory])]
    assert (lost[0], failed[0]) == (5, 6)
    result = probe_of(json.loads(failed[1]), "stdout")
    assert (result.out_of_memory.stage, result.out_of_memory.asked_bytes) == (1, 5 * 2**29)
    assert result.predicted_bytes
    assert result.slice.verified == ()
    assert lost[1] == ""
    assert "asked for" not in lost[2]
    assert "rank 1" in lost[2], "which ran out of memory"
    assert not any("Traceback" in told for _, _, told in (lost, failed))


def test_a_traceback_is_shown_where_it_is_asked_for(plan_file: str) -> None:
    ended = [rank.end() for rank in joined(plan_file, "--debug", faults=[None, faulty_joined.raising])]
    assert [code for code, _, _ in ended] == [5, 5]
    assert "error: rank 1 (stage 1, dp 0, cp 0, tp 0) failed in step 0, at 1B1" in ended[1][2]
    for _, _, told in ended:
        assert "Traceback" in told
        assert "pipeline.py" in told


def test_a_rank_that_waits_names_the_one_that_stopped(plan_file: str) -> None:
    """The process of rank 1 stops while it builds; rank 0, which no launcher watches, waits for its channels."""
    waiting, stopped = joined(plan_file, "--timeout", "2.5", faults=[faulty_joined.impatient, faulty_joined.stopped])
    try:
        code, out, told = waiting.end()
    finally:
        stopped.process.kill()
        stopped.process.join(PATIENCE_S)
    assert (code, out) == (5, "")
    assert "error: rank 1 (stage 1, dp 0, cp 0, tp 0)" in told
    assert "has stopped" in told
    assert "pipeline.py" in told  # the stacks


DIFFERENT = TABLES["different"]
"""Options of rank 1 that rank 0 does not have, and what both say."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.thorough(1)) for name in DIFFERENT])
def test_ranks_that_disagree_say_so_at_once(name: str, plan_file: str, tmp_path: Path) -> None:
    options, said = DIFFERENT[name]
    port, arguments = free_port(), ("probe", plan_file, "--device", "cpu", "--steps", "1")
    ranks = [Joined(tmp_path, 0, 2, port, *arguments), Joined(tmp_path, 1, 2, port, *arguments, *options)]
    ended = [rank.end() for rank in ranks]
    assert [code for code, _, _ in ended] == [5, 5]
    for _, _, told in ended:
        assert said.format(host=os.uname().nodename) in told or ("error: --stage runs" in told and name == "stage")


def test_a_rank_that_is_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    hosted = tcp_store("localhost", free_port(), PATIENCE_S, is_host=True)
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": hosted.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    for port in (hosted.port, *(launch_joined.Bell(rank).server.getsockname()[1] for rank in (0, 1))):
        with pytest.raises(OSError, match="refused"):  # which listen there alone
            socket.create_connection(("127.0.0.2", port))
    dist.PrefixStore("attempt 0", hosted).set("world size", "2")
    launch_joined.meet(1, 2, PATIENCE_S)
    with pytest.raises(ProbeError, match="rank 1 was started twice"):
        launch_joined.meet(1, 2, PATIENCE_S)


def test_a_rank_that_is_missing(plan_file: str, tmp_path: Path) -> None:
    arguments = ("probe", plan_file, "--device", "cpu", "--steps", "1", "--timeout", "4")
    alone = Joined(tmp_path, 0, 2, free_port(), *arguments, fault=faulty_joined.hasty)
    assert "rank 1 of 2 has not come in" in alone.end()[2]


def test_a_rank_that_was_killed_is_named_by_the_other(plan_file: str) -> None:
    killed, left = joined(plan_file, faults=[faulty_joined.killed, None])
    code, _, told = left.end()
    assert killed.end()[0] == -signal.SIGKILL
    assert code == 5
    assert "rank 0 (stage 0, dp 0, cp 0, tp 0) on 127.0.0.1 is gone" in told


@pytest.mark.parametrize(("answers", "word"), TABLES["a_silent_rank_is_rung"])
def test_a_silent_rank_is_rung(answers: str | None, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that runs answers; the kernel takes a call for one that is stopped; nobody does where it is gone."""
    monkeypatch.setattr(launch_joined, "RING_S", 0.3)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    if answers == "here":
        assert launch_joined.ring(launch_joined.Bell(0).address) == word
        return
    if answers == "nowhere":
        monkeypatch.setattr(socket, "create_connection", lambda *_: (_ for _ in ()).throw(OSError("no route")))
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        if answers is not None:
            port.listen()
        assert launch_joined.ring(f"127.0.0.1|{port.getsockname()[1]}") == word


@pytest.mark.parametrize(("nodes", "host"), TABLES["first_host_of_slurm"])
def test_first_host_of_slurm(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


SLURM = {"SLURM_STEP_NODELIST": "n[3-4]", "SLURM_JOB_ID": "5"}
STARTED: dict[str, tuple[dict[str, str], list[str] | None]] = TABLES["started"]
"""The variables that a starter sets, and those of torchrun that they become."""
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI_", "MPI_"))]:
        monkeypatch.delenv(name)
    for name in NAMES:
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize("starter", STARTED)
def test_what_others_than_torchrun_start_is_one_of_several(starter: str, unset: pytest.MonkeyPatch) -> None:
    variables, become = STARTED[starter]
    for name, value in variables.items():
        unset.setenv(name, value)
    assert joins_others() == (become is not None)
    assert [os.environ.get(name) for name in NAMES] == (become or [None] * 5)


@pytest.mark.parametrize("variables", TABLES["variables_that_no_rank_can_have_are_named"])
def test_variables_that_no_rank_can_have_are_named(variables: dict[str, str], unset: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        unset.setenv(name, value)
    with pytest.raises(SpecError, match=r"RANK=x|WORLD_SIZE=x|RANK=2: the ranks are 0 to 1|MASTER_ADDR"):
        joins_others()
