"""The inputs of a plan with their sources, folded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from planner.answer import Plan
from planner.report.format import large
from planner.report.html.pieces import Html, facts, folded, table, tag


def inputs(plan: Plan) -> Iterator[Html]:
    """The sources in a table, every field below it on demand, and the hash of all."""
    model, hardware = plan.model.spec, plan.cluster.hardware
    named = [("model", model.name, model.source)]
    if model.training is not None:
        named.append(("published training", f"{model.training.tokens_per_step:,} tokens a step", model.training.source))
    named.append(("hardware", hardware.name, hardware.source))
    named += [
        (f"link {tier.name}", f"{tier.gb_per_s:g} GB/s, {tier.latency_us:g} µs", tier.source)
        for tier in plan.cluster.tiers
    ]
    named.append(("kernels", hardware.efficiency.evidence.replace("_", " "), hardware.efficiency.source))
    named.append(("reserved memory", f"{hardware.reserved.context_gib:g} GiB context", hardware.reserved.source))
    if hardware.usd_per_gpu_hour is not None:
        named.append(("price", f"${hardware.usd_per_gpu_hour:g} a GPU-hour", hardware.price_source))
    yield table(("input", "value", "source"), [row for row in named if row[2]], "lll", folds=True)
    total, active = large(plan.model.num_parameters), large(plan.model.num_active_parameters)
    model_facts = {"parameters": total, "active parameters": active, **_flat(model.model_dump(mode="json"))}
    yield folded("Model", facts(model_facts))
    yield folded("Cluster", facts(_flat(plan.cluster.model_dump(mode="json"))))
    yield folded("Training", facts(_flat(plan.training.model_dump(mode="json"))))
    yield folded("Runtime", facts(_flat(plan.runtime_spec.model_dump(mode="json"))))
    yield tag("p", "sha256 of the inputs: ", tag("code", plan.inputs_sha256))
    yield tag("p", f"planner {plan.planner_version}, plan schema {plan.schema_version}", class_="soft")


def _flat(data: dict[str, Any], before: str = "") -> dict[str, object]:
    """Nested values under dotted names, without those that are not set."""
    flat: dict[str, object] = {}
    for key, value in data.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            flat |= _flat(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
            for index, entry in enumerate(value):
                flat |= _flat(entry, f"{name}[{index}].")
        elif value is not None:
            flat[name] = _listed(value) if isinstance(value, list) else value
    return flat


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
