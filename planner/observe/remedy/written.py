"""The settings of a trainer that make one layout or recipe of another, in the words that `plan export` writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress

from planner.answer import Plan
from planner.errors import PlannerError
from planner.export.targets import TRAINERS, TrainerTarget
from planner.layout.candidate import Candidate
from planner.layout.replan import layout_again

_COMMENT = re.compile(r"^\s*(#|//|$|from |import )")
_ITEM = re.compile(r"^\s*- ")
_ENVIRONMENT = re.compile(r"^\W*[A-Z][A-Z0-9_]+\W")
_LONGEST = 160
"""Characters of a line that is a setting; longer ones are lists of stages or scripts."""


def settings_between(plan: Plan, before: Candidate, after: Candidate) -> tuple[str, ...]:
    """The settings that the trainer's files have for `after` and not for `before`, then `without …` for those that go.

    Variables of the environment stand last. Empty where no exporter writes the plan's trainer, or where it refuses one
    of the two.
    """
    target = _target(plan)
    if target is None:
        return ()
    with suppress(PlannerError):
        old, new = (_lines(target, plan, candidate) for candidate in (before, after))
        named = {_name(line) for line in new}
        gone = [f"without {line}" for line in old if line not in new and _name(line) not in named]
        come = sorted((line for line in new if line not in old), key=lambda line: bool(_ENVIRONMENT.match(line)))
        return (*come, *gone)
    return ()


def settings_about(plan: Plan, candidate: Candidate, pattern: str) -> tuple[str, ...]:
    """The settings that the trainer's files have for a layout and whose names match; none where no exporter has any."""
    target = _target(plan)
    with suppress(PlannerError):
        lines = _lines(target, plan, candidate) if target is not None else []
        return tuple(line for line in lines if re.search(pattern, _name(line)))
    return ()


def _target(plan: Plan) -> TrainerTarget | None:
    """The exporter of the plan's trainer, or of what it is a kind of."""
    names = (plan.runtime, plan.runtime_spec.name, plan.runtime_spec.family)
    return next((target for name in names for target in TRAINERS.values() if name in target.runtimes), None)


def _lines(target: TrainerTarget, plan: Plan, candidate: Candidate) -> list[str]:
    """The settings in the files of a layout; steps, which say when to save, are those of the plan."""
    layout = layout_again(plan, candidate, exact=False)
    layout = layout.model_copy(update={"step": plan.best.step, "sustained": plan.best.sustained})
    changed = {"best": layout, "runtime_spec": candidate.pricing.runtime, "alternatives": (), "planned_as": None}
    files = target.write(plan.model_copy(update=changed)).files
    return list(dict.fromkeys(line for file in files for line in _settings(file.text)))


def _settings(text: str) -> Iterator[str]:
    """The settings of a file, one a line: lists in one, and options as a command line has them."""
    lines: list[str] = []
    for line in text.splitlines():
        if _ITEM.match(line) and lines:
            lines[-1] += f" {_ITEM.sub('', line).strip()}"
        elif not _COMMENT.match(line):
            lines.append(line.strip().rstrip(","))
    for line in lines:
        if len(line) <= _LONGEST:
            typed = re.sub(r": (true$)?|:$", " ", line, count=1).strip() if line.startswith("--") else line
            yield re.sub(r'^"([^"]*)"$', r"\1", typed)


def _name(line: str) -> str:
    """The part of a setting before its value."""
    return re.split(r"[ :=(]", line, maxsplit=1)[0].strip()
