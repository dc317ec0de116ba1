#!/usr/bin/env python3
"""Rank the layouts of trials.json by the step times in their logs, measured beside predicted.

    python3 rank_trials.py [FOLDER]

It reads every *.log, *.out and *.txt in the trials' folders and needs nothing but Python 3.9. A rank's first steps are
left out: they compile and allocate.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from re import Pattern
from typing import Any

SKIPPED = 5
"""Steps at the beginning that are not counted, where as many others are left."""
Trial = dict[str, Any]


def per_gpu(found: str, trial: Trial) -> float:
    """Seconds of a step at a rate of tokens per second and GPU."""
    rate = float(found.replace(",", ""))
    return float(trial["tokens_per_step"]) / (rate * trial["num_gpus"]) if rate else float("inf")


SECONDS: tuple[tuple[Pattern[str], Callable[[str, Trial], float]], ...] = (
    # Megatron-LM: elapsed time per iteration (ms): 3210.5
    (re.compile(r"elapsed time per iteration \(ms\): *([\d.]+)"), lambda found, trial: float(found) / 1000),
    # Megatron-Bridge: Step Time : 3.21s
    (re.compile(r"[Ss]tep [Tt]ime *:? *([\d.]+) ?s"), lambda found, trial: float(found)),
    # torchtitan: tps: 5,678 (tokens per second and GPU)
    (re.compile(r"\btps: *(?:\x1b\[[\d;]*m)?([\d,]+)"), per_gpu),
    # DeepSpeed: CurrSamplesPerSec=12.3
    (re.compile(r"CurrSamplesPerSec=([\d.]+)"), lambda found, trial: trial["global_batch_size"] / float(found)),
    # planner's own runner: step 12: 3.21 s
    (re.compile(r"\bstep \d+: *([\d.]+) s\b"), lambda found, trial: float(found)),
)


def measured_s(folder: Path, trial: Trial) -> tuple[float, int] | None:
    """The median step of the log that has most, and how many steps it rests on; None without a log."""
    best: list[float] = []
    for path in sorted(p for end in ("*.log", "*.out", "*.txt") for p in folder.rglob(end)):
        text = path.read_text(errors="replace")
        for pattern, seconds in SECONDS:
            steps = [seconds(found, trial) for found in pattern.findall(text)]
            if len(steps) > len(best):
                best = steps
    kept = best[SKIPPED:] if len(best) >= 2 * SKIPPED else best
    return (statistics.median(kept), len(kept)) if kept else None


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
    trials = json.loads((root / "trials.json").read_text())["trials"]
    rows = [(trial, measured_s(root / trial["folder"], trial)) for trial in trials]
    rows.sort(key=lambda row: row[1][0] if row[1] else float("inf"))
    print(f"{'trial':8} {'measured':>10} {'predicted':>10} {'off by':>8} {'tokens/s':>12}  layout")
    for trial, found in rows:
        predicted = trial["step_s"]
        if found is None:
            print(f"{trial['folder']:8} {'no log':>10} {predicted:8.3f} s {'':8} {'':12}  {trial['layout']}")
            continue
        seconds, count = found
        rate = trial["tokens_per_step"] / seconds
        off = f"{100 * (seconds / predicted - 1):+.1f}%"
        times = f"{seconds:8.3f} s {predicted:8.3f} s {off:>8}"
        print(f"{trial['folder']:8} {times} {rate:12,.0f}  {trial['layout']} ({count} steps)")
    if not any(found for _, found in rows):
        sys.exit(
            "no trial has a log with step times: run them with run_trials.sh, or put their logs into their folders"
        )


if __name__ == "__main__":
    main()
