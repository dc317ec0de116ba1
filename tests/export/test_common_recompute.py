"""Layers are recomputed whole in the chunks that the plan names, or in as many layers as it counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.answer import Plan
from planner.export.stages import recomputed_layers, virtual_stages

Planned = Callable[..., Plan]


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (((1,), (3,), (0,), (0,)), [1, 0, 3, 0, 0, 0, 0, 0]),
        ((), [4, 0, 0, 0, 0, 0, 0, 0]),
    ],
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
