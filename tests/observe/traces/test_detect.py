"""What a file is, by its first bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_traces import MadeTrace, made_snapshot, training_trace, write_pickle

from planner.errors import SpecError
from planner.observe.traces.recorded import FileKind, file_kind_of

DATA = Path(__file__).parents[1] / "data"


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
