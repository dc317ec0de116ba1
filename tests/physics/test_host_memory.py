"""What waits on the host: its bytes, layouts that it has no memory for, and GPUs that have no memory but the host's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.errors import Infeasible
from planner.layout.evaluate import price_given
from planner.physics.pricing import Pricing
from planner.physics.stage_memory import HOST_STATE_BYTES, fits_host, host_bytes
from planner.search.case import Case
from planner.search.search import search
from planner.shape import Shape
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, SearchLimits, TrainingSpec
from planner.specs.units import GIB
from planner.trainers.load import load_runtime
from planner.trainers.stated import switched

PARAMETERS = 8_030_261_248
TRAINING = TrainingSpec(seq_length=4096, global_batch_size=32)


def cluster(host_gib: float, num_gpus: int = 8) -> ClusterSpec:
    hardware = load_hardware("rtx-pro-6000")
    host = hardware.host.model_copy(update={"memory_gib": host_gib})
    return ClusterSpec(hardware=hardware.model_copy(update={"host": host}), num_gpus=num_gpus)


def pricing(host_gib: float, **runtime: Any) -> Pricing:
    return Pricing(
        model=load_model("8b"), training=TRAINING, cluster=cluster(host_gib),
        runtime=load_runtime("megatron").model_copy(update=runtime),
    )  # fmt: skip


def shape(**sizes: int) -> Shape:
    return Shape.of(**({"seq_length": 4096, "num_microbatches": 4, "shard_size": sizes.get("dp", 1)} | sizes))


def test_nothing_waits_on_the_host_unless_it_is_asked_for() -> None:
    assert host_bytes(pricing(1), shape(dp=8, zero_stage=1)) == 0
    assert fits_host(pricing(0.001), shape(dp=8, zero_stage=1))


@pytest.mark.parametrize("sizes", [{"dp": 8}, {"tp": 2, "dp": 4}, {"pp": 2, "dp": 4}])
def test_the_states_of_all_parameters_are_spread_over_the_ranks(sizes: dict[str, int]) -> None:
    for fraction in (0.5, 1.0):
        told = pricing(64, optimizer_offload_fraction=fraction)
        expected = fraction * HOST_STATE_BYTES * PARAMETERS / 8
        assert host_bytes(told, shape(**sizes, zero_stage=1)) == pytest.approx(expected, rel=1e-3)


def test_activations_that_wait_grow_with_the_tokens_and_shrink_with_tensor_parallelism() -> None:
    told = pricing(64, offload_modules=("core_attn", "attn_proj"))
    one = host_bytes(told, shape(dp=8))
    # inputs of attention and of its projection: q, k and v, and the output, in 32 layers
    assert one == 32 * 4096 * 2 * (4096 + 2 * 1024 + 4096)
    assert host_bytes(told, shape(dp=8, micro_batch_size=2)) == 2 * one
    assert host_bytes(told, shape(dp=4, tp=2)) == one / 2


@pytest.mark.parametrize(
    ("stage", "share", "weights", "gradients"), [(3, 1, 0, 0), (3, 0, 0, 6), (2, 1, 16, 0), (1, 1, 16, 6)]
)
def test_weights_and_gradients_that_wait(stage: int, share: float, weights: float, gradients: float) -> None:
    """Bytes of a parameter's shard on each of eight ranks, times eight; what is not sharded stays."""
    runtime = switched(load_runtime("deepspeed"), {"parameter_offload": True, "optimizer_offload": share})
    told = replace(pricing(64), runtime=runtime)
    sizes = shape(dp=8, zero_stage=stage)
    part = told.table(sizes).layers[told.model.layers[0], "none"]
    found = [each / part.parameters for each in (part.weights_bytes, part.gradients_bytes, part.optimizer_bytes)]
    assert found == pytest.approx([weights / 8, gradients * (1 if stage == 1 else 1 / 8), (1 - share) * 12 / 8])
    assert (host_bytes(told, sizes) > HOST_STATE_BYTES * share * PARAMETERS / 8) == (stage == 3 or share == 1)
    # a shard of 16 bits comes over PCIe before it is gathered
    plain = replace(told, runtime=load_runtime("deepspeed")).table(sizes).layers[told.model.layers[0], "none"]
    copied_s = 2 * part.parameters / 8 / told.cluster.hardware.host.bytes_per_s
    assert part.gather_s - plain.gather_s == pytest.approx(copied_s * (stage == 3))


def test_a_layout_whose_host_has_too_few_bytes_says_so() -> None:
    runtime = load_runtime("megatron").model_copy(update={"optimizer_offload_fraction": 1.0})
    layout = Parallelism(dp=8, zero_stage=1)
    need_gib = HOST_STATE_BYTES * PARAMETERS / 8 / GIB
    for host_gib in (0.9 * need_gib, 1.3 * need_gib):
        warnings = price_given(load_model("8b"), cluster(host_gib), TRAINING, layout, runtime).warnings
        told = [warning for warning in warnings if "host memory" in warning]
        assert bool(told) == (host_gib < need_gib)
        assert all(f"{need_gib:,.0f} GiB a GPU" in warning for warning in told)


def test_a_search_takes_no_layout_whose_host_has_too_few_bytes() -> None:
    runtime = load_runtime("deepspeed").model_copy(update={"optimizer_offload_fraction": 1.0})
    limits = SearchLimits(time_limit_s=60, tp=(1,), pp=(1,), micro_batch_size=(1,), zero_stage=(1, 2))

    def found(host_gib: float) -> Any:
        return search(Case(load_model("8b"), cluster(host_gib), TRAINING, runtime, limits))

    with pytest.raises(Infeasible, match="host memory") as refused:
        found(10)
    assert "memory_gib" in (refused.value.hint or "")
    assert found(64).best.fits
