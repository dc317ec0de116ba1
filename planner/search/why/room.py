"""The room of a small job: the largest micro-batch, sequence and model that fit, searched over exact peaks.

Beside it stand changes of the job, one at a time: an adapter's rank, the bits of frozen weights, what is recomputed,
the micro-batch, the sequence, how ZeRO shards, or any value of any switch that the trainer has. Each is a row that says
what becomes of the specs, and one function prices them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from math import floor, inf, isfinite
from types import MappingProxyType
from typing import Any

from planner.answer import Change, LargestModel, LongestSequence, Method, Plan, Room
from planner.answer import is_small as is_small_job
from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.layout.price import reprice
from planner.layout.variation import Variation, other_values, setting_of, varied
from planner.physics.layers import model_totals
from planner.search.case import Case
from planner.search.why.misses import least_lack_bytes
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model, model_names
from planner.specs.training import AdapterSpec, Bits, Recompute
from planner.trainers.spec import PACKED_BYTES, RuntimeSpec
from planner.trainers.stated import switched
from planner.trainers.switches import SWITCHES, written

SEQUENCE_STEP = 128
"""Tokens to a multiple of which the longest sequence is found."""
MOST_STEPS, MOST_SEQUENCES = 2**13, 2**12
"""Steps of a sequence (a million tokens) and sequences of a micro-batch beyond which none is looked for."""
_METHODS: tuple[tuple[Method, int | None], ...] = (("qlora", 4), ("lora", 16), ("full", None))
"""Ways to train, with the bits of frozen weights."""


def is_small(case: Case) -> bool:
    """True for a small job."""
    return is_small_job(case.cluster.num_gpus, case.training, case.runtime)


def with_room(found: Plan, case: Case) -> Plan:
    """A small job's plan with its room, and with its changes ranked; any other, and one among many, as it was."""
    if case.limits.top <= 1 or not is_small(case) or found.parallelism.pp > 1:
        return found
    best = candidate_of(found, case)
    return found.model_copy(update={"room": room_of(best), "changes": changes_of(best)})


def candidate_of(found: Plan, case: Case) -> Candidate:
    """The plan's best layout, which fits only with the risk that the case accepts."""
    return reprice(found, found.best, headroom_bytes=case.headroom_bytes)


def within_risk(candidate: Candidate, case: Case) -> Candidate:
    """The candidate with its seconds, which fits only with the risk that the case accepts."""
    pricing = replace(candidate.pricing, headroom_bytes=case.headroom_bytes, counts_seconds=True)
    return candidate.priced_as(pricing)


def room_of(best: Candidate) -> Room:
    """The largest micro-batch and sequence beside the layout's own switches and sharding."""
    positions = best.pricing.model.max_position_embeddings
    pair = best.pricing.training.objective.row.num_sequences
    most = MOST_STEPS if positions is None else positions // SEQUENCE_STEP

    def batch(mode: Recompute | None) -> int:
        return pair * most_within(lambda number: batch_excess_bytes(best, pair * number, mode), MOST_SEQUENCES // pair)

    def length(mode: Recompute) -> int:
        return SEQUENCE_STEP * most_within(lambda n: sequence_excess_bytes(best, SEQUENCE_STEP * n, mode, pair), most)

    return Room(
        micro_batch_size=batch(None),
        checkpointed_micro_batch_size=batch("full"),
        sequence=LongestSequence(seq_length=length("none"), checkpointed_seq_length=length("full"), most=positions),
    )


def most_within(excess: Callable[[int], float], most: int, known: Mapping[int, float] = MappingProxyType({})) -> int:
    """The largest number up to `most` whose excess is no more than 0; 0 where not even 1 has that.

    The excess grows with the number, and nearly along a line: each try is where the line through both ends of what is
    left crosses zero, and every second one is in the middle, so that a bend costs no more than twice a bisection. That
    of one beyond the most may be `known`, which has to be above 0.
    """
    low, at_low = 1, excess(1)
    if at_low > 0 or most < 1:
        return 0
    high = most + 1
    at_high = known.get(high) or (excess(most) if most > 1 else inf)
    if at_high <= 0:
        return most
    if most > 1 and not known:
        high = most
    number = 0
    while high - low > 1:
        number += 1
        guess = low + (high - low) * -at_low / (at_high - at_low) if isfinite(at_high) and number % 3 else 0.0
        at = min(max(floor(guess), low + 1), high - 1) if guess else (low + high) // 2
        found = excess(at)
        if found <= 0:
            low, at_low = at, found
        else:
            high, at_high = at, found
    return low


def batch_excess_bytes(best: Candidate, size: int, mode: Recompute | None) -> float:
    """Bytes that a micro-batch of `size` sequences needs beyond what may be used; infinite where rules refuse it."""
    shape = {"micro_batch_size": size, "num_microbatches": 1}
    return _excess_bytes(best, mode, shape, {"global_batch_size": size * int(best.shape.dp)})


def sequence_excess_bytes(best: Candidate, seq_length: int, mode: Recompute, number: int = 1) -> float:
    """The same of one sequence at a time, or one pair of answers, of `seq_length` tokens."""
    shape = {"micro_batch_size": number, "num_microbatches": 1, "seq_length": seq_length}
    training = {"seq_length": seq_length, "global_batch_size": number * int(best.shape.dp), "document_lengths": None}
    return _excess_bytes(best, mode, shape, training)


def _excess_bytes(best: Candidate, mode: Recompute | None, shape: dict[str, int], training: dict[str, Any]) -> float:
    other = varied(best, Variation("", (), training, shape, mode=mode))
    return inf if other is None else max(other.excess_bytes)


def largest_models(case: Case) -> tuple[LargestModel, ...]:
    """The largest model of the catalogue that fits the case's GPUs in each way to train it."""
    return tuple(_largest(case, method, bits) for method, bits in _METHODS)


@cache
def catalogue(runtime: RuntimeSpec) -> tuple[tuple[int, ModelSpec], ...]:
    """All models that ship with the planner and their numbers of parameters, the largest first."""
    sizes = [(model_totals(model, runtime, 1).num_parameters, model) for model in map(load_model, model_names())]
    return tuple(sorted(sizes, key=lambda pair: -pair[0]))


def _largest(case: Case, method: Method, bits: int | None) -> LargestModel:
    """The first of all models that fits a sequence, or a pair, at a time on each GPU, with every layer recomputed."""
    gpus, runtime, pair = case.cluster.num_gpus, case.runtime, case.training.objective.row.num_sequences
    given = case.training.adapters or AdapterSpec()
    adapters = None if bits is None else given.model_copy(update={"base_bits": bits})
    of_job = (
        case.free()
        .trained(adapters=adapters, global_batch_size=gpus * pair)
        .limited(recompute=("full",), micro_batch_size=(pair,), tp=(1,), pp=(1,), cp=(1,), ep=(1,), dp=(gpus,))
    )
    states = runtime.weight_bytes + runtime.gradient_bytes + runtime.optimizer_bytes
    least_bytes = states if bits is None else PACKED_BYTES[bits]
    for num_parameters, model in catalogue(runtime):
        if num_parameters * least_bytes < case.cluster.hardware.memory_bytes * gpus:
            with suppress(SpecError):
                if least_lack_bytes(replace(of_job, model=model)) <= 0:
                    return LargestModel(method=method, name=model.name, num_parameters=num_parameters)
    return LargestModel(method=method, name=None)


LEAST_BYTES, LEAST_SHARE = 2**26, 0.005
"""Bytes, and the share of a step, below which a change is not worth a line."""
NEAREST_BITS: tuple[Bits, ...] = (16, 8, 4)
MODES: tuple[Recompute, ...] = ("none", "selective", "full")
_CHECKPOINTING: dict[Recompute, str] = {
    "none": "without checkpointing",
    "selective": "checkpointing of some operators",
    "full": "checkpointing of every layer",
}


def _adapters(candidate: Candidate) -> Iterator[Variation]:
    adapters = candidate.pricing.training.adapters
    if adapters is None:
        return
    for rank in sorted({max(1, adapters.rank // 2), adapters.rank * 4} - {adapters.rank}):
        other = adapters.model_copy(update={"rank": rank})
        yield Variation(f"rank {rank}", ("--lora-rank", str(rank)), {"adapters": other}, changes="numerics")
    if adapters.modules != AdapterSpec(targets=("attention",)).modules:
        other = adapters.model_copy(update={"targets": ("attention",)})
        options = ("--lora-targets", "attention")
        yield Variation("adapters on attention alone", options, {"adapters": other}, changes="numerics")


def _bits(candidate: Candidate) -> Iterator[Variation]:
    adapters = candidate.pricing.training.adapters
    for bits in NEAREST_BITS:
        if adapters is not None and bits != adapters.base_bits:
            other = adapters.model_copy(update={"base_bits": bits})
            says = f"frozen weights in {bits} bits"
            yield Variation(says, ("--base-bits", str(bits)), {"adapters": other}, changes="numerics")


def _what_is_trained(candidate: Candidate) -> Iterator[Variation]:
    if candidate.pricing.training.adapters is not None:
        says = "all weights trained, with checkpointing"
        yield Variation(says, (), {"adapters": None}, mode="full", changes="what is trained")
        return
    ways: tuple[tuple[str, str, Bits], ...] = (("LoRA", "--lora", 16), ("QLoRA", "--qlora", 4))
    for says, option, bits in ways:
        yield Variation(says, (option,), {"adapters": AdapterSpec(base_bits=bits)}, changes="what is trained")


def _checkpointing(candidate: Candidate) -> Iterator[Variation]:
    split = candidate.split
    now: Recompute | None = setting_of(candidate).recompute
    if now == "full" and sum(map(sum, split.recomputed)) < sum(split.counts):
        now = None  # some layers are recomputed, and all or none of them would be a change
    for mode in MODES:
        if mode != now and (mode != "selective" or candidate.pricing.runtime.has_sequence_parallel):
            yield Variation(_CHECKPOINTING[mode], ("--recompute", mode), mode=mode)


def _micro_batches(candidate: Candidate) -> Iterator[Variation]:
    now, number = int(candidate.shape.micro_batch_size), candidate.num_microbatches
    for size in (now // 2, now * 2, now * 4):
        if size and now * number % size == 0 and size != now:
            sizes = {"micro_batch_size": size, "num_microbatches": now * number // size}
            yield Variation(f"micro-batch {size}", ("--micro-batch-size", str(size)), shape=sizes)


def _sequences(candidate: Candidate) -> Iterator[Variation]:
    now, most = candidate.pricing.training.seq_length, candidate.pricing.model.max_position_embeddings or inf
    for length in (now // 2, now * 2):
        if length and length <= most and candidate.pricing.training.document_lengths is None:
            says, options = f"sequences of {length:,}", ("--seq-length", str(length))
            yield Variation(says, options, {"seq_length": length}, {"seq_length": length}, changes="the data")


def _sharding(candidate: Candidate) -> Iterator[Variation]:
    for stage in candidate.pricing.runtime.zero_stages:
        if int(candidate.shape.dp) > 1 and stage != int(candidate.shape.zero_stage):
            yield Variation(f"ZeRO-{stage}", ("--zero-stage", str(stage)), shape={"zero_stage": stage})


def _switches(candidate: Candidate) -> Iterator[Variation]:
    for name, value in other_values(candidate):
        words, changed = f"{name}={written(value)}", switched(candidate.pricing.runtime, {name: value})
        numerics = SWITCHES[name].consent.get(value, "")
        yield Variation(words, ("--switch", words), runtime=changed, changes=numerics)


ROWS: dict[str, Callable[[Candidate], Iterator[Variation]]] = {
    "bits": _bits,
    "checkpointing": _checkpointing,
    "micro-batch": _micro_batches,
    "sequence": _sequences,
    "sharding": _sharding,
    "adapters": _adapters,
    "switch": _switches,
    "trained": _what_is_trained,
}
"""All changes that are tried, by their kind."""


def changes_of(candidate: Candidate) -> tuple[Change, ...]:
    """Every legal change that matters, ranked for the constraint at hand.

    Where the job does not fit, those come first with which it does, the least slow of them ahead, then those that save
    most bytes. Where it fits, those come first that gain seconds, then those that save most bytes for each second.
    """
    found = [
        change
        for kind, row in ROWS.items()
        for variation in row(candidate)
        if (change := _change(candidate, kind, variation)) is not None and _matters(change, candidate.step_s)
    ]
    return tuple(sorted(found, key=_by_seconds if candidate.fits else _by_bytes))


def _change(candidate: Candidate, kind: str, variation: Variation) -> Change | None:
    other = varied(candidate, variation)
    if other is None:
        return None
    tokens = candidate.pricing.training.tokens_per_step / other.pricing.training.tokens_per_step
    total_bytes = peak_bytes(other)
    return Change(
        kind=kind,
        change=variation.says,
        options=variation.options,
        bytes=total_bytes - peak_bytes(candidate),
        seconds=other.step_s * tokens - candidate.step_s,
        step_s=other.step_s,
        total_bytes=total_bytes,
        fits=other.fits,
        changes=variation.changes,
    )


def peak_bytes(candidate: Candidate) -> int:
    """Bytes that the fullest rank needs."""
    return max(stage.total_bytes for stage in candidate.memory)


def _matters(change: Change, step_s: float) -> bool:
    return abs(change.bytes) >= LEAST_BYTES or abs(change.seconds) >= LEAST_SHARE * step_s


def _saved_per_second(change: Change) -> float:
    return -change.bytes / max(change.seconds, 1e-9)


def _by_seconds(change: Change) -> tuple[int, float]:
    """Seconds gained, then bytes saved for each second lost; then what costs both, and last what does not fit."""
    if not change.fits:
        return 3, float(change.total_bytes)
    if change.seconds < 0:
        return 0, change.seconds
    return (1, -_saved_per_second(change)) if change.bytes < 0 else (2, change.seconds)


def _by_bytes(change: Change) -> tuple[int, float]:
    if change.fits:
        return 0, change.seconds
    return (1, float(change.bytes)) if change.bytes < 0 else (2, float(change.bytes))
