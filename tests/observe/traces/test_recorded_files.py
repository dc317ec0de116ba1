"""Traces of several ranks: what a file is, waits apart from transfers, the observation, what is shown, how it fails."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from made_traces import ALL_REDUCE, GEMM, SEND_RECV, MadeTrace, training_trace

from planner.cli import main
from planner.errors import SpecError
from planner.observe.traces.breakdown import Sorted
from planner.observe.traces.events import TraceReport
from planner.observe.traces.kineto import read_kineto
from planner.observe.traces.recorded import UNATTRIBUTED, is_trace, observation_of, read_recorded

DATA = Path(__file__).parents[1] / "data"
US = 1e-6


def both(folder: Path, *traces: MadeTrace) -> TraceReport:
    return read_recorded(
        [str(trace.write(folder / f"rank{number}.json")) for number, trace in enumerate(traces)]
    ).traces


def late_us(report: TraceReport, group: str = "tp") -> list[int | None]:
    """Microseconds that each rank waited, in all of its steps."""
    return [
        None if group not in rank.late_s else round(rank.late_s[group] * len(rank.steps) / US) for rank in report.ranks
    ]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (training_trace(0).text(), True),
        ("\ufeff " + json.dumps(training_trace(0).events), True),
        ("", "is empty"),
        ("step 1 | loss 2.0\n", False), ('{"a": 1}', False), (":::MLLOG {}", False),
        (pickle.dumps({"segments": [], "device_traces": []}), "memory snapshot"),
        (pickle.dumps({"version": "2.5", "pg_config": {}, "entries": []}), "flight-recorder dump"),
        (json.dumps({"version": "2.5", "pg_config": {}, "entries": []}), "flight-recorder dump"),
    ],
)  # fmt: skip
def test_the_first_bytes_say_what_a_file_is(tmp_path: Path, content: str | bytes, expected: bool | str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if isinstance(expected, str):
        with pytest.raises(SpecError, match=expected):
            is_trace(str(path))
    else:
        assert is_trace(str(path)) is expected


def test_a_collective_is_cut_at_the_latest_rank_whatever_the_clocks_say(tmp_path: Path) -> None:
    apart = training_trace(1, late_us=80)
    assert late_us(both(tmp_path, training_trace(0), apart)) == [160, 0]
    apart.header["baseTimeNanoseconds"] += 3_000_000  # 3 ms, many times the collective
    assert late_us(both(tmp_path, training_trace(0), apart)) == [160, 0]


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
    assert late_us(both(tmp_path, *pairs)) == [0, 0, 160, 0]


def test_one_rank_cannot_tell_wait_from_transfer_and_says_so(tmp_path: Path) -> None:
    report = both(tmp_path, training_trace(0))
    assert late_us(report) == [None]
    assert any("one rank's trace" in text for text in report.not_shown)


def test_transfers_are_matched_by_source_and_destination(tmp_path: Path) -> None:
    traces = []
    for rank, (start, length) in enumerate([(100, 30), (40, 90), (0, 10)]):
        trace = MadeTrace(rank, 3, groups={"9": ("PIPELINE_MODEL_PARALLEL_GROUP", [0, 1, 2])})
        if rank < 2:
            kind = "send" if rank == 0 else "recv"
            trace.collective(start, length, 0, "9", SEND_RECV, kind, **{"Src Rank": 0, "Dst Rank": 1})
        trace.kernel(GEMM, 0, 5, 0)
        traces.append(trace)
    assert late_us(both(tmp_path, *traces), "pp") == [0, 60, None]


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is of rank 0, as"):
        both(tmp_path, training_trace(0), training_trace(0))


def test_only_exchanges_are_kept_while_the_next_file_is_read(tmp_path: Path) -> None:
    (trace,) = read_kineto(training_trace(0).write(tmp_path / "rank0.json"))
    kept = Sorted.of(trace).exchanges()
    assert len(kept.trace.gpu) == len(kept.group) == 2
    assert {kept.trace.names[name] for name in kept.trace.gpu["name"]} == {ALL_REDUCE}
    assert len(kept.trace.launches) == len(kept.trace.operators) == len(kept.trace.marks) == 0


def test_recorded_traces_of_a_cpu_are_cut_exactly() -> None:
    """Two ranks of which one computes its forward three times (data/TRACES.md)."""
    report = read_recorded([str(DATA / f"cpu_rank{rank}.json.gz") for rank in range(2)]).traces
    for rank in report.ranks:
        assert [step.number for step in rank.steps] == [2, 3, 4]
        assert rank.late_s.keys() >= {"unknown"} or rank.late_s
        assert "no GPU's events" in rank.warnings[0]
        for step in rank.steps:
            parts = (step.compute_s, step.exposed_communication_s, step.copies_s)
            idle = (step.host_gaps_s, step.dependencies_s, step.idle_s)
            assert sum(parts) + sum(idle) == pytest.approx(step.wall_s, abs=1e-12)
            assert sum(family.seconds for family in step.families) == pytest.approx(step.compute_s, abs=1e-12)
            assert {"gemm", "elementwise"} <= {family.family for family in step.families}
    assert any("neither group nor bytes" in told for told in report.not_shown)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Traces of two ranks."""
    return [str(training_trace(rank, late_us=80.0 * rank).write(tmp_path / f"rank{rank}.json.gz")) for rank in range(2)]


def test_terms_add_up_to_the_step(files: list[str]) -> None:
    observation = observation_of(read_recorded(files))
    assert observation.step_s == pytest.approx(995e-6)
    assert sum(observation.breakdown.values()) == pytest.approx(observation.step_s, abs=1e-12)
    assert {name: round(value * 1e6) for name, value in observation.breakdown.items()} == {
        "compute_s": 600,
        "optimizer_s": 50,
        "overhead_s": 120,  # 90 + 60 and 90 + 0 of host gaps
        "tp_comm_s": 60,  # 100 and 20 exposed
        UNATTRIBUTED: 165,
    }
    assert observation.facts.num_gpus == 2


def test_a_log_says_the_step_and_traces_where_it_went(
    tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "steps.csv"
    log.write_text("step,step_time_s\n" + "".join(f"{number},2.5\n" for number in range(30)))

    def said(*words: str) -> str:
        assert main(["observe", *words]) == 0
        return capsys.readouterr().out

    shown = said(*files)
    assert max(map(len, shown.splitlines())) <= 80
    for part in ("Where a step went on the GPU, mean of 4 on 2 ranks", "Computing, by family of kernels"):
        assert part in " ".join(shown.split())
    told: dict[str, Any] = json.loads(said(str(log), *files, "--json"))
    assert (told["observation"]["step_s"], len(told["recorded"]["traces"]["ranks"])) == (pytest.approx(2.5), 2)


def test_text_of_a_file_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = training_trace(0)
    trace.kernel("\x1b[31mred\x07 [bold]", 960, 20, 955)
    trace.header["deviceProperties"][0]["name"] = "\x1b]0;title\x07"
    assert main(["observe", str(trace.write(tmp_path / "t.json"))]) == 0
    assert not set("\x1b\x07") & set(capsys.readouterr().out)


def test_a_broken_file_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(training_trace(0).text()[:2000])
    code = main(["observe", str(path)])
    printed = capsys.readouterr()
    assert (code, printed.out, len(printed.err.splitlines())) == (2, "", 2)
    assert printed.err.startswith(f"error: {path}: traceEvents[")
