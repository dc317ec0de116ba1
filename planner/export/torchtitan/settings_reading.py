"""A torchtitan configuration as a run: a Python recipe (read, never run), command-line overrides, or the old TOML."""

from __future__ import annotations

import re
from typing import Any

from planner.errors import SpecError
from planner.export.followed.shell_script import Script, read_script
from planner.export.imported_run import ConfigFile, ImportedRun
from planner.export.named_models import Model, num_layers_of
from planner.export.torchtitan.recipe_settings import RECOMPUTED, Settings, is_recipe, model_of_flavor, read_settings
from planner.specs.reading import printable
from planner.specs.units import is_count

_SCHEDULES = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved1f1b": "interleaved-1f1b",
    "loopedbfs": "breadth-first",
    "interleavedzerobubble": "zb-h1",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}
_READ = {
    "model.name", "model.flavor", "module", "config", "training.local_batch_size", "training.global_batch_size",
    "training.seq_len", "training.num_tokens_per_microbatch_per_dp_rank", "training.num_tokens_per_train_step",
    "training.max_context_length", "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree", "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree", "parallelism.context_parallel_degree", "parallelism.expert_parallel_degree",
    "parallelism.pipeline_parallel_schedule", "parallelism.num_pp_microbatches",
    "parallelism.pipeline_parallel_microbatch_size", "parallelism.module_fqns_per_model_part",
    "parallelism.enable_sequence_parallel", "parallelism.fsdp_reshard_after_forward", "activation_checkpoint.mode",
    "activation_checkpoint", "compile.enable", "compile.enable_async_tensor_parallel", "training.compile",
    "compile.components", "dtype", "float8.recipe_name", "float8.enable", "model.converters", "job.converters",
    "model.published", "debug.deterministic",
    "base", "activation_checkpoint.selective_ac_option", "parallelism.pipeline_parallel_microbatches",
    "parallelism.pipeline_parallel_layers_per_stage", "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers", "parallelism.expert_tensor_parallel_degree",
}  # fmt: skip
_IGNORED = re.compile(
    r"(job|profiling|profiler|metrics|optimizer|lr_scheduler|checkpoint|comm|validation|validator|debug|dataloader|fault"
    r"|eval|experimental\.custom|fault_tolerance|memory_estimation)\b"
    r"|model\.(tokenizer|hf_assets|print|norm_type|attn_backend)|hf_assets|dump_folder"
    r"|training\.(dataset|mock_data|steps|max_norm|seed|gc_|warmup_steps|disable_cuda|pipeline_parallel)"
    r"|parallelism\.(spmd|context_parallel_load|disable_loss_parallel)|training\.disable_loss_parallel"
    r"|compile\.backend|float8\.(filter|fqns|precompute|enable_fsdp)|quantize\.|mx\."
    r"|activation_checkpoint\.(per_op|early_stop|preserve)"
)


def read_torchtitan(config: ConfigFile) -> ImportedRun:
    """The run that a recipe, a TOML file or a launch script with overrides describes.

    Raises SpecError for a text without settings of torchtitan, and for values that torchtitan would not take.
    """
    # a recipe has no words of a shell, and to look for them takes as long as to read it
    script = Script() if is_recipe(config.text) else read_script(config.text, config.beside)
    settings, unreadable = read_settings(config, script)
    imported = run_of_settings(settings, _num_gpus(settings, script))
    imported.unknown |= unreadable
    if is_recipe(config.text):
        # recipes in Python are of 2026, and so is FlexAttention for all language models
        imported.run["features"]["flex_attention"] = True
    return imported


def run_of_settings(settings: Settings, num_gpus: int | None) -> ImportedRun:
    """The run that settings by `section.name` describe; those that are not read are noted as ignored or unknown."""
    model = settings.get("model.published") or model_of_flavor(
        str(settings.get("model.name", "")), str(settings.get("model.flavor", ""))
    )
    if str(settings.get("model.name", "")).startswith("flux"):
        raise SpecError("model: flux is a diffusion model", "only decoder-only transformers are planned")
    layout, _ = _layout(settings, model)
    imported = ImportedRun(
        "torchtitan",
        {
            "model": model,
            "num_gpus": num_gpus,
            "runtime": "torchtitan",
            "seq_length": _seq_length(settings),
            "dtype": str(settings.get("dtype", "bf16")),
            "precision_recipe": f"fp8-{settings['float8.recipe_name']}" if settings.get("dtype") == "fp8" else None,
            "parallelism": layout,
            "features": _features(settings),
        },
    )
    _read_batch(imported, settings)
    _read_recompute(imported, settings, model)
    if model is None:
        what = f"{settings.get('model.name') or ''} {settings.get('model.flavor') or ''}".strip() or "the model"
        imported.notes.append(f"{what} is no published model: add --model")
    if "base" in settings:
        imported.notes.append(f"what {settings['base']} sets beside is not read: it is not in this file, nor beside it")
    for name, value in settings.items():
        if name == "training.dtype" and value == "float32":
            imported.ignored[name] = value
        elif name not in _READ:
            (imported.ignored if _IGNORED.match(name) else imported.unknown)[name] = str(value)
    return imported


def _read_recompute(imported: ImportedRun, settings: Settings, model: Model | None) -> None:
    """Layers that are recomputed by name, or every n-th of them."""
    layout, layers = imported.run["parallelism"], settings.pop(RECOMPUTED, None)
    every = str(settings.get("activation_checkpoint.selective_ac_option", "op"))
    num_layers = num_layers_of(model)
    if layout["recompute"] == "selective" and is_count(every) and int(every) > 0 and num_layers:
        layout |= {"recompute": "full", "recompute_layers": [*range(int(every) - 1, num_layers, int(every))]}
    elif isinstance(layers, list) and layout["recompute"] == "full" and num_layers:
        layout["recompute_layers"] = layers


def _features(settings: Settings) -> dict[str, Any]:
    """Features of the run: asynchronous tensor parallelism, and which parts are compiled where a setting gives that."""
    dist_gemm = settings.pop("model.tp_gemm_backend", None) == "dist_gemm"
    features: dict[str, Any] = {"async_tp": dist_gemm or bool(_first(settings, "compile.enable_async_tensor_parallel"))}
    if settings.get("model.moe_comm_backend") in ("deepep", "hybridep"):
        features["dispatcher"] = settings.pop("model.moe_comm_backend")
    features["deterministic"] = _first(settings, "debug.deterministic", "training.deterministic") is True
    compiled = _first(settings, "compile.enable", "training.compile")
    components = _first(settings, "compile.components") or ["model", "loss"]
    if isinstance(compiled, bool):
        features["compile"] = compiled and "model" in components
        if "compile.enable" in settings:  # the older switch compiled no loss
            features["cross_entropy_fusion"] = compiled and "loss" in components
    return features


def _first(settings: Settings, *names: str) -> Any:
    """The value of the first of the names that is set."""
    return next((settings[name] for name in names if settings.get(name) is not None), None)


def _degree(settings: Settings, axis: str, default: int = 1) -> int:
    return _whole(settings, f"parallelism.{axis}_degree", default)


def _whole(settings: Settings, name: str, default: int) -> int:
    """A setting that is a whole number. Raises SpecError naming it where it is none."""
    value = default if settings.get(name) is None else settings[name]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"{name}: {printable(repr(value), 60)} is no whole number", "write a number")
    return value


def _seq_length(settings: Settings) -> int | None:
    name = next(
        (name for name in ("training.max_context_length", "training.seq_len") if settings.get(name) is not None), ""
    )
    length = _whole(settings, name, 0)
    if name and length < 1:
        raise SpecError(f"{name}: {length} is below 1", "write the tokens of a sequence")
    return length or None


def _layout(settings: Settings, model: Model | None) -> tuple[dict[str, Any], int]:
    """The run's parallelism, with dp where the settings give it, and the number of ranks of one replica."""
    tp, cp, pp = (_degree(settings, f"{axis}_parallel") for axis in ("tensor", "context", "pipeline"))
    name = str(settings.get("parallelism.pipeline_parallel_schedule", "1F1B")).lower()
    schedule = _SCHEDULES.get(name)
    if schedule is None and pp > 1:
        raise SpecError(
            f"parallelism.pipeline_parallel_schedule: {name[:60]!r} is unknown", f"one of {', '.join(_SCHEDULES)}"
        )
    parts = settings.get("parallelism.module_fqns_per_model_part")
    layout: dict[str, Any] = {
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "ep": _degree(settings, "expert_parallel"),
        "etp": 1 if _degree(settings, "expert_parallel") > 1 else tp,
        "sequence_parallel": bool(settings.get("parallelism.enable_sequence_parallel", True)) and tp > 1,
        "recompute": str(settings.get("activation_checkpoint.mode", "selective")),
        "vpp": _vpp(parts, pp, schedule or ""),
    }
    if pp > 1:
        layout["schedule"] = schedule
    if isinstance(parts, list) and pp > 1:
        layout["layers_per_stage"] = [sum(str(name).startswith("layers.") for name in part) for part in parts]
    elif pp > 1 and (num_layers := num_layers_of(model)):
        layout |= _split(settings, num_layers, pp, layout["vpp"])
    replicate, shard = (
        _degree(settings, f"data_parallel_{kind}", default) for kind, default in (("replicate", 1), ("shard", -1))
    )
    if replicate > 1 and shard > 0:
        layout["fsdp"] = shard * cp
    keeps_weights = settings.get("parallelism.fsdp_reshard_after_forward") == "never"
    layout["zero_stage"] = 0 if shard == 1 and cp == 1 else 2 if keeps_weights else 3
    if shard > 0:
        layout["dp"] = replicate * shard
    return layout, tp * cp * pp


def _split(settings: Settings, num_layers: int, pp: int, vpp: int) -> dict[str, Any]:
    """The stages that torchtitan makes unasked: embedding and head count as so many layers of their stage."""
    first, last = (
        _whole(settings, f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1) for end in ("first", "last")
    )
    per_stage = settings.get("parallelism.pipeline_parallel_layers_per_stage")
    if isinstance(per_stage, int) and per_stage > 0:
        vpp = max(1, -(-(num_layers + first + last) // per_stage) // pp)
    each, rest = divmod(num_layers + first + last, pp * vpp)
    counts = [each + (stage < rest) for stage in range(pp * vpp)]
    counts[0] -= first
    counts[-1] -= last
    return {"vpp": vpp, "layers_per_stage": counts} if min(counts) >= 0 else {"vpp": vpp}


def _vpp(parts: Any, pp: int, schedule: str) -> int:
    """Stages per rank: from the list of stages where there is one, else torchtitan's default for the schedule."""
    if pp == 1 or schedule in ("1f1b", "gpipe"):
        return 1
    return max(1, len(parts) // pp) if isinstance(parts, list) else 2


def _num_gpus(settings: Settings, script: Script) -> int | None:
    """GPUs by the script's variables, else by the grid; None where neither gives a number."""
    for name in ("NGPU", "WORLD_SIZE"):
        values = script.variables.get(name, [])
        if values and is_count(values[0]):
            return int(values[0])
    layout, ranks = _layout(settings, None)
    return layout["dp"] * ranks if "dp" in layout else None


def _read_batch(imported: ImportedRun, settings: Settings) -> None:
    """Micro-batch and global batch in sequences, from sequences or from tokens."""
    run, layout = imported.run, imported.run["parallelism"]
    seq_length = run["seq_length"]
    tokens_per_microbatch = _whole(settings, "training.num_tokens_per_microbatch_per_dp_rank", 0)
    if tokens_per_microbatch and seq_length:
        layout["micro_batch_size"] = max(1, tokens_per_microbatch // seq_length)
        tokens_per_step = _whole(settings, "training.num_tokens_per_train_step", -1)
        num_microbatches = _whole(settings, "parallelism.num_pp_microbatches", 1) if layout["pp"] > 1 else 1
        imported.microbatches_per_rank = num_microbatches
        run["global_batch_size"] = tokens_per_step // seq_length if tokens_per_step > 0 else None
        return
    local_batch_size = _whole(settings, "training.local_batch_size", 8)
    micro_batch_size = _whole(settings, "parallelism.pipeline_parallel_microbatch_size", 1)
    layout["micro_batch_size"] = micro_batch_size if layout["pp"] > 1 else local_batch_size
    global_batch_size = _whole(settings, "training.global_batch_size", -1)
    if layout["pp"] > 1 and (parts := _whole(settings, "parallelism.pipeline_parallel_microbatches", 0)):
        layout["micro_batch_size"] = max(1, local_batch_size // parts)
    if layout["micro_batch_size"] < 1:
        raise SpecError(f"micro-batch: {layout['micro_batch_size']} is below 1", "set training.local_batch_size")
    imported.microbatches_per_rank = max(1, local_batch_size // layout["micro_batch_size"])
    run["global_batch_size"] = global_batch_size if global_batch_size > 0 else None
