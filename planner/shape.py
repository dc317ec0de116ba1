"""One parallel shape: the sizes of the grid of ranks and of one micro-batch.

Every field is a number or a numpy array: the formulas of `physics` use arithmetic alone, so one call prices one shape
or ten thousand. Arrays of one `Shape` broadcast against each other.

>>> Shape.of(tp=2, dp=32).shard_size
32
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from planner.errors import SpecError
from planner.rank_orders import RANK_ORDERS as RANK_ORDERS
from planner.record import record

BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

Number = float | npt.NDArray[np.floating[Any]] | npt.NDArray[np.integer[Any]]
"""One number, or a numpy array of them."""


# Formulas of one shape stay in Python's numbers, which are five to ten times as fast as numpy's of no dimension.


def where(condition: Any, yes: Number, no: Number) -> Number:
    """`yes` where the condition holds, else `no`; one condition chooses one of them whole."""
    if isinstance(condition, np.ndarray):
        return np.where(condition, yes, no)
    return yes if condition else no


def maximum(first: Number, second: Number) -> Number:
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.maximum(first, second)
    return first if first >= second else second


def minimum(first: Number, second: Number) -> Number:
    if isinstance(first, np.ndarray) or isinstance(second, np.ndarray):
        return np.minimum(first, second)
    return first if first <= second else second


def distinct(values: npt.NDArray[Any]) -> list[Any]:
    """The values of an array in order, each once; numpy's loads its masked arrays, which takes as long as a start."""
    return sorted({*values.ravel().tolist()})


def clip(value: Number, least: Number, most: Number) -> Number:
    return minimum(maximum(value, least), most)


def ceil(value: Number) -> Number:
    return np.ceil(value) if isinstance(value, np.ndarray) else math.ceil(value)


def floor(value: Number) -> Number:
    return np.floor(value) if isinstance(value, np.ndarray) else math.floor(value)


def log2(value: Number) -> Number:
    return np.log2(value) if isinstance(value, np.ndarray) else math.log2(value)


def all_of(condition: Any) -> bool:
    """True if the condition holds for every shape."""
    return bool(condition.all()) if isinstance(condition, np.ndarray) else bool(condition)


def any_of(condition: Any) -> bool:
    """True if the condition holds, or a number is not 0, for any shape."""
    return bool(condition.any()) if isinstance(condition, np.ndarray) else bool(condition)


@record(kw_only=True)
class Shape:
    """Sizes of the grid and of one micro-batch; tp·cp·pp·dp ranks are used. `Shape.of` checks them."""

    tp: Number = 1
    cp: Number = 1
    ep: Number = 1
    etp: Number = 1
    pp: Number = 1
    vpp: Number = 1
    dp: Number = 1
    micro_batch_size: Number = 1
    num_microbatches: Number = 1
    seq_length: Number = 1
    sequence_parallel: Number = 0
    """1 where activations outside the tensor-parallel GEMMs are sharded over tp, else 0."""
    zero_stage: Number = 1
    shard_size: Number = 1
    """Ranks over which ZeRO / FSDP shards (dp·cp unless HSDP makes it smaller)."""
    dp_outermost: Number = 0
    """1 where ranks are numbered tp-cp-ep-pp-dp, so that pipelines lie inside data parallelism; 0 for
    tp-cp-ep-dp-pp."""

    @classmethod
    def of(cls, **sizes: Any) -> Shape:
        """A checked shape, whose arrays are broadcast against each other; by default shard_size is dp·cp.

        Raises SpecError for a size that is no positive integer, and for a shard_size that does not divide dp·cp.
        """
        numbers = {name: size if isinstance(size, int) else np.asarray(size) for name, size in sizes.items()}
        for name, size in numbers.items():
            least, most = _LIMITS.get(name, (1, math.inf))
            is_whole = isinstance(size, int) or size.dtype.kind in "iub"
            if not is_whole or any_of(size < least) or any_of(size > most):
                wanted = f"an integer from {least} to {most}" if name in _LIMITS else "a positive integer"
                raise SpecError(f"shape: {name} {sizes[name]!s:.60} is no size", f"give {wanted}")
        ranks = numbers.get("dp", 1) * numbers.get("cp", 1)
        shard_size = numbers.setdefault("shard_size", ranks)
        if any_of(ranks % shard_size):
            raise SpecError(
                f"shape: shard_size {shard_size!s:.60} does not divide dp·cp {ranks!s:.60}", "use a divisor"
            )
        length = np.broadcast_shapes(*(np.shape(size) for size in numbers.values() if not isinstance(size, int)))
        return cls(**{k: np.broadcast_to(size, length) if length else int(size) for k, size in numbers.items()})

    @property
    def tokens(self) -> Number:
        """m = seq_length / cp · micro_batch_size: tokens of one micro-batch on one context-parallel rank."""
        return self.seq_length / self.cp * self.micro_batch_size

    @property
    def shard_tokens(self) -> Number:
        """Tokens outside the tensor-parallel GEMMs: m / tp under sequence parallelism, else m."""
        return self.tokens / self.sequence_shards

    @property
    def sequence_shards(self) -> Number:
        """Ranks that a sequence is cut over between tensor-parallel products: tp under sequence parallelism, else 1."""
        return where(self.sequence_parallel, self.tp, 1)

    @property
    def num_ranks(self) -> Number:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def stage_stride(self) -> Number:
        """Ranks from one stage of a pipeline to the next: tp·cp·dp, or tp·cp where data parallelism is outermost."""
        return self.tp * self.cp * where(self.dp_outermost, 1, self.dp)

    @property
    def rank_order(self) -> Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]:
        """Name of the order of the ranks of one shape."""
        return RANK_ORDERS[int(self.dp_outermost)]

    @property
    def expert_dp(self) -> Number:
        """Ranks that hold the same expert shard: tp·cp·dp / (ep·etp)."""
        return self.tp * self.cp * self.dp / (self.ep * self.etp)

    @classmethod
    def stacked(cls, shapes: Sequence[Shape]) -> Shape:
        """Single shapes as one of arrays."""
        return cls(**dict(zip(SIZES, map(np.array, zip(*map(_sizes, shapes), strict=True)), strict=True)))

    def take(self, index: Any) -> Shape:
        """The shapes at `index` of the arrays; scalars stay."""
        sizes = (size[index] if isinstance(size, np.ndarray) and size.ndim else size for size in _sizes(self))
        return Shape(**dict(zip(SIZES, sizes, strict=True)))


SIZES = tuple(f.name for f in fields(Shape))
"""Names of the sizes of a shape."""
_sizes = attrgetter(*SIZES)

NEAR_FRACTION = 0.03
"""Share by which another batch may be larger or smaller than the one asked for."""
_LIMITS = {"sequence_parallel": (0, 1), "zero_stage": (0, 3), "dp_outermost": (0, 1)}


def divisors(number: int, most: int) -> list[int]:
    """Divisors of `number` up to `most`, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({d for pair in ((d, number // d) for d in small) for d in pair if d <= most})


def liked_batch(num_sequences: float, num_gpus: int, near_fraction: float = NEAR_FRACTION) -> int | None:
    """The nearest multiple of the largest divisor of `num_gpus` that has one within `near_fraction`; None if none has.

    The more of the number of GPUs divides the batch, the more sizes data parallelism can have with no GPU idle. The
    batch itself is the answer where no larger divisor has a multiple nearby.
    """
    for divisor in reversed(divisors(num_gpus, num_gpus)):
        near = max(round(num_sequences / divisor), 1) * divisor
        if abs(near - num_sequences) <= near_fraction * num_sequences:
            return near
    return None
