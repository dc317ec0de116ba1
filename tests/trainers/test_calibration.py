"""A calibration is laid over a profile: factors multiply, shares replace, and the profile itself stays."""

from __future__ import annotations

import pytest

from planner.layout.evaluate import evaluate
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.calibration import Calibration, Factor, Quantity, Share
from planner.trainers.load import load_runtime

MEASURED = Calibration(
    source="NVIDIA H200, torch 2.11",
    gemm_factor=Factor(value=1.1, source="stages"),
    attention_factor={"flash": Factor(value=0.9, source="stages")},
    stream_factor=Factor(value=1.2, source="stages"),
    efficiency_fraction={"nvlink": Share(value=0.7, source="an all-gather")},
    context_gib=Quantity(value=1.5, source="a rank"),
    fragmentation_fraction=Share(value=0.05, source="a rank"),
    microbatch_overhead_s=Quantity(value=2e-4, source="a rank"),
)


def _cluster(**changes: object) -> ClusterSpec:
    fields = {"hardware": load_hardware("h200"), "num_gpus": 16, **changes}
    return ClusterSpec.model_validate(fields)


def test_factors_multiply_those_of_the_profile_and_shares_replace_them() -> None:
    hardware = load_hardware("h200")
    before = hardware.efficiency.model_copy(update={"gemm_factor": 1.05})
    after = MEASURED.of_hardware(hardware.model_copy(update={"efficiency": before}))
    efficiency = after.efficiency
    assert efficiency.gemm_factor == pytest.approx(1.05 * 1.1)
    assert (efficiency.flash.seconds_factor, efficiency.stream_factor) == (0.9, 1.2)
    assert efficiency.gemm == hardware.efficiency.gemm
    assert [tier.efficiency_fraction for tier in after.tiers] == [0.7, hardware.tiers[1].efficiency_fraction]
    assert (after.reserved.context_gib, after.reserved.fragmentation_fraction) == (1.5, 0.05)
    assert after.reserved.communicator_gib == hardware.reserved.communicator_gib


def test_the_profile_itself_stays_and_the_overlay_says_where_it_comes_from() -> None:
    before = load_hardware("h200").model_dump()
    after = MEASURED.of_hardware(load_hardware("h200"))
    assert load_hardware("h200").model_dump() == before
    assert after.efficiency.evidence == "probed"
    assert after.efficiency.source.endswith("Probed: NVIDIA H200, torch 2.11")
    assert after.efficiency.source.startswith(before["efficiency"]["source"])
    assert "an all-gather" in after.tiers[0].source


def test_what_was_not_measured_stays() -> None:
    hardware = load_hardware("h200")
    nothing = Calibration(source="x").of_hardware(hardware)
    assert (nothing.tiers, nothing.reserved) == (hardware.tiers, hardware.reserved)
    assert nothing.efficiency.model_copy(update={"evidence": "measured", "source": ""}) == (
        hardware.efficiency.model_copy(update={"source": ""})
    )
    runtime = load_runtime("megatron")
    assert Calibration(source="x").of_runtime(runtime) is runtime
    assert MEASURED.of_runtime(runtime).microbatch_overhead_s == 2e-4


def test_a_cluster_keeps_its_node_size_and_network_though_its_links_were_looked_up() -> None:
    cluster = _cluster(gpus_per_node=4, network_gb_per_s=25.0)
    assert cluster.tiers[0].num_gpus == 4
    after = MEASURED.of_cluster(cluster)
    assert (after.num_gpus, after.tiers[0].num_gpus, after.tiers[1].gb_per_s) == (16, 4, 25.0)
    assert after.tiers[0].efficiency_fraction == 0.7


def test_a_plan_of_a_calibrated_cluster_is_probed_and_slower_where_it_measured_slower() -> None:
    training, layout = TrainingSpec(seq_length=4096, global_batch_size=16), Parallelism(tp=2, pp=4, dp=2)
    plain = evaluate(load_model("8b"), _cluster(), training, layout)
    probed = evaluate(load_model("8b"), MEASURED.of_cluster(_cluster()), training, layout)
    assert (plain.evidence, probed.evidence) == ("calibrated", "probed")
    assert probed.step.breakdown.compute_s > plain.step.breakdown.compute_s
    assert probed.step.breakdown.tp_comm_s > plain.step.breakdown.tp_comm_s
    assert probed.stages[0].memory.reserved_bytes > plain.stages[0].memory.reserved_bytes


def test_every_number_is_said_with_its_source() -> None:
    lines = MEASURED.in_words()
    assert len(lines) == 7
    assert lines[0] == "products × 1.100 (stages)"
    assert "nvlink at 70% of its rate (an all-gather)" in lines
    assert "200 µs of host a micro-batch (a rank)" in lines
