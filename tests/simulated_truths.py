"""Runs that never ran: what a plan's job would really take, with a hidden error of the model and one injected cause.

Everything here is simulated. A truth is a candidate of the planner's own whose rates are off by errors that the answer
is never told, and in which one thing is as it should not be: it proves reasoning, and nothing about the physics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from planner.answer import Plan
from planner.layout.candidate import Candidate
from planner.layout.evaluate import evaluate
from planner.layout.replan import reprice
from planner.physics.pricing import Pricing
from planner.schedule.replay import makespan_s
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import load_model
from planner.specs.training import Parallelism, TrainingSpec
from planner.trainers.load import load_runtime

HEALTHY = "healthy"
ERROR, MOST_ERROR = 0.04, 0.08
"""Standard deviation and limit of the hidden errors of each family of kernels and of each link."""


@dataclass(frozen=True)
class Job:
    """A job in words that `evaluate` takes."""

    name: str
    model: str
    hardware: str
    num_gpus: int
    batch: int
    layout: Mapping[str, Any]
    seq_length: int = 8192
    trainer: str = "megatron"
    switches: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the trainer's runtime that this run sets."""


_BESIDE = {"ep_overlap_fraction": 1.0, "ep_overlap_network_fraction": 1.0}
JOBS = (
    Job("8b-8", "8b", "h100", 8, 64, {"tp": 2, "dp": 4}),
    Job("8b-pp", "8b", "h100", 16, 128, {"tp": 2, "pp": 2, "dp": 4}),
    Job("8b-fsdp", "8b", "h100", 8, 32, {"dp": 8, "zero_stage": 3}, trainer="torchtitan"),
    Job("8b-zero2", "8b", "h100", 16, 64, {"dp": 16, "zero_stage": 2}, 4096, trainer="deepspeed"),
    Job("70b-64", "70b", "h100", 64, 128, {"tp": 8, "pp": 4, "dp": 2}),
    Job("70b-vpp", "70b", "h200", 128, 128, {"tp": 4, "pp": 4, "vpp": 5, "dp": 8}),
    Job("70b-cp", "70b", "h100", 128, 64, {"tp": 4, "cp": 2, "pp": 4, "dp": 4}),
    Job("405b-512", "405b", "h200", 512, 256, {"tp": 8, "pp": 16, "dp": 4}),
    Job("405b-2048", "405b", "h200", 2048, 512, {"tp": 8, "pp": 16, "dp": 16}),
    Job("mixtral-64", "mixtral-8x7b", "h100", 64, 256, {"tp": 1, "pp": 4, "dp": 16, "ep": 8}, 4096),
    Job("qwen3-32", "qwen3-30b", "h100", 32, 256, {"pp": 2, "dp": 16, "ep": 8, "vpp": 4}, 4096),
    Job("mixtral-vpp", "mixtral-8x7b", "h200", 64, 256, {"pp": 4, "dp": 16, "ep": 8, "vpp": 4}, switches=_BESIDE),
    Job("dsv3-256", "deepseek-v3", "b200", 256, 1024, {"pp": 8, "dp": 32, "ep": 32}, 4096, switches=_BESIDE),
    Job("v2-lite-16", "deepseek-v2-lite", "h100", 16, 128, {"dp": 16, "ep": 8}, 4096),
    Job("8b-a100", "8b", "a100", 16, 128, {"tp": 4, "pp": 2, "dp": 2}, 4096),
    Job("70b-b200", "70b", "b200", 64, 256, {"tp": 4, "pp": 4, "dp": 4}),
)  # fmt: skip
"""Layouts like published ones, on 8 to 2,048 GPUs."""


@cache
def plan_of(name: str, recompute: str | None = None) -> Plan:
    """The plan of a job's layout, priced as if nothing were known of its run."""
    job = next(job for job in JOBS if job.name == name)
    layout = {"sequence_parallel": job.layout.get("tp", 1) > 1, **job.layout}
    if recompute is not None:
        layout["recompute"] = recompute
    runtime = load_runtime(job.trainer)
    runtime = runtime.model_copy(update=dict(job.switches))
    return evaluate(
        load_model(job.model),
        ClusterSpec(hardware=job.hardware, num_gpus=job.num_gpus),
        TrainingSpec(seq_length=job.seq_length, global_batch_size=job.batch),
        Parallelism(**layout),
        runtime=runtime,
    )


@dataclass(frozen=True)
class Truth:
    """A run as it really is; what no file says of it stands here alone."""

    job: Job
    plan: Plan
    cause: str
    strength: float
    """How strong the cause is: a factor, or a share, as `CAUSES` says."""
    where: str = ""
    healthy: Candidate = field(repr=False, default=None)  # type: ignore[assignment]
    """With the hidden errors, and without the cause."""
    candidate: Candidate = field(repr=False, default=None)  # type: ignore[assignment]
    slow_stage: int | None = None
    """The pipeline stage that holds the slow GPU."""
    stall_s: float = 0.0
    """Seconds of every step in which the data is not there."""
    leaks: bool = False
    fragmented: float = 1.0
    """Reserved over allocated memory, beyond what is usual."""

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step before noise."""
        return self.candidate.step_s + self.stall_s

    @property
    def extra_s(self) -> float:
        """Seconds of a step that the cause takes."""
        return self.step_s - self.healthy.step_s

    @property
    def likely_seen(self) -> bool:
        """True where the cause takes enough of a step to be worth a word, or shows in memory."""
        return self.extra_s >= LEAST.get(self.cause, 0.05) * self.healthy.step_s


def _again(pricing: Pricing, hardware: Mapping[str, Any] | None = None, **runtime: Any) -> Pricing:
    """The pricing with other fields of its hardware and of its runtime."""
    if hardware:
        profile = pricing.cluster.hardware
        fields = {name: getattr(profile, name) for name in type(profile).model_fields} | dict(hardware)
        pricing = replace(pricing, cluster=pricing.cluster.changed(hardware=type(profile)(**fields)))
    return replace(pricing, runtime=pricing.runtime.model_copy(update=runtime)) if runtime else pricing


def _kernels(pricing: Pricing, gemm: float, attention: float, stream: float, host: float = 1.0) -> Pricing:
    """The pricing with kernels of each family, and the host, so many times as slow."""
    known = pricing.cluster.hardware.efficiency
    factors = {
        "gemm_factor": known.gemm_factor * gemm, "attention_factor": known.attention_factor * attention,
        "stream_factor": known.stream_factor * stream, "launch_factor": known.launch_factor * host,
    }  # fmt: skip
    return _again(pricing, {"efficiency": known.model_copy(update=factors)})


def _links(pricing: Pricing, factors: tuple[float, ...]) -> Pricing:
    """The pricing with links of each tier so many times as fast."""
    tiers = zip(pricing.cluster.hardware.tiers, factors, strict=True)
    changed = tuple(
        tier.model_copy(update={"efficiency_fraction": min(1.0, tier.efficiency_fraction * factor)})
        for tier, factor in tiers
    )
    return _again(pricing, {"tiers": changed})


def with_errors(candidate: Candidate, rng: np.random.Generator) -> Candidate:
    """The candidate with hidden errors of each family of kernels and of each link."""

    def error() -> float:
        return 1 + float(np.clip(rng.normal(0, ERROR), -MOST_ERROR, MOST_ERROR))

    pricing = _kernels(candidate.pricing, error(), error(), error())
    pricing = _links(pricing, tuple(error() for _ in pricing.cluster.hardware.tiers))
    return candidate.priced_as(pricing)


LEAST = {"leak": -1.0, "fragmentation": -1.0, "recompute_unneeded": -1.0, "clocks": 0.15}
"""Least share of a step that a cause takes in these runs, where it is not 5%: some show in memory, and clocks that all
kernels share are told only from a model that is off by less."""
Inject = Callable[[Truth, np.random.Generator], Truth]


def _priced(truth: Truth, pricing: Pricing, strength: float, where: str = "") -> Truth:
    candidate = truth.candidate.priced_as(pricing)
    return replace(truth, candidate=candidate, strength=strength, where=where)


def _straggler(truth: Truth, rng: np.random.Generator) -> Truth:
    pp = int(truth.candidate.shape.pp)
    stage, factor = int(rng.integers(pp)), float(rng.uniform(1.08, 1.3))
    factors = tuple(factor if rank == stage else 1.0 for rank in range(pp))
    candidate = replace(truth.candidate, rank_factors=factors)
    return replace(truth, candidate=candidate, strength=factor, slow_stage=stage, where=f"stage {stage}")


def _slow_link(truth: Truth, rng: np.random.Generator) -> Truth:
    cluster = truth.candidate.pricing.cluster
    used = len(cluster.tiers) if cluster.num_gpus > cluster.nvlink_domain_size else 1
    tier, factor = int(rng.integers(used)), float(rng.uniform(0.15, 0.6))
    factors = tuple(factor if index == tier else 1.0 for index in range(len(cluster.hardware.tiers)))
    name = cluster.hardware.tiers[tier].name
    return _priced(truth, _links(truth.candidate.pricing, factors), factor, name)


def _runtime(**fields: Any) -> Inject:
    def inject(truth: Truth, rng: np.random.Generator) -> Truth:
        return _priced(truth, _again(truth.candidate.pricing, None, **fields), 1.0)

    return inject


def _host_bound(truth: Truth, rng: np.random.Generator) -> Truth:
    factor = float(rng.uniform(2, 4))
    known = truth.candidate.pricing.cluster.hardware.efficiency
    slower = known.model_copy(update={"host_us": known.host_us * factor})
    return _priced(truth, _again(truth.candidate.pricing, {"efficiency": slower}), factor)


def _imbalance(truth: Truth, rng: np.random.Generator) -> Truth:
    factor = float(rng.uniform(1.4, 2.5))
    training = truth.candidate.pricing.training.model_copy(update={"moe_imbalance": factor})
    return _priced(truth, replace(truth.candidate.pricing, training=training), factor)


def _clocks(truth: Truth, rng: np.random.Generator) -> Truth:
    factor = float(rng.uniform(1.15, 1.4))
    return _priced(truth, _kernels(truth.candidate.pricing, factor, factor, factor), factor)


def _bubble(truth: Truth, rng: np.random.Generator) -> Truth:
    """Micro-batches of unequal length, as packed documents make them: stages wait, and compute as much."""
    candidate = replace(truth.candidate)
    spread = float(rng.uniform(0.25, 0.6))
    sizes = np.clip(rng.normal(1.0, spread, candidate.num_microbatches), 0.2, None)
    durations = replace(candidate.durations, microbatch_sizes=[float(size) for size in sizes / sizes.mean()])
    vars(candidate).update(durations=durations, pipeline_s=makespan_s(candidate.order, durations))
    return replace(truth, candidate=candidate, strength=spread)


def _stall(truth: Truth, rng: np.random.Generator) -> Truth:
    share = float(rng.uniform(0.06, 0.3))
    return replace(truth, stall_s=share * truth.candidate.step_s, strength=share)


def _leak(truth: Truth, rng: np.random.Generator) -> Truth:
    return replace(truth, leaks=True, strength=float(rng.uniform(0.05, 0.2)))


def _fragmented(truth: Truth, rng: np.random.Generator) -> Truth:
    factor = float(rng.uniform(1.25, 1.6))
    return replace(truth, fragmented=factor, strength=factor)


def _unchanged(truth: Truth, rng: np.random.Generator) -> Truth:
    return truth


CAUSES: dict[str, Inject] = {
    HEALTHY: _unchanged,
    "straggler_rank": _straggler,
    "slow_link": _slow_link,
    "no_ep_overlap": _runtime(ep_overlap_fraction=0.0, ep_overlap_network_fraction=0.0, delays_weight_gradients=False),
    "exposed_dp": _runtime(gradient_overlap_fraction=0.0, parameter_overlap_fraction=0.0, fsdp_overlap_fraction=0.0),
    "attention_kernel": _runtime(flash_attention=False),
    "unfused_kernels": _runtime(
        fused_norm=False, fused_rotary=False, fused_activation=False, fused_cross_entropy=False, fused_permute=False,
        fused_grad_accumulation=False, compiled=False,
    ),
    "host_bound": _host_bound,
    "expert_imbalance": _imbalance,
    "clocks": _clocks,
    "bubble": _bubble,
    "data_stall": _stall,
    "leak": _leak,
    "fragmentation": _fragmented,
    "recompute_unneeded": _unchanged,
}  # fmt: skip


def fits_job(cause: str, job: Job) -> bool:
    """True where the cause can strike the job: experts without experts are not out of balance."""
    mixture, pp = job.layout.get("ep", 1) > 1, job.layout.get("pp", 1)
    return {
        "no_ep_overlap": bool(job.switches), "expert_imbalance": mixture, "bubble": pp > 1,
        "straggler_rank": job.layout.get("tp", 1) > 1 or mixture or pp > 1,
        "recompute_unneeded": job.name in ("8b-8", "8b-a100", "70b-b200", "70b-64"),
        "host_bound": mixture or job.layout.get("tp", 1) >= 4,
    }.get(cause, True)  # fmt: skip


def truth_of(job: Job, cause: str, rng: np.random.Generator) -> Truth:
    """A run of the job with the cause, and hidden errors of the model."""
    plan = plan_of(job.name, "full" if cause == "recompute_unneeded" else None)
    healthy = with_errors(reprice(plan, plan.best), rng)
    return CAUSES[cause](Truth(job, plan, cause, 0.0, healthy=healthy, candidate=healthy), rng)
