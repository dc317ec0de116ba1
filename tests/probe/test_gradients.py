"""The optimizer's state, made when the rank is built."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from planner.probe.rank.gradients import allocate_moments  # noqa: E402


def test_moments_are_those_that_the_optimizer_makes_and_need_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def optimizer() -> Any:
        return torch.optim.AdamW([torch.nn.Parameter(torch.ones(4, 3, dtype=torch.float64))], lr=0.1, fused=True)

    ours, theirs = optimizer(), optimizer()
    (parameter,) = theirs.param_groups[0]["params"]
    parameter.grad = torch.zeros_like(parameter)
    theirs.step()
    monkeypatch.setattr(torch.Tensor, "grad", property(lambda tensor: pytest.fail("a gradient")))
    allocate_moments(ours)
    monkeypatch.undo()
    (made,), (expected,) = ours.state.values(), theirs.state.values()
    assert made.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(made[name], torch.zeros_like(value), rtol=0, atol=0)
        assert made[name].requires_grad == value.requires_grad
    (parameter,) = ours.param_groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    ours.step()
    assert made["step"] == 1
    assert (parameter < 1).all()
