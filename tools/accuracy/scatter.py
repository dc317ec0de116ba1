"""Predicted against measured seconds as one HTML file that needs nothing else: a chart, then every run in a table."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from html import escape
from statistics import median
from threading import RLock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from markupsafe import Markup
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from planner.report.format import percent, seconds
from planner.report.html import draw, tag
from planner.report.pictures import PALETTE
from planner.validate.score import Scored

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logging.getLogger("matplotlib").setLevel(logging.WARNING)  # a first run would note that it looks for fonts
INK, SOFT, LINE, ALARM, PAPER = "#1c2128", "#59636e", "#d5dae0", "#b3261e", "#fefefe"
"""Colours of text, quiet text, grids, alarms and background."""
_SETTINGS = {
    "svg.hashsalt": "planner", "svg.fonttype": "none", "font.size": 9, "text.color": INK, "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT, "xtick.color": SOFT, "ytick.color": SOFT, "grid.color": LINE, "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False, "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "system-ui", "sans-serif"], "text.parse_math": False,
}  # fmt: skip
_LOCK = RLock()
"""A lock, since all threads share matplotlib's settings."""


@contextmanager
def drawing() -> Iterator[None]:
    """A context with our matplotlib settings in place of the user's own."""
    from matplotlib import style

    with _LOCK, style.context(["default", _SETTINGS]):
        yield


def figure(width_in: float, height_in: float) -> Figure:
    """An empty figure. Draw on it inside `with drawing():`, which gives new axes our settings."""
    from matplotlib.figure import Figure

    with drawing():
        return Figure(figsize=(width_in, height_in), layout="constrained")


def image(drawn: Figure, kind: Literal["png", "svg", "pdf"]) -> bytes:
    """The figure as a file's bytes."""
    file = io.BytesIO()
    dates = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with drawing():
        drawn.savefig(file, format=kind, dpi=150, metadata=dates[kind])
    return file.getvalue()


BAND_FRACTION = 0.1
COLOURS = (*PALETTE[:6], INK)
"""Colours that are seen as thin edges too, on white and on black."""
MARKERS = "oD^sv<>"
"""Shapes that look the same filled and hollow."""

_OF_PAGE = {
    INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)", ALARM: "var(--alarm)", PAPER: "var(--page)",
}  # fmt: skip
_HINT = "hint-"
_RECTANGLE = re.compile(r"M (\S+) (\S+) L (\S+) \2 L \3 (\S+) L \1 \4 (?:L \1 \2 )?z")


class Point(NamedTuple):
    """One run; hollow where it is no part of the score."""

    name: str
    family: str
    measured_s: float
    predicted_s: float
    counts: bool

    @property
    def error(self) -> float:
        """predicted / measured − 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def title(self) -> str:
        """The text that appears when the pointer rests on the point."""
        return (
            f"{self.name} ({self.family}): measured {seconds(self.measured_s)}, "
            f"predicted {seconds(self.predicted_s)}, {100 * self.error:+.1f}%"
        )


def points_of(scored: Iterable[Scored], each: bool) -> list[Point]:
    """The runs that were priced; but for `each` only those that count."""
    return [
        Point(run.row.id, run.row.family, run.row.measured.step_s, run.layout.step.step_s, run.row.counts)
        for run in scored
        if run.layout is not None and (each or run.row.counts)
    ]


def scatter_page(points: Sequence[Point]) -> str:
    """The whole page; the same points make the same bytes."""
    inside = sum(abs(point.error) <= BAND_FRACTION for point in points)
    said = f"{inside} of {len(points)} lie within ±{percent(BAND_FRACTION, 0)}, the grey band."
    if not all(point.counts for point in points):
        said += " Hollow ones are not scored: fields are assumed, or the source is to be used with care."
    heading = tag("header", tag("h1", f"Predicted and measured seconds of a step, {len(points)} runs"), tag("p", said))
    rows = [(p.name, p.family, seconds(p.measured_s), seconds(p.predicted_s), f"{100 * p.error:+.1f}%") for p in points]
    every = draw(
        "folded", "Every run", draw("table", ("run", "family", "measured", "predicted", "error"), rows, "llrrr")
    )
    charts = [draw_scatter(points), draw_families(points)] if points else []
    drawn = [tag("div", chart, class_="scroll") for chart in charts]
    body = Markup("\n").join([heading, *(draw("picture", one) for one in drawn), every])
    return draw("page", "Predicted and measured seconds of a step", body)


def looks(families: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A colour and a shape for each family; neighbours differ in both, and no two of 49 have the same."""
    return {
        name: (COLOURS[n % len(COLOURS)], MARKERS[(n + n // len(COLOURS)) % len(MARKERS)])
        for n, name in enumerate(families)
    }


def draw_scatter(points: Sequence[Point]) -> Markup:
    """Every run as a mark, by the look of its family, on two logarithmic axes of the same length."""
    drawn, families = figure(9.6, 7.2), looks(list(dict.fromkeys(point.family for point in points)))
    with drawing():
        axes = drawn.add_subplot()
        _draw_paper(axes, [value for point in points for value in (point.measured_s, point.predicted_s)])
        for number, point in enumerate(points):
            colour, marker = families[point.family]
            (mark,) = axes.plot(
                [point.measured_s], [point.predicted_s], marker, color=colour, markersize=5, linestyle="none",
                alpha=0.8, markerfacecolor=colour if point.counts else "none",
            )  # fmt: skip
            mark.set_gid(hint(number))
        handles = [
            axes.plot([], [], marker, color=colour, markersize=5, linestyle="none", label=name)[0]
            for name, (colour, marker) in families.items()
        ]
        drawn.legend(handles=handles, loc="outside right upper", fontsize=8, handletextpad=0.2)
    label = f"Predicted against measured seconds of a step, {len(points)} runs, both axes logarithmic"
    return svg(drawn, label, [point.title for point in points])


def draw_families(points: Sequence[Point]) -> Markup:
    """A row per family: the error of each of its runs, and their median."""
    families = list(dict.fromkeys(point.family for point in points))
    drawn, hints = figure(10.5, 0.8 + 0.2 * len(families)), list[str]()
    with drawing():
        axes = drawn.add_subplot()
        axes.axvspan(-100 * BAND_FRACTION, 100 * BAND_FRACTION, color=LINE, alpha=0.7, linewidth=0)
        for row, family in enumerate(families):
            errors = [100 * point.error for point in points if point.family == family]
            axes.plot(errors, [row] * len(errors), "|", color=INK, markersize=7, alpha=0.5)
            (mark,) = axes.plot([median(errors)], [row], "D", color=PALETTE[1], markersize=4)
            mark.set_gid(hint(row))
            hints.append(f"{family}, {len(errors)} runs: median {median(errors):+.1f}%")
        axes.set_yticks(range(len(families)), families, color=INK)
        axes.set_ylim(len(families) - 0.5, -0.5)
        axes.set_xlabel("predicted less measured, % of measured; a bar is a run, a diamond the median")
        axes.grid(axis="x")
    return svg(drawn, f"Errors of the runs of {len(families)} families, and their medians", hints)


def _draw_paper(axes: Any, values_s: Sequence[float]) -> None:
    """Axes with the diagonal and the band around it."""
    low_s, high_s = min(values_s) / 1.3, max(values_s) * 1.3
    ends = (low_s, high_s)
    over, under = ([end * (1 + sign * BAND_FRACTION) for end in ends] for sign in (1, -1))
    axes.fill_between(ends, under, over, color=LINE, alpha=0.7, linewidth=0)
    axes.plot(ends, ends, color=INK, linewidth=0.8, linestyle="--")
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, s", ylabel="predicted, s", aspect=1)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=30))
        axis.set_major_formatter(lambda value_s, _: f"{value_s:,g}")
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    axes.grid(color=LINE, linewidth=0.5)
    axes.tick_params(colors=SOFT)


def hint(number: int) -> str:
    """The gid that gives an artist the hint of that number in `svg`."""
    return f"{_HINT}{number}"


def svg(drawn: Figure, label: str, hints: Sequence[str] = ()) -> Markup:
    """The figure as part of a page: as wide as there is room, in the page's own colours, `label` read aloud.

    An artist whose gid is `hint(n)` shows `hints[n]` when the pointer rests on it. Several figures may share a page: a
    name that a figure refers to begins with a mark of its own, and the other names are left out.
    """
    with drawing():
        drawn.patch.set_alpha(0.0)
        for axes in drawn.axes:
            axes.patch.set_alpha(0.0)
    text = image(drawn, "svg").decode()
    for colour, of_page in _OF_PAGE.items():
        text = text.replace(colour, of_page)
    mark = sha256((label + text).encode()).hexdigest()[:8]
    text = re.sub(rf'<g id="{_HINT}([0-9]+)">', lambda found: f"<g><title>{escape(hints[int(found[1])])}</title>", text)
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: f' id="{mark}-{found[1]}"' if found[1] in used else "", text)
    text = re.sub(r'(url\(|href=")#', rf"\g<1>#{mark}-", text)
    head, body = text.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return Markup(f'{head} class="chart" role="img" aria-label="{escape(label)}">{_packed(body)}')


def _packed(text: str) -> str:
    """The same drawing in fewer bytes: places to a hundredth of a point, no empty groups, nothing between tags."""
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r"font-family: [^;]*; ", "", text)
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), text)
    text = re.sub(r"\s*\n\s*", " ", text).replace("> <", "><")
    text = re.sub(r"<g>(<text [^>]*>[^<]*</text>)</g>|<g></g>|<defs></defs>", r"\g<1>", text)
    return _RECTANGLE.sub(r"M\1 \2H\3V\4H\1z", text)
