"""Saved plans are read back whole, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from priced_plans import priced_plan

from planner.errors import SpecError
from planner.plan_file import read_plan


@pytest.fixture
def saved() -> dict[str, Any]:
    return priced_plan(num_gpus=16, tp=2, pp=4, vpp=2, dp=2).to_json()


def test_a_plan_is_read_as_it_was_saved(saved: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(saved))
    assert read_plan(str(tmp_path / "plan.json")).to_json() == saved


def test_a_plan_is_read_from_the_json_of_a_replanned_job(saved: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**saved, "resume": {"choices": []}}))
    assert read_plan(str(tmp_path / "plan.json")).to_json() == saved


def test_plans_of_earlier_versions_are_read_without_the_fields_that_are_gone(
    saved: dict[str, Any], tmp_path: Path
) -> None:
    older = json.loads(json.dumps(saved))
    older["cluster"]["hardware"]["efficiency"]["untuned_factor"] = 1.4
    older["runtime_spec"] |= {"tuned_products": True, "stands_for": "megatron", "min_microbatches_is_pp": False}
    del older["digest"]
    (tmp_path / "plan.json").write_text(json.dumps(older))
    assert read_plan(str(tmp_path / "plan.json")).to_json() == saved
    for field in ("rules", "export_rules", "year", "models", "later_features", "graphs_routing_on_racks"):
        del older["runtime_spec"][field]
    (tmp_path / "plan.json").write_text(json.dumps(older))
    assert read_plan(str(tmp_path / "plan.json")).to_json()["best"] == saved["best"]


def change(place: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    """An edit of the entry at a place: names and numbers with points between them."""

    def edit(plan: Any) -> None:
        for key in place.split(".") if place else ():
            plan = plan[int(key) if key.isdigit() else key]
        plan.update(values)

    return edit


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change("best.parallelism", tp=4), "best: 32 ranks, num_gpus_used 16, num_gpus 16"),
        (change("best.parallelism", cp=0), "best.parallelism.cp: 0 must be greater than 0"),
        (change("best.parallelism", num_microbatches=7), "= 14, global_batch_size 32"),
        (change("best.parallelism", vpp=4), "stages are not pp 4 of vpp 4 chunks"),
        (lambda plan: plan["best"]["stages"][1]["chunks"].__setitem__(0, [4, 9]), "do not hold layers 0 to 32"),
        (change("best.stages.1", num_recomputed=[[4], [5]]), "layers that they do not hold"),
        (change("best.stages.1", num_recomputed=[[4]]), "layers that they do not hold"),
        (change("best.stages.1", recompute={"full": 99}), "layers that they do not hold"),
        (change("best.parallelism", etp=0), "best.parallelism.etp: 0 must be greater than 0"),
        (change("best.parallelism", shard_size=0), "best.parallelism.shard_size: 0 must be greater than 0"),
        (change("best.step", step_s=-1e30), "best.step.step_s: -1e+30 must be greater than 0"),
        (change("best.step", step_s=0.0), "best.step.step_s: 0.0 must be greater than 0"),
        (change("best.step", step_s=1.0), "s, step_s is 1"),
        (
            change("best.step", step_s_interval=[-5.0, 9.0]),
            "best.step.step_s_interval[0]: -5.0 must be at least -1e-06",
        ),
        (change("best.stages.0.memory", total_bytes=-5), "best.stages[0].memory.total_bytes: -5 must be at least 0"),
        (change("best.step", step_s_interval=[9.0, 2.0]), "begins at 9 and ends at 2"),
        (change("best.stages.2.memory", weights_bytes=7), "stages[2].memory: its items do not"),
        (change("best.step", mfu=0.9), "best.step.mfu: is 0.9, priced 0."),
        (change("best.stages.1", in_flight_microbatches=9.5), "in_flight_microbatches: is 9.5, pri"),
        (change("training", straggler_fraction=0.2), "training.straggler_fraction: was edited"),
        (change("", command="rm"), "command: was edited after it was saved"),
        (lambda plan: plan["digest"].pop("runtime"), "runtime: was edited"),
        (change("digest", more="0"), "more: was edited"),
        (change("", digest=None), "digest: was edited"),
        (change("best", rank_factors=[1.0]), "not one factor for each of 4 stages"),
        (change("best", actions=["x"] * 4), "actions: 'x' is not a schedule action"),
        (change("best", actions=["0F0 4F0", "1F0 5F0", "2F0 6F0", "3F0 7F0"]), "best: actions: "),
        (
            change("best", actions=["0F0 4F0", "1F0 5F0", "2F0 6F0", "3F0 999999999F0"]),
            "actions name a stage or a micro-batch",
        ),
        (lambda plan: plan.update(alternatives=[{**plan["best"], "stages": []}]), "alternatives[0]: stages are not"),
        (change("best", warnings=["\x1b[2J"]), "has characters that cannot be printed"),
        (
            change("", run_cost={"tokens": 1.0, "days": -1.0, "gpu_hours": 0.0}),
            "run_cost.days: -1.0 must be at least 0",
        ),
    ],
)
def test_what_was_edited_by_hand_is_refused(
    saved: dict[str, Any], edit: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    edit(saved)
    (tmp_path / "plan.json").write_text(json.dumps(saved))
    with pytest.raises(SpecError) as caught:
        read_plan(str(tmp_path / "plan.json"))
    assert message in caught.value.message
