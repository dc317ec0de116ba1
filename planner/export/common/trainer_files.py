"""The result of a trainer's exporter: the files of one trainer and the command that starts it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

from planner.export.common.arguments import Arguments, ShellText

IMAGE = "nvcr.io/nvidia/pytorch:25.09-py3"
IMAGE_OF_AMD = "rocm/primus:v26.5"
"""With Megatron-LM, torchtitan and Transformer Engine for ROCm (AMD-AGI/Primus, docs, August 2026)."""


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Part:
    """Arguments that only one of the two kinds of run has: on mock data, or training."""

    arguments: Arguments = field(default_factory=dict)
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """The program that torchrun starts on every node, with its arguments and its environment."""

    program: str
    """Shell text behind torchrun's own options: a script's path, or `-m module`. May use PLAN_DIR."""
    starts_ranks: bool = False
    """The program starts a node's ranks itself, by NNODES, NODE_RANK, GPUS_PER_NODE, MASTER_ADDR and MASTER_PORT."""
    arguments: Arguments
    words: tuple[str, ...] = ()
    """Arguments behind the named ones."""
    first_run: Part = Part()
    """The part that is added on mock data, where MOCK is 1."""
    training_run: Part = Part()
    """The part that is added otherwise."""
    placeholders: tuple[Placeholder, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    trainer: TrainerVersion = TrainerVersion()
    promise: tuple[str, ...] = ()
    """Lines that say what the plan promises, to hold the first run against."""
    environment: dict[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    """Shell lines to run before."""
    exit_minutes: str = ""
    """The arguments, with {} for a number, that end a run with a checkpoint after so many minutes; empty for none."""
    comments: str = ""
    files: tuple[ExportFile, ...] = ()
    """Files the program reads from PLAN_DIR."""
    image: str = IMAGE
    """Container image, where the launcher starts containers."""


@dataclass(frozen=True, slots=True)
class TrainerFiles:
    """One trainer's part of an export."""

    written_for: str
    """Trainer and version."""
    files: tuple[ExportFile, ...]
    command: LaunchCommand | None
    """None where the trainer is a library and the user's own script starts it."""
    notes: tuple[str, ...] = ()
    """Placeholders for what the plan does not decide, and things that the trainer does differently."""
