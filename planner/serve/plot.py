"""A plot as SVG within a few milliseconds: its axes and ticks, in the page's colours.

matplotlib, which draws the report, takes 0.1 to 0.5 s for each of these pictures; the page has 0.3 s for all of them.
Its tick locator places the ticks here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from matplotlib.ticker import MaxNLocator

from planner.report.html.pieces import Html, joined, tag

FloatArray = npt.NDArray[np.float64]
_LEFT, _RIGHT, _TOP, _FOOT = 40.0, 8.0, 14.0, 32.0


@dataclass(frozen=True, slots=True)
class Plot:
    """A box of `width` × `height` units with an axis below and one on the left."""

    label: str
    """The words that a screen reader says of it."""
    x: tuple[float, float]
    y: tuple[float, float]
    x_title: str = ""
    y_title: str = ""
    width: float = 460.0
    height: float = 240.0
    whole: bool = False
    """True where only whole numbers are marked."""
    inside: list[Html] = field(default_factory=list)

    def across(self, value: float) -> float:
        """Place of a value of the axis below."""
        low, high = self.x
        return _LEFT + (value - low) / (high - low) * (self.width - _LEFT - _RIGHT)

    def down(self, value: float) -> float:
        """Place of a value of the axis on the left."""
        low, high = self.y
        return self.height - _FOOT - (value - low) / (high - low) * (self.height - _FOOT - _TOP)

    def boxes(self, left: FloatArray, right: FloatArray, bottom: FloatArray, top: FloatArray, **style: str) -> None:
        """Rectangles of one look as one path."""
        x0, x1 = self._all(left, right, self.across)
        y0, y1 = self._all(bottom, top, self.down)
        corners = zip(x0, x1, y0, y1, strict=True)
        path = "".join(f"M{a:.1f} {c:.1f}H{b:.1f}V{d:.1f}H{a:.1f}z" for a, b, c, d in corners)
        if path:
            self.inside.append(tag("path", d=path, **style))

    def line(self, x: Iterable[float], y: Iterable[float], **style: str) -> None:
        """Straight lines from point to point."""
        path = "L".join(f"{self.across(a):.1f} {self.down(b):.1f}" for a, b in zip(x, y, strict=True))
        self.inside.append(tag("path", d=f"M{path}", fill="none", **style))

    def text(self, words: object, x: float, y: float, **style: object) -> None:
        """Words at a point of the axes."""
        self.inside.append(tag("text", words, x=f"{self.across(x):.1f}", y=f"{self.down(y) - 3:.1f}", **style))

    def svg(self) -> Html:
        """The whole drawing."""
        box = f"0 0 {self.width:g} {self.height:g}"
        parts = joined([*self._grid(), *self.inside], "")
        return tag("svg", parts, viewBox=box, role="img", aria_label=self.label, class_="plot")

    @staticmethod
    def _all(low: FloatArray, high: FloatArray, place: object) -> tuple[list[float], list[float]]:
        return place(low).tolist(), place(high).tolist()  # type: ignore[operator]

    def _grid(self) -> Iterator[Html]:
        foot, right = self.height - _FOOT, self.width - _RIGHT
        for value in _ticks(min(self.y), max(self.y), 6, self.whole):
            y = f"{self.down(value):.1f}"
            yield tag("path", d=f"M{_LEFT:g} {y}H{right:g}", class_="grid")
            yield tag("text", f"{value:g}", x=f"{_LEFT - 5:g}", y=f"{self.down(value) + 4:.1f}", text_anchor="end")
        for value in _ticks(*self.x, 8):
            x = f"{self.across(value):.1f}"
            yield tag("path", d=f"M{x} {foot:g}v4", class_="grid")
            yield tag("text", f"{value:g}", x=x, y=f"{foot + 15:g}", text_anchor="middle")
        yield tag("text", self.y_title, x="2", y="9", class_="title")
        yield tag("text", self.x_title, x=f"{right:g}", y=f"{self.height - 3:g}", text_anchor="end", class_="title")


def _ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """The values marked on an axis."""
    values = MaxNLocator(most, integer=whole, steps=[1, 2, 5, 10]).tick_values(low, high)
    return [float(value) for value in values if low - 1e-9 * (high - low) <= value <= high + 1e-9 * (high - low)]


def keys(colours: Iterable[tuple[str, str]]) -> Html:
    """A legend: names with their colours."""
    marks = (
        tag("span", tag("svg", tag("rect", width="10", height="10", fill=colour), viewBox="0 0 10 10", class_="key",
            aria_hidden="true"), " ", name)
        for name, colour in colours
    )  # fmt: skip
    return joined(marks, " ")
