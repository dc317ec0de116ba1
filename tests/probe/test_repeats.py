"""What is measured beside steps: how often it is repeated, exchanges, clocks of ranks, the optimizer's state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planner.probe.run import spread_fraction

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

from planner.probe.launch.launcher import launch  # noqa: E402
from planner.probe.model.peers import GroupPeers, Surroundings  # noqa: E402
from planner.probe.rank import exchanges  # noqa: E402
from planner.probe.rank.exchanges import timed_together  # noqa: E402
from planner.probe.rank.gradients import allocate_moments  # noqa: E402
from planner.probe.rank.pipeline import StepRecord  # noqa: E402
from planner.probe.rank.worker import StepLoop  # noqa: E402
from planner.probe.result import TimedAction  # noqa: E402
from planner.probe.torch_build import GATHER  # noqa: E402
from planner.profile.measure import Stopwatch  # noqa: E402


@pytest.mark.parametrize("num", [4, 20, 200])
@pytest.mark.parametrize("name", ["normal", "lognormal"])
def test_the_spread_is_the_standard_error_of_the_median(num: int, name: str) -> None:
    draws = np.random.default_rng(0)
    trials = [draws.normal(10, 1, num) if name == "normal" else draws.lognormal(2, 0.1, num) for _ in range(400)]
    true = np.std([np.median(trial) for trial in trials]) / np.median(trials)
    assert np.mean([spread_fraction(trial.tolist()) for trial in trials]) == pytest.approx(1.25 * true, rel=0.25)


def test_a_drift_is_no_noise_that_more_repeats_lessen() -> None:
    warming = np.linspace(1.0, 0.9, 10_000).tolist()
    assert spread_fraction(warming) == pytest.approx(0.025 / 0.95, rel=0.01)
    assert spread_fraction(sorted(warming[::2]) + warming[::2]) < 0.005  # type: ignore[operator]
    assert (spread_fraction([1.0]), spread_fraction([]), spread_fraction([0.0, 0.0])) == (None, None, None)


def steps_of(run: Any, seconds: Any, slowest: Any = float) -> StepLoop:
    """The loop of a run whose steps take so long, in turn."""
    loop = StepLoop(run, slowest)
    for number, _ in loop:
        step_s = seconds(number)
        timed = TimedAction(action="0F0", ready_s=0.0, start_s=0.0, end_s=step_s)
        loop.add(StepRecord(actions=[timed]), SimpleNamespace(step_s=step_s))  # type: ignore[arg-type]
    return loop


def test_steps_warm_up_and_are_measured_for_so_long(make_run: Any) -> None:
    run = make_run(("none", 1, 1, 1), warm_up_steps=2, num_steps=3)
    pinned = steps_of(run, lambda number: 0.1 * number)
    assert (len(pinned.warm_up), len(pinned.steps)) == (2, 3)
    timed = run.model_copy(update={"steady_s": 1.0, "most_s": 5.0})
    steady = steps_of(timed, lambda number: 0.25)
    assert (len(steady.warm_up), len(steady.steps), len(steady.actions)) == (6, 20, 20)
    assert (len(steps_of(timed, lambda _: 3.0).warm_up), len(steps_of(timed, lambda _: 3.0).steps)) == (3, 3)
    beside_slow = steps_of(timed, lambda number: 0.25, slowest=lambda seconds: 2 * seconds)
    assert (len(beside_slow.warm_up), len(beside_slow.steps)) == (4, 10)


def test_a_round_of_an_exchange_is_many_calls_between_two_marks() -> None:
    now = SimpleNamespace(s=0.0, waited=0)

    def call() -> None:
        now.s += 1e-3

    def meet() -> None:
        now.waited += 1

    clock: Any = SimpleNamespace(start=lambda: setattr(clock, "zero", now.s), mark=lambda: now.s)
    clock.seconds = lambda mark: mark - clock.zero
    timed = timed_together(clock, call, 5, 1.0, meet, lambda seconds: 2 * seconds, round_s=0.02)
    assert timed[0] == pytest.approx(2e-3)
    assert timed[1] == pytest.approx(0, abs=1e-9)
    assert now.waited == 2 + 50, "twice alone, then ten calls a round for a second"
    assert now.s == pytest.approx(2e-3 + 0.5)


class FakeSeconds(Stopwatch):
    """A stopwatch of a device whose calls say what they take."""

    def _round(self, call: Any, num_calls: int) -> list[float]:
        seconds = [call() for _ in range(num_calls)]
        self.total_s = getattr(self, "total_s", 0.0) + sum(seconds)
        return seconds


def test_figures_share_the_budget_and_leave_what_they_do_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = FakeSeconds("cpu", 12.0, num_figures=10)
    monkeypatch.setattr(
        "planner.profile.measure.time", SimpleNamespace(perf_counter=lambda: getattr(bench, "total_s", 0.0))
    )
    assert bench.microseconds(lambda: 1e-3) == pytest.approx(1000)
    assert bench.total_s == pytest.approx(1.2 * 0.9, rel=0.1), "a second, and what warms up before it"
    noise = np.random.default_rng(0)
    bench.spread = 0.0
    bench.microseconds(lambda: 0.05 * noise.uniform(0.5, 1.5))
    assert bench.spread > 0.01, "is told"
    assert bench.total_s == pytest.approx(1.1 + 1.2, rel=0.4)
    for _ in range(8):
        bench.microseconds(lambda: 1e-3)
    assert bench.total_s == pytest.approx(12.0 - bench.budget_s)
    assert 0 < bench.budget_s < 3


def test_ranks_measure_as_many_steps_as_take_so_long(make_run: Any) -> None:
    run = make_run(("none", 1, 1, 2), dp=2, check=False, num_steps=2, warm_up_steps=1)
    measured = launch(run.model_copy(update={"steady_s": 0.1, "most_s": 0.2}))
    (num_steps,) = {len(rank.steps) for rank in measured.ranks}
    assert num_steps > 2
    for rank in measured.ranks:
        assert sum(step.step_s for step in rank.steps) >= 0.1
        assert all(chunk.spread_fraction is not None for chunk in rank.chunks)
        assert all(exchange.spread_fraction is not None for exchange in rank.exchanges)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_bytes_are_those_that_move(sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    monkeypatch.setattr(exchanges, "barrier", lambda device, group: None)
    monkeypatch.setattr(exchanges, "slowest_s", lambda seconds, device, group: seconds)
    monkeypatch.setattr(exchanges.dist, "all_reduce", lambda x, group: moved.append(x.nbytes))
    monkeypatch.setattr(exchanges.dist, GATHER, lambda whole, x, group: moved.append(whole.nbytes))
    trainer: Any = SimpleNamespace(
        around=Surroundings(tp=GroupPeers(4, 0, sequence_parallel)), chunks={},
        run=SimpleNamespace(steady_s=0.0, most_s=0.0), flat=[], device="cpu",
        clock=SimpleNamespace(is_cuda=False, start=lambda: None, mark=lambda: None, seconds=lambda mark: 0.5),
        empty=lambda: torch.empty(8 // (4 if sequence_parallel else 1), 1, 16),
    )  # fmt: skip
    measured = exchanges.measure_exchanges(trainer, str)
    assert [exchange.name for exchange in measured] == ["tp all-gather"] * sequence_parallel + ["tp all-reduce"]
    assert {exchange.num_bytes for exchange in measured} == set(moved) == {8 * 16 * 4}


def test_moments_are_those_that_the_optimizer_makes_and_need_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def optimizer() -> Any:
        return torch.optim.AdamW([torch.nn.Parameter(torch.ones(4, 3, dtype=torch.float64))], lr=0.1, fused=True)

    ours, theirs = optimizer(), optimizer()
    (parameter,) = theirs.param_groups[0]["params"]
    parameter.grad = torch.zeros_like(parameter)
    theirs.step()
    monkeypatch.setattr(torch.Tensor, "grad", property(lambda tensor: pytest.fail("a gradient")))
    allocate_moments(ours)
    monkeypatch.undo()
    (made,), (expected,) = ours.state.values(), theirs.state.values()
    assert made.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(made[name], torch.zeros_like(value), rtol=0, atol=0)
        assert made[name].requires_grad == value.requires_grad
    (parameter,) = ours.param_groups[0]["params"]
    parameter.grad = torch.ones_like(parameter)
    ours.step()
    assert made["step"] == 1
    assert (parameter < 1).all()
