"""The verdict and its likeliest cause in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from planner.observe.causes.hypotheses import HYPOTHESES
from planner.observe.causes.rank import SURE
from planner.observe.observation import Cause, Observation, Remedy, Verdict
from planner.observe.remedy.against import RECIPE
from planner.report.format import digits, seconds, unit_for

_OF_MEMORY = ("fragmentation", "leak")


def conclusion(verdict: Verdict | None, says: str, observation: Observation, causes: Sequence[Cause]) -> str:
    """The sentence of a verdict with the cause that is likely for it; the cause alone where nothing was predicted."""
    sure = [cause for cause in causes if cause.likelihood >= SURE]
    fitting = [cause for cause in sure if (cause.name in _OF_MEMORY) == (verdict == "memory")] or sure
    if not fitting:
        return says
    clause = _clause(fitting[0], observation.step_s)
    if verdict is None:
        return says or clause
    if verdict == "slow":
        return f"slow: {clause}; {says.removeprefix('slow: ')}"
    return f"{says}; {clause}"


def _clause(cause: Cause, step_s: float | None) -> str:
    """`the host launches work too slowly, 1.9 s of 6.1; CUDA graphs: 4.7 s`, or what one rank or stage does."""
    where = cause.name == RECIPE or cause.where.split(" ")[0] in ("rank", "stage")
    text = cause.evidence.split("; ")[0] if where else HYPOTHESES[cause.name].says
    if cause.seconds and step_s:
        text += f", {_of(cause.seconds, step_s)}"
    return text if cause.remedy is None else f"{text}; {_helps(cause.remedy)}"


def _of(part_s: float, step_s: float) -> str:
    """`1.9 s of 6.1`, in the unit that suits the step."""
    factor, unit = unit_for(step_s)
    return f"{digits(part_s * factor)} {unit} of {digits(step_s * factor)}"


def _helps(remedy: Remedy) -> str:
    what = remedy.says or " ".join(remedy.options)
    return what if remedy.step_s is None else f"{what}: {seconds(remedy.step_s)}"
