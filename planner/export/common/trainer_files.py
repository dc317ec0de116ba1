"""What a trainer's exporter hands on: its files, the command that starts it, and what the user should know."""

from __future__ import annotations

from dataclasses import dataclass

from planner.export.bundle import ExportFile
from planner.export.launch.torchrun import Command


@dataclass(frozen=True, slots=True)
class Exported:
    """One trainer's part of an export."""

    target: str
    written_for: str
    files: tuple[ExportFile, ...]
    command: Command | None
    """None where the trainer is a library and the user's own script starts it."""
    notes: tuple[str, ...] = ()
