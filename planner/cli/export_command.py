"""`plan export`: a plan as the files that a trainer takes as they are."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from planner.cli.options import Whole, Word
from planner.errors import printable

if TYPE_CHECKING:
    from pathlib import Path

    from planner.answer import Plan
    from planner.export.export import Bundle

_log = logging.getLogger(__name__)


def export_command(
    plan: str,
    to: str,
    alternative: Whole = None,
    image: Word = None,
    trials: Whole = None,
    output: Word = None,
    dry_run: bool = False,
    force: bool = False,
    json: bool = False,
) -> None:
    """Write the files that a trainer or a scheduler takes as they are, or say what it cannot express.

    \b
    Example:
      plan export plan.json --to megatron -o run
      plan export plan.json --to torchtitan,kubernetes --dry-run
    """
    from pathlib import Path

    from planner.cli.output import dumps
    from planner.export.export import bundle_of, default_folder, write_bundle
    from planner.plan_file import read_plan, with_alternative

    chosen = with_alternative(read_plan(plan), alternative)
    if trials is not None:
        _write_trials(chosen, trials, to, image, output, force)
        return
    bundle = bundle_of(chosen, to, image, force)
    for note in (*bundle.notes, *_left_to_the_user(bundle)):
        _log.info("%s", note)
    if dry_run:
        sys.stdout.write(dumps(_with_texts(bundle)) if json else printable(_texts(bundle)))
        return
    folder = Path(output or default_folder(chosen, bundle))
    paths = write_bundle(bundle, folder, force)
    sys.stdout.write(dumps({**bundle.manifest(), "folder": str(folder)}) if json else printable(_listing(paths)))


def _write_trials(plan: Plan, count: int, to: str, image: str | None, output: str | None, force: bool) -> None:
    """The plan and its next best layouts, each in a folder of its own; their paths on stdout."""
    from pathlib import Path

    from planner.export.export import trials_of, write_trials
    from planner.export.trainer_files import slug
    from planner.plan_file import with_alternative

    most = len(plan.alternatives)
    if count > most:
        _log.info("the plan keeps %d alternatives, not %d: plan … --top N keeps more", most, count)
    plans = [plan, *(with_alternative(plan, number) for number in range(1, min(count, most) + 1))]
    trials, notes = trials_of(plans, to, image, force)
    for note in notes:
        _log.info("%s", note)
    folder = Path(output or f"{slug(plan.model.name)}-trials")
    sys.stdout.write(printable(_listing(write_trials(trials, folder, force))))


def _left_to_the_user(bundle: Bundle) -> Iterator[str]:
    """The values that the user fills in, and the run to begin with."""
    required = [place for place in bundle.placeholders if not (place.is_optional or place.default)]
    for place in required:
        yield f"fill in {place.name}: {place.meaning}"
    others = [place.name for place in bundle.placeholders if place not in required]
    if others:
        yield f"change where yours is another: {', '.join(others)}"
    if bundle.first_run:
        yield f"first run, to hold against the plan: {bundle.first_run}"


def _listing(paths: list[Path]) -> str:
    return "".join(f"{path}\n" for path in paths)


def _texts(bundle: Bundle) -> str:
    return "\n".join(f"==> {file.name} <==\n{file.text}" for file in bundle.with_manifest())


def _with_texts(bundle: Bundle) -> dict[str, Any]:
    return {**bundle.manifest(), "texts": {file.name: file.text for file in bundle.files}}
