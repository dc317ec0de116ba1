"""config.json of every architecture: the parameters and the defaults of transformers, or a clear no.

Every model file: named as its file, with its source, and trained as published.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tables import beside

from planner.errors import SpecError
from planner.physics.layers import model_totals
from planner.specs.architectures import from_config
from planner.specs.model import LayerKind, ModelSpec
from planner.specs.registry import load_model, model_names
from planner.trainers.load import load_runtime

CONFIGS = Path(__file__).parent / "configs"
TABLES = yaml.safe_load((Path(__file__).parent / "counts.yaml").read_text())
OF_FOLDER = beside(__file__)
REFUSED = yaml.safe_load((Path(__file__).parent / "refused_configs.yaml").read_text())
COUNTS: dict[str, int] = TABLES["configs"]
VARIED: dict[str, dict[str, Any]] = TABLES["varied"]
ALSO_SHIPPED = {
    "llama-3.1-8b", "mixtral-8x7b", "qwen3-8b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "gpt-neox-20b",
    "gpt-oss-20b", "gemma-3-27b",
}  # fmt: skip


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A published config.json, with keys changed, or left out where the change is `...`, in tables the text "..."."""
    data = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    return {key: value for key, value in data.items() if value not in (..., "...")}


def count(model: ModelSpec) -> int:
    """Parameters of the language model."""
    return model_totals(
        model.model_copy(update={"vision": None}), load_runtime("torch-eager"), seq_length=2048
    ).num_parameters


def biases(model: ModelSpec) -> tuple[bool, ...]:
    return model.qkv_bias, model.output_bias, model.has_mlp_bias, model.has_norm_bias


def failure(data: dict[str, Any]) -> SpecError:
    with pytest.raises(SpecError) as caught:
        from_config(data, "config.json")
    assert caught.value.message.startswith("config.json: ")
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("name", VARIED)
def test_every_switch_of_an_architecture_is_read(name: str) -> None:
    assert count(from_config(VARIED[name]["config"], "config.json")) == VARIED[name]["parameters"]


@pytest.mark.parametrize(("data", "message"), REFUSED["unsaid"])
def test_what_an_architecture_may_say_and_the_planner_may_not(data: dict[str, Any], message: str) -> None:
    assert failure(data).message.startswith(f"config.json: {message}")


def test_layers_of_a_switched_architecture() -> None:
    ernie = from_config({"model_type": "ernie4_5_moe", "moe_layer_start_index": 3, "moe_layer_end_index": 27}, "x")
    assert [kind.mlp for kind in ernie.layers] == ["dense"] * 3 + ["moe"] * 25
    layers = {"num_hidden_layers": 8, "no_rope_layers": [1, 0] * 4, "moe_layers": [3, 7], "num_local_experts": 128}
    llama4 = from_config({"model_type": "llama4", "text_config": {"model_type": "llama4_text", **layers}}, "x")
    assert [str(kind) for kind in llama4.layers[:4]] == ["dense-chunked", "dense", "dense-chunked", "moe"]
    assert llama4.attention_chunk_size == 8192
    exaone = from_config({"model_type": "exaone4", "num_hidden_layers": 8}, "x")
    assert [kind.attention for kind in exaone.layers] == ["sliding", "sliding", "sliding", "full"] * 2
    assert from_config({"model_type": "glm4"}, "x").partial_rotary_factor == 0.5
    assert from_config({"model_type": "gpt_neox", "rotary_pct": 1.0}, "x").partial_rotary_factor == 1.0
    stated = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75}}
    assert from_config({"model_type": "phi3", **stated}, "x").partial_rotary_factor == 0.75
    inner = {"model_type": "qwen3_vl_text", "num_hidden_layers": 3}
    assert from_config({"model_type": "qwen3_vl", "text_config": inner}, "x").qk_norm


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_equal_those_that_transformers_builds(name: str) -> None:
    assert count(load_model(CONFIGS / f"{name}.json")) == COUNTS[name]


@pytest.mark.parametrize("name", sorted(ALSO_SHIPPED))
def test_a_config_and_our_own_file_describe_the_same_model(name: str) -> None:
    own, theirs = load_model(name), from_config(config(name), "config.json")
    # what a file says of itself, the width of dense MLPs that no layer has, and biases, which have two spellings
    other = {"name", "aliases", "source", "training", "intermediate_size", "attention_bias", "mlp_bias", "norm_bias"}
    # what reports say and configs do not, and a score that follows from the router's bias
    other |= {"mtp_loss_scaling_factor", "vision"}
    unsaid = {"bias_update_rate", "router_aux_loss_coef", "seq_aux", "scoring_func"}
    exclude: Any = dict.fromkeys(other, True) | ({"moe": unsaid} if own.moe is not None else {})
    assert own.model_dump(exclude=exclude) == theirs.model_dump(exclude=exclude)
    assert biases(own) == biases(theirs)
    assert own.scoring_func == theirs.scoring_func


@pytest.mark.parametrize(("name", "base"), OF_FOLDER["the_base_of_the_rotary_frequencies_is_read_and_shipped"])
def test_the_base_of_the_rotary_frequencies_is_read_and_shipped(name: str, base: int) -> None:
    assert load_model(str(CONFIGS / f"{name}.json")).rope_theta == base == load_model(name).rope_theta


def test_the_base_is_also_read_where_transformers_5_writes_it() -> None:
    old = config("llama-3.1-8b")
    base = old.pop("rope_theta")
    new = old | {"rope_parameters": {"rope_type": "llama3", "rope_theta": base}}
    assert from_config(new, "config.json").rope_theta == base
    layered = old | {
        "rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    }
    assert from_config(layered, "config.json").rope_theta == 1e6


def test_the_one_size_without_a_default_must_be_given() -> None:
    assert "num_experts_per_tok: " in failure({"model_type": "deepseek_v2"}).message
    assert count(from_config({"model_type": "deepseek_v2", "num_experts_per_tok": 2}, "x")) == 38_612_307_968


def test_the_name_is_the_checkpoints_else_the_folders_else_the_files() -> None:
    data = config("llama-3.1-8b")
    assert from_config(data | {"_name_or_path": "meta-llama/Llama-3.1-8B"}, "x/config.json").name == "Llama-3.1-8B"
    assert from_config(data, "somewhere/llama/config.json").name == "llama"
    assert from_config(data, "somewhere/llama.json").name == "llama"
    assert from_config(data | {"_name_or_path": ""}, "config.json").name == "llama"


def test_a_model_under_its_own_name_is_read_as_the_architecture_it_is() -> None:
    assert from_config(config("deepseek-v3", model_type="kimi_k2"), "config.json").mla is not None


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_a_language_model_whose_config_is_all_at_the_top(model_type: str) -> None:
    text = config("qwen2.5-7b")
    flat = text | {"model_type": model_type, "vision_config": {"depth": 32, "hidden_size": 1280}}
    assert count(from_config(flat, "config.json")) == COUNTS["qwen2.5-7b"]
    nested = {"model_type": model_type, "text_config": text, "vision_config": {}}
    assert from_config(nested, "x.json") == from_config(text, "x.json").model_copy(update={"name": "x"})


def test_the_top_says_whether_a_language_model_within_is_tied() -> None:
    """The config of Qwen2.5-VL-3B as transformers 5.23 saves it, and the model that it builds of it."""
    sizes = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
             "num_key_value_heads": 2, "vocab_size": 151936}  # fmt: skip
    saved = {"model_type": "qwen2_5_vl", "tie_word_embeddings": True, "text_config": sizes}
    assert count(from_config(saved, "config.json")) == 3_085_938_688


@pytest.mark.parametrize(
    ("name", "changes", "window", "pattern"),
    [
        *OF_FOLDER["which_layers_slide"],
        ("mistral-7b", {"sliding_window": ...}, 4096, None),
        ("gpt-oss-20b", {"layer_types": ...}, 128, 2),
        ("gpt-oss-20b", {"layer_types": ["full_attention"] * 24}, None, None),
        ("gpt-oss-20b", {"layer_types": ["sliding_attention"] * 24}, 128, None),
        ("gpt-oss-20b", {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 6}, 128, 4),
        ("gemma-3-1b", {"sliding_window_pattern": ..., "_sliding_window_pattern": 3}, 512, 3),
    ],
)
def test_which_layers_slide(name: str, changes: dict[str, Any], window: int | None, pattern: int | None) -> None:
    model = from_config(config(name, **changes), "config.json")
    assert (model.sliding_window, model.sliding_window_pattern) == (window, pattern)


@pytest.mark.parametrize(
    ("name", "changes", "dense_layers"),
    [
        *OF_FOLDER["which_layers_are_moe"],
        ("deepseek-v3", {"first_k_dense_replace": 1, "moe_layer_freq": 2}, [0, *range(1, 61, 2)]),
    ],
)
def test_which_layers_are_moe(name: str, changes: dict[str, Any], dense_layers: list[int]) -> None:
    model = from_config(config(name, **changes), "config.json")
    assert [layer for layer, kind in enumerate(model.layers) if kind.mlp == "dense"] == dense_layers


@pytest.mark.parametrize(("name", "changes", "field", "value"), OF_FOLDER["a_key_reaches_its_field"])
def test_a_key_reaches_its_field(name: str, changes: dict[str, Any], field: str, value: object) -> None:
    found: Any = from_config(config(name, **changes), "config.json")
    for part in field.split("."):
        found = getattr(found, part)
    assert found == value


def test_an_unknown_architecture_is_traced() -> None:
    error = failure({"model_type": "hyena"})
    assert "unknown architecture 'hyena'" in error.message
    assert "plan models trace hf-code:" in error.hint
    assert "did you mean llama" in failure({"model_type": "lama"}).hint


def test_latent_attention_may_be_switched_off() -> None:
    sizes = {"use_mla": False, "n_routed_experts": 64, "num_experts_per_tok": 6, "v_head_dim": 0, "kv_lora_rank": None}
    model = from_config({"model_type": "deepseek_v2", **sizes}, "config.json")
    assert (model.mla, model.head_dim) == (None, 128)


@pytest.mark.parametrize("kind", [None, 3, [], {"a": 1}, "x" * 10_000])
def test_a_nonsense_architecture_is_no_crash(kind: object) -> None:
    failure({"model_type": kind} if kind is not None else {"architectures": ["HyenaForCausalLM"]})


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED["wrong_keys"])
def test_a_wrong_key_is_named_as_the_file_spells_it(name: str, changes: dict[str, Any], message: str) -> None:
    assert failure(config(name, **changes)).message.startswith(f"config.json: {message}")


@pytest.mark.parametrize("value", [None, True, -1, 0, 2.5, "text", [], {}, float("nan"), 10**30])
@pytest.mark.parametrize("name", ["deepseek-v3", "qwen1.5-moe-a2.7b", "gpt-oss-20b", "gpt2", "gemma-3-1b"])
def test_any_value_under_any_key_is_read_or_refused(name: str, value: object) -> None:
    for key in config(name):
        with suppress(SpecError):
            assert from_config(config(name, **{key: value}), "config.json").num_hidden_layers > 0


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "gemma-3-1b", "gpt-oss-20b"])
def test_a_size_under_another_name_is_named_or_refused(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each size of a config doubled and renamed, and sizes and switches that no architecture has."""
    whole = config(name)
    sizes = {key for key, value in whole.items() if type(value) is int and value > 1 and not _OF_NO_LAYER.search(key)}
    renamed = [whole | {key: ..., f"new_{key}": 2 * whole[key]} for key in sizes]
    others = {"side_intermediate_size": 64, "loop_layers": 2, "num_loops": 4, "lm_head_bias": True, "post_norm": True}
    for changed in (*renamed, *(whole | {key: value} for key, value in others.items())):
        caplog.clear()
        key = [*changed][-1]
        refused = True
        with suppress(SpecError):
            from_config({name: value for name, value in changed.items() if value is not ...}, "config.json")
            refused = False
        assert refused or key in caplog.text, key


_OF_NO_LAYER = re.compile("token_id|version|position|pretraining|query_pre|group$|rope_|context")

ASKED_FOR = {
    "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "llama-2-7b", "llama-2-13b", "llama-2-70b",
    "gpt3-175b", "megatron-22b", "megatron-530b", "megatron-1t", "bloom-176b", "opt-175b", "gpt-neox-20b",
    "qwen2.5-32b", "qwen2.5-72b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b", "mixtral-8x7b",
    "mixtral-8x22b", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2", "moonlight-16b", "gpt-oss-20b",
    "gpt-oss-120b", "gemma-3-27b", "nemotron-4-340b",
}  # fmt: skip
FULL_DENSE, FULL_MOE = LayerKind("full", "dense"), LayerKind("full", "moe")
SLIDING_DENSE, SLIDING_MOE = LayerKind("sliding", "dense"), LayerKind("sliding", "moe")


@pytest.mark.parametrize("name", model_names())
def test_a_model_file_is_named_sourced_and_trained(name: str) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.source
    assert model.training is not None
    assert model.training.source
    assert model.training.tokens_per_step % model.training.seq_length == 0
    if model.position_embedding == "learned":
        assert model.training.seq_length <= (model.max_position_embeddings or 0)


def test_the_models_people_ask_for_are_there() -> None:
    assert set(model_names()) >= ASKED_FOR


@pytest.mark.parametrize(("name", "seq_length", "sequences"), OF_FOLDER["the_published_batch"])
def test_the_published_batch(name: str, seq_length: int, sequences: int) -> None:
    training = load_model(name).training
    assert training is not None
    assert (training.seq_length, training.tokens_per_step) == (seq_length, sequences * seq_length)


@pytest.mark.parametrize(
    ("name", "runs"),
    [
        ("llama-3.1-405b", ((FULL_DENSE, 126),)),
        ("deepseek-v3", ((FULL_DENSE, 3), (FULL_MOE, 58))),
        ("kimi-k2", ((FULL_DENSE, 1), (FULL_MOE, 60))),
        ("mixtral-8x7b", ((FULL_MOE, 32),)),
        ("gpt-oss-20b", ((SLIDING_MOE, 1), (FULL_MOE, 1)) * 12),
        ("gemma-3-27b", ((SLIDING_DENSE, 5), (FULL_DENSE, 1)) * 10 + ((SLIDING_DENSE, 2),)),
    ],
)
def test_the_sequence_of_layer_kinds(name: str, runs: tuple[tuple[LayerKind, int], ...]) -> None:
    assert load_model(name).runs == runs


@pytest.mark.parametrize("name", ["deepseek-v3", "gemma-3-27b", "gpt-oss-20b", "qwen1.5-moe-a2.7b"])
def test_a_key_by_another_name_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever its value: false is not off where nobody reads it."""
    told, data = 0, config(name)
    plain = from_config(data, "x")
    for key in data.keys() - {"model_type", "_name_or_path"}:
        for other in (f"new_{key}", f"{key}_v2"):
            caplog.clear()
            with suppress(SpecError):
                if from_config({other if one == key else one: value for one, value in data.items()}, "x") != plain:
                    assert other.removesuffix("_config") in caplog.text
                    told += 1
    assert told > 1


def test_layers_that_run_again_have_no_weights_of_their_own() -> None:
    once, four = (from_config({"model_type": "ouro", "total_ut_steps": times}, "x") for times in (1, 4))
    runtime = load_runtime("hf")
    totals = [model_totals(model, runtime, 4096) for model in (once, four)]
    assert totals[0].num_parameters == totals[1].num_parameters
    head = 6 * once.vocab_size * once.hidden_size
    flops = [each.model_flops_per_token - head for each in totals]
    assert flops[1] == pytest.approx(4 * flops[0])
    assert len(four.layers) == 96
