"""Every way in which the planner fails, and the exit code of each.

PlannerError                 1
├─ SpecError                 2   bad or unknown model, hardware or training spec: file, field, value, nearest match
│  └─ Unsupported            2   nothing wrong with it, but outside what is modelled: no number rather than a bad one
├─ Infeasible                3   nothing fits: counts by reason, the nearest miss, the smallest change that lifts it
├─ SolverError               4   the solver failed or found nothing in time
├─ ProbeError                5   the probe could not run: rank, stage and phase named
├─ ProbeMismatch             6   it ran and disagreed beyond the tolerance
└─ OutOfBand                 7   an observed run left its predicted band (observe --follow)
"""

from __future__ import annotations

import os
import re
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class PlannerError(Exception):
    """A failure the user can act on: one `error:` line and one `hint:` line, never a traceback."""

    exit_code = 1
    follows_answer = False
    """True if stdout has its answer already when this is raised; the exit code is then a verdict on that answer."""
    json_type = ""
    """The `type` of the error as JSON, where that is not the class's own name."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def lines(self) -> str:
        """The lines that stderr shows: `error:` and, if there is one, `hint:`, each on one line."""
        labels = (("error", self.message), ("hint", self.hint))
        return "".join(f"{label}: {one_line(text)}\n" for label, text in labels if text)

    def to_json(self) -> dict[str, Any]:
        """The error as plain data, which `--json` prints in place of an answer."""
        return {"error": {"type": self.json_type or type(self).__name__, "message": self.message, "hint": self.hint}}


MAX_WORD, MAX_LINE = 200, 2_000
"""The most characters that a line on stderr shows of one word, and of all."""
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD + 1},}}")


def printable(text: str) -> str:
    """`text` without what could steer a terminal that shows it: escape sequences and other controls, bidi marks.

    Ends of lines and tabs stay. Whatever the planner prints goes through here, since a file that somebody else wrote
    may name anything.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def one_line(text: str) -> str:
    """`text` as a line of stderr: printable, and cut in the middle where a word or the whole is long."""
    line = printable(" ".join(text.split()))
    return shortened(_LONG_WORD.sub(lambda word: shortened(word[0], MAX_WORD), line), MAX_LINE)


def shortened(text: str, most: int) -> str:
    """The begin and the end of a text that is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[len(text) - (most - most // 2 - 1) :]}"


def defect(error: Exception) -> PlannerError:
    """An exception that nobody foresaw, as one line: what happened and where."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return PlannerError(
        f"internal: {type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})",
        "this is a defect of the planner: run again with --debug and report what it prints",
    )


class SpecError(PlannerError):
    """The user's input is wrong: the message names file, field and value."""

    exit_code = 2


class Unsupported(SpecError):
    """The user asks for something that exists and is outside what is modelled: no number rather than a bad one."""


class LayoutError(SpecError):
    """No trainer starts this layout: its ranks, stages, sequences or experts do not divide."""

    json_type = "SpecError"


class Infeasible(PlannerError):
    """No layout is legal and fits into memory.

    `rejections` counts shapes by the reason that excludes them, `nearest` is the layout that lacks least memory and
    `remedy` the smallest change that makes something fit (its `options` are words of the command line). Both are plain
    data for JSON, and None if nobody worked them out.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        hint: str = "",
        rejections: dict[str, int] | None = None,
        *,
        nearest: Mapping[str, Any] | None = None,
        remedy: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.rejections = rejections or {}
        self.nearest, self.remedy = nearest, remedy

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "rejections": self.rejections, "nearest": self.nearest, "remedy": self.remedy}


class SolverError(PlannerError):
    """The solver failed, or found nothing before the time limit."""

    exit_code = 4


class ProbeError(PlannerError):
    """The probe could not run; rank, stage and phase are named."""

    exit_code = 5


class ProbeMismatch(PlannerError):
    """The probe ran, and measured something beyond the tolerance."""

    exit_code = 6
    follows_answer = True


class OutOfBand(PlannerError):
    """A run that is followed left its predicted band for too many steps."""

    exit_code = 7
    follows_answer = True
