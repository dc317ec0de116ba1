"""A probe's result for eyes: what was run of the plan, what it proved, predicted beside measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.report.format import digits, gibibytes, percent, seconds
from planner.report.pieces import bullets, columns, headed, section

if TYPE_CHECKING:
    from planner.answer import Plan
    from planner.probe.result import ComparedQuantity, ProbeResult, ProbeStart

_SHOWN: dict[str, Callable[[float], str]] = {
    "s": seconds,
    "bytes": lambda value: f"{gibibytes(value)} GiB",
    "fraction": percent,
    "count": digits,
}


def render(result: ProbeResult, plan: Plan | None = None, saved: str | None = None) -> Group:
    """The whole report, which ends with the verdict, what is corrected by it and what the plan is now."""
    return Group(*_sections(result), section("What follows", bullets(_follows(result, plan, saved))))


def _follows(result: ProbeResult, plan: Plan | None, saved: str | None) -> Iterator[str]:
    """Lines on the verdict, on each number of the hardware, and on the plan with those that are corrected."""
    from planner.errors import SpecError
    from planner.profile.probe_calibration import from_probe

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
    from planner.layout.price import layout_again, reprice

    return plan.model_copy(update={"best": layout_again(plan, reprice(plan, plan.best))})


def plan_in_words(plan: Plan) -> str:
    """A plan's step and the memory of its fullest stage."""
    fullest = plan.best.worst_stage.memory.total_bytes
    held = f"{gibibytes(fullest)} of {gibibytes(plan.cluster.hardware.memory_bytes)} GiB"
    return f"{seconds(plan.step.step_s)} a step, {held}{'' if plan.best.fits else ', which does not fit'}"


def _sections(result: ProbeResult) -> Iterator[RenderableType]:
    yield Text(f"plan  {result.slice.asked}", style="bold")
    yield Text(f"run   {result.slice.run}")
    yield Text(
        f"on    {result.device}, torch {result.torch_version}" if result.torch_version else f"on    {result.device}"
    )
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
    table = columns("llw")
    for check in result.checks:
        table.add_row("ok" if check.passed else "FAILED", check.name, check.detail)
    return table


def comparison_table(comparisons: Iterable[ComparedQuantity]) -> Table:
    """A row for each quantity."""
    table = headed(("", "stage", "predicted", "measured", "error", ""), "llrrrl")
    for comparison in comparisons:
        error, write = comparison.error_fraction, _SHOWN[comparison.unit]
        table.add_row(
            comparison.name,
            "" if comparison.stage is None else str(comparison.stage),
            write(comparison.predicted),
            write(comparison.measured),
            "" if error is None else f"{100 * error:+.1f}%",
            {None: "", True: "ok", False: "OFF"}[comparison.agrees],
        )
    return table


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
    from planner.probe.result import slowest_exchanges

    on_gpus = result.run.device == "cuda"
    for exchange in slowest_exchanges(result.ranks):
        yield (
            f"{exchange.name} of {_size(exchange.num_bytes)} over {exchange.size} ranks: {seconds(exchange.seconds)}, "
            f"{digits(exchange.bus_gb_per_s)} GB/s on the bus{_sure(exchange.spread_fraction) if on_gpus else ''}"
        )


def _sure(spread: float | None) -> str:
    """How sure a median is, where that is worth saying."""
    from planner.probe.run import SURE_FRACTION

    return "" if spread is None or spread <= SURE_FRACTION else f", sure to {percent(spread)} only"


def _gpus(result: ProbeResult) -> Iterator[str]:
    """A line with the clocks, the power and the temperature under load of the rank whose clock was lowest."""
    from planner.probe.evidence import load_in_words

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
    wrong = [check.name for check in result.checks if not check.passed]
    wrong += [
        comparison.name if comparison.stage is None else f"{comparison.name} of stage {comparison.stage}"
        for comparison in result.comparisons
        if comparison.agrees is False
    ]
    verdict = f"the run contradicts the plan: {', '.join(wrong) or 'out of memory'}"
    is_slow = any(comparison.agrees is False and comparison.unit == "s" for comparison in result.comparisons)
    if not is_slow or not result.conditions:
        return verdict
    faults = [condition.text for condition in result.conditions if condition.is_fault]
    weak = "its seconds are no evidence against the plan" if faults else "its seconds may differ by how the GPUs were"
    return f"{verdict}; {weak}: {'; '.join(faults or [condition.text for condition in result.conditions])}"


def render_start(start: ProbeStart) -> Group:
    """The report of `plan probe --dry-run`: commands, environment and bytes of all ranks, of which none was started."""
    parts = ("weights", "grads", "optim", "held", "moment", "resvd", "total")
    table = headed(("stage", "ranks", "layers", *parts), "rrwrrrrrrr", gap=1)
    for stage in start.stages:
        held = (
            stage.weights_bytes, stage.gradients_bytes, stage.optimizer_bytes, stage.activations_bytes,
            stage.moment_bytes, stage.reserved_bytes, stage.total_bytes,
        )  # fmt: skip
        layers = ", ".join(f"{first}-{last - 1}" if last > first else "none" for first, last in stage.layers)
        table.add_row(str(stage.stage), str(stage.num_ranks), layers, *map(gibibytes, held))
    fits = bullets(start.made_to_fit) if start.made_to_fit else bullets(["nothing: it fits as planned"])
    return Group(
        Text(f"plan  {start.plan}", style="bold"),
        Text(f"would start {start.num_ranks:,} ranks on {start.num_nodes:,} nodes; nothing was started"),
        section("Changed to fit into eager torch", fits),
        section(f"GiB of a rank, of {gibibytes(start.capacity_bytes)}", table),
        section("Commands", bullets(f"{name}: {command}" for name, command in start.commands.items())),
        section("Environment of each rank", bullets(f"{name}: {value}" for name, value in start.environment.items())),
    )
