"""A Hugging Face `config.json` as a ModelSpec, by the table in architectures/: no transformers and no network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath

from pydantic import ValidationError

from planner.errors import SpecError
from planner.specs.architectures import ARCHITECTURES, INNER, REFUSED, SAME_AS, WRAPPERS, Architecture
from planner.specs.architectures.derivations import Config, Derived, InexpressibleError, check_switches
from planner.specs.architectures.general import norm_eps, rotary, router, soft_caps, warn_of_towers
from planner.specs.architectures.layer_lists import without_unused_sections
from planner.specs.model import ModelSpec
from planner.specs.model_parts import MLASpec, MoESpec
from planner.specs.problems import nearest, spec_error
from planner.specs.reading import kind_of

_CANONICAL = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads")
"""Fields that functions read under our names, however a config spells them."""
_YAML_HINT = "write the model as YAML (`plan models llama-3.1-8b` shows one)"


def from_config(config: Config, where: str) -> ModelSpec:
    """The model that a `config.json` describes; `where` names the file in messages.

    Raises SpecError for an unknown architecture, a missing or wrong field, or a layer pattern ModelSpec has not.
    """
    config, row = _architecture(config, where)
    for section in row.sections:
        inner = config.get(section)
        config = {**(inner if isinstance(inner, dict) else {}), **config}
    config = {**_rotary_base(config), **config}
    given = {**row.defaults, **config}
    keys = {
        name: _first(spellings, config) or _first(spellings, row.defaults) or spellings[0]
        for name, spellings in row.keys.items()
    }
    given |= {name: given[keys[name]] for name in _CANONICAL if name in keys and keys[name] in given}
    fields: Derived = {name: given[key] for name, key in keys.items() if key in given}
    try:
        check_switches(config)
        for read in (norm_eps, soft_caps, rotary, router):
            fields |= read(given)
        fields |= row.fixed
        for function in row.derive:
            fields |= function(given)
        fields = without_unused_sections(fields)
        if "moe" in fields or not {"num_experts"} & (keys.keys() | fields.keys()):
            # no experts, whatever the keys of a router say
            fields = {name: value for name, value in fields.items() if name not in MoESpec.model_fields}
        return ModelSpec.model_validate({"name": _name(config, where), "source": f"config.json ({where})", **fields})
    except InexpressibleError as error:
        raise SpecError(f"{where}: {error}", "write the model as YAML, or mend the config") from None
    except ValidationError as error:
        raise spec_error(error, where, ModelSpec, _spelling(keys, given)) from None


def _architecture(config: Config, where: str) -> tuple[Config, Architecture]:
    """The language model's own config and its row of the table."""
    kind = _kind_of_model(config)
    for key in INNER:
        inner = config.get(key)
        if inner is None:
            continue
        if not isinstance(inner, dict):
            raise SpecError(f"{where}: {key}: {kind_of(inner)}, not a mapping", "give the language model's own config")
        warn_of_towers(config, where)
        # transformers 5 writes at the top whether the language model's embeddings are tied
        tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
        named = {"_name_or_path": config.get("_name_or_path")}
        stated = {} if "model_type" in inner else {"model_type": WRAPPERS.get(kind, kind)}
        return _architecture({**tied, **stated, **inner, **named}, where)
    if kind in WRAPPERS and "hidden_size" not in config:
        raise SpecError(f"{where}: text_config: nothing, not a mapping", "give the language model's own config")
    name = SAME_AS.get(kind, kind)
    if name in ARCHITECTURES:
        warn_of_towers(config, where)
        return config, ARCHITECTURES[name]
    if name in REFUSED:
        raise SpecError(f"{where}: model_type: {name!r} has {REFUSED[name]}", _YAML_HINT + " with its nearest kin")
    problem = "is missing" if config.get("model_type") is None else f"unknown architecture {kind[:60]!r}"
    known = {*ARCHITECTURES, *SAME_AS, *WRAPPERS}
    raise SpecError(
        f"{where}: model_type: {problem}", f"{_YAML_HINT}; known are {', '.join(sorted(known))}" + nearest(kind, known)
    )


def _kind_of_model(config: Config) -> str:
    """The `model_type` in lower case with underscores, as long as that is what the table knows."""
    stated = config.get("model_type")
    if not isinstance(stated, str):
        return str(stated)
    plain = stated.lower()
    for kind in (stated, plain, plain.replace("-", "_")):
        if kind in ARCHITECTURES or kind in SAME_AS or kind in WRAPPERS or kind in REFUSED:
            return kind
    return stated


def _rotary_base(config: Config) -> Config:
    """Rotary settings as transformers 5 writes them: in rope_parameters, or in those of full attention."""
    stated = config.get("rope_parameters")
    if isinstance(stated, dict) and isinstance(stated.get("full_attention"), dict):
        stated = stated["full_attention"]
    names = ("rope_theta", "partial_rotary_factor")
    return {name: stated[name] for name in names if name in stated} if isinstance(stated, dict) else {}


def _first(keys: tuple[str, ...], config: Config) -> str | None:
    return next((key for key in keys if key in config), None)


def _name(config: Config, where: str) -> str:
    """The last part of `_name_or_path`, else the directory of a config.json, else the file's stem."""
    stated = config.get("_name_or_path")
    path = PurePath(where)
    candidates = (
        PurePath(stated).name if isinstance(stated, str) else "",
        path.parent.name if path.name == "config.json" else path.stem,
        str(config.get("model_type")),
    )
    return next(name for name in candidates if name)[:200]


def _spelling(keys: Mapping[str, str], config: Config) -> dict[str, str]:
    """The config's keys by our field paths, so that a message names what the user wrote."""
    sections = {"moe": MoESpec.model_fields, "mla": MLASpec.model_fields}
    activation = _first(("activation_function", "hidden_activation"), config)
    spelling = {"activation": activation or "hidden_act"}
    for field, key in keys.items():
        section = next((name for name, names in sections.items() if field in names), None)
        spelling[f"{section}.{field}" if section else field] = key
    return spelling
