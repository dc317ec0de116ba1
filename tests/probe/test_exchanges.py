"""Exchanges timed by themselves: what is reported to have been moved is what was moved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from planner.probe.model.peers import (  # noqa: E402
    GroupPeers,
    Surroundings,
)
from planner.probe.rank import after_steps  # noqa: E402
from planner.probe.torch_build import GATHER  # noqa: E402


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_bytes_are_those_that_move(sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr(after_steps, "barrier", lambda device, group: None)
    monkeypatch.setattr(after_steps, "slowest_s", lambda seconds, device, group: seconds)
    monkeypatch.setattr(after_steps.dist, "all_reduce", lambda x, group: moved.append(x.nbytes))
    monkeypatch.setattr(after_steps.dist, GATHER, lambda whole, x, group: moved.append(whole.nbytes))
    trainer: Any = SimpleNamespace(
        around=Surroundings(tp=GroupPeers(4, 0, sequence_parallel)),
        chunks={},
        run=SimpleNamespace(steady_s=0.0, most_s=0.0),
        flat=[],
        device="cpu",
        clock=SimpleNamespace(is_cuda=False, start=lambda: None, mark=lambda: None, seconds=lambda mark: 0.5),
        empty=lambda: torch.empty(8 // (4 if sequence_parallel else 1), 1, 16),
    )
    measured = after_steps.measure_exchanges(trainer)
    assert [exchange.name for exchange in measured] == ["tp all-gather"] * sequence_parallel + ["tp all-reduce"]
    assert {exchange.num_bytes for exchange in measured} == set(moved) == {8 * 16 * 4}
