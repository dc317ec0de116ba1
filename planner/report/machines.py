"""Answers about machines: a probe's result, stages that are rebalanced, a profile, and what is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rich.console import Group
from rich.text import Text

from planner.answer import Plan, StagePlan
from planner.errors import SpecError
from planner.layout.price import layout_again, reprice
from planner.probe.evidence import load_in_words
from planner.probe.result import ProbeResult, ProbeStart, slowest_exchanges
from planner.probe.run import SURE_FRACTION
from planner.profile.doctor import EXTRAS, Extra, Findings, Package
from planner.profile.fitting import number_at
from planner.profile.measurements import Profiled
from planner.profile.probe_calibration import from_probe
from planner.report.format import counted, digits, gibibytes, percent, seconds, sentence, sentences
from planner.report.pieces import Parts, as_group, bullets, columns, listed, section
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
    yield from map(Text, sentences("probe_head", result=result, repeated=partial(_repeated, result)))
    yield from (Text(f"note  {note}") for note in result.notes)
    if (memory := result.out_of_memory) is not None:
        told = sentences("probe_out_of_memory", memory=memory, planned=result.predicted_bytes, size=_size)
        yield section("Out of memory", bullets(told))
    if result.checks:
        yield section("Proved", listed("probe_checks", result.checks))
    if result.comparisons:
        yield section("Predicted and measured", listed("probe_comparisons", result.comparisons, shown=_SHOWN))
    if exchanges := list(_exchanges(result)):
        yield section("Exchanges by themselves", bullets(exchanges))
    if conditions := [*_gpus(result), *(condition.text for condition in result.conditions)]:
        yield section("How the GPUs were", bullets(conditions))
    yield section("Verified here, and not", bullets(sentences("probe_claims", result=result)))


def _repeated(result: ProbeResult) -> str:
    num_steps = {len(rank.steps) for rank in result.ranks} or {result.run.num_steps}
    spread = f", {seconds(result.step_spread_s)} apart" if max(num_steps) > 1 else ""
    return f"median of {' or '.join(map(str, sorted(num_steps)))}{spread}"


def _exchanges(result: ProbeResult) -> Iterator[str]:
    """A line for each kind of exchange, with the seconds of the slowest rank, sure or not."""
    on_gpus = result.run.device == "cuda"
    for exchange in slowest_exchanges(result.ranks):
        yield from sentences("probe_exchange", it=exchange, size=_size, on_gpus=on_gpus, sure=SURE_FRACTION)


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


def render_start(start: ProbeStart) -> Group:
    """The report of `plan probe --dry-run`: commands, environment and bytes of all ranks, of which none was started."""
    fits = bullets(start.made_to_fit or ["nothing: it fits as planned"])
    return Group(
        Text(f"plan  {start.plan}", style="bold"),
        Text(f"would start {start.num_ranks:,} ranks on {counted(start.num_nodes, 'node')}; nothing was started"),
        section("Changed to fit into eager torch", fits),
        section(f"GiB of a rank, of {gibibytes(start.capacity_bytes)}", listed("probe_start", start.stages, gap=1)),
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
    layout, gain = balanced.plan.parallelism, balanced.gain_fraction
    before_s, after_s = balanced.before.step.step_s, balanced.after.step.step_s
    yield Text(f"{layout} · {layout.schedule}", style="bold")
    stages = listed("rebalanced", _moved(balanced), guessed=guessed, microbatch_s=_microbatch_s)
    yield section("Stages, as slow as they are", stages)
    verdict = sentence("rebalanced_step", gain=gain, before_s=before_s, after_s=after_s)
    room = "" if balanced.after.fits else "\nit does not fit in memory, as before"
    yield Text(f"\n{verdict}{room}", style="bold")


@as_group
def render_profile(profiled: Profiled, sure: str, output: str, plan: Plan | None = None) -> Parts:
    """The rates that a machine reaches, the errors of their fit, and how they differ from the shipped profile."""
    hardware, efficiency = profiled.hardware, profiled.hardware.efficiency
    yield Text(f"{hardware.name}: {efficiency.source}", style="bold")
    facts = [*sentences("profile_facts", hardware=hardware, own=efficiency, gemm=efficiency.gemm)]
    facts += [says for tier in hardware.tiers for says in sentences("profile_tier", tier=tier)]
    facts += [f"of what was timed, {sure}"] if sure else []
    yield section("This machine", bullets(facts))
    yield section("What the fit leaves of each table", listed("profile_residuals", profiled.residuals))
    yield section("What follows", bullets(_follows_profile(profiled, plan, output)))


def _follows_profile(profiled: Profiled, plan: Plan | None, output: str) -> Iterator[str]:
    """Lines on whether the machine is as its shipped profile says, what is other, and a plan with these numbers."""
    known, now, before = profiled.known, "", ""
    if plan is not None:
        cluster = plan.cluster.changed(hardware=profiled.hardware)
        now, before = plan_in_words(priced_again(plan.model_copy(update={"cluster": cluster}))), plan_in_words(plan)
    differing = [] if known is None else differences(known.efficiency, profiled.hardware.efficiency)
    return sentences(
        "profile_follows", known=known, differing=differing, agrees=AGREES_FRACTION, now=now, before=before,
        output=output,
    )  # fmt: skip


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
    return sentence("doctor_package", it=package)


def _gpus_found(findings: Findings) -> str:
    """Each kind of GPU with their number, or why none is found."""
    words = [sentence("doctor_gpu", it=gpu) for gpu in findings.gpus]
    return sentence("doctor_gpus", found=findings, words=words)
