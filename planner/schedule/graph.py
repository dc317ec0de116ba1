"""A schedule as flat integer arrays, in which every action stands behind the actions that it waits for.

Schedules are also read and written as the CSV that torch.distributed.pipelining loads, with one row of compute actions
per rank: `_PipelineScheduleRuntime(stages, num_microbatches, loss_fn)._load_csv(file)` runs it, and torch adds sends
and receives. The spelling is that of torch 2.13 (`_Action.from_str`).
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.errors import SpecError
from planner.record import record
from planner.schedule.actions import Action, ActionList, B, F, I, IntArray, Schedule, W, keeps_latest
from planner.specs.reading import parse_rows


class DeadlockError(SpecError):
    """An error for action lists that cannot be run in their order, because ranks wait for each other."""


@record(eq=False)
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
    previous = np.arange(-1, num_actions - 1, dtype=np.int32)
    previous[bounds[:-1][np.array(lengths) > 0]] = -1
    order = _order_in_turn(kind, rank, bounds)
    position = _positions(order)
    if not ((position[source] < position[:-1]) & (position[previous] < position[:-1])).all():
        order = _topological_order(schedule, source.tolist(), bounds.tolist())
        position = _positions(order)
    return Graph(
        kind=kind[order],
        stage=stage[order],
        microbatch=microbatch[order],
        rank=rank[order],
        previous=position[previous[order]],
        source=position[source[order]],
        position=tuple(np.split(position[:-1], bounds[1:-1])),
        redirected=overlap,
    )


def _positions(order: IntArray) -> IntArray:
    """The place of each action in an order, counted from 1; behind them 0, where index −1, "none", lands."""
    position = np.zeros(len(order) + 1, dtype=np.int32)
    position[order] = np.arange(1, len(order) + 1, dtype=np.int32)
    return position


def _order_in_turn(kind: IntArray, rank: IntArray, bounds: NDArray[np.int64]) -> IntArray:
    """An order of actions in which each stands behind its source, where ranks warm up and then run both ways in turn.

    With w forwards of warm-up on the first rank, and s fewer on each further one, the n-th forward of rank r stands at
    2·n + s·r and its n-th backward at 2·(w + n) + 1 − s·r. Of other schedules that is no such order.
    """
    place, is_backward = np.arange(len(kind)) - bounds[rank], kind != F
    before = np.concatenate(([0], np.cumsum(is_backward)))
    number = before[:-1] - before[bounds[:-1]][rank]
    firsts = place[is_backward & (number == 0)]
    fewer = -np.diff(firsts[:2]).sum() * rank
    at = np.where(is_backward, 2 * (firsts.max(initial=0) + number) - 1 - fewer, 2 * (place - number) + fewer)
    return np.argsort(at, kind="stable").astype(np.int32)


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


_HINT = "give one row of actions such as 0F0,1F0,1B0 a rank, as `plan schedule 1f1b --csv FILE` writes them"


def to_torch_csv(schedule: Schedule) -> str:
    """The schedule in `_load_csv`'s compute-only format.

    Forwards that run together with a backward (DualPipeV) are written `(0F8;7B0)OVERLAP_F_B`; torch runs the two one
    after the other unless a custom function is registered. Raises SpecError for schedules that torch's runtime cannot
    run: two copies of the model, steps without a flush, forwards alone, lists that deadlock.
    """
    for refused, why in (
        (schedule.num_directions > 1, "holds the model twice; torch places each stage on one rank"),
        (schedule.asynchronous, "runs steps without a flush; torch flushes after each"),
        (schedule.forward_only, "has no backward"),
    ):
        if refused:
            raise SpecError(
                f"schedule {schedule.name} {why}", hint="choose another schedule, such as 1f1b, zb-v or dualpipe-v"
            )
    compile_schedule(schedule)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for rank, actions in enumerate(schedule.ranks):
        pairs = set(schedule.overlapped[rank]) if schedule.overlapped else set()
        writer.writerow(
            f"({action};{actions[index + 1]})OVERLAP_F_B" if index in pairs else str(action)
            for index, action in enumerate(actions)
            if index - 1 not in pairs
        )
    return text.getvalue()


def from_torch_csv(text: str, name: str = "csv") -> Schedule:
    """Read compute actions back and skip idle cells; raises SpecError unless they form a schedule that can run."""
    ranks: list[tuple[Action, ...]] = []
    overlapped: list[tuple[int, ...]] = []
    for row in parse_rows(text, "the schedule is no CSV", _HINT):
        actions: list[Action] = []
        pairs: list[int] = []
        for cell in (cell.strip() for cell in row):
            if cell.endswith("OVERLAP_F_B"):
                pairs.append(len(actions))
                actions.extend(Action.parse(part) for part in cell.removesuffix("OVERLAP_F_B").strip("()").split(";"))
            elif cell:
                actions.append(Action.parse(cell))
        ranks.append(tuple(actions))
        overlapped.append(tuple(pairs))
    schedule = _schedule(name, tuple(ranks), tuple(overlapped))
    compile_schedule(schedule)
    return schedule


def made_order(lines: Sequence[str], name: str) -> Schedule:
    """The order of a saved layout's actions, one line a rank; SpecError unless they form a schedule that can run."""
    return from_torch_csv("\n".join(",".join(line.split()) for line in lines), name)


def _schedule(name: str, ranks: tuple[tuple[Action, ...], ...], overlapped: tuple[tuple[int, ...], ...]) -> Schedule:
    rank_of = {action.stage: rank for rank, actions in enumerate(ranks) for action in actions}
    missing = next((number for number, stage in enumerate(sorted(rank_of)) if number != stage), None)
    if missing is not None or not rank_of or not all(ranks):
        raise SpecError(f"the schedule has no actions for stage {missing or 0}, or a rank without any", _HINT)
    return Schedule(
        name,
        ranks,
        tuple(rank_of[stage] for stage in sorted(rank_of)),
        1 + max(action.microbatch for actions in ranks for action in actions),
        overlapped=overlapped if any(overlapped) else (),
    )
