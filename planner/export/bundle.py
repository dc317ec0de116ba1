"""The files of one export, their manifest, and how they reach the disk: all or none, never over others unasked."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.answer import Plan
from planner.errors import PlannerError, SpecError
from planner.export.common.arguments import comment
from planner.files import write_text

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class ExportFile:
    """One file of an export."""

    name: str
    text: str
    executable: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Bundle:
    """What an export writes: files for one trainer, and what the user should know about them."""

    targets: tuple[str, ...]
    written_for: tuple[str, ...]
    """Versions of the trainer the files were written for."""
    plan_sha256: str
    planner_version: str
    files: tuple[ExportFile, ...]
    notes: tuple[str, ...] = ()
    """What the plan does not decide and the export had to."""
    inputs_sha256: str = ""
    world_size: int = 0

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
            "files": {file.name: file.sha256 for file in self.files},
        }

    def with_manifest(self) -> tuple[ExportFile, ...]:
        """All files, the manifest last."""
        return (*self.files, ExportFile(MANIFEST, json.dumps(self.manifest(), indent=2) + "\n"))


def plan_sha256(plan: Plan) -> str:
    """Hash of the whole plan."""
    return hashlib.sha256(json.dumps(plan.to_json(), sort_keys=True).encode()).hexdigest()


def header(plan: Plan, written_for: str, notes: Sequence[str] = ()) -> str:
    """Comment lines for the top of a file: the plan, its hash, the versions, what the plan does not decide."""
    layout = plan.parallelism
    lines = [
        f"{plan.model.name} on {layout.num_gpus_used} of {plan.cluster.num_gpus} GPUs: {layout}",
        f"exported by planner {plan.planner_version} for {written_for}; plan {plan_sha256(plan)[:16]}",
        *notes,
    ]
    return comment("\n".join(lines))


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
