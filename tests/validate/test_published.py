"""Published runs that count: as often in their interval as it says, in every family, and what ran fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli import main
from planner.report.format import NINE_OF_TEN_LOSE
from planner.validate import score as score_module
from planner.validate.choices import regrets, spreads, sweeps
from planner.validate.rows import load_rows
from planner.validate.score import evaluate_rows, score

PAGE = Path(__file__).parents[2] / "docs" / "ACCURACY.md"
OFFLOADED = {"llama3-70b-gb300x64-fp8-cs", "llama3-1-405b-gb200x128-fp8-cs", "lightning-h100x16"}
"""Recipes that keep activations in host memory, those of many layers or the inputs of experts: rows do not say it."""
GATHERED = {"sc21-t2-zero3-530b-640gpu"}
"""DeepSpeed gathers weights one by one there, not whole layers."""
MISSED = {"mlperf-6-0": 0.6}
"""Families that nothing is fitted to, a known part of which is priced wrong (docs/CALIBRATION.md)."""
REMAINDERS = {f"dgxc-24-11-nemotron-4-340b-h100x128-{dtype}-gbs32" for dtype in ("bf16", "fp8")}
"""Apex's optimizer keeps of fp32 masters what the 16-bit weights lack: two bytes fewer a parameter."""

FULL = {"ms-swift-qwen2.5-14b-a800x8-zero2"}
"""Its table says 80 GiB of a card of 80."""


def test_published_runs_lie_in_their_intervals_and_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One test, since pricing all runs takes half a minute of CPU.

    Trusted rows alone: some others name layouts that cannot be what ran (70B unsharded on one GPU).
    """
    rows = load_rows()
    priced = evaluate_rows(rows)
    published = [one for one in priced if one.row.counts]
    everything = score("all", published)
    assert everything is not None
    assert everything.coverage is not None
    assert 0.7 <= everything.coverage <= 0.92

    families = {one.row.family for one in published}
    scores = {family: score(family, [one for one in published if one.row.family == family]) for family in families}
    inside = {name: found.coverage for name, found in scores.items() if found is not None and found.num_rows >= 10}
    assert len(inside) > 12
    assert {name: share for name, share in inside.items() if share < MISSED.get(name, 0.73)} == {}

    lacking = {one.row.id for one in published if one.layout is not None and not one.layout.fits}
    unexplained = (
        {name for name in lacking if not any(recipe in name for recipe in OFFLOADED)} - GATHERED - REMAINDERS - FULL
    )
    assert not unexplained
    assert len(lacking) <= 10

    # the layout ranked first is nearly the fastest measured, in each family whose noise does not decide
    lost = {found.name: found for found in regrets(sweeps(published), spreads(one.row for one in published))}
    quiet = [lost[name] for name in families & set(lost) if not lost[name].is_noisy]
    assert len(quiet) >= 8
    assert max(found.mean for found in quiet) < 0.05
    assert max(found.worst for found in quiet) < 0.15
    assert lost["all"].num_sweeps > 100
    assert lost["all"].p90 < NINE_OF_TEN_LOSE, "as every report says"
    assert lost["all"].mean < 0.015 < 10 * lost["all"].mean < lost["all"].random_mean

    # docs/ACCURACY.md shows what the command prints
    monkeypatch.setattr(
        score_module, "evaluate_rows", lambda asked: priced if len(asked) == len(rows) else evaluate_rows(asked)
    )
    for name, value in (("COLUMNS", "80"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    assert main(["validate"]) == 0
    shown = PAGE.read_text().partition("<!-- $ plan validate ")[2].partition("```text\n")[2].partition("```")[0]
    assert shown in capsys.readouterr().out, "run scripts/readme"
    assert "\nregret" in shown
