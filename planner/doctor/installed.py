"""How the planner was installed, and whether what it depends on is there: looked up, not imported."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata, util
from pathlib import Path

import planner
from planner.distribution import DISTRIBUTION, install_line
from planner.doctor.findings import Extra, Installed, Kind, Package, Torch, Trouble

PACKAGE = Path(planner.__file__).parent
_NEED = re.compile(r"([A-Za-z0-9_.-]+)\s*([^;]*?)\s*(?:;(?:.*extra\s*==\s*[\"'](\w+)[\"'])?.*)?")
_TORCH_FACT = re.compile(r"^(cuda|hip)\b[^=]*= *'([^']+)'", re.MULTILINE)
Needs = dict[str, list[tuple[str, str]]]
"""Names and versions that are needed, by extra; those of the core under the empty name."""


def installed() -> Installed:
    """The kind of installation, its dependencies and its extras."""
    kind, needs = _needs()
    packages = {extra: tuple(_package(*need) for need in listed) for extra, listed in needs.items()}
    return Installed(
        kind=kind,
        folder=str(PACKAGE.parent),
        packages=packages.pop("", ()),
        extras=tuple(_extra(name, has) for name, has in sorted(packages.items())),
    )


def torch_of() -> Torch | None:
    """The torch that is installed, by its files; None where there is none."""
    version, spec = version_of("torch"), util.find_spec("torch")
    if spec is None or not version:
        return None
    text = ""
    for folder in spec.submodule_search_locations or ():
        path = Path(folder) / "version.py"
        text = path.read_text(encoding="utf-8") if path.is_file() else text
    built_with = dict(_TORCH_FACT.findall(text))
    names = {"cuda": "CUDA", "hip": "ROCm"}
    build = ", ".join(f"{names[name]} {'.'.join(value.split('.')[:2])}" for name, value in built_with.items())
    return Torch(version=version, build=build or ("CPU" if text else ""))


def version_of(name: str) -> str:
    """The version of a distribution; empty where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _needs() -> tuple[Kind, Needs]:
    """The kind of installation and what it needs: by its own metadata, or by a source tree's pyproject.toml."""
    pyproject = PACKAGE.parent / "pyproject.toml"
    try:
        ours = metadata.distribution(DISTRIBUTION)
        editable = json.loads(ours.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable", False)
    except metadata.PackageNotFoundError:
        ours, editable = None, False
    if ours is not None and (editable or not pyproject.is_file()):
        return "editable" if editable else "wheel", _by_extra(_parsed(ours.requires or ()))
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"] if pyproject.is_file() else {}
    extras = project.get("optional-dependencies", {})
    lines = [*project.get("dependencies", ()), *(f'{need}; extra == "{e}"' for e in extras for need in extras[e])]
    return "source tree", _by_extra(_parsed(lines))


def _parsed(lines: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for line in lines:
        if match := _NEED.fullmatch(line.strip()):
            yield match[1], match[2].strip("() "), match[3] or ""


def _by_extra(needs: Iterator[tuple[str, str, str]]) -> Needs:
    found: Needs = {}
    for name, versions, extra in needs:
        found.setdefault(extra, []).append((name, versions))
    return found


def _package(name: str, needs: str) -> Package:
    version = version_of(name)
    return Package(name=name, needs=needs, version=version, trouble=_trouble(version, needs))


def _trouble(version: str, needs: str) -> Trouble:
    if not version:
        return "missing"
    for least in re.findall(r">=\s*([\d.]+)", needs):
        if _release(version) < _release(least):
            return "too old"
    for most in re.findall(r"<\s*([\d.]+)", needs):
        if _release(version) >= _release(most):
            return "too new"
    return ""


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, so that 1.10 comes after 1.9; what follows them, such as +cpu or rc1, is left out."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    release = [int(number) for number in numbers[0].split(".")] if numbers else [0]
    while release and release[-1] == 0:
        release.pop()
    return tuple(release)


def _extra(name: str, packages: tuple[Package, ...]) -> Extra:
    lacks = any(package.trouble for package in packages)
    return Extra(name=name, packages=packages, install=install_line(name) if lacks else "")
