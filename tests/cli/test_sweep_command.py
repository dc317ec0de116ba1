"""`plan sweep` answers which and how many GPUs, on the screen, as JSON, as CSV and as pictures."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from planner.cli import main

QUICK = ["sweep", "--model", "8b", "-s", "4096", "-b", "64", "--tp", "1", "--pp", "1", "--micro-batch-size", "1", "-q"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*QUICK, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_json_is_that_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--gpus", "8,16", "--hardware", "h100,h200", "--tokens", "100B", "--deadline", "100d")
    assert set(found) >= {"points", "pareto", "answers"}
    points = found["points"]
    assert [(p["options"]["gpus"], p["options"]["hardware"]) for p in points] == [
        (8, "h100"), (16, "h100"), (8, "h200"), (16, "h200"),
    ]  # fmt: skip
    fields = (
        "options fits step_s step_s_interval tokens_per_s scaling_efficiency mfu days days_interval usd usd_interval"
    )
    assert all(set(fields.split()) <= set(point) for point in points)
    assert found["answers"] == {
        "fewest_gpus": min(range(4), key=lambda i: (points[i]["num_gpus"], points[i]["step_s"])),
        "cheapest": min(range(4), key=lambda i: points[i]["usd"]),
        "fastest": min(range(4), key=lambda i: points[i]["days"]),
    }


def test_an_axis_of_the_layout_gives_a_point_for_each_value(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--gpus", "8", "--recompute", "none,full")
    points = found["points"]
    assert [point["options"]["recompute"] for point in points] == ["none", "full"]
    assert points[0]["step_s"] < points[1]["step_s"] or not points[0]["fits"]


def test_auto_finds_the_fewest_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["sweep", "--model", "llama-2-70b", "-b", "64", "--tp", "8", "--micro-batch-size", "1", "-q", "--json"]
    job += ["--switch", "optimizer_offload=0"]  # with it, 8 GPUs are enough
    assert main([*job, "--gpus", "auto"]) == 0
    found = json.loads(capsys.readouterr().out)
    points, answers = found["points"], found["answers"]
    fewest = points[answers["fewest_gpus"]]["num_gpus"]
    assert fewest == min(point["num_gpus"] for point in points if point["fits"])
    below = [point["num_gpus"] for point in points if point["num_gpus"] < fewest]
    assert fewest - 8 in below, "the next smaller number was tried"


def test_the_screen_is_80_columns_and_says_the_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--gpus", "8..24", "--hardware", "h100,h200", "--tokens", "100B", "--deadline", "10d"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "The run ends within 10.00 days at 4 of 6 points; fewest GPUs: 16 GPUs" in shown.replace("\n", " ")
    assert "in time" in shown


def test_csv_and_a_picture_beside_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture, lines = tmp_path / "a.svg", tmp_path / "a.csv"
    assert main([*QUICK, "--gpus", "8,16", "--plot", str(picture), "--csv", str(lines)]) == 0
    assert "fewest GPUs" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"<?xml")
    with lines.open() as file:
        assert [row["gpus"] for row in csv.DictReader(file)] == ["8", "16"]
