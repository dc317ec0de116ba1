"""What is done with each kind of file: it is read as its command does, and used as far as that costs little."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from fuzzing.made import kept_price, plan_of
from planner.cli.app import run as run_command
from planner.cli.measurements import read_calibration
from planner.cli.options import DEFAULT_HARDWARE
from planner.cli.views import _side, read_question
from planner.decide.compare import compare, of_plan
from planner.errors import PlannerError, SpecError
from planner.export.import_run import read as read_configuration
from planner.layout.runs import evaluate_lines, parse_run
from planner.observe.history import KeptPrice, prices_of, read_kept
from planner.observe.judge import judged
from planner.observe.log_reader import observe
from planner.observe.traces.recorded import kinds_of, observation_of, read_recorded
from planner.plan_file import read_plan
from planner.report.trace import plan_trace
from planner.serve.app import Asked
from planner.serve.controls import Catalogue, asked, options_of
from planner.specs.phases import read_lengths
from planner.specs.reading import load_yaml, parse_json

MAX_LINES = 8
"""Lines of a file of runs that are priced: each is a job of its own, and each has its time."""


class NotSearched(PlannerError):
    """Stands for an answer: the job was read, and is not searched for."""


_SEARCHES = (
    ("planner.search.search", "planned"), ("planner.decide.sweep", "side_by_side"),
    ("planner.decide.course", "side_by_side"), ("planner.schedule.synthesis", "synthesize"),
)  # fmt: skip
"""Functions that take seconds, whatever they are asked."""


def _not_searched(*_: Any, **__: Any) -> Any:
    raise NotSearched("read, and not searched", "")


def imported(path: Path) -> object:
    """What `plan import` reads, and the run that it makes of it; what is missing is given."""
    read = read_configuration(path)
    run = read.complete(hardware="h100", num_gpus=None, model=None if "model" in read.run else "8b")
    return parse_run({"run": run}, str(path))


def imported_folder(path: Path) -> object:
    """The folder that the file lies in, as `plan import FOLDER` reads it."""
    return imported(path.parent)


def runs(path: Path) -> object:
    """The lines of `plan evaluate --runs`, each priced."""
    for answer in evaluate_lines(path.read_text(errors="replace").splitlines()[:MAX_LINES]):
        if answer.error is not None and (answer.error.message or "").startswith("internal"):
            raise RuntimeError(answer.error.message)
    return None


def plan_used(path: Path) -> object:
    """A saved plan where it is used: its trace, and its comparison with the plan before it was edited."""
    plan = read_plan(str(path))
    plan_trace(plan, plan.best)
    return compare([of_plan(plan_of(), "plan.json"), of_plan(plan, "edited.json")]).to_json()


def compared(path: Path) -> object:
    """Any file that `plan compare` takes, beside a plan."""
    return compare([_side(str(path)), of_plan(plan_of(), "plan.json")]).to_json()


def calibrated(path: Path) -> object:
    """The hardware and the trainer that a saved probe or observation corrects."""
    plan = plan_of()
    calibration = read_calibration(str(path), plan.cluster, "megatron")
    return calibration.of_cluster(plan.cluster), calibration.of_runtime(plan.runtime_spec)


def observed(path: Path) -> object:
    return judged(observe([str(path)])).model_dump_json()


def recorded(path: Path) -> object:
    """Traces, snapshots and dumps as `plan observe` reads them; a log where the file's first bytes say nothing."""
    kinds = kinds_of([str(path)])
    if not kinds:
        return observed(path)
    read = read_recorded(kinds)
    with suppress(PlannerError):
        return judged(observation_of(read), recorded=read).model_dump_json()
    return read.model_dump_json()


def history(path: Path) -> object:
    """A folder of kept runs; what cannot be read is left out, with a reason."""
    return prices_of(path.parent, _kept).model_dump_json()


def _kept(path: Path) -> KeptPrice:
    """A price that was made once; what a mutant may break is the reading of its run."""
    read_kept(path)
    return kept_price().model_copy(update={"file": path.name})


def lengths(path: Path) -> object:
    data = load_yaml(str(path))
    return read_lengths(data.get("lengths", data), str(path))


def question(path: Path) -> object:
    """The body of a request to the page, to the question that it asks."""
    try:
        given = Asked.model_validate(parse_json(path.read_bytes(), "request"))
    except (SpecError, ValueError):  # answered with 400
        return None
    return asked(read_question, options_of(given.form, _catalogue())).key, given.shown, given.alternative


@cache
def _catalogue() -> Catalogue:
    return Catalogue.shipped({}, {"hardware": DEFAULT_HARDWARE})


def commanded(path: Path) -> object:
    """A command line; what is asked of it is read and priced, but nothing is searched for."""
    for module, name in _SEARCHES:
        assert hasattr(import_module(module), name)
        setattr(import_module(module), name, _not_searched)
    words = json.loads(path.read_bytes())
    os.chdir(path.parent)
    return run_command(words)
