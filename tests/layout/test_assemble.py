"""What an alternative trades against the best plan."""

from __future__ import annotations

from toys import toy_cluster, toy_problem, toy_training

from planner.layout.evaluate import trade
from planner.search.search import plan
from planner.specs.units import GIB


def test_what_an_alternative_trades() -> None:
    problem = toy_problem(cluster=toy_cluster(8, memory_gib=3.0), training=toy_training(32))
    answer = plan(problem.model, problem.cluster, problem.training, limits=problem.limits, runtime=problem.runtime)
    assert answer.alternatives
    for other in answer.alternatives:
        slower = other.step.step_s / answer.step.step_s - 1
        more = (other.worst_stage.memory.total_bytes - answer.best.worst_stage.memory.total_bytes) / GIB
        assert other.trade.startswith(f"{slower:+.1%} time, {more:+.1f} GiB")
    same = trade(answer.best, answer.best)
    assert same == "+0.0% time, +0.0 GiB"
    assert answer.best.trade == ""
