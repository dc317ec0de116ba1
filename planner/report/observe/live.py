"""A followed run in one line: where it stands."""

from __future__ import annotations

from planner.observe.follower import FollowedRun
from planner.report.format import gibibytes, large, percent, seconds, span
from planner.report.months import duration

_DAY_S = 86400.0


def line_of(found: FollowedRun) -> str:
    """`step 80 of 500  11.00 s a step  above 8.578–9.482 s, 8 of 20 steps  1.3 h left`."""
    if found.step is None or found.window_step_s is None:
        return found.says
    step = f"step {found.step:,}" + (f" of {found.total_steps:,}" if found.total_steps else "")
    parts = [step, f"{seconds(found.window_step_s)} a step", _place(found)]
    if found.mfu is not None:
        parts.append(f"MFU {percent(found.mfu)}")
    elif found.tokens_per_s is not None:
        parts.append(f"{large(round(found.tokens_per_s))} tokens/s")
    if found.peak_memory_bytes is not None:
        parts.append(f"{gibibytes(found.peak_memory_bytes)} GiB")
    if found.eta_s is not None:
        left = f"{found.eta_s / _DAY_S:,.1f} d" if found.eta_s >= 2 * _DAY_S else duration(found.eta_s)
        parts.append(f"{left} left")
    return "  ".join(parts)


def _place(found: FollowedRun) -> str:
    if found.band_s is None:
        return found.place
    around = span(*found.band_s, found.band_s[1])
    if found.place in ("above", "below"):
        return f"{found.place} {around}, {found.out_steps:,} of {found.allowed_steps:,} steps"
    return f"{found.place} {around}"
