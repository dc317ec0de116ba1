"""Chunks timed by themselves: every rank of a stage runs as often, nothing is left of it, and it is what is judged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the probe extra (torch)")

import torch.distributed as dist  # noqa: E402
from small_plans import small_plan  # noqa: E402

from planner.probe.compare import beside_messages_s, compare_pipeline, compare_stage  # noqa: E402
from planner.probe.evidence import _factor  # noqa: E402
from planner.probe.rank import after_steps  # noqa: E402
from planner.probe.rank.after_steps import with_quiet_seconds  # noqa: E402
from planner.probe.rank.training import trainer_alone  # noqa: E402
from planner.probe.result import ChunkSeconds, RankResult  # noqa: E402
from planner.probe.run import SURE_FRACTION, ProbeRun  # noqa: E402
from planner.probe.run_price import in_eager_torch  # noqa: E402

STEP_S = 0.01
"""Seconds by which the clock below moves at each mark."""


SURE = {"steady_s": 1.0, "most_s": 20.0}
"""How long steps of a run are repeated, and chunks with them."""


class TickingClock:
    """A clock that moves at each mark; `slower` is the number of ticks of a mark, by number."""

    is_cuda = False

    def __init__(self, slower: Callable[[int], float] = lambda number: 1.0) -> None:
        self.now_s, self.num_marks, self.slower = 0.0, 0, slower

    def start(self) -> None: ...

    def mark(self) -> float:
        self.num_marks += 1
        self.now_s += STEP_S * self.slower(self.num_marks)
        return self.now_s

    def seconds(self, mark: float) -> float:
        return mark


def timed(trainer: Any, clock: TickingClock) -> tuple[list[str], tuple[ChunkSeconds, ...]]:
    """The actions, and the chunks of a trainer whose clock is `clock`."""
    trainer.clock = clock
    told: list[str] = []
    chunks = tuple(ChunkSeconds(stage=stage, forward_s=0.1, backward_s=0.1) for stage in trainer.chunks)
    return told, with_quiet_seconds(trainer, chunks, told.append)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zb-h1"])
def test_chunks_run_until_their_seconds_are_sure(schedule: str, make_run: Any) -> None:
    vpp = 2 if schedule == "interleaved-1f1b" else 1
    trainer = trainer_alone(make_run((schedule, 2, vpp, 4), check=False, **SURE), 0, "cpu")
    told, chunks = timed(trainer, TickingClock())
    assert [chunk.stage for chunk in chunks] == list(trainer.chunks)
    splits = schedule == "zb-h1"
    for chunk in chunks:
        assert chunk.quiet_forward_s == pytest.approx(STEP_S)
        assert chunk.quiet_backward_s == pytest.approx((2 if splits else 1) * STEP_S)
        assert chunk.spread_fraction == pytest.approx(0.0)
    computed = [at for at in told if "F0 (computing)" in at]
    assert len(computed) == vpp * (5 + 1), "one round of 1 s in passes of 0.2 s, behind one that does not count"
    assert all(not flat.grads.any() for flat in trainer.flat)


def test_passes_that_differ_are_repeated_and_said(make_run: Any) -> None:
    trainer = trainer_alone(make_run(("1f1b", 2, 1, 4), check=False, **SURE), 0, "cpu")
    told, (chunk,) = timed(trainer, TickingClock(lambda number: 1.0 + number % 3))
    assert len([at for at in told if "F0 (computing)" in at]) == after_steps.MOST_ROUNDS * (5 + 1)
    assert chunk.spread_fraction is not None
    assert chunk.spread_fraction > SURE_FRACTION


def test_all_ranks_run_as_often_as_the_slowest_needs(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowest(values: Any, op: Any) -> None:
        values.clamp_(min=0.5)  # of a rank whose passes took so long, or differed so much

    trainer = trainer_alone(make_run(("1f1b", 2, 1, 4), check=False, **SURE), 0, "cpu")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", slowest)
    told, (chunk,) = timed(trainer, TickingClock())
    assert len([at for at in told if "F0 (computing)" in at]) == after_steps.MOST_ROUNDS * (5 + 1)
    assert chunk.spread_fraction == pytest.approx(0.0), "its own"


def ranks_of(run: ProbeRun, among: float, quiet: float | None) -> list[RankResult]:
    """A rank per stage whose actions follow each other without a gap."""
    ranks = []
    for stage, actions in enumerate(run.ranks):
        chunk = ChunkSeconds(
            stage=stage, forward_s=among, backward_s=2 * among,
            quiet_forward_s=quiet, quiet_backward_s=None if quiet is None else 2 * quiet,
        )  # fmt: skip
        timed = [
            {"action": name, "ready_s": among * i, "start_s": among * i, "end_s": among * (i + 1)}
            for i, name in enumerate(actions)
        ]
        ranks.append(
            RankResult.model_validate(
                {
                    "rank": stage, "stage": stage, "dp": 0, "tp": 0, "torch_version": "", "device_name": "",
                    "num_parameters": 1, "actions": timed, "chunks": [chunk], "peak_in_flight_chunks": 1,
                    "steps": [
                        {
                            "pipeline_s": 1, "reduce_s": 0, "optimizer_s": 1, "step_s": 1, "loss": 1,
                            "gradient_norm": 1,
                        }
                    ],
                }
            )
        )  # fmt: skip
    return ranks


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_messages_that_slow_computing_contradict_no_plan(schedule: str, make_run: Any) -> None:
    run = make_run((schedule, 2, 1, 4), num_steps=1)
    eager = in_eager_torch(small_plan())
    stage = eager.best.stages[0]
    planned_s = stage.forward_s + stage.forward_comm_s
    ranks = ranks_of(run, 1.3 * planned_s, planned_s)
    rows = {row.name: row for row in compare_stage(eager, eager, 0, ranks[:1], 0.1, alone=False)}
    assert rows["forward"].agrees
    assert rows["forward"].measured == pytest.approx(planned_s)
    assert rows["forward among messages"].agrees is None
    assert rows["forward among messages"].error_fraction == pytest.approx(0.3)
    # 4 micro-batches of F and B on each of two stages, and one more of both before and after: 0.3 · 5 · 3 F longer
    assert beside_messages_s(run, ranks) == pytest.approx(0.3 * 5 * 3 * planned_s)
    pipeline = {row.name: row for row in compare_pipeline(eager, eager, run, ranks, [0, 1], 0.1)}
    assert pipeline["pipeline among messages"].agrees is None
    gain_s = pipeline["pipeline among messages"].measured - pipeline["pipeline"].measured
    assert gain_s == pytest.approx(beside_messages_s(run, ranks))
    assert beside_messages_s(run, ranks_of(run, 1.0, None)) == 0.0, "nothing was measured quietly"


def test_a_slow_rank_is_one_that_is_slow_without_messages(make_run: Any) -> None:
    run = make_run(("1f1b", 2, 1, 4), num_steps=1)
    layout = in_eager_torch(small_plan()).best
    quiet, among = (_factor(layout, 0, ranks_of(run, 1.3, quiet)[:1], alone=False) for quiet in (1.0, None))
    assert among == pytest.approx(1.3 * quiet)
