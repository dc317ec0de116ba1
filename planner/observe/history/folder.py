"""The files of a folder of kept runs: one a run, and beside them their prices by this version of the planner."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import Field, ValidationError

from planner import __version__
from planner.errors import PlannerError, SpecError
from planner.files import write_text
from planner.observe.history.place import VARIABLE
from planner.observe.history.posterior import KeptPrice
from planner.saved import KEY, as_saved, with_digest
from planner.specs.base import Spec
from planner.specs.reading import load_yaml, printable
from planner.specs.reading.limits import SAVED

_log = logging.getLogger(__name__)
PREFIX, SUFFIX = "run-", ".json"
PRICES = "prices.json"


class Prices(Spec):
    """The prices of all files in the folder, kept so that no command has to make them again."""

    planner_version: str = ""
    files: dict[str, tuple[int, int]] = Field(default_factory=dict)
    """Bytes and time of change of each file, in nanoseconds: another one is read again."""
    runs: tuple[KeptPrice, ...] = ()
    left_out: dict[str, str] = Field(default_factory=dict)
    """The files that are no runs to learn from, and why."""


def prices_of(folder: Path, price: Callable[[Path], KeptPrice]) -> Prices:
    """The prices of all runs in a folder; those of files that changed, or of another version, are made by `price`.

    A file that holds no run is left out, with the reason. The prices are written back where the folder allows it.
    """
    files, known = _files(folder), _saved(folder)
    if known.files == files and known.planner_version == __version__:
        return known
    same = {name for name, state in files.items() if known.files.get(name) == state}
    if known.planner_version != __version__:
        same = set()
    runs = {run.file: run for run in known.runs if run.file in same}
    left_out = {name: reason for name, reason in known.left_out.items() if name in same}
    for name in sorted(files.keys() - same):
        try:
            runs[name] = price(folder / name)
        except PlannerError as error:
            left_out[name] = error.message
        except Exception as error:  # an edited file may say anything, and no plan is to end by it
            left_out[name] = f"is no run that can be priced ({type(error).__name__})"
    made = Prices(
        planner_version=__version__,
        files=files,
        runs=tuple(runs[name] for name in sorted(runs)),
        left_out=dict(sorted(left_out.items())),
    )
    try:
        write_text(folder / PRICES, json.dumps(with_digest(made.model_dump(mode="json"))), force=True)
    except PlannerError:
        _log.debug("%s: cannot be written, prices are made again next time", printable(str(folder / PRICES)))
    return made


def keep(folder: Path, name: str, text: str) -> bool:
    """Write a run's file unless it is there already; true where it is new. Raises PlannerError where the folder cannot
    be made or written to."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        hint = f"--history DIR names another folder, and so does {VARIABLE}=DIR for every command"
        raise PlannerError(f"{folder}: cannot be made: {error.strerror}", hint) from None
    path = folder / name
    if path.exists():
        return False
    write_text(path, text, force=True)
    return True


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """The runs' files with their sizes and times; none where the folder cannot be listed."""
    found: dict[str, tuple[int, int]] = {}
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not (entry.name.startswith(PREFIX) and entry.name.endswith(SUFFIX) and entry.is_file()):
                    continue
                with suppress(FileNotFoundError):  # removed since
                    state = entry.stat()
                    found[entry.name] = (state.st_size, state.st_mtime_ns)
    except OSError as error:
        _log.warning("%s: cannot be listed, and is left out: %s", printable(str(folder)), error.strerror)
    return dict(sorted(found.items()))


def _saved(folder: Path) -> Prices:
    """The prices of the last time; none where there are none, or somebody edited them."""
    try:
        data = load_yaml(folder / PRICES, SAVED)
        return Prices.model_validate({} if KEY not in data else as_saved(data, PRICES, "they are made again"))
    except (SpecError, ValidationError):
        return Prices()


def said_of(left_out: Mapping[str, str], folder: Path) -> str:
    """One sentence on the files that are left out; empty without any."""
    if not left_out:
        return ""
    (name, reason), *others = left_out.items()
    more = f" (and {len(others)} more)" if others else ""
    return f"{printable(str(folder))}: {name} is left out{more}: {printable(reason)}; rm forgets it"
