"""Laws of the hardware: a resource that grows makes no layout slower, and shrinks nothing that fits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import toy_model

from planner.answer import PricedLayout
from planner.layout.evaluate import price_given
from planner.specs.cluster import ClusterSpec, HardwareSpec
from planner.specs.model import ModelSpec
from planner.specs.registry import load_hardware, load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.load import RUNTIMES, load_runtime
from planner.trainers.spec import RuntimeSpec

EXPERTS: dict[str, Any] = {
    "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
MODELS = {
    "dense": toy_model(8),
    "wide": toy_model(8, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=16),
    "experts": toy_model(8, **EXPERTS),
    "latent": toy_model(8, **EXPERTS, **LATENT),
    "sliding": toy_model(8, sliding_window=256, sliding_window_pattern=4, tie_word_embeddings=True, qk_norm=True),
}
HARDWARE = ("h100", "a100", "b200", "mi300x", "l40s", "gb200")
LINKS = ("gb_per_s", "latency_us")
RESOURCES = ("peak_tflops", "hbm_gb_per_s", "memory_gib", "launch_us", *LINKS)
Job = tuple[ModelSpec, ClusterSpec, TrainingSpec, Parallelism, RuntimeSpec]


def grown(hardware: HardwareSpec, resource: str, factor: float, tier: int) -> HardwareSpec:
    """The same GPU with `factor` times as much of one resource, or that much less of a latency."""
    if resource == "peak_tflops":
        update: dict[str, Any] = {resource: {dtype: factor * peak for dtype, peak in hardware.peak_tflops.items()}}
    elif resource == "launch_us":
        less = {resource: hardware.efficiency.launch_us / factor}
        update = {"efficiency": hardware.efficiency.model_copy(update=less)}
    elif resource in LINKS:
        index = tier % len(hardware.tiers)
        link = hardware.tiers[index]
        better = link.gb_per_s * factor if resource == "gb_per_s" else link.latency_us / factor
        changed = link.model_copy(update={resource: better})
        update = {"tiers": (*hardware.tiers[:index], changed, *hardware.tiers[index + 1 :])}
    else:
        update = {resource: factor * getattr(hardware, resource)}
    return hardware.model_copy(update=update)


def on_grown(job: Job, resource: str, factor: float, tier: int) -> PricedLayout:
    model, cluster, *rest = job
    better = cluster.model_copy(update={"hardware": grown(cluster.hardware, resource, factor, tier)})
    return price_given(model, better, *rest)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A model, a cluster, a trainer and a layout with a schedule that the trainer runs."""
    model, hardware = MODELS[draw(st.sampled_from(sorted(MODELS)))], load_hardware(draw(st.sampled_from(HARDWARE)))
    runtime = load_runtime(draw(st.sampled_from(RUNTIMES)))
    if runtime.name == "megatron":
        switches = st.fixed_dictionaries(
            {
                "ep_overlap_fraction": st.sampled_from((0.0, 0.8, 1.0)),
                "ep_overlap_network_fraction": st.sampled_from((0.0, 0.5, 1.0)),
                "delays_weight_gradients": st.booleans(),
                "overlaps_shared_experts": st.booleans(),
                "sends_tokens_once": st.booleans(),
                "dispatcher": st.sampled_from(("", "alltoall", "deepep", "hybridep")),
                "graphed_modules": st.sampled_from(((), ("moe_router",), ("attn", "moe_router", "moe_preprocess"))),
                "fuses_experts": st.booleans(),
                "optimizer_offload_fraction": st.sampled_from((0.0, 0.5, 1.0)),
                "offload_modules": st.sampled_from(((), ("moe_act",), ("core_attn", "attn_proj"))),
                "awaits_token_counts": st.booleans(),
                "cuda_graphs": st.booleans(),
                "cp_comm_type": st.sampled_from(("p2p", "all_gather", "a2a")),
                "host_factor": st.sampled_from((1.3, 8.0)),
            }
        )
        runtime = runtime.model_copy(update=draw(switches))
    tp, cp = draw(st.sampled_from((1, 2, 4, 8))), draw(st.sampled_from((1, 1, 2, 4)))
    dp, micro_batch_size = draw(st.sampled_from((1, 2, 8))), draw(st.sampled_from((1, 4)))
    schedule = draw(st.sampled_from([name for name in runtime.schedules if name != "auto"]))
    pp = 1 if schedule == "none" else draw(st.sampled_from((2, 4)))
    vpp = 2 if schedule in ("interleaved-1f1b", "breadth-first", "zb-v", "v-half", "v-min", "dualpipe-v") else 1
    ranks = tp * cp * dp
    layout = Parallelism(
        tp=tp, cp=cp, pp=pp, vpp=vpp, dp=dp, schedule=schedule, micro_batch_size=micro_batch_size,
        ep=1 if model.moe is None else min(ranks, draw(st.sampled_from((1, 4, 16)))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        zero_stage=draw(st.sampled_from(runtime.zero_stages)),
        sequence_parallel=draw(st.sampled_from((None, False))),
    )  # fmt: skip
    training = TrainingSpec(
        seq_length=draw(st.sampled_from((512, 4096, 32_768))),
        global_batch_size=dp * micro_batch_size * pp * draw(st.sampled_from((2, 4))),
        dtype=draw(st.sampled_from([dtype for dtype in ("bf16", "fp8", "mxfp8") if hardware.peak_flops(dtype)])),  # type: ignore[arg-type]
        moe_imbalance=draw(st.sampled_from((1.0, 1.3))),
        straggler_fraction=draw(st.sampled_from((0.0, 0.1))),
    )
    return model, ClusterSpec(hardware=hardware, num_gpus=ranks * pp), training, layout, runtime


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


@settings(derandomize=True, max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(job=jobs(), resource=st.sampled_from(RESOURCES), factor=st.sampled_from((1.1, 2.0, 8.0)), tier=st.integers(0, 2))
def test_a_resource_that_grows_makes_no_layout_slower(job: Job, resource: str, factor: float, tier: int) -> None:
    before, after = price_given(*job), on_grown(job, resource, factor, tier)
    assert slower_s(before, after) <= 1e-9 * before.step.step_s
    assert after.fits >= before.fits


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_faster_products_hide_as_much_where_the_host_holds_them_up(factor: float) -> None:
    """While the GPU waits for the host, exchanges go on: 1B on eight GPUs took 32.3 s, and 33.8 at twice the peak."""
    job = (
        load_model("1b"),
        ClusterSpec(hardware=load_hardware("h100"), num_gpus=8),
        TrainingSpec(seq_length=8192, global_batch_size=512),
        Parallelism(tp=8),
        load_runtime("megatron"),
    )
    before, after = price_given(*job), on_grown(job, "peak_tflops", factor, 0)
    assert after.step.step_s <= before.step.step_s
