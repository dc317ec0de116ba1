"""The waterfall in the terminal: 80 columns, every term under its name, text from files made printable."""

from __future__ import annotations

import re

import pytest
from pages import printed

from planner.observe.accounts import STEP_TERMS, WALL_TERMS
from planner.observe.observation import Observation, Observed, Prediction, SourceFile, Term
from planner.report.observe import SignedBar, gap_section

SOURCE = SourceFile(path="a.log", format="megatron")


def observed(waterfall: list[Term], beside: list[Term], predicted_s: float = 6.1) -> Observed:
    prediction = Prediction(
        source="plan.json", model="m", hardware="h", num_gpus=8, layout="", step_s=predicted_s, step_s_interval=None,
        tokens_per_s=1.0, mfu=0.4, peak_memory_bytes=0, breakdown={},
    )  # fmt: skip
    step_s = predicted_s + sum(term.seconds for term in waterfall)
    return Observed(
        observation=Observation(sources=(SOURCE,), step_s=step_s), prediction=prediction,
        waterfall=tuple(waterfall), beside=tuple(beside),
    )  # fmt: skip


def text_of(answer: Observed) -> str:
    return printed(gap_section(answer), markup=False)


def term(name: str, seconds: float, evidence: str = "1.0 s here, 2.0 s there") -> Term:
    return Term(term=name, seconds=seconds, evidence=evidence, recoverable_s=max(0.0, seconds))


def test_all_terms_fit_in_eighty_columns() -> None:
    text = text_of(
        observed([term(name, 1234.5) for name in STEP_TERMS], [term(name, -1234.5) for name in WALL_TERMS], 5000.0)
    )
    assert max(map(len, text.splitlines())) <= 80
    for label in (*STEP_TERMS.values(), *WALL_TERMS.values()):
        assert f"{label} " in re.sub(r"\s+", " ", text)


def test_steps_and_terms_are_read_from_top_to_bottom() -> None:
    text = text_of(observed([term("pipeline_waits", 1.0), term("host_gaps", -0.25)], [term("checkpoints", 0.5)]))
    rows = [line.strip() for line in text.splitlines() if ("│" in line and "·" not in line) or "step " in line]
    words = [re.split(r"\s{2,}", row)[:2] for row in rows]
    assert words == [
        ["predicted step", "6.10 s"], ["pipeline bubble and transfers", "+1.00 s"],
        ["GPU waits for the host", "-0.25 s"],
        ["measured step", "6.85 s"], ["checkpoints", "+0.50 s"], ["wall time per step", "7.35 s"],
    ]  # fmt: skip


def test_terms_that_would_read_as_nothing_are_one_row() -> None:
    text = text_of(observed([term("pipeline_waits", 1.0), term("copies", 0.003), term("waits", 0.003)], []))
    assert "2 smaller ones" in text
    assert "copies" not in text


def test_text_from_files_is_made_printable() -> None:
    text = text_of(observed([term("compute_other", 1.0, "the largest is \x1b[31mevil\x1b]0;title\x07")], []))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "evil" in text


def test_without_a_gap_there_is_no_section() -> None:
    assert gap_section(observed([], [])) is None
    assert gap_section(Observed(observation=Observation(sources=(SOURCE,)))) is None


@pytest.mark.parametrize(
    ("fraction", "text"), [(1.0, "        │████████"), (-0.5, "    ████│        "), (0.0, "        │")]
)
def test_what_is_won_stands_left_of_what_is_lost(fraction: float, text: str) -> None:
    assert printed(SignedBar(fraction), 17).rstrip() == text.rstrip()
