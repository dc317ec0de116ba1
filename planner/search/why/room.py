"""The room of a small job: the largest micro-batch, sequence and model that fit, searched over exact peaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import floor, inf, isfinite
from typing import Any

from planner.answer import Plan, small
from planner.answer.small import Change, LargestModel, LongestSequence, Method, Room
from planner.errors import SpecError
from planner.layout.candidate import Candidate
from planner.layout.evaluate import pricing_of
from planner.layout.given import given_layout
from planner.layout.replan import reprice
from planner.physics.layers import model_totals
from planner.search.case import Case
from planner.search.why.changes import Varied, changes_of, priced
from planner.shape import Shape
from planner.specs.model import ModelSpec
from planner.specs.registry import load_model, model_names
from planner.specs.training import AdapterSpec, Parallelism, Recompute
from planner.trainers.rules.of_trainer import rules_for
from planner.trainers.spec import PACKED_BYTES, RuntimeSpec

SEQUENCE_STEP = 128
"""Tokens to a multiple of which the longest sequence is found."""
MOST_STEPS, MOST_SEQUENCES = 2**13, 2**12
"""Steps of a sequence (a million tokens) and sequences of a micro-batch beyond which none is looked for."""
_METHODS: tuple[tuple[Method, int | None], ...] = (("qlora", 4), ("lora", 16), ("full", None))
"""Ways to train, with the bits of frozen weights."""


def is_small(case: Case) -> bool:
    """True for a small job."""
    return small.is_small(case.cluster.num_gpus, case.training, case.runtime)


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
    """The candidate, which fits only with the risk that the case accepts."""
    return replace(candidate, pricing=replace(candidate.pricing, headroom_bytes=case.headroom_bytes))


def nearest_changes(nearest: Candidate, case: Case) -> tuple[Change, ...]:
    """The changes of a layout that does not fit, with which it would fit at the risk that the case accepts."""
    return changes_of(within_risk(nearest, case))


def room_of(best: Candidate) -> Room:
    """The largest micro-batch and sequence beside the layout's own switches and sharding."""
    positions = best.pricing.model.max_position_embeddings
    most = MOST_STEPS if positions is None else positions // SEQUENCE_STEP

    def batch(mode: Recompute | None) -> int:
        return most_within(lambda size: batch_excess_bytes(best, size, mode), MOST_SEQUENCES)

    def length(mode: Recompute) -> int:
        return SEQUENCE_STEP * most_within(lambda n: sequence_excess_bytes(best, SEQUENCE_STEP * n, mode), most)

    return Room(
        micro_batch_size=batch(None),
        checkpointed_micro_batch_size=batch("full"),
        sequence=LongestSequence(seq_length=length("none"), checkpointed_seq_length=length("full"), most=positions),
    )


def most_within(excess: Callable[[int], float], most: int) -> int:
    """The largest number up to `most` whose excess is no more than 0; 0 where not even 1 has that.

    The excess grows with the number, and nearly along a line: each try is where the line through both ends of what is
    left crosses zero, and every second one is in the middle, so that a bend costs no more than twice a bisection.
    """
    low, at_low = 1, excess(1)
    if at_low > 0 or most < 1:
        return 0
    high = most + 1
    at_high = excess(most) if most > 1 else inf
    if at_high <= 0:
        return most
    if most > 1:
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


def sequence_excess_bytes(best: Candidate, seq_length: int, mode: Recompute) -> float:
    """The same of one sequence at a time, of `seq_length` tokens."""
    shape = {"micro_batch_size": 1, "num_microbatches": 1, "seq_length": seq_length}
    training = {"seq_length": seq_length, "global_batch_size": int(best.shape.dp), "document_lengths": None}
    return _excess_bytes(best, mode, shape, training)


def _excess_bytes(best: Candidate, mode: Recompute | None, shape: dict[str, int], training: dict[str, Any]) -> float:
    other = priced(best, Varied("", (), training, shape, mode=mode))
    return inf if other is None else max(other.excess_bytes)


def largest_models(case: Case) -> tuple[LargestModel, ...]:
    """The largest model of the catalogue that fits the case's GPUs in each way to train it."""
    sizes = catalogue(case.runtime)
    return tuple(_largest(case, method, bits, sizes) for method, bits in _METHODS)


@cache
def catalogue(runtime: RuntimeSpec) -> tuple[tuple[int, ModelSpec], ...]:
    """All models that ship with the planner and their numbers of parameters, the largest first."""
    models = [load_model(name) for name in model_names()]
    sizes = [(model_totals(model, runtime, 1).num_parameters, model) for model in models]
    return tuple(sorted(sizes, key=lambda pair: -pair[0]))


def _largest(case: Case, method: Method, bits: int | None, sizes: tuple[tuple[int, ModelSpec], ...]) -> LargestModel:
    dp, runtime = case.cluster.num_gpus, case.runtime
    given = case.training.adapters or AdapterSpec()
    adapters = None if bits is None else given.model_copy(update={"base_bits": bits})
    training = case.training.model_copy(update={"adapters": adapters, "global_batch_size": dp})
    of_job = replace(case, training=training)
    states = runtime.weight_bytes + runtime.gradient_bytes + runtime.optimizer_bytes
    least_bytes = states if bits is None else PACKED_BYTES[bits]
    for num_parameters, model in sizes:
        stages = _legal_stages(of_job, model)
        is_sharded = dp > 1 and 3 in stages
        room = case.cluster.hardware.memory_bytes * (dp if is_sharded else 1)
        if stages and num_parameters * least_bytes < room and _fits_model(of_job, model, stages):
            return LargestModel(method=method, name=model.name, num_parameters=num_parameters)
    return LargestModel(method=method, name=None)


def _legal_stages(case: Case, model: ModelSpec) -> list[int]:
    """The ways in which ZeRO may shard a model over all GPUs, one sequence at a time; none where that is too long."""
    most, dp = model.max_position_embeddings, case.cluster.num_gpus
    if most is not None and most < case.training.seq_length:
        return []
    rules = rules_for(case.runtime)
    shapes = {
        stage: Shape.of(dp=dp, seq_length=case.training.seq_length, zero_stage=stage)
        for stage in sorted(case.runtime.zero_stages, reverse=True)
    }
    return [stage for stage, shape in shapes.items() if all(rule.holds(model, case.training, shape) for rule in rules)]


def _fits_model(case: Case, model: ModelSpec, stages: list[int]) -> bool:
    """True if one sequence at a time fits on each GPU, with every layer recomputed, sharded in one of these ways."""
    try:
        pricing = pricing_of(model, case.cluster, case.training, case.runtime, case.limits)
        for stage in stages:
            layout = Parallelism(dp=case.cluster.num_gpus, micro_batch_size=1, recompute="full")
            given = given_layout(pricing, layout.model_copy(update={"zero_stage": stage}))
            table = pricing.table(given.shape, given.split.priced_modes)
            if not given.warnings and Candidate(pricing, table, given.split, given.schedule).fits:
                return True
    except SpecError:
        pass
    return False
