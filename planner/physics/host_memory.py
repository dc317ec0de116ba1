"""Bytes that a trainer keeps in the host's memory, and the layouts whose host has too few."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from planner.physics.memory import is_decoder_layer, sharded_parameters
from planner.physics.operators import Item, num_parameters
from planner.physics.pricing import Pricing
from planner.shape import Number, Shape, minimum
from planner.specs.units import GIB
from planner.trainers.rules.rule_rows import Rule

HOST_STATE_BYTES = 16
"""Bytes on the host per parameter that it updates: an fp32 weight, its gradient and two moments (DeepSpeed's
documentation of ZeRO-Offload's memory counts as many, deepspeed.readthedocs.io/en/latest/memory.html)."""


def host_bytes(pricing: Pricing, shape: Shape) -> Number:
    """Bytes that a rank keeps in host memory, the mean over all ranks: a node's GPUs share its memory.

    These are the states of parameters that the host updates, and activations that wait there while as many
    micro-batches are in flight as a rank has in the mean.
    """
    runtime, model = pricing.runtime, pricing.model
    if not (runtime.optimizer_offload_fraction or runtime.offload_modules or runtime.offloaded_layers):
        return 0.0
    layers = [(count, pricing.layer(kind, shape)) for kind, count in pricing.kind_counts.items()]
    ends = (pricing.embedding_items(shape), pricing.head_items(shape, model.tie_word_embeddings))
    parts: list[tuple[int, Sequence[Item]]] = [*layers, *((1, items) for items in ends)]
    dense, expert = (
        sum(count * num_parameters(items, expert=routed, trained=True) for count, items in parts) / shape.pp
        for routed in (False, True)
    )
    updated = runtime.optimizer_offload_fraction * sharded_parameters(dense, expert, shape, runtime)
    waiting = sum(count * pricing.offloaded_bytes_of(items) for count, items in layers if is_decoder_layer(items))
    in_flight = minimum((shape.pp + 1) / 2, shape.num_microbatches)
    return HOST_STATE_BYTES * updated + waiting / shape.pp * in_flight


def fits_host(pricing: Pricing, shape: Shape) -> Any:
    """True where the host has memory for all that its GPUs' ranks keep there."""
    return np.asarray(host_bytes(pricing, shape)) <= pricing.cluster.hardware.host.usable_bytes


def host_shortage(pricing: Pricing, shape: Shape) -> str:
    """The sentence that says how many bytes the host lacks, for one shape that does not fit."""
    host = pricing.cluster.hardware.host
    return (
        f"the host's part, {float(host_bytes(pricing, shape)) / GIB:,.0f} GiB a GPU, is more than the "
        f"{host.usable_bytes / GIB:,.0f} GiB that a trainer may fill of {host.memory_gib:g} GiB of host memory a GPU"
    )


def host_rule(pricing: Pricing) -> Rule:
    """The rule that what waits on the host has to fit there."""
    return Rule(
        "host_memory",
        lambda model, training, shape: fits_host(pricing, shape),
        lambda model, training, s: f"{host_shortage(pricing, s)}: tp {s.tp}, pp {s.pp}, dp {s.dp}, ZeRO-{s.zero_stage}",
    )
