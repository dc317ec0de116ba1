"""What a rank holds at its worst, read off a few rounds of a schedule, is what it holds over the whole step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from toys import toy_model, toy_problem

from planner.schedule.orders import SCHEDULES, build_schedule, violation
from planner.search.room import few_rounds, peak_activation_bytes

PP, NUM_MICROBATCHES = 4, 48


TRAINING = [name for name, kind in SCHEDULES.items() if kind.trains_one_copy]


@pytest.mark.parametrize(
    ("schedule", "vpp"),
    [(name, vpp) for name in TRAINING for vpp in (1, 2) if not violation(name, PP, vpp, NUM_MICROBATCHES)],
)
def test_a_few_rounds_hold_what_the_whole_step_holds(schedule: str, vpp: int) -> None:
    problem = toy_problem(toy_model(8), runtime="torch-eager", pp=(PP,))
    table, *_ = (table for table, *_ in problem.nodes())
    table = replace(table, shape=replace(table.shape, vpp=vpp, num_microbatches=NUM_MICROBATCHES))
    live_bytes = [float(stage + 1) for stage in range(PP * vpp)]
    whole = build_schedule(schedule, PP, vpp, NUM_MICROBATCHES)
    few = few_rounds(table, schedule)
    assert peak_activation_bytes(few, live_bytes) == peak_activation_bytes(whole, live_bytes)
