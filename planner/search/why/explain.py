"""Why this and not that: what stands in the way, the nearest miss, what would lift it, what alternatives trade."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from planner.errors import Infeasible, SolverError
from planner.physics.pricing import Pricing
from planner.search.enumerate import Rejections, scalar
from planner.search.priced_shapes import Screen
from planner.specs.training import SearchLimits
from planner.specs.units import gib

QUICK_S = 2.0
"""Of each search for a remedy."""
NARROWING_S = 5.0
"""Of looking for fewer GPUs than some that are enough."""
_UNTRIED = "add GPUs, or free a pinned axis"


def nothing_legal(rejections: Rejections) -> Infeasible:
    """No shape obeys the arithmetic of model, batch and trainer."""
    # rules are applied one after the other: the last that refused any left nothing over
    reason = next(reversed(rejections.counts), "")
    example = rejections.examples.get(reason, "no shape exists")
    return Infeasible(
        f"no legal layout: {example} ({_listed(rejections)})",
        hint_for(reason),
        rejections.counts,
    )


_MORE_MICROBATCHES = "pin a smaller pp, dp or micro-batch-size, or raise the global batch size"
_NO_CP = "use cp 1, or another --runtime (torchtitan takes any attention)"
_HINTS = {
    "attention_sinks_with_cp": _NO_CP,
    "cp_not_expressible": _NO_CP,
    "interleaving_too_few_microbatches": _MORE_MICROBATCHES,
    "more_ranks_than_gpus": "lower what is pinned, or give more GPUs",
    "seq_length_beyond_positions": "shorten the sequence to the positions that the model has",
    "sliding_window_with_ring_cp": _NO_CP,
    "too_few_microbatches": _MORE_MICROBATCHES,
    "tp_across_nvlink_domains": "add --tp-across-nodes, or lower tp",
    "zero_stage_not_expressible": "free zero-stage, or use another --runtime",
}


def hint_for(reason: str) -> str:
    """What lifts the rule that left no shape over."""
    return _HINTS.get(reason, "free a pinned axis, or change the number of GPUs or the global batch size")


def count_misfits(screen: Screen, num_fitting: int, rejections: Rejections) -> None:
    """Count shapes whose ranks together have no room for the layers."""
    misfits = len(screen.kernel) - num_fitting
    if misfits:
        short = shortfall_bytes(screen)
        worst = int(np.argmax(short))
        rejections.add("does_not_fit", misfits, f"{_named(screen, worst)} lacks {gib(short[worst]):.1f} GiB on a rank")


def shortfall_bytes(screen: Screen) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Bytes missing on the fullest rank when layers are split evenly and recomputed whole; negative where it fits."""
    model, shape, table = screen.pricing.model, screen.shape, screen.table
    kind = max(screen.pricing.kind_counts, key=lambda k: screen.pricing.kind_counts[k])
    parts = [table.layers[kind, mode] for mode in ("none", "selective", "full")]
    live = np.min([screen.part(part, "live_bytes") for part in parts], axis=0)
    transient = np.min([screen.part(part, "transient_bytes") for part in parts], axis=0)
    layers = np.ceil(model.num_hidden_layers / np.asarray(shape.pp))
    held = np.minimum(np.asarray(shape.num_microbatches), np.asarray(shape.pp))
    needed = layers * (screen.static_bytes(parts[0]) + held * live) + transient + screen.static_bytes(table.embedding)
    usable = screen.pricing.usable_bytes(shape)
    return np.asarray(needed - usable, dtype=float)


def nothing_fits(pricing: Pricing, limits: SearchLimits, screen: Screen, rejections: Rejections) -> Infeasible:
    """The nearest miss in GiB, and the smallest change that lifts it."""
    short = shortfall_bytes(screen)
    nearest = int(np.argmin(np.where(short > 0, short, np.inf))) if (short > 0).any() else int(np.argmin(short))
    missing = max(float(short[nearest]), 0.0)
    rejections.counts.setdefault("does_not_fit", len(screen.kernel))
    hardware = pricing.cluster.hardware
    return Infeasible(
        f"nothing fits in {hardware.memory_gib:g} GiB of {pricing.cluster.num_gpus} × {hardware.name}: the nearest "
        f"miss, {_named(screen, nearest)}, lacks {gib(missing):.1f} GiB on a rank ({_listed(rejections)})",
        _remedy(pricing, limits),
        rejections.counts,
    )


def _remedy(pricing: Pricing, limits: SearchLimits) -> str:
    """The smallest change that makes room: unpin an axis, shorten the reserve, add GPUs; each is planned with first.

    Takes no longer than the search may, and ends there with what was not tried.
    """
    from planner.search.search import plan

    if limits.gap_fraction == 1.0:
        return _UNTRIED
    model, cluster, training, runtime = pricing.model, pricing.cluster, pricing.training, pricing.runtime
    until = time.monotonic() + limits.time_limit_s

    def works(limits: SearchLimits, num_gpus: int = cluster.num_gpus) -> bool:
        left_s = until - time.monotonic()
        if left_s <= 0:
            return False
        quick = limits.model_copy(update={"top": 1, "time_limit_s": min(QUICK_S, left_s), "gap_fraction": 1.0})
        try:
            plan(model, cluster.model_copy(update={"num_gpus": num_gpus}), training, limits=quick, runtime=runtime)
        except (Infeasible, SolverError):
            return False
        return True

    pins = [
        name
        for name in ("recompute", "micro_batch_size", "pp", "tp", "cp", "ep", "dp", "vpp", "zero_stage", "shard_size")
        if getattr(limits, name)
    ]
    for name in pins:
        if works(limits.model_copy(update={name: None})):
            return f"do not pin {name.replace('_', '-')}: with it free a layout fits"
    if limits.memory_headroom_gib and works(limits.model_copy(update={"memory_headroom_gib": 0.0})):
        return f"lower --memory-headroom from {limits.memory_headroom_gib:g} GiB to 0"
    for doubled in range(1, 9):
        enough = cluster.num_gpus << doubled
        if works(limits, enough):
            return f"it fits on {_fewest(lambda num_gpus: works(limits, num_gpus), enough, cluster.node_size)} GPUs"
    if time.monotonic() >= until:
        return _UNTRIED
    return "use GPUs with more memory, a shorter sequence or a smaller model"


def _fewest(works: Callable[[int], bool], enough: int, node: int) -> int:
    """The least number of GPUs that works, to a node, between half of `enough` and that, as far as NARROWING_S go."""
    low, high, until = enough // 2, enough, time.monotonic() + NARROWING_S
    while high - low > node and high > low + 1 and time.monotonic() < until:
        middle = (low + high) // 2 // node * node or (low + high) // 2
        if middle in (low, high):
            break
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def _listed(rejections: Rejections) -> str:
    ordered = sorted(rejections.counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} × {reason}" for reason, count in ordered) or "nothing rejected"


def _named(screen: Screen, index: int) -> str:
    s = scalar(screen.shape, index)
    extra = f" ep {s.ep}" if s.ep > 1 else ""
    return f"tp {s.tp} cp {s.cp} pp {s.pp} dp {s.dp}{extra} micro-batch {s.micro_batch_size}"
