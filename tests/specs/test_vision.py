"""Vision towers: parameters to the digit, FLOPs, what a frozen and a trained one keep, images that the options give."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from tables import beside

from planner.cli.inputs import read_job
from planner.cli.options import JobOptions
from planner.errors import SpecError
from planner.physics.layers import decoder_layer, model_totals, vision_tower
from planner.physics.operators import num_parameters, operators_of, saved_bytes
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.architectures import from_config
from planner.specs.architectures.sections import vision_of
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec, VisionSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import TrainingSpec
from planner.trainers.load import load_runtime

TABLES = beside(__file__)

RUNTIME = load_runtime("torch-eager")
QWEN = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "fullatt_block_indexes": [7, 15, 23, 31]}
SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
          "num_attention_heads": 16, "patch_size": 14}  # fmt: skip
CLIP = {"model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "patch_size": 14, "image_size": 336}  # fmt: skip
INTERN = {"hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 45, "num_attention_heads": 25,
          "qk_normalization": True, "norm_type": "rms_norm", "image_size": 448}  # fmt: skip


def model_with(kind: str, vision: dict[str, Any], text_hidden: int, **changes: Any) -> ModelSpec:
    found = vision_of({"model_type": kind, "vision_config": vision}, text_hidden)
    assert found is not None
    return load_model("llama-3.2-1b").model_copy(update={"vision": VisionSpec(**found | changes)})


def size(kind: str, vision: dict[str, Any], text_hidden: int) -> int:
    return model_totals(model_with(kind, vision, text_hidden), RUNTIME, 4096).num_vision_parameters


@pytest.mark.parametrize(("kind", "vision", "hidden", "language", "total"), TABLES["parameters_to_the_digit"])
def test_parameters_to_the_digit(kind: str, vision: dict[str, Any], hidden: int, language: str, total: int) -> None:
    beside = model_totals(load_model(language), RUNTIME, 4096).num_parameters if language else 0
    assert beside + size(kind, vision, hidden) == total


@pytest.mark.parametrize(
    ("kind", "vision", "products", "attended"),
    [
        # products as torch counts them in transformers' forward of 64 × 64 patches; 4·width a pair of patches on top
        ("qwen2_5_vl", {"fullatt_block_indexes": [3]}, 36_637_245_440, 3 * 64 * 4096 + 4096**2),
        ("qwen3_vl", {"deepstack_visual_indexes": [1], "patch_size": 16}, 36_238_786_560, 4 * 4096**2),
        ("gemma3", {"image_size": 896, "model_type": "siglip_vision_model"}, 25_742_540_800, 4 * 4096**2),
    ],
)
def test_flops_of_an_image(kind: str, vision: dict[str, Any], products: int, attended: int) -> None:
    sizes = {"hidden_size": 320, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
             "patch_size": 14, "out_hidden_size": 256}  # fmt: skip
    model = model_with(kind, sizes | vision, 256)
    tower = model.vision
    assert tower is not None
    tower = tower.model_copy(update={"image_tokens": 4096 // tower.patches_per_token})
    model = model.model_copy(update={"vision": tower})
    flops = sum(float(op.forward_flops) for op in vision_tower(model, Shape(seq_length=4096), RUNTIME))
    assert flops == products + 4 * 320 * attended


def test_a_frozen_tower_runs_forward_alone_and_a_trained_one_keeps_what_its_layers_do() -> None:
    sizes = {"out_hidden_size": 2048, "num_position_embeddings": 2304}
    frozen, trained = (model_with("qwen3_vl", sizes, 2048, is_trained=on) for on in (False, True))
    shape = Shape.of(seq_length=4096, tp=2, cp=2, micro_batch_size=2)
    seen, learned = (vision_tower(model, shape, RUNTIME) for model in (frozen, trained))
    assert saved_bytes(seen) == num_parameters(seen, trained=True) == sum(op.backward_flops for op in seen) == 0
    patches = 2 * 4096
    assert saved_bytes(learned) > 27 * patches * 2 * (6 * 1152 + 2 * 4304)
    assert num_parameters(learned, trained=True) == num_parameters(seen) == num_parameters(learned)
    flops = [model_totals(model, RUNTIME, 4096).model_flops_per_token for model in (frozen, trained)]
    text = model_totals(frozen.model_copy(update={"vision": None}), RUNTIME, 4096)
    assert flops[1] - text.model_flops_per_token == pytest.approx(3 * (flops[0] - text.model_flops_per_token))
    assert model_totals(frozen, RUNTIME, 4096).num_trained_parameters == text.num_parameters

    def cost(model: ModelSpec) -> Any:
        cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
        training = TrainingSpec(seq_length=4096, global_batch_size=8)
        return Pricing(model=model, training=training, cluster=cluster, runtime=RUNTIME).table(shape).embedding

    parts = [cost(model) for model in (frozen.model_copy(update={"vision": None}), frozen, trained)]
    # weights of 16 bits or in fp32, no gradients, no states; the backward of the text's lookup as before
    assert parts[1].optimizer_bytes == parts[0].optimizer_bytes
    assert parts[1].backward_total_s == pytest.approx(parts[0].backward_total_s, rel=1e-3)
    assert parts[1].live_bytes == parts[0].live_bytes
    assert parts[2].backward_total_s > 1.5 * parts[2].forward_total_s
    assert parts[2].optimizer_bytes > parts[0].optimizer_bytes


def test_a_tower_is_read_beside_the_language_model(caplog: pytest.LogCaptureFixture) -> None:
    text = {"model_type": "qwen3_omni_moe_text", "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2,
            "hidden_size": 256, "num_attention_heads": 4, "vocab_size": 1000}  # fmt: skip
    thinker = {"model_type": "qwen3_omni_moe_thinker", "text_config": text, "audio_config": {"d_model": 8},
               "vision_config": {"out_hidden_size": 256, "model_type": "qwen3_omni_moe_vision_encoder"}}  # fmt: skip
    model = from_config({"model_type": "qwen3_omni_moe", "thinker_config": thinker}, "config.json")
    assert model.vision is not None
    assert len(model.vision.projector) == 2 * 4
    assert "audio left out" in caplog.text
    assert "vision" not in caplog.text
    odd = {"model_type": "qwen2", "vision_config": {"model_type": "nobody_knows", "hidden_size": 8}}
    assert from_config(odd, "config.json").vision is None
    assert "config.json: vision left out" in caplog.text


@pytest.mark.parametrize("key", ["patch_size", "depth", "num_heads"])
@pytest.mark.parametrize("value", ["16", 0, -1, 1.5, [], {}, 2**70])
def test_a_size_that_is_none_is_named(key: str, value: Any) -> None:
    given = {
        "model_type": "qwen3_vl", "text_config": {"model_type": "qwen3"}, "vision_config": {key: value, "depth": 2},
    }  # fmt: skip
    given["vision_config"][key] = value
    with pytest.raises(SpecError, match=key):
        from_config(given, "config.json")


@pytest.fixture
def seeing(tmp_path: Any) -> str:
    config = '{"model_type": "qwen2_5_vl", "hidden_size": 4096, "vision_config": {"hidden_size": 1280}}'
    (tmp_path / "config.json").write_text(config)
    return str(tmp_path)


@pytest.mark.parametrize(("images", "lora", "expected"), TABLES["images_of_a_sequence"])
def test_images_of_a_sequence(seeing: str, images: str | None, lora: bool, expected: Any) -> None:
    asked = JobOptions(model=seeing, gpus=8, seq_length=2048, global_batch_size=8, images=images, lora=lora)
    if isinstance(expected, str):
        with pytest.raises(SpecError, match=expected):
            read_job(asked)
        return
    vision = read_job(asked).model.vision
    found = vision and [vision.images_per_sequence, vision.image_tokens, vision.is_trained]
    assert found == expected


def test_a_model_of_text_takes_no_images() -> None:
    with pytest.raises(SpecError, match="qwen3-8b has no vision tower"):
        read_job(JobOptions(model="qwen3-8b", gpus=8, images="1"))


def test_layers_that_attend_to_images_alone() -> None:
    """Llama 3.2 Vision: FLOPs of torch on the meta device but for the causal half; without images they are left out."""
    config = {"num_hidden_layers": 5, "cross_attention_layers": [3], "model_type": "mllama_text_model"}
    tower = {"model_type": "mllama_vision_model"}
    model = from_config({"model_type": "mllama", "text_config": config, "vision_config": tower}, "x")
    shape = Shape(seq_length=512)
    layers = [decoder_layer(model, kind, shape, RUNTIME) for kind in model.layers]
    flops = sum(float(op.forward_flops) for op in operators_of(chain.from_iterable(layers)))
    assert flops == 1_228_461_309_952 - 4 * 2 * 512**2 * 4096
    assert model.vision is not None
    assert (model.vision.image_tokens, model.vision.in_sequence) == (4 * 1025, False)
    blind = decoder_layer(model.model_copy(update={"vision": None}), model.layers[3], shape, RUNTIME)
    assert num_parameters(blind) == num_parameters(layers[3]) == 218_112_258
    assert not any(op.forward_flops for op in operators_of(blind))


@pytest.mark.parametrize(("name", "tokens", "tiles"), TABLES["a_tower_sees_each_tile_by_itself"])
def test_a_tower_sees_each_tile_by_itself(name: str, tokens: int, tiles: int) -> None:
    """Tiles of an image of 896 × 896, as transformers' processors cut it."""
    model = load_model(name)
    assert model.vision is not None
    assert model.vision.image_tokens == tokens
    one = model.vision.model_copy(update={"image_tokens": tokens // tiles})
    flops = [
        sum(float(op.forward_flops) for op in vision_tower(each, Shape(seq_length=4096), RUNTIME))
        for each in (model, model.model_copy(update={"vision": one}))
    ]
    assert flops[0] == pytest.approx(tiles * flops[1])


def test_experts_for_images_have_the_rows_of_images() -> None:
    """ERNIE-4.5-VL-28B-A3B: 0.5 of a sequence meets experts a third as wide."""
    model = load_model("ernie-4.5-vl-28b-a3b")
    assert model.vision is not None
    moe, text = model.moe, model.model_copy(update={"vision": None})
    assert moe is not None
    sizes = [model_totals(each, RUNTIME, 2048) for each in (model, text)]
    assert sizes[0].num_parameters - sizes[1].num_parameters == 774_658_560
    assert sizes[1].num_active_parameters == 3_356_575_616
    shape, kind = Shape(seq_length=2048), model.layers[-1]
    flops = [sum(float(op.forward_flops) for op in operators_of(decoder_layer(each, kind, shape, RUNTIME)))
             for each in (model, text)]  # fmt: skip
    widths = moe.moe_intermediate_size - moe.image_expert_intermediate_size
    assert flops[1] - flops[0] == 2048 * 0.5 * 6 * 3 * 2 * model.hidden_size * widths
