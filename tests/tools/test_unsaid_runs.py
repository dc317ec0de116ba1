"""Published runs without their switches: as many inside their intervals as these say."""

from __future__ import annotations

import json

import pytest

from planner.validate.rows import PublishedRun, load_rows
from planner.validate.score import evaluate_rows
from tools.accuracy.__main__ import main
from tools.accuracy.unsaid import Unsaid, unsaid_runs, without_switches

FEW = 16
"""Runs of a kind that are enough to tell a share; all of them stand in `tools/accuracy unsaid`."""


@pytest.fixture(scope="module")
def rows() -> list[PublishedRun]:
    """Every n-th run of each kind that says its switches."""
    said = [row for row in load_rows() if row.counts and row.run.get("features")]
    mixtures = [row for row in said if row.run["model"].get("moe")]
    sharded = [row for row in said if row.run["parallelism"].get("fsdp")]
    return [*mixtures[:: len(mixtures) // FEW], *sharded[:: len(sharded) // FEW]]


@pytest.fixture(scope="module")
def found(rows: list[PublishedRun]) -> dict[str, Unsaid]:
    return {kind.name: kind for kind in unsaid_runs(evaluate_rows(rows))}


def test_runs_without_their_switches_are_inside_as_often_as_intervals_say(found: dict[str, Unsaid]) -> None:
    assert found.keys() >= {"all", "mixtures", "FSDP", "moved by over 5%"}
    for name in ("all", "mixtures", "FSDP"):
        assert found[name].coverage >= 0.55, name  # of all mixtures 72% are inside, of these few fewer
        assert found[name].width > 1.1 * found[name].said_width
    # today's intervals had 37% of these
    assert found["moved by over 5%"].coverage >= 0.6


def test_a_run_that_says_its_switches_keeps_its_interval(rows: list[PublishedRun]) -> None:
    said, bare = evaluate_rows(rows[::12]), without_switches(rows[::12])
    for run in said:
        assert run.layout is not None
        assert {one.switch for one in run.layout.unsaid}.isdisjoint(run.row.run["features"])
    assert any(run.layout is not None and run.layout.unsaid for run in bare)


def test_the_study_is_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    main(["unsaid", "--family", "fms-fsdp"])
    assert "FSDP" in capsys.readouterr().out
    main(["unsaid", "--family", "fms-fsdp", "--json"])
    kinds = {kind["name"]: kind for kind in json.loads(capsys.readouterr().out)["unsaid"]}
    assert kinds["FSDP"]["num_runs"] == kinds["all"]["num_runs"] == 10
    assert kinds["FSDP"]["width"] > kinds["FSDP"]["said_width"]
