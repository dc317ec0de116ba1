"""DeepSpeed's throughput lines of two generationsand its breakdown."""

from __future__ import annotations

from pathlib import Path

import pytest
from written import read

from planner.specs.units import GIB

# DeepSpeed issue 2629
OLD = (
    "[2022-12-20 02:07:14,130] [INFO] [timer.py:197:stop] 0/{}, RunningAvgSamplesPerSec=158.31, "
    "CurrSamplesPerSec=160.0, MemAllocated=1.75GB, MaxMemAllocated=2.6GB"
)
NEW = OLD.replace("0/{},", "epoch=0/micro_step={0}/global_step={0},").replace("timer.py:197", "timer.py:260")
OLDEST = "[2022-03-11 02:07:{:02},130] [INFO] [timer.py:189:stop] 0/{}, SamplesPerSec=83.7, MaxMemAllocated=9.02GB"
BATCH = "[2022-12-20 02:07:00,130] [INFO] [config.py:1014:print]   train_batch_size ............. 320"
# accelerate issue 1589
BREAKDOWN = (
    "[2023-06-21 07:39:09,625] [INFO] [logging.py:96:log_dist] [Rank 0] rank=0 time (ms) | forward_microstep: 27.48 | "
    "backward_microstep: 73.59 | backward_inner_microstep: 51.05 | backward_allreduce_microstep: 22.49 | "
    "step_microstep: 72.59"
)


@pytest.mark.parametrize("line", [OLD, NEW])
def test_samples_per_second_of_a_batch_are_a_step(tmp_path: Path, line: str) -> None:
    seen = read(tmp_path, "\n".join([BATCH, *(line.format(step) for step in (10, 20, 30))]))
    assert (seen.step_s, seen.series.steps) == (2.0, (10, 20, 30))
    assert seen.facts.global_batch_size == 320
    assert (seen.peak_memory_bytes, seen.peak_memory_kind) == (round(2.6 * GIB), "allocated")


def test_a_running_average_is_no_step_but_the_clock_says_them(tmp_path: Path) -> None:
    seen = read(tmp_path, "\n".join(OLDEST.format(10 + 5 * step, 10 * step) for step in range(1, 5)))
    assert (seen.step_s, seen.series.steps) == (0.5, (20, 30, 40))
    assert any("batch is not stated" in note for note in seen.notes)


def test_the_breakdown_is_timers(tmp_path: Path) -> None:
    seen = read(tmp_path, f"{BATCH}\n{OLD.format(10)}\n{BREAKDOWN}")
    assert {timer.name: timer.max_s for timer in seen.timers}["backward_microstep"] == pytest.approx(0.07359)
    assert any("synchronises" in note for note in seen.notes)
