"""Laws of the hardware and of the training: more of a resource is never slower, more work never faster or smaller."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from laws.counting import law
from laws.jobs import Job, accepted, jobs
from planner.answer import PricedLayout
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.load import load_runtime

LINKS = ("gb_per_s", "latency_us")
OF_HOST = ("link_gb_per_s", "memory_gb_per_s", "memory_gib")
OF_KERNELS = ("launch_us", "host_us")
RESOURCES = ("peak_tflops", "hbm_gb_per_s", "memory_gib", *OF_KERNELS, *LINKS, *(f"host {name}" for name in OF_HOST))
OVERHEADS = ("collective_sync_us", "microbatch_overhead_s", "step_overhead_s")
"""Numbers of a trainer that are times."""
NO_LATER = 1e-9


def grown(hardware: HardwareSpec, resource: str, factor: float, tier: int) -> HardwareSpec:
    """The same GPU with `factor` times as much of one resource, or that much less of a latency."""
    efficiency, host = hardware.efficiency, hardware.host
    if resource == "peak_tflops":
        update: dict[str, Any] = {resource: {dtype: factor * peak for dtype, peak in hardware.peak_tflops.items()}}
    elif resource in OF_KERNELS:
        less = {resource: getattr(efficiency, resource) / factor}
        update = {"efficiency": efficiency.model_copy(update=less)}
    elif resource.startswith("host "):
        name = resource.removeprefix("host ")
        update = {"host": host.model_copy(update={name: factor * getattr(host, name)})}
    elif resource in LINKS:
        index = tier % len(hardware.tiers)
        link = hardware.tiers[index]
        better = link.gb_per_s * factor if resource == "gb_per_s" else link.latency_us / factor
        changed = link.model_copy(update={resource: better})
        update = {"tiers": (*hardware.tiers[:index], changed, *hardware.tiers[index + 1 :])}
    else:
        update = {resource: factor * getattr(hardware, resource)}
    return hardware.model_copy(update=update)


def slowed(hardware: HardwareSpec, factor: float) -> HardwareSpec:
    """The same GPU, all of whose rates are divided by `factor` and all of whose latencies are multiplied by it."""
    rates = {"gb_per_s", "link_gb_per_s"}
    latencies = {"latency_us", "start_us"}
    tiers = tuple(
        tier.model_copy(
            update={name: value / factor for name in rates if (value := getattr(tier, name)) is not None}
            | {name: factor * getattr(tier, name) for name in latencies}
        )
        for tier in hardware.tiers
    )
    efficiency, host = hardware.efficiency, hardware.host
    return hardware.model_copy(
        update={
            "peak_tflops": {dtype: peak / factor for dtype, peak in hardware.peak_tflops.items()},
            "hbm_gb_per_s": hardware.hbm_gb_per_s / factor,
            "tiers": tiers,
            "host": host.model_copy(
                update={name: getattr(host, name) / factor for name in ("link_gb_per_s", "memory_gb_per_s")}
            ),
            "efficiency": efficiency.model_copy(
                update={name: factor * getattr(efficiency, name) for name in OF_KERNELS}
            ),
        }
    )


def on_hardware(job: Job, hardware: HardwareSpec) -> Job:
    return job.changed(cluster=job.cluster.changed(hardware=hardware))


def slower_s(before: PricedLayout, after: PricedLayout) -> float:
    """Seconds by which a step got longer.

    Of a pipeline, without what its data-parallel exchanges show: ranks that are not the busiest hide less of them when
    they compute faster, and the closed form behind the pipeline does not see that they are then done earlier.
    """
    steps = [
        priced.step.step_s - (priced.step.breakdown.exposed_dp_s if priced.parallelism.pp > 1 else 0.0)
        for priced in (before, after)
    ]
    return steps[1] - steps[0]


def splits_adapters(job: Job) -> bool:
    """True where adapters are trained in a schedule that splits the backward.

    The backward of a layer takes as long as the host or the GPU needs for all of it; where the host holds up the small
    products of adapters, a faster one moves seconds from the weights' gradients to the input's, which others wait for.
    """
    splits = any(action.kind == "I" for actions in job.candidate.order.ranks for action in actions)
    return job.training.adapters is not None and splits


@law(40)
@given(jobs(), st.sampled_from(RESOURCES), st.sampled_from((1.1, 2.0, 8.0)), st.integers(0, 2))
def test_a_resource_that_grows_makes_no_layout_slower(job: Job, resource: str, factor: float, tier: int) -> None:
    assume(resource != "host_us" or not splits_adapters(job))
    before = job.priced
    after = on_hardware(job, grown(job.cluster.hardware, resource, factor, tier)).priced
    assert slower_s(before, after) <= NO_LATER * before.step.step_s
    assert after.fits >= before.fits
    if resource == "memory_gib":
        assert after.step.step_s == before.step.step_s
    else:
        assert [stage.memory.total_bytes for stage in after.stages] == [
            stage.memory.total_bytes for stage in before.stages
        ]


@law(20)
@given(jobs(), st.sampled_from((2.0, 8.0)))
def test_all_seconds_grow_with_all_rates_and_latencies(job: Job, factor: float) -> None:
    """Seconds have one unit: none is a bare number somewhere, and no byte depends on any of them."""
    overheads = {name: factor * getattr(job.runtime, name) for name in OVERHEADS}
    slow = on_hardware(job, slowed(job.cluster.hardware, factor)).changed(
        runtime=job.runtime.model_copy(update=overheads)
    )
    before, after = job.priced, slow.priced
    assert abs(after.step.step_s - factor * before.step.step_s) <= NO_LATER * after.step.step_s
    for name in type(before.step.breakdown).model_fields:
        fast_s, slow_s = getattr(before.step.breakdown, name), getattr(after.step.breakdown, name)
        assert abs(slow_s - factor * fast_s) <= NO_LATER * after.step.step_s, name
    assert abs(after.step.mfu - before.step.mfu) <= NO_LATER
    assert [stage.memory for stage in after.stages] == [stage.memory for stage in before.stages]


@law(30)
@given(jobs(), st.sampled_from(("seq_length", "global_batch_size")), st.integers(1, 64))
def test_more_tokens_take_no_shorter_step_and_no_less_memory(job: Job, grows: str, times: int) -> None:
    """Efficiency curves rise with the tokens of a product, but none so steeply that more of them take less time."""
    layout, training = job.layout, job.training
    per_round = layout.dp * layout.micro_batch_size * layout.pp
    unit = 2 * layout.tp * layout.cp if grows == "seq_length" else per_round
    longer = accepted(job.trained(**{grows: getattr(training, grows) + unit * times}))
    before, after = job.priced, longer.priced
    assert after.step.step_s >= before.step.step_s * (1 - NO_LATER)
    for small, large in zip(before.stages, after.stages, strict=True):
        assert large.memory.total_bytes >= small.memory.total_bytes * (1 - NO_LATER)


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_faster_products_hide_as_much_where_the_host_holds_them_up(factor: float) -> None:
    """While the GPU waits for the host, exchanges go on: 1B on eight GPUs took 32.3 s, and 33.8 at twice the peak."""
    cluster = ClusterSpec(hardware=load_hardware("h100"), num_gpus=8)
    training = TrainingSpec(seq_length=8192, global_batch_size=512)
    job = Job(load_model("1b"), cluster, training, Parallelism(tp=8), load_runtime("megatron"))
    after = on_hardware(job, grown(cluster.hardware, "peak_tflops", factor, 0))
    assert after.priced.step.step_s <= job.priced.step.step_s
