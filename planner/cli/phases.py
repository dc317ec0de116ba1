"""`plan … --phases FILE`: a run of phases, whose options stand in a file beside those of the command line."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from planner.cli.job_options import PlanOptions, command_line
from planner.errors import PlannerError, SpecError

if TYPE_CHECKING:
    from planner.decide.phases import Batch, Phase, PhasesAnswer
    from planner.specs.phases import PhaseSpec

_log = logging.getLogger(__name__)
FEWEST_FOR_PROCESSES = 3
"""Phases from which on processes win back the second or two that they take to start."""
SUMMARY = "phases.json"


def plan_phases(asked: PlanOptions, path: str, as_json: bool, output: str | None, force: bool) -> None:
    """Plan the phases of a file, print the run, and save it: a file of all, or a folder with a plan of each."""
    from planner.cli.output import dumps, progress, show
    from planner.decide.course import run_of_phases
    from planner.decide.processes import processes
    from planner.files import STDOUT
    from planner.report.phases import render_phases
    from planner.specs.phases import read_phases

    if asked.from_ is not None or asked.keep is not None:
        other = "--from" if asked.from_ is not None else "--keep"
        raise SpecError(f"{other} and --phases: both given", f"plan the phases without {other}")
    if asked.tokens is not None:
        raise SpecError(
            "--tokens and --phases: both given", "leave --tokens out: the file says how many each phase has"
        )
    file = read_phases(path)
    said = set[str]()
    phases = [_phase(asked, spec, path, said) for spec in file.phases]
    paths = _paths(output, [phase.name for phase in phases], force)
    with (
        progress("planning phases", 2 * len(phases)) as advance,
        processes(len(phases), FEWEST_FOR_PROCESSES, "planner.decide.phases", advance) as each,
    ):
        run = run_of_phases(phases, each, file.reshard_hours, command_line(asked))
    # printed first, so that a file that cannot be written loses nothing
    if as_json and output != STDOUT:
        sys.stdout.write(dumps(run.to_json()))
    elif output != STDOUT:
        show(render_phases(run))
    if output is not None:
        _save(run, output, paths, force)


def _phase(asked: PlanOptions, spec: PhaseSpec, path: str, said: set[str]) -> Phase:
    """A phase as the command line and the file describe it; SpecError naming the file and the phase."""
    from planner.cli.inputs import read_job, read_limits
    from planner.decide.phases import Phase
    from planner.search.case import Case
    from planner.specs.reading import label

    own = replace(_options(asked, spec), phases=None)
    try:
        job = read_job(own, said)
        limits = read_limits(own, job)
        training, ramp = job.training, spec.rampup
        batches = tuple(_batches(spec, training.global_batch_size, training.seq_length))
        tokens = sum(batch.tokens for batch in batches)
    except PlannerError as error:
        error.message = f"{label(path)}: phase {spec.name}: {error.message}"
        raise
    training = training.model_copy(update={"tokens": float(tokens), "document_lengths": spec.lengths})
    is_plain = spec.lengths is None and ramp is None
    command = command_line(replace(own, tokens=str(round(tokens)))) if is_plain else command_line(asked)
    return Phase(spec.name, Case(job.model, job.cluster, training, job.runtime_spec, limits), batches, command)


def _options(asked: PlanOptions, spec: PhaseSpec) -> PlanOptions:
    """The options of the command line with those of the phase in their places."""
    stated = {name: getattr(spec, name) for name in ("seq_length", "dtype", "gpus", "allow", "switch")}
    batch = spec.global_batch_size
    if spec.batch_tokens is None and batch is None and spec.rampup is not None:
        batch = spec.rampup.to
    if batch is not None or spec.batch_tokens is not None:
        asked = replace(asked, global_batch_size=None, batch_tokens=None)
        stated |= {
            "global_batch_size": batch,
            "batch_tokens": None if spec.batch_tokens is None else str(spec.batch_tokens),
        }
    # operations are said to have no effect without tokens; how many a phase has is known when its batch is
    return replace(asked, tokens="1e15", **{name: value for name, value in stated.items() if value is not None})


def _batches(spec: PhaseSpec, last: int, seq_length: int) -> Iterator[Batch]:
    """The batches of a phase, the last one at the end."""
    from planner.decide.phases import Batch

    ramp, left = spec.rampup, float(spec.tokens or 0)
    if spec.steps is not None:
        left = float(spec.steps) * last * seq_length
    if ramp is not None:
        if ramp.start >= last or (last - ramp.start) % ramp.by:
            near = (
                max(d for d in range(1, min(ramp.by, last) + 1) if (last - ramp.start) % d == 0)
                if ramp.start < last
                else 1
            )
            raise SpecError(
                f"rampup: from {ramp.start:,} by {ramp.by:,} does not reach the batch of {last:,} sequences",
                f"write by: {near}" if ramp.start < last else f"let it begin below {last:,}, or leave rampup out",
            )
        samples = float(ramp.samples) if ramp.samples is not None else float(ramp.tokens or 0) / seq_length
        sizes = ramp.batches(last)
        each = samples * seq_length / len(sizes)
        left -= each * len(sizes)
        if left <= 0:
            raise SpecError(
                f"rampup: lasts {samples * seq_length:,.0f} tokens, the phase {float(spec.tokens or 0):,.0f}",
                f"give the phase more tokens than {samples * seq_length:,.0f}",
            )
        yield from (Batch(size, each) for size in sizes)
    if not math.isfinite(left):
        raise SpecError("tokens: is too large", "write tokens: 15T")
    yield Batch(last, left)


def _paths(output: str | None, names: list[str], force: bool) -> dict[str, str]:
    """The files of a folder's plans by phase, none of which may be there already; empty where a file is asked for."""
    from planner.files import STDOUT, refuse_to_overwrite

    if output is None or output == STDOUT:
        return {}
    if not (output.endswith("/") or os.path.isdir(output)):
        refuse_to_overwrite(output, force)
        return {}
    paths = {name: os.path.join(output, f"plan-{name}.json") for name in names}
    if os.path.isdir(output):
        for file in (*paths.values(), os.path.join(output, SUMMARY)):
            refuse_to_overwrite(file, force)
    return paths


def _save(run: PhasesAnswer, output: str, paths: dict[str, str], force: bool) -> None:
    """Write one file, or a folder with a plan of each phase and the whole run."""
    from planner.cli.output import dumps
    from planner.files import STDOUT, FolderFile, write_folder, write_text

    if not paths:
        write_text(output, dumps(run.to_json()), force)
        if output != STDOUT:
            folder = PurePath(output).stem
            _log.info("wrote %s; -o %s/ writes a plan of each phase, which other commands read", output, folder)
        return
    files = [FolderFile(os.path.basename(paths[phase.name]), phase.plan.saved_text().encode()) for phase in run.phases]
    write_folder(Path(output), [*files, FolderFile(SUMMARY, dumps(run.to_json()).encode())], force)
    _log.info("wrote %s, and %s with a plan of each phase", os.path.join(output, SUMMARY), ", ".join(paths.values()))
