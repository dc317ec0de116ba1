"""A run of NeMo: the YAML of its first version, a recipe in Python of its second, or overrides of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner.errors import SpecError
from planner.export.followed.python_recipe import Evaluator, chosen_recipe
from planner.export.followed.python_values import CallRecord
from planner.export.followed.shell_script import Script, read_script
from planner.export.imported_run import ConfigFile, ImportedRun, yaml_of
from planner.export.keyed_settings import dialect, flat, resolved
from planner.export.megatron.bridge_reading import fields_of, options_of_fields, precision_named, read_peft, sort_fields
from planner.export.megatron.script_reading import run_of
from planner.export.named_models import model_called, vocabulary_of
from planner.specs.base import Fields, Said

_ROW = dialect("nemo")
_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "layernorm1p": "LayerNorm"}


def as_fields(given: Said) -> tuple[Fields, int | None]:
    """The fields of a Megatron-Bridge tree that NeMo's settings by their paths say, and the number of GPUs."""
    model = {path.removeprefix("model."): value for path, value in given.items() if path.startswith("model.")}
    fields: Fields = {_ROW.renamed.get(name, f"model.{name}"): v for name, v in model.items() if "." not in name}
    activation = str(model.get("activation", "gelu"))
    if "glu" in activation:
        fields["model.gated_linear_unit"] = True
    fields["model.activation_func"] = activation.replace("-", "_") if activation == "squared-relu" else activation
    fields["model.add_bias_linear"] = bool(model.get("bias", True))
    fields["model.normalization"] = _NORMS.get(str(model.get("normalization", "layernorm")), "LayerNorm")
    precision = str(given.get("trainer.precision", "bf16"))
    fields |= {"mixed_precision.fp16": precision in ("16", "16-mixed"), "mixed_precision.bf16": "bf16" in precision}
    if model.get("fp8"):
        # a switch of the model; the trainer says bf16 or 16
        fields["mixed_precision.fp8"] = "e4m3" if model.get("fp8_e4m3") else "hybrid"
        fields["mixed_precision.fp8_recipe"] = "delayed"
    is_sharded = "distributed" in str(model.get("optim.name", ""))
    fields["ddp.use_distributed_optimizer"] = is_sharded
    if is_sharded:
        fields["ddp.overlap_grad_reduce"] = bool(model.get("optim.overlap_grad_sync", False))
        fields["ddp.overlap_param_gather"] = bool(model.get("optim.overlap_param_sync", False))
        if "optim.grad_sync_dtype" in model:
            fields["mixed_precision.grad_reduce_in_fp32"] = model["optim.grad_sync_dtype"] in ("fp32", 32, "float32")
    if not fields.get("model.vocab_size"):
        kind = str(model.get("tokenizer.type") or "")
        fields["model.vocab_size"] = vocabulary_of(kind, str(model.get("tokenizer.model") or kind))
    for name in ("model.bias", "model.activation", "model.mcore_gpt", "model.precision"):
        fields.pop(name, None)
    nodes, devices = given.get("trainer.num_nodes", 1), given.get("trainer.devices")
    return fields, nodes * devices if isinstance(nodes, int) and isinstance(devices, int) else None


_HELPERS = {
    "tensor_parallelism": "model.tensor_model_parallel_size", "context_parallelism": "model.context_parallel_size",
    "pipeline_parallelism": "model.pipeline_model_parallel_size", "sequence_parallelism": "model.sequence_parallel",
    "virtual_pipeline_parallelism": "model.virtual_pipeline_model_parallel_size",
    "expert_parallelism": "model.expert_model_parallel_size", "global_batch_size": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size", "seq_length": "dataset.seq_length",
}  # fmt: skip
"""Keywords of the functions that NeMo's recipes make a trainer with, where these are in no file beside the recipe."""
_MAX_DEPTH = 60
_BESIDE = re.compile(r"trainer\.|model\.optim\.(?!(name|overlap_(grad|param)_sync|grad_sync_dtype)$)")
"""Settings beside the model's own, but for those that are read."""
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
        imported = _second_version(_record_of_overrides(config))
        factory = re.search(r"--factory[ =]['\"]?(\w+)", config.text)
        if factory is not None and imported.run["model"] is None:
            imported.run["model"], imported.model_name = model_called(factory[1]), factory[1]
        return imported
    return _first_version(config.text)


def _entry(config: ConfigFile) -> str | None:
    """The function that trains from scratch, where a file has the usual ones."""
    return "pretrain_recipe" if re.search(r"^def pretrain_recipe\(", config.text, re.MULTILINE) else None


def _second_version(record: CallRecord) -> ImportedRun:
    """A recipe: `trainer.strategy` is the grid, `model.config` the model, `data` the batch."""
    fields: Fields = {}
    unread: Fields = {}
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
        elif (ours := _HELPERS.get(path.removeprefix("trainer."))) and isinstance(value, (int, bool)):
            fields[ours] = value
        else:
            unread[path] = value
    fields |= _plugins(record) | _callbacks(record)
    optimizer = record.get("optim")
    if isinstance(optimizer, CallRecord) and re.search(r"distributed_fused_adam|Megatron", optimizer.kind):
        fields.setdefault("optimizer.use_distributed_optimizer", True)
    nodes = record.get("trainer.num_nodes") or record.get("num_nodes") or 1
    devices = (
        record.get("trainer.devices") or record.get("trainer.num_gpus_per_node") or record.get("num_gpus_per_node")
    )
    world = nodes * devices if isinstance(nodes, int) and isinstance(devices, int) else None
    kind = model.kind.rpartition(".")[2] if isinstance(model, CallRecord) else ""
    named = model_called(kind)
    if named is None and isinstance(model, CallRecord):
        fields = {f"model.{name}": _plain(value) for name, value in model.defaults.items()} | fields
    script = Script(variables={"WORLD_SIZE": [str(world)]} if world else {})
    imported = run_of(options_of_fields(fields), script, "nemo", named=named)
    imported.run["runtime"] = "bridge"
    imported.unknown.clear()
    if imported.run["model"] is None and kind:
        imported.model_name = kind
    imported.notes = [note for note in imported.notes if not note.startswith("neither --bf16")]
    sort_fields(
        {path: value for path, value in fields.items() if path in unread or named}, imported.ignored, imported.unknown
    )
    read_peft(imported, record.fields.get("peft"))
    for path, value in unread.items():
        is_known = _ROW.is_harmless(path) or path.startswith("peft") or value in (None, False, [], {}, "")
        (imported.ignored if is_known else imported.unknown)[path] = str(value)[:200]
    return imported


def _plain(value: Any) -> Any:
    """A value of a class's field; functions and classes by their names."""
    if isinstance(value, CallRecord):
        return value.kind.rpartition(".")[2]
    return value if isinstance(value, (str, int, float, bool, list)) else None


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
            in_fp32 = plugin.get("grad_reduce_in_fp32")
            return fields | ({} if in_fp32 is None else {"mixed_precision.grad_reduce_in_fp32": in_fp32})
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


def _record_of_overrides(config: ConfigFile) -> CallRecord:
    """Overrides of a command line, or of MODEL_ARGS, as the record that they change."""
    words = read_script(config.text, config.beside).words
    pairs = [word.lstrip("-").split("=", 1) for word in words if "=" in word]
    pairs += [
        [word.lstrip("-"), words[i + 1]]
        for i, word in enumerate(words[:-1])
        if word.startswith("--") and "=" not in word
    ]
    record = CallRecord("")
    for path, text in pairs:
        owner = record
        *parents, name = path.split(".")[:_MAX_DEPTH]
        for parent in parents:
            inner = owner.fields.setdefault(parent, CallRecord(""))
            owner = inner if isinstance(inner, CallRecord) else CallRecord("")
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
    # a reference to nothing is null
    given = {
        path: None if isinstance(value, str) and "${" in value else value
        for path, value in resolved(flat(data)).items()
    }
    fields, world = as_fields(given)
    imported = run_of(
        options_of_fields(fields), Script(variables={"WORLD_SIZE": [str(world)]} if world else {}), "nemo"
    )
    imported.run["runtime"] = "bridge"
    imported.unknown.clear()
    imported.assumed |= {path: str(value) for path, value in _ROW.left_out(given).items()}
    sort_fields(fields, imported.ignored, imported.unknown)
    imported.unknown |= {path: str(value) for path, value in given.items() if _BESIDE.match(path)}
    for path in [path for path in imported.unknown if _ROW.is_harmless(path)]:
        imported.ignored[path] = imported.unknown.pop(path)
    return imported
