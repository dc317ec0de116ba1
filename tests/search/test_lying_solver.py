"""A solver that lies, fails or runs out of time: the answer still holds, or it is said not to be proven."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pulp
import pytest
from brute_force import brute_force_s
from solver_judges import judged
from solver_nodes import SMALL, interleaved_node, random_node, recurring_node
from toys import NO_LIMIT_S, case_of, toy_cluster, toy_model, toy_problem, toy_training

from planner import Plan, SearchLimits, plan
from planner.cli import main
from planner.errors import Infeasible, SolverError
from planner.search import branch
from planner.search.case import Deadline
from planner.search.ilp import solver
from planner.search.ilp import solver as checked
from planner.search.ilp.node import Node
from planner.search.ilp.program import SolverFailed, build, solve
from planner.search.ilp.solver import Claim
from planner.search.layouts import find_layouts

Lie = Callable[[Any, Claim], Claim]
"""The answer that a solver gives in place of its true one."""
run = solver.run


def late(problem: Any, claim: Claim) -> Claim:
    return Claim("nothing")


def late_with_split(problem: Any, claim: Claim) -> Claim:
    return replace(claim, outcome="found") if claim.values else claim


def infeasible(problem: Any, claim: Claim) -> Claim:
    return Claim("infeasible", bound_s=math.inf)


def killed(problem: Any, claim: Claim) -> Claim:
    return Claim("nothing", failure="PulpSolverError killed")


def worse(problem: Any, claim: Claim) -> Claim:
    """A split that is 5% slower than the fastest, with a bound as if it were the fastest."""
    if not claim.values:
        return claim
    problem.addConstraint(problem.objective >= 1.05 * claim.objective_s, "slower")
    slow = run(problem, 60.0, 0.0)
    del problem._constraints["slower"]
    run(problem, 60.0, 0.0)  # the second run is to see the program without that row
    return replace(slow, bound_s=slow.objective_s) if slow.values else claim


def inflated(problem: Any, claim: Claim) -> Claim:
    """The fastest split, whose pipeline is said to take 5% longer; all rows hold."""
    names = [variable.name for variable in problem.variables()]
    values = list(claim.values)
    if not values or problem.variables()[names.index("T")].upBound is not None:  # beyond a cutoff is no answer
        return claim
    values[names.index("T")] += 0.05 * claim.objective_s
    more_s = 1.05 * claim.objective_s
    return replace(claim, values=tuple(values), objective_s=more_s, bound_s=more_s)


def not_a_number(problem: Any, claim: Claim) -> Claim:
    return replace(claim, values=(math.nan,) * len(claim.values), objective_s=math.nan, bound_s=math.nan)


def bound_of_nan(problem: Any, claim: Claim) -> Claim:
    return replace(claim, bound_s=math.nan)


def bound_above(problem: Any, claim: Claim) -> Claim:
    return replace(claim, bound_s=1.1 * claim.bound_s)


def other_objective(problem: Any, claim: Claim) -> Claim:
    return replace(claim, objective_s=0.5 * claim.objective_s, bound_s=0.5 * claim.objective_s)


def too_few_layers(problem: Any, claim: Claim) -> Claim:
    """All variables 0 but for the seconds: a split without layers."""
    return replace(claim, values=(0.0,) * len(claim.values), objective_s=0.0, bound_s=0.0)


def half_layers(problem: Any, claim: Claim) -> Claim:
    """Half a layer more wherever layers are counted."""
    integer = [variable.cat == pulp.LpInteger for variable in problem.variables()]
    values = [value + 0.5 * is_count for value, is_count in zip(claim.values, integer, strict=False)]
    return replace(claim, values=tuple(values))


def of_fractions(problem: Any, claim: Claim) -> Claim:
    """The optimum if layers could be cut: all rows hold."""
    if not claim.values:
        return claim
    problem.solve(pulp.HiGHS(msg=False, mip=False))
    values = tuple(variable.varValue for variable in problem.variables())
    objective_s = float(pulp.value(problem.objective))
    run(problem, 60.0, 0.0)
    is_lie = objective_s < claim.objective_s * (1 - 1e-5)  # one rank has nothing to cut
    return replace(claim, values=values, objective_s=objective_s, bound_s=objective_s if is_lie else math.nan)


LIES: tuple[Lie, ...] = (
    late, late_with_split, infeasible, killed, worse, inflated, not_a_number, bound_of_nan, bound_above,
    other_objective, too_few_layers, half_layers, of_fractions,
)  # fmt: skip
TRUE_SPLIT = (late_with_split, bound_of_nan, bound_above)


@pytest.fixture(autouse=True)
def second_runs_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(checked, "LEAST_AGAIN_S", NO_LIMIT_S)


def test_what_the_second_run_has_no_time_for_rests_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is not to lose its proof on a busy machine; what contradicts the first run counts at any time."""
    node = random_node(1)
    first = solve(node, NO_LIMIT_S)
    monkeypatch.setattr(solver, "run_below", lambda *_: Claim("nothing"))
    assert solve(node, NO_LIMIT_S) == first
    assert solve(replace(node, usable_bytes=1.0), NO_LIMIT_S) is None


def lie_with(monkeypatch: pytest.MonkeyPatch, lie: Lie, to_the_end: bool = False) -> list[float]:
    """Let the solver lie at first, and `to_the_end` also when it is asked again; the list gets an entry a call."""
    calls: list[float] = []

    def lying(problem: Any, time_limit_s: float, gap_fraction: float, presolve: bool = True) -> Claim:
        calls.append(time_limit_s)
        claim = run(problem, time_limit_s, gap_fraction, presolve)
        return lie(problem, claim) if presolve or to_the_end else claim

    monkeypatch.setattr(solver, "run", lying)
    if to_the_end:
        monkeypatch.setattr(solver, "run_below", lambda *_: Claim("infeasible"))
    return calls


def nodes() -> list[Node]:
    """Some with a choice, some with none, and some where nothing fits."""
    several = [random_node(seed) for seed in (0, 1, 2, 7, 8, 11)] + [recurring_node(3), interleaved_node(4)]
    return [*several, replace(random_node(1), usable_bytes=1.0), replace(random_node(2), cutoff_s=1e-3)]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_lie_is_never_believed(monkeypatch: pytest.MonkeyPatch, lie: Lie) -> None:
    lie_with(monkeypatch, lie)
    answered = 0
    for node in nodes():
        fits = replace(node, cutoff_s=math.inf)
        best_s = brute_force_s(fits) if node.cutoff_s == math.inf else math.inf
        if lie is late or (lie is killed and math.isinf(best_s)):
            with pytest.raises(SolverError) as caught:
                solve(node, NO_LIMIT_S)
            assert isinstance(caught.value, SolverFailed) == (lie is killed)
            continue
        solution = solve(node, NO_LIMIT_S)
        answered += 1
        if solution is None:
            assert math.isinf(best_s)
            continue
        assert solution.objective_s >= best_s * (1 - 1e-5)
        assert solution.bound_s == 0, "what is not confirmed is no bound"
        if lie not in TRUE_SPLIT:
            assert solution.objective_s <= best_s * (1 + 2e-5), "asked again, it has the fastest"
    assert answered >= (0 if lie is late else 7)


def test_every_range_and_row_is_looked_at() -> None:
    program = build(random_node(2))
    claim = run(program.formulation.problem, NO_LIMIT_S, 0.0)
    assert claim.outcome == "optimal"
    checked._assign(program.formulation, claim.values)
    assert checked.violated_row(program.formulation) is None
    for variable in program.formulation.variables:
        value = variable.varValue  # type: ignore[attr-defined]
        for beyond in (variable.lowBound, variable.upBound):
            if beyond is not None:
                variable.varValue = beyond + (1.0 if beyond == variable.upBound else -1.0)  # type: ignore[attr-defined]
                assert checked.violated_row(program.formulation) == f"the range of {variable.name}"
        variable.varValue = value  # type: ignore[attr-defined]
    for row in program.formulation.rows:
        constant = row.constant
        for by in {-1: (1e9,), 0: (1e9, -1e9), 1: (-1e9,)}[row.sense]:
            row.constant = constant + by
            assert checked.violated_row(program.formulation) == f"row {row.name}"
        row.constant = constant


def test_a_slower_split_of_the_second_run_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    node = replace(random_node(7), usable_bytes=1e15)
    first = solve(node, NO_LIMIT_S)

    def slower(problem: Any, bound_s: float, time_limit_s: float) -> Claim:
        layers = next(variable for variable in problem.variables() if variable.name.startswith("filled_0"))
        problem.addConstraint(layers <= layers.varValue - 1, "other")
        other = run(problem, 60.0, 0.0)
        del problem._constraints["other"]
        assert other.values, "there is another split"
        return replace(other, outcome="found")

    monkeypatch.setattr(solver, "run_below", slower)
    second = solve(node, NO_LIMIT_S)
    assert (second.counts, second.objective_s, second.bound_s) == (first.counts, first.objective_s, 0.0)


def test_a_bound_ends_at_the_split_it_was_found_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS may give a bound that is above its objective by less than it lets rows be violated."""
    lie_with(monkeypatch, lambda _, claim: replace(claim, bound_s=claim.bound_s * (1 + 5e-6)))
    solution = solve(random_node(1), NO_LIMIT_S)
    assert solution.bound_s == solution.objective_s


def test_the_truth_is_believed() -> None:
    """The other side: honest answers keep their bounds, and no program is solved without need."""
    confirmed = [solution.bound_s > 0 for node in nodes() if (solution := solve(node, NO_LIMIT_S)) is not None]
    assert all(confirmed)
    assert len(confirmed) > 5


@pytest.mark.parametrize(
    "answer", [Claim("nothing", failure="status Solution limit reached"), Claim("found", (), math.nan)]
)
def test_what_the_second_run_does_not_confirm_is_no_proof(monkeypatch: pytest.MonkeyPatch, answer: Claim) -> None:
    monkeypatch.setattr(solver, "run_below", lambda *_: answer)
    solution = solve(random_node(1), NO_LIMIT_S)
    assert solution.bound_s == 0
    with pytest.raises(SolverFailed, match="no split fits, and without presolve does not confirm it"):
        solve(replace(random_node(1), usable_bytes=1.0), NO_LIMIT_S)


@pytest.mark.parametrize("error", [MemoryError(), pulp.PulpSolverError("killed by signal 9"), ValueError("nan")])
def test_whatever_the_solver_raises_is_its_failure(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(self: Any, problem: Any) -> None:
        raise error

    monkeypatch.setattr(pulp.HiGHS, "callSolver", fail)
    with pytest.raises(SolverFailed, match=type(error).__name__) as caught:
        solve(random_node(1), NO_LIMIT_S)
    assert caught.value.exit_code == 4
    assert "--pp" in caught.value.hint


def test_an_end_without_a_reason_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulp.HiGHS, "callSolver", lambda *_: None)
    with pytest.raises(SolverFailed, match="over 1 stages: status Not Set"):
        solve(random_node(1), NO_LIMIT_S)


def test_the_second_run_is_without_presolve() -> None:
    program = build(random_node(1))
    answer = checked.solved(program.formulation, NO_LIMIT_S, 0.0)
    assert isinstance(answer, checked.Checked)
    assert program.formulation.problem.solverModel.getOptionValue("presolve")[1] == "off"


def test_no_time_is_no_failure_of_the_solver() -> None:
    """HiGHS is given none, and has no split yet."""
    node = random_node(3, pp=3, placement=(0, 1, 2), in_flight=[3.0, 2.0, 1.0], num_microbatches=8, whole="per_stage")
    with pytest.raises(SolverError, match="found no split over 3 stages") as caught:
        checked_in_no_time(node)
    assert not isinstance(caught.value, SolverFailed)


def checked_in_no_time(node: Node) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "run", lambda problem, limit_s, gap, presolve=True: run(problem, 0.0, gap))
        solve(node, NO_LIMIT_S)


@contextmanager
def nothing_but_programs() -> Iterator[None]:
    """No dynamic program decides a node and no even split is tried before, so that all rests on the solver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(branch, "best_split", lambda node: None)
        patch.setattr(branch.Branch, "_try_even_split", lambda *_: None)
        yield


def searched() -> Plan:
    """A job whose answer rests on the solver alone."""
    with nothing_but_programs():
        return plan(
            toy_model(10, vocab_size=96_000), toy_cluster(8, memory_gib=8.0), toy_training(48),
            runtime="torch-eager",
            limits=SearchLimits(
                pp=(4,), tp=(1,), schedule=("1f1b",), time_limit_s=NO_LIMIT_S, top=1, gap_fraction=0.02,
            ),
        )  # fmt: skip


@pytest.fixture(scope="module")
def honest() -> Plan:
    return searched()


@pytest.mark.parametrize("lie", [late_with_split, worse, infeasible], ids=lambda lie: lie.__name__)
def test_no_plan_is_proven_by_a_lie(monkeypatch: pytest.MonkeyPatch, honest: Plan, lie: Lie) -> None:
    assert honest.search.outcome == "proven"
    lie_with(monkeypatch, lie)
    deceived = searched()
    assert deceived.step.step_s == pytest.approx(honest.step.step_s, rel=1e-5)
    assert deceived.search.outcome == "bounded"
    assert deceived.search.lower_bound_s < honest.search.lower_bound_s


def test_a_bound_above_the_replay_of_its_own_split_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the second run confirms it."""
    problem = toy_problem(
        toy_model(10), toy_cluster(8), toy_training(48), pp=(4,), tp=(1,), schedule=("1f1b",), gap_fraction=0.0
    )
    case = case_of(problem)

    def bound_s() -> float:
        with nothing_but_programs():
            return find_layouts(case, [case.runtime], Deadline(NO_LIMIT_S)).branch.lower_bound_s

    honest_s = bound_s()
    lie_with(monkeypatch, inflated, to_the_end=True)
    assert bound_s() < honest_s


def test_a_plan_is_found_though_the_solver_denies_it(monkeypatch: pytest.MonkeyPatch, honest: Plan) -> None:
    lie_with(monkeypatch, infeasible)
    assert searched().step.step_s == honest.step.step_s
    monkeypatch.setattr(solver, "run_below", lambda *_: Claim("nothing", failure="Unknown"))
    with pytest.raises(SolverFailed) as caught:  # and not Infeasible, which would be a proof
        searched()
    assert not isinstance(caught.value, Infeasible)


FAILING = [
    "-m", "8b", "-g", "64", "-b", "128", "--tp", "1", "--pp", "4,8", "--runtime", "torch-eager", "--schedule", "1f1b",
    "--time-limit", "1000",
]  # fmt: skip


def test_a_solver_that_always_fails_is_not_asked_for_ever(monkeypatch: Any, capsys: Any) -> None:
    calls = lie_with(monkeypatch, killed, to_the_end=True)
    with nothing_but_programs():
        code = main(FAILING)
    _, stderr = capsys.readouterr()
    assert code == 4
    assert len(calls) <= 2 * 20 + 4
    error, hint = [line for line in stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert "the solver failed" in error
    assert "PulpSolverError killed" in error
    assert "--pp" in hint


def test_a_plan_needs_no_solver(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An even split stands where every program fails, and it is called no more than feasible."""
    lie_with(monkeypatch, killed, to_the_end=True)
    monkeypatch.setattr(branch, "best_split", lambda node: None)
    assert main([*FAILING, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["search"]["outcome"] == "feasible"


def test_judges_agree_on_random_nodes() -> None:
    """A few of the nodes of tools/cross_check_solver, which draws a thousand."""
    results = [judged(SMALL[seed % 3](seed), True, cbc_limit_s=2.0) for seed in range(36)]
    assert not [result.wrong for result in results if result.wrong]
    assert any(math.isinf(result.checked_s) for result in results)
    assert all(result.bound_s > 0 for result in results)
    assert sum(not math.isnan(result.cbc_s) for result in results) > 30
