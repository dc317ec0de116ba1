"""The performance switches of trainers: one row each, with its values and the fields of a runtime that a value sets.

A recipe is the value of every switch. It is no state of its own: a runtime's fields tell it (`Switch.value_of`). A
switch has one name everywhere: on the command line, among the features of a run, in JSON and in the notes of exports.
Which switches a trainer has, with which values and since which version, stands in the trainer's file (`switches:`).
Whether a value goes with a GPU, a model, a layout and the other switches is said by planner/trainers/rules/rules.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Any

from planner.errors import Unsupported
from planner.record import record
from planner.specs.base import Fields, Said, Texts
from planner.specs.expressions import value_of
from planner.specs.reading import shipped_table
from planner.trainers.optimizers import OPTIMIZERS

Value = bool | int | float | str

EP_OVERLAP = 0.9
"""Share of expert exchanges inside NVLink that hides behind another micro-batch's products, where a recipe asks for it.
The kernels that send take a part of the GPU meanwhile (deepep_sms, hybridep_sms)."""
EP_NETWORK_OVERLAP = 0.8
"""Share of what crosses the network: Qwen3-30B on two nodes, 15% (HybridEP) and 24% (all-to-all) of whose step went
(Megatron-Bridge, pull requests 5094 and 3862)."""
OVERLAP = 0.9
"""Share of the window that reductions and gathers of a sharded optimizer fill: a first guess, fitted to nothing."""
ASYNC_TP = 0.688
"""Share of tensor-parallel exchanges that asynchronous tensor parallelism hides: fitted to torchtitan's published runs
(tools/calibrate runs, "asynchronous TP")."""
ROWWISE = 1.45
"""Seconds of torchao's 8-bit products with a scale for each row or block, over seconds with one for a tensor.

Llama 3 8B on eight H100: 6,150 tokens/s in bf16, 7,690 by tensors, 6,768 by rows (torchao's training benchmarks). 1.6
in torchtitan's report of June 2025 (70B, TP 8: by rows no faster than bf16)."""
CAPACITY_HOST = 0.85
"""Host time of a mixture's layer that is left where experts take a fixed number of tokens: no counts are awaited."""
SHARDED_STAGES: dict[str, tuple[int, ...]] = {"ddp": (0,), "fsdp": (2, 3), "deepspeed": (1, 2, 3)}
"""ZeRO's stages that each value of `sharding` has."""

ROUTING = ("moe_router", "moe_preprocess")
"""Modules of a mixture's layer that a CUDA graph replays up to the exchange, where the host must know token counts."""


@record
class Switch:
    """One switch of a trainer."""

    name: str
    says: str
    """The effect of the switch in a few words, as a report shows it."""
    values: Mapping[Value, Said]
    """Each value that the search may choose, the plainest first, with the fields that it sets."""
    consent: Mapping[Value, str] = field(default_factory=dict)
    """Values that change numerics (or what is checked, or which tokens are trained on), and what they change. They are
    chosen with --allow NAME only."""
    also: Callable[[Any], Said | None] = lambda value: None
    """The fields of a value that runs state and the search does not choose; None for a value that does not exist."""
    is_share: bool = False
    """True for a value that is any share of the optimizer's states."""
    is_described: bool = False
    """True for a feature of runs that are priced, which the search never chooses."""
    shown_by: Texts = ()
    """The fields by which the value is recognized, where other fields that it sets are shared."""
    is_free: bool = False
    """True for a switch that never makes a step slower when it is on: the search does not try it off."""
    doubt_fraction: float = 0.0
    """Share of a step that a predicted gain was too large by in one of five published ablations. On a network that the
    host drives, where few were published, it counts twice."""
    only_saves_memory: bool = False
    """True for a switch that makes no layout faster by itself, but may let a faster one fit."""
    divides_layouts: bool = False
    """True for a switch whose values each need layouts that no other value allows."""
    source: str = ""
    """The evidence for what the switch gains."""

    @property
    def plainest(self) -> Value:
        """The plainest value."""
        return next(iter(self.values))

    def fields_of(self, value: Any) -> Said | None:
        """The fields that `value` sets; None if the switch has no such value."""
        known = next((known for known in self.values if known == value and type(known) is type(value)), None)
        return self.also(value) if known is None else self.values[known]

    def value_of(self, runtime: Any) -> Value:
        """The value whose fields a runtime has; numbers match if both or neither are zero, a share is as it is."""

        def matches(fields: Said) -> bool:
            names = self.shown_by or tuple(fields)
            return all(_alike(getattr(runtime, name), fields[name]) for name in names)

        def is_exact(fields: Said) -> bool:
            return matches(fields) and all(getattr(runtime, name) == fields[name] for name in self.shown_by or fields)

        exact = (value for value, fields in self.values.items() if is_exact(fields))
        alike = (value for value, fields in self.values.items() if matches(fields))
        if (value := next(exact, None)) is None and self.is_share:
            return float(runtime.optimizer_offload_fraction)
        return next(alike, self.plainest) if value is None else value

    @property
    def touched(self) -> frozenset[str]:
        """All fields that the switch's values set."""
        return frozenset(name for fields in self.values.values() for name in fields)


def _alike(found: Any, expected: Any) -> bool:
    if isinstance(expected, float) and not isinstance(found, bool):
        return bool(found) == bool(expected)
    return bool(found == expected)


LEGACY_EXPERT_KERNELS = 7.6
"""Host time of an expert whose products are launched one by one, in kernels of an eager layer: layers of
DeepSeek-V2-Lite take 14.7 ms on eight MI355X with micro-batches of 1 and of 2 sequences (Primus, examples/moe_package,
figure 5)."""
TURBO_EXPERT_KERNELS = 3.8
"""The same where one launch holds all experts of a rank: half. Qwen3-235B on 32 MI355X, whose batch is not published,
excludes both as many as expert by expert (52% too slow) and Transformer Engine's 0.89 (30% too fast)."""
UNFUSED_PERMUTE = 4.0
"""Seconds of permutations by torch's gathers and atomic additions over those of one fused kernel, on AMD's GPUs:
DeepSeek-V2-Lite on eight MI355X, whose steps of 11.19 s with DeepEP take 10.01 with them fused (Primus, examples/
moe_package, figure 6)."""
FUSED_ROUTER_HOST = 0.85
"""Host time of a mixture's layer that is left where one kernel scores and routes: as where a graph replays routing
(graphed_routing_fraction)."""
_CONSTANTS = {
    "EP_OVERLAP": EP_OVERLAP, "EP_NETWORK_OVERLAP": EP_NETWORK_OVERLAP, "OVERLAP": OVERLAP, "ASYNC_TP": ASYNC_TP,
    "ROWWISE": ROWWISE, "CAPACITY_HOST": CAPACITY_HOST, "ROUTING": ROUTING, "OPTIMIZERS": OPTIMIZERS,
    "LEGACY_EXPERT_KERNELS": LEGACY_EXPERT_KERNELS, "TURBO_EXPERT_KERNELS": TURBO_EXPERT_KERNELS,
    "UNFUSED_PERMUTE": UNFUSED_PERMUTE, "FUSED_ROUTER_HOST": FUSED_ROUTER_HOST, "isinstance": isinstance, "type": type,
}  # fmt: skip


def _spelled_out(cell: Any) -> Any:
    """A cell of switches.yaml with its constants; lists are tuples, as fields have them."""
    if isinstance(cell, str) and cell.startswith("="):
        return value_of(cell[1:], _CONSTANTS)
    if isinstance(cell, dict):
        return {key: _spelled_out(part) for key, part in cell.items()}
    return tuple(cell) if isinstance(cell, list) else cell


def _switch(name: str, row: Said) -> Switch:
    cells = _spelled_out(row)
    also, values = cells.pop("also", "None"), cells.pop("values", {})
    if field_name := cells.pop("flag", None):
        values, also = {value: {field_name: value} for value in (False, True)}, "values[bool(value)]"
    elif share := cells.pop("share", None):
        values = {False: dict.fromkeys(share, 0.0), True: dict.fromkeys(share, cells.pop("on"))}
        also, cells["is_free"] = "values[bool(value)]", True
    elif field_name := cells.pop("field", None):
        values = {value: {field_name: value} for value in cells.pop("among")}

    def stated(value: Any) -> Said | None:
        found: Said | None = value_of(also, {**_CONSTANTS, "value": value, "values": values})
        return found

    return Switch(name, cells.pop("says", ""), values, also=stated, **cells)


SWITCHES = {name: _switch(name, row) for name, row in shipped_table("trainers/switches.yaml").items()}
"""All switches, by name: the rows of switches.yaml."""


def written(value: Value) -> str:
    """A value as the command line takes it: `true`, `0.5`, `delayed`."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def parsed(name: str, text: str) -> Value | None:
    """The value of the switch `name` that a text means; None if it has no such value."""
    row = SWITCHES[name]
    known = next((value for value in row.values if written(value) == text.lower()), None)
    kind = type(row.plainest)
    if known is None and kind in (int, float):
        try:
            known = kind(text) if row.also(kind(text)) is not None else None
        except ValueError:
            return None
    return known


NOT_MODELLED = {"cpu_offload": "tensors kept in host memory"}
"""Features of runs whose effect is not priced."""
_IMPLIED_BY_WHOLE_GRAPHS: dict[str, Value] = {"ep_overlap": "delayed", "fused_experts": True, "nan_checks": False}
"""Published recipes that capture whole iterations of mixtures overlap their exchanges, delay weight gradients and fuse
the products of experts too (Megatron-Bridge since 26.06). Megatron-LM takes no checks for NaN beside such graphs."""


def read_recipe(runtime: Any, names: Iterable[str] = ()) -> dict[str, Value]:
    """The value of each switch of `names` that a runtime's fields tell; by default of all that a search may choose."""
    rows = [SWITCHES[name] for name in names] or [row for row in SWITCHES.values() if not row.is_described]
    return {row.name: row.value_of(runtime) for row in rows}


def changes(features: Said) -> tuple[Fields, Texts]:
    """Fields of a RuntimeSpec with the values that `features` give them, and the names, or values, that are unknown.

    Raises Unsupported where a feature is on that is not modelled.
    """
    changed: Fields = {}
    unknown = []
    # what graphs, capacities and switches that are off imply counts where a run does not state others itself
    order = sorted(features.items(), key=lambda pair: (pair[0] != "cuda_graph", pair[0] == "dispatcher", bool(pair[1])))
    for name, value in order:
        row = SWITCHES.get(name)
        if name in NOT_MODELLED:
            if value:
                raise Unsupported(
                    f"features: {name}: {NOT_MODELLED[name]} are not modelled",
                    "leave it out to price the run as if the GPU kept them",
                )
            continue
        fields = None if row is None else row.fields_of(value)
        if fields is None:
            unknown.append(name if row is None else f"{name}: {value!r:.60}")
            continue
        changed |= fields
        if name == "cuda_graph" and value in ("full", "full_iteration"):
            for other, implied in _IMPLIED_BY_WHOLE_GRAPHS.items():
                changed |= SWITCHES[other].values[implied]
    return changed, tuple(unknown)
