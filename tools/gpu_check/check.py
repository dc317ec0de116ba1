"""The check of a GPU: all parts in order of their value until the time is up, written down after each of them."""

from __future__ import annotations

import datetime
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from planner.distribution import __version__
from planner.errors import ProbeError, SpecError
from planner.probe.result import ProbeResult
from planner.probe.run import Device
from planner.probe.run_price import in_eager_torch
from planner.probe.torch_build import require_gpu
from planner.profile.measurements import known_profile
from planner.profile.probe_calibration import from_probe
from planner.search.case import Deadline
from planner.specs.hardware import HardwareSpec
from tools.gpu_check import parts
from tools.gpu_check.cases import CASES, SMALL_HIDDEN_SIZE, SMALL_SEQ_LENGTH, TABLES_OF, StageCase
from tools.gpu_check.report import GpuCheck, Part, PartKind

PROFILE_SHARE, MOST_PROFILE_S = 0.3, 180.0
"""Largest share of a check's time for `plan profile`, and its largest number of seconds."""
START_S, LEAST_START_S = 12.0, 5.0
"""Seconds that a stage takes beside its steps until the one before has shown it, and the least that are allowed for:
processes, CUDA, weights."""
STEPS = 6
"""Steps that a stage is expected to take, warm-ups included, beside those until its medians are sure."""
PATIENCE = 4.0
"""A part may take so many times the seconds that were expected of it."""
SHIPPED, MEASURED, CALIBRATED, TABLES = "shipped profile", "profile measured here", "calibrated here", "H200's tables"
"""The sources of predictions."""
IN_SMALL = f"A CPU, with stages in small (hidden size {SMALL_HIDDEN_SIZE}, sequences of {SMALL_SEQ_LENGTH} tokens),"


class Check:
    """One check of one device."""

    def __init__(
        self,
        device: Device,
        budget_s: float,
        save: Callable[[GpuCheck], None],
        hardware: HardwareSpec | None = None,
        cases: Sequence[StageCase] = CASES,
        stand_in: str | None = None,
        only_stages: bool = False,
    ) -> None:
        """`save` is called after every part. `hardware`: a profile in place of the one that ships for this GPU.
        `stand_in` names what takes a GPU's place; a CPU is one by itself. `only_stages`: neither profile nor pipeline,
        which a check before this one ran."""
        self.only_stages = only_stages
        self.device, self.deadline, self.save, self.cases = device, Deadline(budget_s), save, cases
        self.small, self.start_s = device == "cpu", START_S
        require_gpu(device)
        self.machine = parts.machine_here(device)
        known = hardware or known_profile(self.machine)
        self.sources: dict[str, HardwareSpec] = {} if known is None else {SHIPPED: known}
        has_tables = not self.small and TABLES_OF in self.machine.name.lower()
        self.tables = TABLES if has_tables else None
        self.report = GpuCheck(
            date=datetime.date.today().isoformat(),
            stand_in=stand_in or (IN_SMALL if self.small else None),
            device=self.machine.name,
            memory_bytes=self.machine.memory_bytes,
            num_devices=self.machine.num_devices,
            software=self.machine.software,
            commit=version(),
            budget_s=budget_s,
        )

    def run(self) -> GpuCheck:
        """Run all parts. Raises ProbeError if there is no profile that a stage could be predicted with."""
        if not self.only_stages:
            self.profile()
        if not self.sources:
            why = "".join(f": {part.detail}" for part in self.report.parts)
            raise ProbeError(
                f"no profile ships for {self.machine.name}, and none was measured{why}",
                "name the profile of a GPU like it: --hardware h100",
            )
        basis = next(iter(self.sources))
        self.report = self.report.model_copy(update={"basis": basis, "hardware": self.sources[basis].name})
        for number, case in enumerate(self.cases):
            self.stage(case)
            if number == 0 and not self.only_stages:
                self.pipeline()
        return self.report

    def add(self, part: Part) -> None:
        """Keep a part and write the report."""
        elapsed_s = round(self.deadline.limit_s - self.deadline.left_s, 1)
        self.report = self.report.model_copy(update={"parts": (*self.report.parts, part), "elapsed_s": elapsed_s})
        self.save(self.report)

    def within_time(self, kind: PartKind, name: str, needed_s: float, run: Callable[[], Part]) -> Part:
        """Run a part if the time that is left is enough for it."""
        left_s, patience_s = self.deadline.left_s, PATIENCE * needed_s
        if needed_s > left_s:
            part = parts.left_out(kind, name, f"no time: about {needed_s:.0f} s, {max(0.0, left_s):.0f} s are left")
        elif patience_s > left_s:  # the check's time is up before the part's
            part = parts.part_of(kind, name, left_s, run, late="left out")
        else:
            part = parts.part_of(kind, name, patience_s, run)
        self.add(part)
        return part

    def profile(self) -> None:
        """`plan profile`, whose result is a source of predictions."""
        limit_s = min(MOST_PROFILE_S, PROFILE_SHARE * self.deadline.limit_s)
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            path = Path(folder, "profile.yaml")

            def run() -> Part:
                part = parts.profile_part(self.device, path, limit_s)
                if part.status == "ran":
                    self.sources[MEASURED] = parts.read_profile(path)
                return part

            self.within_time("profile", "plan profile", limit_s, run)

    def stage(self, case: StageCase) -> None:
        """One stage. The first one that runs also gives a calibration."""
        basis = self.sources[self.report.basis]
        try:
            reason = parts.refusal(case, basis, self.device, self.machine.memory_bytes, self.small)
            steps_s = parts.STEPS_S + STEPS * step_s(case, basis, self.small)
        except Exception as error:  # no reason to lose the other parts
            self.add(parts.failed("stage", case.name, error))
            return
        if reason:
            self.add(parts.left_out("stage", case.name, reason))
            return
        results: list[ProbeResult] = []

        def run() -> Part:
            results.append(parts.stage_result(case, basis, self.device, self.small))
            return parts.stage_part(case, results[0], self.sources, self.tables, self.small)

        part = self.within_time("stage", case.name, self.start_s + steps_s, run)
        if part.status == "ran":
            self.start_s = max(LEAST_START_S, part.seconds - steps_s)
        has_tried = any(other.kind == "calibration" for other in self.report.parts)
        if part.quantities and not has_tried:
            self.calibrate(results[0], basis, case)

    def calibrate(self, result: ProbeResult, basis: HardwareSpec, case: StageCase) -> None:
        """Correct the judged profile by the first stage; later stages show what that is worth. A calibration that is
        refused corrects nothing."""
        part = Part(kind="calibration", name="calibration", status="ran", exit_code=0, detail=f"by {case.name}")

        def run() -> Part:
            cluster = case.plan(basis, self.small).cluster
            try:
                calibration = from_probe(result, cluster, "the first stage")
            except SpecError as error:
                return part.model_copy(update={"exit_code": error.exit_code, "lines": (error.message, error.hint)})
            self.sources[CALIBRATED] = calibration.of_hardware(basis)
            corrections = calibration.corrections(basis, cluster.tiers)
            return part.model_copy(update={"lines": tuple(f"{each.name}: {each.says}" for each in corrections)})

        self.add(parts.part_of("calibration", "calibration", 60.0, run))

    def pipeline(self) -> None:
        """Two stages at once."""
        basis, name = self.sources[self.report.basis], "a 1F1B pipeline of two stages"
        needed_s = 2 * self.start_s + 20.0

        def run() -> Part:
            return parts.pipeline_part(basis, self.report.basis, self.device, self.machine.num_devices)

        self.within_time("pipeline", name, needed_s, run)


def step_s(case: StageCase, hardware: HardwareSpec, small: bool) -> float:
    """Seconds of one step of a stage alone, as planned."""
    plan = in_eager_torch(case.plan(hardware, small), alone=True)
    stage = plan.stages[case.stage]
    return plan.parallelism.num_microbatches * (stage.forward_s + stage.backward_s) + stage.optimizer_s


def version() -> str:
    """The planner's version, and the commit where it runs from a checkout."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return __version__
    return f"{__version__} ({done.stdout.strip()})" if done.returncode == 0 else __version__
