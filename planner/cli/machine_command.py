"""`plan probe`, `rebalance`, `profile` and `doctor`: a run that can contradict a plan, and what this machine is."""

from __future__ import annotations

import datetime
import logging
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from planner.cli import options as o
from planner.cli.options import Number, Saving, Whole, Word
from planner.cli.output import dumps, needing, progress, refuse_files, save, show_and_save, tell
from planner.distribution import install_line
from planner.errors import PlannerError, ProbeError, ProbeMismatch, SolverError, SpecError
from planner.files import STDOUT, refuse_to_overwrite, require_working_folder, write_text
from planner.saved import with_digest

if TYPE_CHECKING:
    from planner.answer import Plan
    from planner.probe.result import ProbeResult
    from planner.probe.run import Device
    from planner.profile.doctor import Findings
    from planner.profile.measurements import Measurements, Profiled
    from planner.schedule.actions import Schedule

_log = logging.getLogger(__name__)


def probe_command(
    plan: str,
    device: Word = None,
    stage: Word = None,
    steps: Whole = None,
    budget: Number = None,
    timeout: float = 120.0,
    order: Word = None,
    scale: int = 64,
    processes: int = 8,
    dry_run: bool = False,
    tolerance: Number = None,
    trace: Word = None,
    *,
    saving: Saving,
) -> None:
    """Run the plan's pipeline for a few steps, and put measured beside predicted.

    Exit code 0 where they agree, 6 where they do not, 5 where it could not run.

    \b
    Example:
      plan probe plan.json
      plan probe plan.json --dry-run
      plan probe plan.json --device cuda --stage all
    """
    from planner.plan_file import read_plan
    from planner.report.machines import render_probe

    if trace is not None and stage not in (None, "all"):
        raise SpecError(f"--trace: of stage {stage} alone there is no pipeline to draw", "--stage all, or no --trace")
    refuse_files({"-o": saving.output, "--trace": trace}, saving.force)
    read, made = read_plan(plan), _read_order(order)
    if dry_run:
        said = {"--steps": steps, "--budget": budget, "--order": order, "--tolerance": tolerance,
                "--timeout": None if timeout == 120.0 else timeout}  # fmt: skip
        return _dry_run(read, plan, made, said, device == "cpu" or {stage, trace, saving.output} != {None}, saving)
    result = _probe(
        read, device, steps, budget, tolerance, stages=_stages(stage), hidden_size=scale, num_processes=processes,
        timeout_s=timeout, order=made,
    )  # fmt: skip
    if result is None:  # another rank reports
        return None
    _warn(read, result, tolerance)
    show_and_save(with_digest(result.model_dump(mode="json")), render_probe(result, read, saving.output), saving)
    if trace is not None:
        _write_trace(trace, read, result, saving.force)
    if not result.agrees:
        raise ProbeMismatch("the run contradicts the plan", "the report names what is off, and by how much")


def _dry_run(
    plan: Plan, path: str, order: Schedule | None, said: Mapping[str, object], beside: bool, saving: Saving
) -> None:
    """Print what a probe of all ranks would start; SpecError where options `beside` it ask for another one."""
    if beside:
        hint = "leave out --device cpu, --stage, -o, --trace"
        raise SpecError("--dry-run: tells of all ranks on GPUs", hint)
    from planner.probe.plan_slice import ProbeOptions
    from planner.probe.run_price import what_starts
    from planner.report.machines import render_start

    words = [word for name, value in said.items() if value is not None for word in (name, str(value))]
    options = ProbeOptions(device="cuda", order=order)
    start = what_starts(plan, options, shlex.join(["plan", "probe", path, "--device", "cuda", *words]))
    show_and_save(start.model_dump(mode="json"), render_start(start), saving)


def _warn(plan: Plan, result: ProbeResult, tolerance: float | None) -> None:
    """Warn of a GPU that is not the plan's, and of a tolerance that judges nothing."""
    from planner.cli.measurements import doubt_device

    if result.run.device == "cuda":
        doubt_device(result, plan.cluster.hardware, "the probe")
    if tolerance is not None and not result.uses_tolerance:
        _log.warning("--tolerance %g: nothing that this run measured is judged by it", tolerance)


def _write_trace(path: str, plan: Plan, result: ProbeResult, force: bool) -> None:
    from planner.probe.probe import trace_events

    traced = trace_events(plan, result)
    if traced["traceEvents"]:
        write_text(path, dumps(traced, indent=None), force)
    else:
        _log.warning("%s is not written: no step ran to its end", path)


def _probe(
    plan: Plan, device: str | None, steps: int | None, budget_s: float | None, tolerance: float | None, **asked: Any
) -> ProbeResult | None:
    require_working_folder()
    counts = (("--steps", steps, 1), ("--scale", asked["hidden_size"], 8), ("--processes", asked["num_processes"], 1))
    for name, value, least in counts:
        if value is not None and value < least:
            raise SpecError(f"{name}: {value} is too small", f"at least {least}")
    if None not in (steps, budget_s):
        raise SpecError("--steps, --budget: one says how many steps, the other how long they take", "leave one out")
    with needing("the probe", "probe", ProbeError):
        from planner.probe.probe import ProbeOptions, probe

        kind = _device(device)
    given = {"num_steps": steps, "budget_s": budget_s, "tolerance_fraction": tolerance}
    asked |= {name: value for name, value in given.items() if value is not None}
    options = ProbeOptions(device=kind, **asked)
    if budget_s is not None and options.device == "cpu":
        raise SpecError("--budget: seconds are measured on GPUs", "on a CPU, say --steps")
    if options.order is not None and options.stages is not None:
        raise SpecError("--order: a stage alone follows the plan's own schedule", "leave out --stage")
    return probe(plan, options)


def _stages(stage: str | None) -> Any:
    try:
        return stage if stage in (None, "all") else int(stage or "")
    except ValueError:
        raise SpecError(f"--stage: {(stage or '')[:60]!r} is no stage", "a number, or all") from None


def _read_order(path: str | None) -> Schedule | None:
    if path is None:
        return None
    from planner.schedule.graph import from_torch_csv
    from planner.specs.reading import CSV, read_text

    return from_torch_csv(read_text(path, CSV.num_bytes))


def rebalance_command(
    plan: str,
    probe: Word = None,
    slow_stage: Word = None,
    time_limit: Number = None,
    *,
    saving: Saving,
) -> None:
    """Move layers between stages that a probe found slow and fast, and say what it gains.

    Shape, schedule and micro-batches stay as they are. The step before and after is replayed with the measured seconds.

    \b
    Example:
      plan rebalance plan.json probe.json -o balanced.json
      plan rebalance plan.json --slow-stage 3:1.2
    """
    from planner.plan_file import read_plan
    from planner.report.machines import rebalanced_json, render_rebalanced
    from planner.search.rebalance import rebalance

    saving.check()
    saved = read_plan(plan)
    factors, guessed = _factors(saved, probe, slow_stage)
    balanced = rebalance(saved, factors, *([] if time_limit is None else [time_limit]))
    if save(balanced.plan, saving):
        return
    tell((rebalanced_json if saving.json else render_rebalanced)(balanced, guessed))


def _factors(plan: Plan, probe: str | None, slow_stage: str | None) -> tuple[tuple[float, ...], list[str]]:
    """Each stage's factor, and what it was guessed from where nothing measured it."""
    if (probe is None) == (slow_stage is None):
        given = "neither is given" if probe is None else "both are given"
        raise SpecError(f"PROBE.json, --slow-stage: {given}", "give one: plan rebalance plan.json --slow-stage 3:1.2")
    if probe is not None:
        from planner.cli.measurements import read_probe
        from planner.probe.evidence import slowness
        from planner.specs.reading import label

        ranks = slowness(plan, read_probe(probe), label(probe))
        return tuple(rank.factor for rank in ranks), [rank.guessed for rank in ranks]
    factors = list(plan.best.rank_factors or [1.0] * plan.parallelism.pp)
    for part in (slow_stage or "").split(","):
        stage, factor = _stage_and_factor(part, len(factors))
        factors[stage] *= factor
    return tuple(factors), [""] * len(factors)


def _stage_and_factor(text: str, pp: int) -> tuple[int, float]:
    stage, _, factor = text.partition(":")
    try:
        rank, times = int(stage), float(factor)
    except ValueError:
        raise SpecError(f"--slow-stage: {text[:60]!r} is no stage and factor", "write 3:1.2, or 3:1.2,5:1.1") from None
    if not 0 <= rank < pp:
        raise SpecError(f"--slow-stage: {rank}, the plan has stages 0 to {pp - 1}", "name one of them")
    if not 0 < times <= 100:
        raise SpecError(f"--slow-stage: stage {rank} {times:g} times as long", "a factor above 0, at most 100")
    return rank, times


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
    on all the nodes that torchrun starts it on).

    \b
    Example:
      plan profile -o mine.yaml
      torchrun --nnodes 2 --nproc-per-node 8 -m planner.cli profile
    """
    from planner.plan_file import read_plan

    with needing("measuring", "probe", ProbeError):
        from planner.profile.measure import WAIT_S, Ranks, exchange_rows
    from planner.profile.measurements import profile_of, shapes_to_measure

    kind, ranks = _device(device), Ranks.of_torchrun()
    if ranks is not None and ranks.rank:  # the first rank measures, writes and tells
        shapes, wait_s = shapes_to_measure(kind, quick), WAIT_S + (budget or 0.0)
        exchange_rows(kind, ranks, shapes.exchanged_bytes, shapes.steady_s, wait_s=wait_s)
        return
    refuse_to_overwrite(output, force)
    record = _measured(kind, quick, budget, ranks)
    profiled = profile_of(record)
    sure = record.how_sure()
    write_text(output, _yaml(profiled, sure), force)
    if output == STDOUT:
        return
    if json:
        tell(profiled.hardware.model_dump(mode="json"))
    else:
        from planner.report.machines import render_profile

        tell(render_profile(profiled, sure, output, None if plan is None else read_plan(plan)))


def _device(name: str | None) -> Device:
    if name not in (None, "cpu", "cuda"):
        raise SpecError(f"--device: {name!r} is unknown", "cpu or cuda")
    from planner.probe.torch_build import default_device

    return name or default_device()  # type: ignore[return-value]


def _measured(kind: Device, quick: bool, budget_s: float | None, ranks: object) -> Measurements:
    from planner.profile.measure import machine_of, measure, monitor_of, tasks
    from planner.profile.measurements import Measurements, shapes_to_measure

    monitor = monitor_of(kind)  # before anything of this process is on the GPU
    record = Measurements(machine_of(kind), quick, datetime.date.today().isoformat())
    todo = tasks(kind, shapes_to_measure(kind, quick), budget_s)
    with progress("measuring", len(todo)) as done:
        for line in measure(record, todo, done, monitor):
            _log.info("left out: %s", line)
    _exchange(record, kind, quick, ranks)
    for condition in record.conditions:
        _log.warning("%s: the profile is of such a GPU", condition)
    return record


def _exchange(record: Measurements, kind: Device, quick: bool, ranks: object) -> None:
    """Exchanges: among the ranks that torchrun started, else among processes started here."""
    from planner.profile.measure import Ranks, exchange_rows, num_processes, spawned_rows
    from planner.profile.measurements import shapes_to_measure

    shapes, tables = shapes_to_measure(kind, quick), record.tables
    sizes, size = shapes.exchanged_bytes, num_processes(kind, record.machine.num_devices)
    try:
        if isinstance(ranks, Ranks):
            tables["exchange"] = exchange_rows(kind, ranks, sizes, shapes.steady_s)
        else:
            tables["exchange"] = spawned_rows(kind, size, sizes, steady_s=shapes.steady_s)
    except ProbeError as error:
        _log.warning("links are not measured: %s", error.message)


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
