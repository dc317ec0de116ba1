"""Our orders beside those of Primus' own scheduler, whose makespans and peaks were recorded."""

from __future__ import annotations

import pytest

from planner.schedule.orders import build_schedule, in_flight_microbatches
from planner.schedule.replay import Durations, makespan_s

# AMD-AGI/Primus at fd1eeab, primus/core/pipeline_parallel/scheduler, run by SchedulerSimulationRunner on a CPU:
# pp, micro-batches, milliseconds where F, I and W take 1000 each, and 1000, 1200 and 800, and micro-batches held
RECORDED = {
    "1f1b": [(2, 8, 27000, 27000, 2.0), (4, 16, 57000, 57000, 4.0), (8, 32, 117000, 117000, 8.0)],
    "interleaved-1f1b": [(2, 8, 25500, 25500, 2.5), (4, 16, 52500, 52500, 5.5), (8, 32, 106500, 106500, 11.5)],
    "zb-h1": [(2, 8, 25000, 25400, 2.0), (4, 16, 51000, 52200, 4.0), (8, 32, 103000, 105800, 8.0)],
    "zb-v": [(2, 8, 24500, 24600, 2.0), (4, 16, 49500, 49800, 4.0), (8, 32, 99500, 100200, 8.0)],
    "v-half": [(2, 8, 24500, 24600, 2.0), (4, 16, 50500, 52000, 3.0), (8, 32, 104500, 112800, 5.0)],
    "v-min": [(2, 8, 25000, 27400, 2.0), (4, 16, 53500, 62600, 2.0), (8, 32, 109000, 128500, 4.0)],
}
GREEDY = {"v-half": 0.05, "v-min": 0.03}
"""Orders that fill their gaps in another way than ours, and how far the makespans are apart at most."""
CASES = [(name, *row) for name, rows in RECORDED.items() for row in rows]


@pytest.mark.parametrize(("name", "pp", "m", "even_ms", "uneven_ms", "held"), CASES)
def test_orders_take_as_long_and_hold_as_much_as_those_of_primus(
    name: str, pp: int, m: int, even_ms: int, uneven_ms: int, held: float
) -> None:
    vpp = 1 if name in ("1f1b", "zb-h1") else 2
    order = build_schedule(name, pp, vpp, m)
    assert max(in_flight_microbatches(name, pp, vpp, m)) == held
    for kinds, expected in (((1000, 1000, 1000), even_ms), ((1000, 1200, 800), uneven_ms)):
        durations = Durations(*([seconds / vpp] * (pp * vpp) for seconds in kinds))
        assert makespan_s(order, durations) == pytest.approx(expected, rel=GREEDY.get(name, 1e-9))
