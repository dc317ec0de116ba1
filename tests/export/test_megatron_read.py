"""Launch scripts, argument lists and YAML of Megatron-LM become the run they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from samples import BASE, SCRIPT, layout_of

from planner.answer import Plan
from planner.export.import_run import read_configuration
from planner.export.imported_run import ImportedRun
from planner.export.megatron.option_rows import options_of
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model

TABLES = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text())

Planned = Callable[..., Plan]


def test_a_launch_script() -> None:
    imported = read_configuration(SCRIPT)
    run, layout = imported.run, layout_of(imported)
    assert imported.source == "megatron"
    assert run["num_gpus"] == 128
    assert (run["seq_length"], run["global_batch_size"], run["dtype"]) == (4096, 512, "bf16")
    assert run["model"]["vocab_size"] == 128256
    assert run["model"]["num_key_value_heads"] == 8
    assert (layout["tp"], layout["pp"], layout["vpp"]) == (4, 4, 1)
    assert layout["layout"] == "Et*19|(t*20|)*2t*21L"
    assert (layout["recompute"], layout["recompute_num_layers"]) == ("full", 3)
    assert layout["zero_stage"] == 1
    assert imported.unknown == {"--brand-new-switch": "7"}
    assert {"--save", "--lr"} <= imported.ignored.keys()


def test_the_last_of_equal_options_wins() -> None:
    assert options_of(["x", "--a", "1", "--a=2", "--nproc_per_node", "8"]) == {"--a": ["2"], "--nproc-per-node": ["8"]}


def read(options: str, gpus: int = 32) -> ImportedRun:
    return read_configuration(
        f"torchrun --nnodes {gpus // 8} --nproc-per-node 8 pretrain_gpt.py {BASE} --bf16 {options}"
    )


@pytest.mark.parametrize(("options", "expected"), TABLES["layouts_of_options"])
def test_parallelism(options: str, expected: dict[str, Any]) -> None:
    layout = layout_of(read(options))
    assert {key: layout.get(key) for key in expected} == expected


@pytest.mark.parametrize(("options", "expected"), TABLES["models_of_options"])
def test_models(options: str, expected: dict[str, Any]) -> None:
    model = read(options).run["model"]
    assert {key: model.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("options", "drops"),
    [("", True), ("--hidden-dropout 0.1", True), ("--hidden-dropout 0.0", False), ("--hidden-dropout 0", False)],
)
def test_megatron_drops_a_tenth_unless_told_otherwise(options: str, drops: bool) -> None:
    assert read(options).run["features"]["dropout"] is drops


@pytest.mark.parametrize(("backend", "means"), [("deepep", "deepep"), ("ncclep", "hybridep")])
def test_backends_of_the_flexible_dispatcher(backend: str, means: str) -> None:
    imported = read(f"--num-experts 8 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {backend}")
    assert (imported.run["features"]["dispatcher"], imported.unknown) == (means, {})


def test_weight_gradients_that_are_not_added_by_their_product() -> None:
    imported = read("--no-gradient-accumulation-fusion")
    assert imported.run["features"]["gradient_accumulation_fusion"] is False
    assert imported.unknown == {}


@pytest.mark.parametrize(
    ("options", "width"),
    [("", 16384), ("--swiglu", 10880), ("--ffn-hidden-size 512", 512), ("--moe-ffn-hidden-size 1024", 1024)],
)
def test_experts_are_as_wide_as_a_dense_mlp_unless_told(options: str, width: int) -> None:
    assert read(f"--num-experts 8 {options}").run["model"]["moe"]["moe_intermediate_size"] == width


@pytest.mark.parametrize(
    ("pattern", "dense", "every"),
    [
        ("([0]*3+[1]*29)", 3, 1),
        ("+".join(["([0]*1", *["[1]*1", "[0]*1"] * 15, "[1]*1)"]), 0, 2),
        ("+".join(["([0]*5", *["[1]*1", "[0]*2"] * 8, "[1]*1", "[0]*2)"]), 3, 3),
        ("([0]*32)", 32, 1),
    ],
)
def test_layers_with_experts(pattern: str, dense: int, every: int) -> None:
    """Dense layers in front, then every n-th has experts: what an export writes for each model spec comes back."""
    options = f"--num-experts 8 --ffn-hidden-size 4096 --moe-ffn-hidden-size 1024 --moe-layer-freq '{pattern}'"
    moe = read(options).run["model"]["moe"]
    assert (moe["first_k_dense_replace"], moe["moe_layer_freq"]) == (dense, every)


def test_a_default_that_changed_is_noted() -> None:
    assert any("before it sharded nothing" in note for note in read("--use-megatron-fsdp").notes)
    assert read("--use-megatron-fsdp --data-parallel-sharding-strategy optim").notes == []


@pytest.mark.parametrize(
    ("options", "recipe", "noted"),
    [
        ("--bf16", None, False),
        ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise", "fp8-tensorwise", False),
        ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8", None, False),
        ("--bf16 --fp8-format e4m3 --fp8-recipe blockwise", "fp8-blockwise", True),
        ("--bf16 --fp8-format hybrid", "fp8-delayed", True),
    ],
)
def test_scales_that_are_not_modelled_are_named(options: str, recipe: str | None, noted: bool) -> None:
    imported = read(options)
    assert imported.run["precision_recipe"] == recipe
    named = [note for note in imported.notes if "--fp8-recipe" in note]
    assert len(named) == noted
    assert all(str(recipe).removeprefix("fp8-") in note for note in named)


def test_a_batch_size_left_out_is_one_micro_batch_a_rank() -> None:
    text = BASE.replace(" --global-batch-size 64", "")
    imported = read_configuration(f"torchrun --nproc-per-node 8 pretrain_gpt.py {text} --tensor-model-parallel-size 2")
    assert imported.complete(hardware="h100")["global_batch_size"] == 8
    assert imported.complete(hardware="h100", num_gpus=16)["global_batch_size"] == 16


def test_a_hybrids_pattern_says_layers_stages_and_predictions() -> None:
    nano = load_model("nemotron-3-nano-30b-a3b")
    letters = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    sizes = (
        "--hidden-size 2688 --num-attention-heads 32 --group-query-attention --num-query-groups 2 --kv-channels 128 "
        "--squared-relu --disable-bias-linear --normalization RMSNorm --position-embedding-type none "
        "--vocab-size 131072 --untie-embeddings-and-output-weights --num-experts 128 "
        "--moe-router-topk 6 --moe-ffn-hidden-size 1856 "
        "--moe-shared-expert-intermediate-size 3712 --mamba-num-heads 64 --seq-length 8192 --global-batch-size 64 "
        "--micro-batch-size 1 --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
    )
    text = f"python pretrain_hybrid.py {sizes} --hybrid-layer-pattern '{letters}' --pipeline-model-parallel-size 2"
    imported = read_configuration(text)
    model = ModelSpec.model_validate(imported.complete(num_gpus=16, hardware="h100")["model"])
    assert (model.name, model.layer_types, model.mlp_layer_types) == (nano.name, nano.layer_types, nano.mlp_layer_types)
    assert (model.mamba, imported.unknown, imported.refused) == (nano.mamba, {}, [])
    staged = read_configuration(text.replace(letters, f"{letters[:20]}|{letters[20:]}/*E"))
    assert layout_of(staged)["layout"] == f"E{'t' * 20}|{'t' * 32}mL"
    assert staged.run["model"]["num_nextn_predict_layers"] == 1
