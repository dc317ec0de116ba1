"""Random jobs that go from a plan through a trainer's files and back, and what becomes of their price."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from planner.answer import Plan
from planner.errors import PlannerError
from planner.export.export import bundle_of
from planner.export.import_run import read
from planner.export.imported_run import ImportedRun
from planner.export.refusal import Inexpressible
from planner.export.spelling import setting_of
from planner.export.trainer_files import ExportFile
from planner.layout.evaluate import evaluate
from planner.layout.runs import parse_run
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import AdapterSpec, ObjectiveSpec, Parallelism, TrainingSpec
from planner.trainers.load import load_runtime, switches_of
from planner.trainers.rules.recipe import broken_recipe_rules
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import switched

RUNTIME_OF = {
    "megatron": "megatron", "bridge": "bridge", "torchtitan": "torchtitan", "torch": "torch-eager",
    "deepspeed": "deepspeed", "primus": "primus-megatron", "hf": "hf",
}  # fmt: skip
"""Each target of an export that a plan comes back from, and the trainer that its plans are made for."""
_BACKENDS = ("primus-megatron", "primus-megatron", "primus-torchtitan")
"""Those of Primus' plans, which it hands to one trainer or the other."""
_MODELS = (
    "llama-3.2-1b", "llama-3.1-8b", "llama-2-13b", "qwen2.5-32b", "llama-3.1-70b", "gpt3-175b", "mixtral-8x7b",
    "gpt-oss-20b", "qwen3-30b-a3b", "deepseek-v3", "qwen3-8b", "deepseek-v2-lite",
)  # fmt: skip
_NARROW = {"megatron": ("fp8", "fp16"), "bridge": ("fp8", "fp16"), "primus": ("fp8",), "hf": ("fp16",)}
_TRIES = 100


@dataclass(frozen=True, slots=True)
class RoundTrip:
    """A plan, and the run that its files were read back as."""

    plan: Plan
    imported: ImportedRun
    again: Plan

    @property
    def is_same(self) -> bool:
        """The same seconds and the same bytes on every stage, to twelve digits."""
        alike = abs(self.again.step.step_s / self.plan.step.step_s - 1) < 1e-12
        stages = zip(self.plan.stages, self.again.stages, strict=False)
        return alike and all(a.memory.total_bytes == b.memory.total_bytes for a, b in stages)

    def __str__(self) -> str:
        step, again = self.plan.step.step_s, self.again.step.step_s
        return f"{self.plan.model.name} {self.plan.parallelism} {self.plan.best.recipe}: {step} s, back {again} s"


def round_trips(target: str, count: int, seed: int = 0) -> Iterator[RoundTrip]:
    """`count` random jobs that `target` can express, there and back."""
    rng, done = random.Random(f"{target} {seed}"), 0
    for _ in range(count * _TRIES):
        if done == count:
            return
        with patch("planner.layout.evaluate.told_assumptions", lambda *_, **__: ()):
            trip = _there_and_back(rng, target)
        if trip is not None:
            done += 1
            yield trip
    raise AssertionError(f"{target}: {done} of {count} jobs in {count * _TRIES} tries")


def _there_and_back(rng: random.Random, target: str) -> RoundTrip | None:
    """One random job there and back; None where the target cannot express it."""
    plan = _plan(rng, target)
    try:
        return None if plan is None else there_and_back(plan, bundle_of(plan, [target]).with_manifest())
    except Inexpressible:
        return None


def there_and_back(plan: Plan, files: tuple[ExportFile, ...], start: str = "") -> RoundTrip:
    """The price of what the folder of a plan's export, or one of its files, is read as."""
    with TemporaryDirectory() as folder:
        for file in files:
            Path(folder, file.name).write_text(file.text)
        imported = read(Path(folder, start))
    run = parse_run({"run": imported.complete()})
    again = evaluate(run.model, run.cluster, run.training, run.parallelism, runtime=run.runtime)
    return RoundTrip(plan, imported, again)


def _adapters(rng: random.Random) -> AdapterSpec | None:
    """All weights, or adapters beside frozen ones of some width."""
    if rng.random() < 0.3:
        return None
    targets = rng.choice((("all-linear",), ("attention",), ("q_proj", "v_proj"), ("mlp", "lm_head")))
    bits: Any = rng.choice((4, 8, 16, 16))
    return AdapterSpec(rank=rng.choice((4, 16, 64)), targets=targets, base_bits=bits, dropout=rng.choice((0.0, 0.05)))


def _objective(rng: random.Random, target: str, adapters: AdapterSpec | None) -> ObjectiveSpec:
    """The next token, or where a target writes them pairs of answers beside a reference."""
    if target != "hf" or rng.random() < 0.7:
        return ObjectiveSpec()
    reference: Any = rng.choice(("model" if adapters is None else "adapters", "precomputed"))
    return ObjectiveSpec(name="dpo", reference=reference)


@cache
def _hardware(target: str) -> Any:
    return load_hardware("mi300x" if target == "primus" else "h100-sxm-80gb")


def _plan(rng: random.Random, target: str) -> Plan | None:
    """A random layout of a random job under a random recipe; None where it contradicts itself."""
    pp, dp, micro_batch_size = (rng.choice(sizes) for sizes in ((1, 1, 2, 4, 8), (1, 2, 3, 4, 8, 9, 16), (1, 1, 2, 4)))
    # Primus' Megatron core has no yarn: gpt-oss goes there without it, at another price
    model = load_model(rng.choice([name for name in _MODELS if target != "primus" or "gpt-oss" not in name]))
    layout: dict[str, Any] = {
        "tp": rng.choice((1, 1, 2, 4, 8)), "cp": 1 if target == "deepspeed" else rng.choice((1, 1, 1, 2)), "pp": pp,
        "dp": dp, "ep": 1 if model.moe is None else rng.choice((1, 2, 4, 8)),
        "vpp": rng.choice((1, 1, 2, 4)) if pp > 1 else 1, "micro_batch_size": micro_batch_size,
        "recompute": rng.choice(("none", "none", "full", "selective")), "zero_stage": rng.choice((0, 1, 1, 2, 3)),
    }  # fmt: skip
    if target == "deepspeed":
        layout |= {"vpp": 1, "sequence_parallel": False}
    if target == "hf":
        layout |= {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "vpp": 1}
        layout["fsdp"] = rng.choice((None, None, dp // 2)) if dp > 2 else None
    if layout["recompute"] == "full" and rng.random() < 0.4:
        layout["recompute_num_layers"] = rng.choice((1, 2, 3))
    if dp * layout["cp"] == 1:
        layout["zero_stage"] = 0
    num_gpus = layout["tp"] * layout["cp"] * layout["pp"] * dp
    training: dict[str, Any] = {
        "seq_length": rng.choice((2048, 4096, 8192)),
        "global_batch_size": micro_batch_size * rng.choice((1, 2, 4, 8, 16)) * dp,
        "dtype": rng.choice(("bf16", "bf16", "bf16", *_NARROW.get(target, ()))),
        "moe_imbalance": rng.choice((1.0, 1.3)), "straggler_fraction": rng.choice((0.0, 0.05)),
        "document_lengths": rng.choice((None, None, ({"length": 512, "share": 9}, {"length": 2048, "share": 1}))),
    }  # fmt: skip
    if target == "hf":
        training["adapters"] = _adapters(rng)
        training["objective"] = _objective(rng, target, training["adapters"])
    cluster = ClusterSpec(hardware=_hardware(target), num_gpus=num_gpus)
    name = rng.choice(_BACKENDS) if target == "primus" else RUNTIME_OF[target]
    runtime = _switched(rng, load_runtime(name))
    try:
        plan = evaluate(model, cluster, TrainingSpec(**training), Parallelism(**layout), runtime=runtime)
    except (PlannerError, ValueError):
        return None
    return None if any(broken_recipe_rules(setting_of(plan))) else plan


def _switched(rng: random.Random, runtime: RuntimeSpec) -> RuntimeSpec:
    """A trainer with a few switches at other values; gathers hide only where reductions do."""
    recipe = {name: rng.choice(list(values)) for name, values in switches_of(runtime).items() if rng.random() < 0.3}
    if recipe.get("overlap_grad_reduce") is False:
        recipe["overlap_param_gather"] = False
    return switched(runtime, recipe)
