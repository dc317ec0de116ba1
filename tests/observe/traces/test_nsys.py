"""Exports of Nsight Systems become the same steps as torch's traces. They are made from the schema, not recorded."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from made_traces import write_nsys

from planner.errors import SpecError
from planner.observe.traces.report import read_traces

US = 1e-6


def test_an_export_is_cut_into_steps(tmp_path: Path) -> None:
    report = read_traces([write_nsys(tmp_path / "report_rank3.sqlite")])
    (rank,) = report.ranks
    first, last = rank.steps
    assert (rank.rank, rank.device) == (3, "NVIDIA H100 80GB HBM3")
    assert (first.number, first.wall_s) == (0, pytest.approx(1000 * US))
    # gemm 10–410, NCCL 310–510, a copy 600–650, the next step at 1,010
    assert (first.compute_s, first.exposed_communication_s) == (pytest.approx(400 * US), pytest.approx(100 * US))
    assert first.copies_s == pytest.approx(50 * US)
    assert last.wall_s == pytest.approx(900 * US)
    (exchange,) = rank.collectives
    assert (exchange.collective, exchange.num_bytes, exchange.count) == ("all_reduce", None, 2)
    assert "Nsight Systems says neither groups nor bytes of collectives" in rank.warnings


def test_each_gpu_is_a_rank(tmp_path: Path) -> None:
    report = read_traces([write_nsys(tmp_path / "node.sqlite", devices=2)])
    assert [rank.rank for rank in report.ranks] == [None, None]
    assert [len(rank.steps) for rank in report.ranks] == [2, 2]


def test_tables_that_were_not_recorded_are_not_missed(tmp_path: Path) -> None:
    report = read_traces([write_nsys(tmp_path / "bare.sqlite", ranges=False)])
    assert [step.number for step in report.ranks[0].steps] == [None]
    assert any("nothing marks them" in told for told in report.not_shown)


def test_the_file_is_not_touched(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "a?b%20 c.sqlite")
    before = path.read_bytes()
    path.chmod(0o444)
    read_traces([path])
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("CREATE TABLE other (a)", "holds neither kernels nor NVTX ranges"),
        ("CREATE TABLE {kernels} (start, end)", "holds no kernel"),
        ("CREATE TABLE {kernels} (start, end); INSERT INTO {kernels} VALUES ('a', 2)", "'a' is no time"),
        ("CREATE TABLE {kernels} (start, end); INSERT INTO {kernels} VALUES (1, NULL)", "None is no time"),
        ("CREATE VIEW {kernels} AS SELECT 1 AS start, 2 AS end", "holds neither"),
    ],
)
def test_other_databases_are_one_error(tmp_path: Path, script: str, said: str) -> None:
    path = tmp_path / "odd.sqlite"
    database = sqlite3.connect(path)
    database.executescript(script.format(kernels="CUPTI_ACTIVITY_KIND_KERNEL"))
    database.close()
    with pytest.raises(SpecError, match=said) as refused:
        read_traces([path])
    assert str(path) in refused.value.message


def test_a_damaged_database_is_one_error(tmp_path: Path) -> None:
    path = write_nsys(tmp_path / "cut.sqlite")
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(SpecError, match="cannot be read as a database"):
        read_traces([path])
