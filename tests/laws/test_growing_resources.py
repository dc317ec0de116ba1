"""Laws of the hardware and of the training: more of a resource is never slower, more work never faster or smaller.

Laws of one priced layout: its parts add up, and its replay is no shorter than its bounds.
The same question has the same answer in every process, under every hash seed, in every Python.
Every public type comes back from its JSON as it was.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import BaseModel

from laws.counting import law
from laws.jobs import Job, accepted, jobs
from laws.values import values_of
from planner.answer import Plan, PricedLayout, StageMemory, StepBreakdown
from planner.decide.compare import Comparison
from planner.decide.job import Resume
from planner.decide.phases import PhaseAnswer
from planner.decide.sweep import Sweep
from planner.layout.alive import MemoryAnswer
from planner.layout.runs import RunSpec
from planner.months.losses import Fact
from planner.observe.follower import FollowedRun
from planner.observe.observation import Observed
from planner.observe.traces.recorded import Recorded
from planner.probe.result import ProbeResult
from planner.probe.run import ProbeRun
from planner.profile.measurements import Machine
from planner.schedule.bounds import in_flight_bounds_s
from planner.schedule.replay import replay
from planner.search.why.explanation import Explanation
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.model import ModelSpec
from planner.specs.phases import PhasesFile
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import OperationsSpec, Parallelism, SearchLimits, TrainingSpec
from planner.trainers.calibration import Calibration
from planner.trainers.load import Checkpoint, load_runtime
from planner.trainers.spec import RuntimeSpec
from tools.gpu_check.report import GpuCheck

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


ITEMS = tuple(
    name for name in StageMemory.model_fields if name.endswith("_bytes") and name.split("_")[0] not in ("total", "peak")
)
"""Items of a stage's memory; frozen weights are a part of the weights, and what is reserved comes beside the peak."""
ROUNDED_BYTES = 8
"""Every item is rounded to whole bytes by itself."""


@law(30)
@given(jobs())
def test_stages_hold_each_layer_once(job: Job) -> None:
    stages, sizes = job.priced.stages, job.priced.parallelism
    assert [stage.stage for stage in stages] == list(range(sizes.pp))
    assert sum(stage.num_layers for stage in stages) == job.model.num_hidden_layers
    chunks = sorted(chunk for stage in stages for chunk in stage.chunks)
    assert (chunks[0][0], chunks[-1][1]) == (0, job.model.num_hidden_layers)
    assert all(before[1] == after[0] for before, after in pairwise(chunks))
    for stage in stages:
        assert len(stage.chunks) == sizes.vpp
        assert sum(last - first for first, last in stage.chunks) == stage.num_layers == sum(stage.recompute.values())
    held = [part for stage in stages for part in stage.holds]
    assert {"embedding", "head"} <= set(held)
    assert held.count("head") == 1


@law(50)
@given(jobs())
def test_parts_of_a_step_and_of_a_stages_memory_add_up(job: Job) -> None:
    step, tokens = job.priced.step, job.training.tokens_per_step
    parts_s = [getattr(step.breakdown, name) for name in StepBreakdown.model_fields]
    assert sum(parts_s) == pytest.approx(step.step_s, rel=1e-9)
    assert min(parts_s) >= -1e-9 * step.step_s
    assert step.tokens_per_s * step.step_s == pytest.approx(tokens, rel=1e-12)
    assert step.tokens_per_s_per_gpu * job.cluster.num_gpus == pytest.approx(step.tokens_per_s, rel=1e-12)
    assert 0 <= step.bubble_fraction < 1
    if step.step_s_interval is not None:
        assert step.step_s_interval[0] <= step.step_s <= step.step_s_interval[1]
    capacity_bytes = job.cluster.hardware.memory_bytes
    for stage in job.priced.stages:
        memory = stage.memory
        parts = [getattr(memory, name) for name in ITEMS if name not in ("frozen_weights_bytes", "reserved_bytes")]
        assert min(parts) >= 0
        assert 0 <= memory.frozen_weights_bytes <= memory.weights_bytes
        assert abs(sum(parts) - memory.peak_allocated_bytes) <= ROUNDED_BYTES
        assert memory.peak_allocated_bytes <= memory.total_bytes
        assert memory.peak_allocated_bytes + memory.reserved_bytes == memory.total_bytes
        if memory.total_bytes_interval is not None:
            assert memory.total_bytes_interval[0] <= memory.total_bytes <= memory.total_bytes_interval[1]
    fullest_bytes = max(stage.memory.total_bytes for stage in job.priced.stages)
    assert job.priced.fits == (fullest_bytes <= capacity_bytes) or abs(fullest_bytes - capacity_bytes) <= ROUNDED_BYTES


@law(30)
@given(jobs())
def test_a_replay_is_no_shorter_than_what_its_ranks_allow(job: Job) -> None:
    order, durations = job.candidate.order, job.candidate.durations
    timeline = replay(order, durations)
    splits = any(action.kind == "I" for actions in order.ranks for action in actions)
    free_s = in_flight_bounds_s(durations, order.stage_to_rank, order.num_microbatches, splits_backward=splits)
    held = [int(chunks) for chunks in timeline.peak_in_flight_chunks]
    limited_s = in_flight_bounds_s(durations, order.stage_to_rank, order.num_microbatches, held, splits_backward=splits)
    assert free_s.max() <= limited_s.max() * (1 + 1e-9)
    assert limited_s.max() <= timeline.makespan_s * (1 + 1e-9)
    assert float(timeline.busy_s.max()) <= timeline.makespan_s * (1 + 1e-9)


ROOT = Path(__file__).parents[2]
KNOWN = Path(__file__).parent / "same_answers.json"


@pytest.mark.thorough(2)
@pytest.mark.parametrize("hash_seed", ["0", "4321"])
def test_answers_are_those_of_every_other_process(hash_seed: str, tmp_path: Path) -> None:
    """Held against committed digests, which another Python or another release of a dependency must meet too.

    `scripts/answers tests/laws/same_answers.json --only law --digests` writes them anew after a change that means to
    move a price; without --digests it writes the answers themselves, whose difference says which number moved.
    """
    out = tmp_path / "digests.json"
    command = [sys.executable, str(ROOT / "scripts" / "answers"), str(out), "--only", "law", "--digests"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": hash_seed}, cwd=tmp_path)
    assert json.loads(out.read_text()) == json.loads(KNOWN.read_text())


SPECS = (ModelSpec, HardwareSpec, ClusterSpec, TrainingSpec, OperationsSpec, Parallelism, SearchLimits, RuntimeSpec)
FILES = (PhasesFile, RunSpec, Calibration, Checkpoint, Fact, Machine)
ANSWERS = (
    Plan, PricedLayout, MemoryAnswer, Comparison, PhaseAnswer, Resume, Sweep, Observed, FollowedRun, Recorded, ProbeRun,
    ProbeResult, Explanation, GpuCheck,
)  # fmt: skip


def through_json(value: BaseModel) -> Any:
    """The value read from what is written of it, in two ways."""
    kind = type(value)
    text = json.dumps(value.model_dump(mode="json", by_alias=True), allow_nan=False)
    assert kind.model_validate_json(value.model_dump_json(by_alias=True)) == value
    return kind.model_validate(json.loads(text))


KINDS: tuple[type[BaseModel], ...] = (*SPECS, *FILES, *ANSWERS)


def law_of(kind: type[BaseModel]) -> Callable[[], None]:
    """The law for one type, to be called."""

    @law(3)
    @given(values_of(kind))
    def comes_back(value: BaseModel) -> None:
        assert through_json(value) == value

    return cast("Callable[[], None]", comes_back)


@pytest.mark.thorough(2)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_value_comes_back_from_its_json(kind: type[BaseModel]) -> None:
    law_of(kind)()
