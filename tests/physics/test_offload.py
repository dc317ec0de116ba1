"""What waits in host memory: which tensors, how long the link takes, and what it leaves on the GPU."""

from __future__ import annotations

import pytest

from planner.physics.layers import decoder_layer, embedding
from planner.physics.memory import OFFLOADED, is_decoder_layer, offloaded_bytes, shown_s
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import TrainingSpec
from planner.trainers.load import load_runtime

MODEL, MEGATRON = load_model("qwen3-30b-a3b"), load_runtime("megatron")
SHAPE = Shape(dp=8, ep=8, shard_size=8, seq_length=4096)
(KIND,) = MODEL.kinds
ITEMS = decoder_layer(MODEL, KIND, SHAPE, MEGATRON)


def pricing(hardware: str = "gb200", **fields: object) -> Pricing:
    return Pricing(
        model=MODEL,
        training=TrainingSpec(seq_length=4096, global_batch_size=64),
        cluster=ClusterSpec(hardware=load_hardware(hardware), num_gpus=8),
        runtime=MEGATRON.model_copy(update=fields),
    )


def test_inputs_of_modules_by_hand() -> None:
    rows = 4096 * 8
    assert offloaded_bytes(ITEMS, ["moe_act"]) == 2 * rows * 2 * 768
    assert offloaded_bytes(ITEMS, ["expert_fc1"]) == 2 * rows * 2048
    assert offloaded_bytes(ITEMS, ["attn_proj"]) == 2 * 4096 * 32 * 128
    assert offloaded_bytes(ITEMS, ["core_attn"]) == 2 * 4096 * (32 + 2 * 4) * 128
    assert offloaded_bytes(ITEMS, ["moe_act", "attn_proj"]) == 2 * rows * 2 * 768 + 2 * 4096 * 32 * 128


def test_what_is_recomputed_does_not_travel() -> None:
    assert offloaded_bytes(ITEMS, ["expert_fc1"], recomputed=frozenset({"moe"})) == 0.0
    assert offloaded_bytes(ITEMS, []) == 0.0


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "deepseek-v3"])
def test_every_module_has_an_input_in_some_layer(name: str) -> None:
    model = load_model(name)
    layers = [decoder_layer(model, kind, SHAPE, MEGATRON) for kind in model.kinds]
    for module in OFFLOADED:
        assert any(offloaded_bytes(items, [module]) > 0 for items in layers), module


def test_a_pass_hides_the_copy_as_long_as_it_takes_itself() -> None:
    h100 = load_hardware("h100")
    second = h100.host.bytes_per_s
    assert shown_s(second, h100, 2.0) == 0.0
    assert shown_s(second, h100, 0.25) == pytest.approx(0.75)


def test_the_host_memory_limits_a_link_that_is_faster() -> None:
    gb200 = load_hardware("gb200").host
    assert gb200.bytes_per_s == gb200.memory_bytes_per_s < gb200.link_gb_per_s * 1e9


def test_bytes_leave_the_gpu_and_come_back_for_the_backward() -> None:
    moved = offloaded_bytes(ITEMS, ["moe_act"])
    plain, away = (
        pricing(**fields).table(SHAPE).layers[KIND, "none"] for fields in ({}, {"offload_modules": ("moe_act",)})
    )
    assert plain.live_bytes - away.live_bytes == pytest.approx(moved)
    assert away.transient_bytes - plain.transient_bytes == pytest.approx(moved)
    assert away.total_s == plain.total_s  # NVLink-C2C


def test_pcie_shows_what_a_layer_does_not_hide() -> None:
    every = {"offload_modules": ("moe_act", "expert_fc1", "core_attn", "attn_proj"), "host_factor": 0.0}
    plain, away = (
        pricing("h100", **fields).table(SHAPE).layers[KIND, "none"] for fields in ({"host_factor": 0.0}, every)
    )
    moved_s = offloaded_bytes(ITEMS, every["offload_modules"]) / load_hardware("h100").host.bytes_per_s  # type: ignore[arg-type]
    assert away.forward_total_s == pytest.approx(max(moved_s, float(plain.forward_total_s)))
    assert moved_s > plain.forward_total_s


def test_layers_kept_on_the_host_take_their_share_of_all_layers_along() -> None:
    plain, half, whole = (
        pricing(offloaded_layers=count).table(SHAPE).layers[KIND, "none"].live_bytes for count in (0, 24, 48)
    )
    assert half == pytest.approx(plain / 2)
    assert whole == pytest.approx(0.0)
    assert is_decoder_layer(ITEMS)
    assert not is_decoder_layer(embedding(MODEL, SHAPE, MEGATRON))


def test_recomputed_layers_keep_their_input_wherever_others_are() -> None:
    tables = [pricing(offload_modules=modules).table(SHAPE) for modules in ((), ("moe_act",))]
    full = [table.layers[KIND, "full"].live_bytes for table in tables]
    assert full[0] == full[1] == 2 * 4096 * 2048


def test_moments_leave_the_gpu_and_the_host_updates_them_more_slowly() -> None:
    plain, half, whole = (
        pricing("h100", optimizer_offload_fraction=share).table(SHAPE).layers[KIND, "none"] for share in (0.0, 0.5, 1.0)
    )
    assert half.optimizer_bytes == pytest.approx(plain.optimizer_bytes / 2)
    assert whole.optimizer_bytes == 0, "masters leave with the moments"
    assert whole.optimizer_s - half.optimizer_s == pytest.approx(half.optimizer_s - plain.optimizer_s)
    assert whole.optimizer_s > 20 * plain.optimizer_s


def test_a_graph_of_the_whole_step_has_a_pool_of_its_own() -> None:
    eager, replayed = (pricing(cuda_graphs=on).table(SHAPE).layers[KIND, "none"].live_bytes for on in (False, True))
    assert 1.1 < replayed / eager < 1.5
