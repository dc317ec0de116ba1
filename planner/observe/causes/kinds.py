"""The signs as data: the pattern in words, how often a run without a fault shows it, and what would show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from planner.observe.causes.needs import (
    ALL_TRACES,
    ARGUMENTS,
    BATCH_TIMER,
    LOG,
    MEMORY_LOG,
    PLAN,
    SNAPSHOT,
    STAGE_TRACES,
    TIMERS,
    TRACE,
    Need,
)
from planner.observe.causes.signs import exchanges, host, kernels, layout, memory, ranks, steps
from planner.observe.causes.signs.seen import Seen
from planner.observe.causes.signs.sign import Sign


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of sign."""

    name: str
    says: str
    see: Callable[[Seen], Sign | None]
    """Looks for it; None where the files cannot show it."""
    without: float
    """Probability that a run with no fault shows it: thresholds are such that one in 20 to 50 does."""
    needs: Need
    """The measurement that would show it."""
    is_own: bool = True
    """False where it says that something is slow, and nothing of what."""


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        # one in ten lies above an 80% interval
        Kind("slower", "the step is longer than predicted", steps.slower, 0.1, PLAN, is_own=False),
        Kind("slower_run", "the step is longer than in the earlier run", steps.slower_run, 0.1, PLAN, is_own=False),
        Kind("passes_longer", "passes are longer than planned on every stage", kernels.passes_longer, 0.1, TIMERS,
             is_own=False),
        Kind("uneven", "steps differ", steps.uneven, 0.05, LOG, is_own=False),
        # of MLPerf's longest GPT-3 runs some drift by 20%, without a cause that is known (docs/OBSERVE.md)
        Kind("drifting", "steps get longer", steps.drifting, 0.1, LOG, is_own=False),
        Kind("spells", "spells of slow steps", steps.spells, 0.1, LOG, is_own=False),
        Kind("at_times", "single slow steps", steps.at_times, 0.1, LOG, is_own=False),
        Kind("regularly", "slow steps at equal distances", steps.regularly, 0.1, LOG, is_own=False),
        Kind("collecting", "slow steps where garbage is collected", steps.collecting, 0.02, LOG),
        Kind("saving", "checkpoints take time of training", steps.saving, 0.1, LOG),
        Kind("computes_longer", "one rank computes longer than its peers", ranks.computes_longer, 0.02, STAGE_TRACES),
        Kind("comes_late", "one rank stands still while others wait for it", ranks.comes_late, 0.02, STAGE_TRACES),
        Kind("stage_longer", "one stage computes longer than its layers say", ranks.stage_longer, 0.02, ALL_TRACES),
        Kind("ranks_apart", "a timer differs over the ranks", ranks.ranks_apart, 0.05, TIMERS),
        Kind("late_changes", "every rank waits in exchanges of experts", exchanges.late_changes, 0.02, STAGE_TRACES),
        Kind("experts_differ", "ranks differ in products alone", ranks.experts_differ, 0.05, STAGE_TRACES),
        Kind("slower_than_before", "transfers slower than in the earlier run", exchanges.slower_than_before, 0.03,
             STAGE_TRACES),
        *(
            Kind(f"slow_{group}", f"{group} transfers slower than their links",
                 partial(exchanges.slow, group=group), 0.02, STAGE_TRACES)
            for group in exchanges.GROUPS
        ),
        *(
            Kind(f"long_{group}", f"{group} exchanges run longer than planned", partial(exchanges.long, group=group),
                 0.05, TRACE)
            for group in exchanges.GROUPS
        ),
        *(
            Kind(f"exposed_{group}", f"more {group} communication shows than planned",
                 partial(exchanges.exposed, group=group), 0.03, TRACE)
            for group in exchanges.GROUPS
        ),
        *(
            # exchanges that nothing can hide are no fault
            Kind(f"unhidden_{group}", f"{group} communication runs beside little computing",
                 partial(exchanges.unhidden, group=group), 0.3, TRACE)
            for group in ("ep", "dp")
        ),
        *(
            # a price beside what the log states: only the gain can be wrong
            Kind(f"off_{cause}", "a switch has a slower value", partial(layout.switched_off, cause=cause), 0.005,
                 ARGUMENTS)
            for cause in ("no_ep_overlap", "exposed_dp", "attention_kernel", "unfused_kernels", "host_bound", "recipe")
        ),
        Kind("longer_bubble", "stages stand still longer than planned", exchanges.longer_bubble, 0.05, ALL_TRACES),
        Kind("large_bubble", "the order of the passes leaves the step empty", layout.large_bubble, 0.2, PLAN,
             is_own=False),
        Kind("host_gaps", "GPUs wait for their hosts", host.host_gaps, 0.03, TRACE),
        Kind("short_kernels", "kernels as short as their launches", host.short_kernels, 0.2, TRACE),
        Kind("waits_for_data", "a loader of data covers gaps", host.waits_for_data, 0.01, TRACE),
        Kind("data_timer", "the timer of batches takes a share of the step", host.data_timer, 0.02, BATCH_TIMER),
        Kind("begins_late", "nothing runs at the begin of steps", host.begins_late, 0.05, TRACE),
        Kind("all_slower", "products and attention slower by one factor", kernels.all_slower, 0.04, TRACE),
        Kind("attention_slower", "attention slower than the rest", kernels.attention_slower, 0.03, TRACE),
        Kind("softmax_apart", "attention with a softmax of its own", kernels.softmax_apart, 0.02, TRACE),
        Kind("small_slower", "memory-bound kernels slower than the rest", kernels.small_slower, 0.04, TRACE),
        Kind("many_small", "memory-bound kernels take most of computing", kernels.many_small, 0.05, TRACE),
        Kind("grows", "memory grows with the steps", memory.grows, 0.02, MEMORY_LOG),
        # 5 of 24 public logs keep a third more than they allocate (docs/OBSERVE.md), and work
        Kind("reserved", "far more reserved than allocated", memory.reserved, 0.05, MEMORY_LOG),
        Kind("retried", "the allocator had to try again", memory.retried, 0.02, MEMORY_LOG),
        Kind("refused", "an allocation failed although enough was free", memory.refused, 0.01, SNAPSHOT),
        Kind("above_plan", "more memory than planned", memory.above_plan, 0.05, PLAN, is_own=False),
        Kind("recomputes_with_room", "recomputed although memory is left", layout.recomputes_with_room, 0.01, PLAN),
    )
}  # fmt: skip
"""Every kind of sign by its name; another is a row here and a function in `signs`."""


def signs_of(seen: Seen) -> dict[str, Sign]:
    """The signs that the files can show, seen or not."""
    found = {name: kind.see(seen) for name, kind in KINDS.items()}
    return {name: sign for name, sign in found.items() if sign is not None}
