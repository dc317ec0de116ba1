"""Timers of a step: of all ranks, a little more than a step together, and those that are of no step."""

from __future__ import annotations

from pathlib import Path

import pytest
from written import iterations, read

LINES = list(iterations([1.0] * 9))


def of_ranks(**timers: tuple[float, float]) -> str:
    """Megatron-LM's timers with `--timing-log-option minmax`."""
    lines = [f"    {name} ...: ({low:.2f}, {high:.2f})" for name, (low, high) in timers.items()]
    return "\n".join([*LINES, "(min, max) time across ranks (ms):", *lines])


def test_timers_of_the_slowest_rank_are_terms_of_the_step(tmp_path: Path) -> None:
    seen = read(tmp_path, of_ranks(**{"forward-backward": (700.0, 900.0), "optimizer": (50.0, 60.0)}))
    assert seen.breakdown == pytest.approx({"forward_backward_s": 0.9, "optimizer_s": 0.06, "unattributed_s": 0.04})


@pytest.mark.parametrize(("optimizer_ms", "told"), [(120.0, True), (160.0, False)])
def test_the_most_of_several_ranks_may_be_a_little_more_than_a_step(
    tmp_path: Path, optimizer_ms: float, told: bool
) -> None:
    seen = read(tmp_path, of_ranks(**{"forward-backward": (700.0, 900.0), "optimizer": (50.0, optimizer_ms)}))
    assert sum(seen.breakdown.values()) == pytest.approx(1.0)
    assert ("optimizer_s" in seen.breakdown) is told


def test_what_happens_before_the_first_step_is_no_timer_of_a_step(tmp_path: Path) -> None:
    """As bigscience-workshop/bigscience's logs of gpt2-meg have them."""
    setup = "time (ms) | model-and-optimizer-setup: 330.10 | train/valid/test-data-iterators-setup: 513.20"
    seen = read(tmp_path, "\n".join([setup, *LINES, "time (ms) | forward-compute: 300.00 | backward-compute: 600.00"]))
    assert [timer.name for timer in seen.timers] == ["forward-compute", "backward-compute"]
