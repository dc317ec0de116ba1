"""The first screen of a small job answers who has one card, in 80 columns and without words of pipelines."""

from __future__ import annotations

from functools import cache

import pytest
from pages import printed

from planner.answer import Plan
from planner.report import small
from planner.report.format import gibibytes
from planner.report.terminal import render
from planner.report.view import view_of
from planner.search.search import plan
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware
from planner.specs.training import AdapterSpec, OperationsSpec, SearchLimits, TrainingSpec


@cache
def tuned(num_gpus: int = 1, bits: int | None = 4, tokens: float | None = None) -> Plan:
    adapters = None if bits is None else AdapterSpec.model_validate({"base_bits": bits})
    training = TrainingSpec(
        seq_length=2048, global_batch_size=16, adapters=adapters, tokens=tokens,
        operations=OperationsSpec(usd_per_gpu_hour=0.5),
    )  # fmt: skip
    cluster = ClusterSpec(hardware=load_hardware("l40s"), num_gpus=num_gpus)
    return plan("llama-3.2-1b", cluster, training, limits=SearchLimits(top=2), runtime="hf")


def shown(made: Plan) -> str:
    return printed(render(made))


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_no_word_of_pipelines_ranks_or_months(num_gpus: int) -> None:
    text = shown(tuned(num_gpus)).replace("--zero-stage", "")
    for word in ("TP 1", "PP 1", "pipeline", "bubble", "slowest rank", "slow rank", "months", "sustained", "stage"):
        assert word not in text
    assert max(map(len, text.splitlines())) <= 80


def test_what_is_trained_and_what_it_fits_with_come_first() -> None:
    made = tuned()
    lines = shown(made).splitlines()[1:5]
    count = made.model.num_trained_parameters
    assert count == 11_272_192
    assert "QLoRA r=16 on all-linear · 11.27M of 1.236B parameters are trained (0.91%)" in lines[0]
    assert "frozen base in 4 bits" in lines[1]
    total = gibibytes(made.best.worst_stage.memory.total_bytes)
    assert f"It fits: {total} of 44.4 GiB, with a probability of over 99%" in lines[2]


def test_the_items_of_memory_add_up_to_the_gpu() -> None:
    for bits in (4, 16, None):
        made = tuned(bits=bits)
        items = {item.name: item.num_bytes for item in small.memory_items(made)}
        assert sum(items.values()) == made.cluster.hardware.memory_bytes
        names = [name for name in items if name.startswith("base weights")]
        assert names == ([] if bits is None else [f"base weights, {bits} bits"])
    base = {bits: tuned(bits=bits).best.worst_stage.memory.frozen_weights_bytes for bits in (4, 16)}
    assert 0 < base[4] < base[16] == pytest.approx(2 * tuned().model.num_parameters, rel=1e-6)


def test_the_items_of_a_step_add_up_to_it() -> None:
    made = tuned(8, 16)
    items = {item.name: item.value_s for item in small.step_items(made)}
    assert sum(items.values()) == pytest.approx(made.step.step_s, rel=0.005)
    assert items["backward"] > items["forward"]


def test_only_what_was_not_said_is_assumed() -> None:
    made = tuned()
    assert small.assumed(made).count("--") == 5
    said = made.model_copy(update={"command": "plan --model 1b --qlora -s 2048 --lora-rank=16 --runtime hf"})
    assert small.assumed(said) == "16 a step (--global-batch-size), on all-linear (--lora-targets)"


def test_a_run_of_an_hour_costs_its_steps() -> None:
    hour = tuned().step.tokens_per_s * 3600
    made = tuned(tokens=hour)
    assert made.run_cost.days * 24 == pytest.approx(1.0)
    assert made.run_cost.usd == pytest.approx(0.5)
    assert "60 min" in small.how_long(made) or "1.0 h" in small.how_long(made)
    assert "$0.50 at $0.5 a GPU-hour" in small.how_long(made)


def test_each_kind_of_change_is_shown_once_and_a_misfit_says_by_how_much() -> None:
    made = tuned(bits=16)
    rows = small.shown_changes(made)
    known = {change.change: change for change in made.changes}
    kinds = [(known[row.change].kind, known[row.change].fits) for row in rows]
    assert len(kinds) == len(set(kinds)) > 3
    misfit = next(change for change in made.changes if not change.fits and change.kind == "micro-batch")
    row = next(row for row in rows if row.change == misfit.change)
    lacking = gibibytes(misfit.total_bytes - made.cluster.hardware.memory_bytes)
    assert row.remark in (f"does not fit by {lacking} GiB", "fits too narrowly")
    assert view_of(made).changes == small.change_rows(made, made.changes)


def test_all_weights_of_a_small_model_are_said_to_be_trained() -> None:
    text = shown(tuned(bits=None))
    assert "all 1.236B parameters are trained" in text
    assert "optimizer states" in text
    assert "adapters" not in text.split("Room")[0]


def test_a_plan_that_was_saved_shows_the_same_screen() -> None:
    made = tuned()
    again = Plan.from_json(made.to_json())
    assert shown(again) == shown(made)
    data = made.to_json()
    assert data["training"]["adapters"]["base_bits"] == 4
    assert data["model"]["num_trained_parameters"] == 11_272_192
    assert data["room"]["micro_batch_size"] > 0
