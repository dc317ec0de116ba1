"""Flight-recorder dumps that torch wrote, and what is made of them."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from made_traces import write_pickle

from planner.errors import SpecError
from planner.observe.traces.dumps import read_flight_recorder

DATA = Path(__file__).parents[1] / "data"


def changed(folder: Path, rank: int, change: dict[str, Any], entry: int = 0, name: str = "flight") -> Path:
    """A recorded dump with some fields of one entry replaced."""
    data = pickle.loads((DATA / f"{name}_{rank}").read_bytes())
    data["entries"][entry].update(change)
    return write_pickle(folder / f"made_{rank}", data, 2)


def test_a_job_that_ended_well_has_nothing_outstanding() -> None:
    report = read_flight_recorder([DATA / "flight_0", DATA / "flight_1"])
    (group,) = report.groups
    assert (report.ranks, report.missing_ranks) == ((0, 1), ())
    assert (group.description, group.ranks) == ("DATA_PARALLEL_GROUP", (0, 1))
    assert (group.last_enqueued, group.last_completed) == ({0: 5, 1: 5}, {0: 5, 1: 5})
    assert (group.outstanding, group.mismatches) == ((), ())
    assert report.verdict.startswith("no collective is outstanding")


def test_the_rank_that_did_not_come_is_named() -> None:
    report = read_flight_recorder([DATA / "hang_1", DATA / "hang_0"])
    (waits,) = report.groups[0].outstanding
    assert (waits.sequence, waits.collective, waits.waiting, waits.missing) == (3, "all_reduce", (0,), (1,))
    assert "distributed_c10d.py" in waits.where
    assert "rank 1 never called all_reduce number 3" in report.verdict


def test_one_dump_of_a_hang_says_what_it_can() -> None:
    report = read_flight_recorder([DATA / "hang_0"])
    (waits,) = report.groups[0].outstanding
    assert waits.missing == ()
    assert report.verdict.endswith("all_reduce number 3; it has not ended")


def test_json_says_what_the_pickle_says() -> None:
    by_json, by_pickle = (read_flight_recorder([DATA / name]) for name in ("flight_0.json", "flight_0"))
    assert by_json == by_pickle


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"profiling_name": "nccl:all_gather"}, "collective"),
        ({"input_dtypes": ["BFloat16"]}, "dtype"),
        ({"input_sizes": [[96, 95]]}, "sizes"),
    ],
)
def test_ranks_that_differ_are_a_mismatch(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    report = read_flight_recorder([DATA / "flight_0", changed(tmp_path, 1, change, entry=2)])
    (mismatch,) = report.groups[0].mismatches
    assert (mismatch.sequence, mismatch.field) == (3, field)
    assert f"ranks differ in the {field} of collective 3" in report.verdict


def test_sizes_may_differ_where_a_root_gives_them(tmp_path: Path) -> None:
    change = {"profiling_name": "nccl:broadcast", "input_sizes": [[1]]}
    one = changed(tmp_path, 0, {**change, "input_sizes": [[2]]})
    report = read_flight_recorder([one, changed(tmp_path, 1, change)])
    assert report.groups[0].mismatches == ()


def test_a_ring_that_forgot_a_call_accuses_nobody(tmp_path: Path) -> None:
    data = pickle.loads((DATA / "hang_1").read_bytes())
    data["entries"] = [{**data["entries"][-1], "collective_seq_id": 9}]
    report = read_flight_recorder([DATA / "hang_0", write_pickle(tmp_path / "made_1", data, 2)])
    assert report.groups[0].outstanding[0].missing == ()


def test_ranks_without_a_dump_are_named(tmp_path: Path) -> None:
    data = pickle.loads((DATA / "flight_0").read_bytes())
    data["pg_config"] = {"1": {"name": "1", "desc": "DATA_PARALLEL_GROUP", "ranks": "[0, 1, 2]"}}
    assert read_flight_recorder([write_pickle(tmp_path / "nccl_0", data, 2)]).missing_ranks == (1, 2)


ODD = [[], {}, {"entries": 3}, {"entries": [3]}, {"entries": [{"process_group": 7}] * 10_000}]
BROKEN = ["{", '{"entries": ' + "[" * 10**5, '{"entries": ' + "9" * 5000 + "}", "\x00"]


@pytest.mark.parametrize("data", [pickle.dumps(data, 2) for data in ODD] + [text.encode() for text in BROKEN])
def test_hostile_dumps_are_one_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "nccl_0"
    path.write_bytes(data)
    with pytest.raises(SpecError) as refused:
        read_flight_recorder([path])
    assert str(path) in refused.value.message


def test_two_dumps_of_one_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="two dumps are of rank 0"):
        read_flight_recorder([DATA / "flight_0", changed(tmp_path, 0, {})])


def test_a_name_without_a_rank_is_refused_among_several(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    path.write_bytes((DATA / "flight_0").read_bytes())
    with pytest.raises(SpecError, match="says its rank"):
        read_flight_recorder([path, DATA / "flight_1"])
