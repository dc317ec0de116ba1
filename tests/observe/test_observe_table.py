"""Step times as CSV and JSON lines: columns by name, units by the ends of names."""

from __future__ import annotations

from pathlib import Path

import pytest
from written import read

from planner.errors import SpecError
from planner.observe.log_reader import TableColumns


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("step_time_ms", 1e-3), ("step_time_s", 1.0), ("step time (ms)", 1e-3), ("iteration_time [s]", 1.0),
        ("iteration-time", 1.0), ("time_per_iteration_ms", 1e-3), ("elapsed_ms", 1e-3), ("seconds", 1.0),
        ("llama-run - train_step_timing in s", 1.0), ("Iteration Time", 1.0), ("train_step_time", 1.0),
        ("step_duration_us", 1e-6),
    ],
)  # fmt: skip
def test_columns_of_time(name: str, unit: float) -> None:
    columns = TableColumns(["loss", name, "lr"])
    assert columns.time == name
    assert columns.values({name: "3"})["seconds"] == pytest.approx(3 * unit)


@pytest.mark.parametrize("name", ["lifetime", "time_ms_total", "loss", "timestamp", "steps", "timeout"])
def test_columns_of_no_time(name: str) -> None:
    assert TableColumns([name]).time is None


def test_csv(tmp_path: Path) -> None:
    seen = read(tmp_path, "global_step,step_time_ms,loss\n10,900,3\n11,500,2\n12,510,2\n13,,2\n14,495,1\n15,500,1\n")
    assert (seen.step_s, seen.series.steps) == (0.5, (10, 11, 12, 14, 15))
    assert any("1 rows without a time" in note for note in seen.notes)


def test_a_time_column_is_the_wall_time(tmp_path: Path) -> None:
    rows = "".join(f"{step}\t2.0\t{1_700_000_000 + 3 * step}\n" for step in range(1, 5))
    wall = read(tmp_path, f"step\tstep_time_s\t_timestamp\n{rows}").wall
    assert wall is not None
    assert (wall.steps_s, wall.idle_s, wall.wall_s) == (8.0, 3.0, 11.0)


def test_json_lines_with_tokens(tmp_path: Path) -> None:
    rows = "".join(f'{{"step": {step}, "iteration-time": 0.5, "tokens_per_second": 1000}}\n' for step in range(4))
    seen = read(tmp_path, rows)
    assert (seen.step_s, seen.tokens_per_s) == (0.5, 1000)
    assert any("states no unit" in note for note in seen.notes)


def test_numbers_alone_are_seconds(tmp_path: Path) -> None:
    seen = read(tmp_path, "2.0\n2.1\n1.9\n")
    assert (seen.step_s, seen.series.steps) == (2.0, (1, 2, 3))


@pytest.mark.parametrize("text", ["a,b\n1,2\n", '{"loss": 3}\n', "step,step_time_s\n1,nan\n2,-5\n3,1e999\n"])
def test_tables_without_times(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError, match="no lines of steps that are known"):
        read(tmp_path, text)


def test_seconds_since_the_begin_are_no_steps(tmp_path: Path) -> None:
    seen = read(tmp_path, "step,elapsed\n" + "".join(f"{step},{2 * step}\n" for step in range(1, 40)))
    assert seen.step_s is None
    assert "count from a begin" in seen.notes[0]
