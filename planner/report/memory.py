"""The memory of a plan's stages for a terminal of 80 columns, and a stage's as a snapshot of torch."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.answer.memory import MemoryAnswer, MemoryChange, MemoryOfStage, MemoryTensor
from planner.report.format import MEMORY, gibibytes, percent, seconds
from planner.report.pieces import as_group, bullets, headed, section
from planner.specs.base import Fields

_MOST_GROUPS = 16
_MOST_STAGES = 16
_SHORT = {"gradients": "grads", "optimizer": "optim", "activations": "activ", "workspace": "work", "reserved": "resvd"}


@as_group
def render_memory(answer: MemoryAnswer, stage: MemoryOfStage) -> Iterator[RenderableType]:
    """The stages' peaks, the largest tensors of `stage`, and what would make room there."""
    capacity = gibibytes(stage.capacity_bytes)
    yield Text(f"{answer.model}  {answer.layout}")
    yield section(f"Memory at the peak of each stage, GiB of the GPU's {capacity}", _stages(answer))
    when = seconds(stage.peak_s)
    flying = len({(tensor.microbatch, tensor.from_s) for tensor in stage.tensors if tensor.item == "activations"})
    passes = "micro-batches" if len(stage.chunks) == 1 else "chunks of micro-batches"
    yield section(
        f"Stage {stage.stage}, {when} into the step: {len(stage.tensors):,} tensors, {flying} {passes} in flight",
        _largest(answer, stage),
    )
    if answer.changes:
        yield section(f"What would make room on stage {stage.stage}", _changes(answer, stage))
    notes = dict.fromkeys(f"{tensor.name}: {tensor.note}" for tensor in stage.tensors if tensor.note)
    if notes:
        yield section("Rows that are no tensor of their own", bullets(notes))


def _stages(answer: MemoryAnswer) -> Table:
    items = [name for name in MEMORY if name != "total_bytes"]
    heads = [_SHORT.get(MEMORY[name], MEMORY[name]) for name in items]
    table = headed(("stage", *heads, "total", "peak at"), "r" * (len(items) + 3))
    for first, last in _alike(answer.stages):
        sizes = [gibibytes(getattr(first.memory, name)) for name in items]
        name = str(first.stage) if first is last else f"{first.stage}–{last.stage}"
        table.add_row(name, *sizes, gibibytes(first.memory.total_bytes), seconds(first.peak_s))
    return table


def _alike(stages: Sequence[MemoryOfStage]) -> Iterator[tuple[MemoryOfStage, MemoryOfStage]]:
    """First and last of runs of stages with the same figures, where there are many stages; else each by itself."""
    runs: list[list[MemoryOfStage]] = []
    for stage in stages:
        if len(stages) > _MOST_STAGES and runs and runs[-1][0].memory == stage.memory:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return ((run[0], run[-1]) for run in runs)


def _largest(answer: MemoryAnswer, stage: MemoryOfStage) -> Table:
    table = headed(("GiB", "item", "tensor", "number", "gone with", "step"), "rlwrwr")
    groups = grouped(stage.tensors)
    for group in groups[:_MOST_GROUPS]:
        change = group.cheapest(answer.changes)
        words = ("", "") if change is None else (change.change, _longer(answer, change))
        item = _SHORT.get(group.first.item, group.first.item)
        table.add_row(gibibytes(group.num_bytes), item, group.name, f"{group.number:,}", *words)
    rest = groups[_MOST_GROUPS:]
    if rest:
        number = sum(group.number for group in rest)
        table.add_row(gibibytes(sum(group.num_bytes for group in rest)), "", "others", f"{number:,}", "", "")
    return table


def _longer(answer: MemoryAnswer, change: MemoryChange) -> str:
    ratio = change.step_s / answer.step_s - 1
    return f"{'+' if ratio >= 0 else '−'}{percent(abs(ratio))}"


def _changes(answer: MemoryAnswer, stage: MemoryOfStage) -> Table:
    table = headed(("change", "peak", "frees", "step", ""), "wrrrr")
    for change in answer.changes:
        peak = change.peak_bytes[stage.stage]
        freed = gibibytes(stage.peak_bytes - peak)
        fits = "" if change.fits else " (does not fit)"
        table.add_row(
            change.change + fits, gibibytes(peak), freed, seconds(change.step_s), _longer(answer, change)
        )  # fmt: skip
    return table


class TensorGroup(NamedTuple):
    """Tensors of one name, shape and item."""

    first: MemoryTensor
    number: int
    num_layers: int
    num_microbatches: int
    num_bytes: int

    @property
    def name(self) -> str:
        """The tensor, its shape and its dtype."""
        return f"{self.first.name}{self.first.sizes}"

    @property
    def holders(self) -> str:
        """`8 layers × 16 micro-batches`, or what they are of."""
        layers, passes = self.num_layers, self.num_microbatches
        parts = [_plural(layers, "layer")] if layers else [self.first.part] if self.first.part else []
        if passes:
            parts.append(_plural(passes, "micro-batch", "es"))
        whole = max(layers, 1) * max(passes, 1) == self.number
        return " × ".join(parts) if whole else f"{self.number:,} in {', '.join(parts)}"

    def cheapest(self, changes: Iterable[MemoryChange]) -> MemoryChange | None:
        """The change with the shortest step that would make these tensors again instead of keeping them."""
        removing = [change for change in changes if {*self.first.remade_by} & {*change.modules}]
        return min(removing, key=lambda change: change.step_s, default=None)


def _plural(number: int, name: str, ending: str = "s") -> str:
    return f"{number:,} {name}{ending if number > 1 else ''}"


def grouped(tensors: Sequence[MemoryTensor]) -> list[TensorGroup]:
    """The groups of some tensors, the largest first."""
    found: dict[tuple[object, ...], list[MemoryTensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.item, tensor.part, tensor.name, tensor.shape, tensor.dtype), []).append(tensor)
    groups = [
        TensorGroup(
            first=members[0],
            number=len(members),
            num_layers=len({tensor.layer for tensor in members} - {None}),
            num_microbatches=len({tensor.microbatch for tensor in members} - {None}),
            num_bytes=sum(tensor.bytes for tensor in members),
        )
        for members in found.values()
    ]
    return sorted(groups, key=lambda group: -group.num_bytes)


PROTOCOL = 4
"""The newest pickles that the viewer's own reader understands."""
BASE = 0x7F0000000000
"""The address of the only segment: any number that is no allocation's size."""
MICROSECONDS = 1e6


def snapshot(
    tensors: Sequence[MemoryTensor], events: Sequence[tuple[float, bool, int]], stage: int, model: str
) -> bytes:
    """The snapshot file of a stage; `events` are time in seconds, made or freed, and the tensor's place."""
    places, free, end = dict[int, int](), dict[int, list[int]](), BASE
    trace: list[Fields] = []
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


def _frames(tensor: MemoryTensor, stage: int, model: str) -> list[Fields]:
    """A made-up stack, innermost first: the tensor of a layer, the pass that makes it, the stage."""
    frames = [_frame(tensor.part or "stage", tensor.layer, f"{tensor.name}{tensor.sizes}")]
    if tensor.microbatch is not None:
        frames.append(_frame("micro-batch", tensor.microbatch, tensor.made_by.partition(" of ")[0]))
    return [*frames, _frame("stage", stage, f"{tensor.item} of {model}")]


def _frame(where: str, number: int | None, name: str) -> Fields:
    return {"filename": where, "line": number or 0, "name": name}


def _blocks(tensors: Sequence[MemoryTensor], places: dict[int, int], end: int, stage: int, model: str) -> list[Fields]:
    """All of the segment at the end of the step: what outlives it, and free blocks between."""
    held = {address: number for number, address in places.items()}
    borders = sorted({BASE, end, *held, *(address + tensors[number].bytes for address, number in held.items())})
    blocks = []
    for start, after in pairwise(borders):
        number = held.get(start)
        block: Fields = {"address": start, "size": after - start, "requested_size": after - start}
        if number is None:
            blocks.append({**block, "state": "inactive", "frames": []})
        else:
            frames = _frames(tensors[number], stage, model)
            blocks.append({**block, "state": "active_allocated", "frames": frames})
    return blocks
