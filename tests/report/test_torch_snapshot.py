"""A planned step as a torch memory snapshot: torch's own reader takes it, and it replays to the plan's peak.

A sweep's pictures: a file of each kind, the same bytes for the same sweep.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from typing import Any

import pytest
from priced_plans import priced_plan

from planner.decide.sweep import Goal, Point, Sweep
from planner.layout.alive import step_of
from planner.layout.memory_curve import MemoryCurve, memory_curves
from planner.layout.price import reprice
from planner.report.plots import drawn_sweep, series_of
from planner.report.trace import snapshot
from planner.schedule.replay import replay

VIEWER_READS = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET",
    "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINPUT",
    "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "SETITEM",
}  # fmt: skip
"""Opcodes that the viewer's own unpickler knows (torch/utils/viz/MemoryViz.js), which reads protocols 2 to 4."""


@pytest.fixture(scope="module")
def planned() -> tuple[MemoryCurve, bytes]:
    """The last stage of an 8B on two stages, its curve and its snapshot."""
    plan = priced_plan("llama-3.1-8b", 4, 1024, 8, tp=2, pp=2)
    candidate = reprice(plan, plan.best)
    timeline = replay(candidate.order, candidate.durations)
    curve = memory_curves(candidate, timeline)[1]
    tensors, events = step_of(candidate, timeline, curve)
    return curve, snapshot(tensors, events, 1, plan.model.name)


@pytest.fixture(scope="module")
def data(planned: tuple[MemoryCurve, bytes]) -> Any:
    return pickle.loads(planned[1])


def test_it_replays_to_the_plans_peak(planned: tuple[MemoryCurve, bytes], data: Any) -> None:
    curve, (trace,) = planned[0], data["device_traces"]
    total, most, held = 0, 0, dict[int, int]()
    for entry in trace:
        if entry["action"] == "alloc":
            assert entry["addr"] not in held
            held[entry["addr"]] = entry["size"]
            total += entry["size"]
        elif entry["action"] == "free_completed":
            total -= held.pop(entry["addr"])
        most = max(most, total)
    assert most == curve.peak_bytes
    assert total == curve.allocated_bytes[-1]
    times = [entry["time_us"] for entry in trace]
    assert times == sorted(times)


def test_segments_hold_what_is_left_at_the_end(planned: tuple[MemoryCurve, bytes], data: Any) -> None:
    (segment,) = data["segments"]
    blocks = segment["blocks"]
    assert sum(block["size"] for block in blocks) == segment["total_size"] >= planned[0].peak_bytes
    left = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    assert left == segment["allocated_size"] == planned[0].allocated_bytes[-1]
    ends = [block["address"] + block["size"] for block in blocks]
    assert [segment["address"], *ends[:-1]] == [block["address"] for block in blocks]


def test_frames_name_layer_and_micro_batch(data: Any) -> None:
    (trace,) = data["device_traces"]
    frames = [[f"{frame['filename']}:{frame['line']}:{frame['name']}" for frame in entry["frames"]] for entry in trace]
    assert ["layer:17:qkv [1024, 3072] bf16", "micro-batch:0:forward", "stage:1:activations of llama-3.1-8b"] in frames
    assert ["head:0:head weight [64128, 4096] bf16", "stage:1:weights of llama-3.1-8b"] in frames


def test_the_viewers_own_reader_knows_every_opcode(planned: tuple[MemoryCurve, bytes], data: Any) -> None:
    assert planned[1][1] <= 4
    assert {opcode.name for opcode, _, _ in pickletools.genops(planned[1])} <= VIEWER_READS
    # a category of this name is looked for where there are any
    assert "unknown" in {entry["category"] for entry in data["device_traces"][0]}


def test_torchs_own_functions_take_it(data: Any) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    assert "total_allocated" in viz.segsum(data)
    assert viz.trace(data).count("cudaMalloc") == 1
    for view in (viz.segments, viz.memory):
        lines = view(data, lambda text: text).splitlines()
        sizes = {line.rpartition(" ")[0].split(";")[-1]: int(line.rpartition(" ")[2]) for line in lines}
        assert sizes["layer:16:qkv weight [3072, 4096] bf16"] == 2 * 3072 * 4096
    assert len(viz.trace_plot(data)) > len(io.BytesIO(b"").getvalue())


def point(gpus: int, hardware: str, days: float | None) -> Point:
    rate = 1e4 * gpus
    return Point(
        options={"gpus": gpus, "hardware": hardware}, num_gpus=gpus, fits=True, step_s=1e6 / rate, tokens_per_s=rate,
        tokens_per_s_interval=(0.9 * rate, 1.1 * rate), days=days, days_interval=days and (0.9 * days, 1.1 * days),
        usd=days and 50.0 * days * gpus,
    )  # fmt: skip


def sweep(days: float | None = 400.0) -> Sweep:
    points = [point(gpus, kind, days and days / gpus) for kind in ("h100", "h<200") for gpus in (16, 8, 32)]
    failed = Point(options={"gpus": 4, "hardware": "h100"}, num_gpus=4, fits=False, reason="nothing fits")
    return Sweep(points=(*points, failed), goal=Goal(deadline_days=days))


def test_series_are_lines_over_gpus_of_what_fits() -> None:
    assert [(series.name, [p.num_gpus for p in series.points]) for series in series_of(sweep())] == [
        ("h100", [8, 16, 32]), ("h<200", [8, 16, 32]),
    ]  # fmt: skip


def test_the_picture_has_its_axes_and_a_name_for_each_line() -> None:
    svg = drawn_sweep(sweep())
    for text in ("GPUs; dotted: as the fewest do", "tokens per second", "days", "dollars", "h100", "h&lt;200"):
        assert f">{text}<" in svg
    assert "What time costs" in svg
    assert ">dollars<" not in drawn_sweep(sweep(None)), "there is no money without tokens"


def test_points_of_one_number_of_gpus_are_bars() -> None:
    one = Sweep(points=tuple(point(8, kind, None) for kind in ("h100", "h200")))
    svg = drawn_sweep(one)
    assert ">8 GPUs<" in svg
    assert "dotted" not in svg
