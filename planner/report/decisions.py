"""The answers of `plan compare`, `plan check` and `plan sweep`: plans, probes, runs and files beside each other."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from os.path import commonpath
from pathlib import PurePath

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.answer import Layout
from planner.decide.check import REFUSED, Check, CheckedFile
from planner.decide.compare import FIGURES, Compared, Comparison, WaterfallTerm
from planner.decide.sweep import Point, Sweep
from planner.errors import PlannerError
from planner.report.format import (
    BREAKDOWN,
    LEAST_SHARE,
    MEMORY,
    NINE_OF_TEN_LOSE,
    RANKED_FIRST,
    digits,
    fits_with,
    gibibytes,
    large,
    percent,
    seconds,
    sentence,
    sentences,
    signed_seconds,
    time_of,
    told,
    width,
)
from planner.report.pieces import Parts, as_group, bullets, columns, headed, listed, section
from planner.specs.base import Fields
from planner.trainers.switches import Value, written

TERMS = {
    **BREAKDOWN,
    "products_s": "matrix products",
    "attention_s": "attention",
    "memory_bound_s": "memory-bound kernels",
    "recompute_s": "recomputing",
    "ends_s": "embedding, head and MTP",
    "other_compute_s": "waits for the host, casts, accumulation",
    "passes_s": "passes, with their exchanges",
    "waits_s": "waits and bubble of the pipeline",
    "pipeline_s": "passes, exchanges and bubble",
    "pp_comm_and_waits_s": "waits and bubble of the pipeline",
    "other_comm_s": "exchanges of other groups",
    "forward_s": "forward passes",
    "backward_s": "backward passes",
    "forward_backward_s": "passes, exchanges and bubble",
    "gradients_s": "gradients",
    "parameters_s": "parameters",
    "unattributed_s": "not attributed",
    "others_s": "everything else",
    "replayed_s": "the replayed step",
    "step_s": "the whole step",
    "step": "step",
}
"""The terms of a step in words."""
_CLOSE = "That is closer than predictions can tell layouts apart"


@as_group
def render_comparison(comparison: Comparison) -> Parts:
    """The whole answer, made for 80 columns."""
    sides, names = comparison.sides, short_names([side.name for side in comparison.sides])
    for side, name, rows in zip(sides[1:], names[1:], comparison.waterfalls, strict=True):
        yield Text(says(sides[0], side, names[0], name, rows), style="bold")
        if _is_close(sides[0], side):
            yield Text(f"{_CLOSE}: {RANKED_FIRST}.")
    if any(side.kind == "probe" for side in sides) and any(side.kind != "probe" for side in sides):
        yield Text("A probe runs eager torch in bf16, whatever trainer the plan is for.")
    memory = [name for name in comparison.differences if name in MEMORY or name == "peak_allocated_bytes"]
    facts = [name for name in comparison.differences if name not in (*memory, *FIGURES)]
    yield section("What differs", _facts(comparison, names, facts))
    if memory:
        yield section("Memory of the fullest stage, GiB", _memory(comparison, names, memory))
    for side, name, rows in zip(sides[1:], names[1:], comparison.waterfalls, strict=True):
        yield section(f"Where the seconds go: {names[0]} → {name}", _waterfall(rows, sides[0], side, names[0], name))


def says(first: Compared, other: Compared, first_name: str, other_name: str, rows: Sequence[WaterfallTerm]) -> str:
    """One sentence: by how much the other side is faster or slower, and by which term most."""
    like_s = max(first.step_s, other.step_s)
    steps = f"{seconds(other.step_s, like_s)} a step, {first_name} {seconds(first.step_s, like_s)}"
    rate = other.tokens_per_s / first.tokens_per_s
    gpus = first.facts.get("gpus"), other.facts.get("gpus")
    times = gpus[1] / gpus[0] if isinstance(gpus[0], int) and isinstance(gpus[1], int) else 1
    jobs = list(sentences("other_jobs", first=first, other=other, gpus=times))
    # terms of two models do not explain each other
    causes = "" if "another model" in jobs else _causes(rows, like_s)
    return sentence(
        "compared", rate=rate, least=LEAST_SHARE, other_name=other_name, steps=steps, jobs=jobs, causes=causes
    )


def _causes(rows: Sequence[WaterfallTerm], like_s: float) -> str:
    """The terms that save and cost most, where there are terms."""
    if len(rows) < 2:
        return ""
    least, most = min(rows, key=lambda row: row.seconds), max(rows, key=lambda row: row.seconds)
    saved = (
        f"; it saves most in {TERMS[least.term]} ({signed_seconds(least.seconds, like_s)})" if least.seconds < 0 else ""
    )
    lost = f"{' and' if saved else '; it'} loses most in {TERMS[most.term]} ({signed_seconds(most.seconds, like_s)})"
    return saved + (lost if most.seconds > 0 else "")


def short_names(names: Sequence[str]) -> list[str]:
    """The files' names without their folders and endings, where that still tells them apart."""
    short = [PurePath(name).stem for name in names]
    if len(set(short)) == len(short):
        return short
    if len(set(names)) < len(names):
        return [f"{name} ({number})" for number, name in enumerate(short, 1)]
    shared = commonpath([PurePath(name).parent for name in names])
    return [str(PurePath(name).relative_to(shared)) for name in names]


def _is_close(first: Compared, other: Compared) -> bool:
    """True where two predictions for one job differ by less than such predictions can tell apart."""
    rate = other.tokens_per_s / first.tokens_per_s
    return "probe" not in (first.kind, other.kind) and 0 < abs(rate - 1) < NINE_OF_TEN_LOSE


def _facts(comparison: Comparison, names: Sequence[str], facts: Sequence[str]) -> RenderableType:
    if not facts:
        return Text("nothing of the job, the layout or the recipe")
    rows = ((name, *map(_value, comparison.differences[name])) for name in facts)
    return headed(("", *names), "l" + "w" * len(names), rows)


def _value(value: Value | None) -> str:
    return "–" if value in (None, "") else written(value)


def _memory(comparison: Comparison, names: Sequence[str], items: Sequence[str]) -> Table:
    words = {**MEMORY, "peak_allocated_bytes": "peak of the allocator"}
    rows = (
        (word, *("–" if value is None else gibibytes(float(value)) for value in comparison.differences[name]))
        for name, word in words.items()
        if name in items
    )
    return headed(("", *names), "l" + "w" * len(names), rows)


def _waterfall(
    rows: Sequence[WaterfallTerm], first: Compared, other: Compared, first_name: str, other_name: str
) -> Table:
    like_s = max(first.step_s, other.step_s)
    shown = [row for row in rows if max(abs(row.first_s), abs(row.other_s)) >= LEAST_SHARE * like_s]
    shown.append(WaterfallTerm(term="step", first_s=first.step_s, other_s=other.step_s))
    table = listed("compared_terms", shown, bold={len(shown) - 1}, terms=TERMS, like_s=like_s)
    for column, name in zip(table.columns[1:], (first_name, other_name), strict=False):
        column.header = Text(name)
    table.add_row("tokens a second", large(first.tokens_per_s), large(other.tokens_per_s))
    return table


MOST_ROWS = 4
"""Settings, terms and unknown options that are named; the others are counted."""
RULES = {
    "refused": "The trainer refuses this configuration.",
    "memory": "A GPU has less memory than this configuration needs.",
    "slower": "A step takes longer than under the configuration that this one replaces.",
    "unknown": "A setting that may change seconds or bytes is not known to the planner.",
    "unreadable": "This is no configuration that can be priced.",
}
"""The sentence of each kind of finding, by the id under which SARIF lists it."""


def render_check(check: Check) -> Parts:
    """The file's name, and a line for each question."""
    new = check.new
    yield Text(f"{new.file}: {new.model} on {new.num_gpus:,} × {new.hardware}, {new.source}", style="bold")
    yield columns("lw", _questions(check))


def markdown(checks: Sequence[Check]) -> str:
    """A section for each file, as a comment of a pull request shows it."""
    lines = []
    for check in checks:
        lines += [f"### `{check.new.file}`", "", "| | |", "|--|--|"]
        lines += [f"| {title} | {text.replace('|', chr(92) + '|')} |" for title, text in _questions(check)]
        lines.append("")
    return "\n".join(lines)


def sarif(checks: Sequence[Check], version: str, failed: Mapping[str, PlannerError] | None = None) -> Fields:
    """A SARIF 2.1.0 log: a result for each finding of each file, and for each file that could not be priced."""
    found = [(check.new.file, rule, text) for check in checks for rule, text in _findings(check)]
    found += [
        (file, "refused" if e.exit_code == REFUSED else "unreadable", e.message) for file, e in (failed or {}).items()
    ]
    results = [
        {
            "ruleId": rule,
            "level": "warning" if rule in ("slower", "unknown") else "error",
            "message": {"text": text},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": file}}}],
        }
        for file, rule, text in found
    ]
    rules = [{"id": name, "shortDescription": {"text": text}} for name, text in RULES.items()]
    driver = {"name": "plan check", "version": version, "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": results}],
    }


def _findings(check: Check) -> Iterator[tuple[str, str]]:
    """The id and the text of everything that is wrong."""
    new = check.new
    yield from (("refused", text) for text in new.refused)
    if not new.fits:
        yield "memory", _needs(new)
    if check.is_slower or check.is_fuller:
        yield "slower", _against(check)
    yield from (("unknown", f"{name} {value}".strip()) for name, value in new.unknown.items())


def _questions(check: Check) -> Iterator[list[str]]:
    """A title and a text for each question."""
    against = "" if check.old is None else _against(check)
    changed, moved = _because(check)
    return told(
        "check_questions", new=check.new, needs=_needs(check.new), against=against, changed=changed, moved=moved,
        few=_few, most=MOST_ROWS,
    )  # fmt: skip


def _few(texts: list[str]) -> str:
    rest = len(texts) - MOST_ROWS
    return "; ".join(texts[:MOST_ROWS]) + (f"; and {rest} more" if rest > 0 else "")


def _needs(new: CheckedFile) -> str:
    return sentence("check_needs", new=new, sure=fits_with(new.oom_probability))


def _against(check: Check) -> str:
    old, more = check.old, check.slower_fraction
    assert old is not None
    assert more is not None
    return sentence("check_against", old=old, more=more, grown=check.new.needed_bytes - old.needed_bytes)


def _because(check: Check) -> tuple[list[str], list[str]]:
    """The settings that differ from the old file's, and the terms that make the difference."""
    comparison, step_s = check.comparison, check.new.step_s
    if comparison is None:
        return [], []
    changed = [
        f"{name} {_value(old)} → {_value(new)}"
        for name, (old, new) in comparison.differences.items()
        if name not in (*MEMORY, *FIGURES, "peak_allocated_bytes")
    ]
    moved = [row for row in comparison.waterfalls[0] if abs(row.seconds) > 0.002 * step_s]
    return changed, [f"{TERMS.get(row.term, row.term)} {signed_seconds(row.seconds, step_s)}" for row in moved]


_MARKS = {"fewest_gpus": "fewest GPUs", "cheapest": "cheapest", "fastest": "fastest"}


@as_group
def render_sweep(sweep: Sweep) -> Parts:
    """The whole answer, made for 80 columns."""
    yield Text(says_sweep(sweep), style="bold")
    yield section("The points", _table(sweep, SPEEDS))
    if costs := _costs(sweep):
        yield section("The whole run", _table(sweep, costs))
    failed = [f"{name_of(point, sweep)}: {point.reason}" for point in sweep.points if point.reason]
    if failed:
        yield section("Points that do not fit, or with more risk than was accepted", bullets(failed))


def says_sweep(sweep: Sweep) -> str:
    """One sentence for each answer."""
    answers = [
        f"{_MARKS[name]}: {name_of(sweep.points[number], sweep)}{_figures(sweep.points[number])}"
        for name, number in sweep.answers.items()
        if number is not None
    ]
    goal, met = " and ".join(sentences("sweep_goal", goal=sweep.goal)), sum(map(sweep.goal.is_met, sweep.points))
    return sentence("sweep_says", told=answers, total=len(sweep.points), goal=goal, met=met)


def _figures(point: Point) -> str:
    return sentence("sweep_figures", point=point, dollars=_dollars)


def _dollars(usd: float) -> str:
    """`35.97M`, `412`, and cents of a sum below a hundred."""
    return large(usd) if usd >= 100 else f"{usd:.2f}"


def swept_axes(sweep: Sweep) -> list[str]:
    """The options in which points differ; the GPUs where there is one point only."""
    names = dict.fromkeys(name for point in sweep.points for name in point.options)
    differing = [name for name in names if len({point.options.get(name) for point in sweep.points}) > 1]
    return differing or ["gpus"]


def name_of(point: Point, sweep: Sweep) -> str:
    """The values of a point's swept options: `1,024 GPUs, h200`."""
    values = [(name, point.options[name]) for name in swept_axes(sweep) if name in point.options]
    return ", ".join(f"{value:,} GPUs" if name == "gpus" else _option(name, value) for name, value in values)


def _option(name: str, value: Value) -> str:
    return f"{name} {written(value)}" if isinstance(value, int | float) else str(value)


def _fits(point: Point) -> str:
    return "no" if point.step_s is None else fits_with(point.oom_probability).replace("over ", ">") or "yes"


def _shown(value: float | None, write: Callable[[float], str]) -> str:
    return "–" if value is None else write(value)


def _percent(value: float) -> str:
    return percent(value, 0)


def _brief(layout: Layout) -> str:
    """`tp8 pp16 dp16 mb1`: the sizes of a layout in a column's width."""
    sizes = (f"{axis.lower().replace(' ', '')}" for axis in layout.axes)
    return f"{' '.join(sizes)} mb{layout.micro_batch_size}"


LAYOUT = "layout"
Column = Callable[[Point], str]
SPEEDS: dict[str, Column] = {
    "fits": _fits,
    "step": lambda point: _shown(point.step_s, seconds),
    "tokens/s": lambda point: _shown(point.tokens_per_s, large),
    "MFU": lambda point: _shown(point.mfu, percent),
    "±": lambda point: width(point.step_s_interval),
    "scaling": lambda point: _shown(point.scaling_efficiency, _percent),
    LAYOUT: lambda point: _brief(point.parallelism) if point.parallelism else point.layout,
}
"""Columns of the points; the interval is that of the three numbers before it."""
COSTS: dict[str, Column] = {
    "days": lambda point: _shown(point.days, digits),
    "dollars": lambda point: _shown(point.usd, _dollars),
    "MWh": lambda point: _shown(point.mwh, digits),
    "±": lambda point: width(point.days_interval),
    "in time": lambda point: _shown(point.deadline_probability, _percent),
}
"""Columns of the whole run, likewise."""


def _costs(sweep: Sweep) -> dict[str, Column]:
    """The columns of the whole run that have numbers."""
    if all(point.days is None for point in sweep.points):
        return {}
    short = all(point.days is None or point.days < 1 for point in sweep.points)
    columns = {"time" if short and k == "days" else k: v for k, v in COSTS.items()}
    if short:
        columns["time"] = lambda point: _shown(point.days, time_of)
    return columns if sweep.goal.deadline_days is not None else {k: v for k, v in columns.items() if k != "in time"}


def _cells(point: Point, sweep: Sweep) -> list[str]:
    values = [point.options.get(name) for name in swept_axes(sweep)]
    return ["–" if value is None else f"{value:,}" if type(value) is int else written(value) for value in values]


def _table(sweep: Sweep, figures: Mapping[str, Column]) -> Table:
    axes = [axis.replace("_", " ") for axis in swept_axes(sweep)]
    sides = "r" * len(axes) + "".join("w" if head == LAYOUT else "r" for head in figures)
    table = headed((*axes, *figures), sides, gap=1 if LAYOUT in figures else 2)
    for number, point in enumerate(sweep.points):
        cells = [column(point) for column in figures.values()]
        table.add_row(*_cells(point, sweep), *cells, style="bold" if number in sweep.pareto else "")
    return table


def as_csv(sweep: Sweep) -> str:
    """Every point as a line of comma-separated values: options, figures, both ends of each interval."""
    axes = list(dict.fromkeys(name for point in sweep.points for name in point.options))
    rows = [_flat(point) for point in sweep.points]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*axes, *rows[0]] if rows else axes, lineterminator="\n")
    writer.writeheader()
    for point, row in zip(sweep.points, rows, strict=True):
        writer.writerow({**point.options, **row})
    return text.getvalue()


def _flat(point: Point) -> dict[str, Value | None]:
    flat: dict[str, Value | None] = {}
    for name in Point.model_fields:
        value = getattr(point, name)
        if name == "options":
            continue
        if name.endswith("_interval"):
            low, high = value or (None, None)
            flat |= {f"{name}_low": low, f"{name}_high": high}
        else:
            flat[name] = value
    return flat
