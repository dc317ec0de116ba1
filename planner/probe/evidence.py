"""The evidence in measured seconds: which GPU, kernels and conditions they are of, and how slow each rank was."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import isclose
from statistics import median
from typing import NamedTuple

from planner.answer import Plan, PricedLayout
from planner.errors import SpecError
from planner.probe.plan_slice import sampled_stages
from planner.probe.result import BUSY_FRACTION, Condition, DeviceState, ProbeResult, RankResult
from planner.probe.run import SURE_FRACTION, ProbeRun
from planner.probe.run_price import in_eager_torch
from planner.specs.base import Texts, grouped
from planner.specs.hardware import HardwareSpec
from planner.specs.registry import hardware_names, load_hardware
from planner.specs.units import gib
from planner.trainers.documents import PRICED, kernel_of

SLICE = re.compile(r"MIG \d+g\.\d+gb")
"""The part of a device's name that tells a slice of an NVIDIA GPU."""
VENDORS = {
    "AMD": {"amd", "instinct", "radeon", "gfx90a", "gfx942", "gfx950"},
    "NVIDIA": {"nvidia", "tesla", "quadro", "geforce"},
}
"""Words of a device's name that tell who made it."""


CARDS = {"pcie", "nvl"}
"""Forms of a GPU, with other clocks and links than it has on a board, that names of devices and of profiles tell."""
SERIES = {"rtx", "pro", "dgx"}
"""First words of names of many GPUs, as numbers are: one of them is told by all words of its name."""
_UNTOLD = re.compile(r"\d+gb|nvlink")
"""Words of a profile's name that no device's name has: its memory and its bridges."""


def is_named(hardware: HardwareSpec, device: str) -> bool:
    """True where the device's own name holds the kind of GPU that the profile is named after (h200 in NVIDIA H200).

    A slice of a GPU (MIG) is a card of its own."""
    is_slice = "mig" in _words(device)
    return (not is_slice or "mig" in _words(hardware.name)) and any(
        _names(name, device) for name in (hardware.name, *hardware.aliases)
    )


def named_profiles(device: str) -> list[HardwareSpec]:
    """The shipped profiles that are named after the kind of GPU that a device is."""
    return [hardware for hardware in map(load_hardware, hardware_names()) if is_named(hardware, device)]


def spelled(hardware: HardwareSpec, device: str) -> int:
    """Number of parts of the profile's name that stand in the device's."""
    return sum(part in device.lower() for part in hardware.name.split("-"))


def objection_to_device(device: str, torch_version: str, hardware: HardwareSpec) -> tuple[str, str] | None:
    """The reason why seconds of a GPU say nothing about `hardware`, and a hint; None where they may.

    A profile of the user's own may have any name. Its silicon and its vendor have to be those of the GPU.
    """
    if is_named(hardware, device):
        return None
    if (slice_of := SLICE.search(device)) is not None:
        return (
            f"ran on a slice of a GPU ({slice_of[0]}), which is another card than {hardware.name}",
            "plan profile -o slice.yaml measures the slice: plan with --hardware slice.yaml",
        )
    ours = "AMD" if hardware.is_amd else "NVIDIA"
    theirs = _vendor(device, torch_version)
    known = [load_hardware(name) for name in hardware_names()]
    alike = [one for one in known if one.name.split("-")[0] in _words(device)]
    shipped = named_profiles(device) or alike
    nearest = max(shipped, key=lambda one: spelled(one, device), default=None)
    hint = f"probe on {hardware.name}" + (f", or plan with --hardware {nearest.name}" if nearest else "")
    if theirs is not None and ours != theirs:
        return f"ran on {device}, a GPU of {theirs}; {hardware.name} is {ours}'s", hint
    silicon = sorted({one.architecture for one in shipped})
    if silicon and hardware.architecture.lower() not in silicon:
        return f"ran on {device} ({', '.join(silicon)}); {hardware.name} is {hardware.architecture}", hint
    if shipped and hardware.name in hardware_names():
        return f"ran on {device}, which is another GPU than {hardware.name}", hint
    return None


def _vendor(device: str, torch_version: str) -> str | None:
    if "rocm" in torch_version:
        return "AMD"
    words = _words(device)
    return next((vendor for vendor, known in VENDORS.items() if words & known), None)


def _names(name: str, device: str) -> bool:
    """True if a profile's name is that of a device: h200-sxm-141gb of NVIDIA H200."""
    kind, *rest = name.lower().split("-")
    words = _words(device)
    if kind in SERIES or kind.isdigit():
        return {kind, *(word for word in rest if not _UNTOLD.fullmatch(word))} <= words
    return kind in words and CARDS & words == CARDS & {kind, *rest}


def _words(text: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", text.lower()))


WORDS = {
    "flash": "FlashAttention-2",
    "cudnn": "cuDNN's kernel",
    "efficient": "torch's memory-efficient kernel",
    "math": "matrix products written out",
    "mask": "a kernel that takes a mask",
    "other": "a kernel of this build's own",
    "experts": "one product after another for experts",
}


def seen_kernels(ranks: Sequence[RankResult]) -> Texts:
    return tuple(sorted({kernel for rank in ranks for kernel in rank.attention_kernels}))


def unpriced(ranks: Sequence[RankResult], hardware: HardwareSpec) -> Texts:
    """Kernels that ran and that the profile has no numbers of: of attention, and products of experts one by one."""
    priced = PRICED if hardware.efficiency.cudnn is not None else ("flash",)
    attention = tuple(kernel for kernel in seen_kernels(ranks) if kernel not in priced)
    return (*attention, "experts") if any(rank.experts_one_by_one for rank in ranks) else attention


def kernel_notes(run: ProbeRun, ranks: Sequence[RankResult], hardware: HardwareSpec) -> Texts:
    """Sentences about kernels that ran and that the plan did not expect, or that nothing prices."""
    ran = seen_kernels(ranks)
    unknown = unpriced(ranks, hardware)
    if unknown:
        return (
            f"{in_words(unknown)} ran, of which the profile has no numbers: forward, backward, pipeline and peak are "
            "shown, not judged",
        )
    expected = expected_kernels(run, ranks, hardware)
    if not ran or expected == set(ran):
        return ()
    return (
        f"attention ran in {in_words(ran)} where the plan expected {in_words(sorted(expected))}: it is held against "
        "the price of what ran",
    )


def expected_kernels(run: ProbeRun, ranks: Sequence[RankResult], hardware: HardwareSpec) -> set[str]:
    """The kernels that the layers of these ranks were expected to run; `mask` for any that takes one."""
    chunks = [run.chunk_of(stage) for rank in ranks for stage in run.stages_of(rank.stage)]
    kinds = {kind for chunk in chunks for kind in run.model.layers[chunk.first_layer : chunk.last_layer]}
    return {kernel_of(run.model, kind, hardware, run.cp, run.whole_seq_length) for kind in kinds}


def in_words(kernels: Sequence[str]) -> str:
    names = (kernel.partition(" ") for kernel in kernels)
    return " and ".join(f"{WORDS.get(name, name)} {rest}".strip() for name, _, rest in names)


LOWERED_FRACTION = 0.98
"""Below this share of the usual one, a power limit or a clock is lowered."""
UNEXPLAINED_FRACTION, AT_LIMIT_FRACTION = 0.8, 0.95
"""A clock under load below this share of the highest has a reason; power above this share of its limit is one."""
LOADED_FRACTION = 0.5
"""A GPU that was busy for less was looked at too early, or too late."""
POWER = "software power cap"
"""The reason of every GPU that works hard: its profile is of such clocks."""
FAULTS = {
    "software thermal slowdown": "it was too hot",
    "hardware thermal slowdown": "it was too hot",
    "hardware power brake": "too little power",
}
"""Reasons for low clocks that are faults of the machine or of the moment. NVML gives its general one, hardware
slowdown, whenever clocks change."""
SETTINGS = {"applications clocks setting", "display clock setting", "sync boost"}


UNSEEN = Condition(text="nobody tells of its clocks, power and other processes: no nvidia-smi lists it")


def conditions_of(ranks: Sequence[RankResult]) -> tuple[Condition, ...]:
    """Unusual conditions while these ranks measured; a line names all ranks of which it is true."""
    unseen = [] if any(rank.device_states for rank in ranks) else [UNSEEN]
    known = grouped(
        (condition, rank.rank)
        for rank in ranks
        for condition in dict.fromkeys(
            [
                *(unseen if rank.memory is not None else ()),
                *conditions_of_states(rank.device_states),
                *_of_spreads(rank),
            ]
        )
    )
    return tuple(
        condition.model_copy(update={"text": f"{_named(numbers)}: {condition.text}"})
        for condition, numbers in known.items()
    )


def conditions_of_states(states: Iterable[DeviceState]) -> Iterator[Condition]:
    """Unusual conditions of one GPU; one that several samples show comes several times."""
    for state in states:
        is_busy = state.when == "before" and (state.busy_fraction or 0.0) > BUSY_FRACTION
        held = "" if state.other_bytes is None else f", which held {gib(state.other_bytes):.1f} GiB"
        others = f"{', '.join(state.other_processes)}{held}" if state.other_processes else "a process out of sight"
        if is_busy:
            yield Condition(text=f"the GPU was busy before the run: {others}", is_fault=True)
        elif state.other_processes:
            yield Condition(text=f"the GPU was shared with {others}")
        limit_w = state.power_limit_w
        usual_w = state.default_power_limit_w
        if limit_w is not None and usual_w is not None and limit_w < LOWERED_FRACTION * usual_w:
            yield Condition(text=f"the power limit is {limit_w:.0f} W, {usual_w:.0f} by default")
        if state.when != "before":
            yield from _of_clocks(state)


def _of_clocks(state: DeviceState) -> Iterator[Condition]:
    """Why clocks were low under load, or just after it."""
    faults = [reason for reason in state.throttle_reasons if reason in FAULTS]
    if faults:
        heat = "" if state.temperature_c is None else f" ({state.temperature_c:.0f} °C)"
        text = f"clocks were lowered{heat}: {', '.join(faults)}, because {FAULTS[faults[0]]}"
        yield Condition(text=text, is_fault=True)
    is_loaded = state.when == "within" and (state.busy_fraction is None or state.busy_fraction > LOADED_FRACTION)
    if not is_loaded or state.clock_mhz is None or state.max_clock_mhz is None:
        return
    share = state.clock_mhz / state.max_clock_mhz
    set_by = SETTINGS & set(state.throttle_reasons)
    clocks = f"{state.clock_mhz:.0f} of {state.max_clock_mhz:.0f} MHz under load"
    limit_w = state.power_limit_w
    below_limit = state.power_w is not None and limit_w is not None and state.power_w < AT_LIMIT_FRACTION * limit_w
    if set_by and share < LOWERED_FRACTION:
        yield Condition(text=f"clocks are set lower: {clocks} ({', '.join(sorted(set_by))})")
    elif not faults and POWER not in state.throttle_reasons and below_limit and share < UNEXPLAINED_FRACTION:
        yield Condition(text=f"clocks were low and the driver gives no reason: {clocks}")


def load_in_words(state: DeviceState) -> str:
    """Clock, power, temperature and reasons for low clocks of a GPU under load, as far as its driver says."""

    numbers = (
        (state.clock_mhz, state.max_clock_mhz, "MHz"), (state.power_w, state.power_limit_w, "W"),
        (state.temperature_c, None, "°C"),
    )  # fmt: skip
    said = [
        f"{value:.0f}{'' if most is None else f' of {most:.0f}'} {unit}"
        for value, most, unit in numbers
        if value is not None
    ]
    return ", ".join([*said, *state.throttle_reasons])


def _of_spreads(rank: RankResult) -> Iterator[Condition]:
    """Seconds on a GPU that vary so much that their median is not sure."""
    spreads = [chunk.spread_fraction for chunk in rank.chunks if chunk.spread_fraction is not None]
    if rank.memory is not None and max(spreads, default=0.0) > SURE_FRACTION:
        yield Condition(text=f"the seconds of micro-batches are sure to {max(spreads):.0%} only")


def _named(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    runs_on = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"ranks {numbers[0]} to {numbers[-1]}" if runs_on else f"ranks {', '.join(map(str, numbers))}"


SAME = 1e-6
"""Relative difference below which two predictions are the same."""
_REAL = "run the plan's own stages on the device that it is for: plan probe plan.json --device cuda, or --stage all"


def require_speed(result: ProbeResult, hardware: HardwareSpec, where: str = "the probe") -> None:
    """Raise SpecError if the result says nothing about the speed of `hardware`."""
    for says, hint in _no_speed(result, hardware):
        raise SpecError(f"{where}: {says}", hint)


def _no_speed(result: ProbeResult, hardware: HardwareSpec) -> Iterator[tuple[str, str]]:
    """Reasons why a result says nothing about the speed of `hardware`, each with a hint."""
    for_cpu = hardware.architecture == "cpu"
    if result.out_of_memory is not None or not result.ranks:
        yield "ran out of memory and measured no seconds", "probe a plan that fits"
    if result.run.device == "cpu" and not for_cpu:
        yield f"ran on a CPU, which proves nothing about the speed of {hardware.name}", _REAL
    if result.run.device == "cuda" and for_cpu:
        yield f"ran on {result.device}, the hardware is {hardware.name}, a CPU", "probe --device cpu"
    for device in () if for_cpu else dict.fromkeys([result.device, *(rank.device_name for rank in result.ranks)]):
        if (objection := objection_to_device(device, result.torch_version, hardware)) is not None:
            yield objection
    if result.run.dtype != "bfloat16":
        yield "ran the model in small to prove its order, not its speed", "plan probe --stage all"
    if result.run.fully_sharded and result.mode == "ranks":
        yield "its passes waited for gathered weights (ZeRO-3)", "plan probe --stage all"
    if not any(chunk.forward_s > 0 and chunk.backward_s > 0 for rank in result.ranks for chunk in rank.chunks):
        yield "timed no forward and backward", _REAL
    # numbers that are not finite take a GPU less power, and its clocks stay up: 20% faster on an H100
    for check in (check for check in result.checks if not check.passed):
        says = f"the check {check.name} failed ({check.detail}): its seconds are no evidence"
        yield says, "plan probe again, and look at its checks first"
    for fault in (condition.text for condition in result.conditions if condition.is_fault):
        says = f"{fault}: its seconds are no evidence of the speed of {hardware.name}"
        yield says, "plan probe again, on GPUs that are idle and cool"


class Slowness(NamedTuple):
    """The factor by which a pipeline rank takes longer than the profile says."""

    factor: float
    guessed: str = ""
    """The source of a guess, if the rank's stage did not run."""


def slowness(plan: Plan, result: ProbeResult, where: str = "the probe") -> tuple[Slowness, ...]:
    """The slowness of each pipeline rank, exchanges included.

    The slowest data-parallel rank of a stage counts, because all others wait for it. A stage that did not run takes the
    factor of the nearest stage that ran with the same parts (embedding, head) if all stages ran on one device, else the
    median. Raises SpecError if the probe measured no speed, or another plan.
    """
    layout = in_eager_torch(plan, seen_kernels(result.ranks), alone=result.mode == "stages").best
    require_speed(result, plan.cluster.hardware, where)
    if result.made_to_fit:
        raise SpecError(
            f"{where}: ran other stages than the plan's, to fit into eager torch: {'; '.join(result.made_to_fit)}",
            "plan … --calibration takes what it measured; a plan of --runtime torch-eager is probed as it is",
        )
    if result.inputs_sha256 != plan.inputs_sha256:
        raise SpecError(
            f"{where}: is of a plan with other inputs", "probe this plan: plan probe plan.json -o probe.json"
        )
    _require_same_stages(layout, result, where)
    pp = layout.parallelism.pp
    alone = result.mode == "stages"
    stage_of = list(range(pp)) if alone else sampled_stages(pp, result.run.pp)
    factors = {
        stage_of[stage]: _factor(layout, stage_of[stage], [rank for rank in result.ranks if rank.stage == stage], alone)
        for stage in sorted({rank.stage for rank in result.ranks})
    }
    slowness_of_stage = {stage: Slowness(factor) for stage, factor in factors.items()}
    return tuple(slowness_of_stage.get(stage) or _guess(layout, factors, stage, alone) for stage in range(pp))


def _require_same_stages(layout: PricedLayout, result: ProbeResult, where: str) -> None:
    """Raise SpecError unless the probe's predictions are those of this layout; else it ran other layers."""
    for comparison in result.comparisons:
        if comparison.name == "forward" and comparison.stage is not None:
            own = layout.stages[comparison.stage : comparison.stage + 1]
            planned_s = sum(stage.forward_s + stage.forward_comm_s * (result.mode != "stages") for stage in own)
            if not isclose(comparison.predicted, planned_s, rel_tol=SAME):
                planned = f"{comparison.predicted:.6g} s a forward, here {planned_s:.6g}"
                raise SpecError(
                    f"{where}: stage {comparison.stage} was predicted {planned}",
                    "probe this very plan: plan probe plan.json -o probe.json",
                )


def _factor(layout: PricedLayout, stage: int, ranks: Sequence[RankResult], alone: bool) -> float:
    """Measured over planned seconds of a micro-batch, times the factor that the layout already has for this rank."""
    planned = layout.stages[stage]
    exchanged_s = planned.forward_comm_s + planned.backward_comm_s
    measured_s = max(sum(sum(chunk.passes_s) for chunk in rank.chunks) for rank in ranks)
    layout_factor = layout.rank_factors[stage] if layout.rank_factors else 1.0
    total_s = planned.forward_s + planned.backward_s + exchanged_s
    return layout_factor * (measured_s + (exchanged_s if alone else 0.0)) / total_s


def _guess(layout: PricedLayout, factors: dict[int, float], stage: int, alone: bool) -> Slowness:
    holds = layout.stages[stage].holds
    similar_stages = [other for other in factors if layout.stages[other].holds == holds] if alone else []
    if similar_stages:
        nearest = min(similar_stages, key=lambda other: (abs(other - stage), other))
        return Slowness(factors[nearest], f"like stage {nearest}")
    return Slowness(median(factors.values()), "median" if len(factors) > 1 else f"like stage {min(factors)}")
