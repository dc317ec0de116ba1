"""Arguments of Hugging Face's Trainer and of trainers built on it, and torchtune's recipes, as runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.errors import SpecError
from planner.export.followed.shell_script import read_script
from planner.export.huggingface.deepspeed_files import DEEPSPEED_RUNTIME, apply_deepspeed
from planner.export.huggingface.tuning_settings import (
    ACCELERATE_FILE,
    FSDP_RUNTIME,
    IN_FP32,
    apply_accelerate,
    apply_parallelism,
    beside_adapters,
    deepspeed_beside,
    dtype_of,
    fsdp_layout,
    note_sections,
    read_fine_tuning,
    set_model,
)
from planner.export.imported_run import ConfigFile, ImportedRun, json_of, new_run, positive_number, yaml_of
from planner.export.keyed_settings import (
    Dialect,
    KeyedSettings,
    Settings,
    dialect,
    flat,
    is_empty,
    is_off,
    is_on,
    mapping_of,
    number,
    overrides_of,
    refused_settings,
    settings_of,
    table,
)
from planner.export.keyed_settings import num_gpus as launched_gpus
from planner.export.megatron.deepspeed_options import refuse_other
from planner.export.megatron.keyed_reading import is_adapter, read_adapter
from planner.export.megatron.option_rows import options_of
from planner.export.named_models import Model, exported_gpus, exported_model, model_called, num_layers_of
from planner.specs.base import Fields, Named
from planner.specs.training import MLP

_FULL = (None, "", "full", 0, "0", False, "false", "False", "none", "LORA")
_NAMED_BY = re.compile(r"[^\s\"'=]*\$[^\s\"']*\.ya?ml")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
"""A YAML's name with variables of the shell in it, and each of them."""
_CALLS = re.compile(
    r"(TrainingArguments|\w*(SFT|DPO|CPO|GRPO|Reward|Trainer|Sft|KTO|ORPO|Lora|LoRA)(Config|Arguments)"
    r"|BitsAndBytesConfig|get_peft_model|(^|\.)\w*Trainer)$"
)
_SPELLED = {what: tuple(names.split()) for what, names in table()["huggingface"]["spelled"].items()}
_SEQUENCE, _BATCH, _MODEL, _NARROWER, _OTHERS, _PACKING, _CHECKPOINTING = (
    _SPELLED[what] for what in ("sequence", "batch", "model", "narrower", "others", "packing", "checkpointing")
)
_GRID: Mapping[str, str] = table()["huggingface"]["grid"]
_SAME = {
    name: [name for word in others.split() for name in _SPELLED.get(word, (word,))]
    for name, others in table()["huggingface"]["same"].items()
}
_ROW = dialect("huggingface")
_READ = {*_ROW.read, *_GRID, *(name for names in _SPELLED.values() for name in names)}
_TOOLS = tuple(map(dialect, ("llamafactory", "axolotl", "ms-swift", "trl", "transformers")))
"""Trainers around Hugging Face's, of which the first is meant whose marks the settings have."""
_BY_ACCELERATE = ("trl", "transformers")
"""Trainers whose launch says how they are sharded, in a file of Accelerate's."""


def tool_of(settings: Settings, text: str = "") -> Dialect:
    """The trainer whose settings these are."""
    launched = (tool for tool in _TOOLS if tool.launched and re.search(tool.launched, text))
    marked = (tool for tool in _TOOLS if not tool.marks or any(name in settings for name in tool.marks))
    return next(launched, None) or next(marked)


def read_trainer(config: ConfigFile) -> ImportedRun:
    """The run that the arguments describe. Raises SpecError where there are none."""
    keyed = settings_of(config, _CALLS)
    if is_adapter(keyed.settings) and "finetuning_type" in keyed.settings:
        return read_adapter(keyed)
    return run_of_arguments(keyed, config)


def read_openrlhf(config: ConfigFile) -> ImportedRun:
    """The run of OpenRLHF's trainers: a fine-tuning, or an update of the actor."""
    row, keyed = dialect("openrlhf"), settings_of(config)
    given = keyed.settings
    names = {row.renamed[key]: key for key in {**row.unasked, **given} if row.renamed.get(key)}
    keyed.settings = {row.renamed.get(key) or key: value for key, value in given.items()}
    is_rl, tokens = "train_ppo" in config.text, number(given, "train.max_tokens_per_gpu") or 16192
    answers = number(given, "generate_max_len", "rollout.max_new_tokens")
    if "prompt_max_len" in given and answers:
        keyed.settings["max_length"] = (number(given, "prompt_max_len") or 0) + answers
    if is_rl:
        length = number(keyed.settings, "max_length") or 2048
        packed = max(1, tokens // length) if is_on(given.get("train.dynamic_batch_enable")) else 1
        keyed.settings.setdefault("per_device_train_batch_size", packed)
    gpus = [number(given, f"actor{sign}{name}") or 1 for sign in "_." for name in ("num_nodes", "num_gpus_per_node")]
    keyed.num_gpus = keyed.num_gpus or (gpus[0] * gpus[1] * gpus[2] * gpus[3] if max(gpus) > 1 else None)
    if (other := re.search(r"train_(dpo|rm|kto|kd|prm)\b", config.text)) is not None:
        keyed.settings["stage"] = other[1]
    tool = replace(row, unasked={row.renamed.get(key, key): value for key, value in row.unasked.items()})
    imported = run_of_arguments(keyed, config, tool)
    imported.rename(names)
    imported.source = "openrlhf"
    if is_rl:
        critics, frozen = _models_beside(given, config.text)
        imported.reinforce(
            tokens=_scored_tokens(given, imported.run["seq_length"] or 0, tokens), critics=critics, frozen=frozen
        )
        imported.notes.append("one update of the actor is priced; rollouts are not, nor models on other GPUs")
    return imported


def _scored_tokens(given: Settings, length: int, tokens: int) -> int:
    """Tokens of OpenRLHF's micro-batch of log-probabilities, padded unless it is packed."""
    if is_on(given.get("train.dynamic_batch_enable")):
        return max(tokens, number(given, "rollout.max_tokens_per_gpu") or 0)
    is_packed = any(is_on(given.get(name)) for name in ("packing_samples", "ds.packing_samples"))
    return 0 if is_packed else length * (number(given, "rollout.micro_batch_size", "micro_rollout_batch_size") or 1)


def _models_beside(given: Settings, text: str) -> tuple[int, int]:
    """Critics and frozen models on the actor's GPUs: all of them without Ray, or as the run places them."""
    shares = "train_ppo_ray" not in text or any(
        is_on(given.get(n)) for n in ("colocate_all_models", "train.colocate_all")
    )
    refers = shares or any(is_on(given.get(n)) for n in ("colocate_actor_ref", "train.colocate_actor_ref"))
    has_critic = str(given.get("advantage_estimator", given.get("algo.advantage.estimator", "gae"))) == "gae"
    scores = not any(given.get(name) for name in ("remote_rm_url", "reward.remote_url", "agent_func_path"))
    kept = not is_on(given.get("ref_reward_offload"))
    return int(shares and has_critic), kept * (int(refers) + int(shares and scores))


def run_of_arguments(keyed: KeyedSettings, config: ConfigFile, tool: Dialect | None = None) -> ImportedRun:
    """The run of a trainer's settings, over the defaults of the tool that reads them."""
    keyed.settings = _in_one(keyed.settings)
    settings = {**_model_options(keyed.settings), **keyed.settings, **beside_adapters(keyed.settings, config)}
    if not any(name in settings for name in (*_BATCH, "zero_stage", "deepspeed", *_MODEL, "peft_type")):
        missing = next((name for name in keyed.unread if name.endswith((".yaml", ".yml"))), None)
        if missing is not None:
            asked = [
                f"--set {name}=VALUE" for path in _NAMED_BY.findall(config.text) for name in _VARIABLE.findall(path)
            ]
            hint = "put it there, or import it itself"
            raise SpecError(f"{missing[:80]} is not beside the file", f"add {' '.join(asked)}" if asked else hint)
        raise SpecError("the text gives no arguments of a Hugging Face trainer", "give the script that launches it")
    if not any(name in settings for name in ("learning_rate", *_BATCH)):
        for key, what in table()["no_decoder"]["keys"].items():
            if not is_off(settings.get(key)):
                refuse_other(what, key)
    imported = new_run("huggingface", FSDP_RUNTIME, parallelism={"zero_stage": 0})
    imported.predicts_further = False
    tool = tool or tool_of(settings, config.text)
    unasked = {
        name: value
        for name, value in tool.unasked.items()
        if not any(other in keyed.unread or not is_off(settings.get(other)) for other in _SAME.get(name, ()))
        and name not in settings
        and name not in keyed.unread
    }
    tool.assume(imported, unasked)
    if settings.get("peft_type"):
        imported.assumed |= {name: str(value) for name, value in dialect("peft").left_out(settings).items()}
    said, settings = settings, {**unasked, **settings}
    run, layout = imported.run, imported.run["parallelism"]
    if (answer := number(settings, "max_completion_length")) is not None and number(said, *_SEQUENCE) is None:
        settings["max_length"] = (number(settings, "max_prompt_length") or 512) + answer
    run["seq_length"], run["global_batch_size"] = number(settings, *_SEQUENCE), number(settings, "global_batch_size")
    is_asked = any(is_on(settings.get(n)) or settings.get(n) in ("offload", "unsloth") for n in _CHECKPOINTING)
    if is_asked or ("disable_gradient_checkpointing" in settings and "gradient_checkpointing" in tool.unasked):
        layout["recompute"] = "none" if is_on(settings.get("disable_gradient_checkpointing")) else "full"
    run["num_gpus"] = keyed.num_gpus or number(settings, "num_processes") or exported_gpus(config.text)
    accelerate = config.beside(str(settings.get("config_file") or ACCELERATE_FILE))
    sections: Settings = {name: settings[name] for name in ("fsdp_config", "parallelism_config") if name in settings}
    if accelerate is not None:
        apply_accelerate(imported, file := mapping_of(accelerate), config)
        sections |= file
    note_sections(imported, flat(sections))
    dtype = dtype_of(settings)
    run["dtype"] = dtype or run["dtype"]
    if dtype is not None and IN_FP32 in imported.notes:
        imported.notes.remove(IN_FP32)
    if dtype is None and accelerate is None:
        imported.notes.append("neither bf16 nor fp16 is asked for: priced as bf16")
    _read_sharding(imported, settings, config)
    if not layout["zero_stage"] and not keyed.script.words and accelerate is None and tool.name in _BY_ACCELERATE:
        imported.notes.append(
            f"nothing here says how it is sharded: priced as DDP; put Accelerate's file beside it as {ACCELERATE_FILE}"
        )
    grid = {ours: settings[name] for name, ours in _GRID.items() if settings.get(name) not in (None, "", 1, "1")}
    if isinstance(section := settings.get("parallelism_config"), Mapping):
        grid |= section
    if grid:
        apply_parallelism(imported, grid)
    set_model(imported, next((settings[name] for name in _MODEL if settings.get(name)), None))
    run["model"] = run["model"] or exported_model(config.text)
    # what a file of DeepSpeed's or the arguments say comes before what the tool has unasked
    batch = number(said, *_BATCH) or (None if "micro_batch_size" in layout else number(settings, *_BATCH))
    if batch is not None:
        layout["micro_batch_size"] = batch
    steps = number(said, "gradient_accumulation_steps")
    imported.microbatches_per_rank = steps or imported.microbatches_per_rank or (1 if batch else None)
    stage = {} if is_off(settings.get("deepspeed")) else {"zero_stage": layout.get("zero_stage")}
    known = {**settings, **stage, "said": said, "num_gpus": run["num_gpus"]}
    imported.refused = refused_settings(known, "huggingface", "accelerate", tool.name)
    read_fine_tuning(imported, settings)
    _list_unread(imported, settings)
    _ROW.sort(imported, said, _READ, lambda name, v: is_off(v) or is_empty(v) or tool.is_harmless(name))
    imported.unknown |= {name: value for name, value in keyed.unread.items() if not _ROW.is_harmless(str(name))}
    layout.setdefault("micro_batch_size", 1)
    return imported


def _in_one(settings: Settings) -> Settings:
    """Settings of LLaMA-Factory's version 1 out of their sections, and those of `accelerate launch` in its file's."""
    if "model_class" in settings:
        adapters, sharding = settings.get("peft_config"), settings.get("dist_config")
        found = {name: value for name, value in settings.items() if name not in ("peft_config", "dist_config")}
        found |= adapters if isinstance(adapters, dict) else {}
        kind = found.pop("name", None)
        found["finetuning_type"] = "full" if kind is None else kind
        if isinstance(sharding, dict):
            is_deepspeed = sharding.get("name") == "deepspeed"
            found |= {"deepspeed": sharding.get("config_file")} if is_deepspeed else {"fsdp_version": 2}
        return found
    found = dict(settings)
    for section in ("fsdp_config", "parallelism_config"):
        start = "fsdp_" if section == "fsdp_config" else f"{section}_"
        names = [
            name for name in settings if str(name).startswith(start) and name not in ("fsdp_config", "fsdp_version")
        ]
        inner = settings.get(section)
        if names and not isinstance(inner, str):
            found[section] = {**(inner or {}), **{name: found.pop(name) for name in names}}
    if is_on(found.pop("use_fsdp", False)):
        found.setdefault("fsdp_version", 1)
    if (name := found.pop("deepspeed_config_file", None)) is not None:
        found["deepspeed"] = name
    if is_on(found.pop("use_deepspeed", False)) and "deepspeed" not in found:
        found.setdefault("zero_stage", 2)
    if (device := found.pop("offload_optimizer_device", "none")) != "none":
        found |= {"offload": True} if device == "cpu" else {"offload_optimizer_device": device}
    if found.get("offload_param_device") == "none":
        del found["offload_param_device"]
    return found


def _read_sharding(imported: ImportedRun, settings: Fields, config: ConfigFile) -> None:
    """DeepSpeed's configuration, `zero_stage`, or FSDP."""
    name, layout = settings.get("deepspeed"), imported.run["parallelism"]
    launched = str(settings.get("config_file") or "")
    if launched and config.beside(launched) is None and name in (None, "", False):
        # Accelerate's file is not there: DeepSpeed's stage or FSDP by its name
        name = launched if re.search(r"zero|deepspeed|(^|[_-])z[0-3]|ds_", launched) else None
        if name is None and "fsdp" in launched:
            layout |= fsdp_layout({}, {})
        if name is None:
            imported.unknown["config_file"] = f"{launched} is not beside the file"
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
            if "offload" in str(name):
                imported.run["features"] |= {
                    "optimizer_offload": 1.0,
                    **({"parameter_offload": True} if stage[1] == "3" else {}),
                }
        else:
            imported.unknown["deepspeed"] = f"{name} is not beside the file: ZeRO 0 is assumed"
    elif settings.get("fsdp") or settings.get("fsdp_config") or settings.get("fsdp_version"):
        options = settings.get("fsdp_config")
        if isinstance(options, str):
            options = json_of(config.beside(options) or "{}", f"mend {options}") if options.endswith(".json") else {}
        words = settings.get("fsdp")
        words = " ".join(map(str, words)) if isinstance(words, list) else words
        options = options if isinstance(options, dict) else {}
        layout |= fsdp_layout({"fsdp": words}, options)
        if "offload" in str(words) or is_on(options.get("fsdp_offload_params", options.get("offload_params"))):
            imported.offload_all("fsdp", f"{words or ''} offload of parameters".strip())


def _list_unread(imported: ImportedRun, settings: Fields) -> None:
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


def _model_options(settings: Fields) -> Fields:
    """Options of the model that arguments of TRL hold inside others."""
    inner = settings.get("model_init_kwargs")
    if not isinstance(inner, dict):
        return {}
    return {name: inner[name] for name in ("dtype", "attn_implementation") if name in inner}


MODULES: Named = table()["torchtune"]["modules"]
"""Attention's projections by peft's names, and by torchtune's (lora_attn_modules)."""
OPTIMIZERS: Named = table()["torchtune"]["optimizers"]
"""Values of the switch `optimizer`, and the classes that recipes name."""
_BUILDER = re.compile(r"torchtune\.models\.\w+\.(q?lora_|q?dora_)?(\w+)")


_BUILDERS: Named = table()["torchtune"]["builders"]
"""Builders in torchtune/models, of the models that ship here."""


def model_of_builder(component: str) -> tuple[Model | None, str]:
    """The model that a builder makes, and what stands before its name: lora_, qlora_, dora_ or nothing."""
    found = _BUILDER.fullmatch(component)
    if found is None:
        return None, ""
    own = next((name for name, builder in _BUILDERS.items() if builder == found[2]), None)
    return own or model_called(found[2].replace("_", "-")), found[1] or ""


_HINT = "give a recipe's YAML, such as recipes/configs/llama3_1/8B_lora.yaml"
_RANKS = re.compile(r"--nproc[-_]per[-_]node[ =](\d{1,4})")


def read_torchtune(config: ConfigFile) -> ImportedRun:
    """The run of a recipe. Raises SpecError for what is none, or trains something else than all weights or adapters."""
    data, num_gpus = _recipe_of(config)
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise SpecError("the file has no model with a _component_", _HINT)
    component = str(data["model"].get("_component_", ""))
    model, kind = model_of_builder(component)
    layout: Fields = {"micro_batch_size": _number(data, "batch_size") or 1}
    imported = new_run(
        "torchtune",
        "torchtune",
        model=exported_model(config.text) or model,
        num_gpus=num_gpus,
        seq_length=_number(_section(data, "tokenizer"), "max_seq_len"),
        parallelism=layout,
    )
    imported.microbatches_per_rank = _number(data, "gradient_accumulation_steps") or 1
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
    row = dialect("torchtune")
    parts = {f"model.{name}": value for name, value in data["model"].items()}
    row.sort(imported, {**data, **parts}, (), lambda name, value: False)
    row.assume(imported, row.left_out(flat(data)))
    return imported


def _recipe_of(config: ConfigFile) -> tuple[Any, int | None]:
    """A recipe's settings under the overrides of a `tune run`, and the GPUs of its launch or of its comments."""
    text, overrides, gpus = config.text, Settings(), None
    if re.search(r"^[^#\n]*\btune run\b", text, re.MULTILINE):
        script = read_script(text, config.beside)
        words = next((words for words in script.commands if words[:2] == ["tune", "run"]), script.words)
        options = options_of(words)
        name = next(iter(options.get("--config", [])), "")
        overrides = overrides_of(words)
        gpus = launched_gpus(options, script) or (1 if "single_device" in " ".join(words) else None)
        text = config.beside(name) or ""
        if not text:
            shipped = not name.endswith((".yaml", ".yml"))
            own = f"{name.rpartition('/')[2]}.yaml"
            hint = f"tune cp {name} {own}, then plan import {own}" if shipped else "put it there"
            raise SpecError(f"{name or '--config'} is not beside the file", hint)
    data = yaml_of(text, _HINT)
    for path, value in overrides.items() if isinstance(data, dict) else ():
        *parents, last = path.split(".")
        section: Any = data
        for parent in parents:
            section = section.setdefault(parent, {}) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section[last] = value
    ranks = _RANKS.search(text)
    said = int(ranks[1]) if ranks is not None else 1 if "single_device" in text else None
    return data, gpus or exported_gpus(text) or said


def _read_layout(imported: ImportedRun, data: Fields) -> None:
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
    if data.get("fsdp_cpu_offload"):
        imported.offload_all("fsdp_cpu_offload")
    if data.get("optimizer_in_bwd"):
        imported.unknown["optimizer_in_bwd"] = str(data["optimizer_in_bwd"])
    dataset = _section(data, "dataset")
    length = imported.run["seq_length"]
    if dataset and not dataset.get("packed") and length is not None:
        imported.notes.append(f"sequences are not packed: priced as if each were {length:,} tokens long")


def _read_adapters(imported: ImportedRun, model: Fields, kind: str) -> None:
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


def _read_switches(imported: ImportedRun, data: Fields) -> None:
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


def _section(data: Fields, name: str) -> Fields:
    part = data.get(name)
    return part if isinstance(part, dict) else {}


def _number(data: Fields, name: str) -> int | None:
    """A positive whole number; None where there is none, or -1, which recipes infer."""
    return positive_number(data, name, unsaid=(None, -1))
