"""`python -m tools.gpu_check`: check the GPU of this machine and write the page (docs/GPU_CHECK.md)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from planner.distribution import install_line
from planner.errors import PlannerError, SpecError
from planner.files import refuse_to_overwrite, write_text
from planner.specs.registry import load_hardware
from tools import exit_code_of
from tools.gpu_check.report import REHEARSAL, GpuCheck, page

PAGE = "docs/GPU_CHECK.md"
INTERRUPTED = 130
BUDGET_S = 460.0
"""Seconds of a check: eight minutes with the start of Python and torch."""


class Missed(PlannerError):
    """The check ran, and a target is missed, or a part failed; the page says which."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message, "the page names each, and by how much")
        self.exit_code = exit_code


def main(arguments: Sequence[str]) -> None:
    """Check the GPU of this machine, or rehearse the check on the CPU."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.gpu_check", description="Check this machine's GPU against the planner, in eight minutes."
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cpu rehearses the check [cuda where torch sees one]")
    parser.add_argument("--hardware", metavar="NAME", help="hold stages against this profile [the GPU's own]")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="time for all parts [%(default)g]")
    parser.add_argument("--stages", type=int, metavar="N", help="run the first N stages only [all]")
    parser.add_argument("--after", type=int, default=0, metavar="N", help="only stages, without the first N")
    parser.add_argument("-o", "--output", default=PAGE, help="the page; numbers go beside it as .json [%(default)s]")
    parsed = parser.parse_args(arguments)
    numbers = str(Path(parsed.output).with_suffix(".json"))
    for path in (parsed.output, numbers):
        refuse_to_overwrite(path, force=True)
    try:
        from planner.probe.torch_build import default_device
        from tools.gpu_check.cases import CASES
        from tools.gpu_check.check import Check
    except ModuleNotFoundError as error:
        raise PlannerError(f"the check needs {error.name}", install_line("probe")) from None
    device = parsed.device or default_device()
    keep_real_page(parsed.output, device)

    def save(report: GpuCheck) -> None:
        write_text(numbers, report.model_dump_json(indent=1) + "\n", force=True)
        write_text(parsed.output, page(report), force=True)
        part = report.parts[-1]
        print(
            f"{report.elapsed_s:5.0f} s  {part.status:8} {part.name}  {part.detail[:200]}", file=sys.stderr, flush=True
        )

    hardware = None if parsed.hardware is None else load_hardware(parsed.hardware)
    cases = CASES[parsed.after : parsed.stages]
    report = Check(device, parsed.seconds, save, hardware, cases, only_stages=parsed.after > 0).run()
    print(page(report))
    if report.exit_code:
        raise Missed(f"{parsed.output}: {said(report)}", report.exit_code)


def said(report: GpuCheck) -> str:
    """The reason why the exit code is not 0."""
    missed = [target.name for target in report.targets() if target.passed is False]
    failed = [part.name for part in report.parts if part.status == "failed"]
    return "; ".join(
        [*(f"target missed: {name}" for name in missed), *(f"failed: {name}" for name in failed)] or ["no stage ran"]
    )


def keep_real_page(path: str, device: str) -> None:
    """Raise SpecError where a rehearsal would replace the page of a real GPU."""
    if device == "cpu" and Path(path).is_file() and not Path(path).read_text(encoding="utf-8").startswith(REHEARSAL):
        raise SpecError(f"{path}: is the page of a GPU, which a rehearsal does not replace", "-o REHEARSAL.md")


if __name__ == "__main__":
    try:
        code = exit_code_of(main)
    except KeyboardInterrupt:
        code = INTERRUPTED
        print("interrupted: the page has all parts that had ended", file=sys.stderr)
    sys.exit(code)
