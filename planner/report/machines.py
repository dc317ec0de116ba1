"""Answers about machines: a probe's result, stages that are rebalanced, a profile, and what is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from planner.answer import Plan, StagePlan
from planner.errors import SpecError
from planner.layout.price import layout_again, reprice
from planner.probe.evidence import load_in_words
from planner.probe.result import ComparedQuantity, ProbeResult, ProbeStart, slowest_exchanges
from planner.probe.run import SURE_FRACTION
from planner.profile.doctor import EXTRAS, Extra, Findings, Package
from planner.profile.fitting import number_at
from planner.profile.measurements import Profiled
from planner.profile.probe_calibration import from_probe
from planner.report.format import digits, gibibytes, percent, seconds
from planner.report.pieces import Parts, as_group, bullets, columns, headed, section
from planner.search.rebalance import Rebalanced
from planner.specs.base import Fields
from planner.specs.hardware import Efficiency

_SHOWN: dict[str, Callable[[float], str]] = {
    "s": seconds,
    "bytes": lambda value: f"{gibibytes(value)} GiB",
    "fraction": percent,
    "count": digits,
}


def render_probe(result: ProbeResult, plan: Plan | None = None, saved: str | None = None) -> Group:
    """The whole report, which ends with the verdict, what is corrected by it and what the plan is now."""
    return Group(*_sections(result), section("What follows", bullets(_follows(result, plan, saved))))


def _follows(result: ProbeResult, plan: Plan | None, saved: str | None) -> Iterator[str]:
    """Lines on the verdict, on each number of the hardware, and on the plan with those that are corrected."""
    yield _verdict(result)
    if plan is None:
        return
    try:
        calibration = from_probe(result, plan.cluster, "this run")
    except SpecError as error:
        yield f"nothing is corrected: {error.message}"
        yield f"the plan stays as it is: {plan_in_words(plan)}"
        return
    for correction in calibration.corrections(plan.cluster.hardware, plan.cluster.tiers):
        yield f"{correction.name}: {correction.says}"
    update = {
        "cluster": calibration.of_cluster(plan.cluster),
        "runtime_spec": calibration.of_runtime(plan.runtime_spec),
    }
    now = priced_again(plan.model_copy(update=update))
    yield f"the plan is now {plan_in_words(now)}; it was {plan_in_words(plan)}"
    yield f"plan … --calibration {saved or 'probe.json (saved by -o probe.json)'} searches with these numbers"


def priced_again(plan: Plan) -> Plan:
    """The plan with its layout priced by what its cluster and its trainer are now."""
    return plan.model_copy(update={"best": layout_again(plan, reprice(plan, plan.best))})


def plan_in_words(plan: Plan) -> str:
    """A plan's step and the memory of its fullest stage."""
    fullest = plan.best.worst_stage.memory.total_bytes
    held = f"{gibibytes(fullest)} of {gibibytes(plan.cluster.hardware.memory_bytes)} GiB"
    return f"{seconds(plan.step.step_s)} a step, {held}{'' if plan.best.fits else ', which does not fit'}"


def _sections(result: ProbeResult) -> Parts:
    yield Text(f"plan  {result.slice.asked}", style="bold")
    yield Text(f"run   {result.slice.run}")
    yield Text(f"on    {result.device}" + (f", torch {result.torch_version}" if result.torch_version else ""))
    if result.slice.reduced:
        yield Text(f"less  {', '.join(result.slice.reduced)}")
    if result.step_s is not None:
        yield Text(f"step  {_step(result)}")
    if result.mode == "stages" and result.ranks:
        yield Text(f"      each stage: {_repeated(result)}")
    if result.plan_step_s is not None:
        yield Text("held  against the planner's price of eager torch, which is what runs")
        yield Text(f"      the plan's own trainer, {result.plan_runtime}: {seconds(result.plan_step_s)} a step")
    for note in result.notes:
        yield Text(f"note  {note}")
    if result.out_of_memory is not None:
        yield section("Out of memory", bullets(_memory_lines(result)))
    if result.checks:
        yield section("Proved", _checks(result))
    if result.comparisons:
        yield section("Predicted and measured", comparison_table(result.comparisons))
    if result.activity:
        yield section("What the stages did", _activity(result))
        if result.clock_error_s is not None:
            yield Text(f"the clocks of these ranks differ by up to {seconds(result.clock_error_s)}")
    exchanges = list(_exchanges(result))
    if exchanges:
        yield section("Exchanges by themselves", bullets(exchanges))
    conditions = [*_gpus(result), *(condition.text for condition in result.conditions)]
    if conditions:
        yield section("How the GPUs were", bullets(conditions))
    yield section("Verified here, and not", bullets(_claims(result)))


def _step(result: ProbeResult) -> str:
    """The step of all ranks together: measured, or replayed with the seconds of stages that ran alone."""
    assert result.step_s is not None
    if result.mode == "stages":
        return f"{seconds(result.step_s)}, replayed with what the stages took"
    loss = "" if result.loss is None else f"; loss {result.loss:.4f}"
    return f"{seconds(result.step_s)} ({_repeated(result)}){loss}"


def _repeated(result: ProbeResult) -> str:
    num_steps = {len(rank.steps) for rank in result.ranks} or {result.run.num_steps}
    spread = f", {seconds(result.step_spread_s)} apart" if max(num_steps) > 1 else ""
    return f"median of {' or '.join(map(str, sorted(num_steps)))}{spread}"


def _checks(result: ProbeResult) -> Table:
    rows = (("ok" if check.passed else "FAILED", check.name, check.detail) for check in result.checks)
    return columns("llw", rows)


def comparison_table(comparisons: Iterable[ComparedQuantity]) -> Table:
    """A row for each quantity."""
    rows = (
        (
            one.name, "" if one.stage is None else str(one.stage), _SHOWN[one.unit](one.predicted),
            _SHOWN[one.unit](one.measured), "" if one.error_fraction is None else f"{100 * one.error_fraction:+.1f}%",
            {None: "", True: "ok", False: "OFF"}[one.agrees],
        )
        for one in comparisons
    )  # fmt: skip
    return headed(("", "stage", "predicted", "measured", "error", ""), "llrrrl", rows)


def _activity(result: ProbeResult) -> Table:
    """A row for each stage; it names the rank that it shows where a stage has several."""
    has_peers = result.run.world_size > result.run.pp
    table = headed(("stage", "busy", "waits", "idle by cause"), "rrrw")
    for stage in result.activity:
        causes = sorted(stage.idle_s.items(), key=lambda item: -item[1])
        table.add_row(
            f"{stage.stage} (rank {stage.rank})" if has_peers else str(stage.stage),
            percent(stage.utilisation_fraction),
            seconds(stage.wait_s),
            ", ".join(f"{cause} {seconds(idle_s)}" for cause, idle_s in causes if idle_s > 0) or "none",
        )
    return table


def _exchanges(result: ProbeResult) -> Iterator[str]:
    """A line for each kind of exchange, with the seconds of the slowest rank."""
    on_gpus = result.run.device == "cuda"
    for exchange in slowest_exchanges(result.ranks):
        yield (
            f"{exchange.name} of {_size(exchange.num_bytes)} over {exchange.size} ranks: {seconds(exchange.seconds)}, "
            f"{digits(exchange.bus_gb_per_s)} GB/s on the bus{_sure(exchange.spread_fraction) if on_gpus else ''}"
        )


def _sure(spread: float | None) -> str:
    """How sure a median is, where that is worth saying."""
    return "" if spread is None or spread <= SURE_FRACTION else f", sure to {percent(spread)} only"


def _gpus(result: ProbeResult) -> Iterator[str]:
    """A line with the clocks, the power and the temperature under load of the rank whose clock was lowest."""
    loaded = [
        (state.clock_mhz, rank.rank, state)
        for rank in result.ranks
        for state in rank.device_states
        if state.when == "within" and state.clock_mhz is not None
    ]
    if loaded:
        _, rank, state = min(loaded, key=lambda item: item[:2])
        yield f"under load, rank {rank}{' (the lowest clock)' if len(loaded) > 1 else ''}: {load_in_words(state)}"


def _size(num_bytes: int) -> str:
    """Bytes in the largest unit of which there is at least one."""
    unit = min(3, max(0, num_bytes.bit_length() - 1) // 10)
    return f"{digits(num_bytes / 1024**unit)} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


def _memory_lines(result: ProbeResult) -> list[str]:
    memory = result.out_of_memory
    assert memory is not None
    asked = "" if memory.asked_bytes is None else f" for {_size(memory.asked_bytes)} more"
    planned = "" if result.predicted_bytes is None else f"; the plan has it at {gibibytes(result.predicted_bytes)} GiB"
    return [f"stage {memory.stage} (rank {memory.rank}) asked{asked} in {memory.phase}{planned}", memory.message]


def _claims(result: ProbeResult) -> list[str]:
    lines = [f"verified: {', '.join(result.slice.verified) or 'nothing'}"]
    if result.slice.extrapolated:
        lines.append(f"not measured: {', '.join(result.slice.extrapolated)}")
    if result.device == "cpu":
        lines.append("a run on the CPU proves nothing about the speed of GPUs")
    return lines


def _verdict(result: ProbeResult) -> str:
    if result.agrees:
        return "the run agrees with the plan"
    off = [one for one in result.comparisons if one.agrees is False]
    wrong = [check.name for check in result.checks if not check.passed]
    wrong += [one.name if one.stage is None else f"{one.name} of stage {one.stage}" for one in off]
    verdict = f"the run contradicts the plan: {', '.join(wrong) or 'out of memory'}"
    if not result.conditions or all(one.unit != "s" for one in off):
        return verdict
    faults = [condition.text for condition in result.conditions if condition.is_fault]
    weak = "its seconds are no evidence against the plan" if faults else "its seconds may differ by how the GPUs were"
    return f"{verdict}; {weak}: {'; '.join(faults or [condition.text for condition in result.conditions])}"


_PARTS = {
    "weights_bytes": "weights", "gradients_bytes": "grads", "optimizer_bytes": "optim", "activations_bytes": "held",
    "moment_bytes": "moment", "reserved_bytes": "resvd", "total_bytes": "total",
}  # fmt: skip
"""The parts of a rank's memory, and the heads of their columns."""


def render_start(start: ProbeStart) -> Group:
    """The report of `plan probe --dry-run`: commands, environment and bytes of all ranks, of which none was started."""
    table = headed(("stage", "ranks", "layers", *_PARTS.values()), "rrwrrrrrrr", gap=1)
    for stage in start.stages:
        held = (getattr(stage, name) for name in _PARTS)
        layers = ", ".join(f"{first}-{last - 1}" if last > first else "none" for first, last in stage.layers)
        table.add_row(str(stage.stage), str(stage.num_ranks), layers, *map(gibibytes, held))
    fits = bullets(start.made_to_fit or ["nothing: it fits as planned"])
    return Group(
        Text(f"plan  {start.plan}", style="bold"),
        Text(f"would start {start.num_ranks:,} ranks on {start.num_nodes:,} nodes; nothing was started"),
        section("Changed to fit into eager torch", fits),
        section(f"GiB of a rank, of {gibibytes(start.capacity_bytes)}", table),
        section("Commands", bullets(f"{name}: {command}" for name, command in start.commands.items())),
        section("Environment of each rank", bullets(f"{name}: {value}" for name, value in start.environment.items())),
    )


def rebalanced_json(balanced: Rebalanced, guessed: Sequence[str]) -> Fields:
    """The stages before and after as plain data, and the layout that came of it."""
    stages = [
        {
            "stage": before.stage, "rank_factor": factor, "rank_factor_guessed": guessed[before.stage] or None,
            "num_layers_before": before.num_layers, "num_layers_after": after.num_layers,
            "microbatch_before_s": _microbatch_s(before), "microbatch_after_s": _microbatch_s(after),
        }
        for before, after, factor in _moved(balanced)
    ]  # fmt: skip
    return {
        "step_before_s": balanced.before.step.step_s, "step_after_s": balanced.after.step.step_s,
        "gain_fraction": balanced.gain_fraction, "stages": stages, "best": balanced.after.model_dump(mode="json"),
    }  # fmt: skip


def _moved(balanced: Rebalanced) -> Iterator[tuple[StagePlan, StagePlan, float]]:
    """Each stage before and after, and how many times as long its rank takes."""
    return zip(balanced.before.stages, balanced.after.stages, balanced.after.rank_factors, strict=True)


def _microbatch_s(stage: StagePlan) -> float:
    return stage.forward_s + stage.backward_s + stage.forward_comm_s + stage.backward_comm_s


@as_group
def render_rebalanced(balanced: Rebalanced, guessed: Sequence[str]) -> Parts:
    """Layers and milliseconds of a micro-batch of each stage before and after, and the step."""
    rows = (
        (
            str(before.stage), f"× {factor:.3f}" + (f" ({guess})" if (guess := guessed[before.stage]) else ""),
            str(before.num_layers),
            str(after.num_layers) + (f" ({changed:+d})" if (changed := after.num_layers - before.num_layers) else ""),
            f"{1e3 * _microbatch_s(before):.1f}", f"{1e3 * _microbatch_s(after):.1f}",
        )
        for before, after, factor in _moved(balanced)
    )  # fmt: skip
    layout, before_s = balanced.plan.parallelism, balanced.before.step.step_s
    yield Text(f"{layout} · {layout.schedule}", style="bold")
    heads = ("stage", "slowness", "layers", "then", "mb ms", "then")
    yield section("Stages, as slow as they are", headed(heads, "rrrrrr", rows))
    verdict = f"step {seconds(before_s)}: no layer that may move makes it shorter"
    if balanced.gain_fraction > 0:
        after_s = balanced.after.step.step_s
        verdict = f"step {seconds(before_s)} → {seconds(after_s)}: {percent(balanced.gain_fraction)} shorter"
    room = "" if balanced.after.fits else "\nit does not fit in memory, as before"
    yield Text(f"\n{verdict}{room}", style="bold")


@as_group
def render_profile(profiled: Profiled, sure: str, output: str, plan: Plan | None = None) -> Parts:
    """The rates that a machine reaches, the errors of their fit, and how they differ from the shipped profile."""
    hardware, efficiency = profiled.hardware, profiled.hardware.efficiency
    rows = (
        (label, str(left.num_rows), f"{left.median:.1f}%", f"{left.p90:.1f}%", f"{left.worst:.1f}%")
        for label, left in profiled.residuals
    )
    yield Text(f"{hardware.name}: {efficiency.source}", style="bold")
    yield section("This machine", bullets(_facts(profiled, sure)))
    yield section("What the fit leaves of each table", headed(("", "rows", "median", "p90", "worst"), "lrrrr", rows))
    yield section("What follows", bullets(_follows_profile(profiled, plan, output)))


def _facts(profiled: Profiled, sure: str) -> Iterator[str]:
    hardware, efficiency = profiled.hardware, profiled.hardware.efficiency
    peak, gemm = hardware.peak_flops("bf16") or 0.0, efficiency.gemm
    forward, dgrad, wgrad = (
        f"{min(share, gemm.wave_fraction):.0%}"
        for share in (gemm.forward_fraction, gemm.dgrad_fraction, gemm.wgrad_fraction)
    )
    yield (
        f"{gibibytes(hardware.memory_bytes)} GiB, {digits(peak / 1e12)} TFLOP/s in bf16, "
        f"{digits(hardware.hbm_gb_per_s)} GB/s of memory"
    )
    yield (
        f"large products reach {forward} of the peak forward, {dgrad} and {wgrad} backward; in whole stages "
        f"{efficiency.sustained_fraction:.0%} and {efficiency.backward_sustained_fraction:.0%} of that"
    )
    host = f", the host {digits(efficiency.host_us)} µs to issue it" if efficiency.host_us else ""
    yield f"a kernel takes {digits(efficiency.launch_us * efficiency.launch_factor)} µs to start and end{host}"
    for tier in hardware.tiers:
        rate = digits(tier.gb_per_s * tier.efficiency_fraction)
        yield f"{tier.name}: {rate} GB/s, {digits(tier.latency_us)} µs. {tier.source}"
    if sure:
        yield f"of what was timed, {sure}"


def _follows_profile(profiled: Profiled, plan: Plan | None, output: str) -> Iterator[str]:
    """Lines on whether the machine is as its shipped profile says, what is other, and a plan with these numbers."""
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
    pairs = ((name, number_at(shipped, path), number_at(measured, path)) for name, path in _SHARES.items())
    return [
        f"{name} {before:.0%} → {now:.0%}" for name, before, now in pairs if abs(now / before - 1) > AGREES_FRACTION
    ]


_SHARES = {
    "products forward": "gemm.forward_fraction", "products backward": "gemm.dgrad_fraction",
    "attention forward": "attention.forward_fraction", "attention backward": "attention.backward_fraction",
    "memory": "stream_fraction", "whole stages forward": "sustained_fraction",
    "whole stages backward": "backward_sustained_fraction",
}  # fmt: skip
"""Shares of the data sheet, and where a profile has them."""


@as_group
def render_findings(findings: Findings) -> Parts:
    """The screen of `plan doctor`: a title and one block a subject."""
    yield Text(findings.version, "bold")
    yield columns("lw", _lines(findings))
    yield Text()
    troubles = findings.troubles
    yield Text("The core works." if not troubles else f"It does not all work: {'; '.join(troubles)}", "bold")


def _lines(findings: Findings) -> Iterator[tuple[str, str]]:
    yield "Python", f"{findings.python}, {findings.system}"
    yield "installed", f"as {findings.kind} in {findings.folder}"
    yield "depends on", ", ".join(map(_package, findings.packages))
    works = (f"{name} {trouble or 'solves a small program'}" for name, trouble in findings.solvers.items())
    yield "solver", f"{'; '.join(works)} (optional)"
    for extra in findings.extras:
        if extra.name in EXTRAS:
            yield f"[{extra.name}]", f"{EXTRAS[extra.name]}: {_extra(extra)}"
    yield "GPU", _gpus_found(findings)
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


def _gpus_found(findings: Findings) -> str:
    """Each kind of GPU with their number, or why none is found."""
    if not findings.gpus:
        return f"none found{f': {findings.gpu_trouble}' if findings.gpu_trouble else ''}; plans need none"
    words = [
        f"{gpu.name}{f', {gpu.memory_gib:.1f} GiB' if gpu.memory_gib is not None else ''}"
        f"{f', driver {gpu.driver}' if gpu.driver else ''}"
        for gpu in findings.gpus
    ]
    return "; ".join(f"{words.count(one)} × {one}" for one in dict.fromkeys(words))
