"""Published pairs whose switches differ: they are well formed, and gains are predicted as closely as is promised."""

from __future__ import annotations

import json

import pytest

from planner.cli import main
from planner.layout.runs import parse_run
from planner.validate.choices import (
    HARM,
    Ablation,
    PricedPair,
    gain_of,
    harm,
    load_ablations,
    priced,
    run_pairs,
    scores,
    sweeps,
    switch_of,
)
from planner.validate.rows import load_rows
from planner.validate.score import evaluate_rows

PAIRS = {pair.id: pair for pair in load_ablations()}


def pair(**changes: object) -> Ablation:
    fields = {
        "id": "a", "source": "s", "off": {}, "on": {}, "measured": {"off": 2.0, "on": 1.0, "unit": "s"},
        "run": {"parallelism": {"tp": 1}},
    }  # fmt: skip
    return Ablation.model_validate(fields | changes)


def test_every_pair_is_a_run_with_two_sides_that_differ() -> None:
    assert len(PAIRS) == len(load_ablations()) > 60
    for one in load_ablations():
        off, on = one.side("off"), one.side("on")
        assert off != on, one.id
        assert one.source
        for side in (off, on):
            assert parse_run({"id": one.id, "run": side}, one.id).unknown_features == (), one.id


def test_a_side_adds_its_own_fields_to_the_common_ones() -> None:
    on = pair(on={"ep_overlap": True}, on_run={"dtype": "fp8", "parallelism": {"recompute": "full"}}).side("on")
    assert on == {
        "parallelism": {"tp": 1, "recompute": "full"}, "dtype": "fp8", "features": {"ep_overlap": True},
    }  # fmt: skip


def test_a_gain_is_the_share_of_the_longer_step_whatever_the_unit() -> None:
    assert gain_of(5.0, 4.0) == pytest.approx(0.2)
    assert gain_of(4.0, 5.0) == pytest.approx(-0.2)
    rate = pair(measured={"off": 400.0, "on": 500.0, "unit": "tflops"})
    assert rate.measured.gain == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("measured_on", "predicted_on", "right"),
    [(0.8, 0.99, True), (0.8, 1.01, False), (1.2, 1.01, True), (0.995, 1.01, True), (0.995, 1.1, False)],
)
def test_signs_agree_or_both_gains_are_noise(measured_on: float, predicted_on: float, right: bool) -> None:
    one = pair(measured={"off": 1.0, "on": measured_on, "unit": "s"})
    assert PricedPair(one, 1.0, predicted_on).sign_right == right


def test_pairs_are_named_by_what_differs() -> None:
    assert switch_of(pair(off={"ep_overlap": False}, on={"ep_overlap": True})) == "ep_overlap"
    assert switch_of(pair(on_run={"parallelism": {"recompute": "full"}})) == "recompute"
    assert switch_of(pair(on_run={"dtype": "fp8"}, bundle=True)) == "bundle"


def test_what_cannot_be_priced_is_counted_and_not_scored() -> None:
    broken = priced(PAIRS["ep-overlap-qwen3-235b-b200x64"].model_copy(update={"on": {"cpu_offload": True}}))
    assert broken.error is not None
    one = broken.pair
    found = scores([broken, PricedPair(one, 2.0, 1.1)])[0]
    assert (found.num_pairs, found.num_unsupported) == (1, 1)
    assert found.median_error == pytest.approx(abs(0.45 - one.measured.gain))


def test_gains_are_predicted_as_closely_as_is_promised() -> None:
    single = scores([priced(one) for one in PAIRS.values()])[-1]
    assert single.num_unsupported == 0
    assert single.sign_right >= 0.9
    assert single.median_error <= 0.05


def test_the_command_lists_pairs_and_scores(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--family", "ablations"]) == 0
    out = capsys.readouterr().out
    assert "ep-overlap-qwen3-235b-b200x64" in out
    assert "all single switches" in out
    assert main(["validate", "--family", "ablations", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {one["id"] for one in told["ablations"]} == set(PAIRS)
    assert told["ablation_scores"][-1]["sign_right"] >= 0.9
    assert main(["validate", "--family", "ablations", "--regret"]) == 2


def test_no_switch_chosen_by_default_made_a_measured_step_much_longer() -> None:
    """On the published pairs, those of runs over EFA among them, where a dispatcher made it 1.9 times as long."""
    over_efa = run_pairs(evaluate_rows([row for row in load_rows() if row.family == "aws-mbridge"]))
    found = harm([*map(priced, load_ablations()), *over_efa])
    assert found.num_chosen > 30
    assert found.worst < HARM
    assert found.num_missed <= 2
    assert max(pair.pair.measured.longer for pair in over_efa) > 0.8


def test_layouts_over_efa_rank_as_measured() -> None:
    """Regret of 17 layouts on 64 H100 and 12 on 32 B300."""
    found = sweeps(evaluate_rows([row for row in load_rows() if row.family == "aws-mbridge"]))
    assert sorted(len(sweep.ids) for sweep in found) == [12, 17]
    assert max(sweep.regret for sweep in found) < 0.05
