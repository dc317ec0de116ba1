"""A plan as one HTML file that needs nothing else: no network, no scripts; bars and schedule are inline SVG.

The same plan makes the same bytes. Names come from files that anyone may have written, so all text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from planner.answer import Plan, PricedLayout, StagePlan
from planner.report.causes import MEMORY
from planner.report.format import digits, gibibytes, large, percent, seconds
from planner.report.html_pieces import (
    Html,
    Part,
    bullets,
    facts,
    figures,
    folded,
    page,
    section,
    share_bar,
    stacked_bars,
    table,
    tag,
)
from planner.report.proof import says_bound, says_outcome
from planner.report.terminal import _BREAKDOWN as BREAKDOWN
from planner.report.terminal import _EVIDENCE as EVIDENCE
from planner.report.terminal import _manner as manner
from planner.report.terminal import _misfit as misfit
from planner.report.terminal import _recompute as recomputed
from planner.report.terminal import _sizes as sizes

_PARTS = {name: label for name, label in MEMORY.items() if name != "total_bytes"}


class Drawing(NamedTuple):
    """The schedule as SVG, and what it shows."""

    svg: str
    note: str
    fine: bool = False
    """Whether its bars are too thin for an edge."""


def render_html(plan: Plan, schedule: Drawing) -> str:
    """The whole page."""
    title = f"{plan.model.name} on {plan.cluster.num_gpus:,} × {plan.cluster.hardware.name}"
    return page(f"{title}: {plan.parallelism}", *_sections(plan, schedule, title))


def _sections(plan: Plan, schedule: Drawing, title: str) -> Iterator[Html]:
    yield _header(plan, title)
    capacity = f"{gibibytes(plan.cluster.hardware.memory_bytes)} GiB"
    yield section(f"Memory of each stage, on GPUs of {capacity}", _memory_bars(plan, capacity), _memory_table(plan))
    yield section("Stages", _stages(plan))
    yield section(f"Where the {seconds(plan.step.step_s)} of a step go", *_breakdown(plan))
    drawn = tag(
        "figure",
        tag("div", Html(schedule.svg), class_="schedule fine" if schedule.fine else "schedule"),
        tag("figcaption", schedule.note),
    )
    yield section("The schedule", drawn)
    if plan.alternatives:
        yield section("Alternatives, and what each trades", _alternatives(plan))
    if plan.rejections:
        yield section("Rejected shapes, by reason", _rejections(plan))
    yield section("How sure", table(("", ""), _confidence(plan), "ll"))
    if plan.assumptions:
        yield section("Assumptions that move the result", bullets(plan.assumptions))
    if plan.warnings:
        yield section("Warnings", bullets(plan.warnings))
    yield section("Inputs", *_inputs(plan))


def _header(plan: Plan, title: str) -> Html:
    best, training = plan.best, plan.training
    batch = f"{training.global_batch_size:,} sequences of {training.seq_length:,} tokens a step, {training.dtype}"
    return tag(
        "header",
        tag("p", tag("bdi", title), f", {plan.runtime}", class_="soft"),
        tag("h1", str(best.parallelism)),
        tag("p", f"{' · '.join(manner(best.parallelism))} · {batch}"),
        Html("") if best.fits else tag("p", misfit(plan), class_="alarm"),
        figures(_figures(plan)),
    )


def _figures(plan: Plan) -> Iterator[tuple[str, str]]:
    step, cost = plan.step, plan.run_cost
    yield "step", seconds(step.step_s)
    if step.step_s_interval is not None:
        yield "80% interval", _interval(step.step_s_interval)
    yield "tokens a second", f"{step.tokens_per_s:,.0f}"
    yield "tokens a second and GPU", f"{step.tokens_per_s_per_gpu:,.1f}"
    yield "TFLOP/s a GPU", digits(step.model_tflops_per_gpu)
    yield "MFU, of the dense peak", percent(step.mfu)
    yield "pipeline bubble", percent(step.bubble_fraction)
    yield "fullest stage", f"{gibibytes(plan.best.worst_stage.memory.total_bytes)} GiB"
    if cost is not None:
        yield f"{large(cost.tokens)} tokens take", f"{digits(cost.days)} days"
        yield "GPU-hours", large(cost.gpu_hours)
        if cost.usd is not None:
            yield "cost", f"${large(cost.usd)}"
        if cost.mwh is not None:
            yield "energy", f"{digits(cost.mwh)} MWh"


def _interval(interval_s: tuple[float, float]) -> str:
    low_s, high_s = interval_s
    return f"{digits(low_s)}–{digits(high_s)} s"


def _memory_bars(plan: Plan, capacity: str) -> Html:
    hardware = plan.cluster.hardware
    rows = []
    for stage in plan.stages:
        memory = stage.memory
        sized = [(label, getattr(memory, name)) for name, label in _PARTS.items()]
        parts = [Part(label, size, gibibytes(size)) for label, size in sized]
        filled = f"{gibibytes(memory.total_bytes)} ({percent(memory.total_bytes / hardware.memory_bytes, 0)})"
        rows.append((f"stage {stage.stage}", parts, filled))
    return stacked_bars(rows, hardware.memory_bytes, f"GPU: {capacity}")


def _stages(plan: Plan) -> Html:
    heads = ("stage", "layers", "which", "holds", "recompute", "in flight", "forward", "backward", "parameters")
    like_s = max(stage.backward_s + stage.backward_comm_s for stage in plan.stages)
    rows = [
        (
            stage.stage,
            stage.num_layers,
            _which(stage),
            ", ".join(stage.holds),
            recomputed(stage),
            f"{round(stage.in_flight_microbatches, 2):g}",
            seconds(stage.forward_s + stage.forward_comm_s, like_s),
            seconds(stage.backward_s + stage.backward_comm_s, like_s),
            large(stage.num_parameters),
        )
        for stage in plan.stages
    ]
    return table(heads, rows, "rrlllrrrr")


def _which(stage: StagePlan) -> str:
    """The layers of each chunk, counted from 0."""
    chunks = ((first, end - 1) for first, end in stage.chunks if end > first)
    return ", ".join(f"{first}–{last}" if last > first else str(first) for first, last in chunks)


def _memory_table(plan: Plan) -> Html:
    heads = ("stage, GiB", *MEMORY.values())
    interval = any(stage.memory.total_bytes_interval for stage in plan.stages)
    rows = [
        (
            stage.stage,
            *(gibibytes(getattr(stage.memory, name)) for name in MEMORY),
            *([_gib_interval(stage.memory.total_bytes_interval)] if interval else []),
        )
        for stage in plan.stages
    ]
    return table((*heads, "80% interval") if interval else heads, rows, "r" * (len(heads) + interval))


def _gib_interval(interval_bytes: tuple[float, float] | None) -> str:
    return "" if interval_bytes is None else f"{gibibytes(interval_bytes[0])}–{gibibytes(interval_bytes[1])}"


def _breakdown(plan: Plan) -> Iterator[Html]:
    step_s = plan.step.step_s
    items = [(label, getattr(plan.step.breakdown, name)) for name, label in BREAKDOWN.items()]
    rows: list[tuple[object, ...]] = [
        (label, seconds(value_s, step_s), percent(value_s / step_s), share_bar(value_s / step_s))
        for label, value_s in sorted(items, key=lambda item: -item[1])
        if value_s
    ]
    rows.append(("step", seconds(step_s, step_s), percent(1.0), ""))
    yield table(("", "seconds", "share", ""), rows, "lrrl", bold_last=True)
    yield tag("p", "On the rank that decides the step; the items add up to it.", class_="soft")


def _alternatives(plan: Plan) -> Html:
    heads = ("", "layout", "step", "", "GiB", "MFU", "how, and what it trades")
    rows = [_alternative("best", plan.best, plan.best)]
    rows += [_alternative(f"{rank}.", other, plan.best) for rank, other in enumerate(plan.alternatives, start=1)]
    return table(heads, rows, "lnrrrrl")


def _alternative(label: str, layout: PricedLayout, best: PricedLayout) -> tuple[str, ...]:
    same = () if layout is best else manner(best.parallelism)
    told = [", ".join(part for part in manner(layout.parallelism) if part not in same), layout.trade]
    return (
        label,
        sizes(layout.parallelism),
        seconds(layout.step.step_s),
        "" if layout is best else f"{layout.step.step_s / best.step.step_s - 1:+.1%}",
        gibibytes(layout.worst_stage.memory.total_bytes),
        percent(layout.step.mfu),
        "; ".join(part for part in told if part),
    )


def _rejections(plan: Plan) -> Html:
    ordered = sorted(plan.rejections.items(), key=lambda item: (-item[1], item[0]))
    rows = [(f"{n:,}", reason.replace("_", " "), plan.rejection_examples.get(reason, "")) for reason, n in ordered]
    return table(("shapes", "reason", "for example"), rows, "rll")


def _confidence(plan: Plan) -> Iterator[tuple[str, str]]:
    yield "evidence", EVIDENCE[plan.evidence]
    interval = plan.step.step_s_interval
    yield "interval", "none given" if interval is None else f"{_interval(interval)} in 80% of cases"
    if plan.undecided:
        yield (
            "alternatives",
            f"{len(plan.undecided)} of {len(plan.alternatives)} have intervals that overlap the best's",
        )
    search = plan.search
    if search is not None:
        counts = f"{search.num_shapes:,} legal shapes, {search.num_fitting:,} can fit"
        yield "search", f"{counts}, {search.num_ilps:,} solved as integer programs"
        yield "solver", says_outcome(search)
        yield "bound", says_bound(search)


def _inputs(plan: Plan) -> Iterator[Html]:
    model, hardware = plan.model.spec, plan.cluster.hardware
    named = [("model", model.name, model.source)]
    if model.training is not None:
        named.append(("published training", f"{model.training.tokens_per_step:,} tokens a step", model.training.source))
    named.append(("hardware", hardware.name, hardware.source))
    named += [
        (f"link {tier.name}", f"{tier.gb_per_s:g} GB/s, {tier.latency_us:g} µs", tier.source)
        for tier in plan.cluster.tiers
    ]
    named.append(("kernels", hardware.efficiency.evidence.replace("_", " "), hardware.efficiency.source))
    named.append(("reserved memory", f"{hardware.reserved.context_gib:g} GiB context", hardware.reserved.source))
    if hardware.usd_per_gpu_hour is not None:
        named.append(("price", f"${hardware.usd_per_gpu_hour:g} a GPU-hour", hardware.price_source))
    yield table(("", "", "source"), [row for row in named if row[2]], "lll")
    total, active = large(plan.model.num_parameters), large(plan.model.num_active_parameters)
    model_facts = {"parameters": total, "active parameters": active, **_flat(model.model_dump(mode="json"))}
    yield folded("Model", facts(model_facts))
    yield folded("Cluster", facts(_flat(plan.cluster.model_dump(mode="json"))))
    yield folded("Training", facts(_flat(plan.training.model_dump(mode="json"))))
    yield folded("Runtime", facts(_flat(plan.runtime_spec.model_dump(mode="json"))))
    yield tag("p", "sha256 of the inputs: ", tag("code", plan.inputs_sha256))
    yield tag("p", f"planner {plan.planner_version}, plan schema {plan.schema_version}", class_="soft")


def _flat(data: dict[str, Any], before: str = "") -> dict[str, object]:
    """Nested values under dotted names, without those that are not set."""
    flat: dict[str, object] = {}
    for key, value in data.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
            for at, one in enumerate(value):
                flat |= _flat(one, f"{name}[{at}].")
        elif value is not None:
            flat[name] = _listed(value) if isinstance(value, list) else value
    return flat


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
