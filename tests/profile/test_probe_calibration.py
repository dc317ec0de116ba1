"""A probe's seconds become the factors that made them; what proves nothing about speed is refused."""

import math
import subprocess
import sys
from statistics import median
from typing import Any

import pytest
from priced_plans import priced_plan
from probes import GAP_S, probe_result, probe_run
from tables import beside

from planner.answer import Plan
from planner.errors import SpecError
from planner.layout.evaluate import evaluate
from planner.physics.communication import collective_s
from planner.probe.compare import compared
from planner.probe.result import Condition, ProbeCheck, ProbedExchange, ProbedMemory, ProbeResult, RankOutOfMemory
from planner.probe.run_price import chunk_costs, in_eager_torch
from planner.profile.probe_calibration import from_probe
from planner.profile.probed import NORMAL_80
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware
from planner.specs.training import Parallelism, TrainingSpec
from planner.specs.units import GB, GIB
from planner.trainers.calibration import Calibration
from tools.calibrate.kernels import measured_model
from tools.calibrate.tables import read_table

TABLES = beside(__file__)

KERNELS = ("gemm_factor", "attention_factor", "stream_factor")


def factors_of(calibration: Calibration) -> dict[str, float]:
    """The factor of each kind of kernel; attention ran as cuDNN's."""
    assert calibration.gemm_factor is not None
    assert calibration.stream_factor is not None
    factors = (calibration.gemm_factor, calibration.attention_factor["cudnn"], calibration.stream_factor)
    return {name: factor.value for name, factor in zip(KERNELS, factors, strict=True)}


def make_plan(model: str = "8b", dtype: str = "bf16", **more: Any) -> Plan:
    job = {"runtime": "torch-eager", "tp": 2, "pp": 4} | more
    num_gpus = job["tp"] * job["pp"] * job.get("cp", 1) * job.get("dp", 1)
    return priced_plan(model, num_gpus, hardware="h200", training={"dtype": dtype}, **job)


def slower(cluster: ClusterSpec, **factors: float) -> ClusterSpec:
    """The cluster, and how long its kernels really take."""
    hardware = cluster.hardware
    changed = hardware.efficiency.model_copy(update=factors)
    return ClusterSpec(hardware=hardware.model_copy(update={"efficiency": changed}), num_gpus=cluster.num_gpus)


def measured_on(plan: Plan, machine: ClusterSpec, **changes: Any) -> ProbeResult:
    costs = chunk_costs(probe_run(plan), machine, alone=changes.get("mode") != "ranks")
    if changes.get("mode") == "ranks":
        return probe_result(plan, lambda j: (costs[j].forward_total_s, costs[j].backward_total_s), **changes)
    return probe_result(plan, lambda j: (costs[j].forward_s, costs[j].input_grad_s + costs[j].weight_grad_s), **changes)


@pytest.mark.parametrize(("model", "layout"), TABLES["a_run_is_predicted_as_what_it_is_held_against"])
def test_a_run_is_predicted_as_what_it_is_held_against(model: str, layout: dict[str, Any]) -> None:
    plan = make_plan(model, **layout)
    costs = chunk_costs(probe_run(plan), plan.cluster)
    for stage in in_eager_torch(plan).stages:
        held = [costs[j] for j in probe_run(plan).stages_of(stage.stage)]
        assert sum(cost.forward_s for cost in held) == pytest.approx(stage.forward_s, rel=1e-9)
        assert sum(cost.input_grad_s + cost.weight_grad_s for cost in held) == pytest.approx(stage.backward_s, rel=1e-9)
        assert sum(cost.forward_total_s - cost.forward_s for cost in held) == pytest.approx(stage.forward_comm_s)


@pytest.mark.parametrize("mode", ["stages", "ranks"])
def test_a_probe_of_few_gpus_says_nothing_of_the_late_nodes_of_a_large_job(mode: str) -> None:
    plan = make_plan()
    large = plan.cluster.changed(num_gpus=2048)
    corrections = from_probe(measured_on(plan, plan.cluster, mode=mode), large).corrections(large.hardware, large.tiers)
    kernels = {each.name: each.verdict for each in corrections if each.name in ("products", "memory-bound kernels")}
    assert kernels == {"products": "confirmed", "memory-bound kernels": "confirmed"}


def test_one_slowness_of_all_kernels_is_found_to_the_digit() -> None:
    plan = make_plan()
    calibration = from_probe(measured_on(plan, slower(plan.cluster, **dict.fromkeys(KERNELS, 1.25))), plan.cluster)
    assert list(factors_of(calibration).values()) == pytest.approx([1.25] * 3, rel=0.01)


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_that_is_slower_is_told_from_the_others(name: str) -> None:
    plan = make_plan(seq_length=32768)
    machine = slower(plan.cluster, **{name: 1.3})
    calibration = from_probe(measured_on(plan, machine), plan.cluster)
    values = factors_of(calibration)
    if name != "stream_factor":  # a small share of all passes alike: with it, the others move a little
        assert values[name] > max(value for kernel, value in values.items() if kernel != name)
    for before, after in zip(
        chunk_costs(probe_run(plan), machine),
        chunk_costs(probe_run(plan), calibration.of_cluster(plan.cluster)),
        strict=True,
    ):
        assert float(after.total_s) == pytest.approx(float(before.total_s), rel=0.015)


def stage_plan(row: dict[str, str], cluster: ClusterSpec) -> Plan:
    """The plan that one measured stage is a stage of."""
    tp, pp, dp, batch = (int(row[name]) for name in ("tp", "pp", "dp", "batch"))
    model = measured_model(row["model"])
    layers = {"num_hidden_layers": int(row["layers"]) * pp}
    training = TrainingSpec(seq_length=int(row["seq"]), global_batch_size=dp * batch * 8)
    layout = Parallelism(tp=tp, pp=pp, dp=dp, micro_batch_size=batch)
    return evaluate(
        ModelSpec.model_validate({**model.model_dump(), **layers}), cluster, training, layout, runtime="torch-eager"
    )


def seconds(row: dict[str, str]) -> tuple[float, float]:
    return float(row["forward_us"]) * 1e-6, float(row["backward_us"]) * 1e-6


def errors(rows: list[dict[str, str]], cluster: ClusterSpec) -> list[float]:
    """Of a micro-batch of each measured stage."""
    found = []
    for row in rows:
        run = probe_run(stage_plan(row, cluster))
        cost = chunk_costs(run, cluster, alone=True)[int(row["stage"])]
        compute_s = float(cost.forward_s + cost.input_grad_s + cost.weight_grad_s)
        found.append(abs(compute_s / sum(seconds(row)) - 1))
    return found


@pytest.mark.thorough(3)
@pytest.mark.parametrize("model", ["llama3-8b", "llama2-13b", "gpt3-175b"])
def test_measured_stages_of_one_model_mend_a_wrong_profile_for_the_others(model: str) -> None:
    table = read_table("h200", "stages")
    cells: dict[str, list[str]] = table._cells
    rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    rows = [row for row in rows if row["recompute"] == "none" and row["pp"] != "1"]
    ours = [row for row in rows if row["model"] == model and row["tp"] == ("1" if model == "llama3-8b" else row["tp"])]
    others = [row for row in rows if row["model"] != model]
    wrong = slower(ClusterSpec(hardware=load_hardware("h200"), num_gpus=1024), gemm_factor=0.8, stream_factor=0.85)
    measured = {int(row["stage"]): seconds(row) for row in ours}
    result = probe_result(stage_plan(ours[0], wrong), lambda j: measured[j], stages=sorted(measured))
    mended = from_probe(result, wrong).of_cluster(wrong)
    assert median(errors(others, wrong)) > 0.14
    assert median(left := errors(others, mended)) < 0.05
    assert math.log1p(max(left)) < (mended.hardware.efficiency.step_width or 0.0)


def with_links(cluster: ClusterSpec, **shares: float) -> ClusterSpec:
    """The cluster with the shares of their rates that its links really reach, by tier."""
    hardware = cluster.hardware
    tiers = tuple(
        tier.model_copy(update={"efficiency_fraction": shares.get(tier.name, tier.efficiency_fraction)})
        for tier in hardware.tiers
    )
    return ClusterSpec(hardware=hardware.model_copy(update={"tiers": tiers}), num_gpus=cluster.num_gpus)


def exchange(plan: Plan, name: str, size: int, stride: int, num_bytes: int, efficiency: float) -> ProbedExchange:
    """As it would be measured on links that reach `efficiency` of their rate."""
    hardware = plan.cluster.hardware
    tiers = tuple(tier.model_copy(update={"efficiency_fraction": efficiency}) for tier in hardware.tiers)
    cluster = ClusterSpec(hardware=hardware.model_copy(update={"tiers": tiers}), num_gpus=64)
    kind: Any = "all_reduce" if "all-reduce" in name else "all_gather"
    seconds = float(collective_s(kind, num_bytes, size, stride, cluster))
    moved = (2 if kind == "all_reduce" else 1) * (size - 1) / size * num_bytes
    return ProbedExchange(name=name, size=size, num_bytes=num_bytes, seconds=seconds, bus_gb_per_s=moved / seconds / GB)


def test_links_are_measured_by_the_exchanges_that_run_on_them_alone() -> None:
    plan = make_plan(tp=8, pp=1, dp=4)
    found = (
        exchange(plan, "tp all-gather", 8, 1, 2**26, 0.6),
        exchange(plan, "tp all-reduce", 8, 1, 2**20, 0.3),
        exchange(plan, "gradient reduce-scatter", 4, 8, 2**28, 0.5),
    )
    machine = with_links(plan.cluster, nvlink=0.6, infiniband=0.5)
    result = measured_on(plan, machine, mode="ranks", exchanges=found)
    shares = from_probe(result, plan.cluster).efficiency_fraction
    assert {name: share.value for name, share in shares.items()} == pytest.approx({"nvlink": 0.6, "infiniband": 0.5})
    assert "tp all-gather of 64.0 MiB over 8 ranks" in shares["nvlink"].source


@pytest.mark.parametrize(
    ("layout", "name", "size", "stride", "shares"), TABLES["links_are_those_of_the_ranks_that_exchange"]
)
def test_links_are_those_of_the_ranks_that_exchange(
    layout: dict[str, Any], name: str, size: int, stride: int, shares: dict[str, float]
) -> None:
    plan = make_plan(pp=1, **layout)
    found = (exchange(plan, name, size, stride, 2**28, 0.5),)
    result = measured_on(plan, with_links(plan.cluster, **shares), mode="ranks", exchanges=found)
    measured = from_probe(result, plan.cluster)
    assert {name: share.value for name, share in measured.efficiency_fraction.items()} == pytest.approx(shares)


def memory_of(context_gib: float, fragmentation: float) -> ProbedMemory:
    held = round(50 * GIB * (1 + fragmentation))
    in_use = held + round(context_gib * GIB)
    return ProbedMemory(
        static_bytes=GIB, peak_allocated_bytes=50 * GIB, peak_reserved_bytes=held, device_used_bytes=in_use
    )


def test_memory_and_host_are_what_the_ranks_showed() -> None:
    plan = make_plan()
    calibration = from_probe(measured_on(plan, plan.cluster, memory=memory_of(1.5, 0.04)), plan.cluster)
    assert calibration.context_gib.value == pytest.approx(1.5)
    assert calibration.fragmentation_fraction.value == pytest.approx(0.04)
    # a gap after each action but the last, two actions a micro-batch
    assert calibration.microbatch_overhead_s.value == pytest.approx(2 * GAP_S, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *TABLES["what_proves_nothing_about_speed_is_refused"],
        (
            {"ranks": (), "out_of_memory": RankOutOfMemory(rank=0, stage=0, phase="build", message="")},
            "ran out of memory",
        ),
    ],
)
def test_what_proves_nothing_about_speed_is_refused(changes: dict[str, Any], message: str) -> None:
    plan = make_plan()
    run = probe_run(plan, **changes.pop("run", {}))
    result = measured_on(plan, plan.cluster).model_copy(update={**changes, "run": run})
    with pytest.raises(SpecError, match=message):
        from_probe(result, plan.cluster)


def test_a_machine_as_the_profile_has_it_is_confirmed() -> None:
    plan = make_plan()
    calibration = from_probe(measured_on(plan, plan.cluster), plan.cluster)
    assert calibration.gemm_factor.verdict == "confirmed"
    after = calibration.of_cluster(plan.cluster).hardware.efficiency
    assert (after.evidence, after.gemm_factor, after.flash.seconds_factor) == ("probed", 1.0, 1.0)
    assert 0.07 < (after.step_width or 0.0) < 0.09


def test_one_rank_on_another_gpu_is_enough_to_correct_nothing() -> None:
    plan = make_plan()
    result = measured_on(plan, plan.cluster)
    *first, last = result.ranks
    mixed = (*first, last.model_copy(update={"device_name": "NVIDIA H100 80GB HBM3"}))
    with pytest.raises(SpecError, match="ran on NVIDIA H100 80GB HBM3, which is another GPU"):
        from_probe(result.model_copy(update={"ranks": mixed}), plan.cluster)


@pytest.mark.parametrize("fault", ["rank 2: clocks were lowered", "the check finite failed .gradient norm not", ""])
def test_seconds_of_a_gpu_that_was_too_hot_or_busy_or_multiplied_no_numbers_correct_nothing(fault: str) -> None:
    plan = make_plan()
    hot = Condition(text="rank 2: clocks were lowered", is_fault=fault.startswith("rank"))
    check = ProbeCheck(name="finite", passed="finite" not in fault, detail="gradient norm not finite")
    result = measured_on(plan, slower(plan.cluster, gemm_factor=1.2))
    result = result.model_copy(update={"conditions": (hot,), "checks": (check,)})
    if fault:
        with pytest.raises(SpecError, match=f"{fault}.*: its seconds are no evidence"):
            from_probe(result, plan.cluster)
    else:
        assert from_probe(result, plan.cluster).explains_kernels


@pytest.mark.parametrize(("factor", "said"), [(3.6, r"products × 3\.\d+ .between"), (0.3, "or less .the data sheet's")])
def test_seconds_that_no_such_gpu_can_take_are_refused(factor: float, said: str) -> None:
    plan = make_plan()
    result = measured_on(plan, slower(plan.cluster, **dict.fromkeys(KERNELS, factor)))
    with pytest.raises(SpecError, match=f"NVIDIA H200 is no h200-sxm-141gb by its seconds: .*{said}") as refused:
        from_probe(result, plan.cluster)
    assert "clocks, power limit and other processes" in (refused.value.hint or "")


@pytest.mark.parametrize(("efficiency", "spread", "verdict", "reason"), TABLES["links_are_doubted_too"])
def test_links_are_doubted_too(efficiency: float, spread: float, verdict: str, reason: str) -> None:
    plan = make_plan(tp=8, pp=1, dp=1)
    timed = exchange(plan, "tp all-gather", 8, 1, 2**30, efficiency).model_copy(update={"spread_fraction": spread})
    machine = plan.cluster if verdict == "refused" else with_links(plan.cluster, nvlink=efficiency)
    calibration = from_probe(measured_on(plan, machine, mode="ranks", exchanges=(timed,)), plan.cluster)
    share = calibration.efficiency_fraction["nvlink"]
    assert share.verdict == verdict
    assert reason in share.reason
    own = plan.cluster.hardware.tiers[0].efficiency_fraction
    after = calibration.of_cluster(plan.cluster).tiers[0].efficiency_fraction
    assert after == (pytest.approx(efficiency) if verdict == "corrected" else own)


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("factor", "reason"), [(2.0, "more than the link has"), (1.35, "")])
def test_a_link_faster_than_its_data_sheet_is_another_link_unless_its_switch_sums(factor: float, reason: str) -> None:
    plan = make_plan(tp=8, pp=1, dp=1)
    timed = exchange(plan, "tp all-reduce", 8, 1, 2**30, 0.8)
    changes = {"seconds": timed.seconds / factor, "bus_gb_per_s": factor * timed.bus_gb_per_s}
    result = measured_on(plan, with_links(plan.cluster, nvlink=1.0), mode="ranks")
    ranks = (result.ranks[0].model_copy(update={"exchanges": (timed.model_copy(update=changes),)}),)
    share = from_probe(result.model_copy(update={"ranks": ranks}), plan.cluster).efficiency_fraction["nvlink"]
    assert share.value == 1.0
    assert reason in share.reason
    assert bool(reason) == (share.verdict == "refused")


@pytest.mark.parametrize(("context_gib", "fragmentation", "refused"), TABLES["memory_is_as_sure_as_its_bytes"])
@pytest.mark.parametrize("error", [0.0, 0.1])
def test_memory_is_as_sure_as_its_bytes(context_gib: float, fragmentation: float, refused: str, error: float) -> None:
    plan = make_plan()
    memory = memory_of(context_gib, fragmentation)
    peak = compared("peak allocated", "bytes", 50 * GIB, 50 * GIB * (1 + error), 0.1, 0)
    result = measured_on(plan, plan.cluster, memory=memory)
    calibration = from_probe(result.model_copy(update={"comparisons": (*result.comparisons, peak)}), plan.cluster)
    numbers = (calibration.context_gib, calibration.fragmentation_fraction)
    reasons = "".join(number.reason for number in numbers if number is not None)
    assert refused in reasons
    if refused:
        assert calibration.memory_width is None
    else:
        assert (reasons, calibration.memory_width) == ("", pytest.approx(NORMAL_80 * math.log1p(error)))


def test_a_cpu_is_evidence_of_a_cpu_and_a_gpu_is_not() -> None:
    plan = make_plan()
    hardware = plan.cluster.hardware.model_copy(update={"architecture": "cpu"})
    laptop = ClusterSpec(hardware=hardware, num_gpus=8)
    on_gpu = measured_on(plan, plan.cluster)
    on_cpu = on_gpu.model_copy(update={"run": probe_run(plan, device="cpu"), "device": "cpu"})
    assert from_probe(on_cpu, laptop).gemm_factor is not None
    with pytest.raises(SpecError, match="ran on NVIDIA H200"):
        from_probe(on_gpu, laptop)


def test_torch_is_not_needed_to_read_a_probe() -> None:
    modules = "planner.profile.probe_calibration, planner.probe.evidence, planner.probe.compare"
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
