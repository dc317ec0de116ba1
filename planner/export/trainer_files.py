"""The files of one trainer, the command that starts it, its arguments, their comments, and files from templates/."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import yaml

from planner.answer import Plan
from planner.record import record
from planner.specs.base import Fields, Named, Said, Texts
from planner.specs.expressions import standing, text_of, texts_of, value_of
from planner.specs.reading import shipped_table
from planner.specs.units import GIB, is_count

if TYPE_CHECKING:
    from jinja2 import Environment


class ShellText(str):
    """Shell text with variables in it, which is written as it is: `"${CHECKPOINTS}"`, `${DATA_PATH}`."""

    __slots__ = ()

    @property
    def unquoted(self) -> str:
        """The text for files in which variables are replaced without a shell."""
        return self.replace('"', "")


Value = bool | int | float | str | Texts
Arguments = dict[str, Value]
"""Option (with its dashes) to value: true is a bare flag, a tuple several words."""


def argv(arguments: Mapping[str, Value]) -> list[str]:
    """The words of a command line."""
    words: list[str] = []
    for option, value in arguments.items():
        words.append(option)
        if isinstance(value, tuple):
            words += value
        elif value is not True:
            words.append(_spelled(value))
    return words


def _spelled(value: Value) -> str:
    """A scalar in the words of a command line: of a number the shortest that is exact."""
    if isinstance(value, str):
        return value
    if not isinstance(value, float):
        return str(value)
    short = format(value, "g")
    return short if float(short) == value else repr(value)


IMAGE = "nvcr.io/nvidia/pytorch:25.09-py3"
IMAGE_OF_AMD = "rocm/primus:v26.5"
"""With Megatron-LM, torchtitan and Transformer Engine for ROCm (AMD-AGI/Primus, docs, August 2026)."""


@record
class Placeholder:
    """A variable that the user fills in at the top of a launcher, or sets before it starts."""

    name: str
    meaning: str
    """A few words for the comment beside it."""
    default: str = ""
    """The value as shell text, where there is a sensible one."""
    kind: Literal["folder", "new folder", "file", "prefix", "text"] = "text"
    """The thing that the value names, which is looked for before the start; a new folder may be missing yet."""
    in_first_run: bool = False
    """True if the run on mock data needs it, too."""
    is_optional: bool = False

    @property
    def value(self) -> ShellText:
        """The variable as one word of the shell."""
        return ShellText(f'"${{{self.name}}}"')

    @property
    def words(self) -> ShellText:
        """The variable as the words in it."""
        return ShellText(f"${{{self.name}}}")


@record
class ExportFile:
    """One file of an export."""

    name: str
    text: str
    executable: bool = False
    placeholders: tuple[Placeholder, ...] = ()
    """The values in it that the user fills in."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@record
class Requirement:
    """A Python package that every node must have."""

    module: str
    """The name that is imported."""
    reason: str
    """The part of the recipe that needs it."""
    package: str = ""
    """The distribution that knows its version; empty where any version will do."""
    at_least: str = ""
    hint: str = ""
    """The way to install it."""


@record
class TrainerVersion:
    """The version of the trainer that the arguments are for, and the place that says which one is here."""

    name: str = ""
    is_exactly: str = ""
    """Major and minor, such as 0.16; empty where any new enough version will do."""
    at_least: str = ""
    package: str = ""
    """The installed distribution; empty where a checkout is started."""
    folder: str = ""
    """The placeholder that names the checkout."""
    file: str = ""
    """The file in it that sets `__version__`."""


@record
class RunPart:
    """Arguments that only one of the two kinds of run has: on mock data, or training."""

    arguments: Arguments = field(default_factory=dict)
    words: Texts = ()


@record(kw_only=True)
class LaunchCommand:
    """The program that torchrun starts on every node, with its arguments and its environment."""

    program: str
    """Shell text behind torchrun's own options: a script's path, or `-m module`. May use PLAN_DIR."""
    starts_ranks: bool = False
    """The program starts a node's ranks itself, by NNODES, NODE_RANK, GPUS_PER_NODE, MASTER_ADDR and MASTER_PORT."""
    arguments: Arguments
    words: Texts = ()
    """Arguments behind the named ones."""
    first_run: RunPart = RunPart()
    """The part that is added on mock data, where MOCK is 1."""
    training_run: RunPart = RunPart()
    """The part that is added otherwise."""
    placeholders: tuple[Placeholder, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    trainer: TrainerVersion = TrainerVersion()
    promise: Texts = ()
    """Lines that say what the plan promises, to hold the first run against."""
    environment: Named = field(default_factory=dict)
    setup: Texts = ()
    """Shell lines to run before."""
    exit_minutes: str = ""
    """The arguments, with {} for a number, that end a run with a checkpoint after so many minutes; empty for none."""
    comments: str = ""
    files: tuple[ExportFile, ...] = ()
    """Files the program reads from PLAN_DIR."""
    image: str = IMAGE
    """Container image, where the launcher starts containers."""


@record
class TrainerFiles:
    """One trainer's part of an export."""

    written_for: str
    """Trainer and version."""
    files: tuple[ExportFile, ...]
    command: LaunchCommand | None
    """None where the trainer is a library and the user's own script starts it."""
    notes: Texts = ()
    """Placeholders for what the plan does not decide, and things that the trainer does differently."""


def header(plan: Plan, written_for: str, notes: Sequence[str] = ()) -> str:
    """Comment lines for the top of a file: the plan, its hash, the versions, what the plan does not decide."""
    layout = plan.parallelism
    lines = [
        f"{plan.model.name} on {layout.num_gpus_used} of {plan.cluster.num_gpus} GPUs: {layout}",
        f"exported by planner {plan.planner_version} for {written_for}; plan {plan_sha256(plan)[:16]}",
        *notes,
    ]
    return comment("\n".join(lines))


def plan_sha256(plan: Plan) -> str:
    """Hash of the whole plan, as it was made."""
    return hashlib.sha256(json.dumps(plan.as_planned.to_json(), sort_keys=True).encode()).hexdigest()


def slug(name: str) -> str:
    """A name for jobs and Kubernetes objects: a-z, 0-9 and -, at most 40, letter or digit at the ends."""
    text = "".join(char if char.isascii() and char.isalnum() else "-" for char in name.lower())
    return "-".join(part for part in text.split("-") if part)[:40].strip("-") or "plan"


def comment(text: str) -> str:
    """`text` as comment lines: control characters and line breaks cannot leave the comment."""
    return "".join(f"# {_printable(line)}".rstrip() + "\n" for line in text.split("\n"))


def _printable(line: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in line)


def promise(plan: Plan, shown_as: str) -> Texts:
    """Lines with the planned step and each stage's peak; `shown_as` says where the trainer's log has them."""
    step = plan.best.step
    interval = ""
    if step.step_s_interval is not None:
        interval = f" (80% interval {step.step_s_interval[0]:.3g} to {step.step_s_interval[1]:.3g})"
    peaks = [f"{stage.memory.peak_allocated_bytes / GIB:.1f}" for stage in plan.stages]
    stages = f"stages 0 to {len(peaks) - 1}" if len(peaks) > 1 else "every rank"
    return (
        f"planned step: {step.step_s:.4g} s{interval}, {step.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, "
        f"{step.model_tflops_per_gpu:.0f} TFLOP/s/GPU",
        f"planned peak of torch.cuda.max_memory_allocated, GiB, {stages}: {' '.join(peaks)}",
        shown_as,
    )


def rendered(name: str, /, **values: Any) -> str:
    """The text of a template; whatever it needs and is not given is an error.

    Filters: `python` writes a value as Python's literal, `g` a number in up to six digits, `quote` and `words` text and
    words as the shell reads them back, `json` a value as JSON, which YAML is too.
    """
    return _environment().get_template(f"{name}.j2").render(values)


def settings(file: str, plan: Plan | None = None, /, **values: Any) -> Fields:
    """The keys of a settings file, by its rows in settings.yaml, which says how they name values of the plan."""
    names = values if plan is None else names_of(plan) | values
    found: Fields | None = filled(shipped_table("export/settings.yaml")[file], names)
    return found or {}


def names_of(plan: Plan) -> Fields:
    """The parts of a plan by the names that expressions in our tables have for them."""
    return {
        "plan": plan,
        "layout": plan.parallelism,
        "model": plan.model.spec,
        "training": plan.training,
        "half_dtype": "float16" if plan.training.dtype == "fp16" else "bfloat16",
        "runtime": plan.runtime_spec,
        "hardware": plan.cluster.hardware,
        "best": plan.best,
        "recipe": plan.best.recipe,
    }


def filled(row: Any, values: Said) -> Any:
    """A row with its values, which are copies: a part of a table is never changed."""
    if isinstance(row, dict):
        if "if" in row and not filled(row["if"], values):
            return None
        if "value" in row:
            return row["value"]
        parts = {key: filled(part, values) for key, part in row.items() if key != "if"}
        kept = {
            key: part
            for key, part in parts.items()
            if part or key[-1] != "?" or (key[-2:] == "??" and part is not None)
        }
        return {key.rstrip("?"): part for key, part in kept.items()}
    if isinstance(row, list):
        return [filled(part, values) for part in row]
    return value_of(row[1:], values) if isinstance(row, str) and row.startswith("=") else row


def notes_of(name: str, plan: Plan, /, **more: Any) -> list[str]:
    """The notes of a trainer on a plan, by rows of notes.yaml; `more` are names that only they read."""
    return texts_of(shipped_table("export/notes.yaml")["notes"][name], names_of(plan) | more)


def placeholders_of(name: str) -> tuple[Placeholder, ...]:
    """The values that the user of a trainer's files fills in, by rows of notes.yaml."""
    rows = shipped_table("export/notes.yaml")["placeholders"][name].items()
    return tuple(Placeholder(variable, **row) for variable, row in rows)


def imports_of(name: str, names: Said) -> list[str]:
    """The lines that a file of source begins with, by rows of notes.yaml."""
    return texts_of(shipped_table("export/notes.yaml")["imports"][name], names)


def requirements_of(name: str, plan: Plan | None, /, **more: Any) -> tuple[Requirement, ...]:
    """The packages that a trainer needs for a plan, by rows of notes.yaml."""
    names = more if plan is None else names_of(plan) | more
    rows = standing(shipped_table("export/notes.yaml")["requirements"][name], names)
    return tuple(Requirement(**{key: text_of(cell, names) for key, cell in row.items() if key != "if"}) for row in rows)


def as_json(data: Any) -> str:
    """A settings file in JSON."""
    return json.dumps(data, indent=2) + "\n"


def as_yaml(data: Any) -> str:
    """A settings file in YAML, a long text on one line."""
    return yaml.safe_dump(data, sort_keys=False, width=10_000, allow_unicode=True, default_flow_style=False)


def plain(value: Any) -> Any:
    """A value as settings files have it: text of digits is a number, words are a list, a variable is `${NAME}`."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, ShellText):
        return value.unquoted
    return int(value) if isinstance(value, str) and is_count(value) else value


def shell_words(words: Iterable[str]) -> str:
    """Words joined by blanks, each quoted where the shell would read it otherwise."""
    return " ".join(word if isinstance(word, ShellText) else shlex.quote(word) for word in words)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("planner.export", "templates"), undefined=StrictUndefined, autoescape=False,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters.update(python=repr, g="{:g}".format, quote=shlex.quote, words=shell_words, json=json.dumps)
    return environment
