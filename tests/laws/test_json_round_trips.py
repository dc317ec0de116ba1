"""Every public type comes back from its JSON as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given
from pydantic import BaseModel

from laws.counting import law
from laws.values import values_of
from planner.answer import Plan, PricedLayout
from planner.answer.memory import MemoryAnswer
from planner.decide.compare import Comparison
from planner.decide.job import Resume
from planner.decide.phases import PhaseAnswer
from planner.decide.sweep import Sweep
from planner.layout.runs import RunSpec
from planner.months.losses import Fact
from planner.observe.follower import FollowedRun
from planner.observe.observation import Observed
from planner.observe.traces.recorded import Recorded
from planner.probe.result import ProbeResult
from planner.probe.run import ProbeRun
from planner.profile.measurements import Machine
from planner.search.why.explanation import Explanation
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.model import ModelSpec
from planner.specs.phases import PhasesFile
from planner.specs.training import OperationsSpec, Parallelism, SearchLimits, TrainingSpec
from planner.trainers.calibration import Calibration
from planner.trainers.load import Checkpoint
from planner.trainers.spec import RuntimeSpec
from tools.gpu_check.report import GpuCheck

SPECS = (ModelSpec, HardwareSpec, ClusterSpec, TrainingSpec, OperationsSpec, Parallelism, SearchLimits, RuntimeSpec)
FILES = (PhasesFile, RunSpec, Calibration, Checkpoint, Fact, Machine)
ANSWERS = (
    Plan, PricedLayout, MemoryAnswer, Comparison, PhaseAnswer, Resume, Sweep, Observed, FollowedRun, Recorded, ProbeRun,
    ProbeResult, Explanation, GpuCheck,
)  # fmt: skip


def through_json(value: BaseModel) -> Any:
    """The value read from what is written of it, in two ways."""
    kind = type(value)
    text = json.dumps(value.model_dump(mode="json", by_alias=True), allow_nan=False)
    assert kind.model_validate_json(value.model_dump_json(by_alias=True)) == value
    return kind.model_validate(json.loads(text))


KINDS: tuple[type[BaseModel], ...] = (*SPECS, *FILES, *ANSWERS)


def law_of(kind: type[BaseModel]) -> Callable[[], None]:
    """The law for one type, to be called."""

    @law(3)
    @given(values_of(kind))
    def comes_back(value: BaseModel) -> None:
        assert through_json(value) == value

    return cast("Callable[[], None]", comes_back)


@pytest.mark.thorough(2)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_value_comes_back_from_its_json(kind: type[BaseModel]) -> None:
    law_of(kind)()
