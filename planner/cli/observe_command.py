"""`plan observe`: what a training log shows, beside what was predicted for its layout."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING

from planner.cli import options as o
from planner.cli.options import LayoutOptions, Saving, Word
from planner.cli.output import dumps, progress, show, show_and_save
from planner.errors import OutOfBand, SpecError, printable
from planner.files import write_text
from planner.saved import with_digest

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.answer import Plan
    from planner.observe.follower import Expected, FollowedRun, Follower
    from planner.observe.observation import Observation, Observed
    from planner.specs.base import Fields

_log = logging.getLogger(__name__)
MOST_FILES = 100_000
_LAYOUT = ("tp", "pp", "dp", "cp", "ep", "vpp", "micro_batch_size", "layers_per_stage", "layout", "zero_stage")
"""Options of which any says that the layout is the options' own."""


def observe_command(
    files: list[str],
    asked: LayoutOptions,
    plan: Word = None,
    follow: bool = False,
    only_slow: bool = False,
    *,
    saving: Saving,
) -> None:
    """Read a run's log: its steady step, what made steps slow, memory, where the wall time went; beside the prediction.

    The job comes from --plan, from the log's own arguments, or from options, which come first.

    \b
    Example:
      plan observe train.log --plan plan.json
      plan observe train.log --model llama3-8b --gpus 8 --tp 2 --hardware h100
      plan observe train.log --json
      plan observe --follow train.log --plan plan.json
    """

    if len(files) > MOST_FILES or files.count("-") > 1:
        raise SpecError(f"plan observe: {len(files)} files", "name the logs of one job, standard input once")
    saving.check()
    if only_slow and not follow:
        raise SpecError("--only-slow: given without --follow", "add --follow, or leave it out")
    if follow:
        if len(files) != 1:
            raise SpecError(f"plan observe --follow: {len(files)} files", "follow one log, that of rank 0")
        if saving.json and saving.is_to_stdout:
            raise SpecError("--json and -o -: both on standard output", "give -o a file")
        follower = _follower(files[0], only_slow, asked.tokens, _expected(plan, asked))
        follow_run(follower, saving)
        return
    answer, rendered = _observed(files, None if plan is None else _planned(plan, asked), plan, asked)
    show_and_save(with_digest(answer.model_dump(mode="json")), rendered, saving)


def _observed(
    files: list[str], expected: Plan | Observed | None, plan: str | None, asked: LayoutOptions
) -> tuple[Observed, RenderableType]:
    """The answer and how it is shown: the files beside the plan's file, else beside what options or the log say."""
    from rich.console import Group

    from planner.observe.judge import judged
    from planner.observe.log_reader import observe
    from planner.observe.traces.recorded import ObservedFiles, kinds_of, observation_of, read_recorded
    from planner.report.observe import recorded_sections, render_observed

    kinds = kinds_of(files)
    logs = [path for path in files if path not in kinds]
    with progress("reading", _mebibytes(files)) as advance:
        recorded = read_recorded(kinds, _grid(asked), advance) if kinds else None
        observation = observe(logs, advance, asdict(asked)) if recorded is None or logs else observation_of(recorded)
    source, doubt = plan or "the options", ""
    if expected is None:
        expected, source = _priced(observation, asked)
        doubt = _doubt(observation, asked)
    answer = judged(observation, expected, source, recorded, doubt)
    if recorded is None:
        return answer, render_observed(answer)
    whole = ObservedFiles(**dict(answer), recorded=recorded)
    return whole, Group(render_observed(answer), *recorded_sections(recorded))


def _expected(path: str | None, asked: LayoutOptions) -> Callable[[Observation], tuple[Plan | Observed | None, str]]:
    """The question what a followed run is held against, answered by its first steps; a plan's file is read at once."""
    if path is not None:
        planned = _planned(path, replace(asked, tokens=None))  # the end of the run may be said beside a plan
        return lambda observation: (planned, path)
    asked = asked if asked.model else replace(asked, tokens=None)

    def priced(observation: Observation) -> tuple[Plan | None, str]:
        if doubt := _doubt(observation, asked):
            if asked.model or observation.facts.run:
                _log.warning("nothing is predicted: %s", doubt)
            return None, ""
        return _priced(observation, asked)

    return priced


def _grid(asked: LayoutOptions) -> dict[str, int] | None:
    """The sizes that name process groups which traces leave undescribed."""
    sizes = {axis: getattr(asked, axis) for axis in ("tp", "cp", "dp", "pp")}
    return {axis: size or 1 for axis, size in sizes.items()} if any(sizes.values()) else None


def _mebibytes(files: list[str]) -> int | None:
    """The blocks that will be read; unknown for stdin and for what is packed."""
    if any(path == "-" or path.endswith(".gz") for path in files):
        return None
    return sum(os.path.getsize(path) // 2**20 for path in files if os.path.isfile(path)) + len(files)


def _given(asked: LayoutOptions) -> list[str]:
    names = [field.name for field in fields(asked)]
    return [name for name in names if getattr(asked, name) not in (None, False)]


def _planned(path: str, asked: LayoutOptions) -> Plan | Observed:
    """The plan or the earlier observation in a file."""
    from planner.cli.inputs import option
    from planner.observe.judge import is_observed, observed_of
    from planner.plan_file import plan_of
    from planner.specs.reading import read_saved

    if given := _given(asked):
        raise SpecError(f"--plan and {option(given[0])}: both given", "the plan says the job: leave the options out")
    data, where = read_saved(path)
    return observed_of(data, where) if is_observed(data) else plan_of(data, where)


def _priced(observation: Observation, asked: LayoutOptions) -> tuple[Plan | None, str]:
    """The price of the job that the options or the log's arguments say, and which of them; None where neither does."""
    from planner.observe.describe import SAID

    stated = observation.facts.run
    says_layout = any(getattr(asked, name) is not None for name in _LAYOUT)
    if asked.model is not None or stated:
        asked = replace(asked, hardware=asked.hardware or _hardware(observation.facts.hardware or ""))
    if says_layout or (asked.model is not None and not stated):
        return _of_options(observation, asked), "the options"
    if not stated:
        if idle := {*_given(asked)} - SAID.keys():
            _log.warning("the log states no model: --%s has no effect without --model", min(idle).replace("_", "-"))
        return None, ""
    batch = asked.global_batch_size or stated.get("global_batch_size") or observation.facts.global_batch_size
    return _of_arguments(stated, replace(asked, global_batch_size=batch)), "the log's arguments"


def _of_options(observation: Observation, asked: LayoutOptions) -> Plan:
    """The price of the options' layout; the log says the batch, the sequence and the GPUs that they leave out."""
    from planner.cli.inputs import priced
    from planner.observe.describe import SAID

    values: Fields = {name: getattr(asked, name) or getattr(observation.facts, fact) for name, fact in SAID.items()}
    if asked.batch_tokens is not None:
        values["global_batch_size"] = asked.global_batch_size
    return priced(replace(asked, **values))[2]


def _of_arguments(stated: Fields, asked: LayoutOptions) -> Plan | None:
    """The price of the run that the log dumps, with what the options add; None where something is missing."""
    from planner.cli.measurements import with_history
    from planner.export.imported_run import ImportedRun
    from planner.layout.evaluate import evaluate
    from planner.layout.runs import parse_run

    imported = ImportedRun("the log", dict(stated))  # a dump without a batch has one that nobody can guess
    try:
        run_data = imported.complete(
            model=asked.model,
            num_gpus=asked.gpus,
            hardware=asked.hardware,
            gpus_per_node=asked.gpus_per_node,
            seq_length=asked.seq_length,
            global_batch_size=asked.global_batch_size,
        )
        run = parse_run({"run": run_data}, "the log's arguments")
        cluster = run.cluster if asked.no_history else with_history(run.cluster, run.runtime)
        plan = evaluate(
            run.model, cluster, run.training, run.parallelism, runtime=run.runtime, says_switches=run.says_switches
        )
    except SpecError as error:
        _log.warning("no prediction: %s (%s)", error.message, error.hint)
        return None
    return plan


def _doubt(observation: Observation, asked: LayoutOptions) -> str:
    """The reason why a prediction may be of another GPU: on a guessed one, a step ten times as long means nothing."""
    from planner.probe.evidence import named_profiles

    if asked.hardware is not None or named_profiles(observation.facts.hardware or ""):
        return ""
    return f"the log names no GPU that is known, and {o.DEFAULT_HARDWARE} is a guess: add --hardware"


def _hardware(device: str) -> str:
    """The GPU that the log names: of several profiles the one with most words of its name."""
    from planner.probe.evidence import named_profiles, spelled

    named = named_profiles(device)
    if not named:
        _log.warning("--hardware is not given: predicted for %s", o.DEFAULT_HARDWARE)
        return o.DEFAULT_HARDWARE
    best = max(named, key=lambda known: (spelled(known, device), known.name == o.DEFAULT_HARDWARE))
    _log.info("--hardware %s: the log names %s", best.name, device)
    return best.name


_UNFOLLOWED = "plan observe FILE without --follow says where the seconds of the whole run went"
POLL_S = 0.5


def _follower(path: str, only_slow: bool, tokens: str | None, expected: Callable[[Observation], Expected]) -> Follower:
    """The follower of a log, or of standard input."""
    from planner.cli.inputs import count_of
    from planner.observe.follower import BandWatch, Follower
    from planner.observe.lines import source_of
    from planner.specs.reading import STDIN, label

    total_tokens = None if tokens is None else count_of("tokens", tokens)
    return Follower(
        label(path), source_of(path, _log.info), expected, time.monotonic, lambda: time.sleep(POLL_S),
        BandWatch(only_slow=only_slow), path == STDIN, total_tokens,
    )  # fmt: skip


def follow_run(follower: Follower, saving: Saving) -> None:
    """Follow a run until it ends, is interrupted, or leaves its band, which raises OutOfBand."""
    try:
        for found in follower.standings():
            _show_standing(found, saving)
    except KeyboardInterrupt:
        follower.ended = "interrupted"
    found = follower.standing(final=True)
    _show_standing(found, saving)
    _conclude(follower, found, saving)


def _show_standing(found: FollowedRun, saving: Saving) -> None:
    """One line on where the run stands; nothing where stdout is another's."""
    from planner.report.observe import line_of

    if saving.json:
        sys.stdout.write(dumps(found.model_dump(mode="json"), None))
    elif not saving.is_to_stdout:
        sys.stdout.write(printable(f"{line_of(found)}\n"))
    sys.stdout.flush()


def _conclude(follower: Follower, found: FollowedRun, saving: Saving) -> None:
    """The final answer, and the alarm if there is one."""
    from planner.report.observe import render_observed

    rings = follower.ended in ("alarm", "silent")
    answer = follower.answer(last_steps=rings)
    if answer is None:
        if follower.ended == "end of input":
            raise SpecError(f"{found.source}: has no lines of steps that are known", "pipe the output of a trainer")
        return
    if not saving.json and not saving.is_to_stdout:
        show("", render_observed(answer))
    if saving.output is not None:
        whole = follower.answer(last_steps=False) if rings else answer
        assert whole is not None
        write_text(saving.output, dumps(with_digest(whole.model_dump(mode="json"))), saving.force)
    if rings:
        shown = f"; {found.causes[0].name}: {found.causes[0].evidence}" if found.causes else ""
        raise OutOfBand(f"{found.source}: {found.says}{shown}", _UNFOLLOWED)
