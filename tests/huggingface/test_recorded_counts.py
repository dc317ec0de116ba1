"""Peaks of whole models, counted once with transformers 5.23, peft 0.21, bitsandbytes 0.50 and torch 2.13.

`tools/count_finetuning` prints them (docs/FINETUNE.md); here the planner is held against them without it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from finetuning_jobs import Job, planned

from planner.specs.units import GIB

LLAMA = Job("Llama 3.1 8B", 2048)
SMALL = Job("Llama 3.2 1B", 1024, 4)
COUNTED = (
    (LLAMA, 13.30, 60.13),
    (replace(LLAMA, checkpointing=True), 1.54, 59.85),
    (replace(LLAMA, rank=16), 14.33, 31.71),
    (replace(LLAMA, rank=16, checkpointing=True), 1.51, 18.89),
    (replace(LLAMA, rank=16, base_bits=4), 12.25, 19.75),
    (replace(LLAMA, rank=16, base_bits=4, checkpointing=True), 1.51, 9.01),
    (Job("Llama 3.1 8B", 512, rank=8, targets=("q_proj", "v_proj")), 2.63, 18.11),
    (Job("Llama 3.1 8B", 4096, 4, rank=64, checkpointing=True), 12.08, 44.57),
    (Job("Llama 3.1 8B", 1024, 4, rank=64, base_bits=4, dropout=0.05), 33.29, 43.45),
    (Job("Llama 3.1 8B", 4096, rank=32, dropout=0.05), 33.39, 53.20),
    (Job("Llama 3.1 8B", 1024, 2, 4), 13.30, 75.09),
    (SMALL, 8.65, 19.47),
    (replace(SMALL, checkpointing=True), 2.27, 13.09),
    (replace(SMALL, rank=16), 9.13, 15.47),
    (replace(SMALL, rank=16, base_bits=4, checkpointing=True), 2.24, 7.17),
    (Job("Qwen2.5 7B", 1024), 6.63, 56.75),
)
"""A job with the GiB that its forward and loss keep, and those of its peak."""


@pytest.mark.parametrize(("job", "kept_gib", "peak_gib"), COUNTED, ids=lambda value: getattr(value, "name", value))
def test_the_planner_says_what_was_counted(job: Job, kept_gib: float, peak_gib: float) -> None:
    plan = planned(job)
    assert plan.kept_bytes / GIB == pytest.approx(kept_gib, rel=0.01)
    assert plan.peak_bytes / GIB == pytest.approx(peak_gib, rel=0.01)


def test_gradients_of_one_microbatch_come_as_activations_go() -> None:
    one, more = (planned(replace(LLAMA, num_microbatches=number)) for number in (1, 2))
    assert one.kept_bytes == more.kept_bytes
    with_gradients = one.static_bytes + 2 * one.trained_parameters
    assert with_gradients < one.peak_bytes < with_gradients + one.kept_bytes < more.peak_bytes
