"""A trainer's configuration as the run that it describes: the library's side of `plan import`.

Manifests that start a script on a cluster (Kubernetes, SkyPilot, dstack and others) are read as that script.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any, get_args

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, field_validator

from planner.errors import SpecError
from planner.export.imported_run import ConfigFile, has_line, json_of
from planner.export.imported_run import ImportedRun as ImportedRun
from planner.export.keyed_settings import Dialect, beginnings, dialect, table
from planner.export.megatron.keyed_reading import OFF_KEYS, OPTION_OF_KEY
from planner.export.targets import READERS, SOURCES, UNMARKED
from planner.layout.runs import RunSpec
from planner.record import record
from planner.specs.base import Fields, Named, Said, filled
from planner.specs.reading import STDIN, label, parse_yaml, read_configuration_text, shipped_table, text_beside
from planner.specs.shipped import Kind, find

_SUFFIXES = (".yaml", ".yml", ".json", ".sh", ".py", ".toml")


def configuration_in(folder: Path) -> Path:
    """The file of a folder that describes the run; readers find the others beside it.

    Raises SpecError where there is none.
    """
    known = table()["files"]
    written: list[Path] = [folder / name for name in known["named"].split() if (folder / name).is_file()]
    if written:
        return written[0]
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES and path.is_file())
        texts = {path: text for path in files if (text := text_beside(path)) is not None}
    except OSError as error:
        raise SpecError(f"{folder}: {error.strerror}", "name a folder that can be read, or a file in it") from None
    for mark in known["telling"]:
        for path, text in texts.items():
            if has_line(text, mark):
                return path
    if len(files) == 1:
        return files[0]
    raise SpecError(f"{folder}: none of its files is a configuration by its name or its marks", "name the file itself")


def read(
    path: str | Path,
    source: str | None = None,
    recipe: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> ImportedRun:
    """Read a launch script, an argument list, a YAML, a recipe, a ds_config.json, or a folder with one of them.

    `-` is stdin. Nothing is run.

        from planner.export.import_run import read

        imported = read("pretrain.sh")
        print(imported.source, imported.run["parallelism"], imported.unknown)
        run = imported.complete(hardware="h100", num_gpus=64)

    `source` names the trainer (`megatron`, `torchtitan`, `deepspeed`, …) where the text does not show it, `recipe` the
    function of a Python file with several, `variables` the values of those that are set around a script. Raises
    SpecError for a file that cannot be read, or that is no configuration of these trainers.
    """
    name = str(path)
    name, job = (name, {}) if name == STDIN else _exported(name)
    if os.path.isdir(name):  # Path.is_dir raises for a name that is too long
        name = str(configuration_in(Path(name)))
    config = ConfigFile(read_configuration_text(name), None if name == STDIN else Path(name), recipe, variables or {})
    try:
        imported = read_file(config, source)
    except SpecError as error:
        if not error.message.startswith((label(name), "--from", "--recipe")):
            error.message = f"{label(name)}: {error.message}"
        raise
    if imported.run.get("model") is None and imported.again is not None and "model" in job:
        imported = imported.again(job["model"])
    decides = ("hardware", "gpus_per_node", "runtime")
    imported.run |= {name: value for name, value in job.items() if name in decides or imported.run.get(name) is None}
    if "hardware" in job:
        imported.assumed.pop("hardware", None)
    return imported


_LAUNCHES_ALL = ("megatron", "bridge", "primus")
"""Targets whose launchers start with every option; others' start the file that has them."""


class _Manifest(BaseModel):
    """The part of an export's manifest that is read."""

    planner_version: str
    targets: list[str] = Field(min_length=1)
    files: dict[str, str] = Field(min_length=1)
    job: dict[str, Any] = {}

    @field_validator("job")
    @classmethod
    def _of_a_run(cls, job: Fields) -> Fields:
        """Facts that a run has; others are of a later version."""
        known = {name: value for name, value in job.items() if name in RunSpec.model_fields}
        for name, value in known.items():
            annotation: Any = RunSpec.model_fields[name].annotation
            TypeAdapter(annotation).validate_python(value)
        return filled(known.items())


def _exported(name: str) -> tuple[str, Fields]:
    """The file to read of a folder that we exported or of one of its files, and the job of its manifest.

    The file itself and nothing where the manifest beside it is none of ours, or does not list the file.
    """
    path = Path(name)
    folder, last = (path, "") if os.path.isdir(name) else (path.parent, path.name)
    text = text_beside(Path(folder, "manifest.json"))
    try:
        said = _Manifest.model_validate_json(text or "")
    except ValidationError:
        return name, {}
    main = next(iter(said.files))
    if Path(main).name != main or not Path(folder, main).is_file() or last not in ("", "manifest.json", *said.files):
        return name, {}
    if last.startswith(("launch", "kubernetes")) and said.targets[0] in _LAUNCHES_ALL:
        main = last
    for kind in get_args(Kind):
        if isinstance(given := said.job.get(kind), str) and find(kind, given) is None:
            del said.job[kind]
    return str(Path(folder, main)), said.job


def read_configuration(text: str, source: str | None = None, recipe: str | None = None) -> ImportedRun:
    """The run that `text` describes, as `read` gives it for a file."""
    return read_file(ConfigFile(text, None, recipe), source)


_LAUNCHED = re.compile(
    r"^\s*!\s*(?:sudo\s+)?(.*\b(?:accelerate|torchrun|deepspeed|llamafactory-cli|axolotl|swift|megatron|verl|tune|trl)\b.*)"
)
"""A command of a shell that a cell of a notebook starts a training with."""


def _of_notebook(text: str) -> str:
    """The command that a notebook's cells launch, or their code without what only a notebook runs; else the text."""
    code = text
    if re.match(r'\s*\{\s*"(cells|nbformat|metadata)"', text):
        cells = json_of(text, "give the notebook").get("cells")
        read = (cell for cell in cells or () if isinstance(cell, dict) and cell.get("cell_type") == "code")
        sources = (cell.get("source") or "" for cell in read)
        code = "\n".join("".join(map(str, source)) for source in sources)
    # a line that goes on begins with a space of its own there
    lines = re.sub(r"\\\n\s*", " ", code).splitlines() if code is not text or text.startswith("!") else []
    launched = [found[1] for line in lines if "install" not in line and (found := _LAUNCHED.match(line))]
    if launched and not re.search(r"Trainer\(", code):
        return "\n".join(launched)
    return text if code is text else "\n".join(line for line in code.splitlines() if not re.match(r"\s*[%!?]", line))


_TEXT = r"(?:'[^'\n]*'|\"[^\"\n]*\")"
_LISTED = re.compile(
    rf"(?:with overrides: |Command '|with command: |sigkill_handler\] )(\[{_TEXT}(?:, {_TEXT}){{3,}}\])"
)
"""The words of a command as Python prints a list: of launchers that end, of Hydra's overrides."""


def _of_list(text: str) -> str:
    """The command that a launcher's message lists, else the text."""
    listed = None if has_line(text, r"^(import|from) ") else _LISTED.search(text)
    return text if listed is None else shlex.join(word[1:-1] for word in re.findall(_TEXT, listed[1]))


_IN_LIST = re.compile(r"""(["']--[\w-]+["']\s*,\s*)(?:str\()?([A-Za-z_]\w*)\b(?!["'])""")
_IN_STRING = re.compile(r"""(["'])(\s*--[A-Za-z][^"'\n]*)\1(?:\s*,\s*f?["']([^"'\n-][^"'\n]*))?""")
"""An option of a list and the name behind it; options in a string, and the string behind an option of a list."""
_NAMED_TEXT = re.compile(r"^\s*(\w+)(?:: \w+)? = (?:[\"']([\w./-]+)[\"']|(\d+))$", re.MULTILINE)


def _of_program(text: str) -> str:
    """The command whose options a program in Python keeps in its strings, every branch's; else the text."""
    bare = re.sub(r"^\s*#.*$|add_argument\([^()]*", "", text, flags=re.MULTILINE)
    found = _IN_STRING.findall(_IN_LIST.sub(r"\1'{\2}'", bare))
    if len(found) < 4 or not has_line(text, r"^(import|from) ") or "Trainer(" in text:
        return text
    words = " ".join(f"{option} {value}" for _, option, value in found)
    command = re.sub(r"\{(?:\w+\.)?(\w+)\}", r"$\1", words)
    texts = [f"{name}={value}{number}" for name, value, number in _NAMED_TEXT.findall(text)]
    return "\n".join([*texts, "python train.py " + re.sub(r"\{[^{}]*\}|[()&|;<>`]", "", command)])


def _refuse_unread(config: ConfigFile) -> None:
    """Raise SpecError for an answer of our own, and for the configuration of a trainer that has no reader."""
    text = config.text
    if re.match(r'\s*{\s*"schema_version"', text):
        hint = f"plan show {config.path or '-'} prints it, plan export makes a trainer's files of a plan"
        raise SpecError("this is an answer that plan saved, and no trainer's file", hint)
    for name, mark in table()["unread"].items():
        if has_line(text, mark) and "--tensor-model-parallel-size" not in text:
            raise SpecError(
                f"this is a configuration of {name}, which is not read",
                "price its layout with plan evaluate --model NAME --gpus N --tp N --pp N --micro-batch-size N, "
                "or name the trainer that it resembles with --from",
            )


def _recognised(text: str) -> str | None:
    """The trainer whose mark a text bears, outside of its comments: these may speak of another."""
    text = re.sub(r"^[ \t]*# .*$", "", text, flags=re.MULTILINE)
    return next((name for name in SOURCES if READERS[name].recognises(text)), None)


_KEY = re.compile(r"'([a-z_][\w.-]*)[ ']")
"""A key in the text of tables, of their expressions and clauses."""
_DIGITS = re.compile(r"\d")
_ENDING = re.compile(r"_?(new|old|v?\d+)$")
"""An ending as of another version."""


def _dialects() -> list[Dialect]:
    return [dialect(name) for name, row in table().items() if "documented" in row]


@cache
def _deciding() -> frozenset[str]:
    """The sections and names of the keys that readers know by tables: readings.yaml, options.yaml and dialects.yaml."""
    own = [[*row.renamed, *row.unasked, *row.read, row.refused] for row in _dialects()]
    spelled = " ".join(table()["huggingface"]["spelled"].values()).split()
    tables = own, spelled, shipped_table("export/readings.yaml"), [*OPTION_OF_KEY, *OFF_KEYS]
    return frozenset(part for key in _KEY.findall(str(tables)) for part in _section_and_name(key))


def _section_and_name(key: str) -> set[str]:
    """The section and the name of a key, which are the same where it has no sections."""
    parts = key.lstrip("-").replace("-", "_").split(".")
    return {parts[0], parts[-1]}


def _is_misspelt(key: str) -> bool:
    """The key is one that decides but for a letter or two that changed places, or an ending; no table has it whole."""
    harmless = (beginnings(row.harmless, r"(?:--(?:no-)?|.*\.)?") for row in _dialects() if row.harmless)
    return any(map(_is_another, _section_and_name(key))) and not any(words.fullmatch(key) for words in harmless)


@cache
def _is_another(name: str) -> bool:
    alike = [other for other in _deciding() if other[:1] == name[:1] and abs(len(name) - len(other)) <= 4]
    if any(_DIGITS.sub("", other) == _DIGITS.sub("", name) for other in alike if len(other) == len(name)):
        return False  # one for another number, such as fp4 for fp8
    is_like = _ENDING.sub("", name) in alike or sorted(name) in map(sorted, alike)
    return name not in alike and (is_like or bool(get_close_matches(name, alike, cutoff=0.905)))


_SETTINGS = re.compile(
    r"(^|\s)--?\w|^\s*(bash|sh|sbatch|source|\.) \S+\.sh\b|MODEL_ARGS|\A\s*[\[{]|^\s*(import|from) ", re.MULTILINE
)
"""Marks of a text of options, of a script that starts another, of a mapping and of a program."""


def read_file(config: ConfigFile, source: str | None) -> ImportedRun:
    """The run of a configuration, as `read` gives it; of a manifest, that of the script it starts."""
    plain = _of_list(_of_notebook(dedent(config.text)))
    config = replace(config, text=_of_program(plain))
    is_program = config.text is not plain
    job = job_of(config.text)
    if job is not None:
        config = replace(config, text=job.script)
    is_told = source is not None
    source = source or _recognised(config.text)
    if source is None:
        # a launcher's own words show nothing where the program beside it says its settings itself
        programs = map(config.beside, re.findall(r"[\w./-]+\.(?:py|sh|sbatch|slurm|ya?ml|toml)\b", config.text))
        source = next((found for text in programs if text and (found := _recognised(text))), None)
    if source is None:
        _refuse_unread(config)
        if not _SETTINGS.search(config.text):
            known = f"the script that launches it; --from NAME if it is one of {', '.join(SOURCES)}"
            raise SpecError("no trainer that is read has such a file", f"give the file of its settings, or {known}")
        source = UNMARKED
    if source not in SOURCES:
        raise SpecError(f"--from: {source!r} is unknown", f"one of {', '.join(SOURCES)}")
    if config.recipe is not None and not config.has_line(r"^\s*(def|from|import) "):
        raise SpecError(f"--recipe: {config.recipe[:80]!r}: the file has no functions to choose from", "leave it out")
    try:
        imported = READERS[source].read(config.filled())
    except RecursionError:
        raise SpecError("the configuration is nested too deeply", "give a simpler file") from None
    except SpecError:
        if not is_told:
            _refuse_unread(config)
        raise
    for key in filter(_is_misspelt, [*imported.ignored]):
        imported.unknown[key] = imported.ignored.pop(key)
    if is_program:
        imported.notes.append("a program puts its command together: the options of all its branches are taken")
    if job is not None:
        imported.run["num_gpus"] = imported.run.get("num_gpus") or job.num_gpus
        imported.run.setdefault("hardware", job.hardware)
        imported.unknown |= job.unknown
    return imported


_MANIFEST_HINT = "give the manifest as it is applied, or the script that it starts"
_GPU = re.compile(r"(nvidia|amd)\.com/gpu")
_REPLICAS = ("replicas", "parallelism", "numNodes", "num_nodes")
_SHELLS = re.compile(r"(.*/)?(ba|z|da)?sh")
_MAX_DEPTH, _MAX_GPUS = 24, 10**7


@record
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
        if all(has_line(text, mark) for mark in row["marks"]):
            parts = re.split(r"(?m)^---\s*$", text)
            documents = (parse_yaml(part, "", _MANIFEST_HINT, keeps_last=True) for part in parts)
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
    given: Named = {}
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
    inner = {part: value for part, value in data.items() if part in parts and isinstance(value, Mapping)}
    paths = {name: value for name, value in data.items() if name not in inner}
    paths |= {f"{part}.{name}": value for part, values in inner.items() for name, value in values.items()}
    harmless = beginnings(row["harmless"])
    return {path: str(said)[:200] for path, said in paths.items() if path not in read and not harmless.fullmatch(path)}


def _parts(part: Any, replicas: int = 1, depth: int = 0) -> Iterator[tuple[Said, int]]:
    """Every mapping inside a manifest, and how many there are of it."""
    if depth > _MAX_DEPTH:
        return
    if isinstance(part, Mapping):
        for name in _REPLICAS:
            replicas *= _count(part.get(name)) or 1
        yield part, replicas
    for inner in part.values() if isinstance(part, Mapping) else part if isinstance(part, list) else ():
        yield from _parts(inner, replicas, depth + 1)


def _is_uncounted(name: str, value: Any, harmless: re.Pattern[str]) -> bool:
    """A key of Kubernetes, whose number could be one of replicas, workers or GPUs, is not read."""
    is_read = name in _REPLICAS or _GPU.fullmatch(name) or harmless.fullmatch(name)
    return bool(re.search(r"(?i)replica|node|worker|parallel|gpu", name)) and (_count(value) or 0) > 1 and not is_read


def _of_kubernetes(documents: list[Said], row: Said) -> StartedScript:
    """The job of the container that has most to say, and of the files it starts from a ConfigMap, on all pods' GPUs."""
    parts = [(part, replicas) for part, replicas in _parts(documents) if replicas < _MAX_GPUS]
    held_in = ((one, each) for part, each in parts for one in (*_listed(part.get("containers")), part.get("trainer")))
    pods: list[tuple[Said, int]] = [(one, replicas) for one, replicas in held_in if isinstance(one, Mapping)]
    # Ray's jobs have a command of their own
    pods += [({"command": ["sh", "-c", said]}, 1) for one in documents if (said := _at(one, "spec.entrypoint"))]
    starts = [pod for pod in pods if pod[0].get("command") or pod[0].get("args")]
    if not starts:
        raise SpecError("no container of the manifest has a command", _MANIFEST_HINT)
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
    keys = ((str(name), value) for part, _ in parts for name, value in part.items())
    harmless = beginnings(row["harmless"])
    unknown = {name: str(value) for name, value in keys if _is_uncounted(name, value, harmless)}
    num_gpus = sum(replicas * each for replicas, each in asks) or None
    return StartedScript(_with(given, script + held_too), num_gpus, unknown=unknown)


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
        named, number = next(((k, v) for k, v in said.items() if k not in ("name", "count", "memory")), ("", None))
        kind = said.get("name", named)
        said = f"{kind[0] if isinstance(kind, list) and kind else kind}:{said.get('count', number)}"
    parts = [part for part in re.split(r":", str(said or "")) if part]
    numbers = [count for part in parts if (count := _count(part)) is not None]
    kinds = [part for part in parts if _count(part) is None]
    whole = "-".join(kinds)
    known = next(filter(None, map(_profile, [called.get(whole, whole), *kinds])), None)
    return known, (numbers[-1] if numbers else 1) if parts else None


def _variables(said: Any) -> Named:
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
