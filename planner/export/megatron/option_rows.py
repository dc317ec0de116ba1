"""The table of options (options.yaml): its rows, and the folds that write arguments by them and read fields from them.

A row says how a field is spelled in Megatron-LM's option and in the dialects that share its names; options and their
values come from the words of a command line.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from planner.errors import SpecError
from planner.export.followed.python_values import computed
from planner.export.trainer_files import Arguments, ShellText, names_of
from planner.record import record
from planner.specs.base import Fields, Named, Said, Texts
from planner.specs.expressions import value_of
from planner.specs.model import ModelSpec
from planner.specs.reading import parse_expression, shipped_table
from planner.specs.units import is_count
from planner.trainers.rules.facts import release, rotary_method

Options = Mapping[str, list[str]]
"""Option (with its dashes) to the words behind it."""
OptionWords = dict[str, list[str]]
"""The same while it is made."""


_TORCHRUN = ("--nproc", "--nnodes", "--node", "--master", "--rdzv", "--num_", "--ntasks")
"""Beginnings of torchrun's options, which it takes with `_` and with `-`."""


def options_of(words: Sequence[str]) -> Options:
    """Options and their values; of equal options the last wins. `--a=b` and torchrun's `--a_b` are read too."""
    options: OptionWords = {}
    name = ""
    for word in words:
        if re.match(r"--[A-Za-z]|-[a-z][a-z_-]{3}", word):
            name, equals, value = word.partition("=")
            if name.startswith(_TORCHRUN):
                name = name.replace("_", "-")
            options[name] = [value] if equals else []
        elif name:
            options[name].append(word)
    return options


def text(options: Options, name: str, default: str = "") -> str:
    """An option's values as one text; `default` where the option is not given."""
    values = options.get(name)
    return default if values is None else " ".join(values)


def number(options: Options, name: str, default: int | None = None) -> int | None:
    """An option's value as a whole number; `default` where the option is not given.

    Raises SpecError where the value is no number; `1e6` is one.
    """
    values = options.get(name)
    if values is None:
        return default
    try:
        value = float(values[0])
        if value == int(value):
            return int(value)
    except (IndexError, ValueError, OverflowError):
        raise SpecError(
            f"{name}: {' '.join(values)[:60]!r} is no number",
            "write a number; what the shell around it sets: --set NAME=VALUE",
        ) from None
    raise SpecError(f"{name}: {values[0][:60]!r} is no whole number", "write a whole number")


def positive(options: Options, name: str) -> int:
    """A number of ranks, layers or sequences, 1 where the option is not given; SpecError where it is below 1."""
    value = number(options, name, 1)
    if value is None or value < 1:
        raise SpecError(f"{name}: {value} is less than 1", "write a number of 1 or more")
    return value


def given(options: Options, name: str, default: int) -> int:
    """The size that an option gives; `default` where the option is not given."""
    return size(options, name) if name in options else default


_MOST = 10**6
"""No size of a model is larger; lists of layers are made of one."""


def size(options: Options, name: str) -> int:
    """The size that an option gives; SpecError where it gives none."""
    values = options.get(name, [])
    try:
        number = int(values[0])
    except IndexError:
        raise SpecError(f"{name}: is missing, or its variable is not set in the script", f"add {name} N") from None
    except ValueError:
        raise SpecError(f"{name}: {values[0][:60]!r} is no whole number", "write a number") from None

    if number > _MOST:
        raise SpecError(f"{name}: {values[0][:60]} is more than {_MOST:,}", "write a number")
    return number


def decimal(options: Options, name: str, default: float | None = None) -> float | None:
    """The number that an option gives; `default` where the option is not given. SpecError where it is no number."""
    if name not in options:
        return default
    values = options[name]
    try:
        number = float(values[0])
    except (IndexError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise SpecError(f"{name}: {' '.join(values)[:60]!r} is no number", "write a number")
    return number


def layer_flags(option: str, pattern: str, num_layers: int) -> list[bool]:
    """A flag for each layer from a list expression. Raises SpecError for anything else, and for another length."""
    try:
        flags = [flag > 0 for flag in _listed(parse_expression(pattern))]
    except (ValueError, TypeError, RecursionError):
        raise SpecError(f"{option}: {pattern[:60]!r} is no list of layers", "write it as ([0]*3+[1]*58)") from None
    if len(flags) != num_layers:
        raise SpecError(f"{option}: {len(flags)} entries for {num_layers} layers", "write one entry for each layer")
    return flags


def _listed(node: ast.expr) -> Any:
    """A whole number, or a sum or a multiple of lists of them; ValueError for what is neither."""
    match node:
        case ast.Constant(value=int() as number):
            return number
        case ast.List():
            return [_listed(item) for item in node.elts]
        case ast.BinOp(op=ast.Add() | ast.Mult()):
            return computed(node, _listed)
    raise ValueError


class OptionRow(BaseModel):
    """One option of Megatron-LM: a row of options.yaml, which says what its columns mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    count: str = ""
    amount: str = ""
    flag: str = ""
    size: str = ""
    field: str = ""
    constant: Any = Field(None, alias="is")
    shell: str = ""
    write: str = ""
    reads: Named = {}
    by: str = ""
    says: dict[str, bool] = {}
    known: bool = False
    unasked: float | int | None = None
    unasked_by: str = ""
    bridge: str = ""
    bridge_is: Texts = ()
    bridge_read: Texts = ()
    primus: str = ""
    since: str = ""

    @property
    def fields_read(self) -> set[str]:
        """The fields that the option says by itself, in some value."""
        return {path.rstrip("?") for path in (*self.says, *self.reads)}

    @property
    def is_read(self) -> bool:
        """True if an importer looks at the option by itself."""
        return bool(self.count or self.amount or self.flag or self.size or self.says or self.known or self.reads)

    def value(self, source: Any) -> Any:
        """The value of the option for a model, a plan or a run; None or False where it is left out."""
        if self.write:
            return value_of(self.write, of_model(source) if isinstance(source, ModelSpec) else names_of(source))
        if path := self.count or self.flag or self.field:
            return attrgetter(path)(source)
        if self.size:
            return attrgetter(self.size)(source.parallelism)
        if self.amount:
            return attrgetter(self.amount)(source) or None
        constant = tuple(self.constant) if isinstance(self.constant, list) else self.constant
        return ShellText(self.shell) if self.shell else constant

    def read(self, options: Options) -> Fields:
        """The fields that the options say by this one."""
        if self.reads:
            return self._read(reading(options))
        if self.says:
            return dict(self.says) if self.name in options else {}
        if self.size:
            return {self.size: positive(options, self.name)}
        if self.flag:
            return {self.flag: self.name in options}
        path, number_of = (self.count, size) if self.count else (self.amount, decimal)
        if not path:
            return {}
        if self.name in options or (self.count and not self.unasked_by and "unasked" not in self.model_fields_set):
            return {path: number_of(options, self.name)}
        return {path: value_of(self.unasked_by, reading(options)) if self.unasked_by else self.unasked}

    def _read(self, names: Said) -> Fields:
        """The fields of `reads`; one with ? is left out where it is null."""
        found = {path: value_of(text, names) for path, text in self.reads.items()}
        return {path.rstrip("?"): value for path, value in found.items() if value is not None or path[-1] != "?"}


def of_model(model: ModelSpec) -> Fields:
    """The names by which expressions of the table know a model."""
    method = rotary_method(model)
    return {
        "model": model, "moe": model.moe, "mla": model.mla, "scaling": model.rope_scaling, "method": method,
        "mamba": model.mamba,
        "is_yarn": method not in (None, "llama3", "linear"),
    }  # fmt: skip


def reading(options: Options) -> Fields:
    """The names that expressions of the table read options by."""
    readers = (text, size, number, positive, decimal, given)
    return {
        "options": options,
        "has": lambda name: name in options,
        "first": lambda name, default: (options.get(name) or [default])[0],
        **{reader.__name__: partial(reader, options) for reader in readers},
        **READERS,
    }


READERS: dict[str, Callable[..., Any]] = {}
"""Functions of all options that `reads` may call, where they need more than an expression."""


def table() -> Fields:
    """options.yaml as it stands."""
    return shipped_table("export/megatron/options.yaml")


@cache
def rows_of(part: str) -> dict[str, tuple[OptionRow, ...]]:
    """The rows of each section of a part of the table: model, layout, run or switch."""
    sections = table()[part].items()
    return {name: tuple(OptionRow(name=option, **cells) for option, cells in rows.items()) for name, rows in sections}


def all_rows() -> Iterator[OptionRow]:
    """Every row of every part."""
    for part in ("model", "layout", "run", "switch"):
        for rows in rows_of(part).values():
            yield from rows


class Codec(NamedTuple):
    """The way from a source to several options, or to one whose value is no field, and the way back."""

    write: Callable[[Any], Any] | None
    """The option's value, or arguments where it is about several; None where rows have expressions."""
    read: Callable[[Options], Fields] | None = None


@record
class Section:
    """Rows that are written and read together, with the functions that they name."""

    rows: tuple[OptionRow, ...]
    codecs: Mapping[str, Codec]

    def written(self, source: Any, version: str = "") -> Arguments:
        """The arguments that the rows say of their source, in a version of Megatron core (empty: the newest)."""
        arguments: Arguments = {}
        for row in self._once():
            if not version or not row.since or release(row.since) <= release(version):
                write = self.codecs[row.by].write if row.by and not row.write else row.value
                value = write(source) if write else None
                found = value if isinstance(value, dict) else {row.name: value}
                arguments |= {name: value for name, value in found.items() if value is not None and value is not False}
        return arguments

    def read(self, options: Options) -> Fields:
        """The fields that options say, by their paths."""
        fields: Fields = {}
        for row in self._once():
            read = self.codecs[row.by].read if row.by else None
            fields |= (read(options) if read else {}) | row.read(options)
        return fields

    def _once(self) -> Iterator[OptionRow]:
        """The rows, and of those of one function the first."""
        seen = set()
        for row in self.rows:
            if not row.by or row.by not in seen:
                seen.add(row.by)
                yield row

    def names_read(self) -> frozenset[str]:
        """The options that are read."""
        by = {name for name, codec in self.codecs.items() if codec.read is not None}
        return frozenset(row.name for row in self.rows if row.is_read or row.by in by)


def holds(clause: str, options: Options) -> bool:
    """`--option`, `--option word|word` or `--option > 1` holds of options."""
    name, *words = clause.split()
    said = re.findall(r"[^\s,\[\]]+", text(options, name))
    if words[:1] == [">"]:
        return len(said) == 1 and is_count(said[0]) and int(said[0]) > int(words[1])
    return name in options and (not words or not {*said}.isdisjoint(words[0].split("|")))


def broken_rows(rows: Mapping[str, Said], options: Options) -> Iterator[tuple[str, str]]:
    """The refusals of a table that options meet: their names, and the options that do not go together."""
    for name, row in rows.items():
        given = next((clause for clause in row["given"] if holds(clause, options)), None)
        if given is None or not all(holds(clause, options) for clause in row.get("beside", ())):
            continue
        needs, excludes = row.get("needs", ()), row.get("excludes", ())
        if needs and not any(holds(clause, options) for clause in needs):
            yield name, f"{given} needs {' or '.join(needs)}"
        if any(holds(clause, options) for clause in excludes):
            yield name, f"{given} takes no {' and no '.join(excludes)}"


def sections_of(part: str, codecs: Mapping[str, Codec]) -> dict[str, Section]:
    """The sections of a part of the table, with the functions that its rows name."""
    return {name: Section(rows, codecs) for name, rows in rows_of(part).items()}


def read_fields(sections: Iterable[Section], options: Options) -> Fields:
    """The fields that options say by sections, with those of a part (`moe.`, `mla.`) in a mapping of its own."""
    fields: Fields = {}
    for section in sections:
        for path, value in section.read(options).items():
            part, _, name = path.rpartition(".")
            (fields.setdefault(part, {}) if part else fields)[name] = value
    return fields


BRIDGE = {row.name: row.bridge for row in all_rows() if row.bridge}
"""Options whose value a field of Megatron-Bridge's configuration takes as it is, and the field."""
TANH = "fast_gelu"
"""Bridge's name of the GELU by a tanh, which fused with a bias is the plain one's."""


class BridgeFlag(NamedTuple):
    """A field that stands for a bare option."""

    field: str
    option: str
    value: bool
    """The value where the option is given; the other where it is not."""


def _flags(option: str, paths: Iterable[str]) -> list[BridgeFlag]:
    return [BridgeFlag(path.removeprefix("not "), option, not path.startswith("not ")) for path in paths]


FLAGS = [flag for row in all_rows() for flag in _flags(row.name, row.bridge_is)]
"""Fields that are written for a bare option, whether it is given or not."""
READ_FLAGS = [flag for row in all_rows() for flag in _flags(row.name, row.bridge_read)]
"""Fields that only recipes set."""
OF_BRIDGE: Fields = table()["bridge"]
"""Recipes, downloads, dtypes of moments: rows that only Bridge has."""
YARN: list[list[str]] = OF_BRIDGE["yarn"]
"""A number of yarn: Bridge's field of plain attention, that of latent attention, and the option."""
PRIMUS = {row.name: row.primus for row in all_rows() if row.primus}
"""Options that Primus has by a name of its own, and that name; `not` is before one that the option sets to false."""
NEGATED = {option: key.removeprefix("not ") for option, key in PRIMUS.items() if key.startswith("not ")}
"""Options that set a key of Primus to false."""
PRIMUS_SCHEDULES: dict[str, Fields] = table()["primus_schedules"]


def key_of(option: str) -> str:
    """The name under which Primus knows an option of Megatron-LM."""
    return NEGATED.get(option) or PRIMUS.get(option) or option.removeprefix("--").replace("-", "_")
