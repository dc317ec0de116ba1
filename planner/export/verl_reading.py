"""verl's overrides and ROLL's YAML as runs: an actor's update, or a fine-tuning, on Megatron core, FSDP, DeepSpeed."""

from __future__ import annotations

import re
from collections.abc import Collection

from planner.errors import SpecError
from planner.export.followed.shell_script import Script, read_script
from planner.export.huggingface.trainer_reading import run_of_arguments
from planner.export.imported_run import ConfigFile, ImportedRun
from planner.export.keyed_settings import (
    KeyedSettings,
    Settings,
    dialect,
    first,
    flat,
    is_on,
    mapping_of,
    overrides_of,
    readings,
    refused_settings,
    resolved,
    value_of,
)
from planner.export.megatron.keyed_reading import add_adapters, add_lora, read_keys
from planner.specs.base import Named

_ACTOR, _MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
_ROW = dialect("verl")
_READ = re.compile("|".join(_ROW.read))
_OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload")


def read_verl(config: ConfigFile) -> ImportedRun:
    """The run of a script or a YAML. Raises SpecError where neither trains a model."""
    settings, words = _overrides(config)
    is_rl = any(name.startswith("actor_rollout_ref.") for name in settings)
    model = first(settings, _MODEL + "path", "model.path", "model.partial_pretrain")
    if not settings:
        raise SpecError("the text overrides none of verl's settings", "give the script that calls verl.trainer")
    place = readings("verl-place", settings, words=words)
    is_megatron = place["is_megatron"]
    imported = (_of_megatron if is_megatron else _of_fsdp)(settings, str(model or ""), is_rl, place["num_gpus"])
    known = {"layout": imported.run["parallelism"], "gpus": imported.run["num_gpus"]}
    imported.put(readings("verl", settings, is_rl=is_rl, **known))
    for name in ("verl",) if is_megatron else ("verl", "verl-fsdp"):
        imported.assume(dialect(f"{name}-{'update' if is_rl else 'tuning'}").left_out(settings))
    imported.refused += refused_settings(settings, "verl")
    return imported


def _overrides(config: ConfigFile) -> tuple[Settings, str]:
    """The overrides by their paths, and the words of the launch."""
    if config.has_line(r"^\w+:\s*$") and not config.has_line(r"^\S+ .*\\$"):
        return resolved(flat(mapping_of(config.text))), ""
    script = read_script(config)
    words = script.words
    found = {
        path: f"${{{script.unset[path]}}}" if value is None and path in script.unset else value
        for path, value in overrides_of(words).items()
    }
    gpus = script.variables.get("nproc_per_node") or []
    launched = re.search(r"--nproc[-_]per[-_]node[ =](\d+)", " ".join(words))
    if launched or gpus:
        found.setdefault("trainer.n_gpus_per_node", value_of(launched[1] if launched else gpus[0]))
    found |= script.unpassed
    return found, " ".join(word for word in words if word.endswith((".yaml", "megatron_trainer", "megatron")))


def _of_megatron(settings: Settings, model: str, is_rl: bool, gpus: int | None) -> ImportedRun:
    starts = (f"{_ACTOR}megatron.", "engine.", f"{_ACTOR}optim.override_optimizer_config.",
              "optim.override_optimizer_config.", f"{_ACTOR}optim.", "optim.")  # fmt: skip
    keys, names = Settings(), Named()
    for path, value in settings.items():
        start = next((start for start in starts if path.startswith(start)), None)
        if start is None:
            continue
        key = re.sub(r"^override_\w+_config\.", "", path.removeprefix(start))
        if key not in _OFFLOADS and not _ROW.is_harmless(path):
            keys[key], names[key] = value, path
    micro = f"{_ACTOR}ppo_micro_batch_size_per_gpu" if is_rl else "data.micro_batch_size_per_gpu"
    if settings.get(micro):
        keys["micro_batch_size"] = settings[micro]
    imported = read_keys("verl-megatron", keys, gpus, model=model)
    imported.rename({**names, "micro_batch_size": micro})
    if rank := first(settings, f"{_MODEL}lora.rank", f"{_MODEL}lora_rank", "model.lora.rank"):
        targets = first(settings, f"{_MODEL}lora.target_modules", "model.lora.target_modules")
        add_lora(imported, {"dim": rank, "target_modules": targets})
    imported.predicts_further = is_on(settings.get(f"{_MODEL}mtp.enable_train"))
    _offload(imported, settings, f"{_ACTOR}megatron.")
    _list_unread(imported, settings, names.values())
    return imported


def _of_fsdp(settings: Settings, model: str, is_rl: bool, gpus: int | None) -> ImportedRun:
    """FSDP around a model of transformers."""
    said = readings("verl-fsdp", settings, model=model, is_rl=is_rl)
    imported = run_of_arguments(KeyedSettings(said["arguments"], Script(), gpus), ConfigFile(""), _ROW)
    imported.put(said)
    imported.source = "verl"
    imported.assumed = {}
    _offload(imported, settings, f"{_ACTOR if is_rl else 'model.'}fsdp_config.")
    _list_unread(imported, settings, ())
    return imported


def _offload(imported: ImportedRun, settings: Settings, prefix: str) -> None:
    """verl moves weights, gradients and states to the host between phases: all are on the GPU while it updates."""
    found = [name for name in _OFFLOADS if is_on(settings.get(prefix + name))]
    if found:
        imported.notes.append(f"{', '.join(found)}: on the host during rollouts, on the GPU during the update")
    for name in ("offload_policy", "cpu_offload", "offload_params"):
        if is_on(settings.get(prefix + name)):
            imported.offload_all(prefix + name)


def _list_unread(imported: ImportedRun, settings: Settings, read: Collection[str]) -> None:
    known = {*imported.unknown, *imported.ignored, *read, *filter(_READ.fullmatch, settings)}
    _ROW.sort(
        imported,
        settings,
        known,
        lambda path, value: (
            value in (None, False) or not re.search("[. ]", path) or path.rpartition(".")[2] in _OFFLOADS
        ),
    )


_TRAINED = ("actor_train", "sft_train", "student_train", "student")
"""Workers of ROLL that train."""
_STRATEGY = "strategy_args.strategy_config."
_OF_ROLL = dialect("roll")


def read_roll(config: ConfigFile) -> ImportedRun:
    """The run of ROLL's YAML: what its worker that trains does. Raises SpecError where none does."""
    given = resolved(flat(mapping_of(config.text)))
    worker = next((name for name in _TRAINED if any(path.startswith(f"{name}.") for path in given)), None)
    if worker is None:
        raise SpecError("no worker of ROLL's trains", f"one of {', '.join(_TRAINED)}")
    own = {path.removeprefix(f"{worker}."): value for path, value in given.items() if path.startswith(f"{worker}.")}
    said = readings("roll-arguments", given | own, gpus=_gpus_of(str(own.get("device_mapping", ""))))
    arguments, gpus = said["arguments"], said["num_gpus"]
    model = str(arguments["model_name_or_path"] or "")
    if said["is_megatron"]:
        keys: Settings = {
            path.removeprefix(_STRATEGY).removeprefix("additional_configs."): value
            for path, value in own.items()
            if path.startswith(_STRATEGY)
        } | said["keys"]
        imported = read_keys("roll", keys, gpus, model=model)
        imported.rename({"micro_batch_size": f"{worker}.training_args.per_device_train_batch_size"})
        imported.assumed.pop("--global-batch-size", None)
        add_adapters(imported, arguments)
    else:
        imported = run_of_arguments(KeyedSettings(arguments, Script(), gpus), ConfigFile(""), _OF_ROLL)
    imported.ignored |= {path: str(value)[:200] for path, value in given.items() if not path.startswith(f"{worker}.")}
    dialect("roll-worker").sort(
        imported, own, {path for path in own if said["is_megatron"] and path.startswith(_STRATEGY)}
    )
    imported.source, imported.predicts_further = "roll", False
    imported.model_name = model
    imported.put(readings("roll", given | own, layout=imported.run["parallelism"], **said))
    return imported


def _gpus_of(mapping: str) -> int:
    """GPUs of `list(range(0,16)) + [16, 17]`."""
    ranges = re.findall(r"range\((?:(\d{1,6}), *)?(\d{1,6})\)", mapping)
    rest = re.sub(r"range\([\d, ]*\)", "", mapping)
    return sum(int(last) - int(first or 0) for first, last in ranges) + len(re.findall(r"\d{1,6}", rest))
