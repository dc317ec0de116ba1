"""A plan as one HTML file that needs nothing else: no network, no scripts; bars and schedule are inline SVG.

It lays out the lines of `view`, as the terminal does, and adds what a terminal has no room for: every stage's memory by
item, the schedule drawn, and the inputs with their sources. The same plan makes the same bytes. Names come from files
that anyone may have written, so all text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from planner.answer import Plan, StagePlan
from planner.report.format import gibibytes, large, percent
from planner.report.html.pieces import (
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
from planner.report.labels import LEAST_SHARE, MEMORY
from planner.report.rows import STAGE_HEADS, Entry, Rejection, Share
from planner.report.view import View, view_of

_PARTS = {name: label for name, label in MEMORY.items() if name != "total_bytes"}


class Drawing(NamedTuple):
    """The schedule as SVG, and what it shows."""

    svg: str
    note: str
    fine: bool = False
    """True where bars are too thin for an edge."""


def render_html(plan: Plan, schedule: Drawing) -> str:
    """The whole page."""
    view = view_of(plan)
    return page(f"{view.job}: {view.layout}", *_sections(plan, view, schedule))


def _sections(plan: Plan, view: View, schedule: Drawing) -> Iterator[Html]:
    headings = view.headings
    yield _header(view)
    if view.recipe:
        yield section(headings["recipe"], table(("", ""), view.recipe, "nl"))
    yield section(f"Memory of each stage, on GPUs of {view.capacity}", _memory_bars(plan, view), _memory_table(plan))
    yield section(headings["stages"], *_stages(plan, view))
    yield section(headings["breakdown"], *_breakdown(view))
    drawn = tag(
        "figure",
        tag("div", Html(schedule.svg), class_="schedule fine" if schedule.fine else "schedule"),
        tag("figcaption", schedule.note),
    )
    yield section("The schedule", drawn)
    if view.alternatives:
        yield section(headings["alternatives"], _alternatives(view))
    if view.robust:
        notes = [tag("p", remark, class_="soft") for remark in view.robust.remarks]
        robust = table(view.robust.heads, view.robust.rows, "l" + "r" * (len(view.robust.heads) - 1))
        yield section(headings["robust"], robust, *notes)
    if view.rejections:
        yield section(headings["rejections"], _rejections(view.rejections))
    if view.corrections:
        yield section(headings["corrections"], table(("", ""), view.corrections, "ll"))
    yield section(headings["how_sure"], table(("", ""), view.how_sure, "ll"))
    if view.assumptions:
        yield section(headings["assumptions"], bullets(view.assumptions))
    if view.warnings:
        yield section(headings["warnings"], bullets(view.warnings))
    yield section("Inputs", *_inputs(plan))


def _header(view: View) -> Html:
    return tag(
        "header",
        tag("p", tag("bdi", view.job), class_="soft"),
        tag("h1", view.layout),
        tag("p", f"{' · '.join(view.manner)} · {view.batch}"),
        tag("p", view.batch_offer) if view.batch_offer else Html(""),
        tag("p", " · ".join(view.placement), class_="soft") if view.placement else Html(""),
        tag("p", view.misfit, class_="alarm") if view.misfit else Html(""),
        tag("p", view.fit) if view.fit else Html(""),
        tag("p", f"probed: {' · '.join(view.corrected)}", class_="soft") if view.corrected else Html(""),
        figures(_figures(view)),
    )


def _figures(view: View) -> Iterator[tuple[str, str]]:
    """The key figures, memory and the cost of the whole run among them."""
    for figure in (*view.figures, view.peak):
        yield figure.name, figure.text
    if view.sustained is not None:
        yield view.sustained.name, view.sustained.text
    for figure in view.goodput:
        yield figure.name, figure.text
    for figure in view.cost:
        yield f"{figure.name} of {large(view.tokens or 0)} tokens", figure.text


def _memory_bars(plan: Plan, view: View) -> Html:
    rows = []
    for stage in plan.stages:
        memory = stage.memory
        sized = [(label, getattr(memory, name)) for name, label in _PARTS.items()]
        parts = [Part(label, size, gibibytes(size)) for label, size in sized]
        filled = f"{gibibytes(memory.total_bytes)} ({percent(memory.total_bytes / view.capacity_bytes, 0)})"
        rows.append((f"stage {stage.stage}", parts, filled))
    return stacked_bars(rows, view.capacity_bytes, f"GPU: {view.capacity}")


def _stages(plan: Plan, view: View) -> Iterator[Html]:
    rows = [(*row.cells, large(stage.num_parameters)) for row, stage in zip(view.stages, plan.stages, strict=True)]
    yield table((*STAGE_HEADS, "parameters"), rows, "rlllrrrrr")
    if plan.parallelism.vpp > 1:
        chunks = [(f"stage {stage.stage}", _chunks(stage)) for stage in plan.stages]
        yield folded("Layers of each chunk, counted from 0", table(("", ""), chunks, "ll"))


def _chunks(stage: StagePlan) -> str:
    """The layers of each chunk of a stage."""
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


def _breakdown(view: View) -> Iterator[Html]:
    rows: list[tuple[object, ...]] = [(*share.cells, share_bar(share.fraction)) for share in view.breakdown]
    rows.append((*Share("step", view.step_s, view.step_s).cells, ""))
    yield table(("", "seconds", "share", ""), rows, "lrrl", bold_last=True)
    note = f"On the rank that decides the step; the items add up to it, those below {percent(LEAST_SHARE, 2)} left out."
    yield tag("p", note, class_="soft")


def _alternatives(view: View) -> Html:
    heads = ("", "layout", "step", "", "GiB", "fits with", "MFU", "how, and what it trades")
    return table(heads, [_alternative(entry) for entry in (view.best, *view.alternatives)], "lnrrrrrl")


def _alternative(entry: Entry) -> tuple[str, ...]:
    return entry.name, entry.sizes, entry.step, entry.more, entry.peak, entry.fit, percent(entry.mfu), entry.how


def _rejections(rejections: Iterable[Rejection]) -> Html:
    return table(("shapes", "reason", "for example"), [rejection.cells for rejection in rejections], "rll")


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
        elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
            for index, entry in enumerate(value):
                flat |= _flat(entry, f"{name}[{index}].")
        elif value is not None:
            flat[name] = _listed(value) if isinstance(value, list) else value
    return flat


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
