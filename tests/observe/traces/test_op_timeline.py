"""Operator timelines of many workers, made by replaying a schedule: what is read, and the slow thing that is found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from planner.errors import SpecError
from planner.observe.judge import judged_alone
from planner.observe.observation import Observed
from planner.observe.traces.recorded import kinds_of, observation_of, read_recorded
from planner.schedule.orders import build_schedule
from planner.schedule.replay import Durations, replay
from planner.schedule.timeline import Timeline

PP, DP, M, STEPS = 3, 4, 6, 4
FORWARD_S, BACKWARD_S, HOP_S, SYNC_S, OPTIMIZER_S = 0.1, 0.2, 0.001, 0.05, 0.02
LANES = ("compute", "pp-comm", "dp-comm")

Factor = Callable[[int, int, int], float]
"""(data-parallel rank, stage, step) -> times longer."""


def made(factor: Factor, sizes: Callable[[int, int], list[float]] = lambda data, step: [1.0] * M) -> list[Any]:
    """Events of a job whose ranks are numbered as Megatron-LM does; of a step every pipeline ends with the slowest."""
    events, at_s = [], 0.0
    for step in range(STEPS):
        ends_s = []
        for data in range(DP):
            slow = [factor(data, stage, step) for stage in range(PP)]
            forward_s, backward_s = ([seconds * one for one in slow] for seconds in (FORWARD_S, BACKWARD_S))
            durations = Durations(forward_s, backward_s, [0.0] * PP, HOP_S, microbatch_sizes=sizes(data, step))
            timeline = replay(build_schedule("1f1b", PP, 1, M), durations)
            ends_s.append(at_s + timeline.makespan_s)
            events += passes(timeline, data, step, at_s)
        for data, stage in product(range(DP), range(PP)):
            events.append(operator("grads-reduce-scatter", data, stage, "dp-comm", step, max(ends_s), SYNC_S))
            events.append(operator("optimizer", data, stage, "compute", step, max(ends_s) + SYNC_S, OPTIMIZER_S))
        at_s = max(ends_s) + SYNC_S + OPTIMIZER_S + 1.0  # a second between steps is of neither
    named = [
        {"name": "thread_name", "ph": "M", "pid": data, "tid": thread(data, stage, lane),
         "args": {"name": f"PP rank {stage}, TP rank 0, {lane}"}}
        for data, stage, lane in product(range(DP), range(PP), LANES)
    ]  # fmt: skip
    return events + named


def passes(timeline: Timeline, data: int, step: int, at_s: float) -> Iterator[dict[str, Any]]:
    """The passes of a pipeline, each with its transfer to the next stage."""
    for stage, actions in enumerate(timeline.schedule.ranks):
        for action, start_s, end_s in zip(actions, timeline.start_s[stage], timeline.end_s[stage], strict=True):
            way, to = ("forward", stage + 1) if action.kind == "F" else ("backward", stage - 1)
            yield operator(f"{way}-compute", data, stage, "compute", step, at_s + start_s, end_s - start_s)
            if 0 <= to < PP:
                yield operator(f"{way}-send", data, stage, "pp-comm", step, at_s + end_s, HOP_S)
                yield operator(f"{way}-recv", data, to, "pp-comm", step, at_s + end_s, HOP_S)


def thread(data: int, stage: int, lane: str) -> int:
    return (stage * DP + data) * len(LANES) + LANES.index(lane)


def operator(name: str, data: int, stage: int, lane: str, step: int, start_s: float, length_s: float) -> dict[str, Any]:
    return {
        "name": name, "cat": name, "ph": "X", "pid": data, "tid": thread(data, stage, lane), "ts": start_s * 1e6,
        "dur": length_s * 1e6, "args": {"step": step},
    }  # fmt: skip


def observed(folder: Path, events: list[Any]) -> Observed:
    path = folder / "timeline.json"
    path.write_text(json.dumps(events))
    recorded = read_recorded(kinds_of([str(path)]))
    return judged_alone(observation_of(recorded), recorded)


EVEN_S = (M + PP - 1) * (FORWARD_S + BACKWARD_S) + 2 * (PP - 1) * HOP_S + SYNC_S + OPTIMIZER_S


def test_workers_have_ranks_stages_and_pipelines(tmp_path: Path) -> None:
    answer = observed(tmp_path, made(lambda *_: 1.0))
    seen = answer.observation
    assert [(one.rank, one.stage, one.pipeline) for one in seen.passes] == [
        (rank, rank // DP, rank % DP) for rank in range(PP * DP)
    ]
    assert [one.forward_s for one in seen.passes] == pytest.approx([FORWARD_S] * (PP * DP))
    assert [one.num_microbatches for one in seen.passes] == [M] * (PP * DP)
    assert seen.sources[0].format == "operator timeline"
    assert seen.step_s == pytest.approx(EVEN_S, rel=0.01)


def test_an_even_run_has_nothing_that_is_slow(tmp_path: Path) -> None:
    answer = observed(tmp_path, made(lambda *_: 1.0))
    assert answer.what_if == ()
    assert answer.replayed is not None
    assert answer.replayed.step_s == pytest.approx(answer.replayed.measured_s, rel=0.01)


def test_a_slow_rank_comes_first(tmp_path: Path) -> None:
    answer = observed(tmp_path, made(lambda data, stage, step: 1.5 if (data, stage) == (2, 1) else 1.0))
    first = answer.what_if[0]
    assert (first.kind, first.name) == ("rank", f"rank {1 * DP + 2}")
    assert first.step_s == pytest.approx(EVEN_S, rel=0.01)


def test_a_long_last_stage_is_no_slow_rank(tmp_path: Path) -> None:
    answer = observed(tmp_path, made(lambda data, stage, step: 1.5 if stage == PP - 1 else 1.0))
    assert [(one.kind, one.name) for one in answer.what_if] == [("stage", "stages of equal length")]


def test_batches_that_differ_from_step_to_step_are_no_slow_ranks(tmp_path: Path) -> None:
    def sizes(data: int, step: int) -> list[float]:
        return [3.0 if (data + step + index) % DP == 0 and index < 2 else 1.0 for index in range(M)]

    answer = observed(tmp_path, made(lambda *_: 1.0, sizes))
    assert (answer.what_if[0].kind, answer.what_if[0].name) == ("operation", "micro-batches of equal length")
    assert not [one for one in answer.what_if if one.kind == "rank"]
    assert answer.replayed is not None
    assert answer.replayed.step_s == pytest.approx(answer.replayed.measured_s, rel=0.02)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"args": {}}, "without the number of its step"),
        ({"ts": "soon"}, "no number of microseconds"),
        ({"dur": 1e300}, "no number of microseconds"),
    ],
)
def test_broken_operators_are_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    events = [operator("forward-compute", 0, 0, "compute", 0, 0.0, 1.0)]
    with pytest.raises(SpecError, match=says):
        observed(tmp_path, [{**events[0], **change}])


def test_threads_without_names_say_no_workers(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no thread is named"):
        observed(tmp_path, [operator("forward-compute", 0, 0, "compute", 0, 0.0, 1.0)])
