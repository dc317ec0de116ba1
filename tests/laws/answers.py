"""Canonical answers of a fixed set of jobs: the same bytes in every process, under every hash seed and Python."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from planner.answer import Plan
from planner.layout.evaluate import evaluate
from planner.search.search import plan
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec

EVALUATED: tuple[tuple[str, str, int, str, dict[str, Any]], ...] = (
    ("llama-3.1-8b", "h100", 16, "megatron", {"tp": 2, "pp": 4, "vpp": 2, "dp": 2}),
    ("deepseek-v2-lite", "h100", 16, "megatron", {"pp": 2, "ep": 8, "dp": 8, "recompute": "selective"}),
    ("gpt-oss-20b", "b200", 16, "megatron", {"pp": 2, "vpp": 3, "ep": 4, "dp": 8}),
    ("qwen3-next-80b-a3b", "h200", 32, "torchtitan", {"pp": 2, "dp": 16, "ep": 8}),
    ("nemotron-3-nano-30b-a3b", "h100", 16, "megatron", {"dp": 16, "ep": 8, "recompute": "full"}),
    ("gemma-3-27b", "a100", 32, "torchtitan", {"tp": 4, "pp": 2, "dp": 4, "schedule": "1f1b"}),
    ("llama-3.2-1b", "rtx-4090", 8, "torch-fsdp", {"dp": 8, "zero_stage": 3}),
    ("bloom-176b", "a100", 96, "megatron-deepspeed", {"tp": 4, "pp": 12, "dp": 2}),
)
"""Model, GPU, number of them, trainer, layout."""
SEARCHED: tuple[tuple[str, str, int, str, int], ...] = (
    ("llama-3.2-1b", "h100", 8, "megatron", 64),
    ("llama-3.1-8b", "a100", 8, "torchtitan", 16),
)
"""Model, GPU, number of them, trainer, batch."""
DIGITS = 10
"""Digits that a number must share; Python's own sums and numpy's differ in the last ones between versions."""
LAYOUT = ("parallelism", "stages", "step", "fits", "recipe", "oom_probability", "rank_order")
"""Fields of a layout that are held: what it is and what it costs, and no sentence about it."""


def canonical(value: Any) -> Any:
    """Plain data with each number rounded to so many digits."""
    if isinstance(value, dict):
        return {key: canonical(entry) for key, entry in sorted(value.items())}
    if isinstance(value, list | tuple):
        return [canonical(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def held(answer: Plan) -> dict[str, Any]:
    """The layouts of an answer, and what its search ruled out."""
    data = answer.to_json()
    layouts = [{name: layout[name] for name in LAYOUT} for layout in (data["best"], *data["alternatives"])]
    bound_s = None if answer.search is None else answer.search.lower_bound_s
    found: dict[str, Any] = canonical({"layouts": layouts, "rejections": data["rejections"], "bound_s": bound_s})
    return found


def answers() -> Iterator[dict[str, Any]]:
    """The answer to each job as canonical data."""
    for name, hardware, num_gpus, trainer, layout in EVALUATED:
        training = TrainingSpec(seq_length=4096, global_batch_size=192)
        cluster = ClusterSpec(hardware=hardware, num_gpus=num_gpus)
        yield held(evaluate(load_model(name), cluster, training, Parallelism(**layout), runtime=trainer))
    for name, hardware, num_gpus, trainer, batch in SEARCHED:
        limits = SearchLimits(top=2, time_limit_s=1e6)
        training = TrainingSpec(seq_length=2048, global_batch_size=batch)
        cluster = ClusterSpec(hardware=hardware, num_gpus=num_gpus)
        yield held(plan(load_model(name), cluster, training, limits=limits, runtime=trainer))


def as_text(found: list[dict[str, Any]]) -> str:
    return json.dumps(found, indent=1, sort_keys=True) + "\n"


def digests(found: list[dict[str, Any]]) -> list[str]:
    """A short hash of each answer, in the order of the jobs."""
    return [hashlib.sha256(json.dumps(one, sort_keys=True).encode()).hexdigest()[:16] for one in found]
