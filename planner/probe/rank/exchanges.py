"""Seconds of exchanges that run by themselves: tensor- and context-parallel gathers, data-parallel reductions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from planner.probe.model.attention import CoreAttention
from planner.probe.rank.clock import Clock
from planner.probe.rank.training import Trainer, unheard
from planner.probe.repeats import Repeats, spread_fraction
from planner.probe.result import TimedExchange
from planner.specs.units import GB

FEWEST = 5
"""The smallest number of rounds of an exchange."""
ROUND_S, MOST_IN_ROUND = 0.02, 1000
"""On a GPU, a round is as many calls as take about so long."""


class Seconds(NamedTuple):
    """Seconds of one call, and the standard error of this median as a share of it."""

    median_s: float
    spread: float | None


def barrier(device: str, group: Any = None) -> None:
    """Wait for the ranks of a group. The device is named, because NCCL would otherwise guess it from the rank's
    number."""
    if device != "cpu":
        torch.cuda.synchronize()
    if device == "cpu" or dist.get_backend(group) == "gloo":
        dist.barrier(group=group)
    else:
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


def _seconds(trainer: Trainer, group: Any, call: Callable[[], object]) -> Seconds:
    run, device = trainer.run, trainer.device
    repeats = Repeats(FEWEST, run.steady_s, min(2 * run.steady_s, run.most_s))
    # not of all ranks: some have fewer exchanges than others
    together = partial(barrier, device, group), partial(slowest_s, device=device, group=group)
    return timed_together(trainer.clock, call, repeats, *together, round_s=ROUND_S if trainer.clock.is_cuda else 0.0)


def timed_together(
    clock: Clock,
    call: Callable[[], object],
    repeats: Repeats,
    meet: Callable[[], None],
    slowest: Callable[[float], float],
    round_s: float,
) -> Seconds:
    """Seconds of an exchange that ranks make together, round after round until they suffice.

    A round begins when all ranks `meet` and is as many calls, one behind the other, as take `round_s`: the host and the
    first launch have little part in it. It counts as on the `slowest` rank, which all ranks know, so that all go on or
    end together.
    """
    seconds: list[float] = []
    _round_s(clock, call, 1, meet, slowest)  # connects
    guess_s = _round_s(clock, call, 1, meet, slowest)
    num_calls = max(1, min(MOST_IN_ROUND, int(round_s / max(guess_s, 1e-9))))
    while not repeats.suffice(len(seconds), num_calls * sum(seconds), partial(spread_fraction, seconds)):
        seconds.append(_round_s(clock, call, num_calls, meet, slowest))
    return Seconds(median(seconds), spread_fraction(seconds))


def _round_s(
    clock: Clock,
    call: Callable[[], object],
    num_calls: int,
    meet: Callable[[], None],
    slowest: Callable[[float], float],
) -> float:
    """Seconds of one call of a round."""
    meet()
    clock.start()
    for _ in range(num_calls):
        call()
    return slowest(clock.seconds(clock.mark()) / num_calls)


def slowest_s(seconds: float, device: str, group: Any = None) -> float:
    """The largest of what the ranks of a group took."""
    largest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return float(largest)


def _exchange(name: str, size: int, num_bytes: int, timed: Seconds, passes: int) -> TimedExchange:
    """Bus bandwidth: passes · (n − 1)/n · bytes / seconds, as nccl-tests print it."""
    moved = passes * (size - 1) / size * num_bytes
    return TimedExchange(
        name=name, size=size, num_bytes=num_bytes, seconds=timed.median_s, bus_gb_per_s=moved / timed.median_s / GB,
        spread_fraction=timed.spread,
    )  # fmt: skip
