"""A rank's planned step in the format of torch's memory snapshots, which pytorch.org/memory_viz opens.

The format is that of `torch.cuda.memory._snapshot()`: segments with their blocks as they are at the end, and a trace of
allocations and frees in order. Addresses are made up: a tensor takes the place of a freed one as large, or a new one.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from planner.answer.memory import MemoryTensor

PROTOCOL = 4
"""The newest pickles that the viewer's own reader understands."""
BASE = 0x7F0000000000
"""The address of the one segment: some number that no allocation has for its size."""
MICROSECONDS = 1e6


def snapshot(
    tensors: Sequence[MemoryTensor], events: Sequence[tuple[float, bool, int]], stage: int, model: str
) -> bytes:
    """The snapshot file of a stage; `events` are time in seconds, made or freed, and the tensor's place."""
    places, free, end = dict[int, int](), dict[int, list[int]](), BASE
    trace: list[dict[str, Any]] = []
    for time_s, is_made, number in events:
        size = tensors[number].bytes
        if not size:
            continue
        if is_made and free.get(size):
            places[number] = free[size].pop()
        elif is_made:
            places[number], end = end, end + size
        entry = {
            "addr": places[number], "size": size, "stream": 0, "time_us": round(time_s * MICROSECONDS),
            "frames": _frames(tensors[number], stage, model), "category": tensors[number].item,
        }  # fmt: skip
        if is_made:
            trace.append({"action": "alloc", **entry})
            continue
        free.setdefault(size, []).append(places.pop(number))
        trace += [{"action": action, **entry} for action in ("free_requested", "free_completed")]
    blocks = _blocks(tensors, places, end, stage, model)
    used = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    segment = {
        "device": 0, "address": BASE, "total_size": end - BASE, "allocated_size": used, "active_size": used,
        "requested_size": used, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": [], "blocks": blocks,
    }  # fmt: skip
    # the viewer looks for a category of this name
    begin = {
        "action": "segment_alloc", "addr": BASE, "size": end - BASE, "stream": 0, "time_us": 0, "frames": [],
        "category": "unknown",
    }  # fmt: skip
    data = {"segments": [segment], "device_traces": [[begin, *trace]], "allocator_settings": {}}
    return pickle.dumps(data, protocol=PROTOCOL)


def _frames(tensor: MemoryTensor, stage: int, model: str) -> list[dict[str, Any]]:
    """A made-up stack, innermost first: the tensor of a layer, the pass that makes it, the stage."""
    frames = [_frame(tensor.part or "stage", tensor.layer, f"{tensor.name}{tensor.sizes}")]
    if tensor.microbatch is not None:
        frames.append(_frame("micro-batch", tensor.microbatch, tensor.made_by.partition(" of ")[0]))
    return [*frames, _frame("stage", stage, f"{tensor.item} of {model}")]


def _frame(where: str, number: int | None, name: str) -> dict[str, Any]:
    return {"filename": where, "line": number or 0, "name": name}


def _blocks(
    tensors: Sequence[MemoryTensor], places: dict[int, int], end: int, stage: int, model: str
) -> list[dict[str, Any]]:
    """All of the segment at the end of the step: what outlives it, and free blocks between."""
    held = {address: number for number, address in places.items()}
    borders = sorted({BASE, end, *held, *(address + tensors[number].bytes for address, number in held.items())})
    blocks = []
    for start, after in pairwise(borders):
        number = held.get(start)
        block: dict[str, Any] = {"address": start, "size": after - start, "requested_size": after - start}
        if number is None:
            blocks.append({**block, "state": "inactive", "frames": []})
        else:
            frames = _frames(tensors[number], stage, model)
            blocks.append({**block, "state": "active_allocated", "frames": frames})
    return blocks
