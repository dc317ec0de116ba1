"""The state of GPUs: what drivers say is read, and who else is on a GPU is told from this run."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from fake_gpus import H200, Neighbours, fake_gpu  # noqa: E402

from planner.probe import torch_build as device_state  # noqa: E402
from planner.probe.evidence import conditions_of  # noqa: E402
from planner.probe.launch.process import StageWorker  # noqa: E402
from planner.probe.rank.groups import results_in  # noqa: E402
from planner.probe.result import DeviceState  # noqa: E402
from planner.probe.torch_build import Monitor, nvidia_state, state_of  # noqa: E402

SMI = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
*--query-compute-apps*) printf '%s' "{apps}" ;;
*{unknown}*) echo 'Field "{unknown}" is not a valid field to query.'; exit 2 ;;
*--id=GPU-7*--query-gpu*) echo "{gpu}" ;;
*) echo "No devices were found"; exit 6 ;;
esac
"""
LOADED = "1455, 1980, 3201, 697.50, 700.00, 700.00, 64, 100, 0x0000000000000024"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts an nvidia-smi on the path that knows one GPU. Returns what it was asked."""

    def put(gpu: str = LOADED, apps: str = "", unknown: str = "clocks_no_reasons") -> Path:
        log, tool = tmp_path / "log", tmp_path / "nvidia-smi"
        tool.write_text(SMI.format(log=log, gpu=gpu, apps=apps, unknown=unknown))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
        return log

    return put


def test_nvidia_smi_is_read_field_by_field(smi: Any) -> None:
    log = smi()
    state = state_of(nvidia_state("7"), "within")
    assert (state.clock_mhz, state.max_clock_mhz, state.memory_clock_mhz) == (1455, 1980, 3201)
    assert (state.power_w, state.power_limit_w, state.default_power_limit_w) == (697.5, 700, 700)
    assert (state.temperature_c, state.busy_fraction) == (64, 1.0)
    assert state.throttle_reasons == ("software power cap", "software thermal slowdown")
    assert (state.other_processes, state.other_bytes) == ((), None)
    assert "--format=csv,noheader,nounits" in log.read_text()


def test_older_drivers_have_another_name_for_reasons(smi: Any) -> None:
    log = smi(unknown="clocks_event_reasons")
    assert nvidia_state("GPU-7")["clock_mhz"] == 1455
    assert len(log.read_text().splitlines()) == 3


@pytest.mark.parametrize("gpu", ["[N/A], [Not Supported], , [N/A], N/A, [N/A], [N/A], [N/A], [N/A]", "garbage", ""])
def test_what_a_driver_does_not_say_is_null(gpu: str, smi: Any) -> None:
    smi(gpu=gpu)
    assert state_of(nvidia_state("7"), "after") == DeviceState(when="after")
    assert nvidia_state("8") == {}, "no such GPU"


def test_without_a_tool_nothing_is_said_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(device_state, "time", None)
    monitor = Monitor(lambda: nvidia_state("7"))
    monitor.before()
    monitor.begin_load()
    monitor.after()
    assert monitor.states == []


def test_processes_of_this_run_are_no_others(smi: Any) -> None:
    own = f"{os.getpid()}, python3, 900\n{os.getppid()}, plan, 500\n"
    smi(apps=own + "1, /opt/venv/bin/python3, 41500\n2, Xorg, [N/A]\n")
    state = state_of(nvidia_state("7"), "within")
    assert state.other_processes == ("python3 (1)", "Xorg (2)")
    assert state.other_bytes == 41500 * 2**20


def test_a_container_whose_numbers_are_the_hosts_names_nobody_while_it_computes(smi: Any) -> None:
    smi(apps="1, [Not Found], 41500\n")
    fields = nvidia_state("7")
    assert state_of(fields, "before").other_processes == ("[Not Found] (1)",), "this run is not on it yet"
    assert state_of(fields, "within").other_processes == ()


def test_a_job_of_the_same_shell_is_another_and_a_rank_of_the_same_torchrun_is_not(smi: Any, monkeypatch: Any) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        smi(apps=f"{other.pid}, sleep, [N/A]\n")
        monkeypatch.setattr("planner.probe.torch_build.os.getppid", os.getpid)  # the other one's parent is this process
        monkeypatch.delenv("RANK", raising=False)
        state = state_of(nvidia_state("7"), "before")
        assert (state.other_processes, state.other_bytes) == ((f"sleep ({other.pid})",), None)
        monkeypatch.setenv("RANK", "0")
        assert state_of(nvidia_state("7"), "before").other_processes == ()
        other.kill()


def test_ranks_that_share_a_gpu_do_not_keep_it_busy_for_each_other(smi: Any) -> None:
    smi(apps=f"{os.getppid()}, python3, 900\n")
    assert state_of(nvidia_state("7"), "before").busy_fraction is None
    assert state_of(nvidia_state("7"), "within").busy_fraction == 1.0
    smi(apps=f"{os.getppid()}, python3, 900\n1, python3, 900\n")
    assert state_of(nvidia_state("7"), "before").busy_fraction == 1.0


def test_a_driver_that_does_not_answer_is_asked_once(smi: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(command: Any, **_: Any) -> Any:
        asked.append(command)
        raise subprocess.TimeoutExpired(command, 20)

    smi()
    monkeypatch.setattr("planner.probe.torch_build.subprocess.run", run)
    assert nvidia_state("7") == {}
    assert len(asked) == 1


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_a_gpu_that_has_just_been_freed_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(device_state, "time", SimpleNamespace(sleep=slept.append))
    busy = iter([{"busy_fraction": 0.6}, {"busy_fraction": 0.0}, {"busy_fraction": 1.0}, {"busy_fraction": 0.9}])
    monitor = Monitor(lambda: next(busy))
    monitor.before()
    monitor.begin_load()
    monitor.after()
    assert [(state.when, state.busy_fraction) for state in monitor.states] == [
        ("before", 0.0), ("within", 1.0), ("after", 0.9)
    ]  # fmt: skip
    assert slept == [device_state.SETTLED_S, device_state.UNDER_LOAD_AFTER_S]


def test_a_stage_on_a_gpu_is_measured_by_seconds_and_looked_at_three_times(
    smi: Any, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(("1f1b", 2, 1, 2), check=False, num_steps=3, warm_up_steps=2, dtype="bfloat16")
    run = run.model_copy(update={"device": "cuda", "steady_s": 4.0, "most_s": 8.0})
    for name in ("UNDER_LOAD_AFTER_S", "SETTLED_S"):
        monkeypatch.setattr(device_state, name, 0.0)
    with fake_gpu(replace(H200, uuid="7"), monkeypatch):
        smi()
        worker = StageWorker(run, 1, 0, Neighbours)
        worker.main()
    (rank,) = results_in(worker.store, [1])
    assert [(state.when, state.power_w) for state in rank.device_states] == [
        ("before", 697.5), ("within", 697.5), ("after", 697.5)
    ]  # fmt: skip
    assert sum(step.step_s for step in rank.steps) >= 4.0
    busy, hot = conditions_of([rank])
    assert ("busy before" in busy.text, "software thermal slowdown" in hot.text) == (True, True)
