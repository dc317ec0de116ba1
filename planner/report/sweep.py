"""The answer of `plan sweep`: a table of points, the answers that it gives, and the points as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.answer import Interval, Layout, half_width
from planner.decide.sweep import Point, Sweep
from planner.report.format import digits, fits_with, large, percent, seconds
from planner.report.months import duration
from planner.report.pieces import as_group, bullets, headed, section
from planner.trainers.switches import Value, written

_MARKS = {"fewest_gpus": "fewest GPUs", "cheapest": "cheapest", "fastest": "fastest"}


@as_group
def render_sweep(sweep: Sweep) -> Iterator[RenderableType]:
    """The whole answer, made for 80 columns."""
    yield Text(says(sweep), style="bold")
    yield section("The points", _table(sweep, SPEEDS))
    if costs := _costs(sweep):
        yield section("The whole run", _table(sweep, costs))
    failed = [f"{name_of(point, sweep)}: {point.reason}" for point in sweep.points if point.reason]
    if failed:
        yield section("Points that do not fit, or with more risk than was accepted", bullets(failed))


def says(sweep: Sweep) -> str:
    """One sentence for each answer."""
    told = [
        f"{_MARKS[name]}: {name_of(sweep.points[number], sweep)}{_figures(sweep.points[number])}"
        for name, number in sweep.answers.items()
        if number is not None
    ]
    num_points, goal = len(sweep.points), _goal(sweep)
    if not told:
        return f"None of {num_points} points fits{' with a run that' if goal else ''}{goal}."
    met = sum(map(sweep.goal.is_met, sweep.points))
    begin = f"The run{goal} at {met} of {num_points} points; " if goal else f"Of {num_points} points, "
    return begin + "; ".join(told) + "."


def _goal(sweep: Sweep) -> str:
    goal, terms = sweep.goal, []
    if goal.deadline_days is not None:
        terms.append(f"ends within {digits(goal.deadline_days)} days")
    if goal.budget_usd is not None:
        terms.append(f"costs at most ${large(goal.budget_usd)}")
    return f" {' and '.join(terms)}" if terms else ""


def _figures(point: Point) -> str:
    if point.days is not None:
        usd = "" if point.usd is None else f", ${_dollars(point.usd)}"
        return f" ({_time(point.days)}{usd})"
    return "" if point.tokens_per_s is None else f" ({large(point.tokens_per_s)} tokens/s)"


def _dollars(usd: float) -> str:
    """`35.97M`, `412`, and cents of a sum below a hundred."""
    return large(usd) if usd >= 100 else f"{usd:.2f}"


def _time(days: float) -> str:
    """`41.7 days`, and hours or minutes of a run below a day."""
    return f"{digits(days)} days" if days >= 1 else duration(86_400 * days)


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


def _width(interval: Interval | None) -> str:
    return "–" if interval is None else percent(half_width(interval), 0)


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
    "±": lambda point: _width(point.step_s_interval),
    "scaling": lambda point: _shown(point.scaling_efficiency, _percent),
    LAYOUT: lambda point: _brief(point.parallelism) if point.parallelism else point.layout,
}
"""Columns of the points; the interval is that of the three numbers before it."""
COSTS: dict[str, Column] = {
    "days": lambda point: _shown(point.days, digits),
    "dollars": lambda point: _shown(point.usd, _dollars),
    "MWh": lambda point: _shown(point.mwh, digits),
    "±": lambda point: _width(point.days_interval),
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
        columns["time"] = lambda point: _shown(point.days, _time)
    return columns if sweep.goal.deadline_days is not None else {k: v for k, v in columns.items() if k != "in time"}


def _cells(point: Point, sweep: Sweep) -> list[str]:
    values = [point.options.get(name) for name in swept_axes(sweep)]
    return ["–" if value is None else f"{value:,}" if type(value) is int else written(value) for value in values]


def _table(sweep: Sweep, figures: Mapping[str, Column]) -> Table:
    axes = [axis.replace("_", " ") for axis in swept_axes(sweep)]
    sides = "r" * len(axes) + "".join("w" if head == LAYOUT else "r" for head in figures)
    table = headed((*axes, *figures), sides, style="dim", gap=1 if LAYOUT in figures else 2)
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
