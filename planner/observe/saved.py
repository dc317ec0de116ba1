"""Observations that `plan observe -o` saved, read back."""

from __future__ import annotations

from typing import Any

from planner.errors import SpecError
from planner.observe.observation import Observed
from planner.observe.traces.recorded import ObservedFiles
from planner.plan_file import refuse_contradiction
from planner.saved import as_saved
from planner.specs.problems import checked
from planner.specs.reading import SAVED, label, load_yaml

_HINT = "an observation is not for editing: run plan observe … -o observed.json again"
_ROUNDING = 1e-6


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
    """The observation in what a file held, with what traces show beside it; SpecError where a field is wrong, or was
    edited."""
    data = _without_retired(as_saved(data, where, _HINT))
    observed = checked(ObservedFiles if "recorded" in data else Observed, data, where)
    if observed.plan is not None:
        refuse_contradiction(observed.plan, f"{where}: plan")
    if (problem := _wrong_sum(observed)) is not None:
        raise SpecError(f"{where}: {problem}", _HINT)
    return observed


_RETIRED = (
    "what_if", "replayed", "passes", "likelihood", "test", "first_idle_s", "each_s", "own_s", "pipeline", "links",
    "per_rank",
)  # fmt: skip
"""Fields of observations that 0.2 saved and that nothing reads any more."""
_OTHERS = ("plan", "facts")
"""Entries whose fields are of other types, or of a trainer."""


def _without_retired(data: Any) -> Any:
    """The content of a file without the fields that nothing reads any more."""
    if isinstance(data, list):
        return [_without_retired(entry) for entry in data] if data and isinstance(data[0], dict) else data
    if not isinstance(data, dict):
        return data
    kept = ((name, value) for name, value in data.items() if name not in _RETIRED)
    return {name: value if name in _OTHERS else _without_retired(value) for name, value in kept}


def _wrong_sum(observed: Observed) -> str | None:
    """Terms that do not add up to what they are terms of; None where all do."""
    observation, prediction = observed.observation, observed.prediction
    sums = [("observation.breakdown", observation.step_s, sum(observation.breakdown.values()))]
    if prediction is not None:
        sums.append(("prediction.breakdown", prediction.step_s, sum(prediction.breakdown.values())))
    if observation.step_s is not None and prediction is not None:
        terms_s = sum(term.seconds for term in observed.waterfall)
        sums.append(("waterfall", observation.step_s, prediction.step_s + terms_s))
    terms = {"observation.breakdown": observation.breakdown, "waterfall": observed.waterfall}
    for name, step_s, sum_s in sums:
        if terms.get(name, True) and step_s is not None and abs(sum_s - step_s) > _ROUNDING * abs(step_s):
            return f"{name}: its terms add up to {sum_s:.6g} s, not to {step_s:.6g}"
    return None
