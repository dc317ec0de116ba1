"""The groups of ranks that ZeRO may shard over, for each row of the grid of shapes that the search tries."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.physics.layers import model_totals
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.training import SearchLimits

IntArray = npt.NDArray[np.int64]
Grid = dict[str, IntArray]


def shard_groups(grid: Grid, dp: IntArray, pricing: Pricing, limits: SearchLimits) -> tuple[IntArray, IntArray]:
    """Rows of the grid, one for each group size to shard over, and the number of ranks in the group.

    A group has all dp·cp ranks. If weights or gradients are sharded, groups of one NVLink domain (and its doublings,
    where stages of a pipeline are sharded too) are tried as well; then only reductions leave the group (HSDP). If the
    optimizer alone is sharded, groups of one domain are tried where weights gathered by all ranks would show
    (`_gathers_show`). Pinned sizes are kept, to be refused with a reason.
    """
    every_row, all_ranks, zero_stage = np.arange(len(dp)), dp * grid["cp"], grid["zero_stage"]
    if limits.shard_size is not None:
        pinned = zero_stage >= 1
        groups = [(every_row[~pinned], all_ranks[~pinned])]
        groups += [(every_row[pinned], np.full(int(pinned.sum()), size)) for size in sorted(set(limits.shard_size))]
        return _joined(groups)
    domain, runtime = pricing.cluster.nvlink_domain_size, pricing.runtime
    grouped = np.isin(zero_stage, runtime.grouped_zero_stages)
    groups = [(every_row, all_ranks)]
    size = 2 ** np.floor(np.log2(np.maximum(domain // grid["tp"], 1))).astype(np.int64)
    smaller = grouped & (zero_stage == 1) & (size < all_ranks)
    groups.append(_usable(grid, all_ranks, size, _gathers_show(grid, dp, smaller, pricing)))
    while (smaller := grouped & (zero_stage >= 2) & (size < all_ranks)).any():
        groups.append(_usable(grid, all_ranks, size, smaller))
        if not runtime.shards_pipelines:
            break
        size = 2 * size
    return _joined(groups)


def _usable(grid: Grid, all_ranks: IntArray, size: IntArray, rows: npt.NDArray[np.bool_]) -> tuple[IntArray, IntArray]:
    """Those of the rows whose ranks such groups divide, with all ranks of context parallelism in one group."""
    usable = np.flatnonzero(rows & (all_ranks % size == 0) & (size % grid["cp"] == 0))
    return usable, size[usable]


def _joined(groups: list[tuple[IntArray, IntArray]]) -> tuple[IntArray, IntArray]:
    return np.concatenate([rows for rows, _ in groups]), np.concatenate([sizes for _, sizes in groups])


def _gathers_show(grid: Grid, dp: IntArray, rows: npt.NDArray[np.bool_], pricing: Pricing) -> npt.NDArray[np.bool_]:
    """Those of the rows in which all ranks gather the updated weights for longer than a forward hides.

    The forward is that of one micro-batch at the GPU's peak. Where the gathering is hidden, groups save nothing: they
    hold more, update more, and reduce more bytes between nodes.
    """
    shows, where = np.zeros(len(dp), dtype=bool), np.flatnonzero(rows)
    if not len(where):
        return shows
    model, training, runtime = pricing.model, pricing.training, pricing.runtime
    columns = {name: column[where] for name, column in grid.items()}
    shape = Shape(**columns, dp=dp[where], shard_size=dp[where] * columns["cp"])
    totals = model_totals(model, runtime, training.seq_length)
    expert = 0.0
    if model.moe is not None:
        idle_fraction = 1 - model.moe.num_experts_per_tok / (model.moe.num_experts + model.moe.num_zero_experts)
        expert = (totals.num_parameters - totals.num_active_parameters) / max(idle_fraction, 1e-9)
    dense_each = (totals.num_parameters - expert) / (shape.tp * shape.pp)
    gather_s = pricing.gather_s(dense_each, expert / (shape.ep * shape.etp * shape.pp), shape)
    tokens = shape.micro_batch_size * training.seq_length / (shape.tp * shape.cp * shape.pp)
    peak = pricing.cluster.hardware.peak_flops(training.dtype) or pricing.cluster.hardware.peak_flops("bf16")
    assert peak is not None
    forward_s = totals.model_flops_per_token / 3 * tokens / peak
    shows[where] = gather_s > runtime.parameter_overlap_fraction * forward_s
    return shows
