"""All files of one export with their manifest, written to a folder: all or none, and never over others unasked."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from planner.errors import PlannerError, SpecError
from planner.export.common.trainer_files import ExportFile, Placeholder
from planner.files import write_text

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


def write_bundle(bundle: Bundle, folder: Path, force: bool = False) -> list[Path]:
    """Write every file and the manifest into `folder`, making it where it is missing; the manifest comes last.

    Raises SpecError, before anything is written, where a file exists and `force` is not given, or a folder does.
    """
    files = bundle.with_manifest()
    paths = [folder / file.name for file in files]
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"{folder}: is a file, not a folder", "name another folder")
    folders = [path.name for path in paths if path.is_dir()]
    if folders:
        raise SpecError(f"{folder}: {', '.join(folders)} is a folder there, not a file", "name another folder")
    existing = [path.name for path in paths if os.path.lexists(path)]
    if existing and not force:
        raise SpecError(
            f"{folder}: already holds {', '.join(existing)}", "add --force to replace, or name another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlannerError(f"{folder}: cannot be made: {error.strerror}", "name a folder you may write to") from None
    for file, path in zip(files, paths, strict=True):
        write_text(path, file.text, force)
        if file.executable:
            path.chmod(path.stat().st_mode | 0o111)
    return paths
