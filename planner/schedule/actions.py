"""A schedule is one list of actions per pipeline rank, spelled as torch.distributed.pipelining spells them."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import field
from functools import wraps
from threading import Lock
from typing import NamedTuple, ParamSpec, Protocol, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from planner.errors import SpecError
from planner.record import record

IntArray = NDArray[np.int32]

KINDS = "FBIW"
"""Letters of forward, full backward, input gradient and weight gradient; a full backward is I and W at once."""
F, B, I, W = range(len(KINDS))  # noqa: E741 - the kinds as torch names them, by their place in KINDS
HELD = {"F": 1, "B": -1, "I": 0, "W": -1}
"""Number of activations that an action of each kind adds to those that its rank holds."""
HELD_BY_PLACE = np.array([HELD[kind] for kind in KINDS], dtype=float)
"""The numbers of HELD, each at its kind's place in KINDS."""

_SPELLING = re.compile(r"^([0-9]{1,9})([FBIW])([0-9]{1,9})$")


class Action(NamedTuple):
    """One computation: `kind` of micro-batch `microbatch` on virtual stage `stage`."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read torch's spelling, such as `3F0`; raises SpecError for anything else."""
        match = _SPELLING.match(text.strip())
        if match is None:
            raise SpecError(f"{text[:60]!r} is not a schedule action", "write stage, kind F|B|I|W, micro-batch: 3F0")
        return cls(match[2], int(match[1]), int(match[3]))


@record(eq=False)
class ActionList(Sequence[Action]):
    """Actions of one rank in order, kept as integer arrays: long lists are made, stored and compiled all at once."""

    kind: IntArray
    """Places in KINDS."""
    stage: IntArray
    microbatch: IntArray

    @classmethod
    def of(cls, actions: Iterable[Action]) -> ActionList:
        """The actions, packed into arrays."""
        if isinstance(actions, ActionList):
            return actions
        rows = [(KINDS.index(kind), stage, microbatch) for kind, stage, microbatch in actions]
        return cls(*np.array(rows, dtype=np.int32).reshape(len(rows), 3).T)

    def __len__(self) -> int:
        return len(self.kind)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> ActionList: ...
    def __getitem__(self, index: int | slice) -> Action | ActionList:
        if isinstance(index, slice):
            return ActionList(self.kind[index], self.stage[index], self.microbatch[index])
        return Action(KINDS[self.kind[index]], int(self.stage[index]), int(self.microbatch[index]))

    def __iter__(self) -> Iterator[Action]:
        kinds = (KINDS[kind] for kind in self.kind.tolist())
        return map(Action, kinds, self.stage.tolist(), self.microbatch.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActionList) and all(
            np.array_equal(own, others)
            for own, others in zip(
                (self.kind, self.stage, self.microbatch), (other.kind, other.stage, other.microbatch), strict=True
            )
        )

    __hash__ = None  # type: ignore[assignment]


@record(eq=False)
class Schedule:
    """The actions of all ranks in their order, without times; the replay computes the times.

    Virtual stages are numbered 0 … len(stage_to_rank) − 1. With one direction they are the model from front to back,
    and stage j + 1 consumes what stage j sends. A bidirectional schedule (DualPipe, Chimera) holds the model twice:
    with n = num_model_stages, stages 0 … n − 1 are the first copy and n … 2n − 1 the second copy, again from front to
    back but placed on the ranks in reverse. Nothing flows from stage n − 1 to stage n, and each micro-batch belongs to
    exactly one copy. Two schedules are the same when their `ranks` are; the object itself compares by identity.
    """

    name: str
    ranks: tuple[Sequence[Action], ...]
    """Actions of each pipeline rank in the order in which it runs them; any sequences become ActionLists."""
    stage_to_rank: tuple[int, ...]
    """Rank of each virtual stage, both copies of a bidirectional schedule included."""
    num_microbatches: int
    num_directions: int = 1
    """Directions in which micro-batches travel: 2 when the model is held twice."""
    num_weight_copies: int = 1
    """Copies of its weights that a rank holds: 2 for DualPipe and Chimera (two stages) and for 2BW (two versions)."""
    splits_backward: bool = field(init=False)
    """True where weight gradients run apart from input gradients: the lists say it."""
    forward_only: bool = False
    asynchronous: bool = False
    """True where steps overlap without a flush, so that gradients are taken at stale weights."""
    staleness_steps: int = 0
    """Optimizer steps by which the weights of a gradient lag behind (1 for 2BW)."""
    overlapped: tuple[tuple[int, ...], ...] = ()
    """Positions, per rank, of forwards that run together with the backward right behind them (DualPipe)."""

    def __post_init__(self) -> None:
        ranks = tuple(map(ActionList.of, self.ranks))
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "splits_backward", any(bool((actions.kind == I).any()) for actions in ranks))

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return len(self.ranks)

    @property
    def num_actions(self) -> int:
        """Number of actions of all ranks."""
        return sum(map(len, self.ranks))

    @property
    def num_model_stages(self) -> int:
        """Virtual stages of one copy of the model."""
        return len(self.stage_to_rank) // self.num_directions

    @property
    def vpp(self) -> int:
        """Virtual stages per rank of one copy of the model."""
        return self.num_model_stages // self.pp

    @property
    def stage_to_chunk(self) -> tuple[int, ...]:
        """Chunk of each virtual stage: how many of the stages before it are on its rank."""
        seen = [0] * self.pp
        chunks = []
        for rank in self.stage_to_rank:
            chunks.append(seen[rank])
            seen[rank] += 1
        return tuple(chunks)


MOST_RESULTS = 32
MOST_ACTIONS = 1 << 20
"""The most actions of all results that a function keeps; the last result is kept however many it has."""


class Counted(Protocol):
    """A result that has actions: a schedule, or what it is compiled to."""

    @property
    def num_actions(self) -> int: ...


P = ParamSpec("P")
R = TypeVar("R", bound=Counted)


def keeps_latest(make: Callable[P, R]) -> Callable[P, R]:
    """The function with a cache of its latest results, so that equal arguments give the same object."""
    kept: OrderedDict[Hashable, R] = OrderedDict()
    lock = Lock()

    def is_too_much() -> bool:
        return len(kept) > MOST_RESULTS or sum(result.num_actions for result in kept.values()) > MOST_ACTIONS

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> R:
        key = args, tuple(kwargs.items())
        with lock:
            if key in kept:
                kept.move_to_end(key)
                return kept[key]
        result = make(*args, **kwargs)
        with lock:
            result = kept.setdefault(key, result)
            while len(kept) > 1 and is_too_much():
                kept.popitem(last=False)
        return result

    return made
