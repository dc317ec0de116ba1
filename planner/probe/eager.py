"""The planner's price of the program that a probe runs: the plan's layout in eager torch and bf16.

Measurements are compared with this price, whatever trainer and dtype the plan is for.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from planner.answer import Plan
from planner.layout.candidate import Candidate
from planner.layout.price import layout_again, reprice
from planner.probe.plan_slice import recompute_modules
from planner.schedule.orders import SCHEDULES
from planner.specs.base import Fields
from planner.specs.training import TrainingSpec
from planner.trainers.documents import torch_took
from planner.trainers.load import load_runtime
from planner.trainers.spec import RuntimeSpec

EAGER = load_runtime("torch-eager").model_copy(update={"clips_gradients": True})
"""The trainer that a probe's ranks are: eager torch that clips gradients."""
FUSED_NORMS_SINCE = (2, 9)
"""The first version of torch whose GPUs run RMSNorm as one kernel (pytorch/pytorch#153666)."""
MASTERS_ARE_WEIGHTS: Fields = {"weight_bytes": 4, "optimizer_bytes": 8}
"""Under ZeRO-3 the ranks' sharded weights are the fp32 masters (fully_shard)."""
FAST_GB_PER_S = 1e9
"""The rate of links that take no time."""


def in_eager_torch(plan: Plan, kernels: Collection[str] = (), alone: bool = False) -> Plan:
    """The plan with its best layout priced as a probe runs it, with experts evenly loaded. The layout itself stays.

    `kernels` are those of attention that ran; without any, the price is of those that torch is expected to take. Stages
    that run `alone` copy in their own memory what ranks exchange, and wait for no late node."""
    eager = plan.model_copy(
        update={
            "cluster": plan.cluster.changed(num_gpus=plan.cluster.node_size) if alone else plan.cluster,
            "runtime": EAGER.name,
            "runtime_spec": runtime_of(plan, kernels, alone),
            "training": training_of(plan.training.seq_length, plan.training.global_batch_size),
        }
    )
    return eager.model_copy(update={"best": layout_again(eager, repriced(eager))})


def without_waits(eager: Plan) -> Plan:
    """A plan in eager torch whose hosts are never late for their GPUs, nor ranks for the others in an exchange.

    Hosts differ more than GPUs do, and the waits for late ranks are those of long jobs on many nodes.
    """
    hardware = eager.cluster.hardware
    efficiency = hardware.efficiency.model_copy(update={"host_us": 0.0})
    # late nodes are as many as the job has, and one is never late
    update = {"hardware": hardware.model_copy(update={"efficiency": efficiency}), "num_gpus": eager.cluster.node_size}
    return _with(eager, update, {"collective_sync_us": 0.0})


def without_exchanges(eager: Plan) -> Plan:
    """A plan in eager torch whose exchanges inside layers take no time, beside which hosts could catch up."""
    quick = {"gb_per_s": FAST_GB_PER_S, "link_gb_per_s": None, "latency_us": 0.0, "start_us": 0.0}
    hardware = eager.cluster.hardware
    tiers = tuple(tier.model_copy(update=quick) for tier in hardware.tiers)
    links = {"network_gb_per_s": None, "network_tiers": ()}
    cluster = {"hardware": hardware.model_copy(update={"tiers": tiers}), **links}
    return _with(eager, cluster, {"collective_sync_us": 0.0, "exchange_kernels": 0.0})


def _with(eager: Plan, cluster: Fields, runtime: Fields) -> Plan:
    """The same layout, priced with other fields of its cluster and of its runtime."""
    changed = eager.model_copy(
        update={
            "cluster": eager.cluster.changed(**cluster),
            "runtime_spec": eager.runtime_spec.model_copy(update=runtime),
        }
    )
    return changed.model_copy(update={"best": layout_again(changed, repriced(changed))})


def static_bytes(eager: Plan, stage: int) -> float:
    """Bytes of a stage before its first forward. Under ZeRO-3 there are neither gathered weights nor gradients yet."""
    memory = eager.stages[stage].memory
    runtime = eager.runtime_spec
    if eager.parallelism.zero_stage == 3:
        return memory.optimizer_bytes * (1 + runtime.weight_bytes / runtime.optimizer_bytes)
    return memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes


def knows_peak(eager: Plan) -> bool:
    """True where the planner prices the peak of the ranks' own program.

    Beyond ZeRO-1 gathered weights and gradients come and go. Where backwards are split, the ranks free what only the
    input's gradient needs before the weight's is computed; the planner frees both then.
    """
    layout = eager.parallelism
    schedule = SCHEDULES.get(layout.schedule)
    return layout.zero_stage <= 1 and schedule is not None and not schedule.splits_backward


def repriced(plan: Plan) -> Candidate:
    """Prices of a plan in eager torch, stage by stage. Selective recomputation covers the modules that the probe can
    recompute."""
    return reprice(plan, plan.best, recompute_modules(plan.best))


def runtime_of(plan: Plan, kernels: Collection[str] = (), alone: bool = False) -> RuntimeSpec:
    """Eager torch with the kernels of attention that ran, and the host time per micro-batch that the plan takes from an
    earlier probe."""
    sharded = MASTERS_ARE_WEIGHTS if plan.parallelism.zero_stage == 3 else {}
    overhead = {"microbatch_overhead_s": plan.runtime_spec.microbatch_overhead_s}
    return eager_with(kernels, alone).model_copy(update={**overhead, **sharded})


def eager_with(kernels: Collection[str], alone: bool, torch_version: str = "") -> RuntimeSpec:
    """Eager torch of a version (the one installed here by default), whose ranks ran these kernels of attention, among
    others or `alone`."""
    update = {
        "attention_kernel": torch_took(kernels),
        "fused_norm": fuses_norms(torch_version),
        "copies_exchanged": alone,
    }
    return EAGER.model_copy(update=update)


def fuses_norms(torch_version: str = "") -> bool:
    """True if GPUs run RMSNorm as one kernel under a version of torch; where none is installed, under the newest."""
    with suppress(PackageNotFoundError):
        torch_version = torch_version or version("torch")
    numbers = [int(number) for number in re.findall(r"\d+", torch_version)[:2]]
    return not numbers or tuple(numbers) >= FUSED_NORMS_SINCE


def training_of(seq_length: int, num_sequences: int) -> TrainingSpec:
    """A probe's step: in bf16, with equal shares of tokens for all experts, no rank slower than another."""
    return TrainingSpec(seq_length=seq_length, global_batch_size=num_sequences)
