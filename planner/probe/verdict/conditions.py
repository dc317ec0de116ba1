"""The conditions under which a probe measured: what makes its seconds those of a moment and not of the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from planner.probe.device_state import BUSY_FRACTION
from planner.probe.repeats import SURE_FRACTION
from planner.probe.result import Condition, DeviceState, ProbeResult, RankResult
from planner.specs.units import gib

LOWERED_FRACTION = 0.98
"""Below this share of the usual one, a power limit or a clock is lowered."""
UNEXPLAINED_FRACTION, AT_LIMIT_FRACTION = 0.8, 0.95
"""A clock under load below this share of the highest has a reason; power above this share of its limit is one."""
LOADED_FRACTION = 0.5
"""A GPU that was busy for less was looked at too early, or too late."""
POWER = "software power cap"
"""The reason of every GPU that works hard: its profile is of such clocks."""
FAULTS = {
    "software thermal slowdown": "it was too hot",
    "hardware thermal slowdown": "it was too hot",
    "hardware power brake": "too little power",
}
"""Reasons for low clocks that are faults of the machine or of the moment. NVML gives its general one, hardware
slowdown, whenever clocks change."""
SETTINGS = {"applications clocks setting", "display clock setting", "sync boost"}


def conditions_of(ranks: Sequence[RankResult]) -> tuple[Condition, ...]:
    """Unusual conditions while these ranks measured; a line names all ranks of which it is true."""
    ranks_of: dict[Condition, list[int]] = {}
    for rank in ranks:
        for condition in dict.fromkeys([*conditions_of_states(rank.device_states), *_of_spreads(rank)]):
            ranks_of.setdefault(condition, []).append(rank.rank)
    return tuple(
        condition.model_copy(update={"text": f"{_named(numbers)}: {condition.text}"})
        for condition, numbers in ranks_of.items()
    )


def conditions_of_states(states: Iterable[DeviceState]) -> Iterator[Condition]:
    """Unusual conditions of one GPU, as often as it was seen under them."""
    for state in states:
        is_busy = state.when == "before" and (state.busy_fraction or 0.0) > BUSY_FRACTION
        held = "" if state.other_bytes is None else f", which held {gib(state.other_bytes):.1f} GiB"
        others = f"{', '.join(state.other_processes)}{held}" if state.other_processes else "a process out of sight"
        if is_busy:
            yield Condition(text=f"the GPU was busy before the run: {others}", is_fault=True)
        elif state.other_processes:
            yield Condition(text=f"the GPU was shared with {others}")
        limit_w, usual_w = state.power_limit_w, state.default_power_limit_w
        if limit_w is not None and usual_w is not None and limit_w < LOWERED_FRACTION * usual_w:
            yield Condition(text=f"the power limit is {limit_w:.0f} W, {usual_w:.0f} by default")
        if state.when != "before":
            yield from _of_clocks(state)


def _of_clocks(state: DeviceState) -> Iterator[Condition]:
    """Why clocks were low under load, or just after it."""
    faults = [reason for reason in state.throttle_reasons if reason in FAULTS]
    if faults:
        heat = "" if state.temperature_c is None else f" ({state.temperature_c:.0f} °C)"
        text = f"clocks were lowered{heat}: {', '.join(faults)}, because {FAULTS[faults[0]]}"
        yield Condition(text=text, is_fault=True)
    is_loaded = state.when == "within" and (state.busy_fraction is None or state.busy_fraction > LOADED_FRACTION)
    if not is_loaded or None in (state.clock_mhz, state.max_clock_mhz):
        return
    assert state.clock_mhz is not None
    assert state.max_clock_mhz is not None
    share, set_by = state.clock_mhz / state.max_clock_mhz, SETTINGS & set(state.throttle_reasons)
    clocks = f"{state.clock_mhz:.0f} of {state.max_clock_mhz:.0f} MHz under load"
    limit_w = state.power_limit_w
    below_limit = state.power_w is not None and limit_w is not None and state.power_w < AT_LIMIT_FRACTION * limit_w
    if set_by and share < LOWERED_FRACTION:
        yield Condition(text=f"clocks are set lower: {clocks} ({', '.join(sorted(set_by))})")
    elif not faults and POWER not in state.throttle_reasons and below_limit and share < UNEXPLAINED_FRACTION:
        yield Condition(text=f"clocks were low and the driver gives no reason: {clocks}")


def load_in_words(state: DeviceState) -> str:
    """Clock, power, temperature and reasons for low clocks of a GPU under load, as far as its driver says."""

    def of(value: float | None, most: float | None, unit: str) -> list[str]:
        if value is None:
            return []
        return [f"{value:.0f} {unit}" if most is None else f"{value:.0f} of {most:.0f} {unit}"]

    clock, power = of(state.clock_mhz, state.max_clock_mhz, "MHz"), of(state.power_w, state.power_limit_w, "W")
    return ", ".join([*clock, *power, *of(state.temperature_c, None, "°C"), *state.throttle_reasons])


def _of_spreads(rank: RankResult) -> Iterator[Condition]:
    """Seconds on a GPU that vary so much that their median is not sure."""
    spreads = [chunk.spread_fraction for chunk in rank.chunks if chunk.spread_fraction is not None]
    if rank.memory is not None and max(spreads, default=0.0) > SURE_FRACTION:
        yield Condition(text=f"the seconds of micro-batches are sure to {max(spreads):.0%} only")


def _named(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    runs_on = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"ranks {numbers[0]} to {numbers[-1]}" if runs_on else f"ranks {', '.join(map(str, numbers))}"


def fault_of(result: ProbeResult) -> str | None:
    """The fault of the moment that makes seconds no evidence of the GPU's speed; None without one."""
    return next((condition.text for condition in result.conditions if condition.is_fault), None)
