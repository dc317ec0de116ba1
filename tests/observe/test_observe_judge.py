"""The verdict by the predicted intervals, and the MFU of one definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from planner.answer import Plan
from planner.observe.judge import judged, judged_beside, predicted
from planner.observe.observation import JobFacts, Observation, Observed, SourceFile
from planner.specs.units import GIB


@pytest.fixture
def priced(make_plan: Callable[..., Plan]) -> Plan:
    """The plan of conftest with an interval: 10% to either side."""
    plan = make_plan()
    step = plan.best.step.model_copy(
        update={"step_s_interval": (0.9 * plan.best.step.step_s, 1.1 * plan.best.step.step_s)}
    )
    return plan.model_copy(update={"best": plan.best.model_copy(update={"step": step})})


def observed(plan: Plan, factor: float, **more: object) -> Observation:
    sources = (SourceFile(path="a.log", format="megatron"),)
    return Observation(**{"sources": sources, "step_s": factor * plan.step.step_s, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("factor", "precision", "verdict"),
    [(1.0, 0, "expected"), (1.2, 0, "slow"), (0.8, 0, "fast"), (1.12, 0.05, "expected"), (0.88, 0.05, "expected")],
)
def test_the_interval_decides(priced: Plan, factor: float, precision: float, verdict: str) -> None:
    answer = judged(observed(priced, factor, step_s_precision_fraction=precision), priced, "plan.json")
    assert answer.verdict == verdict
    assert answer.says.startswith(("as expected" if verdict == "expected" else verdict) + ":")
    assert answer.causes == ()


def test_without_an_interval_the_prediction_itself_decides(priced: Plan) -> None:
    step = priced.step.model_copy(update={"step_s_interval": None})
    bare = priced.model_copy(update={"best": priced.best.model_copy(update={"step": step})})
    assert judged(observed(bare, 1.01), bare, "plan.json").verdict == "slow"


def test_memory_beyond_the_interval_is_said_where_the_step_is_right(priced: Plan) -> None:
    peak = priced.best.worst_stage.memory.peak_allocated_bytes
    more = {"peak_memory_bytes": peak + 6 * GIB, "peak_memory_kind": "allocated"}
    answer = judged(observed(priced, 1.0, **more), priced, "plan.json")
    assert (answer.verdict, "6.0 GiB" in answer.says) == ("memory", True)
    slow = judged(observed(priced, 1.2, **more), priced, "plan.json")
    assert (slow.verdict, "6.0 GiB more allocated" in slow.says) == ("slow", True)
    less = {"peak_memory_bytes": peak - 6 * GIB, "peak_memory_kind": "allocated"}
    assert judged(observed(priced, 1.0, **less), priced, "plan.json").verdict == "expected"


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"num_gpus": 16}, "GPUs 16, not 2,048"),
        ({"global_batch_size": 7}, "global batch size 7"),
        ({"lora_rank": 16}, "rank of adapters 16, not 0"),
        ({"seq_length": 4096}, "sequence length 4,096"),
        ({"run": {"parallelism": {"tp": 3}}}, "tp 3"),
    ],
)
def test_a_log_of_another_job_gets_no_verdict(priced: Plan, facts: dict[str, Any], says: str) -> None:
    answer = judged(observed(priced, 1.0, facts=JobFacts(**facts)), priced, "plan.json")
    assert answer.verdict is None
    assert answer.says.startswith("no verdict: the log is of another job")
    assert says in answer.says


def test_a_log_of_the_same_job_gets_one(priced: Plan) -> None:
    layout = priced.parallelism
    facts = JobFacts(
        num_gpus=priced.cluster.num_gpus,
        seq_length=priced.training.seq_length,
        run={"parallelism": {"tp": layout.tp, "pp": layout.pp}},
    )
    assert judged(observed(priced, 1.0, facts=facts), priced, "plan.json").verdict == "expected"


def test_mfu_goes_with_tokens_per_second(priced: Plan) -> None:
    answer = judged(observed(priced, 2.0, asks=("--seq-length N",)), priced, "plan.json").observation
    assert answer.mfu == pytest.approx(priced.step.mfu / 2)
    assert answer.tokens_per_s == pytest.approx(priced.step.tokens_per_s / 2)
    assert answer.asks == ()
    half = observed(priced, 1.0, tokens_per_s=priced.step.tokens_per_s / 4)
    assert judged(half, priced, "plan.json").observation.mfu == pytest.approx(priced.step.mfu / 4)


def test_an_earlier_run_without_memory_predicts_none(priced: Plan) -> None:
    earlier = Observed(observation=observed(priced, 1.0))
    later = observed(priced, 1.0, peak_memory_bytes=90 * GIB, peak_memory_kind="allocated")
    assert judged_beside(later, earlier, "observed.json").verdict == "expected"


def test_no_step_has_no_verdict(priced: Plan) -> None:
    answer = judged(observed(priced, 1.0).model_copy(update={"step_s": None}), priced, "plan.json")
    assert answer.verdict is None


def test_the_prediction_is_the_plan(priced: Plan) -> None:
    prediction = predicted(priced, "plan.json")
    assert sum(prediction.breakdown.values()) == pytest.approx(sum(priced.step.breakdown.model_dump().values()))
    assert prediction.peak_memory_bytes == priced.best.worst_stage.memory.peak_allocated_bytes
