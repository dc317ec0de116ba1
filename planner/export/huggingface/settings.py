"""Settings of the trainers around Hugging Face's, Trainer, Accelerate, axolotl, LLaMA-Factory, as a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.errors import SpecError
from planner.export.common.config_file import ConfigFile
from planner.export.common.exported_model import model_called
from planner.export.common.imported_run import ImportedRun
from planner.export.deepspeed.config import DEEPSPEED_RUNTIME, DeepSpeedConfig, parse_json, read_config

Settings = Mapping[str, Any]

FSDP_RUNTIME, HF_RUNTIME = "torch-fsdp", "hf"
"""FSDP around fp32 weights, which mixed precision makes of them; and transformers' own weights as they are loaded."""
_TRUE = (True, "true", "True", "yes", "1", 1, "y")
_SHARDING = {
    "FULL_SHARD": 3, "1": 3, "SHARD_GRAD_OP": 2, "2": 2, "NO_SHARD": 0, "3": 0, "HYBRID_SHARD": 3, "4": 3,
    "HYBRID_SHARD_ZERO2": 2, "_HYBRID_SHARD_ZERO2": 2, "5": 2,
}  # fmt: skip
"""FSDP's strategies, by name and by Accelerate's number, and the ZeRO stage that each is."""


def is_on(value: Any) -> bool:
    """A setting is true in any of the ways that YAML and command lines write it."""
    return value in _TRUE


def number(settings: Settings, *names: str) -> int | None:
    """The first of the settings that is given, as a whole number. SpecError where it is none."""
    for name in names:
        value = settings.get(name)
        if value in (None, "", "auto", "null"):
            continue
        try:
            return int(float(value))
        except (TypeError, ValueError, OverflowError):
            raise SpecError(f"{name}: {value!r:.60} is no number", "write a number") from None
    return None


def dtype_of(settings: Settings) -> str | None:
    """bf16 or fp16 as flags or as `mixed_precision` say; None for fp32."""
    mixed = str(settings.get("mixed_precision") or "").lower()
    for dtype in ("bf16", "fp16", "fp8"):
        if is_on(settings.get(dtype)) or (settings.get(dtype) == "auto" and dtype == "bf16") or mixed == dtype:
            return dtype
    named = str(settings.get("dtype") or settings.get("torch_dtype") or "").lower()
    return {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}.get(named)


def fsdp_layout(settings: Settings, options: Settings) -> dict[str, Any]:
    """The layout that FSDP's options mean; `settings` are those of the trainer around it."""
    words = str(settings.get("fsdp") or "").lower().split()
    strategy = str(_option(options, "sharding_strategy", "full_shard")).upper()
    if words:
        strategy = next((word.upper() for word in words if word.upper() in _SHARDING), strategy)
    stage = _SHARDING.get(strategy, 3)
    reshards = _option(options, "reshard_after_forward", None)
    if isinstance(reshards, str) and reshards.upper() in _SHARDING:
        stage, strategy = _SHARDING[reshards.upper()], reshards.upper()
    elif reshards is not None and not is_on(reshards):
        stage = 2
    layout: dict[str, Any] = {"zero_stage": stage}
    if "HYBRID" in strategy or strategy in ("4", "5"):
        layout["fsdp"] = 8
    if is_on(_option(options, "activation_checkpointing", False)):
        layout["recompute"] = "full"
    return layout


def _option(options: Settings, name: str, default: Any) -> Any:
    """An option of FSDP, with or without its prefix."""
    return options.get(f"fsdp_{name}", options.get(name, default))


def deepspeed_beside(config: ConfigFile, name: Any) -> DeepSpeedConfig | None:
    """The DeepSpeed configuration that a setting names, or holds; None where it cannot be read."""
    if isinstance(name, Mapping):
        return read_config(dict(name))
    text = config.beside(str(name)) if name else None
    return None if text is None else read_config(parse_json(text))


def apply_deepspeed(imported: ImportedRun, found: DeepSpeedConfig) -> None:
    """Put what DeepSpeed's configuration says into a run; what it leaves to `auto` stays as the trainer says it."""
    run = imported.run
    run["runtime"] = DEEPSPEED_RUNTIME
    layout = run["parallelism"]
    layout |= {
        name: value for name, value in found.layout.items() if name != "recompute" or layout.get("recompute") is None
    }
    run["features"] |= found.features
    run["dtype"] = found.dtype or run["dtype"]
    run["global_batch_size"] = run["global_batch_size"] or found.train_batch_size
    if found.micro_batch_size and "micro_batch_size" not in layout:
        layout["micro_batch_size"] = found.micro_batch_size
    if found.accumulation_steps and imported.microbatches_per_rank is None:
        imported.microbatches_per_rank = found.accumulation_steps
    imported.ignored |= found.ignored
    imported.unknown |= found.unknown


def set_model(imported: ImportedRun, name: Any) -> None:
    """The model that a setting names; a note where the planner does not know it."""
    if not isinstance(name, str) or not name:
        return
    imported.run["model"] = model_called(name)
    if imported.run["model"] is None:
        imported.notes.append(f"{name[:80]} is no model that the planner knows: add --model")


def new_run(source: str) -> ImportedRun:
    """A run of eager torch without sharding, to be filled in."""
    return ImportedRun(
        source,
        {
            "model": None,
            "num_gpus": None,
            "runtime": FSDP_RUNTIME,
            "seq_length": None,
            "global_batch_size": None,
            "dtype": "bf16",
            "parallelism": {"zero_stage": 0},
            "features": {},
        },
    )
