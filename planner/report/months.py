"""Lines about months of training: the sustained step, what the whole run costs, and the share of it that trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from planner.answer import Goodput, Interval, Plan, PricedLayout, RunCost
from planner.report.format import digits, large, percent, seconds, span
from planner.report.rows import Figure

_DAY_S = 86_400.0
_MATTERS = 0.01
"""Share of the time that checkpoints take from which their source is shown."""


def sustained_figure(layout: PricedLayout) -> Figure | None:
    """The sustained step with its interval."""
    found = layout.sustained
    if found is None:
        return None
    values, ends = (found.step_s, *found.step_s_interval), span(*found.step_s_interval, like_s=found.step_s)
    return Figure("sustained over months", values, "s", seconds(found.step_s), ends)


def cost_figures(plan: Plan) -> tuple[Figure, ...]:
    """Days, GPU-hours, dollars and energy of the whole run, as far as they are known."""
    cost = plan.run_cost
    if cost is None:
        return ()
    figures = [
        Figure("time", (cost.days,), "days", *_time(cost)),
        Figure("GPU time", (cost.gpu_hours,), "GPU-hours", f"{large(cost.gpu_hours)} GPU-hours"),
    ]
    if cost.usd is not None:
        figures.append(Figure("price", (cost.usd,), "USD", f"${large(cost.usd)}", _ends(cost.usd_interval, large)))
    if cost.mwh is not None:
        figures.append(Figure("energy", (cost.mwh,), "MWh", f"{digits(cost.mwh)} MWh"))
    return (*figures, *_example_figures(cost))


def _time(cost: RunCost) -> tuple[str, str]:
    """The days of a run and their interval; those of a run of examples that ends within two days as hours or less."""
    if cost.num_steps is None or cost.days >= 2:
        return f"{digits(cost.days)} days", _ends(cost.days_interval, digits)
    return duration(cost.days * _DAY_S), _ends(cost.days_interval, lambda days: duration(days * _DAY_S))


def _example_figures(cost: RunCost) -> Iterator[Figure]:
    """The examples and steps of a run that is stated in them, and what padding takes."""
    if cost.num_steps is None:
        return
    if cost.examples is not None and cost.epochs is not None:
        seen = f"{cost.examples:,} examples × {cost.epochs:g} epoch{'' if cost.epochs == 1 else 's'}"
        yield Figure("examples", (float(cost.examples), cost.epochs), "examples", seen)
    yield Figure("steps", (cost.num_steps,), "steps", f"{math.ceil(cost.num_steps - 1e-6):,} steps")
    if cost.padding_fraction is not None and cost.packed_days is not None:
        packed = duration(cost.packed_days * _DAY_S) if cost.packed_days < 2 else f"{digits(cost.packed_days)} days"
        padding = f"padding {percent(cost.padding_fraction)} of tokens; packed it takes {packed}"
        yield Figure("padding", (cost.padding_fraction,), "fraction", padding)


def _ends(interval: Interval | None, write: Callable[[float], str]) -> str:
    return "" if interval is None else f"{write(interval[0])}–{write(interval[1])}"


def goodput_figures(plan: Plan) -> tuple[Figure, ...]:
    """The share of the run's time that trains, and what takes the rest."""
    found = plan.goodput
    if found is None:
        return ()
    effective, ends = found.effective_fraction, "–".join(f"{100 * end:.1f}" for end in found.interval)
    saved = f"checkpoint {duration(found.checkpoint_s)} every {duration(found.checkpoint_interval_s)}"
    return (
        Figure("effective", (effective,), "fraction", percent(effective), ends),
        Figure("interruptions", (found.failures_per_day,), "1/day", _interruptions(found)),
        Figure("restart", (found.restart_s,), "s", f"restart {duration(found.restart_s)}{_spares(found)}"),
        Figure("checkpoints", (found.checkpoint_s, found.checkpoint_interval_s), "s", saved),
        Figure(
            "evaluation", (found.evaluation_fraction,), "fraction", f"evaluation {percent(found.evaluation_fraction)}"
        ),
    )


def _interruptions(found: Goodput) -> str:
    rate = found.failures_per_day
    if rate >= 1:
        return f"{_short(rate)} interruptions a day"
    return f"an interruption every {_short(1 / rate)} days" if rate else "no interruptions"


def _spares(found: Goodput) -> str:
    count = found.num_spare_nodes
    if count is None:
        return ""
    return f" with {count} spare node{'' if count == 1 else 's'}" if count else " on average, without spare nodes"


def _short(value: float) -> str:
    """`5.1`, `42`: two digits, or three."""
    return f"{value:,.1f}" if value < 9.95 else f"{value:,.0f}"


def duration(value_s: float) -> str:
    """`4.2 s`, `9.3 min`, `1.2 h`: a time of people rather than of kernels."""
    units = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))
    size_s, unit = next((pair for pair in units if value_s >= pair[0]), units[-1])
    return f"{_short(value_s / size_s)} {unit}"


def says_sources(plan: Plan) -> list[tuple[str, str]]:
    """A subject and a source each, of the sustained step and, with a whole run, of what takes most of its time."""
    sustained, goodput = plan.best.sustained, plan.goodput
    lines = [] if sustained is None else [("sustained", sustained.source)]
    if goodput is None:
        return lines
    shown = {"failures": "failures_per_day", "restart": "restart_s"}
    if goodput.checkpoint_s > _MATTERS * goodput.checkpoint_interval_s:
        shown["checkpoint"] = "checkpoint_s"
    return lines + [(name, goodput.sources[field]) for name, field in shown.items() if field in goodput.sources]
