"""All schedules by name: the shapes each is defined for, its action lists, and its number of activations in flight.

`SCHEDULES` is the one table of all facts about schedules: a new schedule is a row here and a function that writes its
action lists.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from planner.errors import SpecError
from planner.record import record
from planner.schedule import builders
from planner.schedule.actions import HELD_BY_PLACE, Action, ActionList, Schedule, keeps_latest
from planner.schedule.builders import interleaved_one_f_one_b, one_f_one_b, warm_up_chunks

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "ScheduleKind",
    "build_schedule",
    "chunks_in_flight",
    "in_flight_chunks",
    "in_flight_microbatches",
    "interleaved_one_f_one_b",
    "one_f_one_b",
    "violation",
]


Bound = Literal["one_f_one_b", "interleaved", "any_order", "split_backward"]
"""Names of lower bounds on a makespan: the closed forms of 1F1B and of interleaved 1F1B, or the bound that holds for
any order, with a full or a split backward."""


@record
class ScheduleKind:
    """A named schedule: its generator and the shapes it is defined for."""

    name: str
    build: Callable[..., Schedule]
    """Function of pp, vpp (where there are many to choose from), num_microbatches and, if grouped, the group's size."""
    source: str
    min_vpp: int = 1
    max_vpp: int = 1
    min_pp: int = 1
    max_pp: int = 1 << 30
    even_pp: bool = False
    min_microbatches_per_rank: int = 0
    """Least number of micro-batches, as a multiple of pp."""
    microbatch_multiple: Callable[[int, int], int] = lambda pp, vpp: 1
    """Function of pp and vpp that gives a divisor of num_microbatches."""
    grouped: bool = False
    """True where a micro-batch group size may be given, which replaces the multiple."""
    splits_backward: bool = False
    """True where weight gradients run apart from input gradients."""
    trains_one_copy: bool = True
    """True where it trains one copy of the model with a flush after each step: plans are made only for these."""
    holds_all: bool = False
    """True where it holds every micro-batch of the step at once."""
    frugal: bool = False
    """True where it holds fewer activations than 1F1B."""
    bound: Bound = "any_order"
    """Name of the lower bound on the makespan that holds for its order."""
    warms_up: bool = False
    """True where the most that a rank holds is its warm-up forwards and one more."""
    chunks_end_in_turn: bool = False
    """True where a rank's chunks end one after the other, each pp micro-batches after the one before, as they start."""
    runs_without_pipeline: bool = False
    """True where a user who names the schedule also accepts a single stage."""
    is_tried_by_default: bool = False
    """True where it is tried when the user names no schedule, since every trainer runs it."""
    is_measured_against: bool = False
    """True where the search for an order made to measure starts from the shapes that the schedule suits."""


_ANY_VPP = 1 << 30
FULL_ROUNDS = 8
"""Rounds of pp micro-batches after which no rank holds more: all schedules that are counted fill in three."""


_V: dict[str, Any] = {"min_vpp": 2, "max_vpp": 2, "splits_backward": True, "bound": "split_backward"}
"""Two chunks of each rank in a V."""

SCHEDULES: dict[str, ScheduleKind] = {
    kind.name: kind
    for kind in (
        ScheduleKind(
            "none",
            builders.no_pipeline,
            "one pipeline rank",
            max_pp=1,
            bound="one_f_one_b",
            warms_up=True,
            runs_without_pipeline=True,
        ),
        ScheduleKind(
            "gpipe",
            builders.gpipe,
            "Huang et al. 2019",
            holds_all=True,
            runs_without_pipeline=True,
        ),
        ScheduleKind(
            "1f1b",
            one_f_one_b,
            "Narayanan et al. 2019",
            bound="one_f_one_b",
            warms_up=True,
            runs_without_pipeline=True,
            is_tried_by_default=True,
            is_measured_against=True,
        ),
        ScheduleKind(
            "interleaved-1f1b",
            interleaved_one_f_one_b,
            "Narayanan et al. 2021",
            min_pp=2,
            min_vpp=2,
            max_vpp=_ANY_VPP,
            microbatch_multiple=lambda pp, vpp: pp,
            grouped=True,
            bound="interleaved",
            warms_up=True,
            chunks_end_in_turn=True,
            is_tried_by_default=True,
            is_measured_against=True,
        ),
        ScheduleKind(
            "breadth-first",
            builders.breadth_first,
            "Lamy-Poirier 2023",
            max_vpp=_ANY_VPP,
            holds_all=True,
            chunks_end_in_turn=True,
        ),
        ScheduleKind(
            "zb-h1",
            builders.zb_h1,
            "Qi et al. 2023",
            max_vpp=_ANY_VPP,
            microbatch_multiple=lambda pp, vpp: pp if vpp > 1 else 1,
            grouped=True,
            splits_backward=True,
            bound="split_backward",
            is_measured_against=True,
        ),
        ScheduleKind(
            "zb-h2",
            builders.zb_h2,
            "Qi et al. 2023",
            splits_backward=True,
            bound="split_backward",
        ),
        ScheduleKind("zb-v", builders.zb_v, "Qi et al. 2024", **_V, is_measured_against=True),
        ScheduleKind("v-half", builders.v_half, "Qi et al. 2024", **_V, frugal=True),
        ScheduleKind("v-min", builders.v_min, "Qi et al. 2024", **_V, frugal=True),
        ScheduleKind(
            "dualpipe",
            builders.dualpipe,
            "DeepSeek-AI 2024",
            even_pp=True,
            min_microbatches_per_rank=2,
            microbatch_multiple=lambda pp, vpp: 2,
            trains_one_copy=False,
        ),
        ScheduleKind("dualpipe-v", builders.dualpipe_v, "Qi et al. 2025", **_V, min_microbatches_per_rank=2),
        ScheduleKind(
            "chimera",
            builders.chimera,
            "Li and Hoefler 2021",
            even_pp=True,
            microbatch_multiple=lambda pp, vpp: pp,
            trains_one_copy=False,
        ),
        ScheduleKind(
            "pipedream-2bw",
            builders.pipedream_2bw,
            "Narayanan et al. 2021 (2BW)",
            warms_up=True,
            trains_one_copy=False,
        ),
        ScheduleKind(
            "forward-only",
            builders.forward_only,
            "evaluation",
            max_vpp=_ANY_VPP,
            trains_one_copy=False,
        ),
    )
}
"""Schedules by name, in the order in which comparisons list them."""


def violation(
    name: str, pp: int, vpp: int, num_microbatches: int, microbatch_group_size: int | None = None
) -> SpecError | None:
    """An error that says with numbers why schedule `name` cannot run this shape, or None when it can."""
    kind = SCHEDULES.get(name)
    if kind is None:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known schedules: {', '.join(SCHEDULES)}"
        return SpecError(f"schedule {name!r} is unknown", hint=hint)
    if min(pp, vpp, num_microbatches) < 1:
        return SpecError(f"pp {pp}, vpp {vpp} and num_microbatches {num_microbatches} must each be at least 1")
    return _shape_violation(kind, pp, vpp) or _batch_violation(kind, pp, vpp, num_microbatches, microbatch_group_size)


def _shape_violation(kind: ScheduleKind, pp: int, vpp: int) -> SpecError | None:
    if not kind.min_pp <= pp <= kind.max_pp:
        limit = f"at least {kind.min_pp}" if pp < kind.min_pp else f"at most {kind.max_pp}"
        return SpecError(f"schedule {kind.name} needs pp {limit}, not {pp}", hint="choose another schedule or pp")
    if kind.even_pp and pp % 2:
        return SpecError(f"schedule {kind.name} needs an even pp, not {pp}", hint=f"pp {pp - 1} or {pp + 1} would do")
    if not kind.min_vpp <= vpp <= kind.max_vpp:
        wanted = kind.min_vpp if vpp < kind.min_vpp else kind.max_vpp
        relation = "exactly" if kind.min_vpp == kind.max_vpp else "at least" if vpp < kind.min_vpp else "at most"
        return SpecError(f"schedule {kind.name} needs vpp {relation} {wanted}, not {vpp}", hint=f"set vpp to {wanted}")
    return None


def _batch_violation(
    kind: ScheduleKind, pp: int, vpp: int, num_microbatches: int, microbatch_group_size: int | None
) -> SpecError | None:
    least = kind.min_microbatches_per_rank * pp
    if num_microbatches < least:
        return SpecError(
            f"schedule {kind.name} needs at least {least} micro-batches at pp {pp}, not {num_microbatches}",
            hint="smaller micro-batches, a larger global batch or less data parallelism give more",
        )
    if microbatch_group_size is not None:
        return _group_violation(kind, pp, num_microbatches, microbatch_group_size)
    multiple = kind.microbatch_multiple(pp, vpp)
    if num_microbatches % multiple:
        below = num_microbatches - num_microbatches % multiple
        return SpecError(
            f"schedule {kind.name} needs a multiple of {multiple} micro-batches at pp {pp}, not {num_microbatches}",
            hint=f"{below} or {below + multiple} would do" if below else f"{multiple} would do",
        )
    return None


def _group_violation(kind: ScheduleKind, pp: int, num_microbatches: int, group: int) -> SpecError | None:
    if not kind.grouped:
        return SpecError(f"schedule {kind.name} takes no micro-batch group size ({group})", hint="leave it out")
    remainder = num_microbatches % group if group > 0 else 0
    if not min(pp, num_microbatches) <= group <= num_microbatches or 0 < remainder < pp:
        return SpecError(
            f"micro-batch group size {group} does not suit {num_microbatches} micro-batches at pp {pp}",
            hint=f"it lies between {pp} and {num_microbatches}, and leaves a last group of at least {pp} or none",
        )
    return None


def placement(name: str, pp: int, vpp: int) -> tuple[int, ...]:
    """Rank of each virtual stage in one direction of schedule `name`; a V where the schedule has exactly two chunks."""
    kind = SCHEDULES[name]
    return builders.v_placement(pp) if kind.min_vpp == kind.max_vpp == 2 else tuple(range(pp)) * vpp


def passes_behind(schedule: str, pp: int, vpp: int) -> float:
    """Micro-batches whose backward is left on a rank when its first chunk begins the last backward, this one included.

    Interleaved chunks end one after the other, each pp micro-batches after the one before: (pp·(vpp − 1) + 1) / vpp.
    Their first forwards begin in the same way. In other schedules all chunks end with the last micro-batch: 1.
    """
    in_turn = schedule in SCHEDULES and SCHEDULES[schedule].chunks_end_in_turn
    return (pp * (vpp - 1) + 1) / vpp if in_turn else 1.0


def lead_passes(schedule: str, vpp: int) -> float:
    """Micro-batches whose backward is left on the rank before when a rank has run its last one: a chunk's, 1 / vpp.

    The number is 0 where weight gradients may come last on any rank.
    """
    return 0.0 if schedule not in SCHEDULES or SCHEDULES[schedule].splits_backward else 1 / vpp


@keeps_latest
def build_schedule(
    name: str, pp: int, vpp: int, num_microbatches: int, microbatch_group_size: int | None = None
) -> Schedule:
    """Action lists of schedule `name`; the same arguments give the same object, so its compiled form is reused.

    Raises SpecError when the name is unknown or the schedule is not defined for the shape.
    """
    error = violation(name, pp, vpp, num_microbatches, microbatch_group_size)
    if error is not None:
        raise error
    kind = SCHEDULES[name]
    chunks, group = (vpp,) * (kind.max_vpp == _ANY_VPP), (microbatch_group_size,) * kind.grouped
    return kind.build(pp, *chunks, num_microbatches, *group)


def in_flight_chunks(name: str, pp: int, vpp: int, num_microbatches: int) -> list[int]:
    """Peak number of (virtual stage, micro-batch) activations held by each rank, from forward to weight gradient.

    1F1B: min(M, pp − r). Interleaved: min(M·vpp, (pp − r − 1)·2 + (vpp − 1)·pp + 1). GPipe and breadth-first: M·vpp.
    All others are counted along the action lists, which no duration changes.
    """
    total = num_microbatches * vpp
    if SCHEDULES[name].warms_up:
        return [min(total, warm_up_chunks(pp, vpp, rank, pp) + 1) for rank in range(pp)]
    if SCHEDULES[name].holds_all:
        return [total] * pp
    schedule = build_schedule(name, pp, vpp, _enough_to_fill(name, pp, num_microbatches))
    if schedule.forward_only:
        return [1] * pp
    return [int(np.cumsum(HELD_BY_PLACE[ActionList.of(actions).kind]).max()) for actions in schedule.ranks]


def in_flight_microbatches(name: str, pp: int, vpp: int, num_microbatches: int) -> list[float]:
    """Peak activations held by each rank, in micro-batches: all that a pp-th of the model saves of one counts as 1."""
    return [count / vpp for count in in_flight_chunks(name, pp, vpp, num_microbatches)]


@lru_cache(maxsize=256)
def chunks_in_flight(name: str, pp: int, vpp: int, num_microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Number of micro-batches, per rank and chunk, that the rank holds when it first holds the most activations.

    Interleaved: a rank is fullest at the end of its warm-up. Every pp·vpp forwards of the warm-up are pp of each chunk,
    and those of the first chunk come first; so the first chunk has more in flight than the others. GPipe and
    breadth-first: M of each chunk.
    """
    if SCHEDULES[name].bound == "interleaved":
        counts = []
        for num_chunks in in_flight_chunks(name, pp, vpp, num_microbatches):
            groups, rest = divmod(num_chunks, pp * vpp)
            counts.append(tuple(groups * pp + min(max(rest - chunk * pp, 0), pp) for chunk in range(vpp)))
        return tuple(counts)
    if SCHEDULES[name].holds_all:
        return ((num_microbatches,) * vpp,) * pp
    stages = placement(name, pp, vpp)
    held_by_rank = []
    for rank, order in enumerate(build_schedule(name, pp, vpp, _enough_to_fill(name, pp, num_microbatches)).ranks):
        actions = ActionList.of(order)
        change = HELD_BY_PLACE[actions.kind]
        fullest = slice(np.cumsum(change).argmax() + 1)
        chunks = [stage for stage, holder in enumerate(stages) if holder == rank]
        held_by_rank.append(tuple(int(change[fullest][actions.stage[fullest] == stage].sum()) for stage in chunks))
    return tuple(held_by_rank)


def _enough_to_fill(name: str, pp: int, num_microbatches: int) -> int:
    """Micro-batches of a step that holds as much as the whole one: a few rounds of pp, ending as the whole one does."""
    if not SCHEDULES[name].trains_one_copy:
        return num_microbatches
    return min(num_microbatches, FULL_ROUNDS * pp + num_microbatches % pp)
