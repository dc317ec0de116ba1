"""Remedies against causes: a row for each cause, with the changes of the job that may help, priced for this job.

Most causes are answered by switches and layouts near the run's own, of which the fastest that the trainer's rules allow
and that fits is taken. Others are of a machine, and answered by the step without them and by what to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from planner.export.common.spelling import spelling_of
from planner.export.megatron.switches import SWITCH_OPTIONS
from planner.layout.candidate import Candidate
from planner.layout.recipe import under
from planner.observe.case import Case
from planner.observe.observation import Cause, Remedy
from planner.observe.remedy import machine
from planner.observe.remedy.change import options_between, runtime_of, switches_between
from planner.observe.remedy.estimate import LEAST_GAIN, best_of, expected_step_s
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
from planner.observe.remedy.recipe_gap import CAUSE_OF
from planner.observe.remedy.running import restored, running
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
_AS_SEEN: Mapping[str, Callable[[Candidate, Cause], Candidate | None]] = {
    "expert_imbalance": machine.uneven,
    "host_bound": lambda now, cause: machine.slow_host(now, cause) or now,
}
"""The layout as a cause makes it, under which changes against it are priced."""
_ADVICE = {
    "no_ep_overlap": "exchanges of experts beside another micro-batch's products",
    "exposed_dp": "exchanges of gradients and weights behind computing",
    "host_bound": "CUDA graphs, torch.compile, larger micro-batches, or free cores on the hosts",
    "unfused_kernels": "fused kernels, or torch.compile",
    "attention_kernel": "a fused kernel for attention",
    "bubble": "more chunks on a rank, or more micro-batches",
    "recompute_unneeded": "fewer layers recomputed",
}
"""Advice in words, where no plan is known that could be changed."""
_ALSO = {"expert_imbalance": machine.BALANCE}
"""Advice beside a change of the layout, which has no price."""
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
    if now is not None and cause.name in _AS_SEEN:
        now = _AS_SEEN[cause.name](now, cause)
    if now is not None:
        back: Move = partial(restored, case, names)
        moves = (back, switch(*names), *_LAYOUTS.get(cause.name, ()))
        found = _changed(case, now, moves) or _lacking(case, now, _own(cause.name, names))
        found = found or _changed(case, now, _CONSENTED.get(cause.name, ()))
        if found is not None:
            also = _ALSO.get(cause.name)
            return found if also is None else found.model_copy(update={"says": f"{also}, or {found.says}"})
    other = _OTHERS.get(cause.name)
    if other is not None:
        return other(case, cause)
    if case.candidate is not None or cause.name not in _ADVICE:
        return None
    return machine.unpriced((), machine.without(case, cause), _advice(case, cause))


def _advice(case: Case, cause: Cause) -> str:
    """The advice, with the options of Megatron-LM where the log is of it."""
    words, own = _ADVICE[cause.name], _own(cause.name, SWITCHES_OF.get(cause.name, ()))
    if not (case.observation.facts.trainer or "").startswith("megatron"):
        return words
    spelled = (spelling_of(SWITCH_OPTIONS, name, True, "") or {} for name in own)
    options = [option for settings in spelled for option in settings]
    return f"{words} ({' '.join(options)})" if options else words


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
    changed = switches_between(now, best).items()
    return {name: SWITCHES[name].consent[value] for name, value in changed if value in SWITCHES[name].consent}


def _own(cause: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The switches whose want is the cause itself, without those that merely help against it."""
    return tuple(name for name in names if CAUSE_OF.get(name, cause) == cause)


def _lacking(case: Case, now: Candidate, names: tuple[str, ...]) -> Remedy | None:
    """The switches that the plan has on and that the run seems to lack, where the log does not name them."""
    if case.plan is None:
        return None
    off = under(now, switched(now.pricing.runtime, _plain(case, now, names)))
    # at most what the run is held against comes back
    step_s = max(expected_step_s(case, off, now), now.step_s, case.prediction.step_s if case.prediction else 0.0)
    if max(off.step_s, now.step_s) < now.step_s * (1 + LEAST_GAIN):
        return None
    if case.observation.step_s is not None and step_s > case.observation.step_s * (1 - LEAST_GAIN):
        return None
    says = f"the plan has it so, and the log does not say it: {_how(case, off, now)}"
    return Remedy(options=options_between(off, now), step_s=step_s, says=says)


def _plain(case: Case, now: Candidate, names: tuple[str, ...]) -> dict[str, Value]:
    """The plainest values of switches that act on the layout, have another value, and are not named by the log."""
    unsaid = [name for name in names if acts(now, name) and name not in case.observation.facts.stated_switches]
    plain = {name: next(iter(SWITCHES[name].values)) for name in unsaid}
    return {name: value for name, value in plain.items() if SWITCHES[name].value_of(runtime_of(now)) != value}


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
