"""Megatron-LM's `--log-straggler`: the least and the most over the ranks of seconds, power, clocks, and who has them.

As of megatron core 0.19 (megatron/core/utils.py, README_STRAGGLER.md), whose older form prints milliwatts under a W.
"""

from __future__ import annotations

import re

from planner.observe.logs.grammar import number, row
from planner.observe.record import MOST_RANKS, Record, Spread

_UNITS = {"ms": 1e-3, "us": 1e-6, "s": 1.0, "%": 1e-2}
NAMES = {
    "Rtt": "round_trip_s", "Pwr": "power_w", "Tmp": "temperature_c", "Utl": "utilization_fraction",
    "Clk": "clock_mhz", "DRtt": "data_s", "Etpt": "tflops",
}  # fmt: skip
"""The words of the line, and what they measure."""
_TIMERS = {"round_trip_s": "straggler-round-trip", "data_s": "straggler-get-batch"}
_VALUE = re.compile(r"\b(Mn|Mx)(D?Rtt|Pwr|Tmp|Utl|Clk|Etpt)/Rnk: *([\d.]{1,30}) ?([A-Za-z%]{1,4})/(\d{1,7})")
_LISTED = re.compile(r"([\d.]{1,30}) ?(?:TF)?/(\d{1,7})")
_MOST_WATTS = 1e4
"""No GPU takes more: such a number is in milliwatts, as NVML has it."""


def _straggler(record: Record, match: re.Match[str]) -> None:
    """`MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: 3468.20ms/0 | …`: least and most, each with its rank."""
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for side, word, text, unit, rank in _VALUE.findall(match.string):
        value, name = number(text) * _UNITS.get(unit, 1.0), NAMES[word]
        if name == "power_w" and value > _MOST_WATTS:
            value /= 1e3
        found.setdefault(name, {})[side] = (value, int(rank))
    for name, sides in found.items():
        if len(sides) < 2:
            continue
        record.spread(name, sides["Mn"], sides["Mx"])
        if name in _TIMERS:
            record.timer(_TIMERS[name], sides["Mn"][0], sides["Mx"][0])
            for value, rank in sides.values():
                record.rank_timer(_TIMERS[name], rank, value)


def _listed(record: Record, match: re.Match[str]) -> None:
    """`Bottom 4 Ranks with lowest Etpt(TF): 296.02/0, 296.17/2, …`."""
    ranks = record.spreads.setdefault("tflops", Spread()).ranks
    for value, rank in _LISTED.findall(match[1]):
        if len(ranks) < MOST_RANKS:
            ranks[int(rank)] = number(value)


ROWS = (
    row("straggler", "/Rnk", r"M[nx](?:Rtt|Etpt)/Rnk", _straggler),
    row("ranks by throughput", "Etpt(TF)", r"Ranks with (?:lowest|highest) +Etpt\(TF\):(.{0,4000})", _listed),
)
