"""A run of NeMo: the YAML of its first version, a recipe in Python of its second, or overrides of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner.errors import SpecError
from planner.export.bridge.tree import fields_of, options_of_fields, precision_named, sort_fields
from planner.export.common.config_file import ConfigFile
from planner.export.common.exported_model import model_called, num_layers_of
from planner.export.common.imported_run import ImportedRun
from planner.export.common.markup import yaml_of
from planner.export.megatron.read import run_of
from planner.export.nemo.first_version import NO_EFFECT, as_fields
from planner.export.nemo.interpolation import resolved
from planner.export.recipes.chosen import chosen_recipe
from planner.export.recipes.evaluator import Evaluator
from planner.export.recipes.values import Record
from planner.export.scripts.script import read_script
from planner.export.scripts.shell import Script

_MAX_DEPTH = 60
_OTHERS = re.compile(
    r"bert|\bt[05]|_t[05]|retro|mamba|griffin|hyena|bart|ul2|inference|\bexport|quantization|prune", re.IGNORECASE
)
"""Names of configurations of NeMo that are no training of a GPT."""


def read_nemo(config: ConfigFile) -> ImportedRun:
    """The run that a NeMo configuration describes. Raises SpecError for what is none."""
    if re.search(r"^\s*(import|from) ", config.text, re.MULTILINE):
        record = chosen_recipe(Evaluator(config), config.recipe or _entry(config), ("trainer", "data"))
        if record is None:
            raise SpecError(
                "no function of the file returns a recipe that can be followed", "give the recipe's own file"
            )
        return _second_version(record)
    if re.search(r"(trainer|model)\.(strategy|config|devices|num_nodes)", config.text):
        return _second_version(_record_of_overrides(config))
    return _first_version(config.text)


def _entry(config: ConfigFile) -> str | None:
    """The function that trains from scratch, where a file has the usual ones."""
    return "pretrain_recipe" if re.search(r"^def pretrain_recipe\(", config.text, re.MULTILINE) else None


def _second_version(record: Record) -> ImportedRun:
    """A recipe: `trainer.strategy` is the grid, `model.config` the model, `data` the batch."""
    fields: dict[str, Any] = {}
    unread: dict[str, Any] = {}
    model = record.get("model.config") or record.get("model")
    for path, value in fields_of(record).items():
        head, _, rest = path.partition(".")
        if path.startswith("trainer.strategy.ddp."):
            fields[f"ddp.{rest.removeprefix('strategy.ddp.')}"] = value
        elif path.startswith("trainer.strategy."):
            fields[f"model.{rest.removeprefix('strategy.')}"] = value
        elif path.startswith("model.config."):
            fields[f"model.{rest.removeprefix('config.')}"] = value
        elif head == "data" and rest in ("global_batch_size", "micro_batch_size"):
            fields[f"train.{rest}"] = value
        elif path == "data.seq_length":
            fields["dataset.seq_length"] = value
        elif head == "optim" and rest.startswith("config."):
            fields[f"optimizer.{rest.removeprefix('config.')}"] = value
        else:
            unread[path] = value
    fields |= _plugins(record) | _callbacks(record)
    optimizer = record.get("optim")
    if isinstance(optimizer, Record) and re.search(r"distributed_fused_adam|Megatron", optimizer.kind):
        fields.setdefault("optimizer.use_distributed_optimizer", True)
    nodes, devices = record.get("trainer.num_nodes", 1), record.get("trainer.devices")
    world = nodes * devices if isinstance(nodes, int) and isinstance(devices, int) else None
    kind = model.kind.rpartition(".")[2] if isinstance(model, Record) else ""
    named = model_called(kind)
    if named is None and isinstance(model, Record):
        fields = {f"model.{name}": _plain(value) for name, value in model.defaults.items()} | fields
    script = Script(variables={"WORLD_SIZE": [str(world)]} if world else {})
    imported = run_of(options_of_fields(fields), script, "nemo", num_layers=num_layers_of(named))
    imported.run["runtime"] = "bridge"
    imported.unknown.clear()
    if named is not None:
        imported.run["model"] = named
    elif imported.run["model"] is None and kind:
        imported.notes.append(f"{kind} is no model that the planner knows: add --model")
    imported.notes = [note for note in imported.notes if not note.startswith("neither --bf16")]
    sort_fields(
        {path: value for path, value in fields.items() if path in unread or named}, imported.ignored, imported.unknown
    )
    imported.ignored |= {path: str(value)[:200] for path, value in unread.items()}
    return imported


def _plain(value: Any) -> Any:
    """A value of a class's field; functions and classes by their names."""
    if isinstance(value, Record):
        return value.kind.rpartition(".")[2]
    return value if isinstance(value, (str, int, float, bool, list)) else None


def _plugins(record: Record) -> dict[str, Any]:
    """The precision, which is a plugin of the trainer."""
    plugins = record.get("trainer.plugins")
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        if isinstance(plugin, Record):
            name = " ".join([plugin.kind, str(plugin.get("precision") or ""), str(plugin.get("fp8_recipe") or "")])
            fields = precision_named(
                name.replace("bf16-mixed", "bf16_mixed").replace("16-mixed", "fp16_mixed").replace("bfp16", "bf16")
            )
            if (fp8 := plugin.get("fp8")) is not None:
                fields |= {
                    "mixed_precision.fp8": fp8,
                    "mixed_precision.fp8_recipe": plugin.get("fp8_recipe") or "delayed",
                }
            in_fp32 = plugin.get("grad_reduce_in_fp32")
            return fields | ({} if in_fp32 is None else {"mixed_precision.grad_reduce_in_fp32": in_fp32})
    return {}


def _callbacks(record: Record) -> dict[str, Any]:
    """Overlaps of communication, which a callback of the trainer switches on."""
    callbacks = record.get("trainer.callbacks") or []
    return {
        f"comm_overlap.{name}": value
        for callback in (callbacks if isinstance(callbacks, list) else [])
        if isinstance(callback, Record) and callback.kind.endswith("MegatronCommOverlapCallback")
        for name, value in callback.fields.items()
        if isinstance(value, (bool, int, str))
    }


def _record_of_overrides(config: ConfigFile) -> Record:
    """Overrides of a command line, or of MODEL_ARGS, as the record that they change."""
    words = read_script(config.text, config.beside).words
    pairs = [word.lstrip("-").split("=", 1) for word in words if "=" in word]
    pairs += [
        [word.lstrip("-"), words[i + 1]]
        for i, word in enumerate(words[:-1])
        if word.startswith("--") and "=" not in word
    ]
    record = Record("")
    for path, text in pairs:
        owner = record
        *parents, name = path.split(".")[:_MAX_DEPTH]
        for parent in parents:
            inner = owner.fields.setdefault(parent, Record(""))
            owner = inner if isinstance(inner, Record) else Record("")
        owner.fields[name] = _scalar(text)
    return record


def _scalar(text: str) -> Any:
    try:
        return yaml_of(text, "")
    except SpecError:
        return text


def _first_version(text: str) -> ImportedRun:
    """`trainer:` and `model:` of a YAML file, as megatron_gpt_config.yaml has them."""
    data = yaml_of(text, "give the configuration's file")
    model = data.get("model") if isinstance(data, Mapping) else None
    if not isinstance(model, Mapping):
        raise SpecError("the file has no model:", "give a configuration of NeMo, such as megatron_gpt_config.yaml")
    what = _OTHERS.search(f"{data.get('name')} {model.get('name')} {' '.join(map(str, data))}")
    if what is not None:
        raise SpecError(
            f"name: {data.get('name')}: this is {what[0].strip('_')}",
            "only decoder-only transformers in training are planned",
        )
    tree = resolved(data)
    fields, world = as_fields(tree)
    imported = run_of(
        options_of_fields(fields), Script(variables={"WORLD_SIZE": [str(world)]} if world else {}), "nemo"
    )
    imported.run["runtime"] = "bridge"
    imported.unknown.clear()
    sort_fields(fields, imported.ignored, imported.unknown)
    for path in [path for path in imported.unknown if NO_EFFECT.match(path)]:
        imported.ignored[path] = imported.unknown.pop(path)
    return imported
