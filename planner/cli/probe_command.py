"""`plan probe`, a short real run that can contradict the plan, and `plan rebalance`, layers moved by what it found."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from planner.cli.options import Number, Whole, Word

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.answer import Plan, StagePlan
    from planner.probe.plan_slice import ProbeOptions
    from planner.probe.result import ProbeResult
    from planner.schedule.actions import Schedule
    from planner.search.rebalance import Rebalanced

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
    sleep: bool = False,
    dry_run: bool = False,
    tolerance: Number = None,
    trace: Word = None,
    json: bool = False,
    output: Word = None,
    force: bool = False,
) -> None:
    """Run the plan's pipeline for a few steps, and put measured beside predicted.

    Exit code 0 where they agree, 6 where they do not, 5 where it could not run.

    \b
    Example:
      plan probe plan.json
      plan probe plan.json --sleep
      plan probe plan.json --dry-run
      plan probe plan.json --device cuda --stage all
    """
    from planner.cli.output import show_and_save
    from planner.cli.probe_report import render
    from planner.errors import ProbeMismatch, SpecError
    from planner.plan_file import read_plan
    from planner.saved import with_digest

    _refuse_files(output, trace, stage, force)
    read = read_plan(plan)
    made = _read_order(order)
    if dry_run:
        if sleep or device == "cpu" or stage is not None or trace is not None or output is not None:
            raise SpecError(
                "--dry-run: tells of all ranks on GPUs", "leave out --device cpu, --sleep, --stage, -o, --trace"
            )
        from planner.probe.plan_slice import ProbeOptions

        said = {"--steps": steps, "--budget": budget, "--order": order, "--tolerance": tolerance}
        said |= {"--timeout": None if timeout == 120.0 else timeout}
        _dry_run(read, plan, ProbeOptions(device="cuda", order=made), said, json)
        return
    result = _probe(read, device, stage, steps, budget, timeout, made, scale, processes, sleep, tolerance)
    if result is None:  # another rank reports
        return
    _warn(read, result, tolerance)
    show_and_save(with_digest(result.model_dump(mode="json")), render(result, read, output), json, output, force)
    if trace is not None:
        _write_trace(trace, read, result, force)
    if not result.agrees:
        raise ProbeMismatch("the run contradicts the plan", "the report names what is off, and by how much")


def _dry_run(plan: Plan, path: str, options: ProbeOptions, said: Mapping[str, object], json: bool) -> None:
    """Print what a probe of all ranks would start."""
    import shlex

    from planner.cli.output import show_and_save
    from planner.cli.probe_report import render_start
    from planner.probe.run_price import what_starts

    words = [word for name, value in said.items() if value is not None for word in (name, str(value))]
    start = what_starts(plan, options, shlex.join(["plan", "probe", path, "--device", "cuda", *words]))
    show_and_save(start.model_dump(mode="json"), render_start(start), json, None, False)


def _refuse_files(output: str | None, trace: str | None, stage: str | None, force: bool) -> None:
    from os.path import realpath

    from planner.errors import SpecError
    from planner.files import refuse_to_overwrite

    if trace is not None and stage not in (None, "all"):
        raise SpecError(f"--trace: of stage {stage} alone there is no pipeline to draw", "--stage all, or no --trace")
    if None not in (output, trace) and realpath(str(output)) == realpath(str(trace)):
        raise SpecError(f"-o, --trace: both name {output}", "name two files")
    for path in (output, trace):
        refuse_to_overwrite(path, force)


def _warn(plan: Plan, result: ProbeResult, tolerance: float | None) -> None:
    """Warn of a GPU that is not the plan's, and of a tolerance that judges nothing."""
    from planner.cli.measurements import doubt_device

    if result.run.device == "cuda":
        doubt_device(result, plan.cluster.hardware, "the probe")
    if tolerance is not None and not result.uses_tolerance:
        _log.warning("--tolerance %g: nothing that this run measured is judged by it", tolerance)


def _write_trace(path: str, plan: Plan, result: ProbeResult, force: bool) -> None:
    from planner.cli.output import dumps
    from planner.files import write_text
    from planner.probe.probe import trace_events

    traced = trace_events(plan, result)
    if traced["traceEvents"]:
        write_text(path, dumps(traced, indent=None), force)
    else:
        _log.warning("%s is not written: no step ran to its end", path)


def _probe(
    plan: Plan,
    device: str | None,
    stage: str | None,
    steps: int | None,
    budget_s: float | None,
    timeout_s: float,
    order: Schedule | None,
    scale: int,
    processes: int,
    sleep: bool,
    tolerance: float | None,
) -> ProbeResult | None:
    from planner.distribution import install_line
    from planner.errors import ProbeError, SpecError
    from planner.files import require_working_folder

    require_working_folder()
    if device not in (None, "cpu", "cuda"):
        raise SpecError(f"--device: {device!r} is unknown", "cpu or cuda")
    _at_least({"--steps": (1 if steps is None else steps, 1), "--scale": (scale, 8), "--processes": (processes, 1)})
    if None not in (steps, budget_s):
        raise SpecError("--steps, --budget: one says how many steps, the other how long they take", "leave one out")
    for name, value in (("--timeout", timeout_s), ("--budget", budget_s), ("--tolerance", tolerance)):
        if value is not None and not value > 0:
            raise SpecError(f"{name} {value:g}: must be positive")
    try:
        from planner.probe.plan_slice import BUDGET_S, DEFAULT_TOLERANCE
        from planner.probe.probe import ProbeOptions, probe
        from planner.probe.torch_build import default_device
    except ModuleNotFoundError as error:
        raise ProbeError(f"the probe needs {error.name}", install_line("probe")) from None
    stages = _stages(stage)
    options: ProbeOptions = ProbeOptions(
        device=device or default_device(),  # type: ignore[arg-type]
        stages=stages,
        hidden_size=scale,
        num_processes=processes,
        sleep=sleep,
        num_steps=steps,
        budget_s=BUDGET_S if budget_s is None else budget_s,
        tolerance_fraction=DEFAULT_TOLERANCE if tolerance is None else tolerance,
        timeout_s=timeout_s,
        order=order,
    )
    if budget_s is not None and options.device == "cpu":
        raise SpecError("--budget: seconds are measured on GPUs", "on a CPU, say --steps")
    if sleep and (options.device != "cpu" or stages is not None):
        raise SpecError("--sleep: ranks sleep on the CPU only", "leave out --device cuda and --stage")
    if order is not None and stages is not None:
        raise SpecError("--order: a stage alone follows the plan's own schedule", "leave out --stage")
    return probe(plan, options)


def _stages(stage: str | None) -> Any:
    return None if stage is None else "all" if stage == "all" else _number("--stage", stage)


def _at_least(values: dict[str, tuple[int, int]]) -> None:
    from planner.errors import SpecError

    for name, (value, least) in values.items():
        if value < least:
            raise SpecError(f"{name}: {value} is too small", f"at least {least}")


def _number(name: str, text: str) -> int:
    from planner.errors import SpecError

    try:
        return int(text)
    except ValueError:
        raise SpecError(f"{name}: {text[:60]!r} is no stage", "a number, or all") from None


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
    json: bool = False,
    output: Word = None,
    force: bool = False,
) -> None:
    """Move layers between stages that a probe found slow and fast, and say what it gains.

    Shape, schedule and micro-batches stay as they are. The step before and after is replayed with the measured seconds.

    \b
    Example:
      plan rebalance plan.json probe.json -o balanced.json
      plan rebalance plan.json --slow-stage 3:1.2
    """
    from planner.cli.output import dumps, save, show
    from planner.files import refuse_to_overwrite
    from planner.plan_file import read_plan
    from planner.search.rebalance import rebalance

    refuse_to_overwrite(output, force)
    saved = read_plan(plan)
    factors, guessed = _factors(saved, probe, slow_stage)
    balanced = rebalance(saved, factors, *([] if time_limit is None else [_positive(time_limit)]))
    if save(balanced.plan, output, force):
        return
    if json:
        sys.stdout.write(dumps(_to_json(balanced, guessed)))
    else:
        show(*_render(balanced, guessed))


def _factors(plan: Plan, probe: str | None, slow_stage: str | None) -> tuple[tuple[float, ...], list[str]]:
    """Each stage's factor, and what it was guessed from where nothing measured it."""
    from planner.errors import SpecError

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
    from planner.errors import SpecError

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


def _positive(time_limit: float) -> float:
    from planner.errors import SpecError

    if not 0 < time_limit < float("inf"):
        raise SpecError(f"--time-limit: {time_limit:g} is no time to look", "seconds above 0")
    return time_limit


def _to_json(balanced: Rebalanced, guessed: list[str]) -> dict[str, Any]:
    stages = [
        {
            "stage": before.stage,
            "rank_factor": factor,
            "rank_factor_guessed": guessed[before.stage] or None,
            "num_layers_before": before.num_layers,
            "num_layers_after": after.num_layers,
            "microbatch_before_s": _microbatch_s(before),
            "microbatch_after_s": _microbatch_s(after),
        }
        for before, after, factor in zip(
            balanced.before.stages, balanced.after.stages, balanced.after.rank_factors, strict=True
        )
    ]
    return {
        "step_before_s": balanced.before.step.step_s,
        "step_after_s": balanced.after.step.step_s,
        "gain_fraction": balanced.gain_fraction,
        "stages": stages,
        "best": balanced.after.model_dump(mode="json"),
    }


def _microbatch_s(stage: StagePlan) -> float:
    return stage.forward_s + stage.backward_s + stage.forward_comm_s + stage.backward_comm_s


def _render(balanced: Rebalanced, guessed: list[str]) -> list[RenderableType]:
    from rich.text import Text

    from planner.report.format import percent, seconds
    from planner.report.pieces import headed, section

    table = headed(("stage", "slowness", "layers", "then", "mb ms", "then"), "rrrrrr")
    for before, after, factor in zip(
        balanced.before.stages, balanced.after.stages, balanced.after.rank_factors, strict=True
    ):
        changed = after.num_layers - before.num_layers
        table.add_row(
            str(before.stage),
            f"× {factor:.3f}" + (f" ({guess})" if (guess := guessed[before.stage]) else ""),
            str(before.num_layers),
            f"{after.num_layers} ({changed:+d})" if changed else str(after.num_layers),
            f"{1e3 * _microbatch_s(before):.1f}",
            f"{1e3 * _microbatch_s(after):.1f}",
        )
    before_s, after_s = balanced.before.step.step_s, balanced.after.step.step_s
    if balanced.gain_fraction > 0:
        verdict = f"step {seconds(before_s)} → {seconds(after_s)}: {percent(balanced.gain_fraction)} shorter"
    else:
        verdict = f"step {seconds(before_s)}: no layer that may move makes it shorter"
    room = "" if balanced.after.fits else "\nit does not fit in memory, as before"
    return [
        Text(f"{balanced.plan.parallelism} · {balanced.plan.parallelism.schedule}", style="bold"),
        section("Stages, as slow as they are", table),
        Text(f"\n{verdict}{room}", style="bold"),
    ]
