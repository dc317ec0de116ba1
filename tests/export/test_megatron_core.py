"""Megatron core takes the arguments, the layouts and the parameters that are exported."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from layouts import SIZES, expressible, some_layout
from tables import beside

from planner.answer import Plan
from planner.export.megatron.megatron_files import megatron_arguments
from planner.export.megatron.plan_options import fold, layout_string
from planner.export.stages import VirtualStage
from planner.export.trainer_files import Arguments
from planner.layout.candidate import parse_layout
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model
from planner.trainers.rules.rule_rows import rules_of

TABLES = beside(__file__)

Planned = Callable[..., Plan]


FIELDS = TABLES["fields"]


@pytest.fixture(scope="module")
def megatron() -> Iterator[Any]:
    """Its modules of interest; all of it warns that there is no Transformer Engine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = pytest.importorskip(
            "megatron.core.transformer.transformer_config", reason="megatron-core is not installed"
        )
        from megatron.core import parallel_state
        from megatron.core.transformer import transformer_block, transformer_layer

        yield config, parallel_state, transformer_block, transformer_layer


def config_of(arguments: Arguments, megatron: Any) -> Any:
    """The arguments as Megatron's own configuration, which checks them."""
    import torch

    values = {FIELDS[option]: value for option, value in arguments.items() if option in FIELDS}
    layout = values.get("pipeline_model_parallel_layout")
    if layout is not None:
        num_stages = len(megatron[0].PipelineParallelLayerLayout(layout, 1).layout[0])
        vpp = num_stages // int(values["pipeline_model_parallel_size"])
        values["virtual_pipeline_model_parallel_size"] = vpp if vpp > 1 else None
    values["add_bias_linear"] = "--disable-bias-linear" not in arguments
    latent = "--multi-latent-attention" in arguments
    kind = megatron[0].MLATransformerConfig if latent else megatron[0].TransformerConfig
    return kind(**values, pipeline_dtype=torch.bfloat16)


@contextmanager
def posing(parallel_state: Any, pp: int, vpp: int | None) -> Iterator[None]:
    parallel_state.set_pipeline_model_parallel_world_size(pp)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_world_size(None)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
        parallel_state.set_pipeline_model_parallel_rank(None)


def layers_built(config: Any, megatron: Any) -> list[list[tuple[int, int]]]:
    """[first, last) of each chunk of each rank; None chunks hold nothing and begin nowhere."""
    _, parallel_state, block, layer = megatron
    pp, vpp = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    ranks = []
    with posing(parallel_state, pp, vpp):
        for rank in range(pp):
            parallel_state.set_pipeline_model_parallel_rank(rank)
            chunks = []
            for chunk in range(vpp or 1):
                stage = chunk if vpp else None
                number = block.get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank)
                first = layer.get_transformer_layer_offset(config, vp_stage=stage, pp_rank=rank)
                chunks.append((first, first + number))
            ranks.append(chunks)
    return ranks


LAYOUTS: list[tuple[str, int, dict[str, Any]]] = TABLES["layouts"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "gpus", "layout"), LAYOUTS)
def test_megatron_builds_the_planned_layers(
    planned: Planned, megatron: Any, model: str, gpus: int, layout: dict[str, Any]
) -> None:
    plan = planned(model, gpus, **layout)
    config = config_of(megatron_arguments(plan), megatron)
    assert layers_built(config, megatron) == [list(stage.chunks) for stage in plan.stages]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("gpus", SIZES)
@pytest.mark.parametrize("name", expressible(rules_of("export megatron")))
def test_every_model_is_built_as_planned(planned: Planned, megatron: Any, name: str, gpus: int) -> None:
    model = load_model(name)
    layout = some_layout(model, gpus, f"{name} {gpus} megatron-core")
    plan = planned(name, gpus, seq_length=min(2048, model.max_position_embeddings or 2048), **layout)
    arguments = megatron_arguments(plan)
    config = config_of(arguments, megatron)
    assert layers_built(config, megatron) == [list(stage.chunks) for stage in plan.stages]
    if (text := arguments.get("--pipeline-model-parallel-layout")) is None:
        return
    stages = megatron[0].PipelineParallelLayerLayout(text, plan.parallelism.pp).layout
    held = [{kind.name for chunk in chunks for kind in chunk} - {"decoder"} for chunks in stages]
    names = {"head": "loss"}
    assert held == [{names.get(part, part) for part in stage.holds} for stage in plan.stages]


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
    [*TABLES["folded"], ([1, *[2] * 62, 1], None, "Et|(tt|)*62tL"), ([3, *[2] * 29, 0, 0], 30, "Et*3|(tt|)*29m|L")],
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


@pytest.mark.thorough(2)
@pytest.mark.parametrize(("model", "gpus", "layout", "runs"), TABLES["built"])
def test_ranks_hold_what_megatron_builds(
    planned: Planned, model: str, gpus: int, layout: dict[str, Any], runs: list[tuple[int, int]]
) -> None:
    plan = planned(model, gpus, **layout)
    parameters = [parameters for parameters, ranks in runs for _ in range(ranks)]
    assert [stage.num_parameters for stage in plan.stages] == parameters
    # also of models whose rotary frequencies it cannot stretch, which no size depends on
    assert megatron_arguments(plan, of_model=())


def test_torchtitan_keeps_the_projection_of_multi_token_prediction_whole(planned: Planned) -> None:
    num_whole, num_split = (
        planned("deepseek-v3", 512, runtime=runtime, tp=2, ep=8, zero_stage=stage).stages[0].num_parameters
        for runtime, stage in (("torchtitan", 3), ("megatron", 1))
    )
    assert num_whole - num_split == 7168 * 7168, "half of 2 · 7168²"
