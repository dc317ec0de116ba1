"""All files of one export with their manifest, written to a folder: all or none, and never over others unasked."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.export.common.trainer_files import ExportFile, Placeholder
from planner.files import FolderFile, write_folder

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The files of a trainer and of the launchers that start it, and what the user should know about them."""

    targets: tuple[str, ...]
    """Names of the trainer, which comes first, and of the launchers."""
    written_for: tuple[str, ...]
    """Versions of the trainer the files were written for."""
    plan_sha256: str
    inputs_sha256: str
    planner_version: str
    world_size: int
    """GPUs that the layout uses."""
    files: tuple[ExportFile, ...]
    notes: tuple[str, ...]
    """Things that the plan does not decide and the export had to."""
    first_run: str = ""
    """The command of the short run to hold against the plan; empty where the user's own script trains."""

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        """The values that the user fills in, each once, in whichever files they stand."""
        return tuple(dict.fromkeys(place for file in self.files for place in file.placeholders))

    def manifest(self) -> dict[str, Any]:
        """Every file's sha256, the plan's hash and the versions."""
        return {
            "planner_version": self.planner_version,
            "plan_sha256": self.plan_sha256,
            "inputs_sha256": self.inputs_sha256,
            "targets": list(self.targets),
            "written_for": list(self.written_for),
            "world_size": self.world_size,
            "notes": list(self.notes),
            "placeholders": [asdict(place) for place in self.placeholders],
            "first_run": self.first_run,
            "files": {file.name: file.sha256 for file in self.files},
        }

    def with_manifest(self) -> tuple[ExportFile, ...]:
        """All files, the manifest last."""
        return (*self.files, ExportFile(MANIFEST, json.dumps(self.manifest(), indent=2) + "\n"))

    def folder_files(self, folder: str = "") -> Iterator[FolderFile]:
        """All files as they are written, in a folder's folder where one is named."""
        for file in self.with_manifest():
            yield FolderFile(os.path.join(folder, file.name), file.text.encode(), file.executable)


def write_bundle(bundle: Bundle, folder: Path, force: bool = False) -> list[Path]:
    """Write every file and the manifest into `folder`, making it where it is missing: all of them or none.

    Raises SpecError, before anything is written, where a file exists and `force` is not given, or a folder does.
    """
    return write_folder(folder, list(bundle.folder_files()), force)
