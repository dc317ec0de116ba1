"""A hardware profile built from measurements, fitted to the same cost model as the shipped profiles."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from planner.physics.communication import joined_fraction, num_hops
from planner.probe.run import Device
from planner.probe.run_price import chunk_costs
from planner.probe.verdict.evidence import is_named
from planner.profile.fitting import (
    STREAMS,
    BenchNumbers,
    Bounds,
    FitProblem,
    MeasuredTable,
    Residuals,
    attention_problem,
    fit,
    gemm_problem,
    hardware_with,
    log_errors,
    stream_problem,
)
from planner.profile.probed import step_width
from planner.profile.record import Machine, MeasurementRecord, StageShape, shapes_to_measure
from planner.shape import FloatArray
from planner.specs.cluster import ClusterSpec
from planner.specs.efficiency import AttentionEfficiency, Efficiency
from planner.specs.hardware import HardwareSpec, LinkTier, ReservedMemory
from planner.specs.registry import hardware_names, load_hardware
from planner.specs.units import GB, GIB, TERA

UNKNOWN_NETWORK = LinkTier(
    name="network", gb_per_s=25.0, latency_us=10.0,
    source="Not measured: only this machine was there. 200 Gb/s a GPU assumed; write what yours has",
)  # fmt: skip


def measured_tiers(
    record: MeasurementRecord, known: HardwareSpec | None
) -> tuple[tuple[LinkTier, ...], list[tuple[str, Residuals]]]:
    """Link tiers fitted to timed exchanges, with their residuals. Tiers without exchanges are those of the known
    device, or assumed."""
    machine, table = record.measured.machine, record.table("exchange", "microseconds")
    if machine.device == "cpu":
        names: tuple[str, ...] = ("gloo",)
        tiers = [LinkTier(name="gloo", gb_per_s=1.0, latency_us=50.0, source="Not measured: one process")]
    elif known is not None:
        tiers = list(known.tiers)
        names = tuple(tier.name for tier in tiers[:2])
    else:
        node = LinkTier(name="node", num_gpus=machine.num_devices, gb_per_s=25.0, latency_us=10.0)
        tiers = [node, UNKNOWN_NETWORK] if machine.num_devices > 1 else [UNKNOWN_NETWORK]
        names = tuple(tier.name for tier in tiers)
    residuals = []
    levels = set(table.number("tier").astype(int).tolist()) if table.num_rows else set()
    for level in sorted(levels):
        number = min(level, len(tiers) - 1)
        rows = table.where(table.number("tier") == level)
        tiers[number], errors = fitted_tier(tiers[number], rows, innermost=level == 0, rated=known is not None)
        if level == 0 and known is None and machine.architecture.startswith("cdna"):  # no switch joins AMD's GPUs
            each_gb_per_s = tiers[number].gb_per_s / (machine.num_devices - 1)
            tiers[number] = tiers[number].model_copy(update={"link_gb_per_s": each_gb_per_s})
        residuals.append((f"exchange {names[number]}", Residuals.of(errors)))
    return tuple(tiers), residuals


def fitted_tier(tier: LinkTier, table: MeasuredTable, innermost: bool, rated: bool) -> tuple[LinkTier, FloatArray]:
    """The tier with the rate and latency that explain exchanges best: seconds = moved / rate + hops · latency, by
    relative least squares. Also returns the log errors.

    With `rated`, a rate below the tier's own becomes a share of it.
    """
    size, num_bytes, seconds = table.number("size"), table.number("num_bytes"), table.seconds("microseconds")
    reduces = table.text("kind") == "all_reduce"
    moved = np.where(reduces, 2.0, 1.0) * num_bytes * (1 - 1 / size) / joined_fraction(tier, size)
    tree, ring = (num_hops(kind, size, 1, size, innermost) for kind in ("all_reduce", "all_gather"))
    hops = np.where(reduces, tree, ring)
    slowness, latency_s = np.linalg.lstsq(np.stack([moved / seconds, hops / seconds], axis=1), np.ones(len(seconds)))[0]
    if latency_s < 0 or slowness <= 0:  # all of it bandwidth
        slowness, latency_s = float(np.median(seconds / moved)), 0.0
    gb_per_s = 1 / slowness / GB
    share = gb_per_s / tier.gb_per_s if rated and gb_per_s <= tier.gb_per_s else 1.0
    evidence = f"{len(seconds)} exchanges over {size.max():.0f} ranks, {num_bytes.max() / 2**20:g} MiB at most"
    changes: dict[str, Any] = {
        "gb_per_s": tier.gb_per_s if share < 1 else gb_per_s,
        "efficiency_fraction": share,
        "latency_us": 1e6 * float(latency_s),
        "start_us": 0.0,
        "source": f"Measured: {evidence}",
    }
    return tier.model_copy(update=changes), np.asarray(np.log((moved * slowness + hops * latency_s) / seconds))


SAME_MEMORY = 0.04
"""Largest relative difference of total memory between a device and the shipped profile of its name."""
BEST_PRODUCT, BEST_STREAM = 0.8, 0.9
"""Fractions of the peak that the best kernels reach, where a data sheet is known; they give the peaks of a device
without one."""
IN_STAGES: dict[Device, dict[str, Bounds]] = {
    "cuda": {
        "sustained_fraction": (0.98, 0.5, 1.1),
        "backward_sustained_fraction": (0.96, 0.5, 1.1),
        "family_fraction.strided": (0.6, 0.1, 1.0),
        "family_fraction.optimizer": (0.7, 0.1, 1.0),
        "host_us": (20.0, 1.0, 200.0),
    },
    # one thread issues and computes: nothing runs ahead of anything, each kernel has its cost
    "cpu": {
        "sustained_fraction": (1.0, 0.05, 1.2),
        "backward_sustained_fraction": (1.0, 0.05, 1.2),
        "family_fraction.optimizer": (0.7, 0.01, 1.0),
        "launch_factor": (1.0, 0.1, 50.0),
    },
}
"""The numbers that only whole stages show and that are fitted to them."""
STAGES = "stage"
"""The table of whole stages, whose errors say how sure the profile is of a step."""
VENDORS = {"nvidia", "amd", "tesla", "instinct", "geforce"}
"""Words of a device's name that do not tell it from others of its vendor."""


class Profiled(NamedTuple):
    """A profile, and the residuals that its model leaves in each table."""

    hardware: HardwareSpec
    residuals: list[tuple[str, Residuals]]
    known: HardwareSpec | None = None
    """The shipped profile of the device."""


def profile_of(record: MeasurementRecord) -> Profiled:
    """Fit every table that was measured, later ones on the numbers of earlier ones."""
    machine, known = record.measured.machine, known_profile(record.measured.machine)
    hardware, residuals = _bare(record, known), list[tuple[str, Residuals]]()
    hardware = hardware.model_copy(update={"efficiency": _start(record, known)})
    changes: dict[str, Any] = {"evidence": "measured", "source": _source(record, known), "step_width": None}
    for problem in _problems(record):
        values = fit(problem, hardware)
        hardware = hardware_with(hardware, values)
        errors = log_errors(problem, hardware, values)
        labels = problem.labels if problem.labels is not None else np.full(len(errors), "")
        residuals += [
            (f"{problem.name} {label}".strip(), Residuals.of(errors[labels == label])) for label in np.unique(labels)
        ]
        if problem.name == STAGES:
            passes = errors[labels != "optimizer"]
            changes["step_width"] = step_width(float(np.sqrt(np.mean(passes**2))), len(passes))
    efficiency = hardware.efficiency.model_copy(update=changes)
    tiers, link_residuals = measured_tiers(record, known)
    parts = {"efficiency": efficiency, "tiers": tiers, "reserved": _reserved(machine, hardware.reserved)}
    data = _rounded(hardware.model_copy(update=parts).model_dump())
    return Profiled(HardwareSpec.model_validate(data), residuals + link_residuals, known)


def known_profile(machine: Machine) -> HardwareSpec | None:
    """The shipped profile of this device, for numbers that cannot be measured: data-sheet peaks, network, price."""
    named = [hardware for hardware in map(load_hardware, hardware_names()) if is_named(hardware, machine.name)]
    for hardware in named:
        if _same_size(machine, hardware):
            return hardware
    # older drivers call all of AMD's GPUs "AMD Radeon Graphics"
    alike = [
        h
        for h in map(load_hardware, hardware_names() if machine.architecture.startswith("cdna") else ())
        if h.architecture == machine.architecture and _same_size(machine, h)
    ]
    return alike[0] if len(alike) == 1 and not named else None


def _same_size(machine: Machine, hardware: HardwareSpec) -> bool:
    same_memory = abs(machine.memory_bytes / hardware.memory_bytes - 1) < SAME_MEMORY
    return same_memory and hardware.num_sms == machine.num_sms


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def _bare(record: MeasurementRecord, known: HardwareSpec | None) -> HardwareSpec:
    """The device without efficiencies: from the data sheet if it is known, else from the best measured rates."""
    machine = record.measured.machine
    memory_gib = machine.memory_bytes / GIB
    if known is not None:
        return known.model_copy(update={"name": f"{known.name}-measured", "aliases": (), "memory_gib": memory_gib})
    name = "cpu" if machine.device == "cpu" else "-".join(w for w in _words(machine.name) if w not in VENDORS)
    return HardwareSpec(
        name=name or "gpu",
        source=f"{machine.name}. No data sheet: the best product measured is taken for {BEST_PRODUCT:.0%} of the peak, "
        f"the best copy for {BEST_STREAM:.0%} of the memory's rate",
        architecture=machine.architecture,
        memory_gib=memory_gib,
        hbm_gb_per_s=_best_stream(record) / BEST_STREAM / GB,
        peak_tflops={"bf16": _best_product(record) / BEST_PRODUCT / TERA},
        num_sms=machine.num_sms,
        gpus_per_node=machine.num_devices,
        tiers=(UNKNOWN_NETWORK,),
    )


def _best_product(record: MeasurementRecord) -> float:
    """FLOP/s of the fastest product."""
    table = record.table("gemm", "forward_us")
    flops = 2 * table.number("m") * table.number("n") * table.number("k")
    return float(max((flops / table.seconds(f"{way}_us")).max() for way in ("forward", "dgrad", "wgrad")))


def _best_stream(record: MeasurementRecord) -> float:
    """Bytes per second of the fastest copy."""
    table = record.table("stream", "forward_us")
    table = table.where(table.text("operator") == "copy")
    moved = STREAMS["copy"][1] * table.number("rows") * table.number("columns")
    return float((moved / table.seconds("forward_us")).max())


def _start(record: MeasurementRecord, known: HardwareSpec | None) -> Efficiency:
    """The efficiencies with which the fits begin; those that nothing was measured for stay."""
    before = Efficiency() if known is None else known.efficiency
    changes: dict[str, Any] = {"sustained_fraction": 1.0, "backward_sustained_fraction": 1.0}
    if known is None:
        changes["host_us"] = 0.0 if record.measured.machine.device == "cpu" else 20.0
    changes["cudnn"] = (before.cudnn or AttentionEfficiency()) if "cudnn" in _backends(record) else None
    return before.model_copy(update=changes)


def _backends(record: MeasurementRecord) -> tuple[str, ...]:
    """Attention kernels that this device runs. Both are kept: trainers take the faster, eager torch its own choice."""
    timed = record.table("attention", "forward_us", "backward_us")
    return tuple(sorted(set(timed.text("backend").tolist()))) if timed.num_rows else ()


def _problems(record: MeasurementRecord) -> list[FitProblem]:
    tables: Mapping[str, MeasuredTable] = {
        name: record.table(name, "forward_us") for name in ("stream", "gemm", "attention", "stage")
    }
    problems = [stream_problem(tables), gemm_problem(tables)]
    # ROCm builds pad values that are narrower than keys (`probe.torch_build`)
    pads = record.measured.machine.architecture.startswith("cdna")
    problems += [attention_problem(tables, backend, pads) for backend in _backends(record)]
    if tables["stage"].num_rows:
        problems.append(stage_problem(record, tables["stage"]))
    return problems


def stage_problem(record: MeasurementRecord, table: MeasuredTable) -> FitProblem:
    """Whole stages: forward, backward and optimizer, as the probe ran them."""
    device = record.measured.machine.device
    shapes: tuple[StageShape, ...] = shapes_to_measure(device, record.measured.quick).stages
    runs = [shapes[int(number)].run(device) for number in table.number("stage")]
    kernels = [text.split(",") for text in table.text("attention")] if "attention" in table else [[]] * len(runs)

    def predict(hardware: HardwareSpec, bench: BenchNumbers) -> FloatArray:
        cluster = ClusterSpec(hardware=hardware, num_gpus=max(run.tp for run in runs))
        costs = [chunk_costs(run, cluster, ran, alone=True)[0] for run, ran in zip(runs, kernels, strict=True)]
        forward = [float(cost.forward_s) for cost in costs]
        backward = [float(cost.input_grad_s + cost.weight_grad_s) for cost in costs]
        return np.array([*forward, *backward, *(float(cost.optimizer_s) for cost in costs)])

    ways = ("forward", "backward", "optimizer")
    return FitProblem(
        name=STAGES,
        num_guesses=1,
        free=IN_STAGES[device],
        predict=predict,
        measured_s=np.concatenate([table.seconds(f"{way}_us") for way in ways]),
        groups=np.tile(table.text("stage"), len(ways)),
        labels=np.repeat(ways, table.num_rows),
    )


def _reserved(machine: Machine, usual: ReservedMemory) -> ReservedMemory:
    context_gib = machine.context_bytes / GIB
    if machine.device == "cpu":
        return ReservedMemory(
            context_gib=context_gib, communicator_gib=0.0, fragmentation_fraction=0.0,
            source="A process with torch; what else it allocates is not known",
        )  # fmt: skip
    source = "Context measured; communicators and fragmentation are usual"
    return usual.model_copy(update={"context_gib": context_gib, "source": source})


def _source(record: MeasurementRecord, known: HardwareSpec | None) -> str:
    measured = record.measured
    counts = ", ".join(f"{len(rows)} {name} rows" for name, rows in measured.tables.items())
    rest = "" if known is None else f" Where nothing was measured (fp8, grouped products), as {known.name}."
    unusual = f" Unusual: {'; '.join(measured.conditions)}." if measured.conditions else ""
    where = f"plan profile on {measured.machine.name}, {measured.machine.software}, {measured.date}"
    where += f", at {measured.under_load}" if measured.under_load else ""
    return f"{where}: {counts}.{rest}{unusual}"


def _rounded(value: Any, name: str = "") -> Any:
    """Numbers rounded to five digits. Shares that a fit carried above 1 become 1 where the profile allows no more."""
    if isinstance(value, dict):
        inside = "share" if name == "family_fraction" else ""
        return {key: _rounded(inner, inside or key) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_rounded(inner, name) for inner in value)
    if not isinstance(value, float):
        return value
    return float(f"{min(value, 1.0) if name in ('stream_fraction', 'share') else value:.5g}")
