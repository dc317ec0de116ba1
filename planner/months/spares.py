"""How many spare nodes pay: the GPU-hours a day that they are idle, against those that failures cost without them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.months.closed_form import best_interval_s, rhythm_of
from planner.months.losses import SECONDS_PER_DAY, Losses, all_in_repair

HOURS_PER_DAY = 24
MOST_SPARES = 4096
ALIKE = 1e-3
"""Share of a cost by which no two numbers of spare nodes can be told apart."""


@dataclass(frozen=True, slots=True)
class Spares:
    """A number of spare nodes, and what it costs a day."""

    num_nodes: int
    none_free_fraction: float
    """Probability that all of them are in repair when a node is lost."""
    effective_fraction: float
    """The share of its time that the job trains."""
    idle_gpu_hours: float
    """GPU-hours a day of spare nodes beyond those that are idle anyway."""
    lost_gpu_hours: float
    """GPU-hours a day in which the job's own GPUs do not train."""

    @property
    def gpu_hours(self) -> float:
        """The cost of a day: idle and lost together."""
        return self.idle_gpu_hours + self.lost_gpu_hours


def spares(losses: Losses, num_nodes: int, node_size: int, num_idle_nodes: int = 0) -> Spares:
    """A job with `num_nodes` spare nodes, of which the first `num_idle_nodes` are paid for anyway.

    Its share of training is the closed form's, with checkpoints as often as suits it.
    """
    kept = replace(losses, num_spare_nodes=num_nodes)
    rhythm = rhythm_of(kept, lambda fact: fact.value)
    effective = float(rhythm.effective_fraction(best_interval_s(rhythm)))
    in_repair = kept.node_loss_fraction.value * kept.failures_per_day.value * kept.repair_s.value / SECONDS_PER_DAY
    return Spares(
        num_nodes=num_nodes,
        none_free_fraction=float(all_in_repair(in_repair, num_nodes)),
        effective_fraction=effective,
        idle_gpu_hours=HOURS_PER_DAY * node_size * max(0, num_nodes - num_idle_nodes),
        lost_gpu_hours=HOURS_PER_DAY * losses.num_gpus * (1 - effective),
    )


def cheapest_spares(losses: Losses, node_size: int, num_idle_nodes: int = 0) -> Spares:
    """The fewest spare nodes whose cost is within ALIKE of the least.

    No number loses less than so many spare nodes that one is always free. So the search ends where the idle nodes and
    that loss together cost more than the best number found.
    """
    least_lost = spares(losses, MOST_SPARES, node_size, MOST_SPARES).lost_gpu_hours
    rows = [spares(losses, 0, node_size, num_idle_nodes)]
    while len(rows) <= MOST_SPARES and rows[-1].idle_gpu_hours + least_lost < min(row.gpu_hours for row in rows):
        rows.append(spares(losses, len(rows), node_size, num_idle_nodes))
    most = (1 + ALIKE) * min(row.gpu_hours for row in rows)
    return next(row for row in rows if row.gpu_hours <= most)
