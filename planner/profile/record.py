"""The measurements of `plan profile`: the shapes, and the rows that are kept in a file beside the profile.

There are a few hundred shapes for a GPU and for a CPU, and tiny ones that take seconds. An interrupted run goes on
with the rows of its file.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from planner.errors import SpecError
from planner.files import write_text
from planner.probe.device_state import DeviceState
from planner.probe.run import STEADY_S, SURE_FRACTION, ChunkSpec, Device, ProbeRun
from planner.probe.verdict.evidence import conditions_of_states, load_in_words
from planner.profile.fitting import MeasuredTable
from planner.saved import as_saved, with_digest
from planner.schedule.orders import build_schedule
from planner.specs.base import Spec
from planner.specs.model import ModelSpec
from planner.specs.problems import checked
from planner.specs.reading import parse_mapping, read_text


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
    exchanged_bytes: tuple[int, ...]
    steady_s: float = 0.0
    """Seconds for which an exchange or a stage is measured at least."""


_WEIGHTS = (
    (1024, 1024), (4096, 512), (512, 4096), (1536, 4096), (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336),
    (8192, 8192), (10240, 8192), (7168, 8192), (8192, 3584), (16384, 16384), (32000, 4096),
)  # fmt: skip
"""n × k of the layers of models from 1B to 405B, whole and sharded."""
GPU = ShapesToMeasure(
    budget_s=360.0,  # 302 figures of 1 s, a twentieth of that before each, a tenth for those that vary
    products=tuple((m, n, k) for m in (1024, 2048, 4096, 8192) for n, k in _WEIGHTS),
    attentions=tuple(
        AttentionShape(batch, seq, heads, min(8, heads), dim, v_dim)
        for batch, seq in ((1, 2048), (2, 2048), (1, 4096), (1, 8192), (1, 16384))
        for heads, dim, v_dim in ((4, 128, 128), (16, 128, 128), (32, 128, 128), (32, 64, 64), (16, 192, 128))
    ),
    streams=(
        *((name, 2**power, 1) for name in ("copy", "add") for power in (22, 24, 26, 28)),
        *((name, rows, 4096) for name in ("rms_norm", "layer_norm") for rows in (1024, 4096, 16384)),
        *(("swiglu", rows, 14336) for rows in (1024, 4096, 16384)),
        *(("cross_entropy_fp32", rows, 32000) for rows in (1024, 4096)),
        *((name, 2**power, 1) for name in ("adamw_fused_fp32", "accumulate_bf16_into_fp32") for power in (24, 27)),
    ),
    stages=(
        StageShape(4096, 14336, 4, 8192, kv_heads_fraction=0.25, vocab_size=32000),
        StageShape(8192, 28672, 4, 4096, tp=8, kv_heads_fraction=0.125, vocab_size=32000),
        StageShape(1024, 4096, 8, 512),
    ),
    exchanged_bytes=(2**20, 2**24, 2**28),
    steady_s=STEADY_S,
)
CPU = ShapesToMeasure(
    budget_s=60.0,
    products=tuple(
        (m, n, k)
        for m in (128, 512)
        for n, k in ((128, 128), (256, 256), (688, 256), (256, 688), (512, 512), (1376, 512), (512, 2048))
    ),
    attentions=tuple(
        AttentionShape(1, seq, heads, heads, dim, dim)
        for seq in (128, 256, 512)
        for heads, dim in ((4, 64), (8, 64), (4, 128))
    ),
    streams=(
        *((name, 2**power, 1) for name in ("copy", "add") for power in (14, 17, 20, 23)),
        *((name, rows, 512) for name in ("rms_norm", "layer_norm") for rows in (128, 512)),
        *(("swiglu", rows, 1376) for rows in (128, 512)),
        *(("cross_entropy_fp32", rows, 1024) for rows in (128, 512)),
        *((name, 2**power, 1) for name in ("adamw_fused_fp32", "accumulate_bf16_into_fp32") for power in (18, 21)),
    ),
    stages=(
        StageShape(256, 688, 2, 256, vocab_size=1024, head_dim=64),
        StageShape(512, 1376, 2, 256, vocab_size=1024, head_dim=64),
        StageShape(256, 688, 4, 512, vocab_size=1024, head_dim=64),
    ),
    exchanged_bytes=(2**14, 2**18, 2**22),
)
QUICK = ShapesToMeasure(
    budget_s=0.1,
    products=((64, 64, 64), (128, 256, 128), (256, 256, 256)),
    attentions=(AttentionShape(1, 64, 4, 4, 32, 32), AttentionShape(1, 128, 4, 4, 64, 64)),
    streams=tuple(
        (name, rows, 256)
        for name in ("copy", "add", "rms_norm", "swiglu", "adamw_fused_fp32", "accumulate_bf16_into_fp32")
        for rows in (64, 1024)
    ),
    stages=(StageShape(128, 256, 2, 64, vocab_size=256, head_dim=32),),
    exchanged_bytes=(2**12, 2**16),
)


def shapes_to_measure(device: Device, quick: bool) -> ShapesToMeasure:
    """The shapes to measure on a kind of device."""
    return QUICK if quick else GPU if device == "cuda" else CPU


_log = logging.getLogger(__name__)
MeasuredRow = dict[str, float | int | str | None]
"""Columns of one measurement; null where the device could not do it."""
SAVE_EVERY_S = 2.0
MAX_BYTES = 2**24


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


class Measurements(Spec):
    """Tables of rows by name."""

    machine: Machine
    quick: bool
    date: str
    tables: dict[str, list[MeasuredRow]] = Field(default_factory=dict)
    conditions: tuple[str, ...] = ()
    """Unusual conditions while rows were measured."""
    under_load: str = ""
    """Clocks, power and temperature under the load of products, in words; empty where the driver does not say."""


class MeasurementRecord:
    """Measurements so far, and the file that keeps them until the profile is written."""

    def __init__(self, machine: Machine, quick: bool, date: str, path: Path | None) -> None:
        """Continue with the measurements in the file `path` if they are of the same machine. Without a path nothing is
        kept."""
        self.path, self.saved_s = path, time.monotonic()
        self.measured = Measurements(machine=machine, quick=quick, date=date)
        kept = _read(path)
        if kept is not None and kept.quick == quick and _same(kept.machine, machine):
            self.measured = kept
        self.num_kept = sum(map(len, self.measured.tables.values()))

    def has(self, table: str, key: MeasuredRow) -> bool:
        """True if the record has the measurement that `key` names."""
        return any(key.items() <= row.items() for row in self.measured.tables.get(table, ()))

    def add(self, table: str, row: MeasuredRow) -> None:
        """Add a row. The file is written every few seconds."""
        self.measured.tables.setdefault(table, []).append(row)
        if time.monotonic() - self.saved_s > SAVE_EVERY_S:
            self.save()

    def note(self, states: Sequence[DeviceState]) -> None:
        """Keep the conditions under which rows were measured, each once."""
        conditions = dict.fromkeys((*self.measured.conditions, *(c.text for c in conditions_of_states(states))))
        under_load = next((load_in_words(state) for state in states if state.when == "within"), "")
        changes = {"conditions": tuple(conditions), "under_load": under_load or self.measured.under_load}
        self.measured = self.measured.model_copy(update=changes)

    def how_sure(self) -> str:
        """How sure the medians of the rows are, in words; empty where the rows do not say."""
        spreads = {
            f"{table} {' '.join(str(value) for value in list(row.values())[:3])}": spread
            for table, rows in self.measured.tables.items()
            for row in rows
            if isinstance(spread := row.get("spread_fraction"), float)
        }
        if not spreads:
            return ""
        unsure = sum(spread > SURE_FRACTION for spread in spreads.values())
        worst = max(spreads, key=lambda name: spreads[name])
        also = f"; the worst to {spreads[worst]:.0%} ({worst})" if unsure else ""
        return f"{len(spreads) - unsure} of {len(spreads)} rows are sure to {SURE_FRACTION:.0%}{also}"

    def save(self) -> None:
        """Write the whole file."""
        if self.path is not None and self.measured.tables:
            write_text(self.path, json.dumps(with_digest(self.measured.model_dump(mode="json"))), force=True)
        self.saved_s = time.monotonic()

    def discard(self) -> None:
        """Remove the file, once the profile is written."""
        if self.path is not None:
            with suppress(FileNotFoundError):
                os.unlink(self.path)

    def table(self, name: str, *needed: str) -> MeasuredTable:
        """The rows of a table that have all of `needed`."""
        rows = [
            row for row in self.measured.tables.get(name, ()) if all(row.get(column) is not None for column in needed)
        ]
        return MeasuredTable([{key: "" if value is None else str(value) for key, value in row.items()} for row in rows])


def _same(first: Machine, second: Machine) -> bool:
    """True if two machines are equal but for the memory that a process holds at its start, which always differs."""
    return first.model_copy(update={"context_bytes": second.context_bytes}) == second


def sidecar(output: str, quick: bool) -> Path:
    """The file that keeps measurements until the profile `output` is written. A quick run has a file of its own."""
    return Path(f"{output}{'.quick' if quick else ''}.partial.json")


def _read(path: Path | None) -> Measurements | None:
    """The measurements that an interrupted run left; None where there are none, or somebody edited them."""
    if path is None or not path.is_file():
        return None
    try:
        data = parse_mapping(read_text(path, MAX_BYTES), f"{path}")
        return checked(Measurements, as_saved(data, f"{path}", ""), f"{path}")
    except SpecError as error:
        _log.warning("%s; all is measured again", error.message)
        return None
