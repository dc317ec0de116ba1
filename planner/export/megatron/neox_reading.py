"""GPT-NeoX's YAML as a run: Megatron-DeepSpeed's arguments under other keys, and DeepSpeed's configuration."""

from __future__ import annotations

import json
import re
from typing import Any

from planner.errors import SpecError
from planner.export.dialects import dialect
from planner.export.followed.shell_script import Script
from planner.export.imported_run import ConfigFile, ImportedRun, yaml_of
from planner.export.keyed_settings import Settings, is_off, is_on
from planner.export.megatron.deepspeed_options import as_megatron, read_zero
from planner.export.megatron.script_reading import run_of

_ROW = dialect("neox")
_READ = {
    *_ROW.renamed, *_ROW.unasked, "fp16", "bf16", "optimizer", "intermediate_size", "expansion_factor", "num_kv_heads",
    "attention_config", "global_num_gpus", "num_gpus", "num_nodes", "zero_stage", "use_qk_layernorm",
    "use_bias_in_norms", "rms_norm_epsilon", "data_types", "zero_allow_untested_optimizer", "checkpoint_num_layers",
    "gpt_j_tied", "train_impl",
}  # fmt: skip
_OTHER_LAYERS = re.compile(r"gmlp|amlp|rwkv|mamba")
_GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "bilinear": "identity", "glu": "sigmoid"}


def read_neox(config: ConfigFile) -> ImportedRun:
    """The run of one file, or of one script's configurations merged. Raises SpecError for models that are no GPT."""
    settings = _settings(config)
    layers = settings.get("attention_config") or []
    if (other := _OTHER_LAYERS.search(json.dumps(layers))) is not None:
        raise SpecError(f"attention_config: {other[0]}: no transformer's layers", "give the configuration of a GPT")
    given = {**_ROW.unasked, **settings}
    options = as_megatron(_options(given))
    script = Script(variables={"WORLD_SIZE": [str(given["global_num_gpus"])]} if given.get("global_num_gpus") else {})
    imported = run_of(options, script, "neox")
    run, layout = imported.run, imported.run["parallelism"]
    run["runtime"] = "megatron-deepspeed"
    imported.unknown, imported.ignored, imported.notes = {}, {}, []
    read_zero(options, {**settings, **({"bf16": {"enabled": True}} if _precision(given) == "bf16" else {})}, imported)
    imported.microbatches_per_rank = int(given["gradient_accumulation_steps"] or 1)
    imported.assumed = {key: str(value) for key, value in _ROW.left_out(settings).items()}
    imported.documented = _ROW.documented
    if run["model"] is not None:
        _add_to_model(run["model"], given)
    _list_unread(imported, settings)
    layout["zero_stage"] = min(layout["zero_stage"], 3)
    return imported


def _settings(config: ConfigFile) -> Settings:
    """Keys with underscores, whichever way they are written."""
    data = yaml_of(config.text, "give a configuration of GPT-NeoX")
    if not isinstance(data, dict):
        raise SpecError("the file holds no settings", "give a configuration of GPT-NeoX, such as configs/20B.yml")
    return {str(key).replace("-", "_"): value for key, value in data.items()}


def _precision(given: Settings) -> str:
    for dtype in ("fp16", "bf16"):
        section = given.get(dtype)
        if isinstance(section, dict) and section.get("enabled"):
            return dtype
    return {"bfloat16": "bf16", "fp32": "fp32"}.get(str(given["precision"]), "fp16")


def _options(given: Settings) -> dict[str, list[str]]:
    """The keys in the words of Megatron-DeepSpeed; a pipeline of 0 stages is none."""
    options = {
        option: [str(given[key])] for key, option in _ROW.renamed.items() if given.get(key) not in (None, "", 0, [], {})
    }
    heads, kv = given.get("num_attention_heads"), given.get("num_kv_heads")
    flags = {
        "--untie-embeddings-and-output-weights": is_on(given["no_weight_tying"]),
        "--checkpoint-activations": is_on(given["checkpoint_activations"]),
        "--sequence-parallel": is_on(given["sequence_parallel"]),
        "--disable-bias-linear": is_off(given["use_bias_in_attn_linear"]) and is_off(given["use_bias_in_mlp"]),
        "--swiglu": given["activation"] in _GATED,
        "--qk-layernorm": is_on(given.get("use_qk_layernorm")),
        "--bf16": _precision(given) == "bf16",
        "--fp16": _precision(given) == "fp16",
    }
    options |= {name: [] for name, is_set in flags.items() if is_set}
    if given.get("vocab_file") and given.get("tokenizer_type") != "GPT2BPETokenizer":
        options["--tokenizer-model"] = [str(given["vocab_file"])]
    options["--ffn-hidden-size"] = [str(_width(given))]
    options["--normalization"] = ["RMSNorm" if given["norm"] == "rmsnorm" else "LayerNorm"]
    options["--position-embedding-type"] = [
        {"rotary": "rope", "learned": "learned_absolute"}.get(str(given["pos_emb"]), str(given["pos_emb"]))
    ]
    if kv and kv != heads:
        options |= {"--group-query-attention": [], "--num-query-groups": [str(kv)]}
    if (given.get("moe_num_experts") or 1) > 1:
        options["--num-experts"] = [str(given["moe_num_experts"])]
    return options


def _width(given: Settings) -> int:
    """Width of the MLP; a gated one is two thirds as wide, and half of that is each of its two inputs."""
    hidden = int(given.get("hidden_size") or 0)
    width = given.get("intermediate_size") or int((given.get("expansion_factor") or 4) * hidden)
    multiple = int(given["mlp_multiple_of"] or 1)
    if given["activation"] in _GATED:
        width = int(width * 2 / 3) // 2
    return multiple * -(-int(width) // multiple)


def _add_to_model(model: dict[str, Any], given: Settings) -> None:
    if is_on(given["gpt_j_residual"]):
        model["parallel_residual"] = "one_norm" if is_on(given.get("gpt_j_tied")) else "two_norms"
    if given["activation"] in _GATED:
        model |= {"gated_mlp": True, "activation": _GATED[given["activation"]]}
    if is_off(given["use_bias_in_attn_linear"]) != is_off(given["use_bias_in_mlp"]):
        model["attention_bias"] = "none" if is_off(given["use_bias_in_attn_linear"]) else "all"


def _list_unread(imported: ImportedRun, settings: Settings) -> None:
    optimizer = settings.get("optimizer")
    kind = str(optimizer.get("type", "adam") if isinstance(optimizer, dict) else optimizer or "adam").lower()
    if not re.fullmatch(r"adam|adamw|fusedadam|cpu_adam", kind):
        imported.unknown["optimizer.type"] = kind
    if settings.get("train_impl", "normal") != "normal":
        imported.unknown["train_impl"] = f"{settings['train_impl']}, priced as learning the next token"
    if "sparse" in json.dumps(settings.get("attention_config") or []) or "local" in json.dumps(
        settings.get("attention_config") or []
    ):
        imported.unknown["attention_config"] = "sparse or local attention, priced as full"
    for key, value in settings.items():
        if key not in _READ:
            is_harmless = is_off(value) or value in ([], {}) or _ROW.is_harmless(key)
            (imported.ignored if is_harmless else imported.unknown)[key] = str(value)[:200]
