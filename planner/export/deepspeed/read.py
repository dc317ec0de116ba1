"""A DeepSpeed configuration as part of a run: it says how to shard and batch, and neither model nor pipeline."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from planner.export.common.config_file import ConfigFile
from planner.export.common.exported_model import exported_model
from planner.export.common.imported_run import ImportedRun
from planner.export.deepspeed.config import DEEPSPEED_RUNTIME, parse_json, read_config

_PIPELINE = "planned_pipeline.py"


def read_deepspeed(config: ConfigFile) -> ImportedRun:
    """The part of a run that `ds_config.json` holds. Raises SpecError where it is no JSON object."""
    found = read_config(parse_json(config.text))
    pipeline = config.beside(_PIPELINE) or ""
    layout = {"micro_batch_size": found.micro_batch_size or 1, **found.layout, **_pipeline(pipeline)}
    imported = ImportedRun(
        "deepspeed",
        {
            "model": exported_model(pipeline),
            "num_gpus": None,
            "runtime": DEEPSPEED_RUNTIME,
            "seq_length": None,
            "global_batch_size": found.train_batch_size,
            "dtype": found.dtype or "bf16",
            "parallelism": layout,
            "features": found.features,
        },
        ignored=found.ignored,
        unknown=found.unknown,
    )
    imported.notes.append("a DeepSpeed configuration names no model, sequence length or pipeline: add them as options")
    if found.dtype is None:
        imported.notes.append("neither bf16 nor fp16 is enabled, so that it trains in fp32: priced as bf16")
    steps = found.accumulation_steps or 1
    if found.train_batch_size and found.micro_batch_size:
        dp = found.train_batch_size // (found.micro_batch_size * steps)
        imported.notes.append(
            f"{found.train_batch_size} sequences, micro-batches of {found.micro_batch_size}, {steps} a step: dp {dp}"
        )
        layout["dp"] = max(1, dp)
        imported.run["num_gpus"] = layout["dp"] * layout["tp"] * layout.get("pp", 1) * layout.get("cp", 1)
    elif found.micro_batch_size:
        imported.microbatches_per_rank = steps
    return imported


def _pipeline(source: str) -> dict[str, Any]:
    """The grid and the stages in the module that plan export writes beside the configuration; nothing without one."""
    grid = re.search(r"num_pp=(\d{1,4}), num_mp=(\d{1,4}), num_dp=\d+", source)
    bounds = re.search(r"^BOUNDARIES = \[([\d, ]+)\]$", source, re.MULTILINE)
    if grid is None or bounds is None:
        return {}
    items = [int(item) for item in bounds[1].split(",")]
    counts = [last - first for first, last in pairwise(items)]
    if len(counts) != int(grid[1]) or len(counts) < 2:
        return {}
    # the embedding is the first item, the final norm and the head are the last two
    counts[0] -= 1
    counts[-1] -= 2
    return {"pp": int(grid[1]), "tp": int(grid[2]), "layers_per_stage": counts, "schedule": "1f1b"}
