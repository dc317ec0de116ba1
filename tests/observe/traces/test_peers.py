"""Ranks beside each other: waits apart from transfers, clocks, stages and stragglers."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_traces import ALL_REDUCE, GEMM, SEND_RECV, MadeTrace, training_trace

from planner.errors import SpecError
from planner.observe.traces.breakdown import Sorted
from planner.observe.traces.events import TraceReport
from planner.observe.traces.recorded import read_traces
from planner.observe.traces.source import read_kineto

US = 1e-6


def both(folder: Path, *traces: MadeTrace, **options: object) -> TraceReport:
    paths = [trace.write(folder / f"rank{number}.json") for number, trace in enumerate(traces)]
    return read_traces(paths, **options)  # type: ignore[arg-type]


def test_a_collective_is_cut_at_the_latest_rank(tmp_path: Path) -> None:
    report = both(tmp_path, training_trace(0), training_trace(1, late_us=80))
    early, late = (rank.collectives[0] for rank in report.ranks)
    assert (early.median_s, late.median_s) == (pytest.approx(200 * US), pytest.approx(120 * US))
    assert (early.wait_s, early.transfer_s) == (pytest.approx(80 * US), pytest.approx(120 * US))
    assert (late.wait_s, late.transfer_s) == (pytest.approx(0), pytest.approx(120 * US))
    # 2 MB × 2 (n − 1)/n, n = 2, in 120 µs
    assert (early.bus_gb_per_s, early.at_least) == (pytest.approx(2e6 / 120e-6 / 1e9), False)


def test_clocks_that_are_apart_are_aligned_by_what_ends_together(tmp_path: Path) -> None:
    apart = training_trace(1, late_us=80)
    apart.header["baseTimeNanoseconds"] += 3_000_000  # 3 ms, many times the collective
    report = both(tmp_path, training_trace(0), apart)
    assert report.ranks[0].collectives[0].wait_s == pytest.approx(80 * US)
    assert report.clock_error_s == pytest.approx(0)


def test_clocks_of_ranks_that_share_nothing_with_the_first_are_aligned_too(tmp_path: Path) -> None:
    pairs = [training_trace(0), training_trace(1), training_trace(0), training_trace(1, late_us=80)]
    for rank, trace in enumerate(pairs):
        trace.header["baseTimeNanoseconds"] += 3_000_000 * rank
        trace.header["distributedInfo"] |= {"rank": rank, "world_size": 4}
        for event in trace.events:
            if rank > 1 and event["args"].get("Process Group Ranks"):
                event["args"]["Process Group Ranks"] = "[2, 3]"
        for group in trace.header["distributedInfo"]["pg_config"]:
            group["ranks"] = [0, 1] if rank < 2 else [2, 3]
    report = both(tmp_path, *pairs)
    waits = {rank.rank: rank.collectives[0].wait_s for rank in report.ranks}
    assert {rank: round((wait or 0) / US) for rank, wait in waits.items()} == {0: 0, 1: 0, 2: 80, 3: 0}


def test_one_rank_cannot_tell_wait_from_transfer_and_says_so(tmp_path: Path) -> None:
    report = both(tmp_path, training_trace(0))
    only = report.ranks[0].collectives[0]
    assert (only.transfer_s, only.wait_s, only.at_least) == (None, None, True)
    assert any("one rank's trace" in text for text in report.not_shown)


def test_a_grid_names_groups_that_nobody_described_and_tells_stages(tmp_path: Path) -> None:
    trace = MadeTrace(5, world_size=8, groups={"3": ("undefined", [1, 5]), "4": ("undefined", [4, 5])})
    trace.collective(10, 50, 0, "3")
    trace.collective(70, 50, 0, "4")
    (rank,) = both(tmp_path, trace, grid={"tp": 2, "dp": 2, "pp": 2}).ranks
    assert rank.stage == 1
    assert {row.group for row in rank.collectives} == {"pp", "tp"}
    (rank,) = both(tmp_path, trace).ranks
    assert {row.group for row in rank.collectives} == {"group 3 (2 ranks, stride 4)", "group 4 (2 ranks, stride 1)"}


def test_transfers_are_matched_by_source_and_destination(tmp_path: Path) -> None:
    traces = []
    for rank, (start, length) in enumerate([(100, 30), (40, 90), (0, 10)]):
        trace = MadeTrace(rank, 3, groups={"9": ("PIPELINE_MODEL_PARALLEL_GROUP", [0, 1, 2])})
        if rank < 2:
            kind = "send" if rank == 0 else "recv"
            trace.collective(start, length, 0, "9", SEND_RECV, kind, **{"Src Rank": 0, "Dst Rank": 1})
        trace.kernel(GEMM, 0, 5, 0)
        traces.append(trace)
    sender, receiver, _ = both(tmp_path, *traces).ranks
    assert sender.collectives[0].wait_s == pytest.approx(0)
    assert receiver.collectives[0].wait_s == pytest.approx(60 * US)
    assert receiver.collectives[0].transfer_s == pytest.approx(30 * US)


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is of rank 0, as"):
        both(tmp_path, training_trace(0), training_trace(0))


def test_only_exchanges_are_kept_while_the_next_file_is_read(tmp_path: Path) -> None:
    (trace,) = read_kineto(training_trace(0).write(tmp_path / "rank0.json"))
    kept = Sorted.of(trace).exchanges()
    assert len(kept.trace.gpu) == len(kept.group) == 2
    assert {kept.trace.names[name] for name in kept.trace.gpu["name"]} == {ALL_REDUCE}
    assert len(kept.trace.launches) == len(kept.trace.operators) == len(kept.trace.marks) == 0
