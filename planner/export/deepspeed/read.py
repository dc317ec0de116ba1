"""A DeepSpeed configuration as part of a run: it says how to shard and batch, and neither model nor pipeline."""

from __future__ import annotations

import json
from typing import Any

from planner.errors import SpecError
from planner.export.common.config_file import ConfigFile
from planner.export.common.imported_run import ImportedRun

_READ = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16", "fp16", "bfloat16",
    "zero_optimization", "tensor_parallel", "activation_checkpointing", "data_types", "sequence_parallel_size",
}  # fmt: skip
_IGNORED = {
    "optimizer", "scheduler", "gradient_clipping", "steps_per_print", "wall_clock_breakdown", "prescale_gradients",
    "gradient_predivide_factor", "dump_state", "checkpoint", "tensorboard", "wandb", "csv_monitor", "comms_logger",
    "flops_profiler", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "fp32_allreduce",
    "communication_data_type", "seed", "memory_breakdown", "load_universal_checkpoint", "data_efficiency",
    "monitor_config",
}  # fmt: skip


def read_deepspeed(config_file: ConfigFile) -> ImportedRun:
    """The part of a run that `ds_config.json` holds. Raises SpecError where it is no JSON object."""
    text = config_file.text
    try:
        config = json.loads(text)
    except ValueError as error:
        raise SpecError(f"not JSON: {error}", "give the file that is passed as --deepspeed_config") from None
    if not isinstance(config, dict):
        raise SpecError("the file holds no JSON object", "give the file that is passed as --deepspeed_config")
    zero = config.get("zero_optimization") or {}
    micro_batch_size = _number(config, "train_micro_batch_size_per_gpu")
    num_microbatches = _number(config, "gradient_accumulation_steps") or 1
    global_batch_size = _number(config, "train_batch_size")
    imported = ImportedRun(
        "deepspeed",
        {
            "model": None,
            "num_gpus": None,
            "runtime": "deepspeed",
            "seq_length": None,
            "global_batch_size": global_batch_size,
            "dtype": "fp16" if (config.get("fp16") or {}).get("enabled") is True else "bf16",
            "parallelism": _layout(config, zero, micro_batch_size),
            "features": {
                "overlap_grad_reduce": bool(zero.get("overlap_comm", True)),
                "optimizer_offload": _offloaded(zero.get("offload_optimizer") or {}),
            },
        },
    )
    imported.notes.append("a DeepSpeed configuration names no model, sequence length or pipeline: add them as options")
    if global_batch_size and micro_batch_size:
        dp = global_batch_size // (micro_batch_size * num_microbatches)
        imported.notes.append(
            f"{global_batch_size} sequences, micro-batches of {micro_batch_size}, {num_microbatches} a step: dp {dp}"
        )
        imported.run["parallelism"]["dp"] = max(1, dp)
    _sort_unread(config, zero, imported)
    return imported


def _offloaded(offload: dict[str, Any]) -> float:
    """The share of the optimizer's states that stays on the host; all of them unless a ratio is given."""
    ratio = offload.get("ratio", 1.0)
    if not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        raise SpecError(f"offload_optimizer: ratio: {ratio!r} is no share", "write a number between 0 and 1")
    return float(ratio) if offload.get("device") == "cpu" else 0.0


def _sort_unread(config: dict[str, Any], zero: dict[str, Any], imported: ImportedRun) -> None:
    """Note every key that is not read as ignored where it is known to be harmless, else as unknown."""
    for key, read in (("offload_optimizer", ("none", "cpu")), ("offload_param", ("none",))):
        if (zero.get(key) or {}).get("device", "none") not in read:
            imported.unknown[f"zero_optimization.{key}"] = json.dumps(zero[key])
    for key, value in config.items():
        if key not in _READ:
            (imported.ignored if key in _IGNORED else imported.unknown)[key] = json.dumps(value)


def _number(config: dict[str, Any], key: str) -> int | None:
    """A whole number; None where it is missing or "auto"."""
    value = config.get(key)
    if value is None or value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{key}: {value!r} is no positive number", "write a number or auto")
    return value


def _layout(config: dict[str, Any], zero: dict[str, Any], micro_batch_size: int | None) -> dict[str, Any]:
    """Sharding, micro-batch, tensor parallelism and recompute."""
    layout: dict[str, Any] = {
        "zero_stage": zero.get("stage", 0),
        "micro_batch_size": micro_batch_size or 1,
        "sequence_parallel": False,
    }
    tensor = config.get("tensor_parallel") or {}
    layout["tp"] = tensor.get("autotp_size") or (tensor.get("tp") or {}).get("tp_size") or 1
    if zero.get("stage") == 3 and zero.get("zero_hpz_partition_size", 1) > 1:
        layout["fsdp"] = zero["zero_hpz_partition_size"]
    if config.get("activation_checkpointing"):
        layout["recompute"] = "full"
    return layout
