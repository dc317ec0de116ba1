"""Runs of examples: padded, packed, and as long as each other where nothing is padded."""

from __future__ import annotations

from functools import cache

import pytest

from planner.answer import Plan, RunCost
from planner.layout.evaluate import evaluate
from planner.layout.step import mean_step_s
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import AdapterSpec, DocumentLength, Parallelism, TrainingSpec
from planner.trainers.documents import Lengths

SHORT_AND_LONG: Lengths = ((512, 0.5), (1024, 0.5))


@cache
def _evaluated(
    lengths: Lengths, batching: str, num_gpus: int = 1, zero_stage: int = 0, seq_length: int = 1024, micro: int = 2
) -> Plan:
    documents = tuple(DocumentLength(length=length, share=share) for length, share in lengths)
    mean = sum(length * share for length, share in lengths)
    training = TrainingSpec(
        seq_length=seq_length, global_batch_size=16, document_lengths=documents, batching=batching,  # type: ignore[arg-type]
        examples=8000, epochs=2, tokens=16_000 * mean, adapters=AdapterSpec(),
    )  # fmt: skip
    layout = Parallelism(dp=num_gpus, micro_batch_size=micro, zero_stage=zero_stage)  # type: ignore[arg-type]
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=num_gpus)
    return evaluate(load_model("8b"), cluster, training, layout, runtime="hf")


def _cost(plan: Plan) -> RunCost:
    assert plan.run_cost is not None
    return plan.run_cost


def test_padding_nothing_is_as_long_as_packing() -> None:
    padded, packed = (_cost(_evaluated(((1024, 1.0),), batching)) for batching in ("padded", "packed"))
    assert padded.days == pytest.approx(packed.days)
    assert padded.num_steps == packed.num_steps == 1000
    assert padded.padding_fraction == 0
    assert padded.packed_days == pytest.approx(packed.days)


def test_packing_is_never_slower_and_says_what_it_gains() -> None:
    padded, packed = (_cost(_evaluated(SHORT_AND_LONG, batching)) for batching in ("padded", "packed"))
    assert packed.days < padded.days
    assert padded.packed_days == pytest.approx(packed.days)
    assert packed.padding_fraction is None
    # the longer of two is long in three of four draws
    assert padded.padding_fraction == pytest.approx(1 - 768 / (0.75 * 1024 + 0.25 * 512))
    assert padded.num_steps == pytest.approx(1000)
    assert packed.num_steps == pytest.approx(750)


def test_the_mean_step_is_that_of_the_lengths_it_may_have() -> None:
    plan, short = _evaluated(SHORT_AND_LONG, "padded"), _evaluated(((512, 1.0),), "padded", seq_length=512)
    expected = 0.75 * plan.best.step.step_s + 0.25 * short.best.step.step_s
    assert mean_step_s(plan) == pytest.approx(expected, rel=1e-9)


def test_the_memory_is_that_of_the_longest() -> None:
    padded, whole = (_evaluated(lengths, "padded") for lengths in (SHORT_AND_LONG, ((1024, 1.0),)))
    assert padded.best.stages == whole.best.stages


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_ranks_wait_for_the_one_with_the_longest_examples(zero_stage: int) -> None:
    plan = _evaluated(SHORT_AND_LONG, "padded", 4, zero_stage)
    mean_s, longest_s = mean_step_s(plan), plan.best.step.step_s
    training = plan.training.model_copy(update={"seq_length": 512})
    short = evaluate(
        plan.model.spec, plan.cluster, training, Parallelism(dp=4, micro_batch_size=2, zero_stage=zero_stage),  # type: ignore[arg-type]
        runtime="hf",
    )  # fmt: skip
    alone_s = 0.75 * longest_s + 0.25 * short.best.step.step_s
    assert alone_s < mean_s <= longest_s
    if zero_stage == 3:
        # of eight examples one is long but in one draw of 256
        assert mean_s == pytest.approx(longest_s - (longest_s - short.best.step.step_s) / 256)


def test_a_run_in_tokens_alone_has_no_examples() -> None:
    plan = _evaluated(SHORT_AND_LONG, "packed")
    training = plan.training.model_copy(update={"examples": None, "document_lengths": None})
    plain = evaluate(plan.model.spec, plan.cluster, training, Parallelism(micro_batch_size=2), runtime="hf")
    assert _cost(plain).num_steps is None
    assert _cost(plain).days == pytest.approx(_cost(plan).days)
