"""Recipes of NeMo AutoModel, and of NeMo RL, whose policies it or Megatron core trains, as runs."""

from __future__ import annotations

import re
from itertools import pairwise, product

from planner.errors import SpecError
from planner.export.followed.shell_script import Script, read_script
from planner.export.huggingface.tuning_settings import put_adapters
from planner.export.imported_run import ConfigFile, ImportedRun
from planner.export.keyed_settings import (
    Dialect,
    Settings,
    dialect,
    flat,
    is_on,
    mapping_of,
    num_gpus,
    overrides_of,
    readings,
    resolved,
    table,
)
from planner.export.megatron.keyed_reading import add_lora, read_keys
from planner.export.megatron.option_rows import options_of
from planner.export.named_models import model_called, moe_of
from planner.export.torchtitan_reading import run_of_settings
from planner.specs.base import Named

_MODES = {"True": "full", "False": "none", "None": "none"}
_NO_EXTRA = {
    "parallelism.pipeline_parallel_first_stage_less_layers": 0,
    "parallelism.pipeline_parallel_last_stage_less_layers": 0,
}
"""Embedding and head count as no layers where its stages are cut."""
_PARENTS = 4


def read_automodel(config: ConfigFile) -> ImportedRun:
    """The run of a recipe's YAML, or of a launch that names it. Raises SpecError for what is none."""
    script = Script() if config.has_line(r"^\w+:") else read_script(config)
    return _of_automodel("automodel", resolved(_merged(config)), num_gpus(options_of(script.words), script))


def _of_automodel(name: str, settings: Settings, num_gpus: int | None) -> ImportedRun:
    """The run of settings by their paths; dialects.yaml has their names in torchtitan's words."""
    row = dialect(name)
    unasked = row.left_out(settings)
    if any(path.startswith("peft.") for path in settings) and "peft.dim" not in settings:
        unasked["peft.dim"] = 8
    found: Settings = {}
    for given, (path, key) in product((settings, unasked), row.renamed.items()):
        if str(given.get(path)).lower() not in ("none", "null", "", "0"):
            found.setdefault(key, given[path])
    for key in ("training.local_batch_size", "training.global_batch_size"):
        if key not in found:
            path = next(path for path, name in row.renamed.items() if name == key)
            raise SpecError(f"{path} is not in the file", "it has no default: write it")
    mode = str(found.get("activation_checkpoint.mode"))
    named = str(found.get("model") or "")
    model = model_called(named)
    imported = run_of_settings(
        {
            **_NO_EXTRA,
            **{key: value for key, value in found.items() if "." in key},
            "activation_checkpoint.mode": _MODES.get(mode, mode),
            "model.published": model,
        },
        num_gpus,
    )
    run, layout = imported.run, imported.run["parallelism"]
    imported.source, imported.model_name = name, named
    row.assume(imported, unasked)
    imported.unknown, imported.ignored, run["features"] = {}, {}, {}
    known = {"layout": layout, "gpus": num_gpus, "is_mixture": moe_of(model) is not None, "given": settings}
    imported.put(readings("automodel", found, **known))
    imported.accumulates_whole = is_on(found.get("keeps_weights"))
    _add_adapters(imported, found)
    _list_unread(imported, row, settings, found)
    return imported


def _add_adapters(imported: ImportedRun, found: Settings) -> None:
    if not found.get("rank") or str(found.get("trains_adapters", True)) == "False":
        return
    said = readings("automodel-adapters", found)
    put_adapters(imported, said["arguments"], bool(said["every"]) and moe_of(imported.run["model"]) is not None)


def _list_unread(imported: ImportedRun, row: Dialect, settings: Settings, found: Settings) -> None:
    said = {row.renamed[path]: path for path in settings if path in row.renamed}
    for key, pattern in table()["automodel"]["expected"].items():
        if key in found and not re.fullmatch(pattern, str(found[key])):
            imported.unknown[said.get(key, key)] = str(found[key])
    row.sort(imported, settings, row.renamed)


def read_nemo_rl(config: ConfigFile) -> ImportedRun:
    """The run of a YAML, or of a script with overrides: one update of the policy, or a fine-tuning."""
    settings = resolved(_merged(config))
    if not any(path.startswith("policy.") for path in settings):
        raise SpecError("no settings of a policy", "give the file that --config names, or put it beside the script")
    said = readings("nemo-rl-cluster", settings)
    gpus, is_megatron = said["num_gpus"], said["is_megatron"]
    imported = _of_megatron(settings, gpus) if is_megatron else _of_automodel("nemo-rl", settings, gpus)
    imported.source = "nemo-rl"
    layout = imported.run["parallelism"]
    known = {"text": config.text, "cp": layout.get("cp", 1), "micro": layout["micro_batch_size"]}
    imported.put(readings("nemo-rl", settings, is_megatron=is_megatron, **known))
    return imported


def _merged(config: ConfigFile, depth: int = 0) -> Settings:
    """The settings of a YAML over those of its `defaults`, or the overrides of a script over the YAML that it names."""
    overrides: Settings = {}
    if config.has_line(r"^\w+:"):
        own = mapping_of(config.text)
        parent, overrides = own.get("defaults"), flat(own)
    else:
        script = read_script(config)
        words = script.words
        if not any("policy." in word for word in words):  # of a command that a variable hands on, to ray.sub
            held = (" ".join(value) for value in script.variables.values())
            words = next((text.split() for text in held if "policy." in text), words)
        overrides = overrides_of(words)
        named = (after for word, after in pairwise(words) if word in ("--config", "-c"))
        parent = next(named, None) or next(iter(options_of(words).get("--config", [])), None)
    text = config.beside(str(parent)) if parent and depth < _PARENTS else None
    where = None if config.path is None else config.path.parent / str(parent)
    before = _merged(ConfigFile(text, where), depth + 1) if text is not None else {}
    if text is not None:
        overrides.pop("defaults", None)
    elif parent:
        overrides["defaults"] = str(parent)
    return {**before, **overrides}


def _of_megatron(settings: Settings, gpus: int | None) -> ImportedRun:
    row, start = dialect("nemo-rl-megatron"), "policy.megatron_cfg."
    keys, names = Settings(), Named()
    off = tuple(
        path.removesuffix("enabled") for path, on in settings.items() if path[-8:] == ".enabled" and not is_on(on)
    )
    for path in [path for path in settings if path.startswith(start) and not path.startswith(off)]:
        inner = path.removeprefix(start)
        key = inner.rpartition(".")[2]
        if key != "enabled" and not row.is_harmless(inner):
            keys[key], names[key] = settings[path], path
    keys |= readings("nemo-rl-keys", keys, micro=settings.get("policy.train_micro_batch_size"))["keys"]
    names |= {"micro_batch_size": "policy.train_micro_batch_size"}
    if start + "activation_checkpointing" not in settings:
        names["--recompute-granularity"] = start + "activation_checkpointing"
    imported = read_keys("nemo-rl-megatron", keys, gpus, model=str(settings.get("policy.model_name") or ""))
    imported.rename(names)
    adapters = {path.removeprefix(f"{start}peft."): value for path, value in settings.items()}
    if is_on(adapters.get("enabled")):
        add_lora(imported, adapters)
    outside = {path: value for path, value in settings.items() if not path.startswith(start)}
    _list_unread(imported, dialect("nemo-rl"), outside, {})
    return imported
