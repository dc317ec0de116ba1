"""The measured tables of GPUs under `data/`: CSV files whose comment lines name their source."""

from __future__ import annotations

import csv
from pathlib import Path

from planner.profile.fitting import MeasuredTable

DATA = Path(__file__).with_name("data")


def measured_gpus() -> list[str]:
    """The GPUs of which there are tables."""
    return sorted(folder.name for folder in DATA.iterdir() if folder.is_dir())


def tables_of(gpu: str) -> dict[str, MeasuredTable]:
    """All tables of a GPU by name; none for a GPU that nobody measured."""
    return {path.stem: read_table(gpu, path.stem) for path in sorted((DATA / gpu).glob("*.csv"))}


def read_table(gpu: str, name: str) -> MeasuredTable:
    """The table `data/<gpu>/<name>.csv`."""
    text = (DATA / gpu / f"{name}.csv").read_text(encoding="utf-8")
    return MeasuredTable(list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))))
