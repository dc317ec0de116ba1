"""DeepSpeed's JSON becomes the part of a run that it holds."""

from __future__ import annotations

import json

import pytest
from samples import layout_of

from planner.errors import SpecError
from planner.export.import_run import read_configuration


def test_deepspeed() -> None:
    config = {
        "train_batch_size": 512,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "zero_hpz_partition_size": 8},
        "optimizer": {"type": "AdamW"},
        "curriculum_learning": {"enabled": True},
    }
    imported = read_configuration(json.dumps(config))
    assert imported.source == "deepspeed"
    assert layout_of(imported)["dp"] == 64
    assert layout_of(imported)["fsdp"] == 8
    assert imported.run["dtype"] == "fp16"
    assert set(imported.unknown) == {"zero_optimization.offload_param", "curriculum_learning"}
    with pytest.raises(SpecError, match="model is not in the configuration"):
        imported.complete()
