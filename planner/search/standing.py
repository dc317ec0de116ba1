"""The state of a search that still runs: its best layout so far, and the bound that no layout beats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planner.answer import Plan, SearchReport
from planner.layout.assemble import assemble
from planner.layout.candidate import Candidate
from planner.layout.price import price_layout
from planner.physics.layers import model_totals


@dataclass(frozen=True, slots=True)
class Standing:
    """A search over layouts in the middle: what its certificate would say if it ended now."""

    best: Candidate
    bound_s: float
    """No layout that fits has a shorter step, among those that this search is about."""
    num_shapes: int
    num_fitting: int
    num_ilps: int

    def plan(self) -> Plan:
        """The plan of the best layout so far, without alternatives, worth of switches and the like."""
        pricing = self.best.pricing
        totals = model_totals(pricing.model, pricing.runtime, pricing.training.seq_length)
        layout = price_layout(self.best, totals, exact=False)
        bound_s = min(self.bound_s, layout.step.step_s)
        report = SearchReport(
            num_shapes=self.num_shapes,
            num_fitting=self.num_fitting,
            num_ilps=self.num_ilps,
            outcome="feasible",
            lower_bound_s=bound_s,
            gap=layout.step.step_s / bound_s - 1,
        )
        return assemble(pricing, totals, [layout], (), report)


News = Callable[[Standing], None]
"""Something that is told how a search stands, as often as that changes."""
