"""The run of a probe: a model, a grid of ranks, an action list per pipeline rank, and the messages between its actions.

Every rank reads it from a file. Sender and receiver both derive the order of messages from the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import product
from math import ceil, sqrt
from statistics import median
from typing import Any, Literal, NamedTuple

import numpy as np

from planner.schedule.actions import Action, ActionList, Schedule
from planner.specs.base import (
    Ints,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Spec,
    Texts,
    grouped,
    retired,
)
from planner.specs.model import ModelSpec

Device = Literal["cpu", "cuda"]


class ChunkSpec(Spec):
    """One virtual stage: the decoder layers [first_layer, last_layer) and what else it holds."""

    first_layer: NonNegativeInt
    last_layer: NonNegativeInt
    embedding: bool = False
    head: bool = False
    mtp: bool = False
    num_recomputed: NonNegativeInt = 0
    """Layers, the first ones, that are recomputed whole."""

    @property
    def num_layers(self) -> int:
        return self.last_layer - self.first_layer


class Place(NamedTuple):
    """Coordinates of a rank: tp innermost, then cp, dp and pp (or pp and dp), as trainers number them."""

    pp: int
    dp: int
    cp: int
    tp: int

    def __str__(self) -> str:
        return f"stage {self.pp}, dp {self.dp}, cp {self.cp}, tp {self.tp}"


class ProbeRun(Spec):
    """One run of a probe. Every rank finds its own part in it."""

    model: ModelSpec
    device: Device = "cpu"
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    tp: PositiveInt = 1
    dp: PositiveInt = 1
    ep: PositiveInt = 1
    cp: PositiveInt = 1
    """Ranks among which each sequence is split."""
    dp_outermost: bool = False
    """Ranks are numbered with data parallelism outermost (tp-cp-ep-pp-dp); without: with pipelines outermost."""
    sequence_parallel: bool = False
    zero: bool = True
    """Optimizer state is sharded over data-parallel ranks (ZeRO-1)."""
    dp_stands_for: PositiveInt = 1
    """Number of the plan's data-parallel ranks that each running one represents; its shard of optimizer state is as
    small as theirs."""
    fully_sharded: bool = False
    """Weights and gradients are sharded over data-parallel ranks too (ZeRO-3)."""
    micro_batch_size: PositiveInt = 1
    seq_length: PositiveInt
    """Tokens of a sequence that one rank holds: 1/cp of it."""
    schedule: str
    ranks: tuple[Texts, ...]
    """Actions of each pipeline rank, spelled as torch does: 3F0."""
    stage_to_rank: Ints
    num_microbatches: PositiveInt
    num_directions: PositiveInt = 1
    chunks: tuple[ChunkSpec, ...]
    """One per virtual stage of one copy of the model."""
    recompute_modules: Texts = ()
    """Modules of every layer that are recomputed (selective)."""
    balanced_routing: bool = False
    check: bool = False
    """Compare loss, gradients and gradient norm with one process."""
    warm_up_steps: NonNegativeInt = 1
    num_steps: PositiveInt = 3
    """Number of steps to measure, or the least one where `most_s` says that they go on."""
    steady_s: NonNegativeFloat = 0.0
    """Seconds that steps go on to warm up after the first ones, and that an exchange is timed."""
    most_s: NonNegativeFloat = 0.0
    """Seconds for which steps are measured; 0 measures `num_steps` and no more."""
    learning_rate: PositiveFloat = 1e-3
    max_norm: NonNegativeFloat = 1.0
    """Gradients are clipped to this global norm."""
    timeout_s: PositiveFloat = 120.0
    """The longest time that any phase may take."""
    seed: int = 0

    _retired = retired("ranks_per_gpu", "backend", "sleep")

    @classmethod
    def of(cls, order: Schedule, **fields: Any) -> ProbeRun:
        """The run of a schedule; the other fields are given by name."""
        return cls(
            schedule=order.name,
            ranks=tuple(tuple(map(str, actions)) for actions in order.ranks),
            stage_to_rank=order.stage_to_rank,
            num_microbatches=order.num_microbatches,
            num_directions=order.num_directions,
            **fields,
        )

    @property
    def pp(self) -> int:
        return len(self.ranks)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def whole_seq_length(self) -> int:
        """Tokens of a whole sequence."""
        return self.seq_length * self.cp

    @cached_property
    def order(self) -> Schedule:
        """The action lists as a schedule."""
        ranks = tuple(ActionList.of(map(Action.parse, actions)) for actions in self.ranks)
        return Schedule(self.schedule, ranks, self.stage_to_rank, self.num_microbatches, self.num_directions)

    @cached_property
    def joins(self) -> tuple[Purpose, ...]:
        """The channels between two pipeline ranks, and the pipeline ranks that hold the same parameters."""
        held = {holders(self, "layers", stage) for stage in range(len(self.stage_to_rank))}
        held |= {holders(self, name, 0) for name in ("embedding.weight", "embedding.positions")}
        wires = [("wire", pair) for pair in sorted(traffic(self.order))]
        return (*wires, *(("replicas", ranks) for ranks in sorted(held) if len(ranks) > 1))

    def place(self, rank: int) -> Place:
        """Coordinates of a global rank."""
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        if self.dp_outermost:
            dp, pp = divmod(rank, self.pp)
            return Place(pp, dp, cp, tp)
        return Place(*divmod(rank, self.dp), cp, tp)

    def rank(self, place: Place) -> int:
        """Global rank at some coordinates."""
        outer = place.dp * self.pp + place.pp if self.dp_outermost else place.pp * self.dp + place.dp
        return (outer * self.cp + place.cp) * self.tp + place.tp

    def stages_of(self, pp_rank: int) -> Ints:
        """Virtual stages that a pipeline rank holds, both copies of a bidirectional schedule included."""
        return tuple(stage for stage, rank in enumerate(self.stage_to_rank) if rank == pp_rank)

    def chunk_of(self, stage: int) -> ChunkSpec:
        """The part of the model that virtual stage `stage` holds, whichever copy of the model it belongs to."""
        return self.chunks[stage % len(self.chunks)]


class Message(NamedTuple):
    """The tensor that virtual stage `stage` needs for a micro-batch: an activation (F) or a gradient (B)."""

    kind: str
    stage: int
    microbatch: int


def message_of(schedule: Schedule, action: Action) -> Message | None:
    """The message that an action sends: a forward sends to the next stage, a backward (or input gradient) to the one
    before."""
    return _between(schedule, action, -1, action.stage + (1 if action.kind == "F" else -1))


def needed_by(schedule: Schedule, action: Action) -> Message | None:
    """The message that an action waits for, which another action's `message_of` is."""
    return _between(schedule, action, 0, action.stage)


def _between(schedule: Schedule, action: Action, end: int, stage: int) -> Message | None:
    """The message of an action about `stage`: none at one end of a forward's way (0: its first stage, -1: its last), at
    the other end of a backward's."""
    kind = "F" if action.kind == "F" else "B"
    ends = 0, schedule.num_model_stages - 1
    is_alone = action.stage % schedule.num_model_stages == ends[end if kind == "F" else -1 - end]
    return None if is_alone or action.kind == "W" else Message(kind, stage, action.microbatch)


def traffic(schedule: Schedule) -> dict[tuple[int, int], list[Message]]:
    """Messages of a step between two different pipeline ranks, by (sender, receiver), in the order of the sender's
    actions."""
    return grouped(
        ((rank, to), message)
        for rank, actions in enumerate(schedule.ranks)
        for message in (message_of(schedule, action) for action in actions)
        if message is not None and (to := schedule.stage_to_rank[message.stage]) != rank
    )


Purpose = tuple[str, Ints]
"""tp, cp, dp, ep or expert_dp; or a wire, or replicas of parameters, with the pipeline ranks that it joins."""
GroupKey = tuple[Purpose, Ints]
"""The purpose of a group, and its global ranks."""


def group_keys(run: ProbeRun) -> list[GroupKey]:
    """The keys of all groups of more than one rank, in the same order on all ranks."""
    places = (Place(*at) for at in product(*map(range, (run.pp, run.dp, run.cp, run.tp))))
    return list(dict.fromkeys(key for place in places for key in groups_of(run, place).items() if len(key[1]) > 1))


def groups_of(run: ProbeRun, place: Place) -> dict[Purpose, Ints]:
    """Global ranks of each group of a rank, by purpose, also of groups that have no other rank. Each direction between
    two pipeline ranks has its own channel."""
    stage = ranks_over(run, place, "dp", "cp", "tp")
    number = stage.index(run.rank(place))
    beside = {"tp": ranks_over(run, place, "tp"), "cp": ranks_over(run, place, "cp")}
    beside["dp"] = ranks_over(run, place, "dp", "cp")
    if run.model.moe is not None:  # ranks that share a set of experts are neighbours; others hold the same ones
        beside |= {"ep": stage[number // run.ep * run.ep :][: run.ep], "expert_dp": stage[number % run.ep :: run.ep]}
    along = {
        (kind, pp_ranks): tuple(sorted(run.rank(place._replace(pp=pp)) for pp in pp_ranks))
        for kind, pp_ranks in run.joins
        if place.pp in pp_ranks
    }
    return {(axis, ()): ranks for axis, ranks in beside.items()} | along


def num_communicators(run: ProbeRun) -> list[int]:
    """Number of communicators that a rank of each pipeline stage makes: of all ranks, and of each group and wire that
    it is part of."""
    groups = (groups_of(run, Place(pp, 0, 0, 0)).values() for pp in range(run.pp))
    return [1 + sum(len(ranks) > 1 for ranks in of_rank) for of_rank in groups]


def ranks_over(run: ProbeRun, place: Place, *axes: str) -> Ints:
    """Global ranks at all coordinates of some axes, and at the place's own of the others; tp innermost."""
    sizes = (range(getattr(run, axis)) if axis in axes else (at,) for axis, at in place._asdict().items())
    return tuple(run.rank(Place(*at)) for at in product(*sizes))


def holders(run: ProbeRun, name: str, stage: int) -> Ints:
    """Pipeline ranks that hold the parameter `name` of virtual stage `stage`, sorted.

    Both copies of a bidirectional schedule hold it. An embedding is also held by the ranks of a tied head or of
    multi-token prediction.
    """
    n = len(run.chunks)
    stages = {stage % n + copy * n for copy in range(run.num_directions)}
    if name.startswith("embedding."):
        tied = run.model.tie_word_embeddings and name == "embedding.weight"
        for other in range(len(run.stage_to_rank)):
            chunk = run.chunk_of(other)
            if chunk.embedding or chunk.mtp or (tied and chunk.head):
                stages.add(other)
    return tuple(sorted({run.stage_to_rank[s] for s in stages}))


SURE_FRACTION = 0.01
"""A median is sure when its standard error is at most this share of it."""
STEADY_S = 1.0
"""Seconds of one kind of work after which a GPU's clocks are those of its power limit, and that a figure rests on."""


def repeats(one_s: float, steady_s: float, fewest: int) -> int:
    """Number of repetitions of `one_s` each that take about `steady_s`; at least `fewest`."""
    return max(fewest, ceil(steady_s / max(one_s, 1e-9)))


def spread_fraction(values: Sequence[float]) -> float | None:
    """Standard error of the median of `values`, as a share of it; None for one value.

    Half the distance between the values √n / 2 ranks below and above the middle one: an interval of one standard error
    to either side, whatever the distribution is. `values` come in the order of their measurement, so that a drift shows
    as half the difference between the medians of the first and the second half; the larger of the two counts.
    """
    num = len(values)
    middle = median(values) if values else 0.0
    if num < 2 or middle <= 0:
        return None
    ranks = (num - 1) / 2 - sqrt(num) / 2, (num - 1) / 2 + sqrt(num) / 2
    low, high = np.interp(ranks, np.arange(num), np.sort(values))
    drift = abs(median(values[: num // 2]) - median(values[num - num // 2 :]))
    return float(max(high - low, drift) / 2 / middle)
