"""Compiles a schedule into flat integer arrays in which every action stands behind the actions that it waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.errors import SpecError
from planner.schedule.actions import ActionList, B, F, I, IntArray, Schedule, W
from planner.schedule.latest import keeps_latest

WIDE = 64
"""Least ranks whose actions are ordered and timed level by level, in arrays."""


class DeadlockError(SpecError):
    """An error for action lists that cannot be run in their order, because ranks wait for each other."""


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Actions in a topological order; position 0 is a sentinel that ends at time 0, so actions are 1 … n."""

    kind: IntArray
    """Place of each action's kind in KINDS; shape (n,), as all arrays but `position`."""
    stage: IntArray
    """Virtual stage of each action; the second copy's stages are numbered on from the first's."""
    microbatch: IntArray
    rank: IntArray
    previous: IntArray
    """Position of the action before each action on its rank (0: none)."""
    source: IntArray
    """Position of the action on the neighbouring stage whose result each action consumes (0: none)."""
    position: tuple[IntArray, ...]
    """Positions of each rank's actions, in list order."""
    redirected: bool
    """True where the consumers of an overlapped forward wait for the end of its pair."""
    levels: IntArray
    """Begins of levels among the actions of many ranks, and the last end: no action of a level waits for another.

    Empty for fewer ranks than `WIDE`, whose actions are timed one by one.
    """

    @property
    def num_actions(self) -> int:
        """Number of actions, without the sentinel."""
        return len(self.kind)


@keeps_latest
def compile_schedule(schedule: Schedule, overlap: bool = False) -> Graph:
    """Order the actions so that one pass can time them, and check the schedule.

    With `overlap`, actions that wait for the forward of an overlapped pair wait for the end of the pair.
    Raises SpecError when an action is missing, repeated or misplaced, DeadlockError when the lists cannot be run.
    """
    lengths = [len(actions) for actions in schedule.ranks]
    num_actions = sum(lengths)
    packed = [ActionList.of(actions) for actions in schedule.ranks]
    kind = np.concatenate([actions.kind for actions in packed])
    stage = np.concatenate([actions.stage for actions in packed])
    microbatch = np.concatenate([actions.microbatch for actions in packed])
    rank = np.repeat(np.arange(schedule.pp, dtype=np.int32), lengths)
    source = _sources(schedule, kind, stage, microbatch, rank)
    if overlap:
        _redirect_to_pairs(schedule, source)
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    wide = _levels(source, bounds) if schedule.pp >= WIDE else None
    if wide is None:
        order, levels = _topological_order(schedule, source.tolist(), bounds.tolist()), np.zeros(0, dtype=np.int32)
    else:
        order, levels = wide
    position = np.empty(num_actions + 1, dtype=np.int32)
    position[order] = np.arange(1, num_actions + 1, dtype=np.int32)
    position[-1] = 0  # where index −1, "none", lands
    previous = np.arange(-1, num_actions - 1, dtype=np.int32)
    previous[bounds[:-1][np.array(lengths) > 0]] = -1
    return Graph(
        kind=kind[order],
        stage=stage[order],
        microbatch=microbatch[order],
        rank=rank[order],
        previous=position[previous[order]],
        source=position[source[order]],
        position=tuple(np.split(position[:-1], bounds[1:-1])),
        redirected=overlap,
        levels=levels,
    )


def pair_positions(schedule: Schedule, graph: Graph) -> tuple[IntArray, IntArray]:
    """Positions of the forwards and of the backwards of all overlapped pairs."""
    pairs = [np.array(indices, dtype=np.int32) for indices in schedule.overlapped]
    forward = [position[index] for position, index in zip(graph.position, pairs, strict=True)]
    backward = [position[index + 1] for position, index in zip(graph.position, pairs, strict=True)]
    return np.concatenate(forward), np.concatenate(backward)


def _sources(schedule: Schedule, kind: IntArray, stage: IntArray, microbatch: IntArray, rank: IntArray) -> IntArray:
    """Flat index of the action on the neighbouring stage whose result each action consumes, −1 where there is none."""
    num_stages, num_microbatches, n = len(schedule.stage_to_rank), schedule.num_microbatches, schedule.num_model_stages
    known = (stage >= 0) & (stage < num_stages) & (microbatch >= 0) & (microbatch < num_microbatches)
    if not known.all():
        action = _spell(schedule, int(np.argmin(known)))
        raise SpecError(
            f"schedule {schedule.name}: {action} with {num_stages} stages, {num_microbatches} micro-batches"
        )
    placed = np.array(schedule.stage_to_rank, dtype=np.int32)[stage] == rank
    if not placed.all():
        action = _spell(schedule, int(np.argmin(placed)))
        raise SpecError(f"schedule {schedule.name}: {action} stands in the list of a rank that does not hold its stage")

    if n * num_microbatches > kind.size:  # checked before a table of that size is made
        raise SpecError(
            f"schedule {schedule.name}: {kind.size} actions are not all of {num_microbatches} micro-batches"
        )
    key = stage * num_microbatches + microbatch
    table = np.full((4, num_stages * num_microbatches), -1, dtype=np.int32)
    table[kind, key] = np.arange(kind.size, dtype=np.int32)
    _check_complete(schedule, table, kind.size)

    gradient = np.maximum(table[B], table[I])
    source = np.full(kind.size, -1, dtype=np.int32)
    forward = (kind == F) & (stage % n != 0)
    source[forward] = table[F][key[forward] - num_microbatches]
    backward = ((kind == B) | (kind == I)) & (stage % n != n - 1)
    source[backward] = gradient[key[backward] + num_microbatches]
    return source


def _check_complete(schedule: Schedule, table: IntArray, num_actions: int) -> None:
    """Raises SpecError unless each micro-batch passes each stage of one copy once: F, then B or (I, then W)."""
    has = table >= 0
    full = has[B] & ~has[I] & ~has[W]
    split = ~has[B] & has[I] & has[W]
    done = has[F] & ~has[B] & ~has[I] & ~has[W] if schedule.forward_only else has[F] & (full | split)
    shape = (schedule.num_directions, schedule.num_model_stages, schedule.num_microbatches)
    complete = np.count_nonzero(done.reshape(shape).all(axis=1), axis=0)
    touched = np.count_nonzero(np.logical_or.reduce(has, axis=0).reshape(shape).any(axis=1), axis=0)
    once = (complete == 1) & (touched == 1)
    if int(has.sum()) != num_actions or not once.all():
        missing = "" if once.all() else f", first micro-batch {int(np.argmin(once))}"
        raise SpecError(
            f"schedule {schedule.name}: an action is missing or stands twice{missing}",
            hint="every stage needs F and then B, or F, I and W, once per micro-batch",
        )
    ordered = (~full | (table[F] < table[B])) & (~split | ((table[F] < table[I]) & (table[I] < table[W])))
    if not ordered.all():
        stage, microbatch = divmod(int(np.argmin(ordered)), schedule.num_microbatches)
        raise SpecError(
            f"schedule {schedule.name}: stage {stage}, micro-batch {microbatch} runs backward before it may",
            hint="the order on a rank must be F before B, or F before I before W",
        )


def _redirect_to_pairs(schedule: Schedule, source: IntArray) -> None:
    first = 0
    for actions, pairs in zip(schedule.ranks, schedule.overlapped, strict=False):
        forwards = first + np.array(pairs, dtype=np.int32)
        source[np.isin(source, forwards)] += 1
        first += len(actions)


def _levels(source: IntArray, bounds: IntArray) -> tuple[IntArray, IntArray] | None:
    """All actions level by level, with the begin of each level; None where ranks wait for each other.

    In each level every rank runs its next action if what that waits for is of an earlier level.
    """
    done = np.zeros(len(source) + 1, dtype=bool)
    done[-1] = True  # where −1, "none", looks
    cursor, end = bounds[:-1].copy(), bounds[1:]
    levels = []
    while len(left := np.flatnonzero(cursor < end)):
        next_ones = cursor[left]
        ready = done[source[next_ones]]
        if not ready.any():
            return None
        levels.append(next_ones[ready])
        done[levels[-1]] = True
        cursor[left[ready]] += 1
    sizes = [0, *map(len, levels)]
    return np.concatenate(levels).astype(np.int32), np.cumsum(sizes, dtype=np.int32)


def _topological_order(schedule: Schedule, source: list[int], bounds: list[int]) -> IntArray:
    """Positions of all actions in an order in which each stands behind its source.

    Each rank runs until it has to wait for an action; the rank that finishes this action wakes it.
    """
    done = bytearray(len(source) + 1)
    done[-1] = 1  # where −1, "none", looks
    waiting: dict[int, int] = {}
    cursor = bounds[:-1]
    ready = list(range(schedule.pp))
    order: list[int] = []
    while ready:
        rank = ready.pop()
        i, end = cursor[rank], bounds[rank + 1]
        while i < end:
            if not done[source[i]]:
                waiting[source[i]] = rank
                break
            done[i] = 1
            order.append(i)
            if i in waiting:
                ready.append(waiting.pop(i))
            i += 1
        cursor[rank] = i
    if len(order) < len(source):
        stuck = [f"rank {rank} at {_spell(schedule, cursor[rank])}" for rank in sorted(waiting.values())]
        raise DeadlockError(f"schedule {schedule.name} deadlocks: {', '.join(stuck[:4])} wait for each other")
    return np.array(order, dtype=np.int32)


def _spell(schedule: Schedule, index: int) -> str:
    for actions in schedule.ranks:
        if index < len(actions):
            return str(actions[index])
        index -= len(actions)
    raise AssertionError("index past the last action")
