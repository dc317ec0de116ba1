"""Row 7 of the integer program: seconds of a step outside the pipeline, on the rank where they are longest.

Gradients are reduced after the last backward, and parameters are gathered before the first forward. Only the seconds
that nothing hides count here. The optimizer comes last.
"""

from __future__ import annotations

from planner.search.ilp.formulation import Expression, Formulation, add_up, constant
from planner.search.ilp.rank_sums import RankSums

_WORDS = {"reduce_s": "gradient reduction", "gather_s": "parameter gathering"}


def add_ends(program: Formulation, sums: RankSums) -> Expression:
    """Add row 7 and return the seconds outside the pipeline: gradients + parameters + optimizer."""
    node = sums.node
    gradients_s = program.variable("gradients", "seconds of gradient reduction that nothing hides")
    parameters_s = program.variable("parameters", "seconds of parameter gathering that nothing hides")
    optimizer_s = program.variable("optimizer", "seconds of the slowest rank's optimizer")
    if node.sharded_each_time:
        _add_each_time(program, sums, gradients_s)
    if node.sharded_each_time < 2:
        hidden, lead = node.gradient_overlap_fraction, node.lead_passes
        _add_exchange(program, sums, gradients_s, "reduce_s", "backward_total_s", hidden, lead)
    if node.sharded_each_time < 3:
        hidden, lead = node.parameter_overlap_fraction, 1 / node.vpp
        _add_exchange(program, sums, parameters_s, "gather_s", "forward_total_s", hidden, lead)
    for rank in range(node.pp):
        program.add_row("ends", f"optimizer_{rank}", optimizer_s >= sums.total(rank, "optimizer_s"))
    return add_up((gradients_s, parameters_s, optimizer_s))


def _add_each_time(program: Formulation, sums: RankSums, gradients_s: Expression) -> None:
    """Add the rows of ZeRO-2 and ZeRO-3 at pp = 1.

    Gradients are reduced for every micro-batch, and with ZeRO-3 weights are gathered, too.
    """
    node, weights_too = sums.node, sums.node.sharded_each_time == 3
    exchanged_s = sums.total(0, "reduce_s") + (2 * sums.total(0, "gather_s") if weights_too else 0.0)
    behind_s = sums.total(0, "total_s" if weights_too else "backward_total_s")
    exposed_s = exchanged_s - node.fsdp_overlap_fraction * behind_s
    program.add_row("ends", "exposed_each_time", gradients_s >= node.num_microbatches * exposed_s)
    showing_s = node.num_microbatches * node.contention_fraction * exchanged_s
    program.add_row("ends", "showing_each_time", gradients_s >= showing_s)


def _add_exchange(
    program: Formulation,
    sums: RankSums,
    exposed_s: Expression,
    exchange: str,
    passing: str,
    hidden_fraction: float,
    lead: float,
) -> None:
    """Add the rows of one exchange: its seconds on a rank that the rank's own passes do not hide.

    `lead` passes of each rank before it are taken off.
    """
    node = sums.node
    before_s = constant(0)
    for rank in range(node.pp):
        exchanged_s, passing_s = sums.total(rank, exchange), sums.total(rank, passing)
        late_s, hidden_s = exposed_s + before_s, hidden_fraction * passing_s
        name = f"{exchange}_{rank}"
        program.add_row("ends", f"showing_{name}", late_s >= node.contention_fraction * exchanged_s)
        program.add_row("ends", f"exposed_{name}_of_the_last_chunk", node.vpp * late_s >= exchanged_s - hidden_s)
        if node.vpp > 1:
            hidden_behind_s = node.passes_behind * hidden_s
            program.add_row("ends", f"exposed_{name}", late_s >= exchanged_s - hidden_behind_s)
        meaning = f"seconds that the ranks 0 … {rank} leave the next rank for its {_WORDS[exchange]}"
        before_s = program.named("ends", f"before_{name}", meaning, before_s + lead * passing_s)
