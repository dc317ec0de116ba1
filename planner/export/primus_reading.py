"""An experiment of AMD's Primus as a run: its YAML, over the presets of a module and of a model that it names."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from planner.errors import SpecError
from planner.export.followed.shell_script import read_script
from planner.export.imported_run import ConfigFile, ImportedRun, least_gpus
from planner.export.keyed_settings import flat, number
from planner.export.megatron.bridge_reading import model_of_recipe
from planner.export.megatron.keyed_reading import add_lora
from planner.export.megatron.option_rows import options_of
from planner.export.named_models import Model, exported_gpus, model_called, moe_of
from planner.export.primus_keys import check_is_transformer, run_of_keys, torchtitan_features
from planner.export.torchtitan_reading import of_today, run_of_settings
from planner.specs.reading import kind_of, parse_mapping, printable

Tree = dict[str, Any]
_ROOT = "primus/configs"
_MAX_EXTENDED = 60
"""Presets that extend each other."""
_VARIABLE = re.compile(r"\$\{([^:{}]+):([^}]*)\}")
_MERGE = re.compile(r"<<\s*:|\?\s+(&\w+\s+)?<<|!!merge|2002:merge")
"""YAML's merges of mappings: copies of copies grow without end before anyone can count them."""
_NUMBER = re.compile(r"-?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")


def tree_of(text: str, where: str) -> Tree:
    """The mapping in a YAML text, each `${NAME:default}` by its default. Raises SpecError for what is none, or hostile.

    A variable without a default stays as it stands: no value, for whoever needs one.
    """
    if _MERGE.search(text):
        raise SpecError(f"{where}: <<: merges of mappings are not read", "write the keys out")
    tree = parse_mapping(text, where)
    return {str(key): _resolved(value) for key, value in tree.items()}


def _resolved(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _resolved(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner) for inner in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    text = _VARIABLE.sub(lambda match: match[2], value)
    return value if text == value else _scalar(text)


def _scalar(text: str) -> Any:
    """The value of a default: true, false, nothing, a number, else the text."""
    words = {"true": True, "false": False, "null": None, "none": None, "": None}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"-?\d{1,30}", text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def merged(base: Tree, over: Tree) -> Tree:
    """Both trees; where both have a value, that of `over`, and mappings are merged in turn."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        result[key] = merged(base[key], value) if both else value
    return result


def preset(config: ConfigFile, section: str, framework: str, name: Any) -> Tree | None:
    """A preset with all that it extends; None where no checkout of Primus around the experiment has it.

    `section` is `models` or `modules`. Raises SpecError for a name that is none.
    """
    if not isinstance(name, str) or not name:
        raise SpecError(f"{section[:-1]}: {name!r:.60} is {kind_of(name)}, no preset's name", "name one of Primus'")
    file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
    path = posixpath.normpath(posixpath.join(section, framework, file))
    return None if _text(config, path) is None else _extended(config, path, (), {})


def _text(config: ConfigFile, path: str) -> str | None:
    return None if path.startswith(("..", "/")) else config.above(f"{_ROOT}/{path}")


def _extended(config: ConfigFile, path: str, on_the_way: tuple[str, ...], known: dict[str, Tree]) -> Tree:
    """A preset with all that it extends; `known` has those that were read on the way, since many may extend one."""
    if path in known:
        return known[path]
    if path in on_the_way or len(on_the_way) > _MAX_EXTENDED:
        raise SpecError(f"{printable(path, 80)}: extends itself", "mend its `extends:`")
    text = _text(config, path)
    if text is None:
        raise SpecError(f"{printable(path, 80)}: the checkout has no such preset", f"one below {_ROOT}")
    own = tree_of(text, path)
    bases = own.pop("extends", [])
    result: Tree = {}
    for base in bases if isinstance(bases, list) else [bases]:
        beside = posixpath.normpath(posixpath.join(posixpath.dirname(path), str(base)))
        result = merged(result, _extended(config, beside, (*on_the_way, path), known))
    known[path] = merged(result, own)
    return known[path]


_GPUS_OF_A_NODE = 8
_MAX_DEPTH = 10
_OTHERS = {
    "maxtext": "MaxText's, in JAX",
    "diffusion": "a diffusion model's",
    "maxdiffusion": "a diffusion model's, in JAX",
    "hummingbirdxt": "a video model's",
    "nemo_automodel": "NeMo AutoModel's",
}
"""Frameworks of Primus without a reader, and what they are."""
_OTHER_MODELS = re.compile(r"mamba|zebra|deepseek_v4|kimi_k3")
"""Parts of the names of presets whose models are no transformer that the planner has."""
_HARDWARE = re.compile(r"(?<![a-z0-9])MI(300|325|350|355)X?(?![a-z0-9])", re.IGNORECASE)
_DEFAULT_HARDWARE = "mi300x"
_LEFT_OUT = re.compile(
    r"(sink_level|file_sink|stderr_sink|trainable|env|lr_scheduler|primus_turbo|experimental|quantize)\b|(sink|\w+_sink)_level"
)
"""Settings of torchtitan's experiments that are Primus' own, and change nothing or are read for themselves."""


_PRE_TRAINER: dict[str, Tree] = {
    "megatron": {
        "bf16": True, "use_distributed_optimizer": True, "sequence_parallel": True, "micro_batch_size": 2,
        "hidden_dropout": 0.0, "use_flash_attn": True, "cp_comm_type": "p2p", "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False, "swiglu": True, "untie_embeddings_and_output_weights": True,
    },
    "torchtitan": {"activation_checkpoint": {"mode": "none"}, "compile": {"enable": True}},
    "megatron_bridge": {"bf16": True},
}  # fmt: skip
"""Values of `pre_trainer.yaml` and of what all models extend, where no checkout is around it (Primus,
commit fd1eeab, August 2026)."""


def read_primus(config: ConfigFile) -> ImportedRun:
    """The run that an experiment describes. Raises SpecError for what is none, and for trainers of no GPT."""
    config, given = _launched(config)
    module = trainer_of(_experiment(config))
    name = str(module.get("model") or "")
    if module.get("framework") == "megatron":
        if (found := _OTHER_MODELS.search(name)) is not None:
            check_is_transformer({"model_type": "mamba" if found[0] == "zebra" else found[0]})
        if isinstance(said := module.get("overrides"), dict):
            check_is_transformer(said)
    values, overrides, missing = values_of(config, given)
    framework = str(module["framework"])
    imported = READERS[framework](values, overrides, re.sub(r"\.ya?ml$", "", name))
    if missing and framework != "megatron_bridge" and exported_gpus(config.text) is None:
        said_by = " and ".join(missing)
        imported.notes.append(f"no checkout of Primus around the experiment has {said_by}: what they set is not read")
    _name_model(imported, name)
    if nodes := number({"NNODES": given.pop("NNODES", None)}, "NNODES"):
        imported.run["num_gpus"] = nodes * _GPUS_OF_A_NODE
    _place(imported, config)
    return imported


def _launched(config: ConfigFile) -> tuple[ConfigFile, Tree]:
    """The experiment that a script starts, and what it overrides; a YAML is its own, and overrides nothing."""
    if re.search(r"^(modules|extends):", config.text, re.MULTILINE):
        return config, {}
    script = read_script(config.text, config.beside)
    options = {name.lstrip("-"): words for name, words in options_of(script.words).items()}
    [name, *_] = [*options.pop("config", []), *script.variables.get("EXP", []), ""]
    if (text := config.beside(name)) is None or config.path is None:
        raise SpecError(f"{name[:80]}: the experiment is not beside the script", "give the experiment's YAML")
    given = {name: _scalar(words[0]) for name, words in options.items() if len(words) == 1}
    given["NNODES"] = next(iter(script.variables.get("NNODES", [])), None)
    return replace(config, text=text, path=config.path.parent / name), given


def values_of(config: ConfigFile, given: Tree | None = None) -> tuple[Tree, Tree, list[str]]:
    """All values that the trainer gets, those that the experiment itself says, and the presets that are missing."""
    module = trainer_of(_experiment(config))
    framework = str(module.get("framework"))
    if framework not in READERS:
        what = _OTHERS.get(framework)
        raise SpecError(
            f"framework: {printable(framework, 60)}: " + (f"this experiment is {what}" if what else "is unknown"),
            f"experiments of {', '.join(READERS)} are read",
        )
    overrides = module.get("overrides") or {}
    if not isinstance(overrides, dict):
        raise SpecError(f"overrides: is {kind_of(overrides)}, expected a mapping", "write `key: value` lines")
    overrides = overrides | {name: value for name, value in (given or {}).items() if name != "NNODES"}
    if "config" not in module:
        return overrides, overrides, []
    of_model = preset(config, "models", framework, module.get("model"))
    of_module = preset(config, "modules", framework, module.get("config"))
    missing = [str(module[key])[:60] for key, found in (("config", of_module), ("model", of_model)) if found is None]
    base = _PRE_TRAINER[framework] if of_module is None else of_module
    return merged((of_model or {}) | base, overrides), overrides, missing


def _experiment(config: ConfigFile, depth: int = 0) -> Tree:
    """The experiment over those beside it that it `extends`."""
    tree = tree_of(config.text, str(config.path or "the experiment"))
    bases = tree.pop("extends", [])
    result: Tree = {}
    for name in bases if isinstance(bases, list) else [bases]:
        text = config.beside(str(name))
        if text is None or config.path is None or depth > _MAX_DEPTH:
            raise SpecError(f"extends: {printable(str(name), 60)}: is not beside the experiment", "put it there")
        result = merged(result, _experiment(ConfigFile(text, config.path.parent / str(name)), depth + 1))
    return merged(result, tree)


def trainer_of(experiment: Tree) -> Tree:
    """The module that trains: Primus takes one before or one after pre-training."""
    modules = experiment.get("modules")
    if not isinstance(modules, dict):
        raise SpecError("modules: is missing, or no mapping", "give an experiment of Primus")
    module = modules.get("pre_trainer") or modules.get("post_trainer")
    if not isinstance(module, dict):
        raise SpecError("modules: has no pre_trainer and no post_trainer", "give an experiment that trains")
    return module


def _read_megatron(values: Tree, written: Tree, model: str) -> ImportedRun:
    """Megatron-LM's arguments; a model that they do not describe is the one of the preset's name."""
    named = None if "num_layers" in values else model_called(model)
    if (mixture := moe_of(named)) is not None:
        values = {"num_experts": mixture["num_experts"], **values}
    imported = run_of_keys(values, written, named)
    if imported.run["model"] is None and named is None:
        imported.model_name = model
    return imported


def _read_torchtitan(values: Tree, written: Tree, model: str) -> ImportedRun:
    """The settings of torchtitan, whose sections Primus' keys are."""
    settings = of_today(flat({name: value for name, value in values.items() if isinstance(value, dict)}))
    own = {name: settings.pop(name) for name in [*settings] if _LEFT_OUT.match(name)}
    settings = {name: value for name, value in settings.items() if value is not None}
    if "model.name" not in settings:
        settings["model.published"] = model_called(model)
    imported = run_of_settings(settings, None)
    imported.source = "primus"
    imported.run["runtime"] = "primus-torchtitan"
    imported.run["features"] |= torchtitan_features(own)
    said = {*of_today(flat(written))}
    imported.unknown = {name: value for name, value in imported.unknown.items() if name in said}
    imported.ignored = {name: value for name, value in imported.ignored.items() if name in said}
    return imported


def _read_bridge(values: Tree, written: Tree, model: str) -> ImportedRun:
    """Overrides of one of Megatron-Bridge's recipes, by the names of Megatron-LM's arguments."""
    flavor = str(values.get("flavor") or "")
    tuned = str(values.get("peft") or "none")
    if re.search(r"mamba|zebra", flavor):
        raise SpecError(f"flavor: {flavor[:60]}: this is Mamba, a state-space model", "give the experiment of a GPT")
    named: Model | None = model_of_recipe(flavor)
    imported = run_of_keys(values, written, named)
    if tuned != "none":
        add_lora(imported, {}, tuned)
    if imported.run["model"] is None:
        imported.model_name = flavor or "the recipe"
    if (vpp := values.get("virtual_pipeline_model_parallel_size")) is not None:
        imported.run["parallelism"]["vpp"] = vpp
    imported.notes.append(f"what the recipe {flavor} sets beside the overrides is not read")
    return imported


READERS = {"megatron": _read_megatron, "torchtitan": _read_torchtitan, "megatron_bridge": _read_bridge}
"""Framework to the reader of its values."""


def _name_model(imported: ImportedRun, name: str) -> None:
    """Models that are described go by their preset's name, unless a published one has their sizes."""
    model = imported.run["model"]
    if isinstance(model, dict) and model.get("name") == "imported":
        model["name"] = re.sub(r"\.ya?ml$", "", name)[:60] or "imported"


def _place(imported: ImportedRun, config: ConfigFile) -> None:
    """GPUs: their kind by the folder, and one node, which Primus starts unless NNODES says otherwise."""
    run = imported.run
    found = _HARDWARE.findall(str(config.path.absolute() if config.path else ""))
    run["hardware"] = f"mi{found[-1]}x" if found else _DEFAULT_HARDWARE
    if not found:
        imported.notes.append(f"no folder names a GPU: priced on {_DEFAULT_HARDWARE}; add --hardware mi355x, say")
    least, batch = least_gpus(run["parallelism"]), run["global_batch_size"]
    if run.get("num_gpus") is None and _GPUS_OF_A_NODE % least == 0:
        run["num_gpus"] = _GPUS_OF_A_NODE
        imported.notes.append("one node of 8 GPUs, as Primus starts it unless NNODES says otherwise; else add --gpus N")
    if batch is None and run["runtime"] == "primus-megatron":
        imported.notes.append("no global_batch_size is given: one micro-batch a rank")
