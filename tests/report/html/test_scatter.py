"""The page of predicted against measured: every run a point where its seconds are, everything escaped."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from planner.report.html.scatter import Point, scatter_page

POINTS = [
    Point("exact", "one", 1.0, 1.0, True),
    Point("slow", "one", 1.0, 2.0, True),
    Point("a<b>&c", "two", 10.0, 9.5, False),
]


def drawing(page: str) -> ElementTree.Element:
    found = re.search(r'<svg[^>]*class="scatter".*?</svg>', page, re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found[0])


def circles(page: str) -> dict[str, ElementTree.Element]:
    """Points of the drawing by what their titles begin with."""
    return {str(one[0].text).split(" (")[0]: one for one in drawing(page).iter("circle")}


def place(circle: ElementTree.Element) -> tuple[float, float]:
    return float(circle.attrib["cx"]), float(circle.attrib["cy"])


def test_every_run_is_a_point_that_says_what_it_is() -> None:
    found = circles(scatter_page(POINTS))
    assert set(found) == {"exact", "slow", "a<b>&c"}
    assert found["slow"][0].text == "slow (one): measured 1.000 s, predicted 2.000 s, +100.0%"


def test_points_stand_where_their_seconds_are() -> None:
    page = scatter_page(POINTS)
    found = circles(page)
    line = next(one.attrib for one in drawing(page).iter("line") if one.attrib["class"] == "diagonal")
    (x1, y1, x2, y2) = (float(line[name]) for name in ("x1", "y1", "x2", "y2"))
    x, y = place(found["exact"])
    assert (x - x1) / (x2 - x1) == pytest.approx((y - y1) / (y2 - y1), abs=1e-3)
    assert place(found["slow"])[0] == x
    assert place(found["slow"])[1] < y


def test_the_band_holds_what_is_within_ten_percent() -> None:
    page = scatter_page([Point("in", "f", 1.0, 1.09, True), Point("out", "f", 1.0, 1.11, True)])
    assert "1 of 2 lie within ±10%" in page


def test_a_colour_is_a_family_and_hollow_is_not_scored() -> None:
    found = circles(scatter_page(POINTS))
    assert found["exact"].attrib["fill"] == found["slow"].attrib["fill"] != found["a<b>&c"].attrib["fill"]
    assert [found[name].attrib.get("class") for name in ("exact", "a<b>&c")] == [None, "hollow"]


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = scatter_page(POINTS)
    assert "default-src 'none'" in page
    assert not re.search(r"<script|<link|<img|https?://|url\(", page)
    assert "a<b>" not in page


def test_the_same_runs_make_the_same_bytes_and_none_make_a_page() -> None:
    assert scatter_page(POINTS) == scatter_page(list(POINTS))
    assert "0 runs" in scatter_page([])
