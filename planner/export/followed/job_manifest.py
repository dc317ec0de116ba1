"""Manifests that start a script on a cluster (Kubernetes, SkyPilot, dstack and others), as that script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.errors import SpecError
from planner.specs.base import Fields, Said
from planner.specs.reading import parse_yaml, shipped_table
from planner.specs.shipped import find

_HINT = "give the manifest as it is applied, or the script that it starts"
_GPU = re.compile(r"(nvidia|amd)\.com/gpu")
_REPLICAS = ("replicas", "parallelism", "numNodes", "num_nodes")
_SHELLS = re.compile(r"(.*/)?(ba|z|da)?sh")
_MAX_DEPTH, _MAX_GPUS = 24, 10**7


@dataclass(frozen=True, slots=True)
class StartedScript:
    """The script that a manifest starts, and the GPUs that it asks for."""

    script: str
    """The commands, behind the variables that they are given."""
    num_gpus: int | None = None
    hardware: str | None = None
    """The profile of the GPUs that it asks for; None where it names none that ships."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Keys of the manifest that are not understood, by their paths."""


def job_of(text: str) -> StartedScript | None:
    """The job of a manifest, or of a script with Slurm's directives; None for any other text."""
    for row in shipped_table("export/dialects.yaml")["manifests"].values():
        if all(re.search(mark, text, re.MULTILINE) for mark in row["marks"]):
            documents = [parse_yaml(part, "", _HINT, keeps_last=True) for part in re.split(r"(?m)^---\s*$", text)]
            found = [document for document in documents if isinstance(document, Mapping)]
            if "script" not in row:
                return _of_kubernetes(found, row)
            # a pipeline's first part may only name it
            starts = [document for document in found if _at(document, row["script"])]
            return _of_row(starts[0], row) if starts else None
    asked = re.search(
        r"^#SBATCH.*?(?:gres|gpus(?:-per-node)?|G)[= ](?:gpu:)?([A-Za-z]\w*(?:-\w+)*)", text, re.MULTILINE
    )
    return StartedScript(text, hardware=_profile(asked[1])) if asked is not None else None


def _of_row(data: Said, row: Said) -> StartedScript:
    """The job of a manifest whose fields a row of the table names."""
    commands = _at(data, row["script"])
    script = "\n".join(map(str, commands)) if isinstance(commands, list) else str(commands or "")
    nodes = _count(_at(data, row.get("nodes", ""))) or 1
    kind, each = _asked(_at(data, row["gpus"]), row.get("called", {}))
    given: dict[str, str] = {}
    for name in row.get("env", ()):
        given |= _variables(_at(data, name))
    said = {"nodes": nodes, "gpus": each, "all": None if each is None else nodes * each}
    for name, value in row.get("sets", {}).items():
        if (known := said.get(value, value)) is not None:
            given.setdefault(name, str(known))
    return StartedScript(_with(given, script), each and nodes * each, kind, _unread(data, row))


def _unread(data: Said, row: Said) -> dict[str, str]:
    """Keys of a manifest, and those beside a key that is read, that no field of its row has."""
    read = [row["script"], row["gpus"], row.get("nodes", ""), *row.get("env", ())]
    parts = {path.partition(".")[0] for path in read if "." in path}
    paths = {name: value for name, value in data.items() if name not in parts}
    paths |= {
        f"{part}.{name}": value for part in parts for name, value in (data.get(part) or {}).items()
        if isinstance(data.get(part), Mapping)
    }  # fmt: skip
    harmless = re.compile("|".join(f"(?:{part})" for part in re.sub(r"\s+(?=\|)", "", row["harmless"]).split()))
    return {
        path: str(value)[:200] for path, value in paths.items() if path not in read and not harmless.fullmatch(path)
    }


def _uncounted(part: Any, harmless: str, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Keys of Kubernetes whose whole number could be one of replicas, workers or GPUs, and that are not read."""
    if depth > _MAX_DEPTH or not isinstance(part, (list, Mapping)):
        return
    for name, inner in part.items() if isinstance(part, Mapping) else enumerate(part):
        told = str(name)
        is_read = told in _REPLICAS or _GPU.fullmatch(told) or re.fullmatch(harmless, told)
        if re.search(r"(?i)replica|node|worker|parallel|gpu", told) and (_count(inner) or 0) > 1 and not is_read:
            yield told, str(inner)
        yield from _uncounted(inner, harmless, depth + 1)


def _of_kubernetes(documents: list[Said], row: Said) -> StartedScript:
    """The job of the container that has most to say, and of the files it starts from a ConfigMap, on all pods' GPUs."""
    pods = [pod for document in documents for pod in _pods(document, 1, 0)]
    # Ray's jobs have a command of their own
    pods += [({"command": ["sh", "-c", said]}, 1) for one in documents if (said := _at(one, "spec.entrypoint"))]
    starts = [pod for pod in pods if pod[0].get("command") or pod[0].get("args")]
    if not starts:
        raise SpecError("no container of the manifest has a command", _HINT)
    container, _ = max(starts, key=lambda pod: len(str(pod[0].get("command"))) + len(str(pod[0].get("args"))))
    given = _variables(container.get("env"))
    asks = [(replicas, each) for pod, replicas in pods if (each := _count(_limit(pod))) is not None]
    if asks:
        given |= {"PET_NPROC_PER_NODE": str(asks[0][1]), "PET_NNODES": str(sum(replicas for replicas, _ in asks))}
    words = [str(word) for key in ("command", "args") for word in _listed(container.get(key))]
    words = [re.sub(r"\$\((\w+)\)", lambda match: given.get(match[1], match[0]), word) for word in words]
    inner = next((at + 1 for at, word in enumerate(words[:-1]) if re.fullmatch(r"-\w*c", word)), 0)
    is_script = inner and _SHELLS.fullmatch(words[0])
    script = words[inner] if is_script else " ".join(word if "$" in word else shlex.quote(word) for word in words)
    maps = [document.get("data") for document in documents if document.get("kind") == "ConfigMap"]
    held = {str(name): str(inner) for data in maps if isinstance(data, Mapping) for name, inner in data.items()}
    held_too = "".join(f"\n{inner}" for name, inner in held.items() if re.search(rf"/{re.escape(name)}\b", script))
    unknown = dict(_uncounted(documents, row["harmless"].replace(" ", "|")))
    num_gpus = sum(replicas * each for replicas, each in asks) or None
    return StartedScript(_with(given, script + held_too), num_gpus, unknown=unknown)


def _pods(part: Any, replicas: int, depth: int) -> Iterator[tuple[Said, int]]:
    """Every container or trainer in a manifest, and how many there are of it."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(part, list):
        for inner in part:
            yield from _pods(inner, replicas, depth + 1)
    elif isinstance(part, Mapping):
        for name in _REPLICAS:
            replicas *= _count(part.get(name)) or 1
        if replicas < _MAX_GPUS:
            yield from (
                (one, replicas) for one in [*_listed(part.get("containers")), part.get("trainer")]
                if isinstance(one, Mapping)
            )  # fmt: skip
            for name, inner in part.items():
                if name not in ("containers", "initContainers"):
                    yield from _pods(inner, replicas, depth + 1)


def _limit(container: Said) -> Any:
    resources = container.get("resources") or container.get("resourcesPerNode") or {}
    limits = (resources.get("limits") or resources.get("requests") or {}) if isinstance(resources, Mapping) else {}
    return next((value for name, value in limits.items() if _GPU.fullmatch(str(name))), None)


def _profile(name: str) -> str | None:
    """The shipped profile of a GPU by the name that it is asked for with."""
    path = find("hardware", name)
    return None if path is None else path.stem


def _asked(said: Any, called: Mapping[str, str]) -> tuple[str | None, int | None]:
    """The GPU and how many of it, as `H100:8`, `80GB:8`, `A100:80GB:2..` or `{name: H100, count: 8}`.

    `called` are names that mean another card here than elsewhere.
    """
    said = (said[0] if said else None) if isinstance(said, list) else said
    if isinstance(said, Mapping):
        named, number = next(((k, v) for k, v in said.items() if k not in ("name", "count", "memory")), (None, None))
        kind = said.get("name", named)
        kind = kind[0] if isinstance(kind, list) and kind else kind
        return _profile(called.get(str(kind), str(kind))), _count(said.get("count", number if named else None)) or 1
    if isinstance(said, int):
        return None, said
    parts = [part for part in re.split(r":", str(said or "")) if part]
    numbers = [count for part in parts if (count := _count(part)) is not None]
    kinds = [part for part in parts if _count(part) is None]
    whole = "-".join(kinds)
    known = next(filter(None, map(_profile, [called.get(whole, whole), *kinds])), None)
    return known, (numbers[-1] if numbers else 1) if parts else None


def _variables(said: Any) -> dict[str, str]:
    """Variables of a mapping, of `NAME=VALUE`s, or of Kubernetes' pairs of name and value; those with a value."""
    pairs: Fields = dict(said) if isinstance(said, Mapping) else {}
    for one in _listed(said):
        if isinstance(one, Mapping):
            pairs[str(one.get("name"))] = one.get("value")
        elif "=" in str(one):
            name, _, pairs[name] = str(one).partition("=")
    return {str(name): str(value) for name, value in pairs.items() if isinstance(value, (str, int, float))}


def _with(given: Mapping[str, str], script: str) -> str:
    names = {name: value for name, value in given.items() if name.isidentifier()}
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in names.items()) + script


def _at(data: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        data = data.get(name) if isinstance(data, Mapping) else None
    return data if path else None


def _listed(said: Any) -> list[Any]:
    return said if isinstance(said, list) else [] if said is None or isinstance(said, Mapping) else [said]


def _count(said: Any) -> int | None:
    """A whole number of 1 or more, or the least of `2..4`; None for anything else."""
    match = re.fullmatch(r"(\d{1,6})(\.\.\d*|\+)?", str(said))
    return int(match[1]) or None if match is not None and not isinstance(said, bool) else None
