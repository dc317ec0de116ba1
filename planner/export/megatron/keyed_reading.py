"""Trainers whose settings are Megatron-LM's by other names: ms-swift, LLaMA-Factory's adapter, slime, GPT-NeoX."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from planner.errors import SpecError
from planner.export.followed.shell_script import Script, launched_on, read_script
from planner.export.huggingface.tuning_settings import put_adapters
from planner.export.imported_run import ConfigFile, ImportedRun
from planner.export.keyed_settings import (
    KeyedSettings,
    Settings,
    dialect,
    is_off,
    is_on,
    mapping_of,
    number,
    readings,
    settings_of,
    table,
)
from planner.export.megatron.deepspeed_options import as_megatron, read_zero
from planner.export.megatron.option_rows import (
    BRIDGE,
    FLAGS,
    NEGATED,
    PRIMUS,
    READ_FLAGS,
    Options,
    OptionWords,
    options_of,
)
from planner.export.megatron.script_reading import READ_OPTIONS, run_of
from planner.export.named_models import model_called
from planner.specs.base import Fields, Named
from planner.specs.expressions import value_of

OPTION_OF_KEY: Named = (
    {path.rpartition(".")[2]: option for option, path in BRIDGE.items()}
    | {flag.field.rpartition(".")[2]: flag.option for flag in (*FLAGS, *READ_FLAGS) if flag.value}
    | {name.removeprefix("--").replace("-", "_"): name for name in sorted(READ_OPTIONS, reverse=True)}
    | {key: option for option, key in PRIMUS.items() if option not in NEGATED}
    | table()["megatron"]["fields"]
)
"""A key, as the parser of Megatron-LM or its configuration classes name it, to the option that sets it."""
OFF_KEYS = {key: option for option, key in NEGATED.items()} | {"add_position_embedding": "--no-position-embedding"}
"""Keys that are true unasked, and the option that sets them to false."""


def options_of_keys(values: Settings, renamed: Mapping[str, str] = {}) -> Options:
    """Keys and values as options of Megatron-LM; those that are off or unsaid are left out."""
    options: OptionWords = {}
    for key, value in values.items():
        option = renamed.get(key, OPTION_OF_KEY.get(key) or "--" + key.replace("_", "-"))
        if not option or value in (None, "", "None", "null", []):
            continue
        if key in OFF_KEYS:
            if is_off(value):
                options[OFF_KEYS[key]] = []
        elif value is True or value in ("true", "True"):
            options[option] = []
        elif isinstance(value, (list, tuple)) and any(isinstance(item, str) for item in value):
            options[option] = [str(item) for item in value]
        elif not is_off(value) or key in ("position_embedding_type", "moe_router_load_balancing_type"):
            text = str(value)
            # a list of names as one text, `["moe_act", "layernorm"]`; one of numbers is a pattern of layers
            is_list = text.startswith("[") and re.search("[A-Za-z]", text)
            options[option] = re.findall(r"[\w.+-]+", text) if is_list else [text] if text[0] in "([" else text.split()
    return options


_MODEL_KEYS = ("model", "model_name_or_path", "model_id_or_path", "hf_checkpoint", "load")


def read_keys(
    name: str,
    settings: Settings,
    gpus: int | None,
    script: Script | None = None,
    model: str = "",
    written: Settings | None = None,
) -> ImportedRun:
    """The run that the keys of a dialect describe, over its own defaults; keys that nobody knows are unknown.

    `model` is the name of one that they do not describe, `written` are those that are listed where they are not read;
    all where there are none.
    """
    row = dialect(name)
    unasked = row.left_out(settings)
    options = options_of_keys({k: v for k, v in {**unasked, **settings}.items() if k not in row.read}, row.renamed)
    imported = run_of(options, script or Script(), name.partition("-megatron")[0], named=model_called(model))
    imported.model_name = model
    imported.run["num_gpus"] = gpus or imported.run["num_gpus"]
    imported.assume(unasked)
    imported.documented = row.documented
    written = settings if written is None else written
    said = {row.renamed.get(key) or OPTION_OF_KEY.get(key, "--" + key.replace("_", "-")): key for key in written}
    unread, known = imported.unknown | imported.ignored, {*imported.ignored}
    keys = OPTION_OF_KEY.keys() | OFF_KEYS.keys() | row.read
    imported.unknown, imported.ignored = {}, {k: str(v) for k, v in written.items() if is_off(v) and k not in keys}
    for option, value in unread.items():
        key = said.get(option, "" if option.startswith("--") else option)
        if key and key not in row.read:
            said_off = is_off(written.get(key, value)) or re.fullmatch(r"0(\.0*)?", str(value))
            is_known = option in known or said_off or row.is_harmless(key)
            (imported.ignored if is_known else imported.unknown)[key] = value
    return imported


def add_adapters(imported: ImportedRun, settings: Settings) -> None:
    """Adapters of LoRA; Megatron's all-linear has the experts too, whose products are linear layers there."""
    kind = str(next((settings[key] for key in ("tuner_type", "train_type", "sft_type") if key in settings), "full"))
    if kind == "full" and not settings.get("adapters"):
        return
    if kind not in ("lora", "full"):
        imported.unknown["tuner_type"] = f"{kind}, priced as lora"
    put_adapters(imported, {"lora_rank": 8, "lora_dropout": 0.05, "target_modules": "all-linear", **settings})


_ALL_MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def add_lora(imported: ImportedRun, fields: Settings, kind: str = "LoRA") -> None:
    """Adapters as Megatron-Bridge's LoRA says them: rank 32 on all linear layers, those of experts too, unless told."""
    rank, dropout = fields.get("dim", 32), fields.get("dropout")
    if kind.lower() not in ("lora", "canonicallora"):
        imported.unknown["peft"] = f"{kind}, priced as LoRA"
    if not isinstance(rank, int) or rank < 1:
        raise SpecError(f"peft.dim: {rank!r:.60} is no rank", "write a whole number")
    targets = fields.get("target_modules") or _ALL_MODULES
    dropped = dropout if isinstance(dropout, float) else 0.0
    put_adapters(imported, {"r": rank, "lora_dropout": dropped, "target_modules": targets})
    imported.rename({"target_modules": "peft.target_modules"})


def _model_of(settings: Settings) -> str:
    """The name of the model that is loaded; empty where none is named."""
    return next((str(settings[key]) for key in _MODEL_KEYS if settings.get(key)), "")


_SWIFT_CALLS = re.compile(r"(Megatron\w*Arguments|\w*_main)$")


def read_swift(config: ConfigFile) -> ImportedRun:
    """The run of `megatron sft`, `pt` or `rlhf`: its command line, YAML or Python."""
    keyed = settings_of(config, _SWIFT_CALLS)
    settings = keyed.settings
    if isinstance(group := settings.get("train"), Mapping):
        # of Ray's groups of GPUs the one that trains
        keyed.settings = settings = {**settings, "train": None, "gpus": None, **group}
        keyed.num_gpus = number(group, "gpus")
    if any(str(key).startswith("per_device_train") for key in settings):
        return read_adapter(keyed)
    imported = read_keys("ms-swift-megatron", settings, keyed.num_gpus, keyed.script, _model_of(settings))
    imported.predicts_further = bool(settings.get("mtp_num_layers"))
    imported.unknown |= keyed.unread
    add_adapters(imported, settings)
    imported.put(readings("ms-swift", settings, run=imported.run, objectives=table()["huggingface"]["objectives"]))
    return imported


def is_adapter(settings: Settings) -> bool:
    """The settings of a trainer of Hugging Face's hold Megatron core's: LLaMA-Factory's adapter of it."""
    return any(re.search(r"(tensor|pipeline|expert|context)_(model_)?parallel_size$", str(key)) for key in settings)


def read_adapter(keyed: KeyedSettings) -> ImportedRun:
    """The run of LLaMA-Factory's Megatron adapter."""
    settings = keyed.settings
    if settings.get("recompute_granularity") == "full" and "recompute_method" not in settings:
        settings = {**settings, "recompute_method": "uniform", "recompute_num_layers": 1}
    imported = read_keys("llamafactory-megatron", settings, keyed.num_gpus, keyed.script, _model_of(settings))
    imported.microbatches_per_rank = int(settings.get("gradient_accumulation_steps") or 1)
    imported.assumed.pop("--global-batch-size", None)
    imported.unknown.pop("gradient_accumulation_steps", None)
    if str(settings.get("finetuning_type", "full")) != "full":
        imported.unknown["finetuning_type"] = f"{settings['finetuning_type']}: the Megatron adapter trains all weights"
    if not is_on(settings.get("packing")):
        imported.note_unpacked()
    return imported


def read_slime(config: ConfigFile) -> ImportedRun:
    """The run of slime's trainer: Megatron-LM's arguments, beside those of rollouts, which are not priced."""
    script = read_script(config)
    options = options_of(script.words)
    settings: Settings = {name.removeprefix("--").replace("-", "_"): " ".join(w) or True for name, w in options.items()}
    said = readings("slime", settings)
    if "global_batch_size" in said:
        settings.setdefault("global_batch_size", said["global_batch_size"])
    model = "" if "num_layers" in settings else _model_of(settings)
    imported = read_keys("slime", settings, said["num_gpus"], script, model)
    imported.predicts_further = "mtp_num_layers" in settings
    imported.ignore(lambda key: (key, settings.get(key)) == ("train_backend", "megatron"))
    imported.put(said)
    return imported


_ROW = dialect("neox")
_OTHER_LAYERS = re.compile(r"gmlp|amlp|rwkv|mamba")
_GATED: Named = table()["neox"]["gated"]


def read_neox(config: ConfigFile) -> ImportedRun:
    """The run of one file, or of one script's configurations merged. Raises SpecError for models that are no GPT."""
    settings = _settings(config)
    layers = settings.get("attention_config") or []
    if (other := _OTHER_LAYERS.search(json.dumps(layers))) is not None:
        raise SpecError(f"attention_config: {other[0]}: no transformer's layers", "give the configuration of a GPT")
    given = {**_ROW.unasked, **settings}
    said = readings("neox", settings, given=given, gated=_GATED)
    options = as_megatron(_options(given, said))
    imported = run_of(options, launched_on(given.get("global_num_gpus")), "neox")
    run, layout = imported.run, imported.run["parallelism"]
    run["runtime"] = "megatron-deepspeed"
    imported.unknown, imported.ignored, imported.notes = {}, {}, []
    read_zero(options, {**settings, "fp16": None, "bf16": None, said["precision"]: {"enabled": True}}, imported)
    imported.microbatches_per_rank = int(given["gradient_accumulation_steps"] or 1)
    _ROW.assume(imported, _ROW.left_out(settings))
    imported.put(said)
    read = {*_ROW.renamed, *_ROW.unasked}
    _ROW.sort(imported, settings, read)
    layout["zero_stage"] = min(layout["zero_stage"], 3)
    return imported


def _settings(config: ConfigFile) -> Settings:
    """Keys with underscores, whichever way they are written."""
    return {str(key).replace("-", "_"): value for key, value in mapping_of(config.text).items()}


def _options(given: Settings, said: Fields) -> OptionWords:
    """The keys in the words of Megatron-DeepSpeed; a pipeline of 0 stages is none."""
    options = {
        option: [str(given[key])] for key, option in _ROW.renamed.items() if given.get(key) not in (None, "", 0, [], {})
    }
    names = {"given": given, "is_on": is_on, "is_off": is_off, "number": number, "gated": _GATED}
    names |= {"precision": said["precision"], "width": said["width"]}
    for option, text in table()["neox"]["says"].items():
        if (value := value_of(text, names)) not in (None, False, ""):
            options[option] = [] if value is True else [str(value)]
    return options
