"""Published fine-tuning runs: where they are from, and that steps, peaks and failures agree as intervals say."""

from __future__ import annotations

import json
import re

import pytest

from planner.layout.runs import parse_run
from tools.accuracy import finetunes
from tools.accuracy.__main__ import main
from tools.accuracy.finetunes import (
    HELD,
    READ,
    SOURCES_READ,
    Finetune,
    Other,
    Tuned,
    TunedScore,
    load_finetunes,
    price_finetunes,
    score_finetunes,
)


@pytest.fixture(scope="module")
def tuned() -> list[Tuned]:
    return price_finetunes(load_finetunes())


@pytest.fixture(scope="module")
def scores(tuned: list[Tuned]) -> dict[str, TunedScore]:
    return {score.name: score for score in score_finetunes(tuned)}


def test_every_row_says_where_it_is_from_and_reports_something() -> None:
    rows = load_finetunes()
    assert len({row.id for row in rows}) == len(rows) >= 250
    assert len({row.origin for row in rows}) >= 12
    for row in rows:
        assert len(row.source) > 20, row.id
        assert re.fullmatch(r"https://[\w./#%-]+", row.address), row.id
        assert re.fullmatch(r"20[12]\d-[01]\d", row.date), row.id
        measured = row.measured
        assert (measured.peak_memory_gib is None) == (measured.memory_kind is None), row.id
        assert any(value is not None for value in (measured.step_s, measured.peak_memory_gib, measured.ran_out)), row.id
        assert not (measured.ran_out and (measured.step_s or measured.peak_memory_gib)), row.id
        assert row.trust == "A" or row.note, row.id


def test_rows_are_priced_or_say_what_they_lack(tuned: list[Tuned]) -> None:
    """Cards without a profile are the one other reason."""
    for one in tuned:
        if one.error is not None and not one.row.lacks:
            assert str(one.error).startswith("unknown hardware"), one.row.id
    assert sum(one.layout is not None for one in tuned) >= 220


def test_features_of_rows_are_known_or_those_of_the_optimizer() -> None:
    """A feature that nobody knows would be left out of a price without a word."""
    for row in load_finetunes():
        if row.run["hardware"].startswith(("a100", "h100", "l40s")):
            assert set(parse_run({"run": row.run}).unknown_features) <= {"optimizer"}, row.id


def test_sources_held_out_are_missed_as_little_as_their_intervals_say(scores: dict[str, TunedScore]) -> None:
    held = scores[HELD]
    assert held.num_steps >= 50
    assert held.num_peaks >= 60
    assert held.median_step_error is not None
    assert held.median_step_error <= 0.10
    assert held.step_coverage is not None
    assert 0.75 <= held.step_coverage <= 0.97
    assert held.median_memory_error is not None
    assert held.median_memory_error <= 0.10
    assert held.memory_coverage is not None
    assert 0.75 <= held.memory_coverage <= 0.97


def test_widths_cover_four_in_five_of_the_sources_that_they_are_read_from(scores: dict[str, TunedScore]) -> None:
    read = scores[READ]
    for share in (read.step_coverage, read.memory_coverage):
        assert share is not None
        assert 0.7 <= share <= 0.95, "peaks end where what an allocator keeps does"
    assert {row.origin for row in load_finetunes()} >= SOURCES_READ


def test_runs_that_fitted_are_expected_to_and_most_that_ran_out_too(scores: dict[str, TunedScore]) -> None:
    found = scores["all"]
    assert found.num_ran >= 130
    assert found.num_ran_likely_out <= 0.03 * found.num_ran
    assert found.num_out >= 30
    assert found.num_out_likely_out >= 0.75 * found.num_out


def test_what_is_unsaid_widens_the_interval() -> None:
    row = next(row for row in load_finetunes() if row.id == "fms-mistral-7b-lora-a100x1-mbs4")
    shorter = Other(what="length", likely="half", share=0.4, run={"seq_length": 2048})
    bare = row.model_copy(update={"unsaid": (shorter,)})
    said, unsaid = price_finetunes([row, bare])
    assert said.layout is not None
    assert unsaid.layout is not None
    assert unsaid.layout.step.step_s == said.layout.step.step_s
    assert unsaid.step_s_interval[0] < 0.8 * said.step_s_interval[0]
    assert unsaid.step_s_interval[1] == pytest.approx(said.step_s_interval[1])
    assert unsaid.memory_width[0] < said.memory_width[0]


def test_a_row_in_which_software_is_assumed_names_fields_that_exist() -> None:
    row = load_finetunes()[0]
    wrong = Finetune.model_validate({**row.model_dump(by_alias=True), "assume": {"no_such_field": 1}})
    (answer,) = price_finetunes([wrong])
    assert "no_such_field" in str(answer.error)
    wider = Finetune.model_validate({**row.model_dump(by_alias=True), "assume": {"optimizer_bytes": 12}})
    (more,), (less,) = price_finetunes([wider]), price_finetunes([row])
    assert more.layout is not None
    assert less.layout is not None
    assert more.layout.worst_stage.memory.optimizer_bytes > 2 * less.layout.worst_stage.memory.optimizer_bytes


def test_the_family_is_shown_within_80_columns(
    tuned: list[Tuned], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = [*tuned[:3], *(one for one in tuned if one.row.lacks)]
    monkeypatch.setattr(finetunes, "price_finetunes", lambda rows: shown)
    for name, value in (("COLUMNS", "80"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    main(["finetunes"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "fms-mistral-7b-full-a100x1-mbs4" in out
    assert "not priced" in out
    main(["finetunes", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["finetunes"]) == len(shown)
    assert answer["finetunes"][0]["address"].startswith("https://")
