"""Megatron's fine-tuning runs, MLPerf's with adapters above all: nothing is fitted to them."""

from __future__ import annotations

import json

import pytest

from planner.layout.runs import parse_run
from tools.accuracy.finetunes import MEGATRON, READ, Tuned, load_finetunes, price_finetunes, score_finetunes


@pytest.fixture(scope="module")
def tuned() -> list[Tuned]:
    return price_finetunes(row for row in load_finetunes() if row.is_megatron)


def test_steps_and_peaks_are_as_near_as_the_page_says(tuned: list[Tuned]) -> None:
    scores = {score.name: score for score in score_finetunes(tuned)}
    assert READ not in scores
    found = scores[MEGATRON]
    assert (found.num_steps, found.num_unsupported) == (125, 0)
    assert found.median_step_error is not None
    assert found.median_step_error <= 0.07
    assert found.step_coverage is not None
    assert found.step_coverage >= 0.7
    assert found.median_memory_error is not None
    assert found.median_memory_error <= 0.07
    assert found.num_ran_likely_out <= 1


def test_every_feature_of_their_runs_is_known(tuned: list[Tuned]) -> None:
    assert not {name for one in tuned for name in parse_run({"run": one.row.run}).unknown_features}


def test_rows_of_one_configuration_are_priced_once_and_held_against_their_own_steps(tuned: list[Tuned]) -> None:
    groups: dict[str, list[Tuned]] = {}
    for one in tuned:
        groups.setdefault(json.dumps(one.row.run, sort_keys=True), []).append(one)
    several = max(groups.values(), key=len)
    assert len(several) > 5
    assert len({id(one.layout) for one in several}) == 1
    assert len({one.step_error for one in several}) > 1


def test_adapters_are_what_makes_the_steps_right(tuned: list[Tuned]) -> None:
    """Priced as full training, the same runs would all look fast: weight gradients are a third of the products."""
    row = next(one.row for one in tuned if one.row.id.startswith("mlperf-5-0-lora-nvidia-nyx"))
    full = {name: value for name, value in row.run.items() if name != "adapters"}
    assert parse_run({"run": full}).evaluate().step.step_s > 1.3 * row.priced().step.step_s
