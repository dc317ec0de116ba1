"""Times kernels on the device at hand: products, attention, memory-bound operators, whole stages. CPU and GPU alike."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from planner.errors import PlannerError
from planner.probe.launch.devices import require_gpu
from planner.probe.launch.launcher import launch
from planner.probe.run import Device
from planner.probe.worker.stage_worker import stage_process
from planner.profile.grid import AttentionShape, ShapesToMeasure, StageShape
from planner.profile.record import Machine, MeasuredRow, Record
from planner.specs.units import MICRO

WARM_UP, FEWEST, MOST = 2, 3, 30
"""Calls before a timing, and of a timing."""
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
ARCHITECTURES = {7: "volta", 8: "ampere", 9: "hopper", 10: "blackwell", 12: "blackwell"}
"""By compute capability."""
MOST_MEMORY_FRACTION = 0.5
"""Of the device: larger operands are left out."""


class MeasurementTask(NamedTuple):
    """One row to measure: what names it, and how; RuntimeError where the device cannot do it."""

    table: str
    key: MeasuredRow
    measure: Callable[[], MeasuredRow]


class Stopwatch:
    """Seconds of calls on one device."""

    def __init__(self, device: Device, budget_s: float) -> None:
        self.device, self.budget_s = device, budget_s

    def microseconds(self, call: Callable[[], object]) -> float:
        """Median of a few calls, each by itself; on a GPU between two events on its stream."""
        for _ in range(WARM_UP):
            call()
        first_s = self._times(call, 1)[0]
        repeats = max(FEWEST, min(MOST, int(self.budget_s / max(first_s, 1e-9))))
        return median(self._times(call, repeats)) / MICRO

    def _times(self, call: Callable[[], object], repeats: int) -> list[float]:
        if self.device == "cpu":
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            return times
        event = cast(Any, torch.cuda.Event)
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(repeats)]
        for start, end in pairs:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def backward_us(self, output: Tensor, inputs: tuple[Tensor, ...]) -> float:
        """Of all gradients of `inputs`."""
        seed = torch.ones_like(output)
        return self.microseconds(lambda: torch.autograd.grad(output, inputs, seed, retain_graph=True))

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
        made = torch.randn(*shape, device=self.device, dtype=dtype)
        return made.requires_grad_() if grad else made


def machine_of(device: Device) -> Machine:
    """The device at hand. Raises ProbeError where there is none of the kind."""
    if device == "cpu":
        cores, pages = os.cpu_count() or 1, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)
        return Machine(
            device=device, name=_cpu_name(), software=f"torch {torch.__version__}, one thread a process",
            architecture="cpu", memory_bytes=pages // cores, num_sms=1, num_devices=cores,
            context_bytes=resident,
        )  # fmt: skip
    require_gpu(device)
    properties = torch.cuda.get_device_properties(0)
    product_row(Stopwatch(device, 0.0), 256, 256, 256)  # a context without cuBLAS and loaded kernels is smaller
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(0)
    hip = getattr(torch.version, "hip", None)
    runtime = f"ROCm {hip}" if hip else f"CUDA {torch.version.cuda}"
    return Machine(
        device=device, name=properties.name, software=f"torch {torch.__version__}, {runtime}{_driver()}",
        architecture="cdna" if hip else ARCHITECTURES.get(properties.major, f"sm_{properties.major}{properties.minor}"),
        memory_bytes=properties.total_memory, num_sms=properties.multi_processor_count,
        num_devices=torch.cuda.device_count(),
        context_bytes=total - free - torch.cuda.memory_reserved(0),
    )  # fmt: skip


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _driver() -> str:
    """NVIDIA's driver, where its tool is there to say."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f", driver {said[0].strip()}" if said else ""


def tasks(device: Device, grid: ShapesToMeasure) -> Iterator[MeasurementTask]:
    """Every row of every table, links aside; quick ones first."""
    bench, free = Stopwatch(device, grid.budget_s), _memory(device)
    for name, rows, columns in grid.streams:
        if 40 * rows * columns < MOST_MEMORY_FRACTION * free:
            key: MeasuredRow = {"operator": name, "rows": rows, "columns": columns}
            yield MeasurementTask("stream", key, partial(stream_row, bench, name, rows, columns))
    for m, n, k in grid.products:
        if 2 * (m * n + m * k + n * k) < MOST_MEMORY_FRACTION * free:
            yield MeasurementTask("gemm", {"m": m, "n": n, "k": k}, partial(product_row, bench, m, n, k))
    for shape in grid.attentions:
        for backend in BACKENDS if device == "cuda" else ("flash",):
            yield MeasurementTask(
                "attention", {**shape._asdict(), "backend": backend}, partial(attention_row, bench, shape, backend)
            )
    for number, stage in enumerate(grid.stages):
        yield MeasurementTask("stage", {"stage": number}, partial(stage_row, device, stage))


def _memory(device: Device) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else machine_of(device).memory_bytes


def product_row(bench: Stopwatch, m: int, n: int, k: int) -> MeasuredRow:
    """y = x·wᵀ, dx = dy·w, dw = dyᵀ·x in bf16."""
    x, w, dy = bench.normal(m, k), bench.normal(n, k), bench.normal(m, n)
    return {
        "forward_us": bench.microseconds(lambda: x @ w.T),
        "dgrad_us": bench.microseconds(lambda: dy @ w),
        "wgrad_us": bench.microseconds(lambda: dy.T @ x),
    }


def attention_row(bench: Stopwatch, shape: AttentionShape, backend: str) -> MeasuredRow:
    """Causal attention, forward and all three gradients. RuntimeError where the backend does not take the shape."""
    batch, seq, heads, kv_heads, qk_dim, v_dim = shape
    q = bench.normal(batch, heads, seq, qk_dim, grad=True)
    k, v = bench.normal(batch, kv_heads, seq, qk_dim, grad=True), bench.normal(batch, kv_heads, seq, v_dim, grad=True)
    grouped = heads != kv_heads

    def forward() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    with warnings.catch_warnings(), sdpa_kernel([BACKENDS[backend]]):
        warnings.simplefilter("ignore")  # torch says of each other backend why it is not the one
        return {
            "forward_us": bench.microseconds(forward),
            "backward_us": bench.backward_us(forward(), (q, k, v)),
        }


def stream_row(bench: Stopwatch, name: str, rows: int, columns: int) -> MeasuredRow:
    """One memory-bound operator, and its backward where it has one; `kernels.STREAMS` knows what they move."""
    grad = name in ("swiglu", "rms_norm", "layer_norm", "cross_entropy_fp32")
    x = bench.normal(rows, columns, grad=grad)
    inputs: tuple[Tensor, ...] = (x,)
    if name == "swiglu":
        other = bench.normal(rows, columns, grad=True)
        inputs = (x, other)
    calls: dict[str, Callable[[], Tensor]] = {
        "copy": lambda: y.copy_(x),
        "add": lambda: torch.add(x, x, out=y),
        "swiglu": lambda: functional.silu(x) * other,
        "rms_norm": lambda: functional.rms_norm(x, (columns,), weight, 1e-5),
        "layer_norm": lambda: functional.layer_norm(x, (columns,), weight, None, 1e-5),
        "cross_entropy_fp32": lambda: functional.cross_entropy(x.float(), labels),
        "adamw_fused_fp32": _adamw(bench, rows * columns) if name == "adamw_fused_fp32" else torch.Tensor,
        "accumulate_bf16_into_fp32": lambda: total.add_(x),
    }
    with nullcontext() if grad else torch.no_grad():
        y, total = torch.empty_like(x), torch.zeros(rows, columns, device=bench.device)
        weight = bench.normal(columns, grad=grad)
        labels = torch.randint(0, columns, (rows,), device=bench.device)
        if name.endswith("norm"):
            inputs = (x, weight)
        found: MeasuredRow = {"forward_us": bench.microseconds(calls[name]), "backward_us": None}
    if grad:
        found["backward_us"] = bench.backward_us(calls[name](), inputs)
    return found


def _adamw(bench: Stopwatch, size: int) -> Callable[[], Tensor]:
    parameter = torch.nn.Parameter(torch.zeros(size, device=bench.device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return cast(Callable[[], Tensor], optimizer.step)


def stage_row(device: Device, stage: StageShape) -> MeasuredRow:
    """A stage in a process of its own, as `plan probe --stage` runs it: what kernels timed alone do not show."""
    if device == "cuda":
        torch.cuda.empty_cache()
    try:
        measured = launch(stage.run(device), stage_process, ranks=(0,))
    except PlannerError as error:
        raise RuntimeError(error.message) from None
    if measured.out_of_memory is not None:
        raise RuntimeError(measured.out_of_memory.message)
    rank = measured.ranks[0]
    return {
        "forward_us": rank.chunks[0].forward_s / MICRO,
        "backward_us": rank.chunks[0].backward_s / MICRO,
        "optimizer_us": median(step.optimizer_s for step in rank.steps) / MICRO,
    }


def measure(record: Record, todo: Sequence[MeasurementTask], done: Callable[[], None]) -> list[str]:
    """Measure what `record` does not have yet, and say what the device could not do; `done` after each row.

    A row that raises RuntimeError (no such kernel, no memory) is kept without numbers. Whatever ends this early, the
    record's file has what was measured.
    """
    threads, left_out = torch.get_num_threads(), list[str]()
    torch.set_num_threads(1 if record.measured.machine.device == "cpu" else threads)  # one process is one device
    try:
        for task in todo:
            if not record.has(task.table, task.key):
                try:
                    record.add(task.table, {**task.key, **task.measure()})
                except RuntimeError as error:
                    named = " ".join(f"{name} {value}" for name, value in task.key.items())
                    left_out.append(f"{task.table} of {named}: {str(error).partition(chr(10))[0][:120]}")
                    record.add(task.table, dict(task.key))
            done()
    finally:
        torch.set_num_threads(threads)
        record.save()
    return left_out
