"""Megatron's layout string says what the plan says, read back by our parser and by Megatron's own."""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence

import pytest

from planner.export.megatron.layout_options import fold, layout_string
from planner.export.stages import VirtualStage
from planner.layout.split import parse_layout
from planner.specs.model import ModelSpec


def stages_of(counts: Sequence[int], pp: int, mtp: int | None) -> list[VirtualStage]:
    first, stages = 0, []
    for j, count in enumerate(counts):
        stages.append(VirtualStage(j % pp, j // pp, first, first + count, j == 0, j == mtp, j == len(counts) - 1))
        first += count
    return stages


def model_of(num_layers: int, num_mtp: int) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": "model", "num_hidden_layers": num_layers, "hidden_size": 64, "intermediate_size": 64,
            "num_attention_heads": 4, "vocab_size": 64, "num_nextn_predict_layers": num_mtp,
        }
    )  # fmt: skip


def random_splits(number: int) -> list[tuple[int, list[int]]]:
    """(pp, layers of each virtual stage): long runs, ramps, empty stages."""
    rng = random.Random(0)
    splits = []
    for _ in range(number):
        pp, vpp = rng.randint(1, 16), rng.randint(1, 4)
        few = [rng.randint(0, 20) for _ in range(rng.randint(1, 3))]
        counts = [rng.choice(few) for _ in range(pp * vpp)]
        counts[-1] += 1  # a model has a layer
        splits.append((pp, counts))
    return splits


@pytest.mark.parametrize(
    ("counts", "mtp", "text"),
    [
        ([1, *[2] * 62, 1], None, "Et|(tt|)*62tL"),
        ([3, *[2] * 29, 0, 0], 30, "Et*3|(tt|)*29m|L"),
        ([0, 4, 4, 0], None, "E|(t*4|)*2L"),
        ([1, 0, 0, 1], None, "Et||*2tL"),
        ([2, 3], 1, "Ett|t*3mL"),
    ],
)
def test_folded(counts: list[int], mtp: int | None, text: str) -> None:
    assert layout_string(stages_of(counts, 2, mtp), 1 if mtp is not None else 0) == text


def test_our_own_parser_reads_it_back() -> None:
    for pp, counts in random_splits(200):
        num_mtp = len(counts) % 3
        mtp = len(counts) - 1 if num_mtp else None
        text = layout_string(stages_of(counts, pp, mtp), num_mtp)
        split = parse_layout(text, model_of(sum(counts), num_mtp), len(counts))
        assert split.counts == tuple(counts), text
        assert split.mtp_stage == mtp, text


def test_megatron_reads_it_back() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core says at length what it does not find
        layouts = pytest.importorskip(
            "megatron.core.transformer.pipeline_parallel_layer_layout", reason="megatron-core is not installed"
        )
    for pp, counts in random_splits(200):
        text = layout_string(stages_of(counts, pp, None))
        layout = layouts.PipelineParallelLayerLayout(text, pp)
        layout.validate_layer_layout(sum(counts), 0)
        held = [layout.layout[j % pp][j // pp].count(layouts.LayerType.decoder) for j in range(len(counts))]
        assert held == counts, text


def test_fold_joins_runs_only() -> None:
    assert fold(["Et", "t", "tt", "tt", "tt", "tL"]) == "Et|t|(tt|)*3tL"
    assert fold(["EttL"]) == "EttL"
