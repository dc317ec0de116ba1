"""A plan for eyes: what was chosen, its stages, where the time goes, what else there was, and how sure it is.

Made for 80 columns. Everything is a rich renderable, so that the console decides about colour; no colour carries
meaning alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from planner.answer import Layout, Plan, PricedLayout, StagePlan
from planner.report.format import digits, gibibytes, large, percent, seconds, span
from planner.report.pieces import Bar, bullets, columns, section
from planner.report.proof import says_bound, says_outcome
from planner.specs.units import GIB

_MAX_ROWS = 16
"""Deeper pipelines show runs of alike stages as one row."""
_PANEL_WIDTH = 76
_LEAST_SHARE = 0.0005
"""Of the step: what would show as 0.0%."""
_EVIDENCE = {
    "spec_sheet": "spec sheet: peaks and typical efficiencies, nothing measured on this kind of GPU",
    "calibrated": "calibrated on measurements of this GPU, or of others of its silicon",
    "probed": "probed: corrected by a real run on this kind of GPU",
}
_BREAKDOWN = {
    "compute_s": "compute",
    "bubble_s": "pipeline bubble",
    "tp_comm_s": "tensor-parallel exchanges",
    "cp_comm_s": "context-parallel exchanges",
    "ep_comm_s": "expert-parallel exchanges",
    "pp_comm_s": "pipeline sends",
    "exposed_dp_s": "data-parallel exchanges",
    "optimizer_s": "optimizer",
    "overhead_s": "host and other overhead",
}


def render(plan: Plan, own: PricedLayout | None = None) -> Group:
    """The whole report of a plan, or of one evaluated layout beside the planner's own choice for the same job."""
    return Group(*_sections(plan, own))


def summary(layout: PricedLayout) -> str:
    """One line: sizes, seconds, memory of the fullest stage."""
    fits = "" if layout.fits else ", does not fit"
    return f"{layout.parallelism}: {seconds(layout.step.step_s)}, {gibibytes(_peak_bytes(layout))} GiB{fits}"


def _sections(plan: Plan, own: PricedLayout | None) -> Iterator[RenderableType]:
    yield _panel(plan)
    if own is not None:
        yield section(
            "Beside the planner's own choice", Group(*_entry("given", plan.best), *_entry("own  ", own, plan.best))
        )
    yield section(f"Stages, on GPUs of {gibibytes(plan.cluster.hardware.memory_bytes)} GiB", _stages(plan))
    yield section(f"Where the {seconds(plan.step.step_s)} of a step go", _breakdown(plan))
    if plan.alternatives:
        yield section("Alternatives, and what each trades", _alternatives(plan))
    if plan.rejections:
        yield section("Rejected shapes, by reason", _rejections(plan))
    yield section("How sure", _confidence(plan))
    if plan.assumptions:
        yield section("Assumptions that move the result", bullets(plan.assumptions))
    if plan.warnings:
        yield section("Warnings", bullets(plan.warnings))


def _panel(plan: Plan) -> Panel:
    best, training = plan.best, plan.training
    lines: list[RenderableType] = [
        Text(str(best.parallelism), style="bold green" if best.fits else "bold"),
        *map(Text, _packed(_manner(best.parallelism))),
        Text(f"{training.global_batch_size:,} sequences of {training.seq_length:,} tokens a step, {training.dtype}"),
    ]
    if not best.fits:
        lines.append(Text(_misfit(plan), style="bold red"))
    lines += ["", _figures(plan)]
    if plan.run_cost is not None:
        lines += ["", Text(_cost(plan))]
    title = f"{plan.model.name} on {plan.cluster.num_gpus:,} × {plan.cluster.hardware.name}, {plan.runtime}"
    return Panel(Group(*lines), title=Text(title, style="bold"), title_align="left")


def _manner(layout: Layout) -> list[str]:
    """How the layout is run, beside its sizes."""
    zero = f"ZeRO-{layout.zero_stage}"
    if layout.zero_stage and layout.shard_size < layout.dp * layout.cp:
        zero += f" over {layout.shard_size:,}"
    recompute = "no recompute" if layout.recompute == "none" else f"{layout.recompute} recompute"
    if layout.recompute == "selective" and layout.recompute_modules:
        recompute += f" ({', '.join(layout.recompute_modules)})"
    parts = [layout.schedule if layout.pp > 1 else "no pipeline", zero, recompute]
    if layout.tp > 1:
        parts.append("sequence parallel" if layout.sequence_parallel else "no sequence parallel")
    if layout.ep > 1:
        parts.append(f"expert TP {layout.etp}")
    if layout.num_gpus_spare:
        parts.append(f"{layout.num_gpus_spare:,} GPUs spare")
    return parts


def _packed(parts: Iterable[str]) -> list[str]:
    """Lines of the panel's width that break between parts only."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + len(part) + 3 <= _PANEL_WIDTH:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return lines


def _misfit(plan: Plan) -> str:
    worst, capacity_bytes = plan.best.worst_stage, plan.cluster.hardware.memory_bytes
    return (
        f"Does not fit: stage {worst.stage} needs {gibibytes(worst.memory.total_bytes)} GiB, "
        f"{gibibytes(worst.memory.total_bytes - capacity_bytes)} more than the GPU's {gibibytes(capacity_bytes)}"
    )


def _figures(plan: Plan) -> Table:
    """The numbers people quote, and the interval where there is one."""
    step = plan.step
    grid = Table.grid(padding=(0, 1), expand=True)
    for _ in range(3):
        grid.add_column()
        grid.add_column(justify="right", style="bold")
        grid.add_column(width=1)
    middle = ("bubble", percent(step.bubble_fraction))
    if step.step_s_interval is not None:
        middle = ("80% interval", span(*step.step_s_interval, like_s=step.step_s))
    speed = digits(step.model_tflops_per_gpu)
    rows = (
        ("step", seconds(step.step_s), "tokens/s", f"{step.tokens_per_s:,.0f}", "TFLOP/s/GPU", speed),
        (*middle, "tokens/s/GPU", f"{step.tokens_per_s_per_gpu:,.1f}", "MFU", percent(step.mfu)),
    )
    for row in rows:
        grid.add_row(*row[:2], "", *row[2:4], "", *row[4:])
    return grid


def _cost(plan: Plan) -> str:
    cost = plan.run_cost
    assert cost is not None
    parts = [f"{digits(cost.days)} days", f"{large(cost.gpu_hours)} GPU-hours"]
    if cost.usd is not None:
        parts.append(f"${large(cost.usd)}")
    if cost.mwh is not None:
        parts.append(f"{digits(cost.mwh)} MWh")
    return f"{large(cost.tokens)} tokens: {' · '.join(parts)}"


def _stages(plan: Plan) -> Table:
    stages, capacity_bytes = plan.stages, plan.cluster.hardware.memory_bytes
    grouped = len(stages) > _MAX_ROWS
    mixed = len({mode for stage in stages for mode, count in stage.recompute.items() if count}) > 1
    table = columns("r", "l", "l", *("l" if mixed else ""), "r", "r", "r", "r", None, gap=1 if mixed else 2)
    heads = ["stage", "layers", "holds", "in flight", "fwd ms", "bwd ms", "GiB", ""]
    if mixed:
        heads.insert(3, "recompute")
    table.add_row(*(Text(head, style="dim") for head in heads))
    for run in _runs(stages) if grouped else ([stage] for stage in stages):
        first, last = run[0], run[-1]
        worst = max(stage.memory.total_bytes for stage in run)
        over = worst > capacity_bytes
        table.add_row(
            str(first.stage) if len(run) == 1 else f"{first.stage}–{last.stage}",
            _layers(first) if len(run) == 1 else f"{first.num_layers} each",
            "+".join(first.holds).replace("embedding", "embed"),
            *([_recompute(first)] if mixed else []),
            _span([stage.in_flight_microbatches for stage in run], "{:g}"),
            f"{1e3 * max(s.forward_s + s.forward_comm_s for s in run):,.1f}",
            f"{1e3 * max(s.backward_s + s.backward_comm_s for s in run):,.1f}",
            gibibytes(worst) + ("!" if over else ""),
            Bar(worst / capacity_bytes, 16, "░", style="red" if over else "cyan"),
        )
    return table


def _runs(stages: Iterable[StagePlan]) -> list[list[StagePlan]]:
    """Neighbouring stages that hold the same."""
    runs: list[list[StagePlan]] = []
    for stage in stages:
        before = runs[-1][-1] if runs else None
        if before and all(
            getattr(before, name) == getattr(stage, name) for name in ("num_layers", "holds", "recompute")
        ):
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return runs


def _layers(stage: StagePlan) -> str:
    """`7 (0–6)`, or `8 in 4 chunks`."""
    if len(stage.chunks) > 1:
        return f"{stage.num_layers} in {len(stage.chunks)} chunks"
    first, end = stage.chunks[0] if stage.chunks else (0, 0)
    return f"{stage.num_layers} ({first}–{end - 1})" if end > first else "0"


def _recompute(stage: StagePlan) -> str:
    return ", ".join(f"{count} {mode}" for mode, count in stage.recompute.items() if count and mode != "none") or "none"


def _span(values: list[float], form: str) -> str:
    """One value, or first to last."""
    first, last = form.format(round(values[0], 2)), form.format(round(values[-1], 2))
    return first if first == last else f"{first}–{last}"


def _breakdown(plan: Plan) -> Table:
    items = [(label, getattr(plan.step.breakdown, name)) for name, label in _BREAKDOWN.items()]
    table = columns("l", "r", "r", None)
    for label, value_s in sorted(items, key=lambda item: -item[1]):
        share = value_s / plan.step.step_s
        if share >= _LEAST_SHARE:
            table.add_row(label, seconds(value_s, plan.step.step_s), percent(share), Bar(share, 32))
    return table


def _alternatives(plan: Plan) -> Group:
    entries = (_entry(f"{rank}.", other, plan.best) for rank, other in enumerate(plan.alternatives, start=1))
    return Group(*(line for entry in entries for line in entry))


def _entry(label: str, layout: PricedLayout, beside: PricedLayout | None = None) -> Iterator[RenderableType]:
    """Two lines: what it is and takes; how it is run where that differs from `beside`, and what it trades."""
    more = "" if beside is None or layout.trade else f"{layout.step.step_s / beside.step.step_s - 1:+.1%}  "
    figures = f"{seconds(layout.step.step_s)}  {more}{gibibytes(_peak_bytes(layout))}{'' if layout.fits else '!'} GiB"
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True)
    table.add_row(label, Text(_sizes(layout.parallelism), style="bold"), figures)
    yield table
    same = _manner(beside.parallelism) if beside else []
    told = ", ".join(part for part in _manner(layout.parallelism) if part not in same)
    if told or layout.trade:
        text = Text("; ".join(part for part in (told, layout.trade) if part), style="dim")
        yield Padding(text, (0, 0, 0, len(label) + 1))


def _sizes(layout: Layout) -> str:
    """The layout in fewer letters, to stand beside its figures."""
    axes, _, batches = str(layout).partition(" · micro-batch ")
    return f"{axes.replace(' × ', ' ')} · mb {batches}"


def _peak_bytes(layout: PricedLayout) -> int:
    return layout.worst_stage.memory.total_bytes


def _highest_bytes(plan: Plan) -> float:
    """The upper end of the fullest rank's interval; 0 where no stage has one."""
    return max((high for s in plan.stages for high in (s.memory.total_bytes_interval or ())[1:]), default=0.0)


def _rejections(plan: Plan) -> Table:
    table = columns("r", "l", None)
    for reason, count in sorted(plan.rejections.items(), key=lambda item: (-item[1], item[0])):
        example = plan.rejection_examples.get(reason, "")
        table.add_row(f"{count:,}", reason.replace("_", " "), Text(example, style="dim"))
    return table


def _confidence(plan: Plan) -> Table:
    table = columns("l", None)
    table.add_row("evidence", _EVIDENCE[plan.evidence])
    search = plan.search
    if search is not None:
        took = "" if search.seconds is None else f" in {seconds(search.seconds)}"
        counts = f"{search.num_shapes:,} legal shapes, {search.num_fitting:,} can fit"
        table.add_row("search", f"{counts}, {search.num_ilps:,} solved as ILP{took}")
        table.add_row("solver", f"{says_outcome(search)}: {says_bound(search)}")
    high_bytes, capacity = _highest_bytes(plan), plan.cluster.hardware.memory_bytes
    if plan.fits and high_bytes > capacity:
        over = f"80% interval of the fullest rank ends at {gibibytes(high_bytes)} GiB"
        table.add_row("memory", f"{over}: --memory-headroom {ceil((high_bytes - capacity) / GIB)} plans below it")
    if plan.undecided:
        count, total = len(plan.undecided), len(plan.alternatives)
        overlap = f"intervals of {count} of {total} overlap the best's: plan probe can tell them apart"
        table.add_row("alternatives", overlap)
    return table
