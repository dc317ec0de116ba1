"""The state of a GPU while it is measured: clocks, power, temperature, who else is on it, as its driver tells.

NVIDIA's driver is asked through nvidia-smi. A GPU that it does not know, and AMD's, have an empty state.
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from planner.specs.base import Fields, Spec, Texts

SYS, PROC = Path("/sys"), Path("/proc")
MOST_S = 20.0
"""Seconds that nvidia-smi may take; without a persistence daemon it first loads the driver's state."""
UNDER_LOAD_AFTER_S = 0.3
"""Seconds after the start of a step in which the GPU works on it."""
BUSY_FRACTION, SETTLED_S = 0.05, 1.5
"""A GPU that was busier than this before anything ran is looked at again after so many seconds: a process that has just
ended shows in the last second's average."""
When = Literal["before", "within", "after"]
NVIDIA_FIELDS = {
    "clocks.sm": "clock_mhz",
    "clocks.max.sm": "max_clock_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.draw": "power_w",
    "enforced.power.limit": "power_limit_w",
    "power.default_limit": "default_power_limit_w",
    "temperature.gpu": "temperature_c",
    "utilization.gpu": "busy_fraction",
}
"""nvidia-smi's names of fields, and ours."""
NVIDIA_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""The bits of reasons, by their name since driver 535 and by their older one."""
REASONS = {
    0x002: "applications clocks setting",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clock setting",
}
"""NVML's bits (nvml.h, nvmlClocksEventReasons); 0x1 is idleness."""


class DeviceState(Spec):
    """The state of a GPU as its driver reports it; null where the driver does not say."""

    when: When
    """Before the steps, in the middle of computing, or after them."""
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    default_power_limit_w: float | None = None
    temperature_c: float | None = None
    busy_fraction: float | None = None
    """Share of about the last second in which any kernel ran on it."""
    throttle_reasons: Texts = ()
    """Reasons why clocks are lower than asked for, in the driver's words; idleness is none."""
    other_processes: Texts = ()
    """Processes on the GPU that are not of this run."""
    other_bytes: int | None = None
    """Memory that they hold."""


def nvidia_state(uuid: str) -> Fields:
    """The state of the GPU with this id, as nvidia-smi reports it."""
    chosen = f"--id={uuid if uuid.startswith(('GPU-', 'MIG-')) else f'GPU-{uuid}'}"
    for reasons in NVIDIA_REASONS:
        rows = nvidia_rows(chosen, f"--query-gpu={','.join((*NVIDIA_FIELDS, reasons))}")
        if rows is None:  # a driver that does not answer is not asked again
            return {}
        for values in rows:
            if len(values) == len(NVIDIA_FIELDS) + 1:  # else an error about a name that this driver does not know
                processes = nvidia_rows(chosen, "--query-compute-apps=pid,process_name,used_gpu_memory") or []
                return _nvidia_fields(values) | _others(
                    [(row[0], ",".join(row[1:-1]), _number(row[-1])) for row in processes if row[0].isdigit()]
                )
    return {}


def nvidia_driver() -> str:
    """The version of NVIDIA's driver; empty where it does not say."""
    rows = nvidia_rows("--query-gpu=driver_version")
    return rows[0][0] if rows else ""


def nvidia_rows(*asked: str) -> list[list[str]] | None:
    """The rows that nvidia-smi prints; None where there is no such tool, or no answer in time."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, *asked, "--format=csv,noheader,nounits"]
    try:  # names of processes may be in any encoding
        ran = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=MOST_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [[cell.strip() for cell in row] for row in csv.reader(ran.stdout.splitlines()) if row]


def _nvidia_fields(values: list[str]) -> Fields:
    state: Fields = dict(zip(NVIDIA_FIELDS.values(), map(_number, values), strict=False))
    busy_percent = state["busy_fraction"]
    state["busy_fraction"] = None if busy_percent is None else busy_percent / 100
    return {**state, "throttle_reasons": tuple(_reasons(values[-1]))}


def _number(text: str) -> float | None:
    """A number of nvidia-smi, which writes [N/A] or [Not Supported] where it has none."""
    try:
        return float(text)
    except ValueError:
        return None


def _reasons(bits: str) -> Iterator[str]:
    with suppress(ValueError):
        active = int(bits, 16)
        yield from (reason for bit, reason in REASONS.items() if active & bit)


def amd_driver() -> str:
    """The version of AMD's driver; empty for the one that comes with the kernel, which has none of its own."""
    return _text(SYS / "module/amdgpu/version")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _others(processes: list[tuple[str, str, float | None]]) -> Fields:
    """The processes on a GPU (number, name, MiB) that are not of this run: neither this one, nor the one that started
    it, nor another that the same one has started.

    In a container the driver may give numbers of the host. Where this process computes and is not listed, nobody can be
    told from it.
    """
    launcher = multiprocessing.parent_process()
    own = {os.getpid(), os.getppid(), *(() if launcher is None else (launcher.pid,))}
    is_rank = launcher is not None or "RANK" in os.environ  # else a shell has started it, and perhaps another job
    siblings_of = str(os.getppid()) if is_rank else ""
    others = [row for row in processes if int(row[0]) not in own and _parent(row[0]) != siblings_of]
    held = [mib for _, _, mib in others if mib is not None]
    return {
        "other_processes": tuple(f"{Path(name).name or 'process'} ({pid})" for pid, name, _ in others),
        "other_bytes": round(sum(held) * 2**20) if held else None,
        "lists_this": any(int(pid) == os.getpid() for pid, _, _ in processes),
        "lists_run": len(others) < len(processes),
    }


def _parent(pid: str) -> str:
    """The number of a process's parent."""
    status = dict(line.split(":", 1) for line in _text(PROC / pid / "status").splitlines() if ":" in line)
    return status.get("PPid", "none").strip()


def state_of(fields: Fields, when: When) -> DeviceState:
    """The state that a driver's answer describes; `lists_this` of this process, `lists_run` of any of this run."""
    if when != "before" and not fields.get("lists_this"):
        fields = fields | {"other_processes": (), "other_bytes": None}
    if when == "before" and fields.get("lists_run") and not fields.get("other_processes"):
        fields = fields | {"busy_fraction": None}  # by ranks that share it
    return DeviceState(when=when, **{name: value for name, value in fields.items() if not name.startswith("lists_")})


class Monitor:
    """Looks at one GPU before, within and after a run."""

    def __init__(self, ask: Callable[[], Fields] | None = None) -> None:
        """`ask` gives the driver's answer, and nothing where the driver does not say."""
        self.ask, self.states = ask, list[DeviceState]()
        self._under_load: threading.Thread | None = None

    def before(self) -> None:
        """Look at the GPU on which this run has not begun to compute."""
        fields = self.ask() if self.ask else {}
        if self.ask and (fields.get("busy_fraction") or 0.0) > BUSY_FRACTION:
            time.sleep(SETTLED_S)
            fields = self.ask()
        self._keep(fields, "before")
        if not fields:
            self.ask = None

    def begin_load(self) -> None:
        """Look at the GPU soon, while it computes; the caller goes on."""
        if self.ask and self._under_load is None:
            self._under_load = threading.Thread(target=self._look_within, daemon=True)
            self._under_load.start()

    def _look_within(self) -> None:
        time.sleep(UNDER_LOAD_AFTER_S)
        self._keep(self.ask() if self.ask else {}, "within")

    def after(self) -> None:
        """Look at the GPU that has just computed."""
        if self._under_load is not None:
            self._under_load.join(2 * MOST_S)
        if self.ask:
            self._keep(self.ask(), "after")

    def _keep(self, fields: Fields, when: When) -> None:
        if fields:
            self.states.append(state_of(fields, when))
