"""Settings of the trainers around Hugging Face's, Accelerate, axolotl, LLaMA-Factory and of adapters, as a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf, isfinite
from typing import Any

from planner.errors import SpecError
from planner.export.huggingface.deepspeed_files import apply_deepspeed, section
from planner.export.imported_run import ConfigFile, ImportedRun, new_run, object_of
from planner.export.keyed_settings import (
    Settings,
    dialect,
    first,
    flat,
    is_empty,
    is_on,
    mapping_of,
    number,
    readings,
    refused_settings,
    table,
    word,
)
from planner.export.named_models import has_plain_attention, has_towers, model_called, moe_of, num_layers_of
from planner.export.trainer_files import settings as settings_file
from planner.specs.base import Fields, Named, Said
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model
from planner.specs.training import ATTENTION, GROUPS, LATENT, OBJECTIVES, TARGETS, AdapterSpec
from planner.trainers.load import load_runtime, switches_of

FSDP_RUNTIME, HF_RUNTIME = "torch-fsdp", "hf"
"""FSDP around fp32 weights, which mixed precision makes of them; and transformers' own weights as they are loaded."""
_SHARDING = {str(name): stage for name, stage in table()["accelerate"]["strategies"].items()}
"""FSDP's strategies, by name and by Accelerate's number, and the ZeRO stage that each is."""


def tuning(settings: Said) -> Fields:
    """Fine-tuning by any trainer's words: the `dtype` (None for fp32), whether it `adapts`, and `bits`."""
    return readings("tuning", settings, kinds=_KINDS)


def apply_fsdp(imported: ImportedRun, words: str, options: Said) -> None:
    """Put what FSDP's options mean into a run, by their own names or Accelerate's; `words` are those of `fsdp`."""
    said = {str(name).removeprefix("fsdp_"): value for name, value in options.items()}
    imported.put(readings("fsdp", said, given=words, strategies=_SHARDING))


def deepspeed_beside(config: ConfigFile, name: Any) -> Fields | None:
    """The DeepSpeed configuration that a setting names, or holds; None where it cannot be read."""
    if isinstance(name, Mapping):
        return dict(name)
    text = config.beside(str(name)) if name else None
    return None if text is None else object_of(text, f"mend {name}")


def set_model(imported: ImportedRun, name: Any, settings: Settings) -> None:
    """The model that a setting names, with the images of the settings; a note where the planner does not know it."""
    if not isinstance(name, str) or not name:
        return
    imported.run["model"] = found = model_called(name)
    if found is None:
        imported.model_name = name
    elif (tower := (model := load_model(found)).vision) is not None:
        length, adapters = imported.run["seq_length"], tuning(settings)["adapts"]
        said = readings("tower", settings, tower=tower, length=length, adapters=adapters)
        if said["vision"]:
            fields = model.model_dump(mode="json") | ({"name": found} if isinstance(found, str) else {})
            imported.run["model"] = {**fields, "vision": fields["vision"] | said["vision"]}
        imported.unknown |= said["unknown"]
        tower = tower.model_copy(update=said["vision"])
        imported.notes.append(
            f"{name[:80]}: planned with a {'trained' if tower.is_trained else 'frozen'} tower and an image of "
            f"{tower.image_tokens:,} tokens a sequence (--images)"
        )
    elif has_towers(name):
        imported.notes.append(f"{name[:80]}: the language model alone is planned")


OPTIMIZERS: Named = table()["transformers"]["optimizers"]
"""Values of the switch `optimizer`, and their names in `optim`; it has none for Muon."""
_OPTIMIZERS = {name: value for value, name in OPTIMIZERS.items()} | table()["transformers"]["older_optimizers"]
_WORDS = ("lora", "qlora")
_KINDS = ("finetuning_type", "tuner_type", "train_type", "sft_type")


def beside_adapters(settings: Said, config: ConfigFile) -> Fields:
    """Fields of peft's and bitsandbytes' files beside training arguments; none where the arguments name adapters."""
    if tuning(settings)["adapts"] or "peft_type" in settings:
        return {}
    found: Fields = {}
    for name in (ADAPTER_FILE, QUANTIZATION_FILE):
        found |= object_of(config.beside(name) or "{}", f"mend {name}")
    return found if "peft_type" in found else {}


def read_fine_tuning(imported: ImportedRun, settings: Fields, **known: Any) -> None:
    """Put adapters, objective, optimizer and kernels into a run, and choose the trainer that keeps weights as it does.

    `known` are names of the table: the tokens of a sequence, the batch and its steps that the settings themselves say,
    and the file of DeepSpeed's that is `beside` them.
    """
    run, layout, said = imported.run, imported.run["parallelism"], tuning(settings)
    imported.unknown |= said["unknown"]
    if said["adapts"]:
        run["adapters"], unknown = read_adapters(settings)
        imported.unknown |= unknown
    for kind in _KINDS:
        if str(settings.get(kind)).lower() not in ("none", "full", *_WORDS):
            imported.unknown[kind] = f"{settings[kind]}, priced as {'lora' if run.get('adapters') else 'all weights'}"
    names = _WORDS_OF_TRAINERS | {
        "runtime": run["runtime"],
        "adapters": run.get("adapters"),
        "bits": said["bits"],
        "gpus": run["num_gpus"],
        "layers": num_layers_of(run["model"]),
        "experts": moe_of(run["model"]) is not None,
        "is_plain": has_plain_attention(run["model"]),
        "layout": layout,
        "zero": layout.get("zero_stage", 0),
        "kinds": _KINDS,
        "switched": switches_of(load_runtime(HF_RUNTIME))["optimizer"],
    }
    unsaid: Fields = {"said_length": None, "micro": None, "steps": None, "beside": {}}
    found = readings("huggingface", settings, **{**unsaid, **known}, **names)
    if found["features"].get("sharding") == "deepspeed":
        run["features"] = {name: run["features"][name] for name in _OFFLOADS if run["features"].get(name)}
    imported.put(found)


_WORDS_OF_TRAINERS: Fields = {
    "objectives": table()["huggingface"]["objectives"],
    "known": OBJECTIVES,
    "optimizers": _OPTIMIZERS,
    "older": table()["trl"]["older"].split(),
}
_OFFLOADS = ("optimizer_offload", "parameter_offload")


_READ_OF_SECTIONS = re.compile(
    r"(fsdp_)?(sharding_strategy|reshard_after_forward|activation_checkpointing(_offload)?|version|offload_params)|zero_stage"
    r"|gradient_accumulation_steps|offload_(optimizer|param)_device|deepspeed_config_file"
    r"|parallelism_config_((tp|cp|sp|dp_replicate|dp_shard)_size|cp_comm_strategy)"
    r"|megatron_lm_(tp_degree|pp_degree|sequence_parallelism|use_distributed_optimizer|recompute_activations?"
    r"|num_micro_batches)"
)
IN_FP32 = "mixed_precision: no, so that it trains in fp32: priced as bf16"


def read_accelerate(config: ConfigFile) -> ImportedRun:
    """The part of a run that Accelerate's YAML holds. Raises SpecError where it is no mapping."""
    settings = mapping_of(config.text)
    imported = new_run("accelerate", FSDP_RUNTIME, parallelism={"zero_stage": 0})
    apply_accelerate(imported, settings, config)
    read_fine_tuning(imported, beside_adapters(settings, config))
    imported.notes.append("an Accelerate configuration names no model, batch or sequence length: add them as options")
    row, given = dialect("accelerate"), flat(settings)
    row.sort(imported, settings, (), lambda name, value: not value)
    row.assume(imported, {path: v for path, v in row.left_out(given).items() if path.partition(".")[0] in settings})
    imported.refused += refused_settings(settings, "accelerate")
    note_sections(imported, given)
    return imported


def note_sections(imported: ImportedRun, given: Said) -> None:
    """List the options in sections of Accelerate's that are not read; `given` are settings by their paths."""
    row = dialect("accelerate")
    for path, value in given.items():
        if "." in path and _READ_OF_SECTIONS.fullmatch(path.partition(".")[2]) is None and not row.is_harmless(path):
            (imported.ignored if is_empty(value) else imported.unknown)[path] = str(value)


def apply_accelerate(imported: ImportedRun, settings: Said, config: ConfigFile) -> None:
    """Put what Accelerate's settings say into a run."""
    imported.put(readings("accelerate", settings, dtype=tuning(settings)["dtype"], in_fp32=IN_FP32))
    kind = word(settings, "distributed_type").upper()
    if kind == "FSDP":
        apply_fsdp(imported, "", section(settings, "fsdp_config"))
        apply_parallelism(imported, section(settings, "parallelism_config"))
    elif kind == "DEEPSPEED":
        _apply_deepspeed(imported, section(settings, "deepspeed_config"), config)
    elif kind == "MEGATRON_LM":
        options = section(settings, "megatron_lm_config")
        sizes = {name.removeprefix("megatron_lm_"): value for name, value in options.items()}
        imported.put(readings("accelerate-megatron", sizes))


def apply_parallelism(imported: ImportedRun, options: Fields) -> None:
    """Sizes of tensor and context parallelism, and of groups that shard."""
    sizes = {str(name).removeprefix("parallelism_config_"): value for name, value in options.items()}
    imported.put(readings("parallelism", sizes, gpus=imported.run["num_gpus"]))


def _apply_deepspeed(imported: ImportedRun, options: Fields, config: ConfigFile) -> None:
    devices = {name: options.get(f"{name}_device") for name in ("offload_optimizer", "offload_param")}
    found: Fields | None = {
        "zero_optimization": {"stage": number(options, "zero_stage") or 0}
        | {name: {"device": device} for name, device in devices.items()},
        "gradient_accumulation_steps": number(options, "gradient_accumulation_steps"),
    }
    if name := options.get("deepspeed_config_file"):
        found = deepspeed_beside(config, name)
    if found is None:
        raise SpecError(
            f"deepspeed_config_file: {name!r:.80} is not beside the file", "put it there, or import it itself"
        )
    apply_deepspeed(imported, found)


ADAPTER_FILE, QUANTIZATION_FILE = "adapter_config.json", "quantization_config.json"
ACCELERATE_FILE = "accelerate_config.yaml"
EVERY_LINEAR = "all-linear"
_EXPERTS = "experts."
_MOST, _LONGEST = 64, 500
"""Alternatives and characters of a pattern that are followed."""


def lora_config(adapters: AdapterSpec, model: ModelSpec) -> Fields:
    """Fields of peft's LoraConfig, with the targets in its order and without those of the other kind of attention."""
    absent = LATENT
    if model.mla is not None:
        absent = (*ATTENTION[1:3], *(ATTENTION[:1] if model.mla.q_lora_rank else LATENT[:2]))
    named = [name for name in TARGETS if name in adapters.modules and (name not in absent or name in adapters.targets)]
    return settings_file("lora", adapters=adapters, named=named)


def read_adapters(settings: Said) -> tuple[Fields, Named]:
    """Fields of AdapterSpec that settings of peft, or of a trainer around it, say; and what it cannot say.

    Raises SpecError for a rank or a dropout that is no number.
    """
    adapters: Fields = {"base_bits": tuning(settings)["bits"]}
    unknown: Named = {}
    rank, dropout = first(settings, "r", "lora_r", "lora_rank", "lora_dim"), first(settings, "lora_dropout")
    if rank is not None:
        adapters["rank"] = int(_number("r", rank))
    if dropout is not None:
        adapters["dropout"] = _number("lora_dropout", dropout)
    adapters["targets"], others = _targets(settings)
    if others:
        unknown["target_modules"] = ", ".join(others)
    for name in ("use_dora", "modules_to_save", "lora_modules_to_save", "layers_to_transform", "rank_pattern"):
        if settings.get(name) not in (None, False, [], {}, ""):
            unknown[name] = str(settings[name])[:200]
    kind = str(settings.get("peft_type") or "LORA").upper()
    if kind != "LORA":
        unknown["peft_type"] = kind
    return adapters, unknown


EXPERT_TARGETS = ("experts.gate_up_proj", "experts.down_proj")


def put_adapters(imported: ImportedRun, settings: Said, has_experts: bool = True) -> None:
    """Put adapters into a run of a trainer whose all-linear has the experts too."""
    adapters, unknown = read_adapters(settings)
    if has_experts and "all-linear" in adapters["targets"]:
        adapters["targets"] = [*adapters["targets"], *EXPERT_TARGETS]
    imported.run["adapters"], imported.unknown = adapters, imported.unknown | unknown


_PACKED: Named = table()["peft"]["packed"] | table()["bridge"]["lora_modules"]
"""The projections behind names that hold several, of packed weights and of Megatron core's modules."""


def _targets(settings: Said) -> tuple[list[str], list[str]]:
    """Targets that the planner knows, and names that it does not."""
    given = first(settings, "target_modules", "lora_target_modules", "lora_target")
    named = [*_listed(given), *_listed(settings.get("target_parameters"))]
    short = [part for name in map(_short, map(str, named)) for part in _PACKED.get(name, name).split()]
    if "all" in short or EVERY_LINEAR in short or settings.get("lora_target_linear") in (True, "true"):
        return [EVERY_LINEAR, *(name for name in short if name in TARGETS and name not in GROUPS[EVERY_LINEAR])], []
    known = [name for name in dict.fromkeys(short) if name in TARGETS]
    # peft adapts the projections of queries and values where nothing is named; Unsloth and DeepSpeed-Chat all
    all_unasked = named or "lora_dim" in settings or is_on(settings.get("use_unsloth"))
    unnamed = [EVERY_LINEAR] if all_unasked else ["q_proj", "v_proj"]
    layers = [str(given)] if re.search(r"layers\W{1,4}\d", str(given)) else []
    return known or unnamed, [*layers, *(n for n in short if n not in TARGETS)]


def _listed(given: Any) -> list[Any]:
    """Names as a list of them, or as a text that holds several; what is neither is one name, which nobody knows."""
    if isinstance(given, str):
        return re.split(r"[\s,|]+", " ".join(_spelled_out(given)))
    return list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]


def _spelled_out(pattern: str) -> list[str]:
    """A regular expression over modules' paths, with the alternatives of its groups written out."""
    texts = [pattern[:_LONGEST]]
    while len(texts) <= _MOST and (group := re.search(r"\((?:\?:)?([^()]*)\)\??", texts[0])):
        texts = [text.replace(group[0], part, 1) for text in texts for part in group[1].split("|")]
    return texts


def _short(name: str) -> str:
    """The end of a module's path, by which peft finds it."""
    tail = name.strip(" .*\\^$").rpartition(".")[2].lstrip("*+")
    return f"{_EXPERTS}{tail}" if f"{_EXPERTS}{tail}" in name else tail


def _number(name: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = inf
    if not isfinite(found):
        raise SpecError(f"{name}: {value!r:.60} is no number", "write a number")
    return found
