"""The recipes of a search: the bundles of switches that it starts from, and the moves of one switch around the winner.

The product of all switches is too large to search, and most of it is illegal. But switches come in bundles: a few named
ones hold what tuned recipes use. The search prices every shape under each bundle and proves its answer among them. Then
one switch at a time is moved around the winner, as long as the step gets shorter. Switches that change numerics take
part only with consent; without it, their worth is offered. The answer has the switches, the worth of each, what rules
refuse, and what consent would buy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from planner.answer import Offer, PricedLayout, RecipeGain, RecipeRefusal
from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.layout.variation import other_values, recipe_of, setting_of, settled, under
from planner.physics.kernels import is_narrow
from planner.physics.stage_memory import fits_host
from planner.record import record
from planner.search.case import Case, Deadline
from planner.trainers.load import has_dtype, switches_of
from planner.trainers.rules.recipe import Setting, broken_recipe_rules, takes
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import (
    NARROW_DTYPES,
    Recipe,
    as_consented,
    check_has,
    check_together,
    consent_of,
    least_gain,
    own_runtime,
    switched,
)
from planner.trainers.switches import SWITCHES, Value, parsed, written

BUNDLES: tuple[Recipe, ...] = (
    {},
    {"cuda_graph": "attn+moe_router"},
    {"ep_overlap": "delayed", "dispatcher": "hybridep"},
    {"ep_overlap": True, "dispatcher": "hybridep", "cuda_graph": "moe_router"},
    {"ep_overlap": True, "dispatcher": "hybridep", "cuda_graph": "attn+moe_router"},
    {"sync_free_moe": 1, "dispatcher": "deepep"},
    {"sync_free_moe": 2, "dispatcher": "deepep", "grouped_gemm": "turbo"},
    {"sync_free_moe": 2, "dispatcher": "deepep", "grouped_gemm": "turbo", "ep_overlap": True},
    {"liger": True},
    {"sharding": "fsdp"},
    {"sharding": "fsdp", "liger": True},
    {"sharding": "deepspeed"},
    {"sharding": "deepspeed", "liger": True},
    {"token_drop": True, "dispatcher": "alltoall"},
    {"memory_policy": "default"},
    {"memory_policy": "sac_and_offload"},
    {"cuda_graph": "full_iteration", "nan_checks": False},
    {"cuda_graph": "full_iteration", "nan_checks": False, "dispatcher": "hybridep", "fused_experts": True},
    {
        "cuda_graph": "full_iteration", "nan_checks": False, "dispatcher": "hybridep", "fused_experts": True,
        "ep_overlap": "delayed",
    },
)  # fmt: skip
"""Switches of each bundle beyond the trainer's own values. Tuned recipes of Megatron-Bridge use them so: layer graphs
on GB200, overlapped exchanges on H100, both for small mixtures, graphs of whole iterations for MXFP8 on Blackwell.
HybridEP takes fewer multiprocessors than DeepEP from the products beside it. Recipes of Primus pair DeepEP with expert
layers without synchronization."""
_WITHOUT_WHICH = {"sync_free_moe", "sharding"}
"""Switches without which the rest of their bundles is none."""
LEAST_GAIN = 5e-4
"""Least share of a step for which a switch leaves the trainer's own value."""
REPLAN_GAIN = 0.02
"""Gain of the moves around the winner, as a share of the step, from which on the layouts are searched again."""


@record(slots=False)
class Recipes:
    """The recipes that a search may choose from."""

    case: Case
    base: RuntimeSpec
    """The trainer with its own switches, and those that the user pinned."""
    free: dict[str, tuple[Value, ...]]
    """The values that each switch may take that is neither pinned nor needs a consent that was not given."""

    @classmethod
    def of(cls, case: Case) -> Recipes:
        """The recipes of a case: all switches are free but those that are pinned, or set in the runtime by hand."""
        base = settled(case.runtime, case.cluster, case.model)
        if case.limits.switches == "default":
            return cls(case, base, {})
        pinned = pinned_by(case)
        has = {name: values for name, values in switches_of(case.runtime).items() if name not in pinned}
        allowed = {name: tuple(v for v in values if _is_allowed(name, v, case)) for name, values in has.items()}
        return cls(case, base, {name: values for name, values in allowed.items() if len(values) > 1})

    @property
    def has_switches(self) -> bool:
        """True if the trainer has any switches."""
        return bool(switches_of(self.case.runtime))

    def starts(self) -> list[RuntimeSpec]:
        """The runtime of each bundle that is legal for the job; the trainer's own comes first."""
        consented = {name: next(iter(SWITCHES[name].consent)) for name in self.free if name in _ONLY_FASTER}
        pinned, has = pinned_by(self.case), switches_of(self.case.runtime)
        # what a version of the trainer lacks is left out of a bundle, what lacks consent is no bundle
        known = [bundle for bundle in BUNDLES if all(name in has for name in _WITHOUT_WHICH & bundle.keys())]
        # nor is a dispatcher that the GPUs do not run, or that nobody is known to gain from on the network
        dispatchers = self.free.get("dispatcher", ())
        tried = {**has, "dispatcher": [v for v in dispatchers if self._legal([switched(self.base, {"dispatcher": v})])]}
        own = [{n: v for n, v in bundle.items() if n not in pinned and v in tried.get(n, ())} for bundle in known]
        bundles = [bundle for bundle in own if all(v in self.free.get(name, ()) for name, v in bundle.items())]
        runtimes = [switched(self.base, consented | dict(bundle)) for bundle in bundles]
        one_changed = (switched(self.base, {name: value}) for name, values in self.free.items() for value in values)
        # where values set by hand exclude the trainer's own, one of these gives way
        return list(dict.fromkeys(self._legal(runtimes))) or self._legal([*one_changed])[:1] or [self.base]

    def dividing(self) -> list[RuntimeSpec]:
        """Those of the starts that divide the states in another way than the trainer's own, or hold less of them."""
        saving = [n for n in self.free if SWITCHES[n].divides_layouts or SWITCHES[n].only_saves_memory]
        own = [SWITCHES[name].value_of(self.base) for name in saving]
        starts = self.starts() if saving else []
        return [runtime for runtime in starts if [SWITCHES[name].value_of(runtime) for name in saving] != own]

    def offloading(self, runtimes: Sequence[RuntimeSpec]) -> list[RuntimeSpec]:
        """The runtimes with activations on the host, where that is free to choose."""
        values = self.free.get("activation_offload", ())[1:]
        others = [switched(runtime, {"activation_offload": value}) for runtime in runtimes for value in values]
        return self._legal(others)

    @property
    def offers_offloading(self) -> bool:
        """True if activations could wait on a host whose link is so slow that this needs a consent, not given."""
        name, hardware, limits = "activation_offload", self.case.cluster.hardware, self.case.limits
        held = limits.switches == "default" or name in (*pinned_by(self.case), *limits.allow)
        return not held and any(consent_of(name, v, hardware) for v in switches_of(self.case.runtime).get(name, ()))

    def moves(self, candidate: Candidate) -> Iterator[Candidate]:
        """Every legal change of one switch of a candidate that has an effect on it, priced on the same layout."""
        tried = {name: values[1:] if SWITCHES[name].is_free else values for name, values in self.free.items()}
        for name, value in other_values(candidate, tried):
            if not SWITCHES[name].only_saves_memory and (moved := self.moved(candidate, {name: value})) is not None:
                yield moved

    def moved(self, candidate: Candidate, recipe: Recipe) -> Candidate | None:
        """The same layout with some switches at other values; None if a rule refuses them."""
        return self.priced(candidate, switched(candidate.pricing.runtime, recipe))

    def priced(self, candidate: Candidate, runtime: RuntimeSpec) -> Candidate | None:
        """The same layout under another runtime; None if a rule refuses its recipe there."""
        return under(candidate, runtime) if _takes(candidate, runtime) else None

    def module_moves(self, candidate: Candidate, fewer_alone: bool = False) -> Iterator[Candidate]:
        """The same layout with one module more recomputed selectively, or one fewer."""
        pricing = candidate.pricing
        if candidate.split.base != "selective":
            return
        chosen, known = set(pricing.selective_modules), pricing.runtime.recomputable_modules
        for module in (name for name in known if name in chosen or not fewer_alone):
            modules = tuple(name for name in known if (name in chosen) != (name == module))
            moved = candidate.priced_as(pricing.recomputing(modules)) if modules else candidate
            if moved is not candidate and not any(broken_recipe_rules(setting_of(moved))):
                yield moved

    def recomputing_less(self, candidate: Candidate) -> Candidate:
        """The candidate without recomputed modules, one after the other, as long as it fits and its ranks have less to
        do."""

        def busiest_s(each: Candidate) -> float:
            return max(float(cost.total_s) for cost in each.rank_costs)

        while candidate.split.base == "selective":
            plain = replace(candidate, split=replace(candidate.split, base="none"))
            fitting = [each for each in (*self.module_moves(candidate, fewer_alone=True), plain) if each.fits]
            lightest = min(fitting, key=busiest_s, default=candidate)
            if busiest_s(lightest) >= busiest_s(candidate):
                break
            candidate = lightest
        return candidate

    def refined(self, candidate: Candidate, deadline: Deadline) -> Candidate:
        """The candidate after the moves of single switches and modules that make its step shorter, the largest gain
        first.

        At the end, switches that gain nothing here go back to the trainer's own value.
        """
        while not deadline.passed:
            best = candidate
            for other in chain(self.moves(candidate), self.module_moves(candidate)):
                if deadline.left_s <= 0:
                    break
                if other.step_s < best.step_s:
                    # what is faster and does not fit may fit with a module more
                    lighter = [other] if other.fits else [each for each in self.module_moves(other) if each.fits]
                    best = min([best, *lighter], key=lambda each: each.step_s)
            if best.step_s >= candidate.step_s * (1 - LEAST_GAIN):
                break
            candidate = best
        return self.plainest(candidate)

    def plainest(self, candidate: Candidate) -> Candidate:
        """The candidate with each free switch at the trainer's own value that gains nothing, or may cost, at another.

        It may cost where it gains less than `least_gain`.
        """
        for name, values in self.free.items():
            own = SWITCHES[name].value_of(self.base)
            if own in values and own != SWITCHES[name].value_of(candidate.pricing.runtime):
                plain = self.moved(candidate, {name: own})
                least = max(LEAST_GAIN, least_gain(name, self.case.cluster.hardware))
                if plain and plain.fits and plain.step_s <= candidate.step_s * (1 + least):
                    candidate = plain
        return candidate

    def _legal(self, runtimes: Sequence[RuntimeSpec]) -> list[RuntimeSpec]:
        """The runtimes whose recipes no rule refuses for the job."""
        job = self.case.model, self.case.cluster, self.case.training
        return [runtime for runtime in runtimes if not any(broken_recipe_rules(Setting(*job, runtime)))]


def pinned(case: Case) -> Case:
    """The case with the switches that its limits pin set in its runtime, which recomputes layers one by one: screens
    take this for what needs least.

    Raises SpecError for a switch or a value that the trainer does not have, and for switches that exclude each other.
    """
    recipe = case.limits.switches
    held = recipe if isinstance(recipe, dict) else {}
    one_by_one = switched(case.runtime, {"recompute_layers_at_once": 1})
    case = replace(case, runtime=as_consented(one_by_one, (*held, *case.limits.allow)))
    if not isinstance(recipe, dict) or not recipe:
        return case
    for name, value in recipe.items():
        check_has(case.runtime, name, "switch")
        if parsed(name, written(value)) is None:
            raise SpecError(f"switch: {name}: {value!r:.60} is no value of it", f"{name}={written(value)} is unknown")
    changed = replace(case, runtime=switched(case.runtime, recipe))
    check_together(Setting(case.model, case.cluster, case.training, changed.runtime), recipe)
    return changed


def narrower(case: Case) -> Iterator[Case]:
    """The case in each dtype of 8 or 4 bits that the user allows and the GPU has, unless it is in such a dtype."""
    if case.training.dtype in NARROW_DTYPES:
        return
    for dtype in NARROW_DTYPES:
        is_there = case.cluster.hardware.peak_flops(dtype) is not None and has_dtype(case.runtime, dtype)
        if is_there and dtype in case.limits.allow:
            yield case.trained(dtype=dtype)


_ONLY_FASTER = ("bf16_gradients", "bf16_moments")
"""Switches that save bytes and seconds in every layout: once allowed, they are on from the start."""


def _takes(candidate: Candidate, runtime: RuntimeSpec) -> bool:
    """True if no rule refuses the runtime's recipe on the candidate's layout, and the host has memory for its part."""
    fits = fits_host(replace(candidate.pricing, runtime=runtime), candidate.shape)
    return takes(replace(setting_of(candidate), runtime=runtime)) and bool(fits)


def _is_allowed(name: str, value: Value, case: Case) -> bool:
    return name in case.limits.allow or not consent_of(name, value, case.cluster.hardware)


def pinned_by(case: Case) -> set[str]:
    """The switches that the user pinned, or set in the runtime by hand."""
    stated = case.limits.switches
    return {*(stated if isinstance(stated, dict) else ()), *set_by_hand(case.runtime)}


def set_by_hand(runtime: RuntimeSpec) -> Iterator[str]:
    """Switches of which a runtime has other fields than its trainer: they were set on purpose, and stay."""
    shipped = own_runtime(runtime)
    for name in switches_of(runtime):
        if any(getattr(runtime, field) != getattr(shipped, field) for field in SWITCHES[name].touched):
            yield name


LEAST_OFFER = 1e-3
"""Least gain, as a share of the step, that is worth an offer."""


Again = Callable[[Case, RuntimeSpec], Candidate | None]
"""Finds the best layout of a case under a runtime; None where nothing fits, or time is up."""


def with_recipe(layout: PricedLayout, best: Candidate, recipes: Recipes, again: Again) -> PricedLayout:
    """The layout with all that is said of its recipe; prices are of this layout, or of one that is planned `again` for
    a gain without which this one does not fit."""
    plain = best.named
    offers = sorted(_offers(plain, recipes), key=lambda offer: offer.step_s)
    return layout.model_copy(
        update={
            "recipe_gains": tuple(_gains(plain, recipes, again)),
            "offers": tuple(offers),
            "recipe_refused": tuple(_refusals(plain, recipes)),
        }
    )


def _gains(best: Candidate, recipes: Recipes, again: Again) -> Iterator[RecipeGain]:
    """The worth of each switch that is not at its plainest value; none where another switch needs it."""
    for name, value in recipe_of(best).items():
        plainest = SWITCHES[name].plainest
        if value == plainest:
            continue
        without = recipes.moved(best, _with_dependents(best, name, plainest))
        if without is None:
            continue
        other = None if without.fits else again(recipes.case.limited(top=1), without.pricing.runtime)
        without_s, source = (other or without).step_s, SWITCHES[name].source
        yield RecipeGain(switch=name, value=value, without_step_s=without_s, replanned=other is not None, source=source)


def _with_dependents(best: Candidate, name: str, value: Value) -> Recipe:
    """A switch at another value, and those that this value rules out at their plainest."""
    setting = replace(setting_of(best), runtime=switched(best.pricing.runtime, {name: value}))
    others = [rule.switch for rule in broken_recipe_rules(setting) if rule.switch != name]
    return {name: value} | {other: SWITCHES[other].plainest for other in others}


def _offers(best: Candidate, recipes: Recipes) -> Iterator[Offer]:
    """Values that need a consent which was not given and make the step shorter, with the switches that they need."""
    pricing, limits = best.pricing, recipes.case.limits
    if limits.switches == "default":
        return
    held, hardware = set(limits.switches or {}), pricing.cluster.hardware
    for name, values in switches_of(pricing.runtime).items():
        needing = [v for v in values if consent_of(name, v, hardware) and name not in (*limits.allow, *held)]
        found = [offer for value in needing for offer in _offer(best, recipes, name, value, {name: value})]
        # of the modules whose inputs may wait elsewhere those that gain most
        yield from sorted(found, key=lambda offer: offer.step_s)[: 1 if SWITCHES[name].only_saves_memory else None]
    for bundle in BUNDLES:
        needed = [name for name, value in bundle.items() if consent_of(name, value, hardware)]
        if needed and len(bundle) > 1 and not held & set(bundle) and any(name not in limits.allow for name in needed):
            name, value = next(iter(bundle.items()))
            yield from _offer(best, recipes, name, value, bundle)
    for dtype in NARROW_DTYPES:
        narrow = pricing.training.model_copy(update={"dtype": dtype})
        is_wide = pricing.training.dtype in ("bf16", "fp16") and dtype not in limits.allow
        if is_wide and is_narrow(pricing.cluster.hardware, dtype) and has_dtype(pricing.runtime, dtype):
            other = best.priced_as(replace(pricing, training=narrow))
            yield from _offer(other, recipes, "dtype", dtype, {}, best.step_s, (dtype,))


def _offer(
    best: Candidate,
    recipes: Recipes,
    name: str,
    value: Value,
    bundle: Recipe,
    now_s: float | None = None,
    allow: tuple[str, ...] = (),
) -> Iterator[Offer]:
    """The offer of one value with the rest of its bundle, if it is legal and makes the step shorter."""
    has = switches_of(best.pricing.runtime)
    if any(part not in has.get(switch, ()) for switch, part in bundle.items()):
        return
    saves = any(SWITCHES[switch].only_saves_memory for switch in bundle)
    moved = None if saves and best.split.base != "selective" else recipes.moved(best, bundle)
    if moved is None or not moved.fits:
        return
    moved = recipes.recomputing_less(moved) if saves else moved
    now_s = best.step_s if now_s is None else now_s
    if moved.step_s >= now_s * (1 - LEAST_OFFER):
        return
    changed = {switch: consent_of(switch, part, best.pricing.cluster.hardware) for switch, part in bundle.items()}
    consents = {switch: says for switch, says in changed.items() if says}
    yield Offer(
        switch=name,
        value=value,
        step_s=moved.step_s,
        replanned=False,
        changes=" and ".join(dict.fromkeys(consents.values())) or "numerics",
        allow=allow or tuple(consents),
    )


def _refusals(best: Candidate, recipes: Recipes) -> Iterator[RecipeRefusal]:
    """The values that the search may choose and a rule refuses beside the rest of the recipe."""
    for name, value in other_values(best, recipes.free):
        if value == SWITCHES[name].plainest:
            continue
        changed = switched(best.pricing.runtime, {name: value})
        rules = list(broken_recipe_rules(replace(setting_of(best), runtime=changed)))
        for rule in [] if any(rule.is_about_model for rule in rules) else rules[:1]:
            yield RecipeRefusal(switch=name, value=value, rule=str(rule))
