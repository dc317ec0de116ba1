"""A run of Megatron-Bridge, a recipe or overrides of one: its configuration tree as options and fields of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from planner.errors import SpecError
from planner.export.followed.python_recipe import Evaluator, chosen_recipe
from planner.export.followed.python_values import CallRecord, Unknown
from planner.export.followed.shell_script import Script, launched_on, read_script
from planner.export.imported_run import ConfigFile, ImportedRun, json_of
from planner.export.keyed_settings import flat, mapping_of, readings, refused_settings, table
from planner.export.megatron.deepspeed_options import check_is_gpt
from planner.export.megatron.keyed_reading import add_lora
from planner.export.megatron.model_options import PATTERNS
from planner.export.megatron.option_rows import (
    BRIDGE,
    FLAGS,
    OF_BRIDGE,
    READ_FLAGS,
    TANH,
    YARN,
    Options,
    OptionWords,
    options_of,
)
from planner.export.megatron.script_reading import run_of
from planner.export.named_models import Model, model_called, num_layers_of
from planner.specs.base import Fields, Named, Said
from planner.specs.reading import kind_of
from planner.specs.registry import load_model
from planner.specs.units import is_count

_ROW = table()["bridge"]
_PATHS = {path: option for option, path in BRIDGE.items()}
# the check of the loss is read as that of the gradients
_FLAGS = {flag.field: flag for flag in (*FLAGS, *READ_FLAGS) if not flag.field.startswith("rerun_state_machine.")}
_ACTIVATIONS = {"squared_relu": "--squared-relu", "quick_gelu": "--quick-geglu"}
_VALUED: Named = OF_BRIDGE["valued"] | {f"model.{name.removeprefix('--').replace('-', '_')}": name for name in PATTERNS}
READ_FIELDS = frozenset({
    *_PATHS, *_FLAGS, *_VALUED, *OF_BRIDGE["read"].split(), *(path for row in YARN for path in row[:2]),
    *OF_BRIDGE["moment_fields"].values(),
})  # fmt: skip
"""Paths that are read."""
IGNORED = re.compile("|".join(
    (rf"({OF_BRIDGE['sections'].replace(' ', '|')})\b",
     *(rf"{section}\.({'|'.join(words.split())})" for section, words in OF_BRIDGE["harmless"].items()))
))  # fmt: skip
"""Paths of fields that change neither seconds nor bytes of a step."""
_OF_HYBRIDS = re.compile(r"model\.(mamba_|hybrid_|is_hybrid|mtp_hybrid|keep_mtp|use_mamba|use_fused_weighted)")
"""Fields that describe a hybrid model of which the name is given."""
_OPTION_MOMENTS = {theirs: ours for ours, theirs in OF_BRIDGE["moments"].items()}


def fields_of(record: CallRecord) -> Fields:
    """Paths and values of a configuration that was followed; classes and dtypes by their names."""
    fields: Fields = {}
    for path, value in record.flat():
        if (
            isinstance(value, CallRecord)
            and value.line
            and value.kind.islower()
            and path in _PATHS.keys() | _VALUED.keys()
        ):
            value = Unknown(f"{value.kind}()")
        value = _named(value)
        if isinstance(value, (str, int, float, list, dict)) or value is None:
            fields[path] = value
        elif isinstance(value, Unknown):
            fields[path] = Unread(str(value))
    model = record.get("model")
    if isinstance(model, CallRecord) and isinstance(model.defaults.get("hidden_size"), int):
        # a class of the tree that says the sizes of a model
        unset = {f"model.{name}": value for name, value in model.defaults.items() if f"model.{name}" not in fields}
        fields |= {path: _named(value) for path, value in unset.items() if path in READ_FIELDS}
    precision = record.get("mixed_precision")
    if isinstance(precision, CallRecord):
        set_fields = {path: value for path, value in fields.items() if path.startswith("mixed_precision.")}
        defaults = {f"mixed_precision.{name}": value for name, value in precision.defaults.items()}
        fields |= {p: v for p, v in defaults.items() if p in READ_FIELDS} | precision_named(precision.kind) | set_fields
    return fields


def _named(value: Any) -> Any:
    """A value; classes, functions and dtypes by their names."""
    return value.kind.rpartition(".")[2] if isinstance(value, CallRecord) else value


def plain(value: Any) -> Any:
    """A value of a class's field; functions and classes by their names."""
    return named if isinstance(named := _named(value), (int, float, str, list)) else None


class Unread(str):
    """The text of a value that only a run knows."""


def precision_named(name: str) -> Fields:
    """The fields of a precision that is given by name, such as `bf16_with_mxfp8_mixed`.

    Gradients are in fp32 beside bf16: a precision overrides what `ddp` says of them (training/mixed_precision.py).
    """
    if not re.search(r"mixed|precision|bf16|fp16", name):
        return {}
    half = "fp16" in name and "bf16" not in name
    fields: Fields = dict.fromkeys(("mixed_precision.bf16", "mixed_precision.grad_reduce_in_fp32"), not half)
    fields["mixed_precision.fp16"] = half
    return fields | next((more for pattern, more in _ROW["precisions"].items() if re.search(pattern, name)), {})


def options_of_fields(fields: Said) -> OptionWords:
    """The fields as options of Megatron-LM."""
    precision = fields.get("mixed_precision")
    if isinstance(precision, dict):
        said = {"grad_reduce_in_fp32": True, **precision}
        fields = {**fields, **{f"mixed_precision.{name}": value for name, value in said.items()}}
    elif isinstance(precision, str):
        fields = {**precision_named(precision), **fields}
    options: OptionWords = {}
    for path, value in fields.items():
        if isinstance(value, Unread):
            continue
        name = _PATHS.get(path) or _VALUED.get(path)
        flag = _FLAGS.get(path)
        if flag is not None and value is flag.value:
            options[flag.option] = []
        elif path == "model.activation_func" and value in _ACTIVATIONS:
            options[_ACTIVATIONS[value]] = []
        elif name is not None and value is not None and value is not False and value != []:
            # a list of numbers is a pattern of layers
            is_words = isinstance(value, list) and not all(isinstance(item, (int, float)) for item in value)
            options[name] = [] if value is True else [str(item) for item in (value if is_words else [value])]
    if isinstance(fields.get("dataset.seq_length"), int):
        options.setdefault("--seq-length", [str(fields["dataset.seq_length"])])
    if isinstance(layout := fields.get("model.pipeline_model_parallel_layout"), list):
        options["--pipeline-model-parallel-layout"] = [_layout_string(layout)]
    return {**options, **_derived(fields, options)}


_SYMBOLS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def _layout_string(stages: list[Any]) -> str:
    """A layout as lists of names, in the letters of Megatron-LM."""
    return "|".join(
        "".join(_SYMBOLS.get(str(name), "t") for name in (stage if isinstance(stage, list) else [stage]))
        for stage in stages
    )


def _derived(fields: Said, options: Options) -> OptionWords:
    """Options whose meaning several fields take together."""
    derived: OptionWords = {}
    for plain, latent, option in YARN:
        if (number := fields.get(latent if fields.get("model.multi_latent_attention") else plain)) is not None:
            derived[option] = [str(number)]
    for option, field in OF_BRIDGE["moment_fields"].items():
        if dtype := fields.get(field):
            name = str(dtype["_target_"] if isinstance(dtype, Mapping) else dtype).rpartition(".")[2]
            derived[option] = [_OPTION_MOMENTS.get(name, name)]
    said: OptionWords = readings("bridge", fields, options={**options, **derived})["options"]
    return derived | said


def run_of_fields(
    source: str, fields: Said, world: int | None, named: Model | None = None, listed: Said | None = None
) -> ImportedRun:
    """The run that fields of Bridge's tree describe; of those that are not read `listed` are noted, or all."""
    imported = run_of(options_of_fields(fields), launched_on(world), source, named=named)
    _sort_fields(fields if listed is None else listed, imported)
    return imported


def _sort_fields(fields: Said, imported: ImportedRun) -> None:
    """Note every field that is not read as ignored where it is known to be harmless or off, else as unknown."""
    imported.run["runtime"] = "bridge"
    imported.unknown.clear()
    for path, value in fields.items():
        is_off = value is None or value is False or value in ([], "", "none", "float32")
        if isinstance(value, Unread) and not IGNORED.match(path):
            imported.unknown[path] = f"{value}: only a run knows it"
        elif path not in READ_FIELDS:
            (imported.ignored if is_off or IGNORED.match(path) else imported.unknown)[path] = str(value)[:200]


_LENGTHS = ("model.seq_length", "dataset.seq_length")
_RANKS = ("--nnodes", "--nproc-per-node")
"""The options of torchrun that say how many ranks there are."""
_COUNTED = ("model.account_for_embedding_in_pipeline_split", "model.account_for_loss_in_pipeline_split")
_MARKS = ("model", "train", "ddp", "mixed_precision")
_HARDWARE = ("h100", "h200", "b200", "b300", "gb200", "gb300", "a100")


def read_bridge(config: ConfigFile) -> ImportedRun:
    """The run that a recipe's function, or its overrides, describe; a recipe that is only named is not known.

    Raises SpecError for a text without overrides or recipes, and for values that are no numbers.
    """
    is_python = config.has_line(r"^\s*def |^from |^import ")
    # a manifest of Kubernetes has programs in its ConfigMap
    if is_python and not config.has_line(r"^#!(?!.*python)|^apiVersion:"):
        return _read_recipe(config)
    words, script, recipe = _words(config)
    check_is_gpt(script.words, {})
    said, others = _arguments(script.words)
    fields = dict(_field(word) for word in (*said, *words))
    recipe, gpus = recipe or others.pop("recipe", ""), others.pop("gpus", "")
    if not fields:
        raise SpecError("the text overrides no field of a recipe", "give bridge.json, or the script that sets fields")
    mode = others.pop("mode", "")
    task = "peft" if mode in ("lora", "dora") else mode or next(iter(re.findall("_(sft|peft)_", recipe)), "pretrain")
    if dtype := others.pop("mixed_precision", ""):
        fields["mixed_precision"] = f"bf16_with_{dtype}_mixed"
    unasked = {path: value for path, value in BASES.get(f"_{task}_common", {}).items() if path not in fields}
    imported = _run({**unasked, **fields}, script, recipe)
    layers, layout = num_layers_of(imported.run["model"]) or 0, imported.run["parallelism"]
    if recipe and layers % layout["pp"] and (layers + 2) % layout["pp"] == 0 and "layout" not in layout:
        # recipes of such models count embedding and loss as layers
        unasked |= dict.fromkeys(_COUNTED, True)
        imported = _run({**unasked, **fields}, script, recipe)
    imported.assume(unasked)
    imported.run["hardware"] = others.pop("hardware", None)
    imported.run["num_gpus"] = imported.run["num_gpus"] or (int(gpus) if is_count(gpus) else None)
    if task == "peft":
        read_peft(imported, mode or "lora")
    imported.unknown |= others
    imported.notes.append("what the recipe sets beside these overrides is not read")
    return imported


def _read_recipe(config: ConfigFile) -> ImportedRun:
    evaluator = Evaluator(config, known=_provided)
    record = chosen_recipe(evaluator, config.recipe, _MARKS)
    if record is None:
        raise SpecError("no function of the file returns a recipe that can be followed", "give the recipe's own file")
    names = [name for name in evaluator.own_functions() if not name.startswith("_")]
    name = config.recipe or (names[0] if len(names) == 1 else "")
    fields = _in_sections(fields_of(record))
    base = record.kind.rpartition(".")[2]
    is_alone = base not in ("", "ConfigContainer")
    bases = BASES.get(base, BASES[""]) if is_alone else {}
    unasked = {path: value for path, value in bases.items() if path not in fields}
    script = launched_on(int(match[1]) if (match := re.search(r"_(\d{1,9})gpus?_", name)) else None)
    named = base if is_alone and base not in BASES and model_of_recipe(base) else name
    imported = _run({**unasked, **fields}, script, named, _hub_name(record.fields.get("model")))
    imported.assume(unasked)
    if is_alone and base not in BASES:
        imported.unknown[base] = "what it sets is in no file beside this one"
    unsaid = CallRecord("LoRA") if base.startswith("_peft_common") else None
    if "peft" not in record.fields:
        imported.assumed["peft"] = "LoRA of rank 32" if unsaid else "none"
    read_peft(imported, record.fields.get("peft", unsaid))
    for call in evaluator.unfollowed:
        is_in = call.fields and any(value is call for value in record.fields.values())
        if is_in and call.kind.islower() and call.kind != "default_peft_config":
            imported.unknown.setdefault(call.kind, f"line {call.line}: in no file beside this one")
    imported.run["hardware"] = next((gpu for gpu in _HARDWARE if f"_{gpu}_" in name), None)
    return imported


BASES: dict[str, Fields] = _ROW["bases"]
"""Fields set by the functions that recipes of Megatron-Bridge call first (recipes/common.py, August 2026)."""


def _in_sections(fields: Said) -> Fields:
    """Keywords that a helper's call gives for the whole recipe, under the section that has them."""
    places = {path.rpartition(".")[2]: path for path in sorted(READ_FIELDS) if path.startswith("model.")}
    places |= {name: f"{section}.{name}" for name, section in _ROW["sections"].items()}
    return {places.get(path, path): value for path, value in fields.items()}


def read_peft(imported: ImportedRun, peft: Any) -> None:
    """Adapters of a recipe: a class of Bridge's or NeMo's, or a scheme by name."""
    for path in [path for path in imported.unknown if path == "peft" or path.startswith("peft.")]:
        del imported.unknown[path]
    if isinstance(peft, Unknown):
        imported.unknown["peft"] = f"{peft}: whether adapters are trained only a run knows; priced as all weights"
    elif isinstance(peft, (str, CallRecord)):
        record_of = peft if isinstance(peft, CallRecord) else CallRecord(peft)
        kind = record_of.kind.rpartition(".")[2]
        if kind in ("default_peft_config", "", "Config"):
            kind = str(next(iter(record_of.arguments), record_of.fields.get("peft_scheme") or "lora"))
        if kind.lower() not in ("none", "null"):
            add_lora(imported, {name: plain(value) for name, value in record_of.fields.items()}, kind)


def _provided(record: CallRecord) -> Fields:
    """The layers of a provider of a model of the hub, which recipes count to lay out its pipeline."""
    name = _hub_name(record)
    if not record.kind.endswith(".to_megatron_provider") or (model := model_called(name)) is None:
        return {}
    spec = load_model(model)
    return {"num_layers": spec.num_hidden_layers, "mtp_num_layers": spec.num_nextn_predict_layers}


def _hub_name(made: Any) -> str:
    """The repository of the hub that a model comes from, which is the first text of the call that makes it."""
    arguments = made.arguments if isinstance(made, CallRecord) else []
    return next((argument for argument in arguments if isinstance(argument, str)), "")


def _run(fields: Said, script: Script, recipe: str, hub_name: str = "") -> ImportedRun:
    launched = {name: words for name, words in options_of(script.words).items() if name in _RANKS}
    options = {**launched, **options_of_fields(fields)}
    is_described = {"--num-layers", "--hidden-size", "--num-attention-heads"} <= options.keys()
    named = None if is_described else model_called(hub_name) or model_of_recipe(recipe)
    if not is_described:
        # a published model drops nothing, and providers of mixtures have it unasked, unlike Megatron-LM
        options = {"--hidden-dropout": ["0.0"], "--moe-token-dispatcher-type": ["alltoall"], **options}
    imported = run_of(options, script, "bridge", named=named)
    if imported.run["model"] is not None and named is None:
        names = {"recipe": recipe, "recipes": OF_BRIDGE["recipes"], "tanh": TANH}
        imported.run["model"] |= readings("bridge-model", fields, **names)["model"]
    _sort_fields(fields, imported)
    if named is not None:
        # a model by name has these layers
        imported.ignore(_OF_HYBRIDS.match)
    imported.model_name = hub_name or recipe
    if isinstance(fields.get("model.pipeline_model_parallel_layout"), Unread):
        # nobody can tell what a layout that is not read refuses
        imported.refused = []
    imported.refused += refused_settings(dict(fields), "bridge")
    lengths = {fields[path] for path in _LENGTHS if isinstance(fields.get(path), int)}
    if len(lengths) > 1:
        imported.refused.append(f"{' and '.join(_LENGTHS)} are to be equal, not {sorted(lengths)}")
    return imported


def model_of_recipe(recipe: str) -> str | None:
    """The model that a recipe's name begins with: `qwen3_30b_a3b_pretrain_config`."""
    parts = re.split(r"_(?:pretrain|sft|peft|finetune|config|low_precision|lora)", recipe)[0].split("_")
    for length in range(len(parts), 0, -1):
        if (model := model_called("-".join(parts[:length]))) is not None:
            return model
    return None


def _words(config: ConfigFile) -> tuple[list[str], Script, str]:
    """The overrides as words, the variables around them, and the name of the recipe."""
    text = config.text
    if text.lstrip().startswith("{"):
        data = json_of(text, "give the bridge.json that plan export wrote")
        overrides = data.get("overrides", [])
        if not isinstance(overrides, list):
            raise SpecError(f"overrides: holds {kind_of(overrides)}, not a list", 'write ["train.train_iters=100", …]')
        return [str(word) for word in overrides], launched_on(data.get("world_size")), str(data.get("recipe", ""))
    if re.match(r"(#.*\n|\s|---)*[a-z_]+:\s*(#.*)?\n", text):
        return [f"{path}={json.dumps(value)}" for path, value in flat(mapping_of(text)).items()], Script(), ""
    script = read_script(config)
    return [word for word in script.words if re.match(r"([+a-z_]+(\.\w+)+|mixed_precision)=", word)], script, ""


def _arguments(words: Sequence[str]) -> tuple[list[str], Named]:
    """Overrides that options of a launch stand for, and what else it is given: a recipe, a mode, what nobody knows."""
    start = next((index for index, word in enumerate(words) if word.endswith(".py")), len(words))
    said, others = list[str](), Named()
    for word, after in pairwise([*words[start:], ""]):
        if (option := re.match(r"--?([A-Za-z][\w.-]*)(=|$)", word)) is None:
            continue
        value = word[option.end() :] if option[2] else "" if re.match(r"-|\w+\.", after) else after
        name = option[1].replace("-", "_")
        place = _PLACES.get(name, word[: option.end(1)])
        if re.fullmatch(r"[a-z_]+(,[a-z_]+)+", value):
            value = json.dumps(value.split(","))
        if "." in place and place[0] != "-":
            said.append(f"{place}={value}")
        else:
            others[place] = value
    others.pop("harmless", None)
    return said, others


_PLACES = {name: path for path, names in _ROW["arguments"].items() for name in names.split()}
"""Options of Bridge's launch scripts, and the fields that they set."""


def _field(word: str) -> tuple[str, Any]:
    """An override's path and value."""
    path, _, value = word.lstrip("+").partition("=")
    if value.startswith("{"):
        # Hydra writes keys without quotes
        value = re.sub(r"([{,])(\w+):", r'\1"\2":', value)
    try:
        return path, json_of(value, "")
    except SpecError:
        return path, {"True": True, "False": False, "None": None}.get(value, value)
