"""Lighter jobs for few GPUs: adapters, fewer bits, shorter sequences, another card; each is named only if it fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from planner.answer.small import MOST_GPUS
from planner.errors import Infeasible, SpecError
from planner.search.case import Case
from planner.search.why.misses import fitting_candidate, least_state_bytes
from planner.search.why.room import most_within
from planner.specs.cluster import ClusterSpec
from planner.specs.hardware import HardwareSpec
from planner.specs.registry import hardware_names, load_hardware
from planner.specs.training import AdapterSpec, Bits
from planner.trainers.load import load_runtime

TUNER = "hf"
"""The trainer of adapters where the job's own is for training all weights on many GPUs."""
LEAST_SEQUENCE, SEQUENCE_STEP = 256, 256
"""Tokens below which no sequence is worth training on, and of which it is a multiple."""

Way = tuple[tuple[str, ...], str, Case]
"""Words of the command line, what they do, and the case with them."""


def lighter(case: Case) -> Iterator[Way]:
    """Lighter jobs that fit: the first of the ways to hold the weights, the longest sequence, the smallest card.

    Where no way to hold the weights is enough by itself, the lightest one goes with the others.
    """
    if case.cluster.num_gpus > MOST_GPUS:
        return
    ways = list(_weights(case))
    held = next((way for way in ways if _fits(way[2])), None)
    if held is not None:
        yield _worded(held)
    yield from map(_worded, _shorter(((), "", case)))
    if held is not None or not ways:
        yield from map(_worded, _other_card(((), "", case)))
        return
    for kind in (_shorter, _more_gpus, _other_card):
        yield from map(_worded, kind(ways[-1]))


def _worded(way: Way) -> Way:
    """A way whose words end in what is typed."""
    options, says, case = way
    return options, f"{says.removeprefix(', ')}: {' '.join(options)}", case


def _fits(case: Case) -> bool:
    """True if some layout of the most promising shapes fits, by its exact memory."""
    try:
        return fitting_candidate(case) is not None
    except (Infeasible, SpecError):
        return False


def _weights(case: Case) -> Iterator[Way]:
    """Adapters beside frozen weights, in the end of 4 bits."""
    adapters = case.training.adapters
    if adapters is None:
        runtime = case.runtime if not case.runtime.has_model_parallel else load_runtime(TUNER)
        named = () if runtime is case.runtime else ("--runtime", runtime.name)
        free = replace(case, runtime=runtime).free()
        kinds: tuple[tuple[str, Bits, str], ...] = (("--lora", 16, "frozen weights"), ("--qlora", 4, "4-bit weights"))
        for option, bits, beside in kinds:
            yield (option, *named), f"train adapters beside {beside}", _with(free, AdapterSpec(base_bits=bits))
        return
    if adapters.base_bits > 4:
        options = ("--qlora",) if adapters.base_bits == 16 else ("--base-bits", "4")
        yield options, "hold the base in 4 bits", _with(case, _in_4_bits(adapters))


def _with(case: Case, adapters: AdapterSpec) -> Case:
    return replace(case, training=case.training.model_copy(update={"adapters": adapters}))


def _in_4_bits(adapters: AdapterSpec) -> AdapterSpec:
    return adapters.model_copy(update={"base_bits": 4})


def _shorter(way: Way) -> Iterator[Way]:
    """The longest sequence that fits, in steps of 256 tokens."""
    beside, says, case = way
    if case.training.document_lengths is not None or case.training.seq_length <= LEAST_SEQUENCE:
        return
    if least_state_bytes(case) > case.cluster.hardware.memory_bytes:
        return

    def of_length(steps: int) -> Case:
        training = case.training.model_copy(update={"seq_length": steps * SEQUENCE_STEP})
        return replace(case, training=training)

    most = (case.training.seq_length - 1) // SEQUENCE_STEP
    steps = most_within(lambda number: -1.0 if _fits(of_length(number)) else 1.0, most)
    if steps:
        options = (*beside, "--seq-length", str(steps * SEQUENCE_STEP))
        yield options, f"{says}, shorten sequences to {steps * SEQUENCE_STEP:,} tokens", of_length(steps)


def _more_gpus(way: Way) -> Iterator[Way]:
    """The fewest GPUs of a small job that are enough."""
    beside, says, case = way
    for num_gpus in range(case.cluster.num_gpus + 1, MOST_GPUS + 1):
        batch = case.training.global_batch_size
        other = case.on_gpus(num_gpus)
        if batch % num_gpus == 0 and _fits(other):
            yield (*beside, "--gpus", str(num_gpus)), f"{says}, take {num_gpus} GPUs", other
            return


def _other_card(way: Way) -> Iterator[Way]:
    """The same number of the GPU with the least memory that is enough."""
    beside, says, case = way
    now, least_bytes = case.cluster.hardware, least_state_bytes(case)
    larger = [card for card in _cards() if card.memory_gib > now.memory_gib and card.is_amd == now.is_amd]
    for card in sorted(larger, key=lambda card: (card.memory_gib, card.name)):
        if card.peak_flops(case.training.dtype) is None or card.memory_bytes < least_bytes:
            continue
        try:
            other = replace(case, cluster=ClusterSpec(hardware=card, num_gpus=case.cluster.num_gpus))
        except (SpecError, ValueError):
            continue
        if _fits(other):
            yield (*beside, "--hardware", card.name), f"{says}, take another card", other
            return


def _cards() -> Iterator[HardwareSpec]:
    return map(load_hardware, hardware_names())
