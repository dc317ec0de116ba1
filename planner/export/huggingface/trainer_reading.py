"""Arguments of Hugging Face's Trainer and of trainers built on it, and torchtune's recipes, as runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from planner.errors import SpecError
from planner.export.followed.shell_script import read_script
from planner.export.huggingface.deepspeed_files import DEEPSPEED_RUNTIME, apply_deepspeed
from planner.export.huggingface.tuning_settings import (
    ACCELERATE_FILE,
    FSDP_RUNTIME,
    IN_FP32,
    apply_accelerate,
    apply_fsdp,
    apply_parallelism,
    beside_adapters,
    deepspeed_beside,
    note_sections,
    read_fine_tuning,
    set_model,
    tuning,
)
from planner.export.imported_run import ConfigFile, ImportedRun, has_line, new_run, positive_number
from planner.export.keyed_settings import (
    Dialect,
    KeyedSettings,
    Settings,
    dialect,
    flat,
    is_any_on,
    is_empty,
    is_off,
    is_on,
    mapping_of,
    number,
    overrides_of,
    readings,
    refused_settings,
    settings_of,
    table,
)
from planner.export.keyed_settings import num_gpus as launched_gpus
from planner.export.megatron.deepspeed_options import check_trains, refuse_other
from planner.export.megatron.keyed_reading import is_adapter, read_adapter
from planner.export.megatron.option_rows import options_of
from planner.export.named_models import Model, exported_gpus, exported_model, model_called, num_layers_of
from planner.specs.base import Fields
from planner.specs.training import MLP

_FULL = (None, "", "full", 0, "0", False, "false", "False", "none", "LORA")
_NAMED_BY = re.compile(r"[^\s\"'=]*\$[^\s\"']*\.ya?ml")
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")
"""A YAML's name with variables of the shell in it, and each of them."""
_CALLS = re.compile(
    r"(TrainingArguments|\w*(SFT|DPO|CPO|GRPO|Reward|Trainer|Sft|KTO|ORPO|Lora|LoRA)(Config|Arguments)"
    r"|BitsAndBytesConfig|ParallelismConfig|DistributedConfig|get_peft_model|(^|\.)\w*Trainer)$"
)
_LEARNED = re.compile(
    r"\b(?:trl |scripts\.|(?:run_|train_)?(?=\w+\.py\b))(dpo|kto|orpo|cpo|grpo|rloo|ppo|reward|gkd)"
    r"(?:_vlm|_train|_modeling)?(?:\.py)?(?!\S)"
)
"""Programs of TRL, and of those who follow it, whose names say what is learned."""
_QUANTIZED = re.compile(r"(?i)[-_](awq|gptq|aqlm|hqq|eetq)\b")
"""Ends of the names of checkpoints whose weights were quantized before, of 16 bits no more."""
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
_TOOLS = tuple(map(dialect, ("llamafactory", "axolotl", "ms-swift", "deepspeed-chat", "trl", "transformers")))
"""Trainers around Hugging Face's, of which the first is meant whose marks the settings have."""
_SECTION = re.compile(r"(training|train|model|lora|peft|sft|dpo|hyperparameters)(_(args|arguments|config|params))?")
"""Names of sections of one's own, for the model, its training and its adapters."""
_SECTIONS = ("dist_config", "quant_config")
"""Sections of LLaMA-Factory's version 1 whose settings are read by their paths."""
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
    names = {row.renamed[key]: key for key in {**row.unasked, **keyed.settings} if row.renamed.get(key)}
    given = keyed.settings = {row.renamed.get(key) or key: value for key, value in keyed.settings.items()}
    is_rl, other = "train_ppo" in config.text, re.search(r"train_(dpo|rm|kto|kd|prm)\b", config.text)
    said = readings("openrlhf-arguments", given, is_rl=is_rl, other=other)
    given |= said["arguments"]
    keyed.num_gpus = keyed.num_gpus or said["num_gpus"]
    tool = replace(row, unasked={row.renamed.get(key, key): value for key, value in row.unasked.items()})
    imported = run_of_arguments(keyed, config, tool)
    imported.rename(names)
    imported.source = "openrlhf"
    if is_rl:
        length, in_ray = imported.run["seq_length"] or 0, "train_ppo_ray" in config.text
        zero = imported.run["parallelism"].get("zero_stage")
        imported.put(readings("openrlhf", given, length=length, in_ray=in_ray, zero=zero))
    return imported


def run_of_arguments(keyed: KeyedSettings, config: ConfigFile, tool: Dialect | None = None) -> ImportedRun:
    """The run of a trainer's settings, over the defaults of the tool that reads them."""
    keyed.settings = _in_one(keyed.settings)
    if tool is None and (learned := _LEARNED.search(" ".join(keyed.script.words))) is not None:
        keyed.settings.setdefault("stage", learned[1])
    said = {**_model_options(keyed.settings), **keyed.settings, **beside_adapters(keyed.settings, config)}
    _refuse_others(said, keyed, config)
    tool = tool or tool_of(said, config.text + keyed.program)
    unread = keyed.unread
    unasked = {
        name: value
        for name, value in tool.left_out({**said, **unread}).items()
        if not any(other in unread or not is_off(said.get(other)) for other in _SAME.get(name, ()))
    }
    settings = {**unasked, **said}
    imported = new_run("huggingface", FSDP_RUNTIME, parallelism={"zero_stage": 0})
    imported.predicts_further = False
    tool.assume(imported, unasked | (dialect("peft").left_out(said) if said.get("peft_type") else {}))
    run, layout = imported.run, imported.run["parallelism"]
    run["seq_length"], run["global_batch_size"] = number(settings, *_SEQUENCE), number(settings, "global_batch_size")
    _read_checkpointing(imported, settings)
    # a worker of Ray's has a GPU (LLaMA-Factory, axolotl)
    asked = number(settings, "num_processes", "ray_num_workers")
    run["num_gpus"] = keyed.num_gpus or asked or exported_gpus(config.text)
    if run["num_gpus"] is None and re.search(r"\bFast(Language|Vision)?Model\.from_pretrained", config.text):
        run["num_gpus"], imported.assumed["num_gpus"] = 1, "1, as Unsloth trains without a launcher"
    _read_launch(imported, settings, config, tool, not keyed.script.words and tool.name in _BY_ACCELERATE)
    given = [str(settings[name]) for name in (*_MODEL, "model_type") if settings.get(name) not in (None, "", True)]
    # ms-swift's type of a model names it where its folder does not
    set_model(imported, next(filter(model_called, given), given[0] if given else None), settings)
    settings |= {"quantized_checkpoint": True} if any(map(_QUANTIZED.search, given)) else {}
    run["model"] = run["model"] or exported_model(config.text)
    # what a file of DeepSpeed's or the arguments say comes before what the tool has unasked
    batch = number(said, *_BATCH) or (None if "micro_batch_size" in layout else number(settings, *_BATCH))
    if batch is not None:
        layout["micro_batch_size"] = batch
    steps = number(said, "gradient_accumulation_steps")
    imported.microbatches_per_rank = steps or imported.microbatches_per_rank or (1 if batch else None)
    by = "fsdp" if is_off(settings.get("deepspeed")) and run["runtime"] != DEEPSPEED_RUNTIME else "zero_stage"
    sharded = {by: layout["zero_stage"]} if layout["zero_stage"] else {}
    known = {**settings, **sharded, "said": said, "num_gpus": run["num_gpus"]}
    imported.refused += refused_settings(known, "huggingface", "accelerate", tool.name)
    beside = deepspeed_beside(config, settings.get("deepspeed")) or {}
    sizes = {"micro": number(said, *_BATCH), "steps": number(said, "gradient_accumulation_steps")}
    read_fine_tuning(imported, settings, said_length=number(said, *_SEQUENCE), beside=beside, **sizes)
    _list_unread(imported, settings)
    _ROW.sort(imported, said, _READ, lambda name, v: is_off(v) or is_empty(v) or tool.is_harmless(name))
    imported.unknown |= {name: value for name, value in unread.items() if not _ROW.is_harmless(name)}
    layout.setdefault("micro_batch_size", 1)
    return imported


def _read_checkpointing(imported: ImportedRun, settings: Fields) -> None:
    """Recomputing of layers, which a key asks for, or LLaMA-Factory where no key of its own forbids it."""
    is_asked = any(str(value) != "0" and not is_off(value) for value in map(settings.get, _CHECKPOINTING))
    if is_asked or "disable_gradient_checkpointing" in settings:
        is_forbidden = is_on(settings.get("disable_gradient_checkpointing"))
        imported.run["parallelism"]["recompute"] = "none" if is_forbidden else "full"


def _refuse_others(settings: Settings, keyed: KeyedSettings, config: ConfigFile) -> None:
    """Raise SpecError for settings that train nothing, or none of which say a model, a batch or its sharding."""
    check_trains(keyed.script.words)
    if not any(name in settings for name in (*_BATCH, "zero_stage", "deepspeed", *_MODEL, "peft_type")):
        missing = next((name for name in keyed.unread if name.endswith((".yaml", ".yml"))), None)
        if missing is None:
            raise SpecError("the text gives no arguments of a Hugging Face trainer", "give the script that launches it")
        asked = [f"--set {name}=VALUE" for path in _NAMED_BY.findall(config.text) for name in _VARIABLE.findall(path)]
        hint = f"add {' '.join(asked)}" if asked else "put it there, or import it itself"
        raise SpecError(f"{missing[:80]} is not beside the file", hint)
    if not any(name in settings for name in ("learning_rate", *_BATCH)):
        for key, what in table()["no_decoder"]["keys"].items():
            if not is_off(settings.get(key)):
                refuse_other(what, key)


def _read_launch(
    imported: ImportedRun, settings: Settings, config: ConfigFile, tool: Dialect, is_program: bool
) -> None:
    """The dtype, the sharding and the grid, which Accelerate's file beside the settings may say.

    `is_program` is true of a program that Accelerate launches, without the words of a launch.
    """
    run = imported.run
    accelerate = config.beside(str(settings.get("config_file") or ACCELERATE_FILE))
    sections: Settings = {name: settings[name] for name in ("fsdp_config", "parallelism_config") if name in settings}
    if accelerate is not None:
        # of the number of processes, the launch's own comes before the file's (accelerate's commands/launch.py)
        file = mapping_of(accelerate) | {name: settings[name] for name in ("num_processes",) if name in settings}
        apply_accelerate(imported, file, config)
        sections |= file
    note_sections(imported, flat(sections))
    dtype = tuning(settings)["dtype"]
    run["dtype"] = dtype or run["dtype"]
    if dtype is None:
        imported.notes += [] if accelerate else ["neither bf16 nor fp16 is asked for: priced as bf16"]
    elif IN_FP32 in imported.notes:
        imported.notes.remove(IN_FP32)
    _read_sharding(imported, settings, config)
    if not run["parallelism"]["zero_stage"] and is_program and accelerate is None:
        imported.notes.append(
            f"nothing here says how it is sharded: priced as DDP; put Accelerate's file beside it as {ACCELERATE_FILE}"
        )
    own = (name for name in _GRID if settings.get(name) not in (None, "", 1, "1") and not tool.is_harmless(name))
    grid = {_GRID[name]: settings[name] for name in own}
    if isinstance(section := settings.get("parallelism_config"), Mapping):
        grid |= section
    if grid:
        apply_parallelism(imported, grid)


def _in_one(settings: Settings) -> Settings:
    """Settings of LLaMA-Factory's version 1 out of their sections, and those of `accelerate launch` in its file's."""
    found = dict(settings)
    if "model_class" in settings:
        adapters = found.pop("peft_config", None)
        found |= adapters if isinstance(adapters, dict) else {}
        found |= flat({name: found.pop(name) for name in _SECTIONS if isinstance(found.get(name), dict)})
        arguments: Settings = readings("llamafactory-arguments", found)["arguments"]
        found.pop("name", None)
        return found | arguments
    for name in filter(_SECTION.fullmatch, map(str, settings)):
        # of a file that people part by themselves
        if isinstance(inner := settings.get(name), Mapping):
            found |= {"model_name_or_path" if key == "name" else key: value for key, value in found.pop(name).items()}
            found |= {"peft_type": "LORA"} if name.startswith(("lora", "peft")) and "r" in inner else {}
    for section, start in (("fsdp_config", "fsdp_"), ("parallelism_config", "parallelism_config_")):
        inner = settings.get(section)
        names = {name for name in map(str, settings) if name.startswith(start)} - {"fsdp_config", "fsdp_version"}
        if names and not isinstance(inner, str):
            found[section] = {**(inner or {}), **{name: found.pop(name) for name in settings if name in names}}
    said: Settings = readings("launched-arguments", found)["arguments"]
    return {name: value for name, value in found.items() if name not in _SPELLED["of_launch"]} | said


def _read_sharding(imported: ImportedRun, settings: Fields, config: ConfigFile) -> None:
    """DeepSpeed's configuration, `zero_stage`, or FSDP."""
    name, launched = settings.get("deepspeed"), str(settings.get("config_file") or "")
    run, layout = imported.run, imported.run["parallelism"]
    if launched and config.beside(launched) is None and name in (None, "", False):
        # Accelerate's file is not there: DeepSpeed's stage or FSDP by its name
        name = launched if re.search(r"zero|deepspeed|(^|[_-])z[0-3]|ds_", launched) else None
        if name is None:
            layout |= {"zero_stage": 3} if "fsdp" in launched else {}
            imported.unknown["config_file"] = f"{launched} is not beside the file"
    stage = number(settings, "zero_stage")
    if stage is not None:
        run["runtime"], layout["zero_stage"] = DEEPSPEED_RUNTIME, stage
        run["features"]["optimizer_offload"] = float(is_on(settings.get("offload")))
    elif name not in (None, "", False) and not is_on(name):
        run["runtime"] = DEEPSPEED_RUNTIME
        if (found := deepspeed_beside(config, name)) is not None:
            apply_deepspeed(imported, found)
        elif (named := re.search(r"(?:zero|stage|z)[-_]?(?:stage)?[-_]?([0-3])", str(name), re.IGNORECASE)) is not None:
            imported.put(readings("zero-by-name", settings, name=str(name), stage=int(named[1])))
        else:
            imported.unknown["deepspeed"] = f"{name} is not beside the file: ZeRO 0 is assumed"
    elif run["runtime"] != DEEPSPEED_RUNTIME and any(map(settings.get, ("fsdp", "fsdp_config", "fsdp_version"))):
        section: Fields = {name: settings.get(name) for name in ("fsdp_config", "fsdp")}
        for name in [name for name, value in section.items() if str(value).endswith(".json")]:
            if (inner := deepspeed_beside(config, section[name])) is None:
                imported.unknown[name] = f"{section[name]} is not beside the file"
            # a file holds the options, or under the names of the settings both
            section |= {name: None} | (inner or {} if name == "fsdp" else {name: inner})
        words, options = section["fsdp"], section["fsdp_config"]
        words = " ".join(map(str, words)) if isinstance(words, list) else str(words or "")
        apply_fsdp(imported, words, options if isinstance(options, dict) else {})


def _list_unread(imported: ImportedRun, settings: Fields) -> None:
    """List what trains less than the model, or otherwise, in ways that the planner has no price for."""
    for name in (*_NARROWER, *_OTHERS):
        if settings.get(name) not in _FULL:
            imported.unknown[name] = str(settings[name])
    packs = is_any_on(settings, *_PACKING) or "block_size" in settings
    if not packs and "objective" not in imported.run:
        imported.note_unpacked()


def _model_options(settings: Fields) -> Fields:
    """Options of the model that arguments of TRL hold inside others."""
    inner = settings.get("model_init_kwargs")
    if not isinstance(inner, dict):
        return {}
    return {name: inner[name] for name in ("dtype", "torch_dtype", "attn_implementation") if name in inner}


_TORCHTUNE = table()["torchtune"]
_HINT = "give a recipe's YAML, such as recipes/configs/llama3_1/8B_lora.yaml"


def model_of_builder(component: str) -> tuple[Model | None, str]:
    """The model that a builder makes, and what stands before its name: lora_, qlora_, dora_ or nothing."""
    found = re.fullmatch(r"torchtune\.models\.\w+\.(q?lora_|q?dora_)?(\w+)", component)
    if found is None:
        return None, ""
    return _TORCHTUNE["builders"].get(found[2]) or model_called(found[2].replace("_", "-")), found[1] or ""


def read_torchtune(config: ConfigFile) -> ImportedRun:
    """The run of a recipe. Raises SpecError for what is none, or trains something else than all weights or adapters."""
    data, settings, num_gpus = _recipe_of(config)
    if "model._component_" not in settings:
        raise SpecError("the file has no model with a _component_", _HINT)
    component, row = str(settings["model._component_"]), dialect("torchtune")
    model, kind = model_of_builder(component)
    imported = new_run("torchtune", "torchtune", model=exported_model(config.text) or model, num_gpus=num_gpus)
    names = {"kind": kind, "num_gpus": num_gpus, "layers": num_layers_of(imported.run["model"]), "mlp": MLP}
    tables = {name: _TORCHTUNE[name] for name in ("modules", "optimizers")}
    positive = partial(positive_number, settings, unsaid=(None, -1))
    imported.put(readings("torchtune", settings, positive=positive, **names, **tables))
    imported.model_name = component
    parts = {path: value for path, value in settings.items() if path.startswith("model.") or "." not in path}
    row.sort(imported, {**data, **parts}, (), lambda name, value: False)
    row.assume(imported, row.left_out(settings))
    return imported


def _recipe_of(config: ConfigFile) -> tuple[Fields, Fields, int | None]:
    """A recipe, its settings under the overrides of a `tune run`, and the GPUs of its launch or of its comments."""
    text, overrides, gpus = config.text, Fields(), None
    if has_line(text, r"^[^#\n]*\btune run\b"):
        script = read_script(config)
        words = next((words for words in script.commands if words[:2] == ["tune", "run"]), script.words)
        options = options_of(words)
        name, overrides = next(iter(options.get("--config", [])), ""), overrides_of(words)
        gpus = launched_gpus(options, script)
        text = config.beside(name) or ""
        if not text:
            own = f"{name.rpartition('/')[2]}.yaml"
            is_shipped = not name.endswith((".yaml", ".yml"))
            hint = f"tune cp {name} {own}, then plan import {own}" if is_shipped else "put it there"
            raise SpecError(f"{name or '--config'} is not beside the file", hint)
    data = mapping_of(text)
    ranks = re.search(r"--nproc[-_]per[-_]node[ =](\d{1,4})", text)
    said = int(ranks[1]) if ranks is not None else 1 if "single_device" in config.text + text else None
    return data, {**flat(data), **overrides}, gpus or exported_gpus(text) or said
