"""Ranks of torchrun that fail on purpose: processes that break one thing and then run as usual."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from faulty import STOPS, at, out_of_memory_error, raise_error

from planner.cli import main
from planner.errors import ProbeError
from planner.probe.launch.joined import run_stages
from planner.probe.rank import status
from planner.probe.result import MeasuredRun, RankResult
from planner.probe.run import ProbeRun


def out_of_memory() -> None:
    at("1F1", out_of_memory_error)


def raising() -> None:
    at("1B1", raise_error)


def impatient() -> None:
    """A watch that allows phases before the first step no more time than steps."""
    status.START_TIMEOUT_S = 0.0


def stopped() -> None:
    impatient()
    STOPS["build"]()


def rank(arguments: Sequence[str], environment: Mapping[str, str], outputs: Sequence[str], fault: Any) -> None:
    """A rank as torchrun starts it, in a process that has imported torch already; `fault` happens to it first."""
    os.environ.update(environment)
    tempfile.tempdir = os.path.dirname(outputs[0])
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    torch.set_num_threads(1)
    if fault is not None:
        fault()
    sys.exit(main(list(arguments)))


def stage_as_told(run: ProbeRun, child: Any, ranks: Sequence[int], failing: Sequence[int]) -> MeasuredRun:
    """A launcher that measures nothing: stages of `failing` fail, all others say on which device they would run."""
    stage = run.place(ranks[0]).pp
    if stage in failing:
        raise ProbeError(f"stage {stage} failed", "mend it")
    rank = RankResult(
        rank=ranks[0], stage=stage, dp=0, tp=0, torch_version="", device_name=f"GPU {child.keywords['first_device']}",
        num_parameters=0, steps=(), actions=(), peak_in_flight_chunks=0,
    )  # fmt: skip
    return MeasuredRun(run=run, ranks=(rank,))


def spread_stages(
    run: ProbeRun, stages: Sequence[int], environment: Mapping[str, str], failing: Sequence[int], answer: Path
) -> None:
    """One rank of torchrun among which stages are spread; it writes what it was given."""
    os.environ.update(environment)
    try:
        measured = run_stages(run, stages, partial(stage_as_told, failing=failing))
    except ProbeError as error:
        answer.write_text(error.message)
        return
    said = None if measured is None else [(one.ranks[0].stage, one.ranks[0].device_name) for one in measured]
    answer.write_text(json.dumps(said))
