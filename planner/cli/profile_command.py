"""`plan profile` and `plan doctor`: this machine measured into a hardware profile, and what it has of what we need."""

from __future__ import annotations

import datetime
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli import options as o
from planner.cli.options import Number, Word
from planner.cli.output import progress, tell
from planner.distribution import install_line
from planner.errors import PlannerError, ProbeError, SolverError, SpecError
from planner.files import STDOUT, refuse_to_overwrite, write_text

if TYPE_CHECKING:
    from planner.probe.run import Device
    from planner.profile.doctor import Findings
    from planner.profile.measurements import MeasurementRecord, Profiled

_log = logging.getLogger(__name__)


def profile_command(
    device: Word = None,
    quick: bool = False,
    budget: Number = None,
    plan: Word = None,
    output: str = "profile.yaml",
    force: bool = False,
    json: bool = False,
) -> None:
    """Measure this machine into a hardware profile that plan --hardware reads; eight minutes on a GPU.

    Matrix products, attention, memory-bound kernels, whole stages, and exchanges where there are several GPUs (here, or
    on all the nodes that torchrun starts it on). What was interrupted goes on where it stopped.

    \b
    Example:
      plan profile -o mine.yaml
      torchrun --nnodes 2 --nproc-per-node 8 -m planner.cli profile
    """
    from planner.plan_file import read_plan

    try:
        from planner.profile.measure import WAIT_S, Ranks, exchange_rows
    except ModuleNotFoundError as error:
        raise ProbeError(f"measuring needs {error.name}", install_line("probe")) from None
    from planner.profile.measurements import profile_of, shapes_to_measure

    if budget is not None and not budget > 0:
        raise SpecError(f"--budget {budget:g}: must be positive", "seconds for all kernels, such as 120")
    kind, ranks = _device(device), Ranks.of_torchrun()
    if ranks is not None and ranks.rank:  # the first rank measures, writes and tells
        shapes, wait_s = shapes_to_measure(kind, quick), WAIT_S + (budget or 0.0)
        exchange_rows(kind, ranks, shapes.exchanged_bytes, shapes.steady_s, wait_s=wait_s)
        return
    refuse_to_overwrite(output, force)
    record = _measured(kind, quick, budget, output, ranks)
    profiled = profile_of(record)
    sure = record.how_sure()
    write_text(output, _yaml(profiled, sure), force)
    record.discard()
    if output == STDOUT:
        return
    if json:
        tell(profiled.hardware.model_dump(mode="json"))
    else:
        from planner.report.machines import render_profile

        tell(render_profile(profiled, sure, output, None if plan is None else read_plan(plan)))


def _device(name: str | None) -> Device:
    from planner.probe.torch_build import default_device

    if name not in (None, "cpu", "cuda"):
        raise SpecError(f"--device: {name!r} is unknown", "cpu or cuda")
    return name or default_device()  # type: ignore[return-value]


def _measured(kind: Device, quick: bool, budget_s: float | None, output: str, ranks: object) -> MeasurementRecord:
    from planner.profile.measure import machine_of, measure, monitor_of, tasks
    from planner.profile.measurements import MeasurementRecord, shapes_to_measure, sidecar

    monitor = monitor_of(kind)  # before anything of this process is on the GPU
    path: Path | None = None if output == STDOUT else sidecar(output, quick)
    record = MeasurementRecord(machine_of(kind), quick, datetime.date.today().isoformat(), path)
    if record.num_kept:
        _log.info("%s: %d measurements of an earlier run are kept", path, record.num_kept)
    todo = tasks(kind, shapes_to_measure(kind, quick), budget_s)
    with progress("measuring", len(todo)) as done:
        for line in measure(record, todo, done, monitor):
            _log.info("left out: %s", line)
    _exchange(record, kind, quick, ranks)
    for condition in record.measured.conditions:
        _log.warning("%s: the profile is of such a GPU", condition)
    return record


def _exchange(record: MeasurementRecord, kind: Device, quick: bool, ranks: object) -> None:
    """Exchanges: among the ranks that torchrun started, else among processes started here, once."""
    from planner.profile.measure import Ranks, exchange_rows, num_processes, spawned_rows
    from planner.profile.measurements import shapes_to_measure

    shapes, tables = shapes_to_measure(kind, quick), record.measured.tables
    sizes, size = shapes.exchanged_bytes, num_processes(kind, record.measured.machine.num_devices)
    try:
        if isinstance(ranks, Ranks):
            tables["exchange"] = exchange_rows(kind, ranks, sizes, shapes.steady_s)
        elif not tables.get("exchange"):
            tables["exchange"] = spawned_rows(kind, size, sizes, steady_s=shapes.steady_s)
    except ProbeError as error:
        _log.warning("links are not measured: %s", error.message)
    record.save()


def _yaml(profiled: Profiled, sure: str) -> str:
    """YAML that --hardware reads; comments tell what the fit leaves unexplained."""
    import yaml

    data = profiled.hardware.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    lines = [*([f"# Of what was timed, {sure}."] if sure else []), "# Predicted less measured, of each table:"]
    lines += [f"# {label:24} {left}" for label, left in profiled.residuals]
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
    return "\n".join([*lines, text])


SOLVERS = ("highspy", "pulp")
"""The packages that solve integer programs."""


def doctor_command(json: bool = False) -> None:
    """Say what is installed, and what commands lack here: one screen to paste into an issue.

    GPUs are found by their driver's tools and torch by its files, so that nothing slow is imported. Names of users and
    machines are left out. Ends with 1 where the planner lacks something that it depends on, with 4 where the solver
    does not work.

    \b
    Example:
      plan doctor
      plan doctor --json
    """
    from planner.profile.doctor import examine

    findings = examine(o.DEFAULT_HARDWARE)
    if json:
        tell(findings.model_dump(mode="json") | {"troubles": findings.troubles})
    else:
        from planner.report.machines import render_findings

        tell(render_findings(findings))
    if findings.troubles:
        raise _trouble(findings)


def _trouble(findings: Findings) -> Exception:
    """The error for a core that does not work; stdout has said all of it."""
    broken, packages = bool(findings.solvers["HiGHS"]), findings.packages
    if any(package.trouble for package in packages):
        hint = f"{install_line()} brings what is missing"
    elif broken:
        again = " ".join(f"'{package.name}{package.needs}'" for package in packages if package.name in SOLVERS)
        hint = f"pip install --force-reinstall --no-deps {again}"
    else:
        hint = "set TMPDIR to a folder that can be written"
    error = (SolverError if broken else PlannerError)("; ".join(findings.troubles), hint)
    error.follows_answer = True
    return error
