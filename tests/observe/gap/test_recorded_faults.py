"""Runs of a small GPT with something wrong on purpose (`tools/record_faults`): the cause is named first."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from planner.observe.judge import judged_alone, judged_beside, observed_of, read_observed
from planner.observe.log_reader import observe
from planner.observe.traces.recorded import ObservedFiles, kinds_of, read_recorded

DATA = Path(__file__).parents[1] / "data" / "faults"


@cache
def answer(name: str, beside: str = "") -> ObservedFiles:
    """What `plan observe FILES [--plan observed.json]` answers, the earlier run through its file."""
    paths = [str(path) for path in sorted((DATA / name).iterdir())]
    kinds = kinds_of(paths)
    recorded = read_recorded(kinds)
    observation = observe([path for path in paths if path not in kinds])
    if not beside:
        return ObservedFiles(**dict(judged_alone(observation, recorded)), recorded=recorded)
    earlier = observed_of(json.loads(answer(beside).model_dump_json()), "observed.json")
    return ObservedFiles(**dict(judged_beside(observation, earlier, "observed.json", recorded)), recorded=recorded)


@pytest.mark.parametrize(
    ("name", "beside", "cause", "where"),
    [
        ("sleeps_dp", "", "straggler_rank", "rank 1"),
        ("data_stall_dp", "", "data_stall", "rank 0"),
        ("leaks_dp", "", "leak", "rank 1"),
    ],
)
def test_what_was_made_wrong_is_named_first(name: str, beside: str, cause: str, where: str) -> None:
    first = answer(name, beside).causes[0]
    assert (first.name, first.where) == (cause, where)


@pytest.mark.parametrize("name", ["healthy_dp", "healthy_pp"])
def test_a_healthy_run_has_no_cause(name: str) -> None:
    assert answer(name).causes == ()
    assert answer(name, name).causes == ()


def test_an_observation_that_0_2_saved_is_read() -> None:
    old = read_observed(str(DATA.parent / "observed_by_0_2.json"))
    assert isinstance(old, ObservedFiles)
    assert [cause.name for cause in old.causes] == ["straggler_rank"]
    own = answer("healthy_dp")
    assert judged_beside(own.observation, old, "old.json", own.recorded).verdict == "fast"


def test_an_earlier_run_may_be_longer_in_its_log_than_in_its_traces() -> None:
    said = answer("healthy_dp").model_dump(mode="json")
    observed = said["observation"]
    observed["step_s"] *= 1.1
    observed["breakdown"] = {term: 1.1 * seconds for term, seconds in observed["breakdown"].items()}
    own = answer("sleeps_dp")
    told = judged_beside(own.observation, observed_of(said, "observed.json"), "observed.json", own.recorded)
    assert sum(term.seconds for term in told.waterfall) == pytest.approx(
        told.observation.step_s - said["observation"]["step_s"]
    )
