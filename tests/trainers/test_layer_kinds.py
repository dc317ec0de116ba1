"""Rules on layers that scan: split by heads, built by no export; their prices are less certain."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tables import beside

from planner.errors import SpecError
from planner.export.export import bundle_of
from planner.layout.evaluate import evaluate
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.load import RUNTIMES, load_runtime
from planner.trainers.rules.recipe import rules_for
from planner.trainers.rules.rule_rows import first_broken, rules_of

TABLES = beside(__file__)

LAYER_KIND_RULES, UNWRITTEN_RULES = rules_of("layer_kinds"), rules_of("unwritten")
TORCH_MODEL_RULES = rules_of("export torch-eager")
TRAINING = TrainingSpec(seq_length=4096, global_batch_size=64)
BASE: dict[str, Any] = TABLES["base"]
MAMBA = {"state_size": 16, "intermediate_size": 128, "num_heads": 8, "n_groups": 2}
DELTA = {"num_key_heads": 2, "num_value_heads": 8, "key_head_dim": 8, "value_head_dim": 16, "conv_kernel": 4}


def model_of(kind: str, **fields: Any) -> ModelSpec:
    return ModelSpec(layer_types=(kind, "full"), **BASE, **fields)


@pytest.mark.parametrize(
    ("model", "sizes", "words"),
    [
        (model_of("mamba2", mamba=MAMBA | {"num_heads": 6, "intermediate_size": 96}), {"tp": 4}, "mamba.num_heads 6"),
        (model_of("mamba2", mamba=MAMBA | {"num_heads": 12, "intermediate_size": 96, "n_groups": 3}), {"tp": 2},
         "mamba.n_groups 3 and tp 2: neither"),
        (model_of("gated_delta", linear_attention=DELTA), {"tp": 4}, "linear_attention.num_key_heads 2"),
        (model_of("mamba2", mamba=MAMBA), {"cp": 2}, "cp 2 splits sequences, and layers of mamba2"),
        (model_of("conv", short_conv_kernel=3), {"cp": 4}, "layers of conv"),
        (model_of("full", per_layer_input_size=8), {"pp": 2}, "pp 2: layers run again, or read"),
        (model_of("full", layer_sizes=({}, {"intermediate_size": 36})), {"tp": 8}, "layer_sizes[1].intermediate"),
    ],
)  # fmt: skip
def test_a_layout_that_cuts_a_state_is_refused(model: ModelSpec, sizes: dict[str, int], words: str) -> None:
    rules = (*LAYER_KIND_RULES, *rules_of("whole_scans"))
    rule = first_broken(rules, model, TRAINING, Shape(**sizes, seq_length=4096))
    assert rule is not None
    assert words in rule.message(model, TRAINING, Shape(**sizes, seq_length=4096))


def test_a_layout_that_leaves_states_whole_is_legal() -> None:
    model = model_of("mamba2", mamba=MAMBA)
    tps = np.array([1, 2, 4, 8])
    for rule in LAYER_KIND_RULES:
        assert np.all(rule.holds(model, TRAINING, Shape(tp=tps, seq_length=4096)))
    assert first_broken(LAYER_KIND_RULES, load_model("8b"), TRAINING, Shape(cp=8, seq_length=4096)) is None


@pytest.mark.parametrize("name", RUNTIMES)
def test_every_trainer_obeys_them(name: str) -> None:
    exchanges_heads = load_runtime(name).family in ("megatron", "bridge", "primus-megatron")
    rules = LAYER_KIND_RULES if exchanges_heads else (*LAYER_KIND_RULES, *rules_of("whole_scans"))
    assert set(rules) <= set(rules_for(load_runtime(name)))


@pytest.mark.parametrize(("fields", "reason"), TABLES["no_export_leaves_a_field_out_silently"])
def test_no_export_leaves_a_field_out_silently(fields: dict[str, Any], reason: str) -> None:
    rule = first_broken(UNWRITTEN_RULES, ModelSpec(**BASE, **fields), TRAINING, Shape())
    assert rule is not None
    assert rule.reason == reason
    assert first_broken(UNWRITTEN_RULES, ModelSpec(**BASE), TRAINING, Shape()) is None


@pytest.mark.parametrize("fields", TABLES["the_runner_builds_no_other_layers_than_the_models"])
def test_the_runner_builds_no_other_layers_than_the_models(fields: dict[str, Any]) -> None:
    assert first_broken(TORCH_MODEL_RULES, ModelSpec(**BASE, **fields), TRAINING, Shape()) is not None
    assert first_broken(TORCH_MODEL_RULES, load_model("deepseek-v3"), TRAINING, Shape()) is None


def test_a_hybrid_is_priced_warned_of_and_not_exported() -> None:
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=64)
    layout = Parallelism(tp=4, pp=2, dp=8, micro_batch_size=1)
    plan = evaluate(load_model("falcon-h1-34b"), cluster, TRAINING, layout)
    assert any("it builds no layers of full_mamba2" in warning for warning in plan.warnings)
    with pytest.raises(SpecError, match="layer_kind: it builds no layers of full_mamba2"):
        bundle_of(plan, ["megatron"])
    dense = evaluate(load_model("qwen3-32b"), cluster, TRAINING, layout)

    def spread(found: Any) -> float:
        low, high = found.best.step.step_s_interval
        return float(high / low)

    assert spread(plan) > 1.15 * spread(dense)
