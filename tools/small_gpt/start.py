"""Starts all ranks of a run, in processes that inherit the loaded libraries."""

from __future__ import annotations

import multiprocessing
import shutil

import torch.multiprocessing
from small_gpt.job import Run
from small_gpt.trainer import rank_main

NUM_NEIGHBOURS = 2


def train(run: Run) -> None:
    """Run all ranks to the end; its folder is made anew."""
    shutil.rmtree(run.folder, ignore_errors=True)
    run.folder.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    count = NUM_NEIGHBOURS if run.fault.kind == "neighbour" else 0
    busy = [context.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in busy:
        process.start()
    try:
        torch.multiprocessing.start_processes(rank_main, (run,), run.layout.num_ranks, start_method="fork")
    finally:
        for process in busy:
            process.terminate()
            process.join()
    (run.folder / "store").unlink(missing_ok=True)


def _spin() -> None:
    while True:
        sum(range(10_000))
