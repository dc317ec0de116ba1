"""Finds, reads and validates models and hardware by name, and turns every failure into one SpecError."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from planner.errors import SpecError
from planner.specs.hardware import HardwareSpec
from planner.specs.machines import find_instance, instance_names, made_instance, with_host, with_network
from planner.specs.model import ModelSpec
from planner.specs.problems import checked, known_keys, nearest, spec_error
from planner.specs.reading import CHECKPOINT, JSON, STDIN, label, load_yaml, parse_mapping
from planner.specs.shipped import Kind, find, hardware_names, lines, model_names, names

__all__ = [
    "hardware_names", "load_hardware", "load_model", "load_yaml", "model_names", "nearest", "spec_error",
]  # fmt: skip

_SUFFIXES = (".yaml", ".yml", ".json")


def load_model(name_or_path: str | Path) -> ModelSpec:
    """The model of a name, an alias, a YAML file, a `config.json` or a directory holding one; `-` is stdin.

    Raises SpecError naming file, field and value.
    """
    path, shipped = _locate("model", str(name_or_path))
    if shipped:
        return _shipped_model(path)
    if os.path.isdir(path):
        path = path / "config.json"
        if not os.path.exists(path):
            raise SpecError(
                f"{path.parent}: a directory without config.json", "name a model, a YAML file or a config.json"
            )
    data = load_yaml(path, CHECKPOINT if path.suffix == ".json" else JSON)
    if path.name == "config.json" or "model_type" in data or "architectures" in data:
        from planner.specs.architectures import from_config

        return from_config(data, label(path))
    given = as_spelled(data)
    _refuse_incomplete(given, label(path))
    return checked(ModelSpec, {"name": _stem(path), **given}, label(path))


def _refuse_incomplete(given: dict[str, Any], where: str) -> None:
    """Raise SpecError for all that a user's model lacks, at once; an unknown key may be what is missing, misspelt."""
    has_experts = {"moe", "num_experts", "mlp_layer_types"} & given.keys()
    lacks = [name for name in (*_NEEDED, *(() if has_experts else ("intermediate_size",))) if given.get(name) is None]
    if not lacks or given.keys() - known_keys(ModelSpec):
        return
    hint = f"add {', '.join(f'`{name}:`' for name in lacks)}"
    if "training" not in given:
        hint += ", and `training:` with seq_length and tokens_per_step, or --seq-length and --global-batch-size"
    raise SpecError(f"{where}: {', '.join(lacks)}: {'is' if len(lacks) == 1 else 'are'} missing", hint)


_NEEDED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
_ALSO_SPELLED = {
    "norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
    "activation": ("hidden_act", "hidden_activation", "activation_function"),
    "num_experts": ("num_local_experts", "n_routed_experts"),
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "num_experts_per_tok": ("moe_topk", "top_k"), "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"), "intermediate_size": ("ffn_hidden_size", "n_inner"),
}  # fmt: skip
"""A model's fields as a `config.json` spells them too."""
_OF_NO_SIZE = (
    "architectures", "attention_dropout", "attn_implementation", "bos_token_id", "dtype", "eos_token_id",
    "hidden_dropout", "initializer_range", "output_router_logits", "pad_token_id", "pretraining_tp", "torch_dtype",
    "transformers_version", "use_cache",
)  # fmt: skip
"""Keys of a `config.json` that change neither sizes nor prices."""


def as_spelled(data: dict[str, Any]) -> dict[str, Any]:
    """A user's model with the keys of a `config.json` under our names, and without those that change no price."""
    ours = {key: name for name, keys in _ALSO_SPELLED.items() for key in keys}
    kept = {ours.get(key, key): value for key, value in data.items() if key not in _OF_NO_SIZE}
    shared = kept.pop("n_shared_experts", None)
    if isinstance(shared, int) and isinstance(kept.get("moe_intermediate_size"), int):
        kept.setdefault("shared_expert_intermediate_size", shared * kept["moe_intermediate_size"])
    if isinstance(bias := kept.get("attention_bias"), bool):
        kept["attention_bias"] = "all" if bias else "none"
    if isinstance(kind := kept.get("activation"), str):
        kept["activation"] = _ACTIVATIONS.get(kind, kind)
    return kept


_ACTIVATIONS = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def model_of(model: ModelSpec | str) -> ModelSpec:
    """`model` itself, or the one that `load_model` finds under that name."""
    return load_model(model) if isinstance(model, str) else model


def load_hardware(name_or_path: str | Path) -> HardwareSpec:
    """The hardware profile of a name, an alias, a rented instance or a YAML file; `-` is stdin.

    Raises SpecError as `load_model` does.
    """
    name = str(name_or_path)
    if name != STDIN and find("hardware", name.lower()) is None and not os.path.exists(name):
        made = _instance(name)
        if made is not None:
            return made
    path, shipped = _locate("hardware", name)
    if shipped:
        return _shipped_hardware(path)
    return _on_machine(checked(HardwareSpec, {"name": _stem(path), **load_yaml(path)}, label(path)))


def _on_machine(hardware: HardwareSpec) -> HardwareSpec:
    """A profile with what the network and the host that it names mean, where it does not say this itself."""
    if hardware.network:
        hardware = with_network(hardware, hardware.network, keeps=True)
    if hardware.host.kind and "host_us" not in hardware.efficiency.model_fields_set:
        hardware = with_host(hardware, hardware.host.kind)
    return hardware


@cache
def _instance(name: str) -> HardwareSpec | None:
    """The profile of a rented instance; None where no instance has the name."""
    found = find_instance(name)
    return None if found is None else made_instance(*found, load_hardware(found[1].hardware))


_UNPUBLISHED = {"tokens_per_step": 2**22, "source": "not published: 4,096 tokens, and 4 Mi tokens a step assumed"}


@cache
def _shipped_model(path: Path) -> ModelSpec:
    if path.name in lines():
        return _model_of_line(path.name)
    return checked(ModelSpec, load_yaml(path), f"{path.parent.name}/{path.name}")


def _model_of_line(name: str) -> ModelSpec:
    """The model that ships as keys of its config, or as another's language model with a tower or keys of its own."""
    from planner.specs.architectures import from_config
    from planner.specs.architectures.sections import vision_of

    keys = parse_mapping(lines()[name], name)
    said = {"name": name, "aliases": keys.pop("aliases", ()), "source": f"config.json of {keys.pop('hub')}"}
    if "like" in keys:
        model = load_model(keys.pop("like"))
        said |= {key: value for key, value in keys.items() if key in ModelSpec.model_fields}
        said["vision"] = vision_of(keys, model.hidden_size)
    else:
        model = from_config(keys, name)
    said["training"] = {"seq_length": min(4096, model.max_position_embeddings or 4096), **_UNPUBLISHED}
    return checked(ModelSpec, model.model_dump(exclude_unset=True) | said, name)


@cache
def _shipped_hardware(path: Path) -> HardwareSpec:
    return checked(HardwareSpec, load_yaml(path), f"{path.parent.name}/{path.name}")


def _stem(path: Path) -> str:
    """The name of a spec that states none."""
    return "stdin" if str(path) == STDIN else path.stem


def _locate(kind: Kind, name: str) -> tuple[Path, bool]:
    """The file that `name` means and whether it ships with the planner; SpecError with the nearest names if neither."""
    separators = [sep for sep in (os.sep, os.altsep) if sep]
    is_file = name == STDIN or name.lower().endswith(_SUFFIXES)
    looks_like_path = is_file or any(sep in name for sep in separators)
    exists = os.path.exists(name)
    # a repository of the Hugging Face hub has one slash, and looks like a path
    if not is_file and not (looks_like_path and exists) and name.count("/") < 2:
        shipped = find(kind, name)
        if shipped is not None:
            return shipped, True
    if exists or (looks_like_path and not _is_missing(name)):
        return Path(name), False
    shipped_names = model_names() if kind == "model" else {**names(kind), **instance_names()}
    known = [*names(kind), *shipped_names, *(alias for aliases in shipped_names.values() for alias in aliases)]
    word = PurePath(name).name if looks_like_path else name
    close = nearest(word, shipped_names) or nearest(word, known)
    if kind == "model" and _REPOSITORY.fullmatch(name) and not is_file:
        hint = f"add the config.json of https://huggingface.co/{name}: plan --model config.json{close}"
        raise SpecError(f"{label(name)}: no such file, and no model that ships with the planner", hint)
    if looks_like_path:
        raise SpecError(f"{label(name)}: no such file", f"check the path{close}")
    listing = "plan models" if kind == "model" else "plan hardware"
    raise SpecError(f"{kind}: unknown {name[:100]!r}", f"`{listing}` lists the names{close}")


_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""The name of a repository of the hub."""


def _is_missing(path: str) -> bool:
    """True where there is surely no such file; where it cannot be told, reading the file will tell."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path != STDIN
    except (OSError, ValueError):  # no permission, too long, a NUL
        return False
    return False
