"""Every shape worth pricing, as arrays: the axes, the rules, and a typed reason for each shape that is not legal.

First stand the schedules that a shape may run, and the number of chunks per rank with each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np

from planner.errors import SpecError
from planner.layout.seconds import MOST_ACTIONS, MOST_STAGES, groups_pay, replayed_actions
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import host_rule
from planner.schedule.orders import SCHEDULES, violation
from planner.search.case import Case
from planner.search.chunks import chunk_lengths
from planner.shape import RANK_ORDERS, SIZES, BoolArray, FloatArray, IntArray, Shape, distinct, divisors
from planner.specs.model import ModelSpec
from planner.specs.problems import closest, nearest
from planner.specs.training import SearchLimits, TrainingSpec
from planner.trainers.load import RUNTIMES, load_runtime
from planner.trainers.rules.recipe import rules_for
from planner.trainers.rules.rule_rows import Rule, rules_of
from planner.trainers.spec import RuntimeSpec

DEFAULT_SCHEDULES = tuple(kind.name for kind in SCHEDULES.values() if kind.is_tried_by_default)
"""Schedules that are tried if the user names none."""


def schedule_options(
    shape: Shape, model: ModelSpec, limits: SearchLimits, runtime: RuntimeSpec
) -> list[tuple[Shape, str]]:
    """One scalar shape with every schedule and vpp it may run, plain 1F1B first."""
    options = schedules_of(int(shape.pp), int(shape.num_microbatches), model, limits, runtime)
    return [(replace(shape, vpp=vpp), name) for name, vpp in options]


def schedules_of(
    pp: int, num_microbatches: int, model: ModelSpec, limits: SearchLimits, runtime: RuntimeSpec
) -> list[tuple[str, int]]:
    """Every schedule and vpp that pp ranks may run with so many micro-batches.

    A single rank runs the schedule `none`. It is tried if the user names no schedule, or one that needs no pipeline.
    """
    alone = ("none",) if limits.schedule is None or any(map(_runs_without_pipeline, limits.schedule)) else ()
    return [
        (name, vpp)
        for name in (schedules_tried(limits, runtime) if pp > 1 else alone)
        for vpp in chunks_tried(name, pp, model, limits, runtime)
        # where torch runs groups of other sizes than pp, those are not tried
        if not violation(name, pp, vpp, num_microbatches)
    ]


def _runs_without_pipeline(name: str) -> bool:
    """True for a name with which the user is also content with a layout of one stage."""
    return name == "auto" or (name in SCHEDULES and SCHEDULES[name].runs_without_pipeline)


def chunks_tried(schedule: str, pp: int, model: ModelSpec, limits: SearchLimits, runtime: RuntimeSpec) -> Iterator[int]:
    """Numbers of chunks per rank that the schedule allows and the model's layers fill."""
    kind, layers = SCHEDULES[schedule], model.num_hidden_layers
    # Megatron-LM interleaves over two ranks only where sends and receives overlap compute (arguments.py)
    interleaves = pp > 2 or runtime.interleaved_p2p_overlap
    for vpp in limits.vpp or range(kind.min_vpp, min(kind.max_vpp, (layers + 2) // pp) + 1):
        if vpp == 1 or (interleaves and cuts_evenly(layers, pp * vpp, runtime.head_only_stage)):
            yield int(vpp)


def schedules_tried(limits: SearchLimits, runtime: RuntimeSpec) -> tuple[str, ...]:
    """Schedules that the search may use; the first is always `none`, for shapes without a pipeline."""
    wanted = limits.schedule or DEFAULT_SCHEDULES
    if "auto" in wanted:
        # a compiled layer's backward does not come apart (RuntimeSpec.for_schedules)
        apart = (kind for kind in SCHEDULES.values() if not (runtime.compiled and kind.splits_backward))
        wanted = (*wanted, *(kind.name for kind in apart if kind.is_measured_against))
    return ("none", *(n for n in dict.fromkeys(wanted) if n in runtime.schedules and n in SCHEDULES and n != "none"))


def no_schedule(shape: Shape, model: ModelSpec, limits: SearchLimits, runtime: RuntimeSpec) -> str:
    """A sentence on why no schedule that may be used runs this shape."""
    pp, steps = int(shape.pp), int(shape.num_microbatches)
    for vpp in limits.vpp or (1,):
        for name in reversed(schedules_tried(limits, runtime)):
            error = violation(name, pp, vpp, steps)
            if error is not None and name != "none":
                return error.message
            if error is None and vpp > 1:
                layers = model.num_hidden_layers
                return f"{layers} layers cannot be cut into pp {pp} · vpp {vpp} = {pp * vpp} chunks of like size"
    return f"no schedule runs pp {pp} with {steps} micro-batches"


def by_runtime(limits: SearchLimits, runtime: RuntimeSpec) -> list[tuple[RuntimeSpec, SearchLimits]]:
    """The runtimes that price the schedules to be tried, each with limits that name its schedules.

    A compiled layer cannot split its backward, so schedules that split it may have an uncompiled runtime of their own.
    """
    named, uncompiled = limits.schedule or (), runtime.for_schedules(split_backward=True)
    split = tuple(name for name in named if name in SCHEDULES and SCHEDULES[name].splits_backward)
    if uncompiled is runtime or not split:
        return [(runtime, limits)]
    unsplit = tuple(name for name in named if name not in split)
    parts = ((runtime, unsplit), (uncompiled, split))
    return [(priced_as, limits.model_copy(update={"schedule": names})) for priced_as, names in parts if names]


def check_expressible(limits: SearchLimits, runtime: RuntimeSpec) -> None:
    """Raise SpecError for an unknown schedule, and for a schedule or recompute mode that the trainer does not have."""
    if "selective" in (limits.recompute or ()) and not runtime.has_sequence_parallel:
        raise SpecError(f"recompute: {runtime.name} has no selective recompute", "one of none, full")
    for name in limits.schedule or ():
        if name in runtime.schedules:
            continue
        known = name in SCHEDULES or name == "auto"
        raise SpecError(
            f"schedule: {runtime.name} cannot run {name!r}" if known else f"schedule: unknown {name!r}",
            f"one of {', '.join(runtime.schedules)}{'' if known else _nearest(name, runtime)}",
        )


def _nearest(name: str, runtime: RuntimeSpec) -> str:
    """The trainer's schedules that are spelt most like it, else a trainer that has one that is."""
    others = ((other.name, kind) for other in map(load_runtime, RUNTIMES) for kind in closest(name, other.schedules))
    elsewhere = (f"; --runtime {trainer} has {kind}" for trainer, kind in others)
    return nearest(name, runtime.schedules) or next(elsewhere, "")


def cuts_evenly(num_layers: int, num_stages: int, empty_ends: bool) -> bool:
    """True if equal stages hold the layers; the first and the last may hold fewer (none, with `empty_ends`)."""
    return next(chunk_lengths(num_layers, num_stages, empty_ends), None) is not None


Grid = dict[str, IntArray]

MAX_MICRO_BATCH_TOKENS = 1 << 16
"""Most tokens of a micro-batch that is tried; with more, GEMMs gain nothing and activations grow."""
MAX_CP = 512
OWN, DP_OUTERMOST = RANK_ORDERS


@dataclass(slots=True)
class Rejections:
    """Counts of rejected shapes by reason, with one example each."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, count: int, example: str) -> None:
        if count:
            self.counts[reason] = self.counts.get(reason, 0) + count
            self.examples.setdefault(reason, example)

    def leave_unasked(self, limits: SearchLimits) -> None:
        """Leave out the reasons of plain arithmetic about sizes that nobody asked for."""
        for reason, axes in _ARITHMETIC.items():
            if all(getattr(limits, axis) is None for axis in axes):
                self.counts.pop(reason, None)
                self.examples.pop(reason, None)


_ARITHMETIC = {
    "heads_not_divisible_by_tp": ("tp",), "kv_heads_not_divisible_by_tp": ("tp",),
    "intermediate_size_not_divisible_by_tp": ("tp",), "shared_expert_not_divisible_by_tp": ("tp",),
    "expert_ranks_not_divisible_by_instances": ("ep", "etp"), "experts_not_divisible_by_ep": ("ep",),
    "moe_intermediate_size_not_divisible_by_etp": ("etp",),
    "no_data_parallel_size": ("tp", "cp", "pp", "ep", "dp", "micro_batch_size"),
}  # fmt: skip
"""Reasons that say only that sizes do not divide each other, and the axes that they are about."""


@dataclass(slots=True)
class Bar:
    """The step that shapes have to beat; those that cannot, whatever pp and dp, are not multiplied out."""

    step_s: float
    least_work_s: Callable[[Shape], FloatArray]
    """At most the seconds of a micro-batch through the whole model, for kernels of any axes that broadcast."""
    passed_over_s: float = np.inf
    """The least step in seconds that any shape passed over may have."""

    def least_step_s(
        self, rows: IntArray, batches: Sequence[int], training: TrainingSpec, gpus: int, sequence_parallel: bool
    ) -> FloatArray:
        """The least step of each kernel (tp, cp, ep, etp) and micro-batch size on all GPUs, without any idle second.

        Every size of every axis is priced once with each other, as a grid that broadcasts.
        """
        axes = [np.array(distinct(column)) for column in rows.T]
        tp, cp, ep, etp, batch = np.ix_(*axes, np.asarray(batches))
        kernels = Shape(
            tp=tp, cp=cp, ep=ep, etp=etp, micro_batch_size=batch, seq_length=training.seq_length, dp=ep * etp,
            sequence_parallel=(tp > 1) * int(sequence_parallel),
        )  # fmt: skip
        work_s = np.broadcast_to(
            self.least_work_s(kernels), np.broadcast_shapes(*map(np.shape, (tp, cp, ep, etp, batch)))
        )
        own_s = work_s[tuple(np.searchsorted(axis, column) for axis, column in zip(axes, rows.T, strict=True))]
        share = (rows[:, 0] * rows[:, 1])[:, None] / gpus
        return np.asarray(training.global_batch_size / np.asarray(batches) * own_s * share)

    def passes(self, least_s: FloatArray) -> BoolArray:
        """True where a step of at least so many seconds may beat the bar; the others are remembered."""
        promising: BoolArray = least_s < self.step_s
        self.passed_over_s = min(self.passed_over_s, float(least_s[~promising].min(initial=np.inf)))
        return promising


def _pinned(pins: Sequence[int] | None, free: Sequence[int]) -> list[int]:
    return sorted(set(pins)) if pins is not None else list(free)


def enumerate_shapes(case: Case, bar: Bar | None = None) -> tuple[Shape, Rejections]:
    """All legal (tp, cp, ep, etp, pp, micro-batch, ZeRO stage, dp, shard group, order), with as much dp as is allowed.

    Interleaving and recompute are chosen later, for each shape. dp is the largest divisor of
    global_batch_size / micro_batch_size that needs no more ranks than there are GPUs, or that leaves as many
    micro-batches as the schedules ask for (`_data_parallel`). The other GPUs stay spare. Shapes that cannot pass the
    bar are left out, and not counted.
    """
    model, cluster, training, limits, runtime = case.model, case.cluster, case.training, case.limits, case.runtime
    rejections = Rejections()
    grid, least_s = _grid(case, rejections, bar)
    rows, dp = _data_parallel(grid, case)
    if bar is not None:
        ranks = np.maximum(dp, 1) * (grid["tp"] * grid["cp"] * grid["pp"])[rows]
        promising = bar.passes(np.where(dp > 0, least_s[rows] * cluster.num_gpus / ranks, 0.0))
        rows, dp = rows[promising], dp[promising]
    grid = _rows(grid, rows)
    _reject(grid, dp == 0, rejections, case)
    pricing = Pricing(model=model, cluster=cluster, training=training, runtime=runtime)
    grid, dp = _rows(grid, dp > 0), dp[dp > 0]
    rows, shard_size = _shard_groups(grid, dp, pricing, limits)
    shape = _shape(_rows(grid, rows), dp[rows], shard_size, case)
    orders: tuple[str, ...] = limits.rank_order or runtime.rank_orders
    if OWN not in orders:
        shape = replace(shape, dp_outermost=np.ones_like(shape.dp))
    rules = (*_own_rules(case), *rules_for(runtime), host_rule(pricing))
    shape = _obeying(rules, shape, case, rejections)
    if np.size(shape.tp):
        rejections.leave_unasked(limits)
    return _with_rank_orders(shape, case, orders, rules), rejections


def _obeying(rules: Sequence[Rule], shape: Shape, case: Case, rejections: Rejections) -> Shape:
    """The shapes that break no rule; the others are counted under the first that each breaks."""
    for rule in rules:
        holds = np.broadcast_to(rule.holds(case.model, case.training, shape), np.shape(shape.tp))
        if not holds.all():
            first = scalar(shape, int(np.argmin(holds)))
            rejections.add(rule.reason, int((~holds).sum()), rule.message(case.model, case.training, first))
            shape = shape.take(holds)
    return shape


def _with_rank_orders(shape: Shape, case: Case, orders: tuple[str, ...], rules: Sequence[Rule]) -> Shape:
    """The shapes (arrays) in each of the `orders` that may be the faster one.

    Data parallelism outermost brings stages closer together and replicas further apart. It is left out where no tier
    tells the stages' places apart: where none is wider than one stage of a replica and narrower than all ranks.
    """
    if DP_OUTERMOST not in orders or OWN not in orders or not np.size(shape.tp):
        return shape
    sizes = [tier.num_gpus for tier in case.cluster.tiers[:-1] if tier.num_gpus is not None]
    within, whole = np.asarray(shape.tp * shape.cp), np.asarray(shape.num_ranks)
    differs = (np.asarray(shape.pp) > 1) & (np.asarray(shape.dp) > 1)
    differs &= np.sum([(within < size) & (size < whole) for size in sizes], axis=0) > 0
    other = replace(shape, dp_outermost=np.ones_like(shape.tp)).take(differs)
    other = _obeying(rules, other, case, Rejections())
    columns = {
        name: np.concatenate([np.broadcast_to(getattr(part, name), np.shape(part.tp)) for part in (shape, other)])
        for name in SIZES
    }
    return Shape(**columns)


def scalar(shape: Shape, index: int) -> Shape:
    """One shape of many, as Python numbers."""
    row = shape.take(index)
    return Shape(**{name: int(getattr(row, name)) for name in SIZES})


def num_rows(case: Case) -> int:
    """The most combinations of tensor, context, expert and pipeline sizes and micro-batches that may be listed."""
    return prod(map(len, _axes(case).values())) * (1 if case.model.moe is None else 2)


def _axes(case: Case) -> dict[str, list[int]]:
    """The values of each axis that is tried by itself."""
    model, limits, gpus, seq_length = case.model, case.limits, case.cluster.num_gpus, case.training.seq_length
    widest = gpus if limits.tp_across_nodes else min(case.cluster.nvlink_domain_size, gpus)
    largest = max(1, MAX_MICRO_BATCH_TOKENS // seq_length)
    free: dict[str, Sequence[int]] = {
        "tp": divisors(model.num_attention_heads, widest),
        "cp": divisors(max(seq_length // 2, 1), min(gpus, MAX_CP)) if seq_length > 1 else [1],
        "ep": [1] if model.moe is None else divisors(model.moe.num_experts, gpus),
        "pp": range(1, min(model.num_hidden_layers, gpus, MOST_STAGES) + 1),
        "micro_batch_size": divisors(case.training.global_batch_size, largest),
    }
    return {axis: _pinned(getattr(limits, axis), values) for axis, values in free.items()}


def _of_layers(case: Case, axes: dict[str, list[int]]) -> list[tuple[int, int, int, int]]:
    """The ways to share a layer: tp, cp, ep and etp."""
    gpus, moe, pairs = case.cluster.num_gpus, case.model.moe, list(product(axes["tp"], axes["cp"]))
    # shapes with more ranks than GPUs are no shapes of this cluster; pinned ones are kept to be refused with a reason
    pairs = [(tp, cp) for tp, cp in pairs if tp * cp <= gpus] or pairs
    return [
        (tp, cp, ep, etp)
        for (tp, cp), ep in product(pairs, axes["ep"])
        for etp in _pinned(case.limits.etp, [tp] if moe is None else sorted({1, tp}))
    ]


def _grid(case: Case, rejections: Rejections, bar: Bar | None) -> tuple[Grid, FloatArray]:
    """The raw axes, multiplied out, and the least step in seconds that each row may have; 0 without a bar."""
    model, training, limits, runtime = case.model, case.training, case.limits, case.runtime
    gpus, axes = case.cluster.num_gpus, _axes(case)
    pps, batches = axes["pp"], axes["micro_batch_size"]
    zeros = _pinned(limits.zero_stage, _useful_zero_stages(runtime))
    rows = np.array(_of_layers(case, axes), dtype=np.int64).reshape(-1, 4)
    split = model.num_attention_heads % rows[:, 0] == 0
    if split.any():
        # refused before they are multiplied out, and counted as what they would have been
        lost = int((~split).sum()) * len(pps) * len(batches) * len(zeros)
        tp = int(rows[~split][0, 0]) if lost else 0
        (heads,) = rules_of("heads")
        rejections.add(heads.reason, lost, heads.message(model, training, Shape(tp=tp)))
        rows = rows[split]
    least_s = np.zeros((len(rows), len(batches)))
    if bar is not None and rows.size and batches:
        least_s = bar.least_step_s(rows, batches, training, gpus, runtime.has_sequence_parallel)
    promising = np.ones_like(least_s, dtype=bool) if bar is None else bar.passes(least_s)
    ranks, stages, zero = (rows[:, 0] * rows[:, 1])[:, None], np.asarray(pps, dtype=np.int64), np.asarray(zeros)
    fits = (ranks * stages <= gpus)[:, :, None, None]
    if not runtime.shards_pipelines:
        # not even counted, unless pinned: there are as many as all others
        fits = fits & ((zero < 2) | (stages[:, None] == 1) | (limits.zero_stage is not None))[:, None, :]
    if not fits.any():  # they are kept to be refused with a reason
        fits = np.ones_like(fits)
    chosen = np.nonzero(fits & promising[:, None, :, None] & np.ones(len(zero), dtype=bool))
    tp, cp, ep, etp = rows[chosen[0]].T
    batch = np.asarray(batches, dtype=np.int64)[chosen[2]]
    columns = {"tp": tp, "cp": cp, "ep": ep, "etp": etp, "pp": stages[chosen[1]], "micro_batch_size": batch}
    columns["zero_stage"] = zero[chosen[3]].astype(np.int64)
    return columns, least_s[chosen[0], chosen[2]]


def _rows(grid: Grid, index: Any) -> Grid:
    return {name: column[index] for name, column in grid.items()}


def _useful_zero_stages(runtime: RuntimeSpec) -> list[int]:
    """ZeRO stages worth trying: not 0 if 1 can be had with the same bytes per parameter, since it needs more memory."""
    return [stage for stage in runtime.zero_stages if stage > 0 or 1 not in runtime.zero_stages or runtime.sharding]


def _data_parallel(grid: Grid, case: Case) -> tuple[IntArray, IntArray]:
    """Rows of the grid, one for each data-parallel size to try, and the sizes; 0 for a row without any.

    The largest size is tried, since fewer ranks compute longer. If it leaves fewer micro-batches than some schedule
    asks for, or no multiple of pp, then the largest size that leaves enough of them is tried, too.
    """
    leasts = {SCHEDULES[name].min_microbatches_per_rank for name in case.limits.schedule or () if name in SCHEDULES}
    asked = [(0, False), (1, False), *((least, True) for least in sorted(leasts | {1}) if least)]
    most = [case.cluster.num_gpus // (grid["tp"] * grid["cp"] * grid["pp"])]
    for least, even in asked:  # what suits the later suits those before
        most.append(_largest(grid, case, most[-1], least, even))
    sizes = np.stack(most[1:])
    which, rows = np.nonzero((np.diff(sizes, axis=0, prepend=-1) != 0) & ((sizes > 0) | (sizes[0] == 0)))
    return rows, sizes[which, rows]


def _largest(grid: Grid, case: Case, most: IntArray, least: int, even: bool) -> IntArray:
    """The largest dp up to `most` of each row that leaves `least`·pp micro-batches or more, with `even` a multiple of
    pp; else 0."""
    num_gpus, global_batch, dps = case.cluster.num_gpus, case.training.global_batch_size, case.limits.dp
    dp = np.zeros_like(most)
    slots = grid["tp"] * grid["cp"]
    experts = grid["ep"] * grid["etp"]
    for batch in distinct(grid["micro_batch_size"]):
        if global_batch % batch:
            continue
        microbatches = global_batch // batch
        sizes = np.array([0] + [d for d in divisors(microbatches, num_gpus) if dps is None or d in dps])
        steps = microbatches // np.maximum(sizes, 1)
        rows = np.flatnonzero(grid["micro_batch_size"] == batch)
        index = np.searchsorted(sizes, most[rows], side="right") - 1
        # step down to a size that suits the schedule and fits the expert grid; the size 0 suits none and ends the loop
        open_rows = np.arange(len(rows))
        while len(open_rows):
            at, those = index[open_rows], rows[open_rows]
            few = (steps[at] < least * grid["pp"][those]) | (even & (steps[at] % grid["pp"][those] != 0))
            crowded = slots[those] * sizes[at] % experts[those] != 0
            open_rows = open_rows[(few | crowded) & (sizes[at] > 0)]
            index[open_rows] -= 1
        dp[rows] = sizes[index]
    return dp


def _shard_groups(grid: Grid, dp: IntArray, pricing: Pricing, limits: SearchLimits) -> tuple[IntArray, IntArray]:
    """Rows of the grid, one for each group size to shard over, and the number of ranks in the group.

    A group has all dp·cp ranks. If weights or gradients are sharded, groups of one NVLink domain (and its doublings,
    where stages of a pipeline are sharded too) are tried as well; then only reductions leave the group (HSDP). If the
    optimizer alone is sharded, groups of one domain are tried where they pay: weights stay inside, but more bytes of
    gradients are reduced between them. Pinned sizes are kept, to be refused with a reason.
    """
    every_row, all_ranks, zero_stage = np.arange(len(dp)), dp * grid["cp"], grid["zero_stage"]
    groups, grouped = [(every_row, all_ranks)], np.isin(zero_stage, pricing.runtime.grouped_zero_stages)
    if limits.shard_size is not None:
        pinned = zero_stage >= 1
        groups, grouped = [(every_row[~pinned], all_ranks[~pinned])], np.zeros_like(grouped)
        groups += [(every_row[pinned], np.full(int(pinned.sum()), size)) for size in sorted(set(limits.shard_size))]
    size = 2 ** np.floor(np.log2(np.maximum(pricing.cluster.nvlink_domain_size // grid["tp"], 1))).astype(np.int64)
    alone = np.flatnonzero(grouped & (zero_stage == 1) & (size < all_ranks))
    of_all = Shape(
        **_rows(grid, alone), dp=dp[alone], shard_size=all_ranks[alone], seq_length=pricing.training.seq_length
    )
    grouped[zero_stage == 1] = False
    grouped[alone] = groups_pay(pricing, of_all, replace(of_all, shard_size=size[alone]))
    while (smaller := grouped & (size < all_ranks)).any():
        usable = np.flatnonzero(smaller & (all_ranks % size == 0) & (size % grid["cp"] == 0))
        groups.append((usable, size[usable]))
        size, grouped = 2 * size, grouped & (zero_stage >= 2) & pricing.runtime.shards_pipelines
    return np.concatenate([rows for rows, _ in groups]), np.concatenate([sizes for _, sizes in groups])


def _reject(grid: Grid, rows: BoolArray, rejections: Rejections, case: Case) -> None:
    """Count the rows without any data-parallel size, by the reason why they have none."""
    if not rows.any():
        return
    num_gpus, global_batch = case.cluster.num_gpus, case.training.global_batch_size
    ranks = grid["tp"] * grid["cp"] * grid["pp"]
    batch = global_batch % grid["micro_batch_size"] != 0
    crowded = ranks > num_gpus
    for reason, mask, text in (
        ("more_ranks_than_gpus", rows & crowded, "tp {tp} · cp {cp} · pp {pp} exceeds " + f"{num_gpus} GPUs"),
        ("global_batch_not_divisible", rows & ~crowded & batch,
         f"global_batch_size {global_batch} is no multiple of micro_batch_size {{micro_batch_size}}"),
        (
            "no_data_parallel_size", rows & ~crowded & ~batch,
            "no dp suits tp {tp}, cp {cp}, pp {pp}, ep {ep}, etp {etp}, "
            f"micro-batch {{micro_batch_size}} on {num_gpus} GPUs at global batch {global_batch}",
        ),
    ):  # fmt: skip
        if mask.any():
            first = int(np.argmax(mask))
            rejections.add(reason, int(mask.sum()), text.format(**{k: int(v[first]) for k, v in grid.items()}))


def _shape(grid: Grid, dp: IntArray, shard_size: IntArray, case: Case) -> Shape:
    """The grid as a `Shape` of arrays, not interleaved."""
    num_microbatches = case.training.global_batch_size // (dp * grid["micro_batch_size"])
    sequence_parallel = ((grid["tp"] > 1) & case.runtime.has_sequence_parallel).astype(np.int64)
    return Shape(
        **grid, dp=dp, num_microbatches=num_microbatches, seq_length=case.training.seq_length, shard_size=shard_size,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip


def _own_rules(case: Case) -> tuple[Rule, ...]:
    """Rules that hold for every trainer."""
    domain, fabric = case.cluster.nvlink_domain_size, case.cluster.hardware.fabric
    return (
        *rules_of("etp"),
        Rule(
            "more_stages_than_layers",
            lambda m, t, s: s.pp * s.vpp <= m.num_hidden_layers,
            lambda m, t, s: f"pp {s.pp} · vpp {s.vpp} stages for {m.num_hidden_layers} layers",
        ),
        Rule(
            "too_many_actions",
            lambda m, t, s: (replayed_actions(s) <= MOST_ACTIONS) & (s.pp * s.vpp <= MOST_STAGES),
            lambda m, t, s: (
                f"pp {s.pp} · vpp {s.vpp}: more than {MOST_STAGES:,} stages, or {MOST_ACTIONS:,} actions to replay"
            ),
        ),
        Rule(
            "tp_across_domains",
            lambda m, t, s: (s.tp <= domain) | case.limits.tp_across_nodes,
            lambda m, t, s: f"tp {s.tp} leaves the {fabric} domain of {domain} GPUs (allow it with --tp-across-nodes)",
        ),
    )
