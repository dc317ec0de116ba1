"""The YAML of a torchtune recipe as the run that it describes."""

from __future__ import annotations

import re
from typing import Any

from planner.errors import SpecError
from planner.export.imported_run import ConfigFile, ImportedRun, positive_number, yaml_of
from planner.export.named_models import Model, exported_gpus, exported_model, model_called, num_layers_of
from planner.specs.finetuning import MLP

MODULES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "output_proj"}
"""Attention's projections by peft's names, and by torchtune's (lora_attn_modules)."""
OPTIMIZERS = {
    "adamw": "torch.optim.AdamW",
    "adamw-8bit": "bitsandbytes.optim.AdamW8bit",
    "paged-adamw": "bitsandbytes.optim.PagedAdamW",
    "paged-adamw-8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "sgd": "torch.optim.SGD",
}
"""Values of the switch `optimizer`, and the classes that recipes name."""
_BUILDER = re.compile(r"torchtune\.models\.\w+\.(q?lora_|q?dora_)?(\w+)")


_BUILDERS = {
    "llama-2-7b": "llama2_7b", "llama-2-13b": "llama2_13b", "llama-2-70b": "llama2_70b",
    "llama-3.1-8b": "llama3_1_8b", "llama-3.1-70b": "llama3_1_70b", "llama-3.1-405b": "llama3_1_405b",
    "llama-3.2-1b": "llama3_2_1b", "qwen2.5-32b": "qwen2_5_32b_instruct", "qwen2.5-72b": "qwen2_5_72b_instruct",
    "qwen3-8b": "qwen3_8b_instruct", "qwen3-32b": "qwen3_32b",
}  # fmt: skip
"""Builders in torchtune/models, of the models that ship here."""


def model_of_builder(component: str) -> tuple[Model | None, str]:
    """The model that a builder makes, and what stands before its name: lora_, qlora_, dora_ or nothing."""
    found = _BUILDER.fullmatch(component)
    if found is None:
        return None, ""
    own = next((name for name, builder in _BUILDERS.items() if builder == found[2]), None)
    return own or model_called(found[2].replace("_", "-")), found[1] or ""


_HINT = "give a recipe's YAML, such as recipes/configs/llama3_1/8B_lora.yaml"
_READ = {
    "model", "tokenizer", "dataset", "batch_size", "gradient_accumulation_steps", "optimizer", "dtype", "compile",
    "enable_activation_checkpointing", "enable_activation_offloading", "fsdp_reshard_after_forward",
    "data_parallel_replicate_dim", "data_parallel_shard_dim", "optimizer_in_bwd", "fsdp_cpu_offload",
    "tensor_parallel_dim", "context_parallel_dim", "loss",
}  # fmt: skip
_IGNORED = {
    "output_dir", "checkpointer", "resume_from_checkpoint", "save_adapter_weights_only", "seed", "shuffle", "epochs",
    "max_steps_per_epoch", "lr_scheduler", "device", "metric_logger", "log_every_n_steps", "log_peak_memory_stats",
    "log_level", "profiler", "clip_grad_norm", "save_every_n_steps", "run_val_every_n_steps", "dataset_val",
    "batch_size_val", "low_cpu_ram", "custom_sharded_layers", "enable_async_checkpointing", "optimizer_ckpt_freq",
    "collate_fn", "cudnn_deterministic_mode", "package", "name",
}  # fmt: skip
_RANKS = re.compile(r"--nproc[-_]per[-_]node[ =](\d{1,4})")


def read_torchtune(config: ConfigFile) -> ImportedRun:
    """The run of a recipe. Raises SpecError for what is none, or trains something else than all weights or adapters."""
    data = yaml_of(config.text, _HINT)
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise SpecError("the file has no model with a _component_", _HINT)
    component = str(data["model"].get("_component_", ""))
    model, kind = model_of_builder(component)
    layout: dict[str, Any] = {"micro_batch_size": _number(data, "batch_size") or 1}
    imported = ImportedRun(
        "torchtune",
        {
            "model": exported_model(config.text) or model,
            "num_gpus": _num_gpus(config.text),
            "runtime": "torchtune",
            "seq_length": _number(_section(data, "tokenizer"), "max_seq_len"),
            "global_batch_size": None,
            "dtype": "bf16",
            "parallelism": layout,
            "features": {},
        },
        microbatches_per_rank=_number(data, "gradient_accumulation_steps") or 1,
    )
    if imported.run["model"] is None:
        imported.model_name = component
    if str(data.get("dtype", "bf16")) != "bf16":
        imported.notes.append(f"dtype: {data['dtype']}, so that it trains in fp32: priced as bf16")
    _read_layout(imported, data)
    _read_adapters(imported, data["model"], kind)
    _read_switches(imported, data)
    loss = str(_section(data, "loss").get("_component_", "CrossEntropy"))
    if not re.search(r"CrossEntropy|CEWith", loss):
        imported.unknown["loss._component_"] = f"{loss}, priced as cross-entropy of one model"
    imported.note_unread(data, _READ, _IGNORED)
    return imported


def _num_gpus(text: str) -> int | None:
    """The GPUs of our own export, or of the command in a recipe's comments."""
    ranks = _RANKS.search(text)
    return exported_gpus(text) or (int(ranks[1]) if ranks is not None else 1 if "single_device" in text else None)


def _read_layout(imported: ImportedRun, data: dict[str, Any]) -> None:
    """Sharding, which recipes for several ranks always have, and recomputation."""
    layout = imported.run["parallelism"]
    if imported.run["num_gpus"] == 1:
        layout["zero_stage"] = 0
    else:
        layout["zero_stage"] = 2 if data.get("fsdp_reshard_after_forward") is False else 3
        shards = _number(data, "data_parallel_shard_dim")
        if (_number(data, "data_parallel_replicate_dim") or 1) > 1 and shards:
            layout["fsdp"] = shards
    if data.get("enable_activation_checkpointing") is True:
        layout["recompute"] = "full"
    for name in ("tensor_parallel_dim", "context_parallel_dim"):
        if (_number(data, name) or 1) > 1:
            imported.unknown[name] = str(data[name])
    for name in ("fsdp_cpu_offload", "optimizer_in_bwd"):
        if data.get(name):
            imported.unknown[name] = str(data[name])
    dataset = _section(data, "dataset")
    length = imported.run["seq_length"]
    if dataset and not dataset.get("packed") and length is not None:
        imported.notes.append(f"sequences are not packed: priced as if each were {length:,} tokens long")


def _read_adapters(imported: ImportedRun, model: dict[str, Any], kind: str) -> None:
    """Adapters of LoRA and QLoRA, where the builder is one of theirs."""
    if not kind:
        return
    if "dora" in kind:
        imported.unknown["model._component_"] = "DoRA, priced as LoRA"
    ours = {theirs: name for name, theirs in MODULES.items()}
    named = model.get("lora_attn_modules")
    modules = [str(name) for name in named] if isinstance(named, list) else []
    targets = [ours[name] for name in modules if name in ours]
    targets += MLP if model.get("apply_lora_to_mlp") is True else ()
    targets += ["lm_head"] if model.get("apply_lora_to_output") is True else []
    if unknown := [name for name in modules if name not in ours]:
        imported.unknown["model.lora_attn_modules"] = ", ".join(unknown)
    if not targets:
        raise SpecError("model: lora_attn_modules: names no module", f"of {', '.join(MODULES.values())}")
    packed = kind.startswith("q") or model.get("quantize_base") is True
    dropout = model.get("lora_dropout", 0.0)
    imported.run["adapters"] = {
        "rank": _number(model, "lora_rank") or 8,
        "targets": targets,
        "base_bits": 4 if packed else 16,
        "dropout": dropout if isinstance(dropout, (int, float)) else 0.0,
    }


def _read_switches(imported: ImportedRun, data: dict[str, Any]) -> None:
    features = imported.run["features"]
    if data.get("compile") is True:
        features["compile"] = True
    component = str(_section(data, "optimizer").get("_component_", OPTIMIZERS["adamw"]))
    value = next((name for name, theirs in OPTIMIZERS.items() if theirs == component), None)
    if value is not None and value != "adamw":
        features["optimizer"] = value
    elif value is None:
        imported.unknown["optimizer._component_"] = component
    layers = num_layers_of(imported.run["model"])
    if data.get("enable_activation_offloading") is True and layers is not None:
        features["cpu_offloading_num_layers"] = layers


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    part = data.get(name)
    return part if isinstance(part, dict) else {}


def _number(data: dict[str, Any], name: str) -> int | None:
    """A positive whole number; None where there is none, or -1, which recipes infer."""
    return positive_number(data, name, unsaid=(None, -1))
