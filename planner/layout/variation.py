"""Queries that change one input of a layout and price it again: its recipe, an assumption, a switch that nobody stated.

Recipe: the value of each switch that acts on a candidate, and the same layout under another one.

Assumptions: each is changed by itself, for the best layout and for the few behind it. A search proves its layout best
under one set of assumptions. The layouts next to it are often within a percent, and one that overlaps less, or crosses
the network less, loses less where an assumption fails.

Switches that a run does not say: each likely value has a share (`likely:` in the trainer's file), one switch whatever
the others have. The step that goes with these values is missed as that of a run that says all: by a lognormal factor,
within the half-width w in 90% of published runs. The interval is that of a run that says all, widened to the 7% and
93% quantiles of this mixture.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import field, replace
from typing import Any

from planner.answer import AS_PLANNED, PricedLayout, RobustStep, UnsaidSwitch
from planner.errors import SpecError
from planner.layout.candidate import Candidate, price_together
from planner.layout.confidence import (
    Choice,
    deciding_fact,
    memory_width,
    mixture_interval,
    width_terms,
    with_other_memory,
)
from planner.months.losses import with_sustained
from planner.physics.passes import TEXT_TOKENS
from planner.physics.pricing import Pricing
from planner.record import record
from planner.schedule.orders import SCHEDULES
from planner.specs.base import LEAST_RATE
from planner.specs.cluster import ClusterSpec, tiers_text
from planner.specs.model import ModelSpec
from planner.specs.training import AdapterSpec, DocumentLength, Recompute
from planner.trainers.generations import imbalance_of, with_likely
from planner.trainers.load import likely_of, switches_of
from planner.trainers.rules.facts import is_tuning
from planner.trainers.rules.recipe import Setting, broken_recipe_rules, has_effect, rules_for, takes
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import consent_of, own_runtime, switched
from planner.trainers.switches import EP_OVERLAP, SWITCHES, Value, read_recipe, written


def recipe_of(candidate: Candidate) -> dict[str, Value]:
    """The value of each switch of the trainer that has an effect on a candidate."""
    setting = setting_of(candidate)
    runtime = settled(candidate.pricing.runtime, candidate.pricing.cluster, candidate.pricing.model)
    return {name: SWITCHES[name].value_of(runtime) for name in switches_of(runtime) if has_effect(name, setting)}


def under(candidate: Candidate, runtime: RuntimeSpec) -> Candidate:
    """The same layout under another runtime, in its named order if it has one that was made to measure."""
    runtime = runtime.for_schedules(SCHEDULES[candidate.schedule].splits_backward)
    return candidate.named.priced_as(replace(candidate.pricing, runtime=runtime))


def setting_of(candidate: Candidate) -> Setting:
    """The things that a recipe's rules look at, of one candidate."""
    pricing, split = candidate.pricing, candidate.split
    modules = pricing.selective_modules if split.base == "selective" else ()
    return Setting(
        pricing.model, pricing.cluster, pricing.training, pricing.runtime, candidate.shape, split.recompute, modules
    )


def settled(runtime: RuntimeSpec, cluster: ClusterSpec, model: ModelSpec) -> RuntimeSpec:
    """The runtime with the name of the dispatcher that its GPUs' links ask for: alltoall where its version lacks it,
    its GPUs run none, or nobody is known to gain from it on the network.

    On AMD's GPUs no user buffers hide the exchanges of tensor parallelism. Nor do they where GPUs reach each other only
    through host memory.
    """
    if (cluster.hardware.is_amd or cluster.hardware.is_through_host) and "tp_comm_overlap" in switches_of(runtime):
        runtime = runtime.model_copy(update=SWITCHES["tp_comm_overlap"].fields_of(False) or {})
    if runtime.dispatcher or not runtime.sends_tokens_once or model.moe is None:
        return runtime
    asked, has = "hybridep" if cluster.is_rack else "deepep", switches_of(runtime).get("dispatcher", ())
    runs = cluster.hardware.architecture in ("ampere", "hopper", "blackwell") and (asked in has or not has)
    found = asked if runs and not consent_of("dispatcher", asked, cluster.hardware) else "alltoall"
    return runtime.model_copy(update=SWITCHES["dispatcher"].fields_of(found) or {})


STRAGGLER, IMBALANCE, NETWORK = 0.1, 0.5, 0.5
"""Fractions by which assumptions are changed: a slow rank, a full expert, a slow network."""
TOLD_FRACTION = 0.02
"""Least change of the step, as a fraction, for which an assumption is reported."""


@record
class Variation:
    """One input changed: of the training, the cluster or the trainer, a size of the layout, or how it recomputes."""

    says: str
    options: tuple[str, ...]
    """Words of the command line with which a user makes the same change."""
    training: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the training with their new values. Likewise below."""
    shape: Mapping[str, int] = field(default_factory=dict)
    runtime: RuntimeSpec | None = None
    cluster: ClusterSpec | None = None
    mode: Recompute | None = None
    modules: tuple[str, ...] = ()
    """Modules that selective recompute means then; empty for those of before."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Limits of the search with their new values."""
    gives_room: bool = False
    """True if other layouts than those known may become possible."""
    replaces: str = ""
    """The value that the option had; empty if it had none."""
    changes: str = ""
    """The thing that it changes beside bytes and seconds: numerics, the data, what is trained; empty if none."""
    name: str = ""

    def of(self, pricing: Pricing) -> Pricing:
        """The pricing after the change."""
        training = pricing.training.model_copy(update=dict(self.training))
        runtime = self.runtime or pricing.runtime
        if "adapters" in self.training:
            runtime = as_without_adapters(runtime, pricing.training.adapters)
        modules = self.modules or pricing.selective_modules
        cluster = self.cluster or pricing.cluster
        return replace(pricing, training=training, runtime=runtime, cluster=cluster, selective_modules=modules)


def varied(candidate: Candidate, variation: Variation) -> Candidate | None:
    """The candidate after a change; None where the trainer's rules refuse it."""
    changed, split = variation.of(candidate.pricing), candidate.split
    shape, model = replace(candidate.shape, **variation.shape), changed.model
    if variation.mode == "full":
        split = replace(split, base="none").recomputing(model)
    elif variation.mode is not None:
        split = replace(split, base=variation.mode, recomputed=split.recomputed if variation.modules else ())
    if not all(rule.holds(model, changed.training, shape) for rule in rules_for(changed.runtime)):
        return None
    try:
        table = changed.table(shape, split.priced_modes)
    except SpecError:
        return None
    other = replace(candidate, pricing=changed, table=table, split=split)
    return None if any(broken_recipe_rules(setting_of(other))) else other


def as_without_adapters(runtime: RuntimeSpec, adapters: AdapterSpec | None) -> RuntimeSpec:
    """The runtime as its recipe has it before adapters change its bytes, so that other adapters, or none, may do so."""
    shipped = own_runtime(runtime)
    own = switched(shipped, read_recipe(runtime, switches_of(runtime))) if switches_of(runtime) else shipped
    changed = own.for_adapters(adapters)
    names = [name for name, value in changed if value != getattr(own, name) and value == getattr(runtime, name)]
    return runtime.model_copy(update={name: getattr(own, name) for name in names})


def other_assumptions(pricing: Pricing, beside_switches: bool = False) -> Iterator[Variation]:
    """All assumptions of this job, each changed by itself for the worse (or for the better where it is the worst).

    A switch that is off and could be on is none of them: it is chosen, or stated. With `beside_switches`, one that is
    on is none of them either: the recipe says what it is worth.
    """
    training, cluster = pricing.training, pricing.cluster
    moe = pricing.model.moe is not None
    yield from _overlaps(pricing, beside_switches)
    slower = training.straggler_fraction + STRAGGLER
    if cluster.num_gpus > 1:  # one GPU waits for no other
        says, words = f"the slowest rank computes {slower:.0%} slower", ("--straggler-fraction", f"{slower:g}")
        yield Variation(says, words, {"straggler_fraction": slower}, name="straggler")
    if moe:
        fuller = training.moe_imbalance + IMBALANCE
        says = f"the fullest expert rank gets {fuller:g} times the mean tokens"
        yield Variation(says, ("--moe-imbalance", f"{fuller:g}"), {"moe_imbalance": fuller}, name="moe_imbalance")
    if len(cluster.tiers) > 1 and cluster.num_gpus > (cluster.tiers[0].num_gpus or 0):
        rate = max(cluster.tiers[1].gb_per_s * NETWORK, LEAST_RATE)
        if cluster.network_tiers:
            rates = [{"gb_per_s": max(tier.gb_per_s * NETWORK, LEAST_RATE)} for tier in cluster.network_tiers]
            slower_tiers = tuple(t.model_copy(update=r) for t, r in zip(cluster.network_tiers, rates, strict=True))
            slow, words = cluster.changed(network_tiers=slower_tiers), ("--tier", tiers_text(slower_tiers))
        else:
            slow, words = cluster.changed(network_gb_per_s=rate), ("--assume", f"network_gb_per_s={rate:g}")
        says = f"the network between nodes has {rate:g} GB/s a GPU, not {cluster.tiers[1].gb_per_s:g}"
        yield Variation(says, words, cluster=slow, name="network")


def _overlaps(pricing: Pricing, beside_switches: bool) -> Iterator[Variation]:
    """Assumptions about what hides behind compute."""
    runtime, has = pricing.runtime, switches_of(pricing.runtime)
    moe = pricing.model.moe is not None
    by_switch = {field for name in has for field in SWITCHES[name].touched} if beside_switches else set[str]()
    for name, fields, says in (
        ("data_parallel_overlap", ("gradient_overlap_fraction", "parameter_overlap_fraction"), "data-parallel"),
        ("sharding_overlap", ("fsdp_overlap_fraction",) if 3 in runtime.zero_stages else (), "sharding"),
        (
            "tensor_parallel_overlap",
            ("tp_overlap_fraction", "mla_tp_overlap_fraction", "tp_async_overlap_fraction"),
            "tensor-parallel",
        ),
        ("context_parallel_overlap", ("cp_overlap_fraction",), "context-parallel"),
        (
            "expert_parallel_overlap",
            ("ep_overlap_fraction", "ep_overlap_network_fraction") if moe else (),
            "expert-parallel",
        ),
    ):
        left = [field for field in fields if field not in by_switch and getattr(runtime, field)]
        if left:
            changed = runtime.model_copy(update=dict.fromkeys(left, 0.0))
            words = ("--assume", ",".join(f"{field}=0" for field in left))
            no = "no" if by_switch.isdisjoint(fields) else "no other"
            yield Variation(f"{no} {says} exchange hides behind compute", words, runtime=changed, name=name)
    if moe and not runtime.ep_overlap_fraction and "ep_overlap" not in has:
        fields = ("ep_overlap_fraction", "ep_overlap_network_fraction")
        hidden = runtime.model_copy(update=dict.fromkeys(fields, EP_OVERLAP))
        words = ("--assume", ",".join(f"{field}={EP_OVERLAP:g}" for field in fields))
        says = f"{EP_OVERLAP:.0%} of expert exchange hides"
        yield Variation(says, words, runtime=hidden, name="expert_parallel_overlap")
    if runtime.interleaved_p2p_overlap and "interleaved_p2p_overlap" not in by_switch:
        waits = runtime.model_copy(update={"interleaved_p2p_overlap": False, "p2p_overlap": False})
        says, words = "pipeline sends do not overlap compute", ("--assume", "interleaved_p2p_overlap=false")
        yield Variation(says, words, runtime=waits, name="pipeline_overlap")
    if not (runtime.cuda_graphs or runtime.graphed_modules or (beside_switches and "cuda_graph" in has)):
        yield _without_host(pricing)


def _without_host(pricing: Pricing) -> Variation:
    """The assumption that CUDA graphs replay what they can: whole iterations, or the layers of a mixture."""
    runtime, has = pricing.runtime, switches_of(pricing.runtime)
    recipe: dict[str, Value] = {"cuda_graph": "full_iteration", "nan_checks": False}
    if pricing.model.moe is not None:
        recipe = {"cuda_graph": "attn+moe_router"}
    if all(value in has.get(name, ()) for name, value in recipe.items()):
        words = ("--switch", ",".join(f"{name}={written(value)}" for name, value in recipe.items()))
        changed = switched(runtime, recipe)
    else:
        words, changed = ("--assume", "cuda_graphs=true"), runtime.model_copy(update={"cuda_graphs": True})
    says = "no kernel waits for the host, as in CUDA graphs"
    if changed.graphed_modules:
        says = "CUDA graphs replay attention and routing"
    return Variation(says, words, runtime=changed, name="host")


def told_assumptions(candidate: Candidate, with_switches: bool = False) -> tuple[str, ...]:
    """Assumptions that change this layout's step by more than 2%, the largest first: effect, change, option.

    With `with_switches`, the switches of a run that someone described are among them, each changed by itself. An order
    that was made to measure is judged as the named schedule that it started from.
    """
    plain, pricing = candidate.named, candidate.pricing
    effects: list[tuple[float, str, str]] = []
    assumptions = [*other_assumptions(pricing, beside_switches=True)]
    has_graphs = "cuda_graph" in switches_of(pricing.runtime) and not pricing.runtime.cuda_graphs
    if with_switches and has_graphs and pricing.model.moe is None:
        assumptions.append(_without_host(pricing))  # the one value that needs another switch's beside it
    for other in assumptions:
        changed = plain.priced_as(other.of(plain.pricing))
        effects.append((changed.step_s / plain.step_s - 1, other.says, " ".join(other.options)))
    if with_switches:
        effects += _switches(plain)
    effects.sort(key=lambda effect: -abs(effect[0]))
    return tuple(
        f"{effect:+.1%} if {says} ({option})" for effect, says, option in effects if abs(effect) > TOLD_FRACTION
    )


def _switches(candidate: Candidate) -> Iterator[tuple[float, str, str]]:
    """The effect of the best other value of each switch that acts on a layout, as far as no consent is needed.

    A switch at its plainest value is left out if that is also its fastest.
    """
    now, others = recipe_of(candidate), defaultdict[str, list[tuple[float, Value]]](list)
    for name, value, other in switch_variants(candidate):
        others[name].append((other.step_s, value))
    for name, legal in others.items():
        step_s, value = min(legal, key=lambda pair: pair[0])
        effect, said = step_s / candidate.step_s - 1, f"{name}={written(value)}"
        if effect < 0 or now[name] != SWITCHES[name].plainest:
            yield effect, f"the recipe has {said}", f"--switch {said}"


def other_values(
    candidate: Candidate, switches: Mapping[str, Sequence[Value]] | None = None
) -> Iterator[tuple[str, Value]]:
    """Each other value of each switch of the trainer, or of some, that acts on a layout."""
    runtime, setting = candidate.pricing.runtime, setting_of(candidate)
    for name, values in (switches_of(runtime) if switches is None else switches).items():
        if has_effect(name, setting):
            yield from ((name, value) for value in values if value != SWITCHES[name].value_of(runtime))


def switch_variants(candidate: Candidate) -> Iterator[tuple[str, Value, Candidate]]:
    """The same layout with each other value of each switch that acts on it, as far as no consent is needed and no rule
    is broken."""
    runtime = candidate.pricing.runtime
    for name, now in recipe_of(candidate).items():
        for value in switches_of(runtime)[name]:
            if value not in (now, *SWITCHES[name].consent):
                other = under(candidate, switched(runtime, {name: value}))
                if takes(setting_of(other)):
                    yield name, value, other


NUM_LAYOUTS = 4
"""The most layouts that are compared, the best among them."""
NO_OVERLAP = "no overlap: no collective hides behind compute"
DEFAULT_SWITCHES = "default switches: the recipe is the trainer's own"
WORDS = {"network": "half the network", "straggler": "slow rank", "moe_imbalance": "uneven experts"}
"""Short names of the assumptions under which layouts are compared; the others are reported of the best alone."""


def assumed_steps(candidates: Sequence[Candidate], trainer: RuntimeSpec) -> dict[str, list[float]]:
    """The step of each candidate as planned and under each assumption that all of them know.

    `trainer` is the runtime with the trainer's own switches. Memory is not looked at: a layout is taken to fit.
    """
    assumed = [dict(_assumptions(candidate, trainer)) for candidate in candidates]
    shared = [name for name in assumed[0] if all(name in others for others in assumed)]
    steps_s = {AS_PLANNED: [candidate.step_s for candidate in candidates]} | {name: list[float]() for name in shared}
    for name in shared:
        price_together(candidates, [others[name] for others in assumed])
    for candidate, others in zip(candidates, assumed, strict=True):  # one after the other: orders are kept for a while
        for name in shared:
            steps_s[name].append(candidate.priced_as(others[name]).step_s)
    return steps_s


def robust_steps(layouts: Sequence[PricedLayout], assumed_s: Mapping[str, Sequence[float]]) -> tuple[RobustStep, ...]:
    """The step of each layout as planned and under each assumption that matters, layout by layout, the best first.

    Nothing is returned where no assumption matters (`_matters`).
    """
    planned_s = [layout.step.step_s for layout in layouts]
    told = {n: s for n, s in assumed_s.items() if n != AS_PLANNED and _matters(planned_s, s)}
    steps_s = {AS_PLANNED: planned_s, **told} if told else {}
    return tuple(
        RobustStep(layout=str(layout.parallelism), assumption=name, step_s=seconds[place])
        for place, layout in enumerate(layouts)
        for name, seconds in steps_s.items()
    )


def _matters(planned_s: Sequence[float], changed_s: Sequence[float]) -> bool:
    """True where a step moves by more than `TOLD_FRACTION`, or another layout than the best is the fastest, before or
    after: one that is faster as planned was left for what may change.
    """
    moves = max(abs(after / before - 1) for before, after in zip(planned_s, changed_s, strict=True))
    return moves > TOLD_FRACTION or any(min(steps_s) < steps_s[0] for steps_s in (planned_s, changed_s))


def _assumptions(candidate: Candidate, trainer: RuntimeSpec) -> Iterator[tuple[str, Pricing]]:
    """The pricing of a candidate under each changed assumption that it knows, by the assumption's words."""
    pricing = candidate.pricing
    yield NO_OVERLAP, replace(pricing, runtime=_without_overlap(pricing.runtime))
    for other in other_assumptions(pricing):
        if other.name in WORDS:
            yield f"{WORDS[other.name]}: {other.says}", other.of(pricing)
    # what saves memory is still needed
    saving = {name: SWITCHES[name].value_of(pricing.runtime) for name in switches_of(trainer)}
    saving = {name: value for name, value in saving.items() if SWITCHES[name].only_saves_memory}
    default = switched(trainer, saving).for_schedules(SCHEDULES[candidate.schedule].splits_backward)
    if takes(replace(setting_of(candidate), runtime=default)):
        yield DEFAULT_SWITCHES, replace(pricing, runtime=default)


def _without_overlap(runtime: RuntimeSpec) -> RuntimeSpec:
    """The runtime in which no collective hides behind compute; transfers between stages stay as they are."""
    fractions = [name for name in RuntimeSpec.model_fields if "overlap" in name and name.endswith("_fraction")]
    return runtime.model_copy(update=dict.fromkeys(fractions, 0.0))


def with_unsaid(candidate: Candidate, layout: PricedLayout, says_switches: bool | Collection[str]) -> PricedLayout:
    """The priced layout of a run: its interval covers the likely values of what it does not say, which it names.

    `says_switches` is true for a run that says all but `SELDOM_SAID`, or the names of those that it says.
    """
    unsaid, interval_s = unsaid_switches(candidate, says_switches), layout.step.step_s_interval
    if not unsaid or interval_s is None:
        return layout
    step_s, choices = layout.step.step_s, defaultdict[str, list[Choice]](list)
    terms, *others = (
        width_terms(pricing, layout, pricing.host_fraction(candidate.shape), candidate.hidden_s)
        for pricing in (candidate.pricing, *(pricing for _, pricing in unsaid))
    )
    width = math.hypot(*terms.values())
    for (one, _), other in zip(unsaid, others, strict=True):
        more = max(math.hypot(*other.values()) ** 2 - width**2, 0.0)
        choices[one.switch].append((math.log(one.other_step_s / step_s), one.other_fraction, more))
    low, high = mixture_interval(width, choices)
    widened = (step_s * math.exp(low), step_s * math.exp(high))
    step = layout.step.model_copy(update={"step_s_interval": widened})
    update = {"step": step, "unsaid": tuple(one for one, _ in unsaid), "deciding_fact": deciding_fact(terms, choices)}
    layout = layout.model_copy(update=update)
    for one, pricing in unsaid:
        if one.other_fraction > 0.5 and memory_width(pricing) > memory_width(candidate.pricing):
            totals_bytes = [stage.total_bytes for stage in candidate.priced_as(pricing).memory]
            layout = with_other_memory(layout, totals_bytes, pricing, one.other_fraction)
    return with_sustained(layout, candidate.pricing.training.straggler_fraction)


SELDOM_SAID = ("packed_documents", "natural_routing", "document_lengths")
"""Features that a run which says others may still leave unsaid: what its data does, and no option of its trainer. The
last is no feature but a field of the training."""
SHORT_TEXTS = 0.5
"""Share of runs whose packed texts are short where nobody says their lengths. A guess: priced is one that fills all."""


def unsaid_switches(candidate: Candidate, says_switches: bool | Collection[str]) -> list[tuple[UnsaidSwitch, Pricing]]:
    """The likely values that move this layout's step by over 2%, the one that moves it most first."""
    said = says_switches if not isinstance(says_switches, bool) else SWITCHES.keys() - SELDOM_SAID
    about = SWITCHES.keys() - (said if says_switches else ())
    unsaid = []
    tunes = not says_switches and is_tuning(candidate.pricing.training)
    for switch, value, other, fraction, pricing in (*_likely(candidate, about, tunes), *_shorter_texts(candidate)):
        other_s = candidate.priced_as(pricing).step_s
        if abs(other_s / candidate.step_s - 1) > TOLD_FRACTION:
            one = UnsaidSwitch(switch=switch, value=value, other=other, other_fraction=fraction, other_step_s=other_s)
            unsaid.append((one, pricing))
    return sorted(unsaid, key=lambda found: -abs(math.log(found[0].other_step_s / candidate.step_s)))


Other = tuple[str, Value, Value, float, Pricing]
"""A switch that is not said, its value, another one, the share of runs that have that, and the pricing with it."""


def _shorter_texts(candidate: Candidate) -> Iterator[Other]:
    """The pricing of texts as short as those that are counted, where attention stays within texts of unsaid lengths."""
    pricing = candidate.pricing
    if not (pricing.runtime.packs_documents and pricing.runtime.masks_documents) or pricing.training.document_lengths:
        return
    lengths = (DocumentLength(length=TEXT_TOKENS, share=1),)
    shorter = replace(pricing, training=pricing.training.model_copy(update={"document_lengths": lengths}))
    yield SELDOM_SAID[-1], pricing.training.seq_length, TEXT_TOKENS, SHORT_TEXTS, shorter


def _likely(candidate: Candidate, about: Set[str], tunes: bool) -> Iterator[Other]:
    """The likely values of the trainer `about` some switches that act on a layout and break no rule of recipes."""
    pricing, now = candidate.pricing, setting_of(candidate)
    model, training, broken = pricing.model, pricing.training, list(broken_recipe_rules(now))
    for entry in likely_of(pricing.runtime, pricing.cluster.hardware.architecture):
        if not set(entry.switches) <= about or not has_effect(entry.switch, now):
            continue
        runtime = with_likely(pricing.runtime, model, entry)
        # a dispatcher left unsaid is one that goes with the rest
        free = runtime if "dispatcher" in entry.switches else runtime.model_copy(update={"dispatcher": ""})
        if any(rule not in broken for rule in broken_recipe_rules(replace(now, runtime=free))):
            continue
        tuned = training.adapters is not None or (tunes and "natural_routing" in entry.switches)
        imbalance = imbalance_of(model, entry.switches, pricing.runtime, tuned)
        fuller, ep = replace(pricing, training=training.model_copy(update=imbalance.fields)), candidate.shape.ep
        fuller = fuller if fuller.imbalance(ep) > pricing.imbalance(ep) else pricing
        other = replace(fuller, runtime=runtime.for_schedules(SCHEDULES[candidate.schedule].splits_backward))
        if other != pricing:
            value = SWITCHES[entry.switch].value_of(pricing.runtime)
            yield entry.switch, value, entry.switches[entry.switch], entry.share(tunes), other
