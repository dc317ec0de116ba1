"""Commands and their options: `options.json` has a row for each, and a command declares a parameter of its type.

    def plan_command(ctx: typer.Context, asked: PlanOptions, json: bool = False) -> None:

A row stands under the command or the class of options that has it (`shared` where several commands do) and under its
heading in the help: its spelling (none for an argument), what follows it (nothing for a flag), the help with defaults
in brackets, the unit of a number or the words that a shell completes, and whether a number is above 0. A command that
declares a parameter of one of the classes below has an option for each field of it. What was not given is None, or
False for a flag: no option has a default here, because a command must be able to tell what was given.
"""

from __future__ import annotations

import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial, wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import typer

from planner.errors import SpecError
from planner.files import STDOUT, refuse_to_overwrite
from planner.rank_orders import RANK_ORDERS
from planner.specs.shipped import DEFAULT_HARDWARE as DEFAULT_HARDWARE
from planner.specs.shipped import hardware_names, model_names
from planner.specs.units import UNITS, parse_number, parse_whole, unit_of
from planner.trainers.shipped import RUNTIMES

DEFAULT_RUNTIME = "megatron"
JOB, LAYOUT, SEARCH, ASSUMED, OUTPUT = "What to train, on what", "Layout", "Search", "Assumptions", "Output"
FINETUNE = "Fine-tuning"
RUN = "The whole run, with --tokens"
FOLLOW = "A log that grows, with --follow"
SECTIONS = (
    "sure", "seconds", "alternatives", "robust", "room", "changes", "memory", "timeline", "recipe", "months",
    "rejected", "proof", "corrections", "assumptions", "warnings",
)  # fmt: skip
"""Sections of an answer, for --show."""
DTYPES = ("bf16", "fp16", "fp8", "mxfp8", "nvfp4")
SCHEDULES = (
    "none", "gpipe", "1f1b", "interleaved-1f1b", "breadth-first", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min",
    "dualpipe", "dualpipe-v", "chimera", "pipedream-2bw", "forward-only", "auto",
)  # fmt: skip
"""The words that shells complete for --dtype and --schedule: those of `Dtype` and the schedules, which load longer."""
Word = str | None
"""The text of an option, which is not empty."""
Whole = int | None
Number = float | None
Numbers = tuple[float, ...] | None
"""A whole number, a number, and numbers in a comma list, written as `planner.specs.units` has them."""
MOST = 1e12
"""More seconds, days and dollars than any run takes."""
_ORDER = (JOB, FINETUNE, RUN, LAYOUT, SEARCH, ASSUMED, FOLLOW, OUTPUT)
"""The order of the headings in the help of a command of jobs."""


class CliOption(NamedTuple):
    """An option or an argument: a row of `options.json` and the heading that it stands under."""

    heading: str
    spelling: str
    metavar: str
    says: str
    of: str = ""
    """The unit of a number, or the name of the words that it may be."""
    is_positive: bool = False
    """True for a number that is above 0, and no larger than any that a run takes."""
    elsewhere: Mapping[str, str] = {}
    """Words that another command takes there, and how to type it."""

    @property
    def name(self) -> str:
        """Its first spelling."""
        return self.spelling.partition(" ")[0]

    @property
    def spellings(self) -> set[str]:
        """All words that name it."""
        return {*self.spelling.replace("/", " ").split()}


@cache
def _data() -> dict[str, dict[str, Any]]:
    data: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "options.json").read_text(encoding="utf-8"))
    return data


def command_rows() -> dict[str, list[str]]:
    """The rows of all commands beside the main job: group, module, function, and the first sentence of the help."""
    return _data()["commands"]


def first_screen() -> list[tuple[str, str]]:
    """The options that the first screen of the help shows, each in one line."""
    return [(spelling, _filled(says)) for spelling, says in _data()["first_screen"].items()]


def _filled(says: str) -> str:
    """A text with the words that {…} stands for."""
    return re.sub(r"\{(\w+)\}", lambda found: ", ".join(_names(found[1])), says)


@cache
def _rows() -> dict[str, dict[str, CliOption]]:
    return {
        owner: {name: CliOption(heading, *row) for heading, rows in headings.items() for name, row in rows.items()}
        for owner, headings in _data().items()
        if owner not in ("commands", "first_screen")
    }


def row_of(owners: Sequence[str], name: str) -> CliOption | None:
    """The row of a parameter of the first of some commands and classes that has one."""
    return next((_rows()[owner][name] for owner in owners if name in _rows().get(owner, ())), None)


_WORDS: dict[str, Iterable[str]] = {
    "dtypes": DTYPES, "schedules": SCHEDULES, "sections": SECTIONS, "runtimes": RUNTIMES, "rank_orders": RANK_ORDERS,
}  # fmt: skip


def _names(of: str) -> Iterable[str]:
    """The words that help lists and shells complete."""
    if of in _WORDS:
        return _WORDS[of]
    if of in ("models", "hardware"):
        names = model_names() if of == "models" else hardware_names()
        return [name for canonical, aliases in names.items() for name in (canonical, *aliases)]
    from planner.export.targets import LAUNCHERS, SOURCES, TARGETS, TRAINERS

    return {"sources": SOURCES, "targets": TARGETS, "trainers": TRAINERS, "launchers": LAUNCHERS}[of]


def _completing(of: str) -> Callable[[str], list[str]]:
    """A shell completion of the last word of a comma list; of a switch after its = also of its values."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        words = _switches(last) if of == "switches" else _names(of)
        return [f"{before}{comma}{word}" for word in words if word.startswith(last)]

    return complete


def _switches(word: str) -> list[str]:
    from planner.trainers.switches import SWITCHES, written

    name, is_named, _ = word.partition("=")
    if is_named:
        return [f"{name}={written(each)}" for each in (SWITCHES[name].values if name in SWITCHES else ())]
    return [*(f"{each}=" for each in SWITCHES), "default"]


def converted(row: CliOption, kind: Any, word: Any) -> Any:
    """The value that a word of an option stands for. Raises SpecError for what is none."""
    if not isinstance(word, str):  # the default of an option that was not given
        return word
    kinds = get_args(kind) or (kind,)
    if not word:  # a variable of a script that was never set, and means no default
        raise SpecError(f"{row.name}: is empty", f"give it a value, or leave {row.name} out")
    unit = row.of if row.of in UNITS else unit_of(row.name.removeprefix("--").replace("-", "_"))
    try:
        if int in kinds:
            return parse_whole(word, unit)
        if float in kinds:
            number = float(parse_number(word, unit))
            if row.is_positive and not 0 < number <= MOST:
                raise SpecError(f"{row.name}: {number:g} is not above 0 and at most {MOST:g}", f"write {row.name} 30")
            return number
        if kind == Numbers:
            return tuple(float(part) for part in word.split(","))
        if row.of == "imbalance" and ":" not in word:  # else a histogram, which TrainingSpec reads
            return float(word)
    except (ValueError, OverflowError):
        example = UNITS[unit][1] if {int, float} & {*kinds} else "1"
        says = f"{row.name}: {word[:60]!r} is not a {'whole number' if int in kinds else 'number'}"
        raise SpecError(says, row.elsewhere.get(word, f"write {row.name} {example}")) from None
    return word


def _parameter(row: CliOption | None, own: inspect.Parameter) -> inspect.Parameter:
    """A parameter as typer reads it."""
    kind: Any = own.annotation
    if row is None:
        return own.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    more: dict[str, Any] = {"metavar": row.metavar or None, "help": _filled(row.says), "show_default": False}
    if row.of and row.of not in UNITS and row.of != "imbalance":
        more["autocompletion"] = _completing(row.of)
    if row.spelling:
        if row.metavar:
            more["parser"] = partial(converted, row, kind)
        option = typer.Option(*row.spelling.split(), rich_help_panel=row.heading, **more)
    else:
        option = typer.Argument(**more)
    kind = Any if kind == Numbers else kind
    return inspect.Parameter(own.name, inspect.Parameter.KEYWORD_ONLY, default=own.default,
                             annotation=Annotated[kind, option])  # fmt: skip


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class JobOptions:
    """A job: a model, the GPUs, the training, and the assumptions made otherwise."""

    model: Word = None
    gpus: Whole = None
    nodes: Whole = None
    hardware: Word = None
    gpus_per_node: Whole = None
    tier: Word = None
    network: Word = None
    host: Word = None
    seq_length: Whole = None
    global_batch_size: Whole = None
    batch_tokens: Word = None
    images: Word = None
    dtype: Word = None
    runtime: Word = None
    finetune: bool = False
    lora: bool = False
    qlora: bool = False
    lora_rank: Whole = None
    lora_targets: Word = None
    lora_dropout: Number = None
    base_bits: Whole = None
    optimizer: Word = None
    objective: Word = None
    reference: Word = None
    example_lengths: Word = None
    batching: Word = None
    examples: Word = None
    epochs: Number = None
    tokens: Word = None
    storage_gb_per_s: Number = None
    failures_per_1000_gpu_days: Number = None
    spares: Whole = None
    usd_per_gpu_hour: Number = None
    moe_imbalance: Word = None
    straggler_fraction: Number = None
    assume: Word = None
    calibration: Word = None
    no_history: bool = False


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class SearchOptions(JobOptions):
    """A job whose layout is searched: axes pinned by comma lists, and how to search."""

    tp: Word = None
    pp: Word = None
    dp: Word = None
    cp: Word = None
    ep: Word = None
    etp: Word = None
    vpp: Word = None
    micro_batch_size: Word = None
    schedule: Word = None
    zero_stage: Word = None
    shard_size: Word = None
    rank_order: Word = None
    recompute: Word = None
    switch: Word = None
    allow: Word = None
    top: Whole = None
    time_limit: Number = None
    fastest: bool = False
    tp_across_nodes: bool = False
    oom_risk: Number = None
    memory_headroom: Number = None


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class PlanOptions(SearchOptions):
    """A job whose layout is searched, or one that runs and goes on with other GPUs, or a run of phases."""

    from_: Word = None
    keep: Word = None
    phases: Word = None
    days: Number = None
    usd: Number = None


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class LayoutOptions(JobOptions):
    """A job whose layout is given."""

    tp: Whole = None
    pp: Whole = None
    dp: Whole = None
    cp: Whole = None
    ep: Whole = None
    etp: Whole = None
    vpp: Whole = None
    micro_batch_size: Whole = None
    schedule: Word = None
    zero_stage: Whole = None
    fsdp: Word = None
    sequence_parallel: bool | None = None
    rank_order: Word = None
    recompute: Word = None
    recompute_modules: Word = None
    recompute_num_layers: Whole = None
    layers_per_stage: Word = None
    layout: Word = None
    switch: Word = None


@dataclass(kw_only=True, eq=False, repr=False)
class Shown:
    """How much of a plan is shown."""

    full: bool = False
    show: Word = None

    @property
    def names(self) -> tuple[str, ...]:
        """The sections of --show. SpecError for one that no answer has."""
        names = () if self.show is None else tuple(name.strip() for name in self.show.split(","))
        for name in names:
            if name not in SECTIONS:
                from planner.specs.problems import among

                raise SpecError(f"--show: {name[:60]!r} is no section", among(SECTIONS, name))
        return names


@dataclass(kw_only=True, eq=False, repr=False)
class Saving:
    """How an answer is told, as JSON or drawn, and the file where it is saved."""

    json: bool = False
    output: Word = None
    force: bool = False

    @property
    def is_to_stdout(self) -> bool:
        """True where what is saved is all that stdout gets."""
        return self.output == STDOUT

    def check(self) -> None:
        """Raise SpecError for a file that is there already. For the start of a long command."""
        refuse_to_overwrite(self.output, self.force)


@dataclass(kw_only=True, eq=False, repr=False)
class Answering(Saving, Shown):
    """How a plan is shown, told and saved."""


def rows_of(options: type[JobOptions]) -> dict[str, tuple[CliOption, Any]]:
    """The row and the type of each field of a class of options."""
    owners, hints = [each.__name__ for each in options.__mro__], get_type_hints(options)
    found = {field.name: row_of(owners, field.name) for field in fields(options)}
    return {name: (row, hints[name]) for name, row in found.items() if row is not None}


EVERYWHERE = {"-q", "--quiet", "--no-color", "--debug", "--version"}
"""Spellings of options that no row has."""


def declared(command: Callable[..., None], name: str, words: Sequence[str] | None = None) -> Callable[..., None]:
    """A command with the parameters that typer shall see: options by their rows, those of a class for its fields.

    A command of a job has the headings of its help in one order, under each first the options that jobs share. Of a
    command line whose words are all known, the options that it names are enough, and soon built.
    """
    own = inspect.signature(command, eval_str=True).parameters
    rows = []
    shared = {}
    for parameter in own.values():
        options = parameter.annotation
        if not (isinstance(options, type) and is_dataclass(options)):
            rows.append((row_of((name, "shared"), parameter.name), parameter))
            continue
        shared[parameter.name] = options
        owners = [*(each.__name__ for each in options.__mro__), "JobOptions", name, "shared"]
        hints = get_type_hints(options)
        for field in fields(options):
            bare = inspect.Parameter(field.name, parameter.kind, default=field.default, annotation=hints[field.name])
            rows.append((row_of(owners, field.name), bare))
    given = {word.partition("=")[0] for word in words or () if word.startswith("-") and word != "-"}
    if words is not None and given <= EVERYWHERE.union(*(row.spellings for row, _ in rows if row)):
        rows = [
            (row, bare) for row, bare in rows
            if row is None or not row.spelling or given & row.spellings or bare.default is bare.empty
        ]  # fmt: skip
    parameters = [_parameter(row, bare) for row, bare in rows]

    @wraps(command)
    def run(**values: Any) -> None:
        asked = {
            place: options(**{field.name: values.pop(field.name) for field in fields(options) if field.name in values})
            for place, options in shared.items()
        }
        command(**values, **asked)

    of_a_job = {each.name for options in shared.values() if issubclass(options, JobOptions) for each in fields(options)}
    run.is_of_a_job = bool(of_a_job)  # type: ignore[attr-defined]
    if of_a_job:
        parameters.sort(key=lambda parameter: (_place(parameter), parameter.name not in of_a_job))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _place(parameter: inspect.Parameter) -> int:
    """Place in the help of the heading that an option stands under."""
    options = getattr(parameter.annotation, "__metadata__", ())
    headings = [getattr(option, "rich_help_panel", None) for option in options]
    return max((_ORDER.index(heading) for heading in headings if heading), default=-1)


def command_line(asked: JobOptions, command: str = "plan") -> str:
    """The words that give `command` these options; a shell takes them as they are."""
    words = command.split()
    for name, (row, _) in rows_of(type(asked)).items():
        value = getattr(asked, name)
        if value is not None and value is not False:
            words += [row.name] if value is True else [row.name, str(value)]
    return shlex.join(words)
