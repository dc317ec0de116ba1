"""`plan observe` of files beside logs: the observation that they amount to, what is shown, and how it fails.

Files with a few bytes changed are read, or end in one error; never in anything else.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from made_traces import MadeTrace, event, frames, made_snapshot, segment, training_trace, write_pickle

from planner.cli import main
from planner.errors import SpecError
from planner.observe.traces.dumps import read_flight_recorder, read_snapshot
from planner.observe.traces.events import TraceReport
from planner.observe.traces.recorded import (
    UNATTRIBUTED,
    FileKind,
    file_kind_of,
    kinds_of,
    observation_of,
    read_recorded,
    read_traces,
)

DATA = Path(__file__).parents[1] / "data"
GIB = 2**30


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Traces of two ranks, a snapshot that ended out of memory, and a hang."""
    traces = [training_trace(rank, late_us=80.0 * rank).write(tmp_path / f"rank{rank}.json.gz") for rank in range(2)]
    stack = frames("model/mlp.py:forward", "torch/nn/modules/module.py:_call_impl")
    events = [
        event("alloc", 2**40, 4 * GIB, 1, stack),
        {"action": "oom", "size": 3 * GIB, "device_free": 0, "time_us": 2, "frames": [], "stream": 0},
    ]
    blocks = [(4 * GIB, "active_allocated", stack), (2 * GIB, "inactive", []), (2 * GIB, "inactive", [])]
    snapshot = write_pickle(tmp_path / "snapshot.pickle", made_snapshot(events, [segment(2**40, blocks)]))
    return [*map(str, traces), str(snapshot), str(DATA / "hang_0"), str(DATA / "hang_1")]


def said(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> str:
    assert main(["observe", *words]) == 0
    return capsys.readouterr().out


def test_terms_add_up_to_the_step(files: list[str]) -> None:
    observation = observation_of(read_recorded(kinds_of(files)))
    assert observation.step_s == pytest.approx(995e-6)
    assert sum(observation.breakdown.values()) == pytest.approx(observation.step_s, abs=1e-12)
    assert {name: round(value * 1e6) for name, value in observation.breakdown.items()} == {
        "compute_s": 600,
        "optimizer_s": 50,
        "overhead_s": 120,  # 90 + 60 and 90 + 0 of host gaps
        "tp_comm_s": 60,  # 100 and 20 exposed
        UNATTRIBUTED: 165,
    }
    assert (observation.peak_memory_bytes, observation.peak_memory_kind) == (4 * GIB, "allocated")
    assert observation.facts.num_gpus == 2


def test_everything_is_shown(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, files)
    assert max(map(len, shown.splitlines())) <= 80
    shown = " ".join(shown.split())
    for part in (
        "all_reduce number 3",
        "mean of 4 on 2 ranks",
        "family of kernels",
        "activations: MLP",
        "blocks of at most 2.0 GiB",
    ):
        assert part in shown


def test_json_holds_all_of_it(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(said(capsys, [*files, "--json"]))
    assert len(told["recorded"]["traces"]["ranks"]) == 2
    assert told["recorded"]["snapshots"][0]["out_of_memory"]["fragmented"] is True
    assert told["observation"]["step_s"] == pytest.approx(995e-6)


def test_a_log_says_the_step_where_both_are_given(tmp_path: Path, files: list[str], capsys: Any) -> None:
    log = tmp_path / "steps.csv"
    log.write_text("step,step_time_s\n" + "".join(f"{number},2.5\n" for number in range(30)))
    told = json.loads(said(capsys, [str(log), *files, "--json"]))
    assert told["observation"]["step_s"] == pytest.approx(2.5)
    assert len(told["recorded"]["traces"]["ranks"]) == 2


def test_text_of_a_file_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = training_trace(0)
    trace.kernel("\x1b[31mred\x07 [bold]", 960, 20, 955)
    trace.header["deviceProperties"][0]["name"] = "\x1b]0;title\x07"
    shown = said(capsys, [str(trace.write(tmp_path / "t.json"))])
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_a_broken_file_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(training_trace(0).text()[:2000])
    code = main(["observe", str(path)])
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith(f"error: {path}: traceEvents[")
    assert len(printed.err.splitlines()) == 2


def test_every_kind_is_told(tmp_path: Path) -> None:
    assert file_kind_of(training_trace(0).write(tmp_path / "t.json")) is FileKind.KINETO
    assert file_kind_of(DATA / "cpu_rank0.json.gz") is FileKind.KINETO
    assert file_kind_of(write_pickle(tmp_path / "s.pickle", made_snapshot([], []))) is FileKind.SNAPSHOT
    assert file_kind_of(DATA / "flight_0") is FileKind.FLIGHT_RECORDER
    assert file_kind_of(DATA / "flight_0.json") is FileKind.FLIGHT_RECORDER


@pytest.mark.parametrize("text", ["", "step 1 | loss 2.0\n", '{"a": 1}', "[rank0]: step: 1", ":::MLLOG {}"])
def test_logs_and_other_files_are_none_of_these(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.log"
    path.write_text(text)
    assert file_kind_of(path) is None


def test_a_list_of_events_is_a_trace(tmp_path: Path) -> None:
    trace = MadeTrace()
    trace.add("kernel", "k", 0, 1)
    path = tmp_path / "list.json"
    path.write_text("\ufeff " + str(trace.events).replace("'", '"'), encoding="utf-8")
    assert file_kind_of(path) is FileKind.KINETO


@pytest.mark.parametrize("name", ["missing", "", "a\0b"])
def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError):
        file_kind_of(f"{tmp_path}/{name}")


@pytest.fixture(scope="module")
def report() -> TraceReport:
    return read_traces([DATA / "cpu_rank0.json.gz", DATA / "cpu_rank1.json.gz"])


def test_steps_are_found_and_cut_exactly(report: TraceReport) -> None:
    for rank in report.ranks:
        assert [step.number for step in rank.steps] == [2, 3, 4]
        for step in rank.steps:
            parts = (step.compute_s, step.exposed_communication_s, step.copies_s)
            idle = (step.host_gaps_s, step.dependencies_s, step.idle_s)
            assert sum(parts) + sum(idle) == pytest.approx(step.wall_s, abs=1e-12)
            assert sum(family.seconds for family in step.families) == pytest.approx(step.compute_s, abs=1e-12)
            assert {"gemm", "elementwise"} <= {family.family for family in step.families}


def test_waits_are_told_apart_from_transfers(report: TraceReport) -> None:
    for rank in report.ranks:
        reduced = next(row for row in rank.collectives if row.collective == "all_reduce")
        assert reduced.transfer_s is not None
        assert reduced.wait_s is not None
    assert report.clock_error_s is not None


def test_what_a_cpu_s_trace_cannot_show_is_said(report: TraceReport) -> None:
    assert all("no GPU's events" in rank.warnings[0] for rank in report.ranks)
    assert any("neither group nor bytes" in told for told in report.not_shown)


NUM_MUTANTS = 150


def trace(folder: Path) -> bytes:
    return training_trace(0).write(folder / "t.json").read_bytes()


def zipped(folder: Path) -> bytes:
    return gzip.compress(trace(folder), mtime=0)


def snapshot(folder: Path) -> bytes:
    stack = frames("model/attention.py:forward")
    events = [
        event("segment_alloc", 4096, 8192, 1),
        event("alloc", 4096, 500, 2, stack),
        event("free_requested", 4096, 500, 3),
    ]
    return write_pickle(folder / "s", made_snapshot(events, [segment(4096, [(8192, "inactive", [])])])).read_bytes()


def dump(folder: Path) -> bytes:
    return (DATA / "hang_0").read_bytes()


def json_dump(folder: Path) -> bytes:
    return (DATA / "flight_0.json").read_bytes()


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, cut out, doubled or moved, or the end cut off."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 3, 10])):
        at = chance.randrange(len(changed) or 1)
        match chance.randrange(5):
            case 0:
                changed[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del changed[at : at + chance.randrange(1, 20)]
            case 2:
                changed[at:at] = changed[at : at + chance.randrange(1, 40)]
            case 3:
                changed[at : at + 1] = chance.choice([b"-", b"1e999", b"null", b"{", b"]", b"\xff", b"\x00", b'"'])
            case 4 if chance.random() < 0.3:
                del changed[at:]
    return bytes(changed)


def read(path: Path) -> None:
    match file_kind_of(path):
        case FileKind.SNAPSHOT:
            [report.model_dump_json() for report in read_snapshot(path)]
        case FileKind.FLIGHT_RECORDER:
            read_flight_recorder([path]).model_dump_json()
        case FileKind.KINETO:
            read_traces([path]).model_dump_json()


@pytest.mark.parametrize("make", [trace, zipped, snapshot, dump, json_dump])
def test_a_mutant_is_read_or_is_one_error(tmp_path: Path, make: Callable[[Path], bytes]) -> None:
    chance, whole = random.Random(27), make(tmp_path)
    path, refused = tmp_path / "mutant_0", []
    for _ in range(NUM_MUTANTS):
        path.write_bytes(mutated(whole, chance))
        try:
            read(path)
        except SpecError as error:
            refused.append(error)
    assert len(refused) > NUM_MUTANTS // 10
    assert [error.message for error in refused if str(path) not in error.message] == []
    assert {len(error.lines().splitlines()) for error in refused} == {2}
    assert all(error.lines().replace("\n", "").isprintable() for error in refused)
