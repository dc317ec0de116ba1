"""Mechanisms that one rank or a log shows by itself: kernels, host, data, the pipeline, memory, what stands still."""

from __future__ import annotations

from statistics import median

import numpy as np

from planner.observe.gap.account import (
    ATTENTION,
    BUBBLE,
    HOST_GAPS,
    MEMORY_BOUND,
    OTHER,
    PIPELINE,
    PP_LINK_RATE,
    PRODUCTS,
    Account,
    in_seconds,
)
from planner.observe.gap.evidence import Finding, RunFiles, data_wait_s, family_s, rank_name
from planner.observe.observation import MemorySeries
from planner.observe.steady import slope_of
from planner.observe.traces.results import HOST
from planner.physics.passes import COMM_GROUPS
from planner.specs.units import GIB, MIB

GAPS, GAPS_UNPRICED = 0.03, 0.08
"""Shares of a step from which host gaps are worth a word: beside a price of them, and where nothing says the usual."""
DATA_SHARE, DATA_NOISE = 0.03, 0.008
ERROR_OF_PRICES, ERROR_OF_RUNS, ERROR_ON_HOST = 0.05, 0.015, 0.1
"""Error of the seconds of one family of kernels: priced, from run to run of one job, and on a CPU."""
LEAST_STEPS, LEAST_ROWS = 20, 6
_COMPUTING = (PRODUCTS, ATTENTION, MEMORY_BOUND, OTHER, HOST_GAPS)


def host_gaps(files: RunFiles) -> Finding | None:
    """Time in which no rank's GPU has work because its host has not launched any; waits for data are not counted."""
    gpus = [one for one in files.accounts if one.rank.report.device != HOST]
    if not gpus:
        return None
    known = [(one.found.parts[HOST_GAPS], one.expected.parts[HOST_GAPS] if one.expected else 0.0) for one in gpus]
    found_s, due_s = min(known, key=lambda pair: pair[0] - pair[1])
    found_s = max(0.0, found_s - files.profiled_extra_s)
    share = GAPS if any(one.expected for one in gpus) else GAPS_UNPRICED
    if found_s - due_s < (share + 2 * share / 3) * files.step_s + 0.3 * due_s:
        return None
    held = f", {in_seconds(due_s)} expected" if due_s else ""
    says = f"GPUs wait {in_seconds(found_s)} of a step for their hosts to launch work{held}"
    return Finding(says, found_s - due_s)


def data_waits(files: RunFiles) -> Finding | None:
    """Annotations of the loader that cover gaps, or the trainer's own timer of its batches."""
    worst = max(files.ranks, key=lambda rank: rank.mean(data_wait_s), default=None)
    waited_s = 0.0 if worst is None else worst.mean(data_wait_s)
    if worst is not None and waited_s > (DATA_SHARE + DATA_NOISE) * files.wall_s:
        others = [rank.mean(data_wait_s) for rank in files.ranks if rank is not worst]
        where = rank_name(worst) if others and max(others) < 0.5 * waited_s else ""
        return Finding(f"{rank_name(worst)} waits {in_seconds(waited_s)} of a step for data", waited_s, where)
    timed_s = files.case.observation.data_s
    if timed_s is None or timed_s < (DATA_SHARE + DATA_NOISE) * files.step_s:
        return None
    return Finding(f"the trainer's timer of batches shows {in_seconds(timed_s)} of a step", timed_s)


def _kernel_ratios(files: RunFiles) -> tuple[tuple[float, float, float], float] | None:
    """How many times as long as expected products, attention and memory-bound kernels take, and the error of that."""
    rows = []
    for one in files.accounts:
        if one.expected is not None:
            is_s, due_s = (
                [side.parts[name] for name in (PRODUCTS, ATTENTION, MEMORY_BOUND)] for side in (one.found, one.expected)
            )
            if min(due_s) > 0.002 * sum(due_s) and min(is_s) > 0:
                rows.append([a / b for a, b in zip(is_s, due_s, strict=True)])
    if not rows:
        return None
    products, attention, memory_bound = (median(column) for column in zip(*rows, strict=True))
    error = ERROR_ON_HOST if files.on_host else ERROR_OF_RUNS if files.earlier else ERROR_OF_PRICES
    return (products, attention, memory_bound), error


def _extra_s(files: RunFiles, part: str, ratio: float) -> float:
    return (1 - 1 / ratio) * median(one.found.parts[part] for one in files.accounts)


def slow_attention(files: RunFiles) -> Finding | None:
    """Attention in products and a softmax of its own, or in a kernel that is slow beside the products."""
    if files.on_gpus:
        softmax_s, fused_s, compute_s = (
            median(rank.middle(of) for rank in files.on_gpus)
            for of in (
                lambda step: family_s(step, ("softmax",)),
                lambda step: family_s(step, ("attention",)),
                lambda step: step.compute_s,
            )
        )
        if softmax_s - fused_s > 0.025 * compute_s:
            fused = f"those of fused attention {in_seconds(fused_s)}"
            return Finding(f"kernels of softmax take {in_seconds(softmax_s)} of a step, {fused}", softmax_s)
    known = _kernel_ratios(files)
    if known is None:
        return None
    (products, attention, _), error = known
    extra_s = _extra_s(files, ATTENTION, attention / products)
    if attention / products < 1 + 8 * error or extra_s < 0.03 * files.step_s:
        return None
    return Finding(f"attention takes {attention:.2f} times what is expected, products {products:.2f} times", extra_s)


def slow_small_kernels(files: RunFiles) -> Finding | None:
    """Kernels that memory bounds slower than expected beside the products: fused ones make one of several."""
    known = None if files.has_experts else _kernel_ratios(files)  # uneven experts have more of them
    if known is None:
        return None
    (products, _, memory_bound), error = known
    extra_s = _extra_s(files, MEMORY_BOUND, memory_bound / products)
    if memory_bound / products < 1 + 9 * error or extra_s < 0.03 * files.step_s:
        return None
    says = (
        f"norms, activations and copies take {memory_bound:.2f} times what is expected, products {products:.2f} times"
    )
    return Finding(says, extra_s)


def low_clocks(files: RunFiles) -> Finding | None:
    """Clocks that the files print, lower than the earlier run's; or all its kernels slower by one factor."""
    earlier, now = files.case.earlier, files.case.observation.clock_mhz
    then = earlier.observation.clock_mhz if earlier else None
    if now and then and now < 0.97 * then:
        return Finding(f"GPUs run at {now:,.0f} MHz, {then:,.0f} in the earlier run", (1 - now / then) * files.step_s)
    known = _kernel_ratios(files) if files.earlier else None
    if known is None:
        return None
    (products, attention, _), error = known
    least = min(products, attention)
    if least < 1 + 3 * error:
        return None
    extra_s = _extra_s(files, PRODUCTS, least) + _extra_s(files, ATTENTION, least)
    return Finding(f"products take {products:.2f} and attention {attention:.2f} times the earlier run's", extra_s)


def standing_stages(files: RunFiles) -> Finding | None:
    """Stages that stand still longer than the order of the passes says, where these take as long as they do."""
    if files.size("pp") in (None, 1):
        return None
    known = [
        (
            _pipeline_s(one.found),
            _pipeline_s(one.expected) * _at_least_one(_passes_s(one.found), _passes_s(one.expected)),
        )
        for one in files.accounts
        if one.expected is not None
    ] or _pipeline_timers(files)
    if not known:
        return None
    found_s, due_s = min(known, key=lambda pair: pair[0] - pair[1])
    if found_s - due_s < 0.05 * files.step_s + 0.2 * due_s:
        return None
    says = f"stages stand still for {in_seconds(found_s)} of a step, {in_seconds(due_s)} by their order"
    return Finding(says, found_s - due_s)


def _pipeline_s(account: Account) -> float:
    return sum(account.parts.get(name, 0.0) for name in (BUBBLE, PP_LINK_RATE, PIPELINE))


def _passes_s(account: Account) -> float:
    inside = (account.exchanges[group] for group in COMM_GROUPS if group in account.exchanges)
    return sum(account.parts.get(name, 0.0) for name in _COMPUTING) + sum(one.busy_s - one.hidden_s for one in inside)


def _at_least_one(found_s: float, due_s: float) -> float:
    """How many times as long passes take: the stages that wait for them wait so many times as long."""
    return max(1.0, found_s / due_s) if due_s > 0 else 1.0


def _pipeline_timers(files: RunFiles) -> list[tuple[float, float]]:
    """Seconds in which the busiest rank waits for other stages, by the timer around all passes."""
    timers = {timer.name: timer for timer in files.case.observation.timers}
    prediction, passes = files.case.prediction, ("forward-compute", "backward-compute")
    if (
        not all(name in timers for name in ("forward-backward", *passes))
        or prediction is None
        or prediction.kind == "run"
    ):
        return []
    due_s = prediction.breakdown.get("bubble_s", 0.0) + prediction.breakdown.get("pp_comm_s", 0.0)
    passes_s = sum(timers[name].max_s for name in passes)
    inside = ("compute_s", "tp_comm_s", "cp_comm_s", "ep_comm_s")
    planned_s = sum(prediction.breakdown.get(name, 0.0) for name in inside)
    return [(timers["forward-backward"].max_s - passes_s, due_s * _at_least_one(passes_s, planned_s))]


def fragments(files: RunFiles) -> Finding | None:
    """Allocations that found no block until the cache was freed, or that failed although enough bytes lay free."""
    observation, recorded = files.case.observation, files.case.recorded
    broken = [s.out_of_memory for s in (recorded.snapshots if recorded else ()) if s.out_of_memory]
    for oom in broken:
        if oom.fragmented:
            free = f"{oom.inactive_bytes / GIB:.1f} GiB lay reserved and free"
            says = f"{oom.requested_bytes / GIB:.1f} GiB were refused while {free}"
            return Finding(f"{says}, {oom.largest_free_block_bytes / GIB:.1f} GiB in one block")
    for one in observation.failed_allocations:
        if one.unused_bytes is not None and one.unused_bytes >= one.requested_bytes:
            says = (
                f"{one.requested_bytes / GIB:.2f} GiB were refused while {one.unused_bytes / GIB:.1f} GiB lay reserved"
            )
            return Finding(f"{says} and free")
    if (count := observation.num_alloc_retries or 0) > 1:
        says = f"the allocator freed its cache and tried again {count:,} times in {observation.num_steps:,} steps"
        return Finding(says)
    return None


def growing_memory(files: RunFiles) -> Finding | None:
    """Memory that grows from step to step, in the second half of the run as in the first."""
    rows = [row for row in files.case.observation.memory_series if len(row.num_bytes) >= LEAST_ROWS]
    return next((found for row in rows if (found := _growth(row)) is not None), None)


def _growth(row: MemorySeries) -> Finding | None:
    """The median slope of all pairs (Theil and Sen) over both halves, against the noise around it."""
    steps, sizes = np.asarray(row.steps, float), np.asarray(row.num_bytes, float)
    half = len(steps) // 2
    slopes = [slope_of(steps[part], sizes[part]) for part in (slice(0, half + 1), slice(half, None))]
    slope, length = slope_of(steps, sizes), float(steps[-1] - steps[0])
    straight = sizes - slope * (steps - steps[0])
    noise = 1.4826 * float(np.median(np.abs(straight - np.median(straight))))
    # what warms up grows in the first half alone
    steady = min(slope * length, 2 * min(slopes) * length)
    if steady < 1.25 * max(0.03 * float(np.median(sizes)), 3 * noise, MIB):
        return None
    size = f"{slope * length / GIB:.2f} GiB" if slope * length > 0.1 * GIB else f"{slope * length / MIB:.1f} MiB"
    where = "" if row.rank is None else f"rank {row.rank}"
    whose = f" of {where}" if where else ""
    return Finding(f"{row.kind} memory{whose} grows by {size} over {int(length):,} steps, in both halves", None, where)


def out_of_memory(files: RunFiles) -> Finding | None:
    """Errors of allocations that failed, as the log or a snapshot has them."""
    observation, recorded = files.case.observation, files.case.recorded
    broken = [s.out_of_memory for s in (recorded.snapshots if recorded else ()) if s.out_of_memory]
    if broken:
        return Finding(f"an allocation of {broken[-1].requested_bytes / GIB:.2f} GiB failed")
    if failed := observation.failed_allocations:
        one = max(failed, key=lambda each: each.requested_bytes)
        whose = "" if one.rank is None else f" of rank {one.rank}"
        parts = [f"an allocation of {one.requested_bytes / GIB:.2f} GiB failed"]
        if one.allocated_bytes is not None:
            parts.append(f"torch held {one.allocated_bytes / GIB:.1f} GiB")
        if one.unused_bytes is not None:
            parts.append(f"{one.unused_bytes / GIB:.1f} GiB reserved beside them")
        prediction = files.case.prediction
        if prediction is not None and prediction.peak_memory_bytes:
            parts.append(f"{prediction.peak_memory_bytes / GIB:.1f} GiB were predicted on the fullest rank")
        return Finding(", ".join(parts) + whose, None, whose.removeprefix(" of "))
    if observation.num_ooms:
        return Finding(f"{observation.num_ooms:,} allocations failed")
    return None


def hung_collective(files: RunFiles) -> Finding | None:
    """A collective that began and never ended, by a flight recorder's dumps or the watchdog's lines in the log."""
    flight = files.case.recorded.flight_recorder if files.case.recorded else None
    if flight is not None and any(group.outstanding or group.mismatches for group in flight.groups):
        return Finding(flight.verdict)
    hung = files.case.observation.hung_collectives
    if not hung:
        return None
    first = min(hung, key=lambda one: one.sequence)
    ranks = ", ".join(str(one.rank) for one in hung if one.sequence == first.sequence and one.rank is not None)
    size = f" of {first.num_elements:,} elements" if first.num_elements else ""
    waited = f" for {first.seconds:,.0f} s" if first.seconds else ""
    what = f"{first.collective or 'the collective'} number {first.sequence}{size}"
    return Finding(f"rank {ranks or '?'} waited in {what}{waited}, which never ended")


def saving(files: RunFiles) -> Finding | None:
    """Time that checkpoints take: between steps, in them, and in the step after them."""
    observation, wall = files.case.observation, files.case.observation.wall
    if observation.num_steps < LEAST_STEPS:
        return None
    extra_s = _outliers_s(files, "checkpoint") + (wall.checkpoint_s if wall else 0.0) / observation.num_steps
    if extra_s < 0.04 * files.step_s:
        return None
    share = extra_s / files.step_s
    return Finding(f"checkpoints take {in_seconds(extra_s)} of a mean step, {share:.1%} beside the median one", extra_s)


def collecting(files: RunFiles) -> Finding | None:
    """Steps that the log's garbage collection makes longer."""
    extra_s = _outliers_s(files, "periodic", "garbage")
    if files.case.observation.num_steps < LEAST_STEPS or extra_s < 0.0125 * files.step_s:
        return None
    return Finding(f"steps in which garbage is collected take {in_seconds(extra_s)} of a mean step", extra_s)


def _outliers_s(files: RunFiles, kind: str, word: str = "") -> float:
    """Seconds of a mean step that slow steps of one kind take, by name or by what the log says of them."""
    observation = files.case.observation
    rows = [row for row in observation.outliers if row.kind == kind and word in row.likely]
    return sum(row.extra_s for row in rows) / max(1, observation.num_steps)
