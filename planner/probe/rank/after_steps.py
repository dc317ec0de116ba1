"""Seconds measured after the steps: exchanges by themselves, and chunks while no message between stages is under way.

A receive or a send of NCCL is a kernel. From when it is posted until its peer has come it spins on some of the GPU's
multiprocessors, which whatever computes meanwhile has to do without (NVIDIA/nccl issues 689 and 1025). Posting receives
late would not help: the sender would spin instead. Therefore all ranks run their chunks once more after the steps,
with tensors of their own in place of messages. Those seconds are the chunks' own; the steps' are shown beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from planner.probe.model.attention import CoreAttention
from planner.probe.rank.gradients import RankExchange
from planner.probe.rank.pipeline import RankClock
from planner.probe.rank.training import RankTrainer, unheard
from planner.probe.result import ChunkSeconds, ProbedExchange
from planner.probe.run import Repeats, is_sure, spread_fraction
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


def measure_exchanges(trainer: RankTrainer, on_exchange: Callable[[str], None] = unheard) -> tuple[ProbedExchange, ...]:
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
    run = trainer.run
    device = trainer.device
    repeats = Repeats(FEWEST_ROUNDS, run.steady_s, min(2 * run.steady_s, run.most_s))
    # not of all ranks: some have fewer exchanges than others
    together = partial(barrier, device, group), partial(slowest_s, device=device, group=group)
    return timed_together(trainer.clock, call, repeats, *together, round_s=ROUND_S if trainer.clock.is_cuda else 0.0)


def timed_together(
    clock: RankClock,
    call: Callable[[], object],
    repeats: Repeats,
    meet: Callable[[], None],
    slowest: Callable[[float], float],
    round_s: float,
) -> tuple[float, float | None]:
    """Seconds of an exchange that ranks make together, round after round until they suffice, and the standard error of
    this median as a share of it.

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


FEWEST_PASSES, MOST_PASSES = 5, 200
"""Smallest and largest number of micro-batches of a round, which else takes `run.steady_s`."""
MOST_ROUNDS = 3
"""Rounds follow each other until the medians are sure, if the run's steps are repeated for that at all."""

Passes = list[tuple[float, float]]
"""Seconds of each micro-batch's forward and backward."""


def with_quiet_seconds(
    trainer: RankTrainer, chunks: Sequence[ChunkSeconds], on_action: Callable[[str], None]
) -> tuple[ChunkSeconds, ...]:
    """The chunks with their quiet seconds. All ranks call this together, because ranks of one stage exchange tensors
    within it; so all of them must know how often each chunk runs."""
    run = trainer.run
    passes = dict[int, Passes]((chunk.stage, []) for chunk in chunks)
    seconds = _largest(trainer, {chunk.stage: chunk.forward_s + chunk.backward_s for chunk in chunks})
    unsure = set(passes)
    for _ in range(MOST_ROUNDS if run.most_s else 1):
        for stage in sorted(unsure):
            count = max(FEWEST_PASSES, min(MOST_PASSES, ceil(run.steady_s / max(seconds[stage], 1e-9))))
            passes[stage] += _passes(trainer, stage, count, on_action)
        on_action("spreads (waiting)")
        spreads = _largest(trainer, {stage: _spread(done) for stage, done in passes.items()})
        unsure = {stage for stage in passes if not is_sure(spreads[stage])}
    trainer.forget()
    return tuple(
        chunk.model_copy(
            update={
                "quiet_forward_s": median(forward_s for forward_s, _ in passes[chunk.stage]),
                "quiet_backward_s": median(backward_s for _, backward_s in passes[chunk.stage]),
                "spread_fraction": _spread(passes[chunk.stage]),
            }
        )
        for chunk in chunks
    )


def _spread(passes: Passes) -> float:
    """The larger standard error of the medians of forward and backward, as a share of them; 1 where it is unknown."""
    spreads = [spread_fraction(seconds) for seconds in zip(*passes, strict=True)]
    return max((1.0 if spread is None else spread for spread in spreads), default=1.0)


def _passes(trainer: RankTrainer, stage: int, count: int, on_action: Callable[[str], None]) -> Passes:
    """Seconds of `count` micro-batches, one after the other, behind one that is not counted. The GPU is waited for when
    all of them are under way."""
    batch = trainer.own_batch()
    clock = trainer.clock
    messages = {"F": trainer.empty().normal_(), "B": trainer.empty().normal_()}
    clock.start()
    marks = [
        trainer.micro_batch(stage, batch, lambda kind: messages[kind].detach(), on_action) for _ in range(count + 1)
    ]
    passes = []
    for number, marks_of_kind in enumerate(marks):
        on_action(f"micro-batch {number} of chunk {stage} (waiting)")
        taken = {kind: clock.seconds(end) - clock.seconds(start) for kind, (start, end) in marks_of_kind.items()}
        passes.append((taken.pop("F"), sum(taken.values())))
    return passes[1:]


def _largest(trainer: RankTrainer, values: Mapping[int, float]) -> list[float]:
    """For each virtual stage, the largest value that any rank has."""
    largest = torch.zeros(len(trainer.run.stage_to_rank), dtype=torch.float64)
    for stage, value in values.items():
        largest[stage] = value
    largest = largest.to(trainer.device)
    if dist.is_initialized():
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [float(value) for value in largest]
