"""Remedies against what is no choice of the job: slow ranks and links, unbalanced experts, waits for data, memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from planner.layout.candidate import Candidate
from planner.layout.price import price_layout
from planner.layout.replan import layout_again
from planner.observe.case import Case
from planner.observe.measured import MemorySeries
from planner.observe.observation import Cause, Remedy
from planner.observe.remedy.running import running
from planner.observe.remedy.written import settings_about
from planner.search.rebalance import rebalance
from planner.specs.base import LEAST_RATE

_RANK = re.compile(r"\b(rank|stage) (\d+)")
_NOT_FILES = ("the options", "the log's arguments")
REBALANCE_S = 1.0
"""Seconds in which layers are moved between stages."""
MOST_FACTOR = 8.0
"""Largest slowness that is looked for."""
MOST_HOST = 64.0
"""The same of a host, whose launches hide until they take as long as the kernels."""
BALANCE = "balance the experts' load, by a larger auxiliary loss or by biases"
_TRIES = 12
LOADERS = {
    "megatron": "--num-workers", "bridge": "dataset.num_workers", "primus-megatron": "num_workers",
    "megatron-deepspeed": "--num-workers", "deepspeed": "num_workers of its DataLoader",
}  # fmt: skip
"""The setting for processes that load data, by trainer."""


def of_straggler(case: Case, cause: Cause) -> Remedy:
    """A healthy node in the place of a slow rank's; layers moved off a slow stage, where that wins something."""
    step_s, found = without(case, cause), _RANK.search(cause.where)
    plan, now = case.plan, running(case)
    if found is None or plan is None or now is None:
        return unpriced((), step_s, "look at what runs on its node, or put another one in its place")
    kind, number = found[1], int(found[2])
    if kind == "stage":
        whole = unpriced((), step_s, f"other nodes in the place of stage {number}'s")
        return _rebalanced(case, cause, now, number) or whole
    node, gpu = divmod(number, plan.cluster.node_size)
    says = f"another node in the place of rank {number}'s (GPU {gpu} of node {node}, unless ranks are placed otherwise)"
    file, left = _plan_file(case), plan.cluster.num_gpus - plan.cluster.node_size
    if file is None or left < plan.cluster.node_size:
        return unpriced((), step_s, says)
    says = f"go on with {left:,} GPUs where no node is spare, or {says}"
    return unpriced(("--from", file, "--gpus", str(left)), step_s, says)


def _rebalanced(case: Case, cause: Cause, now: Candidate, stage: int) -> Remedy | None:
    """Layers moved off a stage that is as slow as the seconds of the cause say."""
    plan, file = case.plan, _plan_file(case)
    if plan is None or cause.seconds is None or stage >= int(now.shape.pp) or int(now.shape.pp) < 2:
        return None

    def slowed(factor: float) -> Candidate:
        factors = tuple(now.rank_factors) or (1.0,) * int(now.shape.pp)
        return replace(now, rank_factors=tuple(f * (factor if rank == stage else 1) for rank, f in enumerate(factors)))

    factor = _solved(lambda factor: slowed(factor).step_s - now.step_s, cause.seconds, MOST_FACTOR)
    if factor is None:
        return None
    slow = slowed(factor)
    runs = plan.model_copy(update={"best": layout_again(plan, now), "runtime_spec": now.pricing.runtime})
    balanced = rebalance(runs, slow.rank_factors, REBALANCE_S)
    won_s = balanced.before.step.step_s - balanced.after.step.step_s
    measured_s = case.observation.step_s or slow.step_s
    if won_s <= 0.001 * measured_s:
        return None
    step_s = measured_s - won_s * min(1.0, measured_s / slow.step_s)
    layers = ", ".join(str(part.num_layers) for part in balanced.after.stages)
    says = f"layers moved off stage {stage}, so that stages hold {layers}"
    options = () if file is None else ("rebalance", file, "--slow-stage", f"{stage}:{factor:.3g}")
    return Remedy(options=options, step_s=step_s, says=says)


def of_link(case: Case, cause: Cause) -> Remedy:
    """The step at the full rate, the test that shows the rate, and a search under the rate that was found."""
    step_s, now = without(case, cause), running(case)
    if now is None or case.plan is None:
        return unpriced((), step_s, "measure the links with nccl-tests")
    cluster, places = now.pricing.cluster, price_layout(now, exact=False).placement
    slow = next((place for place in places if place.group == cause.where), None)
    slow = slow or next((place for place in places if not place.is_inside_nvlink), None)
    crosses = slow is not None and not slow.is_inside_nvlink
    tests, nodes = "rccl-tests" if cluster.hardware.is_amd else "nccl-tests", "pairs of nodes" if crosses else "a node"
    over = slow.tier if slow is not None else cluster.tiers[0].name
    says = f"measure {over} with {tests} (all_reduce_perf -b 64M -e 2G -f 2, on {nodes})"
    full = "" if step_s is None else "; at its full rate"
    rate = _network_rate(now, cause) if crosses and len(cluster.tiers) == 2 else None
    if rate is None:
        return unpriced((), step_s, f"{says}{full}")
    says += f"; the options plan for {rate:.3g} GB/s a GPU, which explain the seconds{full}"
    return unpriced(("--assume", f"network_gb_per_s={rate:.3g}"), step_s, says)


def _network_rate(now: Candidate, cause: Cause) -> float | None:
    """GB/s per GPU of a network that makes the step longer by the seconds of the cause."""
    pricing, full = now.pricing, now.pricing.cluster.tiers[-1].gb_per_s

    def longer_s(factor: float) -> float:
        slow = pricing.cluster.changed(network_gb_per_s=max(full / factor, LEAST_RATE))
        return now.priced_as(replace(pricing, cluster=slow)).step_s - now.step_s

    factor = None if cause.seconds is None else _solved(longer_s, cause.seconds, MOST_FACTOR)
    return None if factor is None else full / factor


def uneven(now: Candidate, cause: Cause) -> Candidate | None:
    """The layout with experts as unbalanced as the seconds of the cause say; None where no imbalance explains them."""
    pricing, balanced = now.pricing, now.pricing.training.moe_imbalance

    def with_imbalance(factor: float) -> Candidate:
        training = pricing.training.model_copy(update={"moe_imbalance": balanced * factor})
        return now.priced_as(replace(pricing, training=training))

    most = float(now.shape.ep) / balanced
    return None if pricing.model.moe is None or most <= 1 else _as_seen(now, cause, with_imbalance, most)


def slow_host(now: Candidate, cause: Cause) -> Candidate | None:
    """The layout with a host that launches as slowly as the seconds of the cause say; None where none explains them."""
    pricing = now.pricing

    def with_host(factor: float) -> Candidate:
        runtime = pricing.runtime.model_copy(update={"host_factor": pricing.runtime.host_factor * factor})
        return now.priced_as(replace(pricing, runtime=runtime))

    return _as_seen(now, cause, with_host, MOST_HOST)


def _as_seen(now: Candidate, cause: Cause, made: Callable[[float], Candidate], most: float) -> Candidate | None:
    """The layout with the factor that makes its step longer by the seconds of the cause."""
    if cause.seconds is None:
        return None
    factor = _solved(lambda factor: made(factor).step_s - now.step_s, cause.seconds, most)
    return None if factor is None else made(factor)


def of_imbalance(case: Case, cause: Cause) -> Remedy:
    """The step with balanced experts, and what balances them."""
    return unpriced((), without(case, cause), BALANCE)


def of_data(case: Case, cause: Cause) -> Remedy:
    """The step without the wait for data, and the loader's setting."""
    trainer = case.plan.runtime if case.plan is not None else case.observation.facts.trainer or ""
    setting = LOADERS.get(trainer, "num_workers of the data loader")
    says = f"more processes that load data ({setting}), or data on a local disk"
    return unpriced((), without(case, cause), says)


def of_clocks(case: Case, cause: Cause) -> Remedy:
    """The step at full clocks, and the query that shows them."""
    step_s = without(case, cause)
    is_amd = case.plan is not None and case.plan.cluster.hardware.is_amd
    query = "amd-smi metric --clock --power --temperature" if is_amd else "nvidia-smi -q -d CLOCK,PERFORMANCE,POWER"
    says = f"look at clocks and limits while it runs ({query})"
    return unpriced((), step_s, says if step_s is None else f"{says}; at full clocks")


def of_garbage(case: Case, cause: Cause) -> Remedy:
    """Collections of Python's garbage on all ranks at once, at steps that are counted."""
    return _set(case, without(case, cause), r"gc", "garbage collected by all ranks at the same steps")


def of_checkpoints(case: Case, cause: Cause) -> Remedy:
    """Checkpoints written beside the training."""
    return _set(case, None, r"async", "checkpoints written beside the training")


def _set(case: Case, step_s: float | None, pattern: str, says: str) -> Remedy:
    """A habit of good runs, by the settings that `plan export` writes for every plan of the trainer."""
    now = running(case)
    lines = settings_about(case.plan, now, pattern) if case.plan is not None and now is not None else ()
    return unpriced((), step_s, f"{says} ({', '.join(lines)})" if lines else says)


def of_fragments(case: Case, cause: Cause) -> Remedy:
    """An allocator whose segments grow, which leaves no gaps between blocks of different sizes."""
    plan = case.plan
    if plan is not None and plan.cluster.hardware.is_amd:
        says = "needs ROCm 7 and a torch of 2026; older ones say that it is not supported, and go on without"
        return Remedy(options=("PYTORCH_HIP_ALLOC_CONF=expandable_segments:True",), says=says)
    options, says = ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",), "segments grow in place of new ones"
    if plan is not None and (plan.runtime_spec.cuda_graphs or plan.runtime_spec.graphed_modules):
        # NCCL would register buffers of graphs, which have no fixed address then
        return Remedy(options=(*options, "NCCL_GRAPH_REGISTER=0"), says=says)
    return Remedy(options=options, says=says)


def of_leak(case: Case, cause: Cause) -> Remedy:
    """The recording that names what is kept, and the steps until the memory is full."""
    series = [s for s in case.observation.memory_series if len(s.steps) > 1 and s.steps[-1] > s.steps[0]]
    # what is allocated says it; what is reserved grows with it in leaps
    allocated = [s for s in series if s.kind == "allocated"]
    worst = max(allocated or series, key=_growth_bytes, default=None)
    says = "record torch.cuda.memory._record_memory_history() for a few steps and plan observe the snapshot; tensors "
    says += "kept from step to step (losses without .item()) are the rule"
    rate = 0.0 if worst is None else _growth_bytes(worst)
    if worst is None or case.plan is None or rate <= 0:
        return Remedy(options=(), says=says)
    left = case.plan.cluster.hardware.memory_bytes - worst.num_bytes[-1]
    return Remedy(options=(), says=f"{says}; the GPU is full after {max(0.0, left) / rate:,.0f} more steps")


def _growth_bytes(series: MemorySeries) -> float:
    return (series.num_bytes[-1] - series.num_bytes[0]) / (series.steps[-1] - series.steps[0])


def unpriced(options: tuple[str, ...], step_s: float | None, says: str) -> Remedy:
    """A remedy against what is no choice of the job: the step without the cause."""
    return Remedy(options=options, step_s=step_s, is_priced=False, says=says)


def without(case: Case, cause: Cause) -> float | None:
    """Seconds of the step less those of the cause: no remedy brings a run below what it is held against."""
    measured_s, prediction = case.observation.step_s, case.prediction
    if measured_s is None or cause.seconds is None:
        return None
    least_s = 0.0 if prediction is None else prediction.step_s
    return max(measured_s - cause.seconds, min(least_s, measured_s))


def _plan_file(case: Case) -> str | None:
    """The file of the plan that the run is held against; None where options or the log's arguments are the plan."""
    prediction = case.prediction
    if prediction is None or prediction.kind != "plan" or prediction.source in _NOT_FILES:
        return None
    return prediction.source


def _solved(longer_s: Callable[[float], float], seconds: float, most: float) -> float | None:
    """The factor between 1 and `most` that makes a step longer by `seconds`; None where none does."""
    if seconds <= 0 or longer_s(most) < seconds:
        return None
    low, high = 1.0, most
    for _ in range(_TRIES):
        middle = (low + high) / 2
        low, high = (middle, high) if longer_s(middle) < seconds else (low, middle)
    return (low + high) / 2
