"""Memory snapshots: the peak to the byte, torch's own replay as a judge, and nothing that runs.

No real snapshot is here: torch records them on GPUs only. These are made from the schema of torch 2.13.
"""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_traces import event, frames, made_snapshot, segment, write_pickle

from planner.errors import SpecError
from planner.observe.traces.dumps import ROUNDING, UNATTRIBUTED, SnapshotReport, read_snapshot

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
    with pytest.raises(SpecError) as refused:
        read_snapshot(path)
    assert str(path) in refused.value.message


def test_odd_frames_and_actions_do_no_harm(tmp_path: Path) -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    odd: tuple[Any, ...] = (cyclic, 3, [None, {"name": b"\x1b[31m", "filename": 7}], "text", {"a": 1})
    made = [made_snapshot([event("alloc", 1, 5, 1, frames)], []) for frames in odd]
    actions: tuple[Any, ...] = (["alloc"], {"alloc": 1}, None, 7)
    made += [made_snapshot([event("alloc", 1, 5, 1), event(action, 1, 5, 2)], []) for action in actions]
    assert {read(tmp_path, data).peak_bytes for data in made} == {512}
