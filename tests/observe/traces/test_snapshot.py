"""Memory snapshots: the peak to the byte, torch's own replay as a judge, and nothing that runs.

No real snapshot is here: torch records them on GPUs only. These are made from the schema of torch 2.13.
Flight-recorder dumps that torch wrote, and what is made of them.
A pickle is plain data or an error: nothing runs, nothing is imported, and five bytes do not take gigabytes.
"""

from __future__ import annotations

import os
import pickle
import struct
from collections import OrderedDict
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_traces import event, frames, made_snapshot, segment, write_pickle
from refusals import refused
from tables import beside

from planner.errors import SpecError
from planner.observe.traces import source
from planner.observe.traces.dumps import ROUNDING, UNATTRIBUTED, SnapshotReport, read_flight_recorder, read_snapshot
from planner.observe.traces.source import load_plain

TABLES = beside(__file__)

KIB, MIB = 2**10, 2**20
OPTIMIZER = frames("megatron/core/optimizer/distrib_optimizer.py:__init__", "train.py:main")
WEIGHTS = frames("torch/nn/modules/linear.py:__init__", "model/attention.py:__init__", "train.py:get_model")
ATTENTION = frames("model/attention.py:forward", "torch/nn/modules/module.py:_call_impl", "train.py:main")
GRADIENTS = frames("megatron/core/distributed/param_and_grad_buffer.py:__init__", "train.py:main")
BACKWARD = frames("??:torch::autograd::Engine::evaluate_function(std::shared_ptr<GraphTask>&)")


def read(folder: Path, data: Any, name: str = "snapshot.pickle") -> SnapshotReport:
    (report,) = read_snapshot(write_pickle(folder / name, data))
    return report


def a_step() -> dict[str, Any]:
    """Weights from before the recording, then activations, a gradient, and a backward that frees."""
    events = [
        event("segment_alloc", 0x20000, 8 * MIB, 1),
        event("alloc", 0x20000, 4 * MIB, 2, GRADIENTS),
        event("alloc", 0x620000, MIB + 100, 3, ATTENTION),
        event("alloc", 0x720400, 2 * MIB, 4, BACKWARD),
        event("free_requested", 0x620000, MIB + 100, 5),
        event("free_completed", 0x620000, MIB + 100, 6),
        event("free_requested", 0x10000, 3 * MIB, 7),  # allocated before the first event
        event("free_completed", 0x10000, 3 * MIB, 8),
    ]
    segments = [
        segment(0x10000, [(3 * MIB, "inactive", []), (2 * MIB, "active_allocated", WEIGHTS)]),
        segment(0x20000, [(4 * MIB, "active_allocated", GRADIENTS), (MIB + 512, "inactive", []),
                          (3 * MIB - 512, "active_allocated", BACKWARD)]),
    ]  # fmt: skip
    segments[1]["blocks"][2].update(address=0x720400, requested_size=2 * MIB)
    return made_snapshot(events, segments)


def test_the_peak_is_attributed_to_the_byte(tmp_path: Path) -> None:
    report = read(tmp_path, a_step())
    parts = {part.category: part.num_bytes for part in report.parts}
    assert parts == {
        "gradients": 4 * MIB,
        UNATTRIBUTED: 3 * MIB,
        "parameters": 2 * MIB,
        "backward": 2 * MIB,
        "activations: attention": MIB + 100,
        ROUNDING: 412 + MIB - 512,  # of the attention's request, and a block that was not split
    }
    assert sum(parts.values()) == report.peak_bytes
    assert report.baseline_bytes == 5 * MIB
    assert (report.reserved_bytes, report.peak_reserved_bytes) == (13 * MIB, 13 * MIB)


def test_what_is_free_at_the_end_is_told(tmp_path: Path) -> None:
    report = read(tmp_path, a_step())
    assert report.inactive_bytes == 4 * MIB + 512
    assert report.largest_free_block_bytes == 3 * MIB
    assert report.out_of_memory is None
    assert any("baseline has no frames" in told for told in report.warnings)


@pytest.mark.parametrize(("requested", "fragmented"), [(4 * MIB, True), (64 * MIB, False), (MIB, False)])
def test_an_oom_says_whether_fragments_would_have_held_it(tmp_path: Path, requested: int, fragmented: bool) -> None:
    data = a_step()
    oom = {"action": "oom", "size": requested, "stream": 0, "time_us": 9, "frames": [], "device_free": 100}
    data["device_traces"][0].append(oom)
    told = read(tmp_path, data).out_of_memory
    assert (told.requested_bytes, told.device_free_bytes, told.fragmented) == (requested, 100, fragmented)


def test_reserved_follows_segments_that_grow_in_place(tmp_path: Path) -> None:
    events = [event("segment_map", 0x1000, 4 * MIB, 1), event("segment_map", 0x500000, 4 * MIB, 2),
              event("alloc", 0x1000, 2 * MIB, 3), event("segment_unmap", 0x500000, 4 * MIB, 4)]  # fmt: skip
    mapped = segment(0x1000, [(2 * MIB, "active_allocated", []), (2 * MIB, "inactive", [])])
    mapped["is_expandable"] = True
    report = read(tmp_path, made_snapshot(events, [mapped]))
    assert (report.peak_reserved_bytes, report.reserved_bytes) == (8 * MIB, 4 * MIB)


def test_torch_counts_the_same(tmp_path: Path) -> None:
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        pytest.skip("needs torch's files")
    # a module of the standard library only: torch itself would take seconds to import
    path = Path(torch.origin).parent / "cuda" / "_memory_viz.py"
    loader = SourceFileLoader("memory_viz", str(path))
    memory_viz = module_from_spec(spec_from_loader("memory_viz", loader))  # type: ignore[arg-type]
    loader.exec_module(memory_viz)
    data = a_step()
    report = read(tmp_path, data)
    assert "total_reserved: 13.0MiB" in memory_viz.segsum(data)
    assert "8 entries" in memory_viz.trace(data)
    assert sum(map(memory_viz.calc_active, data["segments"])) == report.end_bytes
    assert "snapshot" in memory_viz.trace_plot(data)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_parts_and_peak_agree_whatever_happens(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Random allocations and frees, a part of them before the recording; the peak by brute force."""
    live: dict[int, int] = {}
    allocated, peak, events, at = 0, 0, [], 1
    before = data.draw(st.integers(0, 10))
    for number in range(data.draw(st.integers(1, 40))):
        if number == before:
            peak, events = allocated, []
        if live and data.draw(st.booleans()):
            address = data.draw(st.sampled_from(sorted(live)))
            size = live.pop(address)
            allocated -= -(-size // 512) * 512
            events += [event("free_requested", address, size, number), event("free_completed", address, size, number)]
        else:
            size = data.draw(st.integers(1, 5000))
            live[at * 2**16] = size
            events.append(event("alloc", at * 2**16, size, number, ATTENTION))
            at += 1
            allocated += -(-size // 512) * 512
        peak = max(peak, allocated)
    segments = []
    for address, size in live.items():
        made = segment(address, [(-(-size // 512) * 512, "active_allocated", ATTENTION)])
        made["blocks"][0]["requested_size"] = size
        segments.append(made)
    report = read(tmp_path_factory.mktemp("made"), made_snapshot(events, segments))
    assert (report.peak_bytes, report.end_bytes) == (peak, allocated)
    assert sum(part.num_bytes for part in report.parts) == peak


HOSTILE = {
    "no mapping": [],
    "segments of what": {"segments": 3},
    "no blocks": {"segments": [{}]},
    "a size that is text": {"segments": [{"address": 0, "blocks": [{"size": "x", "state": "inactive"}]}]},
    "a negative size": made_snapshot([event("alloc", 1, -5, 1)], []),
    "a true size": made_snapshot([event("alloc", 1, True, 1)], []),
    "an address beyond": made_snapshot([event("alloc", 2**70, 5, 1)], []),
    "a size beyond": made_snapshot([event("alloc", 1, 2**50, 1)], []),
    "sizes beyond in all": made_snapshot(
        [event("alloc", number + 2**40, 2**48 - 1 - number, number + 2**33) for number in range(2**14 + 9)], []
    ),
    "an event that is text": made_snapshot(["alloc"], []),  # type: ignore[list-item]
    "traces of what": {"segments": [], "device_traces": 3},
    "nothing": {"segments": [], "device_traces": []},
    "repeated events": made_snapshot([event("alloc", 1, 5, 1)] * 100_000, []),
    "repeated blocks": made_snapshot([], [segment(0, [(1, "inactive", [])])] * 100_000),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=list(HOSTILE))
def test_hostile_data_is_one_error(tmp_path: Path, data: Any) -> None:
    path = write_pickle(tmp_path / "s.pickle", data)
    with refused(str(path)):
        read_snapshot(path)


def test_odd_frames_and_actions_do_no_harm(tmp_path: Path) -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    odd: tuple[Any, ...] = (cyclic, 3, [None, {"name": b"\x1b[31m", "filename": 7}], "text", {"a": 1})
    made = [made_snapshot([event("alloc", 1, 5, 1, frames)], []) for frames in odd]
    actions: tuple[Any, ...] = (["alloc"], {"alloc": 1}, None, 7)
    made += [made_snapshot([event("alloc", 1, 5, 1), event(action, 1, 5, 2)], []) for action in actions]
    assert {read(tmp_path, data).peak_bytes for data in made} == {512}


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


@pytest.mark.parametrize(("change", "field"), TABLES["ranks_that_differ_are_a_mismatch"])
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
    with refused(str(path)):
        read_flight_recorder([path])


def test_two_dumps_of_one_rank_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="two dumps are of rank 0"):
        read_flight_recorder([DATA / "flight_0", changed(tmp_path, 0, {})])


def test_a_name_without_a_rank_is_refused_among_several(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    path.write_bytes((DATA / "flight_0").read_bytes())
    with pytest.raises(SpecError, match="says its rank"):
        read_flight_recorder([path, DATA / "flight_1"])


class Runs:
    """Asks to run a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def loaded(folder: Path, data: bytes) -> Any:
    path = folder / "data.pickle"
    path.write_bytes(data)
    return load_plain(path)[0]


PLAIN = {"a": [1, -2.5, None, True, ("x", b"y")], "deep": [[[[]]]], "große": 2**80, "set": {"ä"}}


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_of_every_protocol_is_read(tmp_path: Path, protocol: int) -> None:
    data = {key: value for key, value in PLAIN.items() if key != "set" or protocol >= 4}
    if protocol < 3:  # bytes are a call of a function there
        data["a"] = [1]
    assert loaded(tmp_path, pickle.dumps(data, protocol)) == data


@pytest.mark.parametrize("protocol", range(6))
def test_code_is_refused_and_does_not_run(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(SpecError, match=r"names (posix|nt)\.system, which would run code"):
        loaded(tmp_path, pickle.dumps({"segments": [Runs(marker)]}, protocol))
    assert not marker.exists()


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(OrderedDict(a=1)), b"\x80\x02cbuiltins\neval\n(X\x03\x00\x00\x001+1tR.",
        b"(S'ls'\nios\nsystem\n.", b"(cos\nsystem\nS'ls'\no.", b"\x80\x02\x82\x01.",
        b"\x80\x02X\x03\x00\x00\x00pid\x51.", b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x04}\x8c\x01a\x8c\x01bs}b.",
    ],
    ids=["class", "GLOBAL REDUCE", "INST", "OBJ", "EXT1", "BINPERSID", "STACK_GLOBAL", "BUILD"],
)  # fmt: skip
def test_every_way_to_name_code_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(SpecError):
        loaded(tmp_path, data)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x80", b"\x80\x04.", b"\x80\x04]", b"\x80\x04a.", b"\x80\x04h\x05.", b"\x80\x04]]}(a.", b"\x80\x04N}Nes.",
     pickle.dumps(PLAIN)[:-9], b"\x80\x09N.", b"I" + b"9" * 10_000 + b"\n.", b"no pickle at all"],
)  # fmt: skip
def test_a_broken_pickle_is_one_error(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(SpecError, match=r"data\.pickle"):
        loaded(tmp_path, data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02N" + b"r" + struct.pack("<I", 2**31) + b".",  # an index of the memo
        b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.",  # a text of a terabyte
        b"\x80\x04\x8e" + struct.pack("<Q", 2**63 - 1) + b"x.",
        b"\x80\x05\x96" + struct.pack("<Q", 2**38) + b"x.",
    ],
    ids=["memo", "text", "bytes", "bytearray"],
)
def test_few_bytes_do_not_take_gigabytes(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(SpecError, match=r"more memory|no pickle|in the middle"):
        loaded(tmp_path, data)


def test_nesting_has_an_end(tmp_path: Path) -> None:
    data = loaded(tmp_path, b"\x80\x04" + b"]" * 50_000 + b"a" * 49_999 + b".")
    while data:  # taken apart from outside, or freeing it would be as deep
        (data,) = data


def test_a_large_pickle_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_PICKLE_BYTES", 1000)
    with pytest.raises(SpecError, match="is larger than"):
        loaded(tmp_path, pickle.dumps("x" * 2000))


def test_the_limit_on_memory_is_lifted_again(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_AS)
    loaded(tmp_path, pickle.dumps(PLAIN))
    assert resource.getrlimit(resource.RLIMIT_AS) == before
