"""From measurements to a hardware profile: fitted to the same model, number for number, as the shipped profiles are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from planner.physics.communication import joined_fraction, num_hops
from planner.probe.run import Device
from planner.profile import kernels
from planner.profile.fit_kernels import Residuals, fit, hardware_with, log_errors
from planner.profile.grid import StageShape, grid_of
from planner.profile.kernels import STREAMS, Bench, Bounds, Problem
from planner.profile.probed import chunk_costs
from planner.profile.record import Machine, Record
from planner.profile.tables import Table
from planner.shape import FloatArray
from planner.specs.cluster import ClusterSpec
from planner.specs.efficiency import AttentionEfficiency, Efficiency
from planner.specs.hardware import HardwareSpec, LinkTier, ReservedMemory
from planner.specs.registry import hardware_names, load_hardware
from planner.specs.units import GB, GIB, TERA

SAME_MEMORY = 0.04
"""Relative difference of total memory within which a device is the shipped one of its name."""
BEST_PRODUCT, BEST_STREAM = 0.8, 0.9
"""Of the peaks of a device without a data sheet, about what the best kernels reach where there is one."""
UNKNOWN_NETWORK = LinkTier(
    name="network", gb_per_s=25.0, latency_us=10.0,
    source="Not measured: only this machine was there. 200 Gb/s a GPU assumed; write what yours has",
)  # fmt: skip
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
"""What kernels timed alone do not show, fitted to whole stages."""
VENDORS = {"nvidia", "amd", "tesla", "instinct", "geforce"}


class Profiled(NamedTuple):
    """A profile, and what its model leaves unexplained of each table."""

    hardware: HardwareSpec
    residuals: list[tuple[str, Residuals]]


def profile_of(record: Record) -> Profiled:
    """Fit every table that was measured, later ones on the numbers of earlier ones."""
    machine, known = record.measured.machine, known_profile(record.measured.machine)
    hardware, residuals = _bare(record, known), list[tuple[str, Residuals]]()
    hardware = hardware.model_copy(update={"efficiency": _start(record, known)})
    for problem in _problems(record):
        values = fit(problem, hardware)
        hardware = hardware_with(hardware, values)
        errors = log_errors(problem, hardware, values)
        labels = problem.labels if problem.labels is not None else np.full(len(errors), "")
        residuals += [
            (f"{problem.name} {label}".strip(), Residuals.of(errors[labels == label])) for label in np.unique(labels)
        ]
    source = _source(record, known)
    efficiency = hardware.efficiency.model_copy(update={"evidence": "measured", "source": source})
    tiers, left = _tiers(record, known)
    changes = {"efficiency": efficiency, "tiers": tiers, "reserved": _reserved(machine, hardware.reserved)}
    data = _rounded(hardware.model_copy(update=changes).model_dump())
    return Profiled(HardwareSpec.model_validate(data), residuals + left)


def known_profile(machine: Machine) -> HardwareSpec | None:
    """The shipped profile of this very device, for what cannot be measured: data-sheet peaks, network, price."""
    words = set(_words(machine.name))
    for name in hardware_names():
        if name.split("-")[0] not in words or ("pcie" in name) != ("pcie" in words):
            continue
        hardware = load_hardware(name)
        near = abs(machine.memory_bytes / hardware.memory_bytes - 1) < SAME_MEMORY
        if near and hardware.num_sms == machine.num_sms:
            return hardware
    return None


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def _bare(record: Record, known: HardwareSpec | None) -> HardwareSpec:
    """The device without efficiencies: data sheet where it is known, else the best rates that were measured."""
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


def _best_product(record: Record) -> float:
    """FLOP/s of the fastest product."""
    table = record.table("gemm", "forward_us")
    flops = 2 * table.number("m") * table.number("n") * table.number("k")
    return float(max((flops / table.seconds(f"{way}_us")).max() for way in ("forward", "dgrad", "wgrad")))


def _best_stream(record: Record) -> float:
    """Bytes per second of the fastest copy."""
    table = record.table("stream", "forward_us")
    table = table.where(table.text("operator") == "copy")
    moved = STREAMS["copy"][1] * table.number("rows") * table.number("columns")
    return float((moved / table.seconds("forward_us")).max())


def _start(record: Record, known: HardwareSpec | None) -> Efficiency:
    """Where the fits begin, and what stays where nothing was measured for it."""
    before = Efficiency() if known is None else known.efficiency
    changes: dict[str, Any] = {"sustained_fraction": 1.0, "backward_sustained_fraction": 1.0}
    if known is None:
        changes["host_us"] = 0.0 if record.measured.machine.device == "cpu" else 20.0
    changes["cudnn"] = (before.cudnn or AttentionEfficiency()) if "cudnn" in _backends(record) else None
    return before.model_copy(update=changes)


def _backends(record: Record) -> tuple[str, ...]:
    """Attention kernels that this device runs, cuDNN's only where it is faster: the fastest is what is planned with."""
    totals: dict[str, float] = {}
    table = record.table("attention", "forward_us", "backward_us")
    if not table.num_rows:
        return ()
    shape_of = [tuple(table.number(c).tolist()) for c in ("batch", "seq", "heads", "kv_heads", "qk_dim", "v_dim")]
    rows = list(zip(table.text("backend").tolist(), zip(*shape_of, strict=True), strict=True))
    seconds = (table.number("forward_us") + table.number("backward_us")).tolist()
    shared = {shape for backend, shape in rows if backend == "cudnn"} & {s for b, s in rows if b == "flash"}
    for (backend, shape), taken in zip(rows, seconds, strict=True):
        totals[backend] = totals.get(backend, 0.0) + (taken if shape in shared or not shared else 0.0)
    slower = "flash" in totals and totals.get("cudnn", 0.0) > totals["flash"]
    return tuple(name for name in ("cudnn", "flash") if name in totals and not (name == "cudnn" and slower))


def _problems(record: Record) -> list[Problem]:
    tables: Mapping[str, Table] = {
        name: record.table(name, "forward_us") for name in ("stream", "gemm", "attention", "stage")
    }
    problems = [kernels.stream(tables), kernels.gemm(tables)]
    problems += [kernels.attention(tables, backend) for backend in _backends(record)]
    if tables["stage"].num_rows:
        problems.append(stages(record, tables["stage"]))
    return problems


def stages(record: Record, table: Table) -> Problem:
    """Whole stages: forward, backward and optimizer, as the probe ran them."""
    device = record.measured.machine.device
    shapes: tuple[StageShape, ...] = grid_of(device, record.measured.quick).stages
    runs = [shapes[int(number)].run(device) for number in table.number("stage")]

    def predict(hardware: HardwareSpec, bench: Bench) -> FloatArray:
        cluster = ClusterSpec(hardware=hardware, num_gpus=max(run.tp for run in runs))
        costs = [chunk_costs(run, cluster)[0] for run in runs]
        forward = [float(cost.forward_s) for cost in costs]
        backward = [float(cost.input_grad_s + cost.weight_grad_s) for cost in costs]
        return np.array([*forward, *backward, *(float(cost.optimizer_s) for cost in costs)])

    ways = ("forward", "backward", "optimizer")
    return Problem(
        name="stage",
        num_guesses=1,
        free=IN_STAGES[device],
        predict=predict,
        measured_s=np.concatenate([table.seconds(f"{way}_us") for way in ways]),
        groups=np.tile(table.text("stage"), len(ways)),
        labels=np.repeat(ways, table.num_rows),
    )


def _tiers(record: Record, known: HardwareSpec | None) -> tuple[tuple[LinkTier, ...], list[tuple[str, Residuals]]]:
    """Links by what exchanges over them took; outer ones as the known device has them, or assumed."""
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
    left = []
    levels = set(table.number("tier").astype(int).tolist()) if table.num_rows else set()
    for level in sorted(levels):
        number = min(level, len(tiers) - 1)
        rows = table.where(table.number("tier") == level)
        tiers[number], errors = fitted_tier(tiers[number], rows, innermost=level == 0, rated=known is not None)
        left.append((f"exchange {names[number]}", Residuals.of(errors)))
    return tuple(tiers), left


def fitted_tier(tier: LinkTier, table: Table, innermost: bool, rated: bool) -> tuple[LinkTier, FloatArray]:
    """The rate and latency that explain exchanges best: moved / rate + hops · latency, relative least squares.

    With `rated` the rate becomes a share of the tier's own, as far as it is below it.
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
    told = f"{len(seconds)} exchanges over {size.max():.0f} ranks, {num_bytes.max() / 2**20:g} MiB at most"
    changes: dict[str, Any] = {
        "gb_per_s": tier.gb_per_s if share < 1 else gb_per_s,
        "efficiency_fraction": share,
        "latency_us": 1e6 * float(latency_s),
        "source": f"Measured: {told}",
    }
    return tier.model_copy(update=changes), np.asarray(np.log((moved * slowness + hops * latency_s) / seconds))


def _reserved(machine: Machine, usual: ReservedMemory) -> ReservedMemory:
    context_gib = machine.context_bytes / GIB
    if machine.device == "cpu":
        return ReservedMemory(
            context_gib=context_gib, communicator_gib=0.0, fragmentation_fraction=0.0,
            source="A process with torch; what else it allocates is not known",
        )  # fmt: skip
    said = "Context measured; communicators and fragmentation are usual"
    return usual.model_copy(update={"context_gib": context_gib, "source": said})


def _source(record: Record, known: HardwareSpec | None) -> str:
    measured = record.measured
    counts = ", ".join(f"{len(rows)} {name} rows" for name, rows in measured.tables.items())
    kept = "" if known is None else f" Where nothing was measured (fp8, grouped products), as {known.name}."
    return f"plan profile on {measured.machine.name}, {measured.machine.software}, {measured.date}: {counts}.{kept}"


def _rounded(value: Any, name: str = "") -> Any:
    """To five digits; shares that a fit carried above 1 are 1 where the profile allows no more."""
    if isinstance(value, dict):
        inside = "share" if name == "family_fraction" else ""
        return {key: _rounded(inner, inside or key) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_rounded(inner, name) for inner in value)
    if not isinstance(value, float):
        return value
    return float(f"{min(value, 1.0) if name in ('stream_fraction', 'share') else value:.5g}")
