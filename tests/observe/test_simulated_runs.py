"""Runs that are simulated with a known cause: it is named first, a healthy run has none, and the files add up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_traces import GEMM, MadeTrace
from simulated_pieces import Place
from simulated_ranks import Simulated
from simulated_runs import drawn, files_of, observed_of
from simulated_truths import HEALTHY, JOBS, truth_of

from planner.observe.judge import judged_alone
from planner.observe.traces.recorded import kinds_of, observation_of, read_recorded

SMALL = ("8b-8", "8b-fsdp", "v2-lite-16", "70b-cp")
"""Jobs of few micro-batches, whose files are small."""


@pytest.mark.thorough(3)
@pytest.mark.parametrize(
    ("cause", "level", "job"),
    [
        ("straggler_rank", "traces", "8b-8"),
        ("slow_link", "traces", "70b-cp"),
        ("exposed_dp", "traces", "8b-fsdp"),
        ("host_bound", "traces", "v2-lite-16"),
        ("data_stall", "traces", "8b-8"),
        ("unfused_kernels", "trace", "8b-fsdp"),
        ("bubble", "traces", "70b-cp"),
        ("data_stall", "timers", "8b-8"),
        ("attention_kernel", "log", "8b-8"),
        ("no_ep_overlap", "log", "dsv3-256"),
        ("fragmentation", "log", "8b-8"),
        ("recompute_unneeded", "log", "8b-8"),
        ("leak", "log", "8b-8"),
    ],
)
def test_the_cause_is_named_first(cause: str, level: str, job: str, tmp_path: Path) -> None:
    observed = observed_of(drawn(1, cause, level, (job,)), tmp_path)
    assert [found.name for found in observed.causes][:1] == [cause]
    assert observed.causes[0].evidence


@pytest.mark.parametrize(
    ("level", "job"), [("steps", "405b-512"), ("log", "70b-64"), ("timers", "8b-8"), ("traces", "v2-lite-16")]
)
def test_a_healthy_run_has_no_likely_cause(level: str, job: str, tmp_path: Path) -> None:
    observed = observed_of(drawn(2, HEALTHY, level, (job,)), tmp_path)
    assert [found.name for found in observed.causes if found.likelihood >= 0.5] == []


def test_step_times_alone_name_nothing_for_sure(tmp_path: Path) -> None:
    observed = observed_of(drawn(3, "slow_link", "steps", ("qwen3-32",)), tmp_path)
    assert observed.verdict == "slow"
    assert all(found.likelihood < 0.5 for found in observed.causes)


@pytest.mark.parametrize("job", [job for job in JOBS if job.name in SMALL], ids=lambda job: job.name)
def test_what_a_rank_does_fills_its_step(job: object, tmp_path: Path) -> None:
    truth = truth_of(job, HEALTHY, np.random.default_rng(4))  # type: ignore[arg-type]
    run = Simulated(truth)
    ends = [piece.start_s + piece.length_s for piece in run.step(Place.of(run.candidate, 0), 0)]
    assert max(ends) == pytest.approx(truth.step_s, rel=0.01)


def test_a_slow_gpu_computes_and_the_others_of_its_group_wait(tmp_path: Path) -> None:
    case = drawn(1, "straggler_rank", "traces", ("8b-8",))
    paths = [str(path) for path in files_of(case, tmp_path)]
    traces = read_recorded(kinds_of(paths)).traces
    assert traces is not None
    slow = traces.stragglers[0]
    assert (slow.rank, slow.slow) == (1, True)
    assert slow.compute_ratio == pytest.approx(case.truth.strength, rel=0.03)
    walls = [step.wall_s for rank in traces.ranks for step in rank.steps]
    assert np.median(walls) == pytest.approx(case.truth.step_s, rel=0.02)


def test_a_recording_that_begins_before_the_work_is_no_wait_for_data(tmp_path: Path) -> None:
    """As in traces of HolisticTraceAnalysis' tests: 25 s of set-up, no step marked."""
    trace = MadeTrace(world_size=1)
    trace.add("cpu_op", "aten::set_up", 0, 10)
    for number in range(3):
        trace.kernel(GEMM, 25e6 + 1000 * number, 900, 25e6 + 1000 * number - 500)
    recorded = read_recorded(kinds_of([str(trace.write(tmp_path / "rank0.json"))]))
    assert [found.name for found in judged_alone(observation_of(recorded), recorded).causes] == []
