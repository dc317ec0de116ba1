"""The names of the models and the hardware that ship with the planner, from a listing: no file is parsed."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal

Kind = Literal["model", "hardware"]
_FOLDERS: dict[Kind, str] = {"model": "model_specs", "hardware": "hardware_profiles"}
_ALIASES = re.compile(r"^aliases: *\[(.*)\]", re.MULTILINE)


def model_names() -> dict[str, tuple[str, ...]]:
    """Every model that ships with the planner, with its aliases."""
    return dict(names("model"))


def hardware_names() -> dict[str, tuple[str, ...]]:
    """Every hardware profile that ships with the planner, with its aliases."""
    return dict(names("hardware"))


def folder(kind: Kind) -> Path:
    """Package data of the wheel, else the folder at the top of the repository."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "_data" / _FOLDERS[kind]
    return packaged if packaged.is_dir() else package.parent / _FOLDERS[kind]


@cache
def names(kind: Kind) -> dict[str, tuple[str, ...]]:
    """Canonical names and aliases, by a scan of first lines: parsing forty files would take as long as a plan."""
    found = {}
    for name, path in _paths(kind).items():
        with path.open(encoding="utf-8") as file:
            match = _ALIASES.search(file.read(1000))
        found[name] = tuple(alias.strip(" '\"") for alias in match[1].split(",")) if match else ()
    return found


def find(kind: Kind, name: str) -> Path | None:
    """The shipped file of a canonical name or, failing that, of an alias, in lower case."""
    paths = _paths(kind)
    if name not in paths:
        name = next((canonical for canonical, aliases in names(kind).items() if name in aliases), "")
    return paths.get(name)


@cache
def _paths(kind: Kind) -> dict[str, Path]:
    """The file of each canonical name."""
    return {path.stem: path for path in sorted(folder(kind).glob("*.yaml"))}
