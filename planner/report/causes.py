"""Two layouts compared: their seconds and bytes item by item, and the largest cause of the difference in words."""

from __future__ import annotations

from dataclasses import dataclass

from planner.answer import Layout, Plan, PricedLayout
from planner.report.format import (
    BREAKDOWN,
    LEAST_SHARE,
    MEMORY,
    digits,
    fits_with,
    gibibytes,
    is_proven,
    large,
    percent,
    says_bound,
    seconds,
)
from planner.specs.base import Spec
from planner.specs.cluster import ClusterSpec
from planner.specs.units import GIB

_RECOMPUTED = {"none": 0, "selective": 1, "full": 2}


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
    because = _REASONS[worst.item](_Pair(best, other, cluster))
    return Cause(item=worst.item, label=worst.label, difference_s=worst.change, because=because)


def says_slower(best: Plan, pinned: Plan, cause: Cause | None, gap_fraction: float) -> str:
    """A sentence that compares the best layout that obeys the pins with the best of all."""
    if cause is None:
        return "It is what the planner chooses by itself."
    more = pinned.step.step_s / best.step.step_s - 1
    if more < -gap_fraction:
        saved = min(step_differences(best.best, pinned.best), key=lambda difference: difference.change)
        much = f"{saved.label}, {seconds(-saved.change, best.step.step_s)} less"
        return f"It is {percent(-more)} faster, mostly by {much}: the search does not try it unless it is asked to."
    if more <= gap_fraction:
        much = f"{percent(abs(more), 2)} {'slower' if more >= 0 else 'faster'}"
        return f"It is as fast: {much}, and a search is exact to {percent(gap_fraction)}."
    lost = f"{cause.label} (+{seconds(cause.difference_s, best.step.step_s)})"
    return f"It fits and is {percent(more)} slower{_more_cost(best, pinned)}, mostly by {lost}: {cause.because}."


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
    stage, capacity = nearest.worst_stage, cluster.hardware.memory_bytes - headroom_gib * GIB
    memory = stage.memory
    item = max((name for name in MEMORY if name != "total_bytes"), key=lambda name: int(getattr(memory, name)))
    headroom = f" less {headroom_gib:g} of headroom" if headroom_gib else ""
    return (
        f"It does not fit. The nearest miss, {nearest.parallelism}, needs {gibibytes(memory.total_bytes)} GiB on stage "
        f"{stage.stage}, {gibibytes(memory.total_bytes - capacity)} GiB more than the GPU's "
        f"{gibibytes(cluster.hardware.memory_bytes)}{headroom}; most of it are {MEMORY[item]}, "
        f"{gibibytes(getattr(memory, item))} GiB."
    )


def says_best(best: Plan) -> str:
    """A sentence that tells what was proven about the best layout."""
    report, step_s = best.search, best.step.step_s
    assert report is not None
    short = "" if is_proven(report) else f"it is within {percent(report.gap, 2)} of what could be proven: "
    if report.outcome == "feasible":
        short = "time was up before it was proven the fastest: "
    return f"{best.parallelism} takes {seconds(step_s)}, and {short}{says_bound(report)}."


def now(constraint: str, best: Plan) -> str:
    """The distance of the best layout from a constraint, in words."""
    layout, stage = best.parallelism, best.best.worst_stage
    if constraint == "memory":
        filled = stage.memory.total_bytes / best.cluster.hardware.memory_bytes
        fit = fits_with(best.best.oom_probability)
        which = f"stage {stage.stage}" if layout.pp > 1 else "the fullest GPU"
        says = f"{which} fills {percent(filled, 0)} of {gibibytes(best.cluster.hardware.memory_bytes)} GiB"
        return f"{says}, fits with {fit}" if fit else says
    if constraint == "batch":
        stages = f" over {layout.pp} stages" if layout.pp > 1 else ""
        return f"{layout.num_microbatches} micro-batches of {layout.micro_batch_size}{stages}"
    return f"tp {layout.tp} of {best.cluster.hardware.a_domain} of {best.cluster.nvlink_domain_size}"


@dataclass(frozen=True, slots=True)
class _Pair:
    """The best layout and one that is slower, which a reason is about."""

    best: PricedLayout
    other: PricedLayout
    cluster: ClusterSpec

    @property
    def a(self) -> Layout:
        """The sizes of the best."""
        return self.best.parallelism

    @property
    def b(self) -> Layout:
        """The sizes of the other."""
        return self.other.parallelism

    def compute(self) -> str:
        a, b, best, other = self.a, self.b, self.best, self.other
        if b.num_gpus_used < a.num_gpus_used:
            return f"it uses {b.num_gpus_used:,} GPUs of {self.cluster.num_gpus:,}, the best {a.num_gpus_used:,}"
        if _RECOMPUTED[b.recompute] > _RECOMPUTED[a.recompute] or _full_layers(other) > _full_layers(best):
            return f"it recomputes {_recomputed(other)}, the best {_recomputed(best)}"
        lost_s = (_unevenness(other) - _unevenness(best)) * best.step.breakdown.compute_s
        if lost_s > 0.5 * (other.step.breakdown.compute_s - best.step.breakdown.compute_s):
            return (
                f"its slowest stage computes {percent(_unevenness(other))} longer than the mean of all stages, the "
                f"best's {percent(_unevenness(best))}"
            )
        if b.tp > a.tp or b.micro_batch_size * a.cp < a.micro_batch_size * b.cp:
            return f"its matrix products are smaller and reach less of the peak: {_share(b)}, the best's {_share(a)}"
        if b.cp > a.cp:
            return f"attention works on shorter blocks over {b.cp} ranks than over {a.cp}"
        return "its matrix products and attention have shapes that reach less of the GPU's peak"

    def tensor(self) -> str:
        a, b, domain = self.a, self.b, self.cluster.nvlink_domain_size
        if b.tp > domain:
            joined = f"the {self.cluster.hardware.fabric} domain of {domain} GPUs"
            return f"tp {b.tp} leaves {joined}, so every layer waits for the network"
        if _full_layers(self.other) > _full_layers(self.best):
            return f"recomputing repeats the exchanges of a layer: it recomputes {_recomputed(self.other)}"
        if b.tp != a.tp:
            between = f"between {a.tp}" if a.tp > 1 else "not at all"
            return f"every layer's activations are exchanged between {b.tp} GPUs, in the best {between}"
        return f"it exchanges in smaller pieces: {_share(b)}, the best's {_share(a)}"

    def context(self) -> str:
        a, b = self.a, self.b
        crosses = ", across nodes" if b.tp * b.cp > self.cluster.nvlink_domain_size else ""
        ranks = f"round {a.cp}" if a.cp > 1 else "they stay where they are"
        return f"keys and values go round {b.cp} ranks{crosses}; in the best {ranks}"

    def expert(self) -> str:
        a, b, domain = self.a, self.b, self.cluster.nvlink_domain_size
        crosses = f", more than the {domain} of {self.cluster.hardware.a_domain}" if b.ep * b.etp > domain else ""
        return f"tokens travel to experts on {b.ep * b.etp} ranks{crosses}; in the best on {a.ep * a.etp}"

    def pipeline(self) -> str:
        a, b = self.a, self.b
        if a.schedule != b.schedule:
            return f"{b.schedule} waits for what stages send each other where {a.schedule} goes on computing"
        passes = f"{b.num_microbatches} micro-batches pass {b.pp} stages of {b.vpp} chunks"
        return f"{passes}; in the best {a.num_microbatches} pass {a.pp} of {a.vpp}{self.places('pp')}"

    def data(self) -> str:
        best, other = (large(max(s.num_parameters for s in side.stages)) for side in (self.best, self.other))
        return (
            f"{other} parameters a rank are exchanged over {_group(self.b)} and one micro-batch hides too little of "
            f"it; in the best {best} over {_group(self.a)}{self.places('dp')}"
        )

    def bubble(self) -> str:
        return f"filling and draining {_filled(self.b)}; in the best {_filled(self.a)}{self.places('pp')}"

    def optimizer(self) -> str:
        return f"its optimizer is sharded {_shards(self.b)}, the best's {_shards(self.a)}"

    def overhead(self) -> str:
        each = self.b.num_microbatches, self.a.num_microbatches
        return f"the host starts {each[0]} micro-batches a step, in the best {each[1]}"

    def places(self, group: str) -> str:
        """The tiers that a group spans where the two layouts number their ranks in different orders; else nothing."""
        best, other = self.best, self.other
        if best.rank_order == other.rank_order:
            return ""
        a, b = (next((str(each) for each in side.placement if each.group == group), "") for side in (best, other))
        if a == b:
            return ""
        return f"; ranks in the order {other.rank_order} have {b or f'no {group}'}, the best's {a or f'no {group}'}"


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


_REASONS = {
    "compute_s": _Pair.compute,
    "tp_comm_s": _Pair.tensor,
    "cp_comm_s": _Pair.context,
    "ep_comm_s": _Pair.expert,
    "pp_comm_s": _Pair.pipeline,
    "exposed_dp_s": _Pair.data,
    "bubble_s": _Pair.bubble,
    "optimizer_s": _Pair.optimizer,
    "overhead_s": _Pair.overhead,
}
