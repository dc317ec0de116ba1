"""An experiment of AMD's Primus as a run: its YAML, over the presets of a module and of a model that it names."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planner.errors import SpecError
from planner.export.followed.shell_script import read_script
from planner.export.imported_run import ConfigFile, ImportedRun, least_gpus
from planner.export.keyed_settings import flat, is_on, number, readings, table, value_of
from planner.export.megatron.bridge_reading import model_of_recipe
from planner.export.megatron.keyed_reading import add_lora, read_keys
from planner.export.megatron.option_rows import PRIMUS_SCHEDULES, options_of
from planner.export.named_models import exported_gpus, model_called, moe_of, num_layers_of
from planner.export.torchtitan_reading import of_today, run_of_settings
from planner.specs.base import Named, Texts, filled
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
    value = value_of({"none": "None"}.get(text.lower(), text))
    return float(text) if isinstance(value, str) and _NUMBER.fullmatch(text) else value


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


def _extended(config: ConfigFile, path: str, on_the_way: Texts, known: dict[str, Tree]) -> Tree:
    """A preset with all that it extends; `known` has those that were read on the way, since many may extend one."""
    if path not in known:
        if path in on_the_way or len(on_the_way) > _MAX_EXTENDED:
            raise SpecError(f"{printable(path, 80)}: extends itself", "mend its `extends:`")
        text = _text(config, path)
        if text is None:
            raise SpecError(f"{printable(path, 80)}: the checkout has no such preset", f"one below {_ROOT}")

        def read(base: str) -> Tree:
            beside = posixpath.normpath(posixpath.join(posixpath.dirname(path), base))
            return _extended(config, beside, (*on_the_way, path), known)

        known[path] = _over_bases(tree_of(text, path), read)
    return known[path]


def _over_bases(own: Tree, read: Callable[[str], Tree]) -> Tree:
    """A tree over those that it `extends`, as `read` gives them."""
    bases, result = own.pop("extends", []), Tree()
    for base in bases if isinstance(bases, list) else [bases]:
        result = merged(result, read(str(base)))
    return merged(result, own)


_GPUS_OF_A_NODE = 8
_MAX_DEPTH = 10
_OTHER_MODELS = re.compile(r"mamba|zebra|deepseek_v4|kimi_k3")
"""Parts of the names of presets whose models are none that Megatron-LM's arguments say."""
_HARDWARE = re.compile(r"(?<![a-z0-9])MI(300|325|350|355)X?(?![a-z0-9])", re.IGNORECASE)
_DEFAULT_HARDWARE = "mi300x"
_LEFT_OUT = re.compile(
    r"(sink_level|file_sink|stderr_sink|trainable|env|lr_scheduler|(model\.converters\.)?primus_turbo|experimental|quantize)\b"
    r"|(sink|\w+_sink)_level"
)
"""Settings of torchtitan's experiments that are Primus' own, and change nothing or are read for themselves."""


_ROW = table()["primus"]


_PUBLISHED: Named = _ROW["published"]
"""Presets that have keys of their own, and the shipped models that they are."""


def _model_of(module: Tree) -> str:
    """The name of a module's preset of a model."""
    return re.sub(r"\.ya?ml$", "", str(module.get("model") or ""))


def read_primus(config: ConfigFile) -> ImportedRun:
    """The run that an experiment describes. Raises SpecError for what is none, and for trainers of no GPT."""
    config, given = _launched(config)
    module = trainer_of(_experiment(config))
    name = _model_of(module)
    if module.get("framework") == "megatron" and name not in _PUBLISHED:
        if (found := _OTHER_MODELS.search(name)) is not None:
            check_is_transformer({"model_type": found[0]})
        if isinstance(said := module.get("overrides"), dict):
            check_is_transformer(said)
    values, overrides, missing = values_of(config, given)
    framework = str(module["framework"])
    imported = READERS[framework](values, overrides, name)
    imported.unknown |= {key: str(value)[:200] for key, value in module.items() if key not in _ROW["module"].split()}
    if missing and framework != "megatron_bridge" and exported_gpus(config.text) is None:
        said_by = " and ".join(missing)
        imported.notes.append(f"no checkout of Primus around the experiment has {said_by}: what they set is not read")
    _name_model(imported, name)
    if nodes := number({"NNODES": given.pop("NNODES", None)}, "NNODES"):
        imported.run["num_gpus"] = nodes * _GPUS_OF_A_NODE
    elif (gpus := exported_gpus(config.text)) is not None:
        imported.run["num_gpus"] = gpus
    _place(imported, config)
    return imported


def _launched(config: ConfigFile) -> tuple[ConfigFile, Tree]:
    """The experiment that a script starts, and what it overrides; a YAML is its own, and overrides nothing."""
    if config.has_line(r"^(modules|extends):"):
        return config, {}
    script = read_script(config)
    options = {name.lstrip("-"): words for name, words in options_of(script.words).items()}
    [name, *_] = [*options.pop("config", []), *script.variables.get("EXP", []), ""]
    if (text := config.beside(name)) is None or config.path is None:
        raise SpecError(f"{name[:80]}: the experiment is not beside the script", "give the experiment's YAML")
    given = {name: _scalar(words[0]) for name, words in options.items() if len(words) == 1}
    nodes = [*script.variables.get("NNODES", []), *re.findall(r"\bNNODES=(\d+)", config.text)]
    given["NNODES"] = next(iter([*nodes, *script.variables.get("SLURM_NNODES", [])]), None)
    return replace(config, text=text, path=config.path.parent / name), given


def values_of(config: ConfigFile, given: Tree | None = None) -> tuple[Tree, Tree, list[str]]:
    """All values that the trainer gets, those that the experiment itself says, and the presets that are missing."""
    module = trainer_of(_experiment(config))
    framework = str(module.get("framework"))
    if framework not in READERS:
        what = _ROW["frameworks"].get(framework)
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
    # keys of a preset that Megatron-LM has not say what the published model is
    of_model = {} if _model_of(module) in _PUBLISHED else preset(config, "models", framework, module.get("model"))
    of_module = preset(config, "modules", framework, module.get("config"))
    missing = [str(module[key])[:60] for key, found in (("config", of_module), ("model", of_model)) if found is None]
    base = _ROW["presets"][framework] if of_module is None else of_module
    return merged((of_model or {}) | base, overrides), overrides, missing


def _experiment(config: ConfigFile, depth: int = 0) -> Tree:
    """The experiment over those beside it that it `extends`."""

    def read(name: str) -> Tree:
        text = config.beside(name)
        if text is None or config.path is None or depth > _MAX_DEPTH:
            raise SpecError(f"extends: {printable(name, 60)}: is not beside the experiment", "put it there")
        return _experiment(ConfigFile(text, config.path.parent / name), depth + 1)

    return _over_bases(tree_of(config.text, str(config.path or "the experiment")), read)


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
    is_described = {"num_layers", "hidden_size"} <= values.keys()
    named = _PUBLISHED.get(model) or (None if is_described else model_called(model))
    if (mixture := moe_of(named)) is not None:
        values = {"num_experts": mixture["num_experts"], **values}
    imported = run_of_keys(values, written, named)
    imported.model_name = model
    return imported


def _read_torchtitan(values: Tree, written: Tree, model: str) -> ImportedRun:
    """The settings of torchtitan, whose sections Primus' keys are."""
    settings = of_today(flat({name: value for name, value in values.items() if isinstance(value, dict)}))
    settings = {name: v for name, v in settings.items() if v is not None and not _LEFT_OUT.match(name)}
    if "model.name" not in settings:
        settings["model.published"] = model_called(model)
    imported = run_of_settings(settings, None)
    imported.source = "primus"
    imported.run["runtime"] = "primus-torchtitan"
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
    named = model_of_recipe(flavor)
    imported = run_of_keys(values, written, named)
    if tuned != "none":
        add_lora(imported, {}, tuned)
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
        model["name"] = name[:60] or "imported"


def _place(imported: ImportedRun, config: ConfigFile) -> None:
    """GPUs: their kind by the folder, and one node, which Primus starts unless NNODES says otherwise."""
    run = imported.run
    found = _HARDWARE.findall(str(config.path.absolute() if config.path else ""))
    run["hardware"] = f"mi{found[-1]}x" if found else _DEFAULT_HARDWARE
    if not found:
        said = f"{_DEFAULT_HARDWARE} (no folder names a GPU; --hardware mi355x, say)"
        imported.assumed = {"hardware": said, **imported.assumed}
    known = {"gpus": run.get("num_gpus"), "batch": run["global_batch_size"], "runtime": run["runtime"]}
    imported.put(readings("primus-place", {}, least=least_gpus(run["parallelism"]), **known))


_ALGORITHMS = {"1f1b": "1f1b", "1f1b-interleaved": "interleaved-1f1b"} | {
    row["algorithm"]: name for name, row in PRIMUS_SCHEDULES.items()
}
"""Values of `pp_algorithm`, and the schedules that they are."""


def run_of_keys(values: Tree, written: Tree, named: str | None = None) -> ImportedRun:
    """The run that an experiment's values describe; `written` are those that its own file says.

    `named` is a model that the experiment names and does not describe.
    """
    if named is None:
        check_is_transformer(values)
    keys = filled(values.items())
    if "num_query_groups" in values and values["num_query_groups"] is None:
        keys.pop("group_query_attention", None)
    if values.get("tensor_model_parallel_size") == 1:
        keys.pop("sequence_parallel", None)
    imported = read_keys("primus", keys, None, model=named or "", written=written)
    run, layout = imported.run, imported.run["parallelism"]
    run["runtime"] = "primus-megatron"
    known = {"layout": layout, "model": run["model"], "described": run["model"] is not None and named is None}
    names = {"num_layers": num_layers_of(named), "algorithms": _ALGORITHMS, "sorted": sorted}
    lora = values["lora"] if isinstance(values.get("lora"), dict) else {}
    imported.put(found := readings("primus", {**values, "lora.enabled": lora.get("enabled")}, **known, **names))
    if "recompute_layers" in found["layout"]:
        layout["recompute_num_layers"] = None
    if is_on(lora.get("enabled")):
        add_lora(imported, lora)
    return imported


def check_is_transformer(values: Tree) -> None:
    """Raise SpecError for a model whose layers are none that this planner has."""
    readings("primus-kind", values, kinds=_ROW["models"])
