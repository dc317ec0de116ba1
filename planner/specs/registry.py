"""Finds, reads and validates models and hardware by name, and turns every failure into one SpecError."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path, PurePath
from typing import Any, TypeVar

from pydantic import ValidationError

from planner.errors import SpecError
from planner.specs.base import Spec
from planner.specs.hardware import HardwareSpec
from planner.specs.machines import find_instance, instance_names, made_instance, with_host, with_network
from planner.specs.model import ModelSpec
from planner.specs.problems import nearest, spec_error
from planner.specs.reading import STDIN, label, load_yaml
from planner.specs.shipped import Kind, find, hardware_names, model_names, names

__all__ = [
    "hardware_names", "load_hardware", "load_model", "load_yaml", "model_names", "nearest", "spec_error",
]  # fmt: skip

_SUFFIXES = (".yaml", ".yml", ".json")
S = TypeVar("S", bound=Spec)


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
    data = load_yaml(path)
    if path.name == "config.json" or "model_type" in data or "architectures" in data:
        from planner.specs.huggingface import from_config

        return from_config(data, label(path))
    return _validate(ModelSpec, {"name": _stem(path), **data}, label(path))


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
    return _on_machine(_validate(HardwareSpec, {"name": _stem(path), **load_yaml(path)}, label(path)))


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


@cache
def _shipped_model(path: Path) -> ModelSpec:
    return _validate(ModelSpec, load_yaml(path), f"{path.parent.name}/{path.name}")


@cache
def _shipped_hardware(path: Path) -> HardwareSpec:
    return _validate(HardwareSpec, load_yaml(path), f"{path.parent.name}/{path.name}")


def _validate(model: type[S], data: dict[str, Any], where: str) -> S:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise spec_error(error, where, model) from None


def _stem(path: Path) -> str:
    """The name of a spec that states none."""
    return "stdin" if str(path) == STDIN else path.stem


def _locate(kind: Kind, name: str) -> tuple[Path, bool]:
    """The file that `name` means and whether it ships with the planner; SpecError with the nearest names if neither."""
    separators = [sep for sep in (os.sep, os.altsep) if sep]
    looks_like_path = name == STDIN or name.lower().endswith(_SUFFIXES) or any(sep in name for sep in separators)
    if not looks_like_path:
        shipped = find(kind, name.lower())
        if shipped is not None:
            return shipped, True
    if os.path.exists(name) or (looks_like_path and not _is_missing(name)):
        return Path(name), False
    shipped_names = {**names(kind), **(instance_names() if kind == "hardware" else {})}
    known = [*shipped_names, *(alias for aliases in shipped_names.values() for alias in aliases)]
    if looks_like_path:  # a repository of the Hugging Face hub looks like one
        raise SpecError(f"{label(name)}: no such file", f"check the path{nearest(PurePath(name).name, known)}")
    close = nearest(name, known)
    listing = "plan models" if kind == "model" else "plan hardware"
    raise SpecError(f"{kind}: unknown {name[:100]!r}", f"`{listing}` lists the names{close}")


def _is_missing(path: str) -> bool:
    """True where there is surely no such file; where it cannot be told, reading the file will tell."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path != STDIN
    except (OSError, ValueError):  # no permission, too long, a NUL
        return False
    return False
