"""The page of predicted against measured: every run a point where its seconds are, everything escaped."""

from __future__ import annotations

import re
from itertools import pairwise
from math import log
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from tools.accuracy.__main__ import main
from tools.accuracy.scatter import Point, draw_families, draw_scatter, looks, scatter_page

POINTS = [
    Point("exact", "one", 1.0, 1.0, True),
    Point("slow", "one", 1.0, 2.0, True),
    Point("a<b>&c", "two", 10.0, 9.5, False),
]
SVG = "{http://www.w3.org/2000/svg}"


class Mark(NamedTuple):
    title: str
    x: float
    y: float
    style: str


def marks(points: list[Point]) -> dict[str, Mark]:
    """Points of the chart by what their titles begin with."""
    found = {}
    for group in ElementTree.fromstring(draw_scatter(points)).iter(f"{SVG}g"):
        title, used = group.find(f"{SVG}title"), next(group.iter(f"{SVG}use"), None)
        if title is not None and used is not None:
            place = float(used.attrib["x"]), float(used.attrib["y"])
            found[str(title.text).split(" (")[0]] = Mark(str(title.text), *place, used.attrib["style"])
    return found


def test_every_run_is_a_point_that_says_what_it_is() -> None:
    found = marks(POINTS)
    assert set(found) == {"exact", "slow", "a<b>&c"}
    assert found["slow"].title == "slow (one): measured 1.000 s, predicted 2.000 s, +100.0%"


def test_points_stand_where_their_seconds_are() -> None:
    found = marks([*POINTS, Point("ten", "two", 10.0, 10.0, True)])
    exact, slow, ten = found["exact"], found["slow"], found["ten"]
    decade = ten.x - exact.x
    assert exact.y - ten.y == pytest.approx(decade, rel=1e-2), "both axes have one scale"
    assert slow.x == exact.x
    assert (exact.y - slow.y) / decade == pytest.approx(log(2) / log(10), rel=1e-2)


def test_the_band_holds_what_is_within_ten_percent() -> None:
    page = scatter_page([Point("in", "f", 1.0, 1.09, True), Point("out", "f", 1.0, 1.11, True)])
    assert "1 of 2 lie within ±10%" in page


def test_hollow_is_not_scored() -> None:
    found = marks(POINTS)
    assert "fill-opacity: 0;" in found["a<b>&c"].style
    assert "fill-opacity: 0;" not in found["exact"].style


def test_each_family_has_a_look_of_its_own() -> None:
    families = [f"family {number}" for number in range(49)]
    found = [looks(families)[name] for name in families]
    assert len(set(found)) == 49
    assert all(a != b for one, other in pairwise(found) for a, b in zip(one, other, strict=True))


def test_a_family_has_a_row_with_its_median() -> None:
    svg = draw_families([*POINTS, Point("slower", "one", 1.0, 3.0, True)])
    assert "<title>one, 3 runs: median +100.0%</title>" in svg
    assert "<title>two, 1 runs: median -5.0%</title>" in svg


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    page = scatter_page(POINTS)
    assert "default-src 'none'" in page
    assert not re.search(r"<script|<link|<img|(src|href)=\"https?://|url\([^#]", page)
    assert "a<b>" not in page


def test_the_same_runs_make_the_same_bytes_and_none_make_a_page() -> None:
    assert scatter_page(POINTS) == scatter_page(list(POINTS))
    assert "0 runs" in scatter_page([])


def test_the_plot_is_written(tmp_path: Path) -> None:
    main(["plot", "--family", "torchtitan", "-o", str(tmp_path / "runs.html")])
    text = (tmp_path / "runs.html").read_text()
    assert text.startswith("<!doctype html>")
    assert text.count("measured ") > 14
