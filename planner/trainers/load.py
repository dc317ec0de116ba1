"""Trainers as data: one YAML file each, with switches as `key: value` and numbers as `key: {value: …, source: …}`.

`base` names the file whose values hold where a file says nothing else: another trainer, or one of `shared/`. `features`
are what the trainer switches on, spelled as in a run. A number without a source is refused.

`switches` are those that it has, with their values; one without values is not that of its base. `versions` are its
releases, the newest last, and `since` says with which of them a switch, or one value of it (`switch=value`,
`dtype=nvfp4`), came. `megatron@0.16` is the trainer of that release. `checkpoint` says what its files can be loaded as
(checkpoint.py).

`likely` are the values that the switches of runs usually have where nobody says them. Entries whose first switch is the
same exclude each other; the trainer's own value has what their shares leave. A share counts published sources and not
runs, since a source has habits: (sources with the value + ½) / (sources + 1). The half stands for what the next source
does, which nobody knows.
"""

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

from planner.errors import SpecError
from planner.specs.base import Fields, Fraction, Name, Named, Spec, Texts
from planner.specs.problems import check_names, checked, nearest
from planner.specs.reading import label, load_yaml, printable
from planner.specs.training import Dtype
from planner.trainers.rules.rule_rows import rule_names
from planner.trainers.shipped import DATA as _DATA
from planner.trainers.shipped import RUNTIMES as RUNTIMES
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES, Value, changes, written

AXES: Final = (
    "tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch_size", "zero_stage", "shard_size", "schedule",
    "rank_order", "layers",
)  # fmt: skip
"""Axes of a layout that a resumed job may keep; `layers` is how many layers each virtual stage holds."""
Axis = Literal[
    "tp", "cp", "ep", "etp", "pp", "vpp", "dp", "micro_batch_size", "zero_stage", "shard_size", "schedule",
    "rank_order", "layers",
]  # fmt: skip


class Rewritten(Spec):
    """The way to load a checkpoint under a layout that its files do not fit."""

    by: Literal["resave", "convert"]
    """`resave`: a job that keeps the axes loads it and saves it in another format. `convert`: a tool rewrites it."""
    says: Name
    """The option or the tool, in words that end a sentence."""
    ready: Name | Literal[""] = ""
    """The option with which a job saves in the other format from the start; empty if only the tool makes it."""
    keeps: tuple[Axis, ...] = ()
    """Axes that must stay as they were nevertheless."""
    source: Name


class Checkpoint(Spec):
    """A kind of checkpoint: its format, and what a job that loads it has to keep."""

    zero_stages: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
    """The ZeRO stages whose jobs write it."""
    format: Name
    keeps: tuple[Axis, ...]
    """Axes that must be those of the job that saved."""
    rewritten: Rewritten | None = None
    """The way to load optimizer states on other axes; null where there is none."""
    in_buckets: bool = False
    """True where states lie in the buckets in which gradients are reduced, whose size must stay too."""
    data: str = ""
    """A sentence on the data loader after dp has changed; empty where its position is a number of samples."""
    source: Name


UNKNOWN = Checkpoint(
    format="unknown",
    keeps=("tp", "ep", "etp", "pp", "vpp", "zero_stage", "layers"),
    source="nothing is known of this trainer's checkpoints; most load with more or fewer data-parallel ranks",
)
"""The checkpoint of a trainer whose file has no row."""


def read_checkpoints(where: str, given: Any) -> tuple[Checkpoint, ...]:
    """The rows of a trainer's file; SpecError naming the row and its field."""
    if not isinstance(given, list):
        raise SpecError(
            f"{where}: checkpoint: {given!r:.60} is no list", "write `checkpoint:` and rows with `- format:`"
        )
    return tuple(checked(Checkpoint, row, f"{where}: checkpoint[{number}]") for number, row in enumerate(given))


class Likely(Spec):
    """Values that switches have together in a share of all runs."""

    switches: dict[str, Value]
    value: Fraction
    """The share of runs."""
    tuning: Fraction | None = None
    """The same of runs that say nothing, of as few tokens a step as fine-tuning has; null: no other."""
    source: str
    architectures: Texts = ()
    """The silicon of these runs; empty for all."""

    def share(self, tunes: bool) -> float:
        """The share of runs, or of those that likely fine-tune."""
        return self.value if self.tuning is None or not tunes else self.tuning

    @property
    def switch(self) -> str:
        """The switch that the entry is about: the first one."""
        return next(iter(self.switches))


def read_likely(where: str, given: Any) -> tuple[Likely, ...]:
    """The `likely:` entries of a trainer's file. Raises SpecError naming the entry and what is wrong with it."""
    if not isinstance(given, list):
        raise SpecError(f"{where}: likely: {given!r:.60} is no list", "write a list of {switches, value, source}")
    return tuple(_entry(f"{where}: likely: {number}", entry) for number, entry in enumerate(given, start=1))


def _entry(where: str, given: Any) -> Likely:
    entry = checked(Likely, given, where)
    check_names(where, "switches", entry.switches, SWITCHES)
    _, unknown = changes(entry.switches)
    if unknown or not entry.switches:
        raise SpecError(f"{where}: switches: {unknown[0] if unknown else 'none'}: unknown", "name a switch's value")
    return entry


_SUFFIXES = (".yaml", ".yml")
_BASES = (*RUNTIMES, *sorted(f"shared/{path.stem}" for path in (_DATA / "shared").glob("*.yaml")))
_FILE_KEYS = ("source", "base", "features", "switches", "versions", "since", "likely", "checkpoint")
"""Keys of a trainer's file beside the fields of RuntimeSpec."""
_VERSION = re.compile(r"(.+)@([\w.]+)")
Switches = dict[str, tuple[Value, ...]]


class TrainerFile(NamedTuple):
    """A trainer's values, those of its base included, the source of each number, and the switches that it has."""

    values: Fields
    sources: Named
    switches: Switches
    versions: Texts = ()
    """The releases of the trainer, the newest last."""
    since: Mapping[str, str] = {}
    """The release with which a switch came, or one value of it (`switch=value`); others are in all of them."""
    likely: tuple[Likely, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()


def load_runtime(name_or_path: str | Path) -> RuntimeSpec:
    """The trainer of a name or of a YAML file. Raises SpecError naming the nearest names, or file, field and value.

    After the name may stand a version: `megatron@0.16` has no switch, and no value of a switch, that came later.
    """
    name, version = _named_version(str(name_or_path))
    path = _path(name)
    runtime = _shipped(path) if path.parent == _DATA else _runtime(path)
    return _of_version(runtime, _file(path), version) if version else runtime


def _shipped_names(runtime: RuntimeSpec) -> list[str]:
    """Names of a trainer's own file and of its family's, as far as they ship."""
    return [name for name in (runtime.name, runtime.family) if name in RUNTIMES]


def switches_of(runtime: RuntimeSpec) -> Switches:
    """The switches that a trainer has, with the values that a search may choose; none for a trainer of one's own."""
    return next((has for name in _shipped_names(runtime) if (has := _shipped_switches(name, runtime.version))), {})


def coefficients(shipped: RuntimeSpec, runtime: RuntimeSpec) -> Fields:
    """The numbers of `runtime` that `shipped` with its switches has otherwise: assumed, measured or a user's own."""
    switched, _ = shipped.with_features({name: SWITCHES[name].value_of(runtime) for name in switches_of(shipped)})
    own = runtime.model_dump()
    return {name: value for name, value in own.items() if type(value) is float and value != getattr(switched, name)}


def likely_of(runtime: RuntimeSpec, architecture: str) -> tuple[Likely, ...]:
    """Values that switches of a shipped trainer's runs on such silicon may have."""
    likely = _shipped_file(runtime.name).likely if runtime.name in RUNTIMES else ()
    return tuple(entry for entry in likely if not entry.architectures or architecture in entry.architectures)


def checkpoint_of(runtime: RuntimeSpec, zero_stage: int) -> Checkpoint:
    """The checkpoint that jobs of a trainer write under a ZeRO stage."""
    rows = (row for name in _shipped_names(runtime) for row in _shipped_file(name).checkpoints)
    return next((row for row in rows if zero_stage in row.zero_stages), UNKNOWN)


def versions_of(runtime: RuntimeSpec) -> Texts:
    """The versions of a trainer that `NAME@VERSION` may name, the newest last; none where they make no difference."""
    return _shipped_file(runtime.family).versions if runtime.family in RUNTIMES else ()


def since_of(runtime: RuntimeSpec, switch: str, value: Value) -> str:
    """The version with which a value of a switch came; empty for one that all versions have."""
    return _since(_shipped_file(runtime.family), switch, value) if runtime.family in RUNTIMES else ""


def has_dtype(runtime: RuntimeSpec, dtype: str) -> bool:
    """True where the trainer, in its version, computes in a dtype (`dtypes`; `since: {dtype=nvfp4: …}`)."""
    if runtime.dtypes and dtype not in runtime.dtypes:
        return False
    since, versions = since_of(runtime, "dtype", dtype), versions_of(runtime)
    if not since or runtime.version not in versions:
        return True
    return versions.index(since) <= versions.index(runtime.version)


def _since(file: TrainerFile, switch: str, value: Value) -> str:
    return file.since.get(f"{switch}={written(value)}", file.since.get(switch, ""))


@cache
def _shipped_switches(name: str, version: str) -> Switches:
    return _switches_in(_shipped_file(name), version)


@cache
def _shipped_file(name: str) -> TrainerFile:
    """The file of a trainer, or of one of `shared/`, which is parsed once."""
    return _read(_DATA / f"{name}.yaml")


def _switches_in(file: TrainerFile, version: str) -> Switches:
    """The switches of one version, with at least two values each; an empty version has all of them."""
    if version not in file.versions:
        return file.switches
    known = ("", *file.versions[: file.versions.index(version) + 1])
    had = {
        name: tuple(value for value in values if _since(file, name, value) in known)
        for name, values in file.switches.items()
    }
    return {name: values for name, values in had.items() if len(values) > 1}


def _named_version(name: str) -> tuple[str, str]:
    """The name and the version of `NAME@VERSION`; the version is empty where none stands there."""
    match = None if name.lower().endswith(_SUFFIXES) else _VERSION.fullmatch(name)
    return (match[1], match[2]) if match else (name, "")


def _of_version(runtime: RuntimeSpec, file: TrainerFile, version: str) -> RuntimeSpec:
    """A trainer as it was in a version: what came later is at the plainest value."""
    if version not in file.versions:
        known = f"one of {', '.join(file.versions)}" if file.versions else f"write {runtime.name} alone"
        raise SpecError(f"runtime: {runtime.name} has no version {version[:60]!r}", known)
    known_switches, changed = _switches_in(file, version), Fields()
    for name, values in file.switches.items():
        row, now = SWITCHES[name], SWITCHES[name].value_of(runtime)
        if now in values and now not in known_switches.get(name, values[:1]):
            changed |= row.fields_of(values[0]) or {}
    return runtime.model_copy(update={**changed, "version": version})


def _path(name: str) -> Path:
    if name in RUNTIMES:
        return _DATA / f"{name}.yaml"
    if name.lower().endswith(_SUFFIXES) or os.sep in name:
        return Path(name)
    raise SpecError(f"runtime: unknown {name[:100]!r}", f"one of {', '.join(RUNTIMES)}{nearest(name, RUNTIMES)}")


@cache
def _shipped(path: Path) -> RuntimeSpec:
    return _runtime(path)


def _runtime(path: Path) -> RuntimeSpec:
    where = _where(path)
    runtime = checked(RuntimeSpec, {"name": path.stem, **_file(path).values}, where)
    check_names(where, "rules", runtime.rules, rule_names("layout"))
    check_names(where, "export_rules", runtime.export_rules, rule_names("export"))
    check_names(where, "trainer", (runtime.trainer,) if runtime.trainer else (), RUNTIMES)
    return runtime


def _file(path: Path) -> TrainerFile:
    return _shipped_file(path.stem) if path.parent == _DATA else _read(path)


def _read(path: Path) -> TrainerFile:
    where, data = _where(path), load_yaml(path)
    for key in data:
        check_names(
            where, printable(str(key), 60), (str(key),), (*RuntimeSpec.model_fields, *_FILE_KEYS), "unknown key"
        )
    if not isinstance(data.get("source"), str):
        raise SpecError(f"{where}: source: is missing", "add `source:`, what the switches were read from")
    base = _base(where, data.get("base"))
    values, sources = dict(base.values), dict(base.sources)
    features = data.get("features", {})
    changed = _changed(where, features)
    values |= changed
    sources |= dict.fromkeys(changed, f"features {features}: planner/trainers/switches.py")
    for key in [key for key in data if key not in _FILE_KEYS]:
        values[key], source = _value(where, key, data[key])
        sources.pop(key, None)
        sources |= {key: source} if source else {}
    given = base.switches | _switches(where, data.get("switches", {}))
    switches = {name: values for name, values in given.items() if values}
    versions, since = _versions(where, data, base, switches)
    likely = read_likely(where, data["likely"]) if "likely" in data else base.likely
    checkpoints = read_checkpoints(where, data["checkpoint"]) if "checkpoint" in data else base.checkpoints
    return TrainerFile(values, sources, switches, versions, since, likely, checkpoints)


def _base(where: str, name: Any) -> TrainerFile:
    """The values of the file that another one builds on; a file that builds on a trainer is a kind of that trainer."""
    if name is None:
        return TrainerFile({}, {}, {})
    check_names(where, "base", (str(name),), _BASES)
    file = _shipped_file(name)
    return file._replace(values={"trainer": name, **file.values, "stand_in": ""}) if name in RUNTIMES else file


def _versions(where: str, data: Fields, base: TrainerFile, switches: Switches) -> tuple[Texts, Named]:
    """The versions of a file, and since which of them it has which switches."""
    versions, since = data.get("versions", base.versions), data.get("since", {})
    # YAML reads 0.20 as the number 0.2
    if not isinstance(versions, list | tuple) or not all(isinstance(version, str) for version in versions):
        raise SpecError(
            f"{where}: versions: {versions!r:.60} is no list of texts", 'write `versions: ["0.19", "0.20"]`'
        )
    if not isinstance(since, dict):
        raise SpecError(f"{where}: since: {since!r:.60} is no mapping", "write `since: {switch: version}`")
    valued = {**switches, "dtype": get_args(Dtype)}
    known = [*switches, *(f"{name}={written(value)}" for name, values in valued.items() for value in values)]
    for name, version in since.items():
        check_names(where, "since", (str(name),), known)
        check_names(where, f"since: {name}", (version,), versions)
    return tuple(versions), {**base.since, **since}


def _switches(where: str, given: Any) -> Switches:
    """The switches of a file, each with the values that it lists; SpecError names what the planner does not know."""
    if not isinstance(given, dict):
        raise SpecError(f"{where}: switches: {given!r:.60} is no mapping", "write `switches: {name: [values]}`")
    known = {name: row for name, row in SWITCHES.items() if not row.is_described}
    for name, values in given.items():
        check_names(where, "switches", (str(name),), known)
        if not isinstance(values, list):
            listed = f"{name}: [{', '.join(map(written, known[name].values))}]"
            problem = f"{where}: switches: {name}: {values!r:.60} is no list"
            raise SpecError(problem, f"write `{listed}`, or some of them")
        for value in values:
            if known[name].fields_of(value) is None:
                raise SpecError(
                    f"{where}: switches: {name}: {value!r:.60} is no value of it",
                    f"of {', '.join(map(written, known[name].values))}",
                )
    return {name: tuple(values) for name, values in given.items()}


def _changed(where: str, features: Any) -> Fields:
    """The fields that a file's `features` change."""
    if not isinstance(features, dict):
        raise SpecError(f"{where}: features: {features!r:.60} is no mapping", "write `features: {name: value}`")
    changed, unknown = changes(features)
    if unknown:
        raise SpecError(f"{where}: features: {unknown[0]}: unknown", f"one of {', '.join(SWITCHES)}")
    return changed


def _value(where: str, key: str, given: Any) -> tuple[Any, str | None]:
    """The value of an entry, and its source where the value is a number."""
    entry = given if isinstance(given, dict) else {"value": given}
    value, source = entry.get("value"), entry.get("source")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not entry.keys() <= {"value", "source"} or "value" not in entry:
        raise SpecError(
            f"{where}: {key}: has keys other than value and source", f"write `{key}: {{value: …, source: …}}`"
        )
    if is_number and not (isinstance(source, str) and source):
        raise SpecError(
            f"{where}: {key}: {value} has no source", f"write `{key}: {{value: {value}, source: where it comes from}}`"
        )
    return value, source if is_number else None


def _where(path: Path) -> str:
    """A trainer's file as messages name it."""
    return f"trainers/data/{path.relative_to(_DATA)}" if path.is_relative_to(_DATA) else label(path)
