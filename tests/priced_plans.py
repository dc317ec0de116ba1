"""Plans of one line: a layout of a job, priced as `plan evaluate` prices it."""

from typing import Any

from planner.answer import Plan
from planner.layout.evaluate import evaluate
from planner.specs.cluster import ClusterSpec
from planner.specs.training import Parallelism, TrainingSpec


def priced_plan(
    model: Any = "8b", num_gpus: int = 8, seq_length: int = 4096, batch: int = 32, hardware: str = "h100",
    runtime: Any = "megatron", training: dict[str, Any] | None = None, **layout: Any,
) -> Plan:  # fmt: skip
    asked = TrainingSpec(seq_length=seq_length, global_batch_size=batch, **(training or {}))
    cluster = ClusterSpec(hardware=hardware, num_gpus=num_gpus)
    return evaluate(model, cluster, asked, Parallelism(**layout), runtime=runtime)
