"""Residual streams that learned maps mix (manifold-constrained hyper-connections, DeepSeek-V4 2026, §2.2)."""

from __future__ import annotations

from planner.physics.operators import BF16, FP32, Operator, Saved
from planner.shape import Number, Shape
from planner.specs.model import ModelSpec
from planner.trainers.spec import RuntimeSpec

SINKHORN_KERNELS = 2 * 20 * 2
"""Kernels that 20 rounds of normalizing rows and columns are where nothing fuses them: a sum and a division each."""


def gather_streams(name: str, model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> tuple[Operator, Operator]:
    """The maps of a half layer, and the sum of n streams that it reads.

    The maps are n weights before, n behind and n² across: a product of all streams, normed, in fp32, by n·h × (2 + n)·n
    weights, a number and a factor for each kind of map; the n² are made doubly stochastic.
    """
    streams, tokens = model.num_residual_streams, shape.shard_tokens
    width, maps = streams * model.hidden_size, (2 + streams) * streams
    product = Operator(
        name=f"{name} maps", kind="gemm", wide=True, m=tokens, n=maps, k=width, parameters=maps * width + maps + 3,
        saved=(Saved("streams", (tokens, width)), Saved("maps", (3, tokens, maps), dtype="fp32")),
    )  # fmt: skip
    return product, _passes(f"{name} streams in", (width + 2 * width, model.hidden_size), shape, runtime)


def spread_streams(name: str, model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> Operator:
    """The streams of the next half: the old ones mixed, plus the half's output weighted for each."""
    width = model.num_residual_streams * model.hidden_size
    spread = _passes(f"{name} streams out", (width + model.hidden_size, width), shape, runtime)
    kept = Saved("half output", (shape.shard_tokens, model.hidden_size))
    return Operator(
        name=spread.name, kind="elementwise", family="residual", forward_bytes=spread.forward_bytes,
        backward_bytes=spread.backward_bytes, forward_kernels=spread.forward_kernels,
        backward_kernels=spread.backward_kernels, saved=(kept,),
    )  # fmt: skip


def join_streams(model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> tuple[Operator, Operator]:
    """The one stream that the final norm reads: weights of the n streams from a product of all of them."""
    streams, tokens = model.num_residual_streams, shape.shard_tokens
    width = streams * model.hidden_size
    product = Operator(
        name="head maps", kind="gemm", wide=True, m=tokens, n=streams, k=width,
        parameters=streams * width + streams + 1,
        saved=(Saved("streams", (tokens, width)), Saved("maps", (tokens, streams), dtype="fp32")),
    )  # fmt: skip
    return product, _passes("head streams in", (2 * width, model.hidden_size), shape, runtime)


def _passes(name: str, moved: tuple[Number, Number], shape: Shape, runtime: RuntimeSpec) -> Operator:
    """One pass over features that are `moved` (read, written) a token; three backward, in fp32 where nothing fuses."""
    features, fused = sum(moved), runtime.fused_norm or runtime.compiled
    num_bytes = (BF16 if fused else FP32 + BF16) * shape.shard_tokens * features
    return Operator(
        name=name, kind="elementwise", family="residual", forward_bytes=num_bytes, backward_bytes=2 * num_bytes,
        forward_kernels=2 if fused else 12 + SINKHORN_KERNELS,
        backward_kernels=4 if fused else 2 * (12 + SINKHORN_KERNELS),
    )  # fmt: skip
