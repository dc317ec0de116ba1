"""A step is cut into parts that add up, with numbers that the made trace lets one add up by hand (microseconds)."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_traces import ALL_REDUCE, ATTENTION, GEMM, SEND_RECV, MadeTrace, training_trace

from planner.observe.traces.events import RankReport, TraceStep
from planner.observe.traces.recorded import read_traces
from planner.observe.traces.source import read_kineto

US = 1e-6


def reported(trace: MadeTrace, folder: Path) -> RankReport:
    return read_traces([trace.write(folder / "made.json")]).ranks[0]


def parts_us(step: TraceStep) -> dict[str, float]:
    names = ("compute_s", "exposed_communication_s", "copies_s", "host_gaps_s", "dependencies_s", "idle_s")
    return {name: round(getattr(step, name) / US, 6) for name in names}


def test_parts_of_a_step_are_what_the_trace_shows(tmp_path: Path) -> None:
    first, last = reported(training_trace(0), tmp_path).steps
    # computing 10–310, 510–810, 900–950; all-reduce 410–610; the next step begins at 1,010
    assert parts_us(first) == {
        "compute_s": 650, "exposed_communication_s": 100, "copies_s": 0,
        "host_gaps_s": 90 + 60, "dependencies_s": 100, "idle_s": 0,
    }  # fmt: skip
    assert (first.number, first.wall_s) == (3, pytest.approx(1000 * US))
    # the GPU begins a step 10 µs after the host, which ends this one at 1,990
    assert last.wall_s == pytest.approx(990 * US)
    assert parts_us(last)["idle_s"] == 50


def test_families_and_groups_add_up_to_their_part(tmp_path: Path) -> None:
    for step in reported(training_trace(0), tmp_path).steps:
        assert sum(parts_us(step).values()) * US == pytest.approx(step.wall_s, abs=1e-12)
        assert sum(family.seconds for family in step.families) == pytest.approx(step.compute_s, abs=1e-12)
        assert sum(group.exposed_s for group in step.groups) == pytest.approx(step.exposed_communication_s, abs=1e-12)
    families = {family.family: round(family.seconds / US) for family in step.families}
    assert families == {"gemm": 500, "attention": 100, "optimizer": 50}
    (group,) = step.groups
    assert (group.group, round(group.busy_s / US), round(group.hidden_s / US)) == ("tp", 200, 100)


def test_time_that_two_families_share_counts_once(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.kernel(GEMM, 0, 100, 0, stream=7)
    trace.kernel(ATTENTION, 50, 100, 0, stream=8)  # attention stands above gemm in the table
    trace.kernel(GEMM, 20, 50, 0, stream=9)
    step = reported(trace, tmp_path).steps[0]
    assert {family.family: round(family.seconds / US) for family in step.families} == {"attention": 100, "gemm": 50}


def test_kernels_that_no_row_knows_are_named_with_their_share(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.kernel("somebody_s_kernel", 0, 30, 0)
    trace.kernel(GEMM, 30, 70, 0)
    other = reported(trace, tmp_path).steps[0].families[-1]
    assert (other.family, other.share_fraction, other.longest) == ("other", pytest.approx(0.3), ("somebody_s_kernel",))


def test_steps_that_capture_graphs_are_warm_ups(tmp_path: Path) -> None:
    trace = training_trace(0)
    trace.add("cuda_runtime", "cudaStreamBeginCapture", 20, 5)
    assert [step.warm_up for step in reported(trace, tmp_path).steps] == [True, False]


def test_a_first_step_that_is_slow_is_a_warm_up(tmp_path: Path) -> None:
    trace = MadeTrace()
    for number, (at, length) in enumerate([(0, 500), (500, 100), (600, 100), (700, 100)]):
        trace.step(number, at, length)
        trace.kernel(GEMM, at + 5, 50, at + 1)
    assert [step.warm_up for step in reported(trace, tmp_path).steps] == [True, False, False, False]


def test_a_trace_without_marks_is_one_step_and_says_so(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.kernel(GEMM, 10, 100, 5)
    report = read_traces([trace.write(tmp_path / "made.json")])
    assert [step.number for step in report.ranks[0].steps] == [None]
    assert any("nothing marks them" in told for told in report.not_shown)


def test_synchronising_calls_in_gaps_are_named(tmp_path: Path) -> None:
    trace = training_trace(0)
    trace.add("cuda_runtime", "cudaStreamSynchronize", 815, 60)
    waits = dict(reported(trace, tmp_path).steps[0].waits)
    assert waits == {"cudaStreamSynchronize": pytest.approx(60 * US)}


def test_kernels_without_words_get_their_collective_from_the_host(tmp_path: Path) -> None:
    """As on ROCm, where kernels carry nothing and `record_param_comms` on the host says it all."""
    trace = MadeTrace()
    trace.add(
        "cpu_op", "record_param_comms", 0, 20, lane=1,
        **{"Collective name": "reduce_scatter", "In msg nelems": 8000, "Out msg nelems": 2000, "dtype": "Float",
           "Group size": 4, "Process Group Name": "5", "Process Group Description": "mesh_dp_shard",
           "Global rank start": 1, "Global rank stride": 2, "Process Group Ranks": "[1, 3, ...]"},
    )  # fmt: skip
    trace.kernel("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", 30, 100, 10)
    trace.kernel(SEND_RECV, 150, 10, 60)
    (trace_read,) = read_kineto(trace.write(tmp_path / "made.json"))
    assert trace_read.groups["5"].ranks == (1, 3, 5, 7)
    gathered, transfer = reported(trace, tmp_path).collectives
    assert (gathered.group, gathered.collective, gathered.num_bytes, gathered.count) == (
        "dp",
        "reduce_scatter",
        32000,
        1,
    )
    # 32,000 bytes × 3/4 in 100 µs, waiting included: the links are at least as fast
    assert (gathered.bus_gb_per_s, gathered.at_least) == (pytest.approx(0.24), True)
    assert (transfer.group, transfer.num_bytes, transfer.bus_gb_per_s) == ("point to point", None, None)


def test_copies_are_apart_from_computing(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.kernel(GEMM, 0, 100, 0)
    trace.add("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 50, 100, 8, correlation=99, bytes=4096)
    parts = parts_us(reported(trace, tmp_path).steps[0])
    assert (parts["compute_s"], parts["copies_s"]) == (100, 50)


def test_each_gpu_of_a_file_is_a_trace_of_its_own(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.kernel(GEMM, 0, 100, 0)
    trace.events.append({**trace.events[-1], "pid": 1, "ts": 40.0})
    traces = read_kineto(trace.write(tmp_path / "made.json"))
    assert [(len(t.gpu), t.rank) for t in traces] == [(1, None), (1, None)]


def test_events_that_end_before_they_start_are_left_out_and_told(tmp_path: Path) -> None:
    trace = training_trace(0)
    trace.add("kernel", GEMM, 100, -5, 7)
    assert any(text.startswith("1 events") for text in reported(trace, tmp_path).warnings)


def test_old_spellings_are_read(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.add("Kernel", ALL_REDUCE, 10, 20)
    trace.add("Runtime", "cudaLaunchKernel", 5, 1)
    (read,) = read_kineto(trace.write(tmp_path / "rank-7.json"))
    assert (len(read.gpu), len(read.launches)) == (1, 1)
