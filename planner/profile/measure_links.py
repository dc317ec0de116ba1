"""Times exchanges between the devices of this machine, and across machines where torchrun has started ranks there."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from planner.errors import ProbeError
from planner.files import write_text
from planner.probe.launch.launcher import process_context
from planner.probe.rank.after_steps import barrier, slowest_s, timed_together
from planner.probe.rank.pipeline import RankClock
from planner.probe.run import Device, Repeats
from planner.probe.torch_build import gather_whole, scatter_sum
from planner.profile.record import MeasuredRow
from planner.specs.units import MICRO

KINDS: dict[Device, tuple[str, ...]] = {
    "cuda": ("all_gather", "reduce_scatter", "all_reduce"),
    "cpu": ("all_gather", "all_reduce"),  # gloo scatters sums by reducing all of them
}
FEWEST, ROUND_S = 10, 0.02
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
    folder, local = Path(tempfile.mkdtemp(prefix="plan-profile-")), local_size or size
    context = process_context()
    everyone = [Ranks(rank, size, rank % local, local) for rank in range(size)]
    processes = [
        context.Process(target=_child, args=(folder, device, ranks, tuple(sizes), steady_s), daemon=True)
        for ranks in everyone
    ]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + JOIN_S
        while any(process.exitcode is None for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.05)
        codes = [process.exitcode for process in processes]
        if any(codes) or None in codes:
            why = f"they ended with {codes}" if any(codes) else f"no answer in {JOIN_S:.0f} s"
            raise ProbeError(f"exchanges between {size} processes could not be timed: {why}")
        return cast(list[MeasuredRow], json.loads((folder / ROWS_FILE).read_text()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join(10)
        shutil.rmtree(folder, ignore_errors=True)


def _child(folder: Path, device: Device, ranks: Ranks, sizes: tuple[int, ...], steady_s: float) -> None:
    if sys.platform == "linux":  # a laptop's own name often leads nowhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = cast(Any, dist).FileStore(str(folder / "store"), ranks.size)
    rows = exchange_rows(device, ranks, sizes, steady_s, store)
    if ranks.rank == 0:
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
    try:
        return list(_rows(device, ranks, sizes, steady_s, wait_s))
    finally:
        dist.destroy_process_group()


def _rows(device: Device, ranks: Ranks, sizes: Sequence[int], steady_s: float, wait_s: float) -> Iterator[MeasuredRow]:
    on, repeats = _on(device), Repeats(FEWEST, steady_s, 2 * steady_s)
    together = partial(barrier, on), partial(slowest_s, device=on)
    for tier, members in enumerate(_groups(ranks)):
        if len(members[0]) < 2:
            continue
        limit = timedelta(seconds=wait_s)
        groups = [dist.new_group(list(group), timeout=limit) for group in members]  # all ranks make all groups
        own_group = next(number for number, group in enumerate(members) if ranks.rank in group)
        for num_bytes in sizes:
            for kind in KINDS[device]:
                call = _call(device, kind, num_bytes, len(members[own_group]), groups[own_group])
                timed = timed_together(RankClock(device), call, repeats, *together, round_s=ROUND_S)
                yield {
                    "tier": tier, "kind": kind, "size": len(members[own_group]), "num_bytes": num_bytes,
                    "microseconds": timed.median_s / MICRO, "spread_fraction": timed.spread,
                }  # fmt: skip


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
    calls: dict[str, Callable[[], object]] = {
        "all_gather": partial(dist.all_gather, list(whole.chunk(size)), shard, group=group),
        "reduce_scatter": partial(scatter_sum, shard, whole, group),
        "all_reduce": partial(dist.all_reduce, whole, group=group),
    }
    if device == "cuda" and kind == "all_gather":
        return partial(gather_whole, whole, shard, group)
    return calls[kind]
