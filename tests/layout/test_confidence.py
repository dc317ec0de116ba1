"""Intervals: around the prediction, wider where less was measured, and as often right as they say."""

from __future__ import annotations

import math

import pytest

from planner.answer import Plan
from planner.layout.confidence import HOST_WIDTH, TRACED_WIDTH, VISION_WIDTH, width_terms
from planner.layout.evaluate import evaluate
from planner.physics.pricing import Pricing
from planner.search.search import plan
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.trainers.load import load_runtime
from planner.trainers.spec import RuntimeSpec


def _evaluated(model: str = "8b", evidence: str = "family", num_gpus: int = 8) -> Plan:
    hardware = load_hardware("h100")
    efficiency = hardware.efficiency.model_copy(update={"evidence": evidence})
    cluster = ClusterSpec(hardware=hardware.model_copy(update={"efficiency": efficiency}), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=4096, global_batch_size=num_gpus * 4)
    return evaluate(load_model(model), cluster, training, Parallelism(tp=2))


def _width(plan: Plan) -> float:
    low_s, high_s = plan.step.step_s_interval or (0.0, 0.0)
    assert low_s < plan.step.step_s < high_s
    return math.log(plan.step.step_s / low_s)


def _memory_width(plan: Plan) -> float:
    memory = plan.best.worst_stage.memory
    assert memory.total_bytes_interval is not None
    return math.log(memory.total_bytes_interval[1] / memory.total_bytes)


def test_less_evidence_makes_wider_intervals() -> None:
    plans = [_evaluated(evidence=evidence) for evidence in ("probed", "measured", "family", "spec_sheet")]
    for widths in ([_width(p) for p in plans], [_memory_width(p) for p in plans]):
        assert widths == sorted(widths)
        assert widths[-1] > 2 * widths[0]


def test_timed_kernels_say_little_of_amds_software_and_a_probe_all() -> None:
    def width(evidence: str) -> float:
        hardware = load_hardware("mi300x")
        efficiency = hardware.efficiency.model_copy(update={"evidence": evidence})
        cluster = ClusterSpec(hardware=hardware.model_copy(update={"efficiency": efficiency}), num_gpus=8)
        training = TrainingSpec(seq_length=4096, global_batch_size=32)
        return _width(evaluate(load_model("8b"), cluster, training, Parallelism(), runtime="primus-megatron"))

    assert width("spec_sheet") > 1.2 * width("measured")
    assert width("probed") < width("measured") / 2


def test_routing_and_scale_each_widen_the_step() -> None:
    dense = _width(_evaluated())
    assert _width(_evaluated("deepseek-v2-lite")) > dense
    few, many = (_evaluated(num_gpus=n) for n in (4096, 65536))
    shares = [p.step.breakdown.tp_comm_s / p.step.step_s for p in (few, many)]
    assert shares[0] == pytest.approx(shares[1], rel=0.05)  # the same exchanges: only the scale differs
    assert _width(many) > _width(few)


def test_a_tower_and_layers_traced_in_another_trainer_each_widen_the_step() -> None:
    tower = load_model("1b").model_copy(update={"vision": object(), "traced": object()})
    cluster, training = ClusterSpec(hardware="h100", num_gpus=8), TrainingSpec(seq_length=4096, global_batch_size=32)
    best = _evaluated().best

    def width(model: ModelSpec, runtime: str) -> float:
        pricing = Pricing(model=model, training=training, cluster=cluster, runtime=load_runtime(runtime))
        return width_terms(pricing, best, 0.0)["layers"]

    assert width(load_model("1b"), "megatron") == 0
    assert width(tower, "torch-eager") == VISION_WIDTH
    assert width(tower, "megatron") == pytest.approx(math.hypot(VISION_WIDTH, TRACED_WIDTH))


def test_the_more_of_a_step_is_the_hosts_the_wider_it_is() -> None:
    megatron = load_runtime("megatron")
    graphs = megatron.model_copy(update={"cuda_graphs": True})

    def of(model: str, runtime: RuntimeSpec) -> Pricing:
        training = TrainingSpec(seq_length=2048, global_batch_size=64)
        cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
        return Pricing(model=load_model(model), training=training, cluster=cluster, runtime=runtime)

    def fraction(model: str, runtime: RuntimeSpec = megatron) -> float:
        return of(model, runtime).host_fraction(Shape(tp=8, seq_length=2048))

    assert 0 == fraction("llama-3.2-1b", graphs) < fraction("70b") < 0.5 < fraction("llama-3.2-1b") <= 1
    assert fraction("qwen3-30b-a3b") > 0.5, "its host launches routing and experts as well"
    best = _evaluated().best
    alone, shared = (width_terms(of("8b", megatron), best, share) for share in (0.0, 0.5))
    assert shared == pytest.approx(alone | {"host": 0.5 * HOST_WIDTH})


def test_an_alternative_is_undecided_where_its_interval_reaches_below_the_best_ones() -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    training = TrainingSpec(seq_length=4096, global_batch_size=64)
    found = plan(load_model("8b"), cluster, training, limits=SearchLimits(top=5, time_limit_s=60.0))
    assert found.best.step.step_s_interval is not None
    for other in found.alternatives:
        assert other.step.step_s_interval is not None
        reaches = other.step.step_s_interval[0] <= found.best.step.step_s_interval[1]
        assert (other in found.undecided) == reaches
