"""The smallest change of the request after which some layout fits.

A change is named only if a layout was found with it that fits by its exact memory: bytes alone decide. Pinned axes are
changed first, beginning with those whose change costs least, then the headroom, then the number of GPUs. On few GPUs
lighter jobs are tried too: adapters, fewer bits, shorter sequences, another card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise
from math import inf, log
from typing import Any

from planner.answer import MOST_GPUS
from planner.errors import Infeasible, SpecError
from planner.layout.candidate import Candidate
from planner.layout.price import parallelism_of
from planner.layout.variation import Variation
from planner.schedule.orders import SCHEDULES
from planner.search.case import Case, Deadline
from planner.search.enumerate import DEFAULT_SCHEDULES, enumerate_shapes
from planner.search.recipes import Recipes
from planner.search.safest import saving_memory
from planner.search.why.misses import (
    DOES_NOT_FIT,
    NothingFits,
    NothingLegal,
    fitting_candidate,
    least_lack_bytes,
    least_state_bytes,
    nearest_miss,
)
from planner.search.why.room import is_small, most_within
from planner.specs.cluster import ClusterSpec
from planner.specs.registry import hardware_names, load_hardware
from planner.specs.training import AdapterSpec, Bits
from planner.specs.units import gib
from planner.trainers.load import RUNTIMES, load_runtime

VALUES_TRIED = 6
"""Number of other values that are tried in place of those that an axis is pinned to."""
DOUBLINGS = 10
"""Number of times that the nodes more than there are, a quarter at first, are doubled to find enough of them."""
_UNTRIED, _UNTRIED_PINNED = "add GPUs", "add GPUs, or free a pinned axis"
_NONE = "use GPUs with more memory, a shorter sequence or a smaller model"
_AXES = (
    "recompute", "micro_batch_size", "pp", "tp", "cp", "ep", "etp", "dp", "vpp", "zero_stage", "shard_size", "schedule",
)  # fmt: skip
"""Pins in the order in which they are freed."""
_LIFTED_BY_GPUS = (DOES_NOT_FIT, "more_ranks_than_gpus")


@dataclass(slots=True)
class Trials:
    """Trials of whether any layout of a case fits, as long as there is time."""

    deadline: Deadline
    """The time by which all trials end."""
    cut_short: bool = False
    """True if there was no time for some trial."""

    def fitting(self, case: Case) -> Candidate | None:
        """Some layout of the case that fits; None if none was found."""
        if self.deadline.passed:
            self.cut_short = True
            return None
        for runtime in (case.runtime, *Recipes.of(case).dividing()):
            with suppress(SpecError):
                candidate = fitting_candidate(replace(case, runtime=runtime))
                if candidate is not None:
                    return candidate
        return None


def with_remedy(error: Infeasible, case: Case, deadline: Deadline) -> Infeasible:
    """The search's error with the nearest miss and a remedy, which is looked for until the deadline."""
    trials = Trials(deadline)
    if isinstance(error, NothingLegal):
        remedy = first_remedy(case, error.reason, trials)
        works = "" if remedy is None else f"; {' '.join(remedy.options)} works"
        return Infeasible(error.message, f"{error.hint}{works}", error.rejections, remedy=_data_of(remedy))
    if not isinstance(error, NothingFits):
        return error
    miss, found = nearest_miss(case.filling), _all_of(case, trials)
    untried = _UNTRIED_PINNED if case.pins else _UNTRIED
    hint = untried if trials.cut_short else _NONE
    states_bytes = least_state_bytes(case)
    why = f": weights, gradients and optimizer alone take {gib(states_bytes):,.1f} GiB a GPU at least"
    why = why if states_bytes > case.cluster.hardware.memory_bytes else ""
    why += "" if miss is None else f"{';' if why else ':'} the nearest miss, {miss}"
    return Infeasible(
        f"{error.where}{why}",
        "; or ".join(other.says for other in found) or hint,
        error.rejections,
        nearest=None if miss is None else miss.as_data,
        remedy=_data_of(found[0] if found else None),
    )


def _data_of(remedy: Variation | None) -> dict[str, Any] | None:
    """The options and the sentence as plain data."""
    return None if remedy is None else {"options": list(remedy.options), "says": remedy.says}


def _all_of(case: Case, trials: Trials) -> list[Variation]:
    """The smallest change that helps a job of its size and, where few GPUs and no pins are given, lighter jobs."""
    untried = case.pins or trials.deadline.passed
    ways = [] if untried else [Variation(says, options) for options, says, _ in lighter(case)]
    first = first_remedy(case, DOES_NOT_FIT, trials)
    own = [] if first is None else [first]
    return [*ways, *own] if is_small(case) else [*own, *ways]


def first_remedy(case: Case, reason: str, trials: Trials) -> Variation | None:
    """The smallest change that was found to help against `reason`."""
    more_gpus = _more_gpus(case, trials) if reason in _LIFTED_BY_GPUS else ()
    return next(chain(remedies(case, reason, trials), more_gpus), None)


def remedies(case: Case, reason: str, trials: Trials) -> Iterator[Variation]:
    """Changes that help on the same GPUs: first permissions, then another value of each pin, then no headroom."""
    for permission in _permissions(case, reason):
        if trials.fitting(case.under(permission)):
            yield permission
    for axis in _AXES:
        if axis in case.pins:
            yield from _other_value(case, axis, trials)
    headroom_gib = case.limits.memory_headroom_gib
    if headroom_gib:
        says = f"lower --memory-headroom from {headroom_gib:g} GiB to 0"
        limits = {"memory_headroom_gib": 0.0}
        without = Variation(says, ("--memory-headroom", "0"), limits=limits, replaces=f"{headroom_gib:g}")
        if trials.fitting(case.under(without)):
            yield without


def _permissions(case: Case, reason: str) -> Iterator[Variation]:
    """Changes that lift the rule named `reason`, before anything was tried with them."""
    if reason == "tp_across_domains":
        says = f"let tp leave the {case.cluster.hardware.fabric} domain: add --tp-across-nodes"
        yield Variation(says, ("--tp-across-nodes",), limits={"tp_across_nodes": True})
    if reason == "schedule_not_in_trainer":
        for runtime in map(load_runtime, RUNTIMES):
            if set(case.limits.schedule or ()) <= set(runtime.schedules):
                yield Variation(f"use --runtime {runtime.name}", ("--runtime", runtime.name), runtime=runtime)


def _other_value(case: Case, axis: str, trials: Trials) -> Iterator[Variation]:
    """The change of a pinned axis to the value, nearest to the pinned ones, with which something fits."""
    free = trials.fitting(case.limited(**{axis: None}))
    if free is None:
        return
    values = _values(case, axis)[:VALUES_TRIED]
    chosen = getattr(parallelism_of(free), axis)
    if chosen not in (*values, *case.pins[axis], "none"):
        values.append(chosen)
    option = f"--{axis.replace('_', '-')}"
    for value in values:
        says = f"do not pin {option[2:]}: a layout fits with {option} {value}"
        pinned = ",".join(map(str, case.pins[axis]))
        other = Variation(says, (option, str(value)), limits={axis: (value,)}, replaces=pinned)
        if trials.fitting(case.under(other)):
            yield other
            return


def _values(case: Case, axis: str) -> list[Any]:
    """Other values of a pinned axis, the nearest to the pinned ones first: modes, schedules, sizes of legal shapes."""
    pinned = case.pins[axis]
    others: set[int]
    match axis:
        case "recompute":
            return [mode for mode in ("selective", "full", "none") if mode not in pinned]
        case "schedule":
            known, none = case.runtime.schedules, (*pinned, "none")
            tried = dict.fromkeys((*DEFAULT_SCHEDULES, *known))
            return [name for name in tried if name in known and name in SCHEDULES and name not in none]
        case "vpp":
            others = set(range(1, case.model.num_hidden_layers + 1))
        case _:
            shapes, _ = enumerate_shapes(case.limited(**{axis: None}))
            others = set(getattr(shapes, axis).tolist())
    return sorted(others - set(pinned), key=lambda v: (min(abs(log((v + 1) / (pin + 1))) for pin in pinned), v))


def _more_gpus(case: Case, trials: Trials) -> Iterator[Variation]:
    """The change to the least number of GPUs that is enough, where need be with a switch that saves memory."""

    def fits(num_gpus: int) -> bool:
        larger = case.on_gpus(num_gpus)
        return any(map(trials.fitting, chain([larger], saving_memory(larger))))

    cluster = case.cluster
    states_bytes = min(map(least_state_bytes, (case, *saving_memory(case)))) * cluster.num_gpus
    guess = int(states_bytes / max(cluster.hardware.memory_bytes - case.headroom_bytes, 1.0))
    enough = fewest_gpus(cluster.num_gpus, cluster.node_size, fits, guess)
    if enough is None:
        return
    num_nodes, rest = divmod(enough, cluster.node_size)
    nodes = "" if rest or num_nodes == 1 else f", {num_nodes:,} nodes"
    fewer = "; there was no time to try whether fewer are enough" if trials.cut_short else ""
    says, larger = f"it fits on {enough} GPUs{nodes}{fewer}", case.on_gpus(enough).cluster
    yield Variation(says, ("--gpus", str(enough)), cluster=larger, replaces=str(cluster.num_gpus))


def fewest_gpus(num_gpus: int, node_size: int, enough: Callable[[int], bool], guess: int = 0) -> int | None:
    """The least number of GPUs above `num_gpus` that is enough: any number within one node, beyond it whole nodes.

    If a number is enough, every larger number is taken to be enough, too; none below the `guess` is taken to be. None
    if even nearly 2**(DOUBLINGS - 2) times as many nodes are not enough.
    """
    if num_gpus < node_size and guess < node_size and enough(node_size):
        return least_that(max(num_gpus, guess), node_size, enough)
    enough_nodes = cache(lambda num_nodes: enough(num_nodes * node_size))
    low = max(num_gpus // node_size, num_gpus < node_size, guess // node_size)
    tried = [low + max(low // 4, 1) * (2**doubled - 1) for doubled in range(DOUBLINGS + 1)]
    if not any(map(enough_nodes, (*tried[1:5], tried[-1]))):  # the most, before those between
        return None
    too_few, sufficient = next(pair for pair in pairwise(tried) if enough_nodes(pair[1]))
    return node_size * least_that(too_few, sufficient, enough_nodes)


def least_that(too_few: int, sufficient: int, enough: Callable[[int], bool]) -> int:
    """The least number above `too_few` that is enough, if `sufficient` is enough."""
    while sufficient - too_few > 1:
        middle = (too_few + sufficient) // 2
        too_few, sufficient = (too_few, middle) if enough(middle) else (middle, sufficient)
    return sufficient


TUNER = "hf"
"""The trainer of adapters where the job's own is for training all weights on many GPUs."""
LEAST_SEQUENCE, SEQUENCE_STEP = 256, 256
"""Tokens below which no sequence is worth training on, and of which it is a multiple."""

SURE = 0.9
"""Share of the bytes that a card lacks which another one must have more before it is tried: reserves differ."""

Way = tuple[tuple[str, ...], str, Case]
"""Words of the command line, what they do, and the case with them."""


def lighter(case: Case) -> Iterator[Way]:
    """Lighter jobs that fit: the first of the ways to hold the weights, the longest sequence, the smallest card.

    Where no way to hold the weights is enough by itself, the lightest one goes with the others.
    """
    if case.cluster.num_gpus > MOST_GPUS:
        return
    ways = [(way, _lacks_bytes(way[2])) for way in _weights(case)]
    own: tuple[Way, float] = ((), "", case), _lacks_bytes(case)
    held = next((way for way, lacks_bytes in ways if lacks_bytes <= 0), None)
    if held is not None:
        yield _worded(held)
    yield from map(_worded, _shorter(*own))
    if held is not None or not ways:
        yield from map(_worded, _other_card(*own))
        return
    for kind in (_shorter, _few_more_gpus, _other_card):
        yield from map(_worded, kind(*ways[-1]))


def _worded(way: Way) -> Way:
    """A way whose words end in what is typed."""
    options, says, case = way
    return options, f"{says.removeprefix(', ')}: {' '.join(options)}", case


def _lacks_bytes(case: Case) -> float:
    """Bytes that the lightest of the most promising layouts lacks; none, or fewer, where it fits."""
    with suppress(SpecError):
        return least_lack_bytes(case)
    return inf


def _weights(case: Case) -> Iterator[Way]:
    """Adapters beside frozen weights, in the end of 4 bits."""
    adapters = case.training.adapters
    if adapters is None:
        runtime = case.runtime if not case.runtime.has_model_parallel else load_runtime(TUNER)
        named = () if runtime is case.runtime else ("--runtime", runtime.name)
        free = replace(case, runtime=runtime).free()
        kinds: tuple[tuple[str, Bits, str], ...] = (("--lora", 16, "frozen weights"), ("--qlora", 4, "4-bit weights"))
        for option, bits, beside in kinds:
            yield (
                (option, *named),
                f"train adapters beside {beside}",
                free.trained(adapters=AdapterSpec(base_bits=bits)),
            )
        return
    if adapters.base_bits > 4:
        options = ("--qlora",) if adapters.base_bits == 16 else ("--base-bits", "4")
        yield options, "hold the base in 4 bits", case.trained(adapters=adapters.model_copy(update={"base_bits": 4}))


def _shorter(way: Way, lacks_bytes: float) -> Iterator[Way]:
    """The longest sequence that fits, in steps of 256 tokens."""
    beside, says, case = way
    if case.training.document_lengths is not None or case.training.seq_length <= LEAST_SEQUENCE:
        return
    if least_state_bytes(case) > case.cluster.hardware.memory_bytes:
        return

    def of_length(steps: int) -> Case:
        return case.trained(seq_length=steps * SEQUENCE_STEP)

    most = (case.training.seq_length - 1) // SEQUENCE_STEP
    known = {most + 1: lacks_bytes} if 0 < lacks_bytes < inf else {}
    steps = most_within(lambda number: _lacks_bytes(of_length(number)), most, known)
    if steps:
        options = (*beside, "--seq-length", str(steps * SEQUENCE_STEP))
        yield options, f"{says}, shorten sequences to {steps * SEQUENCE_STEP:,} tokens", of_length(steps)


def _few_more_gpus(way: Way, lacks_bytes: float) -> Iterator[Way]:
    """The fewest GPUs of a small job that are enough."""
    beside, says, case = way
    for num_gpus in range(case.cluster.num_gpus + 1, MOST_GPUS + 1):
        other = case.on_gpus(num_gpus)
        if case.training.global_batch_size % num_gpus == 0 and _lacks_bytes(other) <= 0:
            yield (*beside, "--gpus", str(num_gpus)), f"{says}, take {num_gpus} GPUs", other
            return


def _other_card(way: Way, lacks_bytes: float) -> Iterator[Way]:
    """The same number of the GPU with the least memory that is enough."""
    beside, says, case = way
    now = case.cluster.hardware
    least_bytes = now.memory_bytes + lacks_bytes * SURE if lacks_bytes < inf else least_state_bytes(case)
    larger = [
        card
        for card in map(load_hardware, hardware_names())
        if card.memory_gib > now.memory_gib and card.is_amd == now.is_amd and card.memory_bytes >= least_bytes
    ]
    for card in sorted(larger, key=lambda card: (card.memory_gib, card.name)):
        with suppress(SpecError, ValueError):
            other = replace(case, cluster=ClusterSpec(hardware=card, num_gpus=case.cluster.num_gpus))
            if card.peak_flops(case.training.dtype) is not None and _lacks_bytes(other) <= 0:
                yield (*beside, "--hardware", card.name), f"{says}, take another card", other
                return
