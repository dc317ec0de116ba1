"""Megatron-Bridge overrides say what the Megatron-LM arguments say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tables import beside

from planner.answer import Plan
from planner.export.megatron.bridge_files import bridge_overrides, export_bridge, hydra
from planner.export.refusal import Inexpressible
from planner.specs.model import ModelSpec

TABLES = beside(__file__)

Planned = Callable[..., Plan]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *TABLES["all_arguments_are_translated"],
        ("llama-3.1-405b", {"tp": 8, "pp": 16, "vpp": 4, "layers_per_stage": (1, *[2] * 62, 1)}),
    ],
)
def test_all_arguments_are_translated(planned: Planned, model: str, layout: dict[str, Any]) -> None:
    plan = planned(model, 2048, **layout)
    overrides = bridge_overrides(plan)  # an option without a translation is an assertion
    at = plan.parallelism
    assert overrides["model.tensor_model_parallel_size"] == at.tp
    assert overrides["model.pipeline_model_parallel_size"] == at.pp
    assert overrides["model.virtual_pipeline_model_parallel_size"] == (at.vpp if at.vpp > 1 else None)
    assert overrides["model.num_layers"] == plan.model.spec.num_hidden_layers
    assert overrides["model.seq_length"] == overrides["dataset.seq_length"] == plan.training.seq_length
    assert overrides["train.global_batch_size"] == plan.training.global_batch_size


def test_words_are_hydra_s(planned: Planned) -> None:
    plan = planned("llama-3.1-405b", 2048, tp=8, pp=16, vpp=4, layers_per_stage=(1, *[2] * 62, 1))
    exported = export_bridge(plan)
    data = json.loads(exported.files[0].text)
    assert 'model.pipeline_model_parallel_layout="Et|(tt|)*62tL"' in data["overrides"]
    assert "model.sequence_parallel=true" in data["overrides"]
    assert exported.command is not None
    assert list(exported.command.words) == data["overrides"]
    assert data["world_size"] == 2048


@pytest.mark.parametrize(("dtype", "features", "expected"), TABLES["precision_is_said_in_full"])
def test_precision_is_said_in_full(
    planned: Planned, dtype: str, features: dict[str, Any], expected: dict[str, Any]
) -> None:
    precision = bridge_overrides(planned("llama-3.1-8b", 16, tp=2, dtype=dtype, features=features))["mixed_precision"]
    assert precision["_target_"].endswith(".MixedPrecisionConfig")
    assert precision | expected == precision
    assert precision["params_dtype"] == {
        "_target_": "torch.float16" if dtype == "fp16" else "torch.bfloat16",
        "_call_": False,
    }
    assert hydra({"a": {"b": None}, "c": "x"}) == '{a:{b:null},c:"x"}'


@pytest.mark.parametrize(("model", "features", "fused"), TABLES["fusions_do_not_depend_on_what_is_installed"])
def test_fusions_do_not_depend_on_what_is_installed(
    planned: Planned, model: str, features: dict[str, Any], fused: dict[str, bool]
) -> None:
    overrides = bridge_overrides(planned(model, 64, tp=8, pp=8, vpp=2, features=features))
    assert {name: overrides[f"model.{name}"] for name in fused} == fused
    assert overrides["model.overlap_p2p_comm"] is True


def test_latent_attention_starts_from_a_recipe_that_has_it(planned: Planned) -> None:
    overrides = bridge_overrides(planned("kimi-k2", 1024, pp=16, ep=32))
    assert overrides["model.multi_latent_attention"] is True
    assert overrides["model.mtp_num_layers"] is None, "the recipe's own model predicts a second token"
    assert overrides["model.moe_layer_freq"] == [0, *[1] * 60]
    assert "mixed_precision" not in overrides, "its recipe has an object there"
    assert overrides["mixed_precision.grad_reduce_in_fp32"] is True
    assert overrides["model.num_query_groups"] == 64
    split = bridge_overrides(planned("deepseek-v2", 512, tp=2, ep=8, features={"overlap_param_gather": False}))
    assert split["comm_overlap.tp_comm_overlap"] is False, "there are no user buffers for latent projections"
    assert split["comm_overlap.overlap_grad_reduce"] is True, "the recipe's switches come after ddp's"
    assert split["comm_overlap.overlap_param_gather"] is False
    assert split["model.moe_router_score_function"] == "softmax"
    assert overrides["optimizer.use_precision_aware_optimizer"] is False


def test_latent_attention_without_the_recipe_s_experts(planned: Planned) -> None:
    plan = planned("kimi-k2", 1024, pp=16, ep=32)
    fields = plan.model.spec.model_dump()
    for moe in ({**fields["moe"], "shared_expert_intermediate_size": 0}, None):
        experts, spec = moe and moe["num_experts"], ModelSpec.model_validate({**fields, "moe": moe})
        layout = plan.parallelism.model_copy(update={"ep": 32 if experts else 1})
        best = plan.best.model_copy(update={"parallelism": layout})
        model = plan.model.model_copy(update={"spec": spec})
        other = plan.model_copy(update={"model": model, "best": best})
        overrides = bridge_overrides(other)
        assert overrides["model.num_moe_experts"] == experts
        assert overrides["model.expert_model_parallel_size"] == layout.ep
        assert any(overrides["model.moe_layer_freq"]) == bool(experts)
        assert overrides["model.moe_shared_expert_intermediate_size"] is None


def test_a_fusion_that_the_recipe_has_is_switched_off(planned: Planned) -> None:
    fused = {on: bridge_overrides(planned(features={"cross_entropy_fusion": on})) for on in (True, False)}
    assert [fused[on]["model.cross_entropy_loss_fusion"] for on in (True, False)] == [True, False]
    assert fused[True]["model.cross_entropy_fusion_impl"] == "te"


def test_a_position_table_is_as_long_as_the_sequences(planned: Planned) -> None:
    with pytest.raises(Inexpressible, match="1024 rows, the model's 2048"):
        bridge_overrides(planned("gpt3-175b", 64, tp=8, pp=8, seq_length=1024))
    assert bridge_overrides(planned("gpt3-175b", 64, tp=8, pp=8, seq_length=2048))["model.seq_length"] == 2048


def test_the_older_name_of_graphed_modules_gives_way(planned: Planned) -> None:
    """DeepSeek-V3's recipe sets `cuda_graph_scope`, which Megatron core refuses beside `cuda_graph_modules`."""
    layout = {"pp": 4, "ep": 64, "hardware": "gb200", "layers_per_stage": (16, 16, 16, 13)}
    plan = planned("deepseek-v3", 256, features={"cuda_graph": "moe_router"}, **layout)
    overrides = bridge_overrides(plan)
    assert overrides["model.cuda_graph_modules"] == ["moe_router", "moe_preprocess"]
    assert overrides["model.cuda_graph_scope"] is None
    older = plan.model_copy(update={"runtime_spec": plan.runtime_spec.model_copy(update={"version": "0.17"})})
    overrides = bridge_overrides(older)
    assert overrides["model.cuda_graph_scope"] == ["moe_router", "moe_preprocess"]
    assert "model.cuda_graph_modules" not in overrides
