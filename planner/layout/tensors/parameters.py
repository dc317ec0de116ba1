"""Weights, gradients and optimizer states of one part of a stage, operator by operator, as ZeRO shards them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from planner.layout.tensors.kept import Held
from planner.physics import memory
from planner.physics.adapters import OF_ADAPTERS
from planner.physics.operators import BF16, FP32, NARROW_BYTES, Item, Operator, operators_of
from planner.physics.optimizers import states_of, tensors_of
from planner.physics.pricing import Pricing
from planner.shape import Shape

STATES = {12: "master, exp_avg, exp_avg_sq", 8: "exp_avg, exp_avg_sq"}
"""Optimizer states in fp32, by their bytes per parameter."""
_WIDTHS = {BF16: "bf16", FP32: "fp32"}


class Parameter(NamedTuple):
    """A weight of an operator, or its bias, as this rank would hold it whole."""

    operator: Operator
    name: str
    dims: tuple[float, ...]

    @property
    def dense(self) -> float:
        """Parameters that are no experts'."""
        return 0.0 if self.operator.expert else prod(self.dims)

    @property
    def expert(self) -> float:
        """Parameters of routed experts."""
        return prod(self.dims) if self.operator.expert else 0.0


def weights(pricing: Pricing, shape: Shape, items: Sequence[Item]) -> Iterator[Held]:
    """The rows that add up to the part's `weights_bytes`."""
    runtime, dtype = pricing.runtime, pricing.training.dtype
    for one in _parameters(items, pricing.model.hidden_size):
        dense, expert = one.dense, one.expert
        wide = 0.0 if one.operator.is_cast else dense + expert
        gathered = float(memory.gathered_weights_bytes(dense + expert, shape, runtime))
        total, plain = (
            float(memory.weights_bytes(dense, expert, shape, runtime, name, wide)) - gathered
            for name in (dtype, "bf16")
        )
        elements = plain / runtime.weight_bytes
        copies = 0 if wide else memory.cast_copies(runtime, dtype)
        cast = copies * elements * NARROW_BYTES.get(dtype, 0.0)
        if cast:
            own = one.dims if elements == prod(one.dims) else (elements,)
            yield Held(f"{one.name} cast", cast, (copies, *own) if copies > 1 else own, dtype)
        if total > cast:
            yield _row(one, "", total - cast, runtime.weight_bytes)
        if gathered:
            yield _row(one, " gathered", gathered, BF16)
        if runtime.copies_weights and not one.operator.name.endswith(OF_ADAPTERS):
            frozen = memory.frozen_bytes(dense, expert, dense if wide else 0.0, shape, runtime)
            yield Held(f"{one.name} of the reference", float(frozen), note="a second copy, frozen")


def gradients(pricing: Pricing, shape: Shape, items: Sequence[Item]) -> Iterator[Held]:
    """The rows that add up to the part's `gradients_bytes`."""
    runtime = pricing.runtime
    for one in _parameters(items, pricing.model.hidden_size):
        total = float(memory.gradients_bytes(one.dense, one.expert, shape, runtime))
        yield _row(one, " gradient", total, runtime.gradient_bytes, "with a 16-bit gradient beside the sum")


def optimizer(pricing: Pricing, shape: Shape, items: Sequence[Item]) -> Iterator[Held]:
    """The rows that add up to the part's `optimizer_bytes`."""
    runtime = pricing.runtime
    states = STATES.get(runtime.optimizer_bytes)
    for one in _parameters(items, pricing.model.hidden_size):
        kept = _states_bytes(pricing, one)
        total = float(memory.optimizer_bytes(one.dense, one.expert, shape, runtime, kept))
        if states is None or runtime.optimizer_offload_fraction or runtime.optimizer != "adamw":
            note = f"{total / prod(one.dims):.3g} bytes on this rank for each parameter"
            yield Held(f"{one.name} optimizer states", total, note=note)
            continue
        dims = (runtime.optimizer_bytes // FP32, total / runtime.optimizer_bytes)
        yield Held(f"{one.name} {states}", total, dims, "fp32")


def _states_bytes(pricing: Pricing, one: Parameter) -> tuple[float, float]:
    """Bytes of the states of an optimizer other than AdamW, for a weight that is no expert's and for one that is."""
    op = one.operator
    if pricing.runtime.optimizer == "adamw":
        return 0.0, 0.0
    tensors = [each for each in tensors_of(op, pricing.model.hidden_size) if float(each.elements) > 0]
    own = tensors[-1] if one.name.endswith(" bias") else tensors[0]
    kept = float(states_of(own, pricing.runtime).resident_bytes)
    return (0.0, kept) if op.expert else (kept, 0.0)


def _parameters(items: Sequence[Item], hidden_size: int) -> Iterator[Parameter]:
    """The weights of all operators, and their biases."""
    for op in operators_of(items):
        number = float(op.parameters)
        dims = tuple(map(float, (op.count, op.n, op.k) if op.expert else (op.n, op.k)))
        if not number:
            continue
        if op.kind == "gemm" and prod(dims) <= number:
            yield Parameter(op, f"{op.name} weight", dims)
            if number > prod(dims):
                yield Parameter(op, f"{op.name} bias", (number - prod(dims),))
            continue
        # tables of rows as wide as the hidden state; norms with a bias are two of them
        is_table = number > hidden_size and number % hidden_size == 0
        yield Parameter(op, f"{op.name} weight", (number / hidden_size, hidden_size) if is_table else (number,))


def _row(one: Parameter, what: str, num_bytes: float, width: int, copies: str = "") -> Held:
    """A row whose shape is the weight's own where the rank has all of it, and flat where it has a shard."""
    elements, dtype, whole = num_bytes / width, _WIDTHS.get(width), prod(one.dims)
    if dtype is None or elements > whole:
        return Held(f"{one.name}{what}", num_bytes, note=f"{num_bytes / whole:.3g} bytes a parameter: {copies}")
    return Held(f"{one.name}{what}", num_bytes, one.dims if elements == whole else (elements,), dtype)


STATICS = {"weights": weights, "gradients": gradients, "optimizer": optimizer}
"""The rows of each item that outlives the step."""
