"""Adapters beside tensor-parallel products: the shares of their ranks, and exchanges that adapted products need.

As Megatron-Bridge has them (peft/utils.py, ParallelLinearAdapter): A of a column-parallel product is split by columns
and its output gathered, A of a row-parallel one by rows and its output summed; B is split by columns beside both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.physics.operators import BF16, Collective, Operator
from planner.shape import Number, Shape
from planner.specs.training import AdapterSpec
from planner.trainers.spec import RuntimeSpec

ROW_PARALLEL = frozenset({"attention output", "mlp down", "shared_experts down", "mamba out", "convolution out"})
"""Products whose rows are split over tensor-parallel ranks."""
WHOLE = frozenset({"q down", "kv down", "experts up", "experts down"})
"""Products that every tensor-parallel rank has whole, or that other ranks split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Ranks that share the parts of one adapter: its A, its B, and the rows of its output and of its input."""

    rank: int
    is_row: bool = False
    shape: Shape | None = None
    down: Number = 1
    """Ranks that share the columns of A."""
    up: Number = 1
    """Ranks that share the columns of B, beyond those that share the product's."""
    outputs: Number = 1
    """Ranks that share the rows to which the adapter's output is added."""
    inputs: Number | None = None
    """Ranks that shared the rows of the input before it was gathered; none where it was not."""

    @classmethod
    def of(cls, product: Operator, adapters: AdapterSpec, shape: Shape | None) -> Split:
        """The shares of an adapter beside `product`; without a shape, all of it is on each rank."""
        rank = adapters.rank
        if shape is None or product.name in WHOLE:
            return cls(rank=rank)
        if product.name in ROW_PARALLEL:
            return cls(rank=rank, is_row=True, shape=shape, up=shape.tp, outputs=shape.sequence_shards)
        return cls(rank=rank, shape=shape, down=shape.tp, inputs=shape.sequence_shards)

    def exchanges(self, product: Operator, runtime: RuntimeSpec) -> Iterator[Collective]:
        """The exchanges among the ranks that share the adapter, none of which hides behind a product.

        They come just before or after the product's own, in which the ranks have waited for each other already.
        The rows of A's output have its few columns. B's output beside a row-parallel product has the columns of one
        rank and all tokens, and is wanted with all columns and the tokens of one rank: ranks exchange the parts, or
        gather all columns and cut the tokens out (`a2a_experimental`). Without sequence parallelism a column-parallel
        product's adapter sums the gradients of its input by itself.
        """
        if self.shape is None:
            return
        name, rows = f"{product.name} adapter", BF16 * product.count * product.m
        hidden, columns = rows * self.rank, rows * product.n
        forward = Collective(
            name=f"{name} hidden", kind="all_reduce" if self.is_row else "all_gather", group="tp", num_bytes=hidden,
            modules=product.modules, waits=False,
        )  # fmt: skip
        yield forward
        yield replace(forward, name=f"{name} hidden grad", kind="all_reduce", backward=True, modules=())
        if not self.is_row:
            unsharded = rows * product.k * (1 - self.shape.sequence_parallel)
            yield replace(forward, name=f"{name} dgrad", kind="all_reduce", num_bytes=unsharded, backward=True)
            return
        parts = runtime.adapters_all_to_all
        gather = replace(forward, name=f"{name} output", kind="all_gather", num_bytes=columns)
        if parts:
            gather = replace(gather, kind="all_to_all", num_bytes=columns / self.shape.tp)
        yield gather
        again = gather.num_bytes * self.shape.sequence_parallel
        yield replace(gather, name=f"{name} output grad", num_bytes=again, backward=True, modules=())


def frozen_exchange(exchange: Collective, targets: frozenset[str], splits: bool) -> Iterator[Collective]:
    """An exchange beside frozen products.

    No input is gathered again for a weight's gradient, unless an adapter that kept no gathered input needs it. Where
    adapters are split, the input of a target is gathered once for both: in 16 bits, and not behind the product
    (Transformer Engine's return_layernorm_output_gathered, which user buffers cannot do).
    """
    feeds = any(product.name in targets for product in exchange.beside)
    if exchange.for_weight and (splits or not feeds):
        return
    beside = tuple(replace(product, trained=False) for product in exchange.beside)
    if splits and feeds and exchange.kind == "all_gather" and not exchange.backward:
        yield replace(exchange, beside=beside, cast=False, overlap="none")
        return
    yield replace(exchange, beside=beside)
