"""Parameters of every pipeline rank are those that Megatron-LM's own builder gives for the exported arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from planner.answer import Plan
from planner.export.megatron.plan_arguments import megatron_arguments

Planned = Callable[..., Plan]

BUILT: list[tuple[str, int, dict[str, Any], tuple[int, ...]]] = [
    (
        "llama-3.1-405b",
        2048,
        {"tp": 8, "pp": 16, "vpp": 4, "layers_per_stage": (1, *[2] * 62, 1)},
        (3_053_682_688, *[3_187_933_184] * 14, 3_053_699_072),
    ),
    # 8 key-value heads over 16 ranks: the projection is cut further
    ("llama-3.1-70b", 256, {"tp": 16, "pp": 4}, (1_135_935_488, *[1_069_875_200] * 2, 1_135_943_680)),
    ("qwen3-235b-a22b", 512, {"tp": 8, "pp": 2, "ep": 8, "etp": 1}, (14_715_588_352, 14_715_592_448)),
    ("gpt3-175b", 64, {"tp": 8, "pp": 8}, (2_822_731_776, *[2_718_922_752] * 6, 2_797_590_528)),
    ("nemotron-4-340b", 512, {"tp": 8, "pp": 8}, (5_771_722_752, *[5_181_898_752] * 6, 5_771_759_616)),
    ("mixtral-8x22b", 64, {"tp": 2, "pp": 4, "ep": 8}, (4_943_585_280, *[4_845_281_280] * 2, 4_943_591_424)),
    ("qwen2.5-72b", 64, {"tp": 4, "pp": 4}, (4_700_096_512, *[4_388_669_440] * 2, 4_700_104_704)),
    (
        "kimi-k2",
        512,
        {"pp": 8, "ep": 32, "layers_per_stage": (7, *[8] * 6, 6)},
        (5_730_385_920, *[5_411_307_520] * 6, 5_232_892_928),
    ),
    # multi-token prediction embeds its tokens itself
    (
        "deepseek-v3",
        512,
        {"pp": 8, "ep": 64, "layout": "Et*7|(t*8|)*6t*6mL"},
        (4_313_759_744, *[3_273_261_056] * 6, 4_820_250_624),
    ),
    # on a rank of its own it leaves the final norm with the last decoder layer
    (
        "deepseek-v3",
        1024,
        {"pp": 16, "vpp": 2, "ep": 64, "layout": "Et*3|(tt|)*29m|L"},
        (3_495_444_480, *[1_636_630_528] * 12, 1_636_637_696, 2_256_933_888, 1_744_994_304),
    ),
    # tied: the last stage has a copy of the embedding
    ("llama-3.2-1b", 8, {"pp": 2}, (749_240_320, 749_242_368)),
]
"""Model, GPUs, layout, and parameters by pipeline rank as core 0.20.0 builds them."""


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("model", "gpus", "layout", "parameters"), BUILT)
def test_ranks_hold_what_megatron_builds(
    planned: Planned, model: str, gpus: int, layout: dict[str, Any], parameters: tuple[int, ...]
) -> None:
    plan = planned(model, gpus, **layout)
    assert tuple(stage.num_parameters for stage in plan.stages) == parameters
    # also of models whose rotary frequencies it cannot stretch, which no size depends on
    assert megatron_arguments(plan, of_model=())


def test_torchtitan_keeps_the_projection_of_multi_token_prediction_whole(planned: Planned) -> None:
    num_whole, num_split = (
        planned("deepseek-v3", 512, runtime=runtime, tp=2, ep=8, zero_stage=stage).stages[0].num_parameters
        for runtime, stage in (("torchtitan", 3), ("megatron", 1))
    )
    assert num_whole - num_split == 7168 * 7168, "half of 2 · 7168²"
