"""The answer of `plan check` in ten lines, as Markdown for a pull request, and as SARIF for a code scanner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from planner.decide.check import Check, CheckedFile
from planner.decide.compare import FIGURES
from planner.report.comparison import TERMS
from planner.report.format import fits_with, gibibytes, large, percent, seconds, signed_seconds, span
from planner.report.labels import MEMORY
from planner.report.pieces import columns
from planner.trainers.switches import written

MOST_ROWS = 4
"""Settings, terms and unknown options that are named; the others are counted."""
RULES = {
    "refused": "The trainer refuses this configuration.",
    "memory": "A GPU has less memory than this configuration needs.",
    "slower": "A step takes longer than under the configuration that this one replaces.",
    "unknown": "A setting that may change seconds or bytes is not known to the planner.",
}
"""The sentence of each kind of finding, by the id under which SARIF lists it."""


def render_check(check: Check) -> Iterator[RenderableType]:
    """The file's name, and a line for each question."""
    new = check.new
    yield Text(f"{new.file}: {new.model} on {new.num_gpus:,} × {new.hardware}, {new.source}", style="bold")
    table = columns("l", None)
    for title, text in _rows(check):
        table.add_row(title, text)
    yield table


def markdown(checks: Sequence[Check]) -> str:
    """A section for each file, as a comment of a pull request shows it."""
    lines = []
    for check in checks:
        lines += [f"### `{check.new.file}`", "", "| | |", "|--|--|"]
        lines += [f"| {title} | {text.replace('|', chr(92) + '|')} |" for title, text in _rows(check)]
        lines.append("")
    return "\n".join(lines)


def sarif(checks: Sequence[Check], version: str) -> dict[str, Any]:
    """A SARIF 2.1.0 log: a result for each finding of each file."""
    results = [
        {
            "ruleId": rule,
            "level": "warning" if rule in ("slower", "unknown") else "error",
            "message": {"text": text},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": check.new.file}}}],
        }
        for check in checks
        for rule, text in _findings(check)
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
        yield "memory", _memory(new)
    if check.is_slower or check.is_fuller:
        yield "slower", _against(check)
    yield from (("unknown", f"{name} {value}".strip()) for name, value in new.unknown.items())


def _rows(check: Check) -> Iterator[tuple[str, str]]:
    """A title and a text for each question."""
    new = check.new
    yield "starts", "yes" if not new.refused else f"no: {'; '.join(new.refused[:MOST_ROWS])}"
    yield "fits", _memory(new)
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


def _memory(new: CheckedFile) -> str:
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


def _value(value: Any) -> str:
    return "–" if value is None else written(value)
