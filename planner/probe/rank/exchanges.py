"""Seconds of exchanges that run by themselves: tensor- and context-parallel gathers, data-parallel reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from planner.probe.model.attention import CoreAttention
from planner.probe.rank.training import Trainer, unheard
from planner.probe.result import TimedExchange
from planner.specs.units import GB

REPEATS = 5


def barrier(device: str, group: Any = None) -> None:
    """Wait for the ranks of a group. The device is named, because NCCL would otherwise guess it from the rank's
    number."""
    if device == "cpu":
        dist.barrier(group=group)
    else:
        torch.cuda.synchronize()
        dist.barrier(group=group, device_ids=[torch.cuda.current_device()])


def measure_exchanges(trainer: Trainer, on_exchange: Callable[[str], None] = unheard) -> tuple[TimedExchange, ...]:
    """Median seconds and bus bandwidth of what this rank exchanges with tensor-, context- and data-parallel peers;
    `on_exchange` hears of each."""
    exchanges = []
    on_exchange("tp (computing)")
    tp = trainer.around.tp
    if tp.size > 1:
        shard, group = trainer.empty(), cast(Any, tp).group
        gathered = shard.repeat(tp.size if tp.sequence_parallel else 1, 1, 1)
        if tp.sequence_parallel:
            seconds = _seconds(trainer, group, lambda: tp.all_gather(shard))
            exchanges.append(_exchange("tp all-gather", tp.size, gathered.nbytes, seconds, passes=1))
        seconds = _seconds(trainer, group, lambda: dist.all_reduce(gathered, group=group))
        exchanges.append(_exchange("tp all-reduce", tp.size, gathered.nbytes, seconds, passes=2))
    on_exchange("cp (computing)")
    cp = trainer.around.cp
    keys = next(_keys(trainer), None)
    if cp.size > 1 and keys is not None:
        seconds = _seconds(trainer, cast(Any, cp).group, lambda: cp.all_gather(keys))
        exchanges.append(_exchange("cp all-gather", cp.size, cp.size * keys.nbytes, seconds, passes=1))
    for flat in trainer.flat:
        group, size = flat.sharding.group, flat.sharding.size
        for name, num_bytes, passes, call in flat.exchanges() if group is not None else ():
            on_exchange(f"{name} (computing)")
            exchanges.append(_exchange(name, size, num_bytes, _seconds(trainer, group, call), passes))
    return tuple(exchanges)


def _keys(trainer: Trainer) -> Iterator[Tensor]:
    """This rank's keys of a micro-batch, for each attention that it holds."""
    run = trainer.run
    for chunk in trainer.chunks.values():
        for module in chunk.modules():
            if isinstance(module, CoreAttention):
                shape = (run.seq_length, run.micro_batch_size, module.key_heads, module.key_dim)
                yield torch.zeros(shape, dtype=trainer.dtype, device=trainer.device)


def _seconds(trainer: Trainer, group: Any, call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        barrier(trainer.device, group)  # not of all ranks: some have fewer exchanges than others
        trainer.clock.start()
        call()
        times.append(trainer.clock.seconds(trainer.clock.mark()))
    return median(times[1:])  # the first one connects


def _exchange(name: str, size: int, num_bytes: int, seconds: float, passes: int) -> TimedExchange:
    """Bus bandwidth: passes · (n − 1)/n · bytes / seconds, as nccl-tests print it."""
    moved = passes * (size - 1) / size * num_bytes
    return TimedExchange(name=name, size=size, num_bytes=num_bytes, seconds=seconds, bus_gb_per_s=moved / seconds / GB)
