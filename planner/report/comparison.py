"""The answers of `plan compare` and `plan check`: what differs between plans, probes, runs and files for review."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os.path import commonpath
from pathlib import PurePath
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.decide.check import REFUSED, Check, CheckedFile
from planner.decide.compare import FIGURES, Compared, Comparison, WaterfallTerm
from planner.errors import PlannerError
from planner.report.format import fits_with, gibibytes, large, percent, seconds, signed_seconds, span
from planner.report.labels import BREAKDOWN, LEAST_SHARE, MEMORY, NINE_OF_TEN_LOSE, RANKED_FIRST
from planner.report.pieces import as_group, columns, headed, section
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
}
"""The terms of a step in words."""
_CLOSE = "That is closer than predictions can tell layouts apart"


@as_group
def render_comparison(comparison: Comparison) -> Iterator[RenderableType]:
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
    if abs(rate - 1) < LEAST_SHARE:
        return f"{other_name} is as fast: {steps}."
    many = f"{rate:.3g} × as many" if rate >= 2 else f"{percent(rate - 1)} more"
    how = many if rate > 1 else f"{percent(1 - rate)} fewer"
    jobs = list(_other_jobs(first, other))
    another = f", with {', '.join(jobs)}" if jobs else ""
    # terms of two models do not explain each other
    causes = "" if "another model" in jobs else _causes(rows, like_s)
    return f"{other_name} trains {how} tokens a second{another}: {steps}{causes}."


def _other_jobs(first: Compared, other: Compared) -> Iterator[str]:
    """The ways in which two sides are not one job."""
    if first.facts.get("model") != other.facts.get("model"):
        yield "another model"
    gpus = first.facts.get("gpus"), other.facts.get("gpus")
    if isinstance(gpus[0], int) and isinstance(gpus[1], int) and gpus[0] != gpus[1]:
        yield f"{gpus[1] / gpus[0]:.3g} × the GPUs"
    if first.tokens_per_step != other.tokens_per_step:
        yield "another batch"


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
    return headed(("", *names), "l" + "w" * len(names), rows, style="dim")


def _value(value: Value | None) -> str:
    return "–" if value in (None, "") else written(value)


def _memory(comparison: Comparison, names: Sequence[str], items: Sequence[str]) -> Table:
    words = {**MEMORY, "peak_allocated_bytes": "peak of the allocator"}
    rows = (
        (word, *("–" if value is None else gibibytes(float(value)) for value in comparison.differences[name]))
        for name, word in words.items()
        if name in items
    )
    return headed(("", *names), "l" + "w" * len(names), rows, style="dim")


def _waterfall(
    rows: Sequence[WaterfallTerm], first: Compared, other: Compared, first_name: str, other_name: str
) -> Table:
    like_s = max(first.step_s, other.step_s)
    table = headed(("", first_name, other_name, "difference"), "lrrr", style="dim")
    for row in rows:
        if max(abs(row.first_s), abs(row.other_s)) >= LEAST_SHARE * like_s:
            numbers = (seconds(row.first_s, like_s), seconds(row.other_s, like_s), signed_seconds(row.seconds, like_s))
            table.add_row(TERMS[row.term], *numbers)
    steps = (seconds(first.step_s, like_s), seconds(other.step_s, like_s))
    table.add_row("step", *steps, signed_seconds(other.step_s - first.step_s, like_s), style="bold")
    rates = [large(side.tokens_per_s) for side in (first, other)]
    table.add_row("tokens a second", *rates)
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


def render_check(check: Check) -> Iterator[RenderableType]:
    """The file's name, and a line for each question."""
    new = check.new
    yield Text(f"{new.file}: {new.model} on {new.num_gpus:,} × {new.hardware}, {new.source}", style="bold")
    table = columns("lw")
    for title, text in _questions(check):
        table.add_row(title, text)
    yield table


def markdown(checks: Sequence[Check]) -> str:
    """A section for each file, as a comment of a pull request shows it."""
    lines = []
    for check in checks:
        lines += [f"### `{check.new.file}`", "", "| | |", "|--|--|"]
        lines += [f"| {title} | {text.replace('|', chr(92) + '|')} |" for title, text in _questions(check)]
        lines.append("")
    return "\n".join(lines)


def sarif(checks: Sequence[Check], version: str, failed: Mapping[str, PlannerError] | None = None) -> dict[str, Any]:
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


def _questions(check: Check) -> Iterator[tuple[str, str]]:
    """A title and a text for each question."""
    new = check.new
    yield "starts", "yes" if not new.refused else f"no: {'; '.join(new.refused[:MOST_ROWS])}"
    yield "fits", _needs(new)
    yield "step", _step(new)
    if check.old is not None:
        yield "against", _against(check)
        yield from _because(check)
    if new.better and new.better_step_s is not None:
        saved = percent(1 - new.better_step_s / new.step_s)
        yield "better", f"{new.better}: {seconds(new.better_step_s)} a step, {saved} less"
    if new.unknown:
        yield "unknown", _few([f"{name} {value}".strip() for name, value in new.unknown.items()])
    if new.notes:
        yield "assumed", _few(list(new.notes))


def _few(texts: list[str]) -> str:
    rest = len(texts) - MOST_ROWS
    return "; ".join(texts[:MOST_ROWS]) + (f"; and {rest} more" if rest > 0 else "")


def _needs(new: CheckedFile) -> str:
    sure = fits_with(new.oom_probability)
    where = f"stage {new.fullest_stage} needs {gibibytes(new.needed_bytes)} of {gibibytes(new.capacity_bytes)} GiB"
    return f"{'yes' if new.fits else 'no'}{f', with {sure}' if sure and new.fits else ''}: {where}"


def _step(new: CheckedFile) -> str:
    interval = new.step_s_interval
    between = "" if interval is None else f" ({span(*interval, new.step_s)} with 80%)"
    price = "" if new.usd_per_day is None else f", ${large(new.usd_per_day)} a day"
    return f"{seconds(new.step_s)}{between}, {large(new.tokens_per_day)} tokens a day{price}"


def _against(check: Check) -> str:
    old, more = check.old, check.slower_fraction
    assert old is not None
    assert more is not None
    word = "slower" if more > 0 else "faster"
    speed = "as fast a token" if abs(more) < 0.0005 else f"{percent(abs(more))} {word} a token"
    grown = check.new.needed_bytes - old.needed_bytes
    return f"{old.file}: {speed}, {gibibytes(abs(grown))} GiB {'more' if grown >= 0 else 'less'} on the fullest GPU"


def _because(check: Check) -> Iterator[tuple[str, str]]:
    """The settings that differ, and the terms that make the difference."""
    comparison = check.comparison
    assert comparison is not None
    beside = {*MEMORY, *FIGURES, "peak_allocated_bytes"}
    changed = [
        f"{name} {_value(old)} → {_value(new)}"
        for name, (old, new) in comparison.differences.items()
        if name not in beside
    ]
    if changed:
        yield "changed", _few(changed)
    step_s = check.new.step_s
    moved = [row for row in comparison.waterfalls[0] if abs(row.seconds) > 0.002 * step_s]
    if moved:
        told = [f"{TERMS.get(row.term, row.term)} {signed_seconds(row.seconds, step_s)}" for row in moved]
        yield "because", _few(told)
