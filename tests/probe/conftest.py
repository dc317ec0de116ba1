"""Small runs for the probe: a model of a few layers, split evenly over the virtual stages of a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tiny import TINY

from planner.probe.run import ChunkSpec, ProbeRun
from planner.schedule.orders import Schedule, build_schedule
from planner.specs.model import ModelSpec


def tiny_run(order: Schedule | tuple[str, int, int, int], layers: int | None = None, **options: Any) -> ProbeRun:
    """A run of `order` (or of the schedule by name, pp, vpp and micro-batches), a layer a virtual stage by default."""
    order = build_schedule(*order) if isinstance(order, tuple) else order
    n = order.num_model_stages
    model = options.pop("model", {})
    layers = layers or n
    bounds = [layers * i // n for i in range(n + 1)]
    mtp = bool(model.get("num_nextn_predict_layers"))
    chunks = tuple(
        ChunkSpec(
            first_layer=bounds[i],
            last_layer=bounds[i + 1],
            embedding=i == 0,
            head=i == n - 1,
            mtp=mtp and i == n - 1,
            num_recomputed=options.get("num_recomputed", 0),
        )
        for i in range(n)
    )
    options.pop("num_recomputed", None)
    defaults: dict[str, Any] = {"seq_length": 8, "check": True, "warm_up_steps": 0, "num_steps": 2, "timeout_s": 60.0}
    spec = ModelSpec(num_hidden_layers=layers, **{**TINY, **model})
    return ProbeRun.of(order, model=spec, chunks=chunks, **{**defaults, **options})


@pytest.fixture(scope="session")
def make_run() -> Any:
    return tiny_run


@pytest.fixture
def no_group_is_left() -> Iterator[None]:
    """Of processes: a test that leaves one is ended with it."""
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        dist.destroy_process_group()
