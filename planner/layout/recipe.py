"""The recipe of a candidate: the value of each switch that acts on it, and the same layout under another recipe."""

from __future__ import annotations

from dataclasses import replace

from planner.layout.candidate import Candidate
from planner.schedule.orders import SCHEDULES
from planner.specs.cluster import ClusterSpec
from planner.specs.model import ModelSpec
from planner.specs.training import Recompute
from planner.trainers.load import switches_of
from planner.trainers.rules.recipe import Setting, has_effect
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import consent_of
from planner.trainers.switches import SWITCHES, Value


def recipe_of(candidate: Candidate) -> dict[str, Value]:
    """The value of each switch of the trainer that has an effect on a candidate."""
    setting = setting_of(candidate)
    runtime = settled(candidate.pricing.runtime, candidate.pricing.cluster, candidate.pricing.model)
    return {name: SWITCHES[name].value_of(runtime) for name in switches_of(runtime) if has_effect(name, setting)}


def under(candidate: Candidate, runtime: RuntimeSpec) -> Candidate:
    """The same layout under another runtime, in its named order if it has one that was made to measure."""
    runtime = runtime.for_schedules(SCHEDULES[candidate.schedule].splits_backward)
    named = candidate if candidate.made_order is None else replace(candidate, made_order=None)
    return named.priced_as(replace(candidate.pricing, runtime=runtime))


def setting_of(candidate: Candidate) -> Setting:
    """The things that a recipe's rules look at, of one candidate."""
    pricing, split = candidate.pricing, candidate.split
    recompute: Recompute = "full" if any(map(any, split.recomputed)) else split.base
    modules = pricing.selective_modules if split.base == "selective" else ()
    return Setting(
        pricing.model, pricing.cluster, pricing.training, pricing.runtime, candidate.shape, recompute, modules
    )


def settled(runtime: RuntimeSpec, cluster: ClusterSpec, model: ModelSpec) -> RuntimeSpec:
    """The runtime with the name of the dispatcher that its GPUs' links ask for: alltoall where its version lacks it, or
    nobody is known to gain from it on the network.

    On AMD's GPUs that is alltoall, and no user buffers hide the exchanges of tensor parallelism. Nor do they where GPUs
    reach each other only through host memory.
    """
    if (cluster.hardware.is_amd or cluster.hardware.is_through_host) and "tp_comm_overlap" in switches_of(runtime):
        runtime = runtime.model_copy(update=SWITCHES["tp_comm_overlap"].fields_of(False) or {})
    if runtime.dispatcher or not runtime.sends_tokens_once or model.moe is None:
        return runtime
    if cluster.hardware.is_amd:
        return runtime.model_copy(update=SWITCHES["dispatcher"].fields_of("alltoall") or {})
    if cluster.hardware.architecture not in ("ampere", "hopper", "blackwell"):
        return runtime
    asked, has = "hybridep" if cluster.is_rack else "deepep", switches_of(runtime).get("dispatcher", ())
    found = asked if (asked in has or not has) and not consent_of("dispatcher", asked, cluster.hardware) else "alltoall"
    return runtime.model_copy(update=SWITCHES["dispatcher"].fields_of(found) or {})
