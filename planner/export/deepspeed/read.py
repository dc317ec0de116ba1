"""A DeepSpeed configuration as part of a run: it says how to shard and batch, and neither model nor pipeline."""

from __future__ import annotations

from planner.export.common.config_file import ConfigFile
from planner.export.common.exported_model import exported_model
from planner.export.common.imported_run import ImportedRun
from planner.export.deepspeed.config import DEEPSPEED_RUNTIME, parse_json, read_config

_PIPELINE = "planned_pipeline.py"


def read_deepspeed(config: ConfigFile) -> ImportedRun:
    """The part of a run that `ds_config.json` holds. Raises SpecError where it is no JSON object."""
    found = read_config(parse_json(config.text))
    pipeline = config.beside(_PIPELINE) or ""
    layout = {"micro_batch_size": found.micro_batch_size or 1, **found.layout}
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
    elif found.micro_batch_size:
        imported.microbatches_per_rank = steps
    return imported
