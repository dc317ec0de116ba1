"""The grid of ranks that run: the largest part of the plan's ranks that fits the processes or GPUs at hand."""

from __future__ import annotations

from typing import NamedTuple

from planner.answer import PricedLayout
from planner.errors import ProbeError


class RankGrid(NamedTuple):
    """Sizes of the ranks that are started."""

    pp: int
    dp: int
    cp: int
    tp: int
    ep: int

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


def fit_processes(layout: PricedLayout, num_processes: int, most_dp: int) -> RankGrid:
    """The largest slice of the plan's ranks in `num_processes`: data parallelism is given up first, then tensor and
    context parallelism down to 1 (on the CPU only their presence matters), then pipeline stages."""
    parallelism = layout.parallelism
    tp, cp, dp = min(parallelism.tp, 2), min(parallelism.cp, 2), min(parallelism.dp, most_dp)
    dp = max(1, min(dp, num_processes // (parallelism.pp * cp * tp)))
    tp = tp if parallelism.pp * dp * cp * tp <= num_processes else 1
    cp = cp if parallelism.pp * dp * cp * tp <= num_processes else 1
    pp = min(parallelism.pp, num_processes)
    return RankGrid(pp, dp, cp, tp, _largest_divisor(dp * cp * tp, parallelism.ep))


def fit_gpus(layout: PricedLayout, num_gpus: int) -> RankGrid:
    """The largest slice of the plan's ranks on `num_gpus`. Tensor- and context-parallel groups stay whole: dp is
    reduced first, then the number of stages.

    If the plan has several instances of a sharded optimizer, one of them runs: the runner shards over all its replicas.

    Raises ProbeError where not even one group fits, or one stage of a pipeline alone.
    """
    parallelism = layout.parallelism
    group = parallelism.tp * parallelism.cp
    if num_gpus < group * min(2, parallelism.pp):
        needed = "one group" if num_gpus < group else f"two of {parallelism.pp} stages"
        raise ProbeError(
            f"{num_gpus} GPUs are less than {needed} of tp {parallelism.tp} × cp {parallelism.cp}",
            "run the stages one by one on a single GPU: --stage all",
        )
    pp = min(parallelism.pp, num_gpus // group)
    dp = _largest_divisor(sharing_dp(layout), num_gpus // (group * pp))
    return RankGrid(pp, dp, parallelism.cp, parallelism.tp, _largest_divisor(dp * group, parallelism.ep))


def sharing_dp(layout: PricedLayout) -> int:
    """Number of replicas that share one sharded optimizer; all replicas if nothing is sharded."""
    parallelism = layout.parallelism
    return max(1, parallelism.shard_size // parallelism.cp) if parallelism.zero_stage else parallelism.dp


def _largest_divisor(number: int, at_most: int) -> int:
    return next(n for n in range(min(number, at_most), 0, -1) if number % n == 0)


def sampled_stages(asked_pp: int, pp: int) -> list[int]:
    """The plan's stages that the `pp` running stages represent: first, last, and evenly between."""
    return [round(i * (asked_pp - 1) / (pp - 1)) for i in range(pp)] if pp > 1 else [0]
