"""A question that the page asks: the case to plan, and the command line that asks the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.errors import SpecError
from planner.search.case import Case

Options = Mapping[str, str]
"""The texts of the command line's options, by their names in Python; what is not there was not given."""
MAX_TIME_LIMIT_S = 120.0
"""The longest search that the page may ask for: a process is busy meanwhile."""
MAX_TOP = 50
"""The most alternatives that the page may ask for."""


@dataclass(frozen=True, slots=True)
class Question:
    """One job as the page asks it."""

    case: Case
    command: str

    @property
    def key(self) -> str:
        """The same for the same model, cluster, training, trainer and limits, however they were spelled."""
        case = self.case
        specs = (case.model, case.cluster, case.training, case.runtime, case.limits)
        data = [spec.model_dump(mode="json") for spec in specs]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


Reader = Callable[[Options], Question]
"""Reads options as the command line does; raises SpecError naming the option."""


def asked(read: Reader, options: Options) -> Question:
    """The question of the options. Raises SpecError as `read` does, and for a search that keeps others waiting."""
    question = read(options)
    limits = question.case.limits
    if limits.time_limit_s > MAX_TIME_LIMIT_S:
        raise SpecError(
            f"--time-limit: {limits.time_limit_s:g} s is longer than this page searches",
            f"at most {MAX_TIME_LIMIT_S:g} here; the command line takes any",
        )
    if limits.top > MAX_TOP:
        raise SpecError(f"--top: {limits.top} are more than this page shows", f"at most {MAX_TOP} here")
    return question
