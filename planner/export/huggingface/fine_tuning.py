"""Settings of fine-tuning as a run: adapters, packed weights, the optimizer, kernels, and the trainer that has them."""

from __future__ import annotations

import re
from typing import Any

from planner.export.common.config_file import ConfigFile
from planner.export.common.exported_model import num_layers_of
from planner.export.common.imported_run import ImportedRun
from planner.export.common.markup import json_of
from planner.export.deepspeed.config import DEEPSPEED_RUNTIME
from planner.export.huggingface.adapters import ADAPTER_FILE, QUANTIZATION_FILE, bits_of, read_adapters
from planner.export.huggingface.settings import FSDP_RUNTIME, HF_RUNTIME, Settings, is_on
from planner.export.huggingface.training_arguments import OPTIMIZERS
from planner.trainers.load import load_runtime, switches_of
from planner.trainers.switches import SWITCHES

_ADAMS = re.compile(r"adamw?(_torch|_hf|_torch_fused|_apex_fused|_torch_xla)?$")
_OPTIMIZERS = {name: value for value, name in OPTIMIZERS.items()} | {
    "adamw_bnb_8bit": "adamw-8bit", "paged_adamw": "paged-adamw", "adamw_torch_8bit": "adamw-8bit",
}  # fmt: skip
_BF16 = ("bf16", "bfloat16")
_FP32 = ("float32", "fp32")
_WORDS = ("lora", "qlora")


def beside_adapters(settings: Settings, config: ConfigFile) -> dict[str, Any]:
    """Fields of peft's and bitsandbytes' files beside training arguments; none where the arguments name adapters."""
    if says_adapters(settings) or "peft_type" in settings:
        return {}
    found: dict[str, Any] = {}
    for name in (ADAPTER_FILE, QUANTIZATION_FILE):
        data = json_of(config.beside(name) or "{}", f"mend {name}")
        found |= data if isinstance(data, dict) else {}
    return found if "peft_type" in found else {}


def says_adapters(settings: Settings) -> bool:
    """The settings of a trainer train adapters, by any of their words."""
    named = str(settings.get("adapter") or settings.get("finetuning_type") or "").lower()
    flags = ("use_peft", "use_lora", "use_qlora", "peft", "q_lora")
    given = any(settings.get(name) not in (None, "", 0, "0") for name in ("lora_r", "lora_rank", "lora_dim"))
    is_off = named == "full" or any(name in settings and not is_on(settings[name]) for name in flags[:2])
    return named in _WORDS or any(is_on(settings.get(name)) for name in flags) or (given and not is_off)


def read_fine_tuning(imported: ImportedRun, settings: dict[str, Any]) -> None:
    """Put adapters, the optimizer and kernels into a run, and choose the trainer that keeps weights as it does."""
    run = imported.run
    if says_adapters(settings) or str(settings.get("peft_type")).upper() == "LORA":
        named = str(settings.get("adapter") or "").lower()
        bits = 4 if named == "qlora" or is_on(settings.get("use_qlora")) or is_on(settings.get("q_lora")) else None
        run["adapters"], unknown = read_adapters(settings, bits)
        imported.unknown |= unknown
    elif bits_of(settings) < 16:
        imported.unknown["quantization"] = f"weights of {bits_of(settings)} bits that are trained whole"
    if str(settings.get("finetuning_type")).lower() not in ("none", "full", *_WORDS):
        imported.unknown["finetuning_type"] = str(settings["finetuning_type"])
    _read_objective(imported, settings)
    _read_sharding(imported, settings)
    _read_optimizer(imported, settings)
    _read_kernels(imported, settings)


def _read_objective(imported: ImportedRun, settings: Settings) -> None:
    """Pairs of answers, which DPO counts its batch in; other objectives than these are not understood."""
    stage = str(settings.get("rl") or settings.get("stage") or "").lower()
    if "precompute_ref_log_probs" not in settings and stage != "dpo":
        if stage in ("kto", "orpo", "ppo", "rm", "grpo", "simpo", "ipo"):
            imported.unknown["stage"] = f"{stage}, priced as learning the next token"
        return
    reference = "adapters" if imported.run.get("adapters") else "model"
    is_before = is_on(settings.get("precompute_ref_log_probs"))
    imported.run["objective"] = {"name": "dpo", "reference": "precomputed" if is_before else reference}
    layout = imported.run["parallelism"]
    layout["micro_batch_size"] = 2 * layout.get("micro_batch_size", 1)


def _read_sharding(imported: ImportedRun, settings: Settings) -> None:
    """The one who shards, where adapters are trained or the model is loaded in bf16; others keep their own trainer."""
    run = imported.run
    named, sharded = _named_dtype(settings), run["parallelism"].get("zero_stage", 0)
    # FSDP makes fp32 masters of any weights, and DeepSpeed of bf16 ones
    is_tuned = run.get("adapters") or named in _BF16 or (named in _FP32 and sharded >= 2)
    if not is_tuned or run["runtime"] not in (FSDP_RUNTIME, DEEPSPEED_RUNTIME):
        return
    if run["runtime"] == DEEPSPEED_RUNTIME:
        share = run["features"].get("optimizer_offload")
        run["features"] = {"sharding": "deepspeed", **({"optimizer_offload": share} if share else {})}
    else:
        run["features"]["sharding"] = "fsdp" if sharded >= 2 else "ddp"
    run["runtime"] = HF_RUNTIME


def _named_dtype(settings: Settings) -> str:
    """The dtype in which the model is loaded."""
    return str(settings.get("dtype") or settings.get("torch_dtype") or "").lower().removeprefix("torch.")


def _read_optimizer(imported: ImportedRun, settings: Settings) -> None:
    given = str(settings.get("optim") or settings.get("optimizer") or "adamw_torch")
    value = _OPTIMIZERS.get(given)
    if _ADAMS.fullmatch(given):
        return
    if value in switches_of(load_runtime(imported.run["runtime"])).get("optimizer", ()):
        imported.run["features"]["optimizer"] = value
    else:
        imported.unknown["optim"] = given


def _read_kernels(imported: ImportedRun, settings: Settings) -> None:
    """Attention, compiled and fused kernels, and activations on the host."""
    features = imported.run["features"]
    attention = str(settings.get("attn_implementation") or "").lower()
    if attention == "eager":
        features["flash_attention"] = False
    elif is_on(settings.get("flash_attention")) or "fa2" in str(settings.get("flash_attn")) or "2" in attention:
        features["attention_kernel"] = "flash"
    elif "flash" in attention:
        features["attention_kernel"] = "fastest"
    if is_on(settings.get("torch_compile")):
        features["compile"] = True
    if any(is_on(settings.get(name)) for name in ("use_liger_kernel", "liger_kernel", "enable_liger_kernel")):
        if "liger" in SWITCHES:
            features["liger"] = True
        else:
            imported.unknown["use_liger_kernel"] = "true"
    if is_on(settings.get("activation_offloading")):
        layers = num_layers_of(imported.run["model"])
        if layers is None:
            imported.unknown["activation_offloading"] = "true"
        else:
            features["cpu_offloading_num_layers"] = layers
