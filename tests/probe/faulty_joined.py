"""Ranks of torchrun that fail on purpose: processes that break one thing and then run as usual."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from faulty import STOPS, at, out_of_memory_error, raise_error

from planner.cli import main
from planner.probe.launch import joined
from planner.probe.rank import groups, worker


def out_of_memory() -> None:
    at("1F1", out_of_memory_error)


def raising() -> None:
    at("1B1", raise_error)


def impatient() -> None:
    """A watch that allows phases before the first step no more time than steps."""
    groups.START_TIMEOUT_S = groups.SILENT_S = 0.0


def hasty() -> None:
    """A rank that waits for others a moment only."""
    joined.MEET_S = worker.MEET_S = 4.0


def killed() -> None:
    at("1F1" if os.environ["RANK"] == "1" else "0F1", lambda: os.kill(os.getpid(), signal.SIGKILL))


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
