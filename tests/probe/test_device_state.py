"""The state of GPUs: what drivers say is read, judged and told, and who else is on a GPU is told from this run."""

from __future__ import annotations

import io
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from probes import probe_result
from rich.console import Console

from planner.specs.registry import load_model

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from fake_gpus import H200, fake_gpu  # noqa: E402
from small_plans import plan_of  # noqa: E402

from planner.cli.probe_report import render  # noqa: E402
from planner.probe import device_state  # noqa: E402
from planner.probe.device_state import DeviceState, Monitor, amd_state, nvidia_state, state_of  # noqa: E402
from planner.probe.result import (  # noqa: E402
    ChunkSeconds,
    ComparedQuantity,
    ProbeResult,
    RankMemory,
    RankResult,
    TimedExchange,
)
from planner.probe.verdict.conditions import conditions_of  # noqa: E402
from planner.probe.worker.files import RESULT_FILE, RUN_FILE  # noqa: E402
from planner.probe.worker.stage_worker import StageWorker  # noqa: E402

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
    monkeypatch.setattr("planner.probe.device_state.subprocess.run", run)
    assert nvidia_state("7") == {}
    assert len(asked) == 1


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_amds_driver_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_state, "SYS", tmp_path)
    nodes, unique = tmp_path / "class/kfd/kfd/topology/nodes", 0x9D2B3C4D5E6F7081
    write(nodes / "0/properties", "unique_id 0")
    write(nodes / "3/properties", f"simd_count 1216\nunique_id {unique}\ndrm_render_minor 130")
    write(nodes / "3/gpu_id", 51322)
    device = tmp_path / "class/drm/renderD130/device"
    write(device / "pp_dpm_sclk", "0: 132Mhz *\n1: 2100Mhz")
    write(device / "gpu_busy_percent", 3)
    for name, value in {
        "freq1_input": 1_350_000_000, "freq2_input": 900_000_000, "power1_average": 741_000_000,
        "power1_cap": 650_000_000, "power1_cap_default": 750_000_000, "temp1_input": 52_000, "temp2_input": 71_000,
    }.items():  # fmt: skip
        write(device / "hwmon/hwmon4" / name, value)
    write(tmp_path / "class/kfd/kfd/proc/1/vram_51322", 3 * 2**30)
    write(tmp_path / "class/kfd/kfd/proc/2/vram_51322", 0)
    write(tmp_path / "class/kfd/kfd/proc/3/vram_999", 2**30)
    hip = f"{unique:016x}".encode().hex()
    uuid = "-".join((hip[:8], hip[8:12], hip[12:16], hip[16:20], hip[20:]))
    state = state_of(amd_state(uuid), "before")
    assert (state.clock_mhz, state.max_clock_mhz, state.memory_clock_mhz) == pytest.approx((1350, 2100, 900))
    assert (state.power_w, state.power_limit_w, state.default_power_limit_w) == pytest.approx((741, 650, 750))
    assert (state.temperature_c, state.busy_fraction) == pytest.approx((71, 0.03))
    assert state.other_bytes == 3 * 2**30
    assert [name.endswith(" (1)") for name in state.other_processes] == [True]
    assert amd_state("00000000-0000-0000-0000-000000000000") == amd_state("GPU-0") == {}


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


def rank(number: int = 0, spread: float = 0.001, **states: dict[str, Any]) -> RankResult:
    memory = RankMemory(static_bytes=1, peak_allocated_bytes=1, peak_reserved_bytes=1, device_used_bytes=1)
    chunk = ChunkSeconds(stage=number, forward_s=1.0, backward_s=2.0, spread_fraction=spread)
    return RankResult(
        rank=number, stage=number, dp=0, tp=0, torch_version="2.13", device_name="NVIDIA H200", num_parameters=1,
        steps=(), actions=(), chunks=(chunk,), peak_in_flight_chunks=1, memory=memory,
        device_states=tuple(DeviceState(when=when, **fields) for when, fields in states.items()),  # type: ignore[arg-type]
    )  # fmt: skip


HEALTHY: dict[str, Any] = {
    "clock_mhz": 1455, "max_clock_mhz": 1980, "power_w": 698, "power_limit_w": 700, "default_power_limit_w": 700,
    "temperature_c": 64, "throttle_reasons": ("software power cap",),
}  # fmt: skip


def test_a_gpu_at_its_power_limit_is_as_usual() -> None:
    assert conditions_of([rank(before={"busy_fraction": 0.02, "clock_mhz": 345}, within=HEALTHY, after=HEALTHY)]) == ()
    idle = {"clock_mhz": 345, "max_clock_mhz": 1980, "busy_fraction": 0.1}
    changing = {**HEALTHY, "throttle_reasons": ("hardware slowdown",)}
    assert conditions_of([rank(within=idle, after=changing)]) == (), "looked at too early"
    assert conditions_of([rank()]) == (), "nor is a driver that says nothing a condition"


@pytest.mark.parametrize(
    ("states", "words", "is_fault"),
    [
        ({"before": {"busy_fraction": 0.9}}, "was busy before the run: a process out of sight", True),
        (
            {"before": {"busy_fraction": 0.9, "other_processes": ("python3 (7)",), "other_bytes": 2**30}},
            "busy before the run: python3 (7), which held 1.0 GiB",
            True,
        ),
        ({"within": {"other_processes": ("python3 (7)",)}}, "was shared with python3 (7)", False),
        ({"before": {**HEALTHY, "power_limit_w": 500}}, "power limit is 500 W, 700 by default", False),
        (
            {"within": {**HEALTHY, "throttle_reasons": ("hardware thermal slowdown",)}},
            "lowered (64 °C): hardware",
            True,
        ),
        ({"after": {"throttle_reasons": ("hardware power brake",)}}, "because too little power", True),
        (
            {"within": {**HEALTHY, "power_w": 400, "throttle_reasons": ("applications clocks setting",)}},
            "clocks are set lower: 1455 of 1980 MHz under load",
            False,
        ),
        (
            {"within": {**HEALTHY, "power_w": 400, "throttle_reasons": (), "busy_fraction": 0.9}},
            "the driver gives no reason: 1455",
            False,
        ),
    ],
)
def test_unusual_conditions_are_named(states: Any, words: str, is_fault: bool) -> None:
    (condition,) = conditions_of([rank(**states)])
    assert words in condition.text
    assert condition.text.startswith("rank 0: ")
    assert condition.is_fault == is_fault


def test_a_line_names_all_ranks_of_which_it_is_true() -> None:
    capped = {**HEALTHY, "power_limit_w": 500}
    found = conditions_of([rank(0, within=capped, after=capped), rank(1, within=capped), rank(2), rank(3, spread=0.07)])
    assert [condition.text for condition in found] == [
        "ranks 0 to 1: the power limit is 500 W, 700 by default",
        "rank 3: the seconds of micro-batches are sure to 7% only",
    ]


def told(result: ProbeResult) -> str:
    """The report's text, on one line."""
    console = Console(width=400, file=io.StringIO())
    console.print(render(result))
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def test_a_report_says_how_gpus_were_and_what_a_contradiction_is_worth() -> None:
    plan = plan_of(load_model("8b"), 2, 8192, 8, pp=2)
    result = probe_result(plan, lambda stage: (1.0, 2.0), mode="stages")
    off = ComparedQuantity(name="forward", stage=0, unit="s", predicted=1.0, measured=2.0, agrees=False)
    exchange = TimedExchange(
        name="tp all-gather", size=2, num_bytes=2**20, seconds=1e-3, bus_gb_per_s=1.0, spread_fraction=0.04
    )
    hot = {**HEALTHY, "throttle_reasons": ("hardware thermal slowdown",)}
    capped = {**HEALTHY, "power_limit_w": 500, "power_w": 498}

    def report(comparison: ComparedQuantity, *states: dict[str, Any]) -> str:
        ranks = tuple(rank(number, within=state) for number, state in enumerate(states))
        ranks = (ranks[0].model_copy(update={"exchanges": (exchange,)}), *ranks[1:])
        run = result.run.model_copy(update={"device": "cuda"})
        changes = {"run": run, "ranks": ranks, "comparisons": (comparison,), "conditions": conditions_of(ranks)}
        return told(result.model_copy(update=changes))

    assert "GB/s on the bus, sure to 4.0% only" in report(off, HEALTHY)
    assert "under load, rank 0: 1455 of 1980 MHz, 698 of 700 W, 64 °C, software power cap" in report(off, HEALTHY)
    assert report(off, HEALTHY).endswith("the run contradicts the plan: forward of stage 0")
    assert "no evidence against the plan: rank 1: clocks were lowered (64 °C)" in report(off, HEALTHY, hot)
    assert "may differ by how the GPUs were: ranks 0 to 1: the power limit is 500 W" in report(off, capped, capped)
    agreed = report(off.model_copy(update={"agrees": True}), hot)
    assert "clocks were lowered" in agreed
    assert agreed.endswith("the run agrees with the plan")


def test_a_stage_on_a_gpu_is_measured_by_seconds_and_looked_at_three_times(
    smi: Any, make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(("1f1b", 2, 1, 2), check=False, num_steps=3, warm_up_steps=2, dtype="bfloat16")
    run = run.model_copy(update={"device": "cuda", "steady_s": 4.0, "most_s": 8.0})
    (tmp_path / RUN_FILE).write_text(run.model_dump_json())
    for name in ("UNDER_LOAD_AFTER_S", "SETTLED_S"):
        monkeypatch.setattr(device_state, name, 0.0)
    with fake_gpu(replace(H200, uuid="7"), monkeypatch):
        smi()
        StageWorker(tmp_path, 1, 0).main()
    rank = RankResult.model_validate_json((tmp_path / RESULT_FILE.format(1)).read_text())
    assert [(state.when, state.power_w) for state in rank.device_states] == [
        ("before", 697.5), ("within", 697.5), ("after", 697.5)
    ]  # fmt: skip
    assert sum(step.step_s for step in rank.steps) >= 4.0
    assert rank.chunks[0].weight_grad_s == pytest.approx(0.1)
    busy, hot = conditions_of([rank])
    assert ("busy before" in busy.text, "software thermal slowdown" in hot.text) == (True, True)
