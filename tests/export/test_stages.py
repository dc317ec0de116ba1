"""Virtual stages come out in model order, wherever the ranks hold them, with what each recomputes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.stages import is_even, is_looped, recomputed_layers, virtual_stages

Planned = Callable[..., Plan]


def test_interleaved_chunks_follow_each_other(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 16, pp=4, vpp=2, layers_per_stage=(1, 5, 4, 4, 4, 5, 5, 4))
    stages = virtual_stages(plan.best, 32)
    assert [(s.rank, s.chunk) for s in stages] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (1, 1), (2, 1), (3, 1)]
    assert [s.num_layers for s in stages] == [1, 5, 4, 4, 4, 5, 5, 4]
    assert [s.embedding for s in stages] == [True] + [False] * 7
    assert [s.head for s in stages] == [False] * 7 + [True]
    assert is_looped(stages, 4)
    assert not is_even(stages)


def test_v_shaped_chunks_come_back(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 4, runtime="torch-eager", pp=4, vpp=2, schedule="zb-v")
    stages = virtual_stages(plan.best, 32)
    assert [s.rank for s in stages] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert not is_looped(stages, 4)
    assert is_even(stages)


def test_mtp_follows_its_rank_s_layers(planned: Planned) -> None:
    plan = planned("deepseek-v3", 1024, ep=64, pp=16, vpp=2, layout="Et*3|(tt|)*29m|L")
    stages = virtual_stages(plan.best, 61)
    assert [j for j, s in enumerate(stages) if s.mtp] == [30]
    assert stages[30].num_layers == stages[31].num_layers == 0
    assert not stages[30].is_empty


def test_stages_that_leave_layers_out_are_refused(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 16, pp=4)
    first = plan.best.stages[0].model_copy(update={"chunks": ((0, 7),)})
    broken = plan.best.model_copy(update={"stages": (first, *plan.best.stages[1:])})
    with pytest.raises(SpecError, match=r"\[\(0, 7\)\].* do not hold 32 layers once"):
        virtual_stages(broken, 32)
    with pytest.raises(SpecError, match="expected 1 for each of pp 4"):
        virtual_stages(plan.best.model_copy(update={"stages": plan.best.stages[1:]}), 32)


@pytest.mark.parametrize(
    ("saved", "expected"),
    [(((1,), (3,), (0,), (0,)), [1, 0, 3, 0, 0, 0, 0, 0]), ((), [4, 0, 0, 0, 0, 0, 0, 0])],
    ids=["of each chunk", "of the rank"],
)
def test_chunks_recompute_as_planned(planned: Planned, saved: tuple[tuple[int, ...], ...], expected: list[int]) -> None:
    best = planned("llama-3.1-8b", 4, runtime="torch-eager", pp=2, vpp=4).best
    none = ((0,),) * 4 if saved else ()
    counts = [({"full": 4, "none": 12}, saved), ({"none": 16}, none)]
    stages = [
        stage.model_copy(update={"recompute": modes, "num_recomputed": num_recomputed})
        for stage, (modes, num_recomputed) in zip(best.stages, counts, strict=True)
    ]
    best = best.model_copy(update={"stages": tuple(stages)})
    assert sum(recomputed_layers(best, virtual_stages(best, 32))) == 4
    assert recomputed_layers(best, virtual_stages(best, 32)) == expected
