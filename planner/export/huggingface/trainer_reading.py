"""Arguments of Hugging Face's Trainer and of trainers built on it, as a run: command lines, YAML, JSON or Python."""

from __future__ import annotations

import ast
import re
from typing import Any, TypeGuard

from planner.errors import SpecError
from planner.export.followed.shell_script import read_script
from planner.export.huggingface.deepspeed_files import DEEPSPEED_RUNTIME
from planner.export.huggingface.trl_files import ACCELERATE_FILE
from planner.export.huggingface.tuning_settings import (
    IN_FP32,
    apply_accelerate,
    apply_deepspeed,
    beside_adapters,
    deepspeed_beside,
    dtype_of,
    fsdp_layout,
    is_on,
    new_run,
    number,
    read_fine_tuning,
    read_yaml,
    set_model,
)
from planner.export.imported_run import ConfigFile, ImportedRun, json_of
from planner.export.megatron.option_rows import options_of
from planner.export.megatron.script_reading import num_gpus
from planner.export.named_models import exported_gpus, exported_model
from planner.specs.reading import literal, parse_python

_SEQUENCE = (
    "max_seq_length", "max_seq_len", "block_size", "cutoff_len", "sequence_len", "model_max_length", "max_length",
    "max_source_length", "seq_length", "context_length",
)  # fmt: skip
_BATCH = (
    "per_device_train_batch_size",
    "per_gpu_train_batch_size",
    "micro_batch_size",
    "train_micro_batch_size_per_gpu",
)
_MODEL = (
    "model_name_or_path",
    "base_model",
    "model_id",
    "model_name",
    "actor_model_name_or_path",
    "pretrained_model_name_or_path",
    "base_model_name_or_path",
)
_ADAPTERS = (
    "use_peft", "load_in_4bit", "load_in_8bit", "use_lora", "adapter", "lora_r", "lora_rank", "lora_dim", "lora_alpha",
    "lora_dropout", "lora_target_modules", "lora_target", "lora_target_linear", "finetuning_type", "use_qlora", "peft",
    "q_lora", "quantization_bit", "peft_type", "r", "target_modules", "target_parameters", "lora_bias", "task_type",
    "lora_task_type", "bias",
)  # fmt: skip
"""Settings that say that adapters are trained, and which."""
_NARROWER = ("only_optimize_lora", "freeze_layers", "unfrozen_parameters", "freeze_trainable_layers", "peft_type")
"""Settings that train less than the model in ways that are not priced."""
_FULL = (None, "", "full", 0, "0", False, "false", "False", "none", "LORA")
_OTHERS = ("neftune_noise_alpha", "unsloth", "use_unsloth", "group_by_length")
_PACKING = ("packing", "sample_packing")
_COMPILING = ("torch_compile",)
_CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
_CALLS = re.compile(r"(TrainingArguments|SFTConfig|DPOConfig|CPOConfig|GRPOConfig|RewardConfig|TrainerConfig)$")
_READ = {
    *_SEQUENCE, *_BATCH, *_MODEL, *_NARROWER, *_OTHERS, *_ADAPTERS, *_PACKING, *_COMPILING, *_CHECKPOINTING,
    "gradient_accumulation_steps", "bf16", "fp16", "use_liger_kernel", "liger_kernel", "enable_liger_kernel",
    "activation_offloading", "model_init_kwargs", "precompute_ref_log_probs", "rl", "stage",
    "tf32", "fsdp", "fsdp_config", "deepspeed", "zero_stage", "optim", "config_file", "num_processes", "num_machines",
    "attn_implementation", "flash_attn", "flash_attention", "use_flash_attention", "use_flash_attn", "dtype",
    "torch_dtype",
    "mixed_precision", "offload", "nproc_per_node", "nnodes", "num_gpus", "num_nodes",
}  # fmt: skip


def read_trainer(config: ConfigFile) -> ImportedRun:
    """The run that the arguments describe. Raises SpecError where there are none."""
    settings, launch = _settings(config)
    settings = {**_model_options(settings), **settings, **beside_adapters(settings, config)}
    if not any(name in settings for name in (*_BATCH, "zero_stage", "deepspeed", *_MODEL, "peft_type")):
        raise SpecError("the text gives no arguments of a Hugging Face trainer", "give the script that launches it")
    imported = new_run("huggingface")
    run, layout = imported.run, imported.run["parallelism"]
    if (micro_batch_size := number(settings, *_BATCH)) is not None:
        layout["micro_batch_size"] = micro_batch_size
    imported.microbatches_per_rank = number(settings, "gradient_accumulation_steps") or (
        1 if micro_batch_size else None
    )
    run["seq_length"] = number(settings, *_SEQUENCE)
    if any(is_on(settings.get(name)) for name in _CHECKPOINTING):
        layout["recompute"] = "full"
    run["num_gpus"] = launch or exported_gpus(config.text)
    accelerate = config.beside(str(settings.get("config_file") or ACCELERATE_FILE))
    if accelerate is not None:
        apply_accelerate(imported, read_yaml(accelerate), config)
    dtype = dtype_of(settings)
    run["dtype"] = dtype or run["dtype"]
    if dtype is not None and IN_FP32 in imported.notes:
        imported.notes.remove(IN_FP32)
    if dtype is None and accelerate is None:
        imported.notes.append("neither bf16 nor fp16 is asked for: priced as bf16")
    _read_sharding(imported, settings, config)
    set_model(imported, next((settings[name] for name in _MODEL if settings.get(name)), None))
    run["model"] = run["model"] or exported_model(config.text)
    read_fine_tuning(imported, settings)
    _list_unread(imported, settings)
    imported.note_unread(settings, _READ, settings)
    layout.setdefault("micro_batch_size", 8 if any(name in settings for name in ("do_train", "output_dir")) else 1)
    return imported


def _read_sharding(imported: ImportedRun, settings: dict[str, Any], config: ConfigFile) -> None:
    """DeepSpeed's configuration, `zero_stage`, or FSDP."""
    name, layout = settings.get("deepspeed"), imported.run["parallelism"]
    if number(settings, "zero_stage") is not None:
        imported.run["runtime"] = DEEPSPEED_RUNTIME
        layout["zero_stage"] = number(settings, "zero_stage")
        imported.run["features"]["optimizer_offload"] = float(is_on(settings.get("offload")))
    elif name not in (None, "", False) and not is_on(name):
        found = deepspeed_beside(config, name)
        imported.run["runtime"] = DEEPSPEED_RUNTIME
        if found is not None:
            apply_deepspeed(imported, found)
        elif (stage := re.search(r"(?:zero|stage|z)[-_]?(?:stage)?[-_]?([0-3])", str(name), re.IGNORECASE)) is not None:
            layout["zero_stage"] = int(stage[1])
            imported.notes.append(f"{name} is not beside the file: ZeRO {stage[1]} by its name")
        else:
            imported.notes.append(
                f"{name} is not beside the file: ZeRO 0 is assumed; import it with --model for its own"
            )
    elif settings.get("fsdp") or settings.get("fsdp_config") or settings.get("fsdp_version"):
        options = settings.get("fsdp_config")
        if isinstance(options, str):
            options = json_of(config.beside(options) or "{}", f"mend {options}") if options.endswith(".json") else {}
        words = settings.get("fsdp")
        words = " ".join(map(str, words)) if isinstance(words, list) else words
        layout |= fsdp_layout({"fsdp": words}, options if isinstance(options, dict) else {})
        if "offload" in str(words):
            imported.unknown["fsdp"] = str(words)


def _list_unread(imported: ImportedRun, settings: dict[str, Any]) -> None:
    """List what trains less than the model, or otherwise, in ways that the planner has no price for."""
    for name in (*_NARROWER, *_OTHERS):
        if settings.get(name) not in _FULL:
            imported.unknown[name] = str(settings[name])
    packs = any(is_on(settings.get(name)) for name in _PACKING) or "block_size" in settings
    packs |= "objective" in imported.run
    if not packs and imported.run["seq_length"] is not None:
        imported.notes.append(
            f"sequences are not packed: priced as if each were {imported.run['seq_length']:,} tokens long"
        )


def _model_options(settings: dict[str, Any]) -> dict[str, Any]:
    """Options of the model that arguments of TRL hold inside others."""
    inner = settings.get("model_init_kwargs")
    return {name: inner[name] for name in ("dtype", "attn_implementation") if name in inner} if _is_dict(inner) else {}


def _is_dict(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _settings(config: ConfigFile) -> tuple[dict[str, Any], int | None]:
    """Settings by name, and the number of GPUs of the launch."""
    text = config.text
    if text.lstrip().startswith("{"):
        data = json_of(text, "give the file of arguments")
        return (data if isinstance(data, dict) else {}), None
    if re.search(r"^\s*(import|from) \w", text, re.MULTILINE) and not text.startswith("#!/bin"):
        return _of_python(text), None
    if re.search(
        r"^(per_device_train_batch_size|base_model|model_name_or_path|gradient_accumulation_steps|micro_batch_size|use_peft"
        r"|lora_rank|lora_r|finetuning_type):",
        text,
        re.MULTILINE,
    ):
        return read_yaml(text), None
    script = read_script(text, config.beside)
    options = options_of(script.words)
    settings: dict[str, Any] = {}
    for name, words in options.items():
        key = name.lstrip("-").replace("-", "_")
        values = [word for word in words if not word.endswith(".py")]
        settings[key] = True if not values else values[0] if len(values) == 1 or key != "fsdp" else " ".join(values)
    settings |= {name: value for name, value in _assigned(script.words).items() if name not in settings}
    return settings, num_gpus({name.replace("_", "-"): words for name, words in options.items()}, script) or number(
        settings, "num_processes"
    )


def _assigned(words: list[str]) -> dict[str, str]:
    """`key=value` overrides of a command line."""
    return dict(word.split("=", 1) for word in words if re.match(r"[a-z_]\w*=", word))


def _of_python(text: str) -> dict[str, Any]:
    """Keywords of the calls that make arguments of a trainer, and the model that is loaded."""
    tree = parse_python(text, "", "give the script that makes TrainingArguments")
    names = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    settings: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if _CALLS.search(name):
            settings |= {k.arg: _literal(k.value, names) for k in node.keywords if k.arg}
        elif name.endswith("from_pretrained") and "Model" in name and node.args:
            settings.setdefault("model_name_or_path", _literal(node.args[0], names))
    return {name: value for name, value in settings.items() if value is not ...}


def _literal(node: ast.expr, names: dict[str, ast.expr]) -> Any:
    """A literal, or the one that a name is assigned; … for anything else."""
    for _ in range(5):
        if isinstance(node, ast.Name) and node.id in names:
            node = names[node.id]
    try:
        return literal(node)
    except ValueError:
        return ...
