"""A model in a trainer's words reads back as the model: all that ship, and random ones with every field."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from layouts import expressible
from pydantic import ValidationError

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.import_run import read_configuration
from planner.export.megatron.bridge_files import export_bridge
from planner.export.megatron.model_options import model_arguments, read_model
from planner.export.megatron.option_rows import options_of
from planner.export.run_settings import stated
from planner.export.trainer_files import argv
from planner.specs.architectures import ARCHITECTURES, from_config
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model
from planner.specs.training import TrainingSpec
from planner.trainers.rules.common import Rule, first_broken, rotary_method
from planner.trainers.rules.megatron import BRIDGE_MODEL_RULES, MEGATRON_MODEL_RULES, megatron_model_rules

Planned = Callable[..., Plan]

SEQ_LENGTH = 2048
TRAINING = TrainingSpec(seq_length=SEQ_LENGTH, global_batch_size=1)
NOTHING: Any = None
LATENT = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
YARN = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def meaning(model: ModelSpec) -> dict[str, Any]:
    """All that a model computes and learns, however its spec says it, on short sequences."""
    said = stated(model)
    # how transformers computes norms and routers is no trainer's
    of_transformers = {"norm_in_fp32", "residual_dropout"}
    fields = said.model_dump(
        exclude={"name", "aliases", "source", "training", "bias", "sliding_window_pattern", *of_transformers}
    )
    if said.attention_chunk_size is not None and said.attention_chunk_size >= SEQ_LENGTH:
        fields["attention_chunk_size"] = None
    slides = any(kind.attention == "sliding" for kind in said.layers)
    fields |= {
        "norm_bias": said.has_norm_bias,
        "attention_bias": "all" if said.output_bias else "qkv" if said.qkv_bias else "none",
        "mlp_bias": said.has_mlp_bias,
        "layer_types": [kind.attention == "sliding" for kind in said.layers],
        "mlp_layer_types": [kind.mlp for kind in said.layers],
        "sliding_window": said.sliding_window if slides else None,
        "intermediate_size": said.intermediate_size if any(kind.mlp == "dense" for kind in said.layers) else None,
        "max_position_embeddings": said.max_position_embeddings if said.position_embedding == "learned" else None,
        "rope_scaling": scaling(said),
    }
    if said.moe and said.moe.num_experts_per_tok == 1:
        fields["moe"]["norm_topk_prob"] = False
    if fields["moe"]:
        # which layers have experts is a list of its own
        others = ("first_k_dense_replace", "moe_layer_freq", "router_in_fp32")
        fields["moe"] = {k: v for k, v in fields["moe"].items() if k not in others}
    return fields


def scaling(model: ModelSpec) -> dict[str, Any] | None:
    if rotary_method(model) is None or model.rope_scaling is None:
        return None
    usual = {"yarn": YARN, "llama3": LLAMA3}.get(model.rope_scaling.rope_type, {})
    return {**usual, **{k: v for k, v in model.rope_scaling.model_dump().items() if v is not None}}


def unstretched(model: ModelSpec, rules: tuple[Rule, ...]) -> ModelSpec:
    """The model as an export writes it for short sequences: without a stretching that the trainer cannot say."""
    refused = any(rule.stretches(model) for rule in rules if rule.stretches is not None)
    return model.model_copy(update={"rope_scaling": None}) if refused else model


def through_megatron(model: ModelSpec) -> ModelSpec:
    words = argv(model_arguments(model, SEQ_LENGTH, 128))
    return ModelSpec.model_validate(read_model(options_of(words)))


@pytest.mark.parametrize("name", [*expressible(MEGATRON_MODEL_RULES), "deepseek-v2-lite", "moonlight-16b"])
def test_a_model_that_ships(name: str) -> None:
    model = unstretched(load_model(name), MEGATRON_MODEL_RULES)
    assert first_broken(megatron_model_rules("0.18"), model, TRAINING, NOTHING) is None or model.attention_sinks
    assert meaning(through_megatron(model)) == meaning(model)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_model_of_every_kind_of_config(kind: str) -> None:
    """What transformers assumes for a kind is refused by name, or comes back the same."""
    try:
        model = from_config({"model_type": kind, **MISSING}, "config.json")
    except SpecError:
        pytest.skip("the kind has sizes without a default")
    if first_broken(MEGATRON_MODEL_RULES, model, TRAINING, NOTHING) is None:
        model = unstretched(model, MEGATRON_MODEL_RULES)
        back, there = meaning(through_megatron(model)), meaning(model)
        assert {**back, "short_conv_kernel": None} == {**there, "short_conv_kernel": None}


MISSING = {"num_experts_per_tok": 4, "n_routed_experts": 16, "moe_intermediate_size": 128}


IN_BRIDGE = [name for name in expressible(BRIDGE_MODEL_RULES) if name != "opt-175b"]
"""OPT has two learned positions more than its sequences have tokens."""


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", IN_BRIDGE)
def test_a_model_that_ships_in_fields_of_bridge(planned: Planned, name: str) -> None:
    model = unstretched(load_model(name), BRIDGE_MODEL_RULES)
    plan = planned(model, 16, seq_length=SEQ_LENGTH, recompute="full")
    read = read_configuration(export_bridge(plan).files[0].text).run["model"]
    assert meaning(ModelSpec.model_validate({**read, "name": name})) == meaning(model)


def some_model(seed: int) -> ModelSpec | None:
    """A model with a few random fields; None where they do not go together."""
    rng = random.Random(seed)
    layers = rng.choice([4, 6, 7, 12])
    fields: dict[str, Any] = {
        "name": f"random-{seed}", "num_hidden_layers": layers, "hidden_size": 512, "intermediate_size": 1024,
        "num_attention_heads": 8, "num_key_value_heads": rng.choice([1, 2, 8]), "head_dim": rng.choice([64, 96]),
        "vocab_size": 1000, "position_embedding": rng.choice(["rope", "rope", "rope", "none", "learned"]),
        "max_position_embeddings": SEQ_LENGTH, "tie_word_embeddings": rng.random() < 0.5,
    }  # fmt: skip
    optional: dict[str, Callable[[], Any]] = {
        "norm_eps": lambda: rng.choice([1e-6, 3.7e-6, 1e-5]),
        "norm": lambda: rng.choice(["rmsnorm", "layernorm"]),
        "norm_bias": lambda: True,
        "bias": lambda: True,
        "attention_bias": lambda: "qkv",
        "zero_centered_norm": lambda: True,
        "qk_norm": lambda: True,
        "gated_mlp": lambda: False,
        "activation": lambda: rng.choice(["gelu", "gelu_tanh", "relu2", "quick_gelu"]),
        "swiglu_limit": lambda: 7.0,
        "glu_linear_offset": lambda: 1.0,
        "attention_sinks": lambda: True,
        "attn_output_gate": lambda: True,
        "rope_theta": lambda: rng.choice([5e5, 1e7]),
        "partial_rotary_factor": lambda: 0.25,
        "rope_scaling": lambda: rng.choice(SCALINGS),
        "no_rope_layer_interval": lambda: rng.choice([2, 4]),
        "sliding_window": lambda: 64,
        "sliding_window_pattern": lambda: rng.choice([2, 3]),
        "layer_types": lambda: tuple(rng.choice(["full", "sliding"]) for _ in range(layers)),
        "moe": lambda: some_moe(rng),
        "mlp_layer_types": lambda: tuple(rng.choice(["dense", "moe"]) for _ in range(layers)),
        "mla": lambda: {
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
        },
        "num_nextn_predict_layers": lambda: 1,
        "mtp_loss_scaling_factor": lambda: 0.3,
    }
    fields |= {name: choose() for name, choose in optional.items() if rng.random() < 0.3}
    try:
        return ModelSpec.model_validate(fields)
    except ValidationError:
        return None


SCALINGS = [
    dict(rope_type="llama3", factor=8.0, **LLAMA3),
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 16.0},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
    {"rope_type": "yarn", "factor": 32.0, "truncate": False},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "linear", "factor": 1.0},
]


def some_moe(rng: random.Random) -> dict[str, Any]:
    chosen = rng.choice([1, 2, 4])
    by_bias = rng.random() < 0.5
    moe = {
        "num_experts": 16, "num_experts_per_tok": chosen, "moe_intermediate_size": 256, "router_bias": by_bias,
        "norm_topk_prob": chosen > 1 and rng.random() < 0.7, "routed_scaling_factor": rng.choice([1.0, 2.827]),
        "router_aux_loss_coef": rng.choice([None, 0.0, 1e-4]), "seq_aux": rng.random() < 0.5,
    }  # fmt: skip
    if rng.random() < 0.5:
        moe |= {"n_group": rng.choice([1, 4]), "topk_group": 1, "first_k_dense_replace": 1}
    if rng.random() < 0.5:
        moe |= {"shared_expert_intermediate_size": 256, "shared_expert_gate": rng.random() < 0.5}
    if rng.random() < 0.3:
        moe |= {"scoring_func": "sigmoid", "bias_update_rate": 0.01, "router_z_loss_coef": 1e-3}
    return moe


MODELS = [model for model in map(some_model, range(4000)) if model is not None]


def test_a_random_model() -> None:
    """Models that break no rule come back the same; many do."""
    kept = [
        unstretched(model, MEGATRON_MODEL_RULES)
        for model in MODELS
        if first_broken(MEGATRON_MODEL_RULES, model, TRAINING, NOTHING) is None
    ]
    assert len(kept) > 300
    for model in kept:
        assert meaning(through_megatron(model)) == meaning(model), model
    fields = {name for model in kept for name in model.model_fields_set}
    unsaid = {"layer_types", "moe", "mla", "rope_scaling", "no_rope_layer_interval", "mlp_layer_types", "swiglu_limit"}
    assert unsaid <= fields, "the models that are left have every field"
