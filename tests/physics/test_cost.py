"""Parts of a stage: how they add up."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from planner.physics.cost import PartCost, sum_parts

QUANTITIES = [field.name for field in fields(PartCost)]
TOTALS = ["forward_total_s", "input_grad_total_s", "backward_total_s", "total_s", "static_bytes"]


def part(seed: int) -> PartCost:
    numbers = np.random.default_rng(seed)
    return PartCost(**{name: float(numbers.uniform(1, 2)) for name in QUANTITIES})


def test_parts_add_up_but_for_what_is_needed_for_a_moment() -> None:
    one, two, three = part(1), part(2), part(3)
    both = one + two
    for name in QUANTITIES:
        mine, other = getattr(one, name), getattr(two, name)
        assert getattr(both, name) == (max(mine, other) if name == "transient_bytes" else mine + other)
    for name in TOTALS:
        assert getattr(both, name) == pytest.approx(getattr(one, name) + getattr(two, name))
    whole = sum_parts([one, two, three])
    for name in QUANTITIES:
        assert getattr(whole, name) == pytest.approx(getattr(one + (two + three), name))
    assert all(getattr(sum_parts([]), name) == 0 for name in QUANTITIES)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_part_several_times_is_its_sum(count: int) -> None:
    one = part(4)
    many, added = one.times(count), sum_parts([one] * count)
    for name in QUANTITIES:
        assert getattr(many, name) == pytest.approx(getattr(added, name)), name


def test_totals_are_sums_of_compute_and_exchanges() -> None:
    one = part(5)
    forward = one.forward_s + one.tp_forward_s + one.cp_forward_s + one.ep_forward_s
    backward = one.input_grad_s + one.tp_backward_s + one.cp_backward_s + one.ep_backward_s + one.weight_grad_s
    assert one.forward_total_s == pytest.approx(forward)
    assert one.backward_total_s == pytest.approx(backward)
    assert one.total_s == pytest.approx(forward + backward)
    assert one.static_bytes == pytest.approx(one.weights_bytes + one.gradients_bytes + one.optimizer_bytes)
