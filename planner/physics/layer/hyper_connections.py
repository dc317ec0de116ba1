"""Residuals that are more than a sum: streams mixed by learned maps, and attention to snapshots of earlier layers.

Manifold-constrained hyper-connections are DeepSeek-V4's (2026, §2.2), attention residuals Kimi-K3's (2026).
"""

from __future__ import annotations

from dataclasses import replace

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
    return replace(spread, saved=(Saved("half output", (shape.shard_tokens, model.hidden_size)),))


def attend_snapshots(name: str, model: ModelSpec, shape: Shape, runtime: RuntimeSpec) -> Operator:
    """The sum of the residual and its snapshots that half a layer reads, by a softmax over one score a row.

    A row's score is a product of its norm and a vector of h weights; the norm has h weights too. Snapshots are kept
    where they are taken, and what is mixed by the norm behind.
    """
    rows, hidden, tokens = 1 + model.mean_snapshots, model.hidden_size, shape.shard_tokens
    mixed = _passes(f"{name} snapshots", (2 * rows * hidden, hidden), shape, runtime)
    kept = (Saved("residual", (tokens, hidden)), Saved("scores", (tokens, rows), dtype="fp32"))
    return replace(mixed, parameters=2 * hidden, saved=kept)


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
