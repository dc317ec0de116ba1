"""The screen of `plan observe --follow`: where a run stands, in at most 80 columns; and the same in one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from planner.observe.follow.state import Standing
from planner.report.format import gibibytes, large, percent, seconds, span
from planner.report.months import duration
from planner.report.pieces import bullets, columns
from planner.specs.reading import printable

_BLOCKS = "▁▂▃▄▅▆▇█"
_MOST_CAUSES = 3
_LONG_SILENCE = 3.0
"""Silence of so many steps is worth a word."""
_STYLES = {"in band": "green", "above": "bold red", "below": "bold yellow"}
_DAY_S = 86400.0


def render_standing(found: Standing) -> RenderableType:
    """The whole screen."""
    head = Text(f"{printable(found.source, 40)}  ", style="bold")
    head.append(_counted(found))
    if found.step is None:
        return Group(head, Text(found.says))
    table = columns("l", "r", None)
    for row in _rows(found):
        table.add_row(*row)
    parts: list[RenderableType] = [head, Text(_sentence(found), style=_STYLES.get(found.place, "")), table]
    if found.causes:
        parts += [Text("likely causes", style="bold"), bullets(_causes(found))]
    return Group(*parts)


def line_of(found: Standing) -> str:
    """One line, for logs."""
    if found.step is None or found.window_step_s is None:
        return found.says
    parts = [_counted(found), f"{seconds(found.window_step_s)} a step", _place(found)]
    if found.mfu is not None:
        parts.append(f"MFU {percent(found.mfu)}")
    elif found.tokens_per_s is not None:
        parts.append(f"{large(round(found.tokens_per_s))} tokens/s")
    if found.peak_memory_bytes is not None:
        parts.append(f"{gibibytes(found.peak_memory_bytes)} GiB")
    if found.eta_s is not None:
        parts.append(f"{until(found.eta_s)} left")
    if found.causes:
        parts.append(f"likely {found.causes[0].name}")
    return "  ".join(parts)


def sparkline(values: Sequence[float]) -> str:
    """Values as blocks of eight heights, from the least to the most; level ones are low."""
    if not values:
        return ""
    low, high = min(values), max(values)
    # noise of less than a twentieth is no mountain
    scale = max(high - low, 0.05 * high)
    return "".join(_BLOCKS[min(7, int(8 * (value - low) / scale))] if scale else _BLOCKS[0] for value in values)


def until(value_s: float) -> str:
    """`3.2 d`, `5.1 h`, `12 min`."""
    return f"{value_s / _DAY_S:,.1f} d" if value_s >= 2 * _DAY_S else duration(value_s)


def _counted(found: Standing) -> str:
    if found.step is None:
        return ""
    return f"step {found.step:,}" + (f" of {found.total_steps:,}" if found.total_steps else "")


def _place(found: Standing) -> str:
    if found.band_s is None:
        return found.place
    around = span(*found.band_s, found.band_s[1])
    if found.place in ("above", "below"):
        return f"{found.place} {around}, {found.out_steps:,} of {found.allowed_steps:,} steps"
    return f"{found.place} {around}"


def _sentence(found: Standing) -> str:
    said = found.says[:1].upper() + found.says[1:]
    if found.place in ("above", "below") and not found.rings:
        said += f"; {found.allowed_steps:,} ring the alarm"
    return f"{said}."


def _rows(found: Standing) -> Iterator[tuple[str, str, str]]:
    like_s = found.window_step_s or found.step_s or 1.0
    if found.step_s is not None:
        yield "last step", seconds(found.step_s, like_s), sparkline(found.recent_s[-40:])
    if found.window_step_s is not None:
        predicted = f"{seconds(found.predicted_step_s, like_s)} expected" if found.predicted_step_s else ""
        yield f"median of {found.window_steps:,}", seconds(found.window_step_s, like_s), predicted
    if found.drift_fraction is not None:
        yield "drift", f"{100 * found.drift_fraction:+.1f}%", "since the first steady steps"
    yield from _speeds(found)
    yield from _memory(found)
    if found.predicted_bubble_fraction is not None:
        computing = found.predicted_computing_fraction or 0.0
        yield "bubble", percent(found.predicted_bubble_fraction), f"predicted; {percent(computing)} computing"
    if found.computing_fraction is not None:
        waits = "" if found.waits_fraction is None else f"; {percent(found.waits_fraction)} in waits of passes"
        yield "computing", percent(found.computing_fraction), f"by timers{waits}"
    if found.data_fraction is not None:
        yield "waiting for data", percent(found.data_fraction), "on the slowest rank, by timers"
    yield from _events(found)


def _speeds(found: Standing) -> Iterator[tuple[str, str, str]]:
    if found.tokens_per_s is not None:
        predicted = found.predicted_tokens_per_s
        beside = f"{large(round(predicted))} expected" if predicted else ""
        yield "tokens/s", large(round(found.tokens_per_s)), beside
    if found.mfu is not None:
        yield "MFU", percent(found.mfu), f"{percent(found.predicted_mfu)} expected" if found.predicted_mfu else ""
    elif found.printed_mfu is not None:
        yield "MFU printed", percent(found.printed_mfu), "by the trainer's own definition"


def _memory(found: Standing) -> Iterator[tuple[str, str, str]]:
    if found.peak_memory_bytes is None:
        return
    beside = [found.peak_memory_kind or ""]
    if found.predicted_memory_bytes:
        beside.append(f"{gibibytes(found.predicted_memory_bytes)} GiB expected")
    yield "memory, peak", f"{gibibytes(found.peak_memory_bytes)} GiB", ", ".join(filter(None, beside))
    if found.memory_bytes_per_step:
        full = f", full at step {found.memory_full_step:,}" if found.memory_full_step else ""
        yield "memory grows", f"{found.memory_bytes_per_step * 1000 / 2**30:.2f} GiB", f"in 1,000 steps{full}"
    if found.num_alloc_retries:
        yield "allocator retries", f"{found.num_alloc_retries:,}", "the cache was freed to find memory"
    if found.num_ooms:
        yield "out of memory", f"{found.num_ooms:,}", "errors in the log"


def _events(found: Standing) -> Iterator[tuple[str, str, str]]:
    for name, step in (("last checkpoint", found.checkpoint_step), ("last evaluation", found.evaluation_step)):
        if step is not None and found.step is not None:
            yield name, f"step {step:,}", f"{found.step - step:,} steps ago"
    if found.num_restarts:
        yield "restarts", f"{found.num_restarts:,}", f"{found.lost_steps:,} steps made again"
    if found.eta_s is not None and found.pace_s is not None:
        yield "ends in", until(found.eta_s), f"at {seconds(found.pace_s)} a step, with what comes between"
    elif found.total_steps is None:
        yield "ends in", "–", "the log names no last step: add --tokens"
    if found.step_s is not None and found.silent_s > max(60.0, _LONG_SILENCE * found.step_s):
        yield "silent", duration(found.silent_s), "since the last step"


def _causes(found: Standing) -> Iterator[str]:
    for cause in found.causes[:_MOST_CAUSES]:
        where = f", {printable(cause.where, 40)}" if cause.where else ""
        yield f"{cause.name}{where} ({percent(cause.likelihood, 0)}): {printable(cause.evidence, 300)}"
