"""`plan profile` and `plan doctor`: this machine measured into a hardware profile, and what it has of what we need."""

from __future__ import annotations

import datetime
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli import options as o
from planner.cli.options import Number, Word

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.answer import Plan
    from planner.probe.run import Device
    from planner.profile.doctor import Extra, Findings, Package
    from planner.profile.measurements import MeasurementRecord, Profiled
    from planner.specs.hardware import Efficiency

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
    from planner.cli.output import dumps, show
    from planner.distribution import install_line
    from planner.errors import ProbeError, SpecError
    from planner.files import STDOUT, refuse_to_overwrite, write_text
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
        sys.stdout.write(dumps(profiled.hardware.model_dump(mode="json")))
    else:
        show(*_render(profiled, sure, output, None if plan is None else read_plan(plan)))


def _device(name: str | None) -> Device:
    from planner.errors import SpecError
    from planner.probe.torch_build import default_device

    if name not in (None, "cpu", "cuda"):
        raise SpecError(f"--device: {name!r} is unknown", "cpu or cuda")
    return name or default_device()  # type: ignore[return-value]


def _measured(kind: Device, quick: bool, budget_s: float | None, output: str, ranks: object) -> MeasurementRecord:
    from planner.cli.output import progress
    from planner.files import STDOUT
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
    from planner.errors import ProbeError
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


def _render(profiled: Profiled, sure: str, output: str, plan: Plan | None = None) -> list[RenderableType]:
    from rich.text import Text

    from planner.report.format import digits, gibibytes
    from planner.report.pieces import bullets, headed, section

    hardware, efficiency = profiled.hardware, profiled.hardware.efficiency
    table = headed(("", "rows", "median", "p90", "worst"), "lrrrr")
    for label, left in profiled.residuals:
        table.add_row(label, str(left.num_rows), f"{left.median:.1f}%", f"{left.p90:.1f}%", f"{left.worst:.1f}%")
    peak, gemm = hardware.peak_flops("bf16") or 0.0, efficiency.gemm
    forward, dgrad, wgrad = (
        f"{min(share, gemm.wave_fraction):.0%}"
        for share in (gemm.forward_fraction, gemm.dgrad_fraction, gemm.wgrad_fraction)
    )
    facts = [
        f"{gibibytes(hardware.memory_bytes)} GiB, {digits(peak / 1e12)} TFLOP/s in bf16, "
        f"{digits(hardware.hbm_gb_per_s)} GB/s of memory",
        f"large products reach {forward} of the peak forward, {dgrad} and {wgrad} backward; in whole stages "
        f"{efficiency.sustained_fraction:.0%} and {efficiency.backward_sustained_fraction:.0%} of that",
        f"a kernel takes {digits(efficiency.launch_us * efficiency.launch_factor)} µs to start and end"
        + (f", the host {digits(efficiency.host_us)} µs to issue it" if efficiency.host_us else ""),
        *(
            f"{tier.name}: {digits(tier.gb_per_s * tier.efficiency_fraction)} GB/s, {digits(tier.latency_us)} µs. "
            f"{tier.source}"
            for tier in hardware.tiers
        ),
        *([f"of what was timed, {sure}"] if sure else []),
    ]
    return [
        Text(f"{hardware.name}: {efficiency.source}", style="bold"),
        section("This machine", bullets(facts)),
        section("What the fit leaves of each table", table),
        section("What follows", bullets(_follows(profiled, plan, output))),
    ]


def _follows(profiled: Profiled, plan: Plan | None, output: str) -> Iterator[str]:
    """Lines on whether the machine is as its shipped profile says, what is other, and a plan with these numbers."""
    from planner.cli.probe_report import plan_in_words, priced_again

    known, own = profiled.known, profiled.hardware.efficiency
    rows = [] if known is None else differences(known.efficiency, own)
    if known is None:
        yield "no profile of this device ships: all of its numbers are new"
    elif not rows:
        yield f"agrees with {known.name}: no share of its data sheet is off by over {AGREES_FRACTION:.0%}"
    else:
        yield f"differs from {known.name}, which ships: {', '.join(rows)}"
    if plan is not None:
        now = priced_again(plan.model_copy(update={"cluster": plan.cluster.changed(hardware=profiled.hardware)}))
        yield f"the plan is now {plan_in_words(now)}; it was {plan_in_words(plan)}"
    yield f"wrote {output}: plan --model 8b --gpus 8 --hardware {output}"


AGREES_FRACTION = 0.05
"""The most by which a measured share of a data sheet differs from the shipped one where both agree."""


def differences(shipped: Efficiency, measured: Efficiency) -> list[str]:
    """The shares of the data sheet that differ, with the shipped number and the measured one."""
    pairs = {
        "products forward": (shipped.gemm.forward_fraction, measured.gemm.forward_fraction),
        "products backward": (shipped.gemm.dgrad_fraction, measured.gemm.dgrad_fraction),
        "attention forward": (shipped.attention.forward_fraction, measured.attention.forward_fraction),
        "attention backward": (shipped.attention.backward_fraction, measured.attention.backward_fraction),
        "memory": (shipped.stream_fraction, measured.stream_fraction),
        "whole stages forward": (shipped.sustained_fraction, measured.sustained_fraction),
        "whole stages backward": (shipped.backward_sustained_fraction, measured.backward_sustained_fraction),
    }
    return [
        f"{name} {before:.0%} → {now:.0%}"
        for name, (before, now) in pairs.items()
        if abs(now / before - 1) > AGREES_FRACTION
    ]


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
    from planner.cli.output import dumps, show
    from planner.profile.doctor import examine

    findings = examine(o.DEFAULT_HARDWARE)
    if json:
        sys.stdout.write(dumps(findings.model_dump(mode="json") | {"troubles": findings.troubles}))
    else:
        show(*render(findings))
    if findings.troubles:
        raise _trouble(findings)


def _trouble(findings: Findings) -> Exception:
    """The error for a core that does not work; stdout has said all of it."""
    from planner.distribution import install_line
    from planner.errors import PlannerError, SolverError

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


def render(findings: Findings) -> Iterator[RenderableType]:
    """The screen: a title and one block a subject."""
    from rich.text import Text

    from planner.report.pieces import columns

    yield Text(findings.version, "bold")
    table = columns("lw")
    for head, text in _lines(findings):
        table.add_row(head, text)
    yield table
    yield Text()
    troubles = findings.troubles
    yield Text("The core works." if not troubles else f"It does not all work: {'; '.join(troubles)}", "bold")


def _lines(findings: Findings) -> Iterator[tuple[str, str]]:
    from planner.profile.doctor import EXTRAS

    yield "Python", f"{findings.python}, {findings.system}"
    yield "installed", f"as {findings.kind} in {findings.folder}"
    yield "depends on", ", ".join(map(_package, findings.packages))
    works = (f"{name} {trouble or 'solves a small program'}" for name, trouble in findings.solvers.items())
    yield "solver", f"{'; '.join(works)} (optional)"
    for extra in findings.extras:
        if extra.name in EXTRAS:
            yield f"[{extra.name}]", f"{EXTRAS[extra.name]}: {_extra(extra)}"
    yield "GPU", _gpus(findings)
    yield "torch", findings.torch or "not installed: plan probe and plan profile need it, plans do not"
    yield "profile", findings.profile
    yield "calibration", findings.calibration
    yield "history", f"{findings.num_runs} kept runs in {findings.history}"
    yield "temp", f"{findings.temp}, {findings.temp_trouble or 'writable'}"


def _extra(extra: Extra) -> str:
    """The versions of an extra, or what it lacks and the line that installs that."""
    lacks = [package for package in extra.packages if package.trouble]
    return f"{', '.join(map(_package, lacks))}: {extra.install}" if lacks else ", ".join(map(_package, extra.packages))


def _package(package: Package) -> str:
    if not package.version:
        return f"{package.name} missing"
    wrong = f" ({package.trouble}: {package.needs})" if package.trouble else ""
    return f"{package.name} {package.version}{wrong}"


def _gpus(findings: Findings) -> str:
    """Each kind of GPU with their number, or why none is found."""
    if not findings.gpus:
        return f"none found{f': {findings.gpu_trouble}' if findings.gpu_trouble else ''}; plans need none"
    words = [
        f"{gpu.name}{f', {gpu.memory_gib:.1f} GiB' if gpu.memory_gib is not None else ''}"
        f"{f', driver {gpu.driver}' if gpu.driver else ''}"
        for gpu in findings.gpus
    ]
    return "; ".join(f"{words.count(one)} × {one}" for one in dict.fromkeys(words))
