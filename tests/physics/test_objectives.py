"""Objectives: what forwards without a gradient and a reference model add to seconds and bytes."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from planner.answer import Plan
from planner.layout.evaluate import evaluate
from planner.physics.pricing import Pricing
from planner.search.search import plan
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import (
    AdapterSpec,
    ObjectiveName,
    ObjectiveSpec,
    Parallelism,
    Reference,
    SearchLimits,
    TrainingSpec,
)
from planner.trainers.load import load_runtime

CLUSTER = ClusterSpec(hardware=load_hardware("h200"), num_gpus=1)
LORA = AdapterSpec()


def _training(name: ObjectiveName, reference: Reference, adapters: AdapterSpec | None = LORA) -> TrainingSpec:
    objective = ObjectiveSpec(name=name, reference=reference)
    return TrainingSpec(seq_length=1024, global_batch_size=8, adapters=adapters, objective=objective)


def _pricing(name: ObjectiveName, reference: Reference, adapters: AdapterSpec | None = LORA) -> Pricing:
    training = _training(name, reference, adapters)
    return Pricing(model=load_model("8b"), training=training, cluster=CLUSTER, runtime=load_runtime("hf"))


def _evaluated(name: ObjectiveName, reference: Reference = "model", **training: AdapterSpec | None) -> Plan:
    return evaluate(
        load_model("8b"), CLUSTER, _training(name, reference, **training), Parallelism(micro_batch_size=2), runtime="hf"
    )


def test_log_probabilities_known_before_take_least_and_a_second_model_most() -> None:
    plans = [_evaluated("dpo", reference) for reference in ("precomputed", "adapters", "model")]
    steps = [each.best.step.step_s for each in plans]
    peaks = [each.best.stages[0].memory.total_bytes for each in plans]
    assert steps[0] < steps[1] == pytest.approx(steps[2])
    assert peaks[0] == peaks[1] < peaks[2]
    # a second copy of all weights in 16 bits
    weights = [each.best.stages[0].memory.weights_bytes for each in plans]
    assert weights[2] - weights[0] == pytest.approx(2 * 8_030_261_248)


@pytest.mark.parametrize(("fields", "bytes_each"), [({"critics": 1}, 2 + 4), ({"frozen_copies": 2}, 2 * 2)])
def test_models_beside_hold_weights_and_those_that_are_trained_states(fields: dict[str, int], bytes_each: int) -> None:
    totals = []
    for objective in (ObjectiveSpec(), ObjectiveSpec(**fields)):  # type: ignore[arg-type]
        training = TrainingSpec(seq_length=1024, global_batch_size=8, objective=objective)
        memory = evaluate(load_model("8b"), CLUSTER, training, Parallelism(), runtime="hf").best.stages[0].memory
        totals.append(memory.weights_bytes + memory.optimizer_bytes)
    assert totals[1] - totals[0] == pytest.approx(bytes_each * 8_030_261_248)


def test_without_a_reference_a_pair_costs_as_two_sequences() -> None:
    assert _evaluated("orpo").best.step.step_s == _evaluated("lm").best.step.step_s


def test_the_reference_is_as_narrow_as_the_frozen_weights() -> None:
    narrow, wide = (_evaluated("dpo", adapters=AdapterSpec(base_bits=bits)) for bits in (4, 16))
    plain = _evaluated("dpo", "adapters", adapters=AdapterSpec(base_bits=4))
    copied, whole = (
        each.best.stages[0].memory.weights_bytes - plain.best.stages[0].memory.weights_bytes for each in (narrow, wide)
    )
    assert 0.25 < copied / 16e9 < 0.4
    assert whole > copied


def test_a_reference_runs_each_layer_forward_once_without_adapters() -> None:
    shape = Shape.of(tp=1, seq_length=1024, micro_batch_size=2)
    with_reference, without = (
        next(iter(_pricing("dpo", reference).table(shape).layers.values())) for reference in ("adapters", "precomputed")
    )
    frozen_alone = next(iter(_pricing("lm", "model", None).table(shape).layers.values()))
    added_s = float(with_reference.forward_s) - float(without.forward_s)
    assert added_s == pytest.approx(float(frozen_alone.forward_s), rel=1e-6)
    assert float(with_reference.backward_total_s) == float(without.backward_total_s)
    assert float(with_reference.live_bytes) == float(without.live_bytes)


def test_kto_runs_three_forwards_without_a_gradient() -> None:
    shape = Shape.of(tp=1, seq_length=1024)
    plain, dpo, kto = (
        float(next(iter(_pricing(name, "model", None).table(shape).layers.values())).forward_s)
        for name in ("lm", "dpo", "kto")
    )
    assert kto - plain == pytest.approx(3 * (dpo - plain))


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
def test_a_reference_is_sharded_as_the_weights_are(zero_stage: int) -> None:
    def weights(reference: Reference, dp: int) -> float:
        shape = Shape.of(tp=1, dp=dp, seq_length=1024, zero_stage=zero_stage)
        table = _pricing("dpo", reference).table(shape)
        return float(next(iter(table.layers.values())).weights_bytes)

    copies = [weights("model", dp) - weights("precomputed", dp) for dp in (1, 4)]
    assert copies[0] / copies[1] == pytest.approx(4 if zero_stage == 3 else 1)


def test_sharded_weights_are_gathered_once_more_for_each_forward() -> None:
    shape = Shape.of(tp=1, dp=8, seq_length=1024, zero_stage=3)
    cluster = ClusterSpec(hardware=load_hardware("h200"), num_gpus=8)
    plain, dpo = (
        next(
            iter(
                Pricing(
                    model=load_model("8b"), training=_training(name, "model", None), cluster=cluster,
                    runtime=load_runtime("hf"),
                ).table(shape).layers.values()
            )
        )
        for name in ("lm", "dpo")
    )  # fmt: skip
    assert float(dpo.gather_s) == pytest.approx(1.5 * float(plain.gather_s))


def test_micro_batches_hold_whole_pairs() -> None:
    limits = SearchLimits(time_limit_s=20, top=3)
    found = plan(load_model("1b"), CLUSTER, _training("dpo", "adapters"), limits=limits, runtime="hf")
    layouts = [found.best, *found.alternatives]
    assert all(layout.parallelism.micro_batch_size % 2 == 0 for layout in layouts)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"global_batch_size": 3, "objective": {"name": "dpo"}}, "is odd"),
        ({"global_batch_size": 4, "objective": {"name": "dpo", "reference": "adapters"}}, "needs adapters"),
    ],
)
def test_contradictions_are_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        TrainingSpec.model_validate({"seq_length": 8, **fields})
