"""A model in a trainer's words reads back as the model: all that ship, and random ones with every field.

Nothing that decides is dropped silently: the law over every importer, by samples of what people give it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import expressible
from pydantic import ValidationError

from planner.answer import Plan
from planner.errors import SpecError
from planner.export.import_run import read_configuration
from planner.export.imported_run import ImportedRun
from planner.export.megatron.bridge_files import export_bridge
from planner.export.megatron.model_options import model_arguments, read_model
from planner.export.megatron.option_rows import options_of
from planner.export.run_settings import stated
from planner.export.trainer_files import argv
from planner.specs.architectures import ARCHITECTURES, from_config
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model
from planner.specs.training import TrainingSpec
from planner.trainers.load import load_runtime
from planner.trainers.rules.facts import is_hybrid, rotary_method
from planner.trainers.rules.rule_rows import Rule, first_broken, rules_of

Planned = Callable[..., Plan]

SEQ_LENGTH = 2048
TRAINING = TrainingSpec(seq_length=SEQ_LENGTH, global_batch_size=1)
NOTHING: Any = None
LATENT = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
YARN = {"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

OLDER_RULES = rules_of("export megatron", runtime=load_runtime("megatron@0.18"))
MEGATRON_MODEL_RULES, BRIDGE_MODEL_RULES = rules_of("export megatron"), rules_of("export bridge")


def meaning(model: ModelSpec) -> dict[str, Any]:
    """All that a model computes and learns, however its spec says it, on short sequences."""
    said = stated(model)
    # how transformers computes norms and routers is no trainer's
    of_transformers = {"norm_in_fp32", "rotary_in_fp32", "packed_projections", "residual_dropout"}
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
        others = ("first_k_dense_replace", "moe_layer_freq", "router_in_fp32", "row_weights_in_fp32")
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
    is_newer = model.attention_sinks or is_hybrid(model)
    assert first_broken(OLDER_RULES, model, TRAINING, NOTHING) is None or is_newer
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
        "norm_eps": lambda: rng.choice([1e-6, 3.7e-6, 1e-5]), "norm": lambda: rng.choice(["rmsnorm", "layernorm"]),
        "norm_bias": lambda: True, "bias": lambda: True, "attention_bias": lambda: "qkv",
        "zero_centered_norm": lambda: True, "qk_norm": lambda: True, "gated_mlp": lambda: False,
        "activation": lambda: rng.choice(["gelu", "gelu_tanh", "relu2", "quick_gelu"]), "swiglu_limit": lambda: 7.0,
        "glu_linear_offset": lambda: 1.0, "attention_sinks": lambda: True, "attn_output_gate": lambda: True,
        "rope_theta": lambda: rng.choice([5e5, 1e7]), "partial_rotary_factor": lambda: 0.25,
        "rope_scaling": lambda: rng.choice(SCALINGS), "no_rope_layer_interval": lambda: rng.choice([2, 4]),
        "sliding_window": lambda: 64, "sliding_window_pattern": lambda: rng.choice([2, 3]),
        "layer_types": lambda: tuple(rng.choice(["full", "sliding"]) for _ in range(layers)),
        "moe": lambda: some_moe(rng),
        "mlp_layer_types": lambda: tuple(rng.choice(["dense", "moe"]) for _ in range(layers)),
        "mla": lambda: {
            "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        },
        "num_nextn_predict_layers": lambda: 1, "mtp_loss_scaling_factor": lambda: 0.3,
    }  # fmt: skip
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


class Sample(NamedTuple):
    """A configuration, and how its keys are found in it."""

    source: str
    text: str
    key: str
    """A regular expression whose first group is a key."""


SAMPLES = {
    name: Sample(**row)
    for name, row in yaml.safe_load(Path(__file__).with_name("law_samples.yaml").read_text()).items()
}
_HARMLESS = {
    "nproc", "nnodes", "template", "max-position-embeddings", "recompute-method", "recompute_method",
    "target_modules", "stage",
}  # fmt: skip
"""Keys without which nothing is another price, or the model or the number of GPUs is asked for."""


_USERS = {"model": "8b", "num_gpus": 64, "seq_length": 2048, "global_batch_size": 256}
"""What users add where a configuration leaves it to them."""


def keys_of(sample: Sample) -> list[tuple[int, int]]:
    """The places of a sample's keys."""
    found = list(re.finditer(sample.key, sample.text))
    return [next(match.span(group + 1) for group in range(match.re.groups) if match[group + 1]) for match in found]


def read(text: str) -> ImportedRun | SpecError:
    """The run of a text with what users add, or why there is none."""
    try:
        imported = read_configuration(text)
        given: dict[str, Any] = {name: value for name, value in _USERS.items() if imported.run.get(name) is None}
        imported.complete(hardware="h100", **given)
    except SpecError as error:
        return error
    return imported


def says(found: ImportedRun | SpecError, key: str) -> bool:
    """The key is named, as unknown or in an error."""
    if isinstance(found, SpecError):
        return True
    told = [*found.unknown, *found.ignored, *found.unknown.values(), *found.notes]
    return any(key.replace("-", "_") in text.replace("-", "_") for text in told)


def is_asked_for(found: ImportedRun | SpecError, whole: ImportedRun | SpecError) -> bool:
    """What a user adds is missing in a changed text, and was there before."""
    assert isinstance(found, ImportedRun)
    assert isinstance(whole, ImportedRun)
    return any(found.run.get(name) is None is not whole.run.get(name) for name in _USERS)


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_samples_are_read_whole(sample: Sample) -> None:
    imported = read(sample.text)
    assert isinstance(imported, ImportedRun)
    assert imported.source == sample.source
    assert not imported.unknown
    assert not imported.refused


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_a_renamed_key_is_named(sample: Sample, data: st.DataObject) -> None:
    start, end = data.draw(st.sampled_from(keys_of(sample)))
    key = sample.text[start:end]
    suffix = data.draw(st.sampled_from(["x", "_new", "2"]))
    found = read(sample.text[:end] + suffix + sample.text[end:])
    last = re.split(r"[.]", key)[-1] + suffix
    assert says(found, last) or key in _HARMLESS or is_asked_for(found, read(sample.text)), key


def without(text: str, start: int, end: int) -> str:
    """A text without a key and its value: its line, or its words on a command line."""
    if "\n" in text:
        return text[: text.rindex("\n", 0, start) + 1] + text[text.index("\n", end) + 1 :]
    begin = text.rindex(" ", 0, start)
    behind = re.search(r" (?=--|\+?\w+[\w.]*=)|$", text[end:])
    assert behind is not None
    return text[:begin] + text[end + behind.start() :]


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_a_key_left_out_is_assumed_or_asked_for(sample: Sample) -> None:
    whole = read(sample.text)
    assert isinstance(whole, ImportedRun)
    silent = []
    for start, end in keys_of(sample):
        found = read(
            without(
                "\n" * ("\n" in sample.text) + sample.text, start + ("\n" in sample.text), end + ("\n" in sample.text)
            )
        )
        if isinstance(found, SpecError) or found.run == whole.run or found.refused:
            continue
        if is_asked_for(found, whole):
            continue
        last = re.split(r"[.]", sample.text[start:end])[-1].replace("-", "_")
        named = " ".join([*found.assumed, *found.unknown, *found.notes]).replace("-", "_")
        if last not in named and found.run["model"] is not None:
            silent.append(last)
    assert not set(silent) - _HARMLESS
