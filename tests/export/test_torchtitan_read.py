"""Recipes, TOML files and command lines of torchtitan become the run they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from samples import TEXTS, layout_of

from planner.answer import Plan
from planner.export.export import bundle_of
from planner.export.import_run import read, read_configuration
from planner.specs.model import ModelSpec

Planned = Callable[..., Plan]


def test_stages_of_our_own_recipe_come_back(planned: Planned) -> None:
    counts = (1, 5, 4, 4, 4, 5, 5, 4)
    plan = planned("llama-3.1-8b", 64, runtime="torchtitan", tp=2, pp=4, vpp=2, layers_per_stage=counts)
    layout = layout_of(read_configuration(bundle_of(plan, ["torchtitan"]).files[0].text))
    assert (layout["vpp"], layout["layers_per_stage"]) == (2, list(counts))


def test_what_a_recipe_compiles(planned: Planned) -> None:
    features = {}
    for schedule in ("1f1b", "zb-h1"):
        plan = planned("llama-3.1-8b", 64, runtime="torchtitan", pp=4, num_microbatches=8, schedule=schedule)
        features[schedule] = read_configuration(bundle_of(plan, ["torchtitan"]).files[0].text).run["features"]
    today = {"async_tp": False, "deterministic": False, "cross_entropy_fusion": True, "flex_attention": True}
    assert features["1f1b"] == {"compile": True, **today}
    assert features["zb-h1"] == {"compile": False, **today}


def test_layers_recomputed_by_name_are_counted(planned: Planned) -> None:
    plan = planned("llama-3.1-8b", 64, runtime="torchtitan", pp=4, recompute="full", recompute_num_layers=3)
    text = bundle_of(plan, ["torchtitan"]).files[0].text
    assert len(layout_of(read_configuration(text))["recompute_layers"]) == 12
    assert "RECOMPUTED = {i for layers in (range(0, 3)" in text
    fewer = text.replace("RECOMPUTED = {i for layers in (range(0, 3)", "RECOMPUTED = {i for layers in (range(0, 1)")
    assert layout_of(read_configuration(fewer))["recompute_layers"] == [0, 8, 9, 10, 16, 17, 18, 24, 25, 26]


TOML = TEXTS["torchtitan toml"]


def test_torchtitan_toml() -> None:
    imported = read_configuration(TOML)
    assert imported.source == "torchtitan"
    assert imported.run["model"] == "llama-3.1-70b"
    assert imported.run["num_gpus"] == 256
    assert imported.complete(hardware="h100")["global_batch_size"] == 8 * 32
    assert layout_of(imported)["fsdp"] == 16
    assert layout_of(imported)["recompute"] == "full"
    assert imported.unknown == {"parallelism.surprising_degree": "3"}
    assert "job.dump_folder" in imported.ignored


def test_torchtitan_overrides() -> None:
    imported = read_configuration(
        "NGPU=64 torchrun -m torchtitan.train --module llama3 --config llama3_405b "
        "--parallelism.pipeline_parallel_degree 8 --parallelism.tensor-parallel-degree=8 "
        "--parallelism.pipeline_parallel_schedule ZBVZeroBubble --parallelism.no-enable_sequence_parallel "
        "--training.max_context_length 4096 --training.num_tokens_per_microbatch_per_dp_rank 8192 "
        "--training.num_tokens_per_train_step 1048576 --compile.enable"
    )
    layout = layout_of(imported)
    assert imported.run["model"] == "llama-3.1-405b"
    assert imported.run["num_gpus"] == 64
    assert (layout["pp"], layout["tp"], layout["vpp"], layout["schedule"]) == (8, 8, 2, "zb-v")
    assert layout["sequence_parallel"] is False
    assert (layout["micro_batch_size"], imported.run["global_batch_size"]) == (2, 256)


def test_a_recipe_with_values_that_only_a_run_knows() -> None:
    imported = read_configuration(
        "from torchtitan.config import ParallelismConfig\n"
        "from torchtitan.models.llama3 import model_registry\n"
        "config.model_spec = model_registry('8B')\n"
        "config.parallelism = ParallelismConfig(tensor_parallel_degree=2 * 2, expert_parallel_degree=pick())\n"
        "config.training.seq_len = 8192\n"
    )
    assert layout_of(imported)["tp"] == 4
    assert imported.run["model"] == "llama-3.1-8b"
    assert imported.run["seq_length"] == 8192
    assert imported.unknown == {"parallelism.expert_parallel_degree": "pick"}


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ("--parallelism.pipeline_parallel_layers_per_stage 9", "10 stages of 9 layers"),
        (
            "--parallelism.pipeline_parallel_schedule 1F1B --parallelism.pipeline_parallel_layers_per_stage 11",
            "one stage",
        ),
        ("--parallelism.pipeline_parallel_first_stage_less_layers 30", "stages leave fewer layers"),
        ("--activation_checkpoint.memory_budget 0.5", "compile.enable"),
    ],
)
def test_what_torchtitan_refuses_is_told(options: str, noun: str) -> None:
    """A launch that names its TOML says the model by its path alone, where the file is not beside it."""
    text = (
        'CONFIG_FILE="./torchtitan/models/llama3/train_configs/llama3_70b.toml" ./run_train.sh '
        "--parallelism.pipeline_parallel_degree 4 --parallelism.pipeline_parallel_schedule Interleaved1F1B "
    )
    assert read_configuration(text).refused == []
    found = read_configuration(text + options)
    assert found.run["model"] == "llama-3.1-70b"
    assert [noun in reason for reason in found.refused] == [True]


REGISTRY = TEXTS["torchtitan models"]


def test_a_model_of_a_trees_own_registry_is_followed(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text(REGISTRY)
    recipe = tmp_path / "config_registry.py"
    recipe.write_text(
        "from . import model_registry\ndef mine_small():\n    return Trainer.Config(model_spec=model_registry('small'),"
        " training=TrainingConfig(seq_len=2048), parallelism=ParallelismConfig(tensor_parallel_degree=2))\n"
    )
    model = ModelSpec.model_validate(read(recipe).complete(num_gpus=8, hardware="h100")["model"])
    assert (model.num_hidden_layers, model.hidden_size, model.head_dim, model.num_key_value_heads) == (6, 256, 16, 4)
    assert (model.attention_bias, model.sliding_window, model.layer_types) == ("qkv", 128, ("sliding", "full") * 3)
    assert model.moe is not None
    assert (model.moe.num_experts_per_tok, model.moe.moe_intermediate_size, model.moe.first_k_dense_replace) == (
        2,
        96,
        2,
    )
    (tmp_path / "__init__.py").write_text(REGISTRY.replace("Attention.Config(", "Attention.Config(\n o_gate=1,"))
    assert read(recipe).run["model"] is None
