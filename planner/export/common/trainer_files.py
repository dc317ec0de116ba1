"""The result of a trainer's exporter: the files of one trainer and the command that starts it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from planner.export.common.arguments import Arguments

IMAGE = "nvcr.io/nvidia/pytorch:25.09-py3"


@dataclass(frozen=True, slots=True)
class ExportFile:
    """One file of an export."""

    name: str
    text: str
    executable: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCommand:
    """The program that torchrun starts on every node, with its arguments and its environment."""

    program: str
    """Shell text behind torchrun's own options: a script's path, or `-m module`. May use PLAN_DIR."""
    arguments: Arguments
    words: tuple[str, ...] = ()
    """Arguments behind the named ones."""
    environment: dict[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    """Shell lines to run before."""
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
