"""Measuring a machine: rows are kept and gone on with, fits give back what made the rows, names find data sheets."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tables import beside

from planner.physics.communication import collective_s
from planner.probe.run_price import chunk_costs
from planner.profile.fitting import STREAMS, MeasuredTable, fitted_tier
from planner.profile.measurements import CPU, GPU, QUICK, Machine, MeasuredRow, Measurements, known_profile, profile_of
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import LinkTier
from planner.specs.registry import load_hardware
from planner.specs.units import GIB
from tools.calibrate.tables import read_table

TABLES = beside(__file__)

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from planner.probe.torch_build import Monitor, state_of  # noqa: E402
from planner.profile.measure import (  # noqa: E402
    MeasurementTask,
    Stopwatch,
    machine_of,
    measure,
    spawned_rows,
    stream_row,
    tasks,
)


def machine(name: str = "NVIDIA H200", memory_gib: float = 139.8, num_sms: int = 132, **changes: Any) -> Machine:
    fields = {
        "device": "cuda", "name": name, "software": "torch 2.11, CUDA 13.0", "architecture": "hopper",
        "memory_bytes": round(memory_gib * GIB), "num_sms": num_sms, "num_devices": 1, "context_bytes": GIB // 2,
    }  # fmt: skip
    return Machine.model_validate(fields | changes)


def no_record(**changes: Any) -> Measurements:
    return Measurements(machine(**changes), False, "2026-01-01")


def shipped_rows(name: str) -> list[MeasuredRow]:
    """A table that ships with the planner, as if it had been measured now."""
    table = read_table("h200", name)
    cells: dict[str, list[str]] = table._cells
    return [
        {column: cell or None for column, cell in zip(cells, row, strict=True)}
        for row in zip(*cells.values(), strict=True)
    ]


@pytest.fixture(scope="module")
def h200() -> Measurements:
    """An H200 as `plan profile` would have measured it: the shipped tables, stages at the shipped profile's seconds."""
    record, shipped = no_record(), load_hardware("h200")
    for name in ("stream", "gemm", "attention"):
        record.tables[name] = shipped_rows(name)
    for number, stage in enumerate(GPU.stages):
        cost = chunk_costs(stage.run("cuda"), ClusterSpec(hardware=shipped, num_gpus=8), alone=True)[0]
        seconds = {
            "forward_us": cost.forward_s,
            "backward_us": cost.input_grad_s + cost.weight_grad_s,
            "optimizer_us": cost.optimizer_s,
        }
        row = {"stage": number, **{name: 1e6 * float(value) for name, value in seconds.items()}}
        record.tables.setdefault("stage", []).append(row)
    return record


def test_the_shipped_tables_give_the_shipped_profile(h200: Measurements) -> None:
    found, shipped = profile_of(h200).hardware, load_hardware("h200")
    assert (found.peak_tflops, found.hbm_gb_per_s, found.tiers) == (
        shipped.peak_tflops, shipped.hbm_gb_per_s, shipped.tiers
    )  # fmt: skip
    ours, theirs = found.efficiency, shipped.efficiency
    assert ours.gemm.forward_fraction == pytest.approx(theirs.gemm.forward_fraction, rel=0.02)
    assert ours.stream_fraction == pytest.approx(theirs.stream_fraction, rel=0.02)
    assert ours.cudnn.forward_fraction == pytest.approx(theirs.cudnn.forward_fraction, rel=0.02)
    assert ours.sustained_fraction == pytest.approx(theirs.sustained_fraction, rel=0.03)
    assert ours.host_us == pytest.approx(theirs.host_us, rel=0.1)
    assert ours.gemm.fp8_factor == theirs.gemm.fp8_factor
    assert (ours.evidence, found.name) == ("measured", "h200-sxm-141gb-measured")
    assert "NVIDIA H200, torch 2.11, CUDA 13.0, 2026-01-01" in ours.source
    assert found.reserved.context_gib == 0.5
    residuals = dict(profile_of(h200).residuals)
    assert residuals["gemm forward"].median < 5
    assert {"stream norm", "attention cudnn backward", "stage forward", "stage optimizer"} <= residuals.keys()


def test_a_device_without_a_data_sheet_is_measured_against_its_own_best(h200: Measurements) -> None:
    unknown = no_record(name="NVIDIA X9000", num_sms=100)
    unknown.tables.update({k: v for k, v in h200.tables.items() if k != "stage"})
    found = profile_of(unknown).hardware
    assert found.name == "x9000"
    assert found.peak_tflops["bf16"] == pytest.approx(0.83 * 989.4 / 0.8, rel=0.02)
    assert found.hbm_gb_per_s == pytest.approx(4300 / 0.9, rel=0.1)
    assert [tier.name for tier in found.tiers] == ["network"]
    assert "Not measured" in found.tiers[0].source


def test_both_kernels_of_attention_are_kept_and_the_faster_is_planned_with(h200: Measurements) -> None:
    slow = no_record()
    slow.tables.update({k: v for k, v in h200.tables.items() if k != "stage"})
    slow.tables["attention"] = [
        {**row, "forward_us": 9e6} if row["backend"] == "cudnn" else row for row in h200.tables["attention"]
    ]
    slow_cudnn = profile_of(slow).hardware.efficiency
    assert slow_cudnn.cudnn is not None
    assert slow_cudnn.attention is slow_cudnn.flash


@pytest.mark.parametrize(
    ("name", "architecture", "memory_gib", "num_sms", "expected"),
    TABLES["a_name_memory_and_processors_find_the_data_sheet"],
)
def test_a_name_memory_and_processors_find_the_data_sheet(
    name: str, architecture: str, memory_gib: float, num_sms: int, expected: str | None
) -> None:
    found = known_profile(machine(name, memory_gib, num_sms, architecture=architecture))
    assert (None if found is None else found.name) == expected


@pytest.mark.thorough(0)
def test_a_profile_made_on_rocm_is_of_its_gpu_and_links(h200: Measurements) -> None:
    record = no_record(
        name="AMD Instinct MI300X", architecture="cdna3", memory_gib=191.98, num_sms=304, num_devices=8,
        software="torch 2.13.0+rocm7.0, ROCm 7.0",
    )  # fmt: skip
    record.tables.update({name: h200.tables[name] for name in ("stream", "gemm")})
    flash = [row for row in h200.tables["attention"] if row["backend"] == "flash"]
    padded = [{**row, "qk_dim": 192, "forward_us": 1.7 * float(row["forward_us"] or 0)} for row in flash[:6]]
    record.tables["attention"] = [*flash, *padded]
    shipped = load_hardware("mi300x")
    record.tables["exchange"] = exchanges(shipped.tiers[0], (2**20, 2**24, 2**28), 0)
    found = profile_of(record).hardware
    assert (found.name, found.architecture, found.is_amd) == ("mi300x-measured", "cdna3", True)
    assert "ROCm 7.0" in found.efficiency.source
    assert found.efficiency.cudnn is None
    assert found.efficiency.flash.wide_factor != shipped.efficiency.flash.wide_factor, "MLA's padded values count"
    xgmi = found.tiers[0]
    assert (xgmi.name, xgmi.link_gb_per_s) == ("infinity-fabric", 64)
    assert "8 ranks" in xgmi.source


def test_an_unknown_amd_node_has_links_between_pairs(h200: Measurements) -> None:
    record = no_record(name="AMD Instinct MI900X", architecture="cdna", num_devices=8)
    record.tables.update({name: h200.tables[name] for name in ("stream", "gemm")})
    switched = LinkTier(name="node", num_gpus=8, gb_per_s=280.0, latency_us=3.0, efficiency_fraction=1.0)
    record.tables["exchange"] = exchanges(switched, (2**20, 2**24, 2**28), 0)
    node = profile_of(record).hardware.tiers[0]
    assert node.link_gb_per_s == pytest.approx(node.gb_per_s / 7)
    assert node.gb_per_s == pytest.approx(280, rel=0.01)


def exchanges(tier: LinkTier, sizes: tuple[int, ...], level: int, num_ranks: int = 8) -> list[MeasuredRow]:
    """What the cost model says they take."""
    inner = LinkTier(name="inner", num_gpus=1, gb_per_s=1e6, latency_us=0.0, efficiency_fraction=1.0)
    hardware = load_hardware("h200").model_copy(update={"tiers": (tier,) if level == 0 else (inner, tier)})
    cluster = ClusterSpec(hardware=hardware, num_gpus=num_ranks)
    return [
        {
            "tier": level, "kind": kind, "size": num_ranks, "num_bytes": size,
            "microseconds": 1e6 * float(collective_s(kind, size, num_ranks, 1, cluster)),
        }
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
        for size in sizes
    ]  # fmt: skip


@pytest.mark.parametrize("level", [0, 1])
def test_links_give_back_their_rate_and_latency(level: int) -> None:
    true = LinkTier(name="nvlink", gb_per_s=400.0, latency_us=7.0, efficiency_fraction=0.75)
    rows = exchanges(true, (2**20, 2**24, 2**28), level)
    table = MeasuredTable([{key: str(value) for key, value in row.items()} for row in rows])
    sheet = true.model_copy(update={"efficiency_fraction": 0.5, "latency_us": 1.0})
    found, errors = fitted_tier(sheet, table, innermost=level == 0, rated=True)
    assert (found.gb_per_s, found.efficiency_fraction) == (400.0, pytest.approx(0.75, rel=1e-6))
    assert found.latency_us == pytest.approx(7.0, rel=1e-6)
    assert np.abs(errors).max() < 1e-6
    unrated, _ = fitted_tier(sheet, table, innermost=level == 0, rated=False)
    assert (unrated.gb_per_s, unrated.efficiency_fraction) == (pytest.approx(300.0), 1.0)


def quick_tasks() -> list[MeasurementTask]:
    return [task for task in tasks("cpu", QUICK) if task.table != "stage"]


def test_every_kernel_is_timed_on_the_cpu() -> None:
    record = Measurements(machine_of("cpu"), True, "2026-01-01")
    assert measure(record, quick_tasks(), lambda: None) == []
    for table, ways in (("gemm", ("forward", "dgrad", "wgrad")), ("attention", ("forward", "backward"))):
        assert all(float(row[f"{way}_us"] or 0) > 0 for row in record.tables[table] for way in ways)


@pytest.mark.parametrize("name", sorted({name for grid in (GPU, CPU, QUICK) for name, _, _ in grid.streams}))
def test_every_memory_bound_operator_can_be_timed(name: str) -> None:
    row = stream_row(Stopwatch("cpu", 1e-4), name, 8, 16)
    assert float(row["forward_us"] or 0) > 0
    assert (row["backward_us"] is not None) == (STREAMS[name][3] > 0)


def test_what_the_device_cannot_do_is_left_out() -> None:
    def fail() -> MeasuredRow:
        raise RuntimeError("No available kernel.\nAborting execution.")

    record, seen = no_record(), list[int]()
    task = MeasurementTask("attention", {"seq": 64, "backend": "cudnn"}, fail)
    assert measure(record, [task], lambda: seen.append(1)) == [
        "attention of seq 64 backend cudnn: No available kernel."
    ]
    assert record.table("attention", "forward_us").num_rows == 0
    assert seen == [1]


def test_a_profile_says_how_sure_it_is_and_how_the_gpu_was(h200: Measurements, monkeypatch: Any) -> None:
    record, asked = no_record(), list[str]()
    states = {"before": {"clock_mhz": 345.0}, "within": {"clock_mhz": 1455.0, "max_clock_mhz": 1980.0}, "after": {}}
    monitor = Monitor(lambda: {**states[asked[-1]], "power_limit_w": 500.0, "default_power_limit_w": 700.0})
    monkeypatch.setattr("planner.probe.torch_build.time", SimpleNamespace(sleep=lambda s: None))
    monkeypatch.setattr(Monitor, "_keep", lambda m, fields, when: m.states.append(state_of(fields, when)))

    def row(spread: float, when: str) -> MeasuredRow:
        asked.append(when)
        return {"forward_us": 1.0, "spread_fraction": spread}

    asked.append("before")
    monitor.before()
    todo = [
        MeasurementTask("stream", {"operator": "copy", "rows": 1, "columns": 2}, partial(row, 0.002, "within")),
        MeasurementTask("gemm", {"m": 1, "n": 2, "k": 3}, partial(row, 0.034, "within")),
    ]
    measure(record, todo, lambda: None, monitor)
    assert record.how_sure() == "1 of 2 rows are sure to 1%; the worst to 3% (gemm 1 2 3)"
    record.tables.update({k: v for k, v in h200.tables.items() if k in ("stream", "gemm")})
    source = profile_of(record).hardware.efficiency.source
    assert ", at 1455 of 1980 MHz: " in source
    assert source.endswith("Unusual: the power limit is 500 W, 700 by default.")
    assert no_record().how_sure() == ""


def test_exchanges_between_machines_are_a_tier_of_their_own() -> None:
    rows = spawned_rows("cpu", 2, (2**12,), local_size=1)
    assert [(row["tier"], row["kind"], row["size"]) for row in rows] == [(1, "all_gather", 2), (1, "all_reduce", 2)]
    assert all(float(row["microseconds"] or 0) > 0 for row in rows)
    assert spawned_rows("cpu", 1, (2**12,)) == []
