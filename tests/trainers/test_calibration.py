"""A calibration is laid over a profile: factors multiply, shares replace, and the profile itself stays."""

from __future__ import annotations

import pytest

from planner.layout.evaluate import evaluate
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import LinkTier
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.calibration import UNPROBED_MEMORY_WIDTH, Calibration, Factor, Quantity, Share
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
    cluster = _cluster()
    corrections = MEASURED.of_cluster(cluster).hardware.corrections
    says = {correction.name: correction.says for correction in corrections}
    assert len(says) == 7
    assert says["products"] == "× 1.000 → × 1.100 (stages)"
    assert says["nvlink's share of its rate"] == "80.0% → 70.0% (an all-gather)"
    assert says["host per micro-batch"] == "0 µs → 200 µs (a rank)"


def test_what_is_refused_or_confirmed_stays_and_is_said_with_the_reason() -> None:
    slow = Factor(value=1.5, source="stages", verdict="refused", reason="it explains little")
    lost = Share(value=0.05, source="an all-gather", verdict="refused", reason="another way")
    same = Quantity(value=1.02, source="a rank", verdict="confirmed", reason="as near as it repeats")
    doubted = Calibration(
        source="x", gemm_factor=slow, efficiency_fraction={"nvlink": lost}, context_gib=same, step_width=0.4
    )
    cluster = _cluster()
    after = doubted.of_cluster(cluster).hardware
    assert (after.tiers, after.reserved) == (cluster.hardware.tiers, cluster.hardware.reserved)
    assert (after.efficiency.gemm_factor, after.efficiency.evidence) == (1.0, "measured")
    assert [(c.before, c.measured, c.after) for c in after.corrections] == [
        (1.0, 1.5, 1.0),
        (0.8, 0.05, 0.8),
        (1.0, 1.02, 1.0),
    ]
    assert after.corrections[0].says == "refused, stays at × 1.000, measured × 1.500: it explains little"
    assert after.corrections[2].says == "stays at 1.00 GiB, measured 1.02 GiB: as near as it repeats"


def test_a_profile_that_was_confirmed_is_probed_and_stays() -> None:
    same = Factor(value=1.004, source="stages", verdict="confirmed", reason="as near as seconds repeat")
    after = Calibration(source="x", gemm_factor=same, step_width=0.08).of_hardware(load_hardware("h200"))
    assert (after.efficiency.gemm_factor, after.efficiency.evidence, after.efficiency.step_width) == (
        1.0,
        "probed",
        0.08,
    )


def test_the_network_that_a_user_states_is_corrected_too() -> None:
    rack = LinkTier(name="rack", gb_per_s=50.0, latency_us=8.0)
    measured = Calibration(source="x", efficiency_fraction={"rack": Share(value=0.4, source="an all-gather")})
    after = measured.of_cluster(_cluster(network_tiers=(rack,)))
    assert after.tiers[1].efficiency_fraction == 0.4
    assert after.hardware.corrections[0].before == rack.efficiency_fraction


def test_memory_that_no_probe_measured_keeps_the_width_of_a_measured_gpu() -> None:
    def width(calibration: Calibration) -> float:
        return calibration.of_hardware(load_hardware("h200")).reserved.width

    kernels = Calibration(source="x", gemm_factor=Factor(value=1.2, source="stages"))
    assert width(kernels) == UNPROBED_MEMORY_WIDTH
    assert width(kernels.model_copy(update={"memory_width": 0.01})) == 0.01
