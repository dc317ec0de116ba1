"""A sweep's pictures: a file of each kind, the same bytes for the same sweep."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.decide.sweep import Goal, Point, Sweep
from planner.report.plots import draw_sweep, drawn_sweep, image, series_of


def point(gpus: int, hardware: str, days: float | None) -> Point:
    rate = 1e4 * gpus
    return Point(
        options={"gpus": gpus, "hardware": hardware}, num_gpus=gpus, fits=True, step_s=1e6 / rate, tokens_per_s=rate,
        tokens_per_s_interval=(0.9 * rate, 1.1 * rate), days=days, days_interval=days and (0.9 * days, 1.1 * days),
        usd=days and 50.0 * days * gpus,
    )  # fmt: skip


def sweep(days: float | None = 400.0) -> Sweep:
    points = [point(gpus, kind, days and days / gpus) for kind in ("h100", "h<200") for gpus in (16, 8, 32)]
    failed = Point(options={"gpus": 4, "hardware": "h100"}, num_gpus=4, fits=False, reason="nothing fits")
    return Sweep(points=(*points, failed), goal=Goal(deadline_days=days))


def test_series_are_lines_over_gpus_of_what_fits() -> None:
    assert [(series.name, [p.num_gpus for p in series.points]) for series in series_of(sweep())] == [
        ("h100", [8, 16, 32]), ("h<200", [8, 16, 32]),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<?xml"), ("a.png", b"\x89PNG")])
def test_a_file_of_each_kind_is_the_same_every_time(name: str, start: bytes, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        draw_sweep(sweep(), str(tmp_path / folder / name))
    data = (tmp_path / "one" / name).read_bytes()
    assert data.startswith(start)
    assert data == (tmp_path / "two" / name).read_bytes()


def test_the_picture_has_its_axes_and_a_name_for_each_line() -> None:
    svg = image(drawn_sweep(sweep()), "svg").decode()
    for text in ("GPUs", "tokens per second", "days", "dollars", "h100", "h&lt;200", "ideal", "What time costs"):
        assert f">{text}<" in svg
    assert ">dollars<" not in image(drawn_sweep(sweep(None)), "svg").decode(), "there is no money without tokens"


def test_points_of_one_number_of_gpus_are_bars() -> None:
    one = Sweep(points=tuple(point(8, kind, None) for kind in ("h100", "h200")))
    svg = image(drawn_sweep(one), "svg").decode()
    assert ">8 GPUs<" in svg
    assert ">ideal<" not in svg
