"""Every reader of a file that the planner has, with the files that mutants are made of; adding a reader is a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from planner.export.read import read as read_configuration
from planner.layout.runs import evaluate_lines, parse_run
from planner.observe.judge import judged_alone
from planner.observe.read import observe
from planner.plan_file import read_plan
from planner.schedule.torch_csv import from_torch_csv
from planner.specs.phases import read_phases
from planner.specs.reading import read_text
from planner.specs.registry import load_hardware, load_model
from planner.trainers.load import load_runtime

ROOT = Path(__file__).parents[2]
CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Reader:
    """A reader of files with one suffix, and the folders and patterns of its corpus."""

    read: Callable[[Path], object]
    suffix: str
    patterns: tuple[tuple[Path, str], ...]

    def seeds(self) -> list[bytes]:
        """The files that mutants are made of."""
        paths = [path for folder, pattern in self.patterns for path in sorted(folder.glob(pattern))]
        assert paths, f"no corpus for {self}"
        return [path.read_bytes() for path in paths]


def _imported(path: Path) -> object:
    """What `plan import` reads, and the run that it makes of it; what is missing is given."""
    imported = read_configuration(path)
    run = imported.complete(hardware="h100", num_gpus=None, model=None if "model" in imported.run else "8b")
    return parse_run({"run": run}, str(path))


def _runs(path: Path) -> object:
    """The lines of `plan evaluate --runs`, each priced."""
    for answer in evaluate_lines(path.read_text(errors="replace").splitlines()):
        if answer.error is not None and (answer.error.message or "").startswith("internal"):
            raise RuntimeError(answer.error.message)
    return None


def _observed(path: Path) -> object:
    return judged_alone(observe([str(path)])).model_dump_json()


def _corpus(folder: str, pattern: str = "*") -> tuple[tuple[Path, str], ...]:
    return ((CORPUS / folder, pattern),)


READERS = {
    "model": Reader(load_model, ".yaml", ((ROOT / "model_specs", "*.yaml"),)),
    "config.json": Reader(load_model, ".json", ((ROOT / "tests" / "specs" / "configs", "*.json"),)),
    "hardware": Reader(load_hardware, ".yaml", ((ROOT / "hardware_profiles", "*.yaml"),)),
    "trainer": Reader(load_runtime, ".yaml", ((ROOT / "planner" / "trainers" / "data", "*.yaml"),)),
    "plan": Reader(lambda path: read_plan(str(path)), ".json", _corpus("plan")),
    "runs": Reader(_runs, ".jsonl", _corpus("run", "*.jsonl")),
    "phases": Reader(lambda path: read_phases(str(path)), ".yaml", _corpus("run", "*.yaml")),
    "schedule": Reader(lambda path: from_torch_csv(read_text(path)), ".csv", _corpus("csv")),
    "log": Reader(_observed, ".log", _corpus("log")),
    **{
        f"import {name}": Reader(_imported, suffix, _corpus(name))
        for name, suffix in {
            "shell": ".sh", "bridge": ".json", "torchtitan": ".toml", "torch": ".yaml", "deepspeed": ".json",
            "primus": ".yaml", "python": ".py", "huggingface": ".yaml",
        }.items()
    },
}  # fmt: skip
