"""The measurements of `plan profile`: the shapes, their rows, and the profile built from them.

There are a few hundred shapes for a GPU and for a CPU, and tiny ones that take seconds (`shapes.yaml`). The profile is
fitted to the same cost model as those that ship.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from planner.probe.evidence import conditions_of_states, load_in_words, named_profiles
from planner.probe.result import DeviceState
from planner.probe.run import STEADY_S, SURE_FRACTION, ChunkSpec, Device, ProbeRun
from planner.probe.run_price import chunk_costs
from planner.profile.fitting import (
    STREAMS,
    BenchNumbers,
    FitProblem,
    MeasuredTable,
    Residuals,
    attention_problem,
    fit,
    fitted_tier,
    gemm_problem,
    hardware_with,
    log_errors,
    stream_problem,
)
from planner.profile.probed import step_width
from planner.schedule.orders import build_schedule
from planner.shape import FloatArray
from planner.specs.base import Fields, Ints, Spec, Texts
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import AttentionEfficiency, Efficiency, HardwareSpec, LinkTier, ReservedMemory
from planner.specs.model import ModelSpec
from planner.specs.reading import shipped_table
from planner.specs.registry import hardware_names, load_hardware
from planner.specs.units import GB, GIB, TERA


class AttentionShape(NamedTuple):
    """One causal attention."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int


class StageShape(NamedTuple):
    """A whole stage as the probe runs it: a Llama with embedding and head, on one tensor-parallel rank of `tp`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    seq_length: int
    tp: int = 1
    kv_heads_fraction: float = 1.0
    vocab_size: int = 8192
    head_dim: int = 128

    def run(self, device: Device, steady_s: float = 0.0) -> ProbeRun:
        """A run of the stage alone, with four micro-batches of one sequence, for at least `steady_s`."""
        heads = self.hidden_size // self.head_dim
        model = ModelSpec(
            name="profile",
            num_hidden_layers=self.num_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=round(heads * self.kv_heads_fraction),
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            position_embedding="rope",
        )
        return ProbeRun.of(
            build_schedule("none", 1, 1, 4),
            model=model,
            device=device,
            dtype="bfloat16",
            tp=self.tp,
            sequence_parallel=self.tp > 1,
            seq_length=self.seq_length,
            chunks=(ChunkSpec(first_layer=0, last_layer=self.num_layers, embedding=True, head=True),),
            warm_up_steps=2,
            num_steps=3,
            steady_s=steady_s,
            most_s=3 * steady_s,
        )


@dataclass(frozen=True, slots=True)
class ShapesToMeasure:
    """Shapes to measure."""

    budget_s: float
    """Seconds for all kernels together, warm-ups included."""
    products: tuple[tuple[int, int, int], ...]
    """m, n, k."""
    attentions: tuple[AttentionShape, ...]
    streams: tuple[tuple[str, int, int], ...]
    """Operator as `kernel_problems.STREAMS` names it, rows, columns."""
    stages: tuple[StageShape, ...]
    exchanged_bytes: Ints
    steady_s: float = 0.0
    """Seconds for which an exchange or a stage is measured at least."""

    @classmethod
    def of(cls, device: str, steady_s: float = 0.0) -> ShapesToMeasure:
        """The shapes of a kind of device, or the tiny ones (`quick`), as `shapes.yaml` lists them."""
        table = shipped_table("profile/shapes.yaml")[device]
        shapes = {
            "products": [(m, *nk) for group in table["products"] for m in group["m"] for nk in group["n_k"]],
            "attentions": [
                AttentionShape(*both, *heads)
                for group in table["attentions"]
                for both in group["batch_seq"]
                for heads in group["heads"]
            ],
            "streams": [(name, row, columns) for name, (rows, columns) in table["streams"].items() for row in rows],
            "stages": [StageShape(**stage) for stage in table["stages"]],
            "exchanged_bytes": table["exchanged_bytes"],
        }
        return cls(table["budget_s"], **{name: tuple(found) for name, found in shapes.items()}, steady_s=steady_s)


GPU, CPU, QUICK = ShapesToMeasure.of("cuda", STEADY_S), ShapesToMeasure.of("cpu"), ShapesToMeasure.of("quick")


def shapes_to_measure(device: Device, quick: bool) -> ShapesToMeasure:
    """The shapes to measure on a kind of device."""
    return QUICK if quick else GPU if device == "cuda" else CPU


_log = logging.getLogger(__name__)
MeasuredRow = dict[str, float | int | str | None]
"""Columns of one measurement; null where the device could not do it."""


class Machine(Spec):
    """The machine that was measured."""

    device: Device
    name: str
    """Name of the device according to the driver or the operating system."""
    software: str
    architecture: str
    memory_bytes: int
    num_sms: int
    num_devices: int
    """Number of devices in this machine; on a CPU, of processes."""
    context_bytes: int
    """Device memory in use before anything was allocated."""


@dataclass
class Measurements:
    """Rows of tables by name, as far as they are measured, and the conditions under which they were."""

    machine: Machine
    quick: bool
    date: str
    tables: dict[str, list[MeasuredRow]] = field(default_factory=dict)
    conditions: Texts = ()
    """Unusual conditions while rows were measured."""
    under_load: str = ""
    """Clocks, power and temperature under the load of products, in words; empty where the driver does not say."""

    def note(self, states: Sequence[DeviceState]) -> None:
        """Keep the conditions under which rows were measured, each once."""
        self.conditions = tuple(dict.fromkeys(condition.text for condition in conditions_of_states(states)))
        self.under_load = next((load_in_words(state) for state in states if state.when == "within"), "")

    def how_sure(self) -> str:
        """How sure the medians of the rows are, in words; empty where the rows do not say."""
        spreads = {
            f"{table} {' '.join(str(value) for value in list(row.values())[:3])}": spread
            for table, rows in self.tables.items()
            for row in rows
            if isinstance(spread := row.get("spread_fraction"), float)
        }
        if not spreads:
            return ""
        unsure = sum(spread > SURE_FRACTION for spread in spreads.values())
        worst = max(spreads, key=lambda name: spreads[name])
        also = f"; the worst to {spreads[worst]:.0%} ({worst})" if unsure else ""
        return f"{len(spreads) - unsure} of {len(spreads)} rows are sure to {SURE_FRACTION:.0%}{also}"

    def table(self, name: str, *needed: str) -> MeasuredTable:
        """The rows of a table that have all of `needed`."""
        rows = [row for row in self.tables.get(name, ()) if all(row.get(column) is not None for column in needed)]
        return MeasuredTable([{key: "" if value is None else str(value) for key, value in row.items()} for row in rows])


UNKNOWN_NETWORK = LinkTier(
    name="network", gb_per_s=25.0, latency_us=10.0,
    source="Not measured: only this machine was there. 200 Gb/s a GPU assumed; write what yours has",
)  # fmt: skip


def measured_tiers(
    record: Measurements, known: HardwareSpec | None
) -> tuple[tuple[LinkTier, ...], list[tuple[str, Residuals]]]:
    """Link tiers fitted to timed exchanges, with their residuals. Tiers without exchanges are those of the known
    device, or assumed."""
    machine, table = record.machine, record.table("exchange", "microseconds")
    if machine.device == "cpu":
        names: Texts = ("gloo",)
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


SAME_MEMORY = 0.04
"""Largest relative difference of total memory between a device and the shipped profile of its name."""
BEST_PRODUCT, BEST_STREAM = 0.8, 0.9
"""Fractions of the peak that the best kernels reach, where a data sheet is known; they give the peaks of a device
without one."""
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


def profile_of(record: Measurements) -> Profiled:
    """Fit every table that was measured, later ones on the numbers of earlier ones."""
    machine, known = record.machine, known_profile(record.machine)
    hardware, residuals = _bare(record, known), list[tuple[str, Residuals]]()
    hardware = hardware.model_copy(update={"efficiency": _start(record, known)})
    changes: Fields = {"evidence": "measured", "source": _source(record, known), "step_width": None}
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
    named = named_profiles(machine.name)
    for hardware in named:
        if _same_size(machine, hardware):
            return hardware
    if named or not machine.architecture.startswith("cdna"):
        return None
    # older drivers call all of AMD's GPUs "AMD Radeon Graphics"
    alike = [one for one in map(load_hardware, hardware_names()) if one.architecture == machine.architecture]
    same = [one for one in alike if _same_size(machine, one)]
    return same[0] if len(same) == 1 else None


def _same_size(machine: Machine, hardware: HardwareSpec) -> bool:
    same_memory = abs(machine.memory_bytes / hardware.memory_bytes - 1) < SAME_MEMORY
    return same_memory and hardware.num_sms == machine.num_sms


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def _bare(record: Measurements, known: HardwareSpec | None) -> HardwareSpec:
    """The device without efficiencies: from the data sheet if it is known, else from the best measured rates."""
    machine = record.machine
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


def _best_product(record: Measurements) -> float:
    """FLOP/s of the fastest product."""
    table = record.table("gemm", "forward_us")
    flops = 2 * table.number("m") * table.number("n") * table.number("k")
    return float(max((flops / table.seconds(f"{way}_us")).max() for way in ("forward", "dgrad", "wgrad")))


def _best_stream(record: Measurements) -> float:
    """Bytes per second of the fastest copy."""
    table = record.table("stream", "forward_us")
    table = table.where(table.text("operator") == "copy")
    moved = STREAMS["copy"][1] * table.number("rows") * table.number("columns")
    return float((moved / table.seconds("forward_us")).max())


def _start(record: Measurements, known: HardwareSpec | None) -> Efficiency:
    """The efficiencies with which the fits begin; those that nothing was measured for stay."""
    before = Efficiency() if known is None else known.efficiency
    changes: Fields = {"sustained_fraction": 1.0, "backward_sustained_fraction": 1.0}
    if known is None:
        changes["host_us"] = 0.0 if record.machine.device == "cpu" else 20.0
    changes["cudnn"] = (before.cudnn or AttentionEfficiency()) if "cudnn" in _backends(record) else None
    return before.model_copy(update=changes)


def _backends(record: Measurements) -> Texts:
    """Attention kernels that this device runs. Both are kept: trainers take the faster, eager torch its own choice."""
    timed = record.table("attention", "forward_us", "backward_us")
    return tuple(sorted(set(timed.text("backend").tolist()))) if timed.num_rows else ()


def _problems(record: Measurements) -> list[FitProblem]:
    tables = {name: record.table(name, "forward_us") for name in ("stream", "gemm", "attention", "stage")}
    problems = [stream_problem(tables), gemm_problem(tables)]
    # ROCm builds pad values that are narrower than keys (`probe.torch_build`)
    pads = record.machine.architecture.startswith("cdna")
    problems += [attention_problem(tables, backend, pads) for backend in _backends(record)]
    if tables["stage"].num_rows:
        problems.append(stage_problem(record, tables["stage"]))
    return problems


def stage_problem(record: Measurements, table: MeasuredTable) -> FitProblem:
    """Whole stages: forward, backward and optimizer, as the probe ran them."""
    device = record.machine.device
    shapes: tuple[StageShape, ...] = shapes_to_measure(device, record.quick).stages
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
        free=shipped_table("profile/shapes.yaml")[device]["in_stages"],
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


def _source(record: Measurements, known: HardwareSpec | None) -> str:
    counts = ", ".join(f"{len(rows)} {name} rows" for name, rows in record.tables.items())
    rest = "" if known is None else f" Where nothing was measured (fp8, grouped products), as {known.name}."
    unusual = f" Unusual: {'; '.join(record.conditions)}." if record.conditions else ""
    where = f"plan profile on {record.machine.name}, {record.machine.software}, {record.date}"
    where += f", at {record.under_load}" if record.under_load else ""
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
