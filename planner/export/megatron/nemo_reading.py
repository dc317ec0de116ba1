"""A run of NeMo: the YAML of its first version, a recipe in Python of its second, or overrides of one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from planner.errors import SpecError
from planner.export.followed.python_recipe import Evaluator, chosen_recipe
from planner.export.followed.python_values import CallRecord
from planner.export.followed.shell_script import read_script
from planner.export.imported_run import ConfigFile, ImportedRun
from planner.export.keyed_settings import (
    beginnings,
    dialect,
    flat,
    is_empty,
    mapping_of,
    num_gpus,
    overrides_of,
    readings,
    resolved,
    table,
)
from planner.export.megatron.bridge_reading import fields_of, plain, precision_named, read_peft, run_of_fields
from planner.export.megatron.keyed_reading import add_lora
from planner.export.megatron.option_rows import options_of
from planner.export.named_models import model_called, vocabulary_of
from planner.specs.base import Fields, Named, Said

_ROW = dialect("nemo")
_PLACES: Named = table()["nemo"]["places"]
_NORMS: Named = table()["nemo"]["norms"]


def as_fields(given: Said) -> Fields:
    """The fields of a Megatron-Bridge tree that NeMo's settings by their paths say."""
    model = {path.removeprefix("model."): value for path, value in given.items() if path.startswith("model.")}
    fields: Fields = {_ROW.renamed.get(name, f"model.{name}"): v for name, v in model.items() if "." not in name}
    precision = str(given.get("trainer.precision", "bf16"))
    fields |= readings("nemo", model, precision=precision, norms=_NORMS, vocabulary=vocabulary_of)["fields"]
    for name in ("model.bias", "model.activation", "model.mcore_gpt", "model.precision"):
        fields.pop(name, None)
    return fields


_LAUNCHER = beginnings(table()["megatron"]["launchers"])
_HELPERS: Named = table()["nemo"]["keywords"]
"""Keywords of the functions that NeMo's recipes make a trainer with, where these are in no file beside the recipe."""
_RECIPES: dict[str, Fields] = table()["nemo"]["recipes"]
_MAX_DEPTH = 60
_BESIDE = re.compile(r"trainer\.|model\.(?!(optim\.(overlap_(grad|param)_sync|grad_sync_dtype)|tokenizer\.\w+)$)\w+\.")
"""Settings beside the model's own, but for those that are read."""
_OTHERS = re.compile(
    r"bert|\bt[05]|_t[05]|retro|mamba|griffin|hyena|bart|ul2|inference|\bexport|quantization|prune", re.IGNORECASE
)
"""Names of configurations of NeMo that are no training of a GPT."""


def read_nemo(config: ConfigFile) -> ImportedRun:
    """The run that a NeMo configuration describes. Raises SpecError for what is none."""
    if config.has_line(r"^\s*(import|from) "):
        record = chosen_recipe(Evaluator(config), config.recipe or _entry(config), ("trainer", "data"))
        if record is None:
            raise SpecError(
                "no function of the file returns a recipe that can be followed", "give the recipe's own file"
            )
        return _second_version(record)
    if re.search(r"(trainer|model)\.(strategy|config|devices|num_nodes)", config.text):
        script = read_script(config)
        record, options = _record_of_overrides(script.words), options_of(script.words)
        factory, _, said = next(iter(options.get("--factory", [])), "").partition("(")
        if factory:
            # the function behind this name, with its arguments
            record.kind = f"{factory}.{'finetune' if 'finetune' in script.words else 'pretrain'}_recipe"
            record.fields |= {name: int(number) for name, number in re.findall(r"(num_\w+)\s*=\s*(\d+)", said)}
        imported = _second_version(record)
        imported.ignore(_LAUNCHER.match)
        imported.notes += [] if factory else ["what the recipe sets beside these overrides is not read"]
        imported.run["num_gpus"] = imported.run["num_gpus"] or num_gpus(options, script)
        return imported
    return _first_version(config.text)


def _entry(config: ConfigFile) -> str | None:
    """The function that trains from scratch, where a file has the usual ones."""
    return "pretrain_recipe" if config.has_line(r"^def pretrain_recipe\(") else None


def _second_version(record: CallRecord) -> ImportedRun:
    """A recipe: `trainer.strategy` is the grid, `model.config` the model, `data` the batch."""
    fields, unread = Fields(), Fields()
    model = record.get("model.config") or record.get("model")
    for path, value in fields_of(record).items():
        start = next((start for start in _PLACES if path.startswith(start)), None)
        keyword = _HELPERS.get(path.removeprefix("trainer."))
        if start is not None:
            fields[_PLACES[start] + path.removeprefix(start)] = value
        elif keyword and isinstance(value, (int, bool)):
            fields[keyword] = value
        else:
            unread[path] = value
    fields |= _plugins(record) | _callbacks(record)
    optimizer = record.get("optim")
    if isinstance(optimizer, CallRecord) and re.search(r"distributed_fused_adam|Megatron", optimizer.kind):
        fields.setdefault("optimizer.use_distributed_optimizer", True)
    kind = model.kind.rpartition(".")[2] if isinstance(model, CallRecord) else ""
    # a recipe of NeMo's own that lies in no file here; those of fine-tuning differ by their arguments
    own = re.search(r"(\w*)\.?(?:pretrain|finetune)_recipe$", record.kind)
    row = _RECIPES.get(own[1], {}) if own and "pretrain" in own[0] else {}
    nodes = record.get("trainer.num_nodes") or record.get("num_nodes", row.get("nodes", 1))
    names = ("trainer.devices", "trainer.num_gpus_per_node", "num_gpus_per_node")
    devices = next(filter(None, map(record.get, names)), 8 if own else None)
    named = model_called(kind) or (model_called(str(row.get("model", own[1]))) if own else None)
    defaults = model.defaults if isinstance(model, CallRecord) else {}
    # models drop nothing unless their class says so; sequences are those of the data
    unsaid = {f"model.{name}": plain(value) for name, value in ({"hidden_dropout": 0.0} | defaults).items()}
    if named is None and "hidden_dropout" not in defaults:
        del unsaid["model.hidden_dropout"]
    if "dataset.seq_length" in fields:
        unsaid.pop("model.seq_length", None)
    unasked = readings("nemo-recipe", row, fast=record.get("performance_mode") is True)["fields"] if row else {}
    imported = run_of_fields("nemo", unsaid | unasked | fields, _world(nodes, devices), named, fields)
    imported.ignore(_ROW.is_harmless)
    imported.assume({path: value for path, value in unasked.items() if path not in fields})
    if own is not None and not row:
        imported.unknown[record.kind] = "what it sets is in no file beside this one"
    imported.model_name = kind
    read_peft(imported, record.fields.get("peft"))
    _ROW.sort(imported, unread, (), lambda path, value: path.startswith("peft") or is_empty(value) or value == "")
    return imported


def _world(nodes: Any, devices: Any) -> int | None:
    return nodes * devices if isinstance(nodes, int) and isinstance(devices, int) else None


def _plugins(record: CallRecord) -> Fields:
    """The precision, which is a plugin of the trainer."""
    plugins = record.get("trainer.plugins")
    for plugin in plugins if isinstance(plugins, list) else [plugins]:
        if isinstance(plugin, CallRecord):
            name = " ".join([plugin.kind, str(plugin.get("precision") or ""), str(plugin.get("fp8_recipe") or "")])
            fields = precision_named(
                name.replace("bf16-mixed", "bf16_mixed").replace("16-mixed", "fp16_mixed").replace("bfp16", "bf16")
            )
            if (fp8 := plugin.get("fp8")) is not None:
                fields |= {
                    "mixed_precision.fp8": fp8,
                    "mixed_precision.fp8_recipe": plugin.get("fp8_recipe") or "delayed",
                }
            said = {name: plugin.get(name) for name in ("grad_reduce_in_fp32", "fp8_param_gather")}
            return fields | {f"mixed_precision.{name}": value for name, value in said.items() if value is not None}
    return {}


def _callbacks(record: CallRecord) -> Fields:
    """Overlaps of communication, which a callback of the trainer switches on."""
    callbacks = record.get("trainer.callbacks") or []
    return {
        f"comm_overlap.{name}": value
        for callback in (callbacks if isinstance(callbacks, list) else [])
        if isinstance(callback, CallRecord) and callback.kind.endswith("MegatronCommOverlapCallback")
        for name, value in callback.fields.items()
        if isinstance(value, (bool, int, str))
    }


def _record_of_overrides(words: Sequence[str]) -> CallRecord:
    """Overrides of a command line, or of MODEL_ARGS, as the record that they change."""
    record = CallRecord("")
    for path, value in overrides_of(words).items():
        owner = record
        *parents, name = path.split(".")[:_MAX_DEPTH]
        for parent in parents:
            inner = owner.fields.setdefault(parent, CallRecord(""))
            owner = inner if isinstance(inner, CallRecord) else CallRecord("")
        owner.fields[name] = value
    return record


def _first_version(text: str) -> ImportedRun:
    """`trainer:` and `model:` of a YAML file, as megatron_gpt_config.yaml has them."""
    data = mapping_of(text)
    if not isinstance(model := data.get("model"), Mapping):
        raise SpecError("the file has no model:", "give a configuration of NeMo, such as megatron_gpt_config.yaml")
    what = _OTHERS.search(f"{data.get('name')} {model.get('name')} {' '.join(map(str, data))}")
    if what is not None:
        raise SpecError(
            f"name: {data.get('name')}: this is {what[0].strip('_')}",
            "only decoder-only transformers in training are planned",
        )
    # a reference to nothing is null
    given = {
        path: None if isinstance(value, str) and "${" in value else value
        for path, value in resolved(flat(data)).items()
    }
    imported = run_of_fields(
        "nemo", as_fields(given), _world(given.get("trainer.num_nodes", 1), given.get("trainer.devices"))
    )
    imported.assume(_ROW.left_out(given))
    imported.put(readings("nemo-words", given))
    scheme = str(given.get("model.peft.peft_scheme") or "none").lower()
    if scheme not in ("none", "null"):
        start = f"model.peft.{scheme}_tuning."
        fields = {"dim": given.get(f"{start}adapter_dim", 32), "target_modules": given.get(f"{start}target_modules")}
        add_lora(imported, fields, scheme)
    imported.unknown |= {path: str(value) for path, value in given.items() if _BESIDE.match(path)}
    if "adam" in str(given.get("model.optim.name", "adam")):
        imported.unknown.pop("model.optim.name", None)
    imported.ignore(_ROW.is_harmless)
    return imported
