"""Two layouts compared: their seconds and bytes item by item, and the largest cause of the difference in words."""

from __future__ import annotations

from functools import partial
from typing import Any

from planner.answer import Layout, Plan, PricedLayout
from planner.report.format import (
    BREAKDOWN,
    LEAST_SHARE,
    MEMORY,
    digits,
    fits_with,
    is_proven,
    large,
    says_bound,
    seconds,
    sentence,
)
from planner.specs.base import Fields, Spec
from planner.specs.cluster import ClusterSpec
from planner.specs.units import GIB


class Difference(Spec):
    """One item of seconds or bytes in two layouts."""

    item: str
    label: str
    best: float
    other: float

    @property
    def change(self) -> float:
        return self.other - self.best


class Cause(Spec):
    """The item in which the slower layout loses most, and why."""

    item: str
    label: str
    difference_s: float
    because: str


def step_differences(best: PricedLayout, other: PricedLayout) -> tuple[Difference, ...]:
    """The breakdowns of two steps, item by item; what differs most comes first."""
    differences = [
        Difference(
            item=name, label=label, best=getattr(best.step.breakdown, name), other=getattr(other.step.breakdown, name)
        )
        for name, label in BREAKDOWN.items()
    ]
    return tuple(sorted(differences, key=lambda difference: -abs(difference.change)))


def memory_differences(best: PricedLayout, other: PricedLayout) -> tuple[Difference, ...]:
    """Bytes of both layouts' fullest stages, item by item."""
    best_memory, other_memory = best.worst_stage.memory, other.worst_stage.memory
    return tuple(
        Difference(item=name, label=label, best=getattr(best_memory, name), other=getattr(other_memory, name))
        for name, label in MEMORY.items()
    )


def matters(difference: Difference, step_s: float) -> bool:
    """True where an item takes a share of the step that is worth showing."""
    return max(difference.best, difference.other) >= LEAST_SHARE * step_s


def largest_cause(best: PricedLayout, other: PricedLayout, cluster: ClusterSpec) -> Cause:
    """The item in which `other`, the slower layout, loses most."""
    worst = max(step_differences(best, other), key=lambda difference: difference.change)
    because = _because(worst.item, best, other, cluster)
    return Cause(item=worst.item, label=worst.label, difference_s=worst.change, because=because)


def _said(item: str, /, **names: Any) -> str:
    """The sentence of the first row of an item in causes.yaml that holds."""
    return sentence(item, "report/causes.yaml", **_WORDS, **names)


def says_slower(best: Plan, pinned: Plan, cause: Cause | None, gap_fraction: float) -> str:
    """A sentence that compares the best layout that obeys the pins with the best of all."""
    step_s = best.step.step_s
    saved = min(step_differences(best.best, pinned.best), key=lambda difference: difference.change)
    more, cost = pinned.step.step_s / step_s - 1, _more_cost(best, pinned)
    return _said("pinned", more=more, gap=gap_fraction, step_s=step_s, saved=saved, cause=cause, cost=cost)


def _more_cost(best: Plan, pinned: Plan) -> str:
    """Days and dollars that the whole run would take more, in brackets."""
    best_cost, pinned_cost = best.run_cost, pinned.run_cost
    if best_cost is None or pinned_cost is None:
        return ""
    usd = (
        f" and ${large(pinned_cost.usd - best_cost.usd)}"
        if best_cost.usd is not None and pinned_cost.usd is not None
        else ""
    )
    return f" ({digits(pinned_cost.days - best_cost.days)} days{usd} more over {large(best_cost.tokens)} tokens)"


def says_misfit(nearest: PricedLayout, cluster: ClusterSpec, headroom_gib: float) -> str:
    """A sentence that names the stage which lacks memory, how much it lacks, and what takes most of it."""
    stage, has_bytes = nearest.worst_stage, cluster.hardware.memory_bytes
    item = max((name for name in MEMORY if name != "total_bytes"), key=lambda name: int(getattr(stage.memory, name)))
    return _said(
        "misfit", layout=nearest.parallelism, stage=stage, has_bytes=has_bytes, headroom_gib=headroom_gib,
        needs_bytes=stage.memory.total_bytes, free_bytes=has_bytes - headroom_gib * GIB, item=MEMORY[item],
        most_bytes=getattr(stage.memory, item),
    )  # fmt: skip


def says_best(best: Plan) -> str:
    """A sentence that tells what was proven about the best layout."""
    search = best.search
    assert search is not None
    takes = f"{best.parallelism} takes {seconds(best.step.step_s)}"
    return _said("proof", takes=takes, search=search, proven=is_proven(search), bound=says_bound(search))


def now(constraint: str, best: Plan) -> str:
    """The distance of the best layout from a constraint, in words."""
    return _said(
        constraint, a=best.parallelism, stage=best.best.worst_stage, cluster=best.cluster,
        fit=fits_with(best.best.oom_probability),
    )  # fmt: skip


def _because(item: str, best: PricedLayout, other: PricedLayout, cluster: ClusterSpec) -> str:
    """The sentence of the first row of an item in causes.yaml that holds for two layouts."""
    return _said(
        item, best=best, other=other, a=best.parallelism, b=other.parallelism, cluster=cluster,
        domain=cluster.nvlink_domain_size, places=partial(_places, best, other),
        more_compute_s=other.step.breakdown.compute_s - best.step.breakdown.compute_s,
    )  # fmt: skip


def _places(best: PricedLayout, other: PricedLayout, group: str) -> str:
    """The tiers that a group spans where the two layouts number their ranks in different orders; else nothing."""
    a, b = (next((str(each) for each in side.placement if each.group == group), "") for side in (best, other))
    if best.rank_order == other.rank_order or a == b:
        return ""
    return f"; ranks in the order {other.rank_order} have {b or f'no {group}'}, the best's {a or f'no {group}'}"


def _largest(layout: PricedLayout) -> str:
    return large(max(stage.num_parameters for stage in layout.stages))


def _share(layout: Layout) -> str:
    batch = f"{layout.micro_batch_size} sequence{'s' if layout.micro_batch_size > 1 else ''}"
    context = f" over {layout.cp} ranks" if layout.cp > 1 else ""
    return f"tp {layout.tp} with {batch}{context} a micro-batch"


def _full_layers(layout: PricedLayout) -> int:
    return sum(stage.recompute.get("full", 0) for stage in layout.stages)


def _recomputed(layout: PricedLayout) -> str:
    chosen, layers = layout.parallelism, _full_layers(layout)
    if layers:
        return f"{layers} layers whole"
    return "none" if chosen.recompute == "none" else f"parts of every layer ({', '.join(chosen.recompute_modules)})"


def _unevenness(layout: PricedLayout) -> float:
    """Fraction by which the slowest stage computes longer than the mean."""
    times = [stage.forward_s + stage.backward_s for stage in layout.stages]
    return max(times) * len(times) / sum(times) - 1 if sum(times) else 0.0


def _group(layout: Layout) -> str:
    """The ranks that exchange, and those that weights are sharded over where they are fewer."""
    ranks = layout.dp * layout.cp
    sharded = layout.zero_stage > 0 and layout.shard_size < ranks
    return f"{ranks} ranks" + (f" ({layout.shard_size} a shard group)" if sharded else "")


def _filled(layout: Layout) -> str:
    chunks = f" in {layout.vpp} chunks" if layout.vpp > 1 else ""
    return f"{layout.pp} stage{'s' if layout.pp > 1 else ''}{chunks} for {layout.num_microbatches} micro-batches"


def _shards(layout: Layout) -> str:
    return f"over {layout.shard_size} ranks" if layout.zero_stage else "over none"


_WORDS: Fields = {
    "recomputed": {"none": 0, "selective": 1, "full": 2}, "share": _share, "full": _full_layers,
    "what": _recomputed, "uneven": _unevenness, "group": _group, "filled": _filled, "shards": _shards,
    "largest": _largest,
}  # fmt: skip
"""The names that the rows of causes.yaml have beside those of the two layouts."""
