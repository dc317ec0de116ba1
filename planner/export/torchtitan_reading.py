"""A torchtitan configuration as a run: a Python recipe (read, never run), command-line overrides, or the old TOML."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from functools import partial
from typing import Any

from planner.errors import SpecError
from planner.export.followed.python_recipe import Evaluator, chosen_recipe
from planner.export.followed.python_values import OPAQUE, CallRecord
from planner.export.followed.shell_script import Script, read_script
from planner.export.imported_run import ConfigFile, ImportedRun, has_line, new_run
from planner.export.keyed_settings import count, dialect, first, flat, num_gpus, readings, refused_settings, table
from planner.export.megatron.option_rows import options_of
from planner.export.named_models import (
    FLAVORS,
    exported_model,
    flavor_of,
    model_of_flavor,
    num_layers_of,
    registered_model,
)
from planner.specs.base import Fields, Named
from planner.specs.reading import literal, parse_python, parse_toml, printable
from planner.trainers.rules.facts import TORCH_CLASSES

RECOMPUTED = "activation_checkpoint.layers"
"""A setting of our own: the layers that the recipe's policy recomputes, where it names them."""
_NEVER_FOLLOWED = frozenset({"model_registry", "default_adamw", "to_graph_trainer_config"})
_SECTIONS = ("parallelism", "training", "compile")
_MAX_SHOWN_CHARACTERS = 80
_ROW = dialect("torchtitan")


def read_recipe(config: ConfigFile) -> tuple[Fields, Named]:
    """Settings by `section.name`, and those whose values cannot be read.

    Raises SpecError for what is no Python, and for a file with several recipes of which none is chosen.
    """
    evaluator = Evaluator(config, _NEVER_FOLLOWED)
    record = chosen_recipe(evaluator, config.recipe, _SECTIONS) or _at_top(evaluator)
    settings: Fields = {}
    unreadable: Named = {}
    if record.kind == "to_graph_trainer_config":  # the recipe of the plain trainer, with what is set afterwards
        plain = record.arguments[0] if record.arguments and isinstance(record.arguments[0], CallRecord) else record
        record = replace(plain, fields={**plain.fields, **record.fields})
        settings["compile.memory_policy"] = "default"
    for section in _SECTIONS:
        value = record.get(section)
        for path, setting in value.flat(f"{section}.") if isinstance(value, CallRecord) else ():
            if isinstance(setting, OPAQUE):
                told = setting.kind if isinstance(setting, CallRecord) else setting
                unreadable[path] = str(told)[:_MAX_SHOWN_CHARACTERS]
            else:
                settings[path] = setting
    settings |= _policy(record, evaluator) | _model(record, config)
    if record.get("debug.deterministic") is True:
        settings["debug.deterministic"] = True
    if isinstance(optimizer := record.get("optimizer"), CallRecord):
        groups = optimizer.get("param_groups")
        groups = groups if isinstance(groups, list) else [groups]
        names = {group.get("optimizer_name", "") for group in groups if isinstance(group, CallRecord)}
        settings["optimizer.name"] = " ".join(sorted(names)) or optimizer.kind
    if record.kind and "." not in record.kind and record.kind[0].islower():
        settings["base"] = record.kind
    return settings, unreadable


def _at_top(evaluator: Evaluator) -> CallRecord:
    """The settings that a file without functions makes: `config.parallelism = …`, or sections of their own."""
    names = evaluator.module.names
    records = [value for value in names.values() if isinstance(value, CallRecord)]
    whole = [record for record in records if any(section in record.fields for section in _SECTIONS)]
    return whole[-1] if whole else CallRecord("", [], {name: names[name] for name in _SECTIONS if name in names})


def _policy(record: CallRecord, evaluator: Evaluator) -> Fields:
    """Mode of activation checkpointing."""
    if "activation_checkpoint" not in record.fields:
        return {}
    policy = record.fields["activation_checkpoint"]
    if policy is None:
        return {"activation_checkpoint.mode": "none"}
    name = policy.kind.partition(".")[0] if isinstance(policy, CallRecord) else str(policy)
    settings: Fields = {"activation_checkpoint.mode": table()["torchtitan"]["policies"].get(name, "selective")}
    if name == "PlannedAC":
        settings[RECOMPUTED] = evaluator.module.names.get("RECOMPUTED")
    if name == "MemoryBudgetAC":
        settings["activation_checkpoint.memory_budget"] = policy.get("memory_budget", True)
    return settings


def _model(record: CallRecord, config: ConfigFile) -> Fields:
    """Module and flavor of the model, and the converters of its layers."""
    if (exported := exported_model(config.text)) is not None:
        return {"model.published": exported}
    spec = record.get("model_spec")
    settings: Fields = {"model.name": _module(config)}
    if not isinstance(spec, CallRecord):
        return settings
    flavor = spec.fields.get("flavor") or next(iter(spec.arguments), None)
    settings["model.flavor"] = flavor if isinstance(flavor, str) else None
    if model_of_flavor(settings["model.name"], str(flavor)) is None:
        again = chosen_recipe(Evaluator(config, _NEVER_FOLLOWED - {"model_registry"}), config.recipe, _SECTIONS)
        settings["model.published"] = registered_model(None if again is None else again.get("model_spec"))
    for converter in spec.fields.get("converters") or []:
        name = (
            converter.kind.rpartition(".")[0] or converter.kind if isinstance(converter, CallRecord) else str(converter)
        )
        dtype = next(
            (dtype for start, dtype in table()["torchtitan"]["converters"].items() if name.startswith(start)), None
        )
        settings["dtype" if dtype else f"model.converters.{name}"] = dtype or True
        if dtype == "fp8":
            settings["float8.recipe_name"] = converter.get("recipe_name") or "tensorwise"
    for option, value in spec.fields.items():
        if option not in ("flavor", "converters", "model"):
            settings[f"model.{option}"] = value if isinstance(value, (str, int, bool, float)) else str(value)
    return settings


def _module(config: ConfigFile) -> str:
    """The package of models whose registry the recipe asks."""
    for node in ast.walk(parse_python(config.text, "", "give the recipe's file")):
        if isinstance(node, ast.ImportFrom) and any(alias.name.endswith("model_registry") for alias in node.names):
            module = (node.module or "").rpartition("torchtitan.models.")[2].split(".")[0]
            return module or (config.path.absolute().parent.name if config.path is not None else "")
    return ""


def read_settings(config: ConfigFile, script: Script) -> tuple[Fields, Named]:
    """Settings, and those whose values only a run would know; `script` holds the text's words.

    Raises SpecError for a file that is broken, or has no settings of torchtitan.
    """
    unreadable: Named = {}
    text = config.text
    if is_recipe(text):
        settings, unreadable = read_recipe(config)
        settings["recipe"] = True
    else:
        is_toml = has_line(text, r"^\[(parallelism|training|model)\]")
        settings = _toml(text) if is_toml else {**_of_file(config), **override_settings(script)}
    if not any(name.startswith(("parallelism.", "training.")) for name in settings):
        if "base" in settings:
            raise SpecError(f"{settings['base']} is not beside the file", "put it there, or import it itself")
        raise SpecError(
            "no torchtitan settings found", "give a recipe, a TOML file, or a script with --parallelism.… options"
        )
    return of_today(settings), unreadable


def of_today(settings: Fields) -> Fields:
    """Settings under today's names, with the dtype that converters of a TOML file, or its older switch, ask for."""
    settings = {_ROW.renamed.get(name, name): value for name, value in settings.items()}
    converters = str(first(settings, "model.converters", "job.converters", default=""))
    for other in [name for name in re.findall(r"[\w.]+", converters) if not re.search("float8|mx", name)]:
        settings[f"model.converters.{other}"] = True
    if "mx" in converters:
        settings["dtype"] = "mxfp8"
    elif "float8" in converters or settings.get("float8.enable") is True:
        settings |= {"dtype": "fp8", "float8.recipe_name": settings.get("float8.recipe_name") or "tensorwise"}
    return settings


def _of_file(config: ConfigFile) -> Fields:
    """Settings of the TOML that a launch names; of one that is not beside it, the model that its path says."""
    named = re.search(
        r"(?:\bCONFIG_FILE=|--job[._]config_file[ =])[\"']?(?:\$\{\w+:-)?[\"']?([\w./$-]+\.toml)", config.text
    )
    if named is None:
        return {}
    if (text := config.beside(named[1])) is not None:
        return _toml(text)
    module = re.search(r"/models/(\w+)/", named[1])
    stem = named[1].rpartition("/")[2].removesuffix(".toml")
    first = stem.partition("_")[0]  # until 2025 the folder of llama3_8b.toml was `llama`
    name = module[1] if module and all(own != first for own, _ in FLAVORS) else first
    name, flavor = flavor_of(name, stem) or (name, stem)
    return {"model.name": name, "model.flavor": flavor, "base": named[1]}


def is_recipe(text: str) -> bool:
    """The text is a recipe in Python: it names torchtitan's classes of settings."""
    return bool(re.search(r"ParallelismConfig|TrainingConfig|Trainer\.Config|import .*model_registry", text))


def _toml(text: str) -> Fields:
    """Settings of a TOML file, as torchtitan took them up to 2025."""
    return flat(parse_toml(text, "", "give the file that --job.config_file names"))


def override_settings(script: Script) -> Fields:
    """`--section.key value`; a bare option is true, `--section.no-key` is false."""
    # run_train.sh takes the recipe from its surroundings
    around = {name.lower(): script.variables.get(name) for name in ("MODULE", "CONFIG")}
    settings: Fields = {name: words[0] for name, words in around.items() if words}
    for option, words in options_of(script.words).items():
        key = option[2:].replace("-", "_") if "." in option else option[2:]
        section, _, name = key.rpartition(".")
        if name.startswith("no_"):
            settings[f"{section}.{name[3:]}"] = False
        elif "." in key or key in ("module", "config"):
            settings[key] = _literal(words[0]) if words else True
    if isinstance(config := settings.get("config"), str):
        flavor = flavor_of(str(settings.get("module", "")), config)
        settings |= {"base": config, "model.name": flavor[0], "model.flavor": flavor[1]} if flavor else {}
    return settings


def _literal(text: str) -> Any:
    """A Python literal, or the text itself where it is none."""
    try:
        return literal(text)
    except ValueError:
        return text


_SCHEDULES = {name.lower(): schedule for schedule, name in TORCH_CLASSES.items()}


def read_torchtitan(config: ConfigFile) -> ImportedRun:
    """The run that a recipe, a TOML file or a launch script with overrides describes.

    Raises SpecError for a text without settings of torchtitan, and for values that torchtitan would not take.
    """
    # a recipe has no words of a shell, and to look for them takes as long as to read it
    script = Script() if is_recipe(config.text) else read_script(config)
    settings, unreadable = read_settings(config, script)
    gpus = count([*script.variables.get("NGPU", []), *script.variables.get("WORLD_SIZE", [])])
    imported = run_of_settings(settings, gpus or num_gpus(options_of(script.words), script))
    run, layout = imported.run, imported.run["parallelism"]
    if "dp" in layout:
        run["num_gpus"] = run["num_gpus"] or layout["dp"] * layout["tp"] * layout["cp"] * layout["pp"]
    imported.unknown |= unreadable
    if is_recipe(config.text):
        # recipes in Python are of 2026, and so is FlexAttention for all language models
        run["features"]["flex_attention"] = True
    return imported


def run_of_settings(settings: Fields, num_gpus: int | None) -> ImportedRun:
    """The run that settings by `section.name` describe; those that are not read are noted as ignored or unknown."""
    name, flavor = (str(settings.get(f"model.{part}") or "") for part in ("name", "flavor"))
    model = settings.get("model.published") or model_of_flavor(name, flavor)
    if name.startswith("flux"):
        raise SpecError("model: flux is a diffusion model", "only decoder-only transformers are planned")
    known = {"whole": partial(_whole, settings), "schedules": _SCHEDULES, "num_layers": num_layers_of(model)}
    imported = new_run("torchtitan", "torchtitan", model=model, num_gpus=num_gpus)
    imported.put(readings("torchtitan", settings, **known))
    imported.refused += refused_settings(settings, "torchtitan")
    _ROW.assume(imported, _ROW.left_out(settings))
    imported.model_name = f"{name} {flavor}".strip() or "the model"
    read = ("model.moe_comm_backend",) if "dispatcher" in imported.run["features"] else ()
    _ROW.sort(imported, settings, read, lambda name, value: False)
    return imported


def _whole(settings: Fields, name: str, default: int) -> int:
    """A setting that is a whole number. Raises SpecError naming it where it is none."""
    value = default if settings.get(name) is None else settings[name]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"{name}: {printable(repr(value), 60)} is no whole number", "write a number")
    return value
