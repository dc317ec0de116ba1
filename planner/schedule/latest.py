"""A function that keeps its latest results, as with `lru_cache`, but only so many actions of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import wraps
from threading import Lock
from typing import ParamSpec, Protocol, TypeVar

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
    """The function, which gives the same object for the same arguments as long as that is kept."""
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
