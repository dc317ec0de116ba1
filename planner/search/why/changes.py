"""Changes of a job, one at a time: each is a row that says what becomes of the specs, and one function prices them all.

A row is an adapter's rank, the bits of frozen weights, what is recomputed, the micro-batch, the sequence, how ZeRO
shards, or any value of any switch that the trainer has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

from planner.answer.small import Change
from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.layout.recipe import setting_of
from planner.specs.training import AdapterSpec, Bits, Recompute, TrainingSpec
from planner.trainers.load import switches_of
from planner.trainers.rules.of_trainer import rules_for
from planner.trainers.rules.recipe import broken_recipe_rules, has_effect
from planner.trainers.spec import RuntimeSpec
from planner.trainers.stated import own_runtime, switched
from planner.trainers.switches import SWITCHES, read_recipe, written

LEAST_BYTES, LEAST_SHARE = 2**26, 0.005
"""Bytes, and the share of a step, below which a change is not worth a line."""
NEAREST_BITS: tuple[Bits, ...] = (16, 8, 4)
MODES: tuple[Recompute, ...] = ("none", "selective", "full")
_CHECKPOINTING: dict[Recompute, str] = {
    "none": "without checkpointing",
    "selective": "checkpointing of some operators",
    "full": "checkpointing of every layer",
}


@dataclass(frozen=True, slots=True)
class Varied:
    """One change of a job's specs."""

    says: str
    options: tuple[str, ...]
    training: dict[str, Any] = field(default_factory=dict)
    """Fields of the training with their new values. Likewise below."""
    shape: dict[str, int] = field(default_factory=dict)
    runtime: RuntimeSpec | None = None
    mode: Recompute | None = None
    changes: str = ""


def priced(candidate: Candidate, varied: Varied) -> Candidate | None:
    """The candidate after a change; None where the trainer's rules refuse it."""
    pricing = candidate.pricing
    training = pricing.training.model_copy(update=varied.training)
    runtime = varied.runtime or pricing.runtime
    if "adapters" in varied.training:
        runtime = as_without_adapters(runtime, pricing.training.adapters)
    changed = replace(pricing, training=training, runtime=runtime)
    shape = replace(candidate.shape, **varied.shape)
    split = candidate.split
    if varied.mode is not None:
        whole = tuple(
            tuple(pricing.model.layers[first:last].count(kind) for kind in pricing.model.kinds)
            for first, last in split.chunks
        )
        recomputed = whole if varied.mode == "full" else ()
        split = replace(split, base="none" if varied.mode == "full" else varied.mode, recomputed=recomputed)
    if not all(rule.holds(pricing.model, training, shape) for rule in rules_for(changed.runtime)):
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


def _adapters(candidate: Candidate) -> Iterator[Varied]:
    adapters = candidate.pricing.training.adapters
    if adapters is None:
        return
    for rank in sorted({max(1, adapters.rank // 2), adapters.rank * 4} - {adapters.rank}):
        other = adapters.model_copy(update={"rank": rank})
        yield Varied(f"rank {rank}", ("--lora-rank", str(rank)), {"adapters": other}, changes="numerics")
    if adapters.modules != AdapterSpec(targets=("attention",)).modules:
        other = adapters.model_copy(update={"targets": ("attention",)})
        options = ("--lora-targets", "attention")
        yield Varied("adapters on attention alone", options, {"adapters": other}, changes="numerics")


def _bits(candidate: Candidate) -> Iterator[Varied]:
    adapters = candidate.pricing.training.adapters
    for bits in NEAREST_BITS:
        if adapters is not None and bits != adapters.base_bits:
            other = adapters.model_copy(update={"base_bits": bits})
            says = f"frozen weights in {bits} bits"
            yield Varied(says, ("--base-bits", str(bits)), {"adapters": other}, changes="numerics")


def _what_is_trained(candidate: Candidate) -> Iterator[Varied]:
    if candidate.pricing.training.adapters is not None:
        says = "all weights trained, with checkpointing"
        yield Varied(says, (), {"adapters": None}, mode="full", changes="what is trained")
        return
    ways: tuple[tuple[str, str, Bits], ...] = (("LoRA", "--lora", 16), ("QLoRA", "--qlora", 4))
    for says, option, bits in ways:
        yield Varied(says, (option,), {"adapters": AdapterSpec(base_bits=bits)}, changes="what is trained")


def _checkpointing(candidate: Candidate) -> Iterator[Varied]:
    split = candidate.split
    now: Recompute | None = setting_of(candidate).recompute
    if now == "full" and sum(map(sum, split.recomputed)) < sum(split.counts):
        now = None  # some layers are recomputed, and all or none of them would be a change
    for mode in MODES:
        if mode != now and (mode != "selective" or candidate.pricing.runtime.has_sequence_parallel):
            yield Varied(_CHECKPOINTING[mode], ("--recompute", mode), mode=mode)


def _micro_batches(candidate: Candidate) -> Iterator[Varied]:
    now, number = int(candidate.shape.micro_batch_size), candidate.num_microbatches
    for size in (now // 2, now * 2, now * 4):
        if size and now * number % size == 0 and size != now:
            sizes = {"micro_batch_size": size, "num_microbatches": now * number // size}
            yield Varied(f"micro-batch {size}", ("--micro-batch-size", str(size)), shape=sizes)


def _sequences(candidate: Candidate) -> Iterator[Varied]:
    now, most = candidate.pricing.training.seq_length, candidate.pricing.model.max_position_embeddings or inf
    for length in (now // 2, now * 2):
        if length and length <= most and candidate.pricing.training.document_lengths is None:
            says, options = f"sequences of {length:,}", ("--seq-length", str(length))
            yield Varied(says, options, {"seq_length": length}, {"seq_length": length}, changes="the data")


def _sharding(candidate: Candidate) -> Iterator[Varied]:
    for stage in candidate.pricing.runtime.zero_stages:
        if int(candidate.shape.dp) > 1 and stage != int(candidate.shape.zero_stage):
            yield Varied(f"ZeRO-{stage}", ("--zero-stage", str(stage)), shape={"zero_stage": stage})


def _switches(candidate: Candidate) -> Iterator[Varied]:
    runtime, setting = candidate.pricing.runtime, setting_of(candidate)
    for name, values in switches_of(runtime).items():
        row = SWITCHES[name]
        for value in values:
            if value != row.value_of(runtime) and has_effect(name, setting):
                words = f"{name}={written(value)}"
                options = ("--switch", words)
                yield Varied(
                    words, options, runtime=switched(runtime, {name: value}), changes=row.consent.get(value, "")
                )


ROWS: dict[str, Callable[[Candidate], Iterator[Varied]]] = {
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
        for varied in row(candidate)
        if (change := _change(candidate, kind, varied)) is not None and _matters(change, candidate.step_s)
    ]
    return tuple(sorted(found, key=_by_seconds if candidate.fits else _by_bytes))


def _change(candidate: Candidate, kind: str, varied: Varied) -> Change | None:
    other = priced(candidate, varied)
    if other is None:
        return None
    tokens = _tokens(candidate.pricing.training) / _tokens(other.pricing.training)
    total_bytes = peak_bytes(other)
    return Change(
        kind=kind,
        change=varied.says,
        options=varied.options,
        bytes=total_bytes - peak_bytes(candidate),
        seconds=other.step_s * tokens - candidate.step_s,
        step_s=other.step_s,
        total_bytes=total_bytes,
        fits=other.fits,
        changes=varied.changes,
    )


def _tokens(training: TrainingSpec) -> int:
    return training.seq_length * training.global_batch_size


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
