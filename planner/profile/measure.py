"""The list of timings that make a profile, taken one after another; an interrupted run goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from planner.errors import PlannerError
from planner.probe.device_state import Monitor
from planner.probe.launch.launcher import launch
from planner.probe.launch.process import stage_process
from planner.probe.run import Device, ProbeRun
from planner.probe.torch_build import this_build
from planner.profile.record import MeasuredRow, Record
from planner.profile.shapes_to_measure import ShapesToMeasure
from planner.profile.stopwatch import Stopwatch
from planner.profile.this_machine import free_memory_bytes
from planner.profile.time_kernels import attention_row, product_row, stream_row
from planner.specs.units import MICRO

MOST_MEMORY_FRACTION = 0.5
"""Largest fraction of the device's memory for operands; larger ones are left out."""

NUM_FIGURES = {"stream": 2, "gemm": 3, "attention": 2}
"""Number of timings of a row of each table."""


class MeasurementTask(NamedTuple):
    """One row to measure: its name, and the function that measures it, which raises RuntimeError if the device
    cannot."""

    table: str
    key: MeasuredRow
    measure: Callable[[], MeasuredRow]


def tasks(device: Device, grid: ShapesToMeasure, budget_s: float | None = None) -> list[MeasurementTask]:
    """Every row of every table except links, quick ones first. All kernels together take about `budget_s`."""
    bench = Stopwatch(device, grid.budget_s if budget_s is None else budget_s)
    todo = [*_kernel_tasks(bench, grid)]
    bench.num_left = sum(NUM_FIGURES[task.table] for task in todo)
    runs = [stage.run(device, grid.steady_s) for stage in grid.stages]
    return [*todo, *(MeasurementTask("stage", {"stage": n}, partial(stage_row, run)) for n, run in enumerate(runs))]


def _kernel_tasks(bench: Stopwatch, grid: ShapesToMeasure) -> Iterator[MeasurementTask]:
    most_bytes = MOST_MEMORY_FRACTION * free_memory_bytes(bench.device)

    def task(table: str, key: MeasuredRow, row: Callable[..., MeasuredRow], *arguments: object) -> MeasurementTask:
        return MeasurementTask(table, key, partial(_with_spread, bench, partial(row, bench, *arguments)))

    for name, rows, columns in grid.streams:
        if 40 * rows * columns < most_bytes:
            key: MeasuredRow = {"operator": name, "rows": rows, "columns": columns}
            yield task("stream", key, stream_row, name, rows, columns)
    for m, n, k in grid.products:
        if 2 * (m * n + m * k + n * k) < most_bytes:
            yield task("gemm", {"m": m, "n": n, "k": k}, product_row, m, n, k)
    for shape in grid.attentions:
        for backend in this_build().attention if bench.device == "cuda" else ("flash",):
            yield task("attention", {**shape._asdict(), "backend": backend}, attention_row, shape, backend)


def _with_spread(bench: Stopwatch, row: Callable[[], MeasuredRow]) -> MeasuredRow:
    """A row with the largest spread of its figures."""
    bench.spread = 0.0
    return {**row(), "spread_fraction": bench.spread}


def stage_row(run: ProbeRun) -> MeasuredRow:
    """Seconds of a stage that runs in a process of its own, as `plan probe --stage` does."""
    if run.device == "cuda":
        torch.cuda.empty_cache()
    try:
        measured = launch(run, stage_process, ranks=(0,))
    except PlannerError as error:
        raise RuntimeError(error.message) from None
    if measured.out_of_memory is not None:
        raise RuntimeError(measured.out_of_memory.message)
    rank = measured.ranks[0]
    return {
        "forward_us": rank.chunks[0].forward_s / MICRO,
        "backward_us": rank.chunks[0].backward_s / MICRO,
        "optimizer_us": median(step.optimizer_s for step in rank.steps) / MICRO,
        "attention": ",".join(rank.attention_kernels),
        "spread_fraction": rank.chunks[0].spread_fraction,
    }


def measure(
    record: Record, todo: Sequence[MeasurementTask], done: Callable[[], None], monitor: Monitor | None = None
) -> list[str]:
    """Measure the rows that `record` does not have yet, calling `done` after each. Returns lines about rows that the
    device cannot measure. `monitor` looks at the GPU under the load of products.

    A row that raises RuntimeError (no such kernel, no memory) is kept without numbers. If something ends this early,
    the record's file has all rows so far.
    """
    threads, left_out = torch.get_num_threads(), list[str]()
    torch.set_num_threads(1 if record.measured.machine.device == "cpu" else threads)  # one process is one device
    try:
        for task in todo:
            if not record.has(task.table, task.key):
                if monitor is not None and task.table == "gemm":
                    monitor.begin_load()
                try:
                    record.add(task.table, {**task.key, **task.measure()})
                except RuntimeError as error:
                    row_name = " ".join(f"{name} {value}" for name, value in task.key.items())
                    left_out.append(f"{task.table} of {row_name}: {str(error).partition(chr(10))[0][:120]}")
                    record.add(task.table, dict(task.key))
            done()
        if monitor is not None:
            monitor.after()
            record.note(monitor.states)
    finally:
        torch.set_num_threads(threads)
        record.save()
    return left_out
