"""The report of a plan as one HTML page that needs nothing else: no network, no scripts; charts are inline SVG.

It is for `plan report`, `write_report` and notebooks. It lays out the lines of `view`, as the terminal does, and adds
what a terminal has no room for: charts of memory, of seconds and of the alternatives, the pipeline's timeline, and the
inputs with their sources. The same plan makes the same bytes. Names come from files that anyone may have written, so
all text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from planner.answer import Plan
from planner.files import write_text
from planner.report.format import LEAST_SHARE, MEMORY, gibibytes, large, percent
from planner.report.html import (
    Card,
    Html,
    beside,
    bullets,
    cards,
    facts,
    folded,
    joined,
    page,
    section,
    share_bar,
    table,
    tag,
)
from planner.report.pictures import pareto, pictures, stage_seconds, steps
from planner.report.rows import MFU, STAGE_HEADS, Entry, Figure, ReportSection, StepShare, Table
from planner.report.view import SECTIONS, View, view_of


def report_page(plan: Plan) -> str:
    """The plan as one HTML page that needs nothing else: stages, memory, seconds, timeline, alternatives, inputs."""
    return render_html(plan, pictures(plan))


def render_html(plan: Plan, drawn_of: Mapping[str, Html]) -> str:
    """The page with the pictures of `pictures`, by the section that they belong to."""
    view = view_of(plan)
    return page(f"{view.job}: {view.layout}", *_sections(plan, view, drawn_of))


def write_report(plan: Plan, path: str | Path, *, force: bool = False) -> None:
    """Write `report_page` to a file; `-` is stdout. Raises SpecError where the file exists and `force` is not given."""
    write_text(path, report_page(plan), force)


def _sections(plan: Plan, view: View, drawn_of: Mapping[str, Html]) -> Iterator[Html]:
    yield header(view)
    for name in SECTIONS:
        if name == "timeline":
            yield section("The timeline of a step", drawn_of["timeline"])
        elif (shown := view.section(name)) is not None:
            yield section(shown.title, *_in_full(plan, view, shown, drawn_of))
    yield section("Inputs", *inputs(plan))


def _in_full(plan: Plan, view: View, shown: ReportSection, drawn_of: Mapping[str, Html]) -> Iterator[Html]:
    """A section with the pictures that a terminal has no room for."""
    match shown.name:
        case "seconds":
            yield beside(breakdown(view), stage_seconds(plan.best))
        case "alternatives":
            yield from _alternatives(view)
        case "stages":
            yield from map(drawn, shown.parts)
            yield folded("Every stage: seconds, layers and parameters", _each(plan, view))
            yield folded("Every stage: memory by item, in GiB", _memory(plan))
            yield beside(drawn_of["stacks"], drawn_of["curve"])
        case _:
            yield from map(drawn, shown.parts)


def drawn(part: Table | tuple[Entry, ...] | tuple[str, ...]) -> Html:
    """A part of a section: a table, or a list."""
    if not isinstance(part, Table):
        return bullets(part)
    heads = part.heads or ("",) * len(part.align)
    rows: list[Sequence[object]] = list(part.rows)
    if part.bars:
        rows = [(*row, share_bar(share)) for row, share in zip(rows, part.bars, strict=True)]
        heads = (*heads, "")
    folds = bool(part.heads) and "w" in part.align
    filled = table(heads, rows, part.align.replace("w", "l") + "l" * bool(part.bars), folds=folds)
    return joined([filled, *(tag("p", note, class_="soft") for note in part.notes)])


def breakdown(view: View) -> Html:
    """The items of the step and their sum."""
    rows: list[tuple[object, ...]] = [(*share.cells, share_bar(share.fraction)) for share in view.breakdown]
    rows.append((*StepShare("step", view.step_s, view.step_s).cells, ""))
    note = f"On the rank that decides the step; the items add up to it, those below {percent(LEAST_SHARE, 2)} left out."
    filled = table(("item", "seconds", "share", ""), rows, "lrrl", bold_last=True)
    return tag("div", filled, tag("p", note, class_="soft"))


def _alternatives(view: View) -> Iterator[Html]:
    entries = (view.best, *view.alternatives)
    heads = ("", "layout", "step", "GiB", "fits with", "MFU", "how, and what it trades against the best")
    rows = [(e.name, e.sizes, e.step, e.peak, e.fit, percent(e.mfu), _how(e)) for e in entries]
    yield table(heads, rows, "lnrrrrl", folds=True)
    yield beside(steps(entries), pareto(entries, view.capacity_bytes))


def _how(entry: Entry) -> str:
    """The trade of an alternative; the way in which the best is run stands at the top of the page."""
    more = "" if entry.trade else entry.more
    return "" if entry.more_fraction is None else "; ".join(part for part in (more, entry.how) if part)


def header(view: View) -> Html:
    """The page above its first section."""
    classes = {"lead": "layout", "": "", "soft": "soft", "offer": "offer", "alarm": "alarm"}
    lines = (tag("p", " · ".join(line.parts), class_=classes[line.role]) for line in view.lines)
    said = [tag("h1", tag("bdi", view.job)), *lines]
    command = (
        tag("pre", tag("code", view.command), aria_label="the command that made this plan") if view.command else ""
    )
    return tag("header", *said, command, cards(_cards(view)))


def _cards(view: View) -> Iterator[Card]:
    """The step, its speed, its memory, and the whole run."""
    figures = {figure.name: figure for figure in view.figures}
    step, rate, mfu = (figures.pop(name) for name in ("step", "tokens/s", MFU))
    beside_rate = [figure for figure in figures.values() if figure.unit == "tokens/s"]
    beside_mfu = [figure for figure in figures.values() if figure.unit == "TFLOP/s"]
    rest = [figure for figure in figures.values() if figure not in (*beside_rate, *beside_mfu)]
    yield Card(step.name, step.brief, tuple(map(_named, rest)))
    yield Card(rate.name, rate.brief, tuple(map(_named, beside_rate)))
    yield Card(f"{mfu.name}'s peak", mfu.brief, tuple(map(_named, beside_mfu)))
    yield Card(view.peak.name, view.peak.brief, (f"of {view.capacity} a GPU", *filter(None, [view.fit])))
    if view.sustained is not None:
        yield Card(view.sustained.name, view.sustained.brief, (view.sustained.ends,))
    if view.cost:
        days, *more = view.cost
        hours = [figure.text for figure in more if figure.unit == "GPU-hours"]
        yield Card(f"{large(view.tokens or 0)} tokens", days.brief, (*filter(None, [days.ends]), *hours))
        for figure in more:
            if figure.unit != "GPU-hours":
                yield Card(figure.name, figure.brief, tuple(filter(None, [figure.ends])))
    if view.goodput:
        effective = view.goodput[0]
        yield Card(effective.name, effective.brief, (effective.ends, "of the run's time trains"))


def _named(figure: Figure) -> str:
    return f"{figure.name} {figure.text}" if figure.unit in ("s", "fraction") else f"{figure.text} {figure.name}"


def _each(plan: Plan, view: View) -> Html:
    heads = (*STAGE_HEADS, "parameters", "layers, counted from 0")
    rows = [
        (*row.cells, large(stage.num_parameters), chunks(stage.chunks))
        for row, stage in zip(view.stages, plan.stages, strict=True)
    ]
    return table(heads, rows, "rlllrrrrrn")


def chunks(ranges: Sequence[tuple[int, int]]) -> str:
    """`0–6`, `3, 19, 35`, or `2–3, then every 16 on to 114–115` where as many come again and again."""
    held = [(first, end) for first, end in ranges if end > first]
    gaps = {after[0] - before[0] for before, after in pairwise(held)}
    sizes = {end - first for first, end in held}
    if len(held) > 3 and len(gaps) == len(sizes) == 1:
        return f"{_range(*held[0])}, then every {gaps.pop()} on to {_range(*held[-1])}"
    return ", ".join(_range(first, end) for first, end in held)


def _range(first: int, end: int) -> str:
    return f"{first}–{end - 1}" if end > first + 1 else str(first)


def _memory(plan: Plan) -> Html:
    heads = ["stage", *MEMORY.values()]
    rows: list[list[object]] = [
        [stage.stage, *(gibibytes(getattr(stage.memory, name)) for name in MEMORY)] for stage in plan.stages
    ]
    if any(stage.memory.total_bytes_interval for stage in plan.stages):
        heads.append("80% interval")
        for row, stage in zip(rows, plan.stages, strict=True):
            row.append("–".join(map(gibibytes, stage.memory.total_bytes_interval or ())))
    return table(heads, rows, "r" * len(heads))


def inputs(plan: Plan) -> Iterator[Html]:
    """The sources in a table, every field below it on demand, and the hash of all."""
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
    yield table(("input", "value", "source"), [row for row in named if row[2]], "lll", folds=True)
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
