"""Writes the action list of one rank from patterns such as `F0 I1 W1`, counting micro-batches per chunk."""

from __future__ import annotations

from collections import Counter, deque

from planner.schedule.actions import Action


class Tape:
    """The action list of one rank while it is being written.

    A pattern names kinds and local chunks: `F0` is the next forward of chunk 0, `B1` the next full backward of chunk 1,
    `W` without a chunk the oldest weight gradient still owed, and `F0&B1` a forward that runs together with a backward.
    """

    def __init__(self, stages: tuple[int, ...], first_microbatches: tuple[int, ...] = (0, 0)) -> None:
        self.actions: list[Action] = []
        self.overlapped: list[int] = []
        self._stages = stages
        self._first = first_microbatches
        self._count: Counter[tuple[str, int]] = Counter()
        self._owed: deque[tuple[int, int]] = deque()

    def count(self, kind: str, chunk: int) -> int:
        """Number of actions of this kind that the chunk has run; a full backward counts as I and as W."""
        return self._count[kind, chunk]

    def add(self, pattern: str, times: int = 1) -> None:
        """Append the pattern `times` times."""
        for _ in range(times):
            for token in pattern.split():
                forward, ampersand, backward = token.partition("&")
                if ampersand:
                    self.overlapped.append(len(self.actions))
                    self._append(forward)
                    self._append(backward)
                else:
                    self._append(token)

    def _append(self, token: str) -> None:
        if token == "W":
            if self._owed:
                chunk, microbatch = self._owed.popleft()
                self.actions.append(Action("W", self._stages[chunk], microbatch))
            return
        kind, chunk = token[0], int(token[1:])
        counted = "I" if kind == "B" else kind
        microbatch = self._first[chunk] + self._count[counted, chunk]
        self._count[counted, chunk] += 1
        if kind == "B":
            self._count["W", chunk] += 1
        if kind == "I":
            self._owed.append((chunk, microbatch))
        self.actions.append(Action(kind, self._stages[chunk], microbatch))
