"""Runs of layouts that someone else chose: one JSON object a line in, one priced layout (or one error) a line out."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field, ValidationError

from planner.answer import PricedLayout
from planner.errors import PlannerError, SpecError, defect
from planner.layout.evaluate import price_given
from planner.layout.variation import SELDOM_SAID
from planner.record import record
from planner.specs.base import PositiveInt, Spec
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.machines import with_host, with_network
from planner.specs.model import ModelSpec
from planner.specs.problems import checked, spec_error, with_fields
from planner.specs.reading import NotJsonError, json_value, kind_of
from planner.specs.registry import load_hardware, load_model, model_names
from planner.specs.training import AdapterSpec, DocumentLength, Dtype, ObjectiveSpec, Parallelism, TrainingSpec
from planner.trainers.generations import as_built, described, imbalance_of, runtime_of_its_day
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES

_log = logging.getLogger(__name__)

_RATE = re.compile(r"\s*(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*Gb/s\b[^(;]*?\bper (node|GPU)\b", re.IGNORECASE)
_BITS_PER_BYTE = 8
MOST_KEPT = 1000
"""The most answers that are kept for later lines."""


class RunSpec(Spec):
    """The `run` of one line: model, GPUs, layout and training of a run that someone reported."""

    model: str | dict[str, Any]
    """A name, a path, or the fields of a ModelSpec."""
    hardware: str | dict[str, Any]
    """A name, a path, or the fields of a HardwareSpec."""
    num_gpus: PositiveInt
    gpus_per_node: PositiveInt | None = None
    runtime: str = "megatron"
    runtime_fields: dict[str, float] = Field(default_factory=dict)
    """Numbers of the trainer (RuntimeSpec) that are not as it ships."""
    seq_length: PositiveInt
    global_batch_size: PositiveInt
    document_lengths: tuple[DocumentLength, ...] | None = None
    batching: Literal["packed", "padded"] = "packed"
    """Examples that are packed, or padded to the longest of a micro-batch."""
    moe_imbalance: float | str | None = None
    """Tokens on the most loaded expert rank over the mean, or a histogram; null: as such runs route."""
    moe_peak_imbalance: float | None = None
    moe_spread: float | None = None
    straggler_fraction: float | None = None
    dtype: Dtype = "bf16"
    adapters: AdapterSpec | None = None
    """Adapters that are trained in the place of the weights."""
    objective: ObjectiveSpec = ObjectiveSpec()
    """The loss that is trained on."""
    parallelism: Parallelism = Parallelism()
    features: dict[str, Any] = Field(default_factory=dict)
    """Features that the run switched on; names that the runtime does not know are ignored with a warning. A run that
    names any says all: those that it leaves out are as the trainer has them. A run that names none says nothing.
    `network` and `host` (specs/machines.yaml) say what stands around the GPUs, and no switch."""
    intra_node: str | None = None
    """Description only."""
    inter_node: str | None = None
    """Description; a rate per node or GPU in it replaces the profile's network rate."""
    precision_recipe: str | None = None
    """`bf16`: fp32 gradients. `fp16`: what `dtype` calls 16 bits are of that kind. `fp8-tensorwise`, `fp8-rowwise`:
    what shares a scale. Anything else is description."""


@record
class Run:
    """A run as the arguments of `price_given`."""

    id: str | None
    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    runtime: RuntimeSpec
    """The runtime, with the features that the run switched on or off."""
    parallelism: Parallelism
    unknown_features: tuple[str, ...]
    says_switches: bool | Collection[str] = True
    """False for a run without features: the interval of its step covers the likely values of its switches. One with
    features says all switches but those that are seldom said, which it may."""

    def evaluate(self) -> PricedLayout:
        """Price the run's layout, fit or not; SpecError where the layout is illegal."""
        layout = price_given(
            self.model, self.cluster, self.training, self.parallelism, self.runtime, self.says_switches
        )
        return layout.model_copy(update={"id": self.id})


@record
class RunAnswer:
    """The answer to one line: a priced layout or an error."""

    id: Any
    layout: PricedLayout | None = None
    error: PlannerError | None = None

    def to_json(self) -> dict[str, Any]:
        """The layout, or `{"id": …, "error": {"type", "message", "hint"}}`, as plain data."""
        if self.layout is not None:
            return self.layout.model_dump(mode="json")
        error = self.error
        assert error is not None
        return {"id": self.id, "error": {"type": type(error).__name__, "message": error.message, "hint": error.hint}}


def evaluate_lines(lines: Iterable[str]) -> Iterator[RunAnswer]:
    """One answer per line that is not blank, in their order, each before the next line is read.

    Each unknown feature is logged once as a warning. A run that was priced is not priced again: published files repeat
    many.
    """
    warned: set[str] = set()
    priced: dict[str, PricedLayout] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where, run_id = f"line {number}", None
        try:
            data = _json_object(line, where)
            if isinstance(data.get("id"), str | int):  # NaN and 1e400 are no JSON, and cost the lines after them
                run_id = data["id"]
            run = parse_run(data, where)
            for name in run.unknown_features:
                if name not in warned:
                    warned.add(name)
                    _log.warning("%s: features: %s: unknown, ignored", where, name)
            key = json.dumps(data["run"], sort_keys=True)
            layout = priced[key].model_copy(update={"id": run.id}) if key in priced else run.evaluate()
            if len(priced) < MOST_KEPT:
                priced[key] = layout
            yield RunAnswer(run_id, layout=layout)
        except PlannerError as error:
            yield RunAnswer(run_id, error=error)
        except Exception as error:  # a defect that one line meets must not cost the lines after it
            yield RunAnswer(run_id, error=defect(error))


def parse_run(data: dict[str, Any], where: str = "run") -> Run:
    """The run that one line's object describes; keys beside `id` and `run` are ignored.

    Raises SpecError naming `where`, the field and the value.
    """
    run_id = data.get("id")
    if run_id is not None and not isinstance(run_id, str):
        raise SpecError(f"{where}: id: {run_id!r:.60} is {kind_of(run_id)}, expected text", "put it in quotes")
    if "run" not in data:
        raise SpecError(f"{where}: run: is missing", 'write {"id": …, "run": {"model": …, …}}')
    spec = checked(RunSpec, data["run"], f"{where}: run")
    for name, value in (("model", spec.model), ("hardware", spec.hardware)):
        if value == "-":
            raise SpecError(f"{where}: run: {name}: '-' is standard input, where lines come from", "name it")
    given = spec.hardware
    profile = _hardware(given) if isinstance(given, str) else checked(HardwareSpec, given, f"{where}: run: hardware")
    hardware, unknown_machine = _machine(profile, spec.features)
    features = {name: value for name, value in spec.features.items() if name not in _MACHINE}
    cluster = {
        "hardware": hardware,
        "num_gpus": spec.num_gpus,
        "gpus_per_node": spec.gpus_per_node,
        "network_gb_per_s": network_gb_per_s(spec.inter_node, spec.gpus_per_node or hardware.gpus_per_node),
    }
    of_training = TrainingSpec.model_fields.keys() & RunSpec.model_fields.keys()
    training = spec.model_dump(include=set(of_training), exclude_none=True)
    if spec.dtype == "bf16" and spec.precision_recipe == "fp16":
        training["dtype"] = "fp16"
    model = _model(spec.model, f"{where}: run: model")
    used = {"precision_recipe": spec.precision_recipe, **features}
    dated = runtime_of_its_day(spec.runtime, hardware.architecture, model, spec.parallelism, used)
    runtime, unknown = described(dated, hardware, model, used)
    if spec.runtime_fields:
        runtime = with_fields(runtime, spec.runtime_fields, f"{where}: run: runtime_fields")
    model = as_built(model, runtime)
    if spec.moe_imbalance is None:
        training |= imbalance_of(model, features, runtime, spec.adapters is not None).fields
    return Run(
        id=run_id,
        model=model,
        cluster=checked(ClusterSpec, cluster, f"{where}: run"),
        training=checked(TrainingSpec, training, f"{where}: run"),
        runtime=runtime,
        parallelism=spec.parallelism,
        unknown_features=(*unknown, *unknown_machine),
        says_switches=bool(features) and frozenset(SWITCHES).difference(SELDOM_SAID).union(features),
    )


_MACHINE: dict[str, Callable[[HardwareSpec, str], HardwareSpec]] = {"network": with_network, "host": with_host}
"""Features of a run that describe its network and hosts, and are no switches."""


def _machine(hardware: HardwareSpec, features: Mapping[str, Any]) -> tuple[HardwareSpec, tuple[str, ...]]:
    """The profile on the network and beside the host that a run names, and those that nobody knows."""
    unknown = []
    for name, placed in _MACHINE.items():
        value = features.get(name)
        if value is None:
            continue
        try:
            hardware = placed(hardware, str(value))
        except SpecError:
            unknown.append(f"{name}: {value!r:.60}")
    return hardware, tuple(unknown)


def network_gb_per_s(description: str | None, gpus_per_node: int) -> float | None:
    """GB/s per GPU of a network described as `8x400 Gb/s … per node`, `800 Gb/s per node` or `400 Gb/s … per GPU`.

    links · Gb/s / 8 / gpus_per_node, or Gb/s / 8. None for anything else, ranges among it.
    """
    match = _RATE.match(description or "")
    if match is None:
        return None
    links, rate, holder = match.groups()
    total = int(links or 1) * float(rate) / _BITS_PER_BYTE
    return (total / gpus_per_node if holder.lower() == "node" else total) or None


def _json_object(line: str, where: str) -> dict[str, Any]:
    hint = "write one JSON object a line"
    try:
        data = json_value(line.strip(), where, hint)
    except NotJsonError as error:
        raise SpecError(f"{where}: not JSON: {error.problem}", hint) from None
    if not isinstance(data, dict):
        raise SpecError(f"{where}: holds {kind_of(data)}, not an object", hint)
    return data


def _model(model: str | dict[str, Any], where: str) -> ModelSpec:
    if isinstance(model, str):
        return _named_model(model)
    try:
        return as_known(_inline_model(json.dumps(model)))
    except ValidationError as error:
        raise spec_error(error, where, ModelSpec) from None


_SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size",
)  # fmt: skip
_DESIGN = (
    "attention_bias", "mlp_bias", "qk_norm", "post_norms", "embedding_norm", "attention_sinks", "sliding_window",
    "sliding_window_pattern", "attention_chunk_size",
)  # fmt: skip


def as_known(model: ModelSpec) -> ModelSpec:
    """`model` completed from the known model that has its name and its sizes."""
    name = model.name.lower()
    if not any(name == known or name in aliases for known, aliases in model_names().items()):
        return model
    known = _named_model(name)
    if any(getattr(model, field) != getattr(known, field) for field in _SIZES):
        return model
    left_out = {field: getattr(known, field) for field in _DESIGN if field not in model.model_fields_set}
    # a copy would keep the layers that were worked out
    return ModelSpec(**{field: getattr(model, field) for field in ModelSpec.model_fields} | left_out)


# Files of runs repeat a few models and clusters hundreds of times.
_named_model = lru_cache(256)(load_model)
_hardware = lru_cache(256)(load_hardware)


@lru_cache(256)
def _inline_model(text: str) -> ModelSpec:
    return ModelSpec.model_validate({"name": "model", **json.loads(text)})
