"""A torchtitan configuration as a run: a Python recipe (read, never run), command-line overrides, or the old TOML."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from planner.errors import SpecError
from planner.export.common.imported_run import Imported, names
from planner.export.common.shell import Script
from planner.export.torchtitan.read_recipe import read_recipe

Fields = dict[str, Any]

_MODELS = {
    ("llama3", "8B"): "llama-3.1-8b",
    ("llama3", "70B"): "llama-3.1-70b",
    ("llama3", "405B"): "llama-3.1-405b",
    ("llama3", "1B"): "llama-3.2-1b",
    ("deepseek_v3", "671B"): "deepseek-v3",
    ("deepseek_v3", "236B"): "deepseek-v2",
    ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "32B"): "qwen3-32b",
    ("qwen3", "30B-A3B"): "qwen3-30b-a3b",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
}
"""Flavors of torchtitan's registries."""
_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved-1f1b",
    "loopedbfs": "breadth-first",
    "interleavedzerobubble": "zb-h1",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}
_READ = names(
    """
    model.name model.flavor module config training.local_batch_size training.global_batch_size
    training.seq_len training.num_tokens_per_microbatch_per_dp_rank training.num_tokens_per_train_step
    training.max_context_length parallelism.data_parallel_replicate_degree
    parallelism.data_parallel_shard_degree parallelism.tensor_parallel_degree
    parallelism.pipeline_parallel_degree parallelism.context_parallel_degree
    parallelism.expert_parallel_degree parallelism.pipeline_parallel_schedule parallelism.num_pp_microbatches
    parallelism.pipeline_parallel_microbatch_size parallelism.module_fqns_per_model_part
    parallelism.enable_sequence_parallel parallelism.fsdp_reshard_after_forward
    activation_checkpoint.mode activation_checkpoint compile.enable
    compile.enable_async_tensor_parallel training.compile compile.components experimental.enable_async_tensor_parallel
    """
)
_IGNORED = re.compile(
    r"(job|profiling|profiler|metrics|optimizer|lr_scheduler|checkpoint|comm|validation|validator|debug|dataloader|fault)\b"
    r"|model\.(tokenizer|hf_assets|print)|training\.(dataset|steps|max_norm|seed|deterministic|gc_|dtype|mixed|enable_cpu"
    r"|disable_cuda)|hf_assets|dump_folder|parallelism\.(spmd|context_parallel_load|pipeline_parallel_.*less)"
    r"|compile\.backend"
)


def read_torchtitan(text: str, script: Script) -> Imported:
    """The run that a recipe, a TOML file or a launch script with overrides describes."""
    opaque: dict[str, str] = {}
    if _is_python(text):
        fields, opaque = read_recipe(text)
    else:
        fields = _toml(text) if _is_toml(text) else _overrides(script)
    if not any(key.startswith(("parallelism.", "training.")) for key in fields):
        raise SpecError(
            "no torchtitan settings found", "give a recipe, a TOML file, or a script with --parallelism.… options"
        )
    model = _MODELS.get((str(fields.get("model.name", "")), str(fields.get("model.flavor", ""))))
    layout, per_rank = _parallelism(fields)
    imported = Imported(
        "torchtitan",
        {
            "model": model,
            "num_gpus": _world_size(fields, script),
            "runtime": "torchtitan",
            "seq_length": _first(fields, "training.max_context_length", "training.seq_len"),
            "parallelism": layout,
            # recipes in Python are of 2026, and so is FlexAttention for all language models
            "features": _features(fields) | ({"flex_attention": True} if _is_python(text) else {}),
        },
    )
    imported.unknown |= opaque
    _batch(imported, fields, per_rank)
    if fields.get("activation_checkpoint.mode") == "full" and "PlannedAC" in text:
        imported.notes.append("the recipe recomputes some layers by name: read as all of them")
    if model is None:
        known = ", ".join(sorted({f"{name} {flavor}" for name, flavor in _MODELS}))
        imported.notes.append(f"the model is none of torchtitan's flavors {known}: add --model")
    for key, value in fields.items():
        if key not in _READ:
            (imported.ignored if _IGNORED.match(key) else imported.unknown)[key] = str(value)
    return imported


def _is_toml(text: str) -> bool:
    return bool(re.search(r"^\[(parallelism|training|model)\]", text, re.MULTILINE))


def _is_python(text: str) -> bool:
    return "ParallelismConfig" in text or "TrainingConfig" in text


def _toml(text: str) -> Fields:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"not TOML: {error}", "give the file that --job.config_file names") from None
    return _flat(data)


def _flat(data: Mapping[str, Any], prefix: str = "") -> Fields:
    fields: Fields = {}
    for key, value in data.items():
        fields |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return fields


def _overrides(script: Script) -> Fields:
    """`--section.key value`; a bare one is true, `--section.no-key` is false."""
    fields: Fields = {}
    key = ""
    for word in script.words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_") if "." in key else key
            section, _, name = key.rpartition(".")
            if name.startswith("no_"):
                fields[f"{section}.{name[3:]}"], key = False, ""
            elif "." in key or key in ("module", "config"):
                fields[key] = _literal(value) if equals else True
            else:
                key = ""
        elif key and fields.get(key) is True:
            fields[key] = _literal(word)
    if isinstance(config := fields.get("config"), str):
        fields |= _registered(str(fields.get("module", "")), config)
    return fields


def _registered(module: str, function: str) -> Fields:
    """`llama3_405b` of module llama3 is its flavor 405B."""
    flavor = function.removeprefix(f"{module}_").replace("_", "-")
    found = next((known for known in _MODELS if known[0] == module and known[1].lower() == flavor.lower()), None)
    return {"model.name": found[0], "model.flavor": found[1]} if found else {}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _features(fields: Fields) -> dict[str, Any]:
    """What is compiled, where that is said, and asynchronous tensor parallelism."""
    features = {"async_tp": bool(_first(fields, "compile.enable_async_tensor_parallel"))}
    compiled = _first(fields, "compile.enable", "training.compile")
    components = _first(fields, "compile.components") or ["model", "loss"]
    if isinstance(compiled, bool):
        features["compile"] = compiled and "model" in components
        if "compile.enable" in fields:  # the older switch compiled no loss
            features["cross_entropy_fusion"] = compiled and "loss" in components
    return features


def _first(fields: Fields, *keys: str) -> Any:
    return next((fields[key] for key in keys if fields.get(key) is not None), None)


def _degree(fields: Fields, axis: str, default: int = 1) -> int:
    value = fields.get(f"parallelism.{axis}_degree", default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"parallelism.{axis}_degree: {value!r} is no whole number", "write a number")
    return value


def _parallelism(fields: Fields) -> tuple[dict[str, Any], int]:
    """The layout without dp, and ranks of one replica."""
    tp, cp, pp = (_degree(fields, f"{axis}_parallel") for axis in ("tensor", "context", "pipeline"))
    name = str(fields.get("parallelism.pipeline_parallel_schedule", "1F1B")).lower()
    schedule = _SCHEDULES.get(name)
    if schedule is None and pp > 1:
        raise SpecError(
            f"parallelism.pipeline_parallel_schedule: {name!r} is unknown", f"one of {', '.join(_SCHEDULES)}"
        )
    parts = fields.get("parallelism.module_fqns_per_model_part")
    layout: dict[str, Any] = {
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "ep": _degree(fields, "expert_parallel"),
        "etp": 1 if _degree(fields, "expert_parallel") > 1 else tp,
        "sequence_parallel": bool(fields.get("parallelism.enable_sequence_parallel", True)) and tp > 1,
        "recompute": str(fields.get("activation_checkpoint.mode", "selective")),
        "vpp": _vpp(parts, pp, schedule or ""),
    }
    if pp > 1:
        layout["schedule"] = schedule
    if isinstance(parts, list) and pp > 1:
        layout["layers_per_stage"] = [sum(str(name).startswith("layers.") for name in part) for part in parts]
    replicate, shard = (
        _degree(fields, f"data_parallel_{kind}", default) for kind, default in (("replicate", 1), ("shard", -1))
    )
    if replicate > 1 and shard > 0:
        layout["fsdp"] = shard * cp
    keeps_weights = fields.get("parallelism.fsdp_reshard_after_forward") == "never"
    layout["zero_stage"] = 0 if shard == 1 and replicate > 1 else 2 if keeps_weights else 3
    if shard > 0:
        layout["dp"] = replicate * shard
    return layout, tp * cp * pp


def _vpp(parts: Any, pp: int, schedule: str) -> int:
    if pp == 1 or schedule in ("1f1b", "gpipe"):
        return 1
    return max(1, len(parts) // pp) if isinstance(parts, list) else 2


def _world_size(fields: Fields, script: Script) -> int | None:
    for name in ("NGPU", "WORLD_SIZE"):
        values = script.variables.get(name, [])
        if values and values[0].isdigit():
            return int(values[0])
    layout, ranks = _parallelism(fields)
    return layout["dp"] * ranks if "dp" in layout else None


def _batch(imported: Imported, fields: Fields, ranks: int) -> None:
    """Micro-batch and global batch in sequences, from sequences or from tokens."""
    run, layout = imported.run, imported.run["parallelism"]
    seq_length, gpus = run["seq_length"], run["num_gpus"]
    dp = layout.get("dp") or (gpus // ranks if gpus else None)
    tokens = fields.get("training.num_tokens_per_microbatch_per_dp_rank")
    if tokens and seq_length:
        layout["micro_batch_size"] = max(1, tokens // seq_length)
        step, times = (
            fields.get("training.num_tokens_per_train_step", -1),
            fields.get("parallelism.num_pp_microbatches", 1),
        )
        if step == -1 and dp:
            step = tokens * (times if layout["pp"] > 1 else 1) * dp
        run["global_batch_size"] = step // seq_length if step > 0 else None
        return
    local = int(fields.get("training.local_batch_size", 8))
    size = fields.get("parallelism.pipeline_parallel_microbatch_size", 1)
    layout["micro_batch_size"] = int(size) if layout["pp"] > 1 else local
    total = int(fields.get("training.global_batch_size", -1))
    run["global_batch_size"] = total if total > 0 else local * dp if dp else None
