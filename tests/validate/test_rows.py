"""The published runs that come with the package."""

from __future__ import annotations

import json

from planner.validate.rows import load_rows


def test_every_row_has_a_source_and_an_id_of_its_own() -> None:
    rows = load_rows()
    assert len(rows) > 450
    assert len({row.id for row in rows}) == len(rows)
    assert all(len(row.source) > 10 for row in rows)


def test_rows_with_assumed_fields_or_little_trust_are_not_scored() -> None:
    left_out = [row for row in load_rows() if not row.counts]
    assert {row.trust for row in left_out} == {"A", "B", "C"}
    assert all(row.assumed or row.trust == "C" for row in left_out)


def test_a_row_is_a_line_of_runs() -> None:
    line = json.loads(load_rows()[0].to_line())
    assert set(line) == {"id", "run"}
    assert line["run"]["model"]["num_hidden_layers"] == 61
