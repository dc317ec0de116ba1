"""The example notebook: its cells run in their order, and it is kept without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from planner import Plan

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
MOST_BYTES = 20_000


def code_of(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.usefixtures("priced_once")
def test_the_cells_run_in_order_and_say_what_the_text_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a kernel would run them, with pictures drawn to no screen."""
    (notebook,) = NOTEBOOKS
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for number, code in enumerate(code_of(notebook), 1):
        exec(compile(code, f"{notebook.name}, code cell {number}", "exec"), names)
    best, points = names["best"], names["points"]
    names["plt"].close("all")
    assert Plan.load("plan.json").parallelism == best.parallelism
    assert best.step.step_s <= names["ours"].step.step_s
    assert sum(stage.num_layers for stage in best.stages) == names["model"].num_hidden_layers
    efficiencies = [points[0].step_s * 8 / (step.step_s * n) for n, step in zip(names["counts"], points, strict=True)]
    assert [step.step_s for step in points] == sorted((step.step_s for step in points), reverse=True)
    assert efficiencies[-1] < 1, "the step shortens by less than the GPUs grow"
    assert "proof: proven" in capsys.readouterr().out


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_small_and_have_no_outputs(notebook: Path) -> None:
    data = json.loads(notebook.read_text(encoding="utf-8"))
    assert (data["nbformat"], len(notebook.read_bytes()) < MOST_BYTES) == (4, True)
    assert [cell for cell in data["cells"] if cell.get("outputs") or cell.get("execution_count")] == []
    assert len({cell["id"] for cell in data["cells"]}) == len(data["cells"])
