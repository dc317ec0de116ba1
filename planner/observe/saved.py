"""Observations that `plan observe -o` saved, read back."""

from __future__ import annotations

from typing import Any

from planner.errors import SpecError
from planner.observe.observation import Observed
from planner.observe.traces.recorded import ObservedFiles
from planner.specs.checking import checked
from planner.specs.reading import label, load_yaml
from planner.specs.reading.limits import SAVED


def read_observed(path: str) -> Observed:
    """The observation in a file, `-` for stdin; SpecError where the file holds none."""
    data, where = load_yaml(path, SAVED), label(path)
    if not is_observed(data):
        raise SpecError(f"{where}: is no observation", "save one with plan observe train.log -o observed.json")
    return observed_of(data, where)


def is_observed(data: dict[str, Any]) -> bool:
    """True if what a file held is an observation."""
    return {"observation", "verdict"} <= data.keys()


def observed_of(data: dict[str, Any], where: str) -> Observed:
    """The observation in what a file held, with what traces show beside it; SpecError where a field is wrong."""
    return checked(ObservedFiles if "recorded" in data else Observed, data, where)
