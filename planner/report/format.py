"""Quantities as people read them: 22.1 s, 1.4M, 71.3 GiB, and bars."""

from __future__ import annotations

from planner.specs.units import gib

SURE = "over 99%"
"""A probability that calls for no remark."""
_LARGE = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"))
_UNITS = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))


def fits_with(oom_probability: float | None) -> str:
    """The probability of having enough memory, in whole percent; empty where none is known."""
    if oom_probability is None:
        return ""
    if oom_probability < 0.01:
        return SURE
    return "under 1%" if oom_probability > 0.995 else f"{1 - oom_probability:.0%}"


def unit_for(like_s: float) -> tuple[float, str]:
    """The unit that suits `like_s`: how many of it make a second, and its name."""
    return next((factor, unit) for least, factor, unit in _UNITS if like_s >= least)


def seconds(value_s: float, like_s: float | None = None) -> str:
    """`22.08 s`, `812 ms`, `-3.120 s`, `0 s`; in the unit that suits `like_s` where columns are to be compared."""
    factor, unit = unit_for(like_s or abs(value_s))
    return f"{digits(value_s * factor) if like_s is None else f'{value_s * factor:,.2f}'} {unit}" if value_s else "0 s"


def signed_seconds(change_s: float, like_s: float) -> str:
    """`+0.24 s`, `-12.00 ms`, and `0 s` for what would round to nothing."""
    size = seconds(abs(change_s), like_s)
    return f"{'-' if change_s < 0 else '+'}{size}" if size.strip("0. µms") else "0 s"


def span(low_s: float, high_s: float, like_s: float) -> str:
    """`16.00–21.00 ms`: both ends in the unit that suits `like_s`."""
    factor, unit = unit_for(like_s)
    return f"{digits(low_s * factor)}–{digits(high_s * factor)} {unit}"


def digits(value: float) -> str:
    """A number to three digits or four, never in powers of ten: `1,234`, `412`, `41.70`, `0.812`."""
    size = abs(value)
    places = 0 if size >= 100 else 2 if size >= 10 else 3
    return f"{value:,.{places}f}"


def large(value: float) -> str:
    """Counts with a suffix from a million on: `405.9B`, `15T`, `2,048`."""
    for size, suffix in _LARGE:
        if value >= size:
            return f"{value / size:.4g}{suffix}" if value < 1e4 * size else f"{value / size:,.0f}{suffix}"
    return f"{value:,.0f}"


def percent(fraction: float, places: int = 1) -> str:
    """`41.7%`."""
    return f"{100 * fraction:.{places}f}%"


def gibibytes(num_bytes: float) -> str:
    """`71.3`, without the unit, which stands in the column's head."""
    return f"{gib(num_bytes):,.1f}"


def bar(fraction: float, width: int, track: str = " ") -> str:
    """`fraction` of `width` cells filled, never more than all of them, and at least one where there is anything."""
    filled = min(width, max(round(fraction * width), 1 if fraction > 0 else 0))
    return "█" * filled + track * (width - filled)
