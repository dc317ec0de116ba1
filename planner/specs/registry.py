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
from planner.specs.hub_models import model_called
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
    """The model of a name, an alias, a hub's name, a YAML file, a `config.json` or a directory of one; `-` is stdin.

    Raises SpecError naming file, field and value.
    """
    try:
        path, shipped = _locate("model", str(name_or_path))
    except SpecError:
        if (found := model_called(str(name_or_path))) is None:
            raise
        return load_model(found) if isinstance(found, str) else _validate(ModelSpec, found, str(name_or_path))
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
    """The hardware profile of a name, an alias or a YAML file; `-` is stdin. Raises SpecError as `load_model` does."""
    path, shipped = _locate("hardware", str(name_or_path))
    if shipped:
        return _shipped_hardware(path)
    return _validate(HardwareSpec, {"name": _stem(path), **load_yaml(path)}, label(path))


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
    shipped_names = names(kind)
    known = [*shipped_names, *(alias for aliases in shipped_names.values() for alias in aliases)]
    if looks_like_path:  # a repository of the Hugging Face hub looks like one
        close = nearest(PurePath(name).name, known)
        raise SpecError(f"{label(name)}: no such file, and no model of the hub that is known", f"check the path{close}")
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
