"""Plans that version 0.2 saved, one a trainer and kind, are read: running jobs are held against theirs.

`tests/plans_of_0_2` holds them as `plan … --time-limit 12 -o` of df63a9e7 wrote them.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from planner.answer import Plan
from planner.plan_file import read_plan, step_now_s

PLANS = sorted((Path(__file__).parent / "plans_of_0_2").glob("*.json.gz"))


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The plan of a test's parameter, as it was saved."""
    path = tmp_path / request.param.stem
    path.write_bytes(gzip.decompress(request.param.read_bytes()))
    return path


def test_there_is_a_plan_of_every_trainer_that_0_2_had() -> None:
    assert len(PLANS) == 22


@pytest.mark.parametrize("saved", PLANS, indirect=True, ids=lambda path: path.name.split(".")[0])
def test_a_saved_plan_is_read_as_it_was_and_priced_today(saved: Path) -> None:
    plan, told = read_plan(str(saved)), json.loads(saved.read_text())
    assert isinstance(plan, Plan)
    assert plan.step.step_s == told["best"]["step"]["step_s"]
    assert [stage.chunks for stage in plan.stages] == [
        tuple(map(tuple, stage["chunks"])) for stage in told["best"]["stages"]
    ]
    assert 0.5 < step_now_s(plan) / plan.step.step_s < 2
