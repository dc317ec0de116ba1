"""The recipes of a search: the bundles of switches that it starts from, and the moves of one switch around the winner.

The product of all switches is too large to search, and most of it is illegal. But switches come in bundles: a few named
ones hold what tuned recipes use. The search prices every shape under each bundle and proves its answer among them. Then
one switch at a time is moved around the winner, as long as the step gets shorter. Switches that change numerics take
part only with consent; without it, their worth is offered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.schedule.orders import SCHEDULES
from planner.search.case import Case
from planner.search.deadline import Deadline
from planner.specs.cluster import ClusterSpec
from planner.specs.problems import check_names
from planner.specs.training import Recompute
from planner.trainers.load import RUNTIMES, load_runtime, switches_of
from planner.trainers.rules.recipe import Setting, broken_recipe_rules, has_effect
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES, Value, written

Recipe = Mapping[str, Value]

BUNDLES: tuple[Recipe, ...] = (
    {},
    {"cuda_graph": "attn+moe_router"},
    {"ep_overlap": "delayed"},
    {"ep_overlap": True, "cuda_graph": "moe_router"},
    {"cuda_graph": "full_iteration", "nan_checks": False},
    {"cuda_graph": "full_iteration", "nan_checks": False, "dispatcher": "hybridep", "fused_experts": True},
    {
        "cuda_graph": "full_iteration", "nan_checks": False, "dispatcher": "hybridep", "fused_experts": True,
        "ep_overlap": "delayed",
    },
)  # fmt: skip
"""Switches of each bundle beyond the trainer's own values. Tuned recipes of Megatron-Bridge use them so: layer graphs
on GB200, overlapped exchanges on H100, both for small mixtures, graphs of whole iterations for MXFP8 on Blackwell."""
LEAST_GAIN = 5e-4
"""Least share of a step for which a switch leaves the trainer's own value."""
REPLAN_GAIN = 0.02
"""Gain of the moves around the winner, as a share of the step, from which on the layouts are searched again."""


@dataclass(frozen=True)
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
        base = case.runtime if case.model.moe is None else settled(case.runtime, case.cluster)
        if case.limits.switches == "default":
            return cls(case, base, {})
        pinned = {*(case.limits.switches or {}), *set_by_hand(case.runtime)}
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
        bundles = [bundle for bundle in BUNDLES if all(v in self.free.get(name, ()) for name, v in bundle.items())]
        runtimes = [with_switches(self.base, consented | dict(bundle)) for bundle in bundles]
        legal = [runtime for runtime in runtimes if not any(broken_recipe_rules(self._setting(runtime)))]
        return list(dict.fromkeys(legal)) or [self.base]

    def moves(self, candidate: Candidate) -> Iterator[tuple[str, Value, Candidate]]:
        """Every legal change of one switch of a candidate that has an effect on it, priced on the same layout."""
        for name, values in self.free.items():
            if not has_effect(name, setting_of(candidate)):
                continue
            for value in values:
                if value != SWITCHES[name].value_of(candidate.pricing.runtime):
                    moved = repriced(candidate, with_switches(candidate.pricing.runtime, {name: value}))
                    if not any(broken_recipe_rules(setting_of(moved))):
                        yield name, value, moved

    def refined(self, candidate: Candidate, deadline: Deadline) -> Candidate:
        """The candidate after the moves of single switches that make its step shorter, the largest gain first.

        At the end, switches that gain nothing here go back to the trainer's own value.
        """
        while not deadline.passed:
            moved = [other for _, _, other in self.moves(candidate) if other.fits]
            best = min(moved, key=lambda other: other.step_s, default=candidate)
            if best.step_s >= candidate.step_s * (1 - LEAST_GAIN):
                break
            candidate = best
        return self._plainest(candidate)

    def _plainest(self, candidate: Candidate) -> Candidate:
        """The candidate with each free switch at the trainer's own value that gains nothing at another one."""
        for name, values in self.free.items():
            own = SWITCHES[name].value_of(self.base)
            if own in values and own != SWITCHES[name].value_of(candidate.pricing.runtime):
                plain = repriced(candidate, with_switches(candidate.pricing.runtime, {name: own}))
                is_legal = not any(broken_recipe_rules(setting_of(plain)))
                if is_legal and plain.fits and plain.step_s <= candidate.step_s * (1 + LEAST_GAIN):
                    candidate = plain
        return candidate

    def _setting(self, runtime: RuntimeSpec) -> Setting:
        return Setting(self.case.model, self.case.cluster, self.case.training, runtime)


def pinned(case: Case) -> Case:
    """The case with the switches that its limits pin set in its runtime.

    Raises SpecError for a switch or a value that the trainer does not have, and for switches that exclude each other.
    """
    recipe = case.limits.switches
    if not isinstance(recipe, dict) or not recipe:
        return case
    check_switches(case.runtime, recipe)
    changed = replace(case, runtime=with_switches(case.runtime, recipe))
    setting = Setting(case.model, case.cluster, case.training, changed.runtime)
    for rule in broken_recipe_rules(setting):
        if rule.switch in recipe:
            raise SpecError(
                f"switch: {rule.switch}={written(recipe[rule.switch])}: {rule.says}",
                "leave one of them out of --switch",
            )
    return changed


def check_switches(runtime: RuntimeSpec, recipe: Recipe) -> None:
    """Raise SpecError for a switch, or a value of one, that the trainer does not have."""
    has = switches_of(runtime)
    for name, value in recipe.items():
        check_names("switch", f"--switch {name}", (name,), has, f"{runtime.name} has no such switch")
        if SWITCHES[name].fields_of(value) is None:
            raise SpecError(
                f"switch: {name}: {value!r:.60} is no value of it",
                f"one of {', '.join(f'{name}={written(known)}' for known in has[name])}",
            )


_ONLY_FASTER = ("bf16_gradients", "bf16_moments")
"""Switches that save bytes and seconds in every layout: once allowed, they are on from the start."""


def _is_allowed(name: str, value: Value, case: Case) -> bool:
    return value not in SWITCHES[name].consent or name in case.limits.allow


def settled(runtime: RuntimeSpec, cluster: ClusterSpec) -> RuntimeSpec:
    """The runtime with the name of the dispatcher that its GPUs' links ask for."""
    is_nvidia = cluster.hardware.architecture in ("ampere", "hopper", "blackwell")
    if runtime.dispatcher or not runtime.sends_tokens_once or not is_nvidia:
        return runtime
    is_rack = cluster.nvlink_domain_size > cluster.node_size
    return runtime.model_copy(update={"dispatcher": "hybridep" if is_rack else "deepep"})


def set_by_hand(runtime: RuntimeSpec) -> Iterator[str]:
    """Switches of which a runtime has other fields than its trainer: they were set on purpose, and stay."""
    if runtime.family not in RUNTIMES:
        return
    shipped = load_runtime(runtime.name if runtime.name in RUNTIMES else runtime.family)
    for name in switches_of(runtime):
        if any(getattr(runtime, field) != getattr(shipped, field) for field in SWITCHES[name].touched):
            yield name


def with_switches(runtime: RuntimeSpec, recipe: Recipe) -> RuntimeSpec:
    """The runtime with some switches at other values."""
    fields: dict[str, object] = {}
    for name, value in recipe.items():
        fields |= SWITCHES[name].fields_of(value) or {}
    return runtime.model_copy(update=fields)


def repriced(candidate: Candidate, runtime: RuntimeSpec) -> Candidate:
    """The same layout under another runtime."""
    runtime = runtime.for_schedules(SCHEDULES[candidate.schedule].splits_backward)
    pricing = replace(candidate.pricing, runtime=runtime)
    split = candidate.split
    modes: tuple[Recompute, ...] = ("none", *({split.base} - {"none"}), *(("full",) if split.recomputed else ()))
    return replace(candidate, pricing=pricing, table=pricing.table(candidate.shape, modes))


def setting_of(candidate: Candidate) -> Setting:
    """The things that a recipe's rules look at, of one candidate."""
    pricing, split = candidate.pricing, candidate.split
    recompute: Recompute = "full" if any(map(any, split.recomputed)) else split.base
    modules = pricing.selective_modules if split.base == "selective" else ()
    return Setting(
        pricing.model, pricing.cluster, pricing.training, pricing.runtime, candidate.shape, recompute, modules
    )
