"""The timings that make a profile: products, attention, memory-bound operators and stages on the device at hand, and
exchanges between the devices of this machine, or across machines where torchrun has started ranks there.

They are taken one after another.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from planner.errors import PlannerError, ProbeError
from planner.files import write_text
from planner.probe.launch.launcher import launch, process_context
from planner.probe.launch.process import stage_process
from planner.probe.rank.exchanges import barrier, slowest_s, timed_together
from planner.probe.rank.pipeline import RankClock
from planner.probe.run import STEADY_S, Device, ProbeRun, spread_fraction
from planner.probe.torch_build import Monitor, gather_whole, require_gpu, scatter_sum, this_build, watched
from planner.profile.measurements import AttentionShape, Machine, MeasuredRow, Measurements, ShapesToMeasure
from planner.specs.base import Ints, Texts
from planner.specs.units import MICRO

FEWEST = 3
"""The smallest number of calls of a timing, and of those before it."""
WARM_UP_FRACTION, STEADY_FRACTION = 0.05, 0.95
"""Shares of a figure's part of the budget: calls before the timing, and the timing."""
FIRST_WARM_UP_S = 3.0
"""Seconds of products before the first figure: a GPU that was idle is cold, and its clocks are high."""
ROUND_S, MOST_IN_ROUND = 0.05, 500
"""A round of calls takes about so long; all of them are issued before the first is read."""


class Stopwatch:
    """Measures seconds of calls on one device, within a budget that `num_figures` figures share.

    What a figure does not need of its part is left to those after it.
    """

    def __init__(self, device: Device, budget_s: float, num_figures: int = 1) -> None:
        self.device, self.budget_s, self.num_left = device, budget_s, num_figures
        self.spread = 0.0
        """The largest spread of a figure since this was last set to 0."""
        self.is_cold = device == "cuda" and budget_s > 0

    def microseconds(self, call: Callable[[], object]) -> float:
        """Median of calls that follow one another, each timed by itself; on a GPU between two events on its stream."""
        if self.is_cold:
            self._warm_up()
            self.is_cold = False
        began_s, share_s = time.perf_counter(), max(self.budget_s, 0.0) / max(self.num_left, 1)
        warm = self._repeated(call, WARM_UP_FRACTION * share_s, guess_s=ROUND_S)
        seconds = self._repeated(call, min(STEADY_S, STEADY_FRACTION * share_s), guess_s=median(warm))
        self.spread = max(self.spread, spread_fraction(seconds) or 0.0)
        self.num_left -= 1
        self.budget_s -= time.perf_counter() - began_s
        return median(seconds) / MICRO

    def _warm_up(self) -> None:
        """Keep the GPU busy with products, so that the first figure is measured like the last."""
        x = self.normal(4096, 4096)
        self._repeated(lambda: x @ x, min(FIRST_WARM_UP_S, self.budget_s / 10), ROUND_S)

    def _repeated(self, call: Callable[[], object], steady_s: float, guess_s: float) -> list[float]:
        """Seconds of calls, round after round for `steady_s`."""
        seconds = list[float]()
        began_s, round_s = time.perf_counter(), min(ROUND_S, steady_s)
        # short kernels wait for the host
        while len(seconds) < FEWEST or max(sum(seconds), time.perf_counter() - began_s) < steady_s:
            seconds += self._round(call, max(FEWEST, min(MOST_IN_ROUND, int(round_s / max(guess_s, 1e-9)))))
            guess_s = median(seconds)
        return seconds

    def _round(self, call: Callable[[], object], num_calls: int) -> list[float]:
        if self.device == "cpu":
            times = []
            for _ in range(num_calls):
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
            return times
        event = cast(Any, torch.cuda.Event)
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(num_calls)]
        for start, end in pairs:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def backward_us(self, output: Tensor, inputs: tuple[Tensor, ...]) -> float:
        """Microseconds of computing all gradients of `inputs`."""
        seed = torch.ones_like(output)
        return self.microseconds(lambda: torch.autograd.grad(output, inputs, seed, retain_graph=True))

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> Tensor:
        made = torch.randn(*shape, device=self.device, dtype=dtype)
        return made.requires_grad_() if grad else made


def product_row(bench: Stopwatch, m: int, n: int, k: int) -> MeasuredRow:
    """y = x·wᵀ, dx = dy·w, dw = dyᵀ·x in bf16."""
    x, w, dy = bench.normal(m, k), bench.normal(n, k), bench.normal(m, n)
    return {
        "forward_us": bench.microseconds(lambda: x @ w.T),
        "dgrad_us": bench.microseconds(lambda: dy @ w),
        "wgrad_us": bench.microseconds(lambda: dy.T @ x),
    }


def attention_row(bench: Stopwatch, shape: AttentionShape, backend: str) -> MeasuredRow:
    """Causal attention, forward and all three gradients, as the probe's model runs it. Raises RuntimeError if the
    backend does not take the shape."""
    batch, seq, heads, kv_heads, qk_dim, v_dim = shape
    q = bench.normal(batch, heads, seq, qk_dim, grad=True)
    k, v = bench.normal(batch, kv_heads, seq, qk_dim, grad=True), bench.normal(batch, kv_heads, seq, v_dim, grad=True)
    grouped, build = heads != kv_heads, this_build()
    missing = qk_dim - v_dim if build.pads_values else 0

    def forward() -> Tensor:
        values = functional.pad(v, (0, missing)) if missing else v
        return functional.scaled_dot_product_attention(q, k, values, is_causal=True, enable_gqa=grouped)

    with warnings.catch_warnings(), sdpa_kernel([build.attention[backend]]):
        warnings.simplefilter("ignore")  # torch says of each other backend why it is not the one
        return {
            "forward_us": bench.microseconds(forward),
            "backward_us": bench.backward_us(forward(), (q, k, v)),
        }


def stream_row(bench: Stopwatch, name: str, rows: int, columns: int) -> MeasuredRow:
    """One memory-bound operator, and its backward if it has one. `kernel_problems.STREAMS` holds the bytes that they
    move."""
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
        row: MeasuredRow = {"forward_us": bench.microseconds(calls[name]), "backward_us": None}
    if grad:
        row["backward_us"] = bench.backward_us(calls[name](), inputs)
    return row


def _adamw(bench: Stopwatch, size: int) -> Callable[[], Tensor]:
    parameter = torch.nn.Parameter(torch.zeros(size, device=bench.device))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return cast(Callable[[], Tensor], optimizer.step)


def machine_of(device: Device) -> Machine:
    """The device of this machine. Raises ProbeError if there is none of the kind."""
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
    product_row(
        Stopwatch(device, 0.0), 256, 256, 256
    )  # a context without cuBLAS (hipBLASLt) and loaded kernels is smaller
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(0)
    build = this_build()
    driver = build.driver()
    software = f"torch {torch.__version__}, {build.runtime}" + (f", driver {driver}" if driver else "")
    return Machine(
        device=device, name=properties.name, software=software, architecture=build.architecture_of(properties),
        memory_bytes=properties.total_memory, num_sms=properties.multi_processor_count,
        num_devices=torch.cuda.device_count(),
        context_bytes=total - free - torch.cuda.memory_reserved(0),
    )  # fmt: skip


def monitor_of(device: Device) -> Monitor:
    """The monitor of the GPU that is measured, which has looked at it once; of a CPU it says nothing."""
    if device == "cpu":
        return Monitor()
    require_gpu(device)
    return watched(0)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def free_memory_bytes(device: Device) -> int:
    return torch.cuda.mem_get_info()[0] if device == "cuda" else machine_of(device).memory_bytes


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
    record: Measurements, todo: Sequence[MeasurementTask], done: Callable[[], None], monitor: Monitor | None = None
) -> list[str]:
    """Measure the rows and keep them, calling `done` after each. Returns lines about rows that the device cannot
    measure. `monitor` looks at the GPU under the load of products."""
    threads, left_out = torch.get_num_threads(), list[str]()
    torch.set_num_threads(1 if record.machine.device == "cpu" else threads)  # one process is one device
    try:
        for task in todo:
            if monitor is not None and task.table == "gemm":
                monitor.begin_load()
            try:
                row = task.measure()
            except RuntimeError as error:  # no such kernel, no memory
                row_name = " ".join(f"{name} {value}" for name, value in task.key.items())
                left_out.append(f"{task.table} of {row_name}: {str(error).partition(chr(10))[0][:120]}")
            else:
                record.tables.setdefault(task.table, []).append({**task.key, **row})
            done()
        if monitor is not None:
            monitor.after()
            record.note(monitor.states)
    finally:
        torch.set_num_threads(threads)
    return left_out


KINDS: dict[Device, Texts] = {
    "cuda": ("all_gather", "reduce_scatter", "all_reduce"),
    "cpu": ("all_gather", "all_reduce"),  # gloo scatters sums by reducing all of them
}
FEWEST_ROUNDS, EXCHANGE_ROUND_S = 10, 0.02
"""The smallest number of rounds, and the seconds of calls in one."""
JOIN_S, WAIT_S = 300.0, 1800.0
"""Seconds that processes of this machine may take in all, and seconds that ranks wait for rank 0's own measurements."""
MOST_PROCESSES = 2
"""Number of processes on a CPU, where links between processes are memory copies, however many there are."""
ROWS_FILE = "rows.json"


class Ranks(NamedTuple):
    """The number of this process among all processes, and on its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def num_nodes(self) -> int:
        return self.size // self.local_size

    @classmethod
    def of_torchrun(cls) -> Ranks | None:
        """The ranks that torchrun announces; None if this process is alone."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if any(name not in os.environ for name in names) or int(os.environ["WORLD_SIZE"]) == 1:
            return None
        return cls(*(int(os.environ[name]) for name in names))


def num_processes(device: Device, num_devices: int) -> int:
    """Number of processes of this machine that exchange something."""
    return num_devices if device == "cuda" else min(num_devices, MOST_PROCESSES)


def spawned_rows(
    device: Device, size: int, sizes: Sequence[int], local_size: int | None = None, steady_s: float = 0.0
) -> list[MeasuredRow]:
    """Exchanges of `sizes` bytes between `size` processes that are started here, one per device, each timed for at
    least `steady_s`; no rows for one process.

    With a `local_size`, so many processes at a time count as a machine. Raises ProbeError if a process fails or does
    not end. No process is left when this returns or raises.
    """
    if size < 2:
        return []
    folder, started = Path(tempfile.mkdtemp(prefix="plan-profile-")), None
    process_context()  # which has imported torch
    try:
        given = (folder, device, size, local_size or size, tuple(sizes), steady_s)
        started = cast(Any, start_processes)(_child, given, size, join=False, daemon=True, start_method="forkserver")
        deadline = time.monotonic() + JOIN_S
        while not started.join(0.05):
            if time.monotonic() > deadline:
                raise ProbeError(f"exchanges between {size} processes could not be timed: no answer in {JOIN_S:.0f} s")
        return cast(list[MeasuredRow], json.loads((folder / ROWS_FILE).read_text()))
    except ProcessException as error:
        raise ProbeError(f"exchanges between {size} processes could not be timed: {error.msg.strip()}") from None
    finally:
        for process in started.processes if started else ():
            process.kill()
            process.join(10)
        shutil.rmtree(folder, ignore_errors=True)


def _child(rank: int, folder: Path, device: Device, size: int, local_size: int, sizes: Ints, steady_s: float) -> None:
    if sys.platform == "linux":  # a laptop's own name often leads nowhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = cast(Any, dist).FileStore(str(folder / "store"), size)
    rows = exchange_rows(device, Ranks(rank, size, rank % local_size, local_size), sizes, steady_s, store)
    if rank == 0:
        write_text(folder / ROWS_FILE, json.dumps(rows))


def exchange_rows(
    device: Device,
    ranks: Ranks,
    sizes: Sequence[int],
    steady_s: float = 0.0,
    store: Any = None,
    wait_s: float = WAIT_S,
) -> list[MeasuredRow]:
    """Seconds of each exchange on the slowest rank, each timed for at least `steady_s`. Tier 0 is within a machine,
    tier 1 between ranks with the same number on all machines.

    All ranks call it, and wait for each other at most `wait_s`. Without a store they meet at torchrun's address. In
    tier 1 every port of a machine is busy at once.
    """
    if device == "cuda":
        torch.cuda.set_device(0 if torch.cuda.device_count() == 1 else ranks.local_rank)  # else it is shown one
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method="env://" if store is None else None,
        store=store,
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=timedelta(seconds=wait_s),
    )
    on, limit = _on(device), timedelta(seconds=wait_s)
    together, rows = (partial(barrier, on), partial(slowest_s, device=on)), list[MeasuredRow]()
    try:
        for tier, members in enumerate(_groups(ranks)):
            size = len(members[0])
            groups = [
                dist.new_group(list(group), timeout=limit) for group in members if size > 1
            ]  # ranks make them all
            own_group = next((group for group, own in zip(groups, members, strict=False) if ranks.rank in own), None)
            for num_bytes, kind in product(sizes if groups else (), KINDS[device]):
                call = _call(device, kind, num_bytes, size, own_group)
                median_s, spread = timed_together(
                    RankClock(device), call, FEWEST_ROUNDS, steady_s, *together, round_s=EXCHANGE_ROUND_S
                )
                rows.append({
                    "tier": tier, "kind": kind, "size": size, "num_bytes": num_bytes,
                    "microseconds": median_s / MICRO, "spread_fraction": spread,
                })  # fmt: skip
    finally:
        dist.destroy_process_group()
    return rows


def _groups(ranks: Ranks) -> tuple[list[range], list[range]]:
    """The ranks of each machine, and the ranks with the same number on all machines."""
    local = ranks.local_size
    within = [range(node * local, (node + 1) * local) for node in range(ranks.num_nodes)]
    return within, [range(number, ranks.size, local) for number in range(local)]


def _on(device: Device) -> str:
    return "cpu" if device == "cpu" else f"cuda:{torch.cuda.current_device()}"


def _call(device: Device, kind: str, num_bytes: int, size: int, group: Any) -> Callable[[], object]:
    """The exchange of a bf16 tensor of `num_bytes` as a whole, rounded up to equal shards."""
    shard_size = -(-num_bytes // 2 // size)
    whole = torch.zeros(shard_size * size, dtype=torch.bfloat16, device=_on(device))
    shard = torch.zeros(shard_size, dtype=torch.bfloat16, device=_on(device))
    calls = {
        "all_gather": partial(dist.all_gather, list(whole.chunk(size)), shard, group=group),
        "reduce_scatter": partial(scatter_sum, shard, whole, group),
        "all_reduce": partial(dist.all_reduce, whole, group=group),
    }
    if device == "cuda" and kind == "all_gather":
        return partial(gather_whole, whole, shard, group)
    return calls[kind]
