"""The parts of a GPU check: the profile of the device, stages one by one, and a pipeline of two stages."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

from planner.answer import Plan
from planner.errors import PlannerError, ProbeError, defect
from planner.probe.compare import compare_stage
from planner.probe.evidence import load_in_words, seen_kernels
from planner.probe.launch.launcher import process_context
from planner.probe.model.attention import require_flash
from planner.probe.plan_runs import require_runnable
from planner.probe.probe import ProbeOptions, probe
from planner.probe.result import ComparedQuantity, ProbeResult, RankResult
from planner.probe.run import Device
from planner.probe.run_price import in_eager_torch
from planner.profile.measure import machine_of
from planner.profile.measurements import Machine
from planner.specs.hardware import HardwareSpec
from planner.specs.registry import load_hardware
from planner.specs.units import gib
from tools.gpu_check.cases import StageCase
from tools.gpu_check.report import BYTES, SECONDS, CheckedQuantity, Part, PartKind, PartStatus


class OutOfTime(KeyboardInterrupt):
    """A part took longer than it may. Whatever it started ends as it does at Ctrl-C."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the main thread after so many seconds."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    usual = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)


MACHINE_S, STOP_S = 120.0, 20.0
"""Seconds to ask the driver about the device, which starts torch; and for an interrupted command to end."""
BESIDE_KERNELS_S = 60.0
"""Seconds of a profile for whole stages, links and starts, which took 55 on an H100; kernels have the rest."""
STEPS_S = 4.0
"""The most seconds of a stage's measured steps, unless the fewest take longer."""
STILL_S = 60.0
"""Seconds without progress after which a rank counts as hanging."""
MISMATCH = 6
SHOWN = (*SECONDS, "optimizer", *BYTES)
"""Quantities of a stage that a check keeps."""
PIPELINE = StageCase("llama-3.2-1b", 8, 4096, pp=2, dp=1, microbatches=8)
"""A 1F1B pipeline of two stages that both fit on one small GPU."""


def machine_here(device: Device) -> Machine:
    """The device of this machine, described by a process of its own: no later part finds a context of this one."""
    with process_context().Pool(1) as pool:
        try:
            return pool.apply_async(machine_of, (device,)).get(MACHINE_S)
        except multiprocessing.TimeoutError:
            raise ProbeError(f"the GPU did not answer in {MACHINE_S:.0f} s", "nvidia-smi says more") from None


def part_of(kind: PartKind, name: str, limit_s: float, run: Callable[[], Part], late: PartStatus = "failed") -> Part:
    """Run one part within its time, after which it is `late`. Whatever goes wrong in it becomes its detail."""
    start = time.monotonic()
    try:
        with at_most(limit_s):
            part = run()
    except OutOfTime:
        part = Part(kind=kind, name=name, status=late, detail=f"did not end within {limit_s:.0f} s")
    except Exception as error:  # no reason to lose the other parts
        part = failed(kind, name, error)
    return part.model_copy(update={"seconds": round(time.monotonic() - start, 2)})


def failed(kind: PartKind, name: str, raised: Exception) -> Part:
    """A part that ended with an error, as its command would have; one that nobody foresaw is a defect."""
    error = raised if isinstance(raised, PlannerError) else defect(raised)
    return Part(kind=kind, name=name, status="failed", exit_code=error.exit_code, detail=error.message)


def left_out(kind: PartKind, name: str, why: str) -> Part:
    return Part(kind=kind, name=name, status="left out", detail=why)


def profile_part(device: Device, path: Path, limit_s: float) -> Part:
    """`plan profile` as a command of its own. On a CPU it measures a handful of tiny shapes."""
    command = [sys.executable, "-m", "planner.cli", "profile", "--device", device, "-o", str(path), "--force"]
    command += ["--quick"] if device == "cpu" else ["--budget", f"{max(1.0, limit_s - BESIDE_KERNELS_S):.0f}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, said = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise ProbeError(f"plan profile did not end within {limit_s:.0f} s") from None
        finally:
            stop(process)
    if process.returncode:
        last = (said.strip().splitlines() or ["it said nothing"])[0]
        detail = f"plan profile: {last}"
        return Part(kind="profile", name="plan profile", status="failed", exit_code=process.returncode, detail=detail)
    comments = [line.removeprefix("#") for line in path.read_text().splitlines() if line.startswith("# ")]
    lines = tuple(" ".join(line.split()) for line in comments if "median" in line)
    return Part(kind="profile", name="plan profile", status="ran", exit_code=0, lines=lines)


def stop(process: subprocess.Popen[str]) -> None:
    """End a command that still runs: as Ctrl-C does, and by force if that does not help."""
    for number, seconds in ((signal.SIGINT, STOP_S), (signal.SIGKILL, STOP_S)):
        if process.poll() is None:
            process.send_signal(number)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue


def read_profile(path: Path) -> HardwareSpec:
    return load_hardware(str(path))


def stage_result(case: StageCase, hardware: HardwareSpec, device: Device, small: bool) -> ProbeResult:
    """`plan probe --stage` of a case."""
    result = probe(case.plan(hardware, small), stage_options(case, device))
    assert result is not None, "a stage alone has no other ranks that report"
    return result


def stage_options(case: StageCase, device: Device) -> ProbeOptions:
    return ProbeOptions(device=device, stages=case.stage, timeout_s=STILL_S, budget_s=STEPS_S)


def stage_part(
    case: StageCase, result: ProbeResult, sources: Mapping[str, HardwareSpec], tables: str | None, small: bool
) -> Part:
    """A stage's measurements beside the prediction of every source; `tables` names the source that the shipped tables
    are, on the GPU that they are of."""
    out = result.out_of_memory
    detail = circumstances(result) if out is None else f"out of memory in {out.phase}"
    exit_code = 0 if result.agrees else MISMATCH
    part = Part(kind="stage", name=case.name, status="ran", exit_code=exit_code, detail=detail)
    if not result.ranks:
        return part
    predicted: dict[str, dict[str, float]] = {}
    rows: list[ComparedQuantity] = []
    for source, hardware in sources.items():
        rows = kept(compared_with(case.plan(hardware, small), case.stage, result.ranks))
        predicted[source] = {row.name: row.predicted for row in rows}
    if tables is not None:
        predicted[tables] = case.shipped()
    judged = {row.name for row in result.comparisons if row.agrees is not None}
    return part.model_copy(update={"quantities": tuple(checked(row, predicted, judged) for row in rows)})


def circumstances(result: ProbeResult) -> str:
    """The attention that ran, the GPU's clock, power and heat under load, and whatever was unusual."""
    kernels = [f"{kernel} attention" for rank in result.ranks for kernel in rank.attention_kernels]
    states = [state for rank in result.ranks for state in rank.device_states if state.when == "within"]
    unusual = [condition.text for condition in result.conditions]
    unusual += [f"WRONG: {check.name} ({check.detail})" for check in result.checks if not check.passed]
    return "; ".join(dict.fromkeys(filter(None, [*kernels, *map(load_in_words, states), *unusual])))


def compared_with(plan: Plan, stage: int, ranks: tuple[RankResult, ...]) -> list[ComparedQuantity]:
    """The measurements of a stage alone beside the plan's price of it in eager torch, with the attention that ran."""
    eager = in_eager_torch(plan, seen_kernels(ranks), alone=True)
    return compare_stage(eager, eager, stage, ranks, None, alone=True)


def kept(rows: Iterable[ComparedQuantity]) -> list[ComparedQuantity]:
    return [row for row in rows if row.name in SHOWN]


def checked(
    row: ComparedQuantity, predicted: Mapping[str, Mapping[str, float]], judged: Container[str]
) -> CheckedQuantity:
    by_source = {source: values[row.name] for source, values in predicted.items() if row.name in values}
    unit: Literal["s", "bytes"] = "bytes" if row.unit == "bytes" else "s"
    is_judged = row.name in judged
    return CheckedQuantity(name=row.name, unit=unit, measured=row.measured, is_judged=is_judged, predicted=by_source)


def pipeline_part(hardware: HardwareSpec, basis: str, device: Device, num_devices: int) -> Part:
    """A 1F1B pipeline of two stages on two GPUs. On a CPU in small."""
    if device == "cuda" and num_devices == 1:
        return left_out("pipeline", "a 1F1B pipeline of two stages", "one GPU: a pipeline needs two")
    options = ProbeOptions(device=device, timeout_s=STILL_S, num_processes=2)
    result = probe(PIPELINE.plan(hardware), options)
    assert result is not None, "this process starts all ranks"
    return _pipeline(result, "on two GPUs over NCCL" if device == "cuda" else "in two processes over gloo", basis)


def _pipeline(result: ProbeResult, way: str, basis: str) -> Part:
    wrong = [check.name for check in result.checks if not check.passed]
    proved = [check.name for check in result.checks if check.passed]
    says = [f"ran {way}: {result.slice.run}", f"proved {', '.join(proved)}"]
    says += [f"WRONG: {', '.join(wrong)}"] if wrong else []
    quantities = [
        CheckedQuantity(
            name=f"{row.name} of stage {row.stage}",
            unit="bytes",
            measured=row.measured,
            is_judged=False,
            predicted={basis: row.predicted},
        )
        for row in result.comparisons
        if row.name in BYTES
    ]
    return Part(
        kind="pipeline",
        name="a 1F1B pipeline of two stages",
        status="ran",
        exit_code=0 if result.agrees else MISMATCH,
        detail="; ".join(says),
        quantities=tuple(quantities),
    )


def refusal(case: StageCase, hardware: HardwareSpec, device: Device, memory_bytes: int, small: bool) -> str:
    """The reason why a stage does not run on this device or with this torch, or nothing."""
    plan = case.plan(hardware, small)
    try:
        require_runnable(plan, stage_options(case, device))
        require_flash(case.cp, device, "")
    except ProbeError as error:
        return f"refused: {error.message}"
    if small:
        return ""
    needed = in_eager_torch(plan).stages[case.stage].memory.total_bytes
    return f"needs {gib(needed):.1f} GiB of {gib(memory_bytes):.1f}" if needed > memory_bytes else ""
