"""Every reader of what users give the planner, with what mutants are made of; adding a reader is a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fuzzing import made, reads
from fuzzing.made import CORPUS, Seeds
from planner.cli.measurements import read_probe
from planner.observe.judge import read_observed
from planner.plan_file import read_plan
from planner.probe.evidence import slowness
from planner.schedule.graph import from_torch_csv
from planner.specs.phases import read_phases
from planner.specs.reading import read_text
from planner.specs.registry import load_hardware, load_model
from planner.trainers.load import load_runtime

ROOT = Path(__file__).parents[2]
CASES = 1000
"""Mutants of each reader in the tests."""


@dataclass(frozen=True)
class Reader:
    """A reader of files, the files that its mutants are made of, and what they are made of."""

    read: Callable[[Path], object]
    seeds: Callable[[], Seeds]
    grammar: str = "tree"
    """A key of `GRAMMARS`."""
    suffix: str | None = None
    """The end of a mutant's name where the reader goes by it; else it has the name of its seed."""
    folder: bool = False
    """All seeds lie in one folder, and a mutant takes the place of its own."""
    cases: int = CASES
    """Mutants in the tests; fewer where one costs more than 10 ms, as where layers are priced."""


def _files(folder: Path, pattern: str = "*") -> Callable[[], Seeds]:
    def seeds() -> Seeds:
        found = {path.name: path.read_bytes() for path in sorted(folder.glob(pattern))}
        assert found, f"no corpus in {folder}"
        return found

    return seeds


def _corpus(folder: str, pattern: str = "*") -> Callable[[], Seeds]:
    return _files(CORPUS / folder, pattern)


def _exported(target: str, runtime: str | None = None, **sizes: int) -> Callable[[], Seeds]:
    return partial(made.exported, target, runtime, **sizes)


_ALONE = {"tp": 1, "pp": 1, "dp": 8, "zero_stage": 3}
"""All weights sharded, nothing split: what every trainer can run."""
_FILES = {
    "model": Reader(load_model, _files(ROOT / "model_specs", "*.yaml"), suffix=".yaml"),
    "config.json": Reader(load_model, _files(ROOT / "tests" / "specs" / "configs", "*.json"), suffix=".json"),
    "hardware": Reader(load_hardware, _files(ROOT / "hardware_profiles", "*.yaml"), suffix=".yaml"),
    "trainer": Reader(load_runtime, _files(ROOT / "planner" / "trainers" / "data", "*.yaml"), suffix=".yaml"),
    "runs": Reader(reads.runs, _corpus("run", "*.jsonl"), cases=60),
    "phases": Reader(lambda path: read_phases(str(path)), _corpus("run", "*.yaml")),
    "lengths": Reader(reads.lengths, _corpus("lengths")),
    "schedule": Reader(lambda path: from_torch_csv(read_text(path)), _corpus("csv"), "cells"),
}
_SAVED = {
    "plan": Reader(lambda path: read_plan(str(path)), made.plans),
    "plan used": Reader(reads.plan_used, made.plans, cases=100),
    "observation": Reader(lambda path: read_observed(str(path)), made.observations),
    "probe": Reader(lambda path: slowness(made.plan_of("torch-eager"), read_probe(str(path))), made.probes),
    "calibration": Reader(reads.calibrated, lambda: made.observations() | made.probes(), cases=20),
    "compare": Reader(reads.compared, lambda: made.plans() | made.observations() | made.probes(), cases=300),
    "history": Reader(reads.history, made.kept_runs, folder=True),
}
_RUNS = {
    "log": Reader(reads.observed, _corpus("log"), "lines"),
    "trace": Reader(reads.recorded, made.traces),
    "timeline": Reader(reads.recorded, made.timelines, cases=200),
    "snapshot": Reader(reads.recorded, made.snapshots, "pickle"),
    "flight recorder": Reader(reads.recorded, made.flight_dumps, "pickle"),
}
_IMPORTS = {
    "import shell": Reader(reads.imported, _corpus("shell", "*.s*"), "words"),
    "import arguments": Reader(reads.imported, _corpus("shell", "*.yaml")),
    "import bridge": Reader(reads.imported, _corpus("bridge")),
    "import torchtitan": Reader(reads.imported, _corpus("torchtitan", "*.toml")),
    "import torch": Reader(reads.imported, _corpus("torch")),
    "import deepspeed": Reader(reads.imported, _corpus("deepspeed")),
    "import primus": Reader(reads.imported, _corpus("primus")),
    "import python": Reader(reads.imported, _corpus("python"), "python", suffix=".py"),
    "import recipe": Reader(reads.imported, _corpus("torchtitan", "planned_recipe"), "python", suffix=".py", cases=60),
    "import launcher": Reader(reads.imported, _corpus("torchtitan", "*.sh"), "words"),
    "import huggingface": Reader(reads.imported, _corpus("huggingface")),
    "import axolotl": Reader(reads.imported, _corpus("axolotl")),
    "import llamafactory": Reader(reads.imported, _corpus("llamafactory")),
    "import torchtune": Reader(reads.imported, _corpus("torchtune")),
    "import hf folder": Reader(reads.imported_folder, _exported("hf", **_ALONE), folder=True, cases=250),
    "import primus folder": Reader(
        reads.imported_folder, _exported("primus", "primus-torchtitan", **_ALONE), folder=True, cases=250
    ),
    "import deepspeed folder": Reader(reads.imported_folder, _exported("deepspeed", **_ALONE), folder=True, cases=250),
}
_TYPED = {
    "command plan": Reader(reads.commanded, partial(made.lines_of, "plan.txt"), "command", cases=100),
    "command evaluate": Reader(reads.commanded, partial(made.lines_of, "price.txt"), "command", cases=25),
    "command others": Reader(reads.commanded, partial(made.lines_of, "others.txt"), "command", cases=50),
    "page": Reader(reads.question, made.bodies),
}
READERS = {**_FILES, **_SAVED, **_RUNS, **_IMPORTS, **_TYPED}
