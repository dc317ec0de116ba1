"""Configurations that users have, and the parts of runs and docstrings that tests look at."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from planner.export.imported_run import ImportedRun
from planner.export.launchers import node_check

SCRIPT = (Path(__file__).parents[1] / "fuzzing" / "corpus" / "shell" / "script.sh").read_text()

TEXTS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("samples.yaml").read_text())

BASE = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --vocab-size 50304 --seq-length 2048 " \
    "--max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64"  # fmt: skip


def layout_of(imported: ImportedRun) -> dict[str, Any]:
    parallelism: dict[str, Any] = imported.run["parallelism"]
    return parallelism


def example_of(function: Callable[..., Any]) -> str:
    """The indented lines of a function's docstring."""
    docstring = inspect.getdoc(function) or ""
    return textwrap.dedent("\n".join(re.findall(r"^(?: {4}.*)?$", docstring, re.MULTILINE)))


def preflight_names() -> dict[str, Any]:
    """The names that preflight.py defines, without any plan's checks."""
    names: dict[str, Any] = {"__name__": "preflight"}
    exec(compile(node_check({}), "preflight.py", "exec"), names)
    return names


def differences(trainer: str) -> dict[tuple[str, str], str]:
    """Model and field to the reason why its value is not that of the trainer's own recipe."""
    rows = yaml.safe_load((Path(__file__).parent / "trainers_own" / "differences.yaml").read_text())[trainer]
    return {(model, name): row["why"] for row in rows for model in row["models"] for name in row["fields"]}
