"""Exchanges of a rank, timed by themselves after the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from planner.probe.model.attention import CoreAttention
from planner.probe.rank.gradients import RankExchange
from planner.probe.rank.pipeline import RankClock
from planner.probe.rank.training import RankTrainer
from planner.probe.result import ProbedExchange
from planner.probe.run import repeats, spread_fraction
from planner.specs.units import GB

FEWEST_ROUNDS = 5
"""The smallest number of rounds of an exchange."""
ROUND_S, MOST_IN_ROUND = 0.02, 1000
"""On a GPU, a round is as many calls as take about so long."""


def barrier(device: str, group: Any = None) -> None:
    """Wait for the ranks of a group. The device is named, because NCCL would otherwise guess it from the rank's
    number."""
    if device != "cpu":
        torch.cuda.synchronize()
    if device == "cpu":
        dist.barrier(group=group)
    else:
        dist.barrier(group=group, device_ids=[torch.cuda.current_device()])


def measure_exchanges(trainer: RankTrainer, on_exchange: Callable[[str], None]) -> tuple[ProbedExchange, ...]:
    """Median seconds and bus bandwidth of what this rank exchanges with tensor-, context- and data-parallel peers;
    `on_exchange` hears of each."""
    exchanges = []
    for group, size, exchange in _exchanges(trainer):
        on_exchange(f"{exchange.name} (computing)")
        median_s, spread = _seconds(trainer, group, exchange.call)
        # as nccl-tests print it
        moved = exchange.passes * (size - 1) / size * exchange.num_bytes
        exchanges.append(
            ProbedExchange(
                name=exchange.name, size=size, num_bytes=exchange.num_bytes, seconds=median_s,
                bus_gb_per_s=moved / median_s / GB, spread_fraction=spread,
            )
        )  # fmt: skip
    return tuple(exchanges)


def _exchanges(trainer: RankTrainer) -> Iterator[tuple[Any, int, RankExchange]]:
    """The exchanges of a rank, each with its group and the number of ranks in it."""
    tp, cp = cast(Any, trainer.around.tp), cast(Any, trainer.around.cp)
    if tp.size > 1:
        shard = trainer.empty()
        gathered = shard.repeat(tp.size if tp.sequence_parallel else 1, 1, 1)
        if tp.sequence_parallel:
            yield tp.group, tp.size, RankExchange("tp all-gather", gathered.nbytes, 1, partial(tp.all_gather, shard))
        all_reduce = partial(dist.all_reduce, gathered, group=tp.group)
        yield tp.group, tp.size, RankExchange("tp all-reduce", gathered.nbytes, 2, all_reduce)
    keys = next(_keys(trainer), None)
    if cp.size > 1 and keys is not None:
        call = partial(cp.all_gather, keys)
        yield cp.group, cp.size, RankExchange("cp all-gather", cp.size * keys.nbytes, 1, call)
    for flat in trainer.flat:
        for exchange in flat.exchanges() if flat.sharding.group is not None else ():
            yield flat.sharding.group, flat.sharding.size, exchange


def _keys(trainer: RankTrainer) -> Iterator[Tensor]:
    """This rank's keys of a micro-batch, for each attention that it holds."""
    run = trainer.run
    for chunk in trainer.chunks.values():
        for module in chunk.modules():
            if isinstance(module, CoreAttention):
                shape = (run.seq_length, run.micro_batch_size, module.key_heads, module.key_dim)
                yield torch.zeros(shape, dtype=trainer.dtype, device=trainer.device)


def _seconds(trainer: RankTrainer, group: Any, call: Callable[[], object]) -> tuple[float, float | None]:
    device = trainer.device
    # not of all ranks: some have fewer exchanges than others
    together = partial(barrier, device, group), partial(slowest_s, device=device, group=group)
    round_s = ROUND_S if trainer.clock.is_cuda else 0.0
    return timed_together(trainer.clock, call, FEWEST_ROUNDS, trainer.run.steady_s, *together, round_s=round_s)


def timed_together(
    clock: RankClock,
    call: Callable[[], object],
    fewest: int,
    steady_s: float,
    meet: Callable[[], None],
    slowest: Callable[[float], float],
    round_s: float,
) -> tuple[float, float | None]:
    """Seconds of an exchange that ranks make together for `steady_s`, in so many rounds at least, and the standard
    error of this median as a share of it.

    A round begins when all ranks `meet` and is as many calls, one behind the other, as take `round_s`: the host and the
    first launch have little part in it. It counts as on the `slowest` rank, which all ranks know, so that all make as
    many.
    """
    _round_s(clock, call, 1, meet, slowest)  # connects
    guess_s = max(_round_s(clock, call, 1, meet, slowest), 1e-9)
    num_calls = max(1, min(MOST_IN_ROUND, int(round_s / guess_s)))
    num_rounds = repeats(num_calls * guess_s, steady_s, fewest)
    seconds = [_round_s(clock, call, num_calls, meet, slowest) for _ in range(num_rounds)]
    return median(seconds), spread_fraction(seconds)


def _round_s(
    clock: RankClock,
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
