"""Conditions of a run: what was unusual of its GPUs is named, and told where the run contradicts the plan."""

from __future__ import annotations

from typing import Any

import pytest
from pages import printed
from probes import probe_result
from tables import beside

from planner.specs.registry import load_model

pytest.importorskip("torch", reason="needs the probe extra (torch)")

from small_plans import plan_of

from planner.probe.evidence import UNSEEN, conditions_of
from planner.probe.result import (
    ChunkSeconds,
    ComparedQuantity,
    DeviceState,
    ProbedExchange,
    ProbedMemory,
    ProbeResult,
    RankResult,
)
from planner.report.machines import render_probe as render

TABLES = beside(__file__)


def rank(number: int = 0, spread: float = 0.001, **states: dict[str, Any]) -> RankResult:
    memory = ProbedMemory(static_bytes=1, peak_allocated_bytes=1, peak_reserved_bytes=1, device_used_bytes=1)
    chunk = ChunkSeconds(stage=number, forward_s=1.0, backward_s=2.0, spread_fraction=spread)
    return RankResult(
        rank=number, stage=number, dp=0, tp=0, torch_version="2.13", device_name="NVIDIA H200", num_parameters=1,
        steps=(), actions=(), chunks=(chunk,), peak_in_flight_chunks=1, memory=memory,
        device_states=tuple(DeviceState(when=when, **fields) for when, fields in states.items()),  # type: ignore[arg-type]
    )  # fmt: skip


HEALTHY: dict[str, Any] = TABLES["healthy"]


def test_a_gpu_at_its_power_limit_is_as_usual() -> None:
    assert conditions_of([rank(before={"busy_fraction": 0.02, "clock_mhz": 345}, within=HEALTHY, after=HEALTHY)]) == ()
    idle = {"clock_mhz": 345, "max_clock_mhz": 1980, "busy_fraction": 0.1}
    changing = {**HEALTHY, "throttle_reasons": ("hardware slowdown",)}
    assert conditions_of([rank(within=idle, after=changing)]) == (), "looked at too early"
    assert [one.text for one in conditions_of([rank()])] == [f"rank 0: {UNSEEN.text}"], "nobody looked"


@pytest.mark.parametrize(("states", "words", "is_fault"), TABLES["unusual_conditions_are_named"])
def test_unusual_conditions_are_named(states: Any, words: str, is_fault: bool) -> None:
    (condition,) = conditions_of([rank(**states)])
    assert words in condition.text
    assert condition.text.startswith("rank 0: ")
    assert condition.is_fault == is_fault


def test_a_line_names_all_ranks_of_which_it_is_true() -> None:
    capped = {**HEALTHY, "power_limit_w": 500}
    found = conditions_of([rank(0, within=capped, after=capped), rank(1, within=capped), rank(2), rank(3, spread=0.07)])
    assert [condition.text for condition in found] == [
        "ranks 0 to 1: the power limit is 500 W, 700 by default",
        "rank 3: the seconds of micro-batches are sure to 7% only",
    ]


def told(result: ProbeResult) -> str:
    """The report's text, on one line."""
    return " ".join(printed(render(result), 400).split())


def test_a_report_says_how_gpus_were_and_what_a_contradiction_is_worth() -> None:
    plan = plan_of(load_model("8b"), 2, 8192, 8, pp=2)
    result = probe_result(plan, lambda stage: (1.0, 2.0), mode="stages")
    off = ComparedQuantity(name="forward", stage=0, unit="s", predicted=1.0, measured=2.0, agrees=False)
    exchange = ProbedExchange(
        name="tp all-gather", size=2, num_bytes=2**20, seconds=1e-3, bus_gb_per_s=1.0, spread_fraction=0.04
    )
    hot = {**HEALTHY, "throttle_reasons": ("hardware thermal slowdown",)}
    capped = {**HEALTHY, "power_limit_w": 500, "power_w": 498}

    def report(comparison: ComparedQuantity, *states: dict[str, Any]) -> str:
        ranks = tuple(rank(number, within=state) for number, state in enumerate(states))
        ranks = (ranks[0].model_copy(update={"exchanges": (exchange,)}), *ranks[1:])
        run = result.run.model_copy(update={"device": "cuda"})
        changes = {"run": run, "ranks": ranks, "comparisons": (comparison,), "conditions": conditions_of(ranks)}
        return told(result.model_copy(update=changes))

    assert "GB/s on the bus, sure to 4.0% only" in report(off, HEALTHY)
    assert "under load, rank 0: 1455 of 1980 MHz, 698 of 700 W, 64 °C, software power cap" in report(off, HEALTHY)
    assert report(off, HEALTHY).endswith("the run contradicts the plan: forward of stage 0")
    assert "no evidence against the plan: rank 1: clocks were lowered (64 °C)" in report(off, HEALTHY, hot)
    assert "may differ by how the GPUs were: ranks 0 to 1: the power limit is 500 W" in report(off, capped, capped)
    agreed = report(off.model_copy(update={"agrees": True}), hot)
    assert "clocks were lowered" in agreed
    assert agreed.endswith("the run agrees with the plan")
