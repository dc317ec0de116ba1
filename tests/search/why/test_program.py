"""The program of a plan: it is the one of its best layout."""

from __future__ import annotations

from toys import solved, toy_cluster, toy_model, toy_problem, toy_training

from planner.answer import Plan
from planner.search.why.explain import program_text


def planned(**limits: tuple[int, ...]) -> Plan:
    problem = toy_problem(toy_model(8), toy_cluster(8), toy_training(16), **limits)
    return solved(problem)


def test_the_program_is_that_of_the_best_layout() -> None:
    answer = planned(pp=(4,), vpp=(1,))
    text = program_text(answer)
    assert f"{answer.parallelism.pp} ranks with 1 stage each" in text
    assert f"{answer.parallelism.num_microbatches} micro-batches" in text
    assert max(map(len, text.splitlines())) <= 80
    for rank in range(4):
        assert f"\n  memory_{rank}:" in text
        assert f"\n  time_{rank}_0:" in text
