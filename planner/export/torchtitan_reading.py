"""A torchtitan configuration as a run: a Python recipe (read, never run), command-line overrides, or the old TOML."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.errors import SpecError
from planner.export.followed.python_recipe import Evaluator, chosen_recipe
from planner.export.followed.python_values import CallRecord, Unknown
from planner.export.followed.shell_script import Script, read_script
from planner.export.imported_run import ConfigFile, ImportedRun, new_run
from planner.export.keyed_settings import dialect, first, flat, is_on, refused_settings, table
from planner.export.megatron.option_rows import options_of
from planner.export.named_models import (
    FLAVORS,
    Model,
    exported_model,
    flavor_of,
    model_of_flavor,
    num_layers_of,
    registered_model,
)
from planner.specs.base import Fields, Named
from planner.specs.reading import literal, parse_python, parse_toml, printable
from planner.specs.units import is_count
from planner.trainers.rules.facts import TORCH_CLASSES

RECOMPUTED = "activation_checkpoint.layers"
"""A setting of our own: the layers that the recipe's policy recomputes, where it names them."""
_NEVER_FOLLOWED = frozenset({"model_registry", "default_adamw"})
_SECTIONS = ("parallelism", "training", "compile")
_POLICIES = {"FullAC": "full", "PlannedAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "selective"}
"""Mode of each class of activation checkpointing; PlannedAC is the one that an exported recipe defines."""
_CONVERTERS = {"Float8": "fp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
"""Beginnings of the names of converters of linear layers, and the dtype that they compute in."""
_COUNTS_TOKENS = {"training.max_context_length", "training.num_tokens_per_microbatch_per_dp_rank"}
_MAX_SHOWN_CHARACTERS = 80
_ROW = dialect("torchtitan")


def read_recipe(config: ConfigFile) -> tuple[Fields, Named]:
    """Settings by `section.name`, and those whose values cannot be read.

    Raises SpecError for what is no Python, and for a file with several recipes of which none is chosen.
    """
    evaluator = Evaluator(config, _NEVER_FOLLOWED)
    record = chosen_recipe(evaluator, config.recipe, _SECTIONS) or _at_top(evaluator)
    settings: Fields = {}
    unreadable: Named = {}
    if record.kind == "to_graph_trainer_config":  # the recipe of the plain trainer, with what is set afterwards
        plain = record.arguments[0] if record.arguments and isinstance(record.arguments[0], CallRecord) else record
        record = replace(plain, fields={**plain.fields, **record.fields})
        settings["compile.memory_policy"] = "default"
    for section in _SECTIONS:
        value = record.get(section)
        for path, setting in value.flat(f"{section}.") if isinstance(value, CallRecord) else ():
            if isinstance(setting, (Unknown, CallRecord)):
                unreadable[path] = str(setting if isinstance(setting, Unknown) else setting.kind)[
                    :_MAX_SHOWN_CHARACTERS
                ]
            else:
                settings[path] = setting
    settings |= _policy(record, evaluator) | _model(record, config)
    if isinstance(debug := record.get("debug"), CallRecord) and debug.get("deterministic") is True:
        settings["debug.deterministic"] = True
    if isinstance(optimizer := record.get("optimizer"), CallRecord):
        groups = optimizer.get("param_groups") or []
        names = {group.get("optimizer_name", "") for group in groups if isinstance(group, CallRecord)}
        settings["optimizer.name"] = " ".join(sorted(names)) or optimizer.kind
    if record.kind and "." not in record.kind and record.kind[0].islower():
        settings["base"] = record.kind
    return settings, unreadable


def _at_top(evaluator: Evaluator) -> CallRecord:
    """The settings that a file without functions makes: `config.parallelism = …`, or sections of their own."""
    names = evaluator.module.names
    records = [value for value in names.values() if isinstance(value, CallRecord)]
    whole = [record for record in records if any(section in record.fields for section in _SECTIONS)]
    return whole[-1] if whole else CallRecord("", [], {name: names[name] for name in _SECTIONS if name in names})


def _policy(record: CallRecord, evaluator: Evaluator) -> Fields:
    """Mode of activation checkpointing."""
    if "activation_checkpoint" not in record.fields:
        return {}
    policy = record.fields["activation_checkpoint"]
    if policy is None:
        return {"activation_checkpoint.mode": "none"}
    name = policy.kind.partition(".")[0] if isinstance(policy, CallRecord) else str(policy)
    settings: Fields = {"activation_checkpoint.mode": _POLICIES.get(name, "selective")}
    if name == "PlannedAC":
        settings[RECOMPUTED] = evaluator.module.names.get("RECOMPUTED")
    if name == "MemoryBudgetAC":
        settings["activation_checkpoint.memory_budget"] = policy.get("memory_budget", True)
    return settings


def _model(record: CallRecord, config: ConfigFile) -> Fields:
    """Module and flavor of the model, and the converters of its layers."""
    if (exported := exported_model(config.text)) is not None:
        return {"model.published": exported}
    spec = record.get("model_spec")
    settings: Fields = {"model.name": _module(config)}
    if not isinstance(spec, CallRecord):
        return settings
    flavor = spec.fields.get("flavor") or next(iter(spec.arguments), None)
    settings["model.flavor"] = flavor if isinstance(flavor, str) else None
    if model_of_flavor(settings["model.name"], str(flavor)) is None:
        again = chosen_recipe(Evaluator(config, _NEVER_FOLLOWED - {"model_registry"}), config.recipe, _SECTIONS)
        settings["model.published"] = registered_model(None if again is None else again.get("model_spec"))
    for converter in spec.fields.get("converters") or []:
        name = (
            converter.kind.rpartition(".")[0] or converter.kind if isinstance(converter, CallRecord) else str(converter)
        )
        dtype = next((dtype for start, dtype in _CONVERTERS.items() if name.startswith(start)), None)
        settings["dtype" if dtype else f"model.converters.{name}"] = dtype or True
        if dtype == "fp8":
            settings["float8.recipe_name"] = converter.get("recipe_name") or "tensorwise"
    for option, value in spec.fields.items():
        if option not in ("flavor", "converters", "model"):
            settings[f"model.{option}"] = value if isinstance(value, (str, int, bool, float)) else str(value)
    return settings


def _module(config: ConfigFile) -> str:
    """The package of models whose registry the recipe asks."""
    for node in ast.walk(parse_python(config.text, "", "give the recipe's file")):
        if isinstance(node, ast.ImportFrom) and any(alias.name.endswith("model_registry") for alias in node.names):
            module = (node.module or "").rpartition("torchtitan.models.")[2].split(".")[0]
            return module or (config.path.absolute().parent.name if config.path is not None else "")
    return ""


def read_settings(config: ConfigFile, script: Script) -> tuple[Fields, Named]:
    """Settings, and those whose values only a run would know; `script` holds the text's words.

    Raises SpecError for a file that is broken, or has no settings of torchtitan.
    """
    unreadable: Named = {}
    text = config.text
    if is_recipe(text):
        settings, unreadable = read_recipe(config)
        settings["recipe"] = True
    else:
        is_toml = re.search(r"^\[(parallelism|training|model)\]", text, re.MULTILINE)
        settings = _toml(text) if is_toml else {**_of_file(config), **override_settings(script)}
    if not any(name.startswith(("parallelism.", "training.")) for name in settings):
        raise SpecError(
            "no torchtitan settings found", "give a recipe, a TOML file, or a script with --parallelism.… options"
        )
    return of_today(settings), unreadable


def of_today(settings: Fields) -> Fields:
    """Settings under today's names, with the dtype that converters of a TOML file, or its older switch, ask for."""
    settings = {_ROW.renamed.get(name, name): value for name, value in settings.items()}
    converters = str(first(settings, "model.converters", "job.converters", default=""))
    for other in [name for name in re.findall(r"[\w.]+", converters) if not re.search("float8|mx", name)]:
        settings[f"model.converters.{other}"] = True
    if "mx" in converters:
        settings["dtype"] = "mxfp8"
    elif "float8" in converters or settings.get("float8.enable") is True:
        settings |= {"dtype": "fp8", "float8.recipe_name": settings.get("float8.recipe_name") or "tensorwise"}
    return settings


def _of_file(config: ConfigFile) -> Fields:
    """Settings of the TOML that a launch names; of one that is not beside it, the model that its path says."""
    named = re.search(
        r"(?:\bCONFIG_FILE=|--job[._]config_file[ =])[\"']?(?:\$\{\w+:-)?[\"']?([\w./-]+\.toml)", config.text
    )
    if named is None:
        return {}
    if (text := config.beside(named[1])) is not None:
        return _toml(text)
    module = re.search(r"/models/(\w+)/", named[1])
    name = module[1] if module else named[1].rpartition("/")[2].split("_")[0]
    stem = named[1].rpartition("/")[2].removesuffix(".toml").removeprefix(f"{name}_")
    flavor = next((flavor for own, flavor in FLAVORS if (own, flavor.lower()) == (name, stem.lower())), stem)
    return {"model.name": name, "model.flavor": flavor, "base": named[1]}


def is_recipe(text: str) -> bool:
    """The text is a recipe in Python: it names torchtitan's classes of settings."""
    return bool(re.search(r"ParallelismConfig|TrainingConfig|Trainer\.Config|import .*model_registry", text))


def _toml(text: str) -> Fields:
    """Settings of a TOML file, as torchtitan took them up to 2025."""
    return flat(parse_toml(text, "", "give the file that --job.config_file names"))


def override_settings(script: Script) -> Fields:
    """`--section.key value`; a bare option is true, `--section.no-key` is false."""
    settings: Fields = {}
    for option, words in options_of(script.words).items():
        key = option[2:].replace("-", "_") if "." in option else option[2:]
        section, _, name = key.rpartition(".")
        if name.startswith("no_"):
            settings[f"{section}.{name[3:]}"] = False
        elif "." in key or key in ("module", "config"):
            settings[key] = _literal(words[0]) if words else True
    if isinstance(config := settings.get("config"), str):
        flavor = flavor_of(str(settings.get("module", "")), config)
        settings |= {"model.name": flavor[0], "model.flavor": flavor[1]} if flavor else {}
    return settings


def _literal(text: str) -> Any:
    """A Python literal, or the text itself where it is none."""
    try:
        return literal(text)
    except ValueError:
        return text


_SCHEDULES = {name.lower(): schedule for schedule, name in TORCH_CLASSES.items()}
_SIZES = {
    "parallelism.tensor_parallel_degree": "tp",
    "parallelism.context_parallel_degree": "cp",
    "parallelism.pipeline_parallel_degree": "pp",
    "parallelism.expert_parallel_degree": "ep",
}
_REPLICAS, _SHARDS = "parallelism.data_parallel_replicate_degree", "parallelism.data_parallel_shard_degree"
_LESS_LAYERS = (
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
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


def run_of_settings(settings: Fields, num_gpus: int | None) -> ImportedRun:
    """The run that settings by `section.name` describe; those that are not read are noted as ignored or unknown."""
    model = settings.get("model.published") or model_of_flavor(
        str(settings.get("model.name", "")), str(settings.get("model.flavor", ""))
    )
    if str(settings.get("model.name", "")).startswith("flux"):
        raise SpecError("model: flux is a diffusion model", "only decoder-only transformers are planned")
    layout, _ = _layout(settings, model)
    refused = [*_refusals(settings, layout, num_layers_of(model)), *refused_settings(settings, "torchtitan")]
    imported = new_run(
        "torchtitan",
        "torchtitan",
        model=model,
        num_gpus=num_gpus,
        seq_length=_seq_length(settings),
        dtype=str(settings.get("dtype", "bf16")),
        precision_recipe=f"fp8-{settings['float8.recipe_name']}" if settings.get("dtype") == "fp8" else None,
        parallelism=layout,
        features=_features(settings),
    )
    imported.refused = refused
    _ROW.assume(imported, _ROW.left_out(settings))
    _read_batch(imported, settings)
    _read_recompute(imported, settings, model)
    if model is None:
        what = f"{settings.get('model.name') or ''} {settings.get('model.flavor') or ''}".strip() or "the model"
        imported.model_name = what
    if "base" in settings:
        imported.notes.append(f"what {settings['base']} sets beside is not read: it is not in this file, nor beside it")
    if is_on(settings.get("training.enable_cpu_offload")):
        imported.offload_all("training.enable_cpu_offload")
    usual = table()["torchtitan"]["usual"]
    _ROW.sort(imported, settings, (), lambda name, value: str(value) in usual.get(name, ()))
    return imported


def _refusals(settings: Fields, layout: Fields, num_layers: int | None) -> Iterator[str]:
    """Why torchtitan ends before its first step, beside the rules of layouts (distributed/pipeline_parallel.py)."""
    pp, each = layout["pp"], _whole(settings, "parallelism.pipeline_parallel_layers_per_stage", 0)
    ends = [_whole(settings, name, 1) for name in _LESS_LAYERS]
    if pp > 1 and num_layers and not isinstance(settings.get("parallelism.module_fqns_per_model_part"), list):
        is_single = layout["schedule"] in ("1f1b", "gpipe")
        stages = -(-(num_layers + sum(ends)) // each) if each > 0 else pp * (1 if is_single else 2)
        if stages % pp:
            yield f"{stages} stages of {each} layers are no multiple of pp {pp}"
        elif (stages == pp) != is_single:
            yield f"{layout['schedule']} runs {'one stage' if is_single else 'two stages or more'} on a rank"
        elif max(ends) > (num_layers + sum(ends)) // stages:
            yield f"{stages} stages leave fewer layers each than the first or the last has less ({max(ends)})"


def _read_recompute(imported: ImportedRun, settings: Fields, model: Model | None) -> None:
    """Layers that are recomputed by name, or every n-th of them."""
    layout, layers = imported.run["parallelism"], settings.pop(RECOMPUTED, None)
    if policy := settings.get("compile.memory_policy"):
        layout["recompute"] = "full" if policy == "full" else "selective"
    every = str(settings.get("activation_checkpoint.selective_ac_option", "op"))
    num_layers = num_layers_of(model)
    if layout["recompute"] == "selective" and is_count(every) and int(every) > 0 and num_layers:
        layout |= {"recompute": "full", "recompute_layers": [*range(int(every) - 1, num_layers, int(every))]}
    elif isinstance(layers, list) and layout["recompute"] == "full" and num_layers:
        layout["recompute_layers"] = layers


def _features(settings: Fields) -> Fields:
    """Features of the run: asynchronous tensor parallelism, and which parts are compiled where a setting gives that."""
    dist_gemm = settings.pop("model.tp_gemm_backend", None) == "dist_gemm"
    features: Fields = {"async_tp": dist_gemm or bool(first(settings, "compile.enable_async_tensor_parallel"))}
    if settings.get("model.moe_comm_backend") in ("deepep", "hybridep"):
        features["dispatcher"] = settings.pop("model.moe_comm_backend")
    policy = settings.get("compile.memory_policy")
    features["memory_policy"] = policy or "eager"
    # since 13 August 2026 a step is captured unasked; recipes that count tokens are a week younger
    captures = settings.get("training.disable_cuda_graphs", _COUNTS_TOKENS.isdisjoint(settings)) is False
    if policy:
        captures = "cudagraph_pass" not in (settings.get("compile.disable_passes") or ())
    if captures:
        features |= {"cuda_graph": "full_iteration", "fused_experts": False, "ep_overlap": False}
    if settings.get("training.dtype") == "bfloat16":
        features["no_masters"] = True
    features["deterministic"] = first(settings, "debug.deterministic", "training.deterministic") is True
    compiled = first(settings, "compile.enable", "training.compile")
    components = first(settings, "compile.components") or ["model", "loss"]
    if policy:  # the graph trainer: all of a step's operators, or attention alone
        features["compile"] = features["cross_entropy_fusion"] = settings.get("compile.inductor_compilation") == "full"
    elif isinstance(compiled, bool):
        features["compile"] = compiled and "model" in components
        if "compile.enable" in settings:  # the older switch compiled no loss
            features["cross_entropy_fusion"] = compiled and "loss" in components
    return features


def _whole(settings: Fields, name: str, default: int) -> int:
    """A setting that is a whole number. Raises SpecError naming it where it is none."""
    value = default if settings.get(name) is None else settings[name]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"{name}: {printable(repr(value), 60)} is no whole number", "write a number")
    return value


def _seq_length(settings: Fields) -> int | None:
    names = ("training.max_context_length", "training.seq_len")
    name = next((name for name in names if settings.get(name) is not None), "")
    length = _whole(settings, name, 0)
    if name and length < 1:
        raise SpecError(f"{name}: {length} is below 1", "write the tokens of a sequence")
    return length or None


def _layout(settings: Fields, model: Model | None) -> tuple[Fields, int]:
    """The run's parallelism, with dp where the settings give it, and the number of ranks of one replica."""
    sizes = {field: _whole(settings, name, 1) for name, field in _SIZES.items()}
    tp, cp, pp, ep = (sizes[axis] for axis in ("tp", "cp", "pp", "ep"))
    name = str(settings.get("parallelism.pipeline_parallel_schedule", "1F1B")).lower()
    schedule = _SCHEDULES.get(name)
    if schedule is None and pp > 1:
        raise SpecError(
            f"parallelism.pipeline_parallel_schedule: {name[:60]!r} is unknown", f"one of {', '.join(_SCHEDULES)}"
        )
    parts = settings.get("parallelism.module_fqns_per_model_part")
    layout: Fields = {
        **sizes,
        "etp": 1 if ep > 1 else tp,
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
    replicate, shard = _whole(settings, _REPLICAS, 1), _whole(settings, _SHARDS, -1)
    if replicate > 1 and shard > 0:
        layout["fsdp"] = shard * cp
    keeps_weights = settings.get("parallelism.fsdp_reshard_after_forward") == "never"
    layout["zero_stage"] = 0 if shard == 1 and cp == 1 else 2 if keeps_weights else 3
    if shard > 0:
        layout["dp"] = replicate * shard
    return layout, tp * cp * pp


def _split(settings: Fields, num_layers: int, pp: int, vpp: int) -> Fields:
    """The stages that torchtitan makes unasked: embedding and head count as so many layers of their stage."""
    first, last = (_whole(settings, name, 1) for name in _LESS_LAYERS)
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


def _num_gpus(settings: Fields, script: Script) -> int | None:
    """GPUs by the script's variables, else by the grid; None where neither gives a number."""
    for name in ("NGPU", "WORLD_SIZE"):
        values = script.variables.get(name, [])
        if values and is_count(values[0]):
            return int(values[0])
    layout, ranks = _layout(settings, None)
    return layout["dp"] * ranks if "dp" in layout else None


def _read_batch(imported: ImportedRun, settings: Fields) -> None:
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
