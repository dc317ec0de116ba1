"""Switches as someone states them: text read as values, and held against what a trainer has and a job allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal

from planner.errors import SpecError
from planner.specs.base import Texts
from planner.specs.hardware import HardwareSpec
from planner.specs.machines import transport_of
from planner.specs.problems import nearest
from planner.specs.training import Dtype
from planner.trainers.load import RUNTIMES, has_dtype, load_runtime, since_of, switches_of
from planner.trainers.rules.recipe import RecipeRule, Setting, broken_recipe_rules
from planner.trainers.spec import RuntimeSpec
from planner.trainers.switches import SWITCHES, Value, parsed, written

DEFAULT: Final = "default"
"""The word for a trainer's own value of every switch."""
NARROW_DTYPES: tuple[Dtype, ...] = ("fp8", "mxfp8", "nvfp4")
"""Dtypes that change numerics, and that consent allows by name."""
MOST_LOSS = 0.01
"""Share of a step that a chosen switch may cost at the lower end of its gain."""
UNFAMILIAR = 2.0
"""Factor on what a gain may be too large by on a network that the host drives, where few ablations were published."""
FAST_HOST_GB_PER_S = 200.0
"""Least rate of a host's link, in one direction, from which on activations wait on the host without consent: above what
PCIe has, below NVLink-C2C. All recipes of Megatron-Bridge that offload are for GB200 and GB300."""
_MAX_ENTRIES = 1_000
_TRUTH = {"true": True, "false": False}

Recipe = Mapping[str, Value]


def stated_switches(
    text: str, runtime: RuntimeSpec, option: str = "--switch", describes: bool = False
) -> dict[str, Value] | Literal["default"]:
    """The values in `ep_overlap=delayed,cuda_graph=none`, or the word `default` as it stands.

    With `describes`, the text may also name what a run has and a search never chooses, such as flash_attention. Raises
    SpecError naming the switch, or the value, that is unknown or that the trainer does not have.
    """
    if text.strip() == DEFAULT:
        return DEFAULT
    switches: dict[str, Value] = {}
    for part in text.split(",", _MAX_ENTRIES):
        name, is_given, value = part.strip().partition("=")
        name = name.replace("-", "_")
        if name == DEFAULT:
            raise SpecError(f"{option}: default stands beside other switches", f"write {option} default alone")
        check_has(runtime, name, option, describes)
        if not is_given:
            raise SpecError(f"{option}: {name} has no value", _choice(runtime, name))
        if name in switches:
            raise SpecError(f"{option}: {name}: given twice", "keep one of them")
        switches[name] = _value(runtime, name, value, option, describes)
    return switches


def check_has(runtime: RuntimeSpec, name: str, option: str = "--switch", describes: bool = False) -> None:
    """Raise SpecError where a trainer has no switch of that name."""
    has = switches_of(runtime)
    known = [*has, *(row.name for row in SWITCHES.values() if describes and row.is_described)]
    if name in known:
        return
    trainer, shown = _trainer(runtime), name[:60]
    if not known:
        raise SpecError(f"{option}: {shown}: {trainer} has no switches that the planner knows", f"leave {option} out")
    if name in SWITCHES:
        later = since_of(runtime, name, next(iter(SWITCHES[name].values), True)) if runtime.version else ""
        since = f", which came with {later}" if later else ""
        raise SpecError(f"{option}: {trainer} has no switch {shown}{since}", f"it has {', '.join(known)}")
    close = nearest(name, known).removeprefix("; ") or f"one of {', '.join(has)}"
    raise SpecError(f"{option}: unknown switch {shown!r}", close)


def _value(runtime: RuntimeSpec, name: str, text: str, option: str, describes: bool) -> Value:
    """The value that a text means; a run that exists may have one that the search does not choose for its trainer."""
    row, has = SWITCHES[name], switches_of(runtime).get(name, ())
    value = parsed(name, text) if row.values else _literal(text)
    if value is None or row.fields_of(value) is None:
        close = nearest(text, [written(known) for known in has or row.values])
        raise SpecError(f"{option}: {name}: {text[:60]!r} is no value of it", f"{_choice(runtime, name)}{close}")
    later = since_of(runtime, name, value)
    if has and value in row.values and value not in has and (later or not describes):
        since = f", which came with {later}" if later else ""
        raise SpecError(f"{option}: {_trainer(runtime)} has no {name}={text[:60]}{since}", _choice(runtime, name))
    return value


def _choice(runtime: RuntimeSpec, name: str) -> str:
    """Advice to write one of a switch's values, as they are typed."""
    values = switches_of(runtime).get(name, ()) or tuple(SWITCHES[name].values) or (True, False)
    return f"write {', '.join(f'{name}={written(value)}' for value in values)}"


def _literal(text: str) -> Value:
    """The value of a feature that has no list of values: a truth, a number, or text."""
    if text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _trainer(runtime: RuntimeSpec) -> str:
    return f"{runtime.name} {runtime.version}".strip()


def as_consented(runtime: RuntimeSpec, said: Iterable[str]) -> RuntimeSpec:
    """A runtime without what its recipes of narrow dtypes have and `said` does not name: gradients in 16 bits.

    A dtype that is asked for is no consent to them.
    """
    if runtime.narrow_gradient_bytes is None or "bf16_gradients" in said:
        return runtime
    return runtime.model_copy(update={"narrow_gradient_bytes": None})


def of_today(runtime: RuntimeSpec) -> RuntimeSpec:
    """A runtime as options describe it: nothing narrow without consent, and no loss that only older runs have."""
    return as_consented(runtime, ()).model_copy(update={"runs_fuse_loss": False, "runs_keep_logits": False})


def switched(runtime: RuntimeSpec, recipe: Recipe) -> RuntimeSpec:
    """A runtime with some switches at other values.

    A value may leave alone a field that another value of its switch sets; that field is the trainer's own again.
    """
    own, has = own_runtime(runtime), switches_of(runtime)
    changed: dict[str, object] = {}
    for name, value in recipe.items():
        others = {field for other in has if other != name for field in SWITCHES[other].touched}
        changed |= {field: getattr(own, field) for field in SWITCHES[name].touched - others}
        changed |= SWITCHES[name].fields_of(value) or {}
    return runtime.model_copy(update=changed)


def own_runtime(runtime: RuntimeSpec) -> RuntimeSpec:
    """The shipped trainer that a runtime is, or is a kind of; the runtime itself where none is."""
    name = runtime.name if runtime.name in RUNTIMES else runtime.family
    return load_runtime(name) if name in RUNTIMES else runtime


def on_trainer(runtime: RuntimeSpec, name: str) -> RuntimeSpec:
    """The runtime as the shipped trainer `name` runs it: with the values of switches that it has, else with its own.

    A runtime of the same family also keeps what no switch chooses, such as fused kernels; another trainer has its own.
    """
    own = load_runtime(name)
    has, had = switches_of(own), switches_of(runtime.model_copy(update={"version": ""}))
    lost = {switch for switch in had if SWITCHES[switch].value_of(runtime) not in has.get(switch, ())}
    if own.family == runtime.family:
        kept = runtime.model_copy(update={"name": own.name, "trainer": own.trainer})
        return switched(kept, {switch: SWITCHES[switch].value_of(own) for switch in lost})
    fields = {field for switch in had if switch not in lost for field in SWITCHES[switch].touched}
    return as_consented(own, ()).model_copy(update={field: getattr(runtime, field) for field in fields})


CARRIERS: Final = {"deepep": "ibgda", "hybridep": "hybridep"}
"""The transport that each dispatcher which sends rows has on its own."""


def consent_of(name: str, value: Value, hardware: HardwareSpec) -> str:
    """The thing that a value changes and that is not done without consent; empty where it needs none.

    So does what nobody is known to gain from: a dispatcher's transport on another network than its own, and activations
    that wait on a host behind PCIe.
    """
    if name == "activation_offload" and value != "none" and hardware.host.link_gb_per_s < FAST_HOST_GB_PER_S:
        return "where activations wait: behind PCIe, where no gain was measured"
    carrier = CARRIERS.get(str(value), "nccl") if name == "dispatcher" and hardware.network else "nccl"
    if carrier != "nccl" and hardware.network not in transport_of(carrier).networks:
        return f"to a transport that is unproven on {hardware.network}"
    return SWITCHES[name].consent.get(value, "")


def least_gain(name: str, hardware: HardwareSpec) -> float:
    """Share of the step that a switch must be predicted to save before it is chosen: at the lower end of that gain, by
    what predictions of it were too large, no more than `MOST_LOSS` is lost."""
    times = UNFAMILIAR if hardware.tiers[-1].is_host_driven else 1.0
    return max(times * SWITCHES[name].doubt_fraction - MOST_LOSS, 0.0)


def consents(runtime: RuntimeSpec, hardware: HardwareSpec) -> list[str]:
    """The names that --allow takes: switches with values that need consent, and the narrow dtypes of the GPU."""
    switches = [
        name for name, values in switches_of(runtime).items() if any(consent_of(name, v, hardware) for v in values)
    ]
    return [*switches, *(dtype for dtype in NARROW_DTYPES if hardware.peak_flops(dtype) and has_dtype(runtime, dtype))]


def consented(runtime: RuntimeSpec) -> Texts:
    """Switches whose present value needs consent, which the owner of a running job has given."""
    return tuple(name for name in switches_of(runtime) if SWITCHES[name].value_of(runtime) in SWITCHES[name].consent)


def freed(runtime: RuntimeSpec) -> RuntimeSpec:
    """A runtime with every switch that a search chooses at the trainer's own value again."""
    own = own_runtime(runtime)
    touched = {field for name in switches_of(runtime) for field in SWITCHES[name].touched}
    return runtime.model_copy(update={field: getattr(own, field) for field in touched})


def stated_consents(text: str, runtime: RuntimeSpec, hardware: HardwareSpec) -> Texts:
    """The names in `bf16_gradients,fp8`; a hyphen counts as an underscore. SpecError for one that allows nothing."""
    known = consents(runtime, hardware)
    names = tuple(part.strip().replace("-", "_") for part in text.split(",", _MAX_ENTRIES))
    for name in names:
        if name in known:
            continue
        listed = f"one of {', '.join(known)}" if known else "leave --allow out"
        if name in NARROW_DTYPES:
            raise SpecError(f"--allow: {name}: {hardware.name} has no such peak", listed)
        if name in SWITCHES and name in switches_of(runtime):
            raise SpecError(f"--allow: {name} needs no consent: it changes no numerics", f"leave it out; {listed}")
        close = nearest(name, known).removeprefix("; ") or listed
        raise SpecError(f"--allow: unknown {name[:60]!r}", close)
    return tuple(dict.fromkeys(names))


def check_together(setting: Setting, stated: Recipe) -> None:
    """Raise SpecError where stated switches break a rule of the job: with each other, or with what is left unsaid."""
    for rule in broken_recipe_rules(setting):
        if rule.is_about_layout:
            continue
        found = list(partners(setting, rule, stated))
        involved = [name for name in (rule.switch, *(partner for partner, _ in found)) if name in stated]
        if not involved:
            continue
        both = " and ".join(f"{name}={written(stated[name])}" for name in dict.fromkeys(involved))
        raise SpecError(f"--switch: {both}: {rule}", _mended(rule, found, stated) or f"leave {both} out")


def partners(setting: Setting, rule: RecipeRule, stated: Recipe) -> Iterator[tuple[str, Value]]:
    """Switches another value of which would mend a broken rule; first the one that gives way, unless it is stated."""
    has = switches_of(setting.runtime)
    for name, values in sorted(has.items(), key=lambda item: item[0] != rule.switch):
        if name == rule.switch and name in stated:
            continue
        for value in values:
            if value != setting.value(name) and rule.holds(_with(setting, name, value)):
                yield name, value
                break


def _with(setting: Setting, name: str, value: Value) -> Setting:
    return Setting(setting.model, setting.cluster, setting.training, switched(setting.runtime, {name: value}))


def _mended(rule: RecipeRule, partners: list[tuple[str, Value]], stated: Recipe) -> str:
    """Words for the change of one switch that mends a rule; empty where none does."""
    if not partners:
        return f"leave {rule.switch} out"
    name, value = next(((n, v) for n, v in partners if n not in stated), partners[0])
    return f"{'write' if name in stated else 'add'} {name}={written(value)}"
