"""The published runs that come with the package."""

from __future__ import annotations

import json

import pytest

from planner.errors import Unsupported
from planner.layout.runs import parse_run
from planner.physics.layers import model_totals
from planner.validate.rows import PRODUCTION, load_rows


def test_every_row_has_a_source_and_an_id_of_its_own() -> None:
    rows = load_rows()
    assert len(rows) > 450
    assert len({row.id for row in rows}) == len(rows)
    assert all(len(row.source) > 10 for row in rows)


def test_rows_with_assumed_fields_or_little_trust_are_not_scored() -> None:
    left_out = [row for row in load_rows() if not row.counts]
    assert {row.trust for row in left_out} == {"A", "B", "C"}
    assert all(row.assumed or row.trust == "C" or row.family == PRODUCTION for row in left_out)


def test_a_row_is_parsed_as_a_line_of_runs_is() -> None:
    row = load_rows()[0]
    assert row.parsed() == parse_run(json.loads(json.dumps({"id": row.id, "run": row.run})))
    assert row.parsed().model.num_hidden_layers == 61


def test_features_of_published_runs_are_known() -> None:
    """A feature that nobody knows would be left out of a prediction without a word."""
    unknown, num_unsupported = set(), 0
    for row in load_rows():
        try:
            unknown |= set(row.parsed().unknown_features)
        except Unsupported:
            num_unsupported += 1
    assert unknown == set()
    assert num_unsupported == 0


@pytest.mark.parametrize(
    ("model", "num_parameters"),
    [
        ("mpt-125m", 125_311_488), ("mpt-350m", 355_985_408), ("mpt-760m", 760_470_528),
        ("mpt-1b", 1_315_950_592), ("mpt-3b", 2_651_837_440), ("mpt-7b", 6_658_859_008),
        ("mpt-13b", 12_853_954_560), ("mpt-30b", 29_975_214_080), ("mpt-70b", 64_862_437_376),
    ],
)  # fmt: skip
def test_models_have_the_parameters_that_their_tables_state(model: str, num_parameters: int) -> None:
    """LLM Foundry's tables, of sequences of 2,048 tokens: positions are learned, one vector each."""
    rows = [row for row in load_rows() if row.family == "llm-foundry" and row.run["seq_length"] == 2048]
    row = next(row for row in rows if row.run["model"]["name"] == model)
    run = row.parsed()
    assert model_totals(run.model, run.runtime, 2048).num_parameters == num_parameters
