"""Numbers that no change may move unnoticed: prices of layers, and bounds of nodes, for jobs of every kind.

They are not right by themselves: other tests hold the physics against torch, closed forms and published runs. They say
that a change which means to change no number does not. `scripts/pin` writes them anew; the commit says why.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from planner.errors import SpecError
from planner.layout.evaluate import evaluate, pricing_of, selective_modules
from planner.physics.pricing import Pricing
from planner.search.bounds import coarse_bound_s
from planner.search.case import Case
from planner.search.enumerate import enumerate_shapes
from planner.search.frontier import ANY_SET, nodes_of, recompute_choices
from planner.search.priced_shapes import fits, priced_shapes, with_module_sets
from planner.search.rebalance import level_guess_s
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.trainers.load import load_runtime

TABLES = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())

MODELS = ("llama-3.1-8b", "gemma-3-27b", "deepseek-v2-lite", "deepseek-v3", "mixtral-8x7b", "gpt-oss-20b", "gpt3-175b")
TRAINERS = ("megatron", "torchtitan", "torch-eager", "torch-fsdp", "nanotron", "megatron-2021", "megatron-deepspeed")
SHAPES: tuple[dict[str, int], ...] = TABLES["shapes"]
FIELDS = TABLES["fields"]
JOBS: tuple[tuple[str, int, str, int, str, dict[str, Any]], ...] = TABLES["jobs"]


LAYOUTS: tuple[tuple[str, int, str, str, dict[str, Any]], ...] = TABLES["layouts"]


def layouts() -> dict[str, list[float]]:
    """The seconds and bytes that are said of given layouts, by job and layout."""
    numbers: dict[str, list[float]] = {}
    for model, num_gpus, trainer, dtype, sizes in LAYOUTS:
        hardware = load_hardware("mi355x" if trainer.startswith("primus") else "h100")
        cluster = ClusterSpec(hardware=hardware, num_gpus=num_gpus)
        training = TrainingSpec(seq_length=4096, global_batch_size=64, dtype=dtype)  # type: ignore[arg-type]
        best = evaluate(model, cluster, training, Parallelism(**sizes), runtime=trainer).best
        memories = (part.memory.model_dump(exclude={"frozen_weights_bytes"}) for part in best.stages)
        parts = [value for memory in memories for value in memory.values() if isinstance(value, int)]
        stages = [
            (s.num_layers, s.in_flight_microbatches, s.num_parameters, s.forward_s, s.backward_s) for s in best.stages
        ]
        step = [
            best.step.step_s, best.step.mfu, *(best.step.step_s_interval or ()),
            *best.step.breakdown.model_dump().values(),
        ]  # fmt: skip
        name = f"{model} {trainer} {dtype} {' '.join(f'{k}={v}' for k, v in sizes.items())}"
        numbers[name] = [*step, *parts, *(value for stage in stages for value in stage)]
    return numbers


def pricing(model: str, trainer: str, dtype: str, hardware: str, num_gpus: int, batch: int) -> Pricing:
    spec, runtime = load_model(model), load_runtime(trainer)
    cluster = ClusterSpec(hardware=load_hardware(hardware), num_gpus=num_gpus)
    training = TrainingSpec(seq_length=4096, global_batch_size=batch, dtype=dtype)  # type: ignore[arg-type]
    return pricing_of(spec, cluster, training, runtime, modules=selective_modules(spec, runtime))


def prices() -> dict[str, list[float]]:
    """Prices of each part of each layout, by model, trainer, dtype, shape and part."""
    numbers: dict[str, list[float]] = {}
    for first, model in enumerate(MODELS):
        for number, trainer in enumerate(TRAINERS):
            if (number - first) % len(TRAINERS) > 2 and trainer != "megatron":
                continue  # each model with three trainers and Megatron
            dtype, hardware = ("fp8", "h200") if number % 3 == 0 else ("bf16", "a100" if number % 3 == 1 else "h100")
            priced = pricing(model, trainer, dtype, hardware, 32, 128)
            for sizes in SHAPES:
                if sizes.get("ep", 1) > 1 and priced.model.moe is None:
                    continue
                name = f"{model} {trainer} {dtype} {' '.join(f'{k}={v}' for k, v in sizes.items())}"
                try:
                    table = priced.table(Shape.of(**{"seq_length": 4096} | sizes))
                except SpecError:
                    continue
                parts = {f"{kind}/{mode}": part for (kind, mode), part in table.layers.items()}
                parts |= {"embedding": table.embedding, "head": table.head, "beside": table.head_beside_embedding}
                parts |= {} if table.mtp is None else {"mtp": table.mtp}
                parts |= {f"mtp/{mode}": part for mode, part in table.mtp_recomputed.items()}
                for label, part in parts.items():
                    numbers[f"{name}: {label}"] = [float(getattr(part, field)) for field in FIELDS]
                numbers[f"{name}: all"] = [float(table.p2p_s), float(table.usable_bytes), float(table.tail_s)]
    return numbers


def bounds() -> dict[str, list[float]]:
    """Counts of shapes and nodes that could fit, and sums of their bounds, by job and way to recompute."""
    numbers: dict[str, list[float]] = {}
    for model, num_gpus, trainer, batch, dtype, pins in JOBS:
        priced = pricing(model, trainer, dtype, "h100" if dtype == "fp8" else "a100", num_gpus, batch)
        limits, runtime = SearchLimits(**pins), load_runtime(trainer)
        shapes, _ = enumerate_shapes(Case(priced.model, priced.cluster, priced.training, runtime, limits))
        table = with_module_sets(priced_shapes(priced, shapes, limits))
        name = f"{model} {trainer} {dtype}"
        can_fit = fits(replace(table, limits=SearchLimits()))
        numbers[name] = [float(len(can_fit)), float(can_fit.sum()), *_summed(coarse_bound_s(table)),
                         *_summed(coarse_bound_s(table, splits_backward=True))]  # fmt: skip
        choices = [*recompute_choices(priced.model, runtime, limits), *([ANY_SET] if table.module_sets else [])]
        blocks = [nodes for _, nodes in nodes_of(table)]
        for choice in choices if blocks else ():
            bound_s, guess_s = (
                np.concatenate([getattr(nodes, each)(choice) for nodes in blocks]) for each in ("bound_s", "guess_s")
            )
            numbers[f"{name} {choice.base}/{choice.whole}"] = [*_summed(bound_s), *_summed(guess_s)]
        uneven_s = [level_guess_s(nodes) for nodes in blocks]
        numbers |= {f"{name} uneven chunks": [*_summed(np.concatenate(uneven_s))]} if blocks else {}
    return numbers


def _summed(bound_s: np.ndarray[Any, np.dtype[np.float64]]) -> tuple[float, float]:
    """Number of finite bounds, and their sum."""
    finite = bound_s[np.isfinite(bound_s)]
    return float(len(finite)), float(finite.sum())
