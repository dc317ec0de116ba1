"""`plan report` writes one file, whole or not at all, with the schedule drawn as far as it can be seen."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from planner.cli import main
from planner.specs.units import GIB

JOB = ["--model", "8b", "--gpus", "16", "-s", "4096", "--time-limit", "3600", "-q"]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "plan.json"
    assert main([*JOB, "-b", "256", "--pp", "4", "--vpp", "1", "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def target(plan_file: Path) -> Path:
    """Its report."""
    path = plan_file.with_name("report.html")
    assert main(["report", str(plan_file), "-q", "-o", str(path)]) == 0
    return path


def schedule(page: str) -> ElementTree.Element:
    """The drawing of the schedule."""
    found = re.search(r'<div class="scroll"[^>]*>(<svg.*?</svg>)', page, re.DOTALL)
    return ElementTree.fromstring(found[1])


def drawn_bars(page: str) -> int:
    """Actions that the schedule's drawing shows."""
    paths = [element for element in schedule(page).iter() if element.tag.endswith("path")]
    return sum(path.get("d", "").count("H") // 2 for path in paths if path.get("class") == "action")


def test_it_writes_a_page_with_every_stage_and_a_schedule(
    plan_file: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "report.html"
    assert main(["report", str(plan_file), "-o", str(again)]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"note: wrote {again}\n")
    assert list(tmp_path.iterdir()) == [again]
    page = again.read_text()
    assert page.startswith("<!doctype html>")
    assert all(f">stage {stage}: " in page for stage in range(4))
    assert page == target.read_text(), "the same plan makes the same bytes"
    fullest_bytes = max(stage["memory"]["total_bytes"] for stage in json.loads(plan_file.read_text())["best"]["stages"])
    assert f"has the highest peak, {fullest_bytes / GIB:.1f} GiB" in page, "the curve is as high as the highest bar"


def test_of_long_steps_windows_are_drawn(plan_file: Path, target: Path) -> None:
    best = json.loads(plan_file.read_text())["best"]
    assert best["parallelism"]["num_microbatches"] > 32
    page = target.read_text()
    assert 4 * 40 <= drawn_bars(page) <= 4 * 100
    bubble = f"{best['step']['breakdown']['bubble_s'] / best['step']['step_s']:.1%}"
    assert f"the pipeline bubble is {bubble} of the step" in page
    assert f'<td class="num">{bubble}</td>' in page, "the same number as in the table"
    assert "Drawn: steady state" in page


@pytest.mark.thorough(3)
@pytest.mark.parametrize("arguments", ["--pp 1", "--pp 4 --vpp 2", "--pp 4 --runtime torch-eager --schedule auto"])
def test_short_steps_are_drawn_whole(arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*JOB, "-b", "32", *arguments.split(), "--micro-batch-size", "1", "-o", str(path)]) == 0
    capsys.readouterr()
    best = json.loads(path.read_text())["best"]
    assert main(["report", str(path), "-o", "-"]) == 0
    page = capsys.readouterr().out
    layout = best["parallelism"]
    actions = sum(len(rank.split()) for rank in best["actions"])
    assert drawn_bars(page) == (actions or 2 * layout["pp"] * layout["vpp"] * layout["num_microbatches"])
    assert "Drawn:" not in page


def test_it_reads_a_plan_from_a_pipe(
    plan_file: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with plan_file.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["report", "-", "-o", "-"]) == 0
    assert capsys.readouterr().out == target.read_text()
