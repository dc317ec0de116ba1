"""Seconds of expert exchanges: what hides behind another micro-batch, and what that costs the products beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.physics.cost import PartCost
from planner.physics.pricing import Pricing
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import TrainingSpec
from planner.trainers.load import load_runtime

OVERLAPPED = {"ep_overlap_fraction": 0.9, "ep_overlap_network_fraction": 0.8}
QUIET: dict[str, Any] = {"moe_kernels": 0.0, "expert_kernels": 0.0, "host_factor": 0.0}
"""A host that is never late."""


def pricing(hardware: str = "h100", model: str = "deepseek-v3", **fields: Any) -> Pricing:
    return Pricing(
        model=load_model(model),
        training=TrainingSpec(seq_length=4096, global_batch_size=1024),
        cluster=ClusterSpec(hardware=load_hardware(hardware), num_gpus=1024),
        runtime=load_runtime("megatron").model_copy(update=fields),
    )


def shape_of(ep: int, **sizes: Any) -> Shape:
    return Shape(**{"dp": ep, "ep": ep, "shard_size": ep, "seq_length": 4096, "num_microbatches": 64} | sizes)


def mixture(ep: int, mode: str = "none", hardware: str = "h100", **fields: Any) -> PartCost:
    """A layer with experts."""
    layers = pricing(hardware, **QUIET | fields).table(shape_of(ep)).layers
    return next(part for (kind, found), part in layers.items() if kind.mlp == "moe" and found == mode)


def exchanged_s(part: PartCost) -> float:
    return float(part.ep_forward_s + part.ep_backward_s)


@pytest.mark.parametrize("ep", [8, 64])
def test_the_shares_that_hide_are_those_of_the_tiers(ep: int) -> None:
    """Eight GPUs share NVLink; of 64, most of what is exchanged crosses the network."""
    still = {"deepep_sms": 0, "delays_weight_gradients": True}
    alone, inner, outer = (
        exchanged_s(mixture(ep, **still, ep_overlap_fraction=near, ep_overlap_network_fraction=far))
        for near, far in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5))
    )
    hidden_inner, hidden_outer = alone - inner, alone - outer
    if ep == 8:
        assert hidden_inner == pytest.approx(alone / 2)
        assert hidden_outer == 0.0
    else:
        assert hidden_inner + hidden_outer == pytest.approx(alone / 2)
        assert hidden_outer > 3 * hidden_inner > 0


def test_kernels_that_send_take_multiprocessors_from_the_products_beside_them() -> None:
    h100 = load_hardware("h100")
    none, all_of_them = (exchanged_s(mixture(8, **OVERLAPPED, deepep_sms=sms)) for sms in (0, 20))
    hidden_s = exchanged_s(mixture(8)) - none
    assert all_of_them - none == pytest.approx(20 / h100.num_sms * hidden_s)
    # NCCL's all-to-all has no such kernels
    plain = {"dispatcher": "alltoall", "sends_tokens_once": False}
    few, many = (exchanged_s(mixture(8, **OVERLAPPED, **plain, deepep_sms=sms)) for sms in (0, 20))
    assert few == many


@pytest.mark.parametrize(
    ("dispatcher", "once", "hardware", "runs"),
    [
        ("", True, "h100", "deepep"), ("", True, "gb200", "hybridep"), ("", False, "gb200", "alltoall"),
        ("hybridep", True, "h100", "hybridep"), ("alltoall", False, "gb200", "alltoall"),
    ],
)  # fmt: skip
def test_links_choose_the_dispatcher_that_no_recipe_names(
    dispatcher: str, once: bool, hardware: str, runs: str
) -> None:
    runtime = load_runtime("megatron").model_copy(update={"dispatcher": dispatcher, "sends_tokens_once": once})
    assert runtime.dispatcher_on(load_hardware(hardware)) == runs


def test_replayed_exchanges_show() -> None:
    """Nothing runs beside the forward that a recomputed layer repeats."""
    plain, full = (mixture(64, mode, **OVERLAPPED) for mode in ("none", "full"))
    alone = mixture(64)
    assert full.ep_backward_s - plain.ep_backward_s == pytest.approx(alone.ep_forward_s)
    assert plain.ep_forward_s < 0.5 * alone.ep_forward_s


def test_both_passes_together_hide_what_one_alone_would_not() -> None:
    """Forwards run beside backwards, which take twice as long."""
    slow = {"ep_row_bytes": 1.2e5, "deepep_sms": 0, "delays_weight_gradients": True}
    alone = mixture(8, **slow)
    forward_s, passes_s = alone.forward_s, alone.forward_s + alone.input_grad_s + alone.weight_grad_s
    assert forward_s < alone.ep_forward_s
    assert exchanged_s(alone) < passes_s
    assert exchanged_s(mixture(8, **slow, ep_overlap_fraction=1.0)) == pytest.approx(0.0, abs=1e-12)


def test_weight_gradients_that_do_not_wait_hide_no_late_exchange() -> None:
    slow = {**OVERLAPPED, "ep_row_bytes": 4.5e5}
    waiting, early = (exchanged_s(mixture(8, **slow, delays_weight_gradients=delays)) for delays in (True, False))
    assert waiting <= early


def test_the_first_and_the_last_micro_batches_have_nothing_beside_them() -> None:
    overlapped, alone = pricing(**OVERLAPPED), pricing()
    for pp in (1, 4):
        shape = shape_of(64, pp=pp)
        (hidden_s,) = {float(overlapped.tail_s(shape) - alone.tail_s(shape))}
        assert hidden_s == pytest.approx(float(overlapped.unpaired_s(shape)))
    one, four = (float(overlapped.unpaired_s(shape_of(64, pp=pp))) for pp in (1, 4))
    # a rank has a quarter of the layers, and four micro-batches of each
    assert four == pytest.approx(one) and one > 0  # noqa: PT018
    few = float(overlapped.unpaired_s(shape_of(64, pp=4, num_microbatches=2)))
    assert few == pytest.approx(one / 2)
    assert float(alone.unpaired_s(shape_of(64))) == 0.0
    assert float(pricing(model="llama-3.1-8b", **OVERLAPPED).unpaired_s(Shape(dp=8, seq_length=4096))) == 0.0


def test_unpaired_seconds_of_arrays_are_those_of_each_shape() -> None:
    overlapped = pricing(**OVERLAPPED)
    ranks = np.array([8, 64])
    both = Shape(dp=ranks, ep=ranks, shard_size=ranks, pp=np.array([1, 4]), seq_length=4096, num_microbatches=64)
    each = [overlapped.unpaired_s(shape_of(ep, pp=pp)) for ep, pp in ((8, 1), (64, 4))]
    assert overlapped.unpaired_s(both) == pytest.approx(np.array(each))


def test_shared_experts_hide_exchanges_as_long_as_they_take() -> None:
    alone, beside = (mixture(8, overlaps_shared_experts=on) for on in (False, True))
    assert 0 < exchanged_s(beside) < exchanged_s(alone)
    assert beside.forward_s == alone.forward_s
    # a whole micro-batch hides more, and the two exclude each other
    both = mixture(8, overlaps_shared_experts=True, **OVERLAPPED)
    assert both == mixture(8, **OVERLAPPED)


def test_graphs_take_the_host_time_of_what_they_replay() -> None:
    host = {"moe_kernels": 4000.0, "expert_kernels": 0.0, "host_factor": 1.3}
    eager, routing, both = (
        float(mixture(8, **host, graphed_modules=modules).forward_total_s)
        for modules in ((), ("moe_router", "moe_preprocess"), ("attn", "moe_router", "moe_preprocess"))
    )
    assert routing == pytest.approx(0.85 * eager)
    assert both == pytest.approx(0.6 * eager)
    overlapped = float(mixture(8, **host, **OVERLAPPED).forward_total_s)
    assert overlapped == pytest.approx(1.471 * eager)
    graphs = float(mixture(8, **host, **OVERLAPPED, graphed_modules=("moe_router",)).forward_total_s)
    assert graphs == pytest.approx(routing)


def test_fused_experts_need_no_passes_of_their_own() -> None:
    plain, fused = (mixture(8, hardware="b200", fuses_experts=on) for on in (False, True))
    assert fused.forward_s < plain.forward_s
    assert fused.input_grad_s < plain.input_grad_s
    assert fused.live_bytes == plain.live_bytes
