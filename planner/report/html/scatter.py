"""Predicted against measured seconds as one HTML file that needs nothing else: a drawing, then every run in a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, floor, log10
from typing import NamedTuple

from planner.report.format import digits, percent, seconds
from planner.report.html.pieces import Html, folded, joined, page, table, tag

BAND_FRACTION = 0.1
_COLOURS = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#9c755f", "#17a2b8", "#d4a60a", "#ff7fb0", "#7f7f7f",
    "#2f4fd0", "#8fbf1f",
)  # fmt: skip
_SIZE, _LEFT, _TOP, _FOOT = 640, 70, 12, 50


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


def scatter_page(points: Sequence[Point]) -> str:
    """The whole page; the same points make the same bytes."""
    families = list(dict.fromkeys(point.family for point in points))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(families)}
    inside = sum(abs(point.error) <= BAND_FRACTION for point in points)
    said = f"{inside} of {len(points)} lie within ±{percent(BAND_FRACTION, 0)}, the grey band."
    if not all(point.counts for point in points):
        said += " Hollow ones are not scored: fields are assumed, or the source is to be used with care."
    heading = tag("header", tag("h1", f"Predicted and measured seconds of a step, {len(points)} runs"), tag("p", said))
    keys = (
        tag("span", tag("svg", _circle(5, 5, 4, colours[name]), viewBox="0 0 10 10", class_="key"), " ", name)
        for name in families
    )
    drawn = tag("figure", _drawing(points, colours), tag("figcaption", joined(keys, " ")))
    rows = [(p.name, p.family, seconds(p.measured_s), seconds(p.predicted_s), f"{100 * p.error:+.1f}%") for p in points]
    every = folded("Every run", table(("run", "family", "measured", "predicted", "error"), rows, "llrrr"))
    return page("Predicted and measured seconds of a step", heading, drawn, every)


class _Scale(NamedTuple):
    """Seconds on both axes, as powers of ten."""

    low: float
    high: float

    def across(self, value_s: float) -> float:
        return (log10(value_s) - self.low) / (self.high - self.low) * _SIZE + _LEFT

    def down(self, value_s: float) -> float:
        return _SIZE + _TOP - (log10(value_s) - self.low) / (self.high - self.low) * _SIZE


def _drawing(points: Sequence[Point], colours: dict[str, str]) -> Html:
    values = [value for point in points for value in (point.measured_s, point.predicted_s)] or [1.0]
    scale = _Scale(log10(min(values) / 1.3), log10(max(values) * 1.3))
    label = "predicted against measured seconds of a step, both axes logarithmic"
    box = f"0 0 {_LEFT + _SIZE + 10} {_TOP + _SIZE + _FOOT}"
    return tag(
        "svg",
        joined((*_paper(scale), *_ticks(scale), *_dots(points, colours, scale))),
        viewBox=box,
        role="img",
        class_="scatter",
        aria_label=label,
    )


def _paper(scale: _Scale) -> Iterator[Html]:
    low_s, high_s, over, under = 10**scale.low, 10**scale.high, 1 + BAND_FRACTION, 1 - BAND_FRACTION
    corners = [
        (low_s, low_s), (low_s, low_s * over), (high_s / over, high_s),
        (high_s, high_s), (high_s, high_s * under), (low_s / under, low_s),
    ]  # fmt: skip
    path = " ".join(f"{scale.across(x):.1f},{scale.down(y):.1f}" for x, y in corners)
    yield tag("polygon", points=path, class_="band")
    yield tag("line", x1=_LEFT, y1=_TOP + _SIZE, x2=_LEFT + _SIZE, y2=_TOP, class_="diagonal")
    yield tag("rect", x=_LEFT, y=_TOP, width=_SIZE, height=_SIZE, class_="frame")
    middle = _TOP + _SIZE / 2
    yield tag("text", "measured, s", x=_LEFT + _SIZE / 2, y=_TOP + _SIZE + 40, text_anchor="middle")
    turned = f"rotate(-90 16 {middle})"
    yield tag("text", "predicted, s", x=16, y=middle, text_anchor="middle", transform=turned)


def _ticks(scale: _Scale) -> Iterator[Html]:
    every = [factor * 10.0**power for power in range(floor(scale.low), ceil(scale.high) + 1) for factor in (1, 2, 5)]
    for value_s in every:
        if not scale.low <= log10(value_s) <= scale.high:
            continue
        x, y = f"{scale.across(value_s):.1f}", scale.down(value_s)
        shown = f"{value_s:g}" if value_s < 1000 else digits(value_s)
        yield tag("line", x1=x, x2=x, y1=_TOP, y2=_TOP + _SIZE, class_="grid")
        yield tag("line", x1=_LEFT, x2=_LEFT + _SIZE, y1=f"{y:.1f}", y2=f"{y:.1f}", class_="grid")
        yield tag("text", shown, x=x, y=_TOP + _SIZE + 18, text_anchor="middle")
        yield tag("text", shown, x=_LEFT - 8, y=f"{y + 4:.1f}", text_anchor="end")


def _dots(points: Sequence[Point], colours: dict[str, str], scale: _Scale) -> Iterator[Html]:
    for point in points:
        hint = tag("title", point.title)
        x, y = scale.across(point.measured_s), scale.down(point.predicted_s)
        yield _circle(x, y, 4, colours[point.family], hint, "" if point.counts else "hollow")


def _circle(x: float, y: float, radius: float, colour: str, hint: str = "", class_: str = "") -> Html:
    place = {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": f"{radius:g}"}
    return tag("circle", hint, **place, fill=colour, stroke=colour, class_=class_)
