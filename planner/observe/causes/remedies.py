"""Remedies against causes: a row for each cause, with the changes of the job that may help, priced for this job.

Most causes are answered by switches and layouts near the run's own, of which the fastest that the trainer's rules allow
and that fits is taken. Others are of a machine, and answered by the step without them and by what to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from planner.layout.candidate import Candidate
from planner.layout.recipe import under
from planner.observe.case import Case
from planner.observe.observation import Cause, Remedy
from planner.observe.remedy import machine
from planner.observe.remedy.change import options_between, runtime_of
from planner.observe.remedy.estimate import LEAST_GAIN, best_of, expected_step_s
from planner.observe.remedy.machine import uneven
from planner.observe.remedy.moves import (
    Move,
    acts,
    after,
    consented,
    dropping,
    fewer_expert_ranks,
    fewer_recomputed,
    interleaved,
    micro_batch,
    schedules,
    sharded,
    switch,
    where,
)
from planner.observe.remedy.running import running, states_switches
from planner.observe.remedy.written import settings_between
from planner.trainers.stated import switched
from planner.trainers.switches import SWITCHES, Value

SWITCHES_OF: Mapping[str, tuple[str, ...]] = {
    "no_ep_overlap": ("ep_overlap", "dispatcher", "shared_expert_overlap"),
    "exposed_dp": ("overlap_grad_reduce", "overlap_param_gather"),
    "exposed_tp": ("tp_comm_overlap", "async_tp"),
    "exposed_cp": ("cp_comm_type",),
    "exposed_pp": ("p2p_overlap",),
    "unfused_kernels": (
        "compile", "cross_entropy_fusion", "activation_fusion", "gradient_accumulation_fusion", "grouped_gemm",
        "sync_free_moe",
    ),
    "attention_kernel": ("attention_kernel", "flash_attention", "deterministic"),
    "host_bound": ("cuda_graph", "compile", "sync_free_moe", "grouped_gemm"),
    "bubble": ("p2p_overlap",),
}  # fmt: skip
"""The switches against each cause."""
_LAYOUTS: Mapping[str, tuple[Move, ...]] = {
    "no_ep_overlap": (
        after(switch("ep_overlap"), switch("cuda_graph")),
        after(interleaved, switch("ep_overlap")),
        after(interleaved, switch("ep_overlap"), switch("cuda_graph")),
    ),
    "exposed_dp": (sharded, where(lambda now: int(now.shape.dp) > 1, micro_batch(larger=False))),
    "exposed_tp": (where(lambda now: int(now.shape.tp) > 1, micro_batch(larger=True)),),
    "host_bound": (micro_batch(larger=True),),
    "bubble": (schedules, micro_batch(larger=False)),
    "recompute_unneeded": (fewer_recomputed,),
    "expert_imbalance": (fewer_expert_ranks,),
}
"""The layouts against each cause, near the run's own."""
_CONSENTED: Mapping[str, tuple[Move, ...]] = {
    "host_bound": (consented("cuda_graph"),),
    "unfused_kernels": (consented("fused_experts"),),
    "expert_imbalance": (dropping,),
}
"""Changes against each cause of what is trained or checked: offered where nothing else helps."""
_OTHERS: Mapping[str, Callable[[Case, Cause], Remedy | None]] = {
    "straggler_rank": machine.of_straggler,
    "slow_link": machine.of_link,
    "expert_imbalance": machine.of_imbalance,
    "data_stall": machine.of_data,
    "clocks": machine.of_clocks,
    "fragmentation": machine.of_fragments,
    "leak": machine.of_leak,
    "checkpoint_stall": machine.of_checkpoints,
    "garbage_collection": machine.of_garbage,
}


def remedy_for(case: Case, cause: Cause) -> Remedy | None:
    """The remedy with the step that it would give (`remedy.estimate`); None where nothing is known to help.

    A cause named `recipe` is about the switch that its `where` names.
    """
    names = (cause.where,) if cause.name == "recipe" and cause.where in SWITCHES else SWITCHES_OF.get(cause.name, ())
    now = running(case)
    if now is not None and cause.name == "expert_imbalance":
        now = uneven(now, cause)
    if now is not None:
        found = _changed(case, now, (switch(*names), *_LAYOUTS.get(cause.name, ()))) or _lacking(case, now, names)
        found = found or _changed(case, now, _CONSENTED.get(cause.name, ()))
        if found is not None:
            return found
    other = _OTHERS.get(cause.name)
    return None if other is None else other(case, cause)


def _changed(case: Case, now: Candidate, moves: tuple[Move, ...]) -> Remedy | None:
    """The best of some changes of the layout that runs."""
    best = best_of(now, (other for move in moves for other in move(now)))
    if best is None:
        return None
    step_s, options = expected_step_s(case, now, best), options_between(now, best)
    changes = _consents(now, best)
    words = ("--allow", ",".join(changes), *options) if changes else options
    why = f" (changes {' and '.join(dict.fromkeys(changes.values()))})" if changes else ""
    return Remedy(options=words, step_s=step_s, says=f"{_how(case, now, best)}{why}")


def _consents(now: Candidate, best: Candidate) -> dict[str, str]:
    """The changed switches that somebody has to agree to, and what each of them changes."""
    before, after = runtime_of(now), runtime_of(best)
    values = {name: (row.value_of(before), row.value_of(after)) for name, row in SWITCHES.items() if row.consent}
    return {
        name: SWITCHES[name].consent[new]
        for name, (old, new) in values.items()
        if new != old and new in SWITCHES[name].consent
    }


def _lacking(case: Case, now: Candidate, names: tuple[str, ...]) -> Remedy | None:
    """The switch that the plan has on and that the run seems to lack, where the log does not state it."""
    if case.plan is None or states_switches(case):
        return None
    off = [under(now, switched(now.pricing.runtime, {name: plain})) for name, plain in _on(now, names)]
    worst = max(off, key=lambda other: other.step_s, default=now)
    if worst.step_s < now.step_s * (1 + LEAST_GAIN):
        return None
    step_s = expected_step_s(case, worst, now)
    says = f"the plan has it on, and the log does not say so; {_how(case, worst, now)}"
    return Remedy(options=options_between(worst, now), step_s=step_s, says=says)


def _on(now: Candidate, names: tuple[str, ...]) -> list[tuple[str, Value]]:
    """The switches that are not at their plainest value, with that value."""
    plain = {name: next(iter(SWITCHES[name].values)) for name in names if acts(now, name)}
    return [(name, value) for name, value in plain.items() if SWITCHES[name].value_of(runtime_of(now)) != value]


def _how(case: Case, before: Candidate, after: Candidate) -> str:
    """The change in the trainer's own words, or in the planner's where no exporter has any."""
    settings = settings_between(case.plan, before, after) if case.plan is not None else ()
    gone = [line for line in settings if line.startswith(_GONE)]
    come = [line for line in settings if line not in gone][:_MOST_SETTINGS]
    words = [f"with {', '.join(come)}"] if come else []
    words += [", ".join(gone[:_MOST_SETTINGS])] if gone else []
    return " and ".join(words) or f"with {' '.join(options_between(before, after))}"


_GONE = "without "
_MOST_SETTINGS = 4
"""Most lines of a trainer's files in a sentence."""
